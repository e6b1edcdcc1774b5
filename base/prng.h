// Random numbers from a seed. The sequence is the same on every machine and with every compiler.
//
// The generator is xoshiro256** (Blackman and Vigna), seeded by splitmix64. Use it for simulation,
// tests and jitter, never for secrets. Not thread-safe.
#pragma once

#include <cstdint>

#include "base/check.h"

namespace longhaul {

// Advances *state and gives the next number of a splitmix64 sequence. One call also mixes the bits
// of a number well.
constexpr uint64_t SplitMix64(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

class Prng {
 public:
  explicit constexpr Prng(uint64_t seed) {
    for (uint64_t& word : state_) word = SplitMix64(&seed);
  }

  constexpr uint64_t Next() {
    const uint64_t result = Rotate(state_[1] * 5, 7) * 9;
    const uint64_t t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = Rotate(state_[3], 45);
    return result;
  }

  // A uniform number in [0, n). n must not be 0.
  uint64_t Below(uint64_t n) {
    LH_CHECK(n != 0);
    // Lemire's multiplication. Rejects some numbers, so that every value is equally likely.
    unsigned __int128 product = static_cast<unsigned __int128>(Next()) * n;
    if (static_cast<uint64_t>(product) < n) {
      const uint64_t threshold = -n % n;
      while (static_cast<uint64_t>(product) < threshold) {
        product = static_cast<unsigned __int128>(Next()) * n;
      }
    }
    return static_cast<uint64_t>(product >> 64);
  }

  // A uniform number in [low, high].
  int64_t Between(int64_t low, int64_t high) {
    LH_CHECK(low <= high);
    const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + (span == 0 ? Next() : Below(span)));
  }

  // True with probability p: never for 0, always for 1.
  bool Chance(double p) { return static_cast<double>(Next() >> 11) * 0x1p-53 < p; }

 private:
  static constexpr uint64_t Rotate(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
  uint64_t state_[4] = {};
};

}  // namespace longhaul
