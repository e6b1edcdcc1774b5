// How many data lanes a sender uses on a long way, found by trying.
//
// One TCP connection gets a fraction of what a long or lossy path carries, and nobody says how
// large a one. So a sender measures what it gets with n lanes, then with 2n: if that is clearly
// more, or if 2n take nearly always all that there is to send, it stays with them and goes on, else
// it goes back to n. More lanes than are of use do harm: each of them is slower, and the
// end of an op waits for the slowest. It tries again when what it gets has changed by much, and now
// and then.
//
// A burst is what is sent without a pause of two round trips, for instance an op. Bursts add up to
// a measurement in one of two ways:
//   long bursts    Their beginning is left out: then the kernel takes more than the path does.
//   short bursts   The beginning is most of them, and what the number of lanes is to speed up. They
//                  are measured as a whole, less what the kernel may have taken and not sent.
// The two are never compared with each other: when ops become longer or shorter, the search begins
// anew.
//
// Measured is while something waits for a lane: what comes from a neighbour in the ring is no
// faster than the neighbour. Nothing is tried while lanes wait most of the time. What grows or
// falls by itself, as connections do that are new or begin to lose packets, is not taken for an
// effect of their number: two measurements in a row have to agree.
//
// Plain value: no clock.
#pragma once

#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

class LaneCount {
 public:
  // `rtt_us`: of the path, without queues. 1 <= first <= max.
  LaneCount(uint32_t first, uint32_t max, int64_t rtt_us);

  // As many as are right to begin with: what one connection gets falls as round trips grow.
  static uint32_t First(int64_t rtt_us);

  // To send on.
  uint32_t lanes() const { return lanes_; }
  // Bytes a second with that many, or with half of them while those are being tried; 0: not
  // measured yet.
  uint64_t rate() const { return rate_; }

  // More than lanes(), or than half of them while twice as many are being tried, were of no use on
  // this path, or there are no more.
  bool found() const { return found_; }

  // A probe saw the path carry so much. Before anything was measured: as many lanes are used as
  // bring a burst to that rate before connections have grown; never fewer than before, since the
  // probe's connections may have lost packets. True: lanes() is another number now.
  bool Probed(uint64_t bytes_per_second);
  // `bytes` were put on lanes. True: lanes() is another number now.
  bool Sent(uint64_t bytes, Tick now);
  // A lane could take more, and there was nothing.
  void QueueEmptied() { emptied_ = true; }

 private:
  enum class Kind { kLong, kShort };  // of bursts

  bool EndBurst(Tick end);
  // `more`: more lanes may be tried.
  bool Judge(Kind kind, uint64_t rate, bool more, Tick now);
  void Restart();
  void Use(uint32_t lanes);

  const uint32_t max_;
  const int64_t rtt_us_;
  uint32_t lanes_;
  bool trying_ = false;  // twice as many as gave rate_
  bool found_ = false;
  Tick found_until_;  // till then more are of no use
  uint64_t rate_ = 0;
  Tick last_;
  Tick skip_until_;
  int64_t settle_us_ = 0;
  bool emptied_ = false;     // since last_
  uint64_t last_rate_ = 0;   // measured just before with as many; 0: nothing
  int unsteady_ = 0;         // measurements in a row that did not agree
  Kind kind_ = Kind::kLong;  // that rate_ and last_rate_ are of
  // What is being measured of long bursts: time in which something waited, and bytes; and all the
  // time for that.
  int64_t us_ = 0;
  uint64_t bytes_ = 0;
  int64_t all_us_ = 0;
  // The burst that is under way. `idle`: time in which there was nothing to send.
  Tick burst_begun_;
  uint64_t burst_bytes_ = 0;
  int64_t burst_idle_us_ = 0;
  // What is being measured of short ones.
  int64_t short_us_ = 0;
  uint64_t short_bytes_ = 0;
};

}  // namespace longhaul::peerd
