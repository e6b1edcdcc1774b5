// The repair of links that stand and have lost a lane: dials their control lane again, or where the
// other side does, finds out whether the peer is still there. (Lost data lanes are dialled like
// those that are new, see dialling.h.)
//
// Threads: the ring's.
#pragma once

#include <string>

#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/alarm.h"
#include "peerd/transport/handshakes.h"
#include "peerd/transport/resolver.h"
#include "peerd/transport/run_table.h"

namespace longhaul::peerd {

// A lane broke, and the dial of another one found nobody there, or another peer.
void BreakGone(Link* link, const LaneDial& dial);
// How long the dial of a lost lane may take to connect. A packet that is lost on the way is
// repeated after a second; a new attempt begins at once.
Tick ReconnectBy(const Link& link, uint32_t detect_ms, Tick now);

class Repair {
 public:
  Repair(Ring* ring, const TransportOptions* options, Alarm* alarm, Handshakes* handshakes,
         Resolver* resolver, RunTable* runs)
      : ring_(ring),
        options_(options),
        alarm_(alarm),
        handshakes_(handshakes),
        resolver_(resolver),
        runs_(runs) {}

  // A new link.
  void Begin(Peering* p, Tick now);
  void OnLaneLost(Peering* p, LaneKind kind, const std::string& reason);
  void OnLaneBack(Peering* p, const std::string& name);
  // Where the control lane is lost: sees to it. When to call again. May break the link.
  Tick Work(Peering* p, Tick now);
  void Cancel(Peering* p, const char* why);
  void Close() { closing_ = true; }

 private:
  void Redial(Peering* p, Tick now);
  void OnRedialled(const LinkKey& key, LaneDial* dial);
  void Knock(Peering* p, Tick now);
  void KnockAt(Peering* p, const SocketAddress& address);
  void OnKnocked(const LinkKey& key, uint64_t serial, LaneKnock* knock);
  void OnKnockOver(Peering* p);

  Ring* const ring_;
  const TransportOptions* const options_;
  Alarm* const alarm_;
  Handshakes* const handshakes_;
  Resolver* const resolver_;
  RunTable* const runs_;
  bool closing_ = false;
};

}  // namespace longhaul::peerd
