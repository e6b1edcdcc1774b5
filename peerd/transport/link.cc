#include "peerd/transport/link.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "peerd/io/sockets.h"

namespace longhaul::peerd {
namespace {

// How many bytes of its own input an op may have queued on a link (LinkUse::window_bytes). The
// window is large on a long path, where so much may be in flight, and for zero-copy sends. It is
// small if the kernel copies: bytes that wait longer than they stay in the cache are read from
// memory again.
constexpr uint64_t kWindowBytesPerLane = 1 << 20;
constexpr uint64_t kWindowBytesMin = 8 << 20;
constexpr uint64_t kCopiedBytesPerLane = 256 << 10;
constexpr int64_t kNudgeUsMin = Millis(5);
// PINGs in each detect_ms. Two in a row may be lost before the link counts as silent.
constexpr int64_t kPingsPerDetect = 3;
// In units of detect_ms: how long data lanes count as busy after the last segment, and how often an
// idle data lane is pinged.
constexpr int64_t kBusyDetects = 2;
constexpr uint32_t kQuietDetects = 4;
// Round trips up to this long add no patience, because a busy process alone can cause them.
constexpr int64_t kUsualRttUs = Millis(100);
// The receiver acknowledges every LH_SEGMENTS_PER_ACK segments of a lane. So a sender at its limit
// always has an acknowledgement to come.
static_assert(LH_LANES_MAX * LH_SEGMENTS_PER_ACK < LH_SEGMENTS_UNACKED_MAX);
// The limit of LANE_LOST frames for lanes unknown here, until the peer acknowledges one of our
// answers. A peer without a control lane may save up several for each data lane that it dials
// meanwhile.
constexpr uint64_t kUnknownLostMax = uint64_t{64} * LH_LANES_MAX;

}  // namespace

Link::Link(Ring* ring, LaneSocket control, LinkOptions options, LinkOwner* owner)
    : ring_(ring),
      options_(std::move(options)),
      owner_(owner),
      heard_(ring->Now()),
      // The side that was dialled has checked CONFIRM. The dialer waits for the PONG to its first
      // PING.
      control_(ring, ToString(options_.remote), /*established=*/!options_.dialled, this),
      last_serial_(LH_LANES_MAX),
      zero_copy_(options_.zero_copy),
      congestion_(options_.congestion),
      path_(options_.id, options_.paths) {
  if (control.tls != nullptr) {
    secret_ = {control.tls->aead(), control.tls->Export("EXPORTER-longhaul-data-lanes")};
  } else {
    clear_secret_ = control.clear_secret;
  }
  last_ping_ = ring->Now();
  control_.Begin(MakeControl(std::move(control)));
}

std::unique_ptr<Lane> Link::MakeControl(LaneSocket control) {
  LH_CHECK((control.tls != nullptr) == sealed());
  return std::make_unique<Lane>(
      ring_, std::move(control),
      LaneOptions{.kind = LaneKind::kControl,
                  .name = absl::StrCat("control lane to ", ToString(options_.remote))},
      this);
}

// Both ends compute the same keys. No serial comes twice, so no key does either.
std::optional<LaneKeys> Link::KeysOf(uint32_t index, uint64_t serial) const {
  if (!secret_) return std::nullopt;
  const auto key = [&](const char* from) {
    return secret_->secret.Derive(
        absl::StrCat("longhaul data lane ", index, " serial ", serial, " from ", from));
  };
  const KeySecret dialer = key("dialer");
  const KeySecret acceptor = key("acceptor");
  return options_.dialled ? LaneKeys{secret_->aead, dialer, acceptor}
                          : LaneKeys{secret_->aead, acceptor, dialer};
}

template <class F>
void Link::ForEachLane(F f) const {
  control_.ForEachLane(f);
  for (const DataLane& data : data_) {
    if (data.lane != nullptr) f(data.lane.get());
  }
  for (const DataLane& data : lost_) {
    if (data.lane != nullptr) f(data.lane.get());
  }
}

uint32_t Link::lanes() const {
  return (alive() && established() && has_control() ? 1 : 0) + data_lanes_;
}

// ------------------------------------------------------------------------------ lanes come

bool Link::FitsControl(uint64_t serial) const {
  return alive() && established() && !closing() && serial > control_.serial();
}

void Link::ResumeControl(LaneSocket control, uint64_t serial) {
  LH_CHECK(FitsControl(serial));
  if (has_control()) LoseLane(control_.lane(), "replaced by a new connection of the peer");
  control_.Resume(MakeControl(std::move(control)), serial, control_barren_);
}

bool Link::HasDataLane(uint32_t index) const {
  return index < data_.size() && data_[index].lane != nullptr;
}

bool Link::FitsDataLane(uint32_t index, uint32_t count, uint64_t serial) const {
  if (!alive() || !established() || closing() || count == 0 || count > LH_LANES_MAX ||
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
  // The peer noticed before us that this lane is lost.
  if (data.lane != nullptr) LoseLane(data.lane.get(), "replaced by a new connection of the peer");
  data.index = index;
  data.serial = serial;
  data.lane = std::make_unique<Lane>(
      ring_, LaneSocket{fd, nullptr, ""},
      LaneOptions{.kind = LaneKind::kData,
                  .index = index,
                  .name = absl::StrCat("data lane ", index, " to ", ToString(options_.remote)),
                  // What is sealed was copied already.
                  .zero_copy = sealed() ? nullptr : &zero_copy_,
                  .keys = KeysOf(index, serial),
                  .sealed_bytes_max = options_.sealed_bytes_max},
      this);
  last_serial_[index] = serial;
  path_.AddLane(index);
  ++data_lanes_;
  quiet_told_ = false;
  if (data_were_complete_ && !first) owner_->OnLinkLaneBack(this, data.lane->name());
  const bool news = !data_were_complete_ && data_complete();
  data_were_complete_ |= news;
  if (const auto measured = data.lane->Delivery(); measured && measured->rtt_us >= kLongWayUs) {
    data.lane->SetLongWay();
    if (!congestion_.empty()) data.lane->SetCongestion(congestion_);
    path_.SetLongWay(measured->rtt_us, options_.count_lanes, count);
  }
  if (news) Probed(options_.probed_rate);
  if (!control_.delivering()) return;
  data.lane->StartReceiving();
  data.lane->Pull();
}

void Link::Deliver() {
  if (!alive() || control_.delivering()) return;
  if (const absl::Status status = control_.Deliver(); !status.ok()) {
    Break(std::string(status.message()), true);
  }
  for (size_t i = 0; i < data_.size() && alive(); ++i) {
    if (data_[i].lane != nullptr) data_[i].lane->StartReceiving();
  }
}

// ------------------------------------------------------------------------------ sending

void Link::SendParts(const std::vector<OutgoingSegment>& parts) {
  if (queue_.empty()) waiting_since_ = ring_->Now();
  for (const OutgoingSegment& part : parts) queue_.Push(part);
  PullAll();
}

void Link::SendSegment(const OutgoingSegment& segment) {
  if (!alive()) {
    owner_->OnLinkSegmentsDropped(segment.header.type, {segment.cookie});
    return;
  }
  if (queue_.empty()) waiting_since_ = ring_->Now();
  queue_.Push(segment);
  PullAll();
}

// Offers segments to idle lanes in turn. A busy lane pulls by itself when it is done.
void Link::PullAll() {
  for (size_t i = 0; i < data_.size() && !queue_.empty(); ++i) {
    next_lane_ = (next_lane_ + 1) % data_.size();
    if (data_[next_lane_].lane != nullptr) data_[next_lane_].lane->Pull();
  }
}

uint32_t Link::lanes_used() const { return path_.lanes().used(ring_->Now()); }

// Plans a PING behind the last segments before a pause. If their packets are lost, TCP notices it
// by packets that follow. Without such packets TCP waits for two round trips or more.
void Link::RanDry(DataLane* data, Tick now) {
  path_.QueueEmptied();
  const uint64_t sent = data->segments.sent();
  if (sent == std::exchange(data->sent_dry, sent)) return;
  data->nudge_at = now + std::max(rtt_us() / 4, kNudgeUsMin);
  owner_->OnLinkDue(this, data->nudge_at);
}

// Sends the PINGs that RanDry() planned. Returns when to call again.
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
    if (data.segments.sent() == data.sent_dry) (void)data.lane->Ping(0);
  }
  return next;
}

LinkUse Link::BestUse() const {
  const bool copied = options_.zero_copy == ZeroCopyGate::Use::kNever;
  if (copied && !path_.long_way()) return {data_lanes_ * kCopiedBytesPerLane, false};
  // Lanes that are up and not used carry nothing.
  const uint32_t of_use = path_.lanes().lanes_of_use();
  const uint32_t lanes = of_use == 0 ? data_lanes_ : std::min(data_lanes_, of_use);
  return {std::max(lanes * kWindowBytesPerLane, kWindowBytesMin), path_.long_way()};
}

void Link::Probed(uint64_t bytes_per_second) {
  if (path_.Probed(bytes_per_second)) TellLaneCount();
}

void Link::TellLaneCount() {
  owner_->OnLinkLaneCount(this, path_.lanes().lanes_of_use(), path_.lanes().rate());
}

bool Link::NextSegment(Lane* lane, uint32_t bytes_max, OutgoingSegment* segment) {
  const Tick now = ring_->Now();
  const uint32_t index = lane->index();
  const uint32_t before = path_.lanes().lanes_of_use();
  path_.Asks(index, bytes_max == kAnyBytes, now);
  const uint32_t lanes = path_.lanes().lanes_of_use();
  if (lanes > before && lanes > data_.size()) TellLaneCount();
  const OutgoingSegment* const next = queue_.Next();
  const bool part = next != nullptr && next->header.type == FrameType::kPart;
  if (next != nullptr && !part && !path_.lanes().Uses(index)) return false;
  // The limit is for segments that may be sent again. A link that is ending sends none again.
  if (alive() && unacked_ >= LH_SEGMENTS_UNACKED_MAX) return false;
  if (next == nullptr) {
    if (path_.long_way()) RanDry(&data_[index], now);
    return false;
  }
  const uint32_t bytes = next->header.payload_bytes;
  if (part) {
    if (bytes_max != kAnyBytes || path_.lanes().Rests(index, now)) return false;
    lane->SetPace(0);  // parts are few, and frames wait for them
    Give(index, now, segment);
    return true;
  }
  const LaneSchedule::Verdict verdict = path_.Judge(index, bytes, queue_.size(), now);
  if (verdict == LaneSchedule::Verdict::kRest) owner_->OnLinkLaneRests(this);
  if (verdict != LaneSchedule::Verdict::kCarry || bytes > bytes_max) return false;
  Give(index, now, segment);
  const LinkPath::Given given = path_.Gave(index, bytes, now);
  if (given.host_lanes_changed) owner_->OnHostLaneCount();
  if (given.lane_rate) lane->SetPace(*given.lane_rate);
  if (given.lanes_changed) TellLaneCount();
  return true;
}

// Takes the next segment off the queue, for this lane.
void Link::Give(uint32_t index, Tick now, OutgoingSegment* segment) {
  *segment = queue_.Pop();
  DataLane& data = data_[index];
  last_segment_ = now;
  if (!alive()) return;
  if (data.segments.sent() == 0) data.sent_first = now;
  data.segments.Add(*segment);
  ++unacked_;
}

void Link::DropSegments(FrameType type, const std::unordered_set<uint64_t>& cookies) {
  std::vector<uint64_t> dropped = queue_.Drop(type, cookies);
  if (!dropped.empty()) owner_->OnLinkSegmentsDropped(type, std::move(dropped));
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

void Link::OnLaneSegmentSent(FrameType type, uint64_t cookie) {
  options_.segments.Of(type)->OnSegmentSent(cookie);
}

// ------------------------------------------------------------------------------ receiving

absl::Status Link::OnControlFrame(const FrameHeader& header, std::span<const uint8_t> payload) {
  switch (header.type) {
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
      return owner_->OnLinkFrame(this, header, payload);
  }
}

void Link::OnControlResumed(uint64_t repeated, bool barren) {
  if (barren) OnBarrenLane(LaneKind::kControl);
  owner_->OnLinkFramesRepeated(repeated);
  owner_->OnLinkLaneBack(this, control_.lane()->name());
}

absl::StatusOr<uint8_t*> Link::OnLaneData(Lane*, const FrameHeader& header) {
  if (header.type == FrameType::kPart) return control_.OnPart(header);
  return options_.segments.Of(header.type)->OnDataHeader(key(), header);
}

absl::Status Link::OnLaneDataReceived(Lane*, const FrameHeader& header) {
  if (header.type != FrameType::kPart) {
    return options_.segments.Of(header.type)->OnDataReceived(key(), header);
  }
  return control_.OnPartReceived(header);
}

absl::Status Link::OnLaneAcked(Lane* lane, uint64_t segments) {
  const absl::StatusOr<size_t> news = data_[lane->index()].segments.Acknowledge(segments);
  if (!news.ok()) return news.status();
  if (*news > 0) black_hole_.OnAcknowledged();
  const bool waits = unacked_ >= LH_SEGMENTS_UNACKED_MAX;
  unacked_ -= *news;
  if (waits && *news > 0) PullAll();
  return absl::OkStatus();
}

void Link::OnLaneDataAbandoned(Lane*, const FrameHeader& header) {
  if (!alive()) return;
  if (header.type == FrameType::kPart) return control_.OnPartAbandoned(header);
  options_.segments.Of(header.type)->OnDataAbandoned(key(), header);
}

// ------------------------------------------------------------------------------ lanes go

void Link::OnLaneBroken(Lane* lane, const std::string& reason, bool protocol) {
  if (protocol) {
    Break(reason, true);
  } else {
    LoseLane(lane, reason);
  }
}

// `lane` is in use, and its connection has become useless.
void Link::LoseLane(Lane* lane, const std::string& reason) {
  if (!alive()) return lane->Abort();
  const bool control = lane == control_.lane();
  // The dialer does not know yet whether the link exists.
  if (control && !established()) return BreakAs(reason, false, false);
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
    if (control && control_barren_) OnBarrenLane(LaneKind::kControl);
    if (!control && lost_.back().barren) OnBarrenDataLane(lost_.back().serial);
  }
}

// The loss of a lane that was dialled with large packets, before we knew, says nothing new. (The
// acceptor cannot tell such lanes from others.)
void Link::OnBarrenDataLane(uint64_t serial) {
  if (serial >= first_small_serial_) OnBarrenLane(LaneKind::kData);
}

// Work() acts on the verdict, since the caller is in the middle of losing or replacing lanes.
void Link::OnBarrenLane(LaneKind kind) {
  const BlackHole::Verdict verdict =
      black_hole_.OnBarren(kind == LaneKind::kControl, ring_->Now(), detect_ms_);
  if (verdict == BlackHole::Verdict::kWait) return;
  black_hole_verdict_ = verdict;
  if (verdict == BlackHole::Verdict::kDialSmall) {
    if (options_.dialled) first_small_serial_ = next_serial_;
    owner_->OnLinkSmallPackets(this);
  }
  owner_->OnLinkDue(this, ring_->Now());
}

void Link::ActOnBlackHole() {
  switch (std::exchange(black_hole_verdict_, BlackHole::Verdict::kWait)) {
    case BlackHole::Verdict::kWait:
      return;
    case BlackHole::Verdict::kDialSmall:
      return ReplaceBarren();
    case BlackHole::Verdict::kBreak:
      return Break("lanes carry nothing, with small packets either, while PINGs come through");
  }
}

// Whether `since` is long enough ago for a lane to count as barren: a connection that is reset
// early says nothing about large packets. Before the first Work() the answer is no.
bool Link::WaitsLong(Tick since) const {
  return detect_ms_ > 0 && ring_->Now() - since >= Millis(detect_ms_) / 4;
}

bool Link::Barren(const DataLane& data) const {
  return data.segments.acked() == 0 && !data.segments.segments().empty() &&
         WaitsLong(data.sent_first);
}

// Replaces the data lanes of large packets that would soon be lost as barren, too.
void Link::ReplaceBarren() {
  std::vector<Lane*> barren;
  for (const DataLane& data : data_) {
    if (data.lane != nullptr && Barren(data)) barren.push_back(data.lane.get());
  }
  for (Lane* lane : barren) {
    LoseLane(lane, absl::StrCat(lane->name(), ": replaced by one of small packets"));
    if (!alive()) return;
  }
}

// Whether something was heard lately on a lane that is in use.
bool Link::HeardOfLate() const {
  const auto heard = [&](const Lane* lane) {
    return lane != nullptr && ring_->Now() - lane->last_heard() <= Millis(detect_ms_) / 2;
  };
  return heard(control_.lane()) || std::any_of(data_.begin(), data_.end(), [&](const DataLane& d) {
           return heard(d.lane.get());
         });
}

void Link::LoseControl() {
  control_.Lose();
  control_barren_ = control_.nothing_arrived() && WaitsLong(control_.since()) && HeardOfLate();
}

void Link::LoseData(uint32_t index) {
  DataLane& lost = lost_.emplace_back(std::exchange(data_[index], DataLane{}));
  lost.barren = Barren(lost) && HeardOfLate();
  path_.LoseLane(index);
  --data_lanes_;
  data_lost_ = ring_->Now();
}

void Link::OnLaneEnded(Lane* lane) {
  if (std::unique_ptr<Lane> control = control_.TakeEnded(lane)) {
    gone_.Add(lane->stats());
    owner_->OnLinkLaneEnded(std::move(control));
  }
  const auto data = std::find_if(lost_.begin(), lost_.end(),
                                 [lane](const DataLane& lost) { return lost.lane.get() == lane; });
  if (data != lost_.end()) {
    gone_.Add(lane->stats());
    owner_->OnLinkLaneEnded(std::move(data->lane));
    data->told = true;
    // Sent only now: nothing writes any more to a place that a repeated segment may be received
    // into.
    SendLaneLost(*data, lane->received());
    if (data->answered) lost_.erase(data);
  }
  CheckEnded();
}

void Link::SendLaneLost(const DataLane& lost, uint64_t received) {
  if (!alive() || closing()) return;
  FrameHeader frame{.type = FrameType::kLaneLost};
  frame.flags = lost.barren ? kFlagBarren : 0;
  frame.group = lost.index;
  frame.stamp = lost.serial;
  frame.offset = received;
  control_.Send(frame, {}, /*may_wait=*/false);
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
  UnackedSegments segments = std::exchange(lost->segments, {});
  if (header.offset < segments.acked()) {
    return absl::InvalidArgumentError(absl::StrCat("LANE_LOST after ", header.offset,
                                                   " segments where ", segments.acked(),
                                                   " were acknowledged"));
  }
  unacked_ -= segments.segments().size();
  const absl::StatusOr<size_t> news = segments.Acknowledge(header.offset);
  if (!news.ok()) return news.status();
  if (*news > 0) black_hole_.OnAcknowledged();
  lost->answered = true;
  if (lost->told) lost_.erase(lost);
  Repeat(segments);
  if ((header.flags & kFlagBarren) != 0) OnBarrenDataLane(serial);
  PullAll();
  return absl::OkStatus();
}

// The handshake of this lane failed only here. The lane must not come into use any more.
absl::Status Link::OnUnknownLaneLost(uint32_t index, uint64_t serial) {
  if (options_.dialled && serial >= next_serial_) {
    return absl::InvalidArgumentError(
        absl::StrCat("LANE_LOST of lane ", index, " serial ", serial, ", which was never dialled"));
  }
  if (control_.acked() >= unknown_lost_answered_) unknown_lost_ = 0;
  if (++unknown_lost_ > kUnknownLostMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "LANE_LOST of ", unknown_lost_, " lanes that are not known here, no answer acknowledged"));
  }
  last_serial_[index] = std::max(last_serial_[index], serial);
  SendLaneLost({.index = index, .serial = serial}, 0);
  unknown_lost_answered_ = control_.sent();
  return absl::OkStatus();
}

// Repeated segments go first, because other peers wait for them.
void Link::Repeat(const UnackedSegments& lost) {
  std::vector<OutgoingSegment> repeated;
  uint64_t segments = 0;
  for (OutgoingSegment segment : lost.segments()) {
    if (const FrameType type = segment.header.type; type != FrameType::kPart) {
      segment.cookie = options_.segments.Of(type)->OnSegmentRepeat(segment.owner);
      if (segment.cookie == 0) continue;
      ++segments;
    }
    repeated.push_back(segment);
  }
  owner_->OnLinkSegmentsRepeated(segments);
  if (queue_.empty()) waiting_since_ = ring_->Now();
  queue_.PushFront(repeated);
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

// Returns how many us of silence are no loss: detect_ms. On a path with long round trips, or with
// delays from repeated packets, 4 times the excess of the round trip is added (TCP's own timeout,
// RFC 6298, grows likewise). The maximum is four detect_ms.
int64_t Link::Patience(uint32_t detect_ms) const {
  const int64_t detect = Millis(detect_ms);
  return std::min(4 * detect,
                  detect + 4 * std::max<int64_t>(0, control_.rtt_high_us() - kUsualRttUs));
}

// TCP doubles its waiting time with each repetition: after an outage of 0.7 s it may be silent for
// another 0.7 s. So where round trips are short, a lane counts as lost after half of detect_ms, and
// is dialled anew before TCP repeats.
void Link::TuneLanes(uint32_t detect_ms) {
  const uint32_t ms = short_way() ? detect_ms / 2 : 4 * detect_ms;
  ForEachLane([ms](Lane* lane) { lane->SetUserTimeout(ms); });
}

bool Link::short_way() const { return rtt_us() > 0 && control_.rtt_high_us() <= kUsualRttUs; }

Tick Link::Work(Tick now, uint32_t detect_ms, const std::string& repair_error) {
  if (!alive()) return kNever;
  detect_ms_ = detect_ms;
  const int64_t detect = Millis(detect_ms);
  const int64_t interval = detect / kPingsPerDetect;
  if (BreakIfDead(now, detect_ms, repair_error)) return kNever;
  LoseStalled(now, detect_ms);
  if (alive()) ActOnBlackHole();
  if (!alive()) return kNever;
  TuneLanes(detect_ms);
  if (now - last_ping_ >= interval) {
    last_ping_ = now;
    control_.SendPing();
    PingDataLanes(now, detect_ms);
  }
  const Tick nudge = Nudge(now);
  if (!alive()) return kNever;
  Tick next = std::min({nudge, last_ping_ + interval, last_heard() + Patience(detect_ms)});
  if (closing()) next = std::min(next, closing_since_ + interval);
  if (!has_control()) next = std::min(next, control_.lost_at() + 2 * detect);
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
  } else if (!has_control() && now - control_.lost_at() >= 2 * detect) {
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

// Drops lanes on which nothing comes while other lanes are heard. The peer sends PINGs on every
// lane, so a lane that works would be heard.
void Link::LoseStalled(Tick now, uint32_t detect_ms) {
  const int64_t detect = Millis(detect_ms);
  if (closing() || now - last_heard() > detect / 2) return;
  const int64_t patience = Patience(detect_ms);
  std::vector<Lane*> stalled;
  const auto check = [&](Lane* lane) {
    if (now - lane->last_heard() >= patience + lane->quiet_us()) stalled.push_back(lane);
  };
  if (has_control()) check(control_.lane());
  for (const DataLane& data : data_) {
    if (control_.delivering() && data.lane != nullptr) check(data.lane.get());
  }
  for (Lane* lane : stalled) {
    LoseLane(lane, absl::StrCat(lane->name(), ": silent for ", patience / 1000,
                                " ms while other lanes are heard"));
    if (!alive()) return;
  }
}

// While segments come and go, data lanes are pinged as often as the control lane. After a while
// without segments they are pinged seldom, so that many idle lanes cost next to nothing. The PING
// announces the longer silence; otherwise the peer would take the lanes for stalled.
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

void Link::SetCongestion(const std::string& congestion) {
  congestion_ = congestion;
  if (!path_.long_way()) return;
  for (const DataLane& data : data_) {
    if (data.lane != nullptr) data.lane->SetCongestion(congestion);
  }
}

LaneStats Link::stats() const {
  LaneStats sum = gone_;
  ForEachLane([&sum](const Lane* lane) { sum.Add(lane->stats()); });
  return sum;
}

std::vector<LinkMeter::Lane> Link::MeteredLanes() const {
  std::vector<LinkMeter::Lane> lanes;
  lanes.reserve(data_.size());
  for (const DataLane& data : data_) {
    if (data.lane == nullptr) continue;
    lanes.push_back({data.index, data.segments.sent(), data.segments.segments().empty()});
  }
  return lanes;
}

std::optional<TcpDelivery> Link::AskTcp(uint32_t lane) const {
  const Lane* const asked = lane == LinkMeter::kControlLane ? control_.lane()
                            : lane < data_.size()           ? data_[lane].lane.get()
                                                            : nullptr;
  return asked == nullptr ? std::nullopt : asked->Delivery();
}

RateSample Link::PopRate() {
  return path_.meter().PopRate(MeteredLanes(), stats().bytes_sent, !queue_.empty(),
                               [this](uint32_t lane) { return AskTcp(lane); });
}

LinkWait Link::PopWait(Tick now) {
  const LinkWait wait{
      .silent_us = now - last_heard(),
      .waiting_bytes = queue_.bytes(),
      .rtt_us = static_cast<uint32_t>(std::clamp<int64_t>(rtt_us(), 0, UINT32_MAX))};
  // A PING comes every third of detect_ms, so a shorter silence says nothing.
  return path_.meter().PopWait(wait, MeteredLanes(), Millis(detect_ms_) / kPingsPerDetect, now,
                               [this](uint32_t lane) { return AskTcp(lane); });
}

HostPaths::LinkSample Link::PopSample() {
  const LinkArrivals arrived =
      path_.meter().PopArrivals(MeteredLanes(), [this](uint32_t lane) { return AskTcp(lane); });
  HostPaths::LinkSample sample = path_.SampleOf(arrived, ring_->Now());
  sample.rtt_us = rtt_us();
  // The answer brings an acknowledgement at once, so TCP knows the round trip of the control lane
  // (LinkMeter).
  if (sample.long_way && arrived.bytes != 0) control_.SendPing();
  return sample;
}

int64_t Link::shortest_rtt_us() const {
  const std::optional<TcpDelivery> control = AskTcp(LinkMeter::kControlLane);
  return control && control->rtt_us != 0 ? control->rtt_us : rtt_us();
}

int64_t Link::waiting_us() const { return queue_.empty() ? 0 : ring_->Now() - waiting_since_; }

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

// A peer that closes in order ends one lane after the other. The link is down when all have ended,
// or after a delay (BreakIfDead()).
void Link::OnLanePeerEnded(Lane*) { MaybeClosed(); }

void Link::MaybeClosed() {
  if (!alive() || !closing()) return;
  if (has_control() && !control_.lane()->peer_ended()) return;
  for (const DataLane& data : data_) {
    if (data.lane != nullptr && !data.lane->peer_ended()) return;
  }
  BreakAs(absl::StrCat(closing_lane_, ": closed by the other side"), false, false);
}

void Link::OnUnknownThere(const std::string& lane) {
  if (!alive()) return;
  if (has_control()) {
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
  control_.Close();
  if (tell && has_control()) control_.lane()->Finish(kFlagGivenUp);
  ForEachLane([&](Lane* lane) {
    if (!tell || lane != control_.lane()) lane->Abort();
  });
  DropQueue();
  owner_->OnLinkBroken(this, reason, protocol);
  CheckEnded();
}

void Link::Finish() {
  if (!alive()) return;
  state_ = State::kFinishing;
  control_.Close();
  for (const DataLane& data : data_) {
    if (data.lane != nullptr) data.lane->Finish();
  }
  if (has_control()) control_.lane()->Finish();
  // Without data lanes nothing can carry queued segments.
  if (data_lanes_ == 0) DropQueue();
  CheckEnded();
}

void Link::Abort() {
  if (state_ == State::kEnded) return;
  state_ = State::kBroken;
  control_.Close();
  ForEachLane([](Lane* lane) { lane->Abort(); });
  DropQueue();
  CheckEnded();
}

void Link::DropQueue() {
  (void)queue_.DropAll(FrameType::kPart);
  for (const FrameType type : {FrameType::kData, FrameType::kChunkData}) {
    std::vector<uint64_t> dropped = queue_.DropAll(type);
    if (!dropped.empty()) owner_->OnLinkSegmentsDropped(type, std::move(dropped));
  }
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
