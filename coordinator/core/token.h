// Derives the secrets of runs and the tokens of epochs. Whoever knows a token learns nothing about
// another one, or about the secret of the run.
//
// All are made with SipHash-2-4 with 128 bits of output: a pseudo-random function with a key of 128
// bits. A secret of 32 bytes is two independent keys, and each key gives one half of the 32-byte
// result. So to guess a result or a secret means to search 128 bits. The members of one epoch know
// its token, and cannot compute the token of another epoch. Pure functions without randomness.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ids.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

// SipHash-2-4-128 of `data`. Public so that a test can compare it with the published vectors.
std::array<uint8_t, 16> SipHash128(const std::array<uint8_t, 16>& key, std::string_view data);

// The secret of the `number`th run that a coordinator with this entropy creates.
std::string RunSecret(const std::string& entropy, uint64_t number, const std::string& run);

// A number that names one preparation of an epoch, and differs for each start of the coordinator.
// It is no secret, and never 0.
uint64_t PreparationId(const std::string& incarnation, const GroupKey& group, Epoch epoch);

// The token with which peers authenticate the lanes of one epoch of one group.
std::string EpochToken(const std::string& run_secret, uint32_t group, Epoch epoch);

}  // namespace longhaul::coordinator
