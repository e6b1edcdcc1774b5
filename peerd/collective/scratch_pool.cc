#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/collective/attempt.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kSizeMin = 64 << 10;
constexpr uint64_t kHugePage = 2 << 20;

// Rounds a size up to a power of two, or to one of three sizes between two powers. So at most a
// quarter of a buffer is unused, and a run whose tensors differ a little reuses its buffers. 0: too
// large.
uint64_t SizeClass(uint64_t bytes) {
  if (bytes <= kSizeMin) return kSizeMin;
  if (bytes > uint64_t{1} << 62) return 0;
  const uint64_t step = std::bit_ceil(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

// Maps memory that is aligned for huge pages, which save most of the page faults.
uint8_t* Map(uint64_t size) {
  const uint64_t slack = size >= kHugePage ? kHugePage : 0;
  void* const mapped = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<uint8_t*>(mapped);
  if (slack == 0) return begin;
  const uint64_t over = reinterpret_cast<uintptr_t>(begin) % kHugePage;
  const uint64_t skip = over == 0 ? 0 : kHugePage - over;
  if (skip > 0) munmap(begin, skip);
  if (slack > skip) munmap(begin + skip + size, slack - skip);
  // The kernel refuses if it has no huge pages. Then all is slower, but right.
  madvise(begin + skip, size, MADV_HUGEPAGE);
  return begin + skip;
}

class MmapPool final : public ScratchPool {
 public:
  MmapPool(uint64_t kept_bytes_max, UnmapFunction unmap)
      : kept_bytes_max_(kept_bytes_max), unmap_(std::move(unmap)) {}
  MmapPool(const MmapPool&) = delete;
  MmapPool& operator=(const MmapPool&) = delete;
  ~MmapPool() override {
    LH_CHECK(taken_.empty()) << taken_.size() << " scratch buffers are in use";
    while (!kept_.empty()) Release(std::prev(kept_.end()));
  }

  absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
    const uint64_t size = SizeClass(bytes);
    if (size == 0) {
      return absl::ResourceExhaustedError(absl::StrCat("no machine has ", bytes, " bytes"));
    }
    // A kept buffer of up to twice the size will do: that is better than to map another one.
    if (const auto it = kept_.lower_bound(size); it != kept_.end() && it->first / 2 <= size) {
      return Reuse(it);
    }
    KeepLess(size);
    uint8_t* data = Map(size);
    if (data == nullptr && !kept_.empty()) {
      while (!kept_.empty()) Release(std::prev(kept_.end()));
      data = Map(size);
    }
    if (data == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("mapping a scratch buffer of ", size,
                                                       " bytes failed: ", std::strerror(errno)));
    }
    taken_.emplace(data, size);
    taken_bytes_ += size;
    return data;
  }

  void Give(uint8_t* data) override {
    const auto it = taken_.find(data);
    LH_CHECK(it != taken_.end());
    const uint64_t size = it->second;
    taken_.erase(it);
    taken_bytes_ -= size;
    kept_.emplace(size, data);
    kept_bytes_ += size;
    KeepLess(0);
  }

 private:
  using Kept = std::multimap<uint64_t, uint8_t*>;

  uint8_t* Reuse(Kept::iterator it) {
    const auto [size, data] = *it;
    kept_.erase(it);
    kept_bytes_ -= size;
    taken_.emplace(data, size);
    taken_bytes_ += size;
    return data;
  }

  // Releases kept buffers until `more` bytes fit.
  void KeepLess(uint64_t more) {
    while (!kept_.empty() && taken_bytes_ + kept_bytes_ + more > kept_bytes_max_) {
      Release(std::prev(kept_.end()));
    }
  }

  void Release(Kept::iterator it) {
    if (unmap_) {
      unmap_(it->second, it->first);
    } else {
      munmap(it->second, it->first);
    }
    kept_bytes_ -= it->first;
    kept_.erase(it);
  }

  const uint64_t kept_bytes_max_;
  const UnmapFunction unmap_;
  uint64_t taken_bytes_ = 0;
  uint64_t kept_bytes_ = 0;
  std::unordered_map<uint8_t*, uint64_t> taken_;  // not iterated, so its order does not matter
  Kept kept_;                                     // by size
};

}  // namespace

std::unique_ptr<ScratchPool> MakeScratchPool(uint64_t kept_bytes_max, UnmapFunction unmap) {
  return std::make_unique<MmapPool>(kept_bytes_max, std::move(unmap));
}

}  // namespace longhaul::peerd
