#include "coordinator/metrics/metrics.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::HasSubstr;

TEST(CoordinatorMetrics, EverySeriesExistsBeforeItsFirstEvent) {
  const CoordinatorMetrics metrics;
  const std::string text = metrics.Text();
  for (const char* series :
       {"longhaul_coordinator_members 0\n", "longhaul_coordinator_members_pending 0\n",
        "longhaul_coordinator_streams 0\n", "longhaul_coordinator_votes_total 0\n",
        "longhaul_coordinator_epochs_total{cause=\"admit\"} 0\n",
        "longhaul_coordinator_epochs_total{cause=\"removal\"} 0\n",
        "longhaul_coordinator_epochs_total{cause=\"repair\"} 0\n",
        "longhaul_coordinator_syncs_total{outcome=\"committed\"} 0\n",
        "longhaul_coordinator_sync_seconds_count 0\n",
        "longhaul_coordinator_messages_refused_total 0\n",
        "longhaul_coordinator_strangers_refused_total 0\n",
        "longhaul_coordinator_joins_refused_total 0\n",
        "longhaul_coordinator_streams_without_hello 0\n",
        "longhaul_coordinator_preparation_seconds_count 0\n",
        "longhaul_coordinator_store_write_seconds_count 0\n"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
}

TEST(CoordinatorMetrics, CountsWhatHappens) {
  CoordinatorMetrics metrics;
  metrics.OnEpochCommitted(EpochCause::kRemoval);
  metrics.OnPreparation(std::chrono::milliseconds(30));
  metrics.OnVote();
  metrics.OnVote();
  metrics.OnSync(std::chrono::milliseconds(300), 1000);
  metrics.OnSync(std::chrono::milliseconds(1), 0);
  metrics.OnSyncFailed();
  metrics.OnSyncRefused();
  metrics.OnStateCorrupt();
  metrics.OnStreamOpened();
  metrics.OnStreamOpened();
  metrics.OnStreamClosed();
  Overview overview;
  overview.groups.resize(3);
  overview.groups[0].group = {"a", 0};
  overview.groups[0].members = {{MemberId(1), PeerId(1), "", Epoch(1)}, {MemberId(2), PeerId(2)}};
  overview.groups[1].group = {"a", 1};
  overview.groups[1].preparing = Epoch(2);
  overview.groups[2].group = {"b", 0};
  metrics.SetOverview(overview);
  const std::string text = metrics.Text();
  for (const char* series :
       {"longhaul_coordinator_epochs_total{cause=\"removal\"} 1\n",
        "longhaul_coordinator_preparation_seconds_bucket{le=\"0.05\"} 1\n",
        "longhaul_coordinator_syncs_total{outcome=\"committed\"} 2\n",
        "longhaul_coordinator_syncs_total{outcome=\"failed\"} 1\n",
        "longhaul_coordinator_syncs_total{outcome=\"refused\"} 1\n",
        "longhaul_coordinator_sync_bytes_total 1000\n",
        "longhaul_coordinator_sync_seconds_bucket{le=\"0.2\"} 1\n",
        "longhaul_coordinator_states_corrupt_total 1\n", "longhaul_coordinator_votes_total 2\n",
        "longhaul_coordinator_streams 1\n", "longhaul_coordinator_streams_opened_total 2\n",
        "longhaul_coordinator_runs 2\n", "longhaul_coordinator_groups 3\n",
        "longhaul_coordinator_members 1\n", "longhaul_coordinator_members_pending 1\n",
        "longhaul_coordinator_groups_preparing 1\n"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
}

}  // namespace
}  // namespace longhaul::coordinator
