// Converts control messages to protobuf and back, and checks every message that was received.
//
// The conversion uses the list of fields of each message (proto/control/messages.h, base/fields.h):
// a field of a struct is the field of the same name in the .proto file.
//
// A message from FromProto() is valid: exactly one kind of message is set, and no field breaks its
// rule. Texts for people are never refused: they are cut to their limit and made valid UTF-8. A
// field of a newer release is ignored. A kind of message of a newer release is refused.
//
// Pure functions: no threads, no state. To access fields of the protobuf messages, include the
// .pb.h, too.
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

// Converts and checks a received message. InvalidArgument: the text names message, field and value,
// such as "EpochReady: ops[3].ordinal is 0, not an id". Then the caller must close the stream.
absl::StatusOr<PeerMessage> FromProto(const v1::PeerMessage& proto);
absl::StatusOr<CoordinatorMessage> FromProto(const v1::CoordinatorMessage& proto);

// The same with serialized protobuf messages, as streams carry them. InvalidArgument: as for
// FromProto(), or the bytes are no protobuf message or exceed LH_CONTROL_MESSAGE_BYTES_MAX.
std::string Serialize(const PeerMessage& message);
std::string Serialize(const CoordinatorMessage& message);
absl::StatusOr<PeerMessage> ParsePeerMessage(const std::string& bytes);
absl::StatusOr<CoordinatorMessage> ParseCoordinatorMessage(const std::string& bytes);

}  // namespace longhaul::control
