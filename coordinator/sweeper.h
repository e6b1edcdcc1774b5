// Does something each second, and at once when it is woken, on a thread of its own. One thread
// starts and stops it.
#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace longhaul::coordinator {

class Sweeper {
 public:
  Sweeper() = default;
  ~Sweeper() { Stop(); }
  Sweeper(const Sweeper&) = delete;
  Sweeper& operator=(const Sweeper&) = delete;

  // Call this once.
  void Start(std::function<void()> sweep) {
    sweep_ = std::move(sweep);
    thread_ = std::thread([this] { Run(); });
  }
  // Waits until a sweep that runs is over. There is none afterwards.
  void Stop() {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    changed_.Signal();
    if (thread_.joinable()) thread_.join();
  }
  // Any thread, at any time.
  void Wake() {
    {
      MutexLock lock(&mutex_);
      woken_ = true;
    }
    changed_.Signal();
  }

 private:
  void Run() {
    while (true) {
      {
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        MutexLock lock(&mutex_);
        while (!woken_ && !stopping_) {
          if (!changed_.WaitFor(&mutex_, until - std::chrono::steady_clock::now())) break;
        }
        if (stopping_) return;
        woken_ = false;
      }
      sweep_();
    }
  }

  std::function<void()> sweep_;
  Mutex mutex_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace longhaul::coordinator
