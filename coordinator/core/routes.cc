#include "coordinator/core/routes.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "coordinator/core/membership.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {

bool CanRouteAround(const Routes &routes, const LostLinks &lost, const control::BlockedPairs &but) {
  std::set<control::BlockedPair> all(routes.blocked.begin(), routes.blocked.end());
  for (const control::BlockedPair &pair : but) all.erase(pair);
  for (const auto &[link, reason] : lost) {
    all.insert(control::MakeBlockedPair(link.first, link.second));
  }
  if (all.size() > LH_BLOCKED_PAIRS_MAX) return false;
  std::map<PeerId, size_t> count;
  for (const control::BlockedPair &pair : all) {
    ++count[pair.a];
    ++count[pair.b];
  }
  for (const auto &[peer, pairs] : count) {
    if (!routes.established.contains(peer) && 2 * pairs >= routes.peers.size() - 1) return false;
  }
  const control::BlockedPairs blocked(all.begin(), all.end());
  const auto ring = control::RingAvoiding(routes.peers, blocked);
  return ring && control::RingFault(*ring, blocked).empty();
}

PeerId ChooseVictim(const Routes &routes, const LostLinks &lost, const GroupRecord &record) {
  std::set<LostLink> undirected;
  std::set<PeerId> candidates;
  for (const auto &[link, reason] : lost) {
    undirected.insert(std::minmax(link.first, link.second));
    candidates.insert({link.first, link.second});
  }
  for (const auto &[a, b] : routes.blocked) undirected.insert({a, b});
  std::map<PeerId, size_t> count;
  for (const auto &[a, b] : undirected) {
    ++count[a];
    ++count[b];
  }
  std::map<PeerId, std::pair<Epoch, MemberId>> age;  // smallest: here for the longest time
  for (const MemberRecord &m : record.members) {
    const std::pair<Epoch, MemberId> own(IsAdmitted(m) ? m.joined : Epoch(UINT64_MAX), m.member);
    const auto [it, fresh] = age.emplace(m.peer, own);
    if (!fresh) it->second = std::min(it->second, own);
  }
  const auto weight = [&](PeerId peer) {
    return std::tuple(!routes.established.contains(peer), count.at(peer), age[peer]);
  };
  PeerId victim = *candidates.begin();
  for (PeerId peer : candidates) {
    if (weight(peer) > weight(victim)) victim = peer;
  }
  return victim;
}

RingPlan RingOver(const std::vector<PeerId> &order, const control::BlockedPairs &blocked) {
  std::optional<std::vector<PeerId>> ring = control::RingAvoiding(order, blocked);
  if (!ring || !control::RingFault(*ring, blocked).empty()) return {order, {}};
  return {*std::move(ring), blocked};
}

}  // namespace longhaul::coordinator
