// One group: its members, its ballot, its preparation, its epochs; its syncs (sync_ballot.h).
//
//   idle --(all votes in and somebody pending | nobody admitted and somebody pending)--> preparing
//   idle --(all votes in and one of the background is ready)--> preparing
//   idle --(all votes in and a better ring is known)--> preparing
//   idle --(a removal | a lost link)--> preparing, with freeze
//   preparing --(every peer ready)--> committed, idle
//   preparing --(a change)--> preparing the next number, with everything so far in it
//   preparing --(its newcomers are all gone, not frozen)--> idle (AbortEpoch)
//   preparing --(a peer cannot do what the better ring needs)--> idle (AbortEpoch)
//   any --(the last member is removed)--> an empty epoch is committed at once, idle
//
// What happens to a group arrives through the methods of "input": they note it and answer what has
// one answer. Advance() then looks at the whole group, decides what is next (Decide(), which
// changes nothing and says why), and applies it, until there is nothing to do but wait.
//
// Messages are for peers, not sessions: what is for a peer that is not attached may be dropped,
// since Attach() says again what the peer may have missed. They depend on record(): the owner makes
// the record durable before it lets them out.
//
// Plain state machine: no clock, no thread; it asks its PeerDirectory only while one of its methods
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
#include "coordinator/core/records.h"
#include "coordinator/core/sync_ballot.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// What a group asks about peers.
class PeerDirectory {
 public:
  virtual ~PeerDirectory() = default;
  virtual bool Attached(PeerId peer) const = 0;
  // Something came on its stream within this time.
  virtual bool HeardWithin(PeerId peer, int64_t us) const = 0;
  virtual bool Draining(PeerId peer) const = 0;
  // A member of the cohort of this peer is admitted in some group, or about to be.
  virtual bool CohortBegun(const std::string& run, PeerId peer,
                           const std::string& cohort) const = 0;
  // Of the links between the peers of the ring, as measured.
  virtual control::LinkCost CostOf(const std::vector<PeerId>& ring) const = 0;
  // Of the step that is running.
  virtual Tick Now() const = 0;
};

// A member that goes, with its record as it was, and why.
struct Removed {
  MemberRecord member;
  std::string reason;
};

struct GroupConfig {
  uint32_t detect_ms = 0;
  uint32_t ring_interval_ms = 0;  // 0: the ring is never ordered anew
};

struct GroupOutput {
  std::vector<std::pair<PeerId, control::CoordinatorMessage>> messages;
  std::vector<EventRecord> notices;
  std::vector<Removed> removed;  // those of cohorts
};

// Set if the message is against the protocol: what is wrong with it. Nothing was changed then.
using Violation = std::optional<std::string>;

class Group {
 public:
  // `directory` outlives the group.
  Group(GroupRecord record, std::string run_secret, const GroupConfig& config,
        const PeerDirectory* directory);
  // Of a copy: the directory that it belongs to.
  void SetDirectory(const PeerDirectory* directory) { directory_ = directory; }

  // ---- input

  // The peer (re)attached; `state` is what its Hello says of this group, empty if nothing. `anew`:
  // it had a stream before, under this coordinator.
  void Attach(const PeerRecord& peer, const control::GroupState& state, bool anew, Tick now,
              GroupOutput* out);
  // The member that an earlier Join of this peer with this number made; none if there is none.
  MemberId FindRequest(PeerId peer, uint64_t request) const;
  // A new pending member. The owner has checked the bounds.
  void Join(const PeerRecord& peer, const control::Join& join, MemberId member, GroupOutput* out);
  void Leave(PeerId peer, const control::Leave& leave, GroupOutput* out);
  Violation Vote(PeerId peer, const control::Vote& vote, GroupOutput* out);
  Violation Sync(PeerId peer, const control::SyncVote& vote, GroupOutput* out);
  void SyncDone(PeerId peer, const control::SyncDone& done, GroupOutput* out);
  Violation Ready(PeerId peer, const control::EpochReady& ready);
  Violation Failed(PeerId peer, const control::EpochFailed& failed);
  Violation LinkLost(PeerId peer, const control::LinkLost& lost, Tick now, GroupOutput* out);
  void Evict(MemberId member, const std::string& reason, GroupOutput* out);
  // The peer is dead: all its members are. `silent_ms`: nothing was heard of it for so long before.
  void PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms, GroupOutput* out);
  // A member of the cohort is gone, or cannot be admitted together with the others: all go.
  void RemoveCohort(PeerId peer, const std::string& cohort, const std::string& reason,
                    GroupOutput* out);
  // The cohort is complete: its members are admitted by ballots above this number, or at once where
  // nobody is admitted.
  void AdmitCohortAfter(PeerId peer, const std::string& cohort, uint64_t ballot);
  // A link between two of its peers was measured, and is another than was thought.
  void LinkMeasured(Tick now);
  // A better ring is to be looked for, as Ring() may not be the best any more. Says so once.
  bool TakeOrderDue(Tick now);
  // What was found, for the ring of the epoch `asked_in`. Left if it does not fit any more.
  void RingFound(const std::vector<PeerId>& ring, Epoch asked_in, const RingScore& score,
                 const RingScore& present, GroupOutput* out);
  // Handles what is due by now.
  void OnTime(Tick now, GroupOutput* out);
  // The coordinator itself was held up for so long: nobody else is to pay for it.
  void Postpone(int64_t us);

  // Decides and applies until there is nothing to do but wait.
  void Advance(Tick now, GroupOutput* out);

  // ---- view

  const GroupRecord& record() const { return record_; }
  bool Empty() const { return record_.members.empty() && !preparation_; }
  bool HasPeer(PeerId peer) const;
  size_t CountMembers(PeerId peer) const;
  // Those that stay, in order of number.
  std::vector<const MemberRecord*> Cohort(PeerId peer, const std::string& cohort) const;
  // The number of the newest ballot that has a vote or is completed.
  uint64_t NewestBallot() const;
  // The ballot that was to admit this pending member is over, and it is still pending.
  bool Missed(const MemberRecord& member) const;
  // Admitted, or in the preparation that would admit it.
  bool AdmittedOrPrepared(const MemberRecord& member) const;
  // True if another peer says that it cannot reach this one, or lost its link to it and has not
  // reported all links up since. That it heard nothing counts a moment later only: what was lost in
  // a short outage is on its way again, after up to twice the outage.
  bool Accused(PeerId peer, Tick now) const;
  // All others say so, or are routed around it; and they are two or more. What they say counts at
  // once: if anything of it were on its way, one of them would have heard it.
  bool AccusedByAll(PeerId peer) const;
  // Whose accusers' moment is over; each is told once.
  std::vector<PeerId> TakeAccused(Tick now);
  Tick NextDeadline() const;
  // When TakeOrderDue() is due; kNever: not before something changes.
  Tick OrderDue() const { return order_due_; }
  // The group without its ring, which only the owner can describe.
  GroupView View() const;
  // Peers with admitted members, in ring order.
  std::vector<PeerId> Ring() const;

  void CheckInvariants() const;
  void AddTo(Digester* digest) const;

 private:
  // The first report of what the next freeze repairs.
  struct Fault {
    std::string cause;
    std::string detector;
    uint32_t detect_ms = 0;
    Tick since;
  };
  // What one peer of a preparation has answered; the latest answer counts.
  struct Answer {
    Tick due = kNever;  // set when PrepareEpoch first went out to an attached peer
    bool ready = false;
    bool failed = false;
    std::vector<control::OpReport> ops;
    std::map<PeerId, std::string> unreachable;
    bool answered() const { return ready || failed; }
  };
  struct Preparation {
    Epoch epoch;
    bool freeze = false;
    std::set<MemberId> survivors;  // admitted before
    std::set<MemberId> joiners;
    std::set<MemberId> raised;  // survivors that count from this epoch on
    bool reorders = false;      // to better_; it does nothing else then
    bool AtBoundary() const { return !joiners.empty() || !raised.empty() || reorders; }
    std::map<PeerId, Answer> answers;  // exactly the peers of survivors and joiners
    std::vector<PeerId> ring;          // the same peers
    control::BlockedPairs blocked;     // as told to them
    control::LinkCost cost;            // as told to them
    Tick begun;                        // of the first in an unbroken series of preparations
    uint32_t rebuilds = 0;             // lost links in that series
    bool widened = false;              // in that series, by newcomers that waited
    std::string cause;
    std::string changed;  // why it cannot be committed any more; empty: it can
  };
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
  // From the reporter to the peer that it lost.
  using LostLink = std::pair<PeerId, PeerId>;

  Decision Decide() const;
  Decision DecideInPreparation() const;
  Decision DecideIdle() const;
  std::string WaitingForAnswers() const;
  std::string WaitingForGrace() const;
  std::string WaitingForVotes() const;
  std::string WaitingForCohort() const;

  void Apply(const Decision& decision, Tick now, GroupOutput* out);
  void Prepare(const Decision& decision, Tick now, GroupOutput* out);
  void Commit(Tick now, GroupOutput* out);
  void CommitEmpty(GroupOutput* out);
  void Abort(const std::string& reason, GroupOutput* out);
  void AnswerVotes(GroupOutput* out);
  void AnswerVote(MemberId member, GroupOutput* out);
  void Emit(SyncOutput sync, GroupOutput* out) const;

  void TakeEpoch(const Preparation& done);
  void ChooseRing(Tick now, Preparation* preparation) const;
  void CompleteBallot();
  void SortPeers(const std::vector<PeerId>& ring);
  static void SortMembers(const std::vector<PeerId>& ring, const std::set<MemberId>& joiners,
                          std::vector<MemberRecord>* members);
  bool FitsRing(const std::vector<PeerId>& ring) const;
  bool AllAttached(const std::vector<PeerId>& peers) const;
  void HoldOrder(Tick until);
  void KeepRing(const std::string& reason, GroupOutput* out);
  void SendRemoved(const MemberRecord& member, control::Removal why, const std::string& reason,
                   GroupOutput* out) const;
  void SendPrepare(PeerId peer, Tick now, GroupOutput* out);
  control::PrepareEpoch MakePrepare() const;
  control::CommitEpoch MakeCommit(PeerId peer) const;
  void SendPendingCount(GroupOutput* out);
  // Peers that fetch it in the background, admitted members there.
  std::set<PeerId> BackgroundPeers() const;
  // To those that have to hear of it.
  void SendAgreed(GroupOutput* out);

  void Remove(MemberId member, control::Removal why, const std::string& reason, const Fault& fault,
              GroupOutput* out);
  void RemovePeer(PeerId peer, control::Removal why, const std::string& reason, const Fault& fault,
                  GroupOutput* out);
  void ResolveUnreachable(GroupOutput* out);
  void Settle(std::map<LostLink, std::string> pairs, GroupOutput* out);
  bool CanRouteAround(const std::map<LostLink, std::string>& pairs) const;
  bool CanRouteAround(const std::map<LostLink, std::string>& pairs,
                      const control::BlockedPairs& but, const std::vector<PeerId>& peers) const;
  control::BlockedPairs BlockedBefore() const;
  void Block(const std::map<LostLink, std::string>& pairs, int64_t retry_us, GroupOutput* out);
  void ForgetBlockedOfStrangers();
  PeerId ChooseVictim(const std::map<LostLink, std::string>& pairs) const;
  void LinkGraceOver(LostLink link, GroupOutput* out);
  Fault FaultNow(std::string cause, std::string detector, uint32_t detect_ms = 0) const;
  void NoteFault(const Fault& fault);
  void MarkChanged(const std::string& why);
  void Note(std::string kind, MemberId member, PeerId peer, std::string text,
            GroupOutput* out) const;

  MemberRecord* Find(MemberId member) { return FindMember(record_, member); }
  const MemberRecord* Find(MemberId member) const { return FindMember(record_, member); }
  std::set<MemberId> Admitted() const;
  std::set<MemberId> Survivors() const;
  // Of the survivors those that syncs wait for.
  std::set<MemberId> Counting() const;
  std::set<MemberId> Admissible() const;
  std::map<MemberId, Departure> Departures() const;
  bool AnyDeparture() const;
  bool AccusedBy(PeerId other, PeerId peer, Tick now) const;
  // Its stream is not silent.
  bool HeardOfLate(PeerId peer) const;
  // Who would miss the peer if it was dead: the others, but for those that may be dead themselves.
  std::vector<PeerId> Witnesses(PeerId peer) const;
  // Who takes part in what is being agreed, in ring order before blocked pairs are looked at.
  std::vector<PeerId> Participants() const;
  // Newcomers that this admission could take in as well.
  std::set<MemberId> Waiting() const;
  std::vector<PeerId> OrderOf(const std::set<PeerId>& peers) const;
  bool RoutedAround(PeerId x, PeerId y) const;
  control::BlockedPairs BlockedAmong(const std::vector<PeerId>& peers) const;
  // When the member is evicted unless it votes, or offers its state; kNever: it is not.
  Tick VoteDue(const MemberRecord& member) const;
  Tick OfferDue(const MemberRecord& member) const;
  void EvictLate(Tick (Group::*due)(const MemberRecord&) const, const std::string& what, Tick now,
                 GroupOutput* out);
  bool Judged(const MemberRecord& member) const;
  std::set<PeerId> PeersOf(const std::set<MemberId>& members) const;
  std::set<PeerId> AdmittedPeers() const;
  uint32_t CountPending() const;
  bool AnyAdmitted() const;
  bool InForce(PeerId peer) const;

  GroupRecord record_;
  std::string run_secret_;
  uint32_t detect_ms_;
  uint32_t ring_interval_ms_;
  const PeerDirectory* directory_;

  Ballot ballot_;  // its electorate: the admitted members that stay
  // Newcomers were tried since the votes came in: one try a ballot, so that a newcomer that cannot
  // be reached and asks again and again does not hold the voters for ever.
  bool admission_tried_ = false;
  Tick first_vote_ = kNever;  // of the open ballot
  std::set<MemberId> ready_;  // voters of it that are to come out of the background
  // Are to hear what was agreed on last, if they have a member in the background.
  std::set<PeerId> agreed_for_;
  SyncBallot sync_;
  std::string repair_;  // why the next epoch must freeze; empty: it need not
  std::optional<Preparation> preparation_;
  struct Grace {
    Tick due;
    Epoch epoch;  // of the report
    std::string reason;
    Fault fault;
  };
  std::map<LostLink, Grace> lost_;
  // Lost, and not reported up since: from when on it speaks against the second one. Long ago: it
  // does, and the owner knows.
  std::map<LostLink, Tick> missed_;
  // How often a pair lost its link of late.
  struct Strikes {
    uint32_t count = 0;
    uint32_t detours = 0;  // times that the pair was routed around at once, since it fell silent
    Tick last;
  };
  std::map<control::BlockedPair, Strikes> strikes_;
  // Of each pair of the record. It is tried again with the first freezing preparation that comes
  // `retry_us` after `since`.
  struct Detour {
    Tick since;
    int64_t retry_us = 0;
  };
  std::map<control::BlockedPair, Detour> detours_;
  std::optional<Fault> fault_;
  Epoch fault_epoch_;  // of `last_fault_`
  FaultRecord last_fault_;
  uint32_t pending_told_ = 0;
  // The peers of the ring in a better order, for the next boundary; empty: none is known. The
  // present order: its epoch only tells what the links cost by now.
  std::vector<PeerId> better_;
  std::string better_gain_;
  control::LinkCost told_;  // with the epoch in force; unknown after a restart
  Tick order_due_ = kNever;
  Tick order_after_;  // it is due no sooner
  Epoch ring_epoch_;  // the last that was there to order the ring anew
  std::string ring_gain_;
};

}  // namespace longhaul::coordinator
