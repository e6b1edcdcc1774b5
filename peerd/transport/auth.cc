#include "peerd/transport/auth.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <string.h>

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

}  // namespace

Digest32 RunDigest(const std::string& run) {
  Digest32 digest{};
  SHA256(reinterpret_cast<const uint8_t*>(run.data()), run.size(), digest.data());
  return digest;
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
