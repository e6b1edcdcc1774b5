#include "peerd/io/unmapper.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "base/cpu_time.h"

namespace longhaul::peerd {
namespace {

// The most that one munmap() unmaps. Other threads that map memory wait until the call ends.
constexpr size_t kSliceBytes = size_t{64} << 20;

}  // namespace

Unmapper::~Unmapper() {
  {
    MutexLock lock(&mutex_);
    ending_ = true;
  }
  condition_.Signal();
  if (thread_.joinable()) thread_.join();
}

void Unmapper::Unmap(void* data, size_t bytes) {
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  {
    MutexLock lock(&mutex_);
    ranges_.push_back({data, bytes});
  }
  condition_.Signal();
}

void Unmapper::Run() {
  const CpuTime cpu("unmap");
  for (;;) {
    Range range;
    {
      MutexLock lock(&mutex_);
      while (ranges_.empty() && !ending_) condition_.Wait(&mutex_);
      if (ranges_.empty()) return;
      range = ranges_.front();
      ranges_.pop_front();
    }
    for (size_t done = 0; done < range.bytes; done += kSliceBytes) {
      munmap(static_cast<uint8_t*>(range.data) + done, std::min(kSliceBytes, range.bytes - done));
    }
  }
}

}  // namespace longhaul::peerd
