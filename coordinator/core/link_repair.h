// Decides what becomes of links of a group that are lost or cannot be built. In this order: they
// are built again, their pairs go through relays (routes.h), or a peer at one of their ends is
// removed.
//
// Made for one input to the group: it refers to what it is made from, and changes it. The reports
// (link_reports.h) have the times of blocked pairs, and the group's record has the pairs.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/link_reports.h"
#include "coordinator/core/routes.h"
#include "coordinator/core/trials.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

class LinkRepair {
 public:
  // Calls of the group, which take effect at once.
  struct Calls {
    // Removes the members of a peer because of a link that is missing. `reporter`: the peer that
    // reported it. If the peer is a newcomer, the group has waited for it.
    std::function<void(PeerId peer, const std::string& reason, PeerId reporter)> remove;
    // The pending members that the open preparation does not admit, but could.
    std::function<std::set<MemberId>()> waiting;
  };

  LinkRepair(EpochState* epochs, LinkReports* reports, const GroupStep& step, Calls calls)
      : epochs_(epochs), reports_(reports), step_(step), calls_(std::move(calls)) {}

  // Takes a peer's report.
  Violation Lost(PeerId peer, const control::LinkLost& lost);
  // Handles the lost links whose grace is over by now.
  void OnGraceOver();
  // All peers have answered the open preparation: goes around the links that cannot be built, or
  // removes peers, until the group can go around each missing link that is left.
  void GoAround(MissingLinks missing);
  // The few members of a trial that do not reach the newcomer get relays to it from the start, so
  // that nobody waits until they give up.
  void BlockTried(const Trials::Ended& trial);
  // The peer to remove if the group cannot go around these links.
  PeerId VictimOf(const MissingLinks& missing) const {
    return ChooseVictim(RoutesNow(), missing, epochs_->record);
  }
  // Sets the ring, the blocked pairs and their relays. `better`: the ring of a preparation that
  // orders it anew. A freezing preparation tries the straight links of blocked pairs again if their
  // time has come.
  void ChooseRing(const std::vector<PeerId>& better, Preparation* preparation) const;

 private:
  void GraceOver(LinkEnds link);
  void BlameRelays(MissingLinks* missing);
  Routes RoutesOf(const std::set<PeerId>& peers) const;
  Routes RoutesNow() const;
  control::BlockedPairs BlockedBefore() const;
  bool WidenFor(const MissingLinks& missing, const Routes& routes);
  void RemoveVictim(const Routes& routes, MissingLinks* missing);
  void Block(const MissingLinks& missing, int64_t retry_us);
  bool AddBlocked(const control::BlockedPair& pair, const std::string& reason, int64_t retry_us,
                  PeerId reporter);

  EpochState* const epochs_;
  LinkReports* const reports_;
  const GroupStep& step_;
  const Calls calls_;
};

}  // namespace longhaul::coordinator
