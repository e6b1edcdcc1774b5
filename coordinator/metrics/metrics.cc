#include "coordinator/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <set>

#include "base/daemon/version.h"

namespace longhaul::coordinator {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;

Counter& MakeCounter(Registry& registry, const char* name, const char* help) {
  return BuildCounter().Name(name).Help(help).Register(registry).Add({});
}
Gauge& MakeGauge(Registry& registry, const char* name, const char* help) {
  return BuildGauge().Name(name).Help(help).Register(registry).Add({});
}
Histogram& MakeHistogram(Registry& registry, const char* name, const char* help,
                         const Histogram::BucketBoundaries& bounds) {
  return BuildHistogram().Name(name).Help(help).Register(registry).Add({}, bounds);
}

}  // namespace

// All metrics exist from the start, with the value 0: if a series appears late, rate() misses its
// first increase. Names and labels are fixed, so building them cannot throw.
struct CoordinatorMetrics::Impl {
  Registry registry;

  Gauge& build_info = BuildGauge()
                          .Name("longhaul_coordinator_build_info")
                          .Help("1; the version is in the label")
                          .Register(registry)
                          .Add({{"version", kVersion}});
  Gauge& runs = MakeGauge(registry, "longhaul_coordinator_runs", "Runs that the coordinator knows");
  Gauge& groups =
      MakeGauge(registry, "longhaul_coordinator_groups", "Groups that the coordinator knows");
  Gauge& members = MakeGauge(registry, "longhaul_coordinator_members", "Admitted members");
  Gauge& pending = MakeGauge(registry, "longhaul_coordinator_members_pending",
                             "Members that wait for admission");
  Gauge& preparing = MakeGauge(registry, "longhaul_coordinator_groups_preparing",
                               "Groups that are preparing an epoch");
  Gauge& streams =
      MakeGauge(registry, "longhaul_coordinator_streams", "Control streams of peers that are open");

  Gauge& streams_without_hello =
      MakeGauge(registry, "longhaul_coordinator_streams_without_hello",
                "Control streams on which the peer has not said Hello yet; at most 256");

  prometheus::Family<Counter>& epochs = BuildCounter()
                                            .Name("longhaul_coordinator_epochs_total")
                                            .Help("Committed epochs, by what made them necessary")
                                            .Register(registry);
  Counter& epochs_admit = epochs.Add({{"cause", "admit"}});
  Counter& epochs_removal = epochs.Add({{"cause", "removal"}});
  Counter& epochs_repair = epochs.Add({{"cause", "repair"}});
  Counter& epochs_ring = epochs.Add({{"cause", "ring"}});
  Counter& preparations_aborted =
      MakeCounter(registry, "longhaul_coordinator_preparations_aborted_total",
                  "Preparations of an epoch that ended without the epoch");
  Counter& votes =
      MakeCounter(registry, "longhaul_coordinator_votes_total", "Votes at step boundaries");
  prometheus::Family<Counter>& syncs =
      BuildCounter()
          .Name("longhaul_coordinator_syncs_total")
          .Help(
              "Syncs of shared state, by outcome; refused counts members that a sync refused, not "
              "syncs")
          .Register(registry);
  Counter& syncs_committed = syncs.Add({{"outcome", "committed"}});
  Counter& syncs_failed = syncs.Add({{"outcome", "failed"}});
  Counter& syncs_refused = syncs.Add({{"outcome", "refused"}});
  Counter& sync_bytes = MakeCounter(registry, "longhaul_coordinator_sync_bytes_total",
                                    "Bytes received by members that had to fetch the state");
  Counter& states_corrupt =
      MakeCounter(registry, "longhaul_coordinator_states_corrupt_total",
                  "Reports that a member served other bytes of the state than it had announced");
  Counter& removals = MakeCounter(registry, "longhaul_coordinator_members_removed_total",
                                  "Members that left, died or were evicted");
  Counter& streams_opened =
      MakeCounter(registry, "longhaul_coordinator_streams_opened_total", "Control streams opened");
  Counter& refused =
      MakeCounter(registry, "longhaul_coordinator_messages_refused_total",
                  "Messages that broke the protocol, and streams that were turned away");

  Counter& strangers_refused = MakeCounter(
      registry, "longhaul_coordinator_strangers_refused_total",
      "Streams that named a peer whose own stream is alive, and did not bring that peer's secret");
  Counter& joins_refused =
      MakeCounter(registry, "longhaul_coordinator_joins_refused_total",
                  "Joins that were refused; lhctl events says why (kind refuse)");

  Histogram& preparation =
      MakeHistogram(registry, "longhaul_coordinator_preparation_seconds",
                    "Time from the first PrepareEpoch of a change to its CommitEpoch",
                    {0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30});
  prometheus::Family<Histogram>& fault =
      BuildHistogram()
          .Name("longhaul_coordinator_fault_seconds")
          .Help(
              "For each epoch that froze ops: the silence before the first report of the fault "
              "(detect), and the time from there to the commit (agree)")
          .Register(registry);
  const Histogram::BucketBoundaries fault_bounds = {0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2,
                                                    0.5,   1,     1.5,  2,    3,    5,   10};
  Histogram& fault_detect = fault.Add({{"phase", "detect"}}, fault_bounds);
  Histogram& fault_agree = fault.Add({{"phase", "agree"}}, fault_bounds);
  Histogram& sync = MakeHistogram(registry, "longhaul_coordinator_sync_seconds",
                                  "Time from the first vote for a sync to its commit",
                                  {0.002, 0.01, 0.05, 0.2, 1, 5, 20, 60, 300, 1800});
  Histogram& store_write =
      MakeHistogram(registry, "longhaul_coordinator_store_write_seconds",
                    "Time of one durable transaction of the store",
                    {0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 2});
  Histogram& step = MakeHistogram(registry, "longhaul_coordinator_step_seconds",
                                  "Time to handle one event of the core with all its actions",
                                  {0.00001, 0.00005, 0.0002, 0.001, 0.005, 0.02, 0.1, 0.5, 2});
};

CoordinatorMetrics::CoordinatorMetrics() : impl_(std::make_unique<Impl>()) {
  impl_->build_info.Set(1);
}
CoordinatorMetrics::~CoordinatorMetrics() = default;

void CoordinatorMetrics::OnEpochCommitted(EpochCause cause) {
  switch (cause) {
    case EpochCause::kAdmit:
      return impl_->epochs_admit.Increment();
    case EpochCause::kRemoval:
      return impl_->epochs_removal.Increment();
    case EpochCause::kRepair:
      return impl_->epochs_repair.Increment();
    case EpochCause::kRing:
      return impl_->epochs_ring.Increment();
  }
}
void CoordinatorMetrics::OnPreparation(std::chrono::duration<double> took) {
  impl_->preparation.Observe(took.count());
}
void CoordinatorMetrics::OnFault(std::chrono::duration<double> detect,
                                 std::chrono::duration<double> agree) {
  impl_->fault_detect.Observe(detect.count());
  impl_->fault_agree.Observe(agree.count());
}
void CoordinatorMetrics::OnPreparationAborted() { impl_->preparations_aborted.Increment(); }
void CoordinatorMetrics::OnVote() { impl_->votes.Increment(); }
void CoordinatorMetrics::OnSync(std::chrono::duration<double> took, uint64_t bytes) {
  impl_->syncs_committed.Increment();
  impl_->sync.Observe(took.count());
  impl_->sync_bytes.Increment(static_cast<double>(bytes));
}
void CoordinatorMetrics::OnSyncFailed() { impl_->syncs_failed.Increment(); }
void CoordinatorMetrics::OnSyncRefused() { impl_->syncs_refused.Increment(); }
void CoordinatorMetrics::OnStateCorrupt() { impl_->states_corrupt.Increment(); }
void CoordinatorMetrics::OnRemoval() { impl_->removals.Increment(); }
void CoordinatorMetrics::OnStreamOpened() {
  impl_->streams_opened.Increment();
  impl_->streams.Increment();
}
void CoordinatorMetrics::OnStreamClosed() { impl_->streams.Decrement(); }
void CoordinatorMetrics::OnRefused() { impl_->refused.Increment(); }
void CoordinatorMetrics::OnStrangerRefused() { impl_->strangers_refused.Increment(); }
void CoordinatorMetrics::OnJoinRefused() { impl_->joins_refused.Increment(); }
void CoordinatorMetrics::SetStreamsWithoutHello(size_t count) {
  impl_->streams_without_hello.Set(static_cast<double>(count));
}
void CoordinatorMetrics::OnStoreWrite(std::chrono::duration<double> took) {
  impl_->store_write.Observe(took.count());
}
void CoordinatorMetrics::OnStep(std::chrono::duration<double> took) {
  impl_->step.Observe(took.count());
}

void CoordinatorMetrics::SetOverview(const Overview& overview) {
  std::set<std::string> runs;
  size_t members = 0;
  size_t pending = 0;
  size_t preparing = 0;
  for (const GroupView& group : overview.groups) {
    runs.insert(group.group.run);
    if (group.preparing) ++preparing;
    for (const MemberView& member : group.members) ++(member.joined ? members : pending);
  }
  impl_->runs.Set(static_cast<double>(runs.size()));
  impl_->groups.Set(static_cast<double>(overview.groups.size()));
  impl_->members.Set(static_cast<double>(members));
  impl_->pending.Set(static_cast<double>(pending));
  impl_->preparing.Set(static_cast<double>(preparing));
}

std::string CoordinatorMetrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->registry.Collect());
}

}  // namespace longhaul::coordinator
