// How a request of a trainer ended. The numbers are those of lh_status in
// client/include/longhaul/longhaul.h. They cross the Unix socket and are never changed.
#pragma once

#include <cstdint>
#include <string>

#include "base/fields.h"

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

constexpr auto NamesOf(Code) {
  return EnumNames{
      0,
      {"ok", "invalid_argument", "failed_precondition", "unavailable", "aborted",
       "deadline_exceeded", "too_few_members", "evicted", "state_mismatch", "internal"}};
}

inline constexpr size_t kOutcomeTextBytesMax = 448;

// A code. Unless it is kOk, a text says what was seen and what to do.
struct Outcome {
  Code code = Code::kOk;
  std::string text;
  bool ok() const { return code == Code::kOk; }
  LH_FIELDS(Outcome, LH_FIELD(code), LH_FIELD(text, rule::Text{kOutcomeTextBytesMax}));
};

}  // namespace longhaul
