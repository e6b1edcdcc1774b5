// The last events of the coordinator, for operators (`lhctl events`).
//
// One thread appends (the coordinator loop's). Any thread reads, subscribes and unsubscribes. The
// log forgets its oldest events, and nobody waits for a reader. So a slow reader misses events; it
// can tell by a gap in the sequence numbers. Nothing here can fail.
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
  // Allocates memory for all events now, except for long texts. Otherwise the coordinator would
  // grow for days.
  explicit EventLog(size_t events_max = kEventsMax) : events_(events_max) {}
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  void Append(EventRecord event, int64_t time_us);

  // The oldest events in the log that come after sequence number `after`; at most `count`.
  std::vector<StampedEvent> Read(uint64_t after, size_t count) const;
  // The sequence number of the newest event; 0 before the first event.
  uint64_t newest() const;

  // Append() calls `wake` after each event, on the appending thread. `wake` must not block, and
  // must not call Subscribe() or Unsubscribe(). Unsubscribe() waits for a call that runs;
  // afterwards `wake` is never called again.
  using Subscription = uint64_t;
  Subscription Subscribe(std::function<void()> wake);
  void Unsubscribe(Subscription subscription);

 private:
  mutable Mutex mutex_;
  // The event with sequence number n is at index n modulo the size.
  std::vector<StampedEvent> events_ ABSL_GUARDED_BY(mutex_);
  uint64_t newest_ ABSL_GUARDED_BY(mutex_) = 0;

  // Append() holds this while it calls the wakes, so that Unsubscribe() waits for them.
  Mutex subscribers_mutex_;
  std::map<Subscription, std::function<void()>> subscribers_ ABSL_GUARDED_BY(subscribers_mutex_);
  Subscription next_subscription_ ABSL_GUARDED_BY(subscribers_mutex_) = 1;
};

}  // namespace longhaul::coordinator
