#include "peerd/transport/pinned_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

// The bytes to pin or release in one turn of the ring, which takes about a millisecond.
constexpr size_t kPieceBytes = size_t{4} << 20;

}  // namespace

void PinnedMemory::Add(const uint8_t* data, size_t bytes) {
  const size_t pieces = bytes / kPieceBytes + (bytes % kPieceBytes != 0);
  memory_[data] = Memory{.bytes = bytes, .buffers = std::vector<int>(pieces, -1)};
}

void PinnedMemory::Remove(const uint8_t* data) {
  const auto it = memory_.find(data);
  if (it == memory_.end()) return;
  for (const int buffer : it->second.buffers) {
    if (buffer >= 0) unused_buffers_.push_back(buffer);
  }
  memory_.erase(it);
  UnpinNext();
}

// Releases one buffer in each turn of the ring. If nobody else uses its pages, releasing frees
// them, and that takes time.
void PinnedMemory::UnpinNext() {
  if (unused_buffers_.empty() || std::exchange(unpinning_, true)) return;
  events_->Later([this] {
    unpinning_ = false;
    if (closing_) return;
    ring_->UnregisterBuffer(unused_buffers_.back());
    unused_buffers_.pop_back();
    UnpinNext();
  });
}

int PinnedMemory::Find(const uint8_t* data, size_t bytes) {
  auto it = memory_.upper_bound(data);
  if (it == memory_.begin() || bytes == 0) return -1;
  --it;
  const size_t offset = static_cast<size_t>(data - it->first);
  Memory& memory = it->second;
  if (offset >= memory.bytes || bytes > memory.bytes - offset) return -1;
  const size_t piece = offset / kPieceBytes;
  // Bytes in two pieces have no common buffer. Such a send pins its pages itself.
  if ((offset + bytes - 1) / kPieceBytes != piece) return -1;
  int& buffer = memory.buffers[piece];
  if (buffer < 0) buffer = Pin(it->first, &memory, piece);
  return buffer;
}

int PinnedMemory::Pin(const uint8_t* data, Memory* memory, size_t piece) {
  if (!ring_->features().registered_buffers || memory->refused) return -1;
  if (std::exchange(pinned_, true)) return -1;
  events_->Later([this] { pinned_ = false; });
  const size_t offset = piece * kPieceBytes;
  const auto buffer =
      ring_->RegisterBuffer(data + offset, std::min(kPieceBytes, memory->bytes - offset));
  if (buffer.ok()) return *buffer;
  // Buffers that are still to be released count against the limits. So later tries may succeed.
  if (absl::IsUnavailable(buffer.status()) || !unused_buffers_.empty()) return -1;
  memory->refused = true;
  if (!std::exchange(warned_, true)) {
    Log(LogLevel::kWarning, "arena memory is not registered, zero-copy sends cost more" +
                                LogField("reason", std::string(buffer.status().message())));
  }
  return -1;
}

}  // namespace longhaul::peerd
