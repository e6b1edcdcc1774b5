// Whether a group can go on although some pairs of its peers cannot reach each
// other: through whom their links go, and who goes if nobody reaches both. Pure
// functions.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/records.h"
#include "coordinator/core/suspicion.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// Links that cannot be built or were lost, and what the reporter says of each.
using LostLinks = std::map<LostLink, std::string>;

// Who is to be in the next epoch, and what is known of them.
struct Routes {
  std::vector<PeerId> peers;      // who came into the group first stands first
  std::set<PeerId> established;   // in the epoch in force, and staying
  control::BlockedPairs blocked;  // among them
  // Relays over which the link of a pair could not be kept.
  FailedRelays failed;
};

// Gives each of the blocked pairs a relay: the one that it has if that one
// still reaches both, else the oldest of those that do. A newcomer changes
// nothing. False: there is none for some pair.
bool ChooseRelays(const std::vector<PeerId> &by_age, const FailedRelays &failed,
                  control::BlockedPairs *blocked);

// True if the group can go on with all of these peers although the ends of lost
// links, and of the blocked pairs but for those in `but`, cannot reach each
// other. A newcomer is not worth it that two or more, and half of the others,
// cannot reach.
bool CanRouteAround(const Routes &routes, const LostLinks &lost,
                    const control::BlockedPairs &but = {});

// The peer at an end of a lost link that has to go: newcomers before
// established peers; then the one in most pairs without a link, which is
// reached by fewest; then the one that joined last. The reporter is not the
// worse for it: a pair counts once, whoever reported it, and age has nothing to
// do with reporting.
PeerId ChooseVictim(const Routes &routes, const LostLinks &lost, const GroupRecord &record);

}  // namespace longhaul::coordinator
