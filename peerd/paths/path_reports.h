// What the coordinator hears of this host's paths, and which link is probed next.
//
// Takes the samples of the host (HostWatch) and of its links (LinkWatch), and puts those figures
// into a report that have changed. The caller sends reports, and starts the probes (ProbePlan).
//
// Plain value: no clock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "peerd/paths/host_watch.h"
#include "peerd/paths/link_watch.h"
#include "peerd/paths/probe_plan.h"
#include "peerd/paths/samples.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

class PathReports {
 public:
  // `probe_interval_us` 0: no link is ever probed.
  PathReports(PeerId self, int64_t probe_interval_us)
      : links_(self), probes_(self, probe_interval_us) {}

  // Takes what has arrived at other peers, and `received` bytes that this host has received since
  // its start. Call it some times in a second while bytes move. `op_ended`: an op of a local member
  // has ended since the last call.
  void Look(Tick now, const HostSample& sample, uint64_t received, bool op_ended);
  // Takes what straight links carried at the same time.
  void AddRates(std::vector<std::pair<PeerId, RateSample>> rates, Tick now);

  // A link that is up.
  struct Link {
    PeerId peer;
    // The shortest round trip that is known without a sample. 0: unknown, or the link is relayed.
    uint32_t rtt_us = 0;
    bool small_packets = false;  // large packets vanish on its path
  };
  // Returns what the coordinator must be told. Forgets links that are not up. A peer may have
  // several links.
  control::LinkReport PopReport(const std::vector<Link>& up, Tick now);
  // The coordinator must be told everything again: it has greeted.
  void SayAllAgain();

  // As in ProbePlan.
  std::optional<PeerId> NextProbe(std::vector<ProbeCandidate> links, Tick now);
  // The probe of the link ran from `begun` to `ended`. `failed`: it has measured nothing.
  void Probed(PeerId peer, const RateSample& rate, bool failed, Tick begun, Tick ended, Tick now);

  // What is known of the link. 0: unknown.
  LinkWatch::Known Of(PeerId peer) const { return links_.Look(peer); }
  // The most that this host was lately seen to send and receive. 0: unknown.
  uint64_t up() const { return host_.up(); }
  uint64_t down() const { return host_.down(); }

 private:
  HostWatch host_;
  LinkWatch links_;
  ProbePlan probes_;
};

}  // namespace longhaul::peerd
