// What the coordinator's core is told when it starts.
//
// The flags of longhaul-coordinator that the core sees are fields here: main() sets them, all of it
// goes from there to the core and its groups as it is, and the journal keeps it for replays.
#pragma once

#include <cstdint>
#include <string>

#include "base/fields.h"

namespace longhaul::coordinator {

struct CoreConfig {
  // Names this start of the coordinator: random, no two starts on one store have the same.
  std::string incarnation;
  uint64_t store = 1;         // random: the name of the store if it is new; not 0
  uint32_t detect_ms = 1500;  // all deadlines derive from it
  // A group's ring is ordered anew at most so often, and a better one looked for at most ten times
  // in that; 0: never.
  uint32_t ring_interval_ms = 300000;
  // 32 bytes of the system's randomness, fresh at each start. Derived from it: run secrets, and
  // through them the tokens of epochs; the secrets of peers. Nothing else in the core is random.
  std::string entropy;
  LH_FIELDS(CoreConfig, LH_FIELD(incarnation), LH_FIELD(store), LH_FIELD(detect_ms),
            LH_FIELD(ring_interval_ms), LH_FIELD(entropy, rule::Secret{32, 32}));
};

}  // namespace longhaul::coordinator
