#include "peerd/ipc/arena_regions.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "peerd/io/unmapper.h"

namespace longhaul::peerd {

struct ArenaRegions::Hub : std::enable_shared_from_this<Hub> {
  Hub(Ring* ring, std::function<void(const ArenaRegion&)> removed)
      : ring(ring), removed(std::move(removed)) {}

  // Called when nobody refers to the region any more.
  void Release(ArenaRegion* region) {
    if (ring == nullptr) return Unmap(region);
    released.push_back(region);
    if (std::exchange(sweep_scheduled, true)) return;
    ring->Timeout(ring->Now(), [hub = shared_from_this()](IoResult) { hub->Sweep(); });
  }

  void Sweep() {
    sweep_scheduled = false;
    for (ArenaRegion* region : std::exchange(released, {})) {
      if (ring != nullptr) removed(*region);
      Unmap(region);
    }
  }

  void Unmap(ArenaRegion* region) {
    unmapper.Unmap(region->data, region->bytes);
    bytes_mapped -= region->bytes;
    delete region;
  }

  Ring* ring;  // null: closed
  const std::function<void(const ArenaRegion&)> removed;
  uint64_t bytes_mapped = 0;
  std::vector<ArenaRegion*> released;
  bool sweep_scheduled = false;
  Unmapper unmapper;
};

ArenaRegions::ArenaRegions(Ring* ring, std::function<void(const ArenaRegion&)> removed)
    : hub_(std::make_shared<Hub>(ring, std::move(removed))) {}

uint64_t ArenaRegions::bytes_mapped() const { return hub_->bytes_mapped; }
bool ArenaRegions::sweeping() const { return hub_->sweep_scheduled; }

void ArenaRegions::Close() {
  hub_->ring = nullptr;
  for (ArenaRegion* region : std::exchange(hub_->released, {})) hub_->Unmap(region);
}

absl::Status CheckMemfd(int fd, uint64_t bytes) {
  // Ask for the seals first: for a file of FUSE, statfs would wait for whoever serves the file.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return absl::InvalidArgumentError("not a memfd");
  if ((seals & F_SEAL_SHRINK) == 0) {
    // Access beyond a new, lower end would raise SIGBUS.
    return absl::InvalidArgumentError("not a memfd sealed against shrinking");
  }
  // Access to huge pages that nobody reserved could raise SIGBUS.
  struct statfs fs;
  if (fstatfs(fd, &fs) != 0 || fs.f_type != TMPFS_MAGIC) {
    return absl::InvalidArgumentError("not a memfd of ordinary pages");
  }
  struct stat status;
  if (fstat(fd, &status) != 0) return absl::InvalidArgumentError("fstat failed");
  if (static_cast<uint64_t>(status.st_size) < bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", status.st_size, " bytes, ", bytes, " were announced"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ArenaRegion>> ArenaRegions::Map(int fd, uint64_t bytes,
                                                               Account* account) {
  LH_RETURN_IF_ERROR(CheckMemfd(fd, bytes));
  LH_ASSIGN_OR_RETURN(Hold bytes_held, account->Take(Resource::kArenaBytes, bytes));
  LH_ASSIGN_OR_RETURN(Hold region_held, account->Take(Resource::kRegions, 1));
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return absl::UnavailableError(absl::StrCat("mmap failed (", strerror(errno), ")"));
  }
  hub_->bytes_mapped += bytes;
  return std::shared_ptr<ArenaRegion>(
      new ArenaRegion{static_cast<uint8_t*>(data), bytes, std::move(bytes_held),
                      std::move(region_held)},
      [hub = hub_](ArenaRegion* region) { hub->Release(region); });
}

}  // namespace longhaul::peerd
