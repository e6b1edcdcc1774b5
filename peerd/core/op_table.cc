#include "peerd/core/op_table.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "peerd/core/algorithm.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// Divides the time of an op among its phases. A phase that did not come to its end takes 0.
void SetPhases(Tick complete_at, Tick moved_at, Tick posted, OpInfo* info) {
  info->wait_us = std::max<int64_t>(0, complete_at - posted);
  info->transfer_us = std::max<int64_t>(0, moved_at - std::max(complete_at, posted));
}

// The most READYs of one key that wait for one peer's ops. A peer that has settled an op may
// announce the next op of the same tag, but it cannot settle that one without this peer. So one
// READY may wait; one more is tolerated.
constexpr size_t kReadiesAheadMax = 2;

// The most ops of one key that may linger. A peer sends DONE of an op before READY of the next op,
// so without faults each op ends the lingering of the ops before it. A peer that never sends DONE
// is refused at this limit.
constexpr size_t kLingeringMax = 16;

// The most bytes of larger results that lingering ops keep. Beyond, ops are answered when every
// participant is done.
constexpr uint64_t kLingeringBytesMax = LH_READY_INPUTS_AHEAD_BYTES_MAX;

// The most bytes of larger inputs, own and foreign ones, of ops that are announced. Beyond, ops
// withhold their inputs.
constexpr uint64_t kInputBytesMax = uint64_t{256} << 20;

// With so many names counted, the peer asks for a new attempt, in which counting begins anew.
constexpr size_t kNamesCountedMax = 65536;

std::string Subject(const OpDesc& desc, uint64_t tag) {
  return std::string(Name(desc.kind)) + " tag " + std::to_string(tag);
}

std::string AbortedBy(const OpDesc& desc, uint64_t tag, const std::string& cause) {
  return Subject(desc, tag) + " aborted: " + cause +
         "; the source is unchanged: look at the world and start it again";
}

// Whether a small op of this kind may be answered as soon as the result is known here. A later
// death must neither change the result, nor keep a survivor from taking it from another one.
bool MayEndAtOnce(const OpDesc& desc) {
  const bool whole = desc.kind == OpKind::kAllReduce || desc.kind == OpKind::kBarrier ||
                     desc.kind == OpKind::kAllGather || desc.kind == OpKind::kBroadcast;
  return whole && desc.on_fault == OnFault::kRetry;
}

// Larger inputs and results that a READY carries. (Those of small ops are limited in number.)
uint64_t BytesCarried(const PeerReady& ready) {
  if (!MayCarryInput(ready.desc)) return 0;
  return ready.payload.size() + (ready.result ? ready.result->bytes.size() : 0);
}

std::string PayloadProblem(const PeerReady& ready) {
  const bool may_carry = IsOneShot(ready.desc) || MayCarryInput(ready.desc);
  const bool one_shot =
      (IsOneShot(ready.desc) && !ready.other_offer) || ready.input == ReadyInput::kCarried;
  if (ready.result) {
    const bool may =
        may_carry && !ready.other_offer && MayEndAtOnce(ready.desc) && ready.payload.empty();
    // The result of an all-gather has a part for each of its members.
    const bool fits = !ready.desc.InParts() || ready.result->members.size() <= ready.desc.world;
    if (may && fits && ready.result->bytes.size() == ready.desc.bytes() &&
        ready.result->epoch < ready.attempt) {
      return "";
    }
    return "READY " + ToString(ready.ordinal) + " carries a result of " +
           std::to_string(ready.result->bytes.size()) + " bytes from epoch " +
           ToString(ready.result->epoch) + ", which cannot be one of " + ToString(ready.desc) +
           " in attempt " + ToString(ready.attempt);
  }
  const uint64_t expected = one_shot ? OneShotPayloadBytes(ready.desc) : 0;
  if (ready.payload.size() == expected) return "";
  return "READY " + ToString(ready.ordinal) + " carries " + std::to_string(ready.payload.size()) +
         " bytes where " + std::to_string(expected) + " belong";
}

// Keeps the participants that are in `set`.
std::shared_ptr<const Participants> Restricted(const Participants& all,
                                               const std::vector<MemberId>& set,
                                               const EpochHistory& history) {
  auto some = std::make_shared<Participants>(all);
  const auto outside = [&](MemberId member) {
    return std::find(set.begin(), set.end(), member) == set.end();
  };
  std::erase_if(some->members,
                [&](const control::MemberInfo& info) { return outside(info.member); });
  std::erase_if(some->contributors, outside);
  some->KeepPeers([&](PeerId peer) {
    return std::any_of(some->members.begin(), some->members.end(),
                       [&](const control::MemberInfo& info) { return info.peer == peer; });
  });
  some->hosts = history.HostsOf(some->contributors);
  return some;
}

}  // namespace

uint64_t SetOf(OpKind kind, const std::vector<MemberId>& members) {
  if (members.empty()) return 0;
  Digester digest;
  digest.Add(uint64_t{kind == OpKind::kSendRecv});
  for (const MemberId member : members) digest.Add(member);
  return std::max<uint64_t>(1, digest.value());
}

bool OpTable::Op::AllEvicted() const {
  return std::all_of(inputs.begin(), inputs.end(),
                     [](const LocalInput& input) { return input.evicted.has_value(); });
}

OpTable::OpTable(GroupKey group, PeerId self, const EpochHistory* history, OpCounters* counters)
    : group_(std::move(group)), self_(self), history_(history), counters_(counters) {}

OpTable::OpTable(const OpTable& other, const EpochHistory* history, OpCounters* counters)
    : OpTable(other) {
  history_ = history;
  counters_ = counters;
  by_ordinal_.clear();
  for (auto& [key, op] : ops_) {
    if (op.ordinal) by_ordinal_.emplace(op.ordinal, &op);
  }
  for (auto& [key, op] : lingering_) by_ordinal_.emplace(op.ordinal, &op);
}

// ------------------------------------------------------------------------------ local members

std::vector<MemberId> OpTable::SetMembersOf(const NewPost& post) const {
  if (post.local.desc.kind != OpKind::kSendRecv) return post.local.participants;
  MemberId partner = post.local.partner;
  if (post.local.root_rank) partner = OfRank(*post.local.root_rank);
  return post.local.is_root ? std::vector{post.member, partner} : std::vector{partner, post.member};
}

MemberId OpTable::OfRank(uint64_t rank) const {
  const std::vector<control::MemberInfo>& members = history_->current().members;
  return rank < members.size() ? members[rank].member : MemberId();
}

std::string OpTable::NameOf(MemberId member) const {
  const KnownMember* const known = history_->Member(member);
  return "member " + ToString(member) + (known == nullptr ? "" : " (" + known->info.name + ")");
}

std::shared_ptr<const Participants> OpTable::ParticipantsOf(
    const OpKey& key, const std::vector<MemberId>& set) const {
  std::shared_ptr<const Participants> all = history_->For(key.boundary);
  return set.empty() ? all : Restricted(*all, set, *history_);
}

std::string OpTable::ObjectionTo(const NewPost& post) const {
  const OpDesc& desc = post.local.desc;
  if (desc.count > LH_COUNT_MAX) {
    return ToString(desc) + " is beyond the limit of " + std::to_string(LH_COUNT_MAX) + " elements";
  }
  const std::vector<MemberId>& participants = post.local.participants;
  for (size_t i = 0; i < participants.size(); ++i) {
    if (i > 0 && !(participants[i - 1] < participants[i])) {
      return "its participants are not in rising order";
    }
    if (history_->Member(participants[i]) == nullptr) {
      return ToString(participants[i]) +
             " is among its participants, and is no member of the group; give ids of members";
    }
  }
  if (!participants.empty() &&
      !std::binary_search(participants.begin(), participants.end(), post.member)) {
    return "this member, " + ToString(post.member) + ", is not among its participants";
  }
  if (desc.kind == OpKind::kSendRecv) {
    const std::vector<MemberId> pair = SetMembersOf(post);
    if (pair[0] == pair[1]) return "a member cannot send to itself";
    const MemberId partner = pair[post.local.is_root ? 1 : 0];
    if (partner && history_->Member(partner) == nullptr) {
      return "its partner, " + ToString(partner) + ", is no member of the group";
    }
  }
  if (!desc.unequal) return "";
  const auto& members = history_->For(post.boundary)->members;
  const auto local = std::count_if(members.begin(), members.end(),
                                   [this](const auto& info) { return info.peer == self_; });
  const size_t terms = TermsBytes(desc, {post.local.terms});
  constexpr auto kTermsBytesMax = static_cast<size_t>(LH_OP_TERMS_BYTES_MAX);
  if (terms * static_cast<size_t>(local) > kTermsBytesMax) {
    return "the lengths of its parts take " + std::to_string(terms) +
           " bytes, and those of all members of a host may take at most " +
           std::to_string(kTermsBytesMax) + "; use parts of equal lengths";
  }
  return "";
}

Outcome OpTable::MayPost(const NewPost& post) const {
  const auto subject = [&post] { return Subject(post.local.desc, post.local.tag); };
  if (const std::string objection = ObjectionTo(post); !objection.empty()) {
    return {Code::kInvalidArgument, subject() + " refused: " + objection};
  }
  const auto tags = tags_.find(post.local.post.local);
  if (tags == tags_.end()) return {};
  const uint64_t set = SetOf(post.local.desc.kind, SetMembersOf(post));
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
  const std::vector<MemberId> set = SetMembersOf(post);
  const OpKey key{post.boundary, local.tag, SetOf(local.desc.kind, set)};
  Outcome refusal = MayPost(post);
  if (refusal.ok()) {
    if (const std::optional<std::string> why = SettleMissed(post, key)) {
      refusal = {Code::kAborted, *why};
    } else if (std::find(set.begin(), set.end(), MemberId()) != set.end()) {
      refusal = {Code::kAborted,
                 AbortedBy(local.desc, local.tag,
                           "its partner has rank " + std::to_string(*local.root_rank) +
                               ", and the group has " +
                               std::to_string(history_->current().members.size()) + " members")};
    }
  }
  if (!refusal.ok()) {
    out->push_back(PostDone{local.post, refusal, {}});
    return;
  }
  tags_[local.post.local].insert({key.tag, key.set});
  Op& op = ops_[key];
  op.key = key;
  op.set = set;
  LH_CHECK(!op.announced && op.run == Run::kNone)
      << "op posted twice " << Subject(local.desc, local.tag);
  op.inputs.push_back({local.post, post.member, local.desc, local.terms, now, std::nullopt});
  OpDesc& desc = op.inputs.back().desc;
  if (HasRoot(desc.kind)) {
    // A rank that is not there names nobody: the caller has not heard yet that a member is gone.
    if (local.root_rank) desc.root = OfRank(*local.root_rank);
    // The same holds if the caller has made its buffers for another role.
    const bool has_role = SourceOf(desc.kind, true) != SourceOf(desc.kind, false) ||
                          TargetOf(desc.kind, true) != TargetOf(desc.kind, false);
    if (has_role && (desc.root == post.member) != local.is_root) desc.root = MemberId();
  }
  Advance(op, now, out);
}

void OpTable::Cancel(const PostRef& post, Tick now, std::vector<Action>* out) {
  for (auto& [key, op] : ops_) {
    const auto input = std::find_if(op.inputs.begin(), op.inputs.end(),
                                    [&](const LocalInput& each) { return each.post == post; });
    if (input == op.inputs.end()) continue;
    if (op.done || op.abort || input->evicted || op.cancelled != Cancelled::kNo) return;
    if (op.ordinal) {
      op.cancelled_by = input->member;
      op.cancelled = frozen_ || !op.announced ? Cancelled::kLate : Cancelled::kWanted;
      if (op.cancelled == Cancelled::kWanted) AskToCancel(op, out);
      return;
    }
    // No other peer has heard of the op from this one.
    Answer(op, *input,
           {Code::kAborted,
            Subject(op.desc.kind == input->desc.kind ? op.desc : input->desc, key.tag) +
                " cancelled before its host had announced it; the source is "
                "unchanged"},
           now, out);
    op.inputs.erase(input);
    if (op.inputs.empty()) ops_.erase(OpKey(key));
    return;
  }
}

void OpTable::AskToCancel(const Op& op, std::vector<Action>* out) const {
  out->push_back(ToCoordinator{
      control::CancelOp{group_, op.cancelled_by, attempt_, Subject(op.desc, op.key.tag)}});
}

void OpTable::AskAgain(std::vector<Action>* out) const {
  if (frozen_) return;
  for (const auto& [key, op] : ops_) {
    if (op.cancelled == Cancelled::kWanted && op.announced && !op.done) AskToCancel(op, out);
  }
  for (const auto& [ordinal, op] : by_ordinal_) {
    if (op->disputed) Dispute(*op, FirstThatDiffers(*op), out);
  }
}

void OpTable::Evict(MemberId member, const Outcome& outcome, Tick now, std::vector<Action>* out) {
  for (Op* op : AllOps()) {
    if (op->lingers) continue;
    bool touched = false;
    for (LocalInput& input : op->inputs) {
      if (input.member != member || input.evicted) continue;
      input.evicted = outcome;
      touched = true;
    }
    if (!touched) continue;
    if (op->announced && !op->done) op->halted = true;
    Advance(*op, now, out);
  }
}

void OpTable::ViewPost(const NewPost& post, PostView* view) const {
  const std::vector<MemberId> set = SetMembersOf(post);
  const OpKey key{post.boundary, post.local.tag, SetOf(post.local.desc.kind, set)};
  const std::shared_ptr<const Participants> participants = ParticipantsOf(key, set);
  view->peers = participants->ring.size();
  std::set<PeerId> peers;
  for (const control::MemberInfo& info : participants->members) {
    view->crowded = view->crowded || !peers.insert(info.peer).second;
  }
  const auto it = ops_.find(key);
  if (it == ops_.end()) return;
  for (const LocalInput& input : it->second.inputs) {
    view->together.emplace_back(input.post, input.member);
  }
}

size_t OpTable::PostsOf(LocalId local) const {
  const auto it = tags_.find(local);
  return it == tags_.end() ? 0 : it->second.size();
}

size_t OpTable::LingeringOf(LocalId local) const {
  return std::count_if(lingering_.begin(), lingering_.end(), [local](const auto& entry) {
    const std::vector<LocalInput>& inputs = entry.second.inputs;
    return std::any_of(inputs.begin(), inputs.end(),
                       [local](const LocalInput& input) { return input.post.local == local; });
  });
}

std::optional<std::string> OpTable::SettleMissed(const NewPost& post, const OpKey& key) {
  const auto member = missed_.find(post.member);
  if (member == missed_.end()) return std::nullopt;
  // The member posts no ops of older boundaries any more.
  std::erase_if(member->second,
                [&](const auto& entry) { return entry.first.boundary < post.boundary; });
  std::optional<std::string> why;
  const auto it = member->second.find(key);
  if (it != member->second.end()) {
    why = AbortedBy(post.local.desc, key.tag, it->second.cause);
    if (--it->second.count == 0) member->second.erase(it);
  }
  if (member->second.empty()) missed_.erase(member);
  return why;
}

// ------------------------------------------------------------------------------ frames

bool OpTable::Known(PeerId peer) const {
  return expected_.contains(peer) || (!history_->empty() && history_->current().HasPeer(peer));
}

void OpTable::Lose(const std::set<PeerId>& peers) {
  for (const PeerId peer : peers) lost_[peer] = std::max(lost_[peer], attempt_);
}

bool OpTable::Lost(PeerId peer, Epoch attempt) const {
  const auto it = lost_.find(peer);
  return it != lost_.end() && attempt <= it->second;
}

void OpTable::Refuse(PeerId peer, Epoch attempt, const std::string& reason,
                     std::vector<Action>* out) {
  ++counters_->frames_refused;
  lost_[peer] = std::max(lost_[peer], attempt);
  out->push_back(BreakLink{group_, peer, "group " + ToString(group_) + ": " + reason});
}

template <class Frame>
void OpTable::KeepEarly(const Frame& frame, std::vector<Action>* out) {
  std::vector<EarlyFrame>& frames = early_[frame.peer];
  if (frames.size() >= LH_READY_UNMATCHED_MAX) {
    return Refuse(frame, "too many frames of an attempt that has not begun", out);
  }
  if constexpr (std::is_same_v<Frame, PeerReady>) {
    uint64_t bytes = BytesCarried(frame);
    for (const EarlyFrame& each : frames) {
      const auto* const ready = bytes == 0 ? nullptr : std::get_if<PeerReady>(&each);
      if (ready != nullptr) bytes += BytesCarried(*ready);
    }
    if (bytes > LH_READY_INPUTS_UNMATCHED_BYTES_MAX) {
      return Refuse(frame, "too long READYs of an attempt that has not begun", out);
    }
  }
  frames.push_back(frame);
}

void OpTable::KeepUnmatched(const PeerReady& ready, std::vector<Action>* out) {
  Unmatched& unmatched = unmatched_[ready.peer];
  if (unmatched.count >= LH_READY_UNMATCHED_MAX) {
    return Refuse(ready, "too many READYs that no op here has met", out);
  }
  const uint64_t bytes = BytesCarried(ready);
  if (unmatched.bytes + bytes > LH_READY_INPUTS_UNMATCHED_BYTES_MAX) {
    return Refuse(ready, "too long READYs that no op here has met", out);
  }
  std::deque<PeerReady>& queue = unmatched.by_key[{ready.boundary, ready.tag, ready.set}];
  if (queue.size() >= kReadiesAheadMax) {
    return Refuse(ready, "too many READYs of tag " + std::to_string(ready.tag), out);
  }
  queue.push_back(ready);
  ++unmatched.count;
  unmatched.bytes += bytes;
}

void OpTable::OnReady(const PeerReady& ready, Tick now, std::vector<Action>* out) {
  if (!Known(ready.peer) || ready.attempt < attempt_) {
    ++counters_->frames_stale;
    return;
  }
  if (Lost(ready.peer, ready.attempt)) return;
  if (const std::string problem = PayloadProblem(ready); !problem.empty()) {
    return Refuse(ready, problem, out);
  }
  if (ready.attempt > attempt_) return KeepEarly(ready, out);
  // Each op that was announced in this attempt is announced again in the next.
  if (frozen_) return;
  Op* const found = Expecting({ready.boundary, ready.tag, ready.set}, ready.peer);
  if (found == nullptr) return KeepUnmatched(ready, out);
  Op& op = *found;
  if (!op.participants->HasPeer(ready.peer)) {
    return Refuse(
        ready, "READY of tag " + std::to_string(ready.tag) + " posted before the peer joined", out);
  }
  AcceptReady(op, ready, out);
  if (op.AllReady()) NoteComplete(op, now);
  if (op.Live()) Credit(op, ready, out);
  Advance(op, now, out);
}

void OpTable::OnDone(const PeerDone& done, Tick now, std::vector<Action>* out) {
  if (!Known(done.peer) || done.attempt < attempt_) {
    ++counters_->frames_stale;
    return;
  }
  if (Lost(done.peer, done.attempt)) return;
  if (done.attempt > attempt_) return KeepEarly(done, out);
  const auto it = by_ordinal_.find(done.ordinal);
  if (frozen_) {
    // Nothing settles any more. But the coordinator may learn from a dispute who lies.
    if (it == by_ordinal_.end() || !it->second->AllReady() || done.started) return;
    Op& op = *it->second;
    if (op.disputed || Verdict{done.refused, done.readies_digest} == VerdictOf(op)) return;
    op.disputed = true;
    return Dispute(op, done.peer, out);
  }
  if (it == by_ordinal_.end()) {
    if (done.ordinal && done.ordinal.value() < counters_->next_ordinal) {
      ++counters_->frames_stale;
      return;
    }
    return Refuse(done, "DONE for " + ToString(done.ordinal) + ", which never was", out);
  }
  Op& op = *it->second;
  if (done.started) {
    const auto ready = op.readies.find(done.peer);
    if (!op.announced || ready == op.readies.end() || !StartsLate(op.desc, ready->second.input) ||
        !op.started.insert(done.peer).second) {
      return Refuse(done, "DONE (started) for " + ToString(done.ordinal) + " out of order", out);
    }
    if (op.Live()) Credit(op, ready->second, out);
    return;
  }
  // A peer sends one DONE for an op, after its own READY, and only if all participants announced
  // it.
  if (!op.announced || !op.readies.contains(done.peer) || op.dones.contains(done.peer)) {
    return Refuse(done, "DONE for " + ToString(done.ordinal) + " out of order", out);
  }
  if (done.readies_digest.has_value() != op.signed_readies.has_value()) {
    return Refuse(
        done,
        "DONE for " + ToString(done.ordinal) +
            (op.signed_readies ? " without a digest of READYs" : " with a digest of READYs"),
        out);
  }
  op.dones.emplace(done.peer, Verdict{done.refused, done.readies_digest});
  Advance(op, now, out);
}

OpTable::Op* OpTable::Expecting(const OpKey& key, PeerId peer) {
  const auto expects = [peer](const Op& op) { return op.announced && !op.readies.contains(peer); };
  const auto [first, last] = lingering_.equal_range(key);
  for (auto it = first; it != last; ++it) {
    if (expects(it->second)) return &it->second;
  }
  const auto it = ops_.find(key);
  return it != ops_.end() && expects(it->second) ? &it->second : nullptr;
}

void OpTable::AcceptReady(Op& op, PeerReady ready, std::vector<Action>* out) {
  if (!op.lingers && lingering_.count(op.key) >= kLingeringMax) {
    return Refuse(
        ready, "READY of tag " + std::to_string(op.key.tag) + " without DONE of those before", out);
  }
  if (op.signed_readies || ready.signature) {
    const std::string problem =
        !op.signed_readies ? "is signed in an attempt without signatures"
        : !ready.signature ? "is not signed"
                           : AddSignature(ready.peer, history_->current().keys.at(ready.peer),
                                          *ready.signature, &*op.signed_readies);
    if (!problem.empty()) {
      return Refuse(ready, "READY of tag " + std::to_string(op.key.tag) + " " + problem, out);
    }
  }
  if (ready.desc != op.desc || ready.other_offer) {
    if (!op.lingers && ready.desc.SameButForWorld(op.desc) && !ready.other_offer) {
      const MemberId other = op.participants->FirstMemberOf(ready.peer);
      op.unfit = UnfitFor(op, "member " + ToString(other) + " posted " + ToString(ready.desc) +
                                  ", this peer " + ToString(op.desc) +
                                  ", as members do that hear of a change of the world at "
                                  "different times");
      op.readies.emplace(ready.peer, std::move(ready));
      return;
    }
    if (op.lingers) {
      return Refuse(ready,
                    "READY of tag " + std::to_string(op.key.tag) +
                        " is announced again, and is another op than before",
                    out);
    }
    op.differs = true;
  }
  const PeerId peer = ready.peer;
  const auto& members = op.participants->members;
  const auto expected = std::count_if(members.begin(), members.end(),
                                      [&](const auto& info) { return info.peer == peer; });
  if (!ready.terms.empty() && ready.terms.size() != static_cast<size_t>(expected)) {
    return Refuse(ready,
                  "READY of tag " + std::to_string(op.key.tag) + " with the terms of " +
                      std::to_string(ready.terms.size()) + " members, not of " +
                      std::to_string(expected),
                  out);
  }
  // A peer that could have been sent a result has to wait for it.
  if (ready.result && !IsOneShot(op.desc) && !op.lingers && op.input == ReadyInput::kSegments) {
    return Refuse(ready,
                  "READY of tag " + std::to_string(op.key.tag) +
                      " carries a result of an op whose inputs were never sent with READY",
                  out);
  }
  if (op.lingers) ready.payload.clear();
  if (ready.result && !op.result) op.result = std::move(ready.result);
  ready.result.reset();
  op.readies.emplace(peer, std::move(ready));
}

void OpTable::NoteComplete(Op& op, Tick now) {
  if (op.complete_once) return;
  op.complete_once = true;
  op.complete_at = now;
}

// ------------------------------------------------------------------------------ for people

std::optional<control::OldestOp> OpTable::Oldest(Tick now) const {
  // An op that has been posted by several members is as old as its first post.
  const auto posted_at = [](const std::vector<LocalInput>& inputs) {
    Tick first = kNever;
    for (const LocalInput& input : inputs) first = std::min(first, input.posted);
    return first;
  };
  Tick since = kNever;
  const Op* waiting = nullptr;
  const Finishing* finishing = nullptr;
  for (const auto& [key, op] : ops_) {
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
    ExplainOp(*waiting, &oldest);
  }
  return oldest;
}

void OpTable::ExplainOp(const Op& op, control::OldestOp* oldest) const {
  oldest->tag = op.key.tag;
  oldest->boundary = op.key.boundary;
  const auto await = [oldest](auto id, auto* list) {
    if (list->size() < control::kAwaitedMax) list->push_back(id);
    ++oldest->awaited;
  };
  if (frozen_ || op.halted || op.run == Run::kStopping) {
    oldest->phase = control::OpPhase::kFrozen;
  } else if (!op.announced) {
    oldest->phase = control::OpPhase::kStart;
    // If the op is for a set of members, the participants live only as long as this pointer.
    const std::shared_ptr<const Participants> participants = ParticipantsOf(op.key, op.set);
    for (const control::MemberInfo& member : participants->members) {
      if (member.peer != self_) continue;
      const bool here =
          std::any_of(op.inputs.begin(), op.inputs.end(),
                      [&](const LocalInput& input) { return input.member == member.member; });
      if (!here) await(member.member, &oldest->members);
    }
  } else if (!op.AllReady()) {
    oldest->phase = control::OpPhase::kReady;
    for (const PeerId peer : op.participants->ring) {
      if (peer != self_ && !op.readies.contains(peer)) await(peer, &oldest->peers);
    }
  } else if (!op.done) {
    oldest->phase = control::OpPhase::kTransfer;
  } else {
    oldest->phase = control::OpPhase::kDone;
    for (const PeerId peer : op.participants->ring) {
      if (peer != self_ && !op.dones.contains(peer)) await(peer, &oldest->peers);
    }
  }
}

// ------------------------------------------------------------------------------ the driver

void OpTable::OnComplete(const AttemptComplete& event, Tick now, std::vector<Action>* out) {
  const auto it = by_ordinal_.find(event.ordinal);
  if (it == by_ordinal_.end()) return;
  Op& op = *it->second;
  if (op.run != Run::kRunning || op.run_attempt != event.attempt) return;
  op.run = Run::kComplete;
  op.moved_at = now;
  if (EndsAtOnce(op) && !op.result && HasRoomToLinger(op)) {
    op.result = OneShotResult{op.participants->epoch, op.participants->contributors, event.result};
  }
  Advance(op, now, out);
}

void OpTable::OnFinished(const AttemptFinished& event, Tick now, std::vector<Action>* out) {
  const auto found = finishing_.extract(event.ordinal);
  if (found.empty()) return;
  const Finishing& op = found.mapped();
  resumed_ = resumed_ || op.redone;
  for (const LocalInput& input : op.inputs) {
    OpInfo info = op.info;
    SetPhases(op.complete_at, op.moved_at, input.posted, &info);
    Answer(op.key, input, Outcome(), info, now, out);
  }
}

void OpTable::OnStopped(const AttemptStopped& event, Tick now, std::vector<Action>* out) {
  const auto it = by_ordinal_.find(event.ordinal);
  if (it == by_ordinal_.end()) return;
  Op& op = *it->second;
  if (op.run != Run::kStopping || op.run_attempt != event.attempt) return;
  op.run = Run::kNone;
  Advance(op, now, out);
}

// ------------------------------------------------------------------------------ the life of an op

std::vector<OpTable::Op*> OpTable::AllOps() {
  std::vector<Op*> all;
  all.reserve(ops_.size());
  for (const auto& [ordinal, op] : by_ordinal_) all.push_back(op);
  for (auto& [key, op] : ops_) {
    if (!op.ordinal) all.push_back(&op);
  }
  return all;
}

void OpTable::AdvanceAll(Tick now, std::vector<Action>* out) {
  // Advance() ends no op but the one it is given.
  for (Op* op : AllOps()) Advance(*op, now, out);
}

void OpTable::Advance(Op& op, Tick now, std::vector<Action>* out) {
  if (op.lingers) return AdvanceLingering(op, now, out);
  if (op.run == Run::kStopping) return;
  const bool over = op.abort.has_value() || op.AllEvicted();
  const bool resting = frozen_ || op.halted;
  if (op.Live() && (over || !op.announced || op.Refused() || (resting && !op.done))) {
    return Stop(op, out);
  }
  if (over) return Drop(op, now, out);
  if (op.run == Run::kNone && !op.done) DropEvicted(op, now, out);
  if (resting) return;

  if (!op.announced) {
    if (!Gathered(op)) return;
    Announce(op, now, out);
  }
  if (op.AllReady()) {
    JudgeInputs(op);
    JudgeTerms(op);
    if (!CheckVerdicts(op, out)) return;
  }
  if (!op.Refused()) {
    if (op.run == Run::kNone) {
      const bool waits = op.algorithm == Algorithm::kOneShot || StartsLate(op.desc, op.input);
      if (waits && !op.AllReady()) return;
      Start(op, out);
    }
    if (op.run != Run::kComplete) return;
  }
  if (!op.AllReady()) return;
  if (EndsAtOnce(op) && op.result) return Linger(op, now, out);
  if (!op.done) {
    op.done = true;
    SendDones(op, out);
  }
  if (op.AllDone()) Settle(op, now, out);
}

void OpTable::AdvanceLingering(Op& op, Tick now, std::vector<Action>* out) {
  if (frozen_) return;
  if (!op.announced) Announce(op, now, out);
  if (!op.AllReady()) return;
  if (!op.done) {
    op.done = true;
    SendDones(op, out);
  }
  if (CheckVerdicts(op, out) && op.AllDone()) Erase(op);
}

bool OpTable::Gathered(const Op& op) const {
  const std::shared_ptr<const Participants> participants = ParticipantsOf(op.key, op.set);
  return std::all_of(participants->members.begin(), participants->members.end(),
                     [&](const control::MemberInfo& member) {
                       if (member.peer != self_) return true;
                       return std::any_of(
                           op.inputs.begin(), op.inputs.end(),
                           [&](const LocalInput& input) { return input.member == member.member; });
                     });
}

void OpTable::Announce(Op& op, Tick now, std::vector<Action>* out) {
  if (!op.ordinal) {
    op.ordinal = OpOrdinal(counters_->next_ordinal++);
    by_ordinal_.emplace(op.ordinal, &op);
  }
  op.announced = true;
  op.participants = ParticipantsOf(op.key, op.set);
  std::sort(op.inputs.begin(), op.inputs.end(), [&](const LocalInput& a, const LocalInput& b) {
    return op.participants->RankOf(a.member) < op.participants->RankOf(b.member);
  });
  op.desc = op.inputs.front().desc;
  const auto other = std::find_if(op.inputs.begin(), op.inputs.end(), [&](const LocalInput& input) {
    return !input.desc.SameButForWorld(op.desc);
  });
  const bool same_world =
      std::all_of(op.inputs.begin(), op.inputs.end(), [&](const LocalInput& input) {
        return input.desc.world == op.desc.world && input.desc.root == op.desc.root;
      });
  // No world of several members is like this one, so all participants find the op unfit.
  if (!same_world) {
    op.desc.world = op.desc.InParts() ? 1 : 0;
    op.desc.root = MemberId();
  }
  if (other != op.inputs.end()) op.other_offer = OtherOffer{other->member, other->desc};
  op.differs = op.other_offer.has_value();
  const Participants& all = *op.participants;
  const bool mesh = IsShared(op.desc.kind) ? all.mesh_of_owners : all.mesh;
  op.codec = ChooseCodec(op.desc, all.ring.size(), mesh, all.cost);
  op.algorithm = ChooseAlgorithm(op.desc.With(op.codec), all.ring.size(), mesh, all.cost);
  op.unfit = UnfitnessOf(op);
  op.input = InputOf(op);
  op.offered = op.offered || op.input != ReadyInput::kSegments;
  BeginSigning(op, out);
  op.cuts = op.unfit ? std::vector<CutOwner>() : CutsOf(op);

  SendReady ready;
  ready.group = group_;
  ready.ordinal = op.ordinal;
  ready.attempt = attempt_;
  ready.boundary = op.key.boundary;
  ready.tag = op.key.tag;
  ready.set = op.key.set;
  ready.desc = op.desc;
  ready.other_offer = op.other_offer;
  if (op.signed_readies) ready.sign = op.signed_readies->name.index;
  // If the offers of local members differ, no input is sent: tensors of different sizes cannot be
  // added up, and the op will be refused anyway.
  if (op.lingers) {
    ready.result = op.result;
  } else {
    ready.input = op.input;
    ready.one_shot = (IsOneShot(op.desc) && !op.other_offer) || op.input == ReadyInput::kCarried;
    for (const LocalInput& input : op.inputs) ready.posts.push_back(input.post);
    ready.contributes = ContributesOf(op);
    ready.cuts = op.cuts;
    for (const LocalInput& input : op.inputs) {
      if (op.desc.NeedsTerms() && !op.other_offer) ready.terms.push_back(input.terms);
      if (op.desc.weighted) ready.weights.push_back(input.terms.weight);
    }
  }
  for (const PeerId peer : op.participants->ring) {
    if (peer == self_) continue;
    ready.to = peer;
    if (!Lost(peer, attempt_)) out->push_back(ready);
    const auto from = unmatched_.find(peer);
    if (from == unmatched_.end()) continue;
    const auto waiting = from->second.by_key.find(op.key);
    if (waiting == from->second.by_key.end()) continue;
    from->second.bytes -= BytesCarried(waiting->second.front());
    AcceptReady(op, std::move(waiting->second.front()), out);
    waiting->second.pop_front();
    if (waiting->second.empty()) from->second.by_key.erase(waiting);
    if (--from->second.count == 0) unmatched_.erase(from);
  }
  if (op.AllReady()) NoteComplete(op, now);
  if (op.cancelled == Cancelled::kNo || op.lingers) return;
  op.cancelled = Cancelled::kWanted;
  AskToCancel(op, out);
}

ReadyInput OpTable::InputOf(const Op& op) const {
  if (op.lingers || op.other_offer || !MayCarryInput(op.desc)) return ReadyInput::kSegments;
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
  const bool room = InputBytesWith(op) <= kInputBytesMax &&
                    std::all_of(all.ring.begin(), all.ring.end(),
                                [&](PeerId peer) { return MaySendAhead(op, peer); });
  return room ? ReadyInput::kCarried : ReadyInput::kWithheld;
}

uint64_t OpTable::InputBytesWith(const Op& op) const {
  uint64_t sum = op.participants->ring.size() * OneShotPayloadBytes(op.desc);
  for (const auto& [ordinal, other] : by_ordinal_) {
    if (other == &op || !other->announced || other->input != ReadyInput::kCarried) continue;
    sum += other->participants->ring.size() * OneShotPayloadBytes(other->desc);
  }
  return sum;
}

bool OpTable::MaySendAhead(const Op& op, PeerId peer) const {
  if (peer == self_) return true;
  const auto from = unmatched_.find(peer);
  if (from != unmatched_.end() && from->second.by_key.contains(op.key)) return true;
  uint64_t ahead = OneShotPayloadBytes(op.desc);
  for (const auto& [ordinal, other] : by_ordinal_) {
    if (other == &op || !other->announced || other->input != ReadyInput::kCarried) continue;
    if (!other->participants->HasPeer(peer) || other->readies.contains(peer)) continue;
    ahead += OneShotPayloadBytes(other->desc);
  }
  return ahead <= LH_READY_INPUTS_AHEAD_BYTES_MAX;
}

void OpTable::JudgeInputs(Op& op) {
  if (op.input == ReadyInput::kSegments || op.algorithm == Algorithm::kOneShot) return;
  const bool all = op.input == ReadyInput::kCarried &&
                   std::all_of(op.readies.begin(), op.readies.end(), [](const auto& ready) {
                     return ready.second.input == ReadyInput::kCarried;
                   });
  if (all || op.result) {
    op.algorithm = Algorithm::kOneShot;
  } else {
    for (auto& [peer, ready] : op.readies) ready.payload = {};
  }
}

std::optional<Outcome> OpTable::UnfitnessOf(const Op& op) const {
  const Participants& participants = *op.participants;
  const size_t contributing = participants.contributors.size();
  if (contributing < op.desc.min_world) {
    return Outcome{Code::kTooFewMembers,
                   Subject(op.desc, op.key.tag) + " ended: " + std::to_string(contributing) +
                       " members take part, min_world asks for " +
                       std::to_string(op.desc.min_world) + "; the input is intact"};
  }
  if (contributing == 0) {
    return Outcome{
        Code::kTooFewMembers,
        Subject(op.desc, op.key.tag) +
            " ended: all that are left are in the background and contribute nothing yet; "
            "they do from the next step boundary on; the input is intact"};
  }
  if (op.desc.order == Order::kRank && op.algorithm == Algorithm::kRing) {
    return Outcome{Code::kFailedPrecondition,
                   Subject(op.desc, op.key.tag) +
                       " refused: order rank needs links between all hosts, at most " +
                       std::to_string(kMeshPeersMax) +
                       " of them, and no blocked pair (lhctl ring " +
                       "shows them); leave the order to Longhaul"};
  }
  const OpKind kind = op.desc.kind;
  const size_t members = participants.members.size();
  const auto laid_out = [&](size_t present) {
    return UnfitFor(op, "its tensors are laid out for " + std::to_string(op.desc.world) +
                            " members, and " + std::to_string(present) + " take part");
  };
  const auto absent = [&](const std::string& role, MemberId member) {
    return UnfitFor(
        op, "its " + role + ", " + NameOf(member) + ", " +
                (participants.RankOf(member) < 0 ? "does not take part" : "is in the background"));
  };
  if (kind == OpKind::kSendRecv) {
    if (!participants.Contributes(op.set[0])) return absent("sender", op.set[0]);
    if (participants.RankOf(op.set[1]) < 0) return absent("receiver", op.set[1]);
  }
  // A root that is gone also changes the number of members; the root says more.
  if (HasRoot(kind)) {
    if (!op.desc.root) return UnfitFor(op, "its root is not in the world any more");
    const bool gives = kind == OpKind::kBroadcast || kind == OpKind::kScatter;
    const bool there =
        gives ? participants.Contributes(op.desc.root) : participants.RankOf(op.desc.root) >= 0;
    if (!there) return absent("root", op.desc.root);
  }
  // In these, a part stands for a member that must be there to get or to give it.
  const bool all = op.desc.InParts() && kind != OpKind::kAllGather && kind != OpKind::kGather;
  if (all && members != op.desc.world) return laid_out(members);
  if (op.desc.InParts() && !all && contributing > op.desc.world) return laid_out(contributing);
  return std::nullopt;
}

Outcome OpTable::UnfitFor(const Op& op, const std::string& cause) const {
  return {Code::kAborted, AbortedBy(op.desc, op.key.tag, cause)};
}

namespace {

// The elements of the part between two members, as one of them says. `index`: the rank of the other
// one, among the participants.
std::optional<uint64_t> LengthIn(const std::vector<uint64_t>& lengths, size_t index) {
  if (lengths.size() == 1) return lengths[0];
  if (index < lengths.size()) return lengths[index];
  return std::nullopt;
}

}  // namespace

void OpTable::JudgeTerms(Op& op) {
  if (!op.desc.NeedsTerms() || op.judged || op.Refused() || op.result) return;
  op.judged = true;
  const std::vector<control::MemberInfo>& members = op.participants->members;
  std::map<PeerId, size_t> taken;
  for (const control::MemberInfo& info : members) {
    if (info.peer == self_) continue;
    op.terms[info.member] = op.readies.at(info.peer).terms.at(taken[info.peer]++);
  }
  for (const LocalInput& input : op.inputs) op.terms[input.member] = input.terms;
  if (op.desc.weighted) {
    op.weight_sum = 0;
    for (const MemberId member : op.participants->contributors) {
      op.weight_sum += op.terms.at(member).weight;
    }
    if (std::isinf(op.weight_sum)) {
      op.mismatch = "the sum of the members' weights is too large for a double; give smaller ones";
      op.differs = true;
    }
    if (!(op.weight_sum > 0)) {
      op.unfit = Outcome{Code::kTooFewMembers,
                         Subject(op.desc, op.key.tag) +
                             " ended: the weights of all members are 0; the input is intact"};
    }
  }
  if (!op.desc.unequal) return;
  op.cuts = CutsOf(op);
  op.mismatch = TermsMismatch(op);
  op.differs = op.mismatch.has_value();
}

// The world has changed since the op was laid out. Returns whose tensor is too small for the parts
// of the members that are left; nullopt: all fit.
std::optional<std::string> OpTable::SpaceMissing(const Op& op) const {
  const std::vector<control::MemberInfo>& members = op.participants->members;
  if (op.desc.kind != OpKind::kAllGather && op.desc.kind != OpKind::kGather) return std::nullopt;
  uint64_t whole = 0;  // cannot overflow: at most 2^10 lengths below 2^49
  for (size_t i = 0; i < members.size(); ++i) {
    if (!Contributes(op, members[i].member)) continue;
    whole += LengthIn(op.terms.at(members[i].member).gives, i).value_or(0);
  }
  for (const control::MemberInfo& getter : members) {
    if (op.desc.kind == OpKind::kGather && getter.member != op.desc.root) continue;
    const std::vector<uint64_t>& gets = op.terms.at(getter.member).gets;
    const uint64_t space = std::accumulate(gets.begin(), gets.end(), uint64_t{0});
    if (space >= whole) continue;
    return "the members give " + std::to_string(whole) + " elements in all, and member " +
           ToString(getter.member) + " has room for " + std::to_string(space);
  }
  return std::nullopt;
}

// Returns how the lengths that two members give for one part differ; nullopt: all fit.
std::optional<std::string> OpTable::TermsMismatch(const Op& op) const {
  const OpKind kind = op.desc.kind;
  const std::vector<control::MemberInfo>& members = op.participants->members;
  // After a death, ranks no longer say which part is whose. Then the parts are as their owners say.
  const bool same = members.size() == op.desc.world;
  if (!same) {
    if (auto missing = SpaceMissing(op)) return missing;
  }
  const bool reduces = Reduces(kind);
  const OpTerms& first = op.terms.at(members.front().member);
  for (size_t i = 0; i < members.size(); ++i) {
    const MemberId giver = members[i].member;
    const OpTerms& gives = op.terms.at(giver);
    if (reduces && gives.gives != first.gives) {
      return "members " + ToString(members.front().member) + " and " + ToString(giver) +
             " give different lengths of parts";
    }
    if ((kind == OpKind::kScatter && giver != op.desc.root) || !same) continue;
    for (size_t j = 0; j < members.size(); ++j) {
      const MemberId getter = members[j].member;
      if (kind == OpKind::kGather && getter != op.desc.root) continue;
      const auto given = LengthIn(gives.gives, j);
      // Of an op that reduces, everybody gives the part that its owner gets.
      const auto wanted = LengthIn(op.terms.at(getter).gets, reduces ? 0 : i);
      if (given && wanted && *given == *wanted) continue;
      const auto text = [](const std::optional<uint64_t>& length) {
        return length ? std::to_string(*length) + " elements" : "no length";
      };
      return "member " + ToString(giver) + " gives " + text(given) + " to member " +
             ToString(getter) + ", which expects " + text(wanted);
    }
  }
  return std::nullopt;
}

std::vector<CutOwner> OpTable::CutsOf(const Op& op) const {
  const OpKind kind = op.desc.kind;
  const std::vector<PeerId>& ring = op.participants->ring;
  const std::vector<control::MemberInfo>& members = op.participants->members;
  std::vector<CutOwner> cuts;
  const auto place = [&](MemberId member, int* position, int* post) {
    const int rank = op.participants->RankOf(member);
    const auto at = std::find(ring.begin(), ring.end(), members[rank].peer);
    *position = static_cast<int>(at - ring.begin());
    *post = -1;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i].member == member) *post = static_cast<int>(i);
    }
  };
  // `index`: of the part among those of the owner.
  const auto add = [&](MemberId owner, std::optional<MemberId> to, size_t index) {
    CutOwner& cut = cuts.emplace_back();
    place(owner, &cut.position, &cut.post);
    if (to) place(*to, &cut.to_position, &cut.to_post);
    if (!op.judged || !op.desc.unequal) return;
    cut.count = LengthIn(op.terms.at(owner).gives, index).value_or(0);
  };
  if (kind == OpKind::kBroadcast || kind == OpKind::kReduce) {
    add(op.desc.root, std::nullopt, 0);
  } else if (kind == OpKind::kSendRecv) {
    add(op.set[0], op.set[1], 0);
  }
  for (size_t i = 0; i < members.size() && op.desc.InParts(); ++i) {
    const MemberId member = members[i].member;
    const bool gives = Contributes(op, member);
    if (kind == OpKind::kReduceScatter) add(member, std::nullopt, i);
    if (kind == OpKind::kAllGather && gives) add(member, std::nullopt, i);
    if (kind == OpKind::kGather && gives) add(member, op.desc.root, i);
    if (kind == OpKind::kScatter) add(op.desc.root, member, i);
    for (size_t j = 0; j < members.size() && kind == OpKind::kAllToAll; ++j) {
      add(member, members[j].member, j);
    }
  }
  return cuts;
}

bool OpTable::Contributes(const Op& op, MemberId member) {
  return op.participants->Contributes(member);
}

std::vector<bool> OpTable::ContributesOf(const Op& op) {
  std::vector<bool> contributes;
  for (const LocalInput& input : op.inputs) contributes.push_back(Contributes(op, input.member));
  return contributes;
}

void OpTable::Start(Op& op, std::vector<Action>* out) {
  StartAttempt start;
  start.group = group_;
  start.ordinal = op.ordinal;
  start.attempt = attempt_;
  start.desc = op.desc.With(op.codec);
  start.ring = op.participants->ring;
  start.members = static_cast<uint32_t>(op.participants->contributors.size());
  for (const LocalInput& input : op.inputs) start.posts.push_back(input.post);
  start.contributes = ContributesOf(op);
  const auto& members = op.participants->members;
  std::vector<int> first_rank;  // by position: of the first member that contributes
  for (const PeerId peer : start.ring) {
    uint32_t contributing = 0;
    int first = static_cast<int>(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].peer != peer || !Contributes(op, members[i].member)) continue;
      if (contributing++ == 0) first = static_cast<int>(i);
    }
    start.ring_contributes.push_back(contributing);
    first_rank.push_back(first);
  }
  if (op.desc.order == Order::kRank) {
    for (size_t i = 0; i < start.ring.size(); ++i) start.order.push_back(static_cast<int>(i));
    std::sort(start.order.begin(), start.order.end(), [&](int a, int b) {
      return std::pair(first_rank[a], a) < std::pair(first_rank[b], b);
    });
  }
  if (op.desc.weighted) {
    for (const LocalInput& input : op.inputs) start.weights.push_back(input.terms.weight);
    start.weight_sum = op.weight_sum;
  }
  start.algorithm = op.algorithm;
  start.cuts = op.cuts;
  if (start.desc.Encodes()) {
    start.seed =
        Digester().Add(group_).Add(op.key.boundary).Add(op.key.tag).Add(op.key.set).value();
  }
  if (op.algorithm == Algorithm::kMesh) {
    const control::LinkCost& cost = op.participants->cost;
    if (IsShared(op.desc.kind)) start.shares = cost.shares;
    if (op.desc.kind == OpKind::kBroadcast && !op.result) {
      const auto root = static_cast<size_t>(op.cuts.front().position);
      start.shares = PassedOn(start.desc, root, start.ring.size(), cost);
    }
  }
  if (op.result) {
    // The result may be of an older epoch, in which other members took part.
    if (op.desc.kind == OpKind::kAllGather) start.cuts.assign(op.result->members.size(), {});
    if (op.desc.kind == OpKind::kBroadcast) start.cuts.assign(1, {});
    start.result = op.result->bytes;
  } else if (op.algorithm == Algorithm::kOneShot) {
    for (const PeerId peer : start.ring) {
      const auto it = op.readies.find(peer);
      start.payloads.push_back(it == op.readies.end() ? "" : std::move(it->second.payload));
      if (it != op.readies.end()) it->second.payload.clear();
    }
  }
  out->push_back(std::move(start));
  op.run = Run::kRunning;
  op.run_attempt = attempt_;
  const bool tells = StartsLate(op.desc, op.input) && op.algorithm != Algorithm::kOneShot;
  for (const auto& [peer, ready] : op.readies) {
    Credit(op, ready, out);
    if (!tells || Lost(peer, attempt_)) continue;
    SendDone started{group_, peer, ready.ordinal, attempt_};
    started.started = true;
    out->push_back(started);
  }
}

void OpTable::Credit(const Op& op, const PeerReady& ready, std::vector<Action>* out) const {
  if (op.Refused() || op.algorithm == Algorithm::kOneShot) return;
  if (StartsLate(op.desc, ready.input) && !op.started.contains(ready.peer)) return;
  out->push_back(CreditAttempt{group_, op.ordinal, attempt_, ready.peer, ready.ordinal});
}

void OpTable::Stop(Op& op, std::vector<Action>* out) {
  out->push_back(StopAttempt{group_, op.ordinal, op.run_attempt});
  op.run = Run::kStopping;
}

void OpTable::SendDones(const Op& op, std::vector<Action>* out) const {
  const Verdict verdict = VerdictOf(op);
  for (const PeerId peer : op.participants->ring) {
    if (peer == self_ || Lost(peer, attempt_)) continue;
    SendDone done{group_,
                  peer,
                  op.readies.at(peer).ordinal,
                  attempt_,
                  op.Refused(),
                  /*may_wait=*/op.lingers};
    done.readies_digest = verdict.readies_digest;
    out->push_back(done);
  }
}

OpTable::Verdict OpTable::VerdictOf(const Op& op) const {
  Verdict verdict{op.Refused(), std::nullopt};
  if (op.signed_readies) verdict.readies_digest = DigestOf(*op.signed_readies, self_, op.Refused());
  return verdict;
}

bool OpTable::CheckVerdicts(Op& op, std::vector<Action>* out) {
  if (op.disputed) return false;
  if (op.dones.empty()) return true;
  const PeerId other = FirstThatDiffers(op);
  if (!other) return true;
  op.disputed = true;
  Dispute(op, other, out);
  return false;
}

PeerId OpTable::FirstThatDiffers(const Op& op) const {
  const Verdict own = VerdictOf(op);
  const auto other = std::find_if(op.dones.begin(), op.dones.end(),
                                  [&](const auto& done) { return done.second != own; });
  return other == op.dones.end() ? PeerId() : other->first;
}

void OpTable::Dispute(const Op& op, PeerId peer, std::vector<Action>* out) const {
  control::Dispute dispute{group_, peer, attempt_, op.key.boundary, op.key.tag, op.key.set};
  if (op.signed_readies) {
    dispute.index = op.signed_readies->name.index;
    dispute.statements = StatementsOf(*op.signed_readies);
  }
  dispute.what = Subject(op.desc, op.key.tag);
  out->push_back(ToCoordinator{std::move(dispute)});
}

void OpTable::BeginSigning(Op& op, std::vector<Action>* out) {
  if (!history_->current().sign_ops || op.participants->ring.size() < 2) return;
  const uint64_t index = announced_[op.key]++;
  op.signed_readies = SignedReadies{
      {group_, attempt_, op.key.boundary, op.key.tag, op.key.set, index}, /*own=*/"", {}};
  if (announced_.size() < kNamesCountedMax || new_attempt_asked_) return;
  new_attempt_asked_ = true;
  control::Dispute dispute{group_, PeerId(), attempt_, op.key.boundary, op.key.tag, op.key.set};
  dispute.what = "it cannot count the READYs of more names";
  out->push_back(ToCoordinator{std::move(dispute)});
}

void OpTable::OnSigned(const ReadySigned& event, Tick now, std::vector<Action>* out) {
  const auto it = by_ordinal_.find(event.ordinal);
  if (it == by_ordinal_.end() || event.attempt != attempt_) return;
  Op& op = *it->second;
  if (!op.signed_readies) return;
  op.signed_readies->own = event.digest;
  if (op.AllReady()) NoteComplete(op, now);
  Advance(op, now, out);
}

void OpTable::DropEvicted(Op& op, Tick now, std::vector<Action>* out) {
  for (size_t i = 0; i < op.inputs.size();) {
    if (!op.inputs[i].evicted) {
      ++i;
      continue;
    }
    Answer(op, op.inputs[i], *op.inputs[i].evicted, now, out);
    op.inputs.erase(op.inputs.begin() + static_cast<ptrdiff_t>(i));
  }
}

void OpTable::Settle(Op& op, Tick now, std::vector<Action>* out) {
  Conclude(op, now, out);
  Erase(op);
}

void OpTable::Conclude(Op& op, Tick now, std::vector<Action>* out) {
  ++settled_;
  ++(!op.Refused()                                                 ? counters_->committed
     : !op.differs && op.unfit && op.unfit->code == Code::kAborted ? counters_->aborted
                                                                   : counters_->refused);
  out->push_back(FinishAttempt{group_, op.ordinal, !op.Refused()});
  if (!op.Refused()) {
    finishing_.emplace(op.ordinal, Finishing{op.key, op.inputs, InfoOf(op), op.complete_at,
                                             op.moved_at, std::exchange(op.redone, false)});
    return;
  }
  for (const LocalInput& input : op.inputs) {
    Answer(op, input,
           op.differs ? Outcome{Code::kInvalidArgument, RefusalOf(op, input)} : *op.unfit, now,
           out);
  }
}

bool OpTable::EndsAtOnce(const Op& op) {
  // With signed READYs, nothing is answered before all participants agree on what each has said.
  return op.algorithm == Algorithm::kOneShot && MayEndAtOnce(op.desc) && !op.Refused() &&
         !op.signed_readies;
}

bool OpTable::HasRoomToLinger(const Op& op) const {
  if (IsOneShot(op.desc)) return true;
  uint64_t bytes = op.desc.bytes();
  for (const auto& [key, other] : lingering_) {
    if (!IsOneShot(other.desc)) bytes += other.result->bytes.size();
  }
  return bytes <= kLingeringBytesMax;
}

void OpTable::Linger(Op& op, Tick now, std::vector<Action>* out) {
  Conclude(op, now, out);
  op.run = Run::kNone;
  op.lingers = true;
  op.cancelled = Cancelled::kNo;  // it was too late
  lingering_.insert(ops_.extract(op.key));
  AdvanceLingering(op, now, out);
}

void OpTable::Drop(Op& op, Tick now, std::vector<Action>* out) {
  if (op.abort) {
    ++settled_;
    ++counters_->aborted;
  }
  if (op.ordinal) out->push_back(FinishAttempt{group_, op.ordinal, false});
  for (const LocalInput& input : op.inputs) {
    Answer(op, input, input.evicted ? *input.evicted : Outcome{Code::kAborted, *op.abort}, now,
           out);
  }
  Erase(op);
}

void OpTable::Erase(Op& op) {
  resumed_ = resumed_ || op.redone;
  if (op.ordinal) by_ordinal_.erase(op.ordinal);
  const OpKey key = op.key;
  if (!op.lingers) {
    ops_.erase(key);
    return;
  }
  const auto [first, last] = lingering_.equal_range(key);
  lingering_.erase(
      std::find_if(first, last, [&](const auto& entry) { return &entry.second == &op; }));
}

OpInfo OpTable::InfoOf(const Op& op) const {
  OpInfo info;
  if (op.participants) {
    info.epoch = op.participants->epoch;
    info.members = op.participants->contributors;
    info.hosts = op.participants->hosts;
  }
  if (op.result && !op.Refused()) {
    info.epoch = op.result->epoch;
    info.members = op.result->members;
    // The result may be of an older epoch, with other members.
    const bool same = op.participants && op.participants->contributors == info.members;
    info.hosts = same ? op.participants->hosts : history_->HostsOf(info.members);
  }
  info.algorithm = op.algorithm;
  const bool encodes = op.algorithm == Algorithm::kMesh || op.algorithm == Algorithm::kRing;
  info.codec = encodes ? op.codec : Quantization::kNone;
  info.retries = op.retries;
  return info;
}

void OpTable::Answer(const Op& op, const LocalInput& input, Outcome outcome, Tick now,
                     std::vector<Action>* out) {
  OpInfo info = InfoOf(op);
  if (op.complete_once) SetPhases(op.complete_at, op.moved_at, input.posted, &info);
  Answer(op.key, input, std::move(outcome), info, now, out);
}

void OpTable::Answer(const OpKey& key, const LocalInput& input, Outcome outcome, OpInfo info,
                     Tick now, std::vector<Action>* out) {
  info.total_us = now - input.posted;
  const auto tags = tags_.find(input.post.local);
  LH_CHECK(tags != tags_.end() && tags->second.erase({key.tag, key.set}) == 1);
  if (tags->second.empty()) tags_.erase(tags);
  out->push_back(PostDone{input.post, std::move(outcome), info});
}

std::string OpTable::RefusalOf(const Op& op, const LocalInput& input) const {
  const auto text = [&](MemberId member, const OpDesc& theirs) {
    return Subject(op.desc, op.key.tag) + " refused: member " + ToString(member) + " offered " +
           ToString(theirs) + ", this member " + ToString(input.desc);
  };
  if (op.mismatch) return Subject(op.desc, op.key.tag) + " refused: " + *op.mismatch;
  for (const LocalInput& other : op.inputs) {
    if (!other.desc.SameButForWorld(input.desc)) return text(other.member, other.desc);
  }
  for (const PeerId peer : op.participants->ring) {
    const auto it = op.readies.find(peer);
    if (it == op.readies.end() || it->second.desc.SameButForWorld(input.desc)) continue;
    return text(op.participants->FirstMemberOf(peer), it->second.desc);
  }
  for (const auto& [peer, ready] : op.readies) {
    if (ready.other_offer) return text(ready.other_offer->member, ready.other_offer->desc);
  }
  LH_CHECK(false) << "refused without a difference " << Subject(op.desc, op.key.tag);
  return "";
}

// ------------------------------------------------------------------------------ epochs

void OpTable::Freeze(Tick now, std::vector<Action>* out) {
  frozen_ = true;
  // Perhaps this peer refuses the op because it was told another offer than the others. They have
  // sent no DONE, so nothing differs here, but they may dispute this peer's DONE.
  for (const auto& [ordinal, op] : by_ordinal_) {
    if (op->signed_readies && op->AllReady() && op->Refused() && !op->disputed) {
      Dispute(*op, PeerId(), out);
    }
  }
  AdvanceAll(now, out);
}

bool OpTable::Stopping() const {
  return std::any_of(by_ordinal_.begin(), by_ordinal_.end(),
                     [](const auto& entry) { return entry.second->run == Run::kStopping; });
}

// The fate of an op may depend on its ordinals at other peers if the op is done, or may be aborted.
// An op whose inputs travel with READY needs them too, because an earlier op of the same key may
// linger at another peer.
// All other ops are redone, and their ordinals would only make reports longer.
bool OpTable::NeedsMatches(const Op& op) {
  return op.done || op.desc.on_fault == OnFault::kAbort || IsOneShot(op.desc) || op.offered ||
         op.cancelled == Cancelled::kWanted;
}

std::vector<control::OpReport> OpTable::Report() const {
  std::vector<control::OpReport> reports;
  for (const auto& [ordinal, op] : by_ordinal_) {
    // If all local members of an op are out, this peer has no survivor of the op and reports
    // nothing.
    if (!op->announced || op->AllEvicted()) continue;
    control::OpReport report;
    report.ordinal = ordinal;
    report.boundary = op->key.boundary;
    report.tag = op->key.tag;
    report.set = op->key.set;
    report.cancelled = op->cancelled == Cancelled::kWanted;
    report.done = op->done;
    if (op->done) {
      const Verdict verdict = VerdictOf(*op);
      report.verdict = verdict.refused ? 2 : 0;
      // The digest says whether the op is refused, too.
      if (verdict.readies_digest)
        report.verdict = std::max(verdict.readies_digest->low, uint64_t{3});
    }
    report.abort_on_fault = op->desc.on_fault == OnFault::kAbort;
    for (const PeerId peer : op->participants->ring) {
      if (!NeedsMatches(*op)) break;
      const auto it = op->readies.find(peer);
      if (it != op->readies.end()) report.matches.push_back({peer, it->second.ordinal});
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

void OpTable::ForgetAttempt(Op& op) {
  op.announced = false;
  op.differs = false;
  op.unfit.reset();
  op.judged = false;
  op.terms.clear();
  op.mismatch.reset();
  op.cuts.clear();
  op.other_offer.reset();
  op.readies.clear();
  op.started.clear();
  op.dones.clear();
  op.done = false;
  op.signed_readies.reset();
  op.disputed = false;
  op.halted = false;
  op.input = ReadyInput::kSegments;
  if (!op.lingers) op.result.reset();
}

void OpTable::ApplyFate(Op& op, const std::map<OpOrdinal, control::Fate>& fates, Tick now,
                        FateCounts* counts, std::vector<Action>* out) {
  op.redone = false;
  if (!op.announced || op.AllEvicted()) return;
  const bool abort_on_fault = op.desc.on_fault == OnFault::kAbort;
  control::Fate fate = abort_on_fault ? control::Fate::kAbort : control::Fate::kRedo;
  const auto it = fates.find(op.ordinal);
  if (it == fates.end() || (it->second == control::Fate::kCommit && !op.done)) {
    out->push_back(LogLine{"fate makes no sense group=" + ToString(group_) +
                           " op=" + ToString(op.ordinal) + " done=" + (op.done ? "1" : "0") +
                           (it == fates.end() ? " fate=none" : " fate=commit")});
  } else {
    fate = it->second;
  }
  if (op.lingers) {
    // If no local member takes part any more, this peer does not announce the op again.
    const bool needed = ParticipantsOf(op.key, op.set)->HasPeer(self_);
    if (fate == control::Fate::kCommit || !needed) return Erase(op);
    return ForgetAttempt(op);
  }
  ++(fate == control::Fate::kCommit  ? counts->committed
     : fate == control::Fate::kAbort ? counts->aborted
                                     : counts->redone);
  if (fate == control::Fate::kCommit) return Settle(op, now, out);
  op.redone = fate == control::Fate::kRedo;
  // The coordinator knew that the op was cancelled: it was too late.
  if (op.redone && op.cancelled == Cancelled::kWanted) op.cancelled = Cancelled::kNo;
  if (fate == control::Fate::kAbort) {
    op.abort = AbortedBy(op.desc, op.key.tag, history_->current().cause);
  } else if (op.AllReady() && !op.Refused()) {
    ++op.retries;
    ++counters_->retries;
  }
  ForgetAttempt(op);
}

void OpTable::Miss(const OpKey& key, const std::string& cause, Tick now, std::vector<Action>* out) {
  std::set<MemberId> posted;
  if (const auto it = ops_.find(key); it != ops_.end()) {
    Op& op = it->second;
    if (op.announced) return;  // the message does not fit
    // If the op here is redone, the missed op is the next one of this key.
    if (!op.redone) {
      for (const LocalInput& input : op.inputs) posted.insert(input.member);
      op.abort = AbortedBy(op.inputs.front().desc, key.tag, cause);
      Advance(op, now, out);
    }
  }
  for (const control::MemberInfo& info : history_->For(key.boundary)->members) {
    if (info.peer != self_ || posted.contains(info.member)) continue;
    Missed& missed = missed_[info.member][key];
    ++missed.count;
    missed.cause = cause;
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
  std::erase_if(lost_, [this](const auto& entry) { return entry.second != attempt_; });
  Lose(lost);
  unmatched_.clear();
  announced_.clear();
  new_attempt_asked_ = false;
  std::map<OpOrdinal, control::Fate> by_ordinal;
  for (const control::OpFate& fate : fates) by_ordinal.emplace(fate.ordinal, fate.fate);
  for (Op* op : AllOps()) ApplyFate(*op, by_ordinal, now, &counts, out);
  std::erase_if(missed_, [&](const auto& entry) { return record.RankOf(entry.first) < 0; });
  for (const control::MissedOp& op : missed) {
    Miss({op.boundary, op.tag, op.set}, record.cause, now, out);
  }
  resumed_ = false;
  for (auto& [ordinal, op] : finishing_) op.redone = false;
  for (auto& [key, op] : ops_) {
    for (LocalInput& input : op.inputs) {
      if (input.evicted || record.RankOf(input.member) >= 0) continue;
      input.evicted = {Code::kEvicted, Subject(input.desc, key.tag) + " ended: member " +
                                           ToString(input.member) + " is not in epoch " +
                                           ToString(record.epoch) + " (" + record.cause + ")"};
    }
  }
  AdvanceAll(now, out);
  Expect({});
  for (auto& [peer, frames] : std::exchange(early_, {})) {
    for (EarlyFrame& frame : frames) {
      if (const auto* ready = std::get_if<PeerReady>(&frame)) {
        OnReady(*ready, now, out);
      } else {
        OnDone(std::get<PeerDone>(frame), now, out);
      }
    }
  }
  return counts;
}

void OpTable::Expect(std::set<PeerId> peers) {
  expected_ = std::move(peers);
  std::erase_if(unmatched_, [&](const auto& entry) { return !Known(entry.first); });
  std::erase_if(early_, [&](const auto& entry) { return !Known(entry.first); });
}

void OpTable::Reset() {
  LH_CHECK(open() == 0);
  lingering_.clear();
  by_ordinal_.clear();
  missed_.clear();
  unmatched_.clear();
  lost_.clear();
  announced_.clear();
  new_attempt_asked_ = false;
  attempt_ = Epoch();
  frozen_ = false;
  // Early frames from the peers of a prepared epoch are kept.
  Expect(std::exchange(expected_, {}));
}

// ------------------------------------------------------------------------------ for tests

void OpTable::CheckInvariants() const {
  std::map<LocalId, std::set<std::pair<uint64_t, uint64_t>>> tags;
  size_t ordinals = 0;
  for (const auto& [key, op] : ops_) {
    const std::string name = ToString(group_) + " tag " + std::to_string(key.tag);
    LH_CHECK(key == op.key && !op.inputs.empty()) << name;
    for (const LocalInput& input : op.inputs) {
      LH_CHECK(tags[input.post.local].insert({key.tag, key.set}).second) << name;
    }
    if (op.ordinal) {
      ++ordinals;
      const auto it = by_ordinal_.find(op.ordinal);
      LH_CHECK(it != by_ordinal_.end() && it->second == &op) << name;
      LH_CHECK(op.ordinal.value() < counters_->next_ordinal) << name;
    }
    LH_CHECK(!op.announced || op.ordinal) << name;
    LH_CHECK(op.announced || (op.readies.empty() && op.dones.empty() && !op.done)) << name;
    LH_CHECK(!op.abort || !op.announced) << name;
    LH_CHECK(!op.lingers) << name;
    for (const auto& [peer, ready] : op.readies) {
      LH_CHECK(peer != self_ && op.participants->HasPeer(peer)) << name;
    }
    for (const auto& [peer, verdict] : op.dones) LH_CHECK(op.readies.contains(peer)) << name;
    LH_CHECK(!op.disputed || op.AllReady()) << name;
    if (op.done) {
      LH_CHECK(op.AllReady()) << name;
      LH_CHECK(op.Refused() ? op.run == Run::kNone
                            : op.run == Run::kComplete || op.run == Run::kStopping)
          << name;
      LH_CHECK(frozen_ || op.run == Run::kStopping || !op.AllDone()) << name << " not settled";
    }
    LH_CHECK(!op.Live() || op.announced) << name;
    LH_CHECK(!op.Live() || op.run_attempt == attempt_) << name;
    LH_CHECK(!frozen_ || op.done || !op.Live()) << name << " runs while frozen";
    // An op that can be announced is announced.
    LH_CHECK(op.announced || frozen_ || op.run == Run::kStopping || !Gathered(op)) << name;
  }
  for (const auto& [key, op] : lingering_) {
    const std::string name = ToString(group_) + " lingering tag " + std::to_string(key.tag);
    LH_CHECK(key == op.key && op.lingers && op.announced && op.result && op.run == Run::kNone)
        << name;
    const auto it = by_ordinal_.find(op.ordinal);
    LH_CHECK(it != by_ordinal_.end() && it->second == &op) << name;
    LH_CHECK(!op.Refused() && !op.halted && !op.abort && !op.redone) << name;
    LH_CHECK(frozen_ || op.done == op.AllReady()) << name;
    LH_CHECK(frozen_ || !op.AllDone()) << name << " is known everywhere";
    ++ordinals;
  }
  for (const auto& [ordinal, op] : finishing_) {
    const std::string name = ToString(group_) + " finishing tag " + std::to_string(op.key.tag);
    LH_CHECK(!op.inputs.empty() && ordinal.value() < counters_->next_ordinal) << name;
    for (const LocalInput& input : op.inputs) {
      LH_CHECK(tags[input.post.local].insert({op.key.tag, op.key.set}).second) << name;
    }
  }
  LH_CHECK(ordinals == by_ordinal_.size() && tags == tags_) << ToString(group_);
  for (const auto& [member, missed] : missed_) {
    LH_CHECK(!missed.empty()) << ToString(group_) << " " << ToString(member);
    for (const auto& [key, entry] : missed) LH_CHECK(entry.count > 0) << ToString(group_);
  }
  for (const auto& [peer, unmatched] : unmatched_) {
    size_t count = 0;
    for (const auto& [key, queue] : unmatched.by_key) {
      LH_CHECK(!queue.empty() && queue.size() <= kReadiesAheadMax) << ToString(group_);
      count += queue.size();
    }
    LH_CHECK(count == unmatched.count && count <= LH_READY_UNMATCHED_MAX) << ToString(group_);
    LH_CHECK(unmatched.bytes <= LH_READY_INPUTS_UNMATCHED_BYTES_MAX) << ToString(group_);
  }
  for (const auto& [peer, frames] : early_) {
    LH_CHECK(!frames.empty() && frames.size() <= LH_READY_UNMATCHED_MAX) << ToString(group_);
  }
}

namespace {

void AddResult(const OneShotResult& result, Digester* digest) {
  digest->Add(result.epoch).Add(uint64_t{result.members.size()}).Add(result.bytes);
}

void AddOther(const std::optional<OtherOffer>& other, Digester* digest) {
  digest->Add(uint64_t{other.has_value()});
  if (other) digest->Add(other->member).Add(other->desc);
}

void AddTerms(const OpTerms& terms, Digester* digest) {
  digest->Add(std::bit_cast<uint64_t>(terms.weight)).Add(uint64_t{terms.gives.size()});
  for (const uint64_t length : terms.gives) digest->Add(length);
  for (const uint64_t length : terms.gets) digest->Add(length);
}

void AddReady(const PeerReady& ready, Digester* digest) {
  digest->Add(ready.peer).Add(ready.ordinal).Add(ready.attempt).Add(ready.boundary);
  digest->Add(ready.tag).Add(ready.set).Add(ready.desc).Add(ready.payload);
  for (const OpTerms& terms : ready.terms) AddTerms(terms, digest);
  AddOther(ready.other_offer, digest);
  digest->Add(static_cast<uint64_t>(ready.input));
  digest->Add(uint64_t{ready.result.has_value()});
  if (ready.result) AddResult(*ready.result, digest);
  if (ready.signature) digest->Add(ready.signature->index).Add(ready.signature->signature);
}

}  // namespace

void OpTable::AddInput(const LocalInput& input, Digester* digest) {
  digest->Add(input.post.local).Add(input.post.call).Add(input.member).Add(input.desc);
  AddTerms(input.terms, digest);
  digest->Add(input.posted).Add(input.evicted ? input.evicted->text : "");
}

void OpTable::AddOp(const Op& op, Digester* digest) {
  digest->Add(op.key.boundary).Add(op.key.tag).Add(op.key.set).Add(op.ordinal).Add(op.run_attempt);
  digest->Add(static_cast<uint64_t>(op.cancelled)).Add(uint64_t{op.judged});
  digest->Add(static_cast<uint64_t>(op.run)).Add(uint64_t{op.retries}).Add(op.complete_at);
  digest->Add(uint64_t{op.announced} | uint64_t{op.other_offer.has_value()} << 1 |
              uint64_t{op.differs} << 2 | uint64_t{op.done} << 3 | uint64_t{op.halted} << 4 |
              uint64_t{op.complete_once} << 5 | uint64_t{op.redone} << 6);
  digest->Add(static_cast<uint64_t>(op.algorithm)).Add(static_cast<uint64_t>(op.codec));
  digest->Add(static_cast<uint64_t>(op.input)).Add(uint64_t{op.offered});
  digest->Add(op.unfit ? op.unfit->text : "");
  digest->Add(op.abort.value_or("")).Add(op.desc).Add(uint64_t{op.inputs.size()});
  for (const LocalInput& input : op.inputs) AddInput(input, digest);
  for (const auto& [peer, ready] : op.readies) AddReady(ready, digest);
  for (const PeerId peer : op.started) digest->Add(peer);
  for (const auto& [peer, verdict] : op.dones) {
    digest->Add(peer).Add(uint64_t{verdict.refused});
    if (verdict.readies_digest) digest->Add(*verdict.readies_digest);
  }
  if (op.signed_readies) {
    digest->Add(op.signed_readies->name.index).Add(op.signed_readies->own);
    for (const auto& [peer, statement] : op.signed_readies->others) digest->Add(statement);
  }
  if (op.disputed) digest->Add(std::string("disputed"));
  digest->Add(uint64_t{op.lingers} | uint64_t{op.result.has_value()} << 1);
  if (op.result) AddResult(*op.result, digest);
}

void OpTable::AddTo(Digester* digest) const {
  digest->Add(uint64_t{ops_.size()}).Add(attempt_).Add(uint64_t{frozen_}).Add(settled_);
  for (const auto& [key, op] : ops_) AddOp(op, digest);
  digest->Add(uint64_t{lingering_.size()});
  for (const auto& [key, op] : lingering_) AddOp(op, digest);
  for (const auto& [ordinal, op] : finishing_) {
    digest->Add(ordinal)
        .Add(op.key.tag)
        .Add(op.key.set)
        .Add(uint64_t{op.redone})
        .Add(op.complete_at);
    digest->Add(op.info.epoch).Add(uint64_t{op.info.members.size()});
    digest->Add(uint64_t{op.info.retries});
    for (const LocalInput& input : op.inputs) AddInput(input, digest);
  }
  for (const auto& [member, missed] : missed_) {
    digest->Add(member);
    for (const auto& [key, entry] : missed) {
      digest->Add(key.boundary)
          .Add(key.tag)
          .Add(key.set)
          .Add(uint64_t{entry.count})
          .Add(entry.cause);
    }
  }
  for (const auto& [peer, unmatched] : unmatched_) {
    for (const auto& [key, queue] : unmatched.by_key) {
      for (const PeerReady& ready : queue) AddReady(ready, digest);
    }
  }
  for (const auto& [peer, frames] : early_) {
    for (const EarlyFrame& frame : frames) {
      if (const auto* ready = std::get_if<PeerReady>(&frame)) {
        AddReady(*ready, digest);
      } else {
        const auto& done = std::get<PeerDone>(frame);
        digest->Add(done.peer).Add(done.ordinal).Add(done.attempt);
        digest->Add(uint64_t{done.refused} | uint64_t{done.started} << 1);
        if (done.readies_digest) digest->Add(*done.readies_digest);
      }
    }
  }
  for (const auto& [peer, attempt] : lost_) digest->Add(peer).Add(attempt);
  for (const auto& [key, count] : announced_) {
    digest->Add(key.boundary).Add(key.tag).Add(key.set).Add(count);
  }
  for (const PeerId peer : expected_) digest->Add(peer);
  for (const auto& [peer, us] : latency_us_) digest->Add(peer).Add(uint64_t{us});
}

}  // namespace longhaul::peerd
