// Unmaps memory on a thread of its own.
//
// munmap() frees the pages, which takes about 0.3 ms a MiB. For an arena of some GiB that is
// seconds. A thread that has to answer others must not wait so long.
//
// Threads: one thread makes all calls. The destructor waits until all memory is unmapped.
#pragma once

#include <cstddef>
#include <deque>
#include <thread>

#include "base/mutex.h"

namespace longhaul::peerd {

class Unmapper {
 public:
  Unmapper() = default;
  ~Unmapper();
  Unmapper(const Unmapper&) = delete;
  Unmapper& operator=(const Unmapper&) = delete;

  // Takes a range of whole pages that came from mmap(). The caller must not use it any more.
  void Unmap(void* data, size_t bytes);

 private:
  struct Range {
    void* data;
    size_t bytes;
  };

  void Run();

  Mutex mutex_;
  CondVar condition_;
  std::deque<Range> ranges_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // starts with the first range
};

}  // namespace longhaul::peerd
