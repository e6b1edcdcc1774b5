// Addresses of newcomers that could not be reached, and how long each waits before it is tried
// again: a newcomer that asks again and again must not hold the group each time.
//
// Plain value: no clock. Bounded by kPausesMax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/tick.h"

namespace longhaul::coordinator {

// The first pause and the longest one, in detect_ms. The next one is twice as long each time.
inline constexpr int64_t kPauseMinDetects = 40;
inline constexpr int64_t kPauseMaxDetects = 400;
inline constexpr size_t kPausesMax = 1024;

class Pauses {
 public:
  using Endpoints = std::vector<std::string>;

  explicit Pauses(uint32_t detect_ms) : detect_us_(Millis(detect_ms)) {}

  // Whether it waits now.
  bool Waits(const Endpoints& endpoints, Tick now) const;
  // It could not be reached. How long it waits from now on.
  int64_t Begin(const Endpoints& endpoints, Tick now);
  // It was reached.
  void Forget(const Endpoints& endpoints) { pauses_.erase(endpoints); }

  void AddTo(Digester* digest) const;

 private:
  struct Pause {
    uint32_t failures = 0;
    Tick until;
  };
  int64_t detect_us_;
  std::map<Endpoints, Pause> pauses_;
};

}  // namespace longhaul::coordinator
