// Frames of a control lane as bytes: what comes cut into frames, what goes put together.
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
  // Where the next bytes go; never empty.
  std::span<uint8_t> Room();
  // So many came there.
  void Took(size_t bytes) { have_ += bytes; }

  struct Frame {
    FrameHeader header;
    std::span<const uint8_t> payload;  // until the next call
  };
  // The next one that is whole; none: more bytes are needed. InvalidArgument: this is no frame.
  absl::StatusOr<std::optional<Frame>> Next();
  // A part of a frame has come.
  bool in_frame() const { return have_ != 0; }

 private:
  std::vector<uint8_t> bytes_;
  size_t have_ = 0;
  size_t used_ = 0;  // of those, by Next()
};

class ControlWriter {
 public:
  explicit ControlWriter(size_t bytes_max) : bytes_max_(bytes_max) {}

  // These return false if more than bytes_max would wait.
  bool Add(const FrameHeader& header, std::span<const uint8_t> payload);
  // Whole frames that are encoded already.
  bool Add(std::span<const uint8_t> frames);
  // Takes the place of one of its type that has not begun to be sent.
  bool AddNewest(const FrameHeader& header);
  // The last one, which always has room.
  void AddLast(const FrameHeader& header);

  // What goes out now; it stays there until Sent() has named all of it. Empty: nothing waits.
  std::span<const uint8_t> Take();
  void Sent(size_t bytes) { flying_sent_ += bytes; }
  // Something has not been taken.
  bool waiting() const { return !queued_.empty(); }
  void DropWaiting() { queued_.clear(); }

 private:
  bool HasRoom(size_t bytes) const;

  const size_t bytes_max_;
  std::vector<uint8_t> queued_;
  std::vector<std::pair<FrameType, size_t>> newest_;  // in queued_: where AddNewest() put it
  std::vector<uint8_t> flying_;
  size_t flying_sent_ = 0;
};

}  // namespace longhaul::peerd
