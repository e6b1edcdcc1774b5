// How long the addresses of unreachable newcomers wait before members try them again. Without a
// pause, a newcomer that asks again and again would hold the group each time.
//
// Plain value: no clock. Bounded by kPausesMax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/tick.h"

namespace longhaul::coordinator {

// The first and the longest pause, in detect_ms. Each pause is twice as long as the one before.
// After a failed trial, which cost each member one connection:
inline constexpr int64_t kTrialPause[2] = {1, 40};
// After a failed admission, which held the group:
inline constexpr int64_t kAdmissionPause[2] = {40, 400};
inline constexpr size_t kPausesMax = 1024;

class Pauses {
 public:
  using Endpoints = std::vector<std::string>;

  explicit Pauses(uint32_t detect_ms) : detect_us_(Millis(detect_ms)) {}

  // When the address may be tried again. If that time has passed, it may be tried now.
  Tick Until(const Endpoints& endpoints) const;
  // The address could not be reached. Returns its pause, in microseconds from now. `held`: the
  // group has waited for the newcomer.
  int64_t Begin(const Endpoints& endpoints, bool held, Tick now);
  // The address was reached.
  void Forget(const Endpoints& endpoints) { pauses_.erase(endpoints); }

  LH_STATE(Pauses, LH_FIELD(detect_us_, rule::Aside{}), LH_FIELD(pauses_));

 private:
  struct Pause {
    uint32_t failures = 0;
    Tick until;
    LH_FIELDS(Pause, LH_FIELD(failures), LH_FIELD(until));
  };
  int64_t detect_us_;
  std::map<Endpoints, Pause> pauses_;
};

}  // namespace longhaul::coordinator
