// One timer for many users: it goes off at the earliest tick that any of them asked for.
//
// Threads: the ring's.
#pragma once

#include "absl/functional/any_invocable.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

class Alarm {
 public:
  // `off` gets the tick for which the timer was set. The ring refers to the alarm until idle().
  Alarm(Ring* ring, absl::AnyInvocable<void(Tick)> off) : ring_(ring), off_(std::move(off)) {}
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Goes off at `at` or before. kNever: no change.
  void Set(Tick at);
  // Does not go off any more until Set() is called again.
  void Stop();
  bool idle() const { return timers_ == 0; }

 private:
  Ring* const ring_;
  absl::AnyInvocable<void(Tick)> off_;
  IoId timer_ = 0;
  Tick at_ = kNever;
  uint64_t serial_ = 0;
  int timers_ = 0;  // timers that have not called back
};

}  // namespace longhaul::peerd
