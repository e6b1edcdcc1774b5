#include "peerd/collective/landings.h"

#include <algorithm>

namespace longhaul::peerd {
namespace {

// On links with a short latency about so many segments arrive at a time, and so many fit into the
// cache of one processor. On links with a long latency most segments find no free landing, but
// there the processor has time.
constexpr uint64_t kLandings = 4;
constexpr uint64_t kLandingBytesMax = 512 << 10;

}  // namespace

void Landings::Make(uint64_t bytes) {
  bytes_ = std::min((bytes + 63) / 64 * 64, kLandingBytesMax);
  const absl::StatusOr<uint8_t*> memory = pool_->Borrow(kLandings * bytes_);
  for (uint64_t i = 0; memory.ok() && i < kLandings; ++i) {
    landings_.push_back({*memory + i * bytes_, std::nullopt});
  }
}

uint8_t* Landings::Borrow(const Plan::Range& range) {
  if (range.bytes > bytes_) return nullptr;
  for (Landing& landing : landings_) {
    if (landing.offset) continue;
    landing.offset = range.offset;
    return landing.data;
  }
  return nullptr;
}

uint8_t* Landings::Of(const Plan::Range& range) const {
  for (const Landing& landing : landings_) {
    if (landing.offset == range.offset) return landing.data;
  }
  return nullptr;
}

void Landings::Give(const Plan::Range& range) {
  for (Landing& landing : landings_) {
    if (landing.offset == range.offset) landing.offset.reset();
  }
}

void Landings::Release() {
  if (!landings_.empty()) pool_->Give(landings_.front().data);
  landings_.clear();
}

}  // namespace longhaul::peerd
