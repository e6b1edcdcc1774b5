// READY and DONE between the peer core and the control lanes, and RELAY for peers without a link.
//
// What the core sends becomes a frame and the link that it goes out on; what arrives becomes a core
// event, or a frame to be passed on. Two peers of an epoch may have no link to each other: the core
// then names a third one (SendReady.via), the frame travels as RELAY to it, and the third one hands
// the same bytes to the destination.
//
// Plain functions: no state, any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/relay.h"
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

// `input` is what travels inside; "" unless the action is one-shot.
ControlFrame FrameOf(const SendReady& action, PeerId self, const std::string& input);
ControlFrame FrameOf(const SendDone& action, PeerId self);

// A frame of a group or between peers that are none here (any more): nothing is to be done.
struct StaleFrame {};

using TakenFrame = std::variant<PeerReady, PeerDone, ControlFrame, StaleFrame>;

// Takes a READY, DONE or RELAY that came on `from`. `check`: PeerCore::CheckRelay().
// InvalidArgument: against the protocol, close the link.
absl::StatusOr<TakenFrame> TakeFrame(const LinkKey& from, const FrameHeader& header,
                                     std::span<const uint8_t> payload, PeerId self,
                                     const std::function<RelayCheck(const RelayedFrame&)>& check);

}  // namespace longhaul::peerd
