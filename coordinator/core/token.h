// Secrets of runs, epochs and peers, derived so that knowing one tells nothing about another.
//
// The function behind all of them is SipHash-2-4 with 128 bits of output, a pseudo-random function
// keyed with 128 bits. A 32-byte secret is two independent keys; each yields one half of the
// 32-byte result. Guessing a result or a secret thus means searching 128 bits, and the members of
// one epoch, who know its token, cannot compute the token of another. Pure: no library, no
// randomness of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ids.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

// SipHash-2-4-128 of `data`. Exposed for its test against the published vectors.
std::array<uint8_t, 16> SipHash128(const std::array<uint8_t, 16>& key, std::string_view data);

// The secret of the `number`th run that a coordinator with this entropy creates.
std::string RunSecret(const std::string& entropy, uint64_t number, const std::string& run);

// What a peer has to know in order to replace its own control stream, at a coordinator with this
// entropy.
std::string PeerSecret(const std::string& entropy, PeerId peer);

// Takes the same time whatever the secrets are, if both have the same size.
bool SameSecret(const std::string& a, const std::string& b);

// Names one preparation of an epoch: random as the name of the coordinator's start is, and no
// secret. Never 0.
uint64_t PreparationId(const std::string& incarnation, const GroupKey& group, Epoch epoch);

// What authenticates the lanes of one epoch of one group.
std::string EpochToken(const std::string& run_secret, uint32_t group, Epoch epoch);

}  // namespace longhaul::coordinator
