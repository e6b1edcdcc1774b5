// What happened lately, for operators who look now or follow along.
//
// One thread appends, any thread reads. A reader that is slower than events come loses the oldest
// ones and sees it by the gap in the sequence numbers; nobody waits for a reader.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

inline constexpr size_t kEventsMax = 10000;

struct StampedEvent {
  uint64_t sequence = 0;  // from 1, without gaps
  int64_t time_us = 0;    // since 1970
  EventRecord event;
};

class EventLog {
 public:
  // All memory but that of long texts is taken here, so that a coordinator does not grow for days.
  explicit EventLog(size_t events_max = kEventsMax) : events_(events_max) {}
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  void Append(EventRecord event, int64_t time_us);

  // The oldest remembered events after sequence number `after`, at most `count`.
  std::vector<StampedEvent> Read(uint64_t after, size_t count) const;
  // Sequence number of the newest event; 0 before the first.
  uint64_t newest() const;

  // `wake` is called after each Append(), on the appending thread; it must not block, nor
  // subscribe or unsubscribe. After Unsubscribe() returns it is not called any more.
  using Subscription = uint64_t;
  Subscription Subscribe(std::function<void()> wake);
  void Unsubscribe(Subscription subscription);

 private:
  mutable Mutex mutex_;
  // The event of sequence number n is at n modulo the size.
  std::vector<StampedEvent> events_ ABSL_GUARDED_BY(mutex_);
  uint64_t newest_ ABSL_GUARDED_BY(mutex_) = 0;

  // Held while the wakes run, so that Unsubscribe() waits for them.
  Mutex subscribers_mutex_;
  std::map<Subscription, std::function<void()>> subscribers_ ABSL_GUARDED_BY(subscribers_mutex_);
  Subscription next_subscription_ ABSL_GUARDED_BY(subscribers_mutex_) = 1;
};

}  // namespace longhaul::coordinator
