#include "peerd/metrics/peer_metrics.h"

#include <atomic>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace longhaul::peerd
