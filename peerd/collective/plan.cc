#include "peerd/collective/plan.h"

#include <algorithm>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kBlockBytes = 64;
// Finer segments cost more in headers and calls than pipelining gains.
constexpr uint64_t kSegmentBytesMin = 64 << 10;
// So many in a chunk, for its lanes to share: the end of an op waits for the last ones.
constexpr uint64_t kSegmentsWanted = 32;

uint64_t DivideUp(uint64_t value, uint64_t by) { return value / by + (value % by != 0); }

}  // namespace

Plan::Plan(uint64_t bytes, int size, uint32_t segment_bytes_max)
    : bytes_(bytes), blocks_(DivideUp(bytes, kBlockBytes)), first_(size + 1) {
  LH_CHECK(size >= 1 && segment_bytes_max >= kBlockBytes);
  const uint64_t wanted = DivideUp(DivideUp(blocks_, size), kSegmentsWanted) * kBlockBytes;
  const uint64_t max = segment_bytes_max / kBlockBytes * kBlockBytes;
  segment_bytes_ = static_cast<uint32_t>(std::min(std::max(wanted, kSegmentBytesMin), max));
  for (int chunk = 0; chunk < size; ++chunk) {
    first_[chunk + 1] = first_[chunk] + DivideUp(Chunk(chunk).bytes, segment_bytes_);
  }
}

Plan::Piece Plan::Chunk(int chunk) const {
  // In 128 bits: blocks times positions may exceed 64.
  const auto cut = [&](int c) {
    const auto block =
        static_cast<uint64_t>(static_cast<unsigned __int128>(blocks_) * c / chunks());
    return std::min(block * kBlockBytes, bytes_);
  };
  const uint64_t begin = cut(chunk);
  return {begin, cut(chunk + 1) - begin};
}

int Plan::ChunkOf(uint64_t segment) const {
  const auto after = std::upper_bound(first_.begin(), first_.end(), segment);
  return static_cast<int>(after - first_.begin()) - 1;
}

Plan::Piece Plan::Segment(uint64_t segment) const {
  const int chunk = ChunkOf(segment);
  const Piece whole = Chunk(chunk);
  const uint64_t skip = (segment - first_[chunk]) * segment_bytes_;
  return {whole.offset + skip, std::min<uint64_t>(segment_bytes_, whole.bytes - skip)};
}

std::optional<uint64_t> Plan::Find(const Piece& piece) const {
  if (piece.bytes == 0 || piece.offset >= bytes_) return std::nullopt;
  // The chunk that holds the offset: the last one that begins at or before it (and is not empty, as
  // the next one would begin there too).
  int low = 0;
  int high = chunks();
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (Chunk(middle).offset <= piece.offset ? low : high) = middle;
  }
  const uint64_t skip = piece.offset - Chunk(low).offset;
  const uint64_t segment = first_[low] + skip / segment_bytes_;
  if (Segment(segment) != piece) return std::nullopt;
  return segment;
}

}  // namespace longhaul::peerd
