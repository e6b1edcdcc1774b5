#include "peerd/transport/lane.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

// A finishing lane throws away what it receives in pieces of this size.
constexpr size_t kDiscardBytes = 64 << 10;
// For a smaller payload a zero-copy send costs more than the copy.
constexpr uint32_t kZeroCopyBytesMin = 32 << 10;
// Small segments are sent together, up to so many bytes.
constexpr uint32_t kBatchBytes = 64 << 10;
// A change of less than this part of the pace is not made.
constexpr uint64_t kPaceExact = 128;

bool IsTransient(int value) { return value == -EINTR || value == -EAGAIN; }

}  // namespace

Lane::Lane(Ring* ring, LaneSocket socket, LaneOptions options, LaneOwner* owner)
    : ring_(ring),
      fd_(socket.fd),
      options_(std::move(options)),
      owner_(owner),
      last_heard_(ring->Now()),
      tls_(std::move(socket.tls)),
      sealer_(options_.keys ? std::make_unique<Sealer>(options_.keys->aead, options_.keys->send)
                            : nullptr),
      opener_(options_.keys ? std::make_unique<Opener>(options_.keys->aead, options_.keys->receive)
                            : nullptr),
      tls_drained_(tls_ == nullptr),
      control_in_(tls_.get()),
      segments_in_(opener_.get()),
      control_out_(options_.queue_bytes_max, tls_.get()) {
  options_.keys.reset();
}

Lane::~Lane() = default;

void Lane::Tune(const StreamTuning& tuning) {
  user_timeout_ms_ = tuning.user_timeout_ms;
  // Errors are ignored: setting up the connection would have failed with them.
  if (socket_open_) (void)ring_->sockets().Tune(fd_, tuning);
}

void Lane::SetLongWay() {
  if (socket_open_) ring_->sockets().SetLongWay(fd_);
}

void Lane::SetPace(uint64_t bytes_per_second) {
  // A call for every segment would cost more than a limit that is a little off.
  const uint64_t differs = std::max(pace_, bytes_per_second) - std::min(pace_, bytes_per_second);
  if (differs <= pace_ / kPaceExact || !socket_open_) return;
  pace_ = bytes_per_second;
  ring_->sockets().SetPace(fd_, bytes_per_second);
}

void Lane::SetCongestion(const std::string& congestion) {
  Tune({.user_timeout_ms = user_timeout_ms_, .congestion = congestion});
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
  if (!std::exchange(tls_drained_, true)) {
    recv_id_ = ring_->Timeout(Tick{}, [this](IoResult) {
      recv_id_ = 0;
      if (state_ == State::kOpen) TakeControl(0);
      AfterReceive();
    });
    return;
  }
  if (options_.kind == LaneKind::kControl) {
    const std::span<uint8_t> room = control_in_.Room();
    recv_id_ = ring_->Recv(fd_, room.data(), room.size(), false, done);
    return;
  }
  const size_t parts = segments_in_.Room(recv_parts_);
  if (!segments_in_.in_payload()) {
    recv_id_ = ring_->Recv(fd_, recv_parts_[0].iov_base, recv_parts_[0].iov_len, false, done);
    return;
  }
  recv_writes_place_ = segments_in_.kept();
  recv_message_ = {};
  recv_message_.msg_iov = recv_parts_;
  recv_message_.msg_iovlen = parts;
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
  AfterReceive();
}

// Starts the next receive, if there is to be one.
void Lane::AfterReceive() {
  if (recv_id_ != 0) return;
  if (!peer_ended_ && (state_ == State::kOpen || state_ == State::kFinishing)) {
    Receive();
  } else {
    Settle();
  }
}

void Lane::OnPeerEnded() {
  peer_ended_ = true;
  if (control_in_.in_frame() || segments_in_.in_frame()) {
    Broken("closed by the other side in the middle of a frame", false);
  } else if (!closing_) {
    Broken("closed by the other side", false);
  } else {
    owner_->OnLanePeerEnded(this);
  }
}

void Lane::TakeControl(size_t bytes) {
  control_in_.Took(bytes);
  while (true) {
    const auto frame = control_in_.Next();
    if (!frame.ok()) return BrokenBy(frame.status());
    if (!frame->has_value()) {
      if (tls_ != nullptr && tls_->has_output()) SendSoon();
      return;
    }
    const auto& [header, payload] = **frame;
    if (closing_) return Broken("a frame after CLOSE", true);
    if (header.type == FrameType::kClose) {
      closing_ = true;
      owner_->OnLaneClosing(this, header.flags & kFlagGivenUp);
      if (state_ != State::kOpen) return;
      continue;
    }
    const absl::Status status = owner_->OnLaneFrame(this, header, payload);
    if (state_ != State::kOpen) return;
    if (!status.ok()) return Broken(std::string(status.message()), true);
  }
}

void Lane::TakeData(size_t bytes) {
  stats_.bytes_taken += bytes;
  const size_t payload = segments_in_.Took(bytes);
  if (segments_in_.kept() && segments_in_.header().type == FrameType::kChunkData) {
    stats_.state_bytes += payload;
  }
  while (state_ == State::kOpen) {
    if (segments_in_.in_payload()) {
      if (!segments_in_.payload_is_whole()) return;
      TakePayload();
    }
    if (state_ != State::kOpen || !TakeHeader()) return;
  }
}

// Hands over a payload that is whole.
void Lane::TakePayload() {
  const FrameHeader header = segments_in_.header();
  const bool kept = segments_in_.kept();
  if (const absl::Status status = segments_in_.EndPayload(); !status.ok()) return BrokenBy(status);
  ++received_;
  if (received_ - received_told_ >= LH_SEGMENTS_PER_ACK) AcknowledgeSoon();
  if (!kept) {
    stats_.bytes_discarded += header.payload_bytes;
    return;
  }
  stats_.bytes_received += header.payload_bytes;
  const absl::Status status = owner_->OnLaneDataReceived(this, header);
  if (!status.ok() && state_ == State::kOpen) Broken(std::string(status.message()), true);
}

// Returns false if the header is not complete, or if the lane is broken.
bool Lane::TakeHeader() {
  const auto taken = segments_in_.TakeHeader();
  if (!taken.ok()) {
    BrokenBy(taken.status());
    return false;
  }
  if (!taken->has_value()) return false;
  const FrameHeader& header = **taken;
  if (closing_) {
    Broken("a frame after CLOSE", true);
    return false;
  }
  quiet_us_ = 0;
  if (header.type == FrameType::kPing) {
    constexpr uint32_t kQuietMsMax = LH_QUIET_MS_MAX;
    if (header.stamp > kQuietMsMax) {
      Broken(absl::StrCat("PING that promises ", header.stamp, " ms of silence"), true);
      return false;
    }
    quiet_us_ = Millis(static_cast<int64_t>(header.stamp));
    const absl::Status status = owner_->OnLaneAcked(this, header.acked);
    if (!status.ok() && state_ == State::kOpen) Broken(std::string(status.message()), true);
    return state_ == State::kOpen;
  }
  if (header.type == FrameType::kClose) {
    closing_ = true;
    owner_->OnLaneClosing(this, header.flags & kFlagGivenUp);
    return true;
  }
  const absl::StatusOr<uint8_t*> place = owner_->OnLaneData(this, header);
  if (state_ != State::kOpen) return false;
  if (!place.ok()) {
    Broken(std::string(place.status().message()), true);
    return false;
  }
  segments_in_.BeginPayload(header, *place);
  return true;
}

bool Lane::Detach(const std::function<bool(const FrameHeader&)>& names,
                  absl::AnyInvocable<void()> done) {
  if (!names(segments_in_.header())) return false;
  segments_in_.Divert();
  // No receive in flight writes to a place: nothing to wait for.
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

bool Lane::SendFrame(const FrameHeader& header, std::span<const uint8_t> payload) {
  if (state_ != State::kOpen) return true;
  LH_CHECK(options_.kind == LaneKind::kControl);
  if (!control_out_.Add(header, payload)) return false;
  SendSoon();
  return true;
}

bool Lane::SendNewest(const FrameHeader& header) {
  if (state_ != State::kOpen) return true;
  if (!control_out_.AddNewest(header)) return false;
  SendSoon();
  return true;
}

bool Lane::SendFrames(std::span<const uint8_t> bytes, bool may_wait) {
  if (state_ != State::kOpen) return true;
  if (!control_out_.Add(bytes)) return false;
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
  const std::span<const uint8_t> bytes = control_out_.Take();
  if (bytes.empty()) return;
  send_id_ = ring_->Send(fd_, bytes.data(), bytes.size(), true, [this](IoResult result) {
    send_id_ = 0;
    OnSent(result.value);
  });
}

void Lane::Pull() {
  if (options_.kind != LaneKind::kData || send_id_ != 0 || !batch_.empty()) return;
  if (state_ != State::kOpen && state_ != State::kFinishing) return;
  if (ack_due_ && state_ == State::kOpen) return SendPing();
  FillBatch();
  if (!batch_.empty()) {
    if (sealer_ != nullptr) batch_.Seal(sealer_.get());
    SendBatch();
  } else if (state_ == State::kFinishing && !std::exchange(close_queued_, true)) {
    SendBare({.type = FrameType::kClose, .flags = close_flags_});
  }
}

bool Lane::Ping(uint32_t quiet_ms) {
  if (options_.kind != LaneKind::kData || state_ != State::kOpen) return false;
  quiet_ms_ = quiet_ms;
  // Bytes in flight, even stuck ones, tell the peer as much as a PING would.
  if (send_id_ != 0 || !batch_.empty()) return false;
  SendPing();
  return true;
}

// Sends a PING with the count of received segments: now, or after what is being sent.
void Lane::AcknowledgeSoon() {
  ack_due_ = true;
  if (send_id_ == 0 && batch_.empty()) SendPing();
}

void Lane::SendPing() {
  ack_due_ = false;
  received_told_ = received_;
  SendBare({.type = FrameType::kPing, .stamp = quiet_ms_, .acked = received_});
}

void Lane::SendBare(const FrameHeader& header) {
  batch_.Clear();
  batch_.Add({.header = header});
  batch_zero_copy_ = false;
  batch_record_ = SIZE_MAX;
  batch_bare_ = true;
  if (sealer_ != nullptr) batch_.Seal(sealer_.get());
  SendBatch();
}

void Lane::FillBatch() {
  batch_.Clear();
  batch_zero_copy_ = false;
  batch_record_ = SIZE_MAX;
  uint32_t room = kAnyBytes;
  ZeroCopyGate* const gate = options_.zero_copy;
  while (!batch_.full()) {
    OutgoingSegment segment;
    if (!owner_->NextSegment(this, room, &segment)) return;
    const uint32_t bytes = segment.header.payload_bytes;
    batch_.Add(segment);
    // The next part goes to another lane.
    if (segment.header.type == FrameType::kPart) return;
    const Tick now = ring_->Now();
    if (batch_.size() == 1 && gate != nullptr && bytes >= kZeroCopyBytesMin && gate->Pass(now)) {
      batch_zero_copy_ = true;
      if (zero_copy_free_.empty()) {
        zero_copy_free_.push_back(zero_copy_.size());
        zero_copy_.emplace_back();
      }
      batch_record_ = zero_copy_free_.back();
      zero_copy_free_.pop_back();
      zero_copy_[batch_record_] = {
          .type = segment.header.type, .cookie = segment.cookie, .begun = now, .used = true};
      return;
    }
    if (batch_.size() == 1) {
      if (bytes >= kBatchBytes) return;
      room = kBatchBytes;
    }
    room -= std::min(room, bytes);
    // A segment large enough for a zero-copy send waits for a batch of its own.
    if (gate != nullptr && gate->open()) room = std::min(room, kZeroCopyBytesMin - 1);
    if (room == 0) return;
  }
}

void Lane::SendBatch() {
  if (batch_zero_copy_ && batch_.sent() >= kFrameHeaderBytes) {
    const OutgoingSegment& segment = batch_[0];
    const size_t sent = batch_.sent() - kFrameHeaderBytes;
    const size_t rest = segment.header.payload_bytes - sent;
    send_id_ = ring_->SendZeroCopy(
        fd_, segment.data + sent, rest, owner_->FindBuffer(segment.data + sent, rest),
        [this, index = batch_record_, first = true](IoResult result) mutable {
          OnZeroCopy(index, std::exchange(first, false), result);
        });
    return;
  }
  const size_t parts = batch_.Parts(/*payloads=*/!batch_zero_copy_, &send_parts_);
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
  const Tick begun = zero_copy_[index].begun;
  if (result.copied) {
    ++stats_.zero_copy_copied;
    options_.zero_copy->Copied(begun, ring_->Now());
  } else {
    options_.zero_copy->Worked(begun);
  }
  ReleaseZeroCopy(index);
  Settle();
}

// Returns true if the kernel refused only the zero-copy way to send. Then the rest of the segment
// is sent with a copy.
bool Lane::FallBackToCopying(int value) {
  if (!batch_zero_copy_ || batch_.sent() < kFrameHeaderBytes) return false;
  if (value != -ENOMEM && value != -ENOBUFS && value != -EOPNOTSUPP && value != -EINVAL &&
      value != -EFAULT) {
    return false;
  }
  options_.zero_copy->Refused(zero_copy_[batch_record_].begun, ring_->Now());
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
  control_out_.Sent(bytes);
  SendControl();
}

void Lane::AdvanceBatch(size_t bytes) {
  batch_.Sent(bytes);
  if (batch_.sent() < batch_.bytes()) {
    SendBatch();
    return;
  }
  for (size_t i = 0; i < batch_.size(); ++i) {
    stats_.bytes_sent += batch_[i].header.payload_bytes;
  }
  ReleaseBatch();
  if (sealer_ != nullptr && sealer_->bytes() > options_.sealed_bytes_max) {
    return Broken("its key has sealed as many bytes as it may", false);
  }
  Pull();
}

// Gives the segments of the batch back. The owner may call Pull() from within.
void Lane::ReleaseBatch() {
  if (batch_record_ != SIZE_MAX) {
    const size_t index = std::exchange(batch_record_, SIZE_MAX);
    batch_.Clear();
    zero_copy_[index].sent = true;
    ReleaseZeroCopy(index);
    return;
  }
  if (std::exchange(batch_bare_, false)) return batch_.Clear();
  std::array<std::pair<FrameType, uint64_t>, SegmentBatch::kMax> sent;
  const size_t count = batch_.size();
  for (size_t i = 0; i < count; ++i) sent[i] = {batch_[i].header.type, batch_[i].cookie};
  batch_.Clear();
  for (size_t i = 0; i < count; ++i) {
    const auto [type, cookie] = sent[i];
    if (type != FrameType::kPart) owner_->OnLaneSegmentSent(type, cookie);
  }
}

void Lane::ReleaseZeroCopy(size_t index) {
  ZeroCopySend& send = zero_copy_[index];
  if (!send.used || !send.sent || send.notices > 0) return;
  send.used = false;
  zero_copy_free_.push_back(index);
  owner_->OnLaneSegmentSent(send.type, send.cookie);
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

void Lane::BrokenBy(const absl::Status& status) {
  const bool protocol = !absl::IsUnauthenticated(status);
  if (!protocol) ++stats_.unauthentic;
  Broken(std::string(status.message()), protocol);
}

void Lane::Finish(uint8_t flags) {
  if (state_ != State::kOpen) return;
  state_ = State::kFinishing;
  segments_in_.Divert();
  close_flags_ = flags;
  if (hold_id_ != 0) ring_->Cancel(hold_id_);
  if (options_.kind == LaneKind::kControl) {
    control_out_.AddLast({.type = FrameType::kClose, .flags = flags});
    close_queued_ = true;
    SendControl();
  }
  if (recv_id_ != 0) {
    ring_->Cancel(recv_id_);  // its memory may be given to others
  } else if (!peer_ended_) {
    Receive();
  } else {
    Post();
  }
  Pull();
  MaybeShutdown();
}

// Brings a callback in which Settle() runs, since Settle() must not run within a call of the owner.
void Lane::Post() {
  if (post_id_ != 0) return;
  post_id_ = ring_->Timeout(Tick{}, [this](IoResult) {
    post_id_ = 0;
    Settle();
  });
}

void Lane::MaybeShutdown() {
  if (shutdown_ || !close_queued_ || send_id_ != 0) return;
  if (!batch_.empty() || control_out_.waiting()) return;
  shutdown_ = true;
  ring_->sockets().ShutdownSend(fd_);
}

void Lane::Abort() {
  if (state_ == State::kAborting || state_ == State::kEnded) return;
  state_ = State::kAborting;
  control_out_.DropWaiting();
  if (recv_id_ != 0) ring_->Cancel(recv_id_);
  if (send_id_ != 0) ring_->Cancel(send_id_);
  if (hold_id_ != 0) ring_->Cancel(hold_id_);
  Post();
}

// Ends a closing lane that has nothing in flight any more. Called at the end of every callback.
void Lane::Settle() {
  if (recv_id_ != 0 || send_id_ != 0 || post_id_ != 0 || hold_id_ != 0 || send_due_) return;
  if (state_ == State::kFinishing) {
    if (shutdown_ && peer_ended_ && notices_ == 0) End(false);
    return;
  }
  if (state_ != State::kAborting) return;
  if (socket_open_) {
    // Closes with a reset: the kernel drops unsent bytes, so the zero-copy notices come back.
    socket_open_ = false;
    ring_->sockets().Abort(fd_);
    ReleaseBatch();
    if (segments_in_.in_payload() && segments_in_.kept()) {
      segments_in_.Divert();
      owner_->OnLaneDataAbandoned(this, segments_in_.header());
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
