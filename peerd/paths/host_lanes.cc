#include "peerd/paths/host_lanes.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// Times in round trips.
constexpr int64_t kStretch = 16;  // the longest stretch
constexpr int64_t kGrace = 4;     // after a pause, so long the links of the burst before count
// A search ends if for so many bursts fewer links were busy together.
constexpr int kForgottenBursts = 16;
// Shorter round trips count as this long, because of the scheduling of processes.
constexpr int64_t kRttUsMin = Millis(10);

// The rate at which bytes arrive is measured over such times. In a shorter one, those that arrive
// together would make much of it.
constexpr int64_t kArrivedUsMin = Millis(200);
constexpr int64_t kArrivedUsMax = Seconds(1);

// If a search begins with more lanes than this, and so many bytes are repeated, it begins again
// with so few. Fewer bytes than kJudgedBytes say nothing about it.
constexpr uint32_t kFewTotal = 16;
constexpr uint64_t kMuchPerMille = 15;
constexpr uint64_t kJudgedBytes = 4 << 20;

// Divides lanes among links, rounded down to a power of two.
uint32_t Each(uint32_t all, size_t links) {
  return std::bit_floor(std::max(all / static_cast<uint32_t>(links), 1u));
}

}  // namespace

bool HostLanes::Sent(uint64_t id, int64_t rtt_us, uint64_t bytes, Tick now) {
  Link& link = links_[id];
  link.rtt_us = std::max(rtt_us, kRttUsMin);
  int64_t rtt = 0;
  for (const auto& [other, l] : links_) rtt = std::max(rtt, l.rtt_us);
  const int64_t us = now - std::exchange(last_, now);
  const bool waits = std::any_of(links_.begin(), links_.end(),
                                 [](const auto& each) { return each.second.waiting; });
  if (us > PauseUs(rtt, waits)) {
    sum_.us += rtt;  // until the last bytes before the pause had arrived
    BeginStretch(/*paused=*/true, now);
  } else {
    sum_.us += us;
    if (now - begun_ > kStretch * rtt) BeginStretch(/*paused=*/false, now);
  }
  sum_.bytes += bytes;
  bool idle = !std::exchange(link.waiting, true);
  link.bytes += bytes;
  link.in_burst |= link.bytes >= kBusyBytes;
  const bool grace = !after_pause_ || now - begun_ < kGrace * rtt;
  busy_ = 0;
  for (const auto& [other, l] : links_) {
    if (l.bytes < kBusyBytes && !(grace && l.before)) continue;
    ++busy_;
    idle |= !l.waiting;
  }
  if (busy_ == 0) return false;
  if (busy_ == 1) {
    // The lanes of one link alone are counted by the link. Only the rate is of use here.
    if (!alone_) alone_.emplace(1, 1, rtt);
    alone_->Sent(bytes, now);
    return false;
  }
  most_busy_ = std::max(most_busy_, busy_);
  // All busy links together begin with about as many lanes as one link alone.
  if (!count_ || busy_ > counted_) BeginSearch(busy_, rtt, LaneCount::Usual(rtt));
  // While fewer links are busy, or one has nothing to send, the others need not fill the access
  // link.
  if (idle || busy_ < counted_) count_->QueueEmptied();
  if (alone_) count_->SetLimit(alone_->rate());
  return count_->Sent(bytes, now);
}

uint32_t HostLanes::lanes() const {
  if (!crowded()) return 0;
  const size_t all = count_->lanes() * counted_;
  return static_cast<uint32_t>(std::min<size_t>(std::bit_floor(all / busy_), LH_LANES_MAX));
}

void HostLanes::BeginSearch(size_t links, int64_t rtt_us, uint32_t lanes) {
  counted_ = links;
  bursts_ = 0;
  most_busy_ = 0;
  rtt_us_ = rtt_us;
  many_ = lanes > kFewTotal;
  judged_ = repeated_ = 0;
  count_.emplace(Each(lanes, links), LH_LANES_MAX, rtt_us, static_cast<uint32_t>(links));
}

bool HostLanes::Repeated(uint64_t sent, uint64_t repeated) {
  if (!count_ || !many_) return false;
  judged_ += sent;
  repeated_ += repeated;
  if (judged_ < kJudgedBytes) return false;
  const uint64_t per_mille = std::exchange(repeated_, 0) * 1000 / std::exchange(judged_, 0);
  if (per_mille < kMuchPerMille || count_->QueuesAreShort()) return false;
  BeginSearch(counted_, rtt_us_, kFewTotal);
  return true;
}

void HostLanes::BeginStretch(bool paused, Tick now) {
  if (paused && ++bursts_ == kForgottenBursts) {
    // So many links are no longer busy together.
    if (most_busy_ < counted_) count_.reset();
    bursts_ = 0;
    most_busy_ = 0;
  }
  begun_ = now;
  after_pause_ = paused;
  for (auto& [id, link] : links_) {
    link.before = paused ? link.in_burst : link.bytes >= kBusyBytes;
    link.bytes = 0;
    if (paused) link.in_burst = false;
  }
}

void HostLanes::QueueEmptied(uint64_t id) {
  if (const auto link = links_.find(id); link != links_.end()) link->second.waiting = false;
}

void HostLanes::Arrived(uint64_t bytes, uint64_t us, Tick now) {
  const int64_t passed = now - arrived_begun_;
  const bool late = passed > kArrivedUsMax;
  if (late) arrived_ = 0;
  arrived_ += bytes;
  const bool counts = busy_ > 1 && busy_ == counted_;
  if (counts && bytes != 0) count_->Arrived(bytes, us);
  if (late || passed >= kArrivedUsMin) {
    const uint64_t in_all = std::exchange(arrived_, 0);
    arrived_begun_ = now;
    if (counts && !late) count_->ArrivesAt(in_all * Seconds(1) / static_cast<uint64_t>(passed));
  }
}

void HostLanes::SetPace(uint64_t bytes_per_second) {
  if (count_) count_->SetPace(bytes_per_second);
}

void HostLanes::Remove(uint64_t id) {
  links_.erase(id);
  busy_ = 0;  // until the next Sent()
}

HostLanes::Busy HostLanes::PopBusy() { return std::exchange(sum_, {}); }

}  // namespace longhaul::peerd
