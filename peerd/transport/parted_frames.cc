#include "peerd/transport/parted_frames.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

// A shorter part gains nothing, because it takes a packet anyway: with both headers and the tags of
// a sealed lane, so many bytes fill one.
constexpr size_t kPartBytesMin = 1344;
// A longer part might be sent without a copy, and its memory does not live long enough for that.
constexpr size_t kPartBytesMax = 31 << 10;
// Frames in parts that wait. Shorter payloads are not parted.
constexpr uint64_t kWaitingMax = 4096;

}  // namespace

PartedSender::Split PartedSender::SplitFrame(const FrameHeader& header,
                                             std::span<const uint8_t> payload, uint32_t lanes) {
  LH_CHECK(header.payload_bytes == payload.size() && lanes > 0);
  ++numbered_;
  begun_at_.push_back(sent_bytes_);
  const OpOrdinal number(numbered_);
  Split split;
  split.header = {.type = FrameType::kParted, .payload_bytes = kFrameHeaderBytes, .op = number};
  const auto encoded = Encode(header);
  split.payload.assign(encoded.begin(), encoded.end());
  const auto memory = std::make_shared<const std::vector<uint8_t>>(payload.begin(), payload.end());
  const size_t share = (payload.size() + lanes - 1) / lanes;
  const size_t most = std::clamp(share, kPartBytesMin, kPartBytesMax);
  for (size_t offset = 0; offset < payload.size(); offset += most) {
    OutgoingSegment& part = split.parts.emplace_back();
    part.header = {.type = FrameType::kPart,
                   .payload_bytes = static_cast<uint32_t>(std::min(most, payload.size() - offset)),
                   .op = number,
                   .offset = offset,
                   .stamp = payload.size()};
    part.data = memory->data() + offset;
    part.memory = memory;
  }
  return split;
}

void PartedSender::Sent(size_t bytes) { sent_bytes_ += kFrameHeaderBytes + bytes; }

bool PartedSender::full() const {
  return !begun_at_.empty() && sent_bytes_ - begun_at_.front() > LH_PARTED_AHEAD_BYTES_MAX;
}

absl::Status PartedSender::OnDelivered(uint64_t delivered) {
  if (delivered > numbered_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "acknowledges ", delivered, " frames in parts where ", numbered_, " were sent"));
  }
  for (; delivered_ < delivered; ++delivered_) begun_at_.pop_front();
  return absl::OkStatus();
}

absl::StatusOr<uint8_t*> PartedReceiver::Place(const FrameHeader& part) {
  const uint64_t number = part.op.value();
  if (number <= delivered_ || number - delivered_ > kWaitingMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("PART of frame ", number, " where ", delivered_, " have come whole"));
  }
  const auto [it, first] = payloads_.try_emplace(number);
  Payload& payload = it->second;
  if (first) {
    held_bytes_ += part.stamp;
    if (held_bytes_ > LH_PARTED_HELD_BYTES_MAX) {
      return absl::InvalidArgumentError("too many frames in parts that are not whole");
    }
    payload.bytes.resize(part.stamp);
  }
  payload.placed += part.payload_bytes;
  if (payload.bytes.size() != part.stamp || payload.placed > part.stamp) {
    return absl::InvalidArgumentError(absl::StrCat("PARTs of frame ", number, " have ",
                                                   payload.placed, " bytes or more, of ",
                                                   payload.bytes.size()));
  }
  return payload.bytes.data() + part.offset;
}

void PartedReceiver::Received(const FrameHeader& part) {
  payloads_.at(part.op.value()).arrived += part.payload_bytes;
}

void PartedReceiver::Abandoned(const FrameHeader& part) {
  payloads_.at(part.op.value()).placed -= part.payload_bytes;
}

absl::StatusOr<FrameHeader> PartedReceiver::Announced(const FrameHeader& parted,
                                                      std::span<const uint8_t> payload) {
  if (parted.op.value() != announced_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("PARTED ", parted.op.value(), " after ", announced_));
  }
  const auto header = ParseFrameHeader(payload.first<kFrameHeaderBytes>(), LaneKind::kControl);
  if (!header.ok()) return header.status();
  if (!MayBeParted(header->type)) {
    return absl::InvalidArgumentError(
        absl::StrCat("PARTED of a frame of type ", static_cast<int>(header->type)));
  }
  ++announced_;
  return *header;
}

std::optional<std::vector<uint8_t>> PartedReceiver::TakeNext() {
  const auto it = payloads_.find(delivered_ + 1);
  if (it == payloads_.end() || announced_ == delivered_) return std::nullopt;
  Payload& payload = it->second;
  if (payload.arrived != payload.bytes.size()) return std::nullopt;
  std::vector<uint8_t> bytes = std::move(payload.bytes);
  held_bytes_ -= bytes.size();
  payloads_.erase(it);
  ++delivered_;
  return bytes;
}

}  // namespace longhaul::peerd
