#include "peerd/paths/lane_schedule.h"

#include <algorithm>
#include <utility>

#include "base/tcp.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// A lane rests if it takes so many times as long as the average of the others. By chance, lanes of
// one path may differ by a factor of three or four for a while.
constexpr double kLagFactor = 6;
// It rests only if a segment on it would also take so many round trips.
constexpr int64_t kLagRtts = 4;
// A lane leaves a segment to the other lanes if they will have carried the whole queue, and this
// segment, before the lane has carried the segment. The factor allows for chance.
constexpr double kLateFactor = 2;
// The first rest and the longest. A lane that leaves segments to other lanes is also tried again
// after kRestUsMin. A trial may delay one op.
constexpr int64_t kRestUsMin = Seconds(10);
constexpr int64_t kRestUsMax = Seconds(600);

}  // namespace

void LaneSchedule::Add(uint32_t index) {
  if (index >= lanes_.size()) lanes_.resize(index + 1);
  lanes_[index] = {.stands = true};
}

void LaneSchedule::Remove(uint32_t index) { lanes_[index] = {}; }

void LaneSchedule::SetLongWay(int64_t rtt_us, bool count, uint32_t first) {
  // A later lane may have been opened while queues were full.
  if (!long_way_) rtt_us_ = rtt_us;
  SawRtt(rtt_us);
  long_way_ = true;
  if (count && !count_) count_.emplace(first, LH_LANES_MAX, rtt_us);
}

void LaneSchedule::SetCrowded(uint32_t lanes, bool found) {
  crowded_ = lanes;
  crowded_found_ = found;
}

void LaneSchedule::Asks(uint32_t index, Tick now) {
  if (!long_way_) return;
  Lane& lane = lanes_[index];
  if (lane.given_bytes == 0) return;
  const double us = std::max<double>(now - lane.given_at, 1);
  const double us_per_byte = us / static_cast<double>(std::exchange(lane.given_bytes, 0));
  lane.us_per_byte += (us_per_byte - lane.us_per_byte) / (lane.us_per_byte == 0 ? 1 : 4);
}

bool LaneSchedule::Uses(uint32_t index) const {
  const uint32_t lanes = lanes_of_use();
  if (!count_ || index < lanes) return true;
  const auto end = lanes_.begin() + std::min<size_t>(lanes, lanes_.size());
  return std::none_of(lanes_.begin(), end, [](const Lane& lane) { return lane.stands; });
}

LaneSchedule::Others LaneSchedule::OthersThan(uint32_t index, Tick now) const {
  Others others;
  for (uint32_t i = 0; i < lanes_.size(); ++i) {
    const Lane& lane = lanes_[i];
    if (i == index || !lane.stands || !Uses(i) || now < lane.rests_until) continue;
    others.any = true;
    if (lane.us_per_byte == 0) continue;
    others.times += lane.us_per_byte;
    others.rate += 1 / lane.us_per_byte;
    ++others.known;
  }
  return others;
}

bool LaneSchedule::Rests(uint32_t index, Tick now) const {
  return long_way_ && now < lanes_[index].rests_until && OthersThan(index, now).any;
}

LaneSchedule::Verdict LaneSchedule::Judge(uint32_t index, uint32_t bytes, size_t queued, Tick now) {
  if (!long_way_) return Verdict::kCarry;
  Lane& lane = lanes_[index];
  const Others others = OthersThan(index, now);
  if (!others.any) return Verdict::kCarry;
  if (now < lane.rests_until) return Verdict::kLeave;
  if (others.known == 0 || lane.us_per_byte == 0) return Verdict::kCarry;
  // The segment waits behind the lane's unsent bytes.
  const double length = static_cast<double>(bytes) + kUnsentBytes;
  const double own = lane.us_per_byte * length;
  const double usual = others.times / others.known * length;
  if (own <= kLagFactor * usual || own < static_cast<double>(kLagRtts * rtt_us_)) {
    lane.rests = 0;
    const double waiting = static_cast<double>(bytes) * static_cast<double>(queued);
    if (own <= kLateFactor * usual + waiting / others.rate) return Verdict::kCarry;
    if (now - lane.given_at < kRestUsMin) return Verdict::kLeave;
    lane.us_per_byte = 0;  // the lane may have recovered
    return Verdict::kCarry;
  }
  const int64_t us = std::min(kRestUsMin << std::min(lane.rests++, 16u), kRestUsMax);
  lane.rests_until = now + us;
  lane.us_per_byte = 0;
  return Verdict::kRest;
}

bool LaneSchedule::Gave(uint32_t index, uint32_t bytes, Tick now) {
  if (!long_way_) return false;
  lanes_[index].given_at = now;
  lanes_[index].given_bytes += bytes;
  // A crowded link does not judge by its own rate.
  return count_ && crowded_ == 0 && count_->Sent(bytes, now);
}

void LaneSchedule::QueueEmptied() {
  if (count_) count_->QueueEmptied();
}

void LaneSchedule::Arrived(uint64_t bytes, uint64_t queued_us) {
  if (count_ && crowded_ == 0) count_->Arrived(bytes, queued_us);
}

bool LaneSchedule::Probed(uint64_t bytes_per_second) {
  return count_ && count_->Probed(bytes_per_second);
}

uint32_t LaneSchedule::used(Tick now) const {
  uint32_t used = 0;
  for (uint32_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].stands && Uses(i) && now >= lanes_[i].rests_until) ++used;
  }
  return used;
}

}  // namespace longhaul::peerd
