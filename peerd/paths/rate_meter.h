// Measures the rate of a link from the bytes that had arrived at several times.
//
// A new connection takes several round trips until it is as fast as its path. So the fastest
// stretch counts. The measurement is over when no clearly faster stretch has come for three
// stretches' time.
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
  // A rate is taken over at least this long and two round trips, as acknowledgements come in
  // bursts.
  static constexpr int64_t kStretch = Millis(100);
  static constexpr size_t kSamplesMax = 256;  // beyond it the oldest is dropped

  // `bytes` had arrived in all at `at`. Neither may fall. `rtt_us`: 0 while it is not known.
  void Add(Tick at, uint64_t bytes, uint32_t rtt_us);
  // Returns the rate of the fastest stretch. 0: none was long enough.
  uint64_t bytes_per_second() const { return best_; }
  // Three stretches have gone by, and none was faster by a twentieth.
  bool settled() const { return settled_; }

 private:
  std::deque<std::pair<Tick, uint64_t>> samples_;
  uint64_t best_ = 0;
  uint64_t risen_to_ = 0;  // the last best_ that rose by a twentieth
  Tick risen_at_;
  bool settled_ = false;
};

}  // namespace longhaul::peerd
