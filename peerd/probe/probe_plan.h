// Which link is probed next, and when.
//
// One at a time, and one in an interval: a group of N peers probes N links in that time, each peer
// at another moment. A link is probed if its traffic has not shown for long what it carries: of
// those that carry nothing just now the one that was tried least recently, and only then of the
// others, for which ops do not have all of the link meanwhile. Probes take at most a share of the
// time (kShare).
//
// Plain value: no clock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"

namespace longhaul::peerd {

struct ProbeCandidate {
  PeerId peer;
  std::optional<Tick> measured;  // when its bandwidth was seen last; none: never
  bool in_use = false;
};

class ProbePlan {
 public:
  // A measurement that is younger is good enough. The coordinator forgets it half as long later.
  static constexpr int64_t kFresh = Seconds(600);
  // A probe that took a second is followed by no other for twenty.
  static constexpr int64_t kShare = 20;

  // `interval_us` 0: nothing is probed.
  ProbePlan(PeerId self, int64_t interval_us);

  // The link to probe now, if it is time.
  std::optional<PeerId> Next(const std::vector<ProbeCandidate>& links, Tick now);
  // A probe that Next() named is over, well or not.
  void Ended(Tick begun, Tick now);

 private:
  uint64_t Draw(PeerId peer) const;

  const PeerId self_;
  const int64_t interval_us_;
  bool begun_ = false;
  Tick due_;
  std::map<PeerId, Tick> tried_;
};

}  // namespace longhaul::peerd
