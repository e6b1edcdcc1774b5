// Memory that segments are sent from, pinned piece by piece so that sends without a copy need not
// pin it themselves.
//
// A piece is pinned when it is first sent from, not when its memory is announced: then its trainer
// has filled it, and what is never sent costs nothing. One piece is pinned, and one released, in a
// turn of the ring: pings of other links are not to wait for more.
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
  // It may be unmapped at once.
  void Remove(const uint8_t* data);
  // The registered buffer that holds these bytes, or -1: there is none, or not now.
  int Find(const uint8_t* data, size_t bytes);
  // The ring is about to end, which releases everything.
  void Close() { closing_ = true; }

 private:
  struct Memory {
    size_t bytes = 0;
    std::vector<int> buffers;  // of each piece from the start on; -1: not pinned
    bool refused = false;      // the system lets us pin no more
  };

  int Pin(const uint8_t* data, Memory* memory, size_t piece);
  void UnpinNext();

  Ring* const ring_;
  EventQueue* const events_;
  std::map<const uint8_t*, Memory> memory_;
  std::vector<int> unused_buffers_;  // of memory that is no more
  bool pinned_ = false;              // in this turn of the ring
  bool unpinning_ = false;           // the next one has its turn
  bool warned_ = false;
  bool closing_ = false;
};

}  // namespace longhaul::peerd
