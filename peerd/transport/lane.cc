#include "peerd/transport/lane.h"

#include <string.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

// Several frames of a control lane fit; one always does.
constexpr size_t kControlReceiveBytes = 16 << 10;
static_assert(kControlReceiveBytes >= kFrameHeaderBytes + LH_CONTROL_PAYLOAD_BYTES_MAX);
// What is thrown away is read in pieces of this size.
constexpr size_t kDiscardBytes = 64 << 10;
// Below this a zero-copy send costs more than the copy.
constexpr uint32_t kZeroCopyBytesMin = 32 << 10;
// Small segments are sent together up to this.
constexpr uint32_t kBatchBytes = 64 << 10;

bool IsTransient(int value) { return value == -EINTR || value == -EAGAIN; }

}  // namespace

Lane::Lane(Ring* ring, int fd, LaneOptions options, LaneOwner* owner)
    : ring_(ring), fd_(fd), options_(std::move(options)), owner_(owner), last_heard_(ring->Now()) {
  if (options_.kind == LaneKind::kControl) rx_.resize(kControlReceiveBytes);
}

Lane::~Lane() = default;

void Lane::Tune(const StreamTuning& tuning) {
  user_timeout_ms_ = tuning.user_timeout_ms;
  // What could not be set when the lane was new is not missed now.
  if (socket_open_) (void)ring_->sockets().Tune(fd_, tuning);
}

void Lane::SetLongWay() {
  if (socket_open_) ring_->sockets().SetLongWay(fd_);
}

std::optional<TcpDelivery> Lane::Delivery() const {
  return socket_open_ ? ring_->sockets().Delivery(fd_) : std::nullopt;
}

void Lane::SetUserTimeout(uint32_t ms) {
  if (ms != user_timeout_ms_) Tune({.user_timeout_ms = ms, .congestion = ""});
}

// ------------------------------------------------------------------------------ receiving

void Lane::StartReceiving() {
  if (state_ == State::kOpen && recv_id_ == 0 && !peer_ended_) Receive();
}

void Lane::Receive() {
  const auto done = [this](IoResult result) { OnReceived(result); };
  if (state_ == State::kFinishing) {
    sink_.resize(kDiscardBytes);
    recv_id_ = ring_->Recv(fd_, sink_.data(), sink_.size(), false, done);
    return;
  }
  if (options_.kind == LaneKind::kControl) {
    recv_id_ = ring_->Recv(fd_, rx_.data() + rx_have_, rx_.size() - rx_have_, false, done);
    return;
  }
  if (!in_payload_) {
    recv_id_ = ring_->Recv(fd_, next_header_.data() + next_header_have_,
                           next_header_.size() - next_header_have_, false, done);
    return;
  }
  const size_t rest = incoming_.payload_bytes - payload_have_;
  size_t part = rest;
  uint8_t* into = nullptr;
  if (place_ != nullptr) {
    into = place_ + payload_have_;
  } else {
    sink_.resize(kDiscardBytes);
    into = sink_.data();
    part = std::min(rest, sink_.size());
  }
  recv_writes_place_ = place_ != nullptr;
  recv_parts_[0] = {into, part};
  recv_parts_[1] = {next_header_.data(), next_header_.size()};
  recv_message_ = {};
  recv_message_.msg_iov = recv_parts_;
  recv_message_.msg_iovlen = part == rest ? 2 : 1;
  recv_id_ = ring_->RecvMsg(fd_, &recv_message_, done);
}

void Lane::OnReceived(IoResult result) {
  recv_id_ = 0;
  recv_writes_place_ = false;
  const int value = result.value;
  if (state_ == State::kAborting) {
    RunDetached();
    Settle();
    return;
  }
  if (value > 0) last_heard_ = ring_->Now();
  if (state_ == State::kFinishing) {
    RunDetached();
    if (value == 0) {
      peer_ended_ = true;
      Settle();
    } else if (value > 0 || value == -ECANCELED || IsTransient(value)) {
      Receive();
    } else {
      Abort();
      Settle();
    }
    return;
  }
  if (value == 0) {
    RunDetached();
    OnPeerEnded();
  } else if (value > 0) {
    if (options_.kind == LaneKind::kControl) {
      TakeControl(value);
    } else {
      TakeData(value);
    }
    RunDetached();
  } else {
    RunDetached();
    if (value != -ECANCELED && !IsTransient(value)) Broken(strerror(-value), false);
  }
  if (recv_id_ != 0) return;
  if (!peer_ended_ && (state_ == State::kOpen || state_ == State::kFinishing)) {
    Receive();
  } else {
    Settle();
  }
}

void Lane::OnPeerEnded() {
  peer_ended_ = true;
  if (rx_have_ != 0 || next_header_have_ != 0 || in_payload_) {
    Broken("closed by the other side in the middle of a frame", false);
  } else if (!closing_) {
    Broken("closed by the other side", false);
  } else {
    owner_->OnLanePeerEnded(this);
  }
}

void Lane::TakeControl(size_t bytes) {
  rx_have_ += bytes;
  size_t used = 0;
  while (rx_have_ - used >= kFrameHeaderBytes) {
    const auto header = ParseFrameHeader(
        std::span<const uint8_t, kFrameHeaderBytes>(rx_.data() + used, kFrameHeaderBytes),
        LaneKind::kControl);
    if (!header.ok()) return Broken(std::string(header.status().message()), true);
    const size_t whole = kFrameHeaderBytes + header->payload_bytes;
    if (rx_have_ - used < whole) break;
    if (closing_) return Broken("a frame after CLOSE", true);
    if (header->type == FrameType::kClose) {
      closing_ = true;
      owner_->OnLaneClosing(this, header->flags & kFlagGivenUp);
      if (state_ != State::kOpen) return;
      used += whole;
      continue;
    }
    const absl::Status status = owner_->OnLaneFrame(
        this, *header,
        std::span<const uint8_t>(rx_.data() + used + kFrameHeaderBytes, header->payload_bytes));
    if (state_ != State::kOpen) return;
    if (!status.ok()) return Broken(std::string(status.message()), true);
    used += whole;
  }
  memmove(rx_.data(), rx_.data() + used, rx_have_ - used);
  rx_have_ -= used;
}

void Lane::TakeData(size_t bytes) {
  size_t for_header = bytes;
  if (in_payload_) {
    const size_t part = std::min<size_t>(bytes, incoming_.payload_bytes - payload_have_);
    payload_have_ += part;
    if (place_ != nullptr && incoming_.type == FrameType::kChunkData) stats_.state_bytes += part;
    for_header = bytes - part;
  }
  next_header_have_ += for_header;
  while (state_ == State::kOpen) {
    if (in_payload_ && !TakePayload()) return;
    if (state_ != State::kOpen || !TakeHeader()) return;
  }
}

// A payload that is complete is handed over. False: it is not.
bool Lane::TakePayload() {
  if (payload_have_ < incoming_.payload_bytes) return false;
  const bool kept = place_ != nullptr;
  in_payload_ = false;
  place_ = nullptr;
  ++received_;
  if (!kept) {
    stats_.bytes_discarded += incoming_.payload_bytes;
    return true;
  }
  stats_.bytes_received += incoming_.payload_bytes;
  const absl::Status status = owner_->OnLaneDataReceived(this, incoming_);
  if (!status.ok() && state_ == State::kOpen) Broken(std::string(status.message()), true);
  return true;
}

// False: the header is not complete.
bool Lane::TakeHeader() {
  if (next_header_have_ < kFrameHeaderBytes) return false;
  next_header_have_ = 0;
  const auto header = ParseFrameHeader(next_header_, LaneKind::kData);
  if (!header.ok()) {
    Broken(std::string(header.status().message()), true);
    return false;
  }
  if (closing_) {
    Broken("a frame after CLOSE", true);
    return false;
  }
  quiet_us_ = 0;
  if (header->type == FrameType::kPing) {
    constexpr uint32_t kQuietMsMax = LH_QUIET_MS_MAX;
    if (header->stamp > kQuietMsMax) {
      Broken(absl::StrCat("PING that promises ", header->stamp, " ms of silence"), true);
      return false;
    }
    quiet_us_ = Millis(static_cast<int64_t>(header->stamp));
    return true;
  }
  if (header->type == FrameType::kClose) {
    closing_ = true;
    owner_->OnLaneClosing(this, header->flags & kFlagGivenUp);
    return true;
  }
  const absl::StatusOr<uint8_t*> place = owner_->OnLaneData(this, *header);
  if (state_ != State::kOpen) return false;
  if (!place.ok()) {
    Broken(std::string(place.status().message()), true);
    return false;
  }
  incoming_ = *header;
  in_payload_ = true;
  payload_have_ = 0;
  place_ = *place;
  return true;
}

bool Lane::Detach(const std::function<bool(const FrameHeader&)>& names,
                  absl::AnyInvocable<void()> done) {
  if (!names(incoming_)) return false;
  place_ = nullptr;
  // It may be on its way to nowhere already, with the receive still under way.
  if (recv_id_ == 0 || !recv_writes_place_) return false;
  detached_.push_back(std::move(done));
  ring_->Cancel(recv_id_);
  return true;
}

void Lane::RunDetached() {
  std::vector<absl::AnyInvocable<void()>> detached;
  detached.swap(detached_);
  for (auto& done : detached) done();
}

// ------------------------------------------------------------------------------ sending

bool Lane::HasRoom(size_t bytes) const {
  return queued_.size() + flying_.size() - flying_sent_ + bytes <= options_.queue_bytes_max;
}

bool Lane::SendFrame(const FrameHeader& header, std::span<const uint8_t> payload) {
  if (state_ != State::kOpen) return true;
  LH_CHECK(options_.kind == LaneKind::kControl && payload.size() == header.payload_bytes);
  if (!HasRoom(kFrameHeaderBytes + payload.size())) return false;
  const auto bytes = Encode(header);
  queued_.insert(queued_.end(), bytes.begin(), bytes.end());
  queued_.insert(queued_.end(), payload.begin(), payload.end());
  SendSoon();
  return true;
}

bool Lane::SendNewest(const FrameHeader& header) {
  if (state_ != State::kOpen) return true;
  for (const auto& [type, at] : newest_) {
    if (type != header.type) continue;
    const auto bytes = Encode(header);
    std::copy(bytes.begin(), bytes.end(), queued_.begin() + static_cast<ptrdiff_t>(at));
    return true;
  }
  const size_t at = queued_.size();
  if (!SendFrame(header, {})) return false;
  newest_.emplace_back(header.type, at);
  return true;
}

bool Lane::SendFrames(std::span<const uint8_t> bytes, bool may_wait) {
  if (state_ != State::kOpen) return true;
  if (!HasRoom(bytes.size())) return false;
  queued_.insert(queued_.end(), bytes.begin(), bytes.end());
  if (may_wait) {
    SendInTime();
  } else {
    SendSoon();
  }
  return true;
}

void Lane::SendInTime() {
  if (hold_id_ != 0) return;
  hold_id_ = ring_->Timeout(ring_->Now() + kHoldUs, [this](IoResult) {
    hold_id_ = 0;
    if (state_ == State::kOpen) SendControl();
    Settle();
  });
}

void Lane::SendSoon() {
  if (send_id_ != 0 || std::exchange(send_due_, true)) return;
  ring_->BeforeSubmit([this] {
    send_due_ = false;
    SendControl();
    Settle();
  });
}

void Lane::SendControl() {
  if (send_id_ != 0) return;
  if (flying_sent_ == flying_.size()) {
    flying_.clear();
    flying_sent_ = 0;
    flying_.swap(queued_);
    newest_.clear();
  }
  if (flying_.empty()) return;
  send_id_ = ring_->Send(fd_, flying_.data() + flying_sent_, flying_.size() - flying_sent_, true,
                         [this](IoResult result) {
                           send_id_ = 0;
                           OnSent(result.value);
                         });
}

void Lane::Pull() {
  if (options_.kind != LaneKind::kData || send_id_ != 0 || batch_count_ != 0) return;
  if (state_ != State::kOpen && state_ != State::kFinishing) return;
  FillBatch();
  if (batch_count_ != 0) {
    SendBatch();
  } else if (state_ == State::kFinishing && !std::exchange(close_queued_, true)) {
    SendBare({.type = FrameType::kClose, .flags = close_flags_});
  }
}

bool Lane::Ping(uint32_t quiet_ms) {
  if (options_.kind != LaneKind::kData || state_ != State::kOpen) return false;
  // Bytes that are on their way, or stuck, say as much as a PING.
  if (send_id_ != 0 || batch_count_ != 0) return false;
  SendBare({.type = FrameType::kPing, .stamp = quiet_ms});
  return true;
}

void Lane::SendBare(const FrameHeader& header) {
  batch_[0] = {.header = Encode(header), .segment = {.header = header}};
  batch_count_ = 1;
  batch_sent_ = 0;
  batch_zero_copy_ = false;
  batch_record_ = SIZE_MAX;
  batch_bare_ = true;
  SendBatch();
}

void Lane::FillBatch() {
  batch_sent_ = 0;
  batch_zero_copy_ = false;
  batch_record_ = SIZE_MAX;
  uint32_t room = kAnyBytes;
  while (batch_count_ < kBatchMax) {
    Packet& packet = batch_[batch_count_];
    if (!owner_->NextSegment(this, room, &packet.segment)) return;
    const uint32_t bytes = packet.segment.header.payload_bytes;
    packet.header = Encode(packet.segment.header);
    ++batch_count_;
    if (batch_count_ == 1 && options_.zero_copy && bytes >= kZeroCopyBytesMin) {
      batch_zero_copy_ = true;
      if (zero_copy_free_.empty()) {
        zero_copy_free_.push_back(zero_copy_.size());
        zero_copy_.emplace_back();
      }
      batch_record_ = zero_copy_free_.back();
      zero_copy_free_.pop_back();
      zero_copy_[batch_record_] = {.cookie = packet.segment.cookie, .used = true};
      return;
    }
    if (batch_count_ == 1) {
      if (bytes >= kBatchBytes) return;
      room = kBatchBytes;
    }
    room -= std::min(room, bytes);
    // What should go without a copy waits for its own turn.
    if (options_.zero_copy) room = std::min(room, kZeroCopyBytesMin - 1);
    if (room == 0) return;
  }
}

size_t Lane::BatchBytes() const {
  size_t bytes = 0;
  for (size_t i = 0; i < batch_count_; ++i) {
    bytes += kFrameHeaderBytes + batch_[i].segment.header.payload_bytes;
  }
  return bytes;
}

void Lane::SendBatch() {
  if (batch_zero_copy_ && batch_sent_ >= kFrameHeaderBytes) {
    const OutgoingSegment& segment = batch_[0].segment;
    const size_t sent = batch_sent_ - kFrameHeaderBytes;
    const size_t rest = segment.header.payload_bytes - sent;
    send_id_ = ring_->SendZeroCopy(
        fd_, segment.data + sent, rest, owner_->FindBuffer(segment.data + sent, rest),
        [this, index = batch_record_, first = true](IoResult result) mutable {
          OnZeroCopy(index, std::exchange(first, false), result);
        });
    return;
  }
  size_t skip = batch_sent_;
  size_t parts = 0;
  const auto add = [&](const uint8_t* data, size_t bytes) {
    const size_t skipped = std::min(skip, bytes);
    skip -= skipped;
    if (bytes > skipped) {
      send_parts_[parts++] = {const_cast<uint8_t*>(data) + skipped, bytes - skipped};
    }
  };
  for (size_t i = 0; i < batch_count_; ++i) {
    add(batch_[i].header.data(), kFrameHeaderBytes);
    if (!batch_zero_copy_) {
      add(batch_[i].segment.data, batch_[i].segment.header.payload_bytes);
    }
  }
  send_message_ = {};
  send_message_.msg_iov = send_parts_.data();
  send_message_.msg_iovlen = parts;
  send_id_ = ring_->SendMsg(fd_, &send_message_, true, [this](IoResult result) {
    send_id_ = 0;
    OnSent(result.value);
  });
}

void Lane::OnZeroCopy(size_t index, bool first, IoResult result) {
  if (first) {
    send_id_ = 0;
    if (result.more) {
      ++notices_;
      ++zero_copy_[index].notices;
    }
    OnSent(result.value);
    return;
  }
  --notices_;
  --zero_copy_[index].notices;
  if (result.copied) {
    ++stats_.zero_copy_copied;
    if (!options_.zero_copy_always) options_.zero_copy = false;
  }
  ReleaseZeroCopy(index);
  Settle();
}

// Whether a zero-copy send was refused as such: the rest of the segment goes out copied.
bool Lane::FallBackToCopying(int value) {
  if (!batch_zero_copy_ || batch_sent_ < kFrameHeaderBytes) return false;
  if (value != -ENOMEM && value != -ENOBUFS && value != -EOPNOTSUPP && value != -EINVAL &&
      value != -EFAULT) {
    return false;
  }
  options_.zero_copy = false;
  batch_zero_copy_ = false;
  return true;
}

void Lane::OnSent(int value) {
  if (state_ == State::kAborting) {
    Settle();
    return;
  }
  if (value <= 0 && !IsTransient(value) && !FallBackToCopying(value)) {
    Broken(strerror(value == 0 ? EPIPE : -value), false);
    Settle();
    return;
  }
  const size_t bytes = value > 0 ? value : 0;
  if (options_.kind == LaneKind::kControl) {
    AdvanceControl(bytes);
  } else {
    AdvanceBatch(bytes);
  }
  if (state_ == State::kFinishing) MaybeShutdown();
  Settle();
}

void Lane::AdvanceControl(size_t bytes) {
  flying_sent_ += bytes;
  SendControl();
}

void Lane::AdvanceBatch(size_t bytes) {
  batch_sent_ += bytes;
  if (batch_sent_ < BatchBytes()) {
    SendBatch();
    return;
  }
  for (size_t i = 0; i < batch_count_; ++i) {
    stats_.bytes_sent += batch_[i].segment.header.payload_bytes;
  }
  ReleaseBatch();
  Pull();
}

// Gives the segments of the batch back. The owner may have new ones pulled from within.
void Lane::ReleaseBatch() {
  if (batch_record_ != SIZE_MAX) {
    const size_t index = std::exchange(batch_record_, SIZE_MAX);
    batch_count_ = 0;
    zero_copy_[index].sent = true;
    ReleaseZeroCopy(index);
    return;
  }
  if (std::exchange(batch_bare_, false)) {
    batch_count_ = 0;
    return;
  }
  std::array<uint64_t, kBatchMax> cookies;
  const size_t count = std::exchange(batch_count_, 0);
  for (size_t i = 0; i < count; ++i) cookies[i] = batch_[i].segment.cookie;
  for (size_t i = 0; i < count; ++i) owner_->OnLaneSegmentSent(cookies[i]);
}

void Lane::ReleaseZeroCopy(size_t index) {
  ZeroCopySend& send = zero_copy_[index];
  if (!send.used || !send.sent || send.notices > 0) return;
  send.used = false;
  zero_copy_free_.push_back(index);
  owner_->OnLaneSegmentSent(send.cookie);
}

// ------------------------------------------------------------------------------ ending

void Lane::Broken(const std::string& reason, bool protocol) {
  if (state_ == State::kOpen) {
    owner_->OnLaneBroken(this, absl::StrCat(options_.name, ": ", reason), protocol);
    LH_CHECK(state_ != State::kOpen) << "the owner keeps a broken lane";
  } else if (state_ == State::kFinishing) {
    Abort();
  }
}

void Lane::Finish(uint8_t flags) {
  if (state_ != State::kOpen) return;
  state_ = State::kFinishing;
  place_ = nullptr;
  close_flags_ = flags;
  if (hold_id_ != 0) ring_->Cancel(hold_id_);
  if (options_.kind == LaneKind::kControl) {
    FrameHeader close{.type = FrameType::kClose, .flags = flags};
    const auto bytes = Encode(close);
    queued_.insert(queued_.end(), bytes.begin(), bytes.end());
    close_queued_ = true;
    SendControl();
  }
  if (recv_id_ != 0) {
    ring_->Cancel(recv_id_);  // it may write where nobody expects it any more
  } else if (!peer_ended_) {
    Receive();
  } else {
    Post();
  }
  Pull();
  MaybeShutdown();
}

// One more callback: Settle() is never within the owner's call.
void Lane::Post() {
  if (post_id_ != 0) return;
  post_id_ = ring_->Timeout(Tick{}, [this](IoResult) {
    post_id_ = 0;
    Settle();
  });
}

void Lane::MaybeShutdown() {
  if (shutdown_ || !close_queued_ || send_id_ != 0 || batch_count_ != 0 || !queued_.empty()) return;
  shutdown_ = true;
  ring_->sockets().ShutdownSend(fd_);
}

void Lane::Abort() {
  if (state_ == State::kAborting || state_ == State::kEnded) return;
  state_ = State::kAborting;
  queued_.clear();
  if (recv_id_ != 0) ring_->Cancel(recv_id_);
  if (send_id_ != 0) ring_->Cancel(send_id_);
  if (hold_id_ != 0) ring_->Cancel(hold_id_);
  Post();
}

// Ends what has nothing in flight any more. Called at the end of every callback.
void Lane::Settle() {
  if (recv_id_ != 0 || send_id_ != 0 || post_id_ != 0 || hold_id_ != 0 || send_due_) return;
  if (state_ == State::kFinishing) {
    if (shutdown_ && peer_ended_ && notices_ == 0) End(false);
    return;
  }
  if (state_ != State::kAborting) return;
  if (socket_open_) {
    // With a reset: the kernel drops what it holds, and so the notices come back.
    socket_open_ = false;
    ring_->sockets().Abort(fd_);
    ReleaseBatch();
    if (in_payload_ && place_ != nullptr) {
      place_ = nullptr;
      owner_->OnLaneDataAbandoned(this, incoming_);
    }
  }
  if (notices_ == 0) End(true);
}

void Lane::End(bool abort) {
  state_ = State::kEnded;
  if (!abort) {
    socket_open_ = false;
    ring_->sockets().Close(fd_);
  }
  owner_->OnLaneEnded(this);
}

}  // namespace longhaul::peerd
