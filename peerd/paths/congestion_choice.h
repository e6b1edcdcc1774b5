// Chooses TCP's congestion control for the long ways of this host by what was measured.
//
// Begins with the system's default. There are two reasons to try another control:
//   - The default repeats many bytes, for instance bbr: the queues on these paths may be too short
//     for it. Then cubic is tried.
//   - The default is cubic, and bytes are repeated though packets hardly wait in queues. Cubic
//     takes every loss for a full queue, and sends slower. Then bbr is tried, which does not
//     (Cardwell et al., 2016). With losses at random, connections of cubic cannot be much faster
//     than its model says (Mathis et al., 1997; RFC 8312, 5.1). If they are, losses came in bursts,
//     from queues that were full for a moment, as when many connections begin.
// The choice compares one measurement of each. The worth of a control is the bytes a second that it
// carries, less kRepeatCost for each byte that it repeats, since repeated bytes fill queues of
// other hosts.
//   - Where cubic loses packets at random, bbr is kept if it carries half as much again.
//   - A control that repeats clearly fewer bytes is kept unless its rate is below two fifths of
//     the worth of the other one. The hosts of an op wait for each other, so a rate says little of
//     one host's control.
//   - Otherwise cubic is kept unless the default is clearly better, and bbr only if it is clearly
//     better than the default, since it takes more than its part of a path from cubic.
// A control under trial loses only by two measurements. The loser is not tried again for a while.
// If it repeated clearly fewer bytes, or many although packets waited, it is tried again sooner.
// The winner is questioned again if it repeats much later, or if its rate has fallen by half, in
// two measurements in a row.
//
// Pauses between ops do not count. Plain value: no clock.
#pragma once

#include <cstdint>
#include <string>

#include "base/tick.h"

namespace longhaul::peerd {

class CongestionChoice {
 public:
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

  // Returns the control to try beside this default: cubic, or bbr if the default is cubic.
  static std::string OtherThan(const std::string& system_default);

  // `other`: the control to try; empty: the system does not offer it, and the default stays.
  CongestionChoice(std::string system_default, std::string other);

  // Returns why in_use() has changed, for the log; empty: it has not.
  std::string Add(const Sample& sample, Tick now);
  // The control of long ways from now on.
  const std::string& in_use() const { return names_[now_]; }

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
  // Whether bytes were repeated though packets hardly waited in queues, and the control in use
  // carried no more than it can at such losses.
  bool LosesAtRandom(const Sample& sum) const;
  bool HasFallen(const Measured& measured) const;
  bool FearsLosses() const;
  bool IsReasonToTry(const Measured& measured) const;
  // Clearly fewer than the control before.
  bool RepeatsFewer(const Measured& measured) const;
  bool IsWorse(const Measured& measured) const;
  std::string Switch(const std::string& why);

  const std::string names_[2];  // the default and the other
  int now_ = 0;
  bool trying_ = false;
  bool doubted_ = false;       // the last measurement spoke against the control in use
  Measured before_;            // trying: of the control that was in use before
  uint64_t rate_won_ = 0;      // of the control in use, when it won; 0: it was never compared
  Tick try_after_;             // no trial until then
  int64_t soon_again_us_ = 0;  // the loser is tried again after this time; 0: kAgainUs
  int64_t settle_us_ = 0;
  Sample sum_;
};

}  // namespace longhaul::peerd
