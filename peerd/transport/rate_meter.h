// How fast a link carries bytes, from how many had arrived at which times.
//
// A connection that begins takes several round trips to get to the speed of its path, so what
// counts is the fastest stretch, and it is over when no faster one has come for some of them.
//
// Plain value: no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "base/tick.h"

namespace longhaul::peerd {

class RateMeter {
 public:
  // Of what a rate is taken at least, and two round trips: acknowledgements come in bursts.
  static constexpr int64_t kStretch = Millis(100);
  static constexpr size_t kSamplesMax = 256;  // then the oldest goes

  // `bytes` altogether have arrived by then; neither falls. `rtt_us`: 0 while it is unknown.
  void Add(Tick at, uint64_t bytes, uint32_t rtt_us);
  // Of the fastest stretch; 0: none was long enough.
  uint64_t bytes_per_second() const { return best_; }
  // Three stretches have gone by without one that is a twentieth faster.
  bool settled() const { return settled_; }

 private:
  std::deque<std::pair<Tick, uint64_t>> samples_;
  uint64_t best_ = 0;
  uint64_t risen_to_ = 0;  // the last that was a twentieth faster
  Tick risen_at_;
  bool settled_ = false;
};

}  // namespace longhaul::peerd
