// Measures how much a host can send, or receive, in all over its links together, from what it did.
//
// The fastest stretch of the traffic counts, because a host that sent less for a while may have had
// nothing to send, or may have waited for slow receivers. Bytes that waited in a queue come in a
// clump, and make a stretch look faster than the host is. So each stretch counts as longer
// (Clumps). A long stretch loses little by that, so it is preferred where the host was busy all
// along.
//
// The rate is the highest of the last kWindow and kOps ops, whichever is longer. So a host that has
// become slower is noticed after that. An op may keep a host busy only at its beginning, so a time
// alone would be too short or too long. A
// pause counts as at most a second of the window: it forgets nothing, and ops that are short and
// rare are no reason to remember for hours.
//
// A host that was not busy only happened to move so much. Such a stretch says that the host can do
// at least that. It never takes the place of a faster stretch, however long ago that was.
//
// Plain value: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "base/tick.h"

namespace longhaul::peerd {

class TrafficMeter {
 public:
  struct Clumps {
    // A rate is taken over at least this long and two round trips.
    int64_t stretch = 0;
    // A stretch counts as longer by so many percent of a round trip, at least by kLateMin and at
    // most by `late_max`.
    int64_t late_percent = 0;
    int64_t late_max = 0;
  };
  static constexpr int64_t kLateMin = Millis(5);
  static constexpr int64_t kWindow = Seconds(5);
  static constexpr uint64_t kOps = 3;
  // A smaller op does not count: it says nothing of what the host can.
  static constexpr uint64_t kOpBytes = 1 << 20;
  // After so much traffic ops do not matter: they are very long, or there are none.
  static constexpr int64_t kWindowMax = Seconds(600);
  // Traffic comes in bursts, between pauses. A burst that lasts longer is cut.
  static constexpr int64_t kBurst = Seconds(2);
  // The traffic pauses if fewer bytes than this have moved in this time. (Lanes are also pinged.)
  static constexpr int64_t kPause = Millis(400);
  static constexpr uint64_t kPauseBytes = 16 << 10;
  static constexpr size_t kSamplesMax = 64;  // of a burst; beyond it the oldest is dropped

  explicit TrafficMeter(const Clumps& clumps) : clumps_(clumps) {}

  // `bytes` had moved in all at `at`. Neither may fall. `rtt_us`: the longest round trip of the
  // links in use; 0 while it is not known. Call it often while bytes move, and now and then while
  // none do: a pause is seen only so.
  // `busy`: more was there to be moved all the time, as far as is known.
  void Add(Tick at, uint64_t bytes, uint32_t rtt_us, bool busy = true);
  // An op has ended before the last Add(), after the one before it.
  void OpEnded();
  // 0: unknown, no stretch was long enough.
  uint64_t bytes_per_second() const { return figures_.empty() ? 0 : figures_.front().rate; }
  // Whether the host was busy then. Otherwise it may move more.
  bool limits() const { return !figures_.empty() && figures_.front().busy; }
  // Whether the last `us` were all in this burst, and the host sent in them less than this part of
  // the fastest stretch of this burst. Earlier bursts do not count, because the host may have been
  // faster then.
  bool Slack(int64_t us, double part) const;

 private:
  // The rate of a stretch that ended when `clock_` and `ops_` had these values.
  struct Figure {
    int64_t clock = 0;
    uint64_t ops = 0;
    uint64_t rate = 0;
    bool busy = false;
  };
  using Samples = std::deque<std::pair<Tick, uint64_t>>;  // when, and bytes moved until then

  void Begin(std::pair<Tick, uint64_t> first, uint64_t before);
  uint64_t FastestUntilNow(uint32_t rtt_us) const;
  void Keep(uint64_t rate, bool busy);
  bool Old(const Figure& figure) const;
  // The youngest sample that is at least `us` older than the last one; end(): none is.
  Samples::const_iterator Back(int64_t us) const;

  const Clumps clumps_;
  Samples samples_;             // of this burst, the oldest first
  uint64_t fastest_ = 0;        // of this burst
  uint64_t before_ = 0;         // the fastest of the burst before it, if no pause lies between
  std::deque<Figure> figures_;  // falling rates, the highest first
  Tick figure_at_{INT64_MIN / 2};
  int64_t clock_ = 0;      // the time so far, in which no pause counts more than a second
  uint64_t ops_ = 0;       // that counted
  uint64_t op_bytes_ = 0;  // bytes moved when the last op ended
};

}  // namespace longhaul::peerd
