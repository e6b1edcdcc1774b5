// Where the chunks of an op are: in the whole, in the sources and in the targets.
//
// The whole is a tensor that no peer has to have in memory. Its offsets name segments, and the
// payloads and results of one-shot ops are laid out like it. It has the pieces of the op one after
// the other, and each piece begins at a multiple of 64 bytes. Within a piece:
// - If chunks belong to positions (no cuts), there is one for each position that has a share. It
//   begins at a multiple of 64 bytes, so the chunks of aligned tensors are aligned. It differs in
//   length from the position's share by at most 64 bytes; the last one may be shorter still. If
//   the op encodes, chunks begin at multiples of an encoded block instead, where those are longer.
// - If chunks belong to members (cuts), there is one for each cut, in order, without gaps. So an
//   all-gather of which members are gone has a shorter whole.
// - If there are both cuts and shares (a broadcast), the cut is divided as above. Each position
//   passes its chunk on. The owner sends its own chunk itself.
//
// Everything but the locals, `source` and `target` is the same at every peer. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "peerd/collective/attempt.h"
#include "peerd/collective/block_codec.h"
#include "peerd/collective/plan.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// The codec of an op that encodes.
BlockOptions CodecOf(const OpDesc& desc);

class Layout {
 public:
  struct Chunk {
    uint64_t offset = 0;  // in the whole
    uint64_t bytes = 0;   // not 0
    // Where the chunk begins in its piece of a source: in that of every member if the op reduces,
    // otherwise in that of the local owner.
    uint64_t source = 0;
    // Where it begins in its piece of a target: in that of every member if all get the chunk,
    // otherwise in that of the local receiver.
    uint64_t target = 0;
    uint32_t piece = 0;
    int position = 0;      // of the owner
    int via = -1;          // passes the chunk on to everybody; -1: the owner sends it itself
    int local = -1;        // the owner, if it is a local member
    int to_position = -1;  // of the only receiver; -1: every member gets the chunk
    int to_local = -1;     // the only receiver, if it is a local member
    DType dtype = DType::kFloat32;
    friend bool operator==(const Chunk&, const Chunk&) = default;
  };

  // Uses the description, the cuts and the pieces of the spec. `size`: the number of positions,
  // which an op with cuts does not need. What nobody sends needs no cuts: for 1 position, each
  // piece is a chunk.
  Layout(const AttemptSpec& spec, int size);

  // The chunks that are not empty, in the order of their offsets.
  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Of the whole, up to the end of its last piece.
  uint64_t bytes() const { return bytes_; }
  Plan MakePlan(uint32_t grain_bytes) const;

 private:
  void AddShares(uint64_t bytes, const std::vector<uint64_t>& ends, Chunk like);
  uint64_t BlockBytes(DType dtype) const { return std::max<uint64_t>(64, block_ * SizeOf(dtype)); }
  void AddCuts(const AttemptSpec& spec, const Piece& piece, Chunk like);
  void AddPassedOn(const Cut& cut, uint64_t bytes, const std::vector<uint64_t>& ends, Chunk like);

  const uint64_t block_;  // elements of an encoded block; 0: the op does not encode
  std::vector<Chunk> chunks_;
  uint64_t bytes_ = 0;
};

}  // namespace longhaul::peerd
