// Segments of one link that wait for a data lane: those of ops, and those of shared state. While
// both wait they take turns by bytes, ops first; alone, each has all of the link.
//
// Plain value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>
#include <vector>

#include "peerd/transport/segment_framing.h"

namespace longhaul::peerd {

class SegmentQueue {
 public:
  void Push(const OutgoingSegment& segment);
  // In front of all others of their kind, in this order.
  void PushFront(const std::vector<OutgoingSegment>& segments);
  bool empty() const { return ops_.empty() && chunks_.empty(); }
  size_t size() const { return ops_.size() + chunks_.size(); }
  // Whose turn it is; nullptr: nothing waits.
  const OutgoingSegment* Next();
  // Takes that one. Something waits.
  OutgoingSegment Pop();
  // Takes out those with these cookies, or all; their cookies.
  std::vector<uint64_t> Drop(const std::unordered_set<uint64_t>& cookies);
  std::vector<uint64_t> DropAll();

 private:
  std::deque<OutgoingSegment>* Turn();

  std::deque<OutgoingSegment> ops_;     // DATA
  std::deque<OutgoingSegment> chunks_;  // CHUNK_DATA
  // While both have something: bytes of chunks that went onto lanes less bytes of ops.
  int64_t chunks_ahead_ = 0;
};

}  // namespace longhaul::peerd
