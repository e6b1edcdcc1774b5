// Chooses TCP's congestion control for the long ways of this host by what was measured.
//
// Begins with cubic, whatever the system's default is: bbr overruns the queues of access links,
// which connections of several hosts share. If bytes are repeated though packets hardly wait in
// queues, bbr is tried. Cubic takes every loss for a full queue, and sends slower; bbr does not
// (Cardwell et al., 2016). With losses at random, connections of cubic cannot be much faster than
// its model says (Mathis et al., 1997; RFC 8312, 5.1). If they are, losses came in bursts, from
// queues that were full for a moment, as when many connections begin.
//
// The choice compares one measurement of each. The worth of a control is the bytes a second that it
// carries, less kRepeatCost for each byte that it repeats, since repeated bytes fill queues of
// other hosts. bbr has to be clearly better: it takes more than its part of a path from cubic.
// Where cubic loses packets at random, bbr is also better if it carries half as much again. A
// control under trial loses only by two measurements, and is not tried again for a while. bbr is
// questioned again if it repeats much later.
//
// Pauses between ops do not count. Plain value: no clock.
#pragma once

#include <cstdint>
#include <string>

#include "base/tick.h"

namespace longhaul::peerd {

class CongestionChoice {
 public:
  static constexpr char kFirst[] = "cubic";
  static constexpr char kOther[] = "bbr";

  // What the long ways of the host did since the last sample.
  struct Sample {
    int64_t us = 0;               // without pauses between ops
    uint64_t bytes = 0;           // sent in that time, each counted once
    uint64_t bytes_repeated = 0;  // sent again by TCP
    // Bytes that have arrived, and for how long they waited in queues of the path, added up.
    uint64_t arrived = 0;
    uint64_t queued_us = 0;
    int64_t rtt_us = 0;  // the longest round trip of these paths
    // How many round trips all lanes of links that carried bytes make in a second, together.
    double round_trips = 0;
  };

  explicit CongestionChoice(bool offers_bbr) : offers_bbr_(offers_bbr) {}

  // Returns why in_use() has changed, for the log; empty: it has not.
  std::string Add(const Sample& sample, Tick now);
  // The control of long ways from now on.
  std::string in_use() const { return bbr_ ? kOther : kFirst; }

 private:
  static constexpr uint64_t kRepeatCost = 3;
  struct Measured {
    uint64_t rate = 0;       // bytes a second
    uint64_t per_mille = 0;  // of the bytes, repeated
    bool lossy = false;      // LosesAtRandom()
    uint64_t worth() const {
      const uint64_t cost = kRepeatCost * per_mille;
      return cost < 1000 ? rate / 1000 * (1000 - cost) : 0;
    }
  };
  std::string Judge(const Measured& measured, Tick now);
  // Whether bytes were repeated though packets hardly waited in queues, and cubic carried no more
  // than it can at such losses.
  static bool LosesAtRandom(const Sample& sum);
  std::string Switch(const std::string& why);

  const bool offers_bbr_;
  bool bbr_ = false;      // is in use
  bool trying_ = false;   // the control in use, after the other one
  bool doubted_ = false;  // trying: the last measurement spoke against the control in use
  Measured before_;       // trying: of the control that was in use before
  Tick try_after_;        // no trial until then
  int64_t settle_us_ = 0;
  Sample sum_;
};

}  // namespace longhaul::peerd
