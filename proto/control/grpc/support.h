// What both ends of the coordinator's services set up alike. No gRPC type appears here.
#pragma once

#include <cstdint>

namespace longhaul::control {

// HTTP/2 pings. They find a dead connection where nothing is sent otherwise; a dead peer is found
// by the heartbeats of the protocol. Together four detect_ms: a stall on a lossy path is no death.
struct Keepalive {
  int time_ms = 0;     // of silence before a ping
  int timeout_ms = 0;  // without its answer: the connection is dead
};

Keepalive KeepaliveFor(uint32_t detect_ms);

// Initial metadata of Admin.WatchEvents, see admin.proto.
inline constexpr char kWatchedIncarnation[] = "longhaul-incarnation";
inline constexpr char kWatchedAfter[] = "longhaul-after-sequence";

// Before the first use of gRPC; safe to repeat, from any thread. Sends gRPC's own log lines through
// base/log.h, as warnings, and keeps the library alive until the process ends: its shutdown, at the
// end of the last server or channel, sometimes waits for ten seconds.
void InitGrpc();

}  // namespace longhaul::control
