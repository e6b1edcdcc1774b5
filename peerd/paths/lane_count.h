// Finds out, by trying, how many data lanes a sender should use on a long path.
//
// One TCP connection gets only a fraction of what a long or lossy path carries, and nobody says how
// large a fraction. So a sender measures its rate with n lanes, then with 2n. If the rate is
// clearly higher, the sender keeps 2n lanes and later tries 4n. A single link also keeps 2n lanes
// if segments seldom wait for them, so that there is nothing to measure, and it does not send less.
// Otherwise it goes back to n. Too many lanes do harm: each is slower, and the end of an op waits
// for the slowest. The sender tries again when its rate has changed by much, and after kAgainUs.
//
// A burst is what is sent without a pause of two round trips, for instance an op. Bursts are
// measured in one of two ways:
//   long bursts    Their beginning is left out, because then the kernel takes more than the path.
//   short bursts   They are measured as a whole, less what the kernel may have taken and not sent.
//                  Most of a short burst is its beginning, which more lanes can make faster.
// Rates of the two kinds are never compared. When ops become longer or shorter, the search begins
// anew.
//
// Time counts only while a segment waits for a lane. Otherwise the sender is no faster than its
// neighbour in the ring, and no number of lanes helps. But many lanes take nearly all of an op at
// once, so that little waits, and then the op waits for the slowest lane. So a single link also
// goes back if it sends clearly less with 2n lanes in the whole of its bursts, waiting or not.
// (Bytes that a burst leaves in the kernel count as sent.) A rate may also rise or fall by itself,
// when connections are new or begin to lose packets. So two measurements in a row have to agree: in
// the rate, or, during a trial of several links, in what is better.
//
// A single link tries no more lanes while packets wait in queues of the path that all its lanes
// share. Then the lanes together already carry all that the path can.
//
// Where several links are one sender, other links fill these queues, too, and the following holds.
// If packets hardly wait in queues, each connection is limited by itself, for instance by random
// loss, and more lanes do no harm. Then one measurement is enough to try twice as many, and fewer
// are not tried, except when a pace begins (SetPace()). A rate that falls is no news before it has
// been low for a while, since hosts wait for each other. If packets wait in queues then, the path
// has become slower, and more lanes are no help.
//
// Plain value: no clock.
#pragma once

#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

// Whether packets hardly waited in queues: bytes waited for so long on average, on a path with this
// round trip (without queues).
bool QueuesAreShort(uint64_t queued_us, int64_t rtt_us);

// If nothing was put on a lane for longer than this, a pause has ended the burst. `waits`: segments
// wait, and slow lanes only take them late.
int64_t PauseUs(int64_t rtt_us, bool waits);

class LaneCount {
 public:
  // `rtt_us`: of the path, without queues. 1 <= first <= max. `links`: so many links together are
  // one sender, and each uses lanes() lanes. Then too many lanes do more harm, since all of them
  // share one queue. So half as many lanes are tried first, again and again, and kept if they carry
  // nearly as much. More are tried only if half as many were too few. If lanes were added though
  // packets had waited, half as many are tried once more at the end.
  LaneCount(uint32_t first, uint32_t max, int64_t rtt_us, uint32_t links = 1);

  // Returns how many lanes are of use on most paths. One connection gets less as round trips grow.
  static uint32_t Usual(int64_t rtt_us);
  // Returns how many lanes one link begins with: the usual number or more, a power of two.
  static uint32_t First(int64_t rtt_us);

  // How many lanes to send on.
  uint32_t lanes() const { return lanes_; }
  // Bytes a second measured with lanes(), or with half of them during a trial of twice as many. 0:
  // not measured yet.
  uint64_t rate() const { return rate_; }

  // True if a search has ended: more lanes than it chose were of no use on this path, could not be
  // tried, or were not, because queues are full. Stays true when a later trial uses twice as many.
  bool found() const { return found_; }
  // Another number of lanes is being tried without a pace.
  bool in_trial() const { return trying_ || (trying_fewer_ && pace_ == 0); }
  // The search goes on: in_trial(), or nothing was found yet.
  bool tries() const { return in_trial() || !found_; }

  // A probe measured the rate of the path. If nothing was measured here yet, takes as many lanes as
  // reach that rate early in a burst, before connections have grown. Never takes fewer than before,
  // since the probe's connections may have lost packets. Returns whether lanes() has changed.
  bool Probed(uint64_t bytes_per_second);
  // `bytes` were put on lanes. Returns whether lanes() has changed.
  bool Sent(uint64_t bytes, Tick now);
  // Something else than the number of lanes limits the sender to about this rate. While it reaches
  // the rate, more lanes are not tried. 0: no limit is known.
  void SetLimit(uint64_t bytes_per_second) { limit_ = bytes_per_second; }
  // The sender limits itself to this rate (HostPace), since its access link carries no more. While
  // it reaches the rate, more lanes are not tried. When it first reaches the rate after a time
  // without limit, fewer lanes are tried at this rate. 0: no limit.
  void SetPace(uint64_t bytes_per_second);
  // A lane could take more, and nothing waited.
  void QueueEmptied() { emptied_ = true; }
  // `bytes` have arrived. Their packets waited in queues of the path for `us`.
  void Arrived(uint64_t bytes, uint64_t us);
  // Bytes arrived so fast for some time. The sender is not faster than the highest such rate,
  // though the kernel takes more for a while. If this is never called, what was sent counts.
  void ArrivesAt(uint64_t bytes_per_second);
  // Whether packets hardly waited in queues since the last measurement.
  bool QueuesAreShort() const;

 private:
  enum class Kind { kLong, kShort };  // of bursts

  bool trying() const { return trying_ || trying_fewer_; }
  bool EndBurst(Tick end);
  // `more`: more lanes may be tried.
  bool Judge(Kind kind, uint64_t rate, bool more, Tick now);
  // Ends a measurement of overall_.
  void NoteOverall();
  bool SlowsDown() const;
  bool CheckAdded();
  void TryFewer();
  bool Agree(uint64_t a, uint64_t b) const;
  bool MayTryFewer() const;
  bool MayTryFewerThanAdded() const;
  bool JudgeFewer(uint64_t rate, Tick now);
  void BeginMeasurement();
  void Restart();
  void Use(uint32_t lanes);

  const uint32_t max_;
  const int64_t rtt_us_;
  const uint32_t links_;
  const uint32_t first_;
  uint32_t lanes_;
  bool trying_ = false;  // lanes_ is twice the number that gave rate_
  // Of several links: lanes_ is half of the number before, fewer are not tried, and fewer were
  // kept.
  bool trying_fewer_ = false;
  bool fewest_ = false;
  bool fewer_kept_ = false;
  bool room_ = false;            // packets hardly waited before trying_
  bool added_in_doubt_ = false;  // lanes were added though packets had waited
  bool try_at_pace_ = false;     // fewer lanes are to be tried, since a pace has begun
  bool found_ = false;
  Tick found_until_;  // until then more lanes are not tried
  uint64_t rate_ = 0;
  uint64_t limit_ = 0;
  uint64_t pace_ = 0;
  Tick last_;
  Tick skip_until_;
  int64_t settle_us_ = 0;
  bool emptied_ = false;     // since last_ nothing waited for a while
  uint64_t last_rate_ = 0;   // the measurement before, with the same lanes; 0: none
  int unsteady_ = 0;         // measurements in a row that did not agree
  int low_ = 0;              // measurements in a row with a much lower rate than before
  Kind kind_ = Kind::kLong;  // of rate_ and last_rate_
  // The measurement of long bursts: time in which something waited, bytes sent in that time, and
  // the total time, waiting or not.
  int64_t us_ = 0;
  uint64_t bytes_ = 0;
  int64_t all_us_ = 0;
  uint64_t all_bytes_ = 0;  // sent in the total time
  bool full_ = false;       // of a single link: packets wait in queues, as far as is known
  // Bytes a second in the total time of measurements, of which later ones count more: with lanes_,
  // and with half of them before the trial. 0: not measured.
  uint64_t overall_ = 0;
  uint64_t overall_before_ = 0;
  // Of the same time: bytes that arrived, and for how long they waited in queues, added up.
  uint64_t arrived_ = 0;
  uint64_t queued_ = 0;
  uint64_t most_arrived_ = 0;  // ArrivesAt() with lanes_; 0: unknown
  // The burst that goes on. `idle`: time in which there was nothing to send.
  Tick burst_begun_;
  uint64_t burst_bytes_ = 0;
  int64_t burst_idle_us_ = 0;
  // The measurement of short bursts.
  int64_t short_us_ = 0;
  uint64_t short_bytes_ = 0;
};

}  // namespace longhaul::peerd
