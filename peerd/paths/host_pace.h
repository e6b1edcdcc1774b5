// Paces what this host sends on long ways, so that its links together do not overrun the queue in
// front of its access link.
//
// TCP finds the rate of each connection by filling the queue until packets are lost. On a long way
// it then needs many round trips to be as fast again, and the connections of a host lose packets
// together, since they share its access link. This host knows what its lanes send, and how long
// their packets wait. So it limits the sum of the lanes to about what the access link carries.
// TCP's congestion control goes on below that limit.
//
// The limit follows from what arrives and from how long packets wait, as in BBR (Cardwell et al.,
// 2016), but for all connections together:
//   - There is none at first. If packets of every link wait for long, the queue in front of the
//     access link is full. The limit is then the most that arrived lately. (If packets of some
//     links wait and those of others do not, they wait elsewhere, for instance at a receiver.)
//   - If the host sends as much as the limit allows, and no queue fills, the limit rises: first
//     slowly, then faster and faster. So an access link that became faster is noticed.
//   - If the host sends as much as the limit allows, and bytes are repeated or packets wait for
//     very long, the limit falls a little.
//   - If the host sends clearly less than the limit though packets of every link go on waiting, the
//     access link has become slower. The limit is then the most that has arrived meanwhile.
//
// Links get parts of the limit in proportion to what they sent in the bursts before. So links that
// carry different shares of a tensor are done at the same time. Links that have nothing to send
// leave their parts to the others, and those that something else holds leave what they do not use.
// Parts of frames (ADR 0047), and lanes of other peers that go through this host, are few, and are
// not limited.
//
// Plain value: no clock.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/tick.h"

namespace longhaul::peerd {

class HostPace {
 public:
  // A link on a long way put `bytes` on a lane. `rtt_us`: of its path, without queues.
  void Sent(uint64_t link, int64_t rtt_us, uint64_t bytes, Tick now);
  // A lane of the link could take more, and nothing waited.
  void QueueEmptied(uint64_t link);
  void Remove(uint64_t link);

  // The times that bytes waited in queues of the path, added up.
  struct Queued {
    uint64_t shared_us = 0;  // in queues that all connections share
    uint64_t any_us = 0;     // in any queue
  };
  // `bytes` of the link have arrived since the last Measure().
  void Arrived(uint64_t link, uint64_t bytes, const Queued& queued);
  // A link sent so many bytes, and TCP sent `repeated` bytes again.
  void Repeated(uint64_t sent, uint64_t repeated);
  // Judges what has arrived. Call it some times in a second while bytes move. `settled`: no other
  // number of lanes is being tried (LaneCount::tries()). If a limit has begun, ended or followed a
  // slower access link, returns why, for the log; otherwise an empty string.
  std::string Measure(bool settled, Tick now);

  // Returns what all links together may send, in bytes per second. 0: there is no limit.
  uint64_t rate() const { return settled_ ? limit_ : 0; }
  // Whether the access link may have been full in a measurement since the last call: packets of
  // every link waited, many bytes were repeated, or the limit was reached. Nothing if there was no
  // measurement, for instance because ops are short.
  std::optional<bool> PopFull() { return std::exchange(full_, std::nullopt); }
  // Returns what this link may send now, in bytes per second. 0: there is no limit.
  uint64_t RateOf(uint64_t link, Tick now) const;

 private:
  // What arrived in this time of measurements counts.
  static constexpr int64_t kWindow = Seconds(30);

  struct Link {
    uint64_t bytes = 0;    // sent in the present burst
    uint64_t before = 0;   // sent in the last bursts that counted
    bool waiting = false;  // segments wait for lanes
    Tick sent_at;          // when a segment was last put on a lane
    uint64_t arrived = 0;  // in the present stretch
    Queued queued;         // in the present stretch
    uint64_t rate = 0;     // of the last stretch of this burst, in bytes a second; 0: unknown
  };
  // A stretch of time, in which all links with much to send had something to send.
  struct Stretch {
    int64_t us = 0;
    bool settled = true;
  };
  bool Waits() const;  // segments of some link do
  bool IsActive(const Link& link, Tick now) const;
  // The link sent little in the burst before.
  bool IsMinor(const Link& link) const;
  bool AllAreActive(Tick now) const;
  size_t MainLinks() const;
  // The mean wait in these queues of packets of that link on which it is shortest.
  uint64_t ShortestWaitUs(uint64_t Queued::*queues) const;
  void EndBurst();
  void BeginStretch();
  std::string EndStretch();
  std::string Begin(bool queue_is_long);
  void BeginLimit();
  std::string Adjust(uint64_t rate, uint64_t waited_us, bool overrun);
  bool Reached(uint64_t rate) const;
  bool BecameSlower(uint64_t rate, bool queue_is_long);
  uint64_t most() const { return rates_.front().second; }

  std::map<uint64_t, Link> links_;
  uint64_t before_ = 0;  // the sum of Link::before
  int64_t rtt_us_ = 0;   // the longest of the links in this burst
  Tick sent_at_;         // when a link last sent
  Tick burst_begun_;
  Tick measured_at_;  // the last Measure()
  Stretch stretch_;
  bool settled_ = false;

  int64_t clock_us_ = 0;  // the time of all stretches
  // What arrived in a second of a stretch, and when the stretch ended. The rates fall.
  std::deque<std::pair<int64_t, uint64_t>> rates_;
  // As Repeated() has told of all links since the last stretch.
  uint64_t sent_ = 0;
  uint64_t repeated_ = 0;

  uint64_t limit_ = 0;
  std::optional<bool> full_;  // as in PopFull()
  // Stretches in a row in which clearly less than the limit arrived though packets of every link
  // waited, when the first of them ended, and when there were last kSlow of them.
  int slow_ = 0;
  int64_t slow_since_us_ = 0;
  int64_t slower_us_ = -kWindow;
  int long_seen_ = 0;  // stretches with a long queue less those with a short one
  // In how many stretches since the last overrun the limit was reached without one, and how often
  // it has risen meanwhile.
  int quiet_ = 0;
  int rises_ = 0;
};

}  // namespace longhaul::peerd
