// Who a peer is: an Ed25519 key pair (RFC 8032), made by OpenSSL.
//
// The private key never leaves the process and is never stored. It lives as long as the Identity
// and its copies do, so a peerd that starts again is another peer.
//
// Threads: any. Copies share the key, which does not change.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/ids.h"

struct evp_pkey_st;  // OpenSSL's EVP_PKEY

namespace longhaul {

inline constexpr size_t kPublicKeyBytes = 32;
inline constexpr size_t kSignatureBytes = 64;

class Identity {
 public:
  // Makes a new key pair with the system's randomness.
  static Identity New();
  // Makes the same key pair for the same seed. For tests only.
  static Identity ForTest(uint64_t seed);

  // kPublicKeyBytes bytes, as in RFC 8032.
  const std::string& public_key() const { return public_key_; }
  PeerId peer() const;
  // Returns the signature of `text`, kSignatureBytes bytes.
  std::string Sign(std::string_view text) const;
  // For TLS. Stays the property of this object.
  evp_pkey_st* key() const { return key_.get(); }

 private:
  explicit Identity(evp_pkey_st* key);

  std::shared_ptr<evp_pkey_st> key_;
  std::string public_key_;
};

// Returns the id of the peer with this public key: the first 63 bits of the key's SHA-256, or 1 if
// they are all 0. (63 bits: the id stays positive wherever it is shown as a signed number.) Another
// key with the same id can be found with 2^63 tries, so compare keys, not ids, where it matters.
PeerId PeerIdOf(std::string_view public_key);

// Returns whether `signature` is the signature of `text` by the owner of `public_key`. Returns
// false if one of the two is no signature or no key.
bool IsSignedBy(std::string_view public_key, std::string_view text, std::string_view signature);

// Returns the text that a peer signs to show a coordinator that it has its private key. `nonce`
// comes from the coordinator, and is new for each stream.
std::string PossessionText(std::string_view nonce, std::string_view public_key);
inline constexpr size_t kPossessionNonceBytes = 32;

}  // namespace longhaul
