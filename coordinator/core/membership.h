// Questions about the members and peers of a group's record. Pure functions.
//
// A member is *pending* until an epoch admits it. An *admitted* member that departs is still in the
// epoch in force, and will not be in the next one. The *survivors* are the admitted members that do
// not depart. A member in the background contributes to no result yet.
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

inline bool IsAdmitted(const MemberRecord& member) { return static_cast<bool>(member.joined); }
inline bool InBackground(const MemberRecord& member) {
  return member.background_until == control::kInBackground;
}

std::set<MemberId> Admitted(const GroupRecord& group);
std::set<MemberId> Survivors(const GroupRecord& group);
// The survivors that contribute. Syncs wait for these.
std::set<MemberId> Counting(const GroupRecord& group);
// The admitted members that depart, in rank order.
std::vector<MemberRecord> Departing(const GroupRecord& group);
std::vector<MemberId> IdsOf(const std::vector<MemberRecord>& members);
bool AnyDeparts(const GroupRecord& group);
bool AnyAdmitted(const GroupRecord& group);
uint32_t CountPending(const GroupRecord& group);

bool HasPeer(const GroupRecord& group, PeerId peer);
size_t CountMembers(const GroupRecord& group, PeerId peer);
std::set<PeerId> PeersOf(const GroupRecord& group, const std::set<MemberId>& members);
std::set<PeerId> AdmittedPeers(const GroupRecord& group);
// The peers of admitted members in the background.
std::set<PeerId> BackgroundPeers(const GroupRecord& group);
// Peers of admitted members, in ring order.
std::vector<PeerId> RingOf(const GroupRecord& group);
// Returns these peers: first those with admitted members, in ring order, then the others by id.
std::vector<PeerId> OrderOf(const GroupRecord& group, const std::set<PeerId>& peers);
// Returns these peers, oldest first: by the first admission of their present members. Peers without
// an admitted member follow, by id.
std::vector<PeerId> ByAge(const GroupRecord& group, const std::set<PeerId>& peers);
// Returns the blocked pairs whose two ends are both among these peers.
control::BlockedPairs BlockedAmong(const GroupRecord& group, const std::vector<PeerId>& peers);

// Sorts members by rank. Members that are admitted already keep their order, so a change of the
// ring changes no rank. The newcomers follow, in the order of their peers in the ring. Then the
// other pending members follow, by number.
void SortMembers(const std::vector<PeerId>& ring, const std::set<MemberId>& newcomers,
                 std::vector<MemberRecord>* members);
// Sorts the group's peers: those in the ring in its order, then those with pending members only.
// Removes peers without members, and the blocked pairs that they were in.
void SortPeers(const std::vector<PeerId>& ring, GroupRecord* group);
// Removes the blocked pairs of peers that are not in the group.
void ForgetBlockedOfStrangers(GroupRecord* group);

// Aborts the process with a reason if the record contradicts itself.
void CheckInvariants(const GroupRecord& group);

}  // namespace longhaul::coordinator
