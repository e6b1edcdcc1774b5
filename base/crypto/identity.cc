#include "base/crypto/identity.h"

#include <openssl/evp.h>
#include <openssl/sha.h>
#include <string.h>

#include "base/check.h"

namespace longhaul {
namespace {

const uint8_t* Bytes(std::string_view text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

using ContextPtr = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

}  // namespace

Identity::Identity(evp_pkey_st* key) : key_(key, &EVP_PKEY_free) {
  LH_CHECK(key != nullptr) << "OpenSSL makes no Ed25519 key";
  public_key_.resize(kPublicKeyBytes);
  size_t bytes = public_key_.size();
  LH_CHECK(EVP_PKEY_get_raw_public_key(key, reinterpret_cast<uint8_t*>(public_key_.data()),
                                       &bytes) == 1 &&
           bytes == kPublicKeyBytes);
}

Identity Identity::New() { return Identity(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519")); }

Identity Identity::ForTest(uint64_t seed) {
  std::array<uint8_t, 32> bytes{};
  memcpy(bytes.data(), &seed, sizeof seed);
  return Identity(
      EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, bytes.data(), bytes.size()));
}

PeerId Identity::peer() const { return PeerIdOf(public_key_); }

std::string Identity::Sign(std::string_view text) const {
  const ContextPtr context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  std::string signature(kSignatureBytes, '\0');
  size_t bytes = signature.size();
  LH_CHECK(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1 &&
           EVP_DigestSign(context.get(), reinterpret_cast<uint8_t*>(signature.data()), &bytes,
                          Bytes(text), text.size()) == 1 &&
           bytes == kSignatureBytes);
  return signature;
}

PeerId PeerIdOf(std::string_view public_key) {
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(Bytes(public_key), public_key.size(), digest.data());
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof value; ++i) value = value << 8 | digest[i];
  value >>= 1;
  return PeerId(value == 0 ? 1 : value);
}

bool IsSignedBy(std::string_view public_key, std::string_view text, std::string_view signature) {
  if (public_key.size() != kPublicKeyBytes || signature.size() != kSignatureBytes) return false;
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, Bytes(public_key), public_key.size()),
      &EVP_PKEY_free);
  if (key == nullptr) return false;
  const ContextPtr context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  return EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         EVP_DigestVerify(context.get(), Bytes(signature), signature.size(), Bytes(text),
                          text.size()) == 1;
}

std::string PossessionText(std::string_view nonce, std::string_view public_key) {
  std::string text("longhaul hello 1");
  text.push_back('\0');
  text.append(nonce).append(public_key);
  return text;
}

}  // namespace longhaul
