// Carries one lane between two other peers that cannot reach each other.
//
//   connecting  We connect to the acceptor of the lane. The dialer has sent HELLO to us.
//   opening     HELLO, ANSWER and CONFIRM pass through, and both proofs are checked.
//   carrying    All bytes pass through.
//   ended       `done` is called. The tunnel may be destroyed.
//
// Each direction has one buffer. Nothing is received while the buffer is not empty, so a fast
// sender is slowed down as on a straight lane. An end in order on one side becomes an end in order
// on the other. A reset is passed on as a reset.
//
// Threads: the ring's. `done` is called from within Ring::RunOnce(), last of all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/auth.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

struct TunnelOptions {
  HelloBytes hello{};
  std::string token;  // of the epoch in HELLO
  uint32_t detect_ms = 0;
};

class Tunnel {
 public:
  using Done = absl::AnyInvocable<void(Tunnel*)>;
  // `fd`: the dialer's connection, from which HELLO was read.
  Tunnel(Ring* ring, int fd, TunnelOptions options, Done done);
  Tunnel(const Tunnel&) = delete;
  Tunnel& operator=(const Tunnel&) = delete;

  // Connects to the first of the addresses that answers. Call it once. If no address answers, or
  // there is none, the dialer is told that the relay has no way to the acceptor (kNoWay).
  struct Address {
    SocketAddress address;
    StreamTuning tuning;
  };
  void Connect(std::vector<Address> addresses);
  // Ends the tunnel soon.
  void Stop();

  bool carrying() const { return carrying_; }
  // When the tunnel's time is up. Its owner then calls Stop().
  Tick deadline() const;
  uint64_t bytes() const { return bytes_; }
  // The dialer has sent a CONFIRM without the epoch's token.
  bool forged() const { return forged_; }

 private:
  using Step = void (Tunnel::*)();
  enum Side { kDialer = 0, kAcceptor = 1 };
  // One direction: bytes that come from one side and go to the other.
  struct Way {
    std::unique_ptr<uint8_t[]> buffer;
    IoId operation = 0;
    bool ended = false;
  };

  void ConnectNext();
  void OnConnected(int value);
  void OnHelloSent();
  void OnAnswer();
  void OnAnswerSent();
  void OnConfirm();
  void OnConfirmSent();
  void Refuse();
  void OnRefusalSent();
  void Move(bool send, int fd, uint8_t* data, size_t bytes, Step next);
  void Copy(Side from);
  void OnReceived(Side from, int value);
  void Pass(Side from, size_t at, size_t bytes);
  // Ends the tunnel if nothing is in flight and it is stopping, or both sides have ended.
  void CheckEnded();
  void End();

  Ring* const ring_;
  const TunnelOptions options_;
  Done done_;
  const Tick opened_by_;
  std::array<int, 2> fds_;
  std::vector<Address> addresses_;
  size_t next_address_ = 0;
  std::array<uint8_t, kLaneAnswerBytes> answer_bytes_{};
  std::array<uint8_t, kLaneConfirmBytes> confirm_bytes_{};
  LaneAnswer answer_;
  IoId operation_ = 0;  // the operation in flight before the tunnel carries
  std::array<Way, 2> ways_;
  bool carrying_ = false;
  bool stopping_ = false;
  bool in_order_ = false;
  bool over_ = false;
  bool forged_ = false;
  Tick moved_;
  uint64_t bytes_ = 0;
};

}  // namespace longhaul::peerd
