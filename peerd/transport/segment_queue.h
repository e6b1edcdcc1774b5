// The segments of one link that wait for a data lane: parts of frames, those of ops, and those of
// shared state. Parts go first: they are few, and ops cannot begin without them. While both of the
// others wait they take turns by bytes, ops first. If only one kind waits, it gets the whole link.
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
  // Puts these in front of all others of their kind, in this order.
  void PushFront(const std::vector<OutgoingSegment>& segments);
  bool empty() const { return parts_.empty() && ops_.empty() && chunks_.empty(); }
  size_t size() const { return parts_.size() + ops_.size() + chunks_.size(); }
  // The payload of all segments. Takes time in proportion to size().
  uint64_t bytes() const;
  // Returns the segment whose turn it is; nullptr: nothing waits.
  const OutgoingSegment* Next();
  // Takes the segment that Next() returns. Something must wait.
  OutgoingSegment Pop();
  // Drops the segments of this type with these cookies. Returns the cookies of those.
  std::vector<uint64_t> Drop(FrameType type, const std::unordered_set<uint64_t>& cookies);
  // Drops all segments of this type. Returns their cookies.
  std::vector<uint64_t> DropAll(FrameType type);

 private:
  std::deque<OutgoingSegment>* Turn();
  std::deque<OutgoingSegment>* QueueOf(FrameType type);

  std::deque<OutgoingSegment> parts_;   // PART segments
  std::deque<OutgoingSegment> ops_;     // DATA segments
  std::deque<OutgoingSegment> chunks_;  // CHUNK_DATA segments
  // While both kinds wait: bytes of chunks that were taken, less bytes of ops that were taken.
  int64_t chunks_ahead_ = 0;
};

}  // namespace longhaul::peerd
