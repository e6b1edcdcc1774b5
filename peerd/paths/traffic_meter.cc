#include "peerd/paths/traffic_meter.h"

#include <algorithm>
#include <utility>

namespace longhaul::peerd {

void TrafficMeter::Add(Tick at, uint64_t bytes, uint32_t rtt_us, bool busy) {
  if (samples_.empty()) return Begin({at, bytes}, 0);
  const auto [last_at, last_bytes] = samples_.back();
  if (at <= last_at) return;
  if (at - last_at >= kPause && bytes - last_bytes < kPauseBytes) return Begin({at, bytes}, 0);
  if (last_at - samples_.front().first >= kBurst) Begin(samples_.back(), fastest_);
  samples_.emplace_back(at, bytes);
  if (samples_.size() > kSamplesMax) samples_.pop_front();
  const uint64_t rate = FastestUntilNow(rtt_us);
  if (rate == 0) return;
  fastest_ = std::max(fastest_, rate);
  clock_ += std::min(at - figure_at_, Seconds(1));
  figure_at_ = at;
  Keep(rate, busy);
}

void TrafficMeter::OpEnded() {
  if (samples_.empty()) return;
  const uint64_t bytes = samples_.back().second;
  if (bytes - std::exchange(op_bytes_, bytes) >= kOpBytes) ++ops_;
}

void TrafficMeter::Begin(std::pair<Tick, uint64_t> first, uint64_t before) {
  samples_ = {first};
  before_ = before;
  fastest_ = 0;
}

TrafficMeter::Samples::const_iterator TrafficMeter::Back(int64_t us) const {
  const auto first =
      std::upper_bound(samples_.begin(), samples_.end(), samples_.back().first + -us,
                       [](Tick tick, const auto& sample) { return tick < sample.first; });
  return first == samples_.begin() ? samples_.end() : first - 1;
}

uint64_t TrafficMeter::FastestUntilNow(uint32_t rtt_us) const {
  const auto youngest = Back(std::max(clumps_.stretch, 2 * int64_t{rtt_us}));
  if (youngest == samples_.end()) return 0;
  const auto [at, bytes] = samples_.back();
  const int64_t late =
      std::clamp(int64_t{rtt_us} * clumps_.late_percent / 100, kLateMin, clumps_.late_max);
  uint64_t fastest = 0;
  for (auto sample = samples_.begin(); sample <= youngest; ++sample) {
    const auto us = static_cast<uint64_t>(at - sample->first + late);
    fastest = std::max(fastest, (bytes - sample->second) * 1000000 / us);
  }
  return fastest;
}

void TrafficMeter::Keep(uint64_t rate, bool busy) {
  if (!busy && rate <= bytes_per_second()) return;
  while (!figures_.empty() && figures_.back().rate <= rate) figures_.pop_back();
  figures_.push_back({clock_, ops_, rate, busy});
  while (figures_.size() > 1 && Old(figures_.front())) figures_.pop_front();
  if (figures_.size() > kSamplesMax) figures_.pop_back();
}

bool TrafficMeter::Old(const Figure& figure) const {
  const int64_t us = clock_ - figure.clock;
  return us > kWindowMax || (us > kWindow && ops_ - figure.ops >= kOps);
}

bool TrafficMeter::Slack(int64_t us, double part) const {
  if (samples_.empty()) return false;
  const auto first = Back(us);
  if (first == samples_.end()) return false;
  const auto [at, bytes] = samples_.back();
  const double seconds = static_cast<double>(at - first->first) / 1e6;
  const auto fastest = static_cast<double>(std::max(fastest_, before_));
  return static_cast<double>(bytes - first->second) < fastest * part * seconds;
}

}  // namespace longhaul::peerd
