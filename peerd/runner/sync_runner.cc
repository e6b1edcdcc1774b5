#include "peerd/runner/sync_runner.h"

#include <algorithm>
#include <span>

#include "base/check.h"
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

// Where the state is not what it was when it was offered.
void MarkChanged(const ChunkDigests& offered, LocalState* state) {
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
  return request;
}

}  // namespace

SyncRunner::~SyncRunner() {
  for (const auto& [local, sync] : syncs_) pool_->Cancel(sync.job);
}

void SyncRunner::Begin(LocalId local, const StateSync& sync, bool with_step) {
  LH_CHECK(!syncs_.contains(local)) << "two syncs of local " << local.value();
  LocalState& state = *sync.state;
  std::fill(state.changed.begin(), state.changed.end(), uint8_t{0});
  std::vector<size_t> tensors;
  std::vector<std::span<const uint8_t>> bytes;
  for (size_t i = 0; i < state.manifest.size(); ++i) {
    if (state.manifest[i].bytes == 0 || !MayHaveChanged(sync, i)) continue;
    // Not known until it is hashed, also if nobody waits for that any more.
    Forget(&state.digests[i]);
    tensors.push_back(i);
    bytes.push_back(state.Tensor(i));
  }
  Sync& made = syncs_[local];
  made.sync = sync;
  made.with_step = with_step;
  made.began = clock_();
  made.job =
      pool_->HashTensors(bytes, sync.state, [this, local, tensors](HashPool::Digests digests) {
        Hashed(local, tensors, std::move(digests));
      });
}

void SyncRunner::Hashed(LocalId local, const std::vector<size_t>& tensors,
                        HashPool::Digests digests) {
  Sync& sync = syncs_.at(local);
  sync.job = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    sync.sync.state->digests[tensors[i]] = std::move(digests[i]);
  }
  sync.offered = sync.sync.state->digests;
  const SyncRequest request = RequestOf(sync.sync);
  hash_times_us_.push_back(clock_() - sync.began);
  if (sync.with_step) {
    events_.push_back(LocalStep{local, request});
  } else {
    events_.push_back(LocalSync{local, request});
  }
}

bool SyncRunner::Withdraw(LocalId local) {
  const auto it = syncs_.find(local);
  if (it == syncs_.end() || it->second.job == 0) return false;
  pool_->Cancel(it->second.job);
  syncs_.erase(it);
  return true;
}

StateSyncInfo SyncRunner::End(const SyncEnded& ended) {
  StateSyncInfo info{ended.revision, ended.state, ended.torn, ended.bytes, ended.sources, 0};
  const auto it = syncs_.find(ended.local);
  if (it == syncs_.end()) return info;
  info.total_us = clock_() - it->second.began;
  LocalState& state = *it->second.sync.state;
  if (info.bytes > 0) MarkChanged(it->second.offered, &state);
  if (ended.torn) {
    // What lies there is known again when it was hashed again.
    for (std::vector<Hash128>& digests : state.digests) Forget(&digests);
  }
  syncs_.erase(it);
  return info;
}

std::shared_ptr<LocalState> SyncRunner::StateOf(LocalId local) const {
  const auto it = syncs_.find(local);
  return it == syncs_.end() || it->second.job != 0 ? nullptr : it->second.sync.state;
}

}  // namespace longhaul::peerd
