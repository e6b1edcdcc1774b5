// How a tensor is cut: into chunks, and each chunk into grains.
//
// Most tensors have one chunk for each position. Every cut is at a multiple of 64 bytes. So
// elements stay whole, and the grains of an aligned tensor are aligned. Chunks differ in length by
// at most 64 bytes. In a small tensor some chunks are empty.
//
// Where a chunk belongs to a member, the op says how long it is, and all chunks are equally long.
//
// The cuts depend only on the size of the tensor, the number of positions and the size of a grain.
// So they are the same at every peer. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace longhaul::peerd {

// All peers must cut tensors in the same way: a change needs a new version of the lane protocol.
inline constexpr uint32_t kGrainBytes = 32 << 10;

class Plan {
 public:
  // A piece of the tensor, in bytes.
  struct Piece {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  // Consecutive grains.
  struct Grains {
    uint64_t first = 0;
    uint64_t count = 0;
    uint64_t end() const { return first + count; }
    friend bool operator==(const Grains&, const Grains&) = default;
  };

  // `bytes`: of the tensor. `size`: number of positions, at least 1. `grain_bytes`: a multiple of
  // 64.
  Plan(uint64_t bytes, int size, uint32_t grain_bytes);
  // A tensor of `chunks` chunks of `chunk_bytes` each. Neither is 0.
  static Plan OfEqual(int chunks, uint64_t chunk_bytes, uint32_t grain_bytes);

  int chunks() const { return static_cast<int>(first_.size()) - 1; }
  Piece Chunk(int chunk) const;

  uint64_t bytes() const { return bytes_; }
  // The number of grains. Grains are numbered from 0, chunk after chunk. Each grain of a chunk has
  // grain_bytes(), except the last one, which has what is left.
  uint64_t grains() const { return first_.back(); }
  uint32_t grain_bytes() const { return grain_bytes_; }
  Grains GrainsOf(int chunk) const { return {first_[chunk], first_[chunk + 1] - first_[chunk]}; }
  int ChunkOf(uint64_t grain) const;
  // The bytes of one or more grains, which are of one chunk.
  Piece PieceOf(const Grains& grains) const;
  // The grains of one chunk that make up exactly this piece; nullopt if there are none.
  std::optional<Grains> Find(const Piece& piece) const;

 private:
  Plan(uint64_t bytes, int chunks, uint64_t chunk_bytes, uint32_t grain_bytes);

  uint64_t bytes_;
  uint64_t blocks_;       // the tensor in blocks of 64 bytes
  uint64_t chunk_bytes_;  // 0: chunks are cut at blocks
  uint32_t grain_bytes_;
  std::vector<uint64_t> first_;  // the first grain of each chunk; last, the number of grains
};

}  // namespace longhaul::peerd
