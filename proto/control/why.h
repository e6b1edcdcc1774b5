// How a peer asks the coordinator why a group waits. See proto/longhaul/v1/why.proto.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "proto/control/messages.h"

namespace longhaul::control {

struct AskWhy {
  uint64_t request = 0;
  GroupKey group;
};

struct TellWhy {
  uint64_t request = 0;
  std::string text;
};

// Whether bytes from the stream are one of these messages, and not one of the protocol.
bool IsWhyMessage(std::string_view bytes);

// The text of an answer is cut after LH_ERROR_TEXT_BYTES_MAX bytes.
std::string Serialize(const AskWhy& ask);
std::string Serialize(const TellWhy& tell);
// InvalidArgument: the bytes are no such message, or break a limit; the text says which.
absl::StatusOr<AskWhy> ParseAskWhy(const std::string& bytes);
absl::StatusOr<TellWhy> ParseTellWhy(const std::string& bytes);

}  // namespace longhaul::control
