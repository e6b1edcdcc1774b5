#include <algorithm>

#include "peerd/collective/attempt.h"
#include "peerd/collective/block_codec.h"
#include "peerd/collective/local.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// The most pieces that are not empty: in the whole, each begins at a multiple of 64 bytes.
uint64_t PiecesMax(const OpDesc& desc, uint64_t whole) {
  return desc.list == 0 ? 1 : std::min<uint64_t>(whole / 64 + 1, LH_PIECES_MAX);
}

// The most chunks of an op that encodes. One that belongs to a position begins at a block.
uint64_t ChunksMax(const OpDesc& desc, uint64_t whole, uint64_t positions) {
  const uint64_t pieces = PiecesMax(desc, whole);
  if (desc.InParts()) return pieces * desc.world;
  // No element has less than 2 bytes.
  const uint64_t blocks =
      desc.Encodes() ? whole / (uint64_t{2} * CodecOf(desc).block) + pieces : whole;
  return std::min(pieces * positions, blocks);
}

// Bytes of chunks when they are encoded. `bytes`: of all of them, in the tensor. Each of the chunks
// may end with a block of its own.
uint64_t EncodedBytesMax(const OpDesc& desc, uint64_t bytes, uint64_t chunks) {
  const BlockOptions options = CodecOf(desc);
  // A list may have halves among its pieces, and more elements than its first dtype says.
  const uint64_t count = bytes / (desc.list != 0 ? 2 : SizeOf(desc.dtype));
  return EncodedBytes(options, count) + chunks * EncodedBytes(options, 1);
}

// Bytes of a mesh's parts: the inputs of all other positions to the chunks that this one owns.
// `whole`: of the op, in bytes.
uint64_t MeshPartsBytesMax(const OpDesc& desc, uint64_t whole, uint64_t positions, bool crowded) {
  const uint64_t pieces = PiecesMax(desc, whole);
  const uint64_t block =
      desc.Encodes() ? std::max<uint64_t>(64, uint64_t{4} * CodecOf(desc).block) : 64;
  const uint64_t chunks = ChunksMax(desc, whole, positions);
  // Each part is rounded up to 64 bytes.
  const auto parts = [&](uint64_t others, uint64_t own) {
    return others * ((desc.Encodes() ? EncodedBytesMax(desc, own, chunks) : own) + 64);
  };
  if (Gathers(desc.kind)) {
    // Each position owns its share of each piece, which is rounded up to a block. Its chunk has up
    // to one block more.
    const auto share = static_cast<uint64_t>(static_cast<unsigned __int128>(whole) *
                                             GreatestShare(positions) / kShareUnits);
    return parts(positions - 1, std::min(whole + block, share + 2 * block * pieces));
  }
  if (!desc.InParts()) return parts(positions - 1, whole);
  // Each member owns one part. All but one of a peer's parts are there at the cost of a peer.
  const uint64_t world = desc.world;
  if (!crowded && !desc.unequal) return parts(positions - 1, whole / world + 64);
  uint64_t most = 0;
  for (uint64_t p = 2; p <= std::min(positions, world); ++p) {
    const uint64_t own = desc.unequal ? whole : whole / world * (world + 1 - p) + world;
    most = std::max(most, parts(p - 1, own));
  }
  return most;
}

// Bytes of the parts that are finished at a position, and held there until the op is committed.
// Each begins at a multiple of 64.
uint64_t HeldBytesMax(const OpDesc& desc, uint64_t whole, bool crowded) {
  if (!HoldsResults(desc)) return 0;
  const uint64_t pieces = PiecesMax(desc, whole);
  // One member at a peer owns one part. If there are several, or a part may be longer, all may be
  // here.
  if (!crowded && !desc.unequal) return whole / desc.world + 128 * pieces;
  return whole + 64 * pieces * desc.world;
}

}  // namespace

uint64_t ScratchBytesMax(const OpDesc& desc, bool in_place, size_t positions, bool crowded,
                         bool mesh, uint64_t unequal_bytes, bool errors) {
  if (IsAuto(desc.quantization)) {
    uint64_t most = 0;
    for (const Quantization codec :
         {Quantization::kNone, Quantization::kBf16, Quantization::kInt8, Quantization::kInt4}) {
      if (!IsAmong(desc.quantization, codec)) continue;
      most = std::max(most, ScratchBytesMax(desc.With(codec), in_place, positions, crowded, mesh,
                                            unequal_bytes, errors));
    }
    return most;
  }
  if (positions <= 1 || IsOneShot(desc) || !(Reduces(desc.kind) || desc.Encodes())) return 0;
  const uint64_t whole = desc.unequal ? unequal_bytes : desc.bytes();
  if (desc.Encodes()) {
    const uint64_t chunks = ChunksMax(desc, whole, positions);
    const uint64_t count = whole / (desc.list != 0 ? 2 : SizeOf(desc.dtype));
    const uint64_t parts =
        mesh && Reduces(desc.kind) ? MeshPartsBytesMax(desc, whole, positions, crowded) : 0;
    return EncodedBytesMax(desc, whole, chunks) + 64 + parts + 64 +
           (errors ? count * sizeof(float) + 64 : 0) + HeldBytesMax(desc, whole, crowded);
  }
  const uint64_t held = HeldBytesMax(desc, whole, crowded);
  const uint64_t slots = (whole + 63) / 64 * 64;
  // A list may have halves among its pieces.
  const bool halves = desc.Sums() && (IsHalf(desc.dtype) || desc.list != 0);
  const bool wide = halves && (desc.weighted || crowded);
  const bool wide_ring = wide || (halves && positions > 2);
  const bool ring_slots = in_place || wide_ring || !Gathers(desc.kind);
  const uint64_t ring = desc.order == Order::kRank || !ring_slots ? 0 : slots * (wide_ring ? 2 : 1);
  if (!mesh) return ring + held;
  const bool mesh_slots = in_place || wide || (!Gathers(desc.kind) && (desc.weighted || crowded));
  const uint64_t parts = MeshPartsBytesMax(desc, whole, positions, crowded) * (wide ? 2 : 1);
  return std::max(ring, (mesh_slots ? slots * (wide ? 2 : 1) : 0) + parts) + held;
}

}  // namespace longhaul::peerd
