#include "peerd/paths/link_path.h"

#include <algorithm>

namespace longhaul::peerd {
namespace {

// A slower lane would look as if it were broken. If a link uses so many lanes, TCP has to find its
// rate without a limit.
constexpr uint64_t kLaneRateMin = 256 << 10;

}  // namespace

void LinkPath::LoseLane(uint32_t index) {
  schedule_.Remove(index);
  meter_.Forget(index);
}

void LinkPath::Asks(uint32_t index, bool anew, Tick now) {
  // Only the first segment of a batch counts as a new request.
  if (anew) schedule_.Asks(index, now);
  // While other links are busy, too, all use the number of lanes that is found for the host.
  if (long_way()) schedule_.SetCrowded(host_->lanes().lanes(), host_->lanes().found());
}

LinkPath::Given LinkPath::Gave(uint32_t index, uint32_t bytes, Tick now) {
  Given given;
  if (long_way()) {
    const HostPaths::Settings host = host_->Sent(id_, schedule_.rtt_us(), bytes, now);
    given.host_lanes_changed = host.lanes_changed;
    const uint64_t each = host.rate / std::max(schedule_.used(now), 1u);
    given.lane_rate = host.rate == 0 ? 0 : std::max(each, kLaneRateMin);
  }
  given.lanes_changed = schedule_.Gave(index, bytes, now);
  return given;
}

void LinkPath::QueueEmptied() {
  schedule_.QueueEmptied();
  host_->QueueEmptied(id_);
}

HostPaths::LinkSample LinkPath::SampleOf(const LinkArrivals& arrived, Tick now) const {
  return {.link = id_,
          .arrived = arrived,
          .long_way = long_way(),
          .path_rtt_us = schedule_.rtt_us(),
          .lanes_used = schedule_.used(now),
          .tries_lanes = schedule_.tries()};
}

}  // namespace longhaul::peerd
