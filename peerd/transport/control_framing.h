// Turns the bytes received on a control lane into frames, and frames to send into bytes.
//
// On a sealed lane both go through the lane's TLS session, so the bytes of several frames share a
// record of TLS.
//
// Plain values: no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "peerd/transport/tls_session.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class ControlReader {
 public:
  // `tls`: of a sealed lane; must outlive the reader. nullptr: frames come in clear.
  explicit ControlReader(TlsSession* tls = nullptr) : tls_(tls) {}

  // Returns where the next bytes go. Never empty.
  std::span<uint8_t> Room();
  // `bytes` were received there.
  void Took(size_t bytes);

  struct Frame {
    FrameHeader header;
    std::span<const uint8_t> payload;  // valid until the next call
  };
  // Returns the next whole frame, or nothing if more bytes are needed. InvalidArgument: the bytes
  // are no frame. Unauthenticated: the other end did not send them.
  absl::StatusOr<std::optional<Frame>> Next();
  // Part of a frame has been received.
  bool in_frame() const { return have_ != 0; }

 private:
  TlsSession* const tls_;
  std::vector<uint8_t> sealed_;  // as received
  std::vector<uint8_t> bytes_;
  size_t have_ = 0;
  size_t used_ = 0;  // the part of these that Next() has returned
};

class ControlWriter {
 public:
  explicit ControlWriter(size_t bytes_max, TlsSession* tls = nullptr)
      : bytes_max_(bytes_max), tls_(tls) {}

  // These return false if more than bytes_max would wait.
  bool Add(const FrameHeader& header, std::span<const uint8_t> payload);
  // Adds whole frames that are already encoded.
  bool Add(std::span<const uint8_t> frames);
  // Replaces a waiting frame of the same type, if there is one.
  bool AddNewest(const FrameHeader& header);
  // Adds the last frame. It always has room.
  void AddLast(const FrameHeader& header);

  // Returns the bytes to send now. They stay valid until Sent() has counted them all. Empty:
  // nothing waits.
  std::span<const uint8_t> Take();
  void Sent(size_t bytes) { flying_sent_ += bytes; }
  // Something was added and not taken.
  bool waiting() const { return !queued_.empty(); }
  void DropWaiting() { queued_.clear(); }

 private:
  bool HasRoom(size_t bytes) const;

  const size_t bytes_max_;
  TlsSession* const tls_;
  std::vector<uint8_t> queued_;
  std::vector<std::pair<FrameType, size_t>> newest_;  // where AddNewest() put frames in queued_
  std::vector<uint8_t> flying_;
  size_t flying_sent_ = 0;
};

}  // namespace longhaul::peerd
