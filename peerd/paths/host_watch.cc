#include "peerd/paths/host_watch.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "peerd/paths/news.h"
#include "peerd/paths/samples.h"

namespace longhaul::peerd {

void HostWatch::Add(Tick at, uint64_t arrived, uint64_t received, uint32_t rtt_us, bool op_ended,
                    const Queues& queues) {
  if (queues.waiting_us >= kBusy || queues.up_full.value_or(false)) busy_at_ = at;
  up_.Add(at, arrived, rtt_us, at - busy_at_ <= (rtt_us >= kLongWayUs ? kBusyLasts : 0));
  down_.Add(at, received, rtt_us);
  if (!op_ended) return;
  up_.OpEnded();
  down_.OpEnded();
}

bool HostWatch::Holds(int64_t waiting_us, uint32_t rtt_us, size_t waiting, size_t links) const {
  const int64_t stretch = std::max(kHeld, kHeldRoundTrips * int64_t{rtt_us});
  const double part = kHeldPart * static_cast<double>(waiting) / static_cast<double>(links);
  return waiting_us >= 2 * stretch && up_.Slack(stretch, part);
}

bool HostWatch::PopReport(Tick now, control::LinkReport* report) {
  const bool no_limit = up_.bytes_per_second() != 0 && !up_.limits();
  const uint64_t up_now = no_limit ? control::kNoLimitBytesPerSecond : up();
  if (up_now == 0 && down() == 0) return false;
  if (!IsNews(up_now, said_up_) && !IsNews(down(), said_down_) && now - said_at_ < kReportRepeat) {
    return false;
  }
  said_up_ = report->up_bytes_per_second = up_now;
  said_down_ = report->down_bytes_per_second = down();
  said_at_ = now;
  return true;
}

void HostWatch::SayAgain() { said_at_ = kNotSaid; }

}  // namespace longhaul::peerd
