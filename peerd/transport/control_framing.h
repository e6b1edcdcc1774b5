// Turns the bytes received on a control lane into frames, and frames to send into bytes.
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
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class ControlReader {
 public:
  // Returns where the next bytes go. Never empty.
  std::span<uint8_t> Room();
  // `bytes` were received there.
  void Took(size_t bytes) { have_ += bytes; }

  struct Frame {
    FrameHeader header;
    std::span<const uint8_t> payload;  // valid until the next call
  };
  // Returns the next whole frame, or nothing if more bytes are needed. InvalidArgument: the bytes
  // are no frame.
  absl::StatusOr<std::optional<Frame>> Next();
  // Part of a frame has been received.
  bool in_frame() const { return have_ != 0; }

 private:
  std::vector<uint8_t> bytes_;
  size_t have_ = 0;
  size_t used_ = 0;  // the part of these that Next() has returned
};

class ControlWriter {
 public:
  explicit ControlWriter(size_t bytes_max) : bytes_max_(bytes_max) {}

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
  std::vector<uint8_t> queued_;
  std::vector<std::pair<FrameType, size_t>> newest_;  // where AddNewest() put frames in queued_
  std::vector<uint8_t> flying_;
  size_t flying_sent_ = 0;
};

}  // namespace longhaul::peerd
