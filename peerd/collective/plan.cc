#include "peerd/collective/plan.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

uint64_t DivideUp(uint64_t value, uint64_t by) { return value / by + (value % by != 0); }

}  // namespace

Plan::Plan(std::vector<Range> chunks, uint32_t grain_bytes)
    : chunks_(std::move(chunks)), grain_bytes_(grain_bytes), first_(chunks_.size() + 1) {
  LH_CHECK(grain_bytes > 0 && grain_bytes % 64 == 0) << grain_bytes;
  for (size_t c = 0; c < chunks_.size(); ++c) {
    first_[c + 1] = first_[c] + DivideUp(chunks_[c].bytes, grain_bytes_);
  }
}

int Plan::ChunkOf(uint64_t grain) const {
  const auto after = std::upper_bound(first_.begin(), first_.end(), grain);
  return static_cast<int>(after - first_.begin()) - 1;
}

Plan::Range Plan::RangeOf(const Grains& grains) const {
  const int chunk = ChunkOf(grains.first);
  const Range& whole = chunks_[chunk];
  const uint64_t skip = (grains.first - first_[chunk]) * grain_bytes_;
  return {whole.offset + skip, std::min(grains.count * grain_bytes_, whole.bytes - skip)};
}

int Plan::ChunkAt(uint64_t offset) const {
  const auto after =
      std::upper_bound(chunks_.begin(), chunks_.end(), offset,
                       [](uint64_t at, const Range& chunk) { return at < chunk.offset; });
  if (after == chunks_.begin()) return -1;
  const Range& chunk = *(after - 1);
  if (offset - chunk.offset >= chunk.bytes) return -1;
  return static_cast<int>(after - chunks_.begin()) - 1;
}

std::optional<Plan::Grains> Plan::FindIn(int chunk, const Range& range) const {
  const Range& whole = chunks_[chunk];
  const uint64_t skip = range.offset - whole.offset;
  if (range.bytes == 0 || skip % grain_bytes_ != 0 || range.bytes > whole.bytes - skip) {
    return std::nullopt;
  }
  if (range.bytes % grain_bytes_ != 0 && range.bytes != whole.bytes - skip) return std::nullopt;
  return Grains{first_[chunk] + skip / grain_bytes_, DivideUp(range.bytes, grain_bytes_)};
}

std::optional<Plan::Grains> Plan::Find(const Range& range) const {
  const int chunk = ChunkAt(range.offset);
  if (chunk < 0) return std::nullopt;
  return FindIn(chunk, range);
}

}  // namespace longhaul::peerd
