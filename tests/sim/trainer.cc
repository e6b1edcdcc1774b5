#include "tests/sim/trainer.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace longhaul::sim {
namespace {

// After this many refusals of its state in a row the trainer gives up and leaves.
constexpr uint64_t kRefusalsMax = 20;

}  // namespace

// The bytes of a tensor between two fences. When its op has ended, the memory belongs to the
// trainer again. Then it is filled with a pattern that nobody may change.
class Trainer::Buffer {
 public:
  static constexpr size_t kFence = 64;
  explicit Buffer(const std::vector<uint8_t>& content) : bytes_(content.size() + 2 * kFence, 0xfe) {
    std::copy(content.begin(), content.end(), data());
  }
  uint8_t* data() { return bytes_.data() + kFence; }
  size_t size() const { return bytes_.size() - 2 * kFence; }
  std::vector<uint8_t> Content() { return {data(), data() + size()}; }
  bool Fenced() const {
    for (size_t i = 0; i < kFence; ++i) {
      if (bytes_[i] != 0xfe || bytes_[bytes_.size() - 1 - i] != 0xfe) return false;
    }
    return true;
  }
  void Bury() { std::memset(data(), 0xdd, size()); }
  bool Rests() {
    return Fenced() && std::all_of(data(), data() + size(), [](uint8_t b) { return b == 0xdd; });
  }

 private:
  std::vector<uint8_t> bytes_;
};

Trainer::Trainer(const Context& context, uint64_t seed, int index, PeerHost* peer, TrainerPlan plan,
                 uint32_t* slots)
    : context_(context),
      seed_(seed),
      name_("t" + std::to_string(index)),
      peer_(peer),
      plan_(plan),
      slots_(slots),
      prng_(seed * 1000 + static_cast<uint64_t>(index)),
      state_prng_(seed * 1009 + static_cast<uint64_t>(index)) {
  NewTensors();
}

// Some trainers begin with the same contents as others, some with contents of their own.
void Trainer::NewTensors() {
  if (tensors_ != nullptr) lost_.push_back(std::move(tensors_));
  const uint64_t content = state_prng_.Chance(0.5) ? seed_ : state_prng_.Next();
  tensors_ = std::make_unique<StateMemory>(context_.shape, content, state_prng_.Next(), plan_.odd,
                                           context_.planted);
  root_ = tensors_->Root();
}

void Trainer::Say(const std::string& text) {
  context_.story->Tell(context_.world->now(), name_, "  ", text);
}

void Trainer::After(int64_t low_us, int64_t high_us, std::function<void()> what) {
  context_.world->At(context_.world->now() + prng_.Between(low_us, std::max(low_us, high_us)),
                     [this, life = life_, what = std::move(what)] {
                       if (life != life_ || state_ == State::kFinished) return;
                       const int64_t rest = paused_until_ - context_.world->now();
                       if (rest > 0) return After(rest, rest, what);
                       what();
                     });
}

void Trainer::Pause(int64_t us) {
  Say("pauses for " + std::to_string(us / 1000) + " ms");
  paused_until_ = std::max(paused_until_, context_.world->now() + us);
}

std::optional<Trainer::Waiting> Trainer::waiting() const {
  std::optional<Waiting> oldest;
  const auto consider = [&](std::optional<Tick> since, const std::string& what) {
    if (since && (!oldest || *since < oldest->since)) oldest = Waiting{*since, name_ + " " + what};
  };
  consider(join_since_, "join");
  consider(step_since_, "step after " + std::to_string(step_));
  consider(sync_since_, "sync of revision " + std::to_string(revision_));
  consider(take_since_, "take");
  consider(leave_since_, "leave");
  for (const auto& [call, posted] : posted_) consider(posted.since, ToString(posted.name));
  return oldest;
}

// ------------------------------------------------------------------------------ life

void Trainer::Start() {
  if (!peer_->node()->alive) return Finish("finds no peerd");
  Join();
}

void Trainer::Join() {
  if (*slots_ >= kSlotsMax) return Finish("finds no free slot");
  slot_ = (*slots_)++;
  ++life_;
  state_ = State::kJoining;
  join_since_ = context_.world->now();
  world_seen_ = {};
  strands_.clear();
  // The group may have been empty meanwhile. Then its first sync may bring any revision.
  revision_ = 0;
  changed_ = true;
  in_step_ = again_ = working_ = held_ = false;
  background_steps_ = 0;
  CheckState();
  tensors_->Register();
  control::JoinWish terms = plan_.terms;
  terms.members = std::exchange(waits_for_, 0);
  Say("joins group " + std::to_string(plan_.group) + " at " + ToString(peer_->id()));
  local_ = peer_->Join(this, {"demo", plan_.group}, name_, slot_, terms);
  // One of those that it waits for may never come.
  if (terms.members > 0) After(Millis(500), Seconds(5), [this] { GiveUpJoin(); });
  // A fellow may have ended before this trainer joins.
  for (const Trainer* fellow : fellows_) {
    if (fellow->finished()) After(Millis(1), Millis(5), [this] { GiveUpJoin(); });
  }
}

void Trainer::Die() {
  if (state_ == State::kFinished || state_ == State::kIdle) return;
  Say("dies");
  // The buffers of its ops stay mapped at the peer.
  if (peer_->node()->alive) peer_->TrainerDied(local_);
  if (!plan_.rejoin || !state_prng_.Chance(0.5)) return Finish("is dead");
  join_since_ = step_since_ = sync_since_ = take_since_ = leave_since_ = std::nullopt;
  posted_.clear();
  CheckGraves();
  NewTensors();
  JoinAgain(Millis(200));
}

void Trainer::Finish(const std::string& how) {
  Say(how);
  ++life_;
  state_ = State::kFinished;
  join_since_ = step_since_ = sync_since_ = take_since_ = leave_since_ = std::nullopt;
  posted_.clear();
  CheckGraves();
  for (Trainer* fellow : fellows_) {
    fellow->After(Millis(1), Millis(5), [fellow] { fellow->GiveUpJoin(); });
  }
}

void Trainer::GiveUpJoin() {
  if (state_ == State::kJoining) Die();
}

void Trainer::OnPeerGone() {
  if (state_ == State::kFinished) return;
  Finish("lost its peerd");
}

void Trainer::OnJoinDone(const Outcome& outcome, const peerd::World& world) {
  if (state_ != State::kJoining) Checker::Fail(name_ + ": JoinDone was not asked for");
  join_since_.reset();
  if (!outcome.ok()) return Finish("join refused: " + Describe(outcome));
  state_ = State::kInside;
  world_seen_ = world;
  step_ = context_.checker->FirstStep(plan_.group, world.member);
  Say("is " + ToString(world.member) + ", rank " + std::to_string(world.rank) + " of " +
      std::to_string(world.size) + " in epoch " + ToString(world.epoch) + ", step " +
      std::to_string(step_));
  context_.checker->OnStep(plan_.group, step_, world);
  if (!SyncsAt(step_)) return BeginStep();
  if (state_prng_.Chance(0.5)) return After(0, plan_.think_us / 10, [this] { Sync(); });
  peer_->Prepare(local_, tensors_->registered(), [this, life = life_] {
    if (life == life_) Sync();
  });
}

void Trainer::OnWorldChanged(const peerd::World& world) {
  if (state_ != State::kInside && state_ != State::kLeaving) {
    Checker::Fail(name_ + ": WorldChanged outside a membership");
  }
  world_seen_ = world;
}

void Trainer::OnMemberGone(const Outcome& outcome) {
  if (state_ != State::kInside && state_ != State::kLeaving) {
    Checker::Fail(name_ + ": MemberGone outside a membership");
  }
  join_since_ = step_since_ = sync_since_ = take_since_ = leave_since_ = std::nullopt;
  again_ = false;
  posted_.clear();
  Say("is no member any more: " + Describe(outcome));
  const bool again = state_ == State::kInside && plan_.rejoin;
  if (!again) return Finish("ends");
  JoinAgain(Millis(50));
}

void Trainer::JoinAgain(int64_t within_us) {
  state_ = State::kIdle;
  ++life_;
  After(Millis(1), within_us, [this] {
    if (peer_->node()->alive && !peer_->drained()) return Join();
    Finish("has no peerd to join at");
  });
}

void Trainer::OnLeaveDone(const Outcome& outcome) {
  if (!leave_since_) Checker::Fail(name_ + ": LeaveDone was not asked for");
  leave_since_.reset();
  if (!outcome.ok() && outcome.code != Code::kEvicted && outcome.code != Code::kUnavailable) {
    Checker::Fail(name_ + ": leave ended as " + Describe(outcome));
  }
}

// ------------------------------------------------------------------------------ steps and ops

std::vector<Trainer::Strand> Trainer::StrandsOf(uint64_t step) const {
  Prng prng(seed_ * 7919 + plan_.group * 104729 + step);
  std::vector<Strand> strands;
  for (uint64_t tag = 1 + prng.Below(static_cast<uint64_t>(plan_.ops_max)); tag > 0; --tag) {
    strands.push_back({step, tag, prng.Chance(0.2) ? 2u : 1u, 0, false});
  }
  if (step % 2 == 0 && prng.Chance(0.5)) strands.push_back({step, kLateTag, 1, 0, true});
  return strands;
}

void Trainer::BeginStep() {
  working_ = true;
  if (held_ && state_prng_.Chance(0.6)) After(0, plan_.think_us, [this] { TakeState(); });
  for (const Strand& strand : StrandsOf(step_)) strands_.push_back(strand);
  for (size_t i = strands_.size(); i-- > 1;) {
    // Strands of the step before keep their places.
    const size_t j = prng_.Below(i + 1);
    if (strands_[i].step == step_ && strands_[j].step == step_) std::swap(strands_[i], strands_[j]);
  }
  const int64_t pause = prng_.Chance(0.3) ? plan_.think_us : plan_.think_us / 10;
  for (size_t i = 0; i < strands_.size(); ++i) {
    if (strands_[i].step == step_) After(0, pause, [this, i] { PostNext(i); });
  }
  After(0, pause, [this] { MaybeEndStep(); });
}

// Which part of the group the op is for, if it is for a part; and the members of that part. Part 0
// of a split op: this member takes no part.
std::vector<MemberId> Trainer::PartOf(OpName* name, bool split) const {
  const std::vector<MemberId>& all =
      context_.checker->StepMembers(plan_.group, name->step, world_seen_.epoch);
  const auto at = std::find(all.begin(), all.end(), world_seen_.member);
  if (at == all.end()) return {};
  const auto place = static_cast<uint32_t>(at - all.begin());
  std::vector<MemberId> members;
  for (uint32_t i = 0; i < all.size(); ++i) {
    if (split ? i % 2 == place % 2 : i / 2 == place / 2) members.push_back(all[i]);
  }
  name->part = 1 + (split ? place % 2 : place / 2);
  return members;
}

void Trainer::PostNext(size_t index) {
  if (state_ != State::kInside) return;
  const Strand& strand = strands_[index];
  OpName name{plan_.group, strand.step, strand.tag, strand.turn};
  const OpShape shape = ShapeOf(seed_, name);
  const bool given_up = EndsEarly(name);
  // It never starts this op. The others cancel it, and are not to meet what comes next here.
  if (given_up && prng_.Chance(0.3)) return StrandDone(name);
  const bool may_be_refused = MayBeRefused(name);
  const bool refused = may_be_refused && prng_.Chance(0.4);
  // Some of these ops are called only where the call is refused. The next op of the tag comes after
  // the boundary, and is not to meet that. (Peers that sign READYs number them, so that may cost
  // them a link.)
  const bool alone = may_be_refused && name.step % 3 == 0 && !context_.sign_ops;
  if (alone && !refused) return StrandDone(name);
  const uint64_t call = next_call_++;
  peerd::LocalPost post{{local_, call}, strand.tag, DescOf(seed_, name, slot_)};
  OpDesc& desc = post.desc;
  const bool pair = desc.kind == OpKind::kSendRecv;
  if (pair || shape.split) {
    const std::vector<MemberId> members = PartOf(&name, !pair);
    if (members.empty() || (pair && members.size() < 2)) return StrandDone(name);
    if (pair) {
      post.is_root = members[0] == world_seen_.member;
      post.partner = members[post.is_root ? 1 : 0];
    } else {
      post.participants = members;
      std::sort(post.participants.begin(), post.participants.end());
    }
    context_.checker->OnPart(name, members);
  }
  if (desc.InParts()) desc.world = static_cast<uint16_t>(world_seen_.size);
  if (HasRoot(desc.kind)) {
    post.root_rank = RootRankOf(name, world_seen_.size);
    post.is_root = *post.root_rank == world_seen_.rank;
  }
  if (refused) {
    context_.checker->OnRefused(name, slot_);
    peer_->Refuse(post);
    return StrandDone(name);
  }
  if (desc.weighted) post.terms.weight = WeightOf(slot_);
  Posted posted{name, desc, post.is_root, context_.world->now(), nullptr, nullptr, nullptr};
  const auto bytes = [&](Extent extent) -> uint64_t {
    if (extent == Extent::kNone) return 0;
    return desc.part_bytes() * (extent == Extent::kWhole && desc.InParts() ? desc.world : 1);
  };
  const uint64_t source_bytes = bytes(SourceOf(desc.kind, post.is_root));
  const uint64_t target_bytes = bytes(TargetOf(desc.kind, post.is_root));
  posted.source = std::make_shared<Buffer>(source_bytes == 0 ? std::vector<uint8_t>()
                                                             : InputOf(name, desc, slot_));
  // In other kinds, what an op in place leaves behind after an error is not its input.
  const bool may_be_in_place =
      Reduces(desc.kind) && source_bytes == target_bytes && !desc.InParts();
  posted.target =
      prng_.Chance(0.6) && may_be_in_place
          ? posted.source
          : std::make_shared<Buffer>(std::vector<uint8_t>(target_bytes, Checker::kFresh));
  const OpPost op = context_.checker->OnPosted(name, slot_, world_seen_.size, post.is_root);
  peerd::PostBuffers buffers;
  buffers.pieces.push_back({desc.dtype, desc.count});
  buffers.sources.push_back(source_bytes == 0 ? nullptr : posted.source->data());
  buffers.targets.push_back(target_bytes == 0 ? nullptr : posted.target->data());
  buffers.holders = {posted.source, posted.target};
  if (const std::vector<float> error = ErrorOf(name, desc, slot_); !error.empty()) {
    std::vector<uint8_t> bytes(error.size() * sizeof(float));
    std::memcpy(bytes.data(), error.data(), bytes.size());
    posted.error = std::make_shared<Buffer>(bytes);
    buffers.errors.push_back(reinterpret_cast<float*>(posted.error->data()));
    buffers.holders.push_back(posted.error);
  }
  peer_->Post(post, std::move(buffers), op);
  posted_.emplace(call, std::move(posted));
  // Late ops are not started again, so that some members would never start them.
  if (strand.tag == kLateTag) return;
  if (!given_up && !(plan_.cancels && prng_.Chance(0.05))) return;
  After(0, Millis(5), [this, ref = post.post, name] {
    if (state_ != State::kInside || !posted_.contains(ref.call)) return;
    context_.checker->OnCancelled(name);
    peer_->Cancel(ref);
  });
}

void Trainer::OnPostDone(uint64_t call, const Outcome& outcome, const peerd::OpInfo& info) {
  const auto it = posted_.find(call);
  if (it == posted_.end()) Checker::Fail(name_ + ": PostDone was not asked for, or came twice");
  const Posted posted = std::move(it->second);
  posted_.erase(it);
  const std::vector<uint8_t> source = posted.source->Content();
  const std::vector<uint8_t> target = posted.target->Content();
  const bool keeps = posted.error != nullptr;
  const std::vector<uint8_t> error = keeps ? posted.error->Content() : std::vector<uint8_t>();
  if (!posted.source->Fenced() || !posted.target->Fenced() || (keeps && !posted.error->Fenced())) {
    Checker::Fail(ToString(posted.name) + " was written beyond its buffer");
  }
  context_.checker->OnEnded({posted.name, posted.desc, slot_, posted.source == posted.target,
                             posted.is_root, &source, &target, &error},
                            outcome, info);
  if (outcome.ok()) ++ops_ok_;
  // The memory is the trainer's again.
  for (const auto& buffer : {posted.source, posted.target, posted.error}) {
    if (buffer == nullptr) continue;
    buffer->Bury();
    graves_.push_back(buffer);
  }
  if (graves_.size() > 40) CheckGraves();
  const bool aborted = outcome.code == Code::kAborted && state_ == State::kInside;
  if (aborted && GivesUp(posted.name)) {
    context_.checker->OnGivenUp(posted.name, info.epoch);
  } else if (aborted) {
    After(0, Millis(2), [this, name = posted.name] {
      for (size_t i = 0; i < strands_.size(); ++i) {
        if (strands_[i].step == name.step && strands_[i].tag == name.tag) PostNext(i);
      }
    });
    return;
  }
  StrandDone(posted.name);
}

// Whether all members that start the op cancel it, and some do not start it at all. Only the last
// op of its strand, so that a boundary comes before the next op of the tag.
bool Trainer::EndsEarly(const OpName& name) const {
  if (!plan_.ends_early || name.tag == kLateTag || ShapeOf(seed_, name).mismatched) return false;
  if (!IsLastOfStrand(name)) return false;
  return Prng(seed_ * 5915587 + name.step * 1000003 + name.tag * 1009).Chance(0.15);
}

bool Trainer::IsLastOfStrand(const OpName& name) const {
  const std::vector<Strand> strands = StrandsOf(name.step);
  return std::all_of(strands.begin(), strands.end(), [&](const Strand& strand) {
    return strand.tag != name.tag || strand.turns == name.turn + 1;
  });
}

// Whether the call may be refused to some of the op's participants. It is made once: who gets
// Aborted does not start the op again, because others may have been refused.
bool Trainer::MayBeRefused(const OpName& name) const {
  if (!plan_.refuses || ShapeOf(seed_, name).mismatched || EndsEarly(name)) return false;
  if (!IsLastOfStrand(name)) return false;
  return Prng(seed_ * 7368787 + name.step * 1000003 + name.tag * 1009).Chance(0.2);
}

bool Trainer::GivesUp(const OpName& name) const {
  if (EndsEarly(name) || MayBeRefused(name)) return true;
  // Newcomers have joined since, and do not know of the op.
  if (name.tag == kLateTag) return true;
  // While the root or the partner is in the background or dead, the op would always end so.
  const OpKind kind = ShapeOf(seed_, name).desc.kind;
  if (HasRoot(kind) || kind == OpKind::kSendRecv) return true;
  return Prng(seed_ * 6700417 + name.step * 1000003 + name.tag * 1009 + name.turn).Chance(0.5);
}

void Trainer::CheckGraves() {
  for (const auto& buffer : std::exchange(graves_, {})) {
    if (!buffer->Rests()) Checker::Fail(name_ + ": memory was written after its op had ended");
  }
}

// Also called if the member takes no part in the op.
void Trainer::StrandDone(const OpName& name) {
  for (size_t i = 0; i < strands_.size(); ++i) {
    Strand& strand = strands_[i];
    if (strand.step != name.step || strand.tag != name.tag) continue;
    if (++strand.turn < strand.turns) {
      After(0, plan_.think_us / 20, [this, i] { PostNext(i); });
    } else {
      MaybeEndStep();
    }
    return;
  }
}

void Trainer::MaybeEndStep() {
  if (state_ != State::kInside || !working_) return;
  for (const Strand& strand : strands_) {
    if (strand.turn < strand.turns && !(strand.late && strand.step == step_)) return;
  }
  // The op of a late strand must at least be posted.
  for (const Strand& strand : strands_) {
    if (!strand.late || strand.turn == strand.turns) continue;
    const bool posted = std::any_of(posted_.begin(), posted_.end(), [&](const auto& entry) {
      return entry.second.name.step == strand.step && entry.second.name.tag == strand.tag;
    });
    if (!posted) return After(Millis(1), Millis(3), [this] { MaybeEndStep(); });
  }
  std::erase_if(strands_, [](const Strand& s) { return s.turn == s.turns; });
  EndStep();
}

void Trainer::EndStep() {
  ++steps_done_;
  working_ = false;
  step_since_ = context_.world->now();
  const bool hopeless = refusals_ > kRefusalsMax;
  if (steps_done_ < plan_.steps && context_.world->now() < plan_.leave_after && !hopeless) {
    if (plan_.dawdle_us == 0 || !prng_.Chance(0.1)) return ReachBoundary();
    return After(0, plan_.dawdle_us, [this] {
      step_since_ = context_.world->now();
      ReachBoundary();
    });
  }
  step_since_.reset();
  state_ = State::kLeaving;
  leave_since_ = context_.world->now();
  Say("leaves");
  peer_->Leave(local_);
}

void Trainer::ReachBoundary() {
  // Until the take is answered, the state may belong to the trainer or to the peer.
  if (take_since_) return After(Millis(1), Millis(3), [this] { ReachBoundary(); });
  if (state_ != State::kInside) return;
  if (!SyncsAt(step_ + 1)) return peer_->Step(local_);
  in_step_ = true;
  sync_since_ = step_since_;
  peer_->Step(local_, MakeOffer(step_ + 1));
}

void Trainer::OnStepDone(const Outcome& outcome, const peerd::World& world) {
  if (!step_since_) Checker::Fail(name_ + ": StepDone was not asked for");
  step_since_.reset();
  if (!outcome.ok()) {
    if (outcome.code != Code::kEvicted && outcome.code != Code::kUnavailable) {
      Checker::Fail(name_ + ": step ended as " + Describe(outcome));
    }
    return;  // MemberGone follows
  }
  world_seen_ = world;
  ++step_;
  context_.checker->OnStep(plan_.group, step_, world);
  background_steps_ = world.background ? background_steps_ + 1 : 0;
  if (background_steps_ > 100) Checker::Fail(name_ + " does not come out of the background");
  Say("begins step " + std::to_string(step_) + " in epoch " + ToString(world.epoch) + " of " +
      std::to_string(world.size));
  if (again_) return After(0, plan_.think_us / 10, [this] { Sync(); });
  BeginStep();
}

// ------------------------------------------------------------------------------ syncs

bool Trainer::SyncsAt(uint64_t step) const {
  if (plan_.syncs == Syncs::kNone) return false;
  return Prng(seed_ * 15485863 + plan_.group * 31 + step).Chance(0.8);
}

peerd::StateSync Trainer::MakeOffer(uint64_t step) {
  strategy_ = control::SyncStrategy::kPopular;
  if (plan_.syncs == Syncs::kSendReceive) {
    const bool sends = !held_ && !world_seen_.background && (slot_ + step) % 3 == 0;
    strategy_ = sends ? control::SyncStrategy::kSend : control::SyncStrategy::kReceive;
  }
  CheckState();
  if (!held_ && !changed_) {
    // The training since the last sync.
    tensors_->Train(step);
    if (state_prng_.Chance(0.05)) tensors_->Diverge(step);
    root_ = tensors_->Root();
    changed_ = true;
    ++revision_;
  }
  return tensors_->Offer(strategy_, revision_, held_, state_prng_.Chance(0.5));
}

void Trainer::Sync() {
  if (state_ != State::kInside) return;
  again_ = false;
  in_step_ = false;
  sync_since_ = context_.world->now();
  peer_->Sync(local_, MakeOffer(step_));
}

void Trainer::OnSyncDone(const Outcome& outcome, const peerd::StateSyncInfo& info) {
  if (!sync_since_) Checker::Fail(name_ + ": SyncDone was not asked for");
  sync_since_.reset();
  held_ = info.background;
  if (held_) {
    if (!in_step_ && state_ == State::kInside) BeginStep();
    return;
  }
  const Hash128 begun = root_;
  if (outcome.ok()) {
    tensors_->Collect(info.changed);
    revision_ = info.revision;
    changed_ = false;
  } else {
    tensors_->Failed();
  }
  root_ = tensors_->Root();
  context_.checker->OnSyncDone(outcome, info, strategy_, begun, root_);
  refusals_ = outcome.code == Code::kStateMismatch ? refusals_ + 1 : 0;
  again_ = outcome.code == Code::kAborted;           // the same at all participants
  if (in_step_ || state_ != State::kInside) return;  // StepDone follows
  if (outcome.code == Code::kEvicted || outcome.code == Code::kUnavailable) return;
  if (again_) return After(0, plan_.think_us / 10, [this] { Sync(); });
  BeginStep();
}

void Trainer::TakeState() {
  if (!held_ || state_ != State::kInside || sync_since_ || step_since_ || take_since_) return;
  take_since_ = context_.world->now();
  peer_->TakeState(local_, state_prng_.Chance(0.5) ? 0 : plan_.think_us);
}

void Trainer::OnTakeDone(const Outcome& outcome, const peerd::StateSyncInfo& info) {
  if (!take_since_) Checker::Fail(name_ + ": TakeDone was not asked for");
  take_since_.reset();
  if (!outcome.ok()) return;
  held_ = false;
  CheckState();
  tensors_->Collect(info.changed);
  root_ = tensors_->Root();
  context_.checker->OnTaken(info, root_);
  revision_ = info.revision;
  changed_ = false;
}

// Fails if somebody else wrote to the tensors between two syncs.
void Trainer::CheckState() {
  if (tensors_->Root() != root_) {
    Checker::Fail(name_ + ": the state was written after its sync had ended");
  }
}

}  // namespace longhaul::sim
