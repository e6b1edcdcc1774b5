#include "peerd/core/op_table.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "base/check.h"
#include "peerd/core/algorithm.h"
#include "peerd/core/op_terms.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using Run = OpState::Run;
using Cancelled = OpState::Cancelled;

// The most ops of one key that may linger. A peer sends DONE of an op before READY of the next op,
// so without faults each op ends the lingering of the ops before it. A peer that never sends DONE
// is refused at this limit.
constexpr size_t kLingeringMax = 16 + kRefusalsAheadMax;

// The most bytes of larger inputs, own and foreign ones, of ops that are announced. Beyond, ops
// withhold their inputs.
constexpr uint64_t kInputBytesMax = uint64_t{256} << 20;

}  // namespace

OpTable::OpTable(GroupKey group, PeerId self, const EpochHistory* history, OpCounters* counters)
    : group_(std::move(group)), self_(self), history_(history), counters_(counters) {}

// ------------------------------------------------------------------------------ local members

Outcome OpTable::MayPost(const NewPost& post) const {
  const auto subject = [&post] { return Subject(post.local.desc, post.local.tag); };
  if (const std::string objection = ObjectionTo(post, *history_, self_); !objection.empty()) {
    return {Code::kInvalidArgument, subject() + " refused: " + objection};
  }
  const auto tags = tags_.find(post.local.post.local);
  if (tags == tags_.end()) return {};
  const uint64_t set = SetOf(post.local.desc.kind, SetMembersOf(post, *history_));
  if (tags->second.contains({post.local.tag, set})) {
    return {Code::kInvalidArgument,
            subject() +
                " refused: this member has an op with this tag in flight; wait for it, or use "
                "another tag"};
  }
  if (tags->second.size() >= LH_OPS_OPEN_MAX) {
    return {Code::kUnavailable, subject() + " refused: this member has " +
                                    std::to_string(tags->second.size()) +
                                    " ops in flight, the limit; wait for some of them"};
  }
  return {};
}

void OpTable::Post(const NewPost& post, Tick now, std::vector<Action>* out) {
  const LocalPost& local = post.local;
  const std::vector<MemberId> set = SetMembersOf(post, *history_);
  const OpKey key{post.boundary, local.tag, SetOf(local.desc.kind, set)};
  Outcome refusal = MayPost(post);
  if (!refusal.ok()) {
    const std::string objection = ObjectionTo(post, *history_, self_);
    if (!objection.empty()) Refuse(post, objection, now, out);
  } else if (const auto missed = missed_.Take(post.member, key, local.desc.kind)) {
    refusal = missed->refusal
                  ? RefusedBy(*missed->refusal, missed->kind, local.desc, local.tag)
                  : Outcome{Code::kAborted, AbortedBy(local.desc, local.tag, missed->cause)};
  } else if (std::find(set.begin(), set.end(), MemberId()) != set.end()) {
    refusal = {Code::kAborted,
               AbortedBy(local.desc, local.tag,
                         "its partner has rank " + std::to_string(*local.root_rank) +
                             ", and the group has " +
                             std::to_string(history_->current().members.size()) + " members")};
  }
  if (!refusal.ok()) {
    out->push_back(PostDone{local.post, refusal, {}});
    return;
  }
  tags_[local.post.local].insert({key.tag, key.set});
  OpState& op = ops_.Add(key);
  op.set = set;
  LH_CHECK(!op.said.announced && op.run == Run::kNone)
      << "op posted twice " << Subject(local.desc, local.tag);
  op.inputs.push_back(InputFrom(post, *history_, now));
  Advance(op, now, out);
}

void OpTable::Refuse(const NewPost& post, const std::string& why, Tick now,
                     std::vector<Action>* out) {
  const std::vector<MemberId> set = SetMembersOf(post, *history_);
  const OpKey key{post.boundary, post.local.tag, SetOf(post.local.desc.kind, set)};
  const OpKind kind = post.local.desc.kind;
  const std::shared_ptr<const Participants> all = history_->For(key.boundary, set);
  if (all->RankOf(post.member) < 0) return;
  const auto tags = tags_.find(post.local.post.local);
  if (tags != tags_.end() && tags->second.contains({key.tag, key.set})) return;
  // This call stands for the one that the member owes.
  if (missed_.Take(post.member, key, kind)) return;
  OpState* const op = ops_.Find(key);
  if (op != nullptr && op->ordinal) {
    op->excused.insert(post.member);  // the coordinator was asked for its end
    return;
  }
  if (!ops_.HasRoomForRefusal(key)) return;

  const OpRefusal refusal{post.member, post.step, RefusalText(why)};
  std::set<MemberId> told{post.member};
  if (op != nullptr) {
    ++settled_;
    ++counters_->refused;
    for (const PostedInput& input : op->inputs) {
      told.insert(input.member);
      Answer(*op, input,
             input.evicted ? *input.evicted : RefusedBy(refusal, kind, input.desc, key.tag), now,
             out);
    }
    Erase(*op);
  }
  for (const control::MemberInfo& info : all->members) {
    if (info.peer != self_ || told.contains(info.member)) continue;
    Owe(info.member, key, {kind, post.step, "", refusal});
  }
  if (all->ring.size() < 2) return;
  OpState& announced = ops_.AddLingering(key, OpOrdinal(counters_->next_ordinal++));
  announced.set = set;
  announced.desc = RefusedDesc(kind);
  announced.refusal = refusal;
  AdvanceLingering(announced, now, out);
}

void OpTable::Cancel(const PostRef& post, std::vector<Action>* out) {
  for (auto& [key, op] : ops_.open()) {
    const auto input = std::find_if(op.inputs.begin(), op.inputs.end(),
                                    [&](const PostedInput& each) { return each.post == post; });
    if (input == op.inputs.end()) continue;
    if (op.said.done || op.abort || input->evicted || op.cancelled != Cancelled::kNo) return;
    return RequestEnd(op, input->member, out);
  }
}

void OpTable::RequestEnd(OpState& op, MemberId member, std::vector<Action>* out) {
  if (!op.ordinal) ops_.SetOrdinal(OpOrdinal(counters_->next_ordinal++), &op);
  op.cancelled_by = member;
  // An op that was announced in an older attempt may have been answered elsewhere. It is reported
  // only when it is announced again: then it is seen who is done with it.
  const bool late = frozen_ || (op.participants && !op.said.announced);
  op.cancelled = late ? Cancelled::kLate : Cancelled::kWanted;
  if (!late) AskToCancel(op, out);
}

void OpTable::AskToCancel(const OpState& op, std::vector<Action>* out) const {
  const std::string subject = Subject(op.Offered(), op.key.tag);
  const std::string what = op.stranded.empty() ? ToString(op.cancelled_by) + " cancelled " + subject
                                               : subject + " cannot end well: " + op.stranded;
  out->push_back(ToCoordinator{control::CancelOp{group_, op.cancelled_by, attempt_, what}});
}

// ------------------------------------------------------------------------------ boundaries

Place OpTable::PlaceOf(MemberId member) const {
  const auto it = places_.find(member);
  return it == places_.end() ? Place() : it->second;
}

void OpTable::Pass(MemberId member, const Place& place, std::vector<Action>* out) {
  const Place before = std::exchange(places_[member], place);
  missed_.Pass(member, place.boundary, place.step);
  ops_.ForgetRefusals(member, before);
  // The boundary of which local members may still post ops. A member that has not passed one yet
  // may do so from its admission on.
  Epoch floor = place.boundary;
  for (const control::MemberInfo& info : history_->current().members) {
    if (info.peer != self_) continue;
    floor = std::min(floor, std::max(info.joined, PlaceOf(info.member).boundary));
  }
  inbox_.ForgetBefore(floor, [this](const OpKey& key) {
    return ops_.Find(key) != nullptr || ops_.CountLingering(key) != 0;
  });
  for (auto& [key, op] : ops_.open()) {
    if (key.boundary >= place.boundary) break;
    EndIfStranded(op, out);
    // All members have voted at this boundary, so all had passed the one before.
    const bool all_passed = op.inputs.front().member == member && key.boundary < before.boundary;
    if (all_passed && op.said.announced && !frozen_) op.overdue = true;
  }
}

std::string OpTable::WhyStranded(const OpState& op) const {
  // If every READY was here once, everybody has called the op.
  if (op.complete_once || op.abort || op.said.halted || op.AllReady()) return "";
  for (const PostedInput& input : op.inputs) {
    if (input.evicted || PlaceOf(input.member).boundary <= op.key.boundary) return "";
  }
  const auto why = [&](MemberId member, const char* what, Epoch boundary) {
    return ToString(op.inputs.front().member) + " called it at boundary " +
           ToString(op.key.boundary) + ", and " + ToString(member) + what + ToString(boundary);
  };
  const std::shared_ptr<const Participants> all = history_->For(op.key.boundary, op.set);
  for (const control::MemberInfo& info : all->members) {
    if (info.peer != self_ || op.HasInputOf(info.member)) continue;
    const Epoch passed = PlaceOf(info.member).boundary;
    if (passed > op.key.boundary) {
      return why(info.member, " has not called it and has passed boundary ", passed);
    }
  }
  for (const PeerId peer : all->ring) {
    if (peer == self_ || op.said.readies.contains(peer)) continue;
    if (inbox_.Unmatched(peer, op.key) != nullptr) continue;
    const MemberId member = all->FirstMemberOf(peer);
    if (const Epoch later = inbox_.LaterCall(peer, op.key)) {
      return why(member, " has called it at boundary ", later);
    }
    if (op.overdue) {
      return why(member, " has not called it and has passed boundary ",
                 PlaceOf(op.inputs.front().member).boundary);
    }
  }
  return "";
}

void OpTable::EndIfStranded(OpState& op, std::vector<Action>* out) {
  if (op.cancelled != Cancelled::kNo) return;
  op.stranded = WhyStranded(op);
  if (!op.stranded.empty()) RequestEnd(op, op.inputs.front().member, out);
}

void OpTable::AskAgain(std::vector<Action>* out) const {
  if (frozen_) return;
  for (const auto& [key, op] : ops_.open()) {
    if (op.cancelled == Cancelled::kWanted && !op.said.done) AskToCancel(op, out);
  }
  for (const auto& [ordinal, op] : ops_.by_ordinal()) {
    const Verdicts& verdicts = op->said.verdicts;
    if (!verdicts.disputed()) continue;
    Dispute(*op, verdicts.FirstOtherThan(verdicts.Own(self_, op->Refused())), out);
  }
}

void OpTable::Evict(MemberId member, const Outcome& outcome, Tick now, std::vector<Action>* out) {
  for (OpState* op : ops_.All()) {
    if (op->lingers) continue;
    bool touched = false;
    for (PostedInput& input : op->inputs) {
      if (input.member != member || input.evicted) continue;
      input.evicted = outcome;
      touched = true;
    }
    if (!touched) continue;
    if (op->said.announced && !op->said.done) op->said.halted = true;
    Advance(*op, now, out);
  }
}

void OpTable::ViewPost(const NewPost& post, PostView* view) const {
  const std::vector<MemberId> set = SetMembersOf(post, *history_);
  const std::shared_ptr<const Participants> participants = history_->For(post.boundary, set);
  view->peers = participants->ring.size();
  std::set<PeerId> peers;
  for (const control::MemberInfo& info : participants->members) {
    view->crowded = view->crowded || !peers.insert(info.peer).second;
  }
  const OpState* const op =
      ops_.Find({post.boundary, post.local.tag, SetOf(post.local.desc.kind, set)});
  if (op == nullptr) return;
  for (const PostedInput& input : op->inputs) view->together.emplace_back(input.post, input.member);
}

size_t OpTable::PostsOf(LocalId local) const {
  const auto it = tags_.find(local);
  return it == tags_.end() ? 0 : it->second.size();
}

size_t OpTable::LingeringOf(LocalId local) const {
  return std::count_if(
      ops_.lingering().begin(), ops_.lingering().end(), [local](const auto& entry) {
        const std::vector<PostedInput>& inputs = entry.second.inputs;
        return std::any_of(inputs.begin(), inputs.end(),
                           [local](const PostedInput& input) { return input.post.local == local; });
      });
}

// ------------------------------------------------------------------------------ frames

void OpTable::Lose(const std::set<PeerId>& peers) {
  for (const PeerId peer : peers) inbox_.Lose(peer, attempt_);
}

void OpTable::Refuse(PeerId peer, Epoch attempt, const std::string& reason,
                     std::vector<Action>* out) {
  ++counters_->frames_refused;
  inbox_.Lose(peer, attempt);
  out->push_back(BreakLink{group_, peer, "group " + ToString(group_) + ": " + reason});
}

void OpTable::OnReady(const PeerReady& ready, Tick now, std::vector<Action>* out) {
  if (!inbox_.Expects(ready.peer, *history_) || ready.attempt < attempt_) {
    ++counters_->frames_stale;
    return;
  }
  if (inbox_.Lost(ready.peer, ready.attempt)) return;
  std::string problem = PayloadProblem(ready);
  OpState* op = nullptr;
  if (problem.empty() && ready.attempt > attempt_) {
    problem = inbox_.KeepEarly(ready);
  } else if (problem.empty()) {
    // Each op that was announced in this attempt is announced again in the next.
    if (frozen_) return;
    const OpKey key{ready.boundary, ready.tag, ready.set};
    op = ops_.Expecting(key, ready.peer);
    while (op != nullptr && op->IsLeftOutBy(ready)) {
      ops_.Erase(*op);  // it can never end
      op = ops_.Expecting(key, ready.peer);
    }
    if (op != nullptr && op->LeavesOut(ready)) return numbers_.Skip(ready);
    if (op == nullptr) {
      problem = inbox_.KeepUnmatched(ready);
      for (auto& [key, old] : ops_.open()) {
        if (key.boundary >= ready.boundary) break;
        if (key.tag == ready.tag && key.set == ready.set) EndIfStranded(old, out);
      }
    } else if (!op->participants->HasPeer(ready.peer)) {
      problem = "READY of tag " + std::to_string(ready.tag) + " posted before the peer joined";
    }
  }
  if (!problem.empty()) return Refuse(ready, problem, out);
  if (op == nullptr) return;
  AcceptReady(*op, ready, out);
  if (op->AllReady()) op->NoteComplete(now);
  if (op->Live()) Credit(*op, ready, out);
  Advance(*op, now, out);
}

void OpTable::AcceptReady(OpState& op, PeerReady ready, std::vector<Action>* out) {
  const PeerId peer = ready.peer;
  const std::string problem = !op.lingers && ops_.CountLingering(op.key) >= kLingeringMax
                                  ? "without DONE of those before"
                                  : op.TakeReady(std::move(ready), history_->current().keys);
  if (problem.empty()) return;
  Refuse(peer, attempt_, "READY of tag " + std::to_string(op.key.tag) + " " + problem, out);
}

void OpTable::OnDone(const PeerDone& done, Tick now, std::vector<Action>* out) {
  if (!inbox_.Expects(done.peer, *history_) || done.attempt < attempt_) {
    ++counters_->frames_stale;
    return;
  }
  if (inbox_.Lost(done.peer, done.attempt)) return;
  if (done.attempt > attempt_) {
    const std::string problem = inbox_.KeepEarly(done);
    if (!problem.empty()) Refuse(done, problem, out);
    return;
  }
  OpState* const op = ops_.Find(done.ordinal);
  if (frozen_) {
    // Nothing settles any more. But the coordinator may learn from a dispute who lies.
    if (op == nullptr || !op->AllReady() || done.started) return;
    Verdicts& verdicts = op->said.verdicts;
    const OpVerdict theirs{done.refused, done.readies_digest};
    if (verdicts.disputed() || theirs == verdicts.Own(self_, op->Refused())) return;
    verdicts.SetDisputed();
    return Dispute(*op, done.peer, out);
  }
  if (op == nullptr) {
    if (done.ordinal && done.ordinal.value() < counters_->next_ordinal) {
      ++counters_->frames_stale;
      return;
    }
    return Refuse(done, "DONE for " + ToString(done.ordinal) + ", which never was", out);
  }
  const auto ready = op->said.readies.find(done.peer);
  const bool announced = op->said.announced && ready != op->said.readies.end();
  if (done.started) {
    if (!announced || !StartsLate(op->desc, ready->second.input) ||
        !op->said.started.insert(done.peer).second) {
      return Refuse(done, "DONE (started) for " + ToString(done.ordinal) + " out of order", out);
    }
    if (op->Live()) Credit(*op, ready->second, out);
    return;
  }
  // A peer sends one DONE for an op, after its own READY, and only if all participants announced
  // it.
  const std::string problem = !announced || op->said.verdicts.HasDone(done.peer)
                                  ? "out of order"
                                  : op->said.verdicts.TakeDone(done);
  if (!problem.empty()) {
    return Refuse(done, "DONE for " + ToString(done.ordinal) + " " + problem, out);
  }
  Advance(*op, now, out);
}

// ------------------------------------------------------------------------------ for people

std::optional<control::OldestOp> OpTable::Oldest(Tick now) const {
  // An op that has been posted by several members is as old as its first post.
  const auto posted_at = [](const std::vector<PostedInput>& inputs) {
    Tick first = kNever;
    for (const PostedInput& input : inputs) first = std::min(first, input.posted);
    return first;
  };
  Tick since = kNever;
  const OpState* waiting = nullptr;
  const Finishing* finishing = nullptr;
  for (const auto& [key, op] : ops_.open()) {
    const Tick posted = posted_at(op.inputs);
    if (posted >= since) continue;
    since = posted;
    waiting = &op;
  }
  for (const auto& [ordinal, op] : finishing_) {
    const Tick posted = posted_at(op.inputs);
    if (posted >= since) continue;
    since = posted;
    finishing = &op;
  }
  if (since == kNever) return std::nullopt;
  control::OldestOp oldest;
  oldest.age_ms = static_cast<uint32_t>(std::clamp<int64_t>((now - since) / 1000, 0, UINT32_MAX));
  if (finishing != nullptr) {
    oldest.tag = finishing->key.tag;
    oldest.phase = control::OpPhase::kFinish;
  } else {
    waiting->Explain(*history_, self_, frozen_, &oldest);
  }
  return oldest;
}

// ------------------------------------------------------------------------------ the driver

void OpTable::OnSigned(const ReadySigned& event, Tick now, std::vector<Action>* out) {
  OpState* const op = ops_.Find(event.ordinal);
  if (op == nullptr || event.attempt != attempt_) return;
  if (op->said.verdicts.signed_as() == nullptr) return;
  op->said.verdicts.SignedOwn(event.digest);
  if (op->AllReady()) op->NoteComplete(now);
  Advance(*op, now, out);
}

void OpTable::OnComplete(const AttemptComplete& event, Tick now, std::vector<Action>* out) {
  OpState* const op = ops_.Find(event.ordinal);
  if (op == nullptr || op->run != Run::kRunning || op->run_attempt != event.attempt) return;
  op->run = Run::kComplete;
  op->moved_at = now;
  if (op->EndsAtOnce() && !op->result && ops_.HasRoomToLinger(*op)) {
    op->result =
        OneShotResult{op->participants->epoch, op->participants->contributors, event.result};
  }
  Advance(*op, now, out);
}

void OpTable::OnFinished(const AttemptFinished& event, Tick now, std::vector<Action>* out) {
  const auto found = finishing_.extract(event.ordinal);
  if (found.empty()) return;
  const Finishing& op = found.mapped();
  resumed_ = resumed_ || op.redone;
  for (const PostedInput& input : op.inputs) {
    OpInfo info = op.info;
    SetPhases(op.complete_at, op.moved_at, input.posted, &info);
    Answer(op.key, input, Outcome(), info, now, out);
  }
}

void OpTable::OnStopped(const AttemptStopped& event, Tick now, std::vector<Action>* out) {
  OpState* const op = ops_.Find(event.ordinal);
  if (op == nullptr || op->run != Run::kStopping || op->run_attempt != event.attempt) return;
  op->run = Run::kNone;
  Advance(*op, now, out);
}

// ------------------------------------------------------------------------------ the life of an op

void OpTable::AdvanceAll(Tick now, std::vector<Action>* out) {
  // Advance() ends no op but the one it is given.
  for (OpState* op : ops_.All()) Advance(*op, now, out);
}

void OpTable::Advance(OpState& op, Tick now, std::vector<Action>* out) {
  if (op.lingers) return AdvanceLingering(op, now, out);
  if (op.run == Run::kStopping) return;
  const bool over = op.abort.has_value() || op.AllEvicted();
  const bool resting = frozen_ || op.said.halted;
  if (op.Live() && (over || !op.said.announced || op.Refused() || (resting && !op.said.done))) {
    return Stop(op, out);
  }
  if (over) return Drop(op, now, out);
  if (op.run == Run::kNone && !op.said.done) DropEvicted(op, now, out);
  if (resting) return;

  if (!op.said.announced) {
    if (!op.Gathered(*history_->For(op.key.boundary, op.set), self_)) return;
    SendReadies(op, now, out);
  }
  if (op.AllReady()) {
    op.JudgeInputs();
    JudgeTerms(&op, self_);
    if (!CheckVerdicts(op, out)) return;
  }
  if (!op.Refused()) {
    if (op.run == Run::kNone) {
      const bool waits = op.algorithm == Algorithm::kOneShot || StartsLate(op.desc, op.said.input);
      if (waits && !op.AllReady()) return;
      Start(op, out);
    }
    if (op.run != Run::kComplete) return;
  }
  if (!op.AllReady()) return;
  if (op.EndsAtOnce() && op.result) return Linger(op, now, out);
  SendDones(op, out);
  if (!op.AllDone()) return;
  Conclude(op, now, out);
  Erase(op);
}

void OpTable::AdvanceLingering(OpState& op, Tick now, std::vector<Action>* out) {
  if (frozen_) return;
  if (!op.said.announced) SendReadies(op, now, out);
  if (!op.AllReady()) return;
  SendDones(op, out);
  if (CheckVerdicts(op, out) && op.AllDone()) Erase(op);
}

void OpTable::SendReadies(OpState& op, Tick now, std::vector<Action>* out) {
  if (!op.ordinal) ops_.SetOrdinal(OpOrdinal(counters_->next_ordinal++), &op);
  op.BeginAttempt(history_->For(op.key.boundary, op.set));
  if (!op.refusal) op.said.unfit = UnfitnessOf(op, *history_);
  op.said.input = InputOf(op);
  op.offered = op.offered || op.said.input != ReadyInput::kSegments;
  for (const PeerId peer : op.participants->ring) {
    const PeerReady* first = inbox_.Unmatched(peer, op.key);
    for (; first != nullptr && op.LeavesOut(*first); first = inbox_.Unmatched(peer, op.key)) {
      numbers_.Skip(inbox_.TakeUnmatched(peer, op.key));
    }
  }
  BeginSigning(op, out);
  if (!op.refusal && !op.said.unfit) op.said.cuts = CutsOf(op);
  SendReady ready = op.Ready(group_, attempt_);
  for (const PeerId peer : op.participants->ring) {
    if (peer == self_) continue;
    ready.to = peer;
    if (!inbox_.Lost(peer, attempt_)) out->push_back(ready);
    const PeerReady* const next = inbox_.Unmatched(peer, op.key);
    if (next == nullptr || op.IsLeftOutBy(*next)) continue;
    AcceptReady(op, inbox_.TakeUnmatched(peer, op.key), out);
  }
  if (op.AllReady()) op.NoteComplete(now);
  if (op.cancelled != Cancelled::kLate || op.lingers) return;
  op.cancelled = Cancelled::kWanted;
  AskToCancel(op, out);
}

ReadyInput OpTable::InputOf(const OpState& op) const {
  if (op.lingers || op.said.other_offer || !MayCarryInput(op.desc)) return ReadyInput::kSegments;
  const Participants& all = *op.participants;
  uint32_t latency_us = 0;
  for (const PeerId peer : all.ring) {
    const auto it = latency_us_.find(peer);
    if (it != latency_us_.end()) latency_us = std::max(latency_us, it->second);
  }
  // Signing takes long for many bytes.
  const bool carries =
      !history_->current().sign_ops &&
      CarriesInput(op.desc.With(op.codec), all.ring.size(), all.mesh, all.cost, latency_us);
  if (!carries) return op.offered ? ReadyInput::kWithheld : ReadyInput::kSegments;
  const bool room = ops_.InputBytesWith(op) <= kInputBytesMax &&
                    std::all_of(all.ring.begin(), all.ring.end(),
                                [&](PeerId peer) { return MaySendAhead(op, peer); });
  return room ? ReadyInput::kCarried : ReadyInput::kWithheld;
}

bool OpTable::MaySendAhead(const OpState& op, PeerId peer) const {
  if (peer == self_) return true;
  if (inbox_.Unmatched(peer, op.key) != nullptr) return true;
  uint64_t ahead = OneShotPayloadBytes(op.desc);
  for (const auto& [ordinal, other] : ops_.by_ordinal()) {
    if (other == &op || !other->said.announced || other->said.input != ReadyInput::kCarried)
      continue;
    if (!other->participants->HasPeer(peer) || other->said.readies.contains(peer)) continue;
    ahead += OneShotPayloadBytes(other->desc);
  }
  return ahead <= LH_READY_INPUTS_AHEAD_BYTES_MAX;
}

void OpTable::Start(OpState& op, std::vector<Action>* out) {
  out->push_back(op.Start(group_, attempt_));
  op.run = Run::kRunning;
  op.run_attempt = attempt_;
  const bool tells = StartsLate(op.desc, op.said.input) && op.algorithm != Algorithm::kOneShot;
  for (const auto& [peer, ready] : op.said.readies) {
    Credit(op, ready, out);
    if (!tells || inbox_.Lost(peer, attempt_)) continue;
    SendDone started{group_, peer, ready.ordinal, attempt_};
    started.started = true;
    out->push_back(started);
  }
}

void OpTable::Credit(const OpState& op, const PeerReady& ready, std::vector<Action>* out) const {
  if (op.Refused() || op.algorithm == Algorithm::kOneShot) return;
  if (StartsLate(op.desc, ready.input) && !op.said.started.contains(ready.peer)) return;
  out->push_back(CreditAttempt{group_, op.ordinal, attempt_, ready.peer, ready.ordinal});
}

void OpTable::Stop(OpState& op, std::vector<Action>* out) {
  out->push_back(StopAttempt{group_, op.ordinal, op.run_attempt});
  op.run = Run::kStopping;
}

void OpTable::SendDones(OpState& op, std::vector<Action>* out) const {
  if (std::exchange(op.said.done, true)) return;
  const OpVerdict verdict = op.said.verdicts.Own(self_, op.Refused());
  for (const PeerId peer : op.participants->ring) {
    if (peer == self_ || inbox_.Lost(peer, attempt_)) continue;
    SendDone done{group_,
                  peer,
                  op.said.readies.at(peer).ordinal,
                  attempt_,
                  verdict.refused,
                  /*may_wait=*/op.lingers && !op.refusal};
    done.readies_digest = verdict.readies_digest;
    out->push_back(done);
  }
}

// ------------------------------------------------------------------------------ verdicts

bool OpTable::CheckVerdicts(OpState& op, std::vector<Action>* out) {
  Verdicts& verdicts = op.said.verdicts;
  if (verdicts.disputed()) return false;
  if (verdicts.count() == 0) return true;
  const PeerId other = verdicts.FirstOtherThan(verdicts.Own(self_, op.Refused()));
  if (!other) return true;
  verdicts.SetDisputed();
  Dispute(op, other, out);
  return false;
}

void OpTable::Dispute(const OpState& op, PeerId peer, std::vector<Action>* out) const {
  control::Dispute dispute{group_, peer, attempt_, op.key.boundary, op.key.tag, op.key.set};
  if (const control::ReadyName* const name = op.said.verdicts.signed_as()) {
    dispute.index = name->index;
    dispute.statements = op.said.verdicts.Statements();
  }
  dispute.what = Subject(op.desc, op.key.tag);
  out->push_back(ToCoordinator{std::move(dispute)});
}

void OpTable::BeginSigning(OpState& op, std::vector<Action>* out) {
  if (!history_->current().sign_ops || op.participants->ring.size() < 2) return;
  const uint64_t index = numbers_.Next(op.key);
  op.said.verdicts.BeginSigning({group_, attempt_, op.key.boundary, op.key.tag, op.key.set, index});
  if (!numbers_.AsksForNewAttempt()) return;
  control::Dispute dispute{group_, PeerId(), attempt_, op.key.boundary, op.key.tag, op.key.set};
  dispute.what = "it cannot count the READYs of more names";
  out->push_back(ToCoordinator{std::move(dispute)});
}

// ------------------------------------------------------------------------------ the end of an op

void OpTable::DropEvicted(OpState& op, Tick now, std::vector<Action>* out) {
  for (size_t i = 0; i < op.inputs.size();) {
    if (!op.inputs[i].evicted) {
      ++i;
      continue;
    }
    Answer(op, op.inputs[i], *op.inputs[i].evicted, now, out);
    op.inputs.erase(op.inputs.begin() + static_cast<ptrdiff_t>(i));
  }
}

void OpTable::Conclude(OpState& op, Tick now, std::vector<Action>* out) {
  const bool aborted = !op.said.differs && op.said.unfit && op.said.unfit->code == Code::kAborted;
  ++settled_;
  ++(!op.Refused() ? counters_->committed : aborted ? counters_->aborted : counters_->refused);
  out->push_back(FinishAttempt{group_, op.ordinal, !op.Refused()});
  if (!op.Refused()) {
    finishing_.emplace(op.ordinal, Finishing{op.key, op.inputs, op.Info(*history_), op.complete_at,
                                             op.moved_at, std::exchange(op.redone, false)});
    return;
  }
  for (const PostedInput& input : op.inputs) {
    Answer(op, input, op.said.differs ? op.Mismatch(input) : *op.said.unfit, now, out);
  }
}

void OpTable::Linger(OpState& op, Tick now, std::vector<Action>* out) {
  Conclude(op, now, out);
  op.run = Run::kNone;
  op.cancelled = Cancelled::kNo;  // it was too late
  ops_.Linger(&op);
  AdvanceLingering(op, now, out);
}

void OpTable::Drop(OpState& op, Tick now, std::vector<Action>* out) {
  if (op.abort) {
    ++settled_;
    ++counters_->aborted;
  }
  if (op.participants) out->push_back(FinishAttempt{group_, op.ordinal, false});
  for (const PostedInput& input : op.inputs) {
    Answer(op, input, input.evicted ? *input.evicted : Outcome{Code::kAborted, *op.abort}, now,
           out);
  }
  Erase(op);
}

void OpTable::Erase(OpState& op) {
  resumed_ = resumed_ || op.redone;
  ops_.Erase(op);
}

void OpTable::Answer(const OpState& op, const PostedInput& input, Outcome outcome, Tick now,
                     std::vector<Action>* out) {
  OpInfo info = op.Info(*history_);
  if (op.complete_once) SetPhases(op.complete_at, op.moved_at, input.posted, &info);
  Answer(op.key, input, std::move(outcome), info, now, out);
}

void OpTable::Answer(const OpKey& key, const PostedInput& input, Outcome outcome, OpInfo info,
                     Tick now, std::vector<Action>* out) {
  info.total_us = now - input.posted;
  const auto tags = tags_.find(input.post.local);
  LH_CHECK(tags != tags_.end() && tags->second.erase({key.tag, key.set}) == 1);
  if (tags->second.empty()) tags_.erase(tags);
  out->push_back(PostDone{input.post, std::move(outcome), info});
}

// ------------------------------------------------------------------------------ epochs

void OpTable::Freeze(Tick now, std::vector<Action>* out) {
  frozen_ = true;
  // Perhaps this peer refuses the op because it was told another offer than the others. They have
  // sent no DONE, so nothing differs here, but they may dispute this peer's DONE.
  for (const auto& [ordinal, op] : ops_.by_ordinal()) {
    const Verdicts& verdicts = op->said.verdicts;
    if (verdicts.signed_as() == nullptr || verdicts.disputed()) continue;
    if (op->AllReady() && op->Refused()) Dispute(*op, PeerId(), out);
  }
  AdvanceAll(now, out);
}

bool OpTable::Stopping() const {
  return std::any_of(ops_.by_ordinal().begin(), ops_.by_ordinal().end(),
                     [](const auto& entry) { return entry.second->run == Run::kStopping; });
}

std::vector<control::OpReport> OpTable::Report() const {
  std::vector<control::OpReport> reports;
  for (const auto& [ordinal, op] : ops_.by_ordinal()) {
    // If all local members of an op are out, this peer has no survivor of the op and reports
    // nothing.
    if (op->IsReported()) reports.push_back(op->Report(self_));
  }
  return reports;
}

void OpTable::ApplyFate(OpState& op, const std::map<OpOrdinal, control::Fate>& fates, Tick now,
                        FateCounts* counts, std::vector<Action>* out) {
  op.redone = false;
  if (op.refusal && !history_->For(op.key.boundary, op.set)->HasPeer(self_)) return Erase(op);
  if (!op.IsReported()) return;
  const bool abort_on_fault = op.desc.on_fault == OnFault::kAbort;
  control::Fate fate = abort_on_fault ? control::Fate::kAbort : control::Fate::kRedo;
  const auto it = fates.find(op.ordinal);
  if (it == fates.end() || (it->second == control::Fate::kCommit && !op.said.done)) {
    out->push_back(LogLine{"fate makes no sense group=" + ToString(group_) +
                           " op=" + ToString(op.ordinal) + " done=" + (op.said.done ? "1" : "0") +
                           (it == fates.end() ? " fate=none" : " fate=commit")});
  } else {
    fate = it->second;
  }
  if (op.lingers) {
    // If no local member takes part any more, this peer does not announce the op again.
    const bool needed = history_->For(op.key.boundary, op.set)->HasPeer(self_);
    const bool aborted = op.refusal && fate == control::Fate::kAbort;
    if (fate == control::Fate::kCommit || aborted || !needed) return Erase(op);
    return op.ForgetAttempt();
  }
  ++(fate == control::Fate::kCommit  ? counts->committed
     : fate == control::Fate::kAbort ? counts->aborted
                                     : counts->redone);
  if (fate == control::Fate::kCommit) {
    Conclude(op, now, out);
    return Erase(op);
  }
  op.redone = fate == control::Fate::kRedo && op.said.announced;
  // The coordinator knew that the op was cancelled: it was too late.
  if (op.redone && op.cancelled == Cancelled::kWanted) op.cancelled = Cancelled::kNo;
  if (fate == control::Fate::kRedo && !op.said.announced) op.cancelled = Cancelled::kLate;
  if (fate == control::Fate::kAbort) {
    const std::string& cause = op.stranded.empty() ? history_->current().cause : op.stranded;
    op.abort = AbortedBy(op.Offered(), op.key.tag, cause);
    // If it was not announced, some local members have not posted it.
    const control::OpReport report = op.Report(self_);
    const control::MissedOp missed{op.key.boundary, op.key.tag, op.key.set, report.kind,
                                   report.step};
    const std::shared_ptr<const Participants> all = history_->For(op.key.boundary, op.set);
    for (const control::MemberInfo& info : all->members) {
      if (info.peer != self_ || op.HasInputOf(info.member)) continue;
      if (!op.excused.contains(info.member)) Owe(info.member, missed, cause);
    }
  } else if (op.AllReady() && !op.Refused()) {
    ++op.retries;
    ++counters_->retries;
  }
  op.ForgetAttempt();
}

void OpTable::Owe(MemberId member, const control::MissedOp& missed, const std::string& cause) {
  Owe(member, {missed.boundary, missed.tag, missed.set},
      {static_cast<OpKind>(missed.kind), missed.step, cause, std::nullopt});
}

void OpTable::Owe(MemberId member, const OpKey& key, MissedOps::Missed missed) {
  if (PlaceOf(member) > Place{key.boundary, missed.step}) return;
  missed_.Add(member, key, std::move(missed));
}

void OpTable::Miss(const control::MissedOp& missed, const std::string& cause, Tick now,
                   std::vector<Action>* out) {
  const OpKey key{missed.boundary, missed.tag, missed.set};
  std::set<MemberId> posted;
  OpState* const op = ops_.Find(key);
  if (op != nullptr && op->said.announced) return;  // the message does not fit
  // A call that was refused meanwhile was the one that the member owes now.
  OpState* const refused = ops_.FindRefusal(key, static_cast<OpKind>(missed.kind), missed.step);
  if (refused != nullptr) return ops_.Erase(*refused);
  // If the op here is redone, the missed op is the next one of this key.
  if (op != nullptr && !op->redone) {
    for (const PostedInput& input : op->inputs) posted.insert(input.member);
    posted.insert(op->excused.begin(), op->excused.end());
    const PostedInput& first = op->inputs.front();
    // Otherwise the members have left the missed op out, and have posted the next one.
    if (static_cast<uint32_t>(first.desc.kind) == missed.kind && first.step <= missed.step) {
      op->abort = AbortedBy(first.desc, key.tag, cause);
      Advance(*op, now, out);
    }
  }
  const std::shared_ptr<const Participants> all = history_->For(key.boundary);
  for (const control::MemberInfo& info : all->members) {
    if (info.peer == self_ && !posted.contains(info.member)) Owe(info.member, missed, cause);
  }
}

FateCounts OpTable::Commit(const std::vector<control::OpFate>& fates,
                           const std::vector<control::MissedOp>& missed,
                           const std::set<PeerId>& lost, Tick now, std::vector<Action>* out) {
  FateCounts counts;
  const EpochRecord& record = history_->current();
  if (record.last_freeze == attempt_) {
    Lose(lost);
    Expect({});
    AdvanceAll(now, out);
    return counts;
  }
  attempt_ = record.last_freeze;
  frozen_ = false;
  inbox_.BeginAttempt(attempt_);
  Lose(lost);
  numbers_.Clear();
  std::map<OpOrdinal, control::Fate> by_ordinal;
  for (const control::OpFate& fate : fates) by_ordinal.emplace(fate.ordinal, fate.fate);
  for (OpState* op : ops_.All()) ApplyFate(*op, by_ordinal, now, &counts, out);
  missed_.KeepMembersOf(record);
  std::erase_if(places_, [&](const auto& entry) { return record.RankOf(entry.first) < 0; });
  for (const control::MissedOp& op : missed) Miss(op, record.cause, now, out);
  resumed_ = false;
  for (auto& [ordinal, op] : finishing_) op.redone = false;
  for (auto& [key, op] : ops_.open()) {
    for (PostedInput& input : op.inputs) {
      if (input.evicted || record.RankOf(input.member) >= 0) continue;
      input.evicted = {Code::kEvicted, Subject(input.desc, key.tag) + " ended: member " +
                                           ToString(input.member) + " is not in epoch " +
                                           ToString(record.epoch) + " (" + record.cause + ")"};
    }
  }
  AdvanceAll(now, out);
  for (auto& [key, op] : ops_.open()) {
    if (op.cancelled != Cancelled::kLate || op.participants) continue;
    op.cancelled = Cancelled::kWanted;
    AskToCancel(op, out);
  }
  Expect({});
  for (const OpInbox::Frame& frame : inbox_.TakeEarly()) {
    if (const auto* ready = std::get_if<PeerReady>(&frame)) {
      OnReady(*ready, now, out);
    } else {
      OnDone(std::get<PeerDone>(frame), now, out);
    }
  }
  return counts;
}

void OpTable::Reset() {
  LH_CHECK(open() == 0);
  for (const OpState* op : ops_.All()) ops_.Erase(*op);
  missed_.Clear();
  places_.clear();
  numbers_.Clear();
  attempt_ = Epoch();
  frozen_ = false;
  inbox_.Reset(*history_);
}

// ------------------------------------------------------------------------------ for tests

void OpTable::CheckInvariants() const {
  ops_.CheckInvariants();
  missed_.CheckInvariants();
  inbox_.CheckInvariants();
  std::map<LocalId, std::set<std::pair<uint64_t, uint64_t>>> tags;
  const auto check_tags = [&](const OpKey& key, const std::vector<PostedInput>& inputs,
                              const std::string& name) {
    LH_CHECK(!inputs.empty()) << name;
    for (const PostedInput& input : inputs) {
      LH_CHECK(tags[input.post.local].insert({key.tag, key.set}).second) << name;
    }
  };
  for (const auto& [key, op] : ops_.open()) {
    const std::string name = ToString(group_) + " tag " + std::to_string(key.tag);
    op.CheckInvariants(self_, name);
    check_tags(key, op.inputs, name);
    LH_CHECK(op.ordinal.value() < counters_->next_ordinal) << name;
    LH_CHECK(!op.said.done || frozen_ || op.run == Run::kStopping || !op.AllDone())
        << name << " not settled";
    LH_CHECK(!op.Live() || op.run_attempt == attempt_) << name;
    LH_CHECK(!frozen_ || op.said.done || !op.Live()) << name << " runs while frozen";
    LH_CHECK(op.said.announced || frozen_ || op.run == Run::kStopping ||
             !op.Gathered(*history_->For(key.boundary, op.set), self_))
        << name << " can be announced";
  }
  for (const auto& [key, op] : ops_.lingering()) {
    const std::string name = ToString(group_) + " lingering tag " + std::to_string(key.tag);
    op.CheckInvariants(self_, name);
    LH_CHECK(frozen_ || op.said.done == op.AllReady()) << name;
    LH_CHECK(frozen_ || !op.AllDone()) << name << " is known everywhere";
  }
  for (const auto& [ordinal, op] : finishing_) {
    const std::string name = ToString(group_) + " finishing tag " + std::to_string(op.key.tag);
    check_tags(op.key, op.inputs, name);
    LH_CHECK(ordinal.value() < counters_->next_ordinal) << name;
  }
  LH_CHECK(tags == tags_) << ToString(group_);
}

}  // namespace longhaul::peerd
