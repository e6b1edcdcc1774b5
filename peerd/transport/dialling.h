// Dials the lanes that links lack, if it is our side that dials: the control lane of a new link,
// and data lanes, new or lost. (repair.h dials lost control lanes.)
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
  // A control lane has passed its handshake. There was no link to this peer.
  virtual void OnControlDialled(Peering* p, LaneSocket socket, const LaneHello& hello,
                                const SocketAddress& remote) = 0;
  // The link got one more data lane.
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

  // There is a new request: tries all endpoints again, at once.
  void BeginRequest(Peering* p, Tick now);
  // There is a new link. `rtt_us`: of its path; 0: unknown.
  void BeginLink(Peering* p, const SocketAddress& remote, int64_t rtt_us, Tick now);
  // A sender can use `lanes` data lanes. Raises the number of lanes, and never lowers it.
  void Plan(Peering* p, uint32_t lanes);
  // The link that began with one lane is to have as many as others.
  void PlanAll(Peering* p);
  // These start the dials that are due. They return when to call again. WorkData() may break the
  // link.
  Tick WorkControl(Peering* p, Tick now);
  Tick WorkData(Peering* p, Tick now);
  void CancelControl(Peering* p, const char* why);
  void CancelData(Peering* p, const char* why);
  void Close() { closing_ = true; }

  // Returns the request to dial for; nullptr: our side does not dial. Takes the requests in turn,
  // since the peer may know one epoch and not yet another.
  static const Request* NextRequest(const Peering& p);

 private:
  uint32_t PlannedLanes(const Peering& p, const SocketAddress& address, int64_t rtt_us) const;
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
