// The shared state of a simulated trainer: tensors in memory of its own, as the client library lays
// them out for its peerd.
//
// A tensor of the arena is read where it is, and has an inbox beside it. A staged tensor has a
// copy, which peerd reads and which is its own inbox. The trainer writes to its tensors between two
// syncs only, and copies what came when a sync has ended well.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "peerd/state/local_state.h"
#include "peerd/state/memory_state.h"
#include "proto/control/messages.h"
#include "tests/sim/planted.h"

namespace longhaul::sim {

// What all trainers of a run declare.
struct StateShape {
  std::vector<uint64_t> bytes;   // of each tensor: 8 or more
  bool unequal = false;          // the last one is not compared
  uint64_t total_bytes() const;  // of what is compared
};
// None of a run has more chunks.
inline constexpr size_t kStateTensors = 5;
// A few small tensors; in some seeds one that has more than one chunk.
StateShape DrawShape(uint64_t seed);
peerd::Manifest ManifestOf(const StateShape& shape, bool odd);

// The root of what lies in memory: what the state's digests should say.
Hash128 RootOfBytes(const peerd::MemoryState& state);

class StateMemory {
 public:
  // `seed`: of the contents. `own`: of what differs between trainers.
  // `odd`: it declares another name.
  StateMemory(const StateShape& shape, uint64_t seed, uint64_t own, bool odd, Planted planted);
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  // Of what the trainer has.
  Hash128 Root() const;
  // One step of training: some of the tensors change, in the same way at all trainers.
  void Train(uint64_t step);
  // This trainer's tensors become different from the others'.
  void Diverge(uint64_t step);

  // Registered with a peerd, of which nothing is known there.
  void Register();
  const std::shared_ptr<peerd::LocalState>& registered() const { return state_; }
  // For a sync. `held`: peerd fetches in the background, so that nothing is written. `exact`: names
  // the tensors that may have changed.
  peerd::StateSync Offer(control::SyncStrategy strategy, uint64_t revision, bool held, bool exact);
  // The last sync, or take, ended well: copies what came.
  void Collect(bool changed);
  // It did not.
  void Failed();

 private:
  struct Tensor {
    std::vector<uint8_t> own;
    std::vector<uint8_t> copy;   // staged: what peerd reads; else empty
    std::vector<uint8_t> inbox;  // not staged
    bool touched = true;
    uint8_t* place() { return copy.empty() ? own.data() : copy.data(); }
    uint8_t* incoming() { return copy.empty() ? inbox.data() : copy.data(); }
  };

  const Planted planted_;
  const peerd::Manifest manifest_;
  std::vector<Tensor> tensors_;
  std::vector<uint8_t> changed_;
  std::shared_ptr<peerd::LocalState> state_;
};

}  // namespace longhaul::sim
