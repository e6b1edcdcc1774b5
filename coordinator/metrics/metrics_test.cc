#include "coordinator/metrics/metrics.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::HasSubstr;

TEST(CoordinatorMetrics, EverySeriesExistsBeforeItsFirstEvent) {
  const CoordinatorMetrics metrics;
  const std::string text = metrics.Text();
  for (const char* series : {"longhaul_coordinator_members 0\n",
                             "longhaul_coordinator_members_pending 0\n",
                             "longhaul_coordinator_streams 0\n",
                             "longhaul_coordinator_votes_total 0\n",
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
                             "longhaul_coordinator_members_removed_total{cause=\"leave\"} 0\n",
                             "longhaul_coordinator_members_removed_total{cause=\"silence\"} 0\n",
                             "longhaul_coordinator_members_removed_total{cause=\"other\"} 0\n",
                             "longhaul_coordinator_cpu_seconds_total{component=\"loop\"} 0\n",
                             "longhaul_coordinator_loop_lag_seconds_count 0\n",
                             "longhaul_coordinator_ballot_wait_seconds 0\n",
                             "longhaul_coordinator_pairs_blocked 0\n",
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

TEST(CoordinatorMetrics, TellsRemovalsByCauseAndCountsACauseThatItDoesNotKnow) {
  CoordinatorMetrics metrics;
  metrics.OnRemoval("leave");
  metrics.OnRemoval("trainer_died");
  metrics.OnRemoval("trainer_died");
  metrics.OnRemoval("a cause of tomorrow");
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("members_removed_total{cause=\"leave\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("members_removed_total{cause=\"trainer_died\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("members_removed_total{cause=\"other\"} 1\n"));
}

GroupView Group(const std::string& run, uint32_t number) {
  GroupView group;
  group.group = {run, number};
  return group;
}

TEST(CoordinatorMetrics, AGroupIsShownWithItsAgesWhileItExists) {
  CoordinatorMetrics metrics;
  Overview overview;
  overview.now = Tick{Seconds(100)};
  overview.groups.push_back(Group("a", 1));
  GroupView& group = overview.groups[0];
  group.members = {{MemberId(1), PeerId(1), "", Epoch(1)}, {MemberId(2), PeerId(2)}};
  group.committed = Epoch(7);
  group.state = StateRecord{41};
  group.first_vote = Tick{Seconds(97)};
  metrics.SetOverview(overview);
  const std::string labels = "{group=\"1\",run=\"a\"} ";
  std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("group_members" + labels + "1\n"));
  EXPECT_THAT(text, HasSubstr("group_epoch" + labels + "7\n"));
  EXPECT_THAT(text, HasSubstr("group_revision" + labels + "41\n"));
  EXPECT_THAT(text, HasSubstr("group_ballot_wait_seconds" + labels + "3\n"));
  EXPECT_THAT(text, HasSubstr("group_step_age_seconds" + labels + "0\n")) << "just first shown";
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_ballot_wait_seconds 3\n"));

  overview.now = Tick{Seconds(110)};
  group.first_vote = kNever;
  metrics.SetOverview(overview);
  text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("group_step_age_seconds" + labels + "10\n")) << "no step since";
  EXPECT_THAT(text, HasSubstr("group_ballot_wait_seconds" + labels + "0\n"));
  group.last_step = Tick{Seconds(108)};
  metrics.SetOverview(overview);
  EXPECT_THAT(metrics.Text(), HasSubstr("group_step_age_seconds" + labels + "2\n"));

  overview.groups.clear();
  metrics.SetOverview(overview);
  EXPECT_THAT(metrics.Text(), ::testing::Not(HasSubstr("run=\"a\"")));
}

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(CoordinatorMetrics, ThePageHasALimitForGroupsAndShowsTheSlowestLinks) {
  CoordinatorMetrics metrics;
  Overview overview;
  for (uint32_t i = 0; i < 2 * kGroupsShownMax; ++i) overview.groups.push_back(Group("a", i));
  std::vector<PeerView>& ring = overview.groups[0].ring;
  for (uint64_t i = 0; i < 2 * kLinksShownMax; ++i) {
    PeerView peer;
    peer.peer = PeerId(i + 1);
    peer.host = "host" + std::to_string(i);
    if (i != 0) peer.next = LinkView{1000 * i, 2000};  // the first one is not measured
    ring.push_back(peer);
  }
  metrics.SetOverview(overview);
  std::string text = metrics.Text();
  EXPECT_EQ(Count(text, "\nlonghaul_coordinator_group_members{"), kGroupsShownMax);
  EXPECT_EQ(Count(text, "\nlonghaul_coordinator_ring_link_rtt_seconds{"), kLinksShownMax);
  const std::string slowest =
      "{from=\"p2\",from_host=\"host1\",group=\"0\",run=\"a\",to=\"p3\",to_host=\"host2\"} ";
  EXPECT_THAT(text, HasSubstr("ring_link_bytes_per_second" + slowest + "1000\n"));
  EXPECT_THAT(text, HasSubstr("ring_link_rtt_seconds" + slowest + "0.002\n"));

  ring[1].next->bytes_per_second = 1000000;  // not among the slowest any more
  metrics.SetOverview(overview);
  text = metrics.Text();
  EXPECT_EQ(Count(text, "\nlonghaul_coordinator_ring_link_rtt_seconds{"), kLinksShownMax);
  EXPECT_THAT(text, ::testing::Not(HasSubstr("from_host=\"host1\"")));
}

}  // namespace
}  // namespace longhaul::coordinator
