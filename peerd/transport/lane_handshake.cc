#include "peerd/transport/lane_handshake.h"

#include <string.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/bytes.h"
#include "base/check.h"
#include "peerd/paths/black_hole.h"

namespace longhaul::peerd {
namespace {

const char* Explain(LaneResult result) {
  switch (result) {
    case LaneResult::kAccepted:
      return "accepted";
    case LaneResult::kWrongVersion:
      return "it speaks another version of the lane protocol; run the same release at both ends";
    case LaneResult::kUnknownEpoch:
      return "the epoch is not known there";
    case LaneResult::kWrongPeer:
      return "another peer answers there, or it does not expect us";
    case LaneResult::kBusy:
      return "it has a connection to us that it takes for alive";
    case LaneResult::kUnknownLink:
      return "it has given the link up";
    case LaneResult::kNoWay:
      return "the relay could not connect to the peer, or carries as many lanes as it may";
    case LaneResult::kWrongSealing:
      return "one of the two peers encrypts this lane and the other one does not; give both the "
             "same --lane-encryption";
  }
  return "unknown";
}

// Whether the magic is right and the version is not. Such a HELLO gets an answer.
bool IsHelloOfAnotherVersion(const HelloBytes& bytes) {
  ByteReader reader(bytes);
  return reader.U32() == kHandshakeMagic && reader.U16() != kLaneProtocolVersion;
}

// The other side sends less than this before its TLS handshake is over.
constexpr size_t kTlsHandshakeBytesMax = 16 << 10;
// Type, version and length of a TLS record (RFC 8446, section 5.1).
constexpr size_t kTlsRecordHeaderBytes = 5;

std::string SecretText(const KeySecret& secret) {
  return {reinterpret_cast<const char*>(secret.data()), KeySecret::kBytes};
}

std::string HostOf(const SocketAddress& address) {
  const std::string text = ToString(address);
  return text.substr(0, text.rfind(':'));
}

}  // namespace

bool StaysOnHost(Sockets& sockets, int fd, const SocketAddress& remote) {
  if (remote.loopback()) return true;
  const auto local = sockets.LocalAddress(fd);
  return local.ok() && HostOf(*local) == HostOf(remote);
}

// ------------------------------------------------------------------------------ both sides

LaneHandshake::LaneHandshake(Ring* ring, int fd, Tick deadline, Done done)
    : ring_(ring), fd_(fd), deadline_(deadline), done_(std::move(done)) {}

LaneHandshake::~LaneHandshake() = default;

int LaneHandshake::TakeFd() { return std::exchange(fd_, -1); }

LaneSocket LaneHandshake::TakeSocket() {
  return {TakeFd(), std::move(tls_), std::move(clear_secret_)};
}

void LaneHandshake::Fail(const std::string& reason, CallerRefusal refusal) {
  if (failed_ || ended_) return;
  failed_ = true;
  refusal_ = refusal;
  error_ = reason;
  ring_->Cancel(operation_);
}

bool LaneHandshake::Running() {
  operation_ = 0;
  if (!failed_) return true;
  End();
  return false;
}

void LaneHandshake::End() {
  LH_CHECK(operation_ == 0 && !ended_);
  ended_ = true;
  if (!error_.empty() && fd_ >= 0) {
    const int fd = TakeFd();
    if (in_order_) {
      ring_->sockets().Close(fd);
    } else {
      ring_->sockets().Abort(fd);
    }
  }
  done_(this);
}

void LaneHandshake::Send(const void* data, size_t bytes, Step next) {
  Move(true, static_cast<uint8_t*>(const_cast<void*>(data)), bytes, next);
}

void LaneHandshake::Receive(void* data, size_t bytes, Step next) {
  Move(false, static_cast<uint8_t*>(data), bytes, next);
}

void LaneHandshake::Move(bool send, uint8_t* data, size_t bytes, Step next) {
  auto moved = [this, send, data, bytes, next](IoResult result) {
    if (!Running()) return;
    const int value = result.value;
    if (value == -EINTR || value == -EAGAIN) return Move(send, data, bytes, next);
    if (value <= 0) {
      failed_ = true;
      error_ = value == 0 ? "closed by the other side" : strerror(-value);
      return End();
    }
    const size_t n = static_cast<size_t>(value);
    if (n < bytes) return Move(send, data + n, bytes - n, next);
    (this->*next)();
  };
  operation_ = send ? ring_->Send(fd_, data, bytes, true, std::move(moved))
                    : ring_->Recv(fd_, data, bytes, true, std::move(moved));
}

void LaneHandshake::Secure(const TlsContext* tls, TlsSession::Side side,
                           const std::string& peer_key) {
  if (hello_.kind != LaneKind::kControl) return End();
  LH_CHECK(tls != nullptr) << "a control lane, and no key to show";
  tls_ = std::make_unique<TlsSession>(*tls, side, peer_key);
  Shake();
}

void LaneHandshake::Shake() {
  const absl::Status status = tls_->Shake();
  if (!status.ok()) {
    Fail(std::string(status.message()), CallerRefusal::kKey);
    return End();
  }
  tls_out_ = tls_->TakeOutput();
  tls_sent_ = 0;
  SendForTls();
}

// Each call of send() makes a packet of its own, since the lanes have TCP_NODELAY. So the handshake
// gets through where large packets vanish (black_hole.h), and a lost lane can be replaced there.
void LaneHandshake::SendForTls() {
  const size_t bytes = std::min(tls_out_.size() - tls_sent_, kSmallSendBytes);
  if (bytes == 0) return OnShaken();
  uint8_t* const data = tls_out_.data() + tls_sent_;
  tls_sent_ += bytes;
  Send(data, bytes, &LaneHandshake::SendForTls);
}

void LaneHandshake::OnShaken() {
  if (!tls_->shaken()) return ReceiveRecord();
  if (!hello_.sealed) {
    clear_secret_ = SecretText(tls_->Export("EXPORTER-longhaul-clear-lanes"));
    tls_ = nullptr;
  }
  End();
}

// Reads no byte behind the last record of the handshake: frames in clear may follow it.
void LaneHandshake::ReceiveRecord() {
  tls_in_.resize(kTlsRecordHeaderBytes);
  Receive(tls_in_.data(), tls_in_.size(), &LaneHandshake::OnRecordHeader);
}

void LaneHandshake::OnRecordHeader() {
  const size_t bytes = size_t{tls_in_[3]} << 8 | tls_in_[4];
  tls_bytes_ += kTlsRecordHeaderBytes + bytes;
  if (bytes == 0 || tls_bytes_ > kTlsHandshakeBytesMax) {
    Fail(bytes == 0 ? "a TLS record of the handshake is empty"
                    : "the TLS handshake has too many bytes",
         CallerRefusal::kKey);
    return End();
  }
  tls_in_.resize(kTlsRecordHeaderBytes + bytes);
  Receive(tls_in_.data() + kTlsRecordHeaderBytes, bytes, &LaneHandshake::OnRecord);
}

void LaneHandshake::OnRecord() {
  tls_->Feed(tls_in_);
  Shake();
}

void LaneHandshake::Connect(const SocketAddress& address, const StreamTuning& tuning,
                            bool forbidden, absl::AnyInvocable<void(int)> connected) {
  absl::Status status;
  if (forbidden) {
    status = absl::PermissionDeniedError(
        absl::StrCat(ToString(address),
                     " is an address within a host or a wire, and this peer's "
                     "own address is not: let the other peer --advertise one that others reach"));
  } else if (const auto fd = ring_->sockets().Open(address.family()); fd.ok()) {
    fd_ = *fd;
    status = ring_->sockets().Tune(fd_, tuning);
  } else {
    status = fd.status();
  }
  if (!status.ok()) {
    Watch(ring_->Timeout(Tick{}, [this](IoResult) { (void)Running(); }));
    Fail(std::string(status.message()));
    return;
  }
  Watch(ring_->Connect(
      fd_, address.get(), address.length,
      [connected = std::move(connected)](IoResult result) mutable { connected(result.value); }));
}

// ------------------------------------------------------------------------------ dialling

LaneDial::LaneDial(Ring* ring, DialSpec spec, Tick deadline, Done done)
    : LaneHandshake(ring, -1, std::min(deadline, spec.connect_by), std::move(done)),
      spec_(std::move(spec)),
      answer_by_(deadline) {
  hello_ = spec_.hello;
  token_ = spec_.token;
  Connect(spec_.address, spec_.tuning, spec_.forbidden, [this](int value) { OnConnected(value); });
}

void LaneDial::OnConnected(int value) {
  if (!Running()) return;
  if (value < 0) {
    connect_error_ = -value;
    Fail(absl::StrCat("connect to ", ToString(spec_.address), ": ", strerror(-value)));
    return End();
  }
  connected_ = true;
  SetDeadline(answer_by_);
  if (hello_.kind != LaneKind::kProbe) {
    hello_.sealed = spec_.encryption == LaneEncryption::kRequire ||
                    (spec_.encryption == LaneEncryption::kAuto &&
                     (hello_.relay || !StaysOnHost(ring_->sockets(), fd_, spec_.address)));
    if (!hello_.sealed) hello_.host = spec_.host;
  }
  hello_bytes_ = Encode(hello_);
  Send(hello_bytes_.data(), hello_bytes_.size(), static_cast<Step>(&LaneDial::OnHelloSent));
}

void LaneDial::OnHelloSent() {
  Receive(answer_bytes_.data(), answer_bytes_.size(), static_cast<Step>(&LaneDial::OnAnswer));
}

void LaneDial::OnAnswer() {
  const auto answer = ParseLaneAnswer(answer_bytes_);
  if (!answer.ok()) {
    Fail(std::string(answer.status().message()));
    return End();
  }
  if (answer->result != LaneResult::kAccepted) {
    refused_ = answer->result;
    CloseInOrder();
    Fail(absl::StrCat("refused by ", ToString(spec_.address), ": ", Explain(refused_)));
    return End();
  }
  if (!SameProof(answer->proof, AnswerProof(token_, hello_bytes_, answer->nonce))) {
    Fail(absl::StrCat(ToString(spec_.address), " does not have the epoch's token"));
    return End();
  }
  confirm_bytes_ = Encode(LaneConfirm{ConfirmProof(token_, hello_bytes_, answer->nonce)});
  Send(confirm_bytes_.data(), confirm_bytes_.size(), static_cast<Step>(&LaneDial::OnConfirmSent));
}

void LaneDial::OnConfirmSent() { Secure(spec_.tls, TlsSession::Side::kClient, spec_.peer_key); }

// ------------------------------------------------------------------------------ probing

LaneKnock::LaneKnock(Ring* ring, const SocketAddress& address, const StreamTuning& tuning,
                     bool forbidden, Tick deadline, Done done)
    : LaneHandshake(ring, -1, deadline, std::move(done)), address_(address) {
  Connect(address_, tuning, forbidden, [this](int value) {
    if (!Running()) return;
    if (value < 0) {
      connect_error_ = -value;
      Fail(absl::StrCat("connect to ", ToString(address_), ": ", strerror(-value)));
    }
    End();
  });
}

// ------------------------------------------------------------------------------ being dialled

LaneAccept::LaneAccept(Ring* ring, int fd, Digest32 nonce, const TlsContext* tls, Tick deadline,
                       Judge judge, Done done)
    : LaneHandshake(ring, fd, deadline, std::move(done)),
      nonce_(nonce),
      tls_context_(tls),
      judge_(std::move(judge)) {
  Receive(hello_bytes_.data(), hello_bytes_.size(), static_cast<Step>(&LaneAccept::OnHello));
}

void LaneAccept::OnHello() {
  LaneVerdict verdict;
  const auto hello = ParseLaneHello(hello_bytes_);
  if (hello.ok()) {
    hello_ = *hello;
    verdict = judge_(hello_);
  } else if (IsHelloOfAnotherVersion(hello_bytes_)) {
    verdict.result = LaneResult::kWrongVersion;
  } else {
    Fail(std::string(hello.status().message()), CallerRefusal::kMalformed);
    return End();
  }
  if (verdict.carry) return End();
  LaneAnswer answer{.result = verdict.result};
  if (verdict.result != LaneResult::kAccepted) {
    result_ = verdict.result;
    answer_bytes_ = Encode(answer);
    Send(answer_bytes_.data(), answer_bytes_.size(), static_cast<Step>(&LaneAccept::OnRefusalSent));
    return;
  }
  token_ = std::move(verdict.token);
  peer_key_ = std::move(verdict.peer_key);
  answer.nonce = nonce_;
  answer.proof = AnswerProof(token_, hello_bytes_, nonce_);
  answer_bytes_ = Encode(answer);
  Send(answer_bytes_.data(), answer_bytes_.size(), static_cast<Step>(&LaneAccept::OnAnswerSent));
}

void LaneAccept::OnRefusalSent() {
  CloseInOrder();
  Fail(absl::StrCat("refused: ", Explain(result_)), RefusalOf(result_));
  End();
}

void LaneAccept::OnAnswerSent() {
  Receive(confirm_bytes_.data(), confirm_bytes_.size(), static_cast<Step>(&LaneAccept::OnConfirm));
}

void LaneAccept::OnConfirm() {
  const auto confirm = ParseLaneConfirm(confirm_bytes_);
  if (!confirm.ok()) {
    Fail(std::string(confirm.status().message()), CallerRefusal::kMalformed);
  } else if (!SameProof(confirm->proof, ConfirmProof(token_, hello_bytes_, nonce_))) {
    Fail("the caller does not have the epoch's token", CallerRefusal::kToken);
  } else {
    return Secure(tls_context_, TlsSession::Side::kServer, peer_key_);
  }
  End();
}

}  // namespace longhaul::peerd
