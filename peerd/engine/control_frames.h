// Converts READY and DONE: from an action of the core to a frame, and from a received frame to an
// event for the core.
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
#include "peerd/engine/ports.h"
#include "peerd/transport/transport.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

struct ControlFrame {
  LinkKey link;  // the link to send it on
  FrameHeader header;
  std::string payload;
  bool may_wait = false;  // may be sent with Links::SendControlInTime()

  std::span<const uint8_t> bytes() const {
    return {reinterpret_cast<const uint8_t*>(payload.data()), payload.size()};
  }
};

// `input` is the input that the frame carries. It is "" unless action.one_shot is true.
ControlFrame FrameOf(const SendReady& action, const std::string& input);
// Appends a signature to the frame of a READY. Returns the digest that was signed.
std::string SignReady(const SendReady& action, const Signer& sign, ControlFrame* frame);
ControlFrame FrameOf(const SendDone& action);

using TakenFrame = std::variant<PeerReady, PeerDone>;

// Converts a READY or DONE that came on the link `from`. InvalidArgument: the peer broke the
// protocol; close the link.
absl::StatusOr<TakenFrame> TakeFrame(const LinkKey& from, const FrameHeader& header,
                                     std::span<const uint8_t> payload);

}  // namespace longhaul::peerd
