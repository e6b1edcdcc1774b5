#include "tests/sim/state_memory.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "base/prng.h"
#include "peerd/state/state_hash.h"
#include "proto/wire/types.h"

namespace longhaul::sim {
namespace {

void Change(uint8_t* at, uint64_t step) {
  uint64_t value = 0;
  std::memcpy(&value, at, sizeof value);
  value = value * 31 + step;
  std::memcpy(at, &value, sizeof value);
}

}  // namespace

uint64_t StateShape::total_bytes() const {
  uint64_t total = 0;
  for (size_t i = 0; i < bytes.size(); ++i)
    total += unequal && i + 1 == bytes.size() ? 0 : bytes[i];
  return total;
}

StateShape DrawShape(uint64_t seed) {
  Prng prng(seed ^ 0x7e4503);
  StateShape shape;
  for (size_t i = 0; i < kStateTensors; ++i) shape.bytes.push_back(8 + 4 * prng.Below(40));
  if (prng.Chance(0.05)) shape.bytes[1] += peerd::kStateChunkBytes;
  shape.unequal = prng.Chance(0.3);
  return shape;
}

peerd::Manifest ManifestOf(const StateShape& shape, bool odd) {
  peerd::Manifest manifest;
  for (size_t i = 0; i < shape.bytes.size(); ++i) {
    manifest.push_back({"tensor" + std::to_string(i),
                        LH_WIRE_UINT8,
                        {shape.bytes[i]},
                        shape.bytes[i],
                        shape.unequal && i + 1 == shape.bytes.size()});
  }
  if (odd) manifest.front().name = "odd";
  return manifest;
}

Hash128 RootOfBytes(const peerd::MemoryState& state) {
  peerd::ChunkDigests digests(state.manifest.size());
  for (size_t tensor = 0; tensor < digests.size(); ++tensor) {
    const uint64_t bytes = state.manifest[tensor].bytes;
    for (uint64_t chunk = 0; chunk < peerd::CountChunks(bytes); ++chunk) {
      digests[tensor].push_back(
          peerd::HashChunk({state.Chunk(tensor, chunk), peerd::ChunkBytes(bytes, chunk)}));
    }
  }
  return peerd::RootOf(state.manifest, digests);
}

StateMemory::StateMemory(const StateShape& shape, uint64_t seed, uint64_t own, bool odd,
                         Planted planted)
    : planted_(planted), manifest_(ManifestOf(shape, odd)) {
  Prng prng(seed);
  Prng of_trainer(own);
  for (const peerd::StateTensor& tensor : manifest_) {
    Tensor& made = tensors_.emplace_back();
    Prng& content = tensor.allow_unequal ? of_trainer : prng;
    made.own.resize(tensor.bytes);
    for (size_t at = 0; at + 8 <= made.own.size(); at += 8) {
      const uint64_t value = content.Next();
      std::memcpy(&made.own[at], &value, sizeof value);
    }
    (of_trainer.Chance(0.3) ? made.copy : made.inbox).resize(tensor.bytes);
  }
  changed_.resize(peerd::CountChunks(manifest_));
}

Hash128 StateMemory::Root() const {
  peerd::ChunkDigests digests(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::span<const uint8_t> bytes = tensors_[i].own;
    for (size_t at = 0; at < bytes.size(); at += peerd::kStateChunkBytes) {
      const size_t size = std::min<size_t>(peerd::kStateChunkBytes, bytes.size() - at);
      digests[i].push_back(peerd::HashChunk(bytes.subspan(at, size)));
    }
  }
  return peerd::RootOf(manifest_, digests);
}

void StateMemory::Train(uint64_t step) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if ((step + i) % 3 == 0) continue;
    Tensor& tensor = tensors_[i];
    tensor.touched = true;
    Change(tensor.own.data(), step);
    // If there are several chunks, sometimes only the first one changes.
    if (tensor.own.size() > peerd::kStateChunkBytes && step % 2 == 0) {
      Change(&tensor.own[tensor.own.size() - 8], step);
    }
  }
}

void StateMemory::Diverge(uint64_t step) {
  Tensor& tensor = tensors_[step % tensors_.size()];
  tensor.touched = true;
  tensor.own.front() ^= 0x55;
}

void StateMemory::Register() {
  state_ = std::make_shared<peerd::LocalState>();
  state_->manifest = manifest_;
  std::vector<uint8_t*> inbox;
  for (Tensor& tensor : tensors_) {
    std::fill(tensor.inbox.begin(), tensor.inbox.end(), uint8_t{0xdd});
    tensor.touched = true;
    state_->places.push_back(tensor.place());
    state_->digests.emplace_back(peerd::CountChunks(tensor.own.size()));
    inbox.push_back(planted_ == Planted::kWrittenEarly ? tensor.place() : tensor.incoming());
  }
  state_->FetchInto(std::move(inbox));
  state_->changed = changed_;
  auto declared = std::make_shared<peerd::MemoryState>();
  declared->manifest = manifest_;
  declared->places.resize(tensors_.size());
  declared->digests.resize(tensors_.size());
  state_->declared = std::move(declared);
}

peerd::StateSync StateMemory::Offer(control::SyncStrategy strategy, uint64_t revision, bool held,
                                    bool exact) {
  peerd::StateSync sync;
  sync.state = state_;
  sync.strategy = strategy;
  sync.revision = revision;
  if (held) return sync;
  for (Tensor& tensor : tensors_) {
    if (exact) sync.touched.push_back(tensor.touched ? 1 : 0);
    if (!tensor.copy.empty()) std::copy(tensor.own.begin(), tensor.own.end(), tensor.copy.begin());
  }
  return sync;
}

void StateMemory::Collect(bool changed) {
  size_t at = 0;
  for (Tensor& tensor : tensors_) {
    tensor.touched = false;
    for (size_t begin = 0; begin < tensor.own.size(); begin += peerd::kStateChunkBytes) {
      if (changed_[at++] == 0 || !changed) continue;
      const size_t size = std::min<size_t>(peerd::kStateChunkBytes, tensor.own.size() - begin);
      std::memcpy(&tensor.own[begin], tensor.incoming() + begin, size);
    }
    // Peerd gives the memory of the inbox back.
    std::fill(tensor.inbox.begin(), tensor.inbox.end(), uint8_t{0xdd});
  }
}

void StateMemory::Failed() {
  for (Tensor& tensor : tensors_) tensor.touched = true;
}

}  // namespace longhaul::sim
