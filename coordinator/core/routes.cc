#include "coordinator/core/routes.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "coordinator/core/membership.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {

bool ChooseRelays(const std::vector<PeerId>& by_age, const FailedRelays& failed,
                  control::BlockedPairs* blocked) {
  const control::BlockedPairs pairs = *blocked;
  const std::set<PeerId> there(by_age.begin(), by_age.end());
  bool all = true;
  for (control::BlockedPair& pair : *blocked) {
    const auto fits = [&](PeerId peer) {
      const auto out = failed.find(pair);
      return there.contains(peer) && control::CanRelay(pairs, pair, peer) &&
             (out == failed.end() || !out->second.contains(peer));
    };
    if (fits(pair.relay)) continue;
    const auto oldest = std::find_if(by_age.begin(), by_age.end(), fits);
    pair.relay = oldest == by_age.end() ? PeerId() : *oldest;
    all = all && pair.relay;
  }
  return all;
}

bool CanRouteAround(const Routes& routes, const MissingLinks& missing,
                    const control::BlockedPairs& but) {
  std::set<control::BlockedPair> all(routes.blocked.begin(), routes.blocked.end());
  for (const control::BlockedPair& pair : but) all.erase(pair);
  for (const auto& [link, reason] : missing) {
    all.insert(control::MakeBlockedPair(link.first, link.second));
  }
  if (all.size() > LH_BLOCKED_PAIRS_MAX) return false;
  std::map<PeerId, size_t> count;
  for (const control::BlockedPair& pair : all) {
    ++count[pair.a];
    ++count[pair.b];
  }
  for (const auto& [peer, pairs] : count) {
    if (routes.established.contains(peer) || pairs == 1) continue;
    if (2 * pairs >= routes.peers.size() - 1) return false;
  }
  control::BlockedPairs blocked(all.begin(), all.end());
  return ChooseRelays(routes.peers, routes.failed, &blocked);
}

PeerId ChooseVictim(const Routes& routes, const MissingLinks& missing, const GroupRecord& record) {
  std::set<LinkEnds> undirected;
  std::set<PeerId> candidates;
  for (const auto& [link, reason] : missing) {
    undirected.insert(std::minmax(link.first, link.second));
    candidates.insert({link.first, link.second});
  }
  for (const control::BlockedPair& pair : routes.blocked) undirected.insert({pair.a, pair.b});
  std::map<PeerId, size_t> count;
  for (const auto& [a, b] : undirected) {
    ++count[a];
    ++count[b];
  }
  std::map<PeerId, std::pair<Epoch, MemberId>> age;  // smallest: here for the longest time
  for (const MemberRecord& m : record.members) {
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

bool ChangesWays(const std::set<PeerId>& staying, const control::BlockedPairs& before,
                 const control::BlockedPairs& after) {
  const auto differs = [&](const control::BlockedPair& pair) {
    return staying.contains(pair.a) && staying.contains(pair.b) &&
           control::RelayOf(before, pair.a, pair.b) != control::RelayOf(after, pair.a, pair.b);
  };
  return std::any_of(before.begin(), before.end(), differs) ||
         std::any_of(after.begin(), after.end(), differs);
}

}  // namespace longhaul::coordinator
