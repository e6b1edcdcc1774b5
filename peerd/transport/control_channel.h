// The control frames of one link, both ways: the control lane and its replacements, the frames that
// must arrive, and the round trip.
//
// PING, PONG, ACK and RESUME are bare: of each only the newest matters, and they are lost
// with their lane. All other frames are numbered (numbered_frames.h), and arrive exactly once and
// in order, however many control lanes are lost. On a control lane that replaces a lost one, each
// end first sends RESUME with the number of numbered frames that it has received, and then the
// frames that the other end lacks.
//
// Frames for the listener may come in parts (parted_frames.h), which travel on data lanes. Such a
// frame, and those behind it, are held until it is whole. So are all frames before Deliver(). If
// too many bytes are ahead of what the peer has handed on, frames for the listener wait here.
//
// Ownership: the channel owns the lanes, and the owner of the channel is the owner of the lanes. It
// passes on what lanes report. After Close() nothing is sent or handed on.
//
// Threads: the ring's. The owner is called from within calls of this class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/lane.h"
#include "peerd/transport/numbered_frames.h"
#include "peerd/transport/parted_frames.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class ControlChannelOwner {
 public:
  virtual ~ControlChannelOwner() = default;
  // The peer has answered a PING for the first time.
  virtual void OnControlAnswered() = 0;
  // A frame that is not the channel's own came; one for the listener is whole. If it returns an
  // error, the peer broke the protocol.
  virtual absl::Status OnControlFrame(const FrameHeader& header,
                                      std::span<const uint8_t> payload) = 0;
  // Frames go on where the lost lane left off; `repeated` are sent again. `barren`: nothing that
  // the peer sent on the lost lane arrived (black_hole.h).
  virtual void OnControlResumed(uint64_t repeated, bool barren) = 0;
  // The peer does not read, or does not acknowledge. The owner has to call Close().
  virtual void OnControlStuck(const std::string& reason) = 0;
  // These parts of a frame are to be put on data lanes.
  virtual void SendParts(const std::vector<OutgoingSegment>& parts) = 0;
  // On how many data lanes parts would travel.
  virtual uint32_t data_lanes() const = 0;
  virtual bool long_way() const = 0;
};

class ControlChannel {
 public:
  // `remote`: for error texts. `established`: the peer need not answer a PING.
  ControlChannel(Ring* ring, std::string remote, bool established, ControlChannelOwner* owner)
      : ring_(ring), remote_(std::move(remote)), owner_(owner), established_(established) {}
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  // ---- lanes

  // The first lane of the link.
  void Begin(std::unique_ptr<Lane> lane);
  // A lane that replaces a lost one. `serial`: greater than serial(). `barren`: nothing that was
  // sent on the lost lane arrived.
  void Resume(std::unique_ptr<Lane> lane, uint64_t serial, bool barren);
  // nullptr: it is lost, and not replaced yet.
  Lane* lane() const { return lane_.get(); }
  uint64_t serial() const { return serial_; }
  // The lane is lost. It stays here until TakeEnded().
  void Lose();
  Tick lost_at() const { return lost_at_; }
  // When the newest lane came into use, and whether the peer has acknowledged none of the numbered
  // frames that were on it, if there were any.
  Tick since() const { return since_; }
  bool nothing_arrived() const {
    return frames_.sent() > frames_.acked() && frames_.acked() == acked_before_;
  }
  // Returns this lane if it is a lost one, else nullptr.
  std::unique_ptr<Lane> TakeEnded(const Lane* lane);
  template <class F>
  void ForEachLane(F f) const {
    if (lane_ != nullptr) f(lane_.get());
    for (const auto& lane : lost_) f(lane.get());
  }

  // ---- sending

  // `may_wait` concerns numbered frames only, see Lane::SendFrames().
  void Send(const FrameHeader& header, std::span<const uint8_t> payload, bool may_wait);
  void SendPing();
  // Of all numbered frames: how many were sent, and how many the peer has received.
  uint64_t sent() const { return frames_.sent(); }
  uint64_t acked() const { return frames_.acked(); }

  // ---- receiving. If one of these returns an error, the peer broke the protocol.

  absl::Status OnFrame(const FrameHeader& header, std::span<const uint8_t> payload);
  // A part of a frame, on a data lane; as LaneOwner::OnLaneData() and so on.
  absl::StatusOr<uint8_t*> OnPart(const FrameHeader& header) { return parts_in_.Place(header); }
  absl::Status OnPartReceived(const FrameHeader& header);
  void OnPartAbandoned(const FrameHeader& header) { parts_in_.Abandoned(header); }
  // Hands over the frames for the listener that have come. From now on they are not held.
  absl::Status Deliver();
  bool delivering() const { return delivering_; }

  // Whether the peer has answered a PING, if it had to.
  bool established() const { return established_; }
  // Of the last PING; 0: none was answered yet.
  int64_t rtt_us() const { return rtt_us_; }
  // The highest recent one. It falls by an eighth with each PONG.
  int64_t rtt_high_us() const { return rtt_high_us_; }

  void Close() { closed_ = true; }

 private:
  // A frame for the listener, with its payload.
  struct KeptFrame {
    FrameHeader header;
    std::vector<uint8_t> payload;
    bool parted = false;    // held: the payload comes in parts
    bool may_wait = false;  // waiting
  };

  absl::Status Handle(const FrameHeader& header, std::span<const uint8_t> payload);
  absl::Status OnResume(const FrameHeader& header);
  absl::Status OnAcked(const FrameHeader& header);
  void OnPong(const FrameHeader& header);
  absl::Status TakeIn(const FrameHeader& header, std::span<const uint8_t> payload);
  absl::Status Hold(const FrameHeader& header, std::span<const uint8_t> payload, bool parted);
  absl::Status HandOn();
  bool MustPart(size_t payload_bytes) const;
  void SendForListener(const FrameHeader& header, std::span<const uint8_t> payload, bool may_wait);
  void SendNumbered(const FrameHeader& header, std::span<const uint8_t> payload, bool may_wait);
  void PutOnLane(bool may_wait);
  void SendBare(FrameHeader header);
  void Stuck(const std::string& who, const std::string& what);

  Ring* const ring_;
  const std::string remote_;
  ControlChannelOwner* const owner_;
  bool closed_ = false;
  bool established_;
  bool delivering_ = false;

  std::unique_ptr<Lane> lane_;
  uint64_t serial_ = 0;
  Tick lost_at_;
  Tick since_;
  uint64_t acked_before_ = 0;                // frames_.acked() at since_
  std::vector<std::unique_ptr<Lane>> lost_;  // those that have not ended

  NumberedFrames frames_;
  // Frames that came before Deliver(), or behind a frame of which parts are missing.
  std::deque<KeptFrame> held_;
  size_t held_bytes_ = 0;
  PartedReceiver parts_in_;
  PartedSender parts_out_;
  // Frames to send that are held back (PartedSender::full()).
  std::deque<KeptFrame> waiting_;
  size_t waiting_bytes_ = 0;

  int64_t rtt_us_ = 0;
  int64_t rtt_high_us_ = 0;
};

}  // namespace longhaul::peerd
