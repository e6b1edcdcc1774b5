#include "peerd/transport/control_channel.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace longhaul::peerd {
namespace {

// Frames that are kept until Deliver(). Later ones are bounded by what the peer sends ahead
// (parted_frames.h).
constexpr size_t kHeldBytesMax = 1 << 20;
// A longer payload of a frame goes in parts on a long path, since it does not fit into what a
// control lane that was idle sends at once.
constexpr size_t kUnpartedBytesMax = 9 << 10;
// Frames that may be held back. The members of this peer cannot cause more.
constexpr size_t kWaitingBytesMax = kControlQueueBytesMax;

}  // namespace

// ------------------------------------------------------------------------------ lanes

void ControlChannel::Begin(std::unique_ptr<Lane> lane) {
  lane_ = std::move(lane);
  lane_->StartReceiving();
  SendPing();
}

void ControlChannel::Resume(std::unique_ptr<Lane> lane, uint64_t serial, bool barren) {
  LH_CHECK(lane_ == nullptr && serial > serial_);
  serial_ = serial;
  lane_ = std::move(lane);
  frames_.BeginLane();
  lane_->StartReceiving();
  SendBare({.type = FrameType::kResume, .flags = barren ? kFlagBarren : uint8_t{0}});
}

void ControlChannel::Lose() {
  lost_.push_back(std::move(lane_));
  lost_at_ = ring_->Now();
}

std::unique_ptr<Lane> ControlChannel::TakeEnded(const Lane* lane) {
  const auto it = std::find_if(lost_.begin(), lost_.end(),
                               [lane](const auto& lost) { return lost.get() == lane; });
  if (it == lost_.end()) return nullptr;
  std::unique_ptr<Lane> ended = std::move(*it);
  lost_.erase(it);
  return ended;
}

// ------------------------------------------------------------------------------ sending

void ControlChannel::Send(const FrameHeader& header, std::span<const uint8_t> payload,
                          bool may_wait) {
  if (closed_) return;
  if (!IsNumbered(header.type)) return SendBare(header);
  if (!IsForListener(header.type)) return SendNumbered(header, payload, may_wait);
  if (waiting_.empty() && !parts_out_.full()) return SendForListener(header, payload, may_wait);
  waiting_bytes_ += kFrameHeaderBytes + payload.size();
  if (waiting_bytes_ > kWaitingBytesMax) {
    return Stuck("link to " + remote_, "does not say that frames have come");
  }
  waiting_.push_back(
      {.header = header, .payload = {payload.begin(), payload.end()}, .may_wait = may_wait});
}

bool ControlChannel::MustPart(size_t payload_bytes) const {
  if (payload_bytes > LH_CONTROL_PAYLOAD_BYTES_MAX) return true;
  return payload_bytes > kUnpartedBytesMax && owner_->long_way() && owner_->data_lanes() > 0;
}

void ControlChannel::SendForListener(const FrameHeader& header, std::span<const uint8_t> payload,
                                     bool may_wait) {
  if (!MayBeParted(header.type) || !MustPart(payload.size())) {
    parts_out_.Sent(payload.size());
    return SendNumbered(header, payload, may_wait);
  }
  const PartedSender::Split split =
      parts_out_.SplitFrame(header, payload, std::max<uint32_t>(owner_->data_lanes(), 1));
  parts_out_.Sent(payload.size());
  SendNumbered(split.header, split.payload, /*may_wait=*/false);
  if (!closed_) owner_->SendParts(split.parts);
}

void ControlChannel::SendNumbered(const FrameHeader& header, std::span<const uint8_t> payload,
                                  bool may_wait) {
  if (!frames_.Keep(header, payload)) {
    return Stuck("control lane to " + remote_, "does not acknowledge what it is sent");
  }
  PutOnLane(may_wait);
}

void ControlChannel::PutOnLane(bool may_wait) {
  if (lane_ == nullptr || !frames_.resumed()) return;
  if (!lane_->SendFrames(frames_.TakeForLane(), may_wait)) Stuck(lane_->name(), "does not read");
}

void ControlChannel::SendPing() {
  SendBare({.type = FrameType::kPing, .stamp = static_cast<uint64_t>(ring_->Now().us)});
}

// All of these say what this end has received. The peer decides how many PINGs we have to
// answer, and need not read the answers. So a new frame replaces one that waits.
void ControlChannel::SendBare(FrameHeader header) {
  if (lane_ == nullptr || closed_) return;
  header.acked = frames_.received();
  header.offset = parts_in_.delivered();
  const bool sent =
      header.type == FrameType::kResume ? lane_->SendFrame(header, {}) : lane_->SendNewest(header);
  if (!sent) Stuck(lane_->name(), "does not read");
}

void ControlChannel::Stuck(const std::string& who, const std::string& what) {
  owner_->OnControlStuck(absl::StrCat(who, ": the other side ", what));
}

// ------------------------------------------------------------------------------ receiving

absl::Status ControlChannel::OnFrame(const FrameHeader& header, std::span<const uint8_t> payload) {
  if (!IsNumbered(header.type)) return Handle(header, payload);
  LH_RETURN_IF_ERROR(frames_.OnReceived());
  LH_RETURN_IF_ERROR(Handle(header, payload));
  if (!closed_ && frames_.AckIsDue(kFrameHeaderBytes + payload.size())) {
    SendBare({.type = FrameType::kAck});
  }
  return absl::OkStatus();
}

absl::Status ControlChannel::Handle(const FrameHeader& header, std::span<const uint8_t> payload) {
  switch (header.type) {
    case FrameType::kPing:
      SendBare({.type = FrameType::kPong, .stamp = header.stamp});
      return OnAcked(header);
    case FrameType::kPong:
      OnPong(header);
      return OnAcked(header);
    case FrameType::kAck:
      return OnAcked(header);
    case FrameType::kResume:
      return OnResume(header);
    default:
      return IsForListener(header.type) ? TakeIn(header, payload)
                                        : owner_->OnControlFrame(header, payload);
  }
}

absl::Status ControlChannel::OnResume(const FrameHeader& header) {
  LH_ASSIGN_OR_RETURN(const uint64_t repeated, frames_.OnResume(header.acked));
  acked_before_ = frames_.acked();
  since_ = ring_->Now();
  owner_->OnControlResumed(repeated, (header.flags & kFlagBarren) != 0);
  PutOnLane(/*may_wait=*/false);
  return OnAcked(header);
}

void ControlChannel::OnPong(const FrameHeader& header) {
  const int64_t us = ring_->Now().us - static_cast<int64_t>(header.stamp);
  if (us >= 0 && us <= Seconds(60)) {
    rtt_us_ = std::max<int64_t>(us, 1);
    rtt_high_us_ = std::max(rtt_us_, rtt_high_us_ * 7 / 8);
  }
  if (!std::exchange(established_, true)) owner_->OnControlAnswered();
}

absl::Status ControlChannel::OnAcked(const FrameHeader& header) {
  if (closed_) return absl::OkStatus();
  LH_RETURN_IF_ERROR(frames_.OnAcked(header.acked));
  LH_RETURN_IF_ERROR(parts_out_.OnDelivered(header.offset));
  while (!closed_ && !waiting_.empty() && !parts_out_.full()) {
    const KeptFrame frame = std::move(waiting_.front());
    waiting_.pop_front();
    waiting_bytes_ -= kFrameHeaderBytes + frame.payload.size();
    SendForListener(frame.header, frame.payload, frame.may_wait);
  }
  return absl::OkStatus();
}

absl::Status ControlChannel::TakeIn(const FrameHeader& header, std::span<const uint8_t> payload) {
  if (header.type != FrameType::kParted) {
    if (delivering_ && held_.empty()) return owner_->OnControlFrame(header, payload);
    return Hold(header, payload, false);
  }
  LH_ASSIGN_OR_RETURN(const FrameHeader frame, parts_in_.Announced(header, payload));
  LH_RETURN_IF_ERROR(Hold(frame, {}, true));
  return delivering_ ? HandOn() : absl::OkStatus();
}

// Keeps the frame until Deliver(), since the peer may know before us that the link is complete; or
// until the frames before it are whole.
absl::Status ControlChannel::Hold(const FrameHeader& header, std::span<const uint8_t> payload,
                                  bool parted) {
  held_bytes_ += kFrameHeaderBytes + payload.size();
  if (held_bytes_ > (delivering_ ? LH_PARTED_HELD_BYTES_MAX : kHeldBytesMax)) {
    return absl::InvalidArgumentError(delivering_ ? "too many frames behind one that is not whole"
                                                  : "too many frames before the link is complete");
  }
  held_.push_back(
      {.header = header, .payload = {payload.begin(), payload.end()}, .parted = parted});
  return absl::OkStatus();
}

// Hands on the frames that were held, up to the first one that is not whole.
absl::Status ControlChannel::HandOn() {
  bool parted = false;
  while (!closed_ && !held_.empty()) {
    KeptFrame& frame = held_.front();
    if (frame.parted) {
      std::optional<std::vector<uint8_t>> payload = parts_in_.TakeNext();
      if (!payload) break;
      if (payload->size() != frame.header.payload_bytes) {
        return absl::InvalidArgumentError(absl::StrCat("a frame of ", frame.header.payload_bytes,
                                                       " bytes has parts of ", payload->size()));
      }
      parted = true;
      frame.payload = *std::move(payload);
    } else {
      held_bytes_ -= frame.payload.size();
    }
    held_bytes_ -= kFrameHeaderBytes;
    const KeptFrame whole = std::move(frame);
    held_.pop_front();
    LH_RETURN_IF_ERROR(owner_->OnControlFrame(whole.header, whole.payload));
  }
  if (parted && !closed_) SendBare({.type = FrameType::kAck});
  return absl::OkStatus();
}

absl::Status ControlChannel::OnPartReceived(const FrameHeader& header) {
  parts_in_.Received(header);
  return HandOn();
}

absl::Status ControlChannel::Deliver() {
  delivering_ = true;
  return HandOn();
}

}  // namespace longhaul::peerd
