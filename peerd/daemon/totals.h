// The counters of all parts of peerd. One list for the daemon and for docs/metrics.md.
#pragma once

#include <vector>

#include "base/counters.h"
#include "peerd/control/control_client.h"
#include "peerd/core/peer_core.h"
#include "peerd/engine/op_runner.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/metrics/peer_metrics.h"
#include "peerd/state/state_exchange.h"
#include "peerd/transport/refused_callers.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

struct AllCounts {
  PeerCore::Stats core;
  TransportStats transport;
  StateExchange::Stats states;
  IpcStats ipc;
  RepeatedBytes repeated;
  OpCounts ops;
  ControlStats control;
};

inline std::vector<CounterTotal> Totals(const AllCounts& counts) {
  std::vector<CounterTotal> totals;
  AddTotals(kCoreCounters, counts.core, &totals);
  AddTotals(kTransportCounters, counts.transport, &totals);
  AddTotals(counts.transport.callers_refused, &totals);
  AddTotals(kStateCounters, counts.states, &totals);
  AddTotals(kIpcCounters, counts.ipc, &totals);
  AddTotals(kRepeatedCounters, counts.repeated, &totals);
  AddTotals(kOpCounters, counts.ops, &totals);
  AddTotals(counts.control, &totals);
  return totals;
}

}  // namespace longhaul::peerd
