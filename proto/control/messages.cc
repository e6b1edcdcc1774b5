#include "proto/control/messages.h"

#include <set>

namespace longhaul::control {
namespace {

std::string MembersFault(const PrepareEpoch& m) {
  std::set<PeerId> peers;
  for (const PeerInfo& peer : m.peers) peers.insert(peer.peer);
  std::set<PeerId> used;
  for (const MemberInfo& member : m.members) {
    if (!peers.contains(member.peer)) {
      return Refusal("peer of a member", ToString(member.peer), "one of peers");
    }
    used.insert(member.peer);
    if (member.joined > m.epoch) {
      return Refusal("joined", ToString(member.joined), "an epoch up to this one");
    }
    if (member.background_until > m.epoch && member.background_until != kInBackground) {
      return Refusal("background_until", ToString(member.background_until),
                     "an epoch up to this one, or 2^64 - 1");
    }
  }
  if (used.size() == peers.size()) return "";
  return Refusal("peers", std::to_string(peers.size()) + " long",
                 "the " + std::to_string(used.size()) + " that have members");
}

}  // namespace

std::string JoinWish::Fault() const {
  const uint32_t max = cohort.empty() ? 0 : LH_LOCAL_MEMBERS_MAX;
  if (cohort.empty() == (cohort_size == 0) && cohort_size <= max) return "";
  return Refusal("cohort_size", std::to_string(cohort_size),
                 cohort.empty() ? "0, as there is no cohort" : "1 to " + std::to_string(max));
}

std::string GroupState::Fault() const {
  const bool there = static_cast<bool>(prepared);
  if (there == (preparation != 0) && (there || !frozen)) return "";
  return Refusal("prepared",
                 ToString(prepared) + " with preparation " + std::to_string(preparation),
                 "both or none");
}

std::string SyncOffer::Fault() const {
  if (!complete && strategy == SyncStrategy::kSend) {
    return Refusal("complete", "0", "1, as the member sends");
  }
  return "";
}

std::string LinkMeasure::Fault() const {
  if (from == to) return Refusal("to", ToString(to), "another peer than from");
  if (bytes_per_second != 0 || rtt_us != 0 || small_packets) return "";
  return Refusal("bytes_per_second", "0, and so is rtt_us", "a measurement");
}

std::string JoinRefused::Fault() const {
  return outcome.ok() ? Refusal("code", "0", "one of an error") : "";
}

std::string PrepareEpoch::Fault() const {
  if (base >= epoch || boundary > epoch || last_freeze > epoch ||
      freeze != (last_freeze == epoch)) {
    return Refusal("epoch",
                   ToString(epoch) + " after " + ToString(base) + " with boundary " +
                       ToString(boundary) + ", last_freeze " + ToString(last_freeze) + ", freeze " +
                       (freeze ? "1" : "0"),
                   "above its base and consistent");
  }
  if (const std::string fault = SharesFault(cost.shares, peers.size()); !fault.empty()) {
    return Refusal("cost.shares", fault, "the shares of all peers");
  }
  if (std::string fault = MembersFault(*this); !fault.empty() || blocked.empty()) return fault;
  std::vector<PeerId> ring;
  for (const PeerInfo& peer : peers) ring.push_back(peer.peer);
  return BlockedFault(ring, blocked);
}

std::string CommitEpoch::Fault() const {
  for (size_t i = 1; i < missed.size(); ++i) {
    if (missed[i - 1] < missed[i]) continue;
    return Refusal(
        "missed",
        "boundary " + ToString(missed[i].boundary) + " tag " + std::to_string(missed[i].tag),
        "what is above the one before it");
  }
  return "";
}

std::string SyncResult::Fault() const {
  if (action != SyncAction::kEnd && !outcome.ok()) {
    return Refusal("code", std::to_string(static_cast<int>(outcome.code)),
                   "0, as the sync goes on");
  }
  const bool fetch = action == SyncAction::kFetch;
  if (fetch ? !sources.empty() : sources.size() <= 1) return "";
  return Refusal("sources", std::to_string(sources.size()) + " long",
                 fetch ? "1 to " + std::to_string(LH_SYNC_SOURCES_MAX) : "0 to 1");
}

}  // namespace longhaul::control
