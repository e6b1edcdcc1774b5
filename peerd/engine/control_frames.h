// READY and DONE between the peer core and the control lanes.
//
// What the core sends becomes a frame; what arrives becomes a core event.
//
// Plain functions: no state, any thread.
#pragma once

#include <cstdint>
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

// `input` is what travels inside; "" unless the action is one-shot.
ControlFrame FrameOf(const SendReady& action, const std::string& input);
ControlFrame FrameOf(const SendDone& action);

using TakenFrame = std::variant<PeerReady, PeerDone>;

// Takes a READY or DONE that came on `from`. InvalidArgument: against the protocol, close the link.
absl::StatusOr<TakenFrame> TakeFrame(const LinkKey& from, const FrameHeader& header,
                                     std::span<const uint8_t> payload);

}  // namespace longhaul::peerd
