#include <algorithm>

#include "base/check.h"
#include "coordinator/core/fates.h"
#include "coordinator/core/group.h"
#include "coordinator/core/text.h"
#include "coordinator/core/token.h"

// The part of Group that carries out decisions: prepares epochs, commits them and gives them up.
namespace longhaul::coordinator {

Decision Group::DecideNow(const PeerDirectory& peers) const {
  return Decide({epochs_, boundary_, newcomers_, assembly_, reports_, Better(), peers});
}

void Group::Apply(const Decision& decision, const GroupStep& step) {
  switch (decision.act) {
    case Decision::Act::kWait:
      return;
    case Decision::Act::kPrepare:
      return Prepare(decision, step);
    case Decision::Act::kCommit:
      return Commit(step);
    case Decision::Act::kCommitEmpty:
      return CommitEmpty(step);
    case Decision::Act::kAbort:
      return Abort(
          (epochs_.preparation->reorders ? "the ring is kept: " : "its newcomers are gone: ") +
              epochs_.preparation->changed,
          step);
    case Decision::Act::kAnswerVotes:
      for (MemberId member : boundary_.ballot.voted()) AnswerVote(member, step);
      return CompleteBallot(step.now);
  }
}

// ------------------------------------------------------------------------------
// preparing

void Group::Prepare(const Decision& decision, const GroupStep& step) {
  GroupRecord& group = epochs_.record;
  std::optional<Preparation>& open = epochs_.preparation;
  const std::string gain =
      (Better() == Ring() ? " to tell what links cost " : " for a better ring ") +
      ring_choice_.gain();
  Preparation next = PreparationFor(decision, gain, epochs_, step.now);
  next.id = PreparationId(incarnation_, group.group, next.epoch);
  Links(step).ChooseRing(Better(), &next);
  next.cost = step.peers.CostOf(next.ring, next.blocked,
                                next.ring == Ring() ? ring_choice_.NewShares(step.now) : nullptr);
  const std::set<PeerId> staying = PeersOf(group, next.survivors);
  const auto before = BlockedAmong(group, {staying.begin(), staying.end()});
  if (!next.freeze && ChangesWays(staying, before, next.blocked)) {
    next.freeze = true;
    epochs_.NoteFault(step.Fault("unreachable", "coordinator"));
  }

  epochs_.issued = group.highest = next.epoch;
  if (!AnyAdmitted(group)) {
    // The first admission counts as a ballot, although no member votes.
    if (!open) ++group.ballots;
    for (MemberId joiner : next.joiners) {
      group.ballots = std::max(group.ballots, epochs_.Find(joiner)->after + 1);
    }
  }
  if (!next.survivors.empty() && !next.joiners.empty()) boundary_.admission_tried = true;
  if (next.freeze) {
    epochs_.NoteFault(step.Fault("restart", "coordinator"));
    group.last_freeze = next.epoch;
    // The freeze rebuilds links that broke, so their reports are dropped. A link that fell silent
    // would hold up the freeze. So the report of a silence stays until its grace is over, unless
    // the pair is blocked by now. It is dropped if the reporter has all its links before that.
    reports_.ForgetLosses([&next](const LinkEnds& link, const LinkReports::Loss& loss) {
      return loss.fault.detect_ms == 0 || control::IsBlocked(next.blocked, link.first, link.second);
    });
  }
  epochs_.must_freeze.clear();
  open = std::move(next);
  for (const auto& [peer, answer] : open->answers) SendPrepare(peer, step);
  epochs_.Note("prepare", MemberId{}, PeerId{},
               "epoch prepared epoch=" + ToString(open->epoch) +
                   " members=" + std::to_string(open->survivors.size() + open->joiners.size()) +
                   " freeze=" + (open->freeze ? "1" : "0") + LogField("cause", open->cause),
               step);
}

void Group::SendPrepare(PeerId peer, const GroupStep& step) {
  if (!step.peers.Attached(peer)) return;
  Preparation& open = *epochs_.preparation;
  Answer& answer = open.answers.at(peer);
  // The deadline is set once. It does not move if the peer attaches again.
  if (answer.due == kNever) answer.due = step.now + kAnswerDetects * Millis(detect_ms_);
  const std::string token = EpochToken(run_secret_, record().group.group, open.epoch);
  step.Send(peer, MessageOf(open, record(), token));
}

// ------------------------------------------------------------------------------
// ending

void Group::Commit(const GroupStep& step) {
  GroupRecord& group = epochs_.record;
  const Preparation done = *std::exchange(epochs_.preparation, std::nullopt);
  const std::vector<MemberRecord> removed = Departing(group);
  const std::set<MemberId> voted =
      done.AtBoundary() ? boundary_.ballot.voted() : std::set<MemberId>{};
  const bool first = !AnyAdmitted(group);
  const std::vector<PeerId> ring = Ring();
  std::optional<FaultRecord> fault;
  if (done.freeze) {
    // No member could vote during the preparation, so that time does not count for its deadline.
    boundary_.Postpone(step.now - done.begun);
    sync_.Postpone(step.now - done.begun);
    fault = epochs_.EndFault(removed, step.now);
  }

  AdoptEpoch(done, &group);
  ForgetStrangers();
  ring_choice_.Told(done.cost, step.now);
  if (done.freeze) {
    fault_epoch_ = group.committed;
    last_fault_ = *fault;
    Reports reports;
    for (const auto& [peer, answer] : done.answers) reports[peer] = answer.ops;
    group.fates = FatesOf(reports);
  }
  if (first) {
    boundary_ = Boundary::Of(group);
    group.stepped = group.committed;
  } else if (done.AtBoundary()) {
    CompleteBallot(step.now);
  }

  for (const auto& [peer, answer] : done.answers) step.Send(peer, epochs_.CommitFor(peer));
  for (MemberId member : voted) AnswerVote(member, step);
  SendRemovals(removed, step);
  if (!done.joiners.empty()) {
    newcomers_.Restart();
    agreed_for_.merge(BackgroundPeers(group));
  }
  for (MemberId member : done.joiners) {
    const PeerId peer = epochs_.Find(member)->peer;
    newcomers_.Admitted(epochs_.PeerOf(peer));
    epochs_.Note("admit", member, peer,
                 "member admitted member=" + ToString(member) + " peer=" + ToString(peer) +
                     " epoch=" + ToString(group.committed),
                 step);
  }
  for (MemberId member : done.raised) {
    epochs_.Note(
        "ready", member, epochs_.Find(member)->peer,
        "member contributes member=" + ToString(member) + " epoch=" + ToString(group.committed),
        step);
  }
  NoteRing(done, ring, step);
  std::string text = "epoch committed epoch=" + ToString(group.committed) +
                     " members=" + std::to_string(Admitted(group).size()) +
                     " joined=" + List(done.joiners) + " left=" + List(IdsOf(removed)) +
                     " ring=" + List(Ring()) +
                     " took_ms=" + std::to_string((step.now - done.begun) / Millis(1));
  if (fault) {
    text += " cause=" + fault->cause + " detector=" + fault->detector +
            " detect_ms=" + std::to_string(fault->detect_ms) +
            " agree_ms=" + std::to_string(fault->agree_ms);
  }
  epochs_.Note("commit", MemberId{}, PeerId{}, text, step).fault = std::move(fault);
}

// Notes what the epoch has done to the ring, which was `before`.
void Group::NoteRing(const Preparation& done, const std::vector<PeerId>& before,
                     const GroupStep& step) {
  const std::string epoch = ToString(record().committed);
  const std::vector<PeerId> ring = Ring();
  if (!done.reorders) {
    if (ring != before) LinkMeasured(step.now);
    return;
  }
  ring_choice_.Drop();
  std::string text = "link costs told epoch=" + epoch + " " + CostText(done.cost);
  if (ring != before) {
    ring_choice_.Ordered(record().committed, step.now);
    text = "ring ordered anew epoch=" + epoch + " ring=" + List(ring, ",", kNamesShownMax) + " " +
           ring_choice_.ordered_gain();
  }
  epochs_.Note("ring", MemberId{}, PeerId{}, text, step);
}

void Group::CommitEmpty(const GroupStep& step) {
  GroupRecord& group = epochs_.record;
  epochs_.preparation.reset();
  const std::vector<MemberRecord> removed = Departing(group);
  epochs_.issued = group.highest = Epoch(group.highest.value() + 1);
  Preparation empty;
  empty.epoch = group.highest;
  AdoptEpoch(empty, &group);
  ForgetStrangers();
  boundary_ = Boundary::Of(group);
  sync_.Clear();
  group.state.reset();
  epochs_.must_freeze.clear();
  epochs_.fault.reset();
  reports_.ForgetLosses([](const LinkEnds&, const LinkReports::Loss&) { return true; });
  SendRemovals(removed, step);
  epochs_.Note("commit", MemberId{}, PeerId{},
               "epoch committed epoch=" + ToString(group.committed) +
                   " members=0 joined= left=" + List(IdsOf(removed)) + " ring= took_ms=0",
               step);
}

void Group::SendRemovals(const std::vector<MemberRecord>& removed, const GroupStep& step) const {
  for (const MemberRecord& member : removed) {
    step.Send(member.peer, control::Removed{record().group, member.member, member.departs->why,
                                            member.departs->reason});
  }
}

void Group::Abort(const std::string& reason, const GroupStep& step) {
  const Preparation given_up = *std::exchange(epochs_.preparation, std::nullopt);
  LH_CHECK(!given_up.freeze) << "group " << ToString(record().group) << " epoch "
                             << ToString(given_up.epoch) << " froze ops and is given up";
  for (const auto& [peer, answer] : given_up.answers) {
    if (!HasPeer(record(), peer)) continue;
    step.Send(peer, control::AbortEpoch{record().group, given_up.epoch, Clean(reason)});
  }
  epochs_.Note(
      "abort", MemberId{}, PeerId{},
      "epoch given up epoch=" + ToString(given_up.epoch) + LogField("reason", Clean(reason)), step);
}

void Group::AnswerVote(MemberId member, const GroupStep& step) {
  MemberRecord* voter = epochs_.Find(member);
  ++voter->votes;
  step.Send(voter->peer,
            control::VoteResult{record().group, member, voter->votes, record().committed});
  SyncOutput sync;
  sync_.Release(member, record(), step.now, &sync);
  Emit(std::move(sync), step);
}

void Group::CompleteBallot(Tick now) {
  ++epochs_.record.ballots;
  epochs_.record.stepped = record().committed;
  last_step_ = now;
  boundary_ = Boundary::Of(record());
}

}  // namespace longhaul::coordinator
