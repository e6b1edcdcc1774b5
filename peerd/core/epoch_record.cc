#include "peerd/core/epoch_record.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "peerd/core/algorithm.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// How many members, present and former, a history knows.
constexpr size_t kKnownMax = size_t{5} * LH_MEMBERS_MAX;

int RankIn(const std::vector<control::MemberInfo>& members, MemberId member) {
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].member == member) return static_cast<int>(i);
  }
  return -1;
}

bool Contains(const std::vector<PeerId>& peers, PeerId peer) {
  return std::find(peers.begin(), peers.end(), peer) != peers.end();
}

// Maps each peer to the epoch that brought it into the group: the one that admitted its first
// member.
std::map<PeerId, Epoch> ArrivalOf(const std::vector<control::MemberInfo>& members) {
  std::map<PeerId, Epoch> arrival;
  for (const control::MemberInfo& member : members) {
    const auto [it, added] = arrival.emplace(member.peer, member.joined);
    if (!added) it->second = std::min(it->second, member.joined);
  }
  return arrival;
}

bool AnyBlocked(const std::vector<PeerId>& peers, const control::BlockedPairs& blocked) {
  return std::any_of(blocked.begin(), blocked.end(), [&](const control::BlockedPair& pair) {
    return Contains(peers, pair.a) && Contains(peers, pair.b);
  });
}

// Whether a peer with a share cannot reach another peer, or all peers have shares.
bool AnyOwnerBlocked(const EpochRecord& record) {
  if (record.cost.shares.empty()) return true;
  std::vector<PeerId> none;  // the peers without a share
  for (size_t i = 0; i < record.ring.size(); ++i) {
    if (record.cost.shares[i] == 0) none.push_back(record.ring[i]);
  }
  return std::any_of(record.blocked.begin(), record.blocked.end(),
                     [&](const control::BlockedPair& pair) {
                       return !Contains(none, pair.a) || !Contains(none, pair.b);
                     });
}

// Returns the places of these peers in `all`.
std::vector<size_t> PlacesOf(const std::vector<PeerId>& peers, const std::vector<PeerId>& all) {
  std::map<PeerId, size_t> place;
  for (const PeerId peer : all) place.emplace(peer, place.size());
  std::vector<size_t> places;
  places.reserve(peers.size());
  for (const PeerId peer : peers) places.push_back(place.at(peer));
  return places;
}

// Returns the peers that take part in ops of `boundary`, in the ring order of the epoch.
std::vector<PeerId> OrderAt(Epoch boundary, const EpochRecord& record,
                            const std::map<PeerId, Epoch>& arrival) {
  std::vector<PeerId> order;
  for (const PeerId peer : record.ring) {
    if (arrival.at(peer) <= boundary) order.push_back(peer);
  }
  return order;
}

// Returns the neighbours of `self` in the epoch's ring, and in the smaller rings of ops of older
// boundaries.
std::set<PeerId> NeighboursOf(const EpochRecord& record, PeerId self) {
  const std::map<PeerId, Epoch> arrival = ArrivalOf(record.members);
  std::set<Epoch> boundaries;
  for (const auto& [peer, joined] : arrival) boundaries.insert(joined);
  std::set<PeerId> neighbours;
  for (const Epoch boundary : boundaries) {
    const std::vector<PeerId> order = OrderAt(boundary, record, arrival);
    const std::vector<PeerId> ring = control::RingAvoiding(order, record.blocked).value_or(order);
    const auto at = std::find(ring.begin(), ring.end(), self);
    if (at == ring.end()) continue;
    const size_t position = at - ring.begin();
    neighbours.insert(ring[(position + 1) % ring.size()]);
    neighbours.insert(ring[(position + ring.size() - 1) % ring.size()]);
  }
  return neighbours;
}

}  // namespace

int EpochRecord::RankOf(MemberId member) const { return RankIn(members, member); }
bool EpochRecord::HasPeer(PeerId peer) const { return Contains(ring, peer); }

double EpochRecord::ShareOf(PeerId peer) const {
  const auto at = std::find(ring.begin(), ring.end(), peer);
  if (at == ring.end()) return 0;
  if (cost.shares.empty()) return 1.0 / static_cast<double>(ring.size());
  return static_cast<double>(cost.shares[at - ring.begin()]) / kShareUnits;
}

bool EpochRecord::InBackground(MemberId member) const {
  return std::any_of(members.begin(), members.end(), [member](const control::MemberInfo& info) {
    return info.member == member && info.background_until == control::kInBackground;
  });
}
bool EpochRecord::AnyInBackground() const {
  return std::any_of(members.begin(), members.end(), [](const control::MemberInfo& info) {
    return info.background_until == control::kInBackground;
  });
}
std::vector<control::SyncSource> EpochRecord::SourcesFor(MemberId member) const {
  std::vector<control::SyncSource> sources;
  const int rank = RankOf(member);
  // Begins with the next rank, so that several members do not all ask the same source first.
  for (size_t i = 1; i <= members.size() && sources.size() < LH_SYNC_SOURCES_MAX; ++i) {
    const control::MemberInfo& info = members[(std::max(rank, 0) + i) % members.size()];
    if (info.member == member || info.background_until == control::kInBackground) continue;
    sources.push_back({info.member, info.peer});
  }
  return sources;
}

bool Participants::Contributes(MemberId member) const {
  return std::any_of(members.begin(), members.end(), [&](const control::MemberInfo& info) {
    return info.member == member && info.background_until <= boundary;
  });
}
bool Participants::HasPeer(PeerId peer) const { return Contains(ring, peer); }
int Participants::RankOf(MemberId member) const { return RankIn(members, member); }
MemberId Participants::FirstMemberOf(PeerId peer) const {
  for (const control::MemberInfo& member : members) {
    if (member.peer == peer) return member.member;
  }
  return MemberId();
}

void Participants::KeepMembers(const std::vector<MemberId>& stay) {
  const auto goes = [&](MemberId member) {
    return std::find(stay.begin(), stay.end(), member) == stay.end();
  };
  std::erase_if(members, [&](const control::MemberInfo& info) { return goes(info.member); });
  std::erase_if(contributors, goes);
  std::vector<size_t> left;
  for (size_t i = 0; i < ring.size(); ++i) {
    if (FirstMemberOf(ring[i])) left.push_back(i);
  }
  if (left.size() != ring.size()) Arrange(left);
}

void Participants::Arrange(const std::vector<size_t>& places) {
  std::vector<PeerId> arranged;
  arranged.reserve(places.size());
  for (const size_t place : places) arranged.push_back(ring[place]);
  ring = std::move(arranged);
  cost.shares = SharesOf(cost.shares, places);
  // With equal shares, each peer needs a link to each other peer.
  if (!cost.shares.empty()) return;
  cost.mesh_bytes_per_second = cost.even_bytes_per_second;
  mesh_of_owners = mesh;
}

std::string ProblemOf(const control::PrepareEpoch& prepare, PeerId self) {
  std::set<PeerId> peers;
  for (const control::PeerInfo& peer : prepare.peers) {
    if (!peers.insert(peer.peer).second) return "peer " + ToString(peer.peer) + " stands twice";
  }
  if (!peers.contains(self)) return "this peer is not in the ring";
  if (prepare.boundary > prepare.epoch || prepare.last_freeze > prepare.epoch) {
    return "boundary or last_freeze is newer than the epoch";
  }
  if (prepare.freeze && prepare.last_freeze != prepare.epoch)
    return "it freezes, and its last_freeze is older";
  std::set<MemberId> members;
  std::set<PeerId> used;
  for (const control::MemberInfo& member : prepare.members) {
    const std::string name = "member " + ToString(member.member);
    if (!member.member || !members.insert(member.member).second) return name + " stands twice";
    if (!peers.contains(member.peer)) return name + " is at no peer of the ring";
    if (!member.joined || member.joined > prepare.boundary) {
      return name + " joined after the boundary";
    }
    if (member.background_until > prepare.boundary &&
        member.background_until != control::kInBackground) {
      return name + " is in the background until after the boundary";
    }
    used.insert(member.peer);
  }
  if (used.size() != peers.size()) return "a peer of the ring has no member";
  return control::BlockedFault(RecordOf(prepare).ring, prepare.blocked);
}

EpochRecord RecordOf(const control::PrepareEpoch& prepare) {
  EpochRecord record;
  record.epoch = prepare.epoch;
  record.boundary = prepare.boundary;
  record.last_freeze = prepare.last_freeze;
  record.sign_ops = prepare.sign_ops;
  record.members = prepare.members;
  for (const control::PeerInfo& peer : prepare.peers) {
    record.ring.push_back(peer.peer);
    record.hosts.emplace(peer.peer, peer.host);
    record.keys.emplace(peer.peer, peer.key);
  }
  record.blocked = prepare.blocked;
  record.cause = prepare.cause;
  record.cost = prepare.cost;
  return record;
}

std::vector<LinkWanted> LinksOf(const control::PrepareEpoch& prepare, PeerId self) {
  const EpochRecord record = RecordOf(prepare);
  const std::map<PeerId, Epoch> arrival = ArrivalOf(prepare.members);
  const bool mesh = prepare.peers.size() <= kMeshPeersMax;
  const std::set<PeerId> neighbours = NeighboursOf(record, self);
  std::vector<LinkWanted> links;
  for (const control::PeerInfo& peer : prepare.peers) {
    if (peer.peer == self) continue;
    LinkWanted link;
    link.peer = peer;
    link.dial = std::pair(arrival.at(self), self) < std::pair(arrival.at(peer.peer), peer.peer);
    link.relay = record.RelayOf(self, peer.peer);
    // The mesh never uses a link through a relay.
    const bool neighbour = neighbours.contains(peer.peer);
    link.data = (mesh && !link.relay) || neighbour;
    link.one_lane = prepare.peers.size() > kManyLanesPeersMax && !neighbour;
    links.push_back(std::move(link));
  }
  return links;
}

void EpochHistory::Add(EpochRecord record) {
  LH_CHECK(record.epoch > committed());
  participants_.clear();
  for (const control::MemberInfo& member : record.members) {
    const auto host = record.hosts.find(member.peer);
    known_[member.member] = {member, host == record.hosts.end() ? "" : host->second};
  }
  while (known_.size() > kKnownMax) known_.erase(known_.begin());
  std::vector<MemberId>& members = members_[record.epoch];
  for (const control::MemberInfo& member : record.members) members.push_back(member.member);
  const Epoch last_freeze = record.last_freeze;
  records_.emplace(record.epoch, std::move(record));
  records_.erase(records_.begin(), records_.lower_bound(last_freeze));
}

const std::vector<MemberId>* EpochHistory::MembersOf(Epoch epoch) const {
  const auto it = members_.find(epoch);
  return it == members_.end() ? nullptr : &it->second;
}

void EpochHistory::ForgetMembersBefore(Epoch epoch) {
  members_.erase(members_.begin(), members_.lower_bound(epoch));
}

const KnownMember* EpochHistory::Member(MemberId member) const {
  const auto it = known_.find(member);
  return it == known_.end() ? nullptr : &it->second;
}

uint64_t EpochHistory::HostsOf(const std::vector<MemberId>& members) const {
  std::set<std::string> hosts;
  for (const MemberId id : members) {
    const KnownMember* const member = Member(id);
    if (member == nullptr) {
      hosts.insert(ToString(id));
    } else {
      hosts.insert(member->host.empty() ? ToString(member->info.peer) : member->host);
    }
  }
  return std::max<uint64_t>(1, Digester().Add(hosts).value());
}

void EpochHistory::Clear() {
  known_.clear();
  records_.clear();
  members_.clear();
  participants_.clear();
}

std::shared_ptr<const Participants> EpochHistory::For(Epoch boundary,
                                                      const std::vector<MemberId>& set) const {
  LH_CHECK(!empty());
  if (!set.empty()) {
    auto some = std::make_shared<Participants>(*For(boundary));
    some->KeepMembers(set);
    some->hosts = HostsOf(some->contributors);
    return some;
  }
  std::shared_ptr<const Participants>& cached = participants_[boundary];
  if (cached) return cached;
  auto it = records_.lower_bound(std::max(boundary, last_freeze()));
  if (it == records_.end()) --it;
  const EpochRecord& record = it->second;
  auto participants = std::make_shared<Participants>();
  participants->epoch = record.epoch;
  participants->boundary = boundary;
  for (const control::MemberInfo& member : record.members) {
    if (member.joined > boundary) continue;
    participants->members.push_back(member);
    if (member.background_until <= boundary) participants->contributors.push_back(member.member);
  }
  participants->hosts = HostsOf(participants->contributors);
  const std::vector<PeerId> order = OrderAt(boundary, record, ArrivalOf(record.members));
  const bool few = record.ring.size() <= kMeshPeersMax;
  participants->mesh = few && !AnyBlocked(order, record.blocked);
  participants->mesh_of_owners = participants->mesh || (few && !AnyOwnerBlocked(record));
  participants->cost = record.cost;
  // Without the peers that came later, a blocked pair may be neighbours in the ring.
  const std::vector<PeerId> ring = control::RingAvoiding(order, record.blocked).value_or(order);
  participants->ring = record.ring;
  participants->Arrange(PlacesOf(ring, record.ring));
  cached = std::move(participants);
  return cached;
}

}  // namespace longhaul::peerd
