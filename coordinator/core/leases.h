// How long a peer may be unheard by the coordinator before it counts as dead, in detect_ms.
#pragma once

#include <cstdint>

namespace longhaul::coordinator {

// The usual time, while no other peer has lost its link to the peer. It is long because a control
// stream that stalls or breaks does not show that the peer died.
inline constexpr int64_t kLease = 4;
// The shorter time: for a newcomer without a stream, and, after a restart or an isolation of the
// coordinator, for a peer to which another peer has lost its link.
inline constexpr int64_t kShortLease = 2;

}  // namespace longhaul::coordinator
