#include "peerd/paths/host_paths.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

void LogPace(const char* of, const std::string& why, uint64_t rate) {
  if (why.empty()) return;
  Log(LogLevel::kInfo,
      absl::StrCat("pace of ", of, " mbit_per_s=", rate * 8 / 1000000) + LogField("why", why));
}

}  // namespace

HostPaths::Settings HostPaths::Sent(uint64_t link, int64_t rtt_us, uint64_t bytes, Tick now) {
  const bool changed = lanes_.Sent(link, rtt_us, bytes, now);
  pace_.Sent(link, rtt_us, bytes, now);
  return {.rate = pace_.RateOf(link, now), .lanes_changed = changed};
}

void HostPaths::QueueEmptied(uint64_t link) {
  lanes_.QueueEmptied(link);
  pace_.QueueEmptied(link);
}

void HostPaths::Remove(uint64_t link) {
  lanes_.Remove(link);
  pace_.Remove(link);
  receive_pace_.Remove(link);
  moved_.erase(link);
  to_tell_.erase(link);
}

void HostPaths::Arrived(const LinkSample& sample, Tick now) {
  const LinkArrivals& arrived = sample.arrived;
  arrived_ += arrived.bytes;
  sum_.bytes += arrived.bytes;
  sum_.queued_us += arrived.queued_us;
  sum_.shared_queued_us += arrived.shared_queued_us;
  sum_.rtt_us = std::max(sum_.rtt_us, arrived.rtt_us);
  if (!sample.long_way) return;
  queues_.arrived += arrived.bytes;
  queues_.queued_us += arrived.queued_us;
  queues_.rtt_us = std::max(queues_.rtt_us, sample.rtt_us);
  if (arrived.bytes != 0) {
    round_trips_ += static_cast<double>(sample.lanes_used) * Seconds(1) /
                    static_cast<double>(std::max<int64_t>(1, sample.path_rtt_us));
    queues_.round_trips = std::max(queues_.round_trips, round_trips_);
  }
  pace_.Arrived(sample.link, arrived.bytes,
                {.shared_us = arrived.shared_queued_us, .any_us = arrived.queued_us});
  settled_ &= arrived.bytes == 0 || !sample.tries_lanes;
  if (sample.relayed || arrived.bytes + sample.taken == 0) return;
  receive_pace_.Received(sample.link, sample.path_rtt_us, sample.taken, now);
  moved_[sample.link] = {arrived.bytes, arrived.shared_queued_us, sample.in_trial};
}

HostSample HostPaths::Measure(Tick now) {
  const LinkArrivals sum = std::exchange(sum_, {});
  round_trips_ = 0;
  // While one search counts for all links, those of single links rest.
  const bool alone_settled = std::exchange(settled_, true);
  const bool settled = counts_lanes_ && lanes_.searches() ? !lanes_.tries() : alone_settled;
  lanes_.Arrived(sum.bytes, sum.bytes == 0 ? 0 : sum.shared_queued_us / sum.bytes, now);
  const std::string why = pace_.Measure(settled, now);
  LogPace("long ways", why, pace_.rate());
  const std::string why_in = receive_pace_.Measure(now);
  LogPace("senders on long ways", why_in, receive_pace_.rate());
  lanes_.SetPace(pace_.rate());
  to_tell_ = std::exchange(moved_, {});
  own_wait_us_ = OwnWaitUs(now - std::exchange(measured_at_, now));
  return {.bytes = arrived_,
          .arrivals = sum,
          .up_spare = pace_.spare(),
          .down_spare = receive_pace_.spare(),
          .up_full = pace_.PopFull(),
          .down_full = receive_pace_.PopFull(),
          .network_limits = pace_.PopNetworkLimits()};
}

// For how long packets waited in the queue of this host. There, packets of all links wait equally
// long. If packets of one link wait longer than packets of another, they wait on their way. If only
// one link sends, and little, the queue of this host is empty. If it sends much, nobody knows where
// its packets wait. `us`: the time in which the bytes arrived.
uint64_t HostPaths::OwnWaitUs(int64_t us) const {
  std::optional<uint64_t> shortest;
  int links = 0;
  uint64_t arrived = 0;
  for (const auto& [link, moved] : to_tell_) {
    if (moved.arrived == 0) continue;
    ++links;
    arrived += moved.arrived;
    shortest = std::min(shortest.value_or(moved.wait_us()), moved.wait_us());
  }
  // If more time has passed since the last call, it includes a pause of the traffic.
  if (links == 1 && us > 0 && us < Seconds(1) &&
      pace_.IsLittle(arrived * Seconds(1) / static_cast<uint64_t>(us))) {
    return 0;
  }
  return shortest.value_or(0);
}

std::optional<HostPaths::Pace> HostPaths::PopPace(uint64_t link, Tick now) {
  const auto found = to_tell_.find(link);
  if (found == to_tell_.end()) return std::nullopt;
  const Moved moved = found->second;
  to_tell_.erase(found);
  const bool tries = counts_lanes_ && (lanes_.searches() ? lanes_.in_trial() : moved.in_trial);
  return Pace{.wait_us = moved.arrived != 0 ? moved.wait_us() - own_wait_us_ : 0,
              .tries = tries,
              .rate = receive_pace_.RateOf(link, now)};
}

void HostPaths::Carried(uint64_t link, const RateSample& sample) {
  repeated_ += sample.bytes_repeated;
  pace_.Repeated(link, sample.bytes_sent, sample.bytes_repeated);
}

HostPaths::News HostPaths::MeasureRates(Tick now) {
  const uint64_t repeated = std::exchange(repeated_, 0);
  const HostLanes::Busy busy = lanes_.PopBusy();
  News news{.lanes_changed = lanes_.Repeated(busy.bytes, repeated)};
  if (!congestion_) return news;
  CongestionChoice::Sample sample = std::exchange(queues_, {});
  sample.us = busy.us;
  sample.bytes = busy.bytes;
  sample.bytes_repeated = repeated;
  const std::string why = congestion_->Add(sample, now);
  if (why.empty()) return news;
  Log(LogLevel::kInfo,
      absl::StrCat("congestion control of long ways used=", congestion_->in_use()) +
          LogField("why", why));
  news.congestion_changed = true;
  return news;
}

}  // namespace longhaul::peerd
