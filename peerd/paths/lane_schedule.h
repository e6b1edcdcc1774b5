// Decides which data lane of a link carries the next segment.
//
// On a short path any lane does: the first one that has room. On a long path the lanes differ, and
// the end of an op waits for the slowest. So there
//   - only as many lanes are used as are of use (LaneCount; HostLanes while other links are busy,
//     too),
//   - a lane that takes several times as long for a segment as the others is left unused for a
//     while (it rests). Then one segment tries it again. Rests in a row get longer and longer,
//   - near the end of the queue a lane leaves a segment to lanes that will be done with it sooner
//     (earliest completion first: Lim, Nahum, Towsley and Gibbens, "ECF: An MPTCP path scheduler to
//     manage heterogeneous paths", 2017).
//
// Plain value: no clock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/tick.h"
#include "peerd/paths/lane_count.h"

namespace longhaul::peerd {

class LaneSchedule {
 public:
  // A lane is up, or is gone.
  void Add(uint32_t index);
  void Remove(uint32_t index);
  // The path is long. `count`: find out how many lanes are of use, beginning with `first`.
  void SetLongWay(int64_t rtt_us, bool count, uint32_t first);
  bool long_way() const { return long_way_; }
  // A round trip on a lane was so short. 0: unknown.
  void SawRtt(int64_t us) {
    if (us != 0) rtt_us_ = std::min(rtt_us_, us);
  }

  // Other links of this host are busy, too, and `lanes` lanes of each are of use. 0: this link is
  // busy alone. `found`: no more lanes are being tried.
  void SetCrowded(uint32_t lanes, bool found);

  // The lane asks for a segment: nearly all that it was given before is in the kernel.
  void Asks(uint32_t index, Tick now);
  // Whether the lane is one of the first lanes_of_use(). While none of these is up, every lane is
  // used.
  bool Uses(uint32_t index) const;
  enum class Verdict { kCarry, kLeave, kRest };  // kRest: the lane is left unused from now on
  // Decides about a lane that is used and the next segment. `queued`: how many segments wait; all
  // count as `bytes` long.
  Verdict Judge(uint32_t index, uint32_t bytes, size_t queued, Tick now);
  // Whether the lane rests while another one does not. A part of a frame goes to any other lane,
  // also to those that are not used.
  bool Rests(uint32_t index, Tick now) const;
  // The lane got the segment. Returns whether lanes_of_use() has changed.
  bool Gave(uint32_t index, uint32_t bytes, Tick now);
  // A lane could take more, and nothing waited.
  void QueueEmptied();
  // As in LaneCount, of this link.
  void Arrived(uint64_t bytes, uint64_t queued_us);
  // A probe measured the rate of the path. Returns whether lanes_of_use() has changed.
  bool Probed(uint64_t bytes_per_second);

  // Returns how many lanes are up, are used, and do not rest.
  uint32_t used(Tick now) const;
  // 0: all lanes, since the path is short or lanes are not counted.
  uint32_t lanes_of_use() const {
    if (!count_) return 0;
    return crowded_ != 0 ? crowded_ : count_->lanes();
  }
  uint64_t rate() const { return count_ ? count_->rate() : 0; }
  bool growing() const {
    if (!count_) return false;
    return crowded_ != 0 ? !crowded_found_ : !count_->found();
  }
  // While other links are not busy: as in LaneCount. False if lanes are not counted.
  bool tries() const { return count_ && count_->tries(); }
  int64_t rtt_us() const { return rtt_us_; }
  bool counts() const { return count_.has_value(); }

 private:
  struct Lane {
    bool stands = false;
    // The segments given since the last Asks(), and the recent time for a byte (0: not known).
    Tick given_at;
    uint64_t given_bytes = 0;
    double us_per_byte = 0;
    Tick rests_until;
    uint32_t rests = 0;  // in a row
  };
  // The lanes that are used and do not rest, without one of them.
  struct Others {
    bool any = false;
    int known = 0;     // lanes whose us_per_byte is known
    double times = 0;  // the sum of us_per_byte: times / known is the usual time for a byte
    double rate = 0;   // bytes a microsecond of all of them together
  };
  Others OthersThan(uint32_t index, Tick now) const;

  std::vector<Lane> lanes_;
  bool long_way_ = false;
  int64_t rtt_us_ = 0;  // of the path, without queues
  std::optional<LaneCount> count_;
  uint32_t crowded_ = 0;
  bool crowded_found_ = false;
};

}  // namespace longhaul::peerd
