// Settings of gRPC that both ends of the coordinator's services share. No gRPC type appears here.
#pragma once

#include <cstdint>

namespace longhaul::control {

// HTTP/2 pings. They find dead connections on which nothing else is sent; the protocol's heartbeats
// find dead peers. The two times together are four detect_ms, to outlast a stall on a lossy path.
struct Keepalive {
  int time_ms = 0;     // silence before a ping
  int timeout_ms = 0;  // wait for the ping's answer; then the connection is dead
};

Keepalive KeepaliveFor(uint32_t detect_ms);

// Initial metadata of Admin.WatchEvents, see admin.proto.
inline constexpr char kWatchedIncarnation[] = "longhaul-incarnation";
inline constexpr char kWatchedAfter[] = "longhaul-after-sequence";

// Call it before the first use of gRPC. It may be called again, from any thread. It sends gRPC's
// own log lines through base/log.h, errors as warnings. It keeps the library alive until the
// process ends, because the shutdown after the last server or channel sometimes waits for ten
// seconds.
void InitGrpc();

}  // namespace longhaul::control
