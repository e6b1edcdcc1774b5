// The data port: accepts connections, and decides which of them become lanes.
//
// Threads: the ring's.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "peerd/io/ring.h"
#include "peerd/transport/callers.h"
#include "peerd/transport/handshakes.h"
#include "peerd/transport/refused_callers.h"
#include "peerd/transport/run_table.h"
#include "peerd/transport/tunnels.h"

namespace longhaul::peerd {

class AdmissionOwner {
 public:
  virtual ~AdmissionOwner() = default;
  // Whether one more connection of a probe can be accepted now.
  virtual bool HasRoomForProbe() const = 0;
  // The caller at `remote` has proved that it has the token, and its lane fits the peering.
  virtual void OnAdmitted(Peering* p, LaneSocket socket, const LaneHello& hello,
                          const SocketAddress& remote) = 0;
};

class Admission {
 public:
  Admission(Ring* ring, const TransportOptions* options, Handshakes* handshakes, RunTable* runs,
            Tunnels* tunnels, RefusedCallers* refused, AdmissionOwner* owner)
      : ring_(ring),
        options_(options),
        handshakes_(handshakes),
        runs_(runs),
        tunnels_(tunnels),
        refused_(refused),
        owner_(owner) {}

  // Unavailable: the address cannot be bound.
  absl::Status Listen(const SocketAddress& address);
  // Returns the bound address with its port.
  const std::string& address() const { return address_; }
  // Stops listening.
  void Close();
  // The kernel refers to nothing of this object.
  bool idle() const { return accept_ == 0; }
  uint64_t accepted() const { return accepted_; }

 private:
  void AcceptNext();
  void OnAccepted(int value);
  void OnHandshake(uint64_t caller, LaneAccept* handshake, const SocketAddress& remote,
                   bool on_host);
  // `on_host`: the caller connects from this host.
  LaneVerdict Judge(const LaneHello& hello, bool on_host) const;
  bool MaySeal(const Peering& p, const LaneHello& hello, bool on_host) const;
  void Refuse(CallerRefusal refusal, const LaneHello& hello, const SocketAddress& remote,
              const std::string& why);
  LaneResult JudgeControl(const Peering& p, const LaneHello& hello) const;
  void MakeRoom();

  Ring* const ring_;
  const TransportOptions* const options_;
  Handshakes* const handshakes_;
  RunTable* const runs_;
  Tunnels* const tunnels_;
  RefusedCallers* const refused_;
  AdmissionOwner* const owner_;
  std::string address_;
  int listen_fd_ = -1;
  IoId accept_ = 0;
  bool closing_ = false;
  bool warned_ = false;
  Callers callers_;
  std::map<uint64_t, LaneAccept*> accepting_;  // the handshakes of callers_
  size_t accepts_ = 0;  // handshakes that run, also of turned-away callers until they have ended
  Tick crowded_log_at_;
  uint64_t turned_away_ = 0;  // callers, since the last log line about them
  uint64_t accepted_ = 0;
};

}  // namespace longhaul::peerd
