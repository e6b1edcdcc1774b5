// Repairs links that have lost a lane. If we dialled the link, dials a lost control lane again. If
// the peer dialled it, finds out whether the peer is still there. (Lost data lanes are dialled like
// new ones, see dialling.h.)
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

// Breaks the link. A lane broke, and the dial of a new one found that the peer is gone.
void BreakGone(Link* link, const LaneDial& dial);
// Returns until when the dial of a lost lane may try to connect. On a short path that is soon: TCP
// repeats a lost packet only after a second, while a new dial sends one at once.
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

  // There is a new link.
  void Begin(Peering* p, Tick now);
  void OnLaneLost(Peering* p, LaneKind kind, const std::string& reason);
  void OnLaneBack(Peering* p, const std::string& name);
  // If the control lane is lost, does what is due. Returns when to call again. May break the link.
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
