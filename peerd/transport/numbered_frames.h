// The numbered control frames of one end of a link (proto/wire/frame.h): each arrives exactly once,
// in order, over as many control lanes as it takes.
//
// Sent frames are kept until the other end has acknowledged them. On a lane that takes the place of
// a lost one each end says RESUME and how many it has received; what the other one has not goes
// onto that lane first.
//
// Plain value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class NumberedFrames {
 public:
  // ---- what we send

  // False: the other side acknowledges too little, nothing was kept.
  bool Keep(const FrameHeader& header, std::span<const uint8_t> payload);
  // What has to go onto the lane now; valid until the next call. Empty until resumed().
  std::span<const uint8_t> TakeForLane();
  // The other end has so many. InvalidArgument: so many were not sent.
  absl::Status OnAcked(uint64_t acked);
  uint64_t sent() const { return sent_; }
  uint64_t acked() const { return acked_; }

  // ---- what we receive

  // One more. InvalidArgument: it may not come before the RESUME.
  absl::Status OnReceived();
  uint64_t received() const { return received_; }
  // A frame of so many bytes has been dealt with. True: it is time to acknowledge.
  bool AckIsDue(size_t bytes);

  // ---- another lane

  void BeginLane();
  // The other end's RESUME. How many frames go out once more; InvalidArgument: it says what cannot
  // be.
  absl::StatusOr<uint64_t> OnResume(uint64_t acked);
  // The other end has said what it has, or this is the first lane.
  bool resumed() const { return resumed_; }

 private:
  uint64_t sent_ = 0;
  uint64_t put_on_lane_ = 0;  // of those, at least once
  uint64_t acked_ = 0;
  std::vector<uint8_t> kept_;  // from kept_head_ on
  size_t kept_head_ = 0;
  size_t on_lane_bytes_ = 0;  // of those, the first, on this lane
  std::deque<uint32_t> kept_sizes_;
  uint64_t received_ = 0;
  uint32_t unacked_frames_ = 0;  // received since we acknowledged last
  size_t unacked_bytes_ = 0;
  bool resumed_ = true;
};

}  // namespace longhaul::peerd
