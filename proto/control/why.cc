#include "proto/control/why.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fields.h"
#include "proto/longhaul/v1/why.pb.h"
#include "proto/wire/limits.h"

namespace longhaul::control {
namespace {

// Field 65, with a length: how both envelopes begin.
constexpr std::string_view kEnvelope("\x8a\x04", 2);

}  // namespace

bool IsWhyMessage(std::string_view bytes) { return bytes.starts_with(kEnvelope); }

std::string Serialize(const AskWhy& ask) {
  v1::WhyRequestEnvelope envelope;
  v1::AskWhy* const proto = envelope.mutable_ask_why();
  proto->set_request(ask.request);
  proto->set_run(ask.group.run);
  proto->set_group(ask.group.group);
  return envelope.SerializeAsString();
}

std::string Serialize(const TellWhy& tell) {
  v1::WhyAnswerEnvelope envelope;
  v1::TellWhy* const proto = envelope.mutable_tell_why();
  proto->set_request(tell.request);
  proto->set_text(CleanText(tell.text, LH_ERROR_TEXT_BYTES_MAX));
  return envelope.SerializeAsString();
}

absl::StatusOr<AskWhy> ParseAskWhy(const std::string& bytes) {
  v1::WhyRequestEnvelope envelope;
  if (!envelope.ParseFromString(bytes) || !envelope.has_ask_why()) {
    return absl::InvalidArgumentError("a question why a group waits is not a valid protobuf");
  }
  const v1::AskWhy& proto = envelope.ask_why();
  AskWhy ask{proto.request(), {proto.run(), proto.group()}};
  if (ask.request == 0) {
    return absl::InvalidArgumentError("a question why a group waits has the number 0");
  }
  if (const std::string fault = FaultIn(ask.group); !fault.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("a question why a group waits: ", fault));
  }
  return ask;
}

absl::StatusOr<TellWhy> ParseTellWhy(const std::string& bytes) {
  v1::WhyAnswerEnvelope envelope;
  if (!envelope.ParseFromString(bytes) || !envelope.has_tell_why()) {
    return absl::InvalidArgumentError("the answer why a group waits is not a valid protobuf");
  }
  const v1::TellWhy& proto = envelope.tell_why();
  return TellWhy{proto.request(), CleanText(proto.text(), LH_ERROR_TEXT_BYTES_MAX)};
}

}  // namespace longhaul::control
