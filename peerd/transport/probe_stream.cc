#include "peerd/transport/probe_stream.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace longhaul::peerd {
namespace {

constexpr size_t kPieceBytes = size_t{64} << 10;
constexpr std::array<uint8_t, kPieceBytes> kZeros{};

}  // namespace

ProbeStream::ProbeStream(Ring* ring, int fd, bool sends, uint64_t bytes_max, Tick deadline,
                         Done done)
    : ring_(ring),
      fd_(fd),
      sends_(sends),
      bytes_max_(bytes_max),
      deadline_(deadline),
      done_(std::move(done)) {
  if (!sends_) sink_ = std::make_unique<uint8_t[]>(kPieceBytes);
  Move();
}

void ProbeStream::Move() {
  const auto moved = [this](IoResult result) {
    operation_ = 0;
    OnMoved(result.value);
  };
  const uint64_t left = bytes_max_ - bytes_;
  const size_t bytes = static_cast<size_t>(std::min<uint64_t>(left, kPieceBytes));
  if (stopping_ || (left == 0 && !sends_)) {
    operation_ = ring_->Timeout(Tick{}, [this](IoResult) { End(); });
  } else if (left == 0) {
    // All is sent. The other end never sends, so this waits for it to close.
    operation_ = ring_->PollIn(fd_, [this](IoResult) { End(); });
  } else if (sends_) {
    operation_ = ring_->Send(fd_, kZeros.data(), bytes, false, moved);
  } else {
    operation_ = ring_->Recv(fd_, sink_.get(), bytes, false, moved);
  }
}

void ProbeStream::OnMoved(int value) {
  if (value == -EINTR || value == -EAGAIN) return Move();
  if (stopping_ || value <= 0) return End();
  bytes_ += static_cast<uint64_t>(value);
  Move();
}

void ProbeStream::Stop() {
  if (std::exchange(stopping_, true) || !open_) return;
  ring_->Cancel(operation_);
}

const TcpDelivery& ProbeStream::delivery() {
  if (!open_) return delivery_;
  if (const auto now = ring_->sockets().Delivery(fd_)) delivery_ = *now;
  return delivery_;
}

void ProbeStream::End() {
  operation_ = 0;
  (void)delivery();
  open_ = false;
  ring_->sockets().Abort(fd_);
  done_(this);
}

}  // namespace longhaul::peerd
