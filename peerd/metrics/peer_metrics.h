// The metrics of peerd for Prometheus. No other part of peerd uses prometheus-cpp.
//
// Threads: Text() from the HTTP server's thread, all others from the reactor. The reactor counts in
// plain structs and publishes them when Text() asks, so that a page shows what is true when it is
// served (or, if the reactor does not publish in time, what was true the last time).
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
  std::vector<CounterTotal> totals;  // of all parts; totals with the same name are added up
};

class PeerMetrics {
 public:
  // `wake` makes the reactor look at wanted(); called on the thread of Text(), must not block.
  explicit PeerMetrics(std::function<void()> wake);
  ~PeerMetrics();

  // Whether Text() waits for Publish().
  bool wanted() const { return published_ != asked_; }
  void Publish(const PeerSnapshot& snapshot);
  void ObserveOp(Code outcome, const OpInfo& info);
  void ObserveFault(const FaultOver& fault);
  // A local state was hashed for a sync, or what of it may have changed.
  void ObserveStateHash(int64_t us);

  // Everything, in Prometheus' text format: as it is now, or, if the reactor does not publish in
  // time, as it was when it did last.
  std::string Text(std::chrono::milliseconds patience = std::chrono::seconds(1));

 private:
  struct Impl;
  const std::function<void()> wake_;
  // Number of the last Text() that asked, and of the last one that was answered.
  std::atomic<uint64_t> asked_ = 0;
  std::atomic<uint64_t> published_ = 0;
  Mutex mutex_;
  CondVar answered_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::peerd
