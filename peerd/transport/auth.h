// Proofs and nonces of the lane handshake (proto/wire/handshake.h).
//
// A proof is HMAC-SHA-256 keyed with the epoch's token over a label, the HELLO's bytes and the
// answer's nonce. The label differs by direction, so that neither side can hand back what it was
// given.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/prng.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

Digest32 RunDigest(const std::string& run);

using HelloBytes = std::array<uint8_t, kLaneHelloBytes>;
Digest32 AnswerProof(const std::string& token, const HelloBytes& hello, const Digest32& nonce);
Digest32 ConfirmProof(const std::string& token, const HelloBytes& hello, const Digest32& nonce);

// Takes the same time wherever they differ.
bool SameProof(const Digest32& a, const Digest32& b);

// The system's randomness, or a repeatable sequence for tests.
class NonceSource {
 public:
  explicit NonceSource(uint64_t seed) : seeded_(seed != 0), random_(seed) {}
  Digest32 Next();

 private:
  bool seeded_;
  Prng random_;
};

}  // namespace longhaul::peerd
