// Socket addresses, and the few calls that make and end a socket.
//
// What moves bytes is in ring.h; this is the rest of what the data plane asks of the network,
// behind an interface so that the same transport runs over FakeRing's network in memory.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul::peerd {

// IPv4 or IPv6, with a port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  uint16_t port() const;
  bool loopback() const;
};

// "10.0.0.3:29700", "[2001:db8::1]:29700".
std::string ToString(const SocketAddress& address);

struct HostPort {
  std::string host;  // numeric or a name; brackets removed
  uint16_t port = 0;
};

// "host:port" or "[v6]:port"; InvalidArgument names what is wrong. An empty host means any address.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);
// The address if the host is numeric; never blocks.
std::optional<SocketAddress> NumericAddress(const HostPort& host_port);
// Asks the system's resolver, which may block for seconds. Unavailable if the name has no address.
absl::StatusOr<std::vector<SocketAddress>> ResolveBlocking(const HostPort& host_port);

struct StreamTuning {
  uint32_t user_timeout_ms =
      0;                   // unacknowledged data breaks the connection after this; 0: system's
  std::string congestion;  // "": system's
  // Largest payload of a packet, in both directions; only before connect(). 0: system's.
  uint32_t segment_bytes_max = 0;
};

// As much as a connection of 25 Mbit/s sends in 10 ms.
inline constexpr int kUnsentBytes = 32 << 10;

// What TCP has measured of one connection in the direction away from us.
struct TcpDelivery {
  uint64_t bytes_per_second = 0;   // acknowledged of late, as fast as it went; 0: nothing yet
  bool limited_by_sender = false;  // we had too little to send for a higher rate
  uint32_t rtt_us = 0;             // the shortest round trip; 0: none yet
  uint64_t bytes_acked = 0;        // that have arrived, with all before them
  uint64_t bytes_arrived = 0;      // those behind a gap included; to a packet
  uint64_t bytes_sent = 0;         // what was sent again counted again
  uint64_t bytes_repeated = 0;     // of those, sent again
};

// Every descriptor is close-on-exec and, except listeners, non-blocking. Threads: as the ring's.
class Sockets {
 public:
  virtual ~Sockets() = default;
  // A listening TCP socket, SO_REUSEADDR. Unavailable names the address and what the system said.
  virtual absl::StatusOr<int> Listen(const SocketAddress& address) = 0;
  virtual absl::StatusOr<SocketAddress> LocalAddress(int fd) = 0;
  virtual absl::StatusOr<SocketAddress> PeerAddress(int fd) = 0;
  // An unconnected TCP socket.
  virtual absl::StatusOr<int> Open(int family) = 0;
  // TCP_NODELAY, linear timeouts of thin streams, and what `tuning` says. InvalidArgument: unknown
  // congestion control.
  virtual absl::Status Tune(int fd, const StreamTuning& tuning) = 0;
  // None: the system does not say.
  virtual std::optional<TcpDelivery> Delivery(int fd) = 0;
  // For a way of long round trips. What has not been sent waits in the ring rather than in the
  // kernel, beyond kUnsentBytes: there another connection may still take it. And what may be sent
  // goes out evenly over a round trip, not in one burst after each pause, which queues on the way
  // drop. Not offered by the system: nothing.
  virtual void SetLongWay(int fd) = 0;
  // Ends our direction once everything sent has gone out.
  virtual void ShutdownSend(int fd) = 0;
  virtual void Close(int fd) = 0;
  // Closes with a reset: what the kernel still holds of sent data is dropped.
  virtual void Abort(int fd) = 0;
};

// The system's. Has no state.
Sockets& SystemSockets();

}  // namespace longhaul::peerd
