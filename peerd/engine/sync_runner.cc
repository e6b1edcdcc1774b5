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

void Forget(std::vector<Hash128>* digests) {
  std::fill(digests->begin(), digests->end(), Hash128{});
}

// Where the state is not what it was when it was offered; everywhere if it was filled before that.
void MarkChanged(bool filled, const ChunkDigests& offered, LocalState* state) {
  if (filled) {
    std::fill(state->changed.begin(), state->changed.end(), uint8_t{1});
    return;
  }
  size_t chunk = 0;
  for (size_t tensor = 0; tensor < offered.size(); ++tensor) {
    for (size_t i = 0; i < offered[tensor].size(); ++i, ++chunk) {
      state->changed[chunk] = offered[tensor][i] != state->digests[tensor][i];
    }
  }
}

SyncRequest RequestOf(const StateSync& sync) {
  const LocalState& state = *sync.state;
  SyncRequest request;
  request.strategy = sync.strategy;
  request.revision = sync.revision;
  request.manifest = HashManifest(state.manifest);
  request.state = RootOf(state.manifest, state.digests);
  request.restored = sync.restored;
  request.unequal = std::any_of(state.manifest.begin(), state.manifest.end(),
                                [](const StateTensor& tensor) { return tensor.allow_unequal; });
  return request;
}

}  // namespace

SyncRunner::~SyncRunner() {
  for (const auto& [local, sync] : syncs_) pool_->Cancel(sync.job);
}

void SyncRunner::Begin(LocalId local, const StateSync& sync, bool with_step, bool fetching) {
  LH_CHECK(!syncs_.contains(local)) << "two syncs of local " << local.value();
  std::fill(sync.state->changed.begin(), sync.state->changed.end(), uint8_t{0});
  Sync& made = syncs_[local];
  made.sync = sync;
  made.with_step = with_step;
  made.began = clock_();
  if (fetching) {
    made.stage = Stage::kTold;
    SyncRequest request = RequestOf(made.sync);
    request.fetching = true;
    return Tell(local, with_step, request);
  }
  kept_->WhenIdle(local.value(), [this, local] { Start(local); });
}

void SyncRunner::Start(LocalId local) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.stage != Stage::kWaiting) return;  // withdrawn
  Sync& sync = it->second;
  sync.kept = kept_->Inherit(local.value(), sync.sync.state->manifest);
  // What is torn has no revision to speak of.
  const bool older =
      sync.kept != nullptr && (sync.sync.torn || sync.sync.revision < sync.kept->revision);
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
  for (std::vector<Hash128>& digests : state->digests) Forget(&digests);
  state->BeginWriting();
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
    // It would leave the same mixture again.
    if (!right) filled.kept = nullptr;
    Offer(local, /*torn=*/!right);
  });
}

void SyncRunner::Hash(LocalId local, Sync* sync) {
  sync->stage = Stage::kHashing;
  sync->job = HashTensors(sync->sync, [this, local] {
    hash_times_us_.push_back(clock_() - syncs_.at(local).began);
    Offer(local, syncs_.at(local).sync.torn);
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
    // Not known until it is hashed, also if nobody waits for that any more.
    Forget(&state->digests[i]);
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

void SyncRunner::Offer(LocalId local, bool torn) {
  Sync& sync = syncs_.at(local);
  sync.stage = Stage::kTold;
  sync.job = 0;
  sync.offered = sync.sync.state->digests;
  SyncRequest request = RequestOf(sync.sync);
  // Also when it was filled in an earlier sync, which failed.
  request.kept = !torn && sync.kept != nullptr && kept_->Inherited(local.value()) &&
                 request.revision == sync.kept->revision && request.state == sync.kept->root;
  request.torn = torn;
  if (sync.resumed && !torn) request.restored = true;
  Tell(local, sync.with_step, request);
}

void SyncRunner::Tell(LocalId local, bool with_step, const SyncRequest& request) {
  if (with_step) {
    events_.push_back(LocalStep{local, request});
  } else {
    events_.push_back(LocalSync{local, request});
  }
}

std::optional<StateSyncInfo> SyncRunner::Withdraw(LocalId local) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.stage == Stage::kTold) return std::nullopt;
  StateSyncInfo info;
  info.torn = it->second.stage == Stage::kFilling;
  pool_->Cancel(it->second.job);
  syncs_.erase(it);
  return info;
}

void SyncRunner::TransferOver(TransferEnded ended) {
  const auto it = syncs_.find(ended.local);
  const bool mixture = !ended.outcome.ok() && ended.wrote;
  if (it == syncs_.end() || !mixture || it->second.kept == nullptr || held_.contains(ended.local)) {
    events_.push_back(std::move(ended));
    return;
  }
  Sync& sync = it->second;
  sync.job = kept_->CopyTo(sync.kept, sync.sync.state,
                           [this, kept = sync.kept, ended = std::move(ended)](bool right) mutable {
                             Sync& over = syncs_.at(ended.local);
                             over.job = 0;
                             if (right) {
                               over.put_back = true;
                               ended.put_back = PutBack{kept->revision, kept->root};
                             } else {
                               over.kept = nullptr;
                             }
                             Log(LogLevel::kInfo,
                                 absl::StrCat("kept state put back local=", ended.local.value(),
                                              " revision=", kept->revision) +
                                     LogField("right", right ? "yes" : "no"));
                             events_.push_back(std::move(ended));
                           });
}

StateSyncInfo SyncRunner::End(const SyncDone& ended) {
  StateSyncInfo info;
  info.revision = ended.revision;
  info.state = ended.state;
  info.torn = ended.torn;
  info.bytes = ended.bytes;
  info.sources = ended.sources;
  auto found = syncs_.extract(ended.local);
  if (found.empty()) return info;
  Sync& sync = found.mapped();
  info.total_us = clock_() - sync.began;
  if (ended.background) {
    info.background = true;
    // Not again: what the trainer has is what it brought first.
    held_.try_emplace(ended.local,
                      Held{sync.sync.state, std::move(sync.offered), sync.began, sync.resumed});
    return info;
  }
  if (auto held = held_.extract(ended.local); !held.empty()) {
    sync.offered = std::move(held.mapped().offered);
    sync.resumed = sync.resumed || held.mapped().resumed;
  }
  info.resumed = sync.resumed || (sync.put_back && ended.outcome.ok());
  if (!ended.outcome.ok() && !ended.torn) {
    info.replaced = sync.resumed || ended.state != Hash128{};
    if (info.replaced && ended.state == Hash128{}) info.revision = sync.sync.revision;
  }
  LocalState& state = *sync.sync.state;
  MarkChanged(sync.resumed, sync.offered, &state);
  if (ended.torn) {
    // What lies there is known again when it was hashed again.
    for (std::vector<Hash128>& digests : state.digests) Forget(&digests);
  }
  if (!ended.outcome.ok()) return info;
  const bool kept = kept_->Keep(ended.local.value(), sync.sync.state, ended.revision, ended.state,
                                [this, local = ended.local] { keeping_.erase(local); });
  if (!kept) keeping_.insert(ended.local);
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
  MarkChanged(info.resumed, held.mapped().offered, held.mapped().state.get());
  return info;
}

std::shared_ptr<LocalState> SyncRunner::StateOf(LocalId local) const {
  const auto it = syncs_.find(local);
  if (it != syncs_.end() && it->second.stage == Stage::kTold) return it->second.sync.state;
  const auto held = held_.find(local);
  return held == held_.end() ? nullptr : held->second.state;
}

}  // namespace longhaul::peerd
