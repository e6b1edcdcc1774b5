// A state that a trainer has registered, and one sync of it as the trainer asks for it.
#pragma once

#include <algorithm>
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
  // ended: 1 where the chunk came from others. Kept mapped by `memory`, too.
  std::span<uint8_t> changed;

  // To be called before anything is written to the tensors: a trainer whose peerd dies before it
  // has answered takes them for torn from now on.
  void BeginWriting() { std::fill(changed.begin(), changed.end(), uint8_t{1}); }
  // The manifest alone: others may compare theirs with it when the bytes are gone.
  std::shared_ptr<const MemoryState> declared;

  std::span<const uint8_t> Tensor(size_t index) const {
    return {places[index], manifest[index].bytes};
  }
};

struct StateSync {
  std::shared_ptr<LocalState> state;
  control::SyncStrategy strategy = control::SyncStrategy::kPopular;
  uint64_t revision = 0;
  bool restored = false;  // every byte was written since the last sync
  bool torn = false;      // the tensors hold nothing of use, as their trainer knows
  // By tensor, not 0 where it may have changed since the last sync that ended well; empty: all may.
  std::vector<uint8_t> touched;
};

struct StateSyncInfo {
  uint64_t revision = 0;
  Hash128 state;
  bool torn = false;  // the tensors hold nothing of use
  uint64_t bytes = 0;
  uint32_t sources = 0;
  int64_t total_us = 0;
  // The tensors were filled from what peerd had kept, before the sync.
  bool resumed = false;
  // The sync failed, and they hold another state than the trainer brought: that of `revision`.
  bool replaced = false;
  // The member is in the background: the tensors are peerd's until it takes them.
  bool background = false;
};

}  // namespace longhaul::peerd
