#include "peerd/transport/segment_framing.h"

#include <string.h>

#include <algorithm>
#include <span>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

// Payloads that are thrown away are read in pieces of this size.
constexpr size_t kDiscardBytes = 64 << 10;

}  // namespace

size_t SegmentReader::Room(iovec parts[2]) {
  size_t count = 0;
  if (const size_t rest = in_payload_ ? header_.payload_bytes - have_ : 0; rest > 0) {
    size_t part = rest;
    if (place_ != nullptr) {
      parts[count++] = {place_ + have_, part};
    } else {
      sink_.resize(kDiscardBytes);
      part = std::min(rest, sink_.size());
      parts[count++] = {sink_.data(), part};
    }
    if (part < rest) return count;
  }
  parts[count++] = {tail_.data() + tail_have_, TagBytes() + HeaderBytes() - tail_have_};
  return count;
}

size_t SegmentReader::Took(size_t bytes) {
  const size_t payload =
      in_payload_ ? std::min<size_t>(bytes, header_.payload_bytes - have_) : size_t{0};
  // What is thrown away is not opened.
  if (payload > 0 && opener_ != nullptr && place_ != nullptr) {
    opener_->Open(place_ + have_, payload);
  }
  have_ += payload;
  tail_have_ += bytes - payload;
  return payload;
}

absl::StatusOr<std::optional<FrameHeader>> SegmentReader::TakeHeader() {
  if (tail_have_ < HeaderBytes()) return std::nullopt;
  tail_have_ = 0;
  if (opener_ != nullptr &&
      !opener_->OpenWhole(tail_.data(), kFrameHeaderBytes, tail_.data() + kFrameHeaderBytes)) {
    return absl::UnauthenticatedError(
        "the header of a frame has a wrong tag: it was changed on the way, or comes from somebody "
        "else");
  }
  const auto header =
      ParseFrameHeader(std::span<const uint8_t, kFrameHeaderBytes>(tail_.data(), kFrameHeaderBytes),
                       LaneKind::kData);
  if (!header.ok()) return header.status();
  return *header;
}

void SegmentReader::BeginPayload(const FrameHeader& header, uint8_t* place) {
  header_ = header;
  in_payload_ = true;
  have_ = 0;
  place_ = place;
  // The other end has counted this text, so it is counted here even if it is thrown away.
  if (TagBytes() > 0) opener_->Begin();
}

absl::Status SegmentReader::EndPayload() {
  if (const size_t tag = TagBytes(); tag > 0) {
    if (place_ != nullptr && !opener_->Finish(tail_.data())) {
      return absl::UnauthenticatedError(
          "the payload of a frame has a wrong tag: it was changed on the way");
    }
    tail_have_ -= tag;
    memmove(tail_.data(), tail_.data() + tag, tail_have_);
  }
  in_payload_ = false;
  place_ = nullptr;
  return absl::OkStatus();
}

void SegmentBatch::Add(const OutgoingSegment& segment) {
  LH_CHECK(!full());
  LH_CHECK(!sealed_now_);
  Packet& packet = packets_[count_++];
  const auto header = Encode(segment.header);
  std::copy(header.begin(), header.end(), packet.header.begin());
  packet.segment = segment;
}

void SegmentBatch::Seal(Sealer* sealer) {
  sealed_now_ = true;
  size_t bytes = 0;
  for (size_t i = 0; i < count_; ++i) {
    packets_[i].sealed_at = bytes;
    bytes += PayloadBytes(packets_[i]);
  }
  if (bytes > sealed_room_) {
    sealed_ = std::make_unique_for_overwrite<uint8_t[]>(bytes);
    sealed_room_ = bytes;
  }
  for (size_t i = 0; i < count_; ++i) {
    Packet& packet = packets_[i];
    sealer->Seal(packet.header.data(), kFrameHeaderBytes, packet.header.data());
    const uint32_t payload = packet.segment.header.payload_bytes;
    if (payload > 0) {
      sealer->Seal(packet.segment.data, payload, sealed_.get() + packet.sealed_at);
    }
  }
}

void SegmentBatch::Clear() {
  for (size_t i = 0; i < count_; ++i) packets_[i].segment.memory = nullptr;
  count_ = 0;
  sent_ = 0;
  sealed_now_ = false;
}

size_t SegmentBatch::bytes() const {
  size_t bytes = 0;
  for (size_t i = 0; i < count_; ++i) {
    bytes += HeaderBytes() + PayloadBytes(packets_[i]);
  }
  return bytes;
}

size_t SegmentBatch::Parts(bool payloads, PartsArray* parts) const {
  size_t skip = sent_;
  size_t count = 0;
  const auto add = [&](const uint8_t* data, size_t bytes) {
    const size_t skipped = std::min(skip, bytes);
    skip -= skipped;
    if (bytes > skipped) {
      (*parts)[count++] = {const_cast<uint8_t*>(data) + skipped, bytes - skipped};
    }
  };
  for (size_t i = 0; i < count_; ++i) {
    const Packet& packet = packets_[i];
    add(packet.header.data(), HeaderBytes());
    if (!payloads) continue;
    add(sealed_now_ ? sealed_.get() + packet.sealed_at : packet.segment.data, PayloadBytes(packet));
  }
  return count;
}

}  // namespace longhaul::peerd
