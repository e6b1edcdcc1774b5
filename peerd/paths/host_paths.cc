#include "peerd/paths/host_paths.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul::peerd {
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
}

void HostPaths::Arrived(const LinkSample& sample) {
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
}

HostSample HostPaths::Measure(Tick now) {
  const LinkArrivals sum = std::exchange(sum_, {});
  round_trips_ = 0;
  // While one search counts for all links, those of single links rest.
  const bool alone_settled = std::exchange(settled_, true);
  const bool settled = counts_lanes_ && lanes_.searches() ? !lanes_.tries() : alone_settled;
  lanes_.Arrived(sum.bytes, sum.bytes == 0 ? 0 : sum.shared_queued_us / sum.bytes, now);
  const std::string why = pace_.Measure(settled, now);
  if (!why.empty()) {
    Log(LogLevel::kInfo, absl::StrCat("pace of long ways mbit_per_s=", pace_.rate() * 8 / 1000000) +
                             LogField("why", why));
  }
  lanes_.SetPace(pace_.rate());
  return {.bytes = arrived_, .arrivals = sum, .up_full = pace_.PopFull()};
}

void HostPaths::Carried(const RateSample& sample) {
  repeated_ += sample.bytes_repeated;
  pace_.Repeated(sample.bytes_sent, sample.bytes_repeated);
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
