// Digests of shared state: a tree of three levels, the same at every member.
//
//   chunk    XXH3-128 over its bytes; a tensor is cut every kStateChunkBytes, the last is short
//   tensor   XXH3-128 over (bytes, the digests of its chunks)
//   state    XXH3-128 over (the manifest's digest, the digests of the tensors that are compared)
//
// Names, dtypes, shapes and order are in the manifest's digest and lengths in the tensors', so that
// tensors that differ in shape alone differ. A digest does not depend on threads, alignment or
// instruction set: XXH3 (https://xxhash.com, specification 0.8) has one value everywhere. It finds
// errors and divergence at the speed of memory; it does not stop a member that forges collisions,
// who could as well vote for a wrong state.
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

// Part of the protocol: members cut alike.
inline constexpr uint64_t kStateChunkBytes = LH_STATE_CHUNK_BYTES;

// The dtype that only tensors of a state have.
inline constexpr uint8_t kStateBool = LH_WIRE_BOOL;

// One tensor as its owner declares it.
struct StateTensor {
  std::string name;
  uint8_t dtype = 0;  // lh_wire_dtype or kStateBool
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
  bool allow_unequal = false;  // not compared; sent once to a newcomer
  friend bool operator==(const StateTensor&, const StateTensor&) = default;
};
// In the order that all members declare.
using Manifest = std::vector<StateTensor>;

inline uint64_t CountChunks(uint64_t bytes) {
  return bytes / kStateChunkBytes + (bytes % kStateChunkBytes != 0);
}

Hash128 HashChunk(std::span<const uint8_t> bytes);
// `chunks`: CountChunks(bytes) of them.
Hash128 HashTensor(uint64_t bytes, std::span<const Hash128> chunks);
Hash128 HashManifest(const Manifest& manifest);
// `tensors`: as many as the manifest has; those that may be unequal are skipped.
Hash128 HashState(const Manifest& manifest, std::span<const Hash128> tensors);

// The first difference, in words that name both sides; "" if there is none. A tensor of `theirs` is
// called theirs, whoever they are.
std::string FirstDifference(const Manifest& ours, const Manifest& theirs);

}  // namespace longhaul::peerd
