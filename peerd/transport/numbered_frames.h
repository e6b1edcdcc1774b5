// The numbered control frames of one end of a link (proto/wire/frame.h). Each frame arrives exactly
// once and in order, however many control lanes are lost on the way.
//
// A sent frame is kept until the peer has acknowledged it. On a control lane that replaces a lost
// one, each end first sends RESUME with the number of frames that it has received. The other end
// then first sends the frames that are missing.
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
  // ---- sending

  // Returns false, and keeps nothing, if the peer acknowledges too little.
  bool Keep(const FrameHeader& header, std::span<const uint8_t> payload);
  // Returns the frames to put on the lane now. Valid until the next call. Empty until resumed().
  std::span<const uint8_t> TakeForLane();
  // The peer has received `acked` frames. InvalidArgument: so many were not sent.
  absl::Status OnAcked(uint64_t acked);
  uint64_t sent() const { return sent_; }
  uint64_t acked() const { return acked_; }

  // ---- receiving

  // A frame came. InvalidArgument: it came before RESUME.
  absl::Status OnReceived();
  uint64_t received() const { return received_; }
  // A frame of `bytes` bytes has been handled. Returns whether to acknowledge now.
  bool AckIsDue(size_t bytes);

  // ---- a new control lane

  void BeginLane();
  // The peer's RESUME. Returns how many frames are sent again. InvalidArgument: the count is
  // impossible.
  absl::StatusOr<uint64_t> OnResume(uint64_t acked);
  // RESUME has come on this lane, or this is the first lane.
  bool resumed() const { return resumed_; }

 private:
  uint64_t sent_ = 0;
  uint64_t put_on_lane_ = 0;  // frames put on a lane at least once
  uint64_t acked_ = 0;
  std::vector<uint8_t> kept_;  // encoded frames, from kept_head_ on
  size_t kept_head_ = 0;
  size_t on_lane_bytes_ = 0;  // of these, what is on the present lane
  std::deque<uint32_t> kept_sizes_;
  uint64_t received_ = 0;
  uint32_t unacked_frames_ = 0;  // received since the last acknowledgement
  size_t unacked_bytes_ = 0;
  bool resumed_ = true;
};

}  // namespace longhaul::peerd
