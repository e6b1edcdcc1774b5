#include "coordinator/core/decision.h"

#include <algorithm>

#include "coordinator/core/text.h"

namespace longhaul::coordinator {
namespace {

using Act = Decision::Act;

// Returns what the commit waits for if a link between two peers of the preparation was lost; "":
// nothing. The link may have been lost after its peers were ready. If the epoch were committed now,
// ops would use the broken link and would have to be frozen. Before the commit no op uses it.
std::string WaitingForGrace(const Preparation& open, const LinkReports& reports) {
  for (const auto& [link, loss] : reports.losses()) {
    const auto [from, to] = link;
    if (!open.answers.contains(from) || !open.answers.contains(to)) continue;
    return "epoch " + ToString(open.epoch) + " waiting for whether " + ToString(to) +
           " is gone: " + LinkText(from, to, loss.reason);
  }
  return "";
}

// Returns what the open ballot waits for if it is to admit a member of a cohort whose peer is not
// attached; "": nothing. If another group has begun to admit the cohort, this group must admit its
// member in the ballot of the same number. The wait is short: the peer attaches again or is dead
// soon.
std::string WaitingForCohort(const Known& known) {
  const GroupRecord& group = known.epochs.record;
  if (!AnyAdmitted(group) || known.boundary.admission_tried) return "";
  for (const MemberRecord& m : group.members) {
    if (IsAdmitted(m) || m.cohort.empty() || m.after > group.ballots) continue;
    if (known.peers.Attached(m.peer) || known.peers.Draining(m.peer)) continue;
    if (!known.peers.CohortBegun(group.group.run, m.peer, m.cohort)) continue;
    return "waiting for " + ToString(m.peer) + " to come back: its cohort " + m.cohort +
           " is admitted in another group, " + ToString(m.member) + " is not yet";
  }
  return "";
}

std::string WaitingForVotes(const Known& known) {
  const Ballot& ballot = known.boundary.ballot;
  const uint32_t pending = CountPending(known.epochs.record);
  if (ballot.voted().empty() && pending == 0) return "";
  const std::vector<MemberId> missing = ballot.Missing();
  std::string text = "waiting for " + std::to_string(missing.size()) + " of " +
                     std::to_string(ballot.electorate().size()) +
                     " votes: " + List(missing, " ", kNamesShownMax);
  if (pending > 0) text += "; pending: " + std::to_string(pending);
  return text;
}

Decision DecideInPreparation(const Preparation& open, const Known& known) {
  Decision decision;
  if (open.changed.empty()) {
    decision.why = WaitingForAnswers(open, known.peers);
    if (decision.why.empty()) decision.why = WaitingForGrace(open, known.reports);
    decision.act = decision.why.empty() ? Act::kCommit : Act::kWait;
    return decision;
  }
  const GroupRecord& group = known.epochs.record;
  const bool admitted = AnyAdmitted(group);
  decision.joiners = open.joiners;
  decision.raised = open.raised;
  // Without admitted members nobody votes, so newcomers that have come since are admitted, too.
  if (!admitted) decision.joiners = known.newcomers.Founders(known.epochs, known.peers);
  decision.freeze =
      admitted && (open.freeze || AnyDeparts(group) || !known.epochs.must_freeze.empty());
  decision.reorder = open.reorders && !decision.freeze && !known.better_ring.empty();
  if (known.boundary.ballot.electorate().empty() && decision.joiners.empty()) {
    decision.act = admitted ? Act::kCommitEmpty : Act::kAbort;
  } else if (decision.freeze || decision.Changes()) {
    decision.act = Act::kPrepare;
  } else {
    decision.act = Act::kAbort;
  }
  return decision;
}

Decision DecideIdle(const Known& known) {
  Decision decision;
  const GroupRecord& group = known.epochs.record;
  const bool admitted = AnyAdmitted(group);
  if (admitted && known.boundary.ballot.electorate().empty()) {
    decision.act = Act::kCommitEmpty;
    return decision;
  }
  if (admitted && (AnyDeparts(group) || !known.epochs.must_freeze.empty())) {
    decision.act = Act::kPrepare;
    decision.freeze = true;
    return decision;
  }
  if (admitted && !known.boundary.ballot.Decided()) {
    decision.why = WaitingForVotes(known);
    return decision;
  }
  decision.why = WaitingForCohort(known);
  if (!decision.why.empty()) return decision;
  if (!known.boundary.admission_tried) {
    decision.joiners = admitted ? known.newcomers.Admissible(known.epochs, known.peers)
                                : known.newcomers.Founders(known.epochs, known.peers);
  }
  if (admitted) decision.raised = known.boundary.ready;
  // A better ring gets an epoch of its own, and only if all peers are attached, so that the members
  // do not wait long for it.
  decision.reorder = !decision.Changes() && !known.better_ring.empty() &&
                     std::all_of(known.better_ring.begin(), known.better_ring.end(),
                                 [&known](PeerId peer) { return known.peers.Attached(peer); });
  if (decision.Changes()) {
    decision.act = Act::kPrepare;
  } else if (admitted) {
    decision.act = Act::kAnswerVotes;
  } else if (AssemblySize(group) > 0) {
    decision.why = "waiting for more members: " + known.assembly.Text(known.epochs, known.peers);
  } else if (CountPending(group) > 0) {
    decision.why =
        "waiting for a pending member whose peer is attached and "
        "not draining, and whose cohort, "
        "if it has one, is complete";
  }
  return decision;
}

}  // namespace

Decision Decide(const Known& known) {
  return known.epochs.preparation ? DecideInPreparation(*known.epochs.preparation, known)
                                  : DecideIdle(known);
}

Preparation PreparationFor(const Decision& decision, const std::string& gain,
                           const EpochState& epochs, Tick now) {
  const GroupRecord& group = epochs.record;
  Preparation next;
  next.epoch = Epoch(group.highest.value() + 1);
  next.freeze = decision.freeze;
  next.survivors = Survivors(group);
  next.joiners = decision.joiners;
  next.raised = decision.raised;
  next.reorders = decision.reorder;
  next.begun = now;
  next.cause = "joined=" + List(next.joiners, ",", kNamesShownMax) +
               " left=" + List(IdsOf(Departing(group)), ",", kNamesShownMax);
  if (!next.raised.empty()) next.cause += " ready=" + List(next.raised, ",", kNamesShownMax);
  if (next.reorders) next.cause += gain;
  if (const std::optional<Preparation>& open = epochs.preparation) {
    next.begun = open->begun;
    next.rebuilds = open->rebuilds;
    next.widened = open->widened;
    next.cause += " instead of epoch " + ToString(open->epoch) + ": " + open->changed;
  } else if (!epochs.must_freeze.empty()) {
    next.cause += " because " + epochs.must_freeze;
  }
  next.cause = Clean(std::move(next.cause));
  for (PeerId peer : PeersOf(group, next.survivors)) next.answers[peer];
  for (PeerId peer : PeersOf(group, next.joiners)) next.answers[peer];
  return next;
}

}  // namespace longhaul::coordinator
