// Control messages as protobuf and back: the border at which foreign messages are checked.
//
// Derived from the fields that the messages name (proto/control/messages.h, base/fields.h): a field
// of a struct is the field of that name in the .proto file. What FromProto() lets through needs no
// further doubt: exactly one message is set, and nothing in it breaks a rule of its fields.
// Texts for people are not worth a refusal: they are cut to their limit, and made valid UTF-8.
// Fields of newer releases are ignored, kinds of message of newer releases refused.
//
// Pure functions: no threads, no state. Include the .pb.h beside this one to look into the protos.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "proto/control/messages.h"

namespace longhaul::v1 {
class CoordinatorMessage;
class PeerMessage;
}  // namespace longhaul::v1

namespace longhaul::control {

v1::PeerMessage ToProto(const PeerMessage& message);
v1::CoordinatorMessage ToProto(const CoordinatorMessage& message);

// InvalidArgument: the text names message, field and value ("EpochReady: ops[3].ordinal is 0, not
// an id"). The stream is to be closed.
absl::StatusOr<PeerMessage> FromProto(const v1::PeerMessage& proto);
absl::StatusOr<CoordinatorMessage> FromProto(const v1::CoordinatorMessage& proto);

// The same with protobuf's bytes, for journals and simulation. Bytes that are no message of the
// type, or more than LH_CONTROL_MESSAGE_BYTES_MAX, are InvalidArgument.
std::string Serialize(const PeerMessage& message);
std::string Serialize(const CoordinatorMessage& message);
absl::StatusOr<PeerMessage> ParsePeerMessage(const std::string& bytes);
absl::StatusOr<CoordinatorMessage> ParseCoordinatorMessage(const std::string& bytes);

}  // namespace longhaul::control
