// How the chunks of an op are cut into grains.
//
// layout.h says where the chunks are. Here each of them is cut into grains, from its first byte on.
// In a chunk that begins at a multiple of 64 bytes, all grains do. Elements stay whole.
//
// The cuts depend only on the chunks and the size of a grain. So they are the same at every peer.
// Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace longhaul::peerd {

// All peers must cut tensors in the same way: a change needs a new version of the lane protocol.
inline constexpr uint32_t kGrainBytes = 32 << 10;

class Plan {
 public:
  // A stretch of the whole, in bytes.
  struct Range {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    friend bool operator==(const Range&, const Range&) = default;
  };
  // Consecutive grains.
  struct Grains {
    uint64_t first = 0;
    uint64_t count = 0;
    uint64_t end() const { return first + count; }
    friend bool operator==(const Grains&, const Grains&) = default;
  };

  // `chunks`: in the order of their offsets. None is empty, and none overlaps the next one.
  // `grain_bytes`: a multiple of 64.
  Plan(std::vector<Range> chunks, uint32_t grain_bytes);

  int chunks() const { return static_cast<int>(chunks_.size()); }
  const Range& Chunk(int chunk) const { return chunks_[chunk]; }

  // The number of grains. Grains are numbered from 0, chunk after chunk. Each grain of a chunk has
  // grain_bytes(), except the last one, which has what is left.
  uint64_t grains() const { return first_.back(); }
  uint32_t grain_bytes() const { return grain_bytes_; }
  Grains GrainsOf(int chunk) const { return {first_[chunk], first_[chunk + 1] - first_[chunk]}; }
  int ChunkOf(uint64_t grain) const;
  // The bytes of one or more grains, which are of one chunk.
  Range RangeOf(const Grains& grains) const;
  // The chunk that holds the byte at this offset; -1: none does.
  int ChunkAt(uint64_t offset) const;
  // The grains of this chunk that make up exactly this range, which begins within the chunk;
  // nullopt if there are none.
  std::optional<Grains> FindIn(int chunk, const Range& range) const;
  // The same for the chunk in which the range begins.
  std::optional<Grains> Find(const Range& range) const;

 private:
  std::vector<Range> chunks_;
  uint32_t grain_bytes_;
  std::vector<uint64_t> first_;  // the first grain of each chunk; last, the number of grains
};

}  // namespace longhaul::peerd
