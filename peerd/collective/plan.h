// How a tensor is cut: one chunk per position, chunks into grains.
//
// Chunks differ by at most 64 bytes, and every cut lies at a multiple of 64 bytes, so that elements
// stay whole and grains of an aligned tensor are aligned. Small tensors leave chunks empty. The
// same at every peer, since it is a function of the op and the number of positions only. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace longhaul::peerd {

// Peers cut tensors alike: it belongs to the lane protocol's version.
inline constexpr uint32_t kGrainBytes = 32 << 10;

class Plan {
 public:
  // A piece of the tensor, in bytes.
  struct Piece {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  // Grains that follow each other.
  struct Grains {
    uint64_t first = 0;
    uint64_t count = 0;
    uint64_t end() const { return first + count; }
    friend bool operator==(const Grains&, const Grains&) = default;
  };

  // `bytes` of the tensor; `size` >= 1 positions; `grain_bytes` a multiple of 64.
  Plan(uint64_t bytes, int size, uint32_t grain_bytes);

  int chunks() const { return static_cast<int>(first_.size()) - 1; }
  Piece Chunk(int chunk) const;

  // Grains are numbered through, chunk by chunk. Those of a chunk have grain_bytes() each, the last
  // one what is left.
  uint64_t grains() const { return first_.back(); }
  uint32_t grain_bytes() const { return grain_bytes_; }
  Grains GrainsOf(int chunk) const { return {first_[chunk], first_[chunk + 1] - first_[chunk]}; }
  int ChunkOf(uint64_t grain) const;
  // Of one or more grains of one chunk.
  Piece PieceOf(const Grains& grains) const;
  // The grains that are exactly this piece, all of one chunk; none if there are no such.
  std::optional<Grains> Find(const Piece& piece) const;

 private:
  uint64_t bytes_;
  uint64_t blocks_;  // of 64 bytes
  uint32_t grain_bytes_;
  std::vector<uint64_t> first_;  // by chunk, and the end
};

}  // namespace longhaul::peerd
