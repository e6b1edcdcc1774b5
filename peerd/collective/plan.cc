#include "peerd/collective/plan.h"

#include <algorithm>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kBlockBytes = 64;

uint64_t DivideUp(uint64_t value, uint64_t by) { return value / by + (value % by != 0); }

}  // namespace

Plan::Plan(uint64_t bytes, int size, uint32_t grain_bytes) : Plan(bytes, size, 0, grain_bytes) {}

Plan Plan::OfEqual(int chunks, uint64_t chunk_bytes, uint32_t grain_bytes) {
  LH_CHECK(chunk_bytes > 0);
  return {chunk_bytes * static_cast<uint64_t>(chunks), chunks, chunk_bytes, grain_bytes};
}

Plan::Plan(uint64_t bytes, int chunks, uint64_t chunk_bytes, uint32_t grain_bytes)
    : bytes_(bytes),
      blocks_(DivideUp(bytes, kBlockBytes)),
      chunk_bytes_(chunk_bytes),
      grain_bytes_(grain_bytes),
      first_(chunks + 1) {
  LH_CHECK(chunks >= 1 && grain_bytes > 0 && grain_bytes % kBlockBytes == 0);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    first_[chunk + 1] = first_[chunk] + DivideUp(Chunk(chunk).bytes, grain_bytes_);
  }
}

Plan::Piece Plan::Chunk(int chunk) const {
  if (chunk_bytes_ > 0) return {chunk_bytes_ * static_cast<uint64_t>(chunk), chunk_bytes_};
  // In 128 bits, because blocks times positions may not fit into 64.
  const auto cut = [&](int c) {
    const auto block =
        static_cast<uint64_t>(static_cast<unsigned __int128>(blocks_) * c / chunks());
    return std::min(block * kBlockBytes, bytes_);
  };
  const uint64_t begin = cut(chunk);
  return {begin, cut(chunk + 1) - begin};
}

int Plan::ChunkOf(uint64_t grain) const {
  const auto after = std::upper_bound(first_.begin(), first_.end(), grain);
  return static_cast<int>(after - first_.begin()) - 1;
}

Plan::Piece Plan::PieceOf(const Grains& grains) const {
  const int chunk = ChunkOf(grains.first);
  const Piece whole = Chunk(chunk);
  const uint64_t skip = (grains.first - first_[chunk]) * grain_bytes_;
  return {whole.offset + skip, std::min(grains.count * grain_bytes_, whole.bytes - skip)};
}

std::optional<Plan::Grains> Plan::Find(const Piece& piece) const {
  if (piece.bytes == 0 || piece.offset >= bytes_) return std::nullopt;
  // The chunk that holds the offset is the last one that begins at or before it. It is not empty:
  // otherwise the next chunk would begin there, too.
  int low = 0;
  int high = chunks();
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (Chunk(middle).offset <= piece.offset ? low : high) = middle;
  }
  const Piece whole = Chunk(low);
  const uint64_t skip = piece.offset - whole.offset;
  if (skip % grain_bytes_ != 0 || piece.bytes > whole.bytes - skip) return std::nullopt;
  if (piece.bytes % grain_bytes_ != 0 && piece.bytes != whole.bytes - skip) return std::nullopt;
  return Grains{first_[low] + skip / grain_bytes_, DivideUp(piece.bytes, grain_bytes_)};
}

}  // namespace longhaul::peerd
