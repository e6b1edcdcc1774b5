// Numbered frames whose payload travels in parts on data lanes, because it is too long for a
// control lane. A connection that was idle sends ten packets and then waits for a round trip. So
// such a payload is spread over all data lanes of the link, and arrives as fast as a short one.
//
// The control lane carries PARTED in place of the frame, with the frame's header. When all parts
// are here, the frame takes the place of PARTED. Frames behind it wait, since frames must arrive in
// order. Parts are segments: if a lane is lost, they are sent again on another one.
//
// What waits is bounded at both ends. The receiver says how many such frames it has handed on, and
// the sender holds further frames back while too many bytes are ahead of that.
//
// Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "peerd/transport/segment_framing.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class PartedSender {
 public:
  struct Split {
    FrameHeader header;            // of PARTED
    std::vector<uint8_t> payload;  // of PARTED
    std::vector<OutgoingSegment> parts;
  };
  // Splits a frame for so many lanes.
  Split SplitFrame(const FrameHeader& header, std::span<const uint8_t> payload, uint32_t lanes);

  // So many bytes of frames for the listener are sent: `bytes` of payload, in parts or not. For a
  // frame in parts, call it after SplitFrame().
  void Sent(size_t bytes);
  // Whether frames for the listener must be held back.
  bool full() const;
  // The receiver has handed on the first `delivered` frames in parts. InvalidArgument: so many were
  // not sent.
  absl::Status OnDelivered(uint64_t delivered);

 private:
  uint64_t numbered_ = 0;
  uint64_t delivered_ = 0;
  uint64_t sent_bytes_ = 0;
  // Of each frame in parts that is not delivered: sent_bytes_ before it.
  std::deque<uint64_t> begun_at_;
};

class PartedReceiver {
 public:
  // Where a part goes. InvalidArgument: it fits no frame, or too much waits.
  absl::StatusOr<uint8_t*> Place(const FrameHeader& part);
  // A part that was placed has arrived, or will not arrive.
  void Received(const FrameHeader& part);
  void Abandoned(const FrameHeader& part);

  // PARTED came. Returns the header of the frame itself.
  absl::StatusOr<FrameHeader> Announced(const FrameHeader& parted,
                                        std::span<const uint8_t> payload);
  // Takes the payload of the next frame that was announced, if all of it is here. The caller checks
  // that it is as long as the frame's header says.
  std::optional<std::vector<uint8_t>> TakeNext();
  // How many frames were taken.
  uint64_t delivered() const { return delivered_; }

 private:
  struct Payload {
    std::vector<uint8_t> bytes;
    uint64_t placed = 0;  // bytes of parts that have arrived or are arriving
    uint64_t arrived = 0;
  };

  uint64_t announced_ = 0;
  uint64_t delivered_ = 0;
  std::map<uint64_t, Payload> payloads_;  // by number
  uint64_t held_bytes_ = 0;               // of payloads_
};

}  // namespace longhaul::peerd
