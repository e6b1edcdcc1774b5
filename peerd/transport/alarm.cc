#include "peerd/transport/alarm.h"

#include <algorithm>

namespace longhaul::peerd {

void Alarm::Set(Tick at) {
  if (at == kNever) return;
  // Never set the timer to a past tick: `off` would take the delay for time in which this process
  // stood still.
  at = std::max(at, ring_->Now());
  if (timer_ != 0 && at_ <= at) return;
  if (timer_ != 0) ring_->Cancel(timer_);
  at_ = at;
  ++timers_;
  timer_ = ring_->Timeout(at, [this, serial = ++serial_](IoResult) {
    --timers_;
    if (serial != serial_) return;  // replaced by an earlier timer
    timer_ = 0;
    off_(at_);
  });
}

void Alarm::Stop() {
  if (timer_ != 0) ring_->Cancel(timer_);
}

}  // namespace longhaul::peerd
