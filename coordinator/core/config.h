// The configuration that the coordinator's core gets when it starts.
//
// The flags of longhaul-coordinator that the core uses are fields here. main() sets them. The same
// values reach the core and its groups.
#pragma once

#include <cstdint>
#include <string>

#include "base/fields.h"

namespace longhaul::coordinator {

struct CoreConfig {
  // Names this start of the coordinator. Random, and different at each start on one store.
  std::string incarnation;
  uint64_t store = 1;         // the name that a new store gets; not 0
  uint32_t detect_ms = 1500;  // all deadlines derive from this
  // The order of a group's ring may change once in this time. The core asks for a better ring at
  // most ten times in this time. 0: the order never changes.
  uint32_t ring_interval_ms = 300000;
  // Peers sign their READYs from the beginning, and not only after two verdicts have differed.
  bool sign_ops = false;
  // 32 random bytes from the system, new at each start. The secrets of runs derive from them,
  // and the tokens of epochs derive from the secrets of runs. The core has no other randomness.
  std::string entropy;
  LH_FIELDS(CoreConfig, LH_FIELD(incarnation), LH_FIELD(store), LH_FIELD(detect_ms),
            LH_FIELD(ring_interval_ms), LH_FIELD(sign_ops),
            LH_FIELD(entropy, rule::Secret{32, 32}));
};

}  // namespace longhaul::coordinator
