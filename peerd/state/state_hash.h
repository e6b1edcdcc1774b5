// Digests of shared state. They form a tree with three levels, the same at every member:
//
//   chunk    XXH3-128 of its bytes. A tensor is cut every kStateChunkBytes; its last chunk is short
//   tensor   XXH3-128 of its length and the digests of its chunks
//   state    XXH3-128 of the digest of the manifest and the digests of the tensors that are
//            compared. This digest is called the root
//
// The digest of the manifest covers names, dtypes, shapes and order. So two states that differ only
// in the shape of a tensor have different digests. A digest does not depend on threads, alignment
// or instruction set: XXH3 (https://xxhash.com, specification 0.8) gives one value everywhere.
//
// XXH3 finds errors and divergence at the speed of memory. It does not stop a member that forges
// collisions; such a member could as well vote for a wrong state.
//
// Pure functions, for any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/hash128.h"
#include "proto/wire/limits.h"
#include "proto/wire/types.h"

namespace longhaul::peerd {

// This is part of the protocol: all members must cut tensors in the same way.
inline constexpr uint64_t kStateChunkBytes = LH_STATE_CHUNK_BYTES;

// The dtype that only tensors of a state have.
inline constexpr uint8_t kStateBool = LH_WIRE_BOOL;

// The declaration of one tensor.
struct StateTensor {
  std::string name;
  uint8_t dtype = 0;  // lh_wire_dtype or kStateBool
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
  bool allow_unequal = false;  // members may differ; a newcomer that fetches the state gets it once
  friend bool operator==(const StateTensor&, const StateTensor&) = default;
};
// The declaration of all tensors, in the same order at all members.
using Manifest = std::vector<StateTensor>;

// The number of chunks of a tensor of `bytes`.
inline uint64_t CountChunks(uint64_t bytes) {
  return bytes / kStateChunkBytes + (bytes % kStateChunkBytes != 0);
}

Hash128 HashChunk(std::span<const uint8_t> bytes);
// `chunks`: the digests of the CountChunks(bytes) chunks.
Hash128 HashTensor(uint64_t bytes, std::span<const Hash128> chunks);
Hash128 HashManifest(const Manifest& manifest);
// `tensors`: the digest of each tensor of the manifest. Tensors that may be unequal are skipped.
Hash128 HashState(const Manifest& manifest, std::span<const Hash128> tensors);

// Returns a text about the first difference between two manifests; "" if there is none. The text
// says "here" for `ours` and "there" for `theirs`.
std::string FirstDifference(const Manifest& ours, const Manifest& theirs);

}  // namespace longhaul::peerd
