// One group: it decides which epoch is next, and when.
//
// What it decides from has modules of its own: membership.h (who is in its
// record), ballot.h (votes), preparation.h (the next epoch, and who has
// answered), suspicion.h (reports of lost links, blocked pairs), routes.h
// (through whom links of blocked pairs go), ring_choice.h (a better ring),
// sync_ballot.h (shared state), trials.h and pauses.h (whether newcomers are
// reached).
//
// group.cc takes what happens, group_epochs.cc prepares and commits epochs,
// group_links.cc handles links that are lost or cannot be built.
//
//   idle --(all votes in and somebody pending | nobody admitted and somebody
//   pending)--> preparing idle --(all votes in and one of the background is
//   ready)--> preparing idle --(all votes in and a better ring is known)-->
//   preparing idle --(a removal | a lost link)--> preparing, with freeze
//   preparing --(every peer ready)--> committed, idle
//   preparing --(a change)--> preparing the next number, with everything so far
//   in it preparing --(its newcomers are all gone, not frozen)--> idle
//   (AbortEpoch) preparing --(a peer cannot do what the better ring needs)-->
//   idle (AbortEpoch) any --(the last member is removed)--> an empty epoch is
//   committed at once, idle
//
// What happens to a group arrives through the methods of "input": they note it
// and answer what has one answer. Advance() then looks at the whole group,
// decides what is next (Decide(), which changes nothing and says why), and
// applies it, until there is nothing to do but wait.
//
// Messages are for peers, not sessions: what is for a peer that is not attached
// may be dropped, since Attach() says again what the peer may not have heard. They
// depend on record(): the owner makes the record durable before it lets them
// out.
//
// Plain state machine: no clock, no thread; it asks its PeerDirectory only
// while one of its methods runs.
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

// A member that goes, with its record as it was, and why.
struct Removed {
  MemberRecord member;
  std::string reason;
};

struct GroupOutput {
  std::vector<std::pair<PeerId, control::CoordinatorMessage>> messages;
  std::vector<EventRecord> notices;
  std::vector<Removed> removed;  // those of cohorts
};

class Group {
 public:
  // `directory` outlives the group.
  Group(GroupRecord record, std::string run_secret, const CoreConfig &config,
        const PeerDirectory *directory);
  // Of a copy: the directory that it belongs to.
  void SetDirectory(const PeerDirectory *directory) { directory_ = directory; }

  // ---- input

  // The peer (re)attached; `state` is what its Hello says of this group, empty
  // if nothing. `anew`: it had a stream before, under this coordinator.
  void Attach(const PeerRecord &peer, const control::GroupState &state, bool anew, Tick now,
              GroupOutput *out);
  // The member that an earlier Join of this peer with this number made; none if
  // there is none.
  MemberId FindRequest(PeerId peer, uint64_t request) const;
  // A new pending member. The owner has checked the bounds.
  void Join(const PeerRecord &peer, const control::Join &join, MemberId member, GroupOutput *out);
  void Leave(PeerId peer, const control::Leave &leave, GroupOutput *out);
  Violation Vote(PeerId peer, const control::Vote &vote, GroupOutput *out);
  Violation Sync(PeerId peer, const control::SyncVote &vote, GroupOutput *out);
  void FetchDone(PeerId peer, const control::FetchDone &done, GroupOutput *out);
  Violation Ready(PeerId peer, const control::EpochReady &ready);
  Violation Failed(PeerId peer, const control::EpochFailed &failed);
  Violation LinkLost(PeerId peer, const control::LinkLost &lost, Tick now, GroupOutput *out);
  // A peer has tried a newcomer's data port.
  void Tried(PeerId peer, const control::PeerTried &tried);
  void Evict(MemberId member, const std::string &reason, GroupOutput *out);
  // The peer is dead: all its members are. `silent_ms`: nothing was heard of it
  // for so long before.
  void PeerDied(PeerId peer, const std::string &reason, uint32_t silent_ms, GroupOutput *out);
  // A member of the cohort is gone, or cannot be admitted together with the
  // others: all go.
  void RemoveCohort(PeerId peer, const std::string &cohort, const std::string &reason,
                    GroupOutput *out);
  // The cohort is complete: its members are admitted by ballots above this
  // number, or at once where nobody is admitted.
  void AdmitCohortAfter(PeerId peer, const std::string &cohort, uint64_t ballot);
  // A link between two of its peers was measured, and is another than was
  // thought.
  void LinkMeasured(Tick now) { ring_choice_.Measured(now); }
  // A better ring is to be looked for, as Ring() may not be the best any more.
  // Says so once.
  bool OrderFallsDue(Tick now);
  // What was found, for the ring of the epoch `asked_in`. Left if it does not
  // fit any more.
  void RingFound(const std::vector<PeerId> &ring, Epoch asked_in, const RingScore &score,
                 const RingScore &present, GroupOutput *out);
  // Handles reports of lost links whose grace is over by now.
  void OnGraceOver(Tick now, GroupOutput *out);
  // Removes whoever had to say something by now, and did not.
  void OnSilence(Tick now, GroupOutput *out);
  // The coordinator itself was held up for so long: nobody else is to pay for
  // it.
  void Postpone(int64_t us) {
    suspicion_.Postpone(us);
    PostponeSilence(us);
  }
  // It ran, and heard nobody.
  void PostponeSilence(int64_t us);

  // Decides and applies until there is nothing to do but wait.
  void Advance(Tick now, GroupOutput *out);

  // ---- view

  const GroupRecord &record() const { return record_; }
  bool Empty() const { return record_.members.empty() && !preparation_; }
  bool HasPeer(PeerId peer) const { return coordinator::HasPeer(record_, peer); }
  size_t CountMembers(PeerId peer) const { return coordinator::CountMembers(record_, peer); }
  // Those that stay, in order of number.
  std::vector<const MemberRecord *> Cohort(PeerId peer, const std::string &cohort) const;
  // The number of the newest ballot that has a vote or is completed.
  uint64_t NewestBallot() const;
  // The ballot that was to admit this pending member is over, and it is still
  // pending.
  bool PassedOver(const MemberRecord &member) const;
  // Admitted, or in the preparation that would admit it.
  bool AdmittedOrPrepared(const MemberRecord &member) const;
  // True if another peer says that it cannot reach this one, or lost its link
  // to it and has not reported all links up since. That it heard nothing counts
  // a moment later only: what was lost in a short outage is on its way again,
  // after up to twice the outage.
  bool Accused(PeerId peer, Tick now) const;
  // Who says so, be it too early to count.
  std::vector<PeerId> Accusers(PeerId peer) const;
  // All others say so, or have no straight link to it; and they are two or more. What
  // they say counts at once: if anything of it were on its way, one of them
  // would have heard it.
  bool AccusedByAll(PeerId peer) const;
  // Whose accusers' moment is over; each is told once.
  std::vector<PeerId> NewlyAccused(Tick now) { return suspicion_.NewlyAccused(now); }
  // Members have reached the peer's data port, or there are none.
  bool Reached(PeerId peer) const;
  // When OnGraceOver(), NewlyAccused() or Advance(), and OnSilence() are due.
  Tick GraceDue() const {
    return std::min({suspicion_.NextDeadline(), trials_.NextDeadline(), pause_over_});
  }
  Tick SilenceDue() const;
  // When OrderFallsDue() is due; kNever: not before something changes.
  Tick OrderDue() const { return ring_choice_.due(); }
  // The group without its ring, which only the owner can describe.
  GroupView View() const;
  // Peers with admitted members, in ring order.
  std::vector<PeerId> Ring() const { return RingOf(record_); }

  void CheckInvariants() const;
  void AddTo(Digester *digest) const;

 private:
  enum class Act { kWait, kPrepare, kCommit, kCommitEmpty, kAbort, kAnswerVotes };
  struct Decision {
    Act act = Act::kWait;
    std::set<MemberId> joiners;  // kPrepare
    std::set<MemberId> raised;   // kPrepare
    bool freeze = false;         // kPrepare
    bool reorder = false;        // kPrepare
    bool Changes() const { return !joiners.empty() || !raised.empty() || reorder; }
    std::string why;  // kWait: what is waited for; empty: nothing
  };
  Decision Decide() const;
  Decision DecideInPreparation() const;
  Decision DecideIdle() const;
  std::string WaitingForGrace() const;
  std::string WaitingForVotes() const;
  std::string WaitingForCohort() const;

  void Apply(const Decision &decision, Tick now, GroupOutput *out);
  void Prepare(const Decision &decision, Tick now, GroupOutput *out);
  void Commit(Tick now, GroupOutput *out);
  void CommitEmpty(GroupOutput *out);
  void Abort(const std::string &reason, GroupOutput *out);
  void AnswerVotes(GroupOutput *out);
  void AnswerVote(MemberId member, GroupOutput *out);
  void Emit(SyncOutput sync, GroupOutput *out) const;

  void Reconcile(PeerId peer, const control::GroupState &said, bool forgotten, GroupOutput *out);
  void ChooseRing(Tick now, Preparation *preparation) const;
  bool ChangesWays(const Preparation &next) const;
  void CompleteBallot();
  bool FitsRing(const std::vector<PeerId> &ring) const;
  bool AllAttached(const std::vector<PeerId> &peers) const;
  void KeepRing(const std::string &reason, GroupOutput *out);
  void SendRemoved(const MemberRecord &member, control::Removal why, const std::string &reason,
                   GroupOutput *out) const;
  void SendPrepare(PeerId peer, Tick now, GroupOutput *out);
  control::CommitEpoch MakeCommit(PeerId peer) const;
  void SendPendingCount(GroupOutput *out);
  // Peers that fetch it in the background, admitted members there.
  std::set<PeerId> BackgroundPeers() const;
  // To those that have to hear of it.
  void SendAgreed(GroupOutput *out);

  void Remove(MemberId member, control::Removal why, const std::string &reason, const Fault &fault,
              GroupOutput *out);
  void RemovePeer(PeerId peer, control::Removal why, const std::string &reason, const Fault &fault,
                  GroupOutput *out);
  void ResolveUnreachable(GroupOutput *out);
  void Settle(LostLinks lost, GroupOutput *out);
  // Begins trials of newcomers and ends them.
  void TryNewcomers(Tick now, GroupOutput *out);
  void RefuseTried(const Trials::Ended &trial, GroupOutput *out);
  void BlockTried(const Trials::Ended &trial, GroupOutput *out);
  size_t OthersComing(PeerId newcomer) const;
  // Whether the next boundary may admit the pending member.
  bool MayAdmit(const MemberRecord &member) const;
  // Peers of pending members that are to be tried, now or after their pause.
  std::set<PeerId> Untried() const;
  std::set<PeerId> Triers() const;
  // How many pending members the next boundary may admit. Nobody has to hurry
  // to a boundary for the others.
  uint32_t CountComing() const;
  // Why a newcomer that could not be reached is refused: `reason`, and what to
  // do about it. Its address waits before it is tried again. `held`: the group
  // waited for the newcomer.
  std::string Refusal(PeerId newcomer, const std::string &reason, bool held);
  const PeerRecord &PeerOf(PeerId peer) const;
  Routes RoutesOf(const std::set<PeerId> &peers) const;
  Routes RoutesNow() const;
  control::BlockedPairs BlockedBefore() const;
  void Block(const LostLinks &lost, int64_t retry_us, GroupOutput *out);
  bool AddBlocked(const control::BlockedPair &pair, const std::string &reason, int64_t retry_us,
                  PeerId reporter, GroupOutput *out);
  void ForgetStrangers();
  void LossGraceOver(LostLink link, GroupOutput *out);
  void BlameRelays(LostLinks *lost);
  Fault FaultNow(std::string cause, std::string detector, uint32_t detect_ms = 0,
                 PeerId of = PeerId()) const;
  std::string SubjectOf(const Fault &fault, const std::vector<MemberRecord> &removed) const;
  void NoteFault(const Fault &fault);
  // To a peer that speaks of a member that is none: who removed it, when and why.
  control::Removed Unknown(MemberId member) const;
  void Remember(MemberId member, control::Removal why, const std::string &reason,
                const std::string &by);
  void MarkChanged(const std::string &why);
  void Note(std::string kind, MemberId member, PeerId peer, std::string text,
            GroupOutput *out) const;

  MemberRecord *Find(MemberId member) { return FindMember(record_, member); }
  const MemberRecord *Find(MemberId member) const { return FindMember(record_, member); }
  std::set<MemberId> Admissible() const;
  bool AccusedBy(PeerId other, PeerId peer, Tick at) const;
  // Its stream is not silent.
  bool HeardOfLate(PeerId peer) const;
  // Who would report the peer silent if it was dead: the others, but for those that may
  // be dead themselves.
  std::vector<PeerId> Witnesses(PeerId peer) const;
  // Who takes part in what is being agreed, in ring order before blocked pairs
  // are looked at.
  std::vector<PeerId> Participants() const;
  // Newcomers that this admission could take in as well.
  std::set<MemberId> Waiting() const;
  // Through whom the link of the two goes, as they were told last; 0: straight.
  PeerId RelayNow(PeerId x, PeerId y) const;
  // When the member is evicted unless it votes, or offers its state; kNever: it
  // is not.
  Tick VoteDue(const MemberRecord &member) const;
  Tick OfferDue(const MemberRecord &member) const;
  void EvictLate(Tick (Group::*due)(const MemberRecord &) const, const std::string &what, Tick now,
                 GroupOutput *out);
  bool Judged(const MemberRecord &member) const;
  bool InForce(PeerId peer) const { return AdmittedPeers(record_).contains(peer); }
  const std::vector<PeerId> &Better() const { return ring_choice_.better(); }

  GroupRecord record_;
  // The newest number that the store held or that was prepared since; above it,
  // up to the record's `highest`, are numbers that only peers know.
  Epoch issued_;
  std::string run_secret_;
  uint32_t detect_ms_;
  std::string incarnation_;
  const PeerDirectory *directory_;

  Ballot ballot_;  // its electorate: the admitted members that stay
  // Newcomers were tried since the votes came in: one try a ballot, so that a
  // newcomer that cannot be reached and asks again and again does not hold the
  // voters for ever.
  bool admission_tried_ = false;
  Tick first_vote_ = kNever;  // of the open ballot
  std::set<MemberId> ready_;  // voters of it that are to come out of the background
  // Are to hear what was agreed on last, if they have a member in the
  // background.
  std::set<PeerId> agreed_for_;
  SyncBallot sync_;
  std::string repair_;  // why the next epoch must freeze; empty: it need not
  std::optional<Preparation> preparation_;
  Suspicion suspicion_;
  Trials trials_;  // of newcomers
  Pauses pauses_;
  Tick pause_over_ = kNever;  // of the first untried peer that waits
  // Members that were removed of late: their peers may ask.
  struct Gone {
    Tick at;
    std::string text;
  };
  std::map<MemberId, Gone> gone_;
  RingChoice ring_choice_;
  std::optional<Fault> fault_;
  Epoch fault_epoch_;  // of `last_fault_`
  FaultRecord last_fault_;
  uint32_t pending_told_ = 0;
};

}  // namespace longhaul::coordinator
