#include "peerd/transport/lane_count.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

// In round trips: the pause after which a burst begins, what is left out of it, what new
// connections take to reach their speed, and what is measured.
constexpr int64_t kPause = 2;
constexpr int64_t kSkipped = 3;
constexpr int64_t kSettling = 6;
constexpr int64_t kMeasured = 8;
// A shorter round trip counts as this: the scheduling of processes would be in what is measured.
constexpr int64_t kRttUsMin = Millis(10);

// Part of a round trip after lanes had nothing to send: they take at once what they have room for.
constexpr int64_t kAfterDrained = 2;
// What is to be measured may take so many times as long, since there is not always something that
// waits; if it takes longer, it is not lanes that it waits for.
constexpr int64_t kPatience = 3;
constexpr int64_t kPatienceTrying = 12;

// What two measurements of a steady path differ by, and what is clearly more.
constexpr uint64_t kSteadyPercent = 106;
constexpr uint64_t kGainPercent = 112;
// Of an unsteady one the last of so many.
constexpr int kUnsteadyMax = 6;
// The path is another one.
constexpr uint64_t kChangePercent = 150;
constexpr int64_t kAgainUs = Seconds(300);

// 32 at 80 ms.
constexpr int64_t kRttUsPerLane = 2500;
constexpr int64_t kFirstMin = 4;
constexpr int64_t kFirstMax = 64;

bool Exceeds(uint64_t more, uint64_t less, uint64_t percent) { return more * 100 > less * percent; }

}  // namespace

uint32_t LaneCount::First(int64_t rtt_us) {
  const int64_t lanes = std::clamp(rtt_us / kRttUsPerLane, kFirstMin, kFirstMax);
  return std::bit_ceil(static_cast<uint32_t>(lanes));
}

LaneCount::LaneCount(uint32_t first, uint32_t max, int64_t rtt_us)
    : max_(max), rtt_us_(std::max(rtt_us, kRttUsMin)), lanes_(first) {
  LH_CHECK(first >= 1 && first <= max);
}

bool LaneCount::Sent(uint64_t bytes, Tick now) {
  const int64_t us = now - std::exchange(last_, now);
  const bool paused = us > kPause * rtt_us_;
  if (paused) skip_until_ = now + kSkipped * rtt_us_;
  if (std::exchange(drained_, false)) {
    skip_until_ = std::max(skip_until_, now + rtt_us_ / kAfterDrained);
  }
  if (paused) return false;
  if (settle_us_ > 0) {
    settle_us_ -= us;
    return false;
  }
  all_us_ += us;
  if (now >= skip_until_) {
    us_ += us;
    bytes_ += bytes;
  }
  const int64_t enough = kMeasured * rtt_us_;
  if (us_ >= enough) return Judge(now);
  if (all_us_ >= (trying_ ? kPatienceTrying : kPatience) * enough) {
    trying_ = false;
    Restart();
  }
  return false;
}

bool LaneCount::Judge(Tick now) {
  const uint64_t rate = bytes_ * Seconds(1) / static_cast<uint64_t>(us_);
  us_ = 0;
  bytes_ = 0;
  all_us_ = 0;
  const uint64_t before = std::exchange(last_rate_, rate);
  const bool steady =
      !Exceeds(rate, before, kSteadyPercent) && !Exceeds(before, rate, kSteadyPercent);
  if ((before == 0 || !steady) && ++unsteady_ < kUnsteadyMax) return false;
  unsteady_ = 0;
  if (std::exchange(trying_, false) && !Exceeds(rate, rate_, kGainPercent)) {
    found_ = true;
    found_until_ = now + kAgainUs;
    Use(lanes_ / 2);
    return true;
  }
  const bool changed = Exceeds(rate, rate_, kChangePercent) || Exceeds(rate_, rate, kChangePercent);
  if (changed) {
    found_ = false;
    found_until_ = now;
  }
  if (now < found_until_) return false;
  rate_ = rate;
  if (lanes_ > max_ / 2) {
    found_ = true;
    return false;
  }
  trying_ = true;
  Use(lanes_ * 2);
  return true;
}

void LaneCount::Use(uint32_t lanes) {
  lanes_ = lanes;
  settle_us_ = kSettling * rtt_us_;
  Restart();
}

void LaneCount::Restart() {
  us_ = 0;
  bytes_ = 0;
  all_us_ = 0;
  last_rate_ = 0;
  unsteady_ = 0;
}

}  // namespace longhaul::peerd
