// One lane of two other peers that cannot reach each other, carried between them.
//
//   connecting  to the acceptor of the lane, for which the dialer has sent HELLO
//   opening     HELLO, ANSWER and CONFIRM pass through, and both proofs are checked
//   carrying    bytes pass through, whatever they are
//   ended       `done`; it may be destroyed
//
// There is one buffer for each direction. Nothing is read while it is not empty, so that whoever
// sends too much is slowed down as on a straight lane. What one side ends in order, the other one
// sees end in order; a reset is passed on as a reset.
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
  std::string token;  // of the epoch that HELLO names
  uint32_t detect_ms = 0;
};

class Tunnel {
 public:
  using Done = absl::AnyInvocable<void(Tunnel*)>;
  // `fd`: the dialer's connection, from which HELLO was read.
  Tunnel(Ring* ring, int fd, TunnelOptions options, Done done);
  Tunnel(const Tunnel&) = delete;
  Tunnel& operator=(const Tunnel&) = delete;

  // To the first of the addresses that answers. Once; none: the dialer is told that there is no
  // way.
  struct Address {
    SocketAddress address;
    StreamTuning tuning;
  };
  void Connect(std::vector<Address> addresses);
  // Ends soon.
  void Stop();

  bool carrying() const { return carrying_; }
  // When it has had its time.
  Tick deadline() const;
  uint64_t bytes() const { return bytes_; }

 private:
  using Step = void (Tunnel::*)();
  enum Side { kDialer = 0, kAcceptor = 1 };
  // What comes from one side and goes to the other one.
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
  // Whether there is nothing left to wait for after Stop().
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
  IoId operation_ = 0;  // until it carries
  std::array<Way, 2> ways_;
  bool carrying_ = false;
  bool stopping_ = false;
  bool in_order_ = false;
  bool over_ = false;
  Tick moved_;
  uint64_t bytes_ = 0;
};

}  // namespace longhaul::peerd
