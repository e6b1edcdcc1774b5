// A state that a trainer has registered, and one sync of it as the trainer asks for it.
//
// Peerd reads the tensors and never writes to them. What it fetches lies in the inbox until a sync
// that fetched it has ended well; then the trainer copies what is marked as changed to its tensors.
// So a sync that fails leaves them as they were, and so does a peerd that dies.
//
//   brought --(hashed)--> offered --(fetched, to the inbox)--> offered, as fetched
//     --(the sync ends well)--> Settle(): the trainer copies what is marked
//     --(it fails)--> Forget(): the next sync hashes all anew, and finds in the inbox what was
//     right
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/hash128.h"
#include "peerd/state/memory_state.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

// The bytes are shared with the trainer, who does not write to them while a sync is on, if it keeps
// to the rules.
//
// Threads: the reactor's, also for the last release; other threads read bytes that `memory` keeps
// mapped.
struct LocalState : MemoryState {
  // One byte for each chunk of each tensor, in order, for the trainer to look at when a sync has
  // ended: 1 where the chunk is to be copied from the inbox. Kept mapped by `memory`, too.
  std::span<uint8_t> changed;
  // The manifest alone: others may compare theirs with it when the bytes are gone.
  std::shared_ptr<const MemoryState> declared;

  std::span<const uint8_t> Tensor(size_t index) const {
    return {places[index], manifest[index].bytes};
  }
  // The trainer may have written to the tensor: what it holds is not known until it is hashed.
  void Bring(size_t tensor);
  // Marks what came from others; whether anything did. The inbox is the trainer's from here on,
  // until the next sync.
  bool Settle();
  // Nothing is known of any tensor until it is hashed; what the inbox holds is.
  void Forget();
};

struct StateSync {
  std::shared_ptr<LocalState> state;
  control::SyncStrategy strategy = control::SyncStrategy::kPopular;
  uint64_t revision = 0;
  // By tensor, not 0 where it may have changed since the last sync that ended well; empty: all may.
  std::vector<uint8_t> touched;
};

struct StateSyncInfo {
  uint64_t revision = 0;
  Hash128 state;
  uint64_t bytes = 0;
  uint32_t sources = 0;
  int64_t total_us = 0;
  bool changed = false;  // chunks are marked
  // What peerd had kept took the place of the tensors, before the sync.
  bool resumed = false;
  // The member is in the background: nobody writes to the tensors until it takes what is fetched.
  bool background = false;
};

}  // namespace longhaul::peerd
