// What the ops of a peer came to, in numbers.
#pragma once

#include <cstdint>

#include "base/fields.h"

namespace longhaul::peerd {

// What a freezing commit did to the ops that it froze.
struct FateCounts {
  uint32_t committed = 0;
  uint32_t redone = 0;
  uint32_t aborted = 0;
};

// All groups of a peer share these counters.
struct OpCounters {
  uint64_t next_ordinal = 1;
  uint64_t committed = 0;
  uint64_t aborted = 0;
  uint64_t refused = 0;
  uint64_t retries = 0;
  uint64_t frames_stale = 0;
  uint64_t frames_refused = 0;
  LH_FIELDS(OpCounters, LH_FIELD(next_ordinal), LH_FIELD(committed), LH_FIELD(aborted),
            LH_FIELD(refused), LH_FIELD(retries), LH_FIELD(frames_stale), LH_FIELD(frames_refused));
};

}  // namespace longhaul::peerd
