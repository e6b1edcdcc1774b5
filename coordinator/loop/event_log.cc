#include "coordinator/loop/event_log.h"

#include <algorithm>
#include <utility>

namespace longhaul::coordinator {

void EventLog::Append(EventRecord event, int64_t time_us) {
  {
    MutexLock lock(&mutex_);
    ++newest_;
    events_[newest_ % events_.size()] = {newest_, time_us, std::move(event)};
  }
  MutexLock lock(&subscribers_mutex_);
  for (const auto& [subscription, wake] : subscribers_) wake();
}

std::vector<StampedEvent> EventLog::Read(uint64_t after, size_t count) const {
  MutexLock lock(&mutex_);
  if (after >= newest_) return {};
  const uint64_t forgotten = newest_ - std::min<uint64_t>(newest_, events_.size());
  const uint64_t first = std::max(after, forgotten) + 1;
  const uint64_t number = std::min<uint64_t>(count, newest_ + 1 - first);
  std::vector<StampedEvent> events;
  events.reserve(number);
  for (uint64_t n = first; n < first + number; ++n) events.push_back(events_[n % events_.size()]);
  return events;
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
