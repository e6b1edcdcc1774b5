#include "peerd/metrics/peer_metrics.h"

#include <atomic>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSent[] = "longhaul_peerd_sent_bytes_total";

TEST(PeerMetrics, APageHasWhatIsPublishedAfterItWasAskedFor) {
  // The total in a snapshot that is made now.
  std::atomic<uint64_t> sent = 0;
  PeerMetrics metrics([] {});
  std::atomic<bool> over = false;
  std::thread reactor([&] {
    PeerSnapshot snapshot;
    while (!over) {
      if (!metrics.wanted()) {
        std::this_thread::yield();
        continue;
      }
      snapshot.totals = {{kSent, "help", sent}};
      metrics.Publish(snapshot);
    }
  });
  for (int i = 1; i < 100; ++i) {
    sent = static_cast<uint64_t>(i) * 1000;
    EXPECT_THAT(metrics.Text(std::chrono::minutes(1)),
                HasSubstr(std::string(kSent) + " " + std::to_string(i * 1000) + "\n"));
  }
  over = true;
  reactor.join();
}

TEST(PeerMetrics, APageComesAlsoIfNobodyPublishes) {
  PeerMetrics metrics([] {});
  PeerSnapshot snapshot;
  snapshot.totals = {{kSent, "help", 7}};
  EXPECT_FALSE(metrics.wanted());
  metrics.Publish(snapshot);
  EXPECT_THAT(metrics.Text(std::chrono::milliseconds(1)), HasSubstr(std::string(kSent) + " 7\n"));
  EXPECT_TRUE(metrics.wanted());
  metrics.Publish(snapshot);
  EXPECT_FALSE(metrics.wanted());
}

TEST(PeerMetrics, EachCounterIsShownByItsNameAndPartsThatShareOneAreAddedUp) {
  PeerMetrics metrics([] {});
  TransportStats transport;
  uint64_t count = 0;
  for (const auto& counter : kTransportCounters) transport.*counter.count = ++count;
  PeerCore::Stats core;
  core.frames_refused = 1000;
  PeerSnapshot snapshot;
  AddTotals(kTransportCounters, transport, &snapshot.totals);
  AddTotals(kCoreCounters, core, &snapshot.totals);
  metrics.Publish(snapshot);
  const std::string page = metrics.Text(std::chrono::milliseconds(1));
  for (const auto& counter : kTransportCounters) {
    uint64_t total = transport.*counter.count;
    if (counter.count == &TransportStats::frames_refused) total += core.frames_refused;
    EXPECT_THAT(page, HasSubstr(std::string("# HELP ") + counter.name + " " + counter.help + "\n"));
    EXPECT_THAT(page,
                HasSubstr("\n" + std::string(counter.name) + " " + std::to_string(total) + "\n"));
  }
}

TEST(PeerMetrics, CountersOfOneNameDifferInTheirReason) {
  PeerMetrics metrics([] {});
  PeerSnapshot snapshot;
  RefusedCallers::Counts counts{};
  counts[static_cast<size_t>(CallerRefusal::kToken)] = 3;
  AddTotals(counts, &snapshot.totals);
  metrics.Publish(snapshot);
  const std::string page = metrics.Text(std::chrono::milliseconds(1));
  EXPECT_THAT(page, HasSubstr("longhaul_peerd_handshakes_refused_total{reason=\"token\"} 3\n"));
  EXPECT_THAT(page, HasSubstr("longhaul_peerd_handshakes_refused_total{reason=\"key\"} 0\n"));
}

std::string PageOf(PeerMetrics& metrics) { return metrics.Text(std::chrono::milliseconds(1)); }

TEST(PeerMetrics, ThePhasesOfAnOpAddUpToItsTime) {
  PeerMetrics metrics([] {});
  OpInfo info;
  info.total_us = 1000000;
  info.wait_us = 500000;
  info.transfer_us = 375000;
  info.algorithm = Algorithm::kRing;
  metrics.ObserveOp(Code::kOk, info, Tick{});
  metrics.ObserveOp(Code::kAborted, info, Tick{});
  const std::string page = PageOf(metrics);
  for (const char* series : {"longhaul_peerd_op_seconds_sum 1\n",
                             "longhaul_peerd_op_phase_seconds_sum{phase=\"wait\"} 0.5\n",
                             "longhaul_peerd_op_phase_seconds_sum{phase=\"transfer\"} 0.375\n",
                             "longhaul_peerd_op_phase_seconds_sum{phase=\"commit\"} 0.125\n",
                             "longhaul_peerd_ops_total{outcome=\"ok\"} 1\n",
                             "longhaul_peerd_ops_total{outcome=\"aborted\"} 1\n",
                             "longhaul_peerd_ops_total{outcome=\"failed\"} 0\n",
                             "longhaul_peerd_ops_done_total{algorithm=\"ring\"} 1\n",
                             "longhaul_peerd_ops_done_total{algorithm=\"mesh\"} 0\n"}) {
    EXPECT_THAT(page, HasSubstr(series));
  }
}

TEST(PeerMetrics, AgesCountFromTheStartUntilSomethingHappens) {
  PeerMetrics metrics([] {});
  PeerSnapshot snapshot;
  snapshot.now = Tick{Seconds(1000)};
  metrics.Publish(snapshot);
  snapshot.now = Tick{Seconds(1030)};
  metrics.Publish(snapshot);
  EXPECT_THAT(PageOf(metrics), HasSubstr("longhaul_peerd_op_age_seconds 30\n"));
  EXPECT_THAT(PageOf(metrics), HasSubstr("longhaul_peerd_step_age_seconds 30\n"));
  metrics.ObserveOp(Code::kOk, {}, Tick{Seconds(1025)});
  metrics.ObserveOp(Code::kAborted, {}, Tick{Seconds(1029)});  // no progress
  metrics.ObserveStep(Tick{Seconds(1020)});
  metrics.ObserveSync(12);
  metrics.Publish(snapshot);
  EXPECT_THAT(PageOf(metrics), HasSubstr("longhaul_peerd_op_age_seconds 5\n"));
  EXPECT_THAT(PageOf(metrics), HasSubstr("longhaul_peerd_step_age_seconds 10\n"));
  EXPECT_THAT(PageOf(metrics), HasSubstr("longhaul_peerd_revision 12\n"));
}

TEST(PeerMetrics, ShowsWhatTheHostCarries) {
  PeerMetrics metrics([] {});
  PeerSnapshot snapshot;
  snapshot.core.mesh_share = 0.25;
  snapshot.host_up = 5000;
  snapshot.host_down = 7000;
  snapshot.transport.pace = 4900;
  metrics.Publish(snapshot);
  const std::string page = PageOf(metrics);
  EXPECT_THAT(page, HasSubstr("\nlonghaul_peerd_mesh_share 0.25\n"));
  EXPECT_THAT(page, HasSubstr("\nlonghaul_peerd_host_up_bytes_per_second 5000\n"));
  EXPECT_THAT(page, HasSubstr("\nlonghaul_peerd_host_down_bytes_per_second 7000\n"));
  EXPECT_THAT(page, HasSubstr("\nlonghaul_peerd_pace_bytes_per_second 4900\n"));
}

TEST(PeerMetrics, OnlyTheSlowestLinksAreShown) {
  PeerMetrics metrics([] {});
  PeerSnapshot snapshot;
  for (uint64_t i = 1; i <= kLinksShownMax + 1; ++i) {
    snapshot.links.push_back({PeerId(i), 1000 * i, 2000, 10 * i});
  }
  snapshot.links.push_back({PeerId(9)});  // not measured
  metrics.Publish(snapshot);
  std::string page = PageOf(metrics);
  EXPECT_THAT(page, HasSubstr("longhaul_peerd_link_bytes_per_second{peer=\"p1\"} 1000\n"));
  EXPECT_THAT(page, HasSubstr("longhaul_peerd_link_rtt_seconds{peer=\"p1\"} 0.002\n"));
  EXPECT_THAT(page, HasSubstr("longhaul_peerd_link_repeated_bytes_total{peer=\"p4\"} 40\n"));
  EXPECT_THAT(page, Not(HasSubstr("peer=\"p5\"")));
  EXPECT_THAT(page, Not(HasSubstr("peer=\"p9\"")));
  snapshot.links.erase(snapshot.links.begin());
  metrics.Publish(snapshot);
  page = PageOf(metrics);
  EXPECT_THAT(page, Not(HasSubstr("peer=\"p1\"")));
  EXPECT_THAT(page, HasSubstr("longhaul_peerd_link_repeated_bytes_total{peer=\"p5\"} 50\n"));
}

}  // namespace
}  // namespace longhaul::peerd
