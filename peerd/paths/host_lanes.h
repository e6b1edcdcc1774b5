// Finds out how many data lanes each link of this host should use while several links are busy.
//
// All links of a host share its access link. A link that counts its lanes alone (LaneCount) sees
// only its own rate. With more lanes it takes a larger part of the access link, so each link adds
// lanes, the other links do the same, and in the end many lanes overrun the queue in front of the
// access link. So while several links are busy, one search counts for all: it takes fewer lanes for
// every busy link while the host as a whole sends as much, and more only if it then sends more.
//
// A link is busy if it has sent kBusyBytes in the present stretch or the one before. A stretch ends
// with a pause of all links, or after some round trips. So near the end of an op the last link does
// not take up the many lanes that it would use alone. After a pause, the links of the op before the
// pause count as busy for a few round trips.
//
// There is one search, for the greatest number of links that were busy together lately. While fewer
// are busy, nothing is measured: their receivers differ, so their rates say little about lanes.
// They use as many lanes in all. The last link of an op, for instance, does not take up the many
// lanes that it would use if no other link were ever busy.
//
// Time counts only while all busy links have something to send. Otherwise a receiver may be the
// limit. A link that is busy alone is measured, too. If several links together send about as much,
// the access link is full, and more lanes are not tried.
//
// On very long ways a search begins with many lanes, because a network that limits each connection,
// or loses packets at random, needs many. Where hosts share access links, so many overrun queues:
// if many bytes are repeated while packets wait in queues, the search begins again with few, once.
//
// Only links on long ways are told. Plain value: no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/tick.h"
#include "peerd/paths/lane_count.h"

namespace longhaul::peerd {

class HostLanes {
 public:
  // What the links sent, and the time without the pauses.
  struct Busy {
    int64_t us = 0;
    uint64_t bytes = 0;
  };

  // A link put `bytes` on a lane. `rtt_us`: of its path, without queues. Returns whether lanes()
  // has changed because a search went on.
  bool Sent(uint64_t link, int64_t rtt_us, uint64_t bytes, Tick now);
  // A lane of the link could take more, and nothing waited.
  void QueueEmptied(uint64_t link);
  // `bytes` of all links have arrived since the last call. Their packets waited in queues of the
  // path for `us`. Call it some times in a second.
  void Arrived(uint64_t bytes, uint64_t us, Tick now);
  // The busy links sent so many bytes, and TCP sent `repeated` bytes again. Returns whether lanes()
  // has changed.
  bool Repeated(uint64_t sent, uint64_t repeated);
  void Remove(uint64_t link);

  // As in LaneCount, of all links together.
  void SetPace(uint64_t bytes_per_second);
  // Returns how many links are busy.
  size_t links() const { return busy_; }
  // Returns how many lanes each busy link should use. 0: no two links were busy together lately, so
  // each finds its number alone.
  uint32_t lanes() const;
  // As in LaneCount, of all links together.
  uint64_t rate() const { return crowded() ? count_->rate() : 0; }
  bool found() const { return crowded() && count_->found(); }
  // Whether there is a search, though fewer links may be busy now.
  bool searches() const { return count_.has_value(); }
  // As in LaneCount; false without a search.
  bool tries() const { return searches() && count_->tries(); }

  // Returns what was sent since the last call.
  Busy PopBusy();

  static constexpr uint64_t kBusyBytes = 256 << 10;

 private:
  struct Link {
    int64_t rtt_us = 0;
    uint64_t bytes = 0;     // in the present stretch
    bool in_burst = false;  // busy at some time since the last pause
    bool before = false;    // busy before the present stretch
    bool waiting = false;   // segments wait for lanes
  };

  bool crowded() const { return busy_ > 0 && count_.has_value(); }
  void BeginStretch(bool paused, Tick now);
  void BeginSearch(size_t links, int64_t rtt_us, uint32_t lanes);

  std::map<uint64_t, Link> links_;
  size_t busy_ = 0;
  Tick begun_;                // of the present stretch
  bool after_pause_ = false;  // the present stretch began after a pause
  Tick last_;
  std::optional<LaneCount> alone_;  // of a link that is busy alone; only its rate is of use
  // The search, for the greatest number of links that were busy together lately.
  std::optional<LaneCount> count_;
  size_t counted_ = 0;    // so many links
  size_t most_busy_ = 0;  // since the last check whether so many are still busy
  int bursts_ = 0;        // since then
  int64_t rtt_us_ = 0;    // of the path, when the search began
  bool many_ = false;     // the search began with more than a few lanes
  uint64_t arrived_ = 0;  // since then:
  Tick arrived_begun_;
  // What was sent, and sent again, since Repeated() judged last.
  uint64_t judged_ = 0;
  uint64_t repeated_ = 0;
  Busy sum_;
};

}  // namespace longhaul::peerd
