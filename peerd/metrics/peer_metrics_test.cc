#include "peerd/metrics/peer_metrics.h"

#include <atomic>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

using ::testing::HasSubstr;

TEST(PeerMetrics, APageHasWhatIsPublishedAfterItWasAskedFor) {
  std::atomic<int> woken = 0;
  PeerMetrics metrics([&] { ++woken; });
  std::atomic<bool> over = false;
  std::thread reactor([&] {
    PeerSnapshot snapshot;
    while (!over) {
      if (!metrics.wanted()) {
        std::this_thread::yield();
        continue;
      }
      snapshot.transport.bytes_sent = 1000 * static_cast<uint64_t>(woken);
      metrics.Publish(snapshot);
    }
  });
  for (int i = 1; i < 100; ++i) {
    EXPECT_THAT(metrics.Text(std::chrono::minutes(1)),
                HasSubstr("longhaul_peerd_sent_bytes_total " + std::to_string(i * 1000) + "\n"));
  }
  over = true;
  reactor.join();
}

TEST(PeerMetrics, APageComesAlsoIfNobodyPublishes) {
  PeerMetrics metrics([] {});
  PeerSnapshot snapshot;
  snapshot.transport.bytes_sent = 7;
  EXPECT_FALSE(metrics.wanted());
  metrics.Publish(snapshot);
  EXPECT_THAT(metrics.Text(std::chrono::milliseconds(1)),
              HasSubstr("longhaul_peerd_sent_bytes_total 7\n"));
  EXPECT_TRUE(metrics.wanted());
  metrics.Publish(snapshot);
  EXPECT_FALSE(metrics.wanted());
}

}  // namespace
}  // namespace longhaul::peerd
