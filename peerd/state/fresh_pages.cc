#include "peerd/state/fresh_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14
#endif

namespace longhaul::peerd {
namespace {

const uintptr_t kPage = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

// Writes one byte of each page, atomically and without changing it.
void TouchEach(std::span<uint8_t> memory) {
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  for (size_t at = 0; at < memory.size(); at += kPage - (begin + at) % kPage) {
    std::atomic_ref<uint8_t>(memory[at]).fetch_or(0, std::memory_order_relaxed);
  }
}

}  // namespace

void TouchPages(std::span<uint8_t> memory) {
  if (memory.empty()) return;
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t first = begin / kPage * kPage;
  const size_t bytes = begin + memory.size() - first;
  if (madvise(reinterpret_cast<void*>(first), bytes, MADV_POPULATE_WRITE) == 0) return;
  // EINVAL: an older kernel does not know the call. Any other error means that no memory is left.
  // Then a write now could be fatal, so do not touch the pages; later there may be memory.
  if (errno == EINVAL) TouchEach(memory);
}

}  // namespace longhaul::peerd
