// For how long a peer may be unheard, in detect_ms.
#pragma once

#include <cstdint>

namespace longhaul::coordinator {

// While no other peer reports it silent: a connection to us that stalls or breaks is not a peer
// that died.
inline constexpr int64_t kLease = 4;
// The same where less is at stake, or the peer had to come back by itself: a newcomer without a
// stream; a peer that is silent to others, after a restart of the coordinator.
inline constexpr int64_t kShortLease = 2;

}  // namespace longhaul::coordinator
