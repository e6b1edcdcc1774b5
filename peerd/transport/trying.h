// Whether a peer answers at its data port. The try connects and sends a HELLO that names the peer
// and an epoch that does not exist. The answer *unknown epoch* shows that the right peer listens,
// and that bytes pass both ways.
//
// A newcomer makes members connect to the addresses that it names. So members tell it little:
// neither what answered in its place, nor why nothing answered (the log of the member says that).
// And a member tries few addresses in a minute.
//
// Threads: the ring's. `done` is called from within Ring::RunOnce().
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "base/ids.h"
#include "base/rarely.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/alarm.h"
#include "peerd/transport/handshakes.h"
#include "peerd/transport/resolver.h"

namespace longhaul::peerd {

class Trying {
 public:
  // `error` says whether anything answered at the last address tried; empty: the peer answers.
  using Done = absl::AnyInvocable<void(const std::string& error)>;

  Trying(Ring* ring, Alarm* alarm, Handshakes* handshakes, Resolver* resolver)
      : ring_(ring), alarm_(alarm), handshakes_(handshakes), resolver_(resolver) {}

  // Tries the endpoints in order. Calls `done` by `deadline`, never from within Begin().
  void Begin(PeerId peer, const std::vector<std::string>& endpoints, Tick deadline, Done done);
  // Dials the next addresses, and ends trials whose time is up. Returns when to call again.
  Tick Work(Tick now);
  void Close() { trials_.clear(); }

 private:
  struct Trial {
    PeerId peer;
    Tick deadline;
    Done done;
    std::deque<SocketAddress> candidates;
    int resolving = 0;
    bool dialling = false;
    std::string error;
  };
  // Whether to try this address now. Counts it.
  bool Allows(PeerId peer, const std::string& address, Tick now);
  void Resolve(uint64_t id, Trial* trial, const std::string& endpoint);
  void Dial(uint64_t id, Trial* trial, Tick now);
  void OnDialled(uint64_t id, LaneDial* dial);
  void End(uint64_t id, const std::string& error);

  Ring* const ring_;
  Alarm* const alarm_;
  Handshakes* const handshakes_;
  Resolver* const resolver_;
  uint64_t last_ = 0;
  std::map<uint64_t, Trial> trials_;
  Rarely<std::string> log_{Seconds(60), 64};  // by address
  // What was tried in this minute, and did not answer as the peer does.
  Tick minute_;
  std::map<std::string, int> tries_;                   // by address
  std::map<PeerId, std::set<std::string>> addresses_;  // by the peer that named them
};

}  // namespace longhaul::peerd
