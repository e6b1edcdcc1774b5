// READY and DONE between the peer core and the control lanes.
//
// What the core sends becomes a frame and the link that it goes out on; what arrives becomes a core
// event. Two peers of an epoch may have no link to each other (a blocked pair). Then they have a
// virtual one, made of two real links: the frame travels as RELAY to a third peer, which hands the
// same bytes to the destination. The core speaks to all peers alike, and takes frames of all alike;
// it only knows who carries for whom (PeerCore::CarrierOf()), as that follows from the epochs.
//
// Plain functions: no state, any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/transport/transport.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

struct ControlFrame {
  LinkKey link;  // to send it on
  FrameHeader header;
  std::string payload;
  bool may_wait = false;  // Transport::SendControlInTime() will do

  std::span<const uint8_t> bytes() const {
    return {reinterpret_cast<const uint8_t*>(payload.data()), payload.size()};
  }
};

// PeerCore::CarrierOf().
using Carriers =
    std::function<std::optional<PeerId>(const GroupKey&, Epoch attempt, PeerId from, PeerId to)>;

// `input` is what travels inside; "" unless the action is one-shot.
ControlFrame FrameOf(const SendReady& action, PeerId self, const Carriers& carriers,
                     const std::string& input);
ControlFrame FrameOf(const SendDone& action, PeerId self, const Carriers& carriers);

// A frame of a group or between peers that are none here (any more): nothing is to be done.
struct StaleFrame {};

using TakenFrame = std::variant<PeerReady, PeerDone, ControlFrame, StaleFrame>;

// Takes a READY, DONE or RELAY that came on `from`. InvalidArgument: against the protocol, close
// the link. That is also a frame that did not come by the way of its attempt: otherwise any peer
// could speak in the name of any other one, or make another one pass on what it likes.
absl::StatusOr<TakenFrame> TakeFrame(const LinkKey& from, const FrameHeader& header,
                                     std::span<const uint8_t> payload, PeerId self,
                                     const Carriers& carriers);

}  // namespace longhaul::peerd
