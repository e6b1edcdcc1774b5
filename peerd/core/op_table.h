// The ops of one group at one peer, from the first post to the outcome, and what a fault does to
// them (docs/life_of_an_op.md).
//
// The next step of an op is decided in one place: each event is only noted in the op. Then
// Advance() looks at the whole op and takes all steps that are possible. An op and its attempt have
// a state each:
//
//   the op       gathering -> announced -> done -> settled (gone)
//                    ^------------+-----------+  a freezing commit with fate redo
//   its attempt  none -> running -> complete -> none
//                          +-----------+-> stopping -> none
//
// The attempt is what the driver runs, from StartAttempt to FinishAttempt or AttemptStopped. While
// it is stopping, nothing is decided about the op.
//
// If an op is settled with a result, its posts are answered when the driver has put the result into
// all targets (AttemptFinished). No fault can undo the op meanwhile.
//
// A one-shot op is answered as soon as it is done. Then it *lingers*: this peer keeps the result
// until every participant is known to be done. So it can give the result to a participant that a
// fault kept from it. (Not with on_fault=abort, or if the op is refused: then the op ends like
// larger ones.)
//
// Frozen ops rest until the next freezing epoch is committed. So do halted ops: a local member of
// the op was removed before the op was done.
//
// Plain state machine: no clock, no thread. The history given to the constructor must outlive the
// table.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/events.h"
#include "peerd/core/signed_readies.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// What a freezing commit did to the ops that it froze.
struct FateCounts {
  uint32_t committed = 0;
  uint32_t redone = 0;
  uint32_t aborted = 0;
};

// All groups of a peer share these counters.
struct OpCounters {
  uint64_t next_ordinal = 1;
  uint64_t committed = 0;
  uint64_t aborted = 0;
  uint64_t refused = 0;
  uint64_t retries = 0;
  uint64_t frames_stale = 0;
  uint64_t frames_refused = 0;
};

struct NewPost {
  LocalPost local;
  MemberId member;
  Epoch boundary;  // EpochRecord::boundary at the member's last step boundary
};

// A digest of a set of members, as part of an op's name; 0 for no members, which stands for all.
// For kSendRecv the members are the sender and the receiver, in this order.
uint64_t SetOf(OpKind kind, const std::vector<MemberId>& members);

class OpTable {
 public:
  OpTable(GroupKey group, PeerId self, const EpochHistory* history, OpCounters* counters);
  // A copy of `other` that refers to copies of its history and counters.
  OpTable(const OpTable& other, const EpochHistory* history, OpCounters* counters);
  OpTable& operator=(const OpTable&) = delete;

  // ---- local members. The member must be in the committed epoch. A post that is refused is
  // answered at once.

  // Returns how a post of this op would be refused, or OK.
  Outcome MayPost(const NewPost& post) const;
  void Post(const NewPost& post, Tick now, std::vector<Action>* out);
  // The member is out: its posts are answered with `outcome` once their attempts are stopped. The
  // exception: if the op is done and other local members wait for it, the post gets the outcome of
  // the op.
  void Evict(MemberId member, const Outcome& outcome, Tick now, std::vector<Action>* out);
  // The trainer of the post has given it up. An op that was never announced ends here at once, for
  // this member. Otherwise the coordinator is asked for an epoch that ends it at all members.
  void Cancel(const PostRef& post, Tick now, std::vector<Action>* out);
  // The coordinator may have lost what Cancel() and disputes asked: asks again.
  void AskAgain(std::vector<Action>* out) const;
  // For an op that a member is about to post: fills in the local posts that wait for this one, and
  // the number of peers that take part.
  void ViewPost(const NewPost& post, PostView* view) const;
  // The number of posts of the member that are not answered.
  size_t PostsOf(LocalId local) const;
  // The number of ops of the member that linger: another peer may need the result from this peer.
  size_t LingeringOf(LocalId local) const;

  // ---- other peers
  void OnReady(const PeerReady& ready, Tick now, std::vector<Action>* out);
  void OnDone(const PeerDone& done, Tick now, std::vector<Action>* out);
  // Frames to or from these peers may be missing. Until the next attempt nothing is sent to them,
  // and their frames are ignored.
  void Lose(const std::set<PeerId>& peers);
  // The link to the peer has this latency, one way. 0: unknown, or the path is short.
  void NoteLatency(PeerId peer, uint32_t us) { latency_us_[peer] = us; }

  // ---- the driver
  void OnSigned(const ReadySigned& event, Tick now, std::vector<Action>* out);
  void OnComplete(const AttemptComplete& event, Tick now, std::vector<Action>* out);
  void OnFinished(const AttemptFinished& event, Tick now, std::vector<Action>* out);
  void OnStopped(const AttemptStopped& event, Tick now, std::vector<Action>* out);

  // ---- epochs
  // An epoch that freezes is prepared: stops the attempts that are not done, and lets all ops rest.
  void Freeze(Tick now, std::vector<Action>* out);
  bool frozen() const { return frozen_; }
  // True if an attempt that was told to stop has not answered.
  bool Stopping() const;
  // The reports on all ops that are announced and not settled, by ordinal.
  std::vector<control::OpReport> Report() const;
  // The newest epoch of the history is in force. If it freezes, `fates` are the fates of the
  // reported ops, and `missed` are ops that other peers abort and this peer did not report. `lost`:
  // peers as in Lose().
  FateCounts Commit(const std::vector<control::OpFate>& fates,
                    const std::vector<control::MissedOp>& missed, const std::set<PeerId>& lost,
                    Tick now, std::vector<Action>* out);
  // True if an op that the newest freezing commit judged redo has ended since.
  bool resumed() const { return resumed_; }
  // From now on frames are taken from the peers of the newest epoch of the history and from
  // `peers`, those of the prepared epoch. Waiting frames of all other peers are forgotten.
  void Expect(std::set<PeerId> peers);
  // Begins anew. No local member is admitted any more, no op is open, and the history is empty.
  void Reset();

  // The op that has been open for the longest time, and what it waits for. nullopt: no op is open.
  // `now` is that of the last event or later. For people: nothing is decided by it.
  std::optional<control::OldestOp> Oldest(Tick now) const;
  uint32_t open() const { return static_cast<uint32_t>(ops_.size() + finishing_.size()); }
  uint64_t settled() const { return settled_; }

  void CheckInvariants() const;
  void AddTo(Digester* digest) const;

 private:
  OpTable(const OpTable&) = default;

  // Unique among the group's ops in flight at this peer.
  struct OpKey {
    Epoch boundary;
    uint64_t tag = 0;
    uint64_t set = 0;  // SetOf() the members that take part
    friend auto operator<=>(const OpKey&, const OpKey&) = default;
    friend bool operator==(const OpKey&, const OpKey&) = default;
  };
  struct LocalInput {
    PostRef post;
    MemberId member;
    OpDesc desc;
    OpTerms terms;
    Tick posted;
    std::optional<Outcome> evicted;  // set: the member is out, and its post gets this answer
  };
  // What a DONE says of the op.
  struct Verdict {
    bool refused = false;
    std::optional<Hash128> readies_digest;  // see PeerDone
    friend bool operator==(const Verdict&, const Verdict&) = default;
  };
  enum class Run : uint8_t { kNone, kRunning, kComplete, kStopping };
  // kLate: cancelled while an epoch that freezes ops is being prepared, so the report on the op may
  // be on its way. kWanted: the coordinator was asked for such an epoch.
  enum class Cancelled : uint8_t { kNo, kLate, kWanted };
  struct Op {
    OpKey key;
    // The members of the set; of kSendRecv the sender and the receiver. Empty: all members.
    std::vector<MemberId> set;
    OpOrdinal ordinal;  // 0 until the first announcement
    std::vector<LocalInput> inputs;

    // These belong to the attempt in force, and are set when the op is announced in it.
    bool announced = false;
    std::shared_ptr<const Participants> participants;
    OpDesc desc;
    Algorithm algorithm = Algorithm::kAuto;    // the chosen one
    Quantization codec = Quantization::kNone;  // the chosen one
    std::optional<OtherOffer> other_offer;     // if the offers of local members differ
    bool differs = false;                      // two offers differ, here or at other peers
    ReadyInput input = ReadyInput::kSegments;  // as the own READY says
    std::vector<CutOwner> cuts;                // empty if `unfit`
    // Set if the op cannot run with these members: how it ends. All participants set it, perhaps
    // with other texts.
    std::optional<Outcome> unfit;
    bool judged = false;                  // JudgeTerms() was called
    std::map<MemberId, OpTerms> terms;    // of all participants, if `judged`
    double weight_sum = 0;                // of all that contribute, if `judged`
    std::optional<std::string> mismatch;  // set: terms differ, and this is the error's text
    std::map<PeerId, PeerReady> readies;
    // Of those that StartLate(): the peers that have started the op. Others have no place for
    // segments yet.
    std::set<PeerId> started;
    std::map<PeerId, Verdict> dones;
    bool done = false;
    std::optional<SignedReadies> signed_readies;  // if READYs are signed, and other peers take part
    bool disputed = false;                        // the coordinator was told of a DONE that differs

    // In some attempt the own READY carried the input, or could have carried it. So a participant
    // may have a result that the others must take.
    bool offered = false;

    Run run = Run::kNone;
    Epoch run_attempt;
    bool halted = false;
    Cancelled cancelled = Cancelled::kNo;
    MemberId cancelled_by;
    std::optional<std::string> abort;     // set: the fate is abort, and this is the error's text
    std::optional<OneShotResult> result;  // computed here, or sent by a participant that has it
    bool lingers = false;                 // the posts are answered

    bool complete_once = false;  // in some attempt every READY was here
    Tick complete_at;            // when this was so for the first time
    // When the last attempt that came to its end had the result. Nothing is decided by it, so it is
    // not in the digest.
    Tick moved_at;
    uint32_t retries = 0;
    bool redone = false;  // the newest freezing commit judged it redo

    // The verdict: the op ends without a result when all participants have said DONE.
    bool Refused() const { return differs || (unfit && !result); }
    bool AllReady() const {
      return announced && readies.size() + 1 == participants->ring.size() &&
             (!signed_readies || !signed_readies->own.empty());
    }
    bool AllDone() const {
      return done && !disputed && dones.size() + 1 == participants->ring.size();
    }
    bool AllEvicted() const;
    bool Live() const { return run == Run::kRunning || run == Run::kComplete; }
  };
  // The participants of an op of this name that is posted or announced now.
  std::shared_ptr<const Participants> ParticipantsOf(const OpKey& key,
                                                     const std::vector<MemberId>& set) const;
  // READYs of one peer that no op here has met yet.
  struct Unmatched {
    std::map<OpKey, std::deque<PeerReady>> by_key;
    size_t count = 0;
    uint64_t bytes = 0;  // BytesCarried()
  };
  // A settled op whose result the driver is putting into the targets.
  struct Finishing {
    OpKey key;
    std::vector<LocalInput> inputs;
    OpInfo info;
    Tick complete_at;
    Tick moved_at;
    bool redone = false;
  };
  // An op that ended Aborted before a member posted it: how many such posts are still to come.
  struct Missed {
    uint32_t count = 0;
    std::string cause;
  };
  using EarlyFrame = std::variant<PeerReady, PeerDone>;

  void ExplainOp(const Op& op, control::OldestOp* oldest) const;
  // Takes all steps of the op that are possible now. The op may be gone afterwards.
  void Advance(Op& op, Tick now, std::vector<Action>* out);
  void AdvanceAll(Tick now, std::vector<Action>* out);
  void AdvanceLingering(Op& op, Tick now, std::vector<Action>* out);
  // All ops: those with an ordinal, by ordinal, then the others by key.
  std::vector<Op*> AllOps();
  // True if every local participant has posted the op.
  bool Gathered(const Op& op) const;
  void Announce(Op& op, Tick now, std::vector<Action>* out);
  void AcceptReady(Op& op, PeerReady ready, std::vector<Action>* out);
  // Returns the op that the peer means with its next READY of this key: the oldest op of the key
  // that is announced here and has no READY of the peer. nullptr: there is none.
  Op* Expecting(const OpKey& key, PeerId peer);
  // Returns how the announced op must end because of the members that take part. nullopt: it can
  // run.
  std::optional<Outcome> UnfitnessOf(const Op& op) const;
  Outcome UnfitFor(const Op& op, const std::string& cause) const;
  // A text such as "member m3 (host-a)".
  std::string NameOf(MemberId member) const;
  // The member of this rank in the newest epoch; 0: there is none.
  MemberId OfRank(uint64_t rank) const;
  // The set of the post's op; see Op::set. The partner is 0 if its rank is not there.
  std::vector<MemberId> SetMembersOf(const NewPost& post) const;
  // What is wrong with the post, whatever else is in flight; or "".
  std::string ObjectionTo(const NewPost& post) const;
  std::optional<std::string> TermsMismatch(const Op& op) const;
  std::optional<std::string> SpaceMissing(const Op& op) const;
  // All READYs of the op are here. Looks at the terms of all participants: sets `mismatch` if their
  // lengths do not fit, and `unfit` if no weight is left.
  void JudgeTerms(Op& op);
  // The parts of the announced op; empty: parts belong to nobody.
  std::vector<CutOwner> CutsOf(const Op& op) const;
  // Asks the coordinator for an epoch that judges the cancelled op.
  void AskToCancel(const Op& op, std::vector<Action>* out) const;
  void NoteComplete(Op& op, Tick now);
  // Whether the input of `member` is in the op's result.
  static bool Contributes(const Op& op, MemberId member);
  // Contributes(), for each of op.inputs.
  static std::vector<bool> ContributesOf(const Op& op);
  // How the op is announced. Its algorithm and codec have been chosen.
  ReadyInput InputOf(const Op& op) const;
  // The bytes of the inputs, of all participants, of announced ops whose READYs carry them. This op
  // counts as one of them.
  uint64_t InputBytesWith(const Op& op) const;
  // Whether the peer may get this op's input before it announces the op itself.
  bool MaySendAhead(const Op& op, PeerId peer) const;
  // All READYs of the op are here. If all of them carry inputs, the op is a one-shot exchange.
  static void JudgeInputs(Op& op);
  // Whether a participant that announced the op in this way starts it only when it has every READY.
  static bool StartsLate(const OpDesc& desc, ReadyInput input) {
    return desc.NeedsTerms() || input != ReadyInput::kSegments;
  }
  void Start(Op& op, std::vector<Action>* out);
  void Credit(const Op& op, const PeerReady& ready, std::vector<Action>* out) const;
  void Stop(Op& op, std::vector<Action>* out);
  void SendDones(const Op& op, std::vector<Action>* out) const;
  Verdict VerdictOf(const Op& op) const;
  // Returns false if the verdict of a DONE is not that of this peer. Then the coordinator is told,
  // and the op waits for an epoch that freezes ops.
  bool CheckVerdicts(Op& op, std::vector<Action>* out);
  // The first peer whose DONE has another verdict than this peer; 0: there is none.
  PeerId FirstThatDiffers(const Op& op) const;
  void Dispute(const Op& op, PeerId peer, std::vector<Action>* out) const;
  // Sets what the signatures of the announced op's READYs are checked with.
  void BeginSigning(Op& op, std::vector<Action>* out);
  // Answers and removes the posts of members that are out.
  void DropEvicted(Op& op, Tick now, std::vector<Action>* out);
  // Ends the op as every participant does: with its result, or with the refusal.
  void Settle(Op& op, Tick now, std::vector<Action>* out);
  // Ends the op for the local trainers: with the result once it is in the targets, or a refusal.
  void Conclude(Op& op, Tick now, std::vector<Action>* out);
  // True if the report on the op must name the op's ordinals at other peers.
  static bool NeedsMatches(const Op& op);
  // True if the op is answered as soon as it is done here.
  static bool EndsAtOnce(const Op& op);
  // Whether there is room to keep the op's result while it lingers.
  bool HasRoomToLinger(const Op& op) const;
  void Linger(Op& op, Tick now, std::vector<Action>* out);
  // Ends the op at this peer alone, or as aborted. It must have no attempt.
  void Drop(Op& op, Tick now, std::vector<Action>* out);
  void Erase(Op& op);
  OpInfo InfoOf(const Op& op) const;
  void Answer(const Op& op, const LocalInput& input, Outcome outcome, Tick now,
              std::vector<Action>* out);
  void Answer(const OpKey& key, const LocalInput& input, Outcome outcome, OpInfo info, Tick now,
              std::vector<Action>* out);
  std::string RefusalOf(const Op& op, const LocalInput& input) const;
  // Forgets the attempt, so that the op can be announced again.
  void ForgetAttempt(Op& op);
  void ApplyFate(Op& op, const std::map<OpOrdinal, control::Fate>& fates, Tick now,
                 FateCounts* counts, std::vector<Action>* out);

  // Ends an op Aborted at all local participants, because it ended so at other peers. Members that
  // have posted it are told now; the others are told when they post it.
  void Miss(const OpKey& key, const std::string& cause, Tick now, std::vector<Action>* out);
  // If the member missed the op: returns why its post ends at once.
  std::optional<std::string> SettleMissed(const NewPost& post, const OpKey& key);

  static void AddInput(const LocalInput& input, Digester* digest);
  static void AddOp(const Op& op, Digester* digest);

  // True if frames are taken from the peer; see Expect().
  bool Known(PeerId peer) const;
  // True if frames of this attempt to or from the peer may be missing.
  bool Lost(PeerId peer, Epoch attempt) const;
  // The peer broke the protocol in this attempt: breaks its link. Its next frames may depend on the
  // refused one, so the peer counts as lost.
  void Refuse(PeerId peer, Epoch attempt, const std::string& reason, std::vector<Action>* out);
  template <class Frame>
  void Refuse(const Frame& frame, const std::string& reason, std::vector<Action>* out) {
    Refuse(frame.peer, frame.attempt, reason, out);
  }
  template <class Frame>
  void KeepEarly(const Frame& frame, std::vector<Action>* out);
  void KeepUnmatched(const PeerReady& ready, std::vector<Action>* out);

  const GroupKey group_;
  const PeerId self_;
  const EpochHistory* history_;
  OpCounters* counters_;

  std::map<OpKey, Op> ops_;             // not answered
  std::multimap<OpKey, Op> lingering_;  // answered; those of one key in order of their ordinals
  std::map<OpOrdinal, Op*> by_ordinal_;
  std::map<OpOrdinal, Finishing> finishing_;
  // Tags and sets in flight of each member.
  std::map<LocalId, std::set<std::pair<uint64_t, uint64_t>>> tags_;
  std::map<MemberId, std::map<OpKey, Missed>> missed_;
  std::map<PeerId, Unmatched> unmatched_;            // of the attempt in force
  std::map<PeerId, std::vector<EarlyFrame>> early_;  // of newer attempts, in order of arrival
  std::map<PeerId, Epoch> lost_;                     // the last attempt for which Lost() is true
  // If READYs are signed: how many ops of each name were announced in this attempt.
  std::map<OpKey, uint64_t> announced_;
  bool new_attempt_asked_ = false;
  std::set<PeerId> expected_;              // see Expect()
  std::map<PeerId, uint32_t> latency_us_;  // see NoteLatency()
  Epoch attempt_;
  bool frozen_ = false;
  uint64_t settled_ = 0;
  bool resumed_ = false;
};

}  // namespace longhaul::peerd
