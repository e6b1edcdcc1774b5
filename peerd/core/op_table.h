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
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/events.h"
#include "peerd/core/missed_ops.h"
#include "peerd/core/new_post.h"
#include "peerd/core/op_counters.h"
#include "peerd/core/op_inbox.h"
#include "peerd/core/op_state.h"
#include "peerd/core/op_store.h"
#include "peerd/core/ready_numbers.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

class OpTable {
 public:
  OpTable(GroupKey group, PeerId self, const EpochHistory* history, OpCounters* counters);
  // A copy refers to the history and the counters of its original, until it is told of others.
  OpTable(const OpTable&) = default;
  OpTable& operator=(const OpTable&) = delete;
  void ReferTo(const EpochHistory* history, OpCounters* counters) {
    history_ = history;
    counters_ = counters;
  }

  // ---- local members. The member must be in the committed epoch. A post that is refused is
  // answered at once.

  // Returns how a post of this op would be refused, or OK.
  Outcome MayPost(const NewPost& post) const;
  void Post(const NewPost& post, Tick now, std::vector<Action>* out);
  // A call of the member was refused, and its trainer knows. The other participants wait for the
  // call: their op ends as well. Of the post its name counts. Nothing happens if the member has an
  // op of this name in flight, or too many refused calls that nobody has met yet.
  void Refuse(const NewPost& post, const std::string& why, Tick now, std::vector<Action>* out);
  // The member is out: its posts are answered with `outcome` once their attempts are stopped. The
  // exception: if the op is done and other local members wait for it, the post gets the outcome of
  // the op.
  void Evict(MemberId member, const Outcome& outcome, Tick now, std::vector<Action>* out);
  // The trainer of the post has given it up: the coordinator is asked for an epoch that ends the op
  // at all members.
  void Cancel(const PostRef& post, std::vector<Action>* out);
  // The member has passed a step boundary. It calls no op of an older boundary any more, and none
  // that was aborted before. Asks for the end of the ops that wait for such calls.
  void Pass(MemberId member, const Place& place, std::vector<Action>* out);
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
  void Expect(std::set<PeerId> peers) { inbox_.Expect(std::move(peers), *history_); }
  // Begins anew. No local member is admitted any more, no op is open, and the history is empty.
  void Reset();

  // The op that has been open for the longest time, and what it waits for. nullopt: no op is open.
  // `now` is that of the last event or later. For people: nothing is decided by it.
  std::optional<control::OldestOp> Oldest(Tick now) const;
  uint32_t open() const { return static_cast<uint32_t>(ops_.open().size() + finishing_.size()); }
  uint64_t settled() const { return settled_; }

  void CheckInvariants() const;
  LH_STATE(OpTable, LH_FIELD(group_, rule::Aside{}), LH_FIELD(self_, rule::Aside{}),
           LH_FIELD(history_, rule::Aside{}), LH_FIELD(counters_, rule::Aside{}), LH_FIELD(ops_),
           LH_FIELD(finishing_), LH_FIELD(tags_, rule::Aside{}), LH_FIELD(missed_),
           LH_FIELD(places_), LH_FIELD(inbox_), LH_FIELD(numbers_), LH_FIELD(latency_us_),
           LH_FIELD(attempt_), LH_FIELD(frozen_), LH_FIELD(settled_),
           LH_FIELD(resumed_, rule::Aside{}));

 private:
  // A settled op whose result the driver is putting into the targets.
  struct Finishing {
    OpKey key;
    std::vector<PostedInput> inputs;
    OpInfo info;
    Tick complete_at;
    Tick moved_at;
    bool redone = false;
    LH_FIELDS(Finishing, LH_FIELD(key), LH_FIELD(inputs), LH_FIELD(info), LH_FIELD(complete_at),
              LH_FIELD(moved_at, rule::Aside{}), LH_FIELD(redone));
  };

  // Takes all steps of the op that are possible now. The op may be gone afterwards.
  void Advance(OpState& op, Tick now, std::vector<Action>* out);
  void AdvanceAll(Tick now, std::vector<Action>* out);
  void AdvanceLingering(OpState& op, Tick now, std::vector<Action>* out);
  // Announces the op.
  void SendReadies(OpState& op, Tick now, std::vector<Action>* out);
  void AcceptReady(OpState& op, PeerReady ready, std::vector<Action>* out);
  // The op is to end at all members. It may not be announced yet.
  void RequestEnd(OpState& op, MemberId member, std::vector<Action>* out);
  // Asks the coordinator for an epoch that judges the cancelled op.
  void AskToCancel(const OpState& op, std::vector<Action>* out) const;
  Place PlaceOf(MemberId member) const;
  // If a call that the op needs cannot come any more: says why. Otherwise "". While one of the
  // members that have posted it has not passed its boundary, the op waits: started again, it would
  // not meet the others either.
  std::string WhyStranded(const OpState& op) const;
  void EndIfStranded(OpState& op, std::vector<Action>* out);
  // How the op is announced. Its algorithm and codec have been chosen.
  ReadyInput InputOf(const OpState& op) const;
  // Whether the peer may get this op's input before it announces the op itself.
  bool MaySendAhead(const OpState& op, PeerId peer) const;
  void Start(OpState& op, std::vector<Action>* out);
  void Credit(const OpState& op, const PeerReady& ready, std::vector<Action>* out) const;
  void Stop(OpState& op, std::vector<Action>* out);
  // The op is done. Does nothing if it was done before.
  void SendDones(OpState& op, std::vector<Action>* out) const;
  // Returns false if the verdict of a DONE is not that of this peer. Then the coordinator is told,
  // and the op waits for an epoch that freezes ops.
  bool CheckVerdicts(OpState& op, std::vector<Action>* out);
  void Dispute(const OpState& op, PeerId peer, std::vector<Action>* out) const;
  // Sets what the signatures of the announced op's READYs are checked with.
  void BeginSigning(OpState& op, std::vector<Action>* out);
  // Answers and removes the posts of members that are out.
  void DropEvicted(OpState& op, Tick now, std::vector<Action>* out);
  // Ends the op for the local trainers as every participant does: with its result, once it is in
  // the targets, or with the refusal.
  void Conclude(OpState& op, Tick now, std::vector<Action>* out);
  void Linger(OpState& op, Tick now, std::vector<Action>* out);
  // Ends the op at this peer alone, or as aborted. It must have no attempt.
  void Drop(OpState& op, Tick now, std::vector<Action>* out);
  void Erase(OpState& op);
  void Answer(const OpState& op, const PostedInput& input, Outcome outcome, Tick now,
              std::vector<Action>* out);
  void Answer(const OpKey& key, const PostedInput& input, Outcome outcome, OpInfo info, Tick now,
              std::vector<Action>* out);
  void ApplyFate(OpState& op, const std::map<OpOrdinal, control::Fate>& fates, Tick now,
                 FateCounts* counts, std::vector<Action>* out);
  // Ends an op Aborted at all local participants, because it ended so at other peers. Members that
  // have posted it are told now; the others are told when they post it.
  void Miss(const control::MissedOp& missed, const std::string& cause, Tick now,
            std::vector<Action>* out);
  // The op of the key ended Aborted at other peers, or was refused to another local member. If the
  // member has not posted it and may still do so, its post will be answered with that.
  void Owe(MemberId member, const control::MissedOp& missed, const std::string& cause);
  void Owe(MemberId member, const OpKey& key, MissedOps::Missed missed);

  // The peer broke the protocol in this attempt: breaks its link. Its next frames may depend on the
  // refused one, so the peer counts as lost.
  void Refuse(PeerId peer, Epoch attempt, const std::string& reason, std::vector<Action>* out);
  template <class Frame>
  void Refuse(const Frame& frame, const std::string& reason, std::vector<Action>* out) {
    Refuse(frame.peer, frame.attempt, reason, out);
  }

  GroupKey group_;
  PeerId self_;
  const EpochHistory* history_;
  OpCounters* counters_;

  OpStore ops_;
  std::map<OpOrdinal, Finishing> finishing_;
  // Tags and sets in flight of each member, as the ops have them.
  std::map<LocalId, std::set<std::pair<uint64_t, uint64_t>>> tags_;
  MissedOps missed_;
  std::map<MemberId, Place> places_;  // of local members, from their first Pass() on
  OpInbox inbox_;
  ReadyNumbers numbers_;                   // if READYs are signed
  std::map<PeerId, uint32_t> latency_us_;  // see NoteLatency()
  Epoch attempt_;
  bool frozen_ = false;
  uint64_t settled_ = 0;
  bool resumed_ = false;
};

}  // namespace longhaul::peerd
