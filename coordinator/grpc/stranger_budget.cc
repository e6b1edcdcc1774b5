#include "coordinator/grpc/stranger_budget.h"

#include <algorithm>

namespace longhaul::coordinator {
namespace {

constexpr size_t kFrameHeader = 9;  // length (3), type (1), flags (1), stream (4)
constexpr uint8_t kData = 0;
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kContinuation = 9;

}  // namespace

size_t StrangerBudget::Pass(std::string_view bytes) {
  size_t passed = 0;
  const size_t preface = std::min(kPreface.size() - preface_, bytes.size());
  if (bytes.substr(0, preface) != kPreface.substr(preface_, preface)) broken_ = true;
  if (broken_) return 0;
  preface_ += preface;
  passed += preface;
  while (passed < bytes.size()) {
    if (left_ > 0) {
      const size_t more = std::min(left_, bytes.size() - passed);
      left_ -= more;
      passed += more;
      continue;
    }
    const std::string_view header = bytes.substr(passed);
    if (header.size() < kFrameHeader) break;
    const auto byte = [&header](size_t i) { return static_cast<uint8_t>(header[i]); };
    const size_t length = size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2);
    if (!PassFrame(byte(3), length)) break;
    left_ = length;
    passed += kFrameHeader;
  }
  return passed;
}

bool StrangerBudget::PassFrame(uint8_t type, size_t length) {
  if (frames_ >= kFramesMax) return false;
  const bool headers = type == kHeaders || type == kContinuation;
  size_t& bytes = headers ? header_bytes_ : type == kData ? data_bytes_ : other_bytes_;
  const size_t most = headers ? kHeaderBytesMax : type == kData ? kDataBytesMax : kOtherBytesMax;
  if (length > most - bytes || (type == kHeaders && streams_ >= kStreamsMax)) return false;
  bytes += length;
  if (type == kHeaders) ++streams_;
  ++frames_;
  return true;
}

}  // namespace longhaul::coordinator
