// Decides which log lines are written of those that strangers can cause as often as they like:
// Rarely (base/rarely.h) with the system's clock. Any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/mutex.h"
#include "base/rarely.h"
#include "base/tick.h"

namespace longhaul::coordinator {

template <class Key>
class RareLog {
 public:
  RareLog(int64_t interval_us, size_t keys_max) : rarely_(interval_us, keys_max) {}

  // As Rarely::Take(), now.
  std::optional<uint64_t> Take(const Key& key) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const Tick tick{std::chrono::duration_cast<std::chrono::microseconds>(now).count()};
    MutexLock lock(&mutex_);
    return rarely_.Take(key, tick);
  }

 private:
  Mutex mutex_;
  Rarely<Key> rarely_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace longhaul::coordinator
