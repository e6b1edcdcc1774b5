// The ops of one group at one peer: posted, matched, done, settled, and what a fault does to them.
//
// An op's life (docs/life_of_an_op.md) is decided in one place: whatever happens is noted in the
// op, and Advance() then looks at all of it and takes the next steps. Two things run beside each
// other:
//
//   the op       gathering -> announced -> done -> settled (gone)
//                    ^------------+-----------+  a freezing commit judged redo
//   its attempt  none -> running -> complete -> none
//                          +-----------+-> stopping -> none
//
// The posts of an op that is committed are answered when the driver has put the result into all
// targets (AttemptFinished). Nothing else is decided about it meanwhile: no fault undoes it.
//
// A one-shot op that is done is answered at once: it *lingers* until every participant is known to
// be done too, so that one which was kept from it by a fault can be given the result.
//
// "attempt" is what the driver runs (StartAttempt ... FinishAttempt); while it is stopping nothing
// is decided about the op. Frozen ops, and halted ones (a local member of the op was removed), rest
// until the next freezing epoch is committed.
//
// Plain state machine: no clock, no thread. The history given at construction outlives the table.
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

// What all groups of a peer share.
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
  PostRef post;
  MemberId member;
  Epoch boundary;  // of the member
  uint64_t tag = 0;
  OpDesc desc;
};

class OpTable {
 public:
  OpTable(GroupKey group, PeerId self, const EpochHistory* history, OpCounters* counters);
  // The same, beside copies of what it refers to.
  OpTable(const OpTable& other, const EpochHistory* history, OpCounters* counters);
  OpTable(const OpTable&) = delete;
  OpTable& operator=(const OpTable&) = delete;

  // ---- local members. An epoch that has the member is committed. A post that cannot be taken is
  // answered at once.

  // Not OK: a post of this op would be refused, with this answer.
  Outcome MayPost(LocalId local, uint64_t tag, const OpDesc& desc) const;
  void Post(const NewPost& post, Tick now, std::vector<Action>* out);
  // The member is out: its posts are answered with `outcome` once their attempts are stopped. A
  // post of an op that is done, and that other local members wait for too, shares the op's outcome.
  void Evict(MemberId member, const Outcome& outcome, Tick now, std::vector<Action>* out);
  // Of an op that a member may post: what waits for it here, and how many peers take part.
  void ViewPost(Epoch boundary, uint64_t tag, PostView* view) const;
  // Posts that are not answered.
  size_t PostsOf(LocalId local) const;
  // Ops of the member that linger: without this peer somebody may never have their result.
  size_t LingeringOf(LocalId local) const;

  // ---- other peers
  void OnReady(const PeerReady& ready, Tick now, std::vector<Action>* out);
  void OnDone(const PeerDone& done, Tick now, std::vector<Action>* out);
  // Frames to or from the peers may be missing: nothing is sent to them, and nothing of them taken,
  // until the next attempt.
  void Lose(const std::set<PeerId>& peers);

  // ---- the driver
  void OnComplete(const AttemptComplete& event, Tick now, std::vector<Action>* out);
  void OnFinished(const AttemptFinished& event, Tick now, std::vector<Action>* out);
  void OnStopped(const AttemptStopped& event, Tick now, std::vector<Action>* out);

  // ---- epochs
  void Freeze(Tick now, std::vector<Action>* out);
  bool frozen() const { return frozen_; }
  // An attempt that was told to stop has not answered.
  bool Stopping() const;
  // Announced and unsettled ops, by ordinal.
  std::vector<control::OpReport> Report() const;
  // The newest epoch of the history is in force. `fates` judge what was reported, if it freezes;
  // `missed` are ops that others abort and this peer did not report; `lost` are peers as in Lose().
  FateCounts Commit(const std::vector<control::OpFate>& fates,
                    const std::vector<control::MissedOp>& missed, const std::set<PeerId>& lost,
                    Tick now, std::vector<Action>* out);
  // An op that the newest freezing commit had judged redo has been answered.
  bool resumed() const { return resumed_; }
  // Frames are taken from peers of the newest epoch, and from these, which the next one may bring.
  // What others sent is forgotten.
  void Expect(std::set<PeerId> peers);
  // No local member is admitted any more, no op is open, and the history is empty: begin anew.
  void Reset();

  uint32_t open() const { return static_cast<uint32_t>(ops_.size() + finishing_.size()); }
  uint64_t settled() const { return settled_; }

  void CheckInvariants() const;
  void AddTo(Digester* digest) const;

 private:
  // Unique among the ops in flight at one peer.
  struct OpKey {
    Epoch boundary;
    uint64_t tag = 0;
    friend auto operator<=>(const OpKey&, const OpKey&) = default;
    friend bool operator==(const OpKey&, const OpKey&) = default;
  };
  struct LocalInput {
    PostRef post;
    MemberId member;
    OpDesc desc;
    Tick posted;
    std::optional<Outcome> evicted;  // the member is out
  };
  enum class Run : uint8_t { kNone, kRunning, kComplete, kStopping };
  struct Op {
    OpKey key;
    OpOrdinal ordinal;  // 0 until the first announcement
    std::vector<LocalInput> inputs;

    // Of the attempt in force, once announced in it.
    bool announced = false;
    std::shared_ptr<const Participants> participants;
    OpDesc desc;
    Algorithm algorithm = Algorithm::kAuto;  // chosen
    std::optional<OtherOffer> other_offer;   // if the members here disagree
    bool differs = false;                    // some descriptor differs
    // With this ring, or so few members, it cannot run: how it ends. The same at all participants.
    std::optional<Outcome> unfit;
    std::map<PeerId, PeerReady> readies;
    std::map<PeerId, bool> dones;  // and whether with verdict refused
    bool done = false;

    Run run = Run::kNone;
    Epoch run_attempt;
    bool halted = false;
    std::optional<std::string> abort;     // judged: abort, and why
    std::optional<OneShotResult> result;  // known here, or from the READY of one who has it
    bool lingers = false;                 // the posts are answered

    bool complete_once = false;  // every READY was in, in some attempt
    Tick complete_at;
    uint32_t retries = 0;
    bool redone = false;  // judged redo by the newest freezing commit

    // The verdict: it ends without a result, once all participants know.
    bool Refused() const { return differs || (unfit && !result); }
    bool AllReady() const { return announced && readies.size() + 1 == participants->ring.size(); }
    bool AllDone() const { return done && dones.size() + 1 == participants->ring.size(); }
    bool AllEvicted() const;
    bool Live() const { return run == Run::kRunning || run == Run::kComplete; }
  };
  struct Unmatched {
    std::map<OpKey, std::deque<PeerReady>> by_key;
    size_t count = 0;
  };
  // A committed op whose result is on its way to the targets.
  struct Finishing {
    uint64_t tag = 0;
    std::vector<LocalInput> inputs;
    OpInfo info;
    Tick complete_at;
    bool redone = false;
  };
  // Posts that are still to come of an op that has ended.
  struct Missed {
    uint32_t count = 0;
    std::string cause;
  };
  using EarlyFrame = std::variant<PeerReady, PeerDone>;

  // Takes the op as far as it goes now; it may be gone afterwards.
  void Advance(Op& op, Tick now, std::vector<Action>* out);
  void AdvanceAll(Tick now, std::vector<Action>* out);
  void AdvanceLingering(Op& op, Tick now, std::vector<Action>* out);
  // Announced ops by ordinal, then the others by key.
  std::vector<Op*> AllOps();
  // Every local participant has posted.
  bool Gathered(const Op& op) const;
  void Announce(Op& op, Tick now, std::vector<Action>* out);
  void AcceptReady(Op& op, PeerReady ready, std::vector<Action>* out);
  // The op that the peer means with its next READY of the name, if it is announced here.
  Op* Expecting(const OpKey& key, PeerId peer);
  // How the announced op has to end whatever the others offer; nothing if it can run.
  std::optional<Outcome> UnfitnessOf(const Op& op) const;
  void NoteComplete(Op& op, Tick now);
  // Whether the tensor of `member` is part of the op's result.
  static bool Contributes(const Op& op, MemberId member);
  // Contributes(), for each of op.inputs.
  static std::vector<bool> ContributesOf(const Op& op);
  void Start(Op& op, std::vector<Action>* out);
  void Credit(const Op& op, const PeerReady& ready, std::vector<Action>* out) const;
  void Stop(Op& op, std::vector<Action>* out);
  void SendDones(const Op& op, std::vector<Action>* out) const;
  // DONEs whose verdict is not ours: the peer broke the protocol.
  bool CheckVerdicts(Op& op, std::vector<Action>* out);
  // Answers the posts of members that are out.
  void DropEvicted(Op& op, Tick now, std::vector<Action>* out);
  // The op ends the same way at every participant: its result, or the refusal.
  void Settle(Op& op, Tick now, std::vector<Action>* out);
  // Tells the trainers how it ended.
  void Conclude(Op& op, Tick now, std::vector<Action>* out);
  static bool NeedsMatches(const Op& op);
  // Done, and may be answered before the others are known to be.
  static bool EndsAtOnce(const Op& op);
  void Linger(Op& op, Tick now, std::vector<Action>* out);
  // The op ends here alone, or aborted: no attempt of it is left.
  void Drop(Op& op, Tick now, std::vector<Action>* out);
  void Erase(Op& op);
  static OpInfo InfoOf(const Op& op);
  void Answer(const Op& op, const LocalInput& input, Outcome outcome, Tick now,
              std::vector<Action>* out);
  void Answer(uint64_t tag, const LocalInput& input, Outcome outcome, OpInfo info, Tick now,
              std::vector<Action>* out);
  std::string RefusalOf(const Op& op, const LocalInput& input) const;
  // The op is to be announced again.
  void ForgetAttempt(Op& op);
  void ApplyFate(Op& op, const std::map<OpOrdinal, control::Fate>& fates, Tick now,
                 FateCounts* counts, std::vector<Action>* out);

  // The op ends Aborted at all local members that take part, as it did at others: those that have
  // posted it are told, the others when they do.
  void Miss(const OpKey& key, const std::string& cause, Tick now, std::vector<Action>* out);
  // Why the post ends at once, if its member missed the op.
  std::optional<std::string> SettleMissed(const NewPost& post);

  static void AddInput(const LocalInput& input, Digester* digest);
  static void AddOp(const Op& op, Digester* digest);

  bool Known(PeerId peer) const;
  // What is said in the attempt does not reach the peer, or may have holes.
  bool Lost(PeerId peer, Epoch attempt) const;
  // The peer said in this attempt what is against the protocol. What it says next may build upon
  // that, so it counts as lost.
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
  const EpochHistory* const history_;
  OpCounters* const counters_;

  std::map<OpKey, Op> ops_;             // not answered
  std::multimap<OpKey, Op> lingering_;  // answered, of one name in order of their ordinals
  std::map<OpOrdinal, Op*> by_ordinal_;
  std::map<OpOrdinal, Finishing> finishing_;
  std::map<LocalId, std::set<uint64_t>> tags_;  // in flight, by member
  std::map<MemberId, std::map<OpKey, Missed>> missed_;
  std::map<PeerId, Unmatched> unmatched_;            // READYs of this attempt that no op has met
  std::map<PeerId, std::vector<EarlyFrame>> early_;  // of newer attempts, in order of arrival
  std::map<PeerId, Epoch> lost_;                     // up to this attempt
  std::set<PeerId> expected_;
  Epoch attempt_;
  bool frozen_ = false;
  uint64_t settled_ = 0;
  bool resumed_ = false;
};

}  // namespace longhaul::peerd
