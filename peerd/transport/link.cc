#include "peerd/transport/link.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/io/sockets.h"

namespace longhaul::peerd {
namespace {

constexpr size_t kHeldBytesMax = 1 << 20;
// What one op has queued: all that its lanes may have in flight on a long way, or as long as it is
// sent from its place. Where the kernel takes a copy, little: what is queued longer than it stays
// in cache is read from memory again.
constexpr uint64_t kWindowBytesPerLane = 1 << 20;
constexpr uint64_t kWindowBytesMin = 8 << 20;
constexpr uint64_t kCopiedBytesPerLane = 256 << 10;
// A lane that takes so many times as long as the others on average rests. Lanes of one path may
// differ by a factor of three or four for a while, by chance.
constexpr double kLagFactor = 6;
// And it would hold up a segment for so many round trips.
constexpr int64_t kLagRtts = 4;
// A lane leaves the next segment to others if they will be through with all that is queued, and
// that one, in less than the time that it would take: by this factor, since lanes differ by chance.
constexpr double kLateFactor = 2;
constexpr int64_t kNudgeUsMin = Millis(5);
// A rest, and how long a slow lane is not tried otherwise. What it is tried with may hold up one
// op.
constexpr int64_t kRestUsMin = Seconds(10);
constexpr int64_t kRestUsMax = Seconds(600);
// PINGs in one detect_ms: two may be lost to a slow moment without anyone noticing.
constexpr int64_t kPingsPerDetect = 3;

// What says how fast a link is, unless more waits to be sent.
constexpr uint64_t kMeasuredBytesMin = 1 << 20;
// Data lanes count as busy for so long after the last segment, and an idle one is heard this
// seldom.
constexpr int64_t kBusyDetects = 2;
constexpr uint32_t kQuietDetects = 4;
// A round trip that is not worth more patience; a busy process takes as long.
constexpr int64_t kUsualRttUs = Millis(100);
// Numbered frames that are not acknowledged: no more than the members here can cause, with all the
// ops that they may have open at one time announced and done. They fit into a control lane's queue.
constexpr size_t kKeptBytesMax = size_t{LH_LOCAL_MEMBERS_MAX} * LH_OPS_OPEN_MAX *
                                 (2 * kFrameHeaderBytes + LH_CONTROL_PAYLOAD_BYTES_MAX);
static_assert(kKeptBytesMax + (1 << 20) < kControlQueueBytesMax);
// A correct peer acknowledges at least this often.
constexpr uint32_t kAckFrames = 64;
constexpr size_t kAckBytes = 64 << 10;
// Answers to LANE_LOST of lanes that are not known here, until one of them is acknowledged. A peer
// without a control lane may save up some for each data lane that it dialled meanwhile.
constexpr uint64_t kUnknownLostMax = uint64_t{64} * LH_LANES_MAX;

}  // namespace

Link::Link(Ring* ring, int fd, LinkOptions options, LinkOwner* owner)
    : ring_(ring),
      options_(std::move(options)),
      owner_(owner),
      heard_(ring->Now()),
      last_serial_(LH_LANES_MAX) {
  control_ = MakeControl(fd);
  // The side that was dialled has seen the proof; the dialler waits for an answer to its first
  // PING.
  established_ = !options_.dialled;
  control_->StartReceiving();
  SendPings(ring->Now());
}

Link::~Link() = default;

std::unique_ptr<Lane> Link::MakeControl(int fd) {
  return std::make_unique<Lane>(
      ring_, fd,
      LaneOptions{.kind = LaneKind::kControl,
                  .name = absl::StrCat("control lane to ", ToString(options_.remote))},
      this);
}

template <class F>
void Link::ForEachLane(F f) const {
  if (control_ != nullptr) f(control_.get());
  for (const auto& lane : old_controls_) f(lane.get());
  for (const DataLane& data : data_) {
    if (data.lane != nullptr) f(data.lane.get());
  }
  for (const DataLane& data : lost_) {
    if (data.lane != nullptr) f(data.lane.get());
  }
}

uint32_t Link::lanes() const {
  return (alive() && established_ && control_ != nullptr ? 1 : 0) + data_lanes_;
}

// ------------------------------------------------------------------------------ lanes come

bool Link::FitsControl(uint64_t serial) const {
  return alive() && established_ && !closing() && serial > control_serial_;
}

void Link::ResumeControl(int fd, uint64_t serial) {
  LH_CHECK(FitsControl(serial));
  if (control_ != nullptr) LoseLane(control_.get(), "replaced by a new connection of the peer");
  control_serial_ = serial;
  control_ = MakeControl(fd);
  resumed_ = false;
  control_->StartReceiving();
  FrameHeader resume{.type = FrameType::kResume};
  resume.acked = received_;
  unacked_frames_ = 0;
  unacked_bytes_ = 0;
  SendOnLane(resume);
}

bool Link::HasDataLane(uint32_t index) const {
  return index < data_.size() && data_[index].lane != nullptr;
}

bool Link::FitsDataLane(uint32_t index, uint32_t count, uint64_t serial) const {
  if (!alive() || !established_ || closing() || count == 0 || count > LH_LANES_MAX ||
      index >= count || serial <= last_serial_[index]) {
    return false;
  }
  return true;
}

void Link::ExpectDataLanes(uint32_t count) {
  LH_CHECK(count <= LH_LANES_MAX);
  if (count > data_.size()) data_.resize(count);
}

void Link::AddDataLane(int fd, uint32_t index, uint32_t count, uint64_t serial) {
  LH_CHECK(FitsDataLane(index, count, serial));
  ExpectDataLanes(count);
  const bool first = last_serial_[index] == 0;
  DataLane& data = data_[index];
  // The other end has noticed before us that it is lost.
  if (data.lane != nullptr) LoseLane(data.lane.get(), "replaced by a new connection of the peer");
  data.index = index;
  data.serial = serial;
  data.lane = std::make_unique<Lane>(
      ring_, fd,
      LaneOptions{.kind = LaneKind::kData,
                  .index = index,
                  .name = absl::StrCat("data lane ", index, " to ", ToString(options_.remote)),
                  .zero_copy = options_.zero_copy,
                  .zero_copy_always = options_.zero_copy_always},
      this);
  last_serial_[index] = serial;
  ++data_lanes_;
  quiet_told_ = false;
  if (data_were_complete_ && !first) owner_->OnLinkLaneBack(this, data.lane->name());
  data_were_complete_ |= data_complete();
  if (const auto measured = data.lane->Delivery(); measured && measured->rtt_us >= kLongWayUs) {
    data.lane->SetLongWay();
    long_way_ = true;
    long_way_us_ = measured->rtt_us;
    if (options_.count_lanes && !lane_count_) {
      lane_count_.emplace(count, LH_LANES_MAX, measured->rtt_us);
    }
  }
  if (!delivering_) return;
  data.lane->StartReceiving();
  data.lane->Pull();
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
    if (data_[i].lane != nullptr) data_[i].lane->StartReceiving();
  }
}

// ------------------------------------------------------------------------------ sending

void Link::SendControl(const FrameHeader& header, std::span<const uint8_t> payload, bool may_wait) {
  if (!alive()) return;
  if (IsNumbered(header.type)) {
    SendNumbered(header, payload, may_wait);
  } else {
    SendOnLane(header);
  }
}

void Link::SendOnLane(const FrameHeader& header) {
  if (control_ == nullptr) return;
  // Of these only the newest matters; and how many there are may be up to the other side, which
  // need not read them.
  const bool newest = header.type == FrameType::kPing || header.type == FrameType::kPong ||
                      header.type == FrameType::kAck;
  if (newest ? control_->SendNewest(header) : control_->SendFrame(header, {})) return;
  BreakAs(absl::StrCat(control_->name(), ": the other side does not read"), false, false);
}

void Link::SendNumbered(const FrameHeader& header, std::span<const uint8_t> payload,
                        bool may_wait) {
  const size_t bytes = kFrameHeaderBytes + payload.size();
  if (kept_.size() - kept_head_ + bytes > kKeptBytesMax) {
    BreakAs(absl::StrCat("control lane to ", ToString(options_.remote),
                         ": the other side does not acknowledge what it is sent"),
            false, false);
    return;
  }
  const auto encoded = Encode(header);
  const size_t start = kept_.size();
  kept_.insert(kept_.end(), encoded.begin(), encoded.end());
  kept_.insert(kept_.end(), payload.begin(), payload.end());
  kept_sizes_.push_back(static_cast<uint32_t>(bytes));
  ++sent_;
  if (control_ == nullptr || !resumed_) return;
  put_on_lane_ = sent_;
  if (!control_->SendFrames(std::span<const uint8_t>(kept_).subspan(start), may_wait)) {
    BreakAs(absl::StrCat(control_->name(), ": the other side does not read"), false, false);
  }
}

void Link::SendSegment(const OutgoingSegment& segment) {
  if (!alive()) {
    owner_->OnLinkSegmentsDropped({segment.cookie});
    return;
  }
  QueueOf(segment)->push_back(segment);
  PullAll();
}

std::deque<OutgoingSegment>* Link::QueueOf(const OutgoingSegment& segment) {
  return segment.header.type == FrameType::kChunkData ? &chunks_ : &ops_;
}

// Ops first, and never behind: of a link that both want they have half or more.
std::deque<OutgoingSegment>* Link::NextQueue() {
  if (ops_.empty() && chunks_.empty()) return nullptr;
  if (ops_.empty() || chunks_.empty()) {
    chunks_ahead_ = 0;
    return ops_.empty() ? &chunks_ : &ops_;
  }
  return chunks_ahead_ < 0 ? &chunks_ : &ops_;
}

// Idle lanes in turn; a busy one pulls when it is done.
void Link::PullAll() {
  for (size_t i = 0; i < data_.size() && queued(); ++i) {
    next_lane_ = (next_lane_ + 1) % data_.size();
    if (data_[next_lane_].lane != nullptr) data_[next_lane_].lane->Pull();
  }
}

uint32_t Link::lanes_used() const {
  const Tick now = ring_->Now();
  uint32_t used = 0;
  for (uint32_t i = 0; i < data_.size(); ++i) {
    if (data_[i].lane != nullptr && Uses(i) && now >= data_[i].rests_until) ++used;
  }
  return used;
}

// The first lanes, or while none of them stands any.
bool Link::Uses(uint32_t index) const {
  if (!lane_count_ || index < lane_count_->lanes()) return true;
  return std::none_of(data_.begin(), data_.begin() + lane_count_->lanes(),
                      [](const DataLane& data) { return data.lane != nullptr; });
}

// A lane asks for more: what it was given last is in the kernel, but for little.
void Link::Measure(DataLane* data, Tick now) {
  if (data->given_bytes == 0) return;
  const double us = std::max<double>(now - data->given_at, 1);
  const double us_per_byte = us / static_cast<double>(std::exchange(data->given_bytes, 0));
  data->us_per_byte += (us_per_byte - data->us_per_byte) / (data->us_per_byte == 0 ? 1 : 4);
}

// Whether a lane had better not carry the next segment, of so many bytes: it is so slow that it
// rests, or near the end of what is queued the others are done with it sooner (earliest completion
// first: Lim, Nahum, Towsley and Gibbens, "ECF: An MPTCP path scheduler to manage heterogeneous
// paths", 2017).
bool Link::LagsBehind(uint32_t index, uint32_t bytes, Tick now) {
  DataLane& data = data_[index];
  // Of the others: times, since one that had room for all it was given says little.
  double times = 0;
  double rate = 0;  // of all of them, in bytes a microsecond
  int known = 0;
  bool others = false;
  for (uint32_t i = 0; i < data_.size(); ++i) {
    if (i == index || data_[i].lane == nullptr || !Uses(i) || now < data_[i].rests_until) {
      continue;
    }
    others = true;
    if (data_[i].us_per_byte == 0) continue;
    times += data_[i].us_per_byte;
    rate += 1 / data_[i].us_per_byte;
    ++known;
  }
  if (!others) return false;
  if (now < data.rests_until) return true;
  if (known == 0 || data.us_per_byte == 0) return false;
  // It goes behind what the lane keeps unsent.
  const double length = static_cast<double>(bytes) + kUnsentBytes;
  const double own = data.us_per_byte * length;
  const double usual = times / known * length;
  if (own <= kLagFactor * usual || own < static_cast<double>(kLagRtts * long_way_us_)) {
    data.rests = 0;
    const double queued = static_cast<double>(bytes) * (ops_.size() + chunks_.size());
    if (own <= kLateFactor * usual + queued / rate) return false;
    if (now - data.given_at < kRestUsMin) return true;
    data.us_per_byte = 0;  // it may have recovered
    return false;
  }
  const int64_t us = std::min(kRestUsMin << std::min(data.rests++, 16u), kRestUsMax);
  data.rests_until = now + us;
  data.us_per_byte = 0;
  owner_->OnLinkLaneRests(this);
  return true;
}

// Should the last packets before a pause be lost, nothing behind them tells TCP: it waits for two
// round trips and more. A PING behind them does.
void Link::RanDry(DataLane* data, Tick now) {
  if (lane_count_) lane_count_->Drained();
  if (data->sent == std::exchange(data->sent_dry, data->sent)) return;
  data->nudge_at = now + std::max(rtt_us_ / 4, kNudgeUsMin);
  owner_->OnLinkDue(this, data->nudge_at);
}

// When to call again.
Tick Link::Nudge(Tick now) {
  Tick next = kNever;
  for (size_t i = 0; i < data_.size() && alive(); ++i) {
    DataLane& data = data_[i];
    if (data.lane == nullptr || data.nudge_at == kNever) continue;
    if (data.nudge_at > now) {
      next = std::min(next, data.nudge_at);
      continue;
    }
    data.nudge_at = kNever;
    if (data.sent == data.sent_dry) (void)data.lane->Ping(0);
  }
  return next;
}

LinkUse Link::BestUse() const {
  if (!long_way_ && !options_.zero_copy) return {data_lanes_ * kCopiedBytesPerLane, false};
  return {std::max(data_lanes_ * kWindowBytesPerLane, kWindowBytesMin), long_way_};
}

void Link::CountSent(uint64_t bytes, Tick now) {
  if (!lane_count_ || !lane_count_->Sent(bytes, now)) return;
  owner_->OnLinkLaneCount(this, lane_count_->lanes(), lane_count_->rate());
}

bool Link::NextSegment(Lane* lane, uint32_t bytes_max, OutgoingSegment* segment) {
  const Tick now = ring_->Now();
  // Not in the middle of what the lane sends at once.
  if (long_way_ && bytes_max == kAnyBytes) Measure(&data_[lane->index()], now);
  if (!Uses(lane->index())) return false;
  std::deque<OutgoingSegment>* const queue = NextQueue();
  if (queue == nullptr && long_way_) RanDry(&data_[lane->index()], now);
  if (queue != nullptr && long_way_ &&
      LagsBehind(lane->index(), queue->front().header.payload_bytes, now)) {
    return false;
  }
  if (queue == nullptr || queue->front().header.payload_bytes > bytes_max) return false;
  *segment = queue->front();
  const int64_t bytes = segment->header.payload_bytes;
  if (!ops_.empty() && !chunks_.empty()) chunks_ahead_ += queue == &chunks_ ? bytes : -bytes;
  queue->pop_front();
  DataLane& data = data_[lane->index()];
  LH_CHECK(data.lane.get() == lane);
  last_segment_ = now;
  const uint64_t number = data.sent++;
  if (!forgotten_.contains(segment->owner)) {
    data.records.push_back({number, *segment});
    ++records_of_[segment->owner];
    ++records_;
  }
  if (long_way_) {
    data.given_at = now;
    data.given_bytes += segment->header.payload_bytes;
  }
  CountSent(bytes, now);
  return true;
}

void Link::DropSegments(const std::unordered_set<uint64_t>& cookies) {
  std::vector<uint64_t> dropped;
  const auto drop = [&](const OutgoingSegment& segment) {
    if (cookies.count(segment.cookie) == 0) return false;
    dropped.push_back(segment.cookie);
    return true;
  };
  std::erase_if(ops_, drop);
  std::erase_if(chunks_, drop);
  if (!dropped.empty()) owner_->OnLinkSegmentsDropped(std::move(dropped));
}

void Link::ForgetSegments(uint64_t owner) {
  const auto it = records_of_.find(owner);
  if (it == records_of_.end()) return;
  records_forgotten_ += it->second;
  records_of_.erase(it);
  forgotten_.insert(owner);
  // Many at once: to look through all of them for each owner takes the longer the more there are.
  if (2 * records_forgotten_ < records_) return;
  const auto forget = [this](DataLane* data) {
    std::erase_if(data->records, [this](const Record& record) {
      return forgotten_.contains(record.segment.owner);
    });
  };
  for (DataLane& data : data_) forget(&data);
  for (DataLane& data : lost_) forget(&data);
  records_ -= std::exchange(records_forgotten_, 0);
  forgotten_.clear();
}

int Link::Detach(const ReceiveKey& key, const std::function<void()>& done) {
  const auto names = [&key](const FrameHeader& header) { return key.Names(header); };
  int receiving = 0;
  ForEachLane([&](Lane* lane) {
    if (lane->kind() == LaneKind::kData && lane->Detach(names, [done] { done(); })) {
      ++receiving;
    }
  });
  return receiving;
}

int Link::FindBuffer(const uint8_t* data, size_t bytes) { return owner_->FindBuffer(data, bytes); }

void Link::OnLaneSegmentSent(uint64_t cookie) { owner_->OnLinkSegmentSent(cookie); }

// ------------------------------------------------------------------------------ receiving

absl::Status Link::OnLaneFrame(Lane*, const FrameHeader& header, std::span<const uint8_t> payload) {
  if (!IsNumbered(header.type)) return TakeFrame(header, payload);
  if (!resumed_) return absl::InvalidArgumentError("a frame before RESUME");
  ++received_;
  absl::Status status = TakeFrame(header, payload);
  if (status.ok() && alive()) AcknowledgeSoon(kFrameHeaderBytes + payload.size());
  return status;
}

absl::Status Link::TakeFrame(const FrameHeader& header, std::span<const uint8_t> payload) {
  switch (header.type) {
    case FrameType::kPing: {
      FrameHeader pong{.type = FrameType::kPong};
      pong.stamp = header.stamp;
      pong.acked = received_;
      SendOnLane(pong);
      return alive() ? OnAcked(header.acked) : absl::OkStatus();
    }
    case FrameType::kPong:
      OnPong(header);
      return alive() ? OnAcked(header.acked) : absl::OkStatus();
    case FrameType::kAck:
      return OnAcked(header.acked);
    case FrameType::kResume:
      return OnResume(header.acked);
    case FrameType::kLaneLost:
      return OnLaneLost(header);
    case FrameType::kWantLanes:
      if (!options_.dialled) {
        return absl::InvalidArgumentError("WANT_LANES from the side that dials");
      }
      if (header.offset > LH_LANES_MAX) {
        return absl::InvalidArgumentError(absl::StrCat("WANT_LANES of ", header.offset, " lanes"));
      }
      owner_->OnWantLanes(this, (header.flags & kFlagOptional) != 0,
                          static_cast<uint32_t>(header.offset));
      return absl::OkStatus();
    default:
      return delivering_ ? owner_->OnLinkFrame(this, header, payload) : Hold(header, payload);
  }
}

void Link::AcknowledgeSoon(size_t bytes) {
  ++unacked_frames_;
  unacked_bytes_ += bytes;
  if (unacked_frames_ < kAckFrames && unacked_bytes_ < kAckBytes) return;
  unacked_frames_ = 0;
  unacked_bytes_ = 0;
  FrameHeader ack{.type = FrameType::kAck};
  ack.acked = received_;
  SendOnLane(ack);
}

absl::Status Link::OnAcked(uint64_t acked) {
  if (acked > sent_) {
    return absl::InvalidArgumentError(
        absl::StrCat("acknowledges ", acked, " frames where ", sent_, " were sent"));
  }
  if (acked <= acked_) return absl::OkStatus();
  for (; acked_ < acked; ++acked_) {
    kept_head_ += kept_sizes_.front();
    kept_sizes_.pop_front();
  }
  if (kept_head_ * 2 >= kept_.size()) {
    kept_.erase(kept_.begin(), kept_.begin() + static_cast<ptrdiff_t>(kept_head_));
    kept_head_ = 0;
  }
  return absl::OkStatus();
}

absl::Status Link::OnResume(uint64_t acked) {
  if (resumed_) return absl::InvalidArgumentError("RESUME on a lane that was not lost");
  if (acked < acked_) {
    return absl::InvalidArgumentError(
        absl::StrCat("RESUME after ", acked, " frames where ", acked_, " were acknowledged"));
  }
  absl::Status status = OnAcked(acked);
  if (!status.ok()) return status;
  resumed_ = true;
  owner_->OnLinkFramesRepeated(put_on_lane_ > acked_ ? put_on_lane_ - acked_ : 0);
  owner_->OnLinkLaneBack(this, control_->name());
  put_on_lane_ = sent_;
  if (!control_->SendFrames(std::span<const uint8_t>(kept_).subspan(kept_head_))) {
    BreakAs(absl::StrCat(control_->name(), ": the other side does not read"), false, false);
  }
  return absl::OkStatus();
}

void Link::OnPong(const FrameHeader& header) {
  const int64_t us = ring_->Now().us - static_cast<int64_t>(header.stamp);
  if (us >= 0 && us <= Seconds(60)) {
    rtt_us_ = std::max<int64_t>(us, 1);
    rtt_high_us_ = std::max(rtt_us_, rtt_high_us_ * 7 / 8);
  }
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

void Link::OnLaneDataAbandoned(Lane*, const FrameHeader& header) {
  if (alive()) owner_->OnLinkDataAbandoned(this, header);
}

// ------------------------------------------------------------------------------ lanes go

void Link::OnLaneBroken(Lane* lane, const std::string& reason, bool protocol) {
  if (protocol) {
    Break(reason, true);
  } else {
    LoseLane(lane, reason);
  }
}

// One of those in use. Its connection is of no use any more.
void Link::LoseLane(Lane* lane, const std::string& reason) {
  if (!alive()) return lane->Abort();
  const bool control = lane == control_.get();
  // The dialler does not know yet whether there is a link.
  if (control && !established_) return BreakAs(reason, false, false);
  heard_ = std::max(heard_, lane->last_heard());
  lane->Abort();
  if (control) {
    LoseControl();
  } else {
    LoseData(lane->index());
  }
  if (closing()) {
    MaybeClosed();
  } else {
    owner_->OnLinkLaneLost(this, control ? LaneKind::kControl : LaneKind::kData, reason);
  }
}

void Link::LoseControl() {
  old_controls_.push_back(std::move(control_));
  control_lost_ = ring_->Now();
}

void Link::LoseData(uint32_t index) {
  lost_.push_back(std::exchange(data_[index], DataLane{}));
  --data_lanes_;
  data_lost_ = ring_->Now();
}

void Link::OnLaneEnded(Lane* lane) {
  const auto control = std::find_if(old_controls_.begin(), old_controls_.end(),
                                    [lane](const auto& old) { return old.get() == lane; });
  if (control != old_controls_.end()) {
    gone_.Add(lane->stats());
    owner_->OnLinkLaneEnded(std::move(*control));
    old_controls_.erase(control);
  }
  const auto data = std::find_if(lost_.begin(), lost_.end(),
                                 [lane](const DataLane& lost) { return lost.lane.get() == lane; });
  if (data != lost_.end()) {
    gone_.Add(lane->stats());
    owner_->OnLinkLaneEnded(std::move(data->lane));
    const uint32_t index = data->index;
    const uint64_t serial = data->serial;
    data->told = true;
    if (data->answered) lost_.erase(data);
    // Only now: nothing is written to a place that a repeated segment may be received into.
    SendLaneLost(index, serial, lane->received());
  }
  CheckEnded();
}

void Link::SendLaneLost(uint32_t index, uint64_t serial, uint64_t received) {
  if (!alive() || closing()) return;
  FrameHeader lost{.type = FrameType::kLaneLost};
  lost.group = index;
  lost.stamp = serial;
  lost.offset = received;
  SendNumbered(lost, {}, /*may_wait=*/false);
}

absl::Status Link::OnLaneLost(const FrameHeader& header) {
  const uint32_t index = header.group;
  const uint64_t serial = header.stamp;
  if (HasDataLane(index) && data_[index].serial == serial) {
    LoseLane(data_[index].lane.get(),
             absl::StrCat(data_[index].lane->name(), ": lost at the other end"));
    if (!alive()) return absl::OkStatus();
  }
  const auto lost = std::find_if(lost_.begin(), lost_.end(), [&](const DataLane& data) {
    return data.index == index && data.serial == serial;
  });
  if (lost == lost_.end()) return OnUnknownLaneLost(index, serial);
  if (lost->answered) return absl::InvalidArgumentError("LANE_LOST again");
  if (header.offset > lost->sent) {
    return absl::InvalidArgumentError(absl::StrCat("LANE_LOST after ", header.offset,
                                                   " segments where ", lost->sent, " were sent"));
  }
  lost->answered = true;
  Repeat(&*lost, header.offset);
  if (lost->told) lost_.erase(lost);
  PullAll();
  return absl::OkStatus();
}

// Its handshake went wrong at this end only. It must not come into use now.
absl::Status Link::OnUnknownLaneLost(uint32_t index, uint64_t serial) {
  if (options_.dialled && serial >= next_serial_) {
    return absl::InvalidArgumentError(
        absl::StrCat("LANE_LOST of lane ", index, " serial ", serial, ", which was never dialled"));
  }
  if (acked_ >= unknown_lost_answered_) unknown_lost_ = 0;
  if (++unknown_lost_ > kUnknownLostMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "LANE_LOST of ", unknown_lost_, " lanes that are not known here, no answer acknowledged"));
  }
  last_serial_[index] = std::max(last_serial_[index], serial);
  SendLaneLost(index, serial, 0);
  unknown_lost_answered_ = sent_;
  return absl::OkStatus();
}

// Others wait for these: they go first.
void Link::Repeat(DataLane* lost, uint64_t received) {
  std::vector<OutgoingSegment> ops;
  std::vector<OutgoingSegment> chunks;
  for (const Record& record : lost->records) {
    OutgoingSegment segment = record.segment;
    --records_;
    if (forgotten_.contains(segment.owner)) {
      --records_forgotten_;
      continue;
    }
    const auto of = records_of_.find(segment.owner);
    if (--of->second == 0) records_of_.erase(of);
    if (record.number < received) continue;
    segment.cookie = owner_->OnLinkSegmentRepeat(segment.owner);
    if (segment.cookie == 0) continue;
    (QueueOf(segment) == &chunks_ ? chunks : ops).push_back(segment);
  }
  lost->records.clear();
  ops_.insert(ops_.begin(), ops.begin(), ops.end());
  chunks_.insert(chunks_.begin(), chunks.begin(), chunks.end());
}

// ------------------------------------------------------------------------------ life

Tick Link::last_heard() const {
  Tick heard = heard_;
  ForEachLane([&heard](const Lane* lane) { heard = std::max(heard, lane->last_heard()); });
  return heard;
}

void Link::ForgiveSilence(int64_t us) {
  heard_ = heard_ + us;
  ForEachLane([us](Lane* lane) { lane->ForgiveSilence(us); });
}

// How long silence is no loss: detect_ms, and on a path that is long or delays what it has to
// repeat some of its round trips more (as TCP's own timeout, RFC 6298), up to four detect_ms.
int64_t Link::Patience(uint32_t detect_ms) const {
  const int64_t detect = Millis(detect_ms);
  return std::min(4 * detect, detect + 4 * std::max<int64_t>(0, rtt_high_us_ - kUsualRttUs));
}

// TCP waits twice as long before each repetition: after an outage of 0.7 s it may be silent for
// another 0.7 s. Where round trips are short, a lane is dialled anew before that.
void Link::TuneLanes(uint32_t detect_ms) {
  const uint32_t ms = short_way() ? detect_ms / 2 : 4 * detect_ms;
  ForEachLane([ms](Lane* lane) { lane->SetUserTimeout(ms); });
}

bool Link::short_way() const { return rtt_us_ > 0 && rtt_high_us_ <= kUsualRttUs; }

Tick Link::Work(Tick now, uint32_t detect_ms, const std::string& repair_error) {
  if (!alive()) return kNever;
  const int64_t detect = Millis(detect_ms);
  const int64_t interval = detect / kPingsPerDetect;
  if (BreakIfDead(now, detect_ms, repair_error)) return kNever;
  LoseStalled(now, detect_ms);
  if (!alive()) return kNever;
  TuneLanes(detect_ms);
  if (now - last_ping_ >= interval) {
    SendPings(now);
    PingDataLanes(now, detect_ms);
  }
  const Tick nudge = Nudge(now);
  if (!alive()) return kNever;
  Tick next = std::min({nudge, last_ping_ + interval, last_heard() + Patience(detect_ms)});
  if (closing()) next = std::min(next, closing_since_ + interval);
  if (control_ == nullptr) next = std::min(next, control_lost_ + 2 * detect);
  if (data_were_complete_ && data_lanes_ == 0) next = std::min(next, data_lost_ + 2 * detect);
  return next;
}

bool Link::BreakIfDead(Tick now, uint32_t detect_ms, const std::string& repair_error) {
  const int64_t detect = Millis(detect_ms);
  const std::string remote = ToString(options_.remote);
  const std::string error = repair_error.empty() ? "" : ": " + repair_error;
  if (closing() && now - closing_since_ >= detect / kPingsPerDetect) {
    BreakAs(absl::StrCat(closing_lane_, ": closed by the other side"), false, false);
  } else if (const int64_t patience = Patience(detect_ms); now - last_heard() >= patience) {
    BreakAs(absl::StrCat("silent for ", patience / 1000, " ms"), false, false);
  } else if (control_ == nullptr && now - control_lost_ >= 2 * detect) {
    BreakAs(absl::StrCat("control lane to ", remote, " was lost and not replaced in ",
                         2 * uint64_t{detect_ms}, " ms", error),
            false, true);
  } else if (data_were_complete_ && data_lanes_ == 0 && now - data_lost_ >= 2 * detect) {
    BreakAs(
        absl::StrCat("all ", data_.size(), " data lanes to ", remote,
                     " were lost and none was replaced in ", 2 * uint64_t{detect_ms}, " ms", error),
        false, true);
  }
  return !alive();
}

// Lanes on which nothing comes while something comes on others. The PINGs of the other side say
// that it would.
void Link::LoseStalled(Tick now, uint32_t detect_ms) {
  const int64_t detect = Millis(detect_ms);
  if (closing() || now - last_heard() > detect / 2) return;
  const int64_t patience = Patience(detect_ms);
  std::vector<Lane*> stalled;
  const auto check = [&](Lane* lane) {
    if (now - lane->last_heard() >= patience + lane->quiet_us()) stalled.push_back(lane);
  };
  if (control_ != nullptr) check(control_.get());
  for (const DataLane& data : data_) {
    if (delivering_ && data.lane != nullptr) check(data.lane.get());
  }
  for (Lane* lane : stalled) {
    LoseLane(lane, absl::StrCat(lane->name(), ": silent for ", patience / 1000,
                                " ms while other lanes are heard"));
    if (!alive()) return;
  }
}

void Link::SendPings(Tick now) {
  last_ping_ = now;
  FrameHeader ping{.type = FrameType::kPing};
  ping.stamp = static_cast<uint64_t>(now.us);
  ping.acked = received_;
  SendOnLane(ping);
}

// As often as on the control lane while segments come and go. When none did for a while, seldom:
// many idle lanes are to cost next to nothing. The other side is told so, or it would take them for
// stalled.
void Link::PingDataLanes(Tick now, uint32_t detect_ms) {
  const int64_t detect = Millis(detect_ms);
  const uint32_t quiet_ms = now - last_segment_ < kBusyDetects * detect
                                ? 0
                                : std::min(kQuietDetects * detect_ms, LH_QUIET_MS_MAX);
  if (quiet_ms != 0 && quiet_told_ && now - last_data_ping_ < Millis(quiet_ms)) return;
  last_data_ping_ = now;
  quiet_told_ = quiet_ms != 0;
  for (size_t i = 0; i < data_.size() && alive(); ++i) {
    if (data_[i].lane != nullptr) quiet_told_ &= data_[i].lane->Ping(quiet_ms);
  }
}

void Link::Tune(const StreamTuning& tuning) {
  ForEachLane([&tuning](Lane* lane) { lane->Tune(tuning); });
}

LaneStats Link::stats() const {
  LaneStats sum = gone_;
  ForEachLane([&sum](const Lane* lane) { sum.Add(lane->stats()); });
  return sum;
}

LinkDelivery Link::TakeDelivery() {
  LinkDelivery sum{.link = options_.key, .lanes_growing = lane_count_ && !lane_count_->found()};
  // The end of an op is sent by few lanes, and with losses slowly.
  const uint64_t bytes = stats().bytes_sent;
  const uint64_t fresh = bytes - std::exchange(bytes_measured_, bytes);
  sum.limited_by_sender = fresh < kMeasuredBytesMin && !queued();
  for (DataLane& data : data_) {
    const bool used = data.sent != std::exchange(data.sent_measured, data.sent);
    if (!data.lane || !used) continue;
    const std::optional<TcpDelivery> lane = data.lane->Delivery();
    if (!lane) continue;
    sum.bytes_per_second += lane->bytes_per_second;
    sum.limited_by_sender = sum.limited_by_sender || lane->limited_by_sender;
    if (sum.rtt_us == 0 || (lane->rtt_us != 0 && lane->rtt_us < sum.rtt_us)) {
      sum.rtt_us = lane->rtt_us;
    }
  }
  return sum;
}

uint64_t Link::arrived_bytes() const {
  uint64_t sum = 0;
  for (const DataLane& data : data_) {
    if (!data.lane) continue;
    if (const std::optional<TcpDelivery> lane = data.lane->Delivery()) sum += lane->bytes_arrived;
  }
  return sum;
}

void Link::OnLaneClosing(Lane* lane, bool given_up) {
  if (!alive()) return;
  if (given_up) {
    BreakGivenUp(lane->name());
  } else {
    MarkClosing(lane->name());
  }
}

void Link::MarkClosing(const std::string& lane) {
  if (closing()) return;
  closing_lane_ = lane;
  closing_since_ = ring_->Now();
  owner_->OnLinkClosing(this);
}

// A peer that closes in order ends one lane after the other. All of them ended, or a while later:
// the link is down.
void Link::OnLanePeerEnded(Lane*) { MaybeClosed(); }

void Link::MaybeClosed() {
  if (!alive() || !closing()) return;
  if (control_ != nullptr && !control_->peer_ended()) return;
  for (const DataLane& data : data_) {
    if (data.lane != nullptr && !data.lane->peer_ended()) return;
  }
  BreakAs(absl::StrCat(closing_lane_, ": closed by the other side"), false, false);
}

void Link::OnUnknownThere(const std::string& lane) {
  if (!alive()) return;
  if (control_ != nullptr) {
    MarkClosing(lane);
  } else {
    BreakGivenUp(lane);
  }
}

void Link::BreakGivenUp(const std::string& lane) {
  given_up_there_ = true;
  BreakAs(absl::StrCat(lane, ": the other side has given the link up"), false, false);
}

void Link::Break(const std::string& reason, bool protocol) { BreakAs(reason, protocol, true); }

void Link::BreakAs(const std::string& reason, bool protocol, bool tell) {
  if (!alive()) return;
  state_ = State::kBroken;
  if (tell && control_ != nullptr) control_->Finish(kFlagGivenUp);
  ForEachLane([&](Lane* lane) {
    if (!tell || lane != control_.get()) lane->Abort();
  });
  DropQueue();
  owner_->OnLinkBroken(this, reason, protocol);
  CheckEnded();
}

void Link::Finish() {
  if (!alive()) return;
  state_ = State::kFinishing;
  for (const DataLane& data : data_) {
    if (data.lane != nullptr) data.lane->Finish();
  }
  if (control_ != nullptr) control_->Finish();
  // Without data lanes nothing carries what may be queued.
  if (data_lanes_ == 0) DropQueue();
  CheckEnded();
}

void Link::Abort() {
  if (state_ == State::kEnded) return;
  state_ = State::kBroken;
  ForEachLane([](Lane* lane) { lane->Abort(); });
  DropQueue();
  CheckEnded();
}

void Link::DropQueue() {
  if (!queued()) return;
  std::vector<uint64_t> cookies;
  for (const OutgoingSegment& segment : ops_) cookies.push_back(segment.cookie);
  for (const OutgoingSegment& segment : chunks_) cookies.push_back(segment.cookie);
  ops_.clear();
  chunks_.clear();
  owner_->OnLinkSegmentsDropped(std::move(cookies));
}

void Link::CheckEnded() {
  if (state_ == State::kAlive || state_ == State::kEnded) return;
  bool ended = true;
  ForEachLane([&ended](const Lane* lane) { ended = ended && lane->ended(); });
  if (!ended) return;
  DropQueue();
  state_ = State::kEnded;
  owner_->OnLinkEnded(this);
}

}  // namespace longhaul::peerd
