#include "peerd/transport/tunnel.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

constexpr size_t kBufferBytes = size_t{64} << 10;
// Peers ping even an idle lane at least every LH_QUIET_MS_MAX. A lane that is quiet for twice as
// long is dead.
constexpr int64_t kQuietUsMax = 2 * Millis(static_cast<int64_t>(LH_QUIET_MS_MAX));

}  // namespace

Tunnel::Tunnel(Ring* ring, int fd, TunnelOptions options, Done done)
    : ring_(ring),
      options_(std::move(options)),
      done_(std::move(done)),
      opened_by_(ring->Now() + 2 * Millis(options_.detect_ms)),
      fds_{fd, -1},
      moved_(ring->Now()) {}

Tick Tunnel::deadline() const {
  if (stopping_) return kNever;
  if (!carrying_) return opened_by_;
  const bool half = ways_[kDialer].ended || ways_[kAcceptor].ended;
  return moved_ + (half ? 2 * Millis(options_.detect_ms) : kQuietUsMax);
}

void Tunnel::Stop() {
  if (std::exchange(stopping_, true) || over_) return;
  if (operation_ != 0) ring_->Cancel(operation_);
  for (const Way& way : ways_) {
    if (way.operation != 0) ring_->Cancel(way.operation);
  }
  if (operation_ != 0 || ways_[0].operation != 0 || ways_[1].operation != 0) return;
  operation_ = ring_->Timeout(Tick{}, [this](IoResult) {
    operation_ = 0;
    End();
  });
}

void Tunnel::CheckEnded() {
  if (over_ || operation_ != 0 || ways_[0].operation != 0 || ways_[1].operation != 0) return;
  if (stopping_ || (ways_[0].ended && ways_[1].ended)) End();
}

void Tunnel::End() {
  over_ = true;
  in_order_ = in_order_ || (ways_[0].ended && ways_[1].ended && !stopping_);
  for (const int fd : fds_) {
    if (fd < 0) continue;
    if (in_order_) {
      ring_->sockets().Close(fd);
    } else {
      ring_->sockets().Abort(fd);
    }
  }
  done_(this);
}

// ------------------------------------------------------------------------------ connecting

void Tunnel::Connect(std::vector<Address> addresses) {
  if (stopping_) return;
  addresses_ = std::move(addresses);
  ConnectNext();
}

void Tunnel::ConnectNext() {
  while (next_address_ < addresses_.size()) {
    const Address& at = addresses_[next_address_++];
    const auto fd = ring_->sockets().Open(at.address.family());
    if (!fd.ok()) continue;
    fds_[kAcceptor] = *fd;
    if (!ring_->sockets().Tune(*fd, at.tuning).ok()) {
      ring_->sockets().Close(std::exchange(fds_[kAcceptor], -1));
      continue;
    }
    operation_ = ring_->Connect(*fd, at.address.get(), at.address.length, [this](IoResult result) {
      operation_ = 0;
      OnConnected(result.value);
    });
    return;
  }
  Refuse();
}

void Tunnel::OnConnected(int value) {
  if (stopping_) return End();
  if (value < 0) {
    ring_->sockets().Close(std::exchange(fds_[kAcceptor], -1));
    return ConnectNext();
  }
  Move(true, fds_[kAcceptor], const_cast<uint8_t*>(options_.hello.data()), options_.hello.size(),
       &Tunnel::OnHelloSent);
}

void Tunnel::Refuse() {
  answer_bytes_ = Encode(LaneAnswer{.result = LaneResult::kNoWay});
  Move(true, fds_[kDialer], answer_bytes_.data(), answer_bytes_.size(), &Tunnel::OnRefusalSent);
}

void Tunnel::OnRefusalSent() {
  in_order_ = true;
  End();
}

// ------------------------------------------------------------------------------ opening

// Moves all bytes, then calls `next`. Only one operation is in flight at a time.
void Tunnel::Move(bool send, int fd, uint8_t* data, size_t bytes, Step next) {
  auto moved = [this, send, fd, data, bytes, next](IoResult result) {
    operation_ = 0;
    if (stopping_) return End();
    const int value = result.value;
    if (value == -EINTR || value == -EAGAIN) return Move(send, fd, data, bytes, next);
    if (value <= 0) return End();
    const size_t n = static_cast<size_t>(value);
    if (n < bytes) return Move(send, fd, data + n, bytes - n, next);
    (this->*next)();
  };
  operation_ = send ? ring_->Send(fd, data, bytes, true, std::move(moved))
                    : ring_->Recv(fd, data, bytes, true, std::move(moved));
}

void Tunnel::OnHelloSent() {
  Move(false, fds_[kAcceptor], answer_bytes_.data(), answer_bytes_.size(), &Tunnel::OnAnswer);
}

void Tunnel::OnAnswer() {
  const auto answer = ParseLaneAnswer(answer_bytes_);
  if (!answer.ok()) return End();
  answer_ = *answer;
  if (answer_.result != LaneResult::kAccepted) {
    return Move(true, fds_[kDialer], answer_bytes_.data(), answer_bytes_.size(),
                &Tunnel::OnRefusalSent);
  }
  if (!SameProof(answer_.proof, AnswerProof(options_.token, options_.hello, answer_.nonce))) {
    return End();
  }
  Move(true, fds_[kDialer], answer_bytes_.data(), answer_bytes_.size(), &Tunnel::OnAnswerSent);
}

void Tunnel::OnAnswerSent() {
  Move(false, fds_[kDialer], confirm_bytes_.data(), confirm_bytes_.size(), &Tunnel::OnConfirm);
}

void Tunnel::OnConfirm() {
  const auto confirm = ParseLaneConfirm(confirm_bytes_);
  if (!confirm.ok() ||
      !SameProof(confirm->proof, ConfirmProof(options_.token, options_.hello, answer_.nonce))) {
    forged_ = true;
    return End();
  }
  Move(true, fds_[kAcceptor], confirm_bytes_.data(), confirm_bytes_.size(), &Tunnel::OnConfirmSent);
}

// ------------------------------------------------------------------------------ carrying

void Tunnel::OnConfirmSent() {
  carrying_ = true;
  moved_ = ring_->Now();
  for (Way& way : ways_) way.buffer = std::make_unique<uint8_t[]>(kBufferBytes);
  Copy(kDialer);
  Copy(kAcceptor);
}

void Tunnel::Copy(Side from) {
  Way& way = ways_[from];
  way.operation =
      ring_->Recv(fds_[from], way.buffer.get(), kBufferBytes, false, [this, from](IoResult result) {
        ways_[from].operation = 0;
        OnReceived(from, result.value);
      });
}

void Tunnel::OnReceived(Side from, int value) {
  if (stopping_) return CheckEnded();
  if (value == -EINTR || value == -EAGAIN) return Copy(from);
  moved_ = ring_->Now();
  if (value > 0) return Pass(from, 0, static_cast<size_t>(value));
  if (value < 0) return Stop();
  ways_[from].ended = true;
  ring_->sockets().ShutdownSend(fds_[1 - from]);
  CheckEnded();
}

void Tunnel::Pass(Side from, size_t at, size_t bytes) {
  Way& way = ways_[from];
  way.operation = ring_->Send(fds_[1 - from], way.buffer.get() + at, bytes, true,
                              [this, from, at, bytes](IoResult result) {
                                ways_[from].operation = 0;
                                if (stopping_) return CheckEnded();
                                const int value = result.value;
                                if (value == -EINTR || value == -EAGAIN)
                                  return Pass(from, at, bytes);
                                if (value <= 0) return Stop();
                                moved_ = ring_->Now();
                                const size_t n = static_cast<size_t>(value);
                                bytes_ += n;
                                if (n < bytes) return Pass(from, at + n, bytes - n);
                                Copy(from);
                              });
}

}  // namespace longhaul::peerd
