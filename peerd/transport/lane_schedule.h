// Which of a link's data lanes had better carry the next segment.
//
// On a short way any: whichever has room. On a long way lanes of one path differ, and the end of an
// op waits for the slowest:
//   - only as many are used as are of use (LaneCount);
//   - one that takes several times as long for a segment as the others rests, for longer and
//   longer,
//     and is tried again with one segment;
//   - near the end of what is queued, a lane leaves a segment to others that will be done with it
//     sooner (earliest completion first: Lim, Nahum, Towsley and Gibbens, "ECF: An MPTCP path
//     scheduler to manage heterogeneous paths", 2017).
//
// Plain value: no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/tick.h"
#include "peerd/transport/lane_count.h"

namespace longhaul::peerd {

class LaneSchedule {
 public:
  // A lane stands, or does no more.
  void Add(uint32_t index);
  void Remove(uint32_t index);
  // The way is a long one. `count`: how many lanes are of use is found out, beginning with `first`.
  void SetLongWay(int64_t rtt_us, bool count, uint32_t first);
  bool long_way() const { return long_way_; }

  // The lane asks for a segment: what it was given before is in the kernel, but for little.
  void Asks(uint32_t index, Tick now);
  // One of the first lanes, as many as are of use; or while none of those stands any.
  bool Uses(uint32_t index) const;
  enum class Verdict { kCarry, kLeave, kRest };  // kRest: it is left alone from now on
  // Of a lane that is used, and the next segment; `queued`: so many of about that length wait.
  Verdict Judge(uint32_t index, uint32_t bytes, size_t queued, Tick now);
  // It got one. True: lanes_of_use() is another number now.
  bool Gave(uint32_t index, uint32_t bytes, Tick now);
  // It could take more, and there was nothing.
  void QueueEmptied();
  // A probe saw the path carry so much. True: as above.
  bool Probed(uint64_t bytes_per_second);

  // Of those that stand, how many are used and do not rest.
  uint32_t used(Tick now) const;
  // On a long way; 0: all.
  uint32_t lanes_of_use() const { return count_ ? count_->lanes() : 0; }
  uint64_t rate() const { return count_ ? count_->rate() : 0; }
  bool growing() const { return count_ && !count_->found(); }

 private:
  struct Lane {
    bool stands = false;
    // What it was given last, and how long it took for that of late (0: not known).
    Tick given_at;
    uint64_t given_bytes = 0;
    double us_per_byte = 0;
    Tick rests_until;
    uint32_t rests = 0;  // in a row
  };
  // The other lanes that are used and do not rest.
  struct Others {
    bool any = false;
    int known = 0;     // of how many it is known how long they take
    double times = 0;  // of those: times, since one that had room for all it was given says little
    double rate = 0;   // of those together, in bytes a microsecond
  };
  Others OthersThan(uint32_t index, Tick now) const;

  std::vector<Lane> lanes_;
  bool long_way_ = false;
  int64_t rtt_us_ = 0;  // without queues
  std::optional<LaneCount> count_;
};

}  // namespace longhaul::peerd
