// Limits a rate of bytes. Each piece that is sent costs time: its bytes divided by the rate. The
// next piece may be sent when that time has passed for all earlier pieces. So in any time T at most
// rate * (T + kBurstUs) bytes are sent, plus one piece.
//
// Plain value: no clock.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

class TokenBucket {
 public:
  // After a pause, as many bytes may be sent at once as the rate allows in this time.
  static constexpr int64_t kBurstUs = Millis(20);

  // bytes_per_second: 0 means no limit.
  explicit TokenBucket(uint64_t bytes_per_second = 0) : bytes_per_second_(bytes_per_second) {}

  // When the next piece may be sent. A time in the past means now.
  Tick NextAt() const { return paid_at_; }
  // Call it when a piece is sent.
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
  uint64_t rest_ = 0;  // the part of the cost below 1 us, times bytes_per_second_
};

}  // namespace longhaul::peerd
