// How much of what a stranger sends gRPC gets to see. A stranger is a caller that has not shown a
// valid token or certificate yet.
//
// gRPC 1.51 bounds neither the headers nor the streams of a client that does not acknowledge its
// settings, and its quota of memory counts neither. So this class reads the frames of HTTP/2 in
// front of it, in clear, and lets through what an honest caller needs for its first call. What is
// beyond waits: the caller may be just about to be known.
//
// Plain value: no clock, no thread, and it keeps no bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace longhaul::coordinator {

class StrangerBudget {
 public:
  static constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  // The first call of peerd has one HEADERS of about 300 bytes, and less than ten other frames.
  static constexpr size_t kStreamsMax = 3;
  static constexpr size_t kHeaderBytesMax = 2048;  // of all HEADERS and CONTINUATION
  static constexpr size_t kFramesMax = 48;
  static constexpr size_t kOtherBytesMax = 8192;  // of all other frames but DATA
  // The Hello at a port that asks for nothing comes before its caller is known.
  static constexpr size_t kDataBytesMax = 32768;

  // Looks at the next bytes of the connection. Returns how many of them may pass: all, or those
  // before the first frame that is too much. The caller gives the others again later, or never.
  // `bytes` that do not reach the end of a frame's header do not pass before the rest of it comes.
  size_t Pass(std::string_view bytes);
  // Whether the bytes are no HTTP/2 from the beginning: the connection is to be closed.
  bool broken() const { return broken_; }

 private:
  bool PassFrame(uint8_t type, size_t length);

  size_t preface_ = 0;  // of its bytes have passed
  size_t left_ = 0;     // of the frame that is passing
  size_t streams_ = 0;
  size_t header_bytes_ = 0;
  size_t frames_ = 0;
  size_t other_bytes_ = 0;
  size_t data_bytes_ = 0;
  bool broken_ = false;
};

}  // namespace longhaul::coordinator
