// Questions about the members and peers of a group's record. Pure functions.
//
// A member is *pending* until an epoch admits it. An *admitted* member that
// departs is still in the epoch in force, and not in the next one: those that
// stay are the *survivors*. A member in the background contributes to no result yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

inline bool IsAdmitted(const MemberRecord &member) { return static_cast<bool>(member.joined); }
inline bool InBackground(const MemberRecord &member) {
  return member.background_until == control::kInBackground;
}

std::set<MemberId> Admitted(const GroupRecord &group);
std::set<MemberId> Survivors(const GroupRecord &group);
// Survivors that syncs wait for.
std::set<MemberId> Counting(const GroupRecord &group);
// Admitted members that depart, as they are, in rank order.
std::vector<MemberRecord> Departing(const GroupRecord &group);
bool AnyDeparts(const GroupRecord &group);
bool AnyAdmitted(const GroupRecord &group);
uint32_t CountPending(const GroupRecord &group);

bool HasPeer(const GroupRecord &group, PeerId peer);
size_t CountMembers(const GroupRecord &group, PeerId peer);
std::set<PeerId> PeersOf(const GroupRecord &group, const std::set<MemberId> &members);
std::set<PeerId> AdmittedPeers(const GroupRecord &group);
// Peers of admitted members, in ring order.
std::vector<PeerId> RingOf(const GroupRecord &group);
// The order of first admission, then of ids.
std::vector<PeerId> OrderOf(const GroupRecord &group, const std::set<PeerId> &peers);
// Who came into the group first stands first; newcomers behind, by their ids.
std::vector<PeerId> ByAge(const GroupRecord &group, const std::set<PeerId> &peers);
// Blocked pairs of which both are there.
control::BlockedPairs BlockedAmong(const GroupRecord &group, const std::vector<PeerId> &peers);

// Ranks: a member that has one keeps its place, whatever becomes of the ring.
// Newcomers stand behind in the order of the ring, pending members behind them.
void SortMembers(const std::vector<PeerId> &ring, const std::set<MemberId> &newcomers,
                 std::vector<MemberRecord> *members);
// Peers in the order of the ring; those with pending members only behind it.
// Peers without members are removed, and the blocked pairs that they were in.
void SortPeers(const std::vector<PeerId> &ring, GroupRecord *group);
// The blocked pairs of peers that the group does not have.
void ForgetBlockedOfStrangers(GroupRecord *group);

}  // namespace longhaul::coordinator
