// A rate of bytes: what goes out is paid for in time, and nothing goes out before all that went has
// been paid for. Over any time T at most rate * (T + burst) bytes go out, and one piece more.
//
// Plain value: no clock.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

class TokenBucket {
 public:
  // What may go out at once after a pause is worth so much time.
  static constexpr int64_t kBurstUs = Millis(20);

  // 0: no limit.
  explicit TokenBucket(uint64_t bytes_per_second = 0) : bytes_per_second_(bytes_per_second) {}

  // From then on the next piece may go; in the past: now.
  Tick NextAt() const { return paid_at_; }
  void Spend(uint32_t bytes, Tick now) {
    if (bytes_per_second_ == 0) return;
    paid_at_ = std::max(paid_at_, now + -kBurstUs);
    const uint64_t owed = uint64_t{bytes} * uint64_t{1000000} + rest_;
    paid_at_ = paid_at_ + static_cast<int64_t>(owed / bytes_per_second_);
    rest_ = owed % bytes_per_second_;
  }

 private:
  uint64_t bytes_per_second_;
  Tick paid_at_;
  uint64_t rest_ = 0;  // less than a microsecond's worth, by 1e6
};

}  // namespace longhaul::peerd
