// Limits what other hosts send this host on long ways, so that all senders together do not overrun
// the queue in front of the access link of this host.
//
// Each sender sees only its own lanes, and fills the queue with them. This host sees what comes
// from all senders. A sender tells how long its packets wait on the way here, apart from the time
// in the queue of its own host. If the packets of all senders wait, this host tells each sender how
// fast it may send. The rules are the rules of HostPace: what arrives in all is limited to about
// what the access link carries, and each sender gets a part in proportion to what it sent in the
// burst before.
//
// Plain value: no clock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/tick.h"
#include "peerd/paths/host_pace.h"

namespace longhaul::peerd {

class ReceivePace {
 public:
  // What a sender has told of the way to this host (FrameType::kPace).
  struct Told {
    uint64_t wait_us = 0;   // for how long its packets wait, apart from its own queue
    uint64_t repeated = 0;  // bytes that TCP has sent again on this link, in all
    bool tries = false;     // it tries another number of lanes, and must not be limited
  };

  void OnTold(uint64_t link, const Told& told);
  // `bytes` have come on this link, on a long way, since the last Measure().
  void Received(uint64_t link, int64_t rtt_us, uint64_t bytes, Tick now);
  void Remove(uint64_t link);
  // Judges what was received. Call it some times in a second. Returns what HostPace::Measure()
  // does.
  std::string Measure(Tick now);

  // Returns what all senders together may send, in bytes per second. 0: there is no limit.
  uint64_t rate() const { return pace_.rate(); }
  // As HostPace::spare(): what this host could receive.
  uint64_t spare() const { return pace_.spare(); }
  // As HostPace::PopFull(), of the queue in front of this host, if several hosts send.
  std::optional<bool> PopFull() { return pace_.PopFull(); }
  // Returns what the sender of this link may send now, in bytes per second. 0: there is no limit,
  // or the sender tries another number of lanes, and a limit would hide whether more carry more.
  uint64_t RateOf(uint64_t link, Tick now) const;

 private:
  struct Sender {
    Told told;
    uint64_t repeated = 0;  // told.repeated, as Measure() saw it last
    uint64_t received = 0;  // since the last Measure()
  };

  // Senders are seen ten times in a second, so a short pause is none. A single sender finds the
  // rate of its way by itself.
  HostPace pace_{
      HostPace::Options{.pause_us_min = Millis(250), .links_min = 2, .free_trials = false}};
  std::map<uint64_t, Sender> senders_;
};

}  // namespace longhaul::peerd
