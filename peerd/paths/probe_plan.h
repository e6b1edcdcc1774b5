// Decides which link this peer probes next, and when.
//
// A peer probes one link at a time, and at most one in each interval. Each peer draws a random
// moment of the first interval for its first probe, so that peers do not all probe at the same
// time. A link is probed if nothing has measured it for kFresh. Links without traffic come first,
// because a probe takes bandwidth from ops. The tie-break is the time of the last probe: the oldest
// comes first. Probes take at most one part in kShare of the time.
//
// Plain value: no clock, no thread.
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
  std::optional<Tick> measured;  // when its rate was last measured; none: never
  bool in_use = false;           // ops have sent on it lately
};

class ProbePlan {
 public:
  // A link is not probed while its last measurement is younger than this. The coordinator forgets a
  // measurement after 900 s.
  static constexpr int64_t kFresh = Seconds(600);
  // After a probe that took a second, no other begins for 20 seconds.
  static constexpr int64_t kShare = 20;

  // `interval_us` 0: no link is ever probed.
  ProbePlan(PeerId self, int64_t interval_us);

  // Returns the link to probe now. None: it is too early, or every link was measured lately.
  std::optional<PeerId> Next(const std::vector<ProbeCandidate>& links, Tick now);
  // The probe that Next() asked for is over, whether it has succeeded or failed.
  void Ended(Tick begun, Tick now);

 private:
  uint64_t Draw(PeerId peer) const;

  const PeerId self_;
  const int64_t interval_us_;
  bool begun_ = false;
  Tick due_;                      // no probe begins before this time
  std::map<PeerId, Tick> tried_;  // when each link was last chosen
};

}  // namespace longhaul::peerd
