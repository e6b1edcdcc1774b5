#include "coordinator/core/pauses.h"

#include <algorithm>

namespace longhaul::coordinator {

bool Pauses::Waits(const Endpoints& endpoints, Tick now) const {
  const auto pause = pauses_.find(endpoints);
  return pause != pauses_.end() && now < pause->second.until;
}

int64_t Pauses::Begin(const Endpoints& endpoints, Tick now) {
  if (pauses_.size() >= kPausesMax && !pauses_.contains(endpoints)) {
    pauses_.erase(std::min_element(
        pauses_.begin(), pauses_.end(),
        [](const auto& a, const auto& b) { return a.second.until < b.second.until; }));
  }
  Pause& pause = pauses_[endpoints];
  const int64_t us =
      detect_us_ * std::min(kPauseMinDetects << std::min(pause.failures, 4u), kPauseMaxDetects);
  ++pause.failures;
  pause.until = now + us;
  return us;
}

void Pauses::AddTo(Digester* digest) const {
  digest->Add(pauses_.size());
  for (const auto& [endpoints, pause] : pauses_) {
    digest->Add(endpoints).Add(pause.failures).Add(pause.until);
  }
}

}  // namespace longhaul::coordinator
