#include "peerd/paths/lane_count.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"
#include "base/tcp.h"

namespace longhaul::peerd {
namespace {

// Times in round trips.
constexpr int64_t kPause = 2;           // a longer pause ends a burst
constexpr int64_t kStall = 16;          // the same while segments wait
constexpr int64_t kSkipped = 3;         // the beginning of a long burst, which is left out
constexpr int64_t kSettling = 6;        // until new connections are fast
constexpr int64_t kSettlingFewer = 24;  // until fewer ones have grown
constexpr int64_t kMeasured = 8;        // one measurement of long bursts
constexpr int64_t kShort = 5;           // the longest short burst
constexpr int64_t kShortMeasured = 16;  // one measurement of short bursts
// A short burst counts only if it has more than so many times the bytes that the kernel may hold
// unsent.
constexpr uint64_t kShortMin = 2;
// Shorter round trips count as this long. Otherwise the scheduling of processes would distort the
// measurement.
constexpr int64_t kRttUsMin = Millis(10);

// After the queue was empty, 1/kAfterEmptied of a round trip is left out: until its buffers are
// full, the kernel takes segments at once.
constexpr int64_t kAfterEmptied = 2;
// A measurement may take so many times as long as planned, because segments do not always wait.
// Then it is given up: something else than the lanes limits the rate.
constexpr int64_t kPatience = 3;
constexpr int64_t kPatienceTrying = 12;

// The higher of two rates, in percent of the lower one. Up to kSteadyPercent two measurements
// agree. Above kGainPercent more lanes are clearly better.
constexpr uint64_t kSteadyPercent = 106;
constexpr uint64_t kGainPercent = 112;
// Of several links: rates vary more, since hosts wait for each other.
constexpr uint64_t kGainPercentOfSeveral = 125;
// Twice as many lanes carry at most about this. If the rate is higher, it was measured too low
// before, for instance because other hosts of the op were slow, and says nothing about lanes. If
// packets hardly wait, this does not matter, because more lanes do no harm.
constexpr uint64_t kGainPercentMax = 220;
// Of several links, half as many lanes are kept if they carry so much of the rate. If lanes were
// the limit, they would carry half. Fewer than kFewestTotal lanes in all begin too slowly after a
// pause.
constexpr uint64_t kKeptPercent = 85;
constexpr uint32_t kFewestTotal = 16;
// More lanes slow the sender down if it sent so much more before, in percent of what it sends now.
constexpr uint64_t kSlowerPercent = 110;
// After so many measurements in a row that do not agree, the last one counts.
constexpr int kUnsteadyMax = 6;
// Queues are short if packets wait in them for less than this part of a round trip, and for less
// than this time: on very long ways, a full queue may be short beside a round trip.
constexpr int64_t kShortQueuesPercent = 25;
constexpr int64_t kShortQueuesUsMax = Millis(20);
// A rate between these percentages of a limit has reached the limit.
constexpr uint64_t kAtLimitPercent = 75;
constexpr uint64_t kOverLimitPercent = 115;
// Above this percentage of the pace, fewer lanes are tried.
constexpr uint64_t kAtPacePercent = 90;
// Above this, the path has changed, and the search begins again. Of several links: if the rate is
// lower, only after so many measurements in a row.
constexpr uint64_t kChangePercent = 150;
constexpr int kLowMeasurements = 8;
constexpr int64_t kAgainUs = Seconds(300);

// For Usual(): 32 lanes if a round trip takes 80 ms.
constexpr int64_t kRttUsPerLane = 2500;
constexpr int64_t kFirstMin = 4;
constexpr int64_t kFirstMax = 64;
// A new connection sends so much in its first three round trips: 10, 20 and 40 packets.
constexpr uint64_t kGrownBytes = uint64_t{70} * 1460;

bool Exceeds(uint64_t more, uint64_t less, uint64_t percent) { return more * 100 > less * percent; }

}  // namespace

bool QueuesAreShort(uint64_t queued_us, int64_t rtt_us) {
  const int64_t enough = std::min(rtt_us * kShortQueuesPercent / 100, kShortQueuesUsMax);
  return queued_us < static_cast<uint64_t>(enough);
}

int64_t PauseUs(int64_t rtt_us, bool waits) { return (waits ? kStall : kPause) * rtt_us; }

uint32_t LaneCount::Usual(int64_t rtt_us) {
  return static_cast<uint32_t>(std::clamp(rtt_us / kRttUsPerLane, kFirstMin, kFirstMax));
}

uint32_t LaneCount::First(int64_t rtt_us) { return std::bit_ceil(Usual(rtt_us)); }

LaneCount::LaneCount(uint32_t first, uint32_t max, int64_t rtt_us, uint32_t links)
    : max_(max), rtt_us_(std::max(rtt_us, kRttUsMin)), links_(links), first_(first), lanes_(first) {
  LH_CHECK(first >= 1 && first <= max);
}

bool LaneCount::Probed(uint64_t bytes_per_second) {
  if (rate_ != 0 || trying_) return false;
  const uint64_t in_flight = std::min(bytes_per_second, UINT64_MAX / Seconds(60)) *
                             static_cast<uint64_t>(rtt_us_) / Seconds(1);
  const uint64_t most = std::min<uint64_t>(max_, kFirstMax);
  const auto lanes = static_cast<uint32_t>(std::bit_floor(std::min(in_flight / kGrownBytes, most)));
  if (lanes <= lanes_) return false;
  Use(lanes);
  return true;
}

bool LaneCount::Sent(uint64_t bytes, Tick now) {
  const Tick before = std::exchange(last_, now);
  const int64_t us = now - before;
  const bool emptied = std::exchange(emptied_, false);
  if (us > PauseUs(rtt_us_, /*waits=*/!emptied)) {
    const bool changed = EndBurst(before);
    burst_begun_ = now;
    burst_bytes_ = bytes;
    burst_idle_us_ = 0;
    skip_until_ = now + kSkipped * rtt_us_;
    return changed;
  }
  burst_bytes_ += bytes;
  if (emptied) {
    burst_idle_us_ += us;
    skip_until_ = std::max(skip_until_, now + rtt_us_ / kAfterEmptied);
  }
  if (settle_us_ > 0) {
    settle_us_ -= us;
    return false;
  }
  all_us_ += us;
  all_bytes_ += bytes;
  if (now >= skip_until_) {
    us_ += us;
    bytes_ += bytes;
  }
  const int64_t enough = kMeasured * rtt_us_;
  if (us_ >= enough) {
    return Judge(Kind::kLong, bytes_ * Seconds(1) / static_cast<uint64_t>(us_), true, now);
  }
  if (all_us_ < (trying() ? kPatienceTrying : kPatience) * enough) return false;
  NoteOverall();
  const bool tried = std::exchange(trying_, false);
  const bool short_queues = QueuesAreShort();
  Restart();  // nothing was measured, so a row of low rates goes on
  if (links_ == 1 && !(tried && SlowsDown())) return false;
  // More lanes for several links do harm, so they have to be known to be better. Where packets
  // hardly wait, so many do none.
  found_ = true;
  fewest_ |= std::exchange(trying_fewer_, false);
  if (!tried) return false;
  found_until_ = now + kAgainUs;
  if (room_ && short_queues && lanes_ <= kFirstMax) return false;
  Use(lanes_ / 2);
  return true;
}

void LaneCount::NoteOverall() {
  if (all_us_ == 0) return;
  const uint64_t rate = all_bytes_ * Seconds(1) / static_cast<uint64_t>(all_us_);
  overall_ = overall_ == 0 ? rate : (overall_ + rate) / 2;
}

// Whether a single link sends clearly less with the lanes that are being tried. Of short bursts,
// rates say that already.
bool LaneCount::SlowsDown() const {
  return links_ == 1 && kind_ == Kind::kLong && Exceeds(overall_before_, overall_, kSlowerPercent);
}

// The burst ended at `end`, and a pause followed. Returns whether lanes() has changed.
bool LaneCount::EndBurst(Tick end) {
  const int64_t us = end - burst_begun_;
  const uint64_t unsent = uint64_t{lanes_} * links_ * kUnsentBytes;
  if (us > kShort * rtt_us_ || burst_idle_us_ > us / 2) return false;
  if (burst_bytes_ <= kShortMin * unsent) return false;
  if (settle_us_ > 0) {
    settle_us_ -= rtt_us_;
    return false;
  }
  // The kernel may still hold `unsent` bytes. Assume that they leave as fast as the rest did. One
  // more round trip passes until the last byte is known to have arrived.
  const double share =
      static_cast<double>(burst_bytes_) / static_cast<double>(burst_bytes_ - unsent);
  short_us_ += static_cast<int64_t>(static_cast<double>(us) * share) + rtt_us_;
  short_bytes_ += burst_bytes_;
  if (short_us_ < kShortMeasured * rtt_us_) return false;
  const uint64_t rate = short_bytes_ * Seconds(1) / static_cast<uint64_t>(short_us_);
  // More lanes are tried only if such a burst would still count with twice as many.
  return Judge(Kind::kShort, rate, burst_bytes_ > 2 * kShortMin * unsent, end);
}

void LaneCount::Arrived(uint64_t bytes, uint64_t us) {
  if (settle_us_ > 0) return;
  arrived_ += bytes;
  queued_ += bytes * us;
}

void LaneCount::ArrivesAt(uint64_t bytes_per_second) {
  if (settle_us_ > 0) return;
  most_arrived_ = std::max(most_arrived_, bytes_per_second);
}

void LaneCount::SetPace(uint64_t bytes_per_second) {
  const uint64_t before = std::exchange(pace_, bytes_per_second);
  try_at_pace_ = pace_ != 0 && (try_at_pace_ || before == 0);
}

bool LaneCount::QueuesAreShort() const {
  return arrived_ != 0 && peerd::QueuesAreShort(queued_ / arrived_, rtt_us_);
}

bool LaneCount::Judge(Kind kind, uint64_t rate, bool more, Tick now) {
  if (kind == Kind::kLong && most_arrived_ != 0) rate = std::min(rate, most_arrived_);
  if (kind != std::exchange(kind_, kind)) {
    rate_ = 0;
    found_ = false;
    found_until_ = now;
    last_rate_ = 0;
    full_ = false;
    overall_ = 0;
    all_us_ = 0;
    all_bytes_ = 0;
    if (std::exchange(trying_, false)) {
      Use(lanes_ / 2);
      return true;
    }
    if (std::exchange(trying_fewer_, false)) {
      Use(lanes_ * 2);
      return true;
    }
  }
  const bool fell = rate_ != 0 && Exceeds(rate_, rate, kChangePercent);
  low_ = fell ? low_ + 1 : 0;
  const bool low = fell && links_ > 1 && found_ && !trying();
  if (low && low_ < kLowMeasurements) {
    BeginMeasurement();
    last_rate_ = rate;
    return false;
  }
  const bool short_queues = kind == Kind::kLong && QueuesAreShort();
  const bool limited = links_ > 1 && short_queues;
  if (kind == Kind::kLong && arrived_ != 0) full_ = links_ == 1 && !short_queues;
  const bool changed = fell || Exceeds(rate, rate_, kChangePercent);
  // The path has changed, so what was sent before says nothing about more lanes.
  if (rate_ != 0 && changed && !trying()) overall_ = 0;
  NoteOverall();
  BeginMeasurement();
  const uint64_t before = std::exchange(last_rate_, rate);
  // If packets hardly wait, more lanes do no harm.
  const uint64_t gain = links_ > 1 && !(limited && room_) ? kGainPercentOfSeveral : kGainPercent;
  const bool clear = limited && !trying_fewer_ && (!trying_ || Exceeds(rate, rate_, gain));
  if (!clear && (before == 0 || !Agree(before, rate)) && ++unsteady_ < kUnsteadyMax) return false;
  unsteady_ = 0;
  if (trying_fewer_) return JudgeFewer(rate, now);
  const bool tried = std::exchange(trying_, false);
  if (tried && (!Exceeds(rate, rate_, gain) || SlowsDown())) {
    found_ = true;
    found_until_ = now + kAgainUs;
    Use(lanes_ / 2);
    CheckAdded();
    return true;
  }
  if (tried && links_ > 1 && !limited && Exceeds(rate, rate_, kGainPercentMax)) {
    rate_ = 0;
    Use(lanes_ / 2);
    return true;
  }
  added_in_doubt_ |= tried && !room_;
  const bool slower = low && kind == Kind::kLong && !limited;
  if (changed) {
    if (!tried) fewest_ = fewer_kept_ = added_in_doubt_ = false;
    found_ = false;
    found_until_ = now;
  }
  const bool at_pace = pace_ != 0 && rate * 100 >= pace_ * kAtLimitPercent;
  if (try_at_pace_ && !changed && rate * 100 >= pace_ * kAtPacePercent && MayTryFewer()) {
    try_at_pace_ = false;
    rate_ = rate;
    TryFewer();
    return true;
  }
  if (now < found_until_) return false;
  rate_ = rate;
  fewest_ |= clear;
  if (links_ > 1 && !fewest_) {
    if (MayTryFewer()) {
      TryFewer();
      return true;
    }
    fewest_ = true;
  }
  const bool at_limit = !clear && !Exceeds(limit_ * kAtLimitPercent / 100, rate, 100) &&
                        !Exceeds(rate, limit_, kOverLimitPercent);
  if (lanes_ > max_ / 2 || !more || full_ || at_limit || at_pace || slower || fewer_kept_) {
    found_ = true;
    if (slower) found_until_ = now + kAgainUs;
    return tried && CheckAdded();
  }
  trying_ = true;
  room_ = limited;
  overall_before_ = overall_;
  Use(lanes_ * 2);
  return true;
}

// At the end of a search that added lanes, tries half as many, because the rate may have risen by
// itself meanwhile. It has not if packets hardly waited before. Returns whether it tries them.
bool LaneCount::CheckAdded() {
  if (!added_in_doubt_ || !MayTryFewerThanAdded()) return false;
  TryFewer();
  return true;
}

void LaneCount::TryFewer() {
  trying_fewer_ = true;
  Use(lanes_ / 2);
}

// Whether two measurements with the same lanes say the same. During a trial of several links they
// need only lead to the same choice, because the rates of hosts that wait for each other vary.
bool LaneCount::Agree(uint64_t a, uint64_t b) const {
  if (links_ == 1 || !trying()) {
    return !Exceeds(a, b, kSteadyPercent) && !Exceeds(b, a, kSteadyPercent);
  }
  const auto same = [&](uint64_t percent) {
    return Exceeds(a, rate_, percent) == Exceeds(b, rate_, percent);
  };
  if (trying_fewer_) return same(kKeptPercent);
  return same(kGainPercentOfSeveral) && same(kGainPercentMax);
}

bool LaneCount::MayTryFewer() const {
  return MayTryFewerThanAdded() || (lanes_ > 1 && lanes_ / 2 * links_ >= kFewestTotal);
}

bool LaneCount::MayTryFewerThanAdded() const { return links_ > 1 && lanes_ / 2 >= first_; }

// Half as many lanes were tried. rate_ stays the rate of the number that the search began with.
// What is enough at a pace may be too little without it.
bool LaneCount::JudgeFewer(uint64_t rate, Tick now) {
  const bool kept = Exceeds(rate, std::max(rate_, pace_), kKeptPercent);
  fewer_kept_ |= kept && pace_ == 0;
  added_in_doubt_ = false;
  trying_fewer_ = kept && MayTryFewer();
  fewest_ = !trying_fewer_;
  if (fewest_ && fewer_kept_) {
    found_ = true;
    found_until_ = now + kAgainUs;
  }
  if (kept && fewest_) return false;
  Use(kept ? lanes_ / 2 : lanes_ * 2);
  return true;
}

void LaneCount::Use(uint32_t lanes) {
  lanes_ = lanes;
  settle_us_ = (trying_fewer_ ? kSettlingFewer : kSettling) * rtt_us_;
  most_arrived_ = 0;
  full_ = false;
  overall_ = 0;
  low_ = 0;
  Restart();
}

void LaneCount::BeginMeasurement() {
  us_ = 0;
  bytes_ = 0;
  all_us_ = 0;
  all_bytes_ = 0;
  short_us_ = 0;
  short_bytes_ = 0;
  arrived_ = 0;
  queued_ = 0;
}

void LaneCount::Restart() {
  BeginMeasurement();
  last_rate_ = 0;
  unsteady_ = 0;
}

}  // namespace longhaul::peerd
