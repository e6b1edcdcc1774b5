// How a request of a trainer ended. The numbers are those of lh_status in
// client/include/longhaul/longhaul.h and cross the Unix socket; they are never renumbered.
#pragma once

#include <cstdint>
#include <string>

namespace longhaul {

enum class Code : int32_t {
  kOk = 0,
  kInvalidArgument = 1,
  kFailedPrecondition = 2,
  kUnavailable = 3,
  kAborted = 4,
  kDeadlineExceeded = 5,
  kTooFewMembers = 6,
  kEvicted = 7,
  kStateMismatch = 8,
  kInternal = 9,
};

// A code and, unless it is kOk, a text that says what was seen and what to do.
struct Outcome {
  Code code = Code::kOk;
  std::string text;
  bool ok() const { return code == Code::kOk; }
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

}  // namespace longhaul
