// Carries lanes between pairs of other peers that cannot reach each other.
//
// There are at most LH_TUNNELS_MAX tunnels. A dialer has proved nothing before its CONFIRM, so at
// most LH_TUNNELS_OPENING_MAX tunnels wait for a CONFIRM. Beyond that the tunnel that has waited
// longest is closed.
//
// Threads: the ring's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/alarm.h"
#include "peerd/transport/event_queue.h"
#include "peerd/transport/handshakes.h"
#include "peerd/transport/refused_callers.h"
#include "peerd/transport/resolver.h"
#include "peerd/transport/run_table.h"
#include "peerd/transport/tunnel.h"

namespace longhaul::peerd {

class Tunnels {
 public:
  Tunnels(Ring* ring, const TransportOptions* options, EventQueue* events, Alarm* alarm,
          Handshakes* handshakes, Resolver* resolver, RunTable* runs, RefusedCallers* refused)
      : ring_(ring),
        options_(options),
        events_(events),
        alarm_(alarm),
        handshakes_(handshakes),
        resolver_(resolver),
        runs_(runs),
        refused_(refused) {}
  // Leaks tunnels whose buffers the kernel still refers to.
  ~Tunnels();

  // Whether to carry the lane of a HELLO that names us as its relay.
  LaneResult Judge(const LaneHello& hello) const;
  // Carries the lane, which Judge() has accepted. Takes `fd` over, the connection from `dialer`.
  void Open(int fd, const HelloBytes& bytes, const LaneHello& hello, const SocketAddress& dialer);

  // Stops tunnels whose time is up. Returns when to call again.
  Tick Work(Tick now);
  void Close();
  // There are no tunnels, so the kernel refers to none.
  bool idle() const { return tunnels_.empty(); }
  uint32_t count() const { return static_cast<uint32_t>(tunnels_.size()); }
  uint64_t bytes() const;

 private:
  void Connect(uint64_t id, const std::vector<SocketAddress>& addresses);
  void MakeRoom();

  Ring* const ring_;
  const TransportOptions* const options_;
  EventQueue* const events_;
  Alarm* const alarm_;
  Handshakes* const handshakes_;
  Resolver* const resolver_;
  RunTable* const runs_;
  RefusedCallers* const refused_;
  std::map<uint64_t, std::unique_ptr<Tunnel>> tunnels_;  // the oldest first
  uint64_t next_id_ = 1;
  uint64_t gone_bytes_ = 0;  // of tunnels that are no more
};

}  // namespace longhaul::peerd
