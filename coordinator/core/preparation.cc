#include "coordinator/core/preparation.h"

#include <algorithm>

#include "base/check.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/text.h"

namespace longhaul::coordinator {
bool NoteReady(PeerId peer, const control::EpochReady& ready, Preparation* preparation) {
  if (preparation->id != ready.preparation) return false;
  const auto it = preparation->answers.find(peer);
  if (it == preparation->answers.end()) return false;
  Answer& answer = it->second;
  answer.ready = true;
  answer.failed = false;
  answer.unreachable.clear();
  if (preparation->freeze) answer.ops = ready.ops;
  return true;
}

Violation NoteFailed(PeerId peer, const control::EpochFailed& failed, Preparation* preparation) {
  if (preparation->id != failed.preparation) return std::nullopt;  // stale
  const auto it = preparation->answers.find(peer);
  if (it == preparation->answers.end()) return std::nullopt;
  std::map<PeerId, std::string> unreachable;
  for (const control::Unreachable& other : failed.unreachable) {
    if (other.peer == peer || !preparation->answers.contains(other.peer)) continue;
    unreachable.emplace(other.peer, Clean(other.reason));
  }
  if (unreachable.empty()) {
    return "failure of epoch " + ToString(failed.epoch) + " names no other peer of that epoch";
  }
  Answer& answer = it->second;
  answer.ready = false;
  answer.failed = true;
  answer.ops.clear();
  answer.unreachable = std::move(unreachable);
  return std::nullopt;
}

control::PrepareEpoch MessageOf(const Preparation& p, const GroupRecord& record,
                                const std::string& token) {
  control::PrepareEpoch message;
  message.group = record.group;
  message.epoch = p.epoch;
  message.base = record.committed;
  message.boundary = p.AtBoundary() ? p.epoch : record.boundary;
  message.last_freeze = record.last_freeze;
  message.freeze = p.freeze;
  message.sign_ops = record.SignsOps();
  message.token = token;
  message.preparation = p.id;
  message.cause = p.cause;
  message.blocked = p.blocked;
  message.cost = p.cost;

  std::map<PeerId, const PeerRecord*> records;
  for (const PeerRecord& peer : record.peers) records[peer.peer] = &peer;
  for (PeerId id : p.ring) {
    const PeerRecord* peer = records.at(id);
    message.peers.push_back({peer->peer, peer->endpoints, peer->lanes, peer->host, peer->key});
  }
  std::vector<MemberRecord> members = record.members;
  SortMembers(p.ring, p.joiners, &members);
  for (const MemberRecord& m : members) {
    if (p.joiners.contains(m.member)) {
      const Epoch background_until = p.survivors.empty() ? Epoch() : m.background_until;
      message.members.push_back({m.member, m.peer, p.epoch, m.name, background_until, m.cohort});
    } else if (p.survivors.contains(m.member)) {
      const Epoch background_until = p.raised.contains(m.member) ? p.epoch : m.background_until;
      message.members.push_back({m.member, m.peer, m.joined, m.name, background_until, m.cohort});
    }
  }
  return message;
}

void AdoptEpoch(const Preparation& done, GroupRecord* record) {
  std::erase_if(record->blocked, [&done](const BlockedRecord& b) {
    return done.answers.contains(b.pair.a) && done.answers.contains(b.pair.b) &&
           !control::IsBlocked(done.blocked, b.pair.a, b.pair.b);
  });
  for (BlockedRecord& b : record->blocked) {
    b.pair.relay = control::RelayOf(done.blocked, b.pair.a, b.pair.b);
  }
  record->committed = done.epoch;
  if (done.AtBoundary()) record->boundary = done.epoch;
  record->fates.clear();
  std::erase_if(record->members, [](const MemberRecord& m) { return m.departs.has_value(); });
  for (MemberRecord& member : record->members) {
    if (done.joiners.contains(member.member)) {
      member.joined = done.epoch;
      // The group had no members, so nobody waits for the newcomer, and it does not join in the
      // background.
      if (done.survivors.empty()) member.background_until = Epoch();
    }
    if (done.raised.contains(member.member)) member.background_until = done.epoch;
  }
  SortPeers(done.ring, record);
  SortMembers(done.ring, done.joiners, &record->members);
}

std::string WaitingForAnswers(const Preparation& preparation, const PeerDirectory& directory) {
  std::string text;
  size_t missing = 0;
  for (const auto& [peer, answer] : preparation.answers) {
    if (answer.ready) continue;
    if (++missing > kNamesShownMax) continue;
    text += " " + ToString(peer);
    if (answer.failed) {
      std::vector<PeerId> others;
      for (const auto& [other, reason] : answer.unreachable) others.push_back(other);
      text += " (cannot reach " + List(others, " ", kNamesShownMax) + ")";
    } else if (!directory.Attached(peer)) {
      text += " (not attached)";
    }
  }
  if (missing == 0) return "";
  if (missing > kNamesShownMax) {
    text += " and " + std::to_string(missing - kNamesShownMax) + " more";
  }
  return "epoch " + ToString(preparation.epoch) + " waiting for " + std::to_string(missing) +
         " of " + std::to_string(preparation.answers.size()) + " peers:" + text;
}

std::vector<PeerId> Silent(const Preparation& preparation, Tick now) {
  std::vector<PeerId> silent;
  for (const auto& [peer, answer] : preparation.answers) {
    if (!answer.answered() && answer.due <= now) silent.push_back(peer);
  }
  return silent;
}

Tick NextDeadline(const Preparation& preparation) {
  Tick next = kNever;
  for (const auto& [peer, answer] : preparation.answers) {
    if (!answer.answered()) next = std::min(next, answer.due);
  }
  return next;
}

void CheckInvariants(const Preparation& p, const GroupRecord& record,
                     const PeerDirectory& directory) {
  const std::string name = ToString(record.group);
  LH_CHECK(p.epoch > record.committed && p.epoch <= record.highest) << name;
  LH_CHECK(p.changed.empty()) << name << " keeps an outdated preparation";
  LH_CHECK(p.freeze == (record.last_freeze > record.committed)) << name;
  LH_CHECK(p.freeze || !AnyDeparts(record)) << name << " removes members without a freeze";
  const std::string fault = control::BlockedFault(p.ring, p.blocked);
  LH_CHECK(fault.empty()) << name << " " << fault;
  LH_CHECK(p.ring.size() == p.answers.size()) << name;
  LH_CHECK(!p.freeze || record.last_freeze == p.epoch) << name;
  LH_CHECK(!p.reorders || (!p.freeze && p.joiners.empty() && p.raised.empty()))
      << name << " orders the ring anew and does more";
  LH_CHECK(p.survivors == Survivors(record)) << name << " prepares " << List(p.survivors);
  std::set<PeerId> participants = PeersOf(record, p.survivors);
  for (MemberId member : p.joiners) {
    const MemberRecord* joiner = FindMember(record, member);
    LH_CHECK(joiner != nullptr && !IsAdmitted(*joiner)) << name << " " << ToString(member);
    participants.insert(joiner->peer);
  }
  std::set<PeerId> asked;
  for (const auto& [peer, answer] : p.answers) {
    asked.insert(peer);
    LH_CHECK(!(answer.ready && answer.failed)) << name << " " << ToString(peer);
    LH_CHECK(answer.failed != answer.unreachable.empty()) << name << " " << ToString(peer);
    LH_CHECK(!directory.Attached(peer) || answer.due != kNever) << name << " " << ToString(peer);
  }
  LH_CHECK(asked == participants && !asked.empty()) << name << " asks " << List(asked);
}

}  // namespace longhaul::coordinator
