// Segments of a data lane as bytes: what comes told apart into headers and payload, and what goes
// put together into batches.
//
// A payload goes straight to its place, and comes straight from there; nothing is copied here.
//
// Plain values: no I/O.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

struct OutgoingSegment {
  FrameHeader header;
  const uint8_t* data = nullptr;
  uint64_t cookie = 0;
  uint64_t owner = 0;  // see Transport::SendSegment
};

class SegmentReader {
 public:
  // Where the next bytes go: the rest of a header; or the rest of a payload, and the next header
  // behind it. How many of `parts` that takes.
  size_t Room(iovec parts[2]);
  // So many came there. How many of them are payload.
  size_t Took(size_t bytes);

  // The header that has come; none: not all of it. InvalidArgument: this is none.
  absl::StatusOr<std::optional<FrameHeader>> TakeHeader();
  // Its payload follows, to this place; nullptr: it is thrown away.
  void BeginPayload(const FrameHeader& header, uint8_t* place);
  // All of it has come.
  bool payload_is_whole() const { return have_ == header_.payload_bytes; }
  void EndPayload();
  // The rest goes nowhere.
  void Divert() { place_ = nullptr; }

  bool in_payload() const { return in_payload_; }
  // Of the payload that is coming, or came last.
  const FrameHeader& header() const { return header_; }
  // It has a place.
  bool kept() const { return place_ != nullptr; }
  // A part of a frame has come.
  bool in_frame() const { return in_payload_ || next_have_ != 0; }

 private:
  std::array<uint8_t, kFrameHeaderBytes> next_;  // header
  size_t next_have_ = 0;
  bool in_payload_ = false;
  FrameHeader header_;
  size_t have_ = 0;  // of its payload
  uint8_t* place_ = nullptr;
  std::vector<uint8_t> sink_;
};

class SegmentBatch {
 public:
  static constexpr size_t kMax = 16;
  // What Parts() needs.
  using PartsArray = std::array<iovec, 2 * kMax>;

  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == kMax; }
  size_t size() const { return count_; }
  const OutgoingSegment& operator[](size_t i) const { return packets_[i].segment; }
  void Add(const OutgoingSegment& segment);
  // Empty again, also of what was sent.
  void Clear();

  // Of all of them, with headers.
  size_t bytes() const;
  size_t sent() const { return sent_; }
  void Sent(size_t bytes) { sent_ += bytes; }
  // What is left to send, payloads or headers alone. How many of `parts` that takes.
  size_t Parts(bool payloads, PartsArray* parts) const;

 private:
  struct Packet {
    std::array<uint8_t, kFrameHeaderBytes> header;
    OutgoingSegment segment;
  };
  std::array<Packet, kMax> packets_;
  size_t count_ = 0;
  size_t sent_ = 0;  // bytes
};

}  // namespace longhaul::peerd
