#include "peerd/engine/control_frames.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace longhaul::peerd {
namespace {

template <class Bytes>
std::string TextOf(const Bytes& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// The frame on its way to `to`.
ControlFrame Address(const GroupKey& group, PeerId self, PeerId to, const Carriers& carriers,
                     FrameHeader header, std::string payload) {
  header.group = group.group;
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  // The last that a group says before it is gone needs no carrier: no link of it stays.
  const PeerId carrier = carriers(group, header.attempt, self, to).value_or(to);
  if (carrier == to) return {{group.run, to}, header, std::move(payload)};
  FrameHeader relay;
  relay.type = FrameType::kRelay;
  relay.group = group.group;
  std::string wrapped = TextOf(Encode(RelayBody{to, self, header})) + payload;
  relay.payload_bytes = static_cast<uint32_t>(wrapped.size());
  return {{group.run, carrier}, relay, std::move(wrapped)};
}

// READY or DONE of `origin`.
absl::StatusOr<TakenFrame> Open(const GroupKey& group, PeerId origin, const FrameHeader& header,
                                std::span<const uint8_t> payload) {
  if (header.type == FrameType::kDone) {
    const bool refused = (header.flags & kFlagRefused) != 0;
    return PeerDone{group, origin, header.op, header.attempt, refused};
  }
  LH_CHECK(header.type == FrameType::kReady);
  LH_ASSIGN_OR_RETURN(const ReadyBody body, ParseReadyBody(payload));
  PeerReady ready{group,
                  origin,
                  header.op,
                  header.attempt,
                  body.boundary,
                  body.tag,
                  body.desc,
                  body.local_mismatch,
                  ""};
  std::string bytes = TextOf(payload.subspan(kReadyBodyBytes));
  if (body.result_epoch) {
    ready.result = OneShotResult{body.result_epoch, body.result_members, std::move(bytes)};
  } else {
    ready.payload = std::move(bytes);
  }
  return ready;
}

}  // namespace

ControlFrame FrameOf(const SendReady& action, PeerId self, const Carriers& carriers,
                     const std::string& input) {
  FrameHeader header;
  header.type = FrameType::kReady;
  header.op = action.ordinal;
  header.attempt = action.attempt;
  ReadyBody body{action.boundary, action.tag, action.desc, action.local_mismatch};
  if (action.result) {
    body.result_epoch = action.result->epoch;
    body.result_members = action.result->members;
  }
  const std::string& bytes = action.result ? action.result->bytes : input;
  return Address(action.group, self, action.to, carriers, header, TextOf(Encode(body)) + bytes);
}

ControlFrame FrameOf(const SendDone& action, PeerId self, const Carriers& carriers) {
  FrameHeader header;
  header.type = FrameType::kDone;
  header.flags = action.refused ? kFlagRefused : 0;
  header.op = action.ordinal;
  header.attempt = action.attempt;
  ControlFrame frame = Address(action.group, self, action.to, carriers, header, "");
  frame.may_wait = action.may_wait;
  return frame;
}

absl::StatusOr<TakenFrame> TakeFrame(const LinkKey& from, const FrameHeader& header,
                                     std::span<const uint8_t> payload, PeerId self,
                                     const Carriers& carriers) {
  const GroupKey group{from.run, header.group};
  if (header.type == FrameType::kReady || header.type == FrameType::kDone) {
    // Of an attempt that is over the core knows what to think.
    const PeerId carrier = carriers(group, header.attempt, from.peer, self).value_or(self);
    if (carrier == self) return Open(group, from.peer, header, payload);
    return absl::InvalidArgumentError(
        absl::StrCat(header.type == FrameType::kReady ? "READY" : "DONE", " from ",
                     ToString(from.peer), " in attempt ", ToString(header.attempt), ", in which ",
                     ToString(carrier), " carries between the two"));
  }
  if (header.type != FrameType::kRelay) {
    return absl::InvalidArgumentError(absl::StrCat("frame type is ", static_cast<int>(header.type),
                                                   ", not READY, DONE or RELAY"));
  }

  LH_ASSIGN_OR_RETURN(const RelayBody body, ParseRelayBody(payload));
  if (body.inner.group != header.group) {
    return absl::InvalidArgumentError(absl::StrCat("RELAY of group ", header.group,
                                                   " carries a frame of group ", body.inner.group));
  }
  const bool arrived = body.destination == self;
  // One relay on the way: the origin gives it to the relay, the relay to the destination.
  if (body.origin == self || (body.origin == from.peer) == arrived) {
    return absl::InvalidArgumentError(
        absl::StrCat("RELAY from ", ToString(body.origin), " to ", ToString(body.destination),
                     " does not belong on a link to ", ToString(from.peer)));
  }
  const PeerId relay = arrived ? from.peer : self;
  const std::optional<PeerId> carrier =
      carriers(group, body.inner.attempt, body.origin, body.destination);
  if (!carrier) return StaleFrame{};
  if (*carrier != relay) {
    return absl::InvalidArgumentError(absl::StrCat(
        "RELAY from ", ToString(body.origin), " to ", ToString(body.destination), " in attempt ",
        ToString(body.inner.attempt), ", in which ", ToString(relay), " is not their relay"));
  }
  if (arrived) {
    return Open(group, body.origin, body.inner, payload.subspan(kRelayBodyBytes));
  }
  // Not passed on unread: whoever breaks the rules is cut off here, not the relay at the other end.
  LH_RETURN_IF_ERROR(
      Open(group, body.origin, body.inner, payload.subspan(kRelayBodyBytes)).status());
  return ControlFrame{{from.run, body.destination}, header, TextOf(payload)};
}

}  // namespace longhaul::peerd
