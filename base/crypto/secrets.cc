#include "base/crypto/secrets.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "base/check.h"

namespace longhaul {

std::string RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  LH_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(size)) == 1)
      << "OpenSSL has no randomness";
  return bytes;
}

std::string Sha256(const std::string& data) {
  std::string hash(kSha256Bytes, '\0');
  unsigned int size = 0;
  LH_CHECK(EVP_Digest(data.data(), data.size(), reinterpret_cast<unsigned char*>(hash.data()),
                      &size, EVP_sha256(), nullptr) == 1 &&
           size == kSha256Bytes)
      << "OpenSSL has no SHA-256";
  return hash;
}

std::string HmacSha256(const std::string& key, const std::string& data) {
  std::string code(kSha256Bytes, '\0');
  unsigned int size = 0;
  LH_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                reinterpret_cast<const unsigned char*>(data.data()), data.size(),
                reinterpret_cast<unsigned char*>(code.data()), &size) != nullptr &&
           size == kSha256Bytes)
      << "OpenSSL has no HMAC";
  return code;
}

bool SameBytes(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace longhaul
