// What a group does if some pairs of its peers cannot reach each other: which relays their links
// use, and which peer is removed if a pair has no relay. Pure functions.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/link_reports.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// Links that were lost or cannot be built, and why, as the reporter says.
using MissingLinks = std::map<LinkEnds, std::string>;

// The peers of the next epoch, and what is known of their links.
struct Routes {
  std::vector<PeerId> peers;      // the oldest in the group first
  std::set<PeerId> established;   // peers of the committed epoch that stay
  control::BlockedPairs blocked;  // the blocked pairs among `peers`
  FailedRelays failed;
};

// Gives each blocked pair a relay. A pair keeps its relay while that peer reaches both ends and has
// not failed. Otherwise the pair gets the oldest such peer. So a newcomer changes no relay that
// works. Returns false if some pair has no relay.
bool ChooseRelays(const std::vector<PeerId>& by_age, const FailedRelays& failed,
                  control::BlockedPairs* blocked);

// Returns true if the group can go on with all of these peers, although the ends of the missing
// links and of the blocked pairs cannot reach each other. Returns false also if a newcomer has no
// link to two or more peers that are at least half of the others. `but`: blocked pairs to treat as
// if their ends could reach each other.
bool CanRouteAround(const Routes& routes, const MissingLinks& missing,
                    const control::BlockedPairs& but = {});

// Chooses the peer to remove, among the ends of missing links: a newcomer before an established
// peer; then the peer in most pairs without a link; then the peer that joined last. It makes no
// difference which end reported the loss: a pair counts once.
PeerId ChooseVictim(const Routes& routes, const MissingLinks& missing, const GroupRecord& record);

// Whether the link of two of these peers gets another relay, or becomes straight again. Frames
// would be lost with the old link, so ops must be frozen.
bool ChangesWays(const std::set<PeerId>& staying, const control::BlockedPairs& before,
                 const control::BlockedPairs& after);

}  // namespace longhaul::coordinator
