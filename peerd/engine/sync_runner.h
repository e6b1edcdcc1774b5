// Prepares syncs for the peer core, and completes the core's answers for the trainers. Before a
// sync, it has all tensors hashed that may have changed, and tells the core what state there is.
//
//   Begin --(hashed)--> a LocalSync or LocalStep for the core --(SyncDone)--> End
//
// If states are kept (kept_states.h):
// - Begin: a member may bring a lower revision than a former member of its name has left. If it has
//   committed nothing itself, and its strategy is not `send`, the kept state is copied to the inbox
//   of its state, and the core is told of the kept state.
// - If this copy is damaged, the kept state is dropped, and the core is told of what the trainer
//   brought. But if peerd had only a copy of the tensors, the damaged bytes have overwritten it.
//   Then the core is told of a state that is not whole, and has to be fetched.
// - End: a state that all members agreed on is kept. Keeping() is true until it is copied.
//
// Threads: the reactor thread. Nothing here calls the core: events are collected (PopEvents).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/state/hash_pool.h"
#include "peerd/state/kept_states.h"
#include "peerd/state/local_state.h"

namespace longhaul::peerd {

class SyncRunner {
 public:
  // `pool` and `kept` must outlive this object. `clock` gives the time of the reactor.
  SyncRunner(HashPool* pool, KeptStates* kept, std::function<Tick()> clock)
      : pool_(pool), kept_(kept), clock_(std::move(clock)) {}
  ~SyncRunner();
  SyncRunner(const SyncRunner&) = delete;
  SyncRunner& operator=(const SyncRunner&) = delete;

  // Hashes all tensors, so that the next sync of the state need not. Any member may make that sync.
  // Runs `done` afterwards, within HashPool::Deliver(). No sync may use the state meanwhile.
  void Prepare(const std::shared_ptr<LocalState>& state, std::function<void()> done);

  // Begins a sync. A member has one at a time. `with_step`: the core gets a LocalStep, otherwise a
  // LocalSync.
  void Begin(LocalId local, const StateSync& sync, bool with_step);
  // Drops a sync that the core has not heard of, because its member leaves or is gone. The caller
  // must answer the sync. Returns whether it came with a step. nullopt: the core has heard of it,
  // or there is none.
  std::optional<bool> Withdraw(LocalId local);
  // Ends a sync that the core has answered. Returns what the trainer must be told, once Keeping()
  // is false.
  StateSyncInfo End(const SyncDone& ended);
  // Ends a take. OK: the trainer gets the fetched state. Returns what the trainer must be told.
  StateSyncInfo End(const TakeDone& done);
  // The member is out.
  void Gone(LocalId local);
  // True while the state that the member has committed is being copied.
  bool Keeping(LocalId local) const { return keeping_.contains(local); }

  // The state of a sync that the core has heard of and not ended, or the state that is held in the
  // background; otherwise nullptr.
  std::shared_ptr<LocalState> StateOf(LocalId local) const;

  std::vector<Event> PopEvents() { return std::exchange(events_, {}); }
  // For each sync that was hashed since the last call: the time from Begin(), in microseconds.
  std::vector<int64_t> PopHashTimes() { return std::exchange(hash_times_us_, {}); }

 private:
  enum class Stage : uint8_t {
    kWaiting,  // for the kept state of the name, which is being updated
    kFilling,  // the kept state is copied to the inbox
    kHashing,
    kTold,  // the core has heard of the sync
  };
  struct Sync {
    StateSync sync;  // its revision is the one that is offered
    bool with_step = false;
    Tick began;
    Stage stage = Stage::kWaiting;
    HashPool::JobId job = 0;
    std::shared_ptr<const KeptState> kept;
    bool resumed = false;  // the kept state is offered in place of the tensors
    bool whole = true;     // false: damaged bytes have overwritten peerd's copy of the tensors
  };

  // The state of a member in the background. The state that the group agreed on is fetched into it.
  struct Held {
    std::shared_ptr<LocalState> state;
    Tick began;
    bool resumed = false;  // a kept state was offered in place of the tensors
  };

  void Start(LocalId local);
  void Fill(LocalId local, Sync* sync);
  void Hash(LocalId local, Sync* sync);
  // Hashes the tensors that may have changed.
  HashPool::JobId HashTensors(const StateSync& sync, std::function<void()> done);
  void Offer(LocalId local);
  void Tell(LocalId local, bool with_step, const SyncRequest& request);

  HashPool* const pool_;
  KeptStates* const kept_;
  const std::function<Tick()> clock_;
  std::map<LocalId, Sync> syncs_;
  std::map<LocalId, Held> held_;
  std::set<LocalId> keeping_;
  std::vector<Event> events_;
  std::vector<int64_t> hash_times_us_;
};

}  // namespace longhaul::peerd
