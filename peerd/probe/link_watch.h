// What this peer has seen its links carry, and what of it the coordinator is to hear.
//
// From real traffic, by what TCP measures of it: the rate at which data was acknowledged while
// the network, and not the sender, set the pace (as BBR takes its samples: Cardwell et al., 2016);
// and from probes where there is none. Of the samples of the last kWindow the highest counts, since
// a rate is lower whenever the link is shared with other traffic of ours, and the shortest round
// trip; a link that became slower or longer shows once that has passed. The first samples after a
// pause may have seen no more than connections that begin: until kConfirm they make no link slower,
// and what was unknown before is a lower bound.
//
// Plain value: no clock, no thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

// Of all lanes of a link together, since the last sample; or of a probe.
struct RateSample {
  uint64_t bytes_per_second = 0;  // 0: nothing was sent
  // There was too little to send for some of them: the link may carry more.
  bool limited_by_sender = false;
  uint32_t rtt_us = 0;  // the shortest; 0: unknown
  // More connections than these may carry more: a probe's, or lanes whose number is not found yet.
  bool few_connections = false;
};

class LinkWatch {
 public:
  static constexpr int64_t kWindow = Seconds(20);
  static constexpr int64_t kConfirm = Seconds(10);
  // Said again before the coordinator forgets it, as long as it is known.
  static constexpr int64_t kRepeat = Seconds(300);
  // A measurement that is not confirmed is not repeated for longer.
  static constexpr int64_t kForget = Seconds(600);
  static constexpr size_t kSamplesMax = 64;  // of one link; then the oldest goes

  explicit LinkWatch(PeerId self) : self_(self) {}

  void Add(PeerId peer, const RateSample& sample, Tick now);
  // Whether the link uses small packets, as large ones vanish on the way.
  void SetSmallPackets(PeerId peer, bool small);
  // When its bandwidth was seen last; none: never.
  std::optional<Tick> Measured(PeerId peer) const;
  // What has changed by more than a twentieth since it was said, and what is due again.
  control::LinkReport PopReport(Tick now);
  // A coordinator that has heard nothing.
  void SayAllAgain();
  // Links to others are forgotten.
  void Keep(const std::vector<PeerId>& peers);

 private:
  struct Watched {
    std::deque<std::pair<Tick, uint64_t>> samples;  // falling rates, the highest first
    std::deque<std::pair<Tick, uint32_t>> rtts;     // rising round trips, the shortest first
    Tick since;                                     // the first after the last pause
    uint64_t rate = 0;                              // the last known
    bool at_least = false;                          // it may carry more
    uint32_t rtt_us = 0;                            // likewise
    Tick at;                                        // of the last sample that counted
    uint64_t said_rate = 0;
    bool small_packets = false;
    bool said_small_packets = false;
    bool said_at_least = false;
    uint32_t said_rtt_us = 0;
    Tick said_at{INT64_MIN / 2};
  };

  const PeerId self_;
  std::map<PeerId, Watched> links_;
};

}  // namespace longhaul::peerd
