// What peerd counts, for Prometheus. The only place of peerd that knows prometheus-cpp.
//
// Threads: Publish() and Observe...() from the reactor, Text() from the HTTP server's thread.
#pragma once

#include <memory>
#include <string>

#include "base/outcome.h"
#include "peerd/core/actions.h"
#include "peerd/core/peer_core.h"
#include "peerd/core/values.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

// Frames between two other peers.
struct RelayCounts {
  uint64_t passed_on = 0;
  uint64_t stale = 0;  // of peers that are none any more
};

// Chunks of shared state.
struct StateCounts {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;   // right ones, once
  uint64_t bytes_refetched = 0;  // came for nothing
  uint64_t chunks_corrupt = 0;
  uint64_t bytes_kept = 0;
};

struct PeerSnapshot {
  PeerCore::Stats core;
  RelayCounts relays;
  StateCounts states;
  TransportStats transport;
  uint32_t clients = 0;
  uint64_t requests_refused = 0;
  uint64_t arena_bytes = 0;
  bool coordinator_up = false;
};

class PeerMetrics {
 public:
  PeerMetrics();
  ~PeerMetrics();

  void Publish(const PeerSnapshot& snapshot);
  void ObserveOp(Code outcome, const OpInfo& info);
  void ObserveFault(const FaultOver& fault);
  // A local state was hashed for a sync, or what of it may have changed.
  void ObserveStateHash(int64_t us);

  // Everything, in Prometheus' text format.
  std::string Text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::peerd
