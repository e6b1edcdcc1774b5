// Whether large segments of one link are sent without a copy.
//
// The kernel may refuse such a send (too much memory is pinned just now), or copy after all and say
// so (the device of the path cannot do without). Either costs more than a plain send. The gate
// closes then, for all lanes of the link. After a pause it lets one send through as a trial: if
// that works it opens, else the pause doubles, up to kPauseUsMax.
//
// Plain value: no clock.
#pragma once

#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

class ZeroCopyGate {
 public:
  enum class Use { kNever, kWhereOfUse, kAlways };  // kAlways: also where the kernel copies

  static constexpr int64_t kPauseUsMin = Seconds(1);
  static constexpr int64_t kPauseUsMax = Seconds(300);

  explicit ZeroCopyGate(Use use) : use_(use) {}

  bool open() const { return use_ != Use::kNever && !closed_; }
  // Whether a send that begins now goes without a copy. Report what becomes of it.
  bool Pass(Tick now);
  // What became of a send that began at `begun`. One that began before the gate closed is no news.
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
