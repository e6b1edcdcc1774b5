#include <algorithm>

#include "base/check.h"
#include "coordinator/core/group.h"
#include "coordinator/core/judge.h"
#include "coordinator/core/text.h"
#include "coordinator/core/token.h"

// The part of Group that decides which epoch is next, prepares it and commits it.
namespace longhaul::coordinator {
// ------------------------------------------------------------------------------
// deciding

Group::Decision Group::Decide() const {
  return preparation_ ? DecideInPreparation() : DecideIdle();
}

Group::Decision Group::DecideInPreparation() const {
  Decision decision;
  if (preparation_->changed.empty()) {
    decision.why = WaitingForAnswers(*preparation_, *directory_);
    if (decision.why.empty()) decision.why = WaitingForGrace();
    decision.act = decision.why.empty() ? Act::kCommit : Act::kWait;
    return decision;
  }
  const bool admitted = AnyAdmitted(record_);
  decision.joiners = preparation_->joiners;
  decision.raised = preparation_->raised;
  // Without admitted members nobody votes, so newcomers that have come since are admitted, too.
  if (!admitted) decision.joiners = Founders();
  decision.freeze = admitted && (preparation_->freeze || AnyDeparts(record_) || !repair_.empty());
  decision.reorder = preparation_->reorders && !decision.freeze && !Better().empty();
  if (ballot_.electorate().empty() && decision.joiners.empty()) {
    decision.act = admitted ? Act::kCommitEmpty : Act::kAbort;
  } else if (decision.freeze || decision.Changes()) {
    decision.act = Act::kPrepare;
  } else {
    decision.act = Act::kAbort;
  }
  return decision;
}

Group::Decision Group::DecideIdle() const {
  Decision decision;
  const bool admitted = AnyAdmitted(record_);
  if (admitted && ballot_.electorate().empty()) {
    decision.act = Act::kCommitEmpty;
    return decision;
  }
  if (admitted && (AnyDeparts(record_) || !repair_.empty())) {
    decision.act = Act::kPrepare;
    decision.freeze = true;
    return decision;
  }
  if (admitted && !ballot_.Decided()) {
    decision.why = WaitingForVotes();
    return decision;
  }
  decision.why = WaitingForCohort();
  if (!decision.why.empty()) return decision;
  if (!admission_tried_) decision.joiners = admitted ? Admissible() : Founders();
  if (admitted) decision.raised = ready_;
  // A better ring gets an epoch of its own, and only if all peers are attached, so that the members
  // do not wait long for it.
  decision.reorder = !decision.Changes() && !Better().empty() && AllAttached(Better());
  if (decision.Changes()) {
    decision.act = Act::kPrepare;
  } else if (admitted) {
    decision.act = Act::kAnswerVotes;
  } else if (AssemblySize() > 0) {
    decision.why = "waiting for more members: " + AssemblyText();
  } else if (CountPending(record_) > 0) {
    decision.why =
        "waiting for a pending member whose peer is attached and "
        "not draining, and whose cohort, "
        "if it has one, is complete";
  }
  return decision;
}

// Returns what the commit waits for if a link between two peers of the preparation was lost; "":
// nothing. The link may have been lost after its peers were ready. If the epoch were committed now,
// ops would use the broken link and would have to be frozen. Before the commit no op uses it.
std::string Group::WaitingForGrace() const {
  for (const auto& [link, loss] : suspicion_.losses()) {
    const auto [from, to] = link;
    if (!preparation_->answers.contains(from) || !preparation_->answers.contains(to)) continue;
    return "epoch " + ToString(preparation_->epoch) + " waiting for whether " + ToString(to) +
           " is gone: " + LinkText(from, to, loss.reason);
  }
  return "";
}

// Returns what the open ballot waits for if it is to admit a member of a cohort whose peer is not
// attached; "": nothing. If another group has begun to admit the cohort, this group must admit its
// member in the ballot of the same number. The wait is short: the peer attaches again or is dead
// soon.
std::string Group::WaitingForCohort() const {
  if (!AnyAdmitted(record_) || admission_tried_) return "";
  for (const MemberRecord& m : record_.members) {
    if (IsAdmitted(m) || m.cohort.empty() || m.after > record_.ballots) continue;
    if (directory_->Attached(m.peer) || directory_->Draining(m.peer)) continue;
    if (!directory_->CohortBegun(record_.group.run, m.peer, m.cohort)) continue;
    return "waiting for " + ToString(m.peer) + " to come back: its cohort " + m.cohort +
           " is admitted in another group, " + ToString(m.member) + " is not yet";
  }
  return "";
}

std::string Group::WaitingForVotes() const {
  const uint32_t pending = CountPending(record_);
  if (ballot_.voted().empty() && pending == 0) return "";
  const std::vector<MemberId> missing = ballot_.Missing();
  std::string text = "waiting for " + std::to_string(missing.size()) + " of " +
                     std::to_string(ballot_.electorate().size()) +
                     " votes: " + List(missing, " ", kNamesShownMax);
  if (pending > 0) text += "; pending: " + std::to_string(pending);
  return text;
}

// ------------------------------------------------------------------------------
// applying

void Group::Apply(const Decision& decision, Tick now, GroupOutput* out) {
  switch (decision.act) {
    case Act::kWait:
      return;
    case Act::kPrepare:
      return Prepare(decision, now, out);
    case Act::kCommit:
      return Commit(now, out);
    case Act::kCommitEmpty:
      return CommitEmpty(out);
    case Act::kAbort:
      return Abort((preparation_->reorders ? "the ring is kept: " : "its newcomers are gone: ") +
                       preparation_->changed,
                   out);
    case Act::kAnswerVotes:
      return AnswerVotes(out);
  }
}

void Group::Prepare(const Decision& decision, Tick now, GroupOutput* out) {
  std::vector<MemberId> left;
  for (const MemberRecord& member : Departing(record_)) left.push_back(member.member);
  Preparation next;
  next.epoch = Epoch(record_.highest.value() + 1);
  next.id = PreparationId(incarnation_, record_.group, next.epoch);
  next.freeze = decision.freeze;
  next.survivors = Survivors(record_);
  next.joiners = decision.joiners;
  next.raised = decision.raised;
  next.reorders = decision.reorder;
  next.begun = now;
  next.cause = "joined=" + List(next.joiners, ",", kNamesShownMax) +
               " left=" + List(left, ",", kNamesShownMax);
  if (!next.raised.empty()) next.cause += " ready=" + List(next.raised, ",", kNamesShownMax);
  if (next.reorders) {
    next.cause += (Better() == Ring() ? " to tell what links cost " : " for a better ring ") +
                  ring_choice_.gain();
  }
  if (preparation_) {
    next.begun = preparation_->begun;
    next.rebuilds = preparation_->rebuilds;
    next.widened = preparation_->widened;
    next.cause +=
        " instead of epoch " + ToString(preparation_->epoch) + ": " + preparation_->changed;
  } else if (!repair_.empty()) {
    next.cause += " because " + repair_;
  }
  next.cause = Clean(std::move(next.cause));
  for (PeerId peer : PeersOf(record_, next.survivors)) next.answers[peer];
  for (PeerId peer : PeersOf(record_, next.joiners)) next.answers[peer];
  ChooseRing(now, &next);
  const bool same_ring = next.ring == Ring();
  next.cost = directory_->CostOf(next.ring, next.blocked,
                                 same_ring ? ring_choice_.KeptShares(now) : nullptr);
  if (!next.freeze && ChangesWays(next)) {
    next.freeze = true;
    NoteFault(FaultNow("unreachable", "coordinator"));
  }

  issued_ = record_.highest = next.epoch;
  if (!AnyAdmitted(record_)) {
    // The first admission counts as a ballot, although no member votes.
    if (!preparation_) ++record_.ballots;
    for (MemberId joiner : next.joiners) {
      record_.ballots = std::max(record_.ballots, Find(joiner)->after + 1);
    }
  }
  if (next.freeze && !fault_) fault_ = Fault{"restart", "coordinator", 0, now};
  if (!next.survivors.empty() && !next.joiners.empty()) admission_tried_ = true;
  if (next.freeze) {
    record_.last_freeze = next.epoch;
    // The freeze rebuilds links that broke, so their reports are dropped. A link that fell silent
    // would hold up the freeze. So the report of a silence stays until its grace is over, unless
    // the pair is blocked by now. It is dropped if the reporter has all its links before that.
    suspicion_.ForgetLosses([&next](const LostLink& link, const Suspicion::Loss& loss) {
      return loss.fault.detect_ms == 0 || control::IsBlocked(next.blocked, link.first, link.second);
    });
  }
  repair_.clear();
  preparation_ = std::move(next);
  for (const auto& [peer, answer] : preparation_->answers) SendPrepare(peer, now, out);
  Note("prepare", MemberId{}, PeerId{},
       "epoch prepared epoch=" + ToString(preparation_->epoch) + " members=" +
           std::to_string(preparation_->survivors.size() + preparation_->joiners.size()) +
           " freeze=" + (preparation_->freeze ? "1 " : "0 ") + preparation_->cause,
       out);
}

// Sets the ring, the blocked pairs and their relays. A freezing preparation tries the straight
// links of blocked pairs again if their time has come.
void Group::ChooseRing(Tick now, Preparation* preparation) const {
  std::set<PeerId> peers;
  for (const auto& [peer, answer] : preparation->answers) peers.insert(peer);
  const std::vector<PeerId> order = preparation->reorders ? Better() : OrderOf(record_, peers);
  control::BlockedPairs blocked = BlockedAmong(record_, order);
  std::erase_if(blocked, [&](const control::BlockedPair& pair) {
    return preparation->freeze && suspicion_.TryDue(pair, now);
  });
  ChooseRelays(ByAge(record_, peers), suspicion_.failed_relays(), &blocked);
  // No peer can be the relay of these pairs, so their straight links are tried again.
  std::erase_if(blocked, [](const control::BlockedPair& pair) { return !pair.relay; });
  preparation->ring = control::RingAvoiding(order, blocked).value_or(order);
  preparation->blocked = std::move(blocked);
}

// Whether the link of two peers that stay gets another relay, or becomes straight again. Frames
// would be lost with the old link, so ops must be frozen.
bool Group::ChangesWays(const Preparation& next) const {
  const std::set<PeerId> staying = PeersOf(record_, next.survivors);
  const control::BlockedPairs before = BlockedAmong(record_, {staying.begin(), staying.end()});
  const auto differs = [&](const control::BlockedPair& pair) {
    return staying.contains(pair.a) && staying.contains(pair.b) &&
           control::RelayOf(before, pair.a, pair.b) !=
               control::RelayOf(next.blocked, pair.a, pair.b);
  };
  return std::any_of(before.begin(), before.end(), differs) ||
         std::any_of(next.blocked.begin(), next.blocked.end(), differs);
}

void Group::Commit(Tick now, GroupOutput* out) {
  const Preparation done = *std::exchange(preparation_, std::nullopt);
  Reports reports;
  for (const auto& [peer, answer] : done.answers) reports[peer] = answer.ops;
  const std::vector<MemberRecord> removed = Departing(record_);
  const std::set<MemberId> voted = done.AtBoundary() ? ballot_.voted() : std::set<MemberId>{};
  const bool first = !AnyAdmitted(record_);
  const std::vector<PeerId> ring = Ring();
  const std::string subject = fault_ ? SubjectOf(*fault_, removed) : "";

  AdoptEpoch(done, &record_);
  ForgetStrangers();
  ring_choice_.Told(done.cost, now);
  std::string fault_text;
  std::optional<FaultRecord> fault;
  if (done.freeze) {
    // No member could vote during the preparation, so that time does not count for its deadline.
    if (first_vote_ != kNever) first_vote_ = first_vote_ + (now - done.begun);
    sync_.Postpone(now - done.begun);
    fault = FaultRecord{fault_->cause, fault_->detector, fault_->detect_ms,
                        static_cast<uint32_t>((now - fault_->since) / Millis(1)), subject};
    fault_text = " cause=" + fault->cause + " detector=" + fault->detector +
                 " detect_ms=" + std::to_string(fault->detect_ms) +
                 " agree_ms=" + std::to_string(fault->agree_ms);
    fault_epoch_ = record_.committed;
    last_fault_ = *fault;
    fault_.reset();
    record_.fates = Judge(reports);
  }
  if (first) {
    ballot_ = Ballot(Survivors(record_));
    admission_tried_ = false;
  } else if (done.AtBoundary()) {
    CompleteBallot();
  }

  for (const auto& [peer, answer] : done.answers)
    out->messages.emplace_back(peer, MakeCommit(peer));
  for (MemberId member : voted) AnswerVote(member, out);
  std::vector<MemberId> left;
  for (const MemberRecord& member : removed) {
    left.push_back(member.member);
    SendRemoved(member, member.departs->why, member.departs->reason, out);
  }
  if (!done.joiners.empty()) trials_.Restart();
  for (MemberId member : done.joiners) {
    const MemberRecord* joiner = Find(member);
    pauses_.Forget(PeerOf(joiner->peer).endpoints);
    trials_.Forget(joiner->peer);
    Note("admit", member, joiner->peer,
         "member admitted member=" + ToString(member) + " peer=" + ToString(joiner->peer) +
             " epoch=" + ToString(record_.committed),
         out);
  }
  for (MemberId member : done.raised) {
    Note("ready", member, Find(member)->peer,
         "member contributes member=" + ToString(member) + " epoch=" + ToString(record_.committed),
         out);
  }
  if (!done.joiners.empty()) agreed_for_.merge(BackgroundPeers());
  if (done.reorders) ring_choice_.Drop();
  if (done.reorders && Ring() == ring) {
    Note("ring", MemberId{}, PeerId{},
         "link costs told epoch=" + ToString(record_.committed) + " " + CostText(done.cost), out);
  } else if (done.reorders) {
    ring_choice_.Ordered(record_.committed, now);
    Note("ring", MemberId{}, PeerId{},
         "ring ordered anew epoch=" + ToString(record_.committed) +
             " ring=" + List(Ring(), ",", kNamesShownMax) + " " + ring_choice_.ordered_gain(),
         out);
  } else if (Ring() != ring) {
    LinkMeasured(now);
  }
  Note("commit", MemberId{}, PeerId{},
       "epoch committed epoch=" + ToString(record_.committed) +
           " members=" + std::to_string(Admitted(record_).size()) +
           " joined=" + List(done.joiners) + " left=" + List(left) + " ring=" + List(Ring()) +
           " took_ms=" + std::to_string((now - done.begun) / Millis(1)) + fault_text,
       out);
  out->notices.back().fault = std::move(fault);
}

Violation Group::CancelOp(PeerId peer, const control::CancelOp& cancel, GroupOutput* out) {
  if (cancel.after > record_.highest) {
    return "cancelled an op after epoch " + ToString(cancel.after) + ", which was never prepared";
  }
  const MemberRecord* const member = Find(cancel.member);
  // The peer has reported its ops for a newer freeze, or will do so. It cancels again if need be.
  if (cancel.after < record_.last_freeze || member == nullptr || member->peer != peer ||
      !IsAdmitted(*member)) {
    return std::nullopt;
  }
  const std::string text = ToString(cancel.member) + " cancelled " + Clean(cancel.what);
  Note("cancel", cancel.member, peer,
       "op cancelled member=" + ToString(cancel.member) + " op=" + Clean(cancel.what), out);
  AskForFreeze(text, FaultNow("cancel", ToString(peer)));
  return std::nullopt;
}

Violation Group::Dispute(PeerId peer, const control::Dispute& dispute, GroupOutput* out) {
  if (dispute.attempt > record_.highest) {
    return "disputed a verdict of attempt " + ToString(dispute.attempt) +
           ", which was never prepared";
  }
  if (!InForce(peer) || dispute.peer == peer) return std::nullopt;
  // The freeze that answers the first dispute about an op may be under way when a second peer
  // disputes. The two together may prove who lies.
  const bool open =
      dispute.attempt == record_.last_freeze && record_.last_freeze <= record_.committed;
  if (!open && !disputes_.Knows(NameOf(dispute))) return std::nullopt;
  if (!disputes_.Admit(peer, dispute.attempt)) return std::nullopt;
  const auto key_of = [this](PeerId id) { return HasPeer(id) ? PeerOf(id).key : std::string(); };
  const std::string what = Clean(dispute.what);
  if (const std::optional<PeerId> liar = disputes_.Add(peer, dispute, key_of)) {
    Note("dispute", MemberId{}, *liar,
         "peer lies peer=" + ToString(*liar) + " proof=\"signed two READYs of one op\" op=\"" +
             what + "\" reporter=" + ToString(peer),
         out);
    Bar(*liar, "it told two peers different things about " + what + ", and signed both", peer, out);
    return std::nullopt;
  }
  const bool evidence = !dispute.peer && !dispute.statements.empty();
  if (!open || evidence) return std::nullopt;
  if (!dispute.peer) {
    const std::string text = ToString(peer) + " asks for a new attempt: " + what;
    Note("dispute", MemberId{}, peer, text, out);
    AskForFreeze(text, FaultNow("dispute", ToString(peer)));
    return std::nullopt;
  }
  Note("dispute", MemberId{}, peer,
       "verdicts differ peer=" + ToString(peer) + " other=" + ToString(dispute.peer) + " op=\"" +
           what + "\" signed=" + (record_.SignsOps() ? "1" : "0"),
       out);
  if (!record_.sign_ops) {
    record_.sign_ops = true;
    record_.sign_ops_from = Epoch(record_.highest.value() + 1);
  } else if (record_.SignsOps() && disputes_.CountUnproven(peer, dispute)) {
    // Nobody can prove who of the pair lies. The peer in most disputed pairs is removed, then the
    // one that joined last.
    const LostLinks pairs = disputes_.Unproven();
    disputes_.ForgetUnproven();
    Bar(ChooseVictim(RoutesNow(), pairs, record_), pairs.begin()->second, peer, out);
    return std::nullopt;
  }
  AskForFreeze(
      "verdicts of " + ToString(peer) + " and " + ToString(dispute.peer) + " differ about " + what,
      FaultNow("dispute", ToString(peer), 0, dispute.peer));
  return std::nullopt;
}

void Group::Bar(PeerId peer, const std::string& reason, PeerId reporter, GroupOutput* out) {
  if (record_.barred.size() < kBarredMax) record_.barred.push_back(peer);
  RemovePeer(peer, control::Removal::kEvicted,
             reason + "; this peerd is not admitted to the group again",
             FaultNow("dispute", ToString(reporter), 0, peer), out);
}

void Group::CommitEmpty(GroupOutput* out) {
  preparation_.reset();
  const std::vector<MemberRecord> removed = Departing(record_);
  issued_ = record_.highest = Epoch(record_.highest.value() + 1);
  Preparation empty;
  empty.epoch = record_.highest;
  AdoptEpoch(empty, &record_);
  ForgetStrangers();
  ballot_ = Ballot();
  first_vote_ = kNever;
  ready_.clear();
  sync_.Clear();
  record_.state.reset();
  admission_tried_ = false;
  repair_.clear();
  fault_.reset();
  suspicion_.ForgetLosses([](const LostLink&, const Suspicion::Loss&) { return true; });
  std::vector<MemberId> left;
  for (const MemberRecord& member : removed) {
    left.push_back(member.member);
    SendRemoved(member, member.departs->why, member.departs->reason, out);
  }
  Note("commit", MemberId{}, PeerId{},
       "epoch committed epoch=" + ToString(record_.committed) +
           " members=0 joined= left=" + List(left) + " ring= took_ms=0",
       out);
}

void Group::Abort(const std::string& reason, GroupOutput* out) {
  const Preparation given_up = *std::exchange(preparation_, std::nullopt);
  LH_CHECK(!given_up.freeze) << "group " << ToString(record_.group) << " epoch "
                             << ToString(given_up.epoch) << " froze ops and is given up";
  for (const auto& [peer, answer] : given_up.answers) {
    if (!HasPeer(peer)) continue;
    out->messages.emplace_back(peer,
                               control::AbortEpoch{record_.group, given_up.epoch, Clean(reason)});
  }
  Note("abort", MemberId{}, PeerId{},
       "epoch given up epoch=" + ToString(given_up.epoch) + " reason=" + Clean(reason), out);
}

void Group::AnswerVotes(GroupOutput* out) {
  for (MemberId member : ballot_.voted()) AnswerVote(member, out);
  CompleteBallot();
}

void Group::AnswerVote(MemberId member, GroupOutput* out) {
  MemberRecord* voter = Find(member);
  ++voter->votes;
  out->messages.emplace_back(
      voter->peer, control::VoteResult{record_.group, member, voter->votes, record_.committed});
  SyncOutput sync;
  sync_.Release(member, record_, directory_->Now(), &sync);
  Emit(std::move(sync), out);
}

void Group::CompleteBallot() {
  ++record_.ballots;
  last_step_ = directory_->Now();
  ballot_ = Ballot(Survivors(record_));
  first_vote_ = kNever;
  ready_.clear();
  admission_tried_ = false;
}

// ------------------------------------------------------------------------------
// messages

void Group::SendPrepare(PeerId peer, Tick now, GroupOutput* out) {
  if (!directory_->Attached(peer)) return;
  Answer& answer = preparation_->answers.at(peer);
  // The deadline is set once. It does not move if the peer attaches again.
  if (answer.due == kNever) answer.due = now + kAnswerDetects * Millis(detect_ms_);
  const std::string token = EpochToken(run_secret_, record_.group.group, preparation_->epoch);
  out->messages.emplace_back(peer, MessageOf(*preparation_, record_, token));
}

control::CommitEpoch Group::MakeCommit(PeerId peer) const {
  control::CommitEpoch message{record_.group, record_.committed, {}, {}};
  for (const FatesRecord& record : record_.fates) {
    if (record.peer != peer) continue;
    message.fates = record.fates;
    message.missed = record.missed;
  }
  return message;
}

// Makes sure that an epoch that the peer has prepared will end: by a commit, by a preparation with
// a higher number, or by AbortEpoch.
void Group::Reconcile(PeerId peer, const control::GroupState& said, bool forgotten,
                      GroupOutput* out) {
  if (!said.prepared) return;
  const bool in_force = InForce(peer);
  if (preparation_ && preparation_->epoch == said.prepared &&
      preparation_->id == said.preparation) {
    return;  // the peer has the open preparation
  }
  if (in_force && said.prepared <= record_.committed) return;  // CommitEpoch was sent
  // The store does not know the peer's preparation: the store went back in time, and perhaps the
  // number was given out again before this peer attached.
  const bool unknown = forgotten || (preparation_ && preparation_->epoch <= said.prepared);
  const bool replaced = preparation_ && !unknown && (preparation_->freeze || !said.frozen);
  if (replaced) return;
  if (!unknown && !(in_force && said.frozen)) {
    out->messages.emplace_back(
        peer, control::AbortEpoch{record_.group, said.prepared, "it was given up"});
    return;
  }
  const std::string text = ToString(peer) + " has prepared another epoch " +
                           ToString(said.prepared) + " than the store knows";
  MarkChanged(text);
  if (!in_force) return;
  repair_ = text;
  NoteFault(FaultNow("restart", "coordinator"));
}

}  // namespace longhaul::coordinator
