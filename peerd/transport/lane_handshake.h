// The handshake that opens a lane (proto/wire/handshake.h). One object runs one side of it.
//
// Each object calls `done` exactly once, when the kernel refers to nothing of it any more. It then
// holds a socket to take over, or an error. The accepting side keeps a few hundred bytes for each
// caller, and asks its judge before it answers. If the first bytes are no HELLO, it closes the
// connection with a reset and does not answer.
//
// On a control lane, TLS follows the three messages, and ends with the proof that the other side
// has the key of the peer that HELLO names. If the lane is in clear, nothing of TLS is left then
// but a secret.
//
// Threads: the ring's. `done` and the judge are called from within Ring::RunOnce().
#pragma once

#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/lane_encryption.h"
#include "peerd/transport/refused_callers.h"
#include "peerd/transport/tls_session.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

// Whether both ends of the connection are on this host.
bool StaysOnHost(Sockets& sockets, int fd, const SocketAddress& remote);

class LaneHandshake {
 public:
  using Done = absl::AnyInvocable<void(LaneHandshake*)>;
  virtual ~LaneHandshake();

  Tick deadline() const { return deadline_; }
  // Ends the handshake soon, with this error.
  void Fail(const std::string& reason, CallerRefusal refusal = CallerRefusal::kBroken);

  // Only after `done`:
  bool ok() const { return error_.empty(); }
  const std::string& error() const { return error_; }
  const LaneHello& hello() const { return hello_; }
  const HelloBytes& hello_bytes() const { return hello_bytes_; }
  int TakeFd();
  LaneSocket TakeSocket();
  // What the error is, to an acceptor that counts.
  CallerRefusal refusal() const { return refusal_; }

 protected:
  LaneHandshake(Ring* ring, int fd, Tick deadline, Done done);
  using Step = void (LaneHandshake::*)();
  // Starts the next operation. `next` follows when all bytes have moved.
  void Send(const void* data, size_t bytes, Step next);
  void Receive(void* data, size_t bytes, Step next);
  // Both sides have proved that they have the token. Goes on with TLS on a control lane, and ends
  // after it.
  void Secure(const TlsContext* tls, TlsSession::Side side, const std::string& peer_key);
  void Watch(IoId id) { operation_ = id; }
  // Starts the first operation of a side that connects. `connected` gets 0 or -errno. `forbidden`:
  // this peer does not connect to such an address, so the handshake fails at once.
  void Connect(const SocketAddress& address, const StreamTuning& tuning, bool forbidden,
               absl::AnyInvocable<void(int)> connected);
  // Called at the start of every callback. Returns false if the handshake has failed and ended.
  bool Running();
  void End();
  // The socket is to be closed in order at the end, not with a reset.
  void CloseInOrder() { in_order_ = true; }
  void SetDeadline(Tick deadline) { deadline_ = deadline; }

  Ring* const ring_;
  int fd_;
  LaneHello hello_;
  std::string token_;
  HelloBytes hello_bytes_{};
  std::array<uint8_t, kLaneAnswerBytes> answer_bytes_{};
  std::array<uint8_t, kLaneConfirmBytes> confirm_bytes_{};

 private:
  void Move(bool send, uint8_t* data, size_t bytes, Step next);
  void Shake();
  void SendForTls();
  void OnShaken();
  void ReceiveRecord();
  void OnRecordHeader();
  void OnRecord();

  Tick deadline_;
  Done done_;
  IoId operation_ = 0;
  bool failed_ = false;
  bool in_order_ = false;
  bool ended_ = false;
  CallerRefusal refusal_ = CallerRefusal::kBroken;
  std::string error_;
  std::unique_ptr<TlsSession> tls_;
  std::vector<uint8_t> tls_out_;
  size_t tls_sent_ = 0;          // of tls_out_
  std::vector<uint8_t> tls_in_;  // one record
  size_t tls_bytes_ = 0;         // received for TLS
  std::string clear_secret_;
};

struct DialSpec {
  SocketAddress address;
  StreamTuning tuning;
  LaneHello hello;
  std::string token;
  // Whether the lane is sealed. LaneDial decides it when it is connected, and says so in HELLO.
  LaneEncryption encryption = LaneEncryption::kOff;
  Tag16 host{};                     // of this process; HELLO names it if the lane is in clear
  const TlsContext* tls = nullptr;  // needed for control lanes and sealed ones
  std::string peer_key;             // the public key of the acceptor
  Tick connect_by = kNever;
  bool forbidden = false;  // the address
};

// Connects, sends HELLO, and proves that we have the token.
class LaneDial final : public LaneHandshake {
 public:
  LaneDial(Ring* ring, DialSpec spec, Tick deadline, Done done);
  const SocketAddress& address() const { return spec_.address; }
  bool small_packets() const { return spec_.tuning.segment_bytes_max != 0; }
  PeerId relay() const { return spec_.hello.relay; }
  // We are connected and send HELLO, so the acceptor may know of us.
  bool connected() const { return connected_; }
  LaneResult refused() const { return refused_; }
  // errno of connect(). 0: it succeeded, or was not reached.
  int connect_error() const { return connect_error_; }
  // Nobody listens at the address, or another peer does.
  bool SaysGone() const {
    return connect_error_ == ECONNREFUSED || refused_ == LaneResult::kWrongPeer;
  }

 private:
  void OnConnected(int value);
  void OnHelloSent();
  void OnAnswer();
  void OnConfirmSent();

  const DialSpec spec_;
  const Tick answer_by_;
  bool connected_ = false;
  int connect_error_ = 0;
  LaneResult refused_ = LaneResult::kAccepted;
};

// Only connects, to see whether anybody listens.
class LaneKnock final : public LaneHandshake {
 public:
  LaneKnock(Ring* ring, const SocketAddress& address, const StreamTuning& tuning, bool forbidden,
            Tick deadline, Done done);
  const SocketAddress& address() const { return address_; }
  int connect_error() const { return connect_error_; }

 private:
  const SocketAddress address_;
  int connect_error_ = 0;
};

// What to answer to a HELLO. `token` is set if the lane is accepted.
struct LaneVerdict {
  LaneResult result = LaneResult::kUnknownEpoch;
  std::string token;
  std::string peer_key;  // the public key of the dialer; only for a control lane
  bool carry = false;    // accepted for another peer, which will answer: the handshake ends here
};

// Reads HELLO, asks the judge, answers, and checks CONFIRM.
class LaneAccept final : public LaneHandshake {
 public:
  using Judge = absl::AnyInvocable<LaneVerdict(const LaneHello&)>;
  // `tls`: nullptr if the judge accepts no control lane.
  LaneAccept(Ring* ring, int fd, Digest32 nonce, const TlsContext* tls, Tick deadline, Judge judge,
             Done done);

 private:
  void OnHello();
  void OnRefusalSent();
  void OnAnswerSent();
  void OnConfirm();

  const Digest32 nonce_;
  const TlsContext* const tls_context_;
  Judge judge_;
  LaneResult result_ = LaneResult::kAccepted;
  std::string peer_key_;
};

}  // namespace longhaul::peerd
