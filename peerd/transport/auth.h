// Proofs and nonces of the lane handshake (proto/wire/handshake.h).
//
// A proof is HMAC-SHA-256 keyed with the epoch's token. It covers a label, the bytes of HELLO, and
// the nonce of ANSWER. Each direction has its own label, so neither side can return the proof that
// it got.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/prng.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

// LaneHello::run, for an epoch with this token and a HELLO with this nonce.
Tag16 RunTag(const std::string& token, const std::string& run, const Digest32& nonce);

// LaneHello::host of this process: a hash of the kernel's boot id and of the network namespace.
// Zeros if the system does not tell them: then every lane has to be sealed.
Tag16 HostTag();

using HelloBytes = std::array<uint8_t, kLaneHelloBytes>;
Digest32 AnswerProof(const std::string& token, const HelloBytes& hello, const Digest32& nonce);
Digest32 ConfirmProof(const std::string& token, const HelloBytes& hello, const Digest32& nonce);

// Takes the same time wherever the proofs differ.
bool SameProof(const Digest32& a, const Digest32& b);

// Gives random nonces from the system, or a repeatable sequence for tests (`seed` is not 0).
class NonceSource {
 public:
  explicit NonceSource(uint64_t seed) : seeded_(seed != 0), random_(seed) {}
  Digest32 Next();

 private:
  bool seeded_;
  Prng random_;
};

}  // namespace longhaul::peerd
