// A state as it lies in memory: what it consists of, where each tensor is, and the digests of its
// chunks.
//
// Whoever hashed it made it. A transfer writes to the inbox, never to the places, and keeps the
// digests up to date as it does: what the state consists of then lies in both. `memory` keeps all
// of it mapped as long as the object lives, also when its owner is gone.
//
// Threads: the reactor's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "base/hash128.h"
#include "peerd/state/state_hash.h"

namespace longhaul::peerd {

// By tensor, by chunk. 0: not known, somebody has begun to write there.
using ChunkDigests = std::vector<std::vector<Hash128>>;

// Where a chunk begins in its tensor, and how long it is: the last one of a tensor is short.
inline uint64_t ChunkOffset(uint64_t chunk) { return chunk * kStateChunkBytes; }

struct MemoryState {
  Manifest manifest;
  std::vector<uint8_t*> places;  // by tensor: its bytes from there on
  ChunkDigests digests;          // CountChunks() of each tensor
  std::shared_ptr<const void> memory;
  // Where what is fetched goes, by tensor; empty: nothing is fetched. It is the place itself if the
  // bytes there are a copy that nobody needs any more.
  std::vector<uint8_t*> inbox;
  ChunkDigests fetched;  // what lies in the inbox

  void FetchInto(std::vector<uint8_t*> where);
  // Where the chunk is that has its digest.
  const uint8_t* Chunk(size_t tensor, uint64_t chunk) const;
  bool InInbox(size_t tensor, uint64_t chunk) const;
  // The inbox of the tensor is memory of its own, which may have no pages yet.
  bool FreshInbox(size_t tensor) const { return inbox[tensor] != places[tensor]; }
  // The chunk is received or copied to where this says, and not known until Fetched().
  uint8_t* BeginFetch(size_t tensor, uint64_t chunk);
  void Fetched(size_t tensor, uint64_t chunk, const Hash128& digest);
  // The chunk is to be this one. True: it is; an earlier transfer may have brought it.
  bool Has(size_t tensor, uint64_t chunk, const Hash128& digest);
};

uint32_t ChunkBytes(uint64_t tensor_bytes, uint64_t chunk);
// Of all tensors.
uint64_t CountChunks(const Manifest& manifest);

// The root (state_hash.h) that chunks of these digests add up to. `digests` fits the manifest.
Hash128 RootOf(const Manifest& manifest, const ChunkDigests& digests);

// The answer to ChunkKind::kDigests: 16 bytes a chunk (high, low), all chunks of all tensors in
// order.
inline constexpr size_t kDigestBytes = 16;
std::vector<uint8_t> EncodeDigests(const ChunkDigests& digests);
// `bytes`: kDigestBytes for each chunk of the manifest.
ChunkDigests ParseDigests(const Manifest& manifest, std::span<const uint8_t> bytes);

// The answer to ChunkKind::kManifest:
//   count u32 | each tensor: name_bytes u16 | name | dtype u8 | flags u8 (bit 0 allow_unequal) |
//   dims u8 | sizes u64 each | bytes u64
std::vector<uint8_t> EncodeManifest(const Manifest& manifest);
// InvalidArgument names what is beyond the limits of proto/wire/limits.h, or not whole.
absl::StatusOr<Manifest> ParseManifest(std::span<const uint8_t> bytes);
// What no manifest's encoding exceeds.
uint64_t ManifestBytesMax();

}  // namespace longhaul::peerd
