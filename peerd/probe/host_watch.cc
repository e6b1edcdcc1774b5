#include "peerd/probe/host_watch.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "peerd/probe/news.h"

namespace longhaul::peerd {

void HostWatch::Add(Tick at, uint64_t arrived, uint64_t received, uint32_t rtt_us, bool op_ended,
                    std::optional<bool> up_full, std::optional<bool> down_full) {
  up_.Add(at, arrived, rtt_us);
  down_.Add(at, received, rtt_us);
  up_queue_.Saw(up_full);
  down_queue_.Saw(down_full);
  if (!op_ended) return;
  up_.OpEnded(up_queue_.PopOp());
  down_.OpEnded(down_queue_.PopOp());
}

void HostWatch::Queue::Saw(std::optional<bool> full_now) {
  if (full_now) full = full.value_or(false) || *full_now;
}

bool HostWatch::Queue::PopOp() {
  was_full = std::exchange(full, std::nullopt).value_or(was_full);
  return was_full;
}

bool HostWatch::Holds(int64_t waiting_us, uint32_t rtt_us, size_t waiting, size_t links) const {
  const int64_t stretch = std::max(kHeld, kHeldRoundTrips * int64_t{rtt_us});
  const double part = kHeldPart * static_cast<double>(waiting) / static_cast<double>(links);
  return waiting_us >= 2 * stretch && up_.Slack(stretch, part);
}

bool HostWatch::PopReport(Tick now, control::LinkReport* report) {
  if (up() == 0 && down() == 0) return false;
  if (!IsNews(up(), said_up_) && !IsNews(down(), said_down_) && now - said_at_ < kReportRepeat) {
    return false;
  }
  said_up_ = report->up_bytes_per_second = up();
  said_down_ = report->down_bytes_per_second = down();
  said_at_ = now;
  return true;
}

void HostWatch::SayAgain() { said_at_ = kNotSaid; }

}  // namespace longhaul::peerd
