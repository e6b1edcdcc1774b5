// A state that a trainer has registered, and the requests to sync it.
//
// peerd only reads the tensors of a trainer. It writes what it fetches to the inbox. When a sync
// has ended well, the trainer copies the chunks that are marked as changed from the inbox to its
// tensors. So a sync that fails leaves the tensors as they were, and so does a peerd that dies.
//
// The steps of a sync:
// 1. Bring() for each tensor that may have changed. Then these tensors are hashed.
// 2. The member offers the state. If the group elects another state, the chunks that differ are
//    fetched to the inbox.
// 3. The sync ends well: Settle() marks the fetched chunks, and the trainer copies them.
//    The sync fails: Forget(). The next sync hashes all tensors again. It need not fetch chunks
//    that are in the inbox already.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/hash128.h"
#include "peerd/state/memory_state.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

// The memory is shared with the trainer. A trainer that keeps to the rules does not write to the
// tensors during a sync.
//
// Threads: the reactor thread, which also destroys the object. Other threads may read bytes that
// `memory` keeps mapped.
struct LocalState : MemoryState {
  // One byte for each chunk of each tensor, in order. When a sync has ended well, 1 means that the
  // trainer must copy the chunk from the inbox. `memory` keeps these bytes mapped, too.
  std::span<uint8_t> changed;
  // A copy with the manifest only: no tensors, no digests, no `memory`. After a sync the server of
  // states has this copy in place of the state. So other peers can still compare manifests, and the
  // trainer's memory need not stay mapped.
  std::shared_ptr<const MemoryState> declared;

  std::span<const uint8_t> Tensor(size_t index) const {
    return {places[index], manifest[index].bytes};
  }
  // Call it if the trainer may have written to the tensor: forgets the digests of the tensor.
  void Bring(size_t tensor);
  // Call it after a sync that ended well: marks the fetched chunks in `changed`. Returns whether
  // there are any. From now to the next sync the inbox belongs to the trainer.
  bool Settle();
  // Call it after a sync that failed: forgets the digests of all tensors, but not of the inbox.
  void Forget();
};

// A request of a trainer to sync a state.
struct StateSync {
  std::shared_ptr<LocalState> state;
  control::SyncStrategy strategy = control::SyncStrategy::kPopular;
  uint64_t revision = 0;
  // For each tensor: not 0 if it may have changed since the last sync that ended well. Empty: all
  // tensors may have changed.
  std::vector<uint8_t> touched;
};

// How a sync ended.
struct StateSyncInfo {
  uint64_t revision = 0;
  Hash128 state;
  uint64_t bytes = 0;    // bytes that were fetched
  uint32_t sources = 0;  // members that sent any of these bytes
  int64_t total_us = 0;
  bool changed = false;  // LocalState::changed has marks
  // The member offered a state that peerd had kept (kept_states.h), not the trainer's tensors.
  bool resumed = false;
  // The member is in the background: its trainer must not write to the tensors until it takes the
  // fetched state.
  bool background = false;
};

}  // namespace longhaul::peerd
