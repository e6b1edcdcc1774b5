// Decides whether large segments of one link are sent without a copy.
//
// The kernel may refuse a zero-copy send (too much memory is pinned), or copy the bytes after all
// and say so (the network device needs that). Both cost more than a plain send. The gate then
// closes for all lanes of the link. After a pause it lets one send through as a trial. If the trial
// works, the gate opens. Otherwise the pause doubles, up to kPauseUsMax.
//
// Plain value: no clock.
#pragma once

#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

class ZeroCopyGate {
 public:
  enum class Use { kNever, kWhereOfUse, kAlways };  // kAlways: even if the kernel copies

  static constexpr int64_t kPauseUsMin = Seconds(1);
  static constexpr int64_t kPauseUsMax = Seconds(300);

  explicit ZeroCopyGate(Use use) : use_(use) {}

  bool open() const { return use_ != Use::kNever && !closed_; }
  // Whether a send that begins now goes without a copy. If it does, report its outcome below.
  bool Pass(Tick now);
  // The outcome of a send that began at `begun`. A send that began before the gate closed changes
  // nothing.
  void Worked(Tick begun);
  void Copied(Tick begun, Tick now);
  void Refused(Tick begun, Tick now);

 private:
  const Use use_;
  bool closed_ = false;
  Tick closed_at_;
  Tick trial_at_;
  int64_t pause_us_ = kPauseUsMin;
};

}  // namespace longhaul::peerd
