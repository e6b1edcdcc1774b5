// The peer's end of the control stream. Keeps one Attach stream open to a coordinator. When the
// stream ends, the client connects again, for ever.
//
//   connecting --(stream stands)--> connected() --> message()... --(stream ends)--> disconnected()
//   connecting --(refused, or not there in time)--> disconnected()
//   connected --(Refuse())--> disconnected()
//   disconnected() --(pause)--> connecting
//
// The next try goes to the same address if the stream had brought a message and was not refused.
// Otherwise it goes to the next address. Pauses rise from 50 to 500 ms with each round of failures.
// They have jitter, so that the peers of a large run do not all come back at one moment.
//
// No gRPC type appears in this header.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/control/messages.h"

namespace longhaul::peerd {

struct ControlClientOptions {
  std::vector<std::string> addresses;  // host:port, tried in turn; at least one
  // Used until a coordinator tells its own detect_ms in Welcome.
  uint32_t detect_ms = 1500;
  uint32_t pause_ms_min = 50;
  uint32_t pause_ms_max = 500;
};

// Threads of the client call these: one at a time, in order, with no lock held. A callback puts its
// news into the owner's mailbox and returns. No callback may call Stop().
struct ControlClientCallbacks {
  // Both return false if the owner has no room for the news. The client then gives the stream up.
  std::function<bool()> connected;
  std::function<bool(control::CoordinatorMessage)> message;
  // A standing stream has ended, or a try to connect has failed. `reason` names the address.
  std::function<void(std::string reason)> disconnected;
};

class ControlClient {
 public:
  // Does the same as Stop().
  virtual ~ControlClient() = default;

  // Queues a message on the standing stream. Any thread may call it. False: the message was
  // dropped, because no stream stands, because the queue is full (the client then gives the stream
  // up), or because of the rule for Hello.
  //
  // Hello must be the first message on a stream, and comes once. A message before Hello is dropped,
  // and so is a second Hello. The reason: the owner hears of streams by mail, so it may still send
  // messages that were meant for the stream before.
  virtual bool Send(const control::PeerMessage& message) = 0;

  // Ends the standing stream and goes on to the next address, because the owner does not follow
  // this coordinator. Any thread may call it.
  virtual void Refuse(const std::string& reason) = 0;

  // Ends the stream. Once Stop() has returned, no callback is called any more. Safe to repeat.
  virtual void Stop() = 0;
};

std::unique_ptr<ControlClient> MakeControlClient(ControlClientOptions options,
                                                 ControlClientCallbacks callbacks);

}  // namespace longhaul::peerd
