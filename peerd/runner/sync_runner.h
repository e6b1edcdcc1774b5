// Syncs between a trainer's call and the peer core: has what may have changed hashed, tells the
// core what there is, and gives the answer its numbers.
//
//   Begin --(hashed)--> a LocalSync or LocalStep for the core --(SyncEnded)--> End
//
// Threads: the reactor's. Nothing here calls the core: events are collected (TakeEvents).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "peerd/core/peer_core.h"
#include "peerd/state/hash_pool.h"
#include "peerd/state/local_state.h"

namespace longhaul::peerd {

class SyncRunner {
 public:
  // The pool outlives the runner. `clock`: the reactor's.
  SyncRunner(HashPool* pool, std::function<Tick()> clock) : pool_(pool), clock_(std::move(clock)) {}
  ~SyncRunner();
  SyncRunner(const SyncRunner&) = delete;
  SyncRunner& operator=(const SyncRunner&) = delete;

  // At most one of a member at a time. `with_step`: the core gets a LocalStep.
  void Begin(LocalId local, const StateSync& sync, bool with_step);
  // The member does not want it any more, or is gone. True: the core has not heard of the sync and
  // never will, so the caller answers it.
  bool Withdraw(LocalId local);
  // The core has answered: what the trainer is told.
  StateSyncInfo End(const SyncEnded& ended);

  // The state of a sync that the core has heard of and not ended; else nullptr.
  std::shared_ptr<LocalState> StateOf(LocalId local) const;

  std::vector<Event> TakeEvents() { return std::exchange(events_, {}); }
  // How long it took to hash, of each sync that was handed to the core since the last call.
  std::vector<int64_t> TakeHashTimes() { return std::exchange(hash_times_us_, {}); }

 private:
  struct Sync {
    StateSync sync;
    bool with_step = false;
    Tick began;
    HashPool::JobId job = 0;  // 0: hashed
    ChunkDigests offered;
  };

  void Hashed(LocalId local, const std::vector<size_t>& tensors, HashPool::Digests digests);

  HashPool* const pool_;
  const std::function<Tick()> clock_;
  std::map<LocalId, Sync> syncs_;
  std::vector<Event> events_;
  std::vector<int64_t> hash_times_us_;
};

}  // namespace longhaul::peerd
