// Knows how much each link of this peer carries, and decides which of these figures the coordinator
// must be told.
//
// Samples come from ops and from probes of links without traffic. For ops, TCP measures the rate at
// which data was acknowledged while the network set the pace, and not the sender (BBR takes its
// samples like this: Cardwell et al., 2016).
//
// The rate of a link is the highest sample of the last kWindow, because samples are lower while
// other links of this peer share the path. The round trip is the shortest of the last kWindow. So a
// link that has become slower or longer is noticed after kWindow.
//
// While the host sends on other links too, a sample says only what the link carries at least: the
// links share the host's access link. Exception: the link is held, that is, segments waited for it
// although the host sent clearly less in all than it can (HostWatch::Holds()). Then the link or the
// receiver limits the rate. A link counts as held after kHeldSeen such samples, until kHeldSamples
// samples in a row have come without that. This takes long, because a coordinator that heeds the
// limit makes its signs vanish.
//
// The first samples after a pause may come from connections that are still slow-starting. For
// kConfirm such samples do not lower a known rate. A rate that was unknown before is reported as a
// lower bound during that time.
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
#include "peerd/paths/samples.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

class LinkWatch {
 public:
  static constexpr int64_t kWindow = Seconds(20);
  static constexpr int64_t kConfirm = Seconds(10);
  // A rate that no sample has confirmed for this long is not reported any more.
  static constexpr int64_t kForget = Seconds(600);
  static constexpr uint32_t kHeldSeen = 2;
  // Two minutes of traffic: a link in use is sampled twice a second.
  static constexpr uint32_t kHeldSamples = 240;
  static constexpr size_t kSamplesMax = 64;  // of one link; then the oldest one is dropped

  explicit LinkWatch(PeerId self) : self_(self) {}

  void Add(PeerId peer, const RateSample& sample, Tick now);
  // Notes the round trip of a link that need not have carried anything yet. It counts until Add()
  // knows one.
  void SetRtt(PeerId peer, uint32_t rtt_us);
  // Notes that the link is held. Call it before Add() adds the sample of this time.
  void SetHeld(PeerId peer);
  // Notes whether the link uses small packets because large ones vanish on its path.
  void SetSmallPackets(PeerId peer, bool small);
  // What is known of the link. 0: unknown.
  struct Known {
    uint64_t bytes_per_second = 0;
    uint32_t rtt_us = 0;
  };
  Known Look(PeerId peer) const;
  // When the rate was last measured; none: never.
  std::optional<Tick> Measured(PeerId peer) const;
  // Returns the links that must be reported: those whose last report is kReportRepeat old, and
  // those whose figures have changed since then (rate and round trip: by more than a twentieth). A
  // link whose rate was never measured is reported with its round trip alone.
  control::LinkReport PopReport(Tick now);
  // Makes the next PopReport() return all known links. Call it when a coordinator has greeted.
  void SayAllAgain();
  // Forgets all links but those to `peers`.
  void Keep(const std::vector<PeerId>& peers);

 private:
  struct Watched {
    std::deque<std::pair<Tick, uint64_t>> samples;  // falling rates, the highest first
    std::deque<std::pair<Tick, uint32_t>> rtts;     // rising round trips, the shortest first
    Tick since;                                     // the first sample after the last pause
    uint64_t rate = 0;                              // last known; 0: none
    bool at_least = false;                          // the link may carry more than `rate`
    uint32_t rtt_us = 0;                            // last known; 0: none
    Tick at;                                        // when a sample last confirmed `rate`
    bool held_now = false;                          // since the last sample
    uint32_t held_seen = 0;                         // how many samples have shown that it is held
    uint32_t held_samples = 0;                      // for how many more samples that counts
    // said_*: the figures of the last report, and its time.
    uint64_t said_rate = 0;
    bool small_packets = false;
    bool said_small_packets = false;
    bool said_at_least = false;
    bool said_held = false;
    uint32_t said_rtt_us = 0;
    Tick said_at{INT64_MIN / 2};
  };

  const PeerId self_;
  std::map<PeerId, Watched> links_;
};

}  // namespace longhaul::peerd
