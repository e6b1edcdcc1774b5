// Dials the lanes that links lack, where that is up to us: the control lane of a link that is not
// there yet, and data lanes, new or lost.
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

class DiallingOwner {
 public:
  virtual ~DiallingOwner() = default;
  // A control lane has passed its handshake: there was no link.
  virtual void OnControlDialled(Peering* p, int fd, const LaneHello& hello,
                                const SocketAddress& remote) = 0;
  // The link has one more data lane.
  virtual void OnDataLaneDialled(Peering* p) = 0;
};

class Dialling {
 public:
  Dialling(Ring* ring, const TransportOptions* options, Alarm* alarm, Handshakes* handshakes,
           Resolver* resolver, RunTable* runs, DiallingOwner* owner)
      : ring_(ring),
        options_(options),
        alarm_(alarm),
        handshakes_(handshakes),
        resolver_(resolver),
        runs_(runs),
        owner_(owner) {}

  // A new request: all endpoints are tried again, at once.
  void BeginRequest(Peering* p, Tick now);
  // A new link. `rtt_us`: of its path; 0: unknown.
  void BeginLink(Peering* p, const SocketAddress& remote, int64_t rtt_us, Tick now);
  // A sender has use for so many data lanes. Those that there are stay.
  void Plan(Peering* p, uint32_t lanes);
  // Begins what is missing. When to call again. WorkData() may break the link.
  Tick WorkControl(Peering* p, Tick now);
  Tick WorkData(Peering* p, Tick now);
  void CancelControl(Peering* p, const char* why);
  void CancelData(Peering* p, const char* why);
  void Close() { closing_ = true; }

  // The request to dial for next, one after the other: the other side may know of one epoch and not
  // yet of another. nullptr: it is not up to us.
  static const Request* NextRequest(const Peering& p);

 private:
  uint32_t PlannedLanes(const SocketAddress& address, int64_t rtt_us) const;
  void DialControl(Peering* p, const Request& request, Tick now);
  void StartRound(Peering* p, const Request& request);
  void StartControlDial(Peering* p, const Request& request, Tick now);
  void OnControlDialled(const LinkKey& key, LaneDial* dial);
  void OnControlFailed(Peering* p, const LaneDial& dial);
  void DialData(Peering* p, Tick now);
  void DialDataLane(Peering* p, uint32_t lane, const Credential& credential, Tick deadline);
  void OnDataDialled(const LinkKey& key, uint32_t lane, LaneDial* dial);

  Ring* const ring_;
  const TransportOptions* const options_;
  Alarm* const alarm_;
  Handshakes* const handshakes_;
  Resolver* const resolver_;
  RunTable* const runs_;
  DiallingOwner* const owner_;
  bool closing_ = false;
};

}  // namespace longhaul::peerd
