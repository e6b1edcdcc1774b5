#include "peerd/transport/segment_framing.h"

#include <algorithm>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

// Payloads that are thrown away are read in pieces of this size.
constexpr size_t kDiscardBytes = 64 << 10;

}  // namespace

size_t SegmentReader::Room(iovec parts[2]) {
  if (!in_payload_) {
    parts[0] = {next_.data() + next_have_, next_.size() - next_have_};
    return 1;
  }
  const size_t rest = header_.payload_bytes - have_;
  size_t part = rest;
  if (place_ != nullptr) {
    parts[0] = {place_ + have_, part};
  } else {
    sink_.resize(kDiscardBytes);
    part = std::min(rest, sink_.size());
    parts[0] = {sink_.data(), part};
  }
  parts[1] = {next_.data(), next_.size()};
  return part == rest ? 2 : 1;
}

size_t SegmentReader::Took(size_t bytes) {
  const size_t payload =
      in_payload_ ? std::min<size_t>(bytes, header_.payload_bytes - have_) : size_t{0};
  have_ += payload;
  next_have_ += bytes - payload;
  return payload;
}

absl::StatusOr<std::optional<FrameHeader>> SegmentReader::TakeHeader() {
  if (next_have_ < kFrameHeaderBytes) return std::nullopt;
  next_have_ = 0;
  const auto header = ParseFrameHeader(next_, LaneKind::kData);
  if (!header.ok()) return header.status();
  return *header;
}

void SegmentReader::BeginPayload(const FrameHeader& header, uint8_t* place) {
  header_ = header;
  in_payload_ = true;
  have_ = 0;
  place_ = place;
}

void SegmentReader::EndPayload() {
  in_payload_ = false;
  place_ = nullptr;
}

void SegmentBatch::Add(const OutgoingSegment& segment) {
  LH_CHECK(!full());
  packets_[count_++] = {.header = Encode(segment.header), .segment = segment};
}

void SegmentBatch::Clear() {
  count_ = 0;
  sent_ = 0;
}

size_t SegmentBatch::bytes() const {
  size_t bytes = 0;
  for (size_t i = 0; i < count_; ++i) {
    bytes += kFrameHeaderBytes + packets_[i].segment.header.payload_bytes;
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
    const OutgoingSegment& segment = packets_[i].segment;
    add(packets_[i].header.data(), kFrameHeaderBytes);
    if (payloads) add(segment.data, segment.header.payload_bytes);
  }
  return count;
}

}  // namespace longhaul::peerd
