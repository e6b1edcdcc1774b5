// The segments of one data lane that were sent and that its other end has not acknowledged. Should
// the lane be lost, these are sent again.
//
// The lane carries segments in order, so a count says which of them have arrived.
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
  // The lane has taken it.
  void Add(const OutgoingSegment& segment) { segments_.push_back(segment); }
  // The other end has the first `received` segments of the lane. How many of them that was news of;
  // InvalidArgument: so many were not sent.
  absl::StatusOr<size_t> Acknowledge(uint64_t received);

  // Of the lane, since it stands.
  uint64_t sent() const { return acked_ + segments_.size(); }
  uint64_t acked() const { return acked_; }
  const std::deque<OutgoingSegment>& segments() const { return segments_; }

 private:
  uint64_t acked_ = 0;
  std::deque<OutgoingSegment> segments_;
};

}  // namespace longhaul::peerd
