// Maps the arena regions of trainers, and unmaps each when nobody refers to it any more.
//
// A region is mapped while any shared_ptr to it lives. The last one may be released inside code
// that `removed` would call again, so `removed` is called in a later RunOnce() of the ring. Then
// another thread unmaps the region. Regions may outlive this object; then they are unmapped
// without a call of `removed`.
//
// Threads: the ring's. The ring outlives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

// Memory shared with a trainer.
struct ArenaRegion {
  uint8_t* data = nullptr;
  size_t bytes = 0;
};

class ArenaRegions {
 public:
  ArenaRegions(Ring* ring, std::function<void(const ArenaRegion&)> removed);
  ~ArenaRegions() { Close(); }
  ArenaRegions(const ArenaRegions&) = delete;
  ArenaRegions& operator=(const ArenaRegions&) = delete;

  // Maps `bytes` of a memfd. InvalidArgument: it is no memfd of that size, or access could raise
  // SIGBUS later. Unavailable: the system has no room.
  absl::StatusOr<std::shared_ptr<ArenaRegion>> Map(int fd, uint64_t bytes);
  uint64_t bytes_mapped() const;
  // Whether regions wait for their removal.
  bool sweeping() const;
  // `removed` is not called any more.
  void Close();

 private:
  struct Hub;
  const std::shared_ptr<Hub> hub_;  // outlives this object as long as regions do
};

}  // namespace longhaul::peerd
