// The shared state of a simulated trainer: tensors in its own memory, laid out for peerd as the
// client library does it.
//
// Peerd reads a tensor of the arena in place, and the tensor has an inbox beside it. A staged
// tensor has a copy, which peerd reads and which is its own inbox. The trainer writes to its
// tensors only between two syncs. After a sync that ended well it copies the chunks that came.
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
  std::vector<uint64_t> bytes;   // of each tensor: at least 8
  bool unequal = false;          // the last tensor is not compared (allow_unequal)
  uint64_t total_bytes() const;  // of the tensors that are compared
};
// Number of tensors of a state.
inline constexpr size_t kStateTensors = 5;
// Returns a few small tensors. In some seeds one of them has more than one chunk.
StateShape DrawShape(uint64_t seed);
peerd::Manifest ManifestOf(const StateShape& shape, bool odd);

// Computes the root from the bytes in memory. The digests of the state should give the same.
Hash128 RootOfBytes(const peerd::MemoryState& state);

class StateMemory {
 public:
  // `seed` gives the contents of the tensors that are compared, `own` all that differs between
  // trainers. `odd`: one tensor has another name.
  StateMemory(const StateShape& shape, uint64_t seed, uint64_t own, bool odd, Planted planted);
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  // Root of the trainer's tensors.
  Hash128 Root() const;
  // One step of training: changes some of the tensors, in the same way at all trainers.
  void Train(uint64_t step);
  // Makes this trainer's tensors different from those of the other trainers.
  void Diverge(uint64_t step);

  // Hands the tensors to a peerd that knows nothing of them.
  void Register();
  const std::shared_ptr<peerd::LocalState>& registered() const { return state_; }
  // Returns an offer for a sync. `held`: peerd fetches in the background and holds the tensors, so
  // they are not touched. `exact`: the offer names the tensors that may have changed.
  peerd::StateSync Offer(control::SyncStrategy strategy, uint64_t revision, bool held, bool exact);
  // The last sync or take ended well: copies the chunks that came.
  void Collect(bool changed);
  // The last sync failed.
  void Failed();

 private:
  struct Tensor {
    std::vector<uint8_t> own;
    std::vector<uint8_t> copy;   // if staged: what peerd reads; otherwise empty
    std::vector<uint8_t> inbox;  // if not staged
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
