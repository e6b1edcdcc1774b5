// A store that goes back in time: it was restored from a backup, or its disk lost the last writes.
#pragma once

#include <string>

#include "coordinator/core/records.h"
#include "coordinator/core/token.h"
#include "proto/control/messages.h"
#include "tests/sim/planted.h"

namespace longhaul::sim {

// Returns true if `older` lacks only plans: preparations, joins, departures, drains, terms. Then it
// still holds all that was decided and told: committed epochs, counted ballots, ended syncs.
inline bool ForgetsPlansOnly(const coordinator::Records& older, const coordinator::Records& now) {
  for (const auto& [key, group] : now.groups) {
    const auto it = older.groups.find(key);
    if (it == older.groups.end()) {
      if (group.committed || group.ballots != 0) return false;
      continue;
    }
    const coordinator::GroupRecord& before = it->second;
    if (before.committed != group.committed || before.ballots != group.ballots ||
        before.state != group.state) {
      return false;
    }
    for (const coordinator::MemberRecord& member : group.members) {
      if (!member.joined) continue;
      const coordinator::MemberRecord* const known = FindMember(before, member.member);
      if (known == nullptr || known->votes != member.votes || known->syncs != member.syncs) {
        return false;
      }
    }
  }
  for (const auto& [key, group] : older.groups) {
    if (!now.groups.contains(key)) return false;
  }
  return true;
}

// Changes a message to the coordinator to what a peer with the planted bug would say: the peer is
// silent about things that the store may have forgotten. `incarnation` is the coordinator's.
inline void Withhold(Planted planted, const std::string& incarnation,
                     control::PeerMessage* message) {
  auto* const hello = std::get_if<control::Hello>(message);
  if (planted == Planted::kTermUntold && hello != nullptr) hello->store = hello->term = 0;
  if (planted != Planted::kPreparedUntold) return;
  if (hello != nullptr) {
    for (control::GroupState& group : hello->groups) {
      group.prepared = Epoch();
      group.preparation = 0;
      group.frozen = false;
    }
  }
  const auto answer = [&](auto* m) {
    if (m == nullptr) return;
    m->preparation = coordinator::PreparationId(incarnation, m->group, m->epoch);
  };
  answer(std::get_if<control::EpochReady>(message));
  answer(std::get_if<control::EpochFailed>(message));
}

}  // namespace longhaul::sim
