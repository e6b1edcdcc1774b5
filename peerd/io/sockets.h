// Socket addresses, and the few calls that make, set up and close a socket.
//
// ring.h moves bytes; this file holds the other calls of the data plane to the network. They are
// behind an interface so that the same transport also runs over FakeRing's network in memory.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/daemon/host_port.h"
#include "base/tcp.h"

namespace longhaul::peerd {

// IPv4 or IPv6, with a port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  uint16_t port() const;
  bool loopback() const;
  // Only those on the same machine (loopback, "any") or on the same wire (link-local) get there.
  enum class Scope { kMachine, kWire, kWide };
  Scope scope() const;
};

// "10.0.0.3:29700", "[2001:db8::1]:29700".
std::string ToString(const SocketAddress& address);

// The address if the host is numeric; never blocks.
std::optional<SocketAddress> NumericAddress(const HostPort& host_port);
// Asks the system's resolver, which may block for seconds. Unavailable if the name has no address.
absl::StatusOr<std::vector<SocketAddress>> ResolveBlocking(const HostPort& host_port);

struct StreamTuning {
  // The connection breaks when data stays unacknowledged for so long; 0: the system's default.
  uint32_t user_timeout_ms = 0;
  std::string congestion;  // the congestion control; "": the system's default
  // Largest payload of a packet, in both directions. Takes effect only before connect(). 0: the
  // system's default.
  uint32_t segment_bytes_max = 0;
};

// Every descriptor is close-on-exec and non-blocking; only listeners block. Threads: the owner of
// the ring.
class Sockets {
 public:
  virtual ~Sockets() = default;
  // Makes a listening TCP socket with SO_REUSEADDR. Unavailable names the address and the system's
  // reason.
  virtual absl::StatusOr<int> Listen(const SocketAddress& address) = 0;
  virtual absl::StatusOr<SocketAddress> LocalAddress(int fd) = 0;
  virtual absl::StatusOr<SocketAddress> PeerAddress(int fd) = 0;
  // Makes an unconnected TCP socket.
  virtual absl::StatusOr<int> Open(int family) = 0;
  // Sets TCP_NODELAY, linear retransmission timeouts for streams of few packets, and `tuning`.
  // InvalidArgument: the system refuses the congestion control.
  virtual absl::Status Tune(int fd, const StreamTuning& tuning) = 0;
  // None: the system does not say.
  virtual std::optional<TcpDelivery> Delivery(int fd) = 0;
  // Sets a socket up for a path with long round trips. Two things change:
  // - The kernel holds at most about kUnsentBytes that it has not sent. The rest waits in the
  //   ring, where another connection can still take it.
  // - The kernel spreads packets evenly over a round trip. Otherwise it would send a burst after
  //   each pause, and queues on the way drop bursts.
  // Does nothing where the system offers neither.
  virtual void SetLongWay(int fd) = 0;
  // The kernel sends at most so many bytes a second of a stream that SetLongWay() was called for.
  // 0: as fast as its congestion control allows. Does nothing where the system does not offer it.
  virtual void SetPace(int fd, uint64_t bytes_per_second) = 0;
  // Ends the sending direction once the kernel has sent all data.
  virtual void ShutdownSend(int fd) = 0;
  virtual void Close(int fd) = 0;
  // Closes with a reset: data that the kernel has not delivered yet is dropped.
  virtual void Abort(int fd) = 0;
};

// The sockets of the operating system. Has no state.
Sockets& SystemSockets();

}  // namespace longhaul::peerd
