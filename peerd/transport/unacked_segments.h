// The segments that were sent on one data lane and are not acknowledged by the peer. If the lane is
// lost, they are sent again.
//
// A lane carries segments in order, so a count says which of them have arrived.
//
// Plain value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "peerd/transport/segment_framing.h"

namespace longhaul::peerd {

class UnackedSegments {
 public:
  // The segment was put on the lane.
  void Add(const OutgoingSegment& segment) { segments_.push_back(segment); }
  // The peer has received the first `received` segments of the lane. Returns how many of them are
  // newly acknowledged. InvalidArgument: so many were not sent.
  absl::StatusOr<size_t> Acknowledge(uint64_t received);

  // Segments put on the lane since it began.
  uint64_t sent() const { return acked_ + segments_.size(); }
  uint64_t acked() const { return acked_; }
  const std::deque<OutgoingSegment>& segments() const { return segments_; }

 private:
  uint64_t acked_ = 0;
  std::deque<OutgoingSegment> segments_;
};

}  // namespace longhaul::peerd
