#include "base/crypto/sealing.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <algorithm>
#include <climits>
#include <string>

#include "base/check.h"

namespace longhaul {
namespace {

const EVP_CIPHER* CipherOf(Aead aead) {
  return aead == Aead::kAes128Gcm ? EVP_aes_128_gcm() : EVP_chacha20_poly1305();
}

EVP_KDF* Hkdf() {
  static EVP_KDF* const kdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  return kdf;
}

}  // namespace

KeySecret::~KeySecret() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

KeySecret KeySecret::Derive(std::string_view label) const {
  const std::unique_ptr<EVP_KDF_CTX, decltype(&EVP_KDF_CTX_free)> context(EVP_KDF_CTX_new(Hkdf()),
                                                                          &EVP_KDF_CTX_free);
  int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY;
  std::string digest = "SHA256";
  std::string info(label);
  KeySecret out;
  const std::array<OSSL_PARAM, 5> parameters = {
      OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest.data(), 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, const_cast<uint8_t*>(data()), kBytes),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
      OSSL_PARAM_construct_end()};
  LH_CHECK(EVP_KDF_derive(context.get(), out.data(), kBytes, parameters.data()) == 1)
      << "OpenSSL cannot derive a key";
  return out;
}

AeadSequence::AeadSequence(Aead aead, const KeySecret& secret, bool seal)
    : context_(EVP_CIPHER_CTX_new()) {
  const KeySecret key = secret.Derive("key");
  const KeySecret iv = secret.Derive("iv");
  std::copy_n(iv.data(), iv_.size(), iv_.begin());
  const EVP_CIPHER* const cipher = CipherOf(aead);
  LH_CHECK(EVP_CIPHER_get_iv_length(cipher) == static_cast<int>(iv_.size()) &&
           EVP_CIPHER_get_key_length(cipher) <= static_cast<int>(KeySecret::kBytes));
  LH_CHECK(EVP_CipherInit_ex(context_.get(), cipher, nullptr, key.data(), nullptr, seal ? 1 : 0) ==
           1)
      << "OpenSSL lacks a cipher";
}

void AeadSequence::Free::operator()(evp_cipher_ctx_st* context) const {
  EVP_CIPHER_CTX_free(context);
}

void AeadSequence::Begin() {
  LH_CHECK(count_ != UINT64_MAX);
  std::array<uint8_t, 12> nonce = iv_;
  for (size_t i = 0; i < 8; ++i) {
    nonce[nonce.size() - 1 - i] ^= static_cast<uint8_t>(count_ >> (8 * i));
  }
  ++count_;
  LH_CHECK(EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1);
}

void AeadSequence::Update(const uint8_t* in, size_t bytes, uint8_t* out) {
  bytes_ += bytes;
  while (bytes > 0) {
    const int part = static_cast<int>(std::min<size_t>(bytes, INT_MAX / 2));
    int moved = 0;
    LH_CHECK(EVP_CipherUpdate(context_.get(), out, &moved, in, part) == 1 && moved == part);
    in += part;
    out += part;
    bytes -= static_cast<size_t>(part);
  }
}

void Sealer::Seal(const uint8_t* in, size_t bytes, uint8_t* out) {
  Begin();
  Update(in, bytes, out);
  int rest = 0;
  LH_CHECK(EVP_CipherFinal_ex(context_.get(), out + bytes, &rest) == 1 && rest == 0);
  LH_CHECK(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, out + bytes) == 1);
}

bool Opener::Finish(const uint8_t* tag) {
  LH_CHECK(EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes,
                               const_cast<uint8_t*>(tag)) == 1);
  int rest = 0;
  uint8_t none[kTagBytes];
  return EVP_CipherFinal_ex(context_.get(), none, &rest) == 1;
}

bool Opener::OpenWhole(uint8_t* data, size_t bytes, const uint8_t* tag) {
  Begin();
  Open(data, bytes);
  return Finish(tag);
}

}  // namespace longhaul
