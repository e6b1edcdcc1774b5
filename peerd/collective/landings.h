// A few small buffers into which segments are received that are used at once: the landings of an
// attempt (segment_attempt.h says what they are good for).
//
// They are parts of one buffer of the pool, which must outlive them. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "peerd/collective/attempt.h"
#include "peerd/collective/plan.h"

namespace longhaul::peerd {

class Landings {
 public:
  // There are none before Make().
  explicit Landings(ScratchPool* pool) : pool_(pool) {}
  Landings(const Landings&) = delete;
  Landings& operator=(const Landings&) = delete;
  ~Landings() { Release(); }

  // Borrows them, for segments of up to `bytes`, or of what is worthwhile. If the pool has no
  // memory, there are none: an op takes longer then, but is right.
  void Make(uint64_t bytes);
  // Takes one for a segment. nullptr: none is free, or the segment is too long.
  uint8_t* Borrow(const Plan::Range& range);
  // The one that holds the segment, or nullptr.
  uint8_t* Of(const Plan::Range& range) const;
  // Frees that of the segment, if there is one.
  void Give(const Plan::Range& range);
  // Gives the memory back. Nobody uses it any more.
  void Release();

 private:
  struct Landing {
    uint8_t* data = nullptr;
    std::optional<uint64_t> offset;  // of the segment that it holds; nullopt: free
  };

  ScratchPool* const pool_;
  uint64_t bytes_ = 0;  // of each
  std::vector<Landing> landings_;
};

}  // namespace longhaul::peerd
