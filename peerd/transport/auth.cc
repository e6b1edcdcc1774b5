#include "peerd/transport/auth.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <string.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/crypto/secrets.h"

namespace longhaul::peerd {
namespace {

Digest32 Proof(const char* label, const std::string& token, const HelloBytes& hello,
               const Digest32& nonce) {
  std::string text(label);
  text.append(hello.begin(), hello.end());
  text.append(nonce.begin(), nonce.end());
  const std::string code = HmacSha256(token, text);
  Digest32 proof{};
  static_assert(proof.size() == kSha256Bytes);
  memcpy(proof.data(), code.data(), proof.size());
  return proof;
}

Tag16 Begin(const std::string& code) {
  Tag16 tag{};
  std::copy_n(code.begin(), tag.size(), tag.begin());
  return tag;
}

}  // namespace

Tag16 RunTag(const std::string& token, const std::string& run, const Digest32& nonce) {
  std::string text("longhaul run");
  text.append(nonce.begin(), nonce.end());
  text.append(run);
  return Begin(HmacSha256(token, text));
}

Tag16 HostTag() {
  std::string boot;
  struct stat network = {};
  if (!std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot) ||
      stat("/proc/self/ns/net", &network) != 0) {
    return {};
  }
  return Begin(
      HmacSha256("longhaul host", absl::StrCat(boot, " ", network.st_dev, " ", network.st_ino)));
}

Digest32 AnswerProof(const std::string& token, const HelloBytes& hello, const Digest32& nonce) {
  return Proof("longhaul lane answer", token, hello, nonce);
}

Digest32 ConfirmProof(const std::string& token, const HelloBytes& hello, const Digest32& nonce) {
  return Proof("longhaul lane confirm", token, hello, nonce);
}

bool SameProof(const Digest32& a, const Digest32& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Digest32 NonceSource::Next() {
  Digest32 nonce;
  if (!seeded_) {
    LH_CHECK(RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) == 1)
        << "the system has no randomness";
    return nonce;
  }
  for (size_t i = 0; i < nonce.size(); i += 8) {
    const uint64_t word = random_.Next();
    memcpy(nonce.data() + i, &word, 8);
  }
  return nonce;
}

}  // namespace longhaul::peerd
