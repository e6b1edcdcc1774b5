// A state in memory: its manifest, where each tensor is, and the digests of its chunks.
//
// The code that makes a MemoryState has the tensors hashed and sets the digests. A transfer writes
// chunks to the inbox and updates the digests. After a transfer some chunks of the state are in the
// tensors (`places`) and the other chunks are in the inbox; Chunk() knows where each chunk is.
// `memory` keeps everything mapped as long as the object exists, even after the trainer's end.
//
// Threads: the reactor thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "base/hash128.h"
#include "peerd/state/state_hash.h"

namespace longhaul::peerd {

// By tensor, then by chunk. 0: the digest is not known, for instance because a write has begun.
using ChunkDigests = std::vector<std::vector<Hash128>>;

// Where a chunk begins in its tensor.
inline uint64_t ChunkOffset(uint64_t chunk) { return chunk * kStateChunkBytes; }

struct MemoryState {
  Manifest manifest;
  std::vector<uint8_t*> places;  // for each tensor, where its bytes begin
  ChunkDigests digests;          // of the state, one for each chunk of each tensor
  std::shared_ptr<const void> memory;
  // For each tensor, where fetched chunks go. Empty: nothing can be fetched. The inbox of a tensor
  // is the place of the tensor itself if the place holds only a copy of the trainer's tensor.
  std::vector<uint8_t*> inbox;
  ChunkDigests fetched;  // of the chunks in the inbox

  // Sets the inbox. It holds no chunks yet.
  void FetchInto(std::vector<uint8_t*> where);
  // Returns the address of the chunk whose digest is in `digests`: in the inbox or in its tensor.
  const uint8_t* Chunk(size_t tensor, uint64_t chunk) const;
  // Returns whether that chunk is in the inbox.
  bool InInbox(size_t tensor, uint64_t chunk) const;
  // Returns whether the inbox is other memory than the tensor. Such memory may have no pages yet.
  bool FreshInbox(size_t tensor) const { return inbox[tensor] != places[tensor]; }
  // Returns where to write a chunk that is being fetched. Its digest is unknown until Fetched().
  uint8_t* BeginFetch(size_t tensor, uint64_t chunk);
  void Fetched(size_t tensor, uint64_t chunk, const Hash128& digest);
  // Returns whether this chunk of the state has this digest. If only a chunk that an earlier
  // transfer left in the inbox has it, that chunk becomes part of the state.
  bool Has(size_t tensor, uint64_t chunk, const Hash128& digest);
};

// Returns the length of a chunk in bytes. Only the last chunk of a tensor may be short.
uint32_t ChunkBytes(uint64_t tensor_bytes, uint64_t chunk);
// The number of chunks of all tensors together.
uint64_t CountChunks(const Manifest& manifest);

// The root (state_hash.h) of a state whose chunks have these digests.
Hash128 RootOf(const Manifest& manifest, const ChunkDigests& digests);

// The answer to ChunkKind::kDigests: kDigestBytes for each chunk (high, then low), for all chunks
// of all tensors in order.
inline constexpr size_t kDigestBytes = 16;
std::vector<uint8_t> EncodeDigests(const ChunkDigests& digests);
// `bytes` must have kDigestBytes for each chunk of the manifest.
ChunkDigests ParseDigests(const Manifest& manifest, std::span<const uint8_t> bytes);

// The answer to ChunkKind::kManifest:
//   count u32 | each tensor: name_bytes u16 | name | dtype u8 | flags u8 (bit 0 allow_unequal) |
//   dims u8 | sizes u64 each | bytes u64
std::vector<uint8_t> EncodeManifest(const Manifest& manifest);
// InvalidArgument: the text names what exceeds a limit (proto/wire/limits.h), or that bytes are
// missing.
absl::StatusOr<Manifest> ParseManifest(std::span<const uint8_t> bytes);
// The longest encoding that a manifest can have.
uint64_t ManifestBytesMax();

}  // namespace longhaul::peerd
