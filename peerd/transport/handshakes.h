// The handshakes that run in one transport. Starts them, ends those that take too long, and
// destroys them when they are over.
//
// Threads: the ring's. `done` is called from within Ring::RunOnce(). Its argument is destroyed
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

  // `options->detect_ms` may change later.
  Handshakes(Ring* ring, const TransportOptions* options, EventQueue* events, Alarm* alarm)
      : ring_(ring),
        options_(options),
        events_(events),
        alarm_(alarm),
        nonces_(options->seed),
        tls_(options->identity ? std::make_unique<TlsContext>(*options->identity) : nullptr) {}
  // Leaks handshakes that the kernel still refers to.
  ~Handshakes();

  // Checks that the kernel has the congestion control of the options, and looks for others. Call
  // this first.
  absl::Status CheckCongestion(int family);
  // Whether the system has what long ways may use if the options leave it open (CongestionChoice).
  bool offers_cubic() const { return offers_cubic_; }
  bool offers_bbr() const { return offers_bbr_; }
  // Returns how to set up a socket to that address.
  StreamTuning TuningFor(const SocketAddress& remote) const;

  // Whether this peer connects to such an address if another one names it
  // (TransportOptions::own_endpoints).
  bool MayDial(const SocketAddress& address) const;

  // Returns the dial for a lane to this peer. The caller fills in which lane it is. A lane of a
  // link that stands is sealed if the link is. `link`: nullptr for the first lane of a link.
  DialSpec Introduce(const Peering& p, LaneKind kind, const SocketAddress& address, PeerId relay,
                     Credential credential, const Link* link);
  // Returns a dial that finds out whether `peer` listens at `address`. It always ends with a
  // refusal, which is kUnknownEpoch if the peer listens.
  DialSpec LookFor(PeerId peer, const SocketAddress& address);
  LaneDial* Dial(DialSpec spec, Tick deadline, Done<LaneDial> done);
  LaneKnock* Knock(const SocketAddress& address, Tick deadline, Done<LaneKnock> done);
  LaneAccept* Accept(int fd, Tick deadline, LaneAccept::Judge judge, Done<LaneAccept> done);

  // Ends handshakes whose time is up. Returns when to call again.
  Tick Work(Tick now);
  void FailAll(const std::string& reason);
  bool empty() const { return running_.empty(); }
  const Tag16& host() const { return options_->host; }

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
  const std::unique_ptr<TlsContext> tls_;
  std::string loopback_congestion_;
  bool offers_cubic_ = false;
  bool offers_bbr_ = false;
  std::map<LaneHandshake*, std::unique_ptr<LaneHandshake>> running_;
};

}  // namespace longhaul::peerd
