// Splits the bytes received on a data lane into headers and payloads, and puts segments to send
// together in batches.
//
// A payload is received straight into its place, and sent straight from its memory. Nothing is
// copied here.
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
  // Fills `parts` with the places of the next bytes: the rest of a header, or the rest of a payload
  // and the next header behind it. Returns how many parts it filled.
  size_t Room(iovec parts[2]);
  // `bytes` were received there. Returns how many of them are payload.
  size_t Took(size_t bytes);

  // Returns the next header, or nothing if it is not complete. InvalidArgument: the bytes are no
  // header.
  absl::StatusOr<std::optional<FrameHeader>> TakeHeader();
  // The payload of `header` follows, and goes to `place`. nullptr: it is thrown away.
  void BeginPayload(const FrameHeader& header, uint8_t* place);
  // All of the payload has come.
  bool payload_is_whole() const { return have_ == header_.payload_bytes; }
  void EndPayload();
  // Throws the rest of the payload away.
  void Divert() { place_ = nullptr; }

  bool in_payload() const { return in_payload_; }
  // The header of the present payload, or of the last one.
  const FrameHeader& header() const { return header_; }
  // The payload has a place.
  bool kept() const { return place_ != nullptr; }
  // Part of a frame has been received.
  bool in_frame() const { return in_payload_ || next_have_ != 0; }

 private:
  std::array<uint8_t, kFrameHeaderBytes> next_;  // the next header
  size_t next_have_ = 0;
  bool in_payload_ = false;
  FrameHeader header_;
  size_t have_ = 0;  // bytes of the payload so far
  uint8_t* place_ = nullptr;
  std::vector<uint8_t> sink_;
};

class SegmentBatch {
 public:
  static constexpr size_t kMax = 16;
  // Has room for all that Parts() returns.
  using PartsArray = std::array<iovec, 2 * kMax>;

  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == kMax; }
  size_t size() const { return count_; }
  const OutgoingSegment& operator[](size_t i) const { return packets_[i].segment; }
  void Add(const OutgoingSegment& segment);
  // Forgets all segments, and what was sent of them.
  void Clear();

  // Returns the bytes of all segments with their headers.
  size_t bytes() const;
  size_t sent() const { return sent_; }
  void Sent(size_t bytes) { sent_ += bytes; }
  // Fills `parts` with what is left to send: headers, and with `payloads` also payloads. Returns
  // how many parts it filled.
  size_t Parts(bool payloads, PartsArray* parts) const;

 private:
  struct Packet {
    std::array<uint8_t, kFrameHeaderBytes> header;
    OutgoingSegment segment;
  };
  std::array<Packet, kMax> packets_;
  size_t count_ = 0;
  size_t sent_ = 0;  // bytes sent of the batch
};

}  // namespace longhaul::peerd
