// Hashes chunks of a state, and creates the pages of memory for chunks, without blocking the
// reactor.
//
// Threads: the reactor thread. It calls Hash() and Touch(), and `done` runs on it: exactly once for
// each call, in any order, and never inside Hash() or Touch().
//
// The caller must keep the memory mapped until `done`. If the bytes change while they are hashed,
// the digest is wrong, and differs from the digest with which the caller compares it.
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
  // Computes HashChunk() (state_hash.h) of one chunk, of at most kStateChunkBytes.
  virtual void Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) = 0;
  // Calls TouchPages() (fresh_pages.h) for the memory of one chunk.
  virtual void Touch(std::span<uint8_t> memory, std::function<void()> done) = 0;
};

}  // namespace longhaul::peerd
