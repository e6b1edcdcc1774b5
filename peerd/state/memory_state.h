// A state in memory: its manifest, where each tensor is, and the digests of its chunks.
//
// Whoever makes a MemoryState hashes the tensors. A transfer writes chunks to the inbox and updates
// the digests. After a transfer some chunks of the state are in the tensors (`places`) and the
// others in the inbox; Chunk() says which. `memory` keeps everything mapped as long as the object
// exists, also when its owner is gone.
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

// By tensor, then by chunk. 0: not known, because somebody has begun to write to the chunk.
using ChunkDigests = std::vector<std::vector<Hash128>>;

// Where a chunk begins in its tensor.
inline uint64_t ChunkOffset(uint64_t chunk) { return chunk * kStateChunkBytes; }

struct MemoryState {
  Manifest manifest;
  std::vector<uint8_t*> places;  // for each tensor, where its bytes begin
  ChunkDigests digests;          // of the state, one for each chunk of each tensor
  std::shared_ptr<const void> memory;
  // For each tensor, where fetched chunks go. Empty: nothing can be fetched. Equal to the place of
  // the tensor if that is only a copy, which may be overwritten.
  std::vector<uint8_t*> inbox;
  ChunkDigests fetched;  // of the chunks in the inbox

  // Sets the inbox. It holds no chunks yet.
  void FetchInto(std::vector<uint8_t*> where);
  // Where the chunk with the digest in `digests` is: in the inbox or in its tensor.
  const uint8_t* Chunk(size_t tensor, uint64_t chunk) const;
  // Whether that chunk is in the inbox.
  bool InInbox(size_t tensor, uint64_t chunk) const;
  // Whether the inbox of the tensor is memory of its own. Such memory may have no pages yet.
  bool FreshInbox(size_t tensor) const { return inbox[tensor] != places[tensor]; }
  // Returns where to write the chunk. Its digest is unknown until Fetched().
  uint8_t* BeginFetch(size_t tensor, uint64_t chunk);
  void Fetched(size_t tensor, uint64_t chunk, const Hash128& digest);
  // Whether the state has a chunk with this digest. A chunk that an earlier transfer left in the
  // inbox counts, and becomes part of the state.
  bool Has(size_t tensor, uint64_t chunk, const Hash128& digest);
};

// The length of a chunk of a tensor.
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
