// Time as the pure cores see it: microseconds. Only the driver of a core reads a clock.
#pragma once

#include <compare>
#include <cstdint>

namespace longhaul {

struct Tick {
  int64_t us = 0;
  friend constexpr auto operator<=>(Tick, Tick) = default;
  friend constexpr Tick operator+(Tick t, int64_t us) { return Tick{t.us + us}; }
  friend constexpr int64_t operator-(Tick a, Tick b) { return a.us - b.us; }
};

inline constexpr Tick kNever{INT64_MAX};

constexpr int64_t Millis(int64_t ms) { return ms * 1000; }
constexpr int64_t Seconds(int64_t s) { return s * 1000000; }

}  // namespace longhaul
