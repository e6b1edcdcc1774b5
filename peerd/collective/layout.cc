#include "peerd/collective/layout.h"

#include <algorithm>
#include <utility>

namespace longhaul::peerd {
namespace {

constexpr uint64_t kPieceAlignment = 64;

uint64_t DivideUp(uint64_t value, uint64_t by) { return value / by + (value % by != 0); }

// Returns the sum of the shares up to each position, including its own. The whole of an op that
// nobody sends has one position, whatever the shares.
std::vector<uint64_t> EndsOf(const Shares& shares, int size) {
  std::vector<uint64_t> ends;
  ends.reserve(static_cast<size_t>(size));
  uint64_t sum = 0;
  for (int i = 0; i < size; ++i) {
    ends.push_back(sum += shares.size() == static_cast<size_t>(size) ? shares[i] : 1);
  }
  return ends;
}

}  // namespace

BlockOptions CodecOf(const OpDesc& desc) {
  BlockOptions options;
  options.stochastic = desc.rounding == Rounding::kStochastic;
  options.format = desc.quantization == Quantization::kBf16   ? BlockFormat::kBfloat16
                   : desc.quantization == Quantization::kInt8 ? BlockFormat::kInt8
                                                              : BlockFormat::kInt4;
  // The elements of a bfloat16 block share nothing; a short one lets chunks begin almost anywhere.
  options.block = desc.block == 0 ? kBlockMin : desc.block;
  return options;
}

Layout::Layout(const AttemptSpec& spec, int size)
    : block_(spec.desc.Encodes() ? CodecOf(spec.desc).block : 0) {
  const std::vector<uint64_t> ends = EndsOf(spec.shares, size);
  for (size_t k = 0; k < spec.pieces.size(); ++k) {
    const Piece& piece = spec.pieces[k];
    Chunk like;
    like.offset = bytes_ = DivideUp(bytes_, kPieceAlignment) * kPieceAlignment;
    like.piece = static_cast<uint32_t>(k);
    like.dtype = piece.dtype;
    if (spec.cuts.empty()) {
      AddShares(piece.count * SizeOf(piece.dtype), ends, like);
    } else if (!spec.shares.empty()) {
      AddPassedOn(spec.cuts.front(), piece.count * SizeOf(piece.dtype), ends, like);
    } else if (piece.count > 0 || spec.desc.unequal) {
      AddCuts(spec, piece, like);
    }
  }
}

// Position c has the blocks from blocks * ends[c-1] / ends.back() to blocks * ends[c] /
// ends.back(), rounded down. Goes from one chunk that is not empty to the next, because a list may
// have many small pieces.
void Layout::AddShares(uint64_t bytes, const std::vector<uint64_t>& ends, Chunk like) {
  const uint64_t block_bytes = BlockBytes(like.dtype);
  const uint64_t blocks = DivideUp(bytes, block_bytes);
  const uint64_t begin = like.offset;
  // In 128 bits, because blocks times units may not fit into 64.
  const auto end_of = [&](uint64_t units) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(blocks) * units / ends.back());
  };
  for (uint64_t block = 0; block < blocks;) {
    const auto owner =
        std::upper_bound(ends.begin(), ends.end(), block,
                         [&](uint64_t place, uint64_t units) { return place < end_of(units); });
    const uint64_t end = end_of(*owner);
    Chunk& chunk = chunks_.emplace_back(like);
    chunk.source = chunk.target = block * block_bytes;
    chunk.offset = begin + chunk.source;
    chunk.bytes = std::min(end * block_bytes, bytes) - chunk.source;
    chunk.position = static_cast<int>(owner - ends.begin());
    block = end;
  }
  bytes_ = begin + bytes;
}

void Layout::AddCuts(const AttemptSpec& spec, const Piece& piece, Chunk like) {
  const uint64_t begin = like.offset;
  // Of each local member: the bytes of the cuts so far that it owns, and that it alone receives.
  std::vector<uint64_t> owned(spec.sources.size());
  std::vector<uint64_t> received(spec.targets.size());
  // Returns the place behind the cuts so far, and adds one more.
  const auto place = [](std::vector<uint64_t>* places, int local, uint64_t bytes) {
    if (local < 0) return uint64_t{0};
    return std::exchange((*places)[local], (*places)[local] + bytes);
  };
  for (const Cut& cut : spec.cuts) {
    const uint64_t count = spec.desc.unequal ? cut.count : piece.count;
    if (count == 0) continue;
    Chunk& chunk = chunks_.emplace_back(like);
    chunk.offset = bytes_;
    chunk.bytes = count * SizeOf(piece.dtype);
    chunk.position = cut.position;
    chunk.local = cut.local;
    if (IsDirect(spec.desc.kind)) {
      chunk.to_position = cut.to_position;
      chunk.to_local = cut.to_local;
    } else if (!spec.gathers()) {
      // What is added up stays with its owner.
      chunk.to_position = cut.position;
      chunk.to_local = cut.local;
    }
    chunk.source = spec.reduces() ? bytes_ - begin : place(&owned, chunk.local, chunk.bytes);
    chunk.target =
        chunk.to_position < 0 ? bytes_ - begin : place(&received, chunk.to_local, chunk.bytes);
    bytes_ += chunk.bytes;
  }
}

void Layout::AddPassedOn(const Cut& cut, uint64_t bytes, const std::vector<uint64_t>& ends,
                         Chunk like) {
  const size_t before = chunks_.size();
  AddShares(bytes, ends, like);
  for (size_t c = before; c < chunks_.size(); ++c) {
    Chunk& chunk = chunks_[c];
    if (chunk.position != cut.position) chunk.via = chunk.position;
    chunk.position = cut.position;
    chunk.local = cut.local;
  }
}

Plan Layout::MakePlan(uint32_t grain_bytes) const {
  std::vector<Plan::Range> ranges;
  ranges.reserve(chunks_.size());
  for (const Chunk& chunk : chunks_) ranges.push_back({chunk.offset, chunk.bytes});
  return {std::move(ranges), grain_bytes};
}

}  // namespace longhaul::peerd
