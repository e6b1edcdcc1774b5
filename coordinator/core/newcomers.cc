#include "coordinator/core/newcomers.h"

#include <algorithm>

#include "coordinator/core/assembly.h"
#include "coordinator/core/text.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

bool OnLoopback(const std::string& endpoint) {
  return endpoint.starts_with("127.") || endpoint.starts_with("[::1]") ||
         endpoint.starts_with("localhost:");
}

}  // namespace

// ------------------------------------------------------------------------------
// trials

void Newcomers::Answer(PeerId from, const control::PeerTried& tried) {
  trials_.Answer(from, tried.trial, tried.peer, Clean(tried.reason));
}

std::vector<Trials::Ended> Newcomers::End(const EpochState& epochs, Tick now) {
  if (AnyAdmitted(epochs.record)) return trials_.End(now);
  trials_.ForgetIf([](PeerId) { return true; });
  return {};
}

std::optional<std::string> Newcomers::RefusalAfter(const Trials::Ended& trial,
                                                   const EpochState& epochs, Tick now) {
  const PeerRecord& newcomer = epochs.PeerOf(trial.newcomer);
  // The peers of other pending members that the members' peers have reached or are trying.
  std::set<PeerId> others;
  for (const MemberRecord& member : epochs.record.members) {
    const PeerId peer = member.peer;
    if (peer == trial.newcomer || epochs.InForce(peer)) continue;
    if (trials_.Reached(peer) || trials_.Running(peer)) others.insert(peer);
  }
  if (!TooFewReach(trial.errors.size(), trial.asked + others.size())) {
    pauses_.Begin(newcomer.endpoints, /*held=*/false, now);
    return std::nullopt;
  }
  std::string reason;
  for (const auto& [peer, error] : trial.errors) {
    reason += (reason.empty() ? "" : ", ") + Unreached(peer, trial.newcomer, error);
    if (reason.size() > LH_ERROR_TEXT_BYTES_MAX / 3) break;
  }
  reason += " (" + std::to_string(trial.errors.size()) + " of the " + std::to_string(trial.asked) +
            " members that tried cannot)";
  return Refusal(newcomer, reason, /*held=*/false, now);
}

std::string Newcomers::Refusal(const PeerRecord& newcomer, const std::string& reason, bool held,
                               Tick now) {
  const int64_t pause_us = pauses_.Begin(newcomer.endpoints, held, now);
  const std::string address =
      newcomer.endpoints.empty() ? "its address" : newcomer.endpoints.front();
  const std::string todo =
      OnLoopback(address)
          ? "its longhaul-peerd tells only " + address +
                ", which no other host reaches: give it --listen=[::]:PORT, or name the address "
                "that they reach with --advertise"
          : "open " + address +
                " (TCP) of that host for the hosts of the group, or name the address that they "
                "reach with --advertise of its longhaul-peerd";
  return Clean(reason + "; " + todo + "; the group tries this address again in " +
               std::to_string(pause_us / Seconds(1)) + " s at the earliest");
}

void Newcomers::Try(const EpochState& epochs, const std::set<PeerId>& asked,
                    const GroupStep& step) {
  pause_over_ = kNever;
  if (asked.empty() || !AnyAdmitted(epochs.record)) return;
  for (const PeerId newcomer : Untried(epochs, step.peers)) {
    const PeerRecord& record = epochs.PeerOf(newcomer);
    if (const Tick until = pauses_.Until(record.endpoints); step.now < until) {
      pause_over_ = std::min(pause_over_, until);
      continue;
    }
    const uint64_t trial =
        trials_.Begin(newcomer, asked, step.now + kTrialHalfDetects * detect_us_ / 2);
    for (const PeerId peer : asked) {
      step.Send(peer, control::TryPeer{
                          epochs.record.group,
                          trial,
                          {newcomer, record.endpoints, record.lanes, record.host, record.key}});
    }
  }
}

void Newcomers::Admitted(const PeerRecord& peer) {
  pauses_.Forget(peer.endpoints);
  trials_.Forget(peer.peer);
}

void Newcomers::ForgetStrangers(const GroupRecord& group) {
  trials_.ForgetIf([&group](PeerId peer) { return !HasPeer(group, peer); });
}

Tick Newcomers::NextDeadline() const { return std::min(trials_.NextDeadline(), pause_over_); }

// ------------------------------------------------------------------------------
// questions

bool Newcomers::Reached(PeerId peer, const GroupRecord& group) const {
  return !AnyAdmitted(group) || AdmittedPeers(group).contains(peer) || trials_.Reached(peer);
}

// A member of a complete cohort needs no further trial: the members of all its groups have reached
// its peer, and the cohort has to be admitted in all groups by one ballot.
bool Newcomers::MayAdmit(const MemberRecord& member, const GroupRecord& group) const {
  const bool complete = !member.cohort.empty() && member.after != kCohortIncomplete;
  return complete || Reached(member.peer, group);
}

std::set<MemberId> Newcomers::Admissible(const EpochState& epochs,
                                         const PeerDirectory& peers) const {
  const GroupRecord& group = epochs.record;
  // The number of the open ballot. A group without admitted members has no voters: its open
  // preparation counts as a ballot, and has that ballot's number. Without a preparation such a
  // group may admit every complete cohort.
  const uint64_t ballot = AnyAdmitted(group)
                              ? group.ballots + 1
                              : (epochs.preparation ? group.ballots : kCohortIncomplete);
  const bool assembly = AssemblySize(group) > 0;
  std::set<MemberId> members;
  for (const MemberRecord& m : group.members) {
    if (m.after >= ballot || !MayAdmit(m, group)) continue;
    // A member that waits for no others joins the group after it has formed.
    if (m.members == 0 && assembly) continue;
    if (!IsAdmitted(m) && peers.Attached(m.peer) && !peers.Draining(m.peer)) {
      members.insert(m.member);
    }
  }
  return members;
}

std::set<MemberId> Newcomers::Waiting(const EpochState& epochs, const PeerDirectory& peers) const {
  const std::optional<Preparation>& open = epochs.preparation;
  // If the preparation admits no newcomer, votes may be missing, and nobody may be admitted.
  if (!open || open->joiners.empty() || AssemblySize(epochs.record) > 0) return {};
  std::set<MemberId> waiting = Admissible(epochs, peers);
  for (MemberId joiner : open->joiners) waiting.erase(joiner);
  return waiting;
}

std::set<MemberId> Newcomers::Founders(const EpochState& epochs, const PeerDirectory& peers) const {
  const std::set<MemberId> admissible = Admissible(epochs, peers);
  std::set<MemberId> founders =
      epochs.preparation ? epochs.preparation->joiners : std::set<MemberId>{};
  const uint32_t size = AssemblySize(epochs.record);
  if (size == 0) {
    founders.insert(admissible.begin(), admissible.end());
    return founders;
  }
  // The group has the size that its members asked for, even if more members have come meanwhile.
  for (const MemberId member : admissible) {
    if (founders.size() < size) founders.insert(member);
  }
  return founders.size() < size ? std::set<MemberId>{} : founders;
}

uint32_t Newcomers::CountComing(const GroupRecord& group) const {
  return static_cast<uint32_t>(
      std::count_if(group.members.begin(), group.members.end(),
                    [&](const MemberRecord& m) { return !IsAdmitted(m) && MayAdmit(m, group); }));
}

std::set<PeerId> Newcomers::Untried(const EpochState& epochs, const PeerDirectory& peers) const {
  std::set<PeerId> untried;
  for (const MemberRecord& member : epochs.record.members) {
    const PeerId peer = member.peer;
    if (IsAdmitted(member) || MayAdmit(member, epochs.record) || trials_.Running(peer)) continue;
    if (peers.Attached(peer) && !peers.Draining(peer)) untried.insert(peer);
  }
  return untried;
}

std::vector<PeerId> Newcomers::Pausing(const EpochState& epochs, const PeerDirectory& peers) const {
  std::vector<PeerId> pausing;
  for (const PeerId peer : Untried(epochs, peers)) {
    if (pauses_.Until(epochs.PeerOf(peer).endpoints) > peers.Now()) pausing.push_back(peer);
  }
  return pausing;
}

std::set<PeerId> Triers(const EpochState& epochs, const PeerDirectory& peers, int64_t heard_us) {
  std::vector<PeerId> heard = OrderOf(epochs.record, epochs.Staying());
  std::erase_if(heard, [&](PeerId peer) { return !peers.HeardWithin(peer, heard_us); });
  std::set<PeerId> triers;
  const size_t count = std::min(heard.size(), kTriersMax);
  for (size_t i = 0; i < count; ++i) triers.insert(heard[i * heard.size() / count]);
  return triers;
}

}  // namespace longhaul::coordinator
