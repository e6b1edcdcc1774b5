// One connection of a probe, from the end of its handshake to its close. One end sends bytes that
// mean nothing, and the other end throws them away.
//
// The stream runs until the other end closes it, the connection breaks, or Stop(). (The receiving
// end also stops at `bytes_max`.) Then it calls `done`, and may be destroyed. It closes with a
// reset, so that unsent bytes are dropped.
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
  // Takes over `fd`, a connected and tuned socket. Sends `bytes_max`, or ends after receiving as
  // many. The owner has to call Stop() at `deadline`.
  ProbeStream(Ring* ring, int fd, bool sends, uint64_t bytes_max, Tick deadline, Done done);
  ProbeStream(const ProbeStream&) = delete;
  ProbeStream& operator=(const ProbeStream&) = delete;

  void Stop();
  Tick deadline() const { return deadline_; }
  bool sends() const { return sends_; }
  // Returns what TCP has measured of the connection so far.
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
  std::unique_ptr<uint8_t[]> sink_;  // what a receiving end throws away
};

}  // namespace longhaul::peerd
