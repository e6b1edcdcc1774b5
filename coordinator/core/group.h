// One group: decides which epoch is next, and when.
//
// Its parts are modules of their own:
//   epoch_state.h               the record, and the next epoch as far as it is known
//   membership.h, preparation.h questions about the two
//   boundary.h, sync_ballot.h   the members at a step boundary; shared state
//   newcomers.h, assembly.h     pending members
//   link_reports.h, accusations.h, link_repair.h, routes.h   links that are lost or missing
//   ring_choice.h               a better ring
//   disputes.h                  ops whose verdicts differ
//   former_members.h            removed members
//   decision.h                  what is next
// group.cc takes inputs and removes members; group_epochs.cc prepares and commits epochs.
//
//   idle --(all votes are in, and a pending member may be admitted)--> preparing
//   idle --(no member is admitted, and a pending one may be)--> preparing
//   idle --(all votes are in, and a member is ready to leave the background)--> preparing
//   idle --(all votes are in, and a better ring or new link costs are known)--> preparing
//   idle --(a removal | a lost link | a cancelled op)--> preparing, with freeze
//   preparing --(every peer is ready)--> committed, idle
//   preparing --(a change)--> preparing the next number, which includes all changes so far
//   preparing --(without freeze; all that it was for is gone)--> idle (AbortEpoch)
//   preparing --(a peer cannot do what the better ring needs)--> idle (AbortEpoch)
//   any --(the last member is removed)--> an empty epoch is committed at once, idle
//
// The methods under "input" note what happened to the group. They send only answers that do not
// depend on a decision. Then Advance() looks at the whole group, decides what is next (decision.h),
// and applies it, until the group can only wait.
//
// Messages are addressed to peers, not to sessions. The owner may drop a message to a peer that is
// not attached, because Attach() repeats what the peer may have missed. Messages depend on
// record(): the owner must make the record durable before it sends them.
//
// Plain value: no clock, no thread. A copy is another group in the same state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/accusations.h"
#include "coordinator/core/assembly.h"
#include "coordinator/core/boundary.h"
#include "coordinator/core/config.h"
#include "coordinator/core/decision.h"
#include "coordinator/core/disputes.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/former_members.h"
#include "coordinator/core/link_repair.h"
#include "coordinator/core/link_reports.h"
#include "coordinator/core/newcomers.h"
#include "coordinator/core/ring_choice.h"
#include "coordinator/core/sync_ballot.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

class Group {
 public:
  Group(GroupRecord record, std::string run_secret, const CoreConfig& config);

  // ---- input

  // The peer has attached. `state`: what its Hello says of this group; empty if it says nothing.
  // `anew`: the peer has had a stream before, since this coordinator started.
  void Attach(const PeerRecord& peer, const control::GroupState& state, bool anew,
              const GroupStep& step);
  // Adds a pending member. The owner has checked the limits and ObjectionTo().
  void Join(const PeerRecord& peer, const control::Join& join, MemberId member,
            const GroupStep& step);
  // A message of a peer about this group. A violation has changed nothing.
  Violation Take(PeerId peer, const control::Leave& leave, const GroupStep& step);
  Violation Take(PeerId peer, const control::Vote& vote, const GroupStep& step);
  Violation Take(PeerId peer, const control::SyncVote& vote, const GroupStep& step);
  Violation Take(PeerId peer, const control::FetchDone& done, const GroupStep& step);
  Violation Take(PeerId peer, const control::EpochReady& ready, const GroupStep& step);
  Violation Take(PeerId peer, const control::EpochFailed& failed, const GroupStep& step);
  Violation Take(PeerId peer, const control::LinkLost& lost, const GroupStep& step);
  Violation Take(PeerId peer, const control::PeerTried& tried, const GroupStep& step);
  // A member cancels an op: the next epoch freezes ops, and decides this one's fate.
  Violation Take(PeerId peer, const control::CancelOp& cancel, const GroupStep& step);
  // A peer's verdict on an op differs from another's: the next epoch freezes ops, and from then on
  // the group signs its READYs. If signatures prove that a peer lies, it is removed.
  Violation Take(PeerId peer, const control::Dispute& dispute, const GroupStep& step);
  void Evict(MemberId member, const std::string& reason, const GroupStep& step);
  // The peer is dead: removes all its members. `silent_ms`: how long it had not been heard; 0: its
  // death did not show by silence.
  void PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms, const GroupStep& step);
  // Removes all members of the cohort, because one of them is gone or was not admitted together
  // with the others.
  void RemoveCohort(PeerId peer, const std::string& cohort, const std::string& reason,
                    const GroupStep& step);
  // The cohort is complete. A ballot with a number above `ballot` admits its members here. If the
  // group has no admitted member, they are admitted at once.
  void AdmitCohortAfter(PeerId peer, const std::string& cohort, uint64_t ballot);
  // The measurement of a link between two peers of the group has changed by more than noise.
  void LinkMeasured(Tick now) { ring_choice_.Measured(now); }
  // Returns true when it is time to start a search for a better ring order. Returns true once for
  // each scheduled search.
  bool OrderFallsDue(Tick now);
  // Takes the result of a search. `asked_in`: the committed epoch when the search began. If the
  // group has changed since, the result is dropped, and another search falls due later.
  void RingFound(const std::vector<PeerId>& ring, Epoch asked_in, const RingScore& score,
                 const RingScore& present, const GroupStep& step);
  // Handles the lost links whose grace is over by now. Plans to tell peers what links cost, if that
  // has changed by much.
  void OnGraceOver(const GroupStep& step);
  // Removes members that missed their step deadline, and peers that did not answer a preparation
  // in time.
  void OnSilence(const GroupStep& step);
  // This coordinator was held up for `us`. Moves all deadlines by that time, because the peers are
  // not at fault.
  void Postpone(int64_t us) {
    reports_.Postpone(us);
    PostponeSilence(us);
  }
  // This coordinator ran, but it heard no peer. Moves only the deadlines of OnSilence().
  void PostponeSilence(int64_t us);
  // Returns the peers that are accused by a report of silence whose delay is over by now. Uses each
  // report only once.
  std::vector<PeerId> NewlyAccused(Tick now) { return reports_.NewlyAccused(now); }

  // Decides and applies until the group can only wait.
  void Advance(const GroupStep& step);

  // ---- view

  const GroupRecord& record() const { return epochs_.record; }
  bool Empty() const { return record().members.empty() && !epochs_.preparation; }
  // Returns the member that a Join of this peer with this request number has made; 0 if there is no
  // such member.
  MemberId FindRequest(PeerId peer, uint64_t request) const;
  // The answer to the Join that has made this pending member.
  control::JoinPending PendingOf(MemberId member, const PeerDirectory& peers) const {
    return assembly_.PendingOf(member, epochs_, peers);
  }
  // Returns why the group cannot take this Join; "": it can.
  std::string ObjectionTo(PeerId peer, const control::Join& join) const;
  // Returns the members of the cohort that do not depart: admitted members by rank, then pending
  // ones.
  std::vector<const MemberRecord*> Cohort(PeerId peer, const std::string& cohort) const;
  // The number of the newest ballot that is completed or has a vote.
  uint64_t NewestBallot() const;
  // Whether the ballot that was to admit this member of a cohort is over, while the member is still
  // pending.
  bool PassedOver(const MemberRecord& member) const;
  // Whether the member is admitted, or the open preparation would admit it.
  bool AdmittedOrPrepared(const MemberRecord& member) const;
  // Whether members have reached the peer's data port, or the peer needs no trial.
  bool Reached(PeerId peer) const { return newcomers_.Reached(peer, record()); }
  Accusations AccusationsNow(const PeerDirectory& peers) const {
    return {epochs_, reports_, peers};
  }
  // GraceDue(): when OnGraceOver(), NewlyAccused() or Advance() is due. SilenceDue(): when
  // OnSilence() is due.
  Tick GraceDue() const {
    return std::min(
        {reports_.NextDeadline(), newcomers_.NextDeadline(), ring_choice_.telling_due()});
  }
  Tick SilenceDue() const;
  // The time of the next scheduled search. kNever: only a new measurement schedules one.
  Tick OrderDue() const { return ring_choice_.due(); }
  // Returns what operators see of the group. The owner adds what it knows of peers and links.
  GroupView View(const PeerDirectory& peers) const;
  // The shares of the peers of Ring(), as of the last epoch. Unknown after a restart, and then
  // equal until the next epoch.
  const Shares& ToldShares() const { return ring_choice_.told().shares; }
  // Pairs of the peers of Ring() that cannot reach each other.
  control::BlockedPairs Blocked() const { return BlockedAmong(record(), Ring()); }
  // Peers with admitted members, in ring order.
  std::vector<PeerId> Ring() const { return epochs_.Ring(); }

  void CheckInvariants(const PeerDirectory& peers) const;

  LH_STATE(Group, LH_FIELD(run_secret_, rule::Secret{kSecretBytes, kSecretBytes}),
           LH_FIELD(detect_ms_, rule::Aside{}), LH_FIELD(incarnation_, rule::Aside{}),
           LH_FIELD(epochs_), LH_FIELD(boundary_), LH_FIELD(sync_), LH_FIELD(agreed_for_),
           LH_FIELD(reports_), LH_FIELD(disputes_), LH_FIELD(newcomers_), LH_FIELD(assembly_),
           LH_FIELD(former_), LH_FIELD(ring_choice_), LH_FIELD(pending_told_),
           LH_FIELD(fault_epoch_), LH_FIELD(last_fault_), LH_FIELD(last_step_, rule::Aside{}));

 private:
  // ---- deciding and applying (group_epochs.cc)
  Decision DecideNow(const PeerDirectory& peers) const;
  void Apply(const Decision& decision, const GroupStep& step);
  void Prepare(const Decision& decision, const GroupStep& step);
  void SendPrepare(PeerId peer, const GroupStep& step);
  void Commit(const GroupStep& step);
  void NoteRing(const Preparation& done, const std::vector<PeerId>& before, const GroupStep& step);
  void CommitEmpty(const GroupStep& step);
  void SendRemovals(const std::vector<MemberRecord>& removed, const GroupStep& step) const;
  void Abort(const std::string& reason, const GroupStep& step);
  void AnswerVote(MemberId member, const GroupStep& step);
  void CompleteBallot(Tick now);

  // ---- removing
  void Remove(MemberId member, control::Removal why, const std::string& reason,
              const FaultReport& fault, const GroupStep& step);
  void RemovePeer(PeerId peer, control::Removal why, const std::string& reason,
                  const FaultReport& fault, const GroupStep& step);
  // Forgets what is known of peers that are no longer in the group. If one comes back, everything
  // is tried again.
  void ForgetStrangers();

  // ---- the rest
  // Valid as long as the step.
  LinkRepair Links(const GroupStep& step);
  void ResolveUnreachable(const GroupStep& step);
  // Begins trials of newcomers, and ends those that are decided.
  void TryNewcomers(const GroupStep& step);
  const std::vector<PeerId>& Better() const { return ring_choice_.better(); }
  bool FitsRing(const std::vector<PeerId>& ring) const;
  control::LinkCost CostNow(const PeerDirectory& peers) const;
  void KeepRing(const std::string& reason, const GroupStep& step);
  void Emit(SyncOutput sync, const GroupStep& step) const;
  // Sends the agreed state to agreed_for_.
  void SendAgreed(const GroupStep& step);
  void SendPendingCount(const GroupStep& step);
  void SendUnknown(PeerId peer, MemberId member, const GroupStep& step) const {
    step.Send(peer, former_.AnswerFor(member, record().group, step.now));
  }

  // As in CoreConfig and RunRecord.
  std::string run_secret_;
  uint32_t detect_ms_;
  std::string incarnation_;

  EpochState epochs_;
  Boundary boundary_;
  SyncBallot sync_;
  // The peers that Advance() has to tell the agreed state, if they have a member in the background.
  std::set<PeerId> agreed_for_;
  LinkReports reports_;
  Disputes disputes_;
  Newcomers newcomers_;
  Assembly assembly_;
  FormerMembers former_;
  RingChoice ring_choice_;
  uint32_t pending_told_ = 0;
  Epoch fault_epoch_;  // the epoch whose commit ended last_fault_
  FaultRecord last_fault_;

  // ---- only for operators
  Tick last_step_ = kNever;  // when the last ballot was decided
};

}  // namespace longhaul::coordinator
