#include "coordinator/loop/event_log.h"

#include <algorithm>
#include <utility>

namespace longhaul::coordinator {

void EventLog::Append(EventRecord event, int64_t time_us) {
  {
    MutexLock lock(&mutex_);
    events_.push_back({++newest_, time_us, std::move(event)});
    if (events_.size() > events_max_) events_.pop_front();
  }
  MutexLock lock(&subscribers_mutex_);
  for (const auto& [subscription, wake] : subscribers_) wake();
}

std::vector<StampedEvent> EventLog::Read(uint64_t after, size_t count) const {
  MutexLock lock(&mutex_);
  if (events_.empty() || after >= newest_) return {};
  const uint64_t oldest = events_.front().sequence;
  const size_t first = after < oldest ? 0 : static_cast<size_t>(after + 1 - oldest);
  const size_t end = std::min(events_.size(), first + std::min(count, events_.size()));
  return {events_.begin() + static_cast<ptrdiff_t>(first),
          events_.begin() + static_cast<ptrdiff_t>(end)};
}

uint64_t EventLog::newest() const {
  MutexLock lock(&mutex_);
  return newest_;
}

EventLog::Subscription EventLog::Subscribe(std::function<void()> wake) {
  MutexLock lock(&subscribers_mutex_);
  subscribers_.emplace(next_subscription_, std::move(wake));
  return next_subscription_++;
}

void EventLog::Unsubscribe(Subscription subscription) {
  MutexLock lock(&subscribers_mutex_);
  subscribers_.erase(subscription);
}

}  // namespace longhaul::coordinator
