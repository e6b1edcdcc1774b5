// How a tensor is cut for a ring: one chunk per position, chunks into segments.
//
// Chunks differ by at most 64 bytes, and every cut lies at a multiple of 64 bytes, so that elements
// stay whole and segments of an aligned tensor are aligned. Small tensors leave chunks empty. The
// same at every peer, since it is a function of the op and the number of positions only. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace longhaul::peerd {

class Plan {
 public:
  // A piece of the tensor, in bytes.
  struct Piece {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    friend bool operator==(const Piece&, const Piece&) = default;
  };

  // `bytes` of the tensor; `size` >= 1 positions; `segment_bytes_max` >= 64.
  Plan(uint64_t bytes, int size, uint32_t segment_bytes_max);

  int chunks() const { return static_cast<int>(first_.size()) - 1; }
  Piece Chunk(int chunk) const;

  // Segments are numbered through, chunk by chunk. Those of a chunk have segment_bytes() each, the
  // last one what is left. A chunk is cut into 32 or more where that leaves segments of 64
  // KiB, so that a small op is pipelined too and many lanes share a large one.
  uint64_t segments() const { return first_.back(); }
  uint32_t segment_bytes() const { return segment_bytes_; }
  // The first segment of a chunk; FirstSegment(chunks()) is segments().
  uint64_t FirstSegment(int chunk) const { return first_[chunk]; }
  int ChunkOf(uint64_t segment) const;
  Piece Segment(uint64_t segment) const;
  // The segment that is exactly this piece; none if the plan has no such.
  std::optional<uint64_t> Find(const Piece& piece) const;

 private:
  uint64_t bytes_;
  uint64_t blocks_;  // of 64 bytes
  uint32_t segment_bytes_;
  std::vector<uint64_t> first_;  // by chunk, and the end
};

}  // namespace longhaul::peerd
