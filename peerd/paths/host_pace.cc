#include "peerd/paths/host_pace.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "peerd/paths/lane_count.h"

namespace longhaul::peerd {
namespace {

// A shorter pause does not end a burst.
constexpr int64_t kPauseUsMin = Millis(100);
// Times in round trips.
constexpr int64_t kSkipped = 3;  // the beginning of a burst is left out: TCP may be slow
constexpr int64_t kStretch = 4;  // but at least kStretchUsMin
constexpr int64_t kStretchUsMin = Millis(500);
// A link is active for so long after it sent, if segments wait and if none does.
constexpr int64_t kActiveWaiting = 8;
constexpr int64_t kActive = 1;
// Shorter round trips count as this long, because of the scheduling of processes.
constexpr int64_t kRttUsMin = Millis(10);
// What arrives first in a stretch may have waited in a queue before. So a stretch counts as longer.
constexpr int64_t kClumpUs = Millis(25);
// So what arrives in a second is up to so many percent of what was measured.
constexpr uint64_t kMostPercent = 105;

// A burst of so many bytes tells how bytes are divided among links. A longer one than kBurstUs is
// cut. An op is one burst, unless the host waits for others. Then the last burst of an op may have
// gone to one link only. So a burst that is smaller than what is known of the ones before replaces
// only as many of these bytes, but at least a quarter of them.
constexpr uint64_t kBurstBytes = 1 << 20;
constexpr int64_t kBurstUs = Seconds(60);
constexpr double kKeptMost = 0.75;
// A link that sent less than this part of what links sent on average need not be active in a
// stretch.
constexpr uint64_t kMinorPart = 7;
// A link gets at least this part of what it would get if all had sent the same. A connection with a
// very low limit would look as if it were broken.
constexpr uint64_t kLeastPart = 4;
// A link that uses less than its part keeps so many times of what it uses, so that it can use more.
constexpr double kUsed = 1.25;

// There is no limit before so many more stretches had a long queue than a short one.
constexpr int kLong = 3;
// What arrives if the limit holds the host, in percent of the limit.
constexpr uint64_t kAtLimitPercent = 95;
// A queue is overrun if so many bytes are repeated, or if packets wait so many times as long as in
// queues that count as short.
constexpr uint64_t kMuchPerMille = 5;
constexpr uint64_t kWaitFactor = 4;
// The limit then falls to so many percent, but not below kLeastPercent of the most that arrived
// lately.
constexpr uint64_t kFallPercent = 98;
constexpr uint64_t kLeastPercent = 92;
// The access link has become slower if for so many stretches in a row less than so much of the
// limit arrived though packets of every link waited. The limit does not follow twice within
// kWindow: packets may wait elsewhere, and a limit that is too low takes some ops to rise.
constexpr int kSlow = 4;
constexpr uint64_t kSlowPercent = 75;
// The limit rises after so many stretches at the limit, and then after every further one: twice by
// one percent, twice by two, and so on, until there is an overrun. It stays in a stretch in which
// packets of every link waited for kFillsUs, because a queue fills then. Stretches in which others
// hold the host back, for instance at the end of an op, do not count.
constexpr uint64_t kFillsUs = Millis(20);
constexpr int kQuiet = 2;
constexpr int kRisesOfAStep = 2;
constexpr int kDoublings = 4;

}  // namespace

void HostPace::Sent(uint64_t id, int64_t rtt_us, uint64_t bytes, Tick now) {
  const int64_t rtt = std::max(rtt_us_, kRttUsMin);
  if (now - sent_at_ > std::max(PauseUs(rtt, Waits()), kPauseUsMin)) {
    EndBurst();
    BeginStretch();
    burst_begun_ = now;
    rtt_us_ = 0;
  } else if (now - burst_begun_ > kBurstUs) {
    EndBurst();
    burst_begun_ = now + -kSkipped * rtt;  // TCP is fast already
  }
  sent_at_ = now;
  rtt_us_ = std::max({rtt_us_, rtt_us, kRttUsMin});
  Link& link = links_[id];
  link.bytes += bytes;
  link.waiting = true;
  link.sent_at = now;
}

bool HostPace::Waits() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& each) { return each.second.waiting; });
}

void HostPace::QueueEmptied(uint64_t id) {
  if (const auto link = links_.find(id); link != links_.end()) link->second.waiting = false;
}

void HostPace::Remove(uint64_t id) {
  const auto link = links_.find(id);
  if (link == links_.end()) return;
  before_ -= link->second.before;
  links_.erase(link);
  slow_ = 0;
  BeginStretch();
}

void HostPace::EndBurst() {
  uint64_t sum = 0;
  for (const auto& [id, link] : links_) sum += link.bytes;
  if (sum >= kBurstBytes) {
    const double kept =
        sum < before_
            ? std::min(1 - static_cast<double>(sum) / static_cast<double>(before_), kKeptMost)
            : 0;
    before_ = 0;
    for (auto& [id, link] : links_) {
      link.before = static_cast<uint64_t>(static_cast<double>(link.before) * kept) + link.bytes;
      before_ += link.before;
    }
  }
  for (auto& [id, link] : links_) link.bytes = link.rate = 0;
}

void HostPace::BeginStretch() {
  stretch_ = {};
  for (auto& [id, link] : links_) {
    link.arrived = 0;
    link.queued = {};
  }
}

void HostPace::Arrived(uint64_t id, uint64_t bytes, const Queued& queued) {
  const auto link = links_.find(id);
  if (link == links_.end()) return;
  link->second.arrived += bytes;
  link->second.queued.shared_us += queued.shared_us;
  link->second.queued.any_us += queued.any_us;
}

void HostPace::Repeated(uint64_t sent, uint64_t repeated) {
  sent_ += sent;
  repeated_ += repeated;
}

// A link whose lanes take every segment at once still sends. One on which nothing moves though
// segments wait has nothing of its part.
bool HostPace::IsActive(const Link& link, Tick now) const {
  const int64_t rtts = link.waiting ? kActiveWaiting : kActive;
  return now - link.sent_at < rtts * std::max(rtt_us_, kRttUsMin);
}

bool HostPace::IsMinor(const Link& link) const {
  return link.before * links_.size() * kMinorPart < before_;
}

bool HostPace::AllAreActive(Tick now) const {
  return std::all_of(links_.begin(), links_.end(), [&](const auto& each) {
    return IsMinor(each.second) || IsActive(each.second, now);
  });
}

// Returns how many links sent more than a little in the bursts before.
size_t HostPace::MainLinks() const {
  const auto count = std::count_if(links_.begin(), links_.end(),
                                   [this](const auto& each) { return !IsMinor(each.second); });
  return static_cast<size_t>(count);
}

uint64_t HostPace::ShortestWaitUs(uint64_t Queued::*queues) const {
  uint64_t shortest = std::numeric_limits<uint64_t>::max();
  for (const auto& [id, link] : links_) {
    if (IsMinor(link) || link.arrived == 0) continue;
    shortest = std::min(shortest, link.queued.*queues / link.arrived);
  }
  return shortest == std::numeric_limits<uint64_t>::max() ? 0 : shortest;
}

std::string HostPace::Measure(bool settled, Tick now) {
  const Tick begun = std::exchange(measured_at_, now);
  const bool was_settled = std::exchange(settled_, settled);
  if (before_ == 0 || begun < burst_begun_ + kSkipped * rtt_us_ || !AllAreActive(now)) {
    BeginStretch();
    return "";
  }
  stretch_.settled &= settled && was_settled;
  stretch_.us += now - begun;
  if (stretch_.us < std::max(kStretch * rtt_us_, kStretchUsMin)) return "";
  std::string news = EndStretch();
  BeginStretch();
  return news;
}

std::string HostPace::EndStretch() {
  uint64_t bytes = 0;
  for (const auto& [id, link] : links_) bytes += link.arrived;
  const auto in_a_second = [&](int64_t us) {
    return bytes * Seconds(1) / static_cast<uint64_t>(us);
  };
  const uint64_t rate = in_a_second(stretch_.us + kClumpUs);
  for (auto& [id, link] : links_) {
    link.rate = link.arrived * Seconds(1) / static_cast<uint64_t>(stretch_.us);
  }
  clock_us_ += stretch_.us;
  while (!rates_.empty() && rates_.back().second <= rate) rates_.pop_back();
  rates_.emplace_back(clock_us_, rate);
  while (clock_us_ - rates_.front().first > kWindow) rates_.pop_front();

  const uint64_t waited_us = ShortestWaitUs(&Queued::shared_us);
  const bool queue_is_long = !QueuesAreShort(waited_us, rtt_us_);
  // If packets of every link wait, but not in a queue that connections share, the network limits
  // each connection, and what is repeated was lost there.
  const bool own_queues =
      !queue_is_long && !QueuesAreShort(ShortestWaitUs(&Queued::any_us), rtt_us_);
  // What was repeated between stretches counts, too: TCP tells of a loss late.
  const bool much_repeated = !own_queues && repeated_ * 1000 > sent_ * kMuchPerMille;
  sent_ = repeated_ = 0;
  if (bytes == 0) return "";
  const uint64_t arrived = in_a_second(stretch_.us);
  full_ = full_.value_or(false) || queue_is_long || Reached(arrived) || much_repeated;
  if (!stretch_.settled) return "";
  if (limit_ == 0) return Begin(queue_is_long);
  const bool overrun = much_repeated || !QueuesAreShort(waited_us / kWaitFactor, rtt_us_);
  return Adjust(arrived, waited_us, overrun);
}

// Decides whether there is a limit from now on.
std::string HostPace::Begin(bool queue_is_long) {
  long_seen_ = queue_is_long ? long_seen_ + 1 : std::max(long_seen_ - 1, 0);
  if (long_seen_ < kLong) return "";
  long_seen_ = 0;
  BeginLimit();
  return "packets of all links wait";
}

void HostPace::BeginLimit() {
  limit_ = most();
  quiet_ = rises_ = slow_ = 0;
}

bool HostPace::Reached(uint64_t rate) const {
  return limit_ != 0 && rate >= limit_ / 100 * kAtLimitPercent;
}

// Counts stretches in which the access link seems to have become slower. Returns whether there were
// enough in a row. With one link alone, packets may wait at its receiver, so such a link says
// nothing.
bool HostPace::BecameSlower(uint64_t rate, bool queue_is_long) {
  if (MainLinks() < 2 || !queue_is_long || rate * 100 >= limit_ * kSlowPercent ||
      clock_us_ - slower_us_ < kWindow) {
    slow_ = 0;
    return false;
  }
  if (slow_++ == 0) slow_since_us_ = clock_us_;
  return slow_ == kSlow;
}

// `rate`: what arrived in a second. `waited_us`: as ShortestWaitUs().
std::string HostPace::Adjust(uint64_t rate, uint64_t waited_us, bool overrun) {
  const bool reached = Reached(rate);
  const bool queue_is_long = !QueuesAreShort(waited_us, rtt_us_);
  if (BecameSlower(rate, queue_is_long)) {
    while (rates_.front().first < slow_since_us_) rates_.pop_front();
    BeginLimit();
    slower_us_ = clock_us_;
    return "the access link has become slower";
  }
  if (overrun || (!reached && queue_is_long)) quiet_ = rises_ = 0;
  if (!overrun) {
    if (!reached) return "";
    if (waited_us >= kFillsUs || ++quiet_ < kQuiet) return "";
    limit_ += limit_ / 100 << std::min(rises_++ / kRisesOfAStep, kDoublings);
    return "";
  }
  // A limit that is not reached though packets of all links wait is too high. If they do not,
  // others hold this host back.
  const uint64_t possible = most() / 100 * kMostPercent;
  if (limit_ > possible && (reached || queue_is_long)) {
    limit_ = possible;
    return "";
  }
  // If the host sends less than the limit, TCP has just fallen back, and a lower limit is no help.
  if (!reached) return "";
  limit_ = std::max(std::min(limit_, most()) / 100 * kFallPercent, most() / 100 * kLeastPercent);
  return "";
}

uint64_t HostPace::RateOf(uint64_t id, Tick now) const {
  const auto link = links_.find(id);
  if (rate() == 0 || link == links_.end()) return rate();
  const uint64_t usual = std::max<uint64_t>(before_ / links_.size(), 1);
  // A link that is new gets as much as if all had sent the same.
  const auto part = [usual](const Link& l) {
    return static_cast<double>(l.before == 0 ? usual : std::max(l.before, usual / kLeastPart));
  };
  const auto counts = [&](uint64_t other, const Link& l) {
    return other == id || IsActive(l, now);
  };
  double sum = 0;
  for (const auto& [other, l] : links_) {
    if (counts(other, l)) sum += part(l);
  }
  auto left = static_cast<double>(rate());
  const double unit = left / sum;
  double sharing = 0;  // the parts of the links that share what is left
  for (const auto& [other, l] : links_) {
    if (!counts(other, l)) continue;
    const double kept = static_cast<double>(l.rate) * kUsed;
    if (other != id && l.rate != 0 && kept < unit * part(l)) {
      left -= kept;
    } else {
      sharing += part(l);
    }
  }
  return static_cast<uint64_t>(left * part(link->second) / sharing);
}

}  // namespace longhaul::peerd
