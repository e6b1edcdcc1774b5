// Solves rings for the core on a thread of its own. Solving takes seconds, and the coordinator
// loop's thread must not wait so long. Nothing here can fail.
#pragma once

#include <functional>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "coordinator/core/coordinator_core.h"

namespace longhaul::coordinator {

class RingWorker {
 public:
  // The worker calls `done` once per order, on its own thread.
  explicit RingWorker(std::function<void(RingOrdered)> done);
  // Waits for the order that is being solved (seconds for a large ring). An order that has not
  // begun is dropped.
  ~RingWorker();
  RingWorker(const RingWorker&) = delete;
  RingWorker& operator=(const RingWorker&) = delete;

  // Hands an order to the worker. One thread calls this, and only after `done` was called for the
  // order before.
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
