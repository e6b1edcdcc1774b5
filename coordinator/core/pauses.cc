#include "coordinator/core/pauses.h"

#include <algorithm>

namespace longhaul::coordinator {

Tick Pauses::Until(const Endpoints& endpoints) const {
  const auto pause = pauses_.find(endpoints);
  return pause == pauses_.end() ? Tick{INT64_MIN / 2} : pause->second.until;
}

int64_t Pauses::Begin(const Endpoints& endpoints, bool held, Tick now) {
  if (pauses_.size() >= kPausesMax && !pauses_.contains(endpoints)) {
    pauses_.erase(std::min_element(
        pauses_.begin(), pauses_.end(),
        [](const auto& a, const auto& b) { return a.second.until < b.second.until; }));
  }
  Pause& pause = pauses_[endpoints];
  const auto& [first, longest] = held ? kAdmissionPause : kTrialPause;
  const int64_t us = detect_us_ * std::min(first << std::min(pause.failures, 8u), longest);
  ++pause.failures;
  pause.until = now + us;
  return us;
}

}  // namespace longhaul::coordinator
