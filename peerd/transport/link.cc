#include "peerd/transport/link.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

constexpr size_t kHeldBytesMax = 1 << 20;
// PINGs in one detect_ms: two may be lost to a slow moment without anyone noticing.
constexpr int64_t kPingsPerDetect = 3;

}  // namespace

Link::Link(Ring* ring, int fd, LinkOptions options, LinkOwner* owner)
    : ring_(ring), options_(std::move(options)), owner_(owner) {
  control_ = std::make_unique<Lane>(
      ring, fd,
      LaneOptions{.kind = LaneKind::kControl,
                  .name = absl::StrCat("control lane to ", ToString(options_.remote))},
      this);
  // The side that was dialled has seen the proof; the dialler waits for an answer to its first
  // PING.
  established_ = !options_.dialled;
  control_->StartReceiving();
  Work(ring->Now(), UINT32_MAX);
}

Link::~Link() = default;

bool Link::HasDataLane(uint32_t index) const {
  return index < data_.size() && data_[index] != nullptr;
}

bool Link::FitsDataLane(uint32_t index, uint32_t count) const {
  if (!alive() || !established_ || count == 0 || count > LH_LANES_MAX || index >= count) {
    return false;
  }
  return data_.empty() || (data_.size() == count && data_[index] == nullptr);
}

void Link::AddDataLane(int fd, uint32_t index, uint32_t count) {
  LH_CHECK(FitsDataLane(index, count));
  data_.resize(count);
  data_[index] = std::make_unique<Lane>(
      ring_, fd,
      LaneOptions{.kind = LaneKind::kData,
                  .name = absl::StrCat("data lane ", index, " to ", ToString(options_.remote)),
                  .zero_copy = options_.zero_copy,
                  .zero_copy_always = options_.zero_copy_always},
      this);
  ++data_lanes_;
  if (!delivering_) return;
  data_[index]->StartReceiving();
  data_[index]->Pull();
}

void Link::Deliver() {
  if (!alive() || delivering_) return;
  delivering_ = true;
  for (size_t i = 0; i < held_.size() && alive(); ++i) {
    const absl::Status status = owner_->OnLinkFrame(this, held_[i].first, held_[i].second);
    if (!status.ok()) Break(std::string(status.message()), true);
  }
  held_.clear();
  held_bytes_ = 0;
  for (size_t i = 0; i < data_.size() && alive(); ++i) {
    if (data_[i] != nullptr) data_[i]->StartReceiving();
  }
}

// ------------------------------------------------------------------------------ sending

void Link::SendControl(const FrameHeader& header, std::span<const uint8_t> payload) {
  if (!alive()) return;
  if (!control_->SendFrame(header, payload)) {
    Break(absl::StrCat(control_->name(), ": the other side does not read"));
  }
}

void Link::SendSegment(const OutgoingSegment& segment) {
  if (!alive()) {
    owner_->OnLinkSegmentsDropped({segment.cookie});
    return;
  }
  queue_.push_back(segment);
  // Idle lanes in turn; a busy one pulls when it is done.
  for (size_t i = 0; i < data_.size() && !queue_.empty(); ++i) {
    next_lane_ = (next_lane_ + 1) % data_.size();
    if (data_[next_lane_] != nullptr) data_[next_lane_]->Pull();
  }
}

bool Link::NextSegment(uint32_t bytes_max, OutgoingSegment* segment) {
  if (queue_.empty() || queue_.front().header.payload_bytes > bytes_max) return false;
  *segment = queue_.front();
  queue_.pop_front();
  return true;
}

void Link::DropSegments(const std::unordered_set<uint64_t>& cookies) {
  std::vector<uint64_t> dropped;
  std::erase_if(queue_, [&](const OutgoingSegment& segment) {
    if (cookies.count(segment.cookie) == 0) return false;
    dropped.push_back(segment.cookie);
    return true;
  });
  if (!dropped.empty()) owner_->OnLinkSegmentsDropped(std::move(dropped));
}

int Link::Detach(uint32_t group, OpOrdinal op, Epoch attempt, const std::function<void()>& done) {
  int receiving = 0;
  for (const auto& lane : data_) {
    if (lane != nullptr && lane->Detach(group, op, attempt, [done] { done(); })) ++receiving;
  }
  return receiving;
}

int Link::FindBuffer(const uint8_t* data, size_t bytes) { return owner_->FindBuffer(data, bytes); }

void Link::OnLaneSegmentSent(uint64_t cookie) { owner_->OnLinkSegmentSent(cookie); }

// ------------------------------------------------------------------------------ receiving

absl::Status Link::OnLaneFrame(Lane*, const FrameHeader& header, std::span<const uint8_t> payload) {
  switch (header.type) {
    case FrameType::kPing: {
      FrameHeader pong{.type = FrameType::kPong};
      pong.stamp = header.stamp;
      SendControl(pong, {});
      return absl::OkStatus();
    }
    case FrameType::kPong:
      OnPong(header);
      return absl::OkStatus();
    case FrameType::kWantLanes:
      if (!options_.dialled) {
        return absl::InvalidArgumentError("WANT_LANES from the side that dials");
      }
      owner_->OnWantLanes(this, header.group, header.attempt);
      return absl::OkStatus();
    default:
      return delivering_ ? owner_->OnLinkFrame(this, header, payload) : Hold(header, payload);
  }
}

void Link::OnPong(const FrameHeader& header) {
  const int64_t us = ring_->Now().us - static_cast<int64_t>(header.stamp);
  if (us >= 0 && us <= Seconds(60)) rtt_us_ = std::max<int64_t>(us, 1);
  if (established_) return;
  established_ = true;
  owner_->OnLinkEstablished(this);
}

// The other side may know sooner than we that the link is complete.
absl::Status Link::Hold(const FrameHeader& header, std::span<const uint8_t> payload) {
  held_bytes_ += kFrameHeaderBytes + payload.size();
  if (held_bytes_ > kHeldBytesMax) {
    return absl::InvalidArgumentError("too many frames before the link is complete");
  }
  held_.emplace_back(header, std::vector<uint8_t>(payload.begin(), payload.end()));
  return absl::OkStatus();
}

absl::StatusOr<uint8_t*> Link::OnLaneData(Lane*, const FrameHeader& header) {
  return owner_->OnLinkData(this, header);
}

absl::Status Link::OnLaneDataReceived(Lane*, const FrameHeader& header) {
  return owner_->OnLinkDataReceived(this, header);
}

// ------------------------------------------------------------------------------ life

Tick Link::Work(Tick now, uint32_t detect_ms) {
  if (!alive()) return kNever;
  const int64_t interval = Millis(detect_ms) / kPingsPerDetect;
  if (!closing_lane_.empty() && now - closing_since_ >= interval) {
    Break(absl::StrCat(closing_lane_, ": closed by the other side"));
    return kNever;
  }
  const int64_t silent = now - control_->last_heard();
  if (silent >= Millis(detect_ms)) {
    Break(absl::StrCat("silent for ", detect_ms, " ms"));
    return kNever;
  }
  if (last_ping_ == Tick{} || now - last_ping_ >= interval) {
    last_ping_ = now;
    FrameHeader ping{.type = FrameType::kPing};
    ping.stamp = static_cast<uint64_t>(now.us);
    SendControl(ping, {});
    if (!alive()) return kNever;
  }
  Tick next = std::min(last_ping_ + interval, control_->last_heard() + Millis(detect_ms));
  if (!closing_lane_.empty()) next = std::min(next, closing_since_ + interval);
  return next;
}

void Link::Tune(const StreamTuning& tuning) {
  control_->Tune(tuning);
  for (const auto& lane : data_) {
    if (lane != nullptr) lane->Tune(tuning);
  }
}

LaneStats Link::stats() const {
  LaneStats sum = control_->stats();
  for (const auto& lane : data_) {
    if (lane == nullptr) continue;
    sum.bytes_sent += lane->stats().bytes_sent;
    sum.bytes_received += lane->stats().bytes_received;
    sum.bytes_discarded += lane->stats().bytes_discarded;
    sum.zero_copy_copied += lane->stats().zero_copy_copied;
  }
  return sum;
}

// A peer that closes in order ends one lane after the other. All of them ended, or a while later:
// the link is down.
void Link::OnLanePeerEnded(Lane* lane) {
  if (closing_lane_.empty()) {
    closing_lane_ = lane->name();
    closing_since_ = ring_->Now();
    owner_->OnLinkClosing(this);
  }
  if (!control_->peer_ended()) return;
  for (const auto& other : data_) {
    if (other != nullptr && !other->peer_ended()) return;
  }
  Break(absl::StrCat(closing_lane_, ": closed by the other side"));
}

void Link::OnLaneBroken(Lane*, const std::string& reason, bool protocol) {
  Break(reason, protocol);
}

void Link::Break(const std::string& reason, bool protocol) {
  if (!alive()) return;
  state_ = State::kBroken;
  AbortLanes();
  DropQueue();
  owner_->OnLinkBroken(this, reason, protocol);
}

void Link::Finish() {
  if (!alive()) return;
  state_ = State::kFinishing;
  for (const auto& lane : data_) {
    if (lane != nullptr) lane->Finish();
  }
  control_->Finish();
  // Without data lanes nothing carries what may be queued.
  if (data_lanes_ == 0) DropQueue();
}

void Link::Abort() {
  if (state_ != State::kAlive && state_ != State::kFinishing) return;
  state_ = State::kBroken;
  AbortLanes();
  DropQueue();
}

void Link::AbortLanes() {
  control_->Abort();
  for (const auto& lane : data_) {
    if (lane != nullptr) lane->Abort();
  }
}

void Link::DropQueue() {
  if (queue_.empty()) return;
  std::vector<uint64_t> cookies;
  for (const OutgoingSegment& segment : queue_) cookies.push_back(segment.cookie);
  queue_.clear();
  owner_->OnLinkSegmentsDropped(std::move(cookies));
}

void Link::OnLaneEnded(Lane*) {
  if (state_ == State::kEnded || !control_->ended()) return;
  for (const auto& lane : data_) {
    if (lane != nullptr && !lane->ended()) return;
  }
  DropQueue();
  state_ = State::kEnded;
  owner_->OnLinkEnded(this);
}

}  // namespace longhaul::peerd
