// Hashes chunks of a state, and has the pages made that chunks will be received into, without
// keeping the reactor waiting.
//
// Threads: the reactor's. `done` runs there, from within Ring::RunOnce() or the like and never from
// within Hash() or Touch(), exactly once for each call; in any order.
//
// The bytes stay mapped until `done`. That they do not change while they are hashed is the caller's
// affair: if they do, the digest is one of no particular bits, which no comparison takes for right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/hash128.h"

namespace longhaul::peerd {

class Hasher {
 public:
  virtual ~Hasher() = default;
  // HashChunk() (state_hash.h) of these bytes: of one chunk, so at most kStateChunkBytes.
  virtual void Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) = 0;
  // TouchPages() (fresh_pages.h) of the memory of one chunk.
  virtual void Touch(std::span<uint8_t> memory, std::function<void()> done) = 0;
};

}  // namespace longhaul::peerd
