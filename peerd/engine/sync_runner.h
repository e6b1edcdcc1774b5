// Syncs between a trainer's call and the peer core: has what may have changed hashed, tells the
// core what there is, and gives the answer its numbers.
//
//   Begin --(hashed)--> a LocalSync or LocalStep for the core --(SyncDone)--> End
//
// Where states are kept (kept_states.h):
// - Begin of a member that brings a lower revision than one of its name left, and has committed
//   nothing itself, copies that to the inbox of its state: it is what the core hears of. A member
//   that only sends stays as it is. If the copy turns out to be damaged, what was kept is
//   forgotten, and the core hears of what the trainer brought. Where peerd has that as a copy only,
//   which the damaged bits went over, the core hears of a state that is not whole: it has to be
//   fetched.
// - End of a sync that all agreed on keeps the state; Keeping() until that is done.
//
// Threads: the reactor's. Nothing here calls the core: events are collected (PopEvents).
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
  // The pool outlives the runner; `kept` goes after it. `clock`: the reactor's.
  SyncRunner(HashPool* pool, KeptStates* kept, std::function<Tick()> clock)
      : pool_(pool), kept_(kept), clock_(std::move(clock)) {}
  ~SyncRunner();
  SyncRunner(const SyncRunner&) = delete;
  SyncRunner& operator=(const SyncRunner&) = delete;

  // Hashes all tensors, that the next sync of the state, of whichever member, finds them hashed;
  // then runs `done`, within HashPool::Deliver(). No sync uses the state.
  void Prepare(const std::shared_ptr<LocalState>& state, std::function<void()> done);

  // At most one of a member at a time. `with_step`: the core gets a LocalStep.
  void Begin(LocalId local, const StateSync& sync, bool with_step);
  // The member does not want it any more, or is gone. The core has not heard of the sync and never
  // will, so the caller answers it: whether it came with a step. nullopt: the core has heard of it,
  // or there is none.
  std::optional<bool> Withdraw(LocalId local);
  // The core has answered: what the trainer is told, once it is not Keeping() any more.
  StateSyncInfo End(const SyncDone& ended);
  // The trainer gets what is fetched, or not yet.
  StateSyncInfo End(const TakeDone& done);
  // The member is out.
  void Gone(LocalId local);
  // What the member has agreed on is being copied.
  bool Keeping(LocalId local) const { return keeping_.contains(local); }

  // The state of a sync that the core has heard of and not ended, or that is held in the
  // background; else nullptr.
  std::shared_ptr<LocalState> StateOf(LocalId local) const;

  std::vector<Event> PopEvents() { return std::exchange(events_, {}); }
  // How long it took to hash, of each sync that was handed to the core since the last call.
  std::vector<int64_t> PopHashTimes() { return std::exchange(hash_times_us_, {}); }

 private:
  enum class Stage : uint8_t {
    kWaiting,  // until what one of its name left is whole
    kFilling,  // from that
    kHashing,
    kTold,  // to the core
  };
  struct Sync {
    StateSync sync;  // with the revision that is offered
    bool with_step = false;
    Tick began;
    Stage stage = Stage::kWaiting;
    HashPool::JobId job = 0;
    std::shared_ptr<const KeptState> kept;
    bool resumed = false;  // it took the place of the tensors
    bool whole = true;     // false: copies of the tensors were written over by what was damaged
  };

  // A state into which what others agree on is fetched in the background.
  struct Held {
    std::shared_ptr<LocalState> state;
    Tick began;
    bool resumed = false;  // what was kept took the place of the tensors
  };

  void Start(LocalId local);
  void Fill(LocalId local, Sync* sync);
  void Hash(LocalId local, Sync* sync);
  // What may have changed.
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
