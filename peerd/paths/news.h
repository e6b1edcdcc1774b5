// When the coordinator must be told of a measurement again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

// Known figures are reported again this often, so that the coordinator does not forget them.
inline constexpr int64_t kReportRepeat = Seconds(300);

// Whether a figure differs by more than a twentieth from the one that was reported.
inline bool IsNews(uint64_t now, uint64_t said) {
  const uint64_t high = std::max(now, said);
  return high - std::min(now, said) > high / 20;
}

}  // namespace longhaul::peerd
