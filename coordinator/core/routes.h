// Whether a group can go on although some pairs of its peers have no link:
// which ring avoids them, and who goes if none does. Pure functions.
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
  std::vector<PeerId> peers;      // in ring order, before blocked pairs are looked at
  std::set<PeerId> established;   // in the epoch in force, and staying
  control::BlockedPairs blocked;  // among them
};

// True if the group can go on with all of these peers although the lost links,
// and the blocked pairs but for those in `but`, have no link. A newcomer is not
// worth it that half of the others or more cannot reach.
bool CanRouteAround(const Routes &routes, const LostLinks &lost,
                    const control::BlockedPairs &but = {});

// The peer at an end of a lost link that has to go: newcomers before
// established peers; then the one in most pairs without a link, which is
// reached by fewest; then the one that joined last. The reporter is not the
// worse for it: a pair counts once, whoever reported it, and age has nothing to
// do with reporting.
PeerId ChooseVictim(const Routes &routes, const LostLinks &lost, const GroupRecord &record);

struct RingPlan {
  std::vector<PeerId> ring;
  control::BlockedPairs blocked;  // that get no link
};
// `order`, changed as little as it takes to part the blocked pairs. Where that
// is not possible, as with three peers left, all pairs get a link.
RingPlan RingOver(const std::vector<PeerId> &order, const control::BlockedPairs &blocked);

}  // namespace longhaul::coordinator
