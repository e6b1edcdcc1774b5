// Control messages as protobuf and back: the border at which foreign messages are checked.
//
// What FromProto() lets through needs no further doubt: exactly one message is set, names have the
// right length and alphabet, counts are within proto/wire/limits.h, ids that a message needs are
// not 0 and not twice in one list, enums are known, epochs are in order, endpoints are host:port.
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

// InvalidArgument: the text names message, field and value. The stream is to be closed.
absl::StatusOr<PeerMessage> FromProto(const v1::PeerMessage& proto);
absl::StatusOr<CoordinatorMessage> FromProto(const v1::CoordinatorMessage& proto);

// The same with protobuf's bytes, for journals and simulation. Bytes that are no message of the
// type, or more than LH_CONTROL_MESSAGE_BYTES_MAX, are InvalidArgument.
std::string Serialize(const PeerMessage& message);
std::string Serialize(const CoordinatorMessage& message);
absl::StatusOr<PeerMessage> ParsePeerMessage(const std::string& bytes);
absl::StatusOr<CoordinatorMessage> ParseCoordinatorMessage(const std::string& bytes);

// "EpochReady" and so on: for logs and metrics.
const char* Name(const PeerMessage& message);
const char* Name(const CoordinatorMessage& message);

// `text` cut to at most `bytes_max` bytes at the border of a character, with what is no UTF-8
// replaced by '?'. Every text for people passes here on its way out and in.
std::string CleanText(const std::string& text, size_t bytes_max);

}  // namespace longhaul::control
