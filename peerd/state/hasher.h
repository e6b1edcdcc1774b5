// Hashes chunks of a state without keeping the reactor waiting.
//
// Threads: the reactor's. `done` runs there, from within Ring::RunOnce() or the like and never from
// within Hash(), exactly once for each call; in any order.
//
// The bytes stay readable until `done`. That they do not change meanwhile is the caller's affair:
// if they do, the digest is one of no particular bits, which no comparison takes for right.
#pragma once

#include <cstddef>
#include <functional>

#include "base/hash128.h"

namespace longhaul::peerd {

class Hasher {
 public:
  virtual ~Hasher() = default;
  // HashChunk() (state_hash.h) of these bytes: of one chunk, so at most kStateChunkBytes.
  virtual void Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) = 0;
};

}  // namespace longhaul::peerd
