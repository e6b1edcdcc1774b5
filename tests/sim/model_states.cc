#include "tests/sim/model_states.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/prng.h"
#include "tests/sim/checker.h"

namespace longhaul::sim {

using peerd::AskId;
using peerd::LocalId;

namespace {

constexpr uint32_t kChunkBytes = 1u << 20;

uint64_t DigestOf(uint64_t chunk) { return SplitMix64(&chunk); }

Hash128 RootOfDigests(const std::vector<uint64_t>& digests) {
  Hash128 root{1, 2};
  for (const uint64_t digest : digests) {
    root.high ^= digest;
    root.high = SplitMix64(&root.high);
    root.low += root.high;
  }
  return root;
}

std::vector<uint64_t> DigestsOf(const ModelState& state) {
  std::vector<uint64_t> digests;
  for (const uint64_t chunk : state.chunks) digests.push_back(DigestOf(chunk));
  return digests;
}

}  // namespace

Hash128 RootOf(const ModelState& state) { return RootOfDigests(DigestsOf(state)); }

ModelTransfers::ModelTransfers(PeerId self, Options options)
    : self_(self), options_(std::move(options)) {}

void ModelTransfers::Die() {
  held_.clear();
  serving_.clear();
  transfers_.clear();
  reads_.clear();
}

void ModelTransfers::Hold(LocalId local, std::shared_ptr<ModelState> state,
                          control::SyncStrategy strategy) {
  const auto it = held_.find(local);
  if (it != held_.end()) {
    // In the background since an earlier call.
    it->second.strategy = strategy;
    return;
  }
  const Hash128 begun = RootOf(*state);
  held_[local] = {std::move(state), strategy, begun, nullptr};
}

ModelTransfers::Held ModelTransfers::Release(LocalId local, bool good) {
  const auto it = held_.find(local);
  if (it == held_.end()) return {};
  const auto serving = serving_.find(local);
  if ((serving != serving_.end() && !serving->second.may_change) || transfers_.contains(local)) {
    Checker::Fail("a sync has ended, and the state is still served or written");
  }
  Held held = std::move(it->second);
  held_.erase(it);
  if (good) *held.state = *held.now();
  return held;
}

void ModelTransfers::Forget(LocalId local) {
  if (serving_.contains(local) || transfers_.contains(local)) {
    Checker::Fail("a member is out, and its state is still served or written");
  }
  held_.erase(local);
}

void ModelTransfers::Send(PeerId to, Answer what) {
  ModelTransfers* const other = options_.find(to);
  if (other == nullptr) return;
  Node* const node = other->options_.node;
  options_.world->On(node, options_.world->Arrival(*options_.node, *node),
                     [other, what = std::move(what)] { what(other); });
}

// ------------------------------------------------------------------------------ serving

void ModelTransfers::Serve(const peerd::ServeState& action) {
  const Held& held = held_.at(action.local);
  const std::shared_ptr<ModelState> now = held.now();
  if (RootOf(*now) != action.state) {
    Checker::Fail(ToString(action.member) + " serves a state that it has not got");
  }
  // By the time that it may change, the trainer has it.
  serving_[action.local] = {action.group,
                            action.member,
                            action.state,
                            held.strategy,
                            action.may_change ? held.state : now,
                            DigestsOf(*now),
                            action.may_change,
                            action.local};
}

void ModelTransfers::EndServe(const peerd::EndServe& action) {
  if (serving_.erase(action.local) == 0) Checker::Fail("nothing is served that ends");
}

const ModelTransfers::Serving* ModelTransfers::FindServing(const GroupKey& group, MemberId member,
                                                           const Hash128& root) const {
  for (const auto& [id, serving] : serving_) {
    if (serving.group != group || serving.member != member || serving.root != root) continue;
    return &serving;
  }
  return nullptr;
}

void ModelTransfers::Give(PeerId to, const GroupKey& group, MemberId member, const Hash128& root,
                          size_t chunk, uint64_t digest,
                          std::function<void(ModelTransfers*, Chunk)> answer) {
  std::optional<Serving> serving;
  if (const Serving* const found = FindServing(group, member, root)) {
    if (found->strategy == control::SyncStrategy::kReceive) {
      Checker::Fail(ToString(member) + " only receives, and is asked for its state");
    }
    serving = *found;
    // The trainer of a state that may change does not wait for readers.
    if (!serving->may_change) ++reads_[serving->local].count;
  }
  World& world = *options_.world;
  world.On(options_.node, world.now() + world.Between(0, options_.chunk_us), [=, this] {
    const Chunk given = serving ? Read(*serving, chunk, digest) : Chunk();
    Send(to, [=](ModelTransfers* t) { answer(t, given); });
    if (serving && !serving->may_change) EndRead(serving->local);
  });
}

ModelTransfers::Chunk ModelTransfers::Read(const Serving& serving, size_t chunk, uint64_t digest) {
  Chunk given{serving.state->chunks[chunk], false};
  if (DigestOf(*given.value) != digest) {
    if (!serving.may_change) Checker::Fail(ToString(serving.member) + " changed while it was read");
    return {std::nullopt, true};
  }
  if (options_.world->Chance(options_.flips)) *given.value ^= 0x100;
  return given;
}

void ModelTransfers::EndRead(LocalId local) {
  Reads& reads = reads_.at(local);
  if (--reads.count > 0) return;
  const std::deque<std::function<void()>> then = std::move(reads.then);
  reads_.erase(local);
  for (const auto& act : then) act();
}

void ModelTransfers::WhenUnread(LocalId local, std::function<void()> act) {
  const auto it = reads_.find(local);
  const auto serving = serving_.find(local);
  // Nothing waits for readers as long as there may be more of them.
  const bool served = serving != serving_.end() && !serving->second.may_change;
  if (it == reads_.end() || served) return act();
  it->second.then.push_back(std::move(act));
}

bool ModelTransfers::reading() const {
  return std::any_of(reads_.begin(), reads_.end(),
                     [](const auto& entry) { return !entry.second.then.empty(); });
}

// ------------------------------------------------------------------------------ receiving

ModelTransfers::Transfer* ModelTransfers::Find(LocalId local, uint64_t id) {
  const auto it = transfers_.find(local);
  if (it == transfers_.end() || it->second.id != id || it->second.stopping) return nullptr;
  return &it->second;
}

void ModelTransfers::Start(const peerd::StartTransfer& action) {
  if (transfers_.contains(action.local)) Checker::Fail("two transfers into one state");
  if (serving_.contains(action.local)) Checker::Fail("a state is written while it is served");
  if (action.manifest != kModelManifest) Checker::Fail("a transfer of another manifest");
  Held& held = held_.at(action.local);
  if (held.strategy == control::SyncStrategy::kSend) {
    Checker::Fail("a member that only sends is told to fetch");
  }
  if (held.fetched == nullptr) held.fetched = std::make_shared<ModelState>(*held.state);
  Transfer& transfer = transfers_[action.local];
  transfer.id = options_.world->NewNumber();
  transfer.local = action.local;
  transfer.group = action.group;
  transfer.root = action.state;
  transfer.begun = options_.world->now();
  transfer.background = action.background;
  for (const control::SyncSource& source : action.sources) {
    transfer.sources[source.member] = source.peer;
  }
  AskDigests(transfer);
}

// One source after the other, round and round until one has answered.
void ModelTransfers::AskDigests(Transfer& transfer) {
  World& world = *options_.world;
  if (world.now() - transfer.begun >= 4 * Millis(options_.detect_ms)) {
    return End(transfer, {Code::kUnavailable, "no source sent digests in time"});
  }
  auto next = transfer.sources.end();
  for (auto it = transfer.sources.begin(); it != transfer.sources.end(); ++it) {
    if (transfer.unfit.contains(it->first)) continue;
    if (next == transfer.sources.end() ||
        (next->first <= transfer.asked && it->first > transfer.asked)) {
      next = it;
    }
  }
  const LocalId local = transfer.local;
  const uint64_t id = transfer.id;
  const uint64_t ask = transfer.digest_ask = world.NewNumber();
  world.On(options_.node, world.now() + Millis(options_.detect_ms), [=, this] {
    Transfer* const late = Find(local, id);
    if (late != nullptr && !late->plan && late->digest_ask == ask) AskDigests(*late);
  });
  // Others may be named.
  transfer.waits = next == transfer.sources.end();
  if (transfer.waits) return;
  const auto& [member, peer] = *next;
  transfer.asked = member;
  Send(peer, [=, this, member = member, group = transfer.group,
              root = transfer.root](ModelTransfers* source) {
    std::optional<std::vector<uint64_t>> digests;
    if (const Serving* const serving = source->FindServing(group, member, root)) {
      digests = serving->digests;
      if (source->options_.world->Chance(options_.flips)) digests->front() ^= 1;
    }
    source->Send(self_, [=](ModelTransfers* t) { t->OnDigests(local, id, ask, digests); });
  });
}

void ModelTransfers::OnDigests(LocalId local, uint64_t id, uint64_t ask,
                               std::optional<std::vector<uint64_t>> digests) {
  Transfer* const transfer = Find(local, id);
  if (transfer == nullptr || transfer->plan || transfer->digest_ask != ask) return;
  if (!digests || RootOfDigests(*digests) != transfer->root) {
    if (digests) transfer->corrupt.insert(transfer->asked);
    transfer->unfit.insert(transfer->asked);
    return AskDigests(*transfer);
  }
  transfer->digests = *std::move(digests);
  const std::vector<uint64_t> own = DigestsOf(*held_.at(local).now());
  std::vector<peerd::ChunkToFetch> chunks;
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i] != transfer->digests[i]) chunks.push_back({0, i, kChunkBytes});
  }
  if (transfer->background) {
    options_.tell(peerd::TransferMeasured{local, chunks.size() * uint64_t{kChunkBytes},
                                          own.size() * uint64_t{kChunkBytes}});
  }
  peerd::TransferOptions options;
  options.patience_us = Millis(options_.detect_ms);
  options.stall_us = 4 * Millis(options_.detect_ms);
  options.wait_for_sources = true;
  transfer->plan.emplace(std::move(chunks), options, options_.world->now());
  for (const auto& [member, peer] : transfer->sources) {
    if (!transfer->unfit.contains(member)) transfer->plan->AddSource(member);
  }
  Pump(local, id);
}

void ModelTransfers::Pump(LocalId local, uint64_t id) {
  Transfer* const transfer = Find(local, id);
  if (transfer == nullptr || !transfer->plan) return;
  peerd::TransferPlan& plan = *transfer->plan;
  const std::vector<peerd::TransferAction> actions = plan.Advance(options_.world->now());
  plan.CheckInvariants();
  for (const peerd::TransferAction& action : actions) Carry(*transfer, action);
  if (plan.done() && plan.left_out() > 0) {
    return End(*transfer, {Code::kAborted, "chunks have changed at all sources"});
  }
  if (plan.done()) {
    const bool right = RootOf(*held_.at(local).now()) == transfer->root ||
                       options_.planted == Planted::kChunksUnchecked;
    return End(*transfer, right ? Outcome{} : Outcome{Code::kInternal, "the root is another one"});
  }
  if (!plan.failure().empty() && transfer->asks.empty()) {
    return End(*transfer, {Code::kUnavailable, plan.failure()});
  }
  Arm(*transfer);
}

void ModelTransfers::Carry(Transfer& transfer, const peerd::TransferAction& action) {
  World& world = *options_.world;
  const LocalId local = transfer.local;
  const uint64_t id = transfer.id;
  if (const auto* ask = std::get_if<peerd::AskChunk>(&action)) {
    const size_t chunk = ask->chunk.chunk;
    transfer.asks[ask->ask] = chunk;
    Send(transfer.sources.at(ask->source),
         [=, self = self_, number = ask->ask, source = ask->source, group = transfer.group,
          root = transfer.root, digest = transfer.digests[chunk]](ModelTransfers* t) {
           t->Give(
               self, group, source, root, chunk, digest,
               [=](ModelTransfers* back, Chunk given) { back->OnChunk(local, id, number, given); });
         });
  } else {
    world.On(options_.node, world.now() + world.Between(0, Millis(2)),
             [this, local, id, ask = std::get<peerd::DropAsk>(action).ask] {
               Transfer* const found = Find(local, id);
               if (found == nullptr || found->asks.erase(ask) == 0) return;
               found->plan->OnDropped(ask);
               Pump(local, id);
             });
  }
}

void ModelTransfers::Write(const Transfer& transfer, size_t chunk, uint64_t value) {
  const Held& held = held_.at(transfer.local);
  held.fetched->chunks[chunk] = value;
  if (options_.planted == Planted::kWrittenEarly) held.state->chunks[chunk] = value;
}

// No value: it was refused.
void ModelTransfers::OnChunk(LocalId local, uint64_t id, AskId number, Chunk given) {
  const std::optional<uint64_t>& value = given.value;
  Transfer* const transfer = Find(local, id);
  if (transfer == nullptr) return;
  const auto it = transfer->asks.find(number);
  if (it == transfer->asks.end()) return;
  const size_t chunk = it->second;
  transfer->asks.erase(it);
  if (!value && given.changed) {
    transfer->plan->OnChanged(number);
  } else if (!value) {
    transfer->plan->OnRefused(number, "has it no more");
  } else {
    Write(*transfer, chunk, *value);
    const bool good = DigestOf(*value) == transfer->digests[chunk] ||
                      options_.planted == Planted::kChunksUnchecked;
    transfer->plan->OnChunk(number, good, options_.world->now());
  }
  Pump(local, id);
  options_.chunk_arrived();
}

void ModelTransfers::Arm(Transfer& transfer) {
  const Tick due = transfer.plan->NextDeadline();
  if (due == kNever || due >= transfer.armed) return;
  transfer.armed = due;
  World& world = *options_.world;
  world.On(options_.node, std::max(due, world.now()),
           [this, due, local = transfer.local, id = transfer.id] {
             Transfer* const found = Find(local, id);
             if (found == nullptr) return;
             if (found->armed == due) found->armed = kNever;
             Pump(local, id);
           });
}

void ModelTransfers::Change(const peerd::ChangeSources& action) {
  const auto it = transfers_.find(action.local);
  // It has just ended; the core is about to hear of it.
  if (it == transfers_.end() || it->second.stopping) return;
  Transfer& transfer = it->second;
  const auto before = std::exchange(transfer.sources, {});
  for (const control::SyncSource& source : action.sources) {
    transfer.sources[source.member] = source.peer;
  }
  if (!transfer.plan) {
    if (transfer.waits) AskDigests(transfer);
    return;
  }
  for (const auto& [member, peer] : before) {
    if (!transfer.sources.contains(member)) transfer.plan->RemoveSource(member, "left");
  }
  for (const auto& [member, peer] : transfer.sources) {
    if (!before.contains(member)) transfer.plan->AddSource(member);
  }
  Pump(action.local, transfer.id);
}

void ModelTransfers::OnLinkDown(PeerId peer) {
  std::vector<std::pair<LocalId, uint64_t>> touched;
  for (auto& [local, transfer] : transfers_) {
    if (!transfer.plan || transfer.stopping) continue;
    for (const auto& [member, at] : transfer.sources) {
      if (at != peer) continue;
      transfer.plan->SuspendSource(member);
      if (!transfer.unfit.contains(member)) transfer.plan->AddSource(member);
    }
    touched.emplace_back(local, transfer.id);
  }
  for (const auto& [local, id] : touched) Pump(local, id);
}

void ModelTransfers::Stop(const peerd::StopTransfer& action) {
  const auto it = transfers_.find(action.local);
  if (it == transfers_.end()) return;
  it->second.stopping = true;
  World& world = *options_.world;
  world.On(options_.node, world.now() + world.Between(0, Millis(3)),
           [this, local = action.local, id = it->second.id] {
             const auto found = transfers_.find(local);
             if (found == transfers_.end() || found->second.id != id) return;
             End(found->second, {Code::kAborted, "stopped"});
           });
}

void ModelTransfers::End(Transfer& transfer, Outcome outcome) {
  peerd::TransferEnded ended{transfer.local, std::move(outcome)};
  std::set<MemberId> corrupt = transfer.corrupt;
  if (transfer.plan) {
    ended.bytes = transfer.plan->progress().bytes_received;
    ended.sources = transfer.plan->sources_used();
    for (const MemberId member : transfer.plan->corrupt()) corrupt.insert(member);
  }
  ended.corrupt = {corrupt.begin(), corrupt.end()};
  options_.story->Tell(options_.world->now(), ToString(self_), "  transfer of local ",
                       transfer.local.value(), " ends: ", Describe(ended.outcome),
                       " bytes=", ended.bytes);
  transfers_.erase(transfer.local);
  options_.tell(std::move(ended));
}

void ModelTransfers::Compare(const peerd::CompareManifest& action) {
  World& world = *options_.world;
  world.On(options_.node, world.now() + world.Between(0, 4 * Millis(options_.detect_ms)),
           [this, local = action.local] {
             options_.tell(peerd::ManifestCompared{local, "tensor 0 differs"});
           });
}

}  // namespace longhaul::sim
