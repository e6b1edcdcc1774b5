// The metrics of peerd for Prometheus. No other part of peerd uses prometheus-cpp.
//
// Threads: the HTTP server's threads call Text(), the reactor calls everything else. The reactor
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
#include "base/ids.h"
#include "base/mutex.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/actions.h"
#include "peerd/core/peer_core.h"
#include "peerd/core/values.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

// One link, as measured in the direction away from this peer.
struct LinkSample {
  PeerId peer;
  uint64_t bytes_per_second = 0;  // 0: unknown
  uint32_t rtt_us = 0;            // 0: unknown
  uint64_t bytes_repeated = 0;    // sent again by TCP, since the link was first seen
};

// The page shows so many links, those with the lowest rates. So its length does not depend on the
// number of peers.
inline constexpr size_t kLinksShownMax = 4;

// Threads that say which part they work for (base/cpu_time.h). All other threads are "other".
inline constexpr const char* kCpuParts[] = {"reactor", "hash", "control", "unmap", "http"};

struct PeerSnapshot {
  Tick now;
  PeerCore::Stats core;
  TransportStats transport;
  uint32_t clients = 0;
  uint64_t arena_bytes = 0;
  uint64_t arena_limit = 0;  // 0: none
  uint64_t scratch_bytes = 0;
  uint64_t scratch_limit = 0;
  uint64_t state_bytes_kept = 0;
  bool coordinator_up = false;
  bool on_epoll = false;  // the ring is not io_uring
  // What the host was lately seen to send and receive in all. 0: unknown.
  uint64_t host_up = 0;
  uint64_t host_down = 0;
  std::vector<LinkSample> links;
  std::vector<CounterTotal> totals;  // of all parts of peerd; equal names are added up
};

// What TCP sent again on data lanes, summed up from RateSample::bytes_repeated.
struct RepeatedBytes {
  uint64_t bytes = 0;
};
inline constexpr Counter<RepeatedBytes> kRepeatedCounters[] = {
    {"longhaul_peerd_repeated_bytes_total",
     "Bytes that TCP sent again on data lanes, because packets were lost or late",
     &RepeatedBytes::bytes},
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
  void ObserveOp(Code outcome, const OpInfo& info, Tick now);
  // A local member passed a step boundary.
  void ObserveStep(Tick now) { last_step_ = now; }
  // A local member and its group have this state in common.
  void ObserveSync(uint64_t revision);
  void ObserveFault(const FaultOver& fault);
  // Hashing a local state for a sync took `us`. (Only tensors that may have changed are hashed.)
  void ObserveStateHash(int64_t us);

  // Returns all metrics in Prometheus' text format. Waits up to `patience` for Publish(); after
  // that, gives what was published last.
  std::string Text(std::chrono::milliseconds patience = std::chrono::seconds(1));

 private:
  struct Impl;
  const std::function<void()> wake_;
  // Ages count from the first Publish() if nothing has happened.
  Tick last_op_ = kNever;
  Tick last_step_ = kNever;
  // Calls of Text() are numbered: the last call that asked, and the last one that was answered.
  std::atomic<uint64_t> asked_ = 0;
  std::atomic<uint64_t> published_ = 0;
  Mutex mutex_;
  CondVar answered_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::peerd
