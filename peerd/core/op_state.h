// What one peer knows of one op of a group: what its local members posted, what the participants
// said of it, and what follows from both.
//
// Plain values, and functions of them. OpTable (op_table.h) decides what happens to the op.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/core/verdicts.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// Unique among the group's ops in flight at this peer.
struct OpKey {
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;  // SetOf() the members that take part
  friend auto operator<=>(const OpKey&, const OpKey&) = default;
  LH_FIELDS(OpKey, LH_FIELD(boundary), LH_FIELD(tag), LH_FIELD(set));
};

// A digest of a set of members, as part of an op's name; 0 for no members, which stands for all.
// For kSendRecv the members are the sender and the receiver, in this order.
uint64_t SetOf(OpKind kind, const std::vector<MemberId>& members);

// Texts of outcomes: "all-reduce tag 7", and "all-reduce tag 7 aborted: CAUSE; what to do".
std::string Subject(const OpDesc& desc, uint64_t tag);
std::string AbortedBy(const OpDesc& desc, uint64_t tag, const std::string& cause);

// How an op ends if the call of a member was refused. `kind`: of that call.
Outcome RefusedBy(const OpRefusal& refusal, OpKind kind, const OpDesc& desc, uint64_t tag);

// Refused calls of one name that a peer may announce in a step before others have made theirs.
// Further ones are not announced.
inline constexpr size_t kRefusalsAheadMax = 8;

// Whether a small op of this kind may be answered as soon as the result is known here. A later
// death must neither change the result, nor keep a survivor from taking it from another one.
bool MayEndAtOnce(const OpDesc& desc);

// Whether a participant that announced the op in this way starts it only when it has every READY.
inline bool StartsLate(const OpDesc& desc, ReadyInput input) {
  return desc.NeedsTerms() || input != ReadyInput::kSegments;
}

// Divides the time of an op among its phases. A phase that did not come to its end takes 0.
void SetPhases(Tick complete_at, Tick moved_at, Tick posted, OpInfo* info);

// A local member's post of the op.
struct PostedInput {
  PostRef post;
  MemberId member;
  OpDesc desc;
  OpTerms terms;
  Tick posted;
  std::optional<Outcome> evicted;  // set: the member is out, and its post gets this answer
  uint64_t step = 0;               // NewPost::step
  std::string outline = {};        // of a list; see OutlineFault()
  LH_FIELDS(PostedInput, LH_FIELD(post), LH_FIELD(member), LH_FIELD(desc), LH_FIELD(terms),
            LH_FIELD(posted), LH_FIELD(evicted), LH_FIELD(step), LH_FIELD(outline));
};

struct OpState {
  enum class Run : uint8_t { kNone, kRunning, kComplete, kStopping };
  // A member has cancelled the op, or it cannot meet the calls of others (`stranded`).
  // kLate: since an epoch that freezes ops is being prepared, so the report on the op may be on its
  // way. kWanted: the coordinator was asked for such an epoch.
  enum class Cancelled : uint8_t { kNo, kLate, kWanted };

  // What was said of the op in the attempt in force, and what follows from it.
  struct Said {
    bool announced = false;
    std::optional<OtherOffer> other_offer;     // if the offers of local members differ
    bool differs = false;                      // two offers differ, here or at other peers
    ReadyInput input = ReadyInput::kSegments;  // as the own READY says
    std::vector<CutOwner> cuts;                // empty if `unfit`
    // Set if the op cannot run with these members: how it ends. All participants set it, perhaps
    // with other texts.
    std::optional<Outcome> unfit;
    bool judged = false;                  // JudgeTerms() has set the next three
    std::map<MemberId, OpTerms> terms;    // of all participants
    double weight_sum = 0;                // of all that contribute
    std::optional<std::string> mismatch;  // set: terms differ, and this is the error's text
    std::map<PeerId, PeerReady> readies;
    // Of those that StartsLate(): the peers that have started the op. Others have no place for
    // segments yet.
    std::set<PeerId> started;
    Verdicts verdicts;
    bool done = false;
    bool halted = false;  // a local member was removed before the op was done
    LH_STATE(Said, LH_FIELD(announced), LH_FIELD(other_offer), LH_FIELD(differs), LH_FIELD(input),
             LH_FIELD(cuts, rule::Aside{}), LH_FIELD(unfit), LH_FIELD(judged),
             LH_FIELD(terms, rule::Aside{}), LH_FIELD(weight_sum, rule::Aside{}),
             LH_FIELD(mismatch, rule::Aside{}), LH_FIELD(readies), LH_FIELD(started),
             LH_FIELD(verdicts), LH_FIELD(done), LH_FIELD(halted));
  };

  OpKey key;
  // The members of the set; of kSendRecv the sender and the receiver. Empty: all members.
  std::vector<MemberId> set;
  OpOrdinal ordinal;  // 0 until it is announced or cancelled for the first time
  std::vector<PostedInput> inputs;
  // Set: the call of a local member was refused, and all local members are answered or will be when
  // they post (OpTable::Refuse()). The op lingers from its first moment, without inputs.
  std::optional<OpRefusal> refusal;
  // Local members whose call was refused when the op was to end already. They owe it no post.
  std::set<MemberId> excused;

  // Of the newest attempt in which the op was announced; null: it never was.
  std::shared_ptr<const Participants> participants;
  OpDesc desc;
  Algorithm algorithm = Algorithm::kAuto;    // the chosen one
  Quantization codec = Quantization::kNone;  // the chosen one
  Said said;

  // In some attempt the own READY carried the input, or could have carried it. So a participant
  // may have a result that the others must take.
  bool offered = false;

  Run run = Run::kNone;
  Epoch run_attempt;
  Cancelled cancelled = Cancelled::kNo;
  MemberId cancelled_by;
  std::string stranded;  // not empty: why the op cannot meet the calls of others
  bool overdue = false;  // it has waited in this attempt when all had passed its boundary
  std::optional<std::string> abort;     // set: the fate is abort, and this is the error's text
  std::optional<OneShotResult> result;  // computed here, or sent by a participant that has it
  bool lingers = false;                 // the posts are answered

  bool complete_once = false;  // in some attempt every READY was here
  Tick complete_at;            // when this was so for the first time
  Tick moved_at;               // when the last attempt that came to its end had the result
  uint32_t retries = 0;
  bool redone = false;  // the newest freezing commit judged it redo

  LH_STATE(OpState, LH_FIELD(key), LH_FIELD(set), LH_FIELD(ordinal), LH_FIELD(inputs),
           LH_FIELD(refusal), LH_FIELD(excused), LH_FIELD(participants, rule::Aside{}),
           LH_FIELD(desc), LH_FIELD(algorithm), LH_FIELD(codec), LH_FIELD(said), LH_FIELD(offered),
           LH_FIELD(run), LH_FIELD(run_attempt), LH_FIELD(cancelled), LH_FIELD(cancelled_by),
           LH_FIELD(stranded), LH_FIELD(overdue), LH_FIELD(abort), LH_FIELD(result),
           LH_FIELD(lingers), LH_FIELD(complete_once), LH_FIELD(complete_at),
           LH_FIELD(moved_at, rule::Aside{}), LH_FIELD(retries), LH_FIELD(redone));

  // How many step boundaries its members had passed since key.boundary when they called.
  uint64_t Step() const;
  // A refusal belongs to the step of its call. Whether the READY refuses a call that the local
  // members have left out, and whether this op was refused, and the peer of the READY has left it
  // out.
  bool LeavesOut(const PeerReady& ready) const { return ready.refusal && ready.step < Step(); }
  bool IsLeftOutBy(const PeerReady& ready) const { return refusal && refusal->step < ready.step; }

  // What a local member posted, or what was announced.
  const OpDesc& Offered() const { return participants ? desc : inputs.front().desc; }
  // Whether reports name the op.
  bool IsReported() const {
    return (said.announced || cancelled == Cancelled::kWanted) && !AllEvicted();
  }

  // The verdict: the op ends without a result when all participants have said DONE.
  bool Refused() const { return said.differs || (said.unfit && !result); }
  bool AllReady() const {
    return said.announced && said.readies.size() + 1 == participants->ring.size() &&
           !said.verdicts.AwaitsOwn();
  }
  bool AllDone() const {
    return said.done && !said.verdicts.disputed() &&
           said.verdicts.count() + 1 == participants->ring.size();
  }
  bool AllEvicted() const;
  bool Live() const { return run == Run::kRunning || run == Run::kComplete; }
  // Whether the input of the member is in the op's result.
  bool Contributes(MemberId member) const { return participants->Contributes(member); }
  // Whether the op is answered as soon as it is done here.
  bool EndsAtOnce() const;
  bool HasInputOf(MemberId member) const;
  // Whether every local participant has posted the op. `all`: the participants, now.
  bool Gathered(const Participants& all, PeerId self) const;

  // The op is announced now, with these participants: sets its description, algorithm and codec.
  void BeginAttempt(std::shared_ptr<const Participants> all);
  // Forgets the attempt, so that the op can be announced again.
  void ForgetAttempt();
  void NoteComplete(Tick now);
  // Takes the READY of another participant. Returns what is wrong with it, or "". `keys`: the
  // public keys of peers.
  std::string TakeReady(PeerReady ready, const std::map<PeerId, std::string>& keys);
  // All READYs are here. If all of them carry inputs, the op is a one-shot exchange.
  void JudgeInputs();

  // The READY to each other participant; `to` is not set.
  SendReady Ready(const GroupKey& group, Epoch attempt) const;
  // Takes the inputs out of the READYs.
  StartAttempt Start(const GroupKey& group, Epoch attempt);
  control::OpReport Report(PeerId self) const;
  OpInfo Info(const EpochHistory& history) const;
  // How the post is refused if two offers differ.
  Outcome Mismatch(const PostedInput& input) const;
  // What the op waits for. For people.
  void Explain(const EpochHistory& history, PeerId self, bool frozen,
               control::OldestOp* oldest) const;
  void CheckInvariants(PeerId self, const std::string& name) const;

 private:
  std::vector<bool> ContributesOf() const;  // Contributes(), for each of `inputs`
  // True if the report must name the op's ordinals at other peers.
  bool NeedsMatches() const;
};

}  // namespace longhaul::peerd
