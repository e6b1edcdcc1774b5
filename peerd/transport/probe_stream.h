// One of the connections of a probe, from the end of its handshake to its close: one end sends
// bytes that mean nothing, the other one throws them away.
//
//   running --the other side ends it, it breaks, or Stop()--> ended: `done`; it may be destroyed
//
// It is closed with a reset, so that what has not been sent is not sent any more.
//
// Threads: the ring's. `done` is called from within Ring::RunOnce(), last of all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "base/tick.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

class ProbeStream {
 public:
  using Done = absl::AnyInvocable<void(ProbeStream*)>;
  // Takes over `fd`, connected and tuned. Sends `bytes_max`, or receives no more than that and ends
  // then. Not beyond `deadline`, if its owner calls Stop() then.
  ProbeStream(Ring* ring, int fd, bool sends, uint64_t bytes_max, Tick deadline, Done done);
  ProbeStream(const ProbeStream&) = delete;
  ProbeStream& operator=(const ProbeStream&) = delete;

  void Stop();
  Tick deadline() const { return deadline_; }
  bool sends() const { return sends_; }
  // What TCP has seen of it so far.
  const TcpDelivery& delivery();

 private:
  void Move();
  void OnMoved(int value);
  void End();

  Ring* const ring_;
  const int fd_;
  const bool sends_;
  const uint64_t bytes_max_;
  const Tick deadline_;
  Done done_;
  IoId operation_ = 0;
  uint64_t bytes_ = 0;
  bool stopping_ = false;
  bool open_ = true;
  TcpDelivery delivery_;
  std::unique_ptr<uint8_t[]> sink_;  // where it receives
};

}  // namespace longhaul::peerd
