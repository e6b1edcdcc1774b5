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

// The first pause and the longest one, in detect_ms. The next one is twice as long each time. After
// a trial, which costs the members a connection each; after an admission that held the group.
inline constexpr int64_t kTrialPause[2] = {1, 40};
inline constexpr int64_t kAdmissionPause[2] = {40, 400};
inline constexpr size_t kPausesMax = 1024;

class Pauses {
 public:
  using Endpoints = std::vector<std::string>;

  explicit Pauses(uint32_t detect_ms) : detect_us_(Millis(detect_ms)) {}

  // Until when it waits; long ago: it does not.
  Tick Until(const Endpoints& endpoints) const;
  // It could not be reached. How long it waits from now on. `held`: the group has, for it.
  int64_t Begin(const Endpoints& endpoints, bool held, Tick now);
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
