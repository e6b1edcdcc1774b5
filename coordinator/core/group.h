// One group: decides which epoch is next, and when.
//
// Its parts are modules of their own:
//   membership.h           the members and peers in the group's record
//   ballot.h               the votes at a boundary
//   preparation.h          the next epoch, and the peers' answers to it
//   suspicion.h, routes.h  reports of lost links; blocked pairs and their relays
//   ring_choice.h          a better ring
//   sync_ballot.h          shared state
//   trials.h, pauses.h     whether members can reach newcomers
// group.cc has the inputs, the removal of members and the view; group_epochs.cc prepares and
// commits epochs; group_assembly.cc forms the first epoch when joins wait for each other;
// group_links.cc handles links that are lost or cannot be built.
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
// depend on a decision. Then Advance() looks at the whole group, decides what is next, and applies
// it, until the group can only wait. The decision is made by Decide(), which changes nothing and
// says why the group waits.
//
// Messages are addressed to peers, not to sessions. The owner may drop a message to a peer that is
// not attached, because Attach() repeats what the peer may have missed. Messages depend on
// record(): the owner must make the record durable before it sends them.
//
// Plain state machine: no clock, no thread. Asks its PeerDirectory only while one of its methods
// runs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/ballot.h"
#include "coordinator/core/config.h"
#include "coordinator/core/disputes.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/pauses.h"
#include "coordinator/core/peer_directory.h"
#include "coordinator/core/preparation.h"
#include "coordinator/core/records.h"
#include "coordinator/core/ring_choice.h"
#include "coordinator/core/routes.h"
#include "coordinator/core/suspicion.h"
#include "coordinator/core/sync_ballot.h"
#include "coordinator/core/trials.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// A removed member: its record before the removal, and the reason.
struct Removed {
  MemberRecord member;
  std::string reason;
};

struct GroupOutput {
  std::vector<std::pair<PeerId, control::CoordinatorMessage>> messages;
  std::vector<EventRecord> notices;
  std::vector<Removed> removed;  // only members that belong to a cohort
};

class Group {
 public:
  // `directory` must outlive the group.
  Group(GroupRecord record, std::string run_secret, const CoreConfig& config,
        const PeerDirectory* directory);
  // Only for a copy of a group: sets the directory of the copy's owner.
  void SetDirectory(const PeerDirectory* directory) { directory_ = directory; }

  // ---- input

  // The peer has attached. `state`: what its Hello says of this group; empty if it says nothing.
  // `anew`: the peer has had a stream before, since this coordinator started.
  void Attach(const PeerRecord& peer, const control::GroupState& state, bool anew, Tick now,
              GroupOutput* out);
  // Returns the member that a Join of this peer with this request number has made; 0 if there is no
  // such member.
  MemberId FindRequest(PeerId peer, uint64_t request) const;
  // The answer to the Join that has made this pending member.
  control::JoinPending PendingOf(MemberId member) const;
  // Returns why the group cannot take this Join; "": it can.
  std::string ObjectionTo(PeerId peer, const control::Join& join) const;
  // Adds a pending member. The owner has checked the limits and ObjectionTo().
  void Join(const PeerRecord& peer, const control::Join& join, MemberId member, GroupOutput* out);
  void Leave(PeerId peer, const control::Leave& leave, GroupOutput* out);
  Violation Vote(PeerId peer, const control::Vote& vote, GroupOutput* out);
  Violation Sync(PeerId peer, const control::SyncVote& vote, GroupOutput* out);
  void FetchDone(PeerId peer, const control::FetchDone& done, GroupOutput* out);
  Violation Ready(PeerId peer, const control::EpochReady& ready);
  Violation Failed(PeerId peer, const control::EpochFailed& failed);
  Violation LinkLost(PeerId peer, const control::LinkLost& lost, Tick now, GroupOutput* out);
  // A member cancels an op: the next epoch freezes ops, and judges this one.
  Violation CancelOp(PeerId peer, const control::CancelOp& cancel, GroupOutput* out);
  // A peer's verdict on an op differs from another's: the next epoch freezes ops, and from then on
  // the group signs its READYs. If signatures prove that a peer lies, it is removed.
  Violation Dispute(PeerId peer, const control::Dispute& dispute, GroupOutput* out);
  // A peer has tried a newcomer's data port.
  void Tried(PeerId peer, const control::PeerTried& tried);
  void Evict(MemberId member, const std::string& reason, GroupOutput* out);
  // The peer is dead: removes all its members. `silent_ms`: how long it had not been heard; 0: its
  // death did not show by silence.
  void PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms, GroupOutput* out);
  // Removes all members of the cohort, because one of them is gone or was not admitted together
  // with the others.
  void RemoveCohort(PeerId peer, const std::string& cohort, const std::string& reason,
                    GroupOutput* out);
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
                 const RingScore& present, GroupOutput* out);
  // Handles the lost links whose grace is over by now. Plans to tell peers what links cost, if that
  // has changed by much.
  void OnGraceOver(Tick now, GroupOutput* out);
  // Removes members that missed their step deadline, and peers that did not answer a preparation
  // in time.
  void OnSilence(Tick now, GroupOutput* out);
  // This coordinator was held up for `us`. Moves all deadlines by that time, because the peers are
  // not at fault.
  void Postpone(int64_t us) {
    suspicion_.Postpone(us);
    PostponeSilence(us);
  }
  // This coordinator ran, but it heard no peer. Moves only the deadlines of OnSilence().
  void PostponeSilence(int64_t us);

  // Decides and applies until the group can only wait.
  void Advance(Tick now, GroupOutput* out);

  // ---- view

  const GroupRecord& record() const { return record_; }
  bool Empty() const { return record_.members.empty() && !preparation_; }
  bool HasPeer(PeerId peer) const { return coordinator::HasPeer(record_, peer); }
  size_t CountMembers(PeerId peer) const { return coordinator::CountMembers(record_, peer); }
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
  // Returns true if another peer accuses this peer: it has reported that it cannot reach this peer,
  // or that it lost its link to this peer, and has not reported all links up since. A report of
  // silence counts only after a delay: TCP repeats packets that a short outage swallowed, after up
  // to twice the outage.
  bool Accused(PeerId peer, Tick now) const;
  // Returns the peers that accuse this peer, also those whose report does not count yet.
  std::vector<PeerId> Accusers(PeerId peer) const;
  // Returns true if there are two witnesses or more, and each of them accuses the peer or has only
  // a link through a relay to it. Their reports count at once: if the peer were alive after a short
  // outage, a witness would have heard it.
  bool AccusedByAll(PeerId peer) const;
  // Returns the peers that are accused by a report of silence whose delay is over by now. Uses each
  // report only once.
  std::vector<PeerId> NewlyAccused(Tick now) { return suspicion_.NewlyAccused(now); }
  // Whether members have reached the peer's data port, or the peer needs no trial.
  bool Reached(PeerId peer) const;
  // GraceDue(): when OnGraceOver(), NewlyAccused() or Advance() is due. SilenceDue(): when
  // OnSilence() is due.
  Tick GraceDue() const {
    return std::min({suspicion_.NextDeadline(), trials_.NextDeadline(), pause_over_,
                     ring_choice_.telling_due()});
  }
  Tick SilenceDue() const;
  // The time of the next scheduled search. kNever: only a new measurement schedules one.
  Tick OrderDue() const { return ring_choice_.due(); }
  // Returns what operators see of the group. The owner adds what it knows of peers and links.
  GroupView View() const;
  // The shares of the peers of Ring(), as of the last epoch. Unknown after a restart, and then
  // equal until the next epoch.
  const Shares& ToldShares() const { return ring_choice_.told().shares; }
  // Pairs of the peers of Ring() that cannot reach each other.
  control::BlockedPairs Blocked() const { return BlockedAmong(record_, Ring()); }
  // Peers with admitted members, in ring order.
  std::vector<PeerId> Ring() const { return RingOf(record_); }

  void CheckInvariants() const;
  void AddTo(Digester* digest) const;

 private:
  enum class Act { kWait, kPrepare, kCommit, kCommitEmpty, kAbort, kAnswerVotes };
  struct Decision {
    Act act = Act::kWait;
    std::set<MemberId> joiners;  // kPrepare
    std::set<MemberId> raised;   // kPrepare
    bool freeze = false;         // kPrepare
    bool reorder = false;        // kPrepare
    bool Changes() const { return !joiners.empty() || !raised.empty() || reorder; }
    std::string why;  // kWait: what the group waits for; "": nothing
  };
  Decision Decide() const;
  Decision DecideInPreparation() const;
  Decision DecideIdle() const;
  std::string WaitingForGrace() const;
  std::string WaitingForVotes() const;
  std::string WaitingForCohort() const;

  // ---- the assembly: pending members of a group without admitted members that asked to be
  // admitted together
  // The number of members that they wait for; 0: there is no assembly.
  uint32_t AssemblySize() const;
  // The members that a preparation admits into a group without admitted members. With an assembly:
  // as many as it waits for, or none.
  std::set<MemberId> Founders() const;
  // Says who has come, and who has left again. "": there is no assembly.
  std::string AssemblyText() const;
  // The pending member is being removed.
  void LeaveAssembly(const MemberRecord& member, const std::string& why);
  // Sends AssemblyText() to the members that wait, if it has changed.
  void TellAssembly(GroupOutput* out);

  void Apply(const Decision& decision, Tick now, GroupOutput* out);
  void Prepare(const Decision& decision, Tick now, GroupOutput* out);
  void Commit(Tick now, GroupOutput* out);
  void CommitEmpty(GroupOutput* out);
  void Abort(const std::string& reason, GroupOutput* out);
  void AnswerVotes(GroupOutput* out);
  void AnswerVote(MemberId member, GroupOutput* out);
  void Emit(SyncOutput sync, GroupOutput* out) const;

  void Reconcile(PeerId peer, const control::GroupState& said, bool forgotten, GroupOutput* out);
  void ChooseRing(Tick now, Preparation* preparation) const;
  bool ChangesWays(const Preparation& next) const;
  void CompleteBallot();
  bool FitsRing(const std::vector<PeerId>& ring) const;
  control::LinkCost CostNow() const;
  bool AllAttached(const std::vector<PeerId>& peers) const;
  void KeepRing(const std::string& reason, GroupOutput* out);
  void SendRemoved(const MemberRecord& member, control::Removal why, const std::string& reason,
                   GroupOutput* out) const;
  void SendPrepare(PeerId peer, Tick now, GroupOutput* out);
  control::CommitEpoch MakeCommit(PeerId peer) const;
  void SendPendingCount(GroupOutput* out);
  // The peers of admitted members in the background.
  std::set<PeerId> BackgroundPeers() const;
  // Sends the agreed state to agreed_for_.
  void SendAgreed(GroupOutput* out);

  void Remove(MemberId member, control::Removal why, const std::string& reason, const Fault& fault,
              GroupOutput* out);
  // Removes a peer that lies, for good.
  void Bar(PeerId peer, const std::string& reason, PeerId reporter, GroupOutput* out);
  void RemovePeer(PeerId peer, control::Removal why, const std::string& reason, const Fault& fault,
                  GroupOutput* out);
  void ResolveUnreachable(GroupOutput* out);
  void Settle(LostLinks lost, GroupOutput* out);
  // Begins trials of newcomers, and ends those that are decided.
  void TryNewcomers(Tick now, GroupOutput* out);
  void RefuseTried(const Trials::Ended& trial, GroupOutput* out);
  void BlockTried(const Trials::Ended& trial, GroupOutput* out);
  size_t OthersComing(PeerId newcomer) const;
  // Whether the next boundary may admit the pending member.
  bool MayAdmit(const MemberRecord& member) const;
  // The peers of pending members that need a trial, now or after their pause.
  std::set<PeerId> Untried() const;
  std::set<PeerId> Triers() const;
  // How many pending members the next boundary may admit. PendingCount tells members this number,
  // so that they come to a boundary for these only.
  uint32_t CountComing() const;
  // Returns the text for a newcomer that is refused because it could not be reached: `reason`, and
  // what to do about it. Begins the pause of its address. `held`: the group has waited for it.
  std::string Refusal(PeerId newcomer, const std::string& reason, bool held);
  const PeerRecord& PeerOf(PeerId peer) const;
  Routes RoutesOf(const std::set<PeerId>& peers) const;
  Routes RoutesNow() const;
  control::BlockedPairs BlockedBefore() const;
  void Block(const LostLinks& lost, int64_t retry_us, GroupOutput* out);
  bool AddBlocked(const control::BlockedPair& pair, const std::string& reason, int64_t retry_us,
                  PeerId reporter, GroupOutput* out);
  void ForgetStrangers();
  void LossGraceOver(LostLink link, GroupOutput* out);
  void BlameRelays(LostLinks* lost);
  Fault FaultNow(std::string cause, std::string detector, uint32_t detect_ms = 0,
                 PeerId of = PeerId()) const;
  std::string SubjectOf(const Fault& fault, const std::vector<MemberRecord>& removed) const;
  void NoteFault(const Fault& fault);
  // The answer to a peer that names a member that is unknown or removed: who removed it, when, why.
  control::Removed Unknown(MemberId member) const;
  void Remember(MemberId member, control::Removal why, const std::string& reason,
                const std::string& by);
  void MarkChanged(const std::string& why);
  // The next epoch freezes ops, because of `why`.
  void AskForFreeze(const std::string& why, const Fault& fault);
  void Note(std::string kind, MemberId member, PeerId peer, std::string text,
            GroupOutput* out) const;

  MemberRecord* Find(MemberId member) { return FindMember(record_, member); }
  const MemberRecord* Find(MemberId member) const { return FindMember(record_, member); }
  std::set<MemberId> Admissible() const;
  bool AccusedBy(PeerId other, PeerId peer, Tick at) const;
  // Whether the coordinator has heard the peer's stream within heard_of_late_us().
  bool HeardOfLate(PeerId peer) const;
  // Returns the peers that would report this peer silent if it were dead: all other participants.
  // Exception: participants that are attached and silent may be dead themselves.
  std::vector<PeerId> Witnesses(PeerId peer) const;
  // Returns the peers of the next epoch, as far as they are known: those of the survivors, and
  // those of the newcomers in the open preparation. The order is that of OrderOf().
  std::vector<PeerId> Participants() const;
  // Returns the pending members that the open preparation does not admit, but could.
  std::set<MemberId> Waiting() const;
  // Returns the relay of the two peers' link, as the peers were told last; 0: it has no relay.
  PeerId RelayNow(PeerId x, PeerId y) const;
  // When the member is evicted unless it votes (VoteDue) or offers its state (OfferDue). kNever: no
  // such deadline.
  Tick VoteDue(const MemberRecord& member) const;
  Tick OfferDue(const MemberRecord& member) const;
  void EvictLate(Tick (Group::*due)(const MemberRecord&) const, const std::string& what, Tick now,
                 GroupOutput* out);
  bool Judged(const MemberRecord& member) const;
  bool InForce(PeerId peer) const { return AdmittedPeers(record_).contains(peer); }
  const std::vector<PeerId>& Better() const { return ring_choice_.better(); }

  GroupRecord record_;
  // The newest epoch number that the store held at the start, or that was prepared since. Numbers
  // above it, up to the record's `highest`, are known from peers only.
  Epoch issued_;
  std::string run_secret_;
  uint32_t detect_ms_;
  std::string incarnation_;
  const PeerDirectory* directory_;

  Ballot ballot_;  // electorate: the survivors
  // A preparation of this ballot has tried to admit newcomers. There is one try per ballot;
  // otherwise a newcomer that cannot be reached and joins again and again would hold the voters.
  bool admission_tried_ = false;
  Tick first_vote_ = kNever;  // when the first vote of the open ballot came
  std::set<MemberId> ready_;  // voters of that ballot that are to come out of the background
  // The peers that Advance() has to tell the agreed state, if they have a member in the background.
  std::set<PeerId> agreed_for_;
  SyncBallot sync_;
  std::string repair_;  // why the next epoch must freeze; "": it need not
  std::optional<Preparation> preparation_;
  Suspicion suspicion_;
  Disputes disputes_;
  Trials trials_;
  Pauses pauses_;
  Tick pause_over_ = kNever;  // when the first pause of an untried peer is over
  // Recently removed members, for the answer when their peers name them.
  struct Gone {
    Tick at;
    std::string text;
  };
  std::map<MemberId, Gone> gone_;
  RingChoice ring_choice_;
  std::optional<Fault> fault_;
  Epoch fault_epoch_;  // the epoch whose commit ended last_fault_
  FaultRecord last_fault_;
  uint32_t pending_told_ = 0;
  std::string assembly_told_;
  uint32_t assembly_present_ = 0;  // how many had come when they were told last
  // Who has left the assembly, and why: the last kNamesShownMax of them. For people.
  std::vector<std::pair<std::string, std::string>> left_assembly_;
  Tick last_step_ = kNever;  // when the last ballot was decided; only for operators
};

}  // namespace longhaul::coordinator
