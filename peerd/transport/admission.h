// The data port: takes callers in, and decides who of them gets a lane.
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
#include "peerd/transport/run_table.h"
#include "peerd/transport/tunnels.h"

namespace longhaul::peerd {

class AdmissionOwner {
 public:
  virtual ~AdmissionOwner() = default;
  // Whether one more connection of a probe can be taken in now.
  virtual bool HasRoomForProbe() const = 0;
  // A caller that has proved who it is, from `remote`. It fits what is there.
  virtual void OnAdmitted(Peering* p, int fd, const LaneHello& hello,
                          const SocketAddress& remote) = 0;
};

class Admission {
 public:
  Admission(Ring* ring, const TransportOptions* options, Handshakes* handshakes, RunTable* runs,
            Tunnels* tunnels, AdmissionOwner* owner)
      : ring_(ring),
        options_(options),
        handshakes_(handshakes),
        runs_(runs),
        tunnels_(tunnels),
        owner_(owner) {}

  // Unavailable: the address cannot be bound.
  absl::Status Listen(const SocketAddress& address);
  // As it is bound, port filled in.
  const std::string& address() const { return address_; }
  // Listens no more.
  void Close();
  // The kernel refers to nothing of it.
  bool idle() const { return accept_ == 0; }
  uint64_t accepted() const { return accepted_; }
  uint64_t refused() const { return refused_; }

 private:
  void AcceptNext();
  void OnAccepted(int value);
  void OnHandshake(uint64_t caller, LaneAccept* handshake);
  LaneVerdict Judge(const LaneHello& hello) const;
  LaneResult JudgeControl(const Peering& p, const LaneHello& hello) const;
  void MakeRoom();

  Ring* const ring_;
  const TransportOptions* const options_;
  Handshakes* const handshakes_;
  RunTable* const runs_;
  Tunnels* const tunnels_;
  AdmissionOwner* const owner_;
  std::string address_;
  int listen_fd_ = -1;
  IoId accept_ = 0;
  bool closing_ = false;
  bool warned_ = false;
  Callers callers_;
  std::map<uint64_t, LaneAccept*> accepting_;  // those
  size_t accepts_ = 0;                         // those and the ones that are ending
  Tick crowded_log_at_;
  uint64_t turned_away_ = 0;  // since the last log
  uint64_t accepted_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace longhaul::peerd
