#include "peerd/engine/sync_runner.h"

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/state_hash.h"

namespace longhaul::peerd {
namespace {

bool MayHaveChanged(const StateSync& sync, size_t tensor) {
  if (sync.touched.empty() || sync.touched[tensor] != 0) return true;
  const std::vector<Hash128>& digests = sync.state->digests[tensor];
  return std::find(digests.begin(), digests.end(), Hash128{}) != digests.end();
}

// True if peerd has only a copy of some tensor, which fetched chunks overwrite.
bool AnyIsCopy(const LocalState& state) {
  for (size_t tensor = 0; tensor < state.manifest.size(); ++tensor) {
    if (state.manifest[tensor].bytes > 0 && !state.FreshInbox(tensor)) return true;
  }
  return false;
}

SyncRequest RequestOf(const StateSync& sync) {
  const LocalState& state = *sync.state;
  SyncRequest request;
  request.strategy = sync.strategy;
  request.revision = sync.revision;
  request.manifest = HashManifest(state.manifest);
  request.state = RootOf(state.manifest, state.digests);
  request.unequal = std::any_of(state.manifest.begin(), state.manifest.end(),
                                [](const StateTensor& tensor) { return tensor.allow_unequal; });
  return request;
}

}  // namespace

SyncRunner::~SyncRunner() {
  for (const auto& [local, sync] : syncs_) pool_->Cancel(sync.job);
}

void SyncRunner::Begin(LocalId local, const StateSync& sync, bool with_step) {
  LH_CHECK(!syncs_.contains(local)) << "two syncs of local " << local.value();
  // The marks of an earlier sync do not count for this one.
  std::fill(sync.state->changed.begin(), sync.state->changed.end(), uint8_t{0});
  Sync& made = syncs_[local];
  made.sync = sync;
  made.with_step = with_step;
  made.began = clock_();
  if (held_.contains(local)) {
    // The core knows the held state, and a transfer may be writing to it: do not hash it.
    made.stage = Stage::kTold;
    return Tell(local, with_step, RequestOf(made.sync));
  }
  kept_->WhenIdle(local.value(), [this, local] { Start(local); });
}

void SyncRunner::Start(LocalId local) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.stage != Stage::kWaiting) return;  // withdrawn
  Sync& sync = it->second;
  sync.kept = kept_->Inherit(local.value(), sync.sync.state->manifest);
  const bool older = sync.kept != nullptr && sync.sync.revision < sync.kept->revision;
  const bool fill = older && kept_->Inherited(local.value()) &&
                    sync.sync.strategy != control::SyncStrategy::kSend;
  if (fill) {
    Fill(local, &sync);
  } else {
    Hash(local, &sync);
  }
}

void SyncRunner::Fill(LocalId local, Sync* sync) {
  const std::shared_ptr<LocalState>& state = sync->sync.state;
  for (size_t tensor = 0; tensor < state->manifest.size(); ++tensor) state->Bring(tensor);
  sync->stage = Stage::kFilling;
  sync->resumed = true;
  const uint64_t brought = std::exchange(sync->sync.revision, sync->kept->revision);
  sync->job = kept_->CopyTo(sync->kept, state, [this, local, brought](bool right) {
    Sync& filled = syncs_.at(local);
    Log(right ? LogLevel::kInfo : LogLevel::kError,
        absl::StrCat("kept state taken up local=", local.value(), " brought=", brought,
                     " revision=", filled.kept->revision,
                     " took_ms=", (clock_() - filled.began) / 1000) +
            LogField("right", right ? "yes" : "no"));
    if (right) return Offer(local);
    kept_->Discard(local.value());
    filled.kept = nullptr;
    filled.resumed = false;
    filled.sync.revision = brought;
    if (!AnyIsCopy(*filled.sync.state)) {
      // The tensors are as the trainer brought them. Their digests are gone: hash all of them.
      filled.sync.touched.clear();
      return Hash(local, &filled);
    }
    // The trainer's own tensors are elsewhere, and the kept bytes have overwritten peerd's copy of
    // them. The digest of each chunk is known, but together the chunks are no member's state.
    filled.whole = false;
    for (size_t tensor = 0; tensor < filled.sync.state->manifest.size(); ++tensor) {
      // The root does not cover tensors with allow_unequal, so damage there would not show. The
      // trainer keeps its own, unless other members send theirs.
      if (filled.sync.state->manifest[tensor].allow_unequal) filled.sync.state->Bring(tensor);
    }
    Offer(local);
  });
}

void SyncRunner::Hash(LocalId local, Sync* sync) {
  sync->stage = Stage::kHashing;
  sync->job = HashTensors(sync->sync, [this, local] {
    hash_times_us_.push_back(clock_() - syncs_.at(local).began);
    Offer(local);
  });
}

void SyncRunner::Prepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) {
  StateSync all;
  all.state = state;
  HashTensors(all, std::move(done));
}

HashPool::JobId SyncRunner::HashTensors(const StateSync& sync, std::function<void()> done) {
  const std::shared_ptr<LocalState>& state = sync.state;
  std::vector<size_t> tensors;
  std::vector<std::span<const uint8_t>> bytes;
  for (size_t i = 0; i < state->manifest.size(); ++i) {
    if (state->manifest[i].bytes == 0 || !MayHaveChanged(sync, i)) continue;
    // The digests are unknown until the tensor is hashed, also if the job is cancelled.
    state->Bring(i);
    tensors.push_back(i);
    bytes.push_back(state->Tensor(i));
  }
  return pool_->HashTensors(bytes, state,
                            [state, tensors, done = std::move(done)](HashPool::Digests digests) {
                              for (size_t i = 0; i < tensors.size(); ++i) {
                                state->digests[tensors[i]] = std::move(digests[i]);
                              }
                              done();
                            });
}

void SyncRunner::Offer(LocalId local) {
  Sync& sync = syncs_.at(local);
  sync.stage = Stage::kTold;
  sync.job = 0;
  SyncRequest request = RequestOf(sync.sync);
  request.whole = sync.whole;
  // This also holds if the kept state was copied in an earlier sync that failed.
  request.kept = sync.kept != nullptr && kept_->Inherited(local.value()) &&
                 request.revision == sync.kept->revision && request.state == sync.kept->root;
  Tell(local, sync.with_step, request);
}

void SyncRunner::Tell(LocalId local, bool with_step, const SyncRequest& request) {
  if (with_step) {
    events_.push_back(LocalStep{local, request});
  } else {
    events_.push_back(LocalSync{local, request});
  }
}

std::optional<bool> SyncRunner::Withdraw(LocalId local) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.stage == Stage::kTold) return std::nullopt;
  pool_->Cancel(it->second.job);
  const bool with_step = it->second.with_step;
  syncs_.erase(it);
  return with_step;
}

StateSyncInfo SyncRunner::End(const SyncDone& ended) {
  StateSyncInfo info;
  info.revision = ended.revision;
  info.state = ended.state;
  info.bytes = ended.bytes;
  info.sources = ended.sources;
  auto found = syncs_.extract(ended.local);
  if (found.empty()) return info;
  Sync& sync = found.mapped();
  const std::shared_ptr<LocalState>& state = sync.sync.state;
  info.total_us = clock_() - sync.began;
  if (ended.background) {
    info.background = true;
    held_.try_emplace(ended.local, Held{state, sync.began, sync.resumed});
    return info;
  }
  if (const auto held = held_.extract(ended.local); !held.empty()) {
    sync.resumed = sync.resumed || held.mapped().resumed;
  }
  if (!ended.outcome.ok()) {
    state->Forget();
    return info;
  }
  info.resumed = sync.resumed;
  const bool kept = kept_->Keep(ended.local.value(), state, ended.revision, ended.state,
                                [this, local = ended.local] { keeping_.erase(local); });
  if (!kept) keeping_.insert(ended.local);
  info.changed = state->Settle();
  return info;
}

StateSyncInfo SyncRunner::End(const TakeDone& done) {
  StateSyncInfo info;
  info.revision = done.revision;
  info.state = done.state;
  info.bytes = done.bytes;
  info.sources = done.sources;
  if (!done.outcome.ok()) {
    info.background = held_.contains(done.local);
    return info;
  }
  const auto held = held_.extract(done.local);
  if (held.empty()) return info;  // taken before
  info.total_us = clock_() - held.mapped().began;
  info.resumed = held.mapped().resumed;
  info.changed = held.mapped().state->Settle();
  return info;
}

void SyncRunner::Gone(LocalId local) {
  if (const auto held = held_.extract(local); !held.empty()) held.mapped().state->Forget();
}

std::shared_ptr<LocalState> SyncRunner::StateOf(LocalId local) const {
  const auto it = syncs_.find(local);
  if (it != syncs_.end() && it->second.stage == Stage::kTold) return it->second.sync.state;
  const auto held = held_.find(local);
  return held == held_.end() ? nullptr : held->second.state;
}

}  // namespace longhaul::peerd
