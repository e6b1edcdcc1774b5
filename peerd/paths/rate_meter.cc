#include "peerd/paths/rate_meter.h"

#include <algorithm>

namespace longhaul::peerd {

void RateMeter::Add(Tick at, uint64_t bytes, uint32_t rtt_us) {
  const int64_t stretch = std::max(kStretch, 2 * int64_t{rtt_us});
  if (samples_.empty()) risen_at_ = at;
  samples_.emplace_back(at, bytes);
  if (samples_.size() > kSamplesMax) samples_.pop_front();
  // The youngest sample that is at least a stretch old. Older samples are of use only if the round
  // trip turns out to be longer.
  auto first = std::upper_bound(samples_.begin(), samples_.end(), at + -stretch,
                                [](Tick tick, const auto& sample) { return tick < sample.first; });
  if (first == samples_.begin()) return;
  --first;
  const int64_t us = at - first->first;
  best_ = std::max(best_, (bytes - first->second) * 1000000 / static_cast<uint64_t>(us));
  if (best_ > risen_to_ + risen_to_ / 20) {
    risen_to_ = best_;
    risen_at_ = at;
  }
  settled_ = best_ > 0 && at - risen_at_ >= 3 * stretch;
}

}  // namespace longhaul::peerd
