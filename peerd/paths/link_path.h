// What one link knows of its path, and how it uses its lanes there: which lane carries the next
// segment (LaneSchedule), what the lanes carry (LinkMeter), and what the link may send
// (HostPaths).
//
// On a short way all lanes are used, and nothing is limited. Plain value: no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/tick.h"
#include "peerd/paths/host_paths.h"
#include "peerd/paths/lane_schedule.h"
#include "peerd/paths/link_meter.h"
#include "peerd/paths/samples.h"

namespace longhaul::peerd {

class LinkPath {
 public:
  // `id` names the link to `host`, which must outlive this object.
  LinkPath(uint64_t id, HostPaths* host) : id_(id), host_(host), meter_(&schedule_) {}
  ~LinkPath() { host_->Remove(id_); }
  LinkPath(const LinkPath&) = delete;
  LinkPath& operator=(const LinkPath&) = delete;

  // As in LaneSchedule.
  void AddLane(uint32_t index) { schedule_.Add(index); }
  void LoseLane(uint32_t index);
  void SetLongWay(int64_t rtt_us, bool count, uint32_t first) {
    schedule_.SetLongWay(rtt_us, count, first);
  }
  bool Probed(uint64_t bytes_per_second) { return schedule_.Probed(bytes_per_second); }
  const LaneSchedule& lanes() const { return schedule_; }
  bool long_way() const { return schedule_.long_way(); }

  // A lane asks for a segment. `anew`: nearly all that it was given before is in the kernel.
  void Asks(uint32_t index, bool anew, Tick now);
  LaneSchedule::Verdict Judge(uint32_t index, uint32_t bytes, size_t queued, Tick now) {
    return schedule_.Judge(index, bytes, queued, now);
  }
  struct Given {
    // What this lane may send from now on, in bytes a second. 0: no limit. Nothing: as before.
    std::optional<uint64_t> lane_rate;
    bool lanes_changed = false;       // lanes().lanes_of_use() has
    bool host_lanes_changed = false;  // HostPaths::Settings::lanes_changed
  };
  // The lane got the segment.
  Given Gave(uint32_t index, uint32_t bytes, Tick now);
  // A lane could take more, and nothing waited.
  void QueueEmptied();

  // What was measured.
  LinkMeter& meter() { return meter_; }
  // The sample of this link for HostPaths::Arrived(), without what only the link knows.
  HostPaths::LinkSample SampleOf(const LinkArrivals& arrived, Tick now) const;

 private:
  const uint64_t id_;
  HostPaths* const host_;
  LaneSchedule schedule_;
  LinkMeter meter_;
};

}  // namespace longhaul::peerd
