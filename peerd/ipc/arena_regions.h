// Maps the arena regions of trainers, and unmaps each when nobody refers to it any more.
//
// A region is mapped while any shared_ptr to it lives. After the release of the last one, `removed`
// is called in a later RunOnce() of the ring, and then another thread unmaps the region. (`removed`
// is not called at once, because it may call into the object that has just released the region.)
// Regions may outlive this object; then they are unmapped without a call of `removed`.
//
// Threads: the reactor thread. The ring must outlive this object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/accounts.h"

namespace longhaul::peerd {

// Memory shared with a trainer.
struct ArenaRegion {
  uint8_t* data = nullptr;
  size_t bytes = 0;
  // Given back when nobody refers to the region any more.
  Hold bytes_held;
  Hold region_held;
};

// InvalidArgument: the descriptor is no memfd of at least `bytes`, or access to the memory could
// raise SIGBUS later.
absl::Status CheckMemfd(int fd, uint64_t bytes);

class ArenaRegions {
 public:
  ArenaRegions(Ring* ring, std::function<void(const ArenaRegion&)> removed);
  ~ArenaRegions() { Close(); }
  ArenaRegions(const ArenaRegions&) = delete;
  ArenaRegions& operator=(const ArenaRegions&) = delete;

  // Maps the first `bytes` of a memfd. `account` holds the region until it is unmapped.
  // InvalidArgument: see CheckMemfd(). ResourceExhausted: the account may not hold so much.
  // Unavailable: the system refused to map it.
  absl::StatusOr<std::shared_ptr<ArenaRegion>> Map(int fd, uint64_t bytes, Account* account);
  uint64_t bytes_mapped() const;
  // Returns whether released regions still wait for the call of `removed`.
  bool sweeping() const;
  // Unmaps all regions that were released. `removed` is not called any more.
  void Close();

 private:
  struct Hub;
  const std::shared_ptr<Hub> hub_;  // outlives this object as long as regions do
};

}  // namespace longhaul::peerd
