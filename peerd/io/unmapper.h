// Gives mapped memory back to the system, on a thread of its own.
//
// To unmap what nobody else uses any more means to free its pages, about 0.3 ms a MiB: seconds for
// an arena of some GiB, which is too long for a thread that answers others.
//
// Threads: the calls, one thread. The destructor waits until everything is given back.
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

  // The range, of whole pages from mmap(), is not the caller's any more.
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
  std::thread thread_;  // from the first range on
};

}  // namespace longhaul::peerd
