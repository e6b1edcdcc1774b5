// The handshakes of one transport that are under way: starts them, ends those that take too long,
// and destroys them when they are over.
//
// Threads: the ring's. `done` is called from within Ring::RunOnce(); what it gets is destroyed
// later.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "peerd/io/ring.h"
#include "peerd/transport/alarm.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/event_queue.h"
#include "peerd/transport/lane_handshake.h"
#include "peerd/transport/run_table.h"

namespace longhaul::peerd {

class Handshakes {
 public:
  template <class T>
  using Done = absl::AnyInvocable<void(T*)>;

  // `options`: their `detect_ms` may change meanwhile.
  Handshakes(Ring* ring, const TransportOptions* options, EventQueue* events, Alarm* alarm)
      : ring_(ring), options_(options), events_(events), alarm_(alarm), nonces_(options->seed) {}
  // Those that the kernel still refers to are left alone.
  ~Handshakes();

  // Whether there is the congestion control that was asked for. Before anything else.
  absl::Status CheckCongestion(int family);
  // How sockets to that address are set up.
  StreamTuning TuningFor(const SocketAddress& remote) const;

  // A dial of this peer. What says which lane it is to be is left to the caller.
  DialSpec Introduce(const Peering& p, const Digest32& run, LaneKind kind,
                     const SocketAddress& address, PeerId relay, Credential credential);
  // A dial to whoever listens there, which ends with a refusal: kUnknownEpoch if it is the peer.
  DialSpec LookFor(PeerId peer, const SocketAddress& address);
  LaneDial* Dial(DialSpec spec, Tick deadline, Done<LaneDial> done);
  LaneKnock* Knock(const SocketAddress& address, Tick deadline, Done<LaneKnock> done);
  LaneAccept* Accept(int fd, Tick deadline, LaneAccept::Judge judge, Done<LaneAccept> done);

  // Ends what has had its time. When to call again.
  Tick Work(Tick now);
  void FailAll(const std::string& reason);
  bool empty() const { return running_.empty(); }

 private:
  template <class T>
  T* Keep(std::unique_ptr<T> handshake);
  template <class T>
  LaneHandshake::Done Over(Done<T> done);

  Ring* const ring_;
  const TransportOptions* const options_;
  EventQueue* const events_;
  Alarm* const alarm_;
  NonceSource nonces_;
  std::string loopback_congestion_;
  std::map<LaneHandshake*, std::unique_ptr<LaneHandshake>> running_;
};

}  // namespace longhaul::peerd
