// The metrics of peerd for Prometheus. No other part of peerd uses prometheus-cpp.
//
// Threads: the HTTP server's thread calls Text(), the reactor calls everything else. The reactor
// counts in plain structs. It publishes them when Text() asks, so that a page shows the numbers of
// the moment. If the reactor does not publish in time, the page shows what was published last.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/counters.h"
#include "base/mutex.h"
#include "base/outcome.h"
#include "peerd/core/actions.h"
#include "peerd/core/peer_core.h"
#include "peerd/core/values.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

struct PeerSnapshot {
  PeerCore::Stats core;
  TransportStats transport;
  uint32_t clients = 0;
  uint64_t arena_bytes = 0;
  uint64_t state_bytes_kept = 0;
  bool coordinator_up = false;
  bool on_epoll = false;             // the ring is not io_uring
  std::vector<CounterTotal> totals;  // of all parts of peerd; equal names are added up
};

class PeerMetrics {
 public:
  // `wake` makes the reactor look at wanted(). It is called on the thread of Text() and must not
  // block.
  explicit PeerMetrics(std::function<void()> wake);
  ~PeerMetrics();

  // Returns whether a Text() waits for Publish().
  bool wanted() const { return published_ != asked_; }
  void Publish(const PeerSnapshot& snapshot);
  void ObserveOp(Code outcome, const OpInfo& info);
  void ObserveFault(const FaultOver& fault);
  // Hashing a local state for a sync took `us`. (Only tensors that may have changed are hashed.)
  void ObserveStateHash(int64_t us);

  // Returns all metrics in Prometheus' text format. Waits up to `patience` for Publish(); after
  // that, gives what was published last.
  std::string Text(std::chrono::milliseconds patience = std::chrono::seconds(1));

 private:
  struct Impl;
  const std::function<void()> wake_;
  // Calls of Text() are numbered: the last call that asked, and the last one that was answered.
  std::atomic<uint64_t> asked_ = 0;
  std::atomic<uint64_t> published_ = 0;
  Mutex mutex_;
  CondVar answered_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::peerd
