#include "coordinator/core/membership.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/check.h"
#include "coordinator/core/text.h"

namespace longhaul::coordinator {
namespace {

template <class Predicate>
std::set<MemberId> Those(const GroupRecord& group, Predicate predicate) {
  std::set<MemberId> members;
  for (const MemberRecord& member : group.members) {
    if (predicate(member)) members.insert(member.member);
  }
  return members;
}

}  // namespace

std::set<MemberId> Admitted(const GroupRecord& group) { return Those(group, IsAdmitted); }

std::set<MemberId> Survivors(const GroupRecord& group) {
  return Those(group, [](const MemberRecord& m) { return IsAdmitted(m) && !m.departs; });
}

std::set<MemberId> Counting(const GroupRecord& group) {
  return Those(
      group, [](const MemberRecord& m) { return IsAdmitted(m) && !m.departs && !InBackground(m); });
}

std::vector<MemberRecord> Departing(const GroupRecord& group) {
  std::vector<MemberRecord> members;
  for (const MemberRecord& member : group.members) {
    if (member.departs) members.push_back(member);
  }
  return members;
}

std::vector<MemberId> IdsOf(const std::vector<MemberRecord>& members) {
  std::vector<MemberId> ids;
  for (const MemberRecord& member : members) ids.push_back(member.member);
  return ids;
}

bool AnyDeparts(const GroupRecord& group) {
  return std::any_of(group.members.begin(), group.members.end(),
                     [](const MemberRecord& member) { return member.departs.has_value(); });
}

// Admitted members stand before pending ones.
bool AnyAdmitted(const GroupRecord& group) {
  return !group.members.empty() && IsAdmitted(group.members.front());
}

uint32_t CountPending(const GroupRecord& group) {
  return static_cast<uint32_t>(
      std::count_if(group.members.begin(), group.members.end(),
                    [](const MemberRecord& member) { return !IsAdmitted(member); }));
}

bool HasPeer(const GroupRecord& group, PeerId peer) {
  return std::any_of(group.peers.begin(), group.peers.end(),
                     [peer](const PeerRecord& record) { return record.peer == peer; });
}

size_t CountMembers(const GroupRecord& group, PeerId peer) {
  return std::count_if(group.members.begin(), group.members.end(),
                       [peer](const MemberRecord& member) { return member.peer == peer; });
}

std::set<PeerId> PeersOf(const GroupRecord& group, const std::set<MemberId>& members) {
  std::set<PeerId> peers;
  for (const MemberRecord& member : group.members) {
    if (members.contains(member.member)) peers.insert(member.peer);
  }
  return peers;
}

std::set<PeerId> AdmittedPeers(const GroupRecord& group) { return PeersOf(group, Admitted(group)); }

std::set<PeerId> BackgroundPeers(const GroupRecord& group) {
  return PeersOf(
      group, Those(group, [](const MemberRecord& m) { return IsAdmitted(m) && InBackground(m); }));
}

std::vector<PeerId> RingOf(const GroupRecord& group) {
  const std::set<PeerId> admitted = AdmittedPeers(group);
  std::vector<PeerId> ring;
  for (const PeerRecord& peer : group.peers) {
    if (admitted.contains(peer.peer)) ring.push_back(peer.peer);
  }
  return ring;
}

std::vector<PeerId> OrderOf(const GroupRecord& group, const std::set<PeerId>& peers) {
  std::vector<PeerId> order;
  std::set<PeerId> rest = peers;
  for (PeerId peer : RingOf(group)) {
    if (rest.erase(peer) != 0) order.push_back(peer);
  }
  order.insert(order.end(), rest.begin(), rest.end());
  return order;
}

std::vector<PeerId> ByAge(const GroupRecord& group, const std::set<PeerId>& peers) {
  std::map<PeerId, Epoch> ages;
  for (PeerId peer : peers) ages[peer] = Epoch(UINT64_MAX);
  for (const MemberRecord& m : group.members) {
    const auto age = ages.find(m.peer);
    if (age != ages.end() && IsAdmitted(m)) age->second = std::min(age->second, m.joined);
  }
  std::vector<PeerId> order(peers.begin(), peers.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](PeerId a, PeerId b) { return ages.at(a) < ages.at(b); });
  return order;
}

control::BlockedPairs BlockedAmong(const GroupRecord& group, const std::vector<PeerId>& peers) {
  const std::set<PeerId> there(peers.begin(), peers.end());
  control::BlockedPairs blocked;
  for (const BlockedRecord& b : group.blocked) {
    if (there.contains(b.pair.a) && there.contains(b.pair.b)) blocked.push_back(b.pair);
  }
  return blocked;
}

void SortMembers(const std::vector<PeerId>& ring, const std::set<MemberId>& newcomers,
                 std::vector<MemberRecord>* members) {
  std::map<PeerId, size_t> position;
  for (PeerId peer : ring) position.emplace(peer, position.size());
  const bool first = std::none_of(members->begin(), members->end(), [&](const MemberRecord& m) {
    return IsAdmitted(m) && !newcomers.contains(m.member);
  });
  // Part of the list; whether a name does not decide; the name; place in the ring; member. The
  // peers of a first ring stand in the order of their ids.
  using Rank = std::tuple<int, bool, std::string, size_t, MemberId>;
  const auto rank = [&](const MemberRecord& m) {
    if (!newcomers.contains(m.member)) {
      return IsAdmitted(m) ? Rank(0, false, "", 0, MemberId()) : Rank(2, false, "", 0, m.member);
    }
    const bool by_name = first && m.members > 0 && m.named;
    return Rank(1, !by_name, by_name ? m.name : "", position.at(m.peer), m.member);
  };
  std::stable_sort(
      members->begin(), members->end(),
      [&rank](const MemberRecord& a, const MemberRecord& b) { return rank(a) < rank(b); });
}

void SortPeers(const std::vector<PeerId>& ring, GroupRecord* group) {
  std::erase_if(group->peers,
                [group](const PeerRecord& p) { return CountMembers(*group, p.peer) == 0; });
  ForgetBlockedOfStrangers(group);
  std::map<PeerId, size_t> position;
  for (PeerId peer : ring) position.emplace(peer, position.size());
  const auto rank = [&](const PeerRecord& p) {
    const auto it = position.find(p.peer);
    return it == position.end() ? position.size() : it->second;
  };
  std::stable_sort(group->peers.begin(), group->peers.end(),
                   [&rank](const PeerRecord& a, const PeerRecord& b) { return rank(a) < rank(b); });
}

void ForgetBlockedOfStrangers(GroupRecord* group) {
  std::erase_if(group->blocked, [group](const BlockedRecord& b) {
    return !HasPeer(*group, b.pair.a) || !HasPeer(*group, b.pair.b);
  });
}

void CheckInvariants(const GroupRecord& group) {
  const std::string name = ToString(group.group);
  LH_CHECK(group.committed <= group.highest) << name;
  LH_CHECK(group.boundary <= group.committed) << name;
  LH_CHECK(group.last_freeze <= group.highest) << name;
  LH_CHECK(!group.state || AnyAdmitted(group)) << name << " remembers a state of nobody";

  std::set<MemberId> seen;
  std::set<PeerId> peers_of_members;
  bool pending_behind = false;
  for (const MemberRecord& m : group.members) {
    LH_CHECK(m.member && m.peer) << name;
    LH_CHECK(seen.insert(m.member).second) << name << " has " << ToString(m.member) << " twice";
    LH_CHECK(m.joined <= group.committed) << name << " " << ToString(m.member);
    LH_CHECK(InBackground(m) || m.background_until <= group.boundary)
        << name << " " << ToString(m.member);
    LH_CHECK(!(pending_behind && IsAdmitted(m)))
        << name << " admitted " << ToString(m.member) << " behind a pending member";
    LH_CHECK(!m.departs || IsAdmitted(m)) << name << " " << ToString(m.member) << " departs";
    LH_CHECK(m.cohort.empty() == (m.cohort_size == 0)) << name << " " << ToString(m.member);
    pending_behind = pending_behind || !IsAdmitted(m);
    peers_of_members.insert(m.peer);
  }
  std::set<PeerId> peers;
  for (const PeerRecord& p : group.peers) LH_CHECK(peers.insert(p.peer).second) << name;
  LH_CHECK(peers == peers_of_members)
      << name << " peers " << List(peers) << " but members at " << List(peers_of_members);

  for (size_t i = 0; i < group.blocked.size(); ++i) {
    const control::BlockedPair& pair = group.blocked[i].pair;
    LH_CHECK(i == 0 || group.blocked[i - 1].pair < pair) << name;
    LH_CHECK(peers.contains(pair.a) && peers.contains(pair.b)) << name << " blocks a stranger";
  }
}

}  // namespace longhaul::coordinator
