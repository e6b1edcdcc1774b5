// Derives the secrets of runs and the tokens of epochs. Whoever knows a token learns nothing about
// another one, or about the secret of the run.
//
// All are HMAC-SHA-256, keyed with the secret from which they derive. So the members of one epoch
// know its token, and cannot compute the token of another epoch. Pure functions without randomness.
#pragma once

#include <cstdint>
#include <string>

#include "base/ids.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

// The secret of the `number`th run that a coordinator with this entropy creates.
std::string RunSecret(const std::string& entropy, uint64_t number, const std::string& run);

// A number that names one preparation of an epoch, and differs for each start of the coordinator.
// It is no secret, and never 0.
uint64_t PreparationId(const std::string& incarnation, const GroupKey& group, Epoch epoch);

// The token with which peers authenticate the lanes of one epoch of one group.
std::string EpochToken(const std::string& run_secret, uint32_t group, Epoch epoch);

}  // namespace longhaul::coordinator
