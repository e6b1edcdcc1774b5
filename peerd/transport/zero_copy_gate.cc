#include "peerd/transport/zero_copy_gate.h"

#include <algorithm>

namespace longhaul::peerd {

bool ZeroCopyGate::Pass(Tick now) {
  if (use_ == Use::kNever) return false;
  if (!closed_) return true;
  if (now < trial_at_) return false;
  // If no outcome of this trial is reported, the next one follows after the same pause.
  trial_at_ = now + pause_us_;
  return true;
}

void ZeroCopyGate::Worked(Tick begun) {
  if (closed_ && begun > closed_at_) closed_ = false;
}

void ZeroCopyGate::Copied(Tick begun, Tick now) {
  if (use_ == Use::kAlways) {
    Worked(begun);
  } else {
    Refused(begun, now);
  }
}

void ZeroCopyGate::Refused(Tick begun, Tick now) {
  if (closed_ && begun <= closed_at_) return;
  pause_us_ = closed_ ? std::min(2 * pause_us_, kPauseUsMax) : kPauseUsMin;
  closed_ = true;
  closed_at_ = now;
  trial_at_ = now + pause_us_;
}

}  // namespace longhaul::peerd
