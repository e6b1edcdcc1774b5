// Tells operators, in bounded number, that peers have found inputs to ops that look wrong.
//
// Plain value: no clock, no thread.
#pragma once

#include <utility>

#include "base/ids.h"
#include "base/rarely.h"
#include "base/tick.h"
#include "coordinator/core/epoch_state.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// At most one event in this time says that one peer suspects the contributions of another one, and
// at most so many such pairs of a group have events in that time. Peers hold reports back, too; but
// a hostile one need not.
inline constexpr int64_t kSuspectIntervalUs = Seconds(10);
inline constexpr size_t kSuspectsMax = 1024;

class SuspectContributions {
 public:
  void Suspect(PeerId reporter, const control::ContributionSuspect& suspect,
               const EpochState& epochs, const GroupStep& step);

 private:
  // The reports that became events, by reporter and reported peer.
  Rarely<std::pair<PeerId, PeerId>> told_{kSuspectIntervalUs, kSuspectsMax};
};

}  // namespace longhaul::coordinator
