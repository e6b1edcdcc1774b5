// Splits the bytes received on a data lane into headers and payloads, and puts segments to send
// together in batches.
//
// A payload is received straight into its place, and sent straight from its memory. Nothing is
// copied here.
//
// On a sealed lane, header and payload of a frame are two texts (base/crypto/sealing.h), each with
// a tag behind it. The header is opened first, because it says where the payload goes. A payload is
// sealed into memory of the batch, and opened in its place, piece by piece. Before the payload's
// tag was found right, the place may hold anything: the segment does not count as received, and is
// sent again. A payload of no bytes has no tag.
//
// Plain values: no I/O.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/crypto/sealing.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

struct OutgoingSegment {
  FrameHeader header;
  const uint8_t* data = nullptr;
  uint64_t cookie = 0;
  uint64_t owner = 0;  // see Transport::SendSegment
  // Of a part of a frame (parted_frames.h): what `data` points into. A part has no cookie.
  std::shared_ptr<const std::vector<uint8_t>> memory = nullptr;
};

class SegmentReader {
 public:
  // `opener`: of a sealed lane; must outlive the reader. nullptr: frames come in clear.
  explicit SegmentReader(Opener* opener = nullptr) : opener_(opener) {}

  // Fills `parts` with the places of the next bytes: the rest of a header, or the rest of a payload
  // and the next header behind it. Returns how many parts it filled.
  size_t Room(iovec parts[2]);
  // `bytes` were received there. Returns how many of them are payload.
  size_t Took(size_t bytes);

  // Returns the next header, or nothing if it is not complete. InvalidArgument: the bytes are no
  // header. Unauthenticated: the other end did not send them.
  absl::StatusOr<std::optional<FrameHeader>> TakeHeader();
  // The payload of `header` follows, and goes to `place`. nullptr: it is thrown away.
  void BeginPayload(const FrameHeader& header, uint8_t* place);
  // All of the payload has come.
  bool payload_is_whole() const {
    return have_ == header_.payload_bytes && tail_have_ >= TagBytes();
  }
  // Call it for a whole payload. Unauthenticated: the other end did not send what is in the place;
  // the payload does not end.
  absl::Status EndPayload();
  // Throws the rest of the payload away.
  void Divert() { place_ = nullptr; }

  bool in_payload() const { return in_payload_; }
  // The header of the present payload, or of the last one.
  const FrameHeader& header() const { return header_; }
  // The payload has a place.
  bool kept() const { return place_ != nullptr; }
  // Part of a frame has been received.
  bool in_frame() const { return in_payload_ || tail_have_ != 0; }

 private:
  size_t HeaderBytes() const { return kFrameHeaderBytes + (opener_ != nullptr ? kTagBytes : 0); }
  // Of the present payload.
  size_t TagBytes() const {
    return opener_ != nullptr && in_payload_ && header_.payload_bytes > 0 ? kTagBytes : 0;
  }

  Opener* const opener_;
  // What follows the payload: its tag, if there is one, and the next header.
  std::array<uint8_t, kTagBytes + kFrameHeaderBytes + kTagBytes> tail_;
  size_t tail_have_ = 0;
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
  // Seals all segments that were added. Call it once, before anything is sent.
  void Seal(Sealer* sealer);
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
    std::array<uint8_t, kFrameHeaderBytes + kTagBytes> header;
    OutgoingSegment segment;
    size_t sealed_at = 0;  // where the sealed payload is in sealed_
  };
  size_t HeaderBytes() const { return kFrameHeaderBytes + (sealed_now_ ? kTagBytes : 0); }
  // Of the payload with its tag.
  size_t PayloadBytes(const Packet& packet) const {
    const size_t bytes = packet.segment.header.payload_bytes;
    return bytes + (sealed_now_ && bytes > 0 ? kTagBytes : 0);
  }

  std::array<Packet, kMax> packets_;
  size_t count_ = 0;
  size_t sent_ = 0;  // bytes sent of the batch
  bool sealed_now_ = false;
  std::unique_ptr<uint8_t[]> sealed_;  // sealed payloads
  size_t sealed_room_ = 0;
};

}  // namespace longhaul::peerd
