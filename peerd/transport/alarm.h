// One timer for many who wait: it goes off at the earliest tick that anybody asked for.
//
// Threads: the ring's.
#pragma once

#include "absl/functional/any_invocable.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

class Alarm {
 public:
  // `ring` calls `off` with the tick for which it was set. The ring refers to the alarm until
  // idle().
  Alarm(Ring* ring, absl::AnyInvocable<void(Tick)> off) : ring_(ring), off_(std::move(off)) {}
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Goes off then, or before; kNever: no change.
  void Set(Tick at);
  // Does not go off any more, unless it is set again.
  void Stop();
  bool idle() const { return timers_ == 0; }

 private:
  Ring* const ring_;
  absl::AnyInvocable<void(Tick)> off_;
  IoId timer_ = 0;
  Tick at_ = kNever;
  uint64_t serial_ = 0;
  int timers_ = 0;  // started and not called back
};

}  // namespace longhaul::peerd
