// Authenticated encryption (AEAD) of a sequence of texts in one direction, by OpenSSL.
//
// A key is used in one direction of one connection. Sealer and Opener count the texts. The nonce of
// a text is made from its number as in TLS 1.3 (RFC 8446, section 5.3), so no nonce comes twice,
// and a text that is repeated, left out or moved does not open.
//
// Threads: one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

struct evp_cipher_ctx_st;  // OpenSSL's EVP_CIPHER_CTX

namespace longhaul {

// AES-128-GCM (NIST SP 800-38D), or ChaCha20-Poly1305 (RFC 8439) for processors without AES
// instructions.
enum class Aead : uint8_t { kAes128Gcm, kChaCha20Poly1305 };

inline constexpr size_t kTagBytes = 16;

// A secret of 32 bytes from which keys are derived. Forgets its bytes when it ends.
class KeySecret {
 public:
  static constexpr size_t kBytes = 32;
  KeySecret() = default;
  KeySecret(const KeySecret&) = default;
  KeySecret& operator=(const KeySecret&) = default;
  ~KeySecret();

  uint8_t* data() { return bytes_.data(); }
  const uint8_t* data() const { return bytes_.data(); }

  // Returns a secret for one use, which `label` names (HKDF-Expand with SHA-256, RFC 5869).
  // Different labels give independent secrets.
  KeySecret Derive(std::string_view label) const;

 private:
  std::array<uint8_t, kBytes> bytes_{};
};

// The state that both directions have. Use Sealer or Opener.
class AeadSequence {
 public:
  // How many texts were begun.
  uint64_t count() const { return count_; }
  // How many bytes were sealed or opened.
  uint64_t bytes() const { return bytes_; }

 protected:
  AeadSequence(Aead aead, const KeySecret& secret, bool seal);
  // Begins the next text.
  void Begin();
  void Update(const uint8_t* in, size_t bytes, uint8_t* out);

  struct Free {
    void operator()(evp_cipher_ctx_st* context) const;
  };
  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
  std::array<uint8_t, 12> iv_{};
  uint64_t count_ = 0;
  uint64_t bytes_ = 0;
};

class Sealer : public AeadSequence {
 public:
  Sealer(Aead aead, const KeySecret& secret) : AeadSequence(aead, secret, /*seal=*/true) {}
  // Encrypts `bytes` bytes of `in` to `out`, which may be the same place, and writes kTagBytes
  // behind them.
  void Seal(const uint8_t* in, size_t bytes, uint8_t* out);
};

// Opens each text piece by piece, as its bytes come in. Until Finish() has returned true, the
// opened bytes may be forged.
class Opener : public AeadSequence {
 public:
  Opener(Aead aead, const KeySecret& secret) : AeadSequence(aead, secret, /*seal=*/false) {}
  using AeadSequence::Begin;
  // Decrypts the next bytes of the text in place.
  void Open(uint8_t* data, size_t bytes) { Update(data, bytes, data); }
  // All bytes of the text were opened, and kTagBytes follow at `tag`. Returns whether the text is
  // what the other side sealed at this place of the sequence.
  [[nodiscard]] bool Finish(const uint8_t* tag);
  // Does all three.
  [[nodiscard]] bool OpenWhole(uint8_t* data, size_t bytes, const uint8_t* tag);
};

}  // namespace longhaul
