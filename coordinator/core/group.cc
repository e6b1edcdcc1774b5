#include "coordinator/core/group.h"

#include <algorithm>

#include "base/check.h"
#include "coordinator/core/text.h"

namespace longhaul::coordinator {
namespace {

using control::Removal;

const char* RemovalNotice(Removal why, bool pending) {
  switch (why) {
    case Removal::kLeft:
      return "leave";
    case Removal::kEvicted:
      return "evict";
    case Removal::kUnreachable:
      return pending ? "refuse" : "evict";
    case Removal::kDied:
    case Removal::kUnknown:
      break;
  }
  return "death";
}

}  // namespace

Group::Group(GroupRecord record, std::string run_secret, const CoreConfig& config)
    : run_secret_(std::move(run_secret)),
      detect_ms_(config.detect_ms),
      incarnation_(config.incarnation),
      epochs_{std::move(record)},
      boundary_(Boundary::Of(epochs_.record)),
      reports_(config.detect_ms),
      newcomers_(config.detect_ms),
      ring_choice_(config.ring_interval_ms) {
  const GroupRecord& group = epochs_.record;
  epochs_.issued = group.highest;
  for (const BlockedRecord& blocked : group.blocked) reports_.Restore(blocked.pair);
  // Before the restart the coordinator froze ops and did not commit. The peers wait for a commit.
  if (group.last_freeze > group.committed && AnyAdmitted(group)) {
    epochs_.must_freeze = "the coordinator restarted in epoch " + ToString(group.last_freeze) +
                          ", which was prepared and froze ops";
  }
}

// ------------------------------------------------------------------------------
// input

void Group::Attach(const PeerRecord& peer, const control::GroupState& state, bool anew,
                   const GroupStep& step) {
  GroupRecord& group = epochs_.record;
  // The cause that blocked the peer's links may be gone, so they are tried again.
  if (anew) reports_.TryAgain(peer.peer);
  for (PeerRecord& known : group.peers) {
    if (known.peer != peer.peer) continue;
    if (known.endpoints != peer.endpoints) newcomers_.Forget(peer.peer);
    known = peer;
  }
  // A commit is durable before any peer hears of it. So if the peer knows a newer epoch, the store
  // went back in time. The newer epoch cannot be restored here, so the peer's members are removed.
  // The epoch numbers that the peer knows are not used again.
  const bool store_is_behind = state.committed > group.committed;
  const Epoch newest = std::max(state.committed, state.prepared);
  const bool forgotten =
      newest > epochs_.issued && MayBeForgotten(newest.value(), epochs_.issued.value());
  if (forgotten) group.highest = std::max(group.highest, newest);
  const bool knows_group = state.committed || !state.members.empty();
  if (knows_group && epochs_.InForce(peer.peer) && state.committed < group.committed) {
    step.Send(peer.peer, epochs_.CommitFor(peer.peer));
  }
  const std::set<MemberId> named(state.members.begin(), state.members.end());
  std::set<MemberId> known;
  for (const MemberRecord& member : group.members) {
    if (member.peer == peer.peer) known.insert(member.member);
  }
  for (MemberId member : named) {
    if (!known.contains(member)) SendUnknown(peer.peer, member, step);
  }
  for (MemberId member : known) {
    if (store_is_behind) {
      Remove(member, Removal::kUnknown,
             "the coordinator's store is older than epoch " + ToString(state.committed) +
                 " of this peer: join again",
             step.Fault("restart", "coordinator"), step);
    } else if (!named.contains(member)) {
      Remove(member, Removal::kDied, "its peer came back without it",
             step.Fault("trainer_died", ToString(peer.peer)), step);
    }
  }
  if (!store_is_behind && HasPeer(group, peer.peer)) {
    epochs_.Reconcile(peer.peer, state, forgotten, step);
  }
  // If the preparation has changed, Advance() replaces it.
  const std::optional<Preparation>& open = epochs_.preparation;
  if (open && open->changed.empty() && open->answers.contains(peer.peer)) {
    SendPrepare(peer.peer, step);
  }
  if (epochs_.InForce(peer.peer)) {
    step.Send(peer.peer, control::PendingCount{group.group, newcomers_.CountComing(group)});
    agreed_for_.insert(peer.peer);
  }
}

void Group::Join(const PeerRecord& peer, const control::Join& join, MemberId member,
                 const GroupStep& step) {
  GroupRecord& group = epochs_.record;
  if (!HasPeer(group, peer.peer)) group.peers.push_back(peer);
  MemberRecord record;
  record.member = member;
  record.peer = peer.peer;
  record.request = join.request;
  record.name = join.name;
  record.cohort = join.wish.cohort;
  record.cohort_size = join.wish.cohort_size;
  if (!join.wish.cohort.empty()) record.after = kCohortIncomplete;
  record.step_deadline_ms = join.wish.step_deadline_ms;
  if (join.wish.background) record.background_until = control::kInBackground;
  record.members = join.wish.members;
  record.named = join.wish.named;
  group.members.push_back(record);
  assembly_.Join(join.name);
  step.Send(peer.peer, PendingOf(member, step.peers));
  epochs_.Note("join", member, peer.peer,
               "member pending member=" + ToString(member) + " peer=" + ToString(peer.peer) +
                   LogField("name", Clean(join.name)) +
                   (join.wish.cohort.empty() ? "" : LogField("cohort", Clean(join.wish.cohort))) +
                   (join.wish.background ? " mode=background" : "") +
                   (join.wish.members > 0 ? " members=" + std::to_string(join.wish.members) : ""),
               step);
}

Violation Group::Take(PeerId peer, const control::Leave& leave, const GroupStep& step) {
  const MemberRecord* member = epochs_.Find(leave.member);
  if (member == nullptr || member->peer != peer) {
    step.Send(peer, control::Removed{record().group, leave.member, Removal::kLeft,
                                     "it is no member (any more)"});
    return std::nullopt;
  }
  Remove(leave.member, leave.died ? Removal::kDied : Removal::kLeft, Clean(leave.reason),
         step.Fault(leave.died ? "trainer_died" : "leave", ToString(peer)), step);
  return std::nullopt;
}

Violation Group::Take(PeerId peer, const control::Vote& vote, const GroupStep& step) {
  MemberRecord* member = epochs_.Find(vote.member);
  if (member == nullptr || member->peer != peer) {
    SendUnknown(peer, vote.member, step);
    return std::nullopt;
  }
  if (vote.number == 0) return "vote of " + ToString(vote.member) + " has no number";
  if (!IsAdmitted(*member)) return "vote of " + ToString(vote.member) + ", which is not admitted";
  if (vote.sync && !vote.ready && InBackground(*member)) {
    return "offer of " + ToString(vote.member) + ", which is in the background";
  }
  if (member->departs) return std::nullopt;
  const GroupKey& group = record().group;
  if (vote.number <= member->votes) {
    // The epoch of the boundary, not that of now: all members are told the same world. A store of
    // an older release does not know it.
    const Epoch epoch = record().stepped ? record().stepped : record().committed;
    step.Send(peer, control::VoteResult{group, vote.member, vote.number, epoch});
    if (vote.sync) return Take(peer, control::SyncVote{group, vote.member, *vote.sync}, step);
    return std::nullopt;
  }
  // This changes `votes` only if the store lost its last transactions, and with them earlier votes.
  member->votes = vote.number - 1;
  if (vote.sync) sync_.Hold(vote.member, *vote.sync);
  boundary_.Vote(vote.member, vote.ready && InBackground(*member), step.now);
  return std::nullopt;
}

Violation Group::Take(PeerId peer, const control::SyncVote& vote, const GroupStep& step) {
  const MemberRecord* member = epochs_.Find(vote.member);
  if (member == nullptr || member->peer != peer) {
    SendUnknown(peer, vote.member, step);
    return std::nullopt;
  }
  if (!IsAdmitted(*member)) return "sync of " + ToString(vote.member) + ", which is not admitted";
  if (InBackground(*member)) {
    return "offer of " + ToString(vote.member) + ", which is in the background";
  }
  if (member->departs) return std::nullopt;
  SyncOutput sync;
  sync_.Offer(vote.member, vote.offer, record(), step.now, &sync);
  Emit(std::move(sync), step);
  return std::nullopt;
}

Violation Group::Take(PeerId peer, const control::FetchDone& done, const GroupStep& step) {
  const MemberRecord* member = epochs_.Find(done.member);
  if (member == nullptr || member->peer != peer) return std::nullopt;  // stale
  SyncOutput sync;
  sync_.FetchDone(done, &sync);
  Emit(std::move(sync), step);
  return std::nullopt;
}

Violation Group::Take(PeerId peer, const control::EpochReady& ready, const GroupStep&) {
  if (ready.epoch > record().highest) {
    return "ready for epoch " + ToString(ready.epoch) + ", which was never prepared";
  }
  if (epochs_.preparation && NoteReady(peer, ready, &*epochs_.preparation)) {
    reports_.Absolve(peer, ready.epoch);
  }
  return std::nullopt;
}

Violation Group::Take(PeerId peer, const control::EpochFailed& failed, const GroupStep&) {
  if (failed.epoch > record().highest) {
    return "failure of epoch " + ToString(failed.epoch) + ", which was never prepared";
  }
  return epochs_.preparation ? NoteFailed(peer, failed, &*epochs_.preparation) : std::nullopt;
}

Violation Group::Take(PeerId peer, const control::LinkLost& lost, const GroupStep& step) {
  return Links(step).Lost(peer, lost);
}

Violation Group::Take(PeerId peer, const control::PeerTried& tried, const GroupStep&) {
  newcomers_.Answer(peer, tried);
  return std::nullopt;
}

Violation Group::Take(PeerId peer, const control::CancelOp& cancel, const GroupStep& step) {
  if (cancel.after > record().highest) {
    return "cancelled an op after epoch " + ToString(cancel.after) + ", which was never prepared";
  }
  const MemberRecord* const member = epochs_.Find(cancel.member);
  // The peer has reported its ops for a newer freeze, or will do so. It asks again if need be.
  if (cancel.after < record().last_freeze || member == nullptr || member->peer != peer ||
      !IsAdmitted(*member)) {
    return std::nullopt;
  }
  const std::string text = Clean(cancel.what);
  epochs_.Note("cancel", cancel.member, peer,
               "op cancelled member=" + ToString(cancel.member) + LogField("why", text), step);
  epochs_.AskForFreeze(text, step.Fault("cancel", ToString(peer)));
  return std::nullopt;
}

Violation Group::Take(PeerId peer, const control::Dispute& dispute, const GroupStep& step) {
  if (dispute.attempt > record().highest) {
    return "disputed a verdict of attempt " + ToString(dispute.attempt) +
           ", which was never prepared";
  }
  const auto victim_of = [&](const MissingLinks& pairs) { return Links(step).VictimOf(pairs); };
  const auto barred = disputes_.Take(peer, dispute, victim_of, &epochs_, step);
  if (!barred) return std::nullopt;
  if (record().barred.size() < kBarredMax) epochs_.record.barred.push_back(barred->peer);
  RemovePeer(barred->peer, Removal::kEvicted,
             barred->reason + "; this peerd is not admitted to the group again",
             step.Fault("dispute", ToString(peer), 0, barred->peer), step);
  return std::nullopt;
}

void Group::Evict(MemberId member, const std::string& reason, const GroupStep& step) {
  if (epochs_.Find(member) == nullptr) return;
  Remove(member, Removal::kEvicted, Clean(reason), step.Fault("evict", "operator"), step);
}

void Group::PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms,
                     const GroupStep& step) {
  FaultReport fault =
      step.Fault(silent_ms == 0 ? "peer_died" : "silence", "coordinator", silent_ms);
  // If a peer has reported that it lost its link to the dead peer, that report counts as the fault.
  for (const auto& [link, loss] : reports_.losses()) {
    if (link.second == peer && loss.fault.since <= fault.since) fault = loss.fault;
  }
  RemovePeer(peer, Removal::kDied, reason, fault, step);
}

void Group::RemoveCohort(PeerId peer, const std::string& cohort, const std::string& reason,
                         const GroupStep& step) {
  std::vector<MemberId> members;
  for (const MemberRecord* member : Cohort(peer, cohort)) members.push_back(member->member);
  for (MemberId member : members) {
    Remove(member, Removal::kEvicted, Clean(reason), step.Fault("cohort", ToString(peer)), step);
  }
}

void Group::AdmitCohortAfter(PeerId peer, const std::string& cohort, uint64_t ballot) {
  for (MemberRecord& member : epochs_.record.members) {
    if (member.peer == peer && member.cohort == cohort && !IsAdmitted(member)) {
      member.after = ballot;
    }
  }
}

bool Group::OrderFallsDue(Tick now) {
  return ring_choice_.FallsDue(now, Ring().size(), epochs_.preparation.has_value());
}

void Group::RingFound(const std::vector<PeerId>& ring, Epoch asked_in, const RingScore& score,
                      const RingScore& present, const GroupStep& step) {
  if (asked_in != record().committed || epochs_.preparation || !FitsRing(ring)) {
    return LinkMeasured(step.now);
  }
  const std::string found = ring_choice_.Found(ring, Ring(), score, present, CostNow(step.peers));
  if (!found.empty()) epochs_.Note("ring", MemberId{}, PeerId{}, found, step);
}

control::LinkCost Group::CostNow(const PeerDirectory& peers) const {
  return peers.CostOf(Ring(), Blocked(), ring_choice_.NewShares(peers.Now()));
}

// Whether `ring` has the peers of the present ring, in an order that avoids blocked pairs.
bool Group::FitsRing(const std::vector<PeerId>& ring) const {
  const std::vector<PeerId> present = Ring();
  return ring.size() == present.size() &&
         std::is_permutation(ring.begin(), ring.end(), present.begin()) &&
         control::RingAvoiding(ring, BlockedAmong(record(), ring)) == ring;
}

// Gives up the better ring. No peer is removed for it.
void Group::KeepRing(const std::string& reason, const GroupStep& step) {
  ring_choice_.GiveUp(step.now);
  epochs_.MarkChanged(reason);
  epochs_.Note("ring", MemberId{}, PeerId{}, "ring kept" + LogField("reason", Clean(reason)), step);
}

void Group::OnGraceOver(const GroupStep& step) {
  if (ring_choice_.TellingFallsDue(step.now, Ring().size(), epochs_.preparation.has_value())) {
    ring_choice_.Compare(Ring(), CostNow(step.peers));
  }
  Links(step).OnGraceOver();
}

void Group::OnSilence(const GroupStep& step) {
  const auto evict_late = [&](const std::string& what, const auto& due) {
    std::vector<MemberRecord> late;
    for (const MemberRecord& member : record().members) {
      if (due(member) <= step.now) late.push_back(member);
    }
    for (const MemberRecord& member : late) {
      const uint32_t ms = member.step_deadline_ms;
      Remove(member.member, Removal::kEvicted,
             what + " within " + std::to_string(ms) + " ms of the first",
             step.Fault("step_deadline", "coordinator", ms), step);
    }
  };
  evict_late("late at the step boundary: no vote",
             [this](const MemberRecord& m) { return VoteDue(m, epochs_, boundary_, sync_); });
  evict_late("late for the sync: no offer",
             [this](const MemberRecord& m) { return OfferDue(m, epochs_, sync_); });
  if (!epochs_.preparation) return;
  const std::vector<PeerId> silent = Silent(*epochs_.preparation, step.now);
  if (!silent.empty() && epochs_.preparation->reorders) {
    return KeepRing(ToString(silent.front()) + " did not answer in time", step);
  }
  const auto ms = static_cast<uint32_t>(kAnswerDetects) * detect_ms_;
  for (PeerId peer : silent) {
    RemovePeer(peer, Removal::kUnreachable,
               "silent: " + ToString(peer) + " did not answer the preparation of epoch " +
                   ToString(epochs_.preparation->epoch) + " within " + std::to_string(ms) + " ms",
               step.Fault("silence", "coordinator", ms), step);
  }
}

void Group::PostponeSilence(int64_t us) {
  boundary_.Postpone(us);
  sync_.Postpone(us);
  if (!epochs_.preparation) return;
  for (auto& [peer, answer] : epochs_.preparation->answers) {
    if (answer.due != kNever) answer.due = answer.due + us;
  }
}

void Group::Advance(const GroupStep& step) {
  GroupRecord& group = epochs_.record;
  reports_.Start(step.now);
  for (int round = 0;; ++round) {
    LH_CHECK(round < 16) << "group " << ToString(group.group) << " does not come to rest";
    ResolveUnreachable(step);
    TryNewcomers(step);
    // The group has other peers by now, or two neighbours of the better ring are blocked.
    if (!Better().empty() && !FitsRing(Better())) ring_choice_.Drop();
    const Decision decision = DecideNow(step.peers);
    if (decision.act == Decision::Act::kWait) break;
    Apply(decision, step);
  }
  SyncOutput sync;
  const std::optional<StateRecord> before = group.state;
  sync_.Advance(Counting(group), boundary_.ballot.voted(), &group, step.now, &sync);
  Emit(std::move(sync), step);
  if (group.state != before) agreed_for_.merge(BackgroundPeers(group));
  SendAgreed(step);
  if (newcomers_.CountComing(group) != pending_told_) SendPendingCount(step);
  assembly_.Tell(epochs_, step);
}

// Waits for the answers of all peers, because the first ones do not show which end of a pair is the
// unreachable one. Exception: a preparation that only orders the ring is given up at the first
// failure.
void Group::ResolveUnreachable(const GroupStep& step) {
  const std::optional<Preparation>& open = epochs_.preparation;
  if (!open || !open->changed.empty()) return;
  bool all = true;
  MissingLinks missing;
  for (const auto& [peer, answer] : open->answers) {
    all = all && answer.answered();
    for (const auto& [other, reason] : answer.unreachable) {
      if (open->reorders) return KeepRing(Unreached(peer, other, reason), step);
      missing.emplace(LinkEnds(peer, other), Unreached(peer, other, reason));
    }
  }
  if (all) Links(step).GoAround(std::move(missing));
}

void Group::TryNewcomers(const GroupStep& step) {
  for (const Trials::Ended& trial : newcomers_.End(epochs_, step.now)) {
    if (trial.reached) {
      Links(step).BlockTried(trial);
    } else if (const auto refusal = newcomers_.RefusalAfter(trial, epochs_, step.now)) {
      RemovePeer(trial.newcomer, Removal::kUnreachable, *refusal,
                 step.Fault("unreachable", ToString(trial.errors.begin()->first)), step);
    }
  }
  newcomers_.Try(epochs_, Triers(epochs_, step.peers, reports_.heard_of_late_us()), step);
}

LinkRepair Group::Links(const GroupStep& step) {
  const auto remove = [this, &step](PeerId peer, const std::string& reason, PeerId reporter) {
    const std::string told =
        epochs_.Staying().contains(peer)
            ? Clean(reason)
            : newcomers_.Refusal(epochs_.PeerOf(peer), reason, /*held=*/true, step.now);
    RemovePeer(peer, Removal::kUnreachable, told, step.Fault("unreachable", ToString(reporter)),
               step);
  };
  const auto waiting = [this, &step] { return newcomers_.Waiting(epochs_, step.peers); };
  return {&epochs_, &reports_, step, {remove, waiting}};
}

// ------------------------------------------------------------------------------
// messages

void Group::Emit(SyncOutput sync, const GroupStep& step) const {
  for (control::SyncResult& result : sync.results) {
    result.group = record().group;
    step.Send(epochs_.Find(result.member)->peer, std::move(result));
  }
  for (EventRecord& notice : sync.notices) {
    notice.group = record().group;
    notice.epoch = record().committed;
    if (const MemberRecord* member = epochs_.Find(notice.member)) notice.peer = member->peer;
    step.out->notices.push_back(std::move(notice));
  }
}

void Group::SendPendingCount(const GroupStep& step) {
  pending_told_ = newcomers_.CountComing(record());
  for (PeerId peer : AdmittedPeers(record())) {
    step.Send(peer, control::PendingCount{record().group, pending_told_});
  }
}

void Group::SendAgreed(const GroupStep& step) {
  const std::set<PeerId> peers = std::exchange(agreed_for_, {});
  const std::optional<StateRecord>& state = record().state;
  if (peers.empty() || !state) return;
  for (const PeerId peer : BackgroundPeers(record())) {
    if (!peers.contains(peer)) continue;
    step.Send(peer,
              control::StateAgreed{record().group, state->revision, state->manifest, state->state});
  }
}

// ------------------------------------------------------------------------------
// removing

void Group::Remove(MemberId id, Removal why, const std::string& reason, const FaultReport& fault,
                   const GroupStep& step) {
  GroupRecord& group = epochs_.record;
  std::optional<Preparation>& open = epochs_.preparation;
  const MemberRecord member = *epochs_.Find(id);
  if (member.departs) return;
  const bool pending = !IsAdmitted(member);
  if (!member.cohort.empty()) step.out->cohort_losses.push_back({member, reason});
  former_.Add(id, why, reason, fault.detector, step.now);
  if (!pending) {
    epochs_.Find(id)->departs = Departure{why, reason};
    epochs_.NoteFault(fault);
    boundary_.Leave(id);
    if (open) open->raised.erase(id);
    sync_.Leave(id);
  } else {
    assembly_.Leave(member, epochs_, why == Removal::kLeft ? "it gave up" : reason);
    std::erase_if(group.members, [id](const MemberRecord& m) { return m.member == id; });
    if (CountMembers(group, member.peer) == 0) {
      std::erase_if(group.peers, [&](const PeerRecord& p) { return p.peer == member.peer; });
      ForgetStrangers();
    }
    step.Send(member.peer, control::Removed{group.group, id, why, reason});
  }
  if (open && (!pending || open->joiners.erase(id) > 0)) {
    epochs_.MarkChanged(ToString(id) + " " + NameOf(why));
  }
  epochs_
      .Note(RemovalNotice(why, pending), id, member.peer,
            "member removed member=" + ToString(id) + " peer=" + ToString(member.peer) +
                " why=" + NameOf(why) + LogField("reason", reason),
            step)
      .cause = fault.cause;
}

void Group::RemovePeer(PeerId peer, Removal why, const std::string& reason,
                       const FaultReport& fault, const GroupStep& step) {
  std::vector<MemberId> members;
  for (const MemberRecord& member : record().members) {
    if (member.peer == peer) members.push_back(member.member);
  }
  for (MemberId member : members) Remove(member, why, reason, fault, step);
}

void Group::ForgetStrangers() {
  GroupRecord& group = epochs_.record;
  ForgetBlockedOfStrangers(&group);
  const auto stranger = [&group](PeerId peer) { return !HasPeer(group, peer); };
  reports_.ForgetReportsOf(stranger);
  disputes_.ForgetIf(stranger);
  newcomers_.ForgetStrangers(group);
  reports_.ForgetPairsOf(stranger, [&group](const control::BlockedPair& pair) {
    return std::any_of(group.blocked.begin(), group.blocked.end(), [&](const BlockedRecord& b) {
      return b.pair.a == pair.a && b.pair.b == pair.b;
    });
  });
}

// ------------------------------------------------------------------------------
// view

MemberId Group::FindRequest(PeerId peer, uint64_t request) const {
  for (const MemberRecord& member : record().members) {
    if (member.peer == peer && member.request == request) return member.member;
  }
  return MemberId{};
}

std::string Group::ObjectionTo(PeerId peer, const control::Join& join) const {
  const std::vector<PeerId>& barred = record().barred;
  if (std::find(barred.begin(), barred.end(), peer) != barred.end()) {
    return "this peerd told members of the group different things (lhctl events, kind dispute); if "
           "its host is to come back, start its peerd again";
  }
  const uint32_t size = AssemblySize(record());
  if (size == 0 || join.wish.members == 0 || join.wish.members == size) return "";
  return "the join waits for " + std::to_string(join.wish.members) +
         " members, and those that have come wait for " + std::to_string(size) +
         ": give all the same number";
}

std::vector<const MemberRecord*> Group::Cohort(PeerId peer, const std::string& cohort) const {
  std::vector<const MemberRecord*> members;
  for (const MemberRecord& m : record().members) {
    if (m.peer == peer && m.cohort == cohort && !m.departs) members.push_back(&m);
  }
  return members;
}

uint64_t Group::NewestBallot() const {
  return record().ballots + (boundary_.ballot.voted().empty() ? 0 : 1);
}

bool Group::PassedOver(const MemberRecord& member) const {
  return !IsAdmitted(member) && member.after != kCohortIncomplete && !member.cohort.empty() &&
         AnyAdmitted(record()) && record().ballots > member.after;
}

bool Group::AdmittedOrPrepared(const MemberRecord& member) const {
  return IsAdmitted(member) ||
         (epochs_.preparation && epochs_.preparation->joiners.contains(member.member));
}

Tick Group::SilenceDue() const {
  Tick next = kNever;
  for (const MemberRecord& member : record().members) {
    next = std::min(
        {next, VoteDue(member, epochs_, boundary_, sync_), OfferDue(member, epochs_, sync_)});
  }
  return epochs_.preparation ? std::min(next, NextDeadline(*epochs_.preparation)) : next;
}

GroupView Group::View(const PeerDirectory& peers) const {
  GroupView view;
  view.group = record().group;
  view.committed = record().committed;
  if (epochs_.preparation) view.preparing = epochs_.preparation->epoch;
  const auto wait = [&view](const std::string& why) {
    if (!why.empty()) view.waiting_for += (view.waiting_for.empty() ? "" : "; ") + why;
  };
  wait(DecideNow(peers).why);
  wait(sync_.WaitingFor(Counting(record())));
  if (const std::vector<PeerId> pausing = newcomers_.Pausing(epochs_, peers); !pausing.empty()) {
    wait("not tried again yet, since members could not reach it: " +
         List(pausing, " ", kNamesShownMax));
  }
  view.state = record().state;
  view.first_vote = boundary_.first_vote;
  view.last_step = last_step_;
  for (const MemberRecord& m : record().members) {
    view.members.push_back({m.member, m.peer, m.name, m.joined, boundary_.ballot.HasVoted(m.member),
                            m.cohort, std::nullopt, InBackground(m)});
  }
  view.blocked = record().blocked;
  view.fault_epoch = fault_epoch_;
  view.fault = last_fault_;
  view.ring_epoch = ring_choice_.ordered_epoch();
  view.ring_gain = ring_choice_.ordered_gain();
  return view;
}

void Group::CheckInvariants(const PeerDirectory& peers) const {
  const GroupRecord& group = record();
  const std::string name = ToString(group.group);
  coordinator::CheckInvariants(group);
  LH_CHECK(epochs_.issued <= group.highest) << name;
  for (const BlockedRecord& blocked : group.blocked) {
    LH_CHECK(reports_.Knows(blocked.pair)) << name;
  }
  LH_CHECK(reports_.CountBlocked() == group.blocked.size()) << name;
  const Ballot& ballot = boundary_.ballot;
  LH_CHECK(ballot.electorate() == Survivors(group))
      << name << " electorate " << List(ballot.electorate());
  for (const MemberId member : boundary_.ready) {
    LH_CHECK(ballot.HasVoted(member) && InBackground(*epochs_.Find(member))) << name;
  }
  sync_.CheckInvariants(Survivors(group), Counting(group));
  LH_CHECK(agreed_for_.empty()) << name << " owes somebody what was agreed on";
  LH_CHECK(Better().empty() || FitsRing(Better())) << name << " has a ring of others";
  LH_CHECK(DecideNow(peers).act == Decision::Act::kWait)
      << name << " has something to do and does not do it";
  LH_CHECK(epochs_.must_freeze.empty()) << name << " forgot " << epochs_.must_freeze;
  if (!epochs_.preparation) {
    LH_CHECK(!AnyDeparts(group)) << name << " forgot a change";
    LH_CHECK(!epochs_.fault) << name << " forgot " << epochs_.fault->cause;
    const std::string fault = control::BlockedFault(Ring(), Blocked());
    LH_CHECK(fault.empty()) << name << " " << fault;
    LH_CHECK(group.last_freeze <= group.committed) << name << " left ops frozen";
    return;
  }
  const Preparation& open = *epochs_.preparation;
  coordinator::CheckInvariants(open, group, peers);
  LH_CHECK(open.freeze == epochs_.fault.has_value()) << name << " freezes without a cause";
  LH_CHECK(!open.reorders || open.ring == Better()) << name << " orders the ring otherwise";
  LH_CHECK(std::includes(boundary_.ready.begin(), boundary_.ready.end(), open.raised.begin(),
                         open.raised.end()))
      << name;
}

}  // namespace longhaul::coordinator
