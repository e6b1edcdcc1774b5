// A state that a trainer has registered: what it consists of, and where its bytes are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "peerd/state/state_hash.h"

namespace longhaul::peerd {

// Fixed once it is made; the bytes are shared with the trainer, who does not write to them while a
// sync is on, if it keeps to the rules. Last released on the reactor thread.
struct LocalState {
  Manifest manifest;
  std::vector<uint8_t*> data;  // of each tensor; any alignment; nullptr: it has no bytes
  uint64_t bytes = 0;          // of all tensors
  // One byte for each chunk of each tensor, in order: tells the trainer which of them came from
  // others, once a sync has ended.
  std::span<uint8_t> changed;
  // Keep data and `changed` mapped.
  std::vector<std::shared_ptr<const void>> holders;

  std::span<const uint8_t> Tensor(size_t index) const {
    return {data[index], manifest[index].bytes};
  }
};

}  // namespace longhaul::peerd
