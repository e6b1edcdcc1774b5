// The thread that solves rings for the core, which must not be held up by it.
#pragma once

#include <functional>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "coordinator/core/coordinator_core.h"

namespace longhaul::coordinator {

class RingWorker {
 public:
  // `done` is called on the worker's thread, once for each order.
  explicit RingWorker(std::function<void(RingOrdered)> done);
  // Waits for what is being solved, which takes a few seconds at the most.
  ~RingWorker();
  RingWorker(const RingWorker&) = delete;
  RingWorker& operator=(const RingWorker&) = delete;

  // From one thread; not before the order before has been answered.
  void Submit(OrderRing order);

 private:
  void Run();

  const std::function<void(RingOrdered)> done_;
  Mutex mutex_;
  CondVar wake_;
  std::optional<OrderRing> order_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace longhaul::coordinator
