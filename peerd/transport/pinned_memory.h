// Memory that segments are sent from. It is pinned piece by piece, so that zero-copy sends do not
// have to pin it themselves.
//
// A piece is pinned when it is first sent from. By then the trainer has filled it, and memory that
// is never sent costs nothing. At most one piece is pinned and one released in a turn of the ring,
// since PINGs of other links wait meanwhile.
//
// Threads: the ring's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "peerd/io/ring.h"
#include "peerd/transport/event_queue.h"

namespace longhaul::peerd {

class PinnedMemory {
 public:
  PinnedMemory(Ring* ring, EventQueue* events) : ring_(ring), events_(events) {}

  // The memory is not touched before it is sent from.
  void Add(const uint8_t* data, size_t bytes);
  // The caller may unmap the memory at once.
  void Remove(const uint8_t* data);
  // Returns the registered buffer that holds these bytes, or -1 if there is none yet.
  int Find(const uint8_t* data, size_t bytes);
  // The ring is about to end, and that releases everything.
  void Close() { closing_ = true; }

 private:
  struct Memory {
    size_t bytes = 0;
    std::vector<int> buffers;  // of each piece in order; -1: not pinned
    bool refused = false;      // the system does not let us pin more
  };

  int Pin(const uint8_t* data, Memory* memory, size_t piece);
  void UnpinNext();

  Ring* const ring_;
  EventQueue* const events_;
  std::map<const uint8_t*, Memory> memory_;
  std::vector<int> unused_buffers_;  // of memory that was removed
  bool pinned_ = false;              // a piece was pinned in this turn of the ring
  bool unpinning_ = false;           // the next buffer is released in the next turn
  bool warned_ = false;
  bool closing_ = false;
};

}  // namespace longhaul::peerd
