// Settings of gRPC that both ends of the coordinator's services share. No gRPC type appears here.
#pragma once

#include <cstdint>

namespace longhaul::control {

// Times of HTTP/2 pings. The pings find dead connections on which nothing else is sent; heartbeats
// find dead peers. Both times together are 4 * detect_ms, to outlast a stall on a lossy path. They
// are at least 0.8 s and at most 8 minutes.
struct Keepalive {
  int time_ms = 0;     // silence before a ping
  int timeout_ms = 0;  // without an answer for this long the connection is dead
};

Keepalive KeepaliveFor(uint32_t detect_ms);

// Initial metadata of the coordinator's side of Attach: the nonce that Hello signs.
inline constexpr char kNonceMetadata[] = "longhaul-nonce-bin";

// The message of the UNAVAILABLE with which the coordinator ends a control stream only because its
// connection is to begin anew. The peer connects again at once.
inline constexpr char kAged[] = "the connection has reached its age (--tls-connection-age-s)";

// Initial metadata of Admin.WatchEvents, see admin.proto.
inline constexpr char kWatchedIncarnation[] = "longhaul-incarnation";
inline constexpr char kWatchedAfter[] = "longhaul-after-sequence";

// How a caller shows its join token: metadata "authorization" with "Bearer TOKEN".
inline constexpr char kAuthorization[] = "authorization";
inline constexpr char kBearer[] = "Bearer ";

// Call this before the first use of gRPC. Any thread may call it again. Sends gRPC's own log lines
// through base/log.h: errors as warnings, at most five a second, all others as debug lines. Keeps
// the library alive until the process ends, because the shutdown after the last server or channel
// sometimes waits for ten seconds.
void InitGrpc();

}  // namespace longhaul::control
