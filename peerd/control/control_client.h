// The peer's end of the control stream: keeps one Attach stream to a coordinator, whatever happens.
//
//   connecting --(stream stands)--> connected() --> message()... --(stream ends)--> disconnected()
//   connecting --(refused, or not there in time)--> disconnected()
//   connected --(Refuse())--> disconnected()
//   disconnected() --(pause)--> connecting, at the next address unless this one had worked
//
// Pauses rise from 50 to 500 ms with each round of failures, with jitter, so that the peers of a
// large run do not all come back at one moment. No gRPC type appears here.
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
  // Until the coordinator has told its own.
  uint32_t detect_ms = 1500;
  uint32_t pause_ms_min = 50;
  uint32_t pause_ms_max = 500;
};

// Called from threads of the client: one at a time, in order, no lock held. They hand over to the
// owner's mailbox and return; none may call Stop().
struct ControlClientCallbacks {
  // False: the owner has no room for it. The stream is given up then.
  std::function<bool()> connected;
  std::function<bool(control::CoordinatorMessage)> message;
  // Of a stream that stood, or of a try that failed. The reason names the address.
  std::function<void(std::string reason)> disconnected;
};

class ControlClient {
 public:
  // As Stop().
  virtual ~ControlClient() = default;

  // Queues a message on the stream that stands. Any thread. False if it was dropped: no stream
  // stands, the queue is full (the stream is then given up), or the stream is waiting for Hello.
  //
  // The first message on a stream is Hello: others are dropped before it, and a second Hello is.
  // The owner learns of streams by mail, so what it says may be meant for the stream before.
  virtual bool Send(const control::PeerMessage& message) = 0;

  // The stream that stands leads to a coordinator that the owner does not follow: ends the stream,
  // and goes on to the next address. Any thread.
  virtual void Refuse(const std::string& reason) = 0;

  // Ends the stream. After it returns no callback is called any more. Safe to repeat.
  virtual void Stop() = 0;
};

std::unique_ptr<ControlClient> MakeControlClient(ControlClientOptions options,
                                                 ControlClientCallbacks callbacks);

}  // namespace longhaul::peerd
