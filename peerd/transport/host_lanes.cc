#include "peerd/transport/host_lanes.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// Times in round trips.
constexpr int64_t kPause = 2;     // a longer pause ends a stretch, and a burst
constexpr int64_t kStretch = 16;  // the longest stretch
constexpr int64_t kGrace = 4;     // after a pause, so long the links of the burst before count
// A search ends if for so many bursts fewer links were busy together.
constexpr int kForgottenBursts = 16;
// Shorter round trips count as this long, because of the scheduling of processes.
constexpr int64_t kRttUsMin = Millis(10);

// All busy links together begin with so many lanes, rounded down, or with fewer on short ways.
constexpr uint32_t kFirstTotal = 16;

uint32_t FirstLanes(int64_t rtt_us, size_t links) {
  const uint32_t all = std::min(LaneCount::Usual(rtt_us), kFirstTotal);
  return std::bit_floor(std::max(all / static_cast<uint32_t>(links), 1u));
}

}  // namespace

bool HostLanes::Sent(uint64_t id, int64_t rtt_us, uint64_t bytes, Tick now) {
  Link& link = links_[id];
  link.rtt_us = std::max(rtt_us, kRttUsMin);
  int64_t rtt = 0;
  for (const auto& [other, l] : links_) rtt = std::max(rtt, l.rtt_us);
  const int64_t us = now - std::exchange(last_, now);
  if (us > kPause * rtt) {
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
  if (!count_ || busy_ > counted_) BeginSearch(busy_, rtt);
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

void HostLanes::BeginSearch(size_t links, int64_t rtt_us) {
  counted_ = links;
  bursts_ = 0;
  most_busy_ = 0;
  const auto n = static_cast<uint32_t>(links);
  count_.emplace(FirstLanes(rtt_us, links), LH_LANES_MAX, rtt_us, n);
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

void HostLanes::Arrived(uint64_t bytes, uint64_t us) {
  if (busy_ > 1 && busy_ == counted_) count_->Arrived(bytes, us);
}

void HostLanes::Remove(uint64_t id) {
  links_.erase(id);
  busy_ = 0;  // until the next Sent()
}

HostLanes::Busy HostLanes::PopBusy() { return std::exchange(sum_, {}); }

}  // namespace longhaul::peerd
