// What a host knows of its long ways in all, and how its links should use them: how many lanes each
// link uses while several are busy (HostLanes), how fast the host sends (HostPace), and with
// which congestion control (CongestionChoice).
//
// There is one such object for a host. Several transports can share it on one thread: links are
// told apart by their ids. A link calls it once for each segment (LinkPath). Some times in a second
// each transport says what its links have done since the last time, and then somebody calls
// Measure() or MeasureRates():
//
//   samples in                                       settings out
//   Sent(), QueueEmptied()               ------->    lanes(), what Sent() returns
//   Arrived() of each link, Measure()    ------->    lanes(), what Sent() returns
//   Carried() of each link, MeasureRates() ----->    congestion(), lanes()
//
// Links on short ways only have their bytes counted. Plain value: no clock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/tick.h"
#include "peerd/paths/congestion_choice.h"
#include "peerd/paths/host_lanes.h"
#include "peerd/paths/host_pace.h"
#include "peerd/paths/samples.h"

namespace longhaul::peerd {

class HostPaths {
 public:
  // `counts_lanes`: the number of lanes is searched for. Otherwise an option says it.
  explicit HostPaths(bool counts_lanes) : counts_lanes_(counts_lanes) {}

  // From now on the congestion control of long ways is chosen (CongestionChoice). Without this call
  // it stays as it is. `offers_bbr`: the system does.
  void ChooseCongestion(bool offers_bbr) { congestion_.emplace(offers_bbr); }
  // Returns the congestion control of long ways; empty: it stays as it is.
  std::string congestion() const { return congestion_ ? congestion_->in_use() : ""; }

  // ---- Of one link on a long way

  struct Settings {
    uint64_t rate = 0;           // what the link may send now, in bytes a second; 0: no limit
    bool lanes_changed = false;  // all busy links use another number of lanes from now on
  };
  // The link put `bytes` on a lane. `rtt_us`: of its path, without queues.
  Settings Sent(uint64_t link, int64_t rtt_us, uint64_t bytes, Tick now);
  // A lane of the link could take more, and nothing waited.
  void QueueEmptied(uint64_t link);
  // The link is gone, or was never used.
  void Remove(uint64_t link);

  // ---- Some times in a second: what arrives

  // What a link has done since the last sample.
  struct LinkSample {
    uint64_t link = 0;
    LinkArrivals arrived;  // at the peer
    bool long_way = false;
    // The rest is of long ways only.
    int64_t rtt_us = 0;       // of the last PING
    int64_t path_rtt_us = 0;  // of the path, without queues
    uint32_t lanes_used = 0;
    bool tries_lanes = false;  // LaneCount's, while no other link is busy
  };
  void Arrived(const LinkSample& sample);
  // Judges what Arrived() has told since the last call. Of the result, the caller fills in what
  // waits and how many links are up. Logs changes of a pace.
  HostSample Measure(Tick now);
  // ---- About twice in a second: what TCP delivers

  // What a straight link on a long way has carried since the last time.
  void Carried(const RateSample& sample);
  struct News {
    bool lanes_changed = false;       // as in Settings
    bool congestion_changed = false;  // congestion() has; logged
  };
  // Judges what Carried() has told since the last call.
  News MeasureRates(Tick now);

  // All busy links together: how many there are, how many lanes each uses, and the rate.
  const HostLanes& lanes() const { return lanes_; }

  // ---- For people
  // What all long ways may carry, in bytes per second. 0: no limit.
  uint64_t pace() const { return pace_.rate(); }

 private:
  const bool counts_lanes_;
  HostLanes lanes_;
  HostPace pace_;
  std::optional<CongestionChoice> congestion_;  // nothing: an option decides
  CongestionChoice::Sample queues_;             // of long ways, since the last MeasureRates()
  uint64_t repeated_ = 0;                       // since then
  uint64_t arrived_ = 0;                        // in all
  // Since the last Measure():
  LinkArrivals sum_;
  double round_trips_ = 0;  // that lanes made in a second
  bool settled_ = true;     // no link tries another number of lanes
};

}  // namespace longhaul::peerd
