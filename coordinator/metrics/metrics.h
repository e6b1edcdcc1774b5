// What the coordinator counts, for Prometheus. The only place of the coordinator that knows
// prometheus-cpp.
//
// Any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "coordinator/core/records.h"

namespace longhaul::coordinator {

enum class EpochCause { kAdmit, kRemoval, kRepair, kRing };

class CoordinatorMetrics {
 public:
  CoordinatorMetrics();
  ~CoordinatorMetrics();
  CoordinatorMetrics(const CoordinatorMetrics&) = delete;
  CoordinatorMetrics& operator=(const CoordinatorMetrics&) = delete;

  void OnEpochCommitted(EpochCause cause);
  // From the first PrepareEpoch of a change to its commit.
  void OnPreparation(std::chrono::duration<double> took);
  void OnPreparationAborted();
  // A fault was repaired by an epoch: the silence before its first report, and from there to the
  // commit.
  void OnFault(std::chrono::duration<double> detect, std::chrono::duration<double> agree);
  void OnVote();
  // All members of a group have one state: since the first of them offered one, and what those
  // that had to fetch received.
  void OnSync(std::chrono::duration<double> took, uint64_t bytes);
  void OnSyncFailed();
  // A member was refused; the others went on.
  void OnSyncRefused();
  void OnStateCorrupt();
  void OnRemoval();
  void OnStreamOpened();
  void OnStreamClosed();
  // A message that is no message, or a stream that may not be.
  void OnRefused();
  // A stream that spoke for a peer that is heard, without that peer's secret.
  void OnStrangerRefused();
  void OnJoinRefused();
  void SetStreamsWithoutHello(size_t count);
  void OnStoreWrite(std::chrono::duration<double> took);
  // One event of the core, with all its actions.
  void OnStep(std::chrono::duration<double> took);

  // Sets the gauges of what is: runs, groups, members, pending.
  void SetOverview(const Overview& overview);

  // Everything, in Prometheus' text format.
  std::string Text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
