#include "coordinator/loop/ring_worker.h"

#include <utility>

#include "base/check.h"
#include "base/cpu_time.h"

namespace longhaul::coordinator {

RingWorker::RingWorker(std::function<void(RingOrdered)> done)
    : done_(std::move(done)), thread_([this] { Run(); }) {}

RingWorker::~RingWorker() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.Signal();
  thread_.join();
}

void RingWorker::Submit(OrderRing order) {
  {
    MutexLock lock(&mutex_);
    LH_CHECK(!order_) << "a second order before the first was answered";
    order_ = std::move(order);
  }
  wake_.Signal();
}

void RingWorker::Run() {
  const CpuTime cpu("ring");
  while (true) {
    std::optional<OrderRing> order;
    {
      MutexLock lock(&mutex_);
      while (!order_ && !stopping_) wake_.Wait(&mutex_);
      if (stopping_) return;
      order = std::exchange(order_, std::nullopt);
    }
    done_(Solve(*order));
  }
}

}  // namespace longhaul::coordinator
