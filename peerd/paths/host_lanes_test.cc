#include "peerd/paths/host_lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {
namespace {

constexpr int64_t kRttUs = Millis(40);

class HostLanesTest : public ::testing::Test {
 protected:
  // The first `links` links have much to send. The host sends at most `host_rate`, and each lane at
  // most `lane_rate`, in bytes a millisecond.
  void Send(uint64_t links, uint64_t host_rate, uint64_t lane_rate, int64_t ms) {
    for (; ms > 0; --ms) {
      now_ = now_ + Millis(1);
      const uint64_t lanes = std::max(host_.lanes(), 1u);
      const uint64_t each = std::min(host_rate / links, lanes * lane_rate);
      for (uint64_t link = 1; link <= links; ++link) {
        changes_ += host_.Sent(link, kRttUs, each, now_);
        most_ = std::max(most_, host_.lanes());
      }
    }
  }

  void Pause() {
    for (uint64_t link = 1; link <= 3; ++link) host_.QueueEmptied(link);
    now_ = now_ + Seconds(1);
  }

  HostLanes host_;
  Tick now_{Seconds(100)};
  int changes_ = 0;
  uint32_t most_ = 0;
};

TEST_F(HostLanesTest, ALinkThatIsBusyAloneIsNotTold) {
  Send(1, 12500, 12500, 10000);
  EXPECT_EQ(host_.links(), 1u);
  EXPECT_EQ(host_.lanes(), 0u);
  EXPECT_FALSE(host_.found());
}

TEST_F(HostLanesTest, BeginsWithFewAndAddsNoneWhereTheHostSendsNoMore) {
  Send(3, 12500, 12500, 10000);
  EXPECT_EQ(host_.links(), 3u);
  EXPECT_EQ(host_.lanes(), 4u) << "as many as one link alone, divided";
  EXPECT_EQ(most_, 8u) << "tried";
  EXPECT_TRUE(host_.found());
  EXPECT_NEAR(static_cast<double>(host_.rate()), 12.5e6, 0.1e6);
}

TEST_F(HostLanesTest, OnAVeryLongWayManyLanesThatOverrunQueuesAreGivenUpOnce) {
  const auto begin = [this] {
    now_ = now_ + Millis(1);
    for (uint64_t link = 1; link <= 3; ++link) {
      host_.Sent(link, /*rtt_us=*/Millis(200), HostLanes::kBusyBytes, now_);
    }
  };
  begin();
  EXPECT_EQ(host_.lanes(), 16u);
  EXPECT_FALSE(host_.Repeated(1 << 20, 1 << 20)) << "too little to tell";
  EXPECT_FALSE(host_.Repeated(99 << 20, 0)) << "1 % is repeated";
  host_.Arrived(1 << 20, Millis(1), now_);
  EXPECT_FALSE(host_.Repeated(100 << 20, 5 << 20)) << "lost at random: no queue is full";
  host_.Arrived(1 << 20, Millis(60), now_);
  EXPECT_TRUE(host_.Repeated(100 << 20, 5 << 20));
  EXPECT_EQ(host_.lanes(), 4u);
  begin();
  EXPECT_EQ(host_.lanes(), 4u);
  EXPECT_FALSE(host_.Repeated(100 << 20, 5 << 20)) << "once";
}

TEST_F(HostLanesTest, TriesNoMoreWhereTheLinksTogetherSendAsMuchAsOneAlone) {
  Send(1, 12500, 12500, 2000);
  Pause();
  Send(3, 12000, 12500, 10000);
  EXPECT_EQ(host_.lanes(), 4u);
  EXPECT_EQ(changes_, 0);
  EXPECT_TRUE(host_.found());
  Pause();
  Send(3, 50000, 1500, 20000);
  EXPECT_EQ(host_.lanes(), 16u) << "three links together send more than one alone";
}

TEST_F(HostLanesTest, AddsLanesWhileTheHostSendsMore) {
  Send(3, 60000, 1500, 20000);
  EXPECT_EQ(host_.lanes(), 16u) << "14 are enough";
  EXPECT_EQ(most_, 32u);
}

TEST_F(HostLanesTest, LinksBusyBeforeAPauseCountFromTheBeginningOfTheNextBurst) {
  Send(3, 12500, 12500, 400);
  Pause();
  Send(1, 1000, 1000, 1);
  EXPECT_EQ(host_.links(), 3u);
  Send(1, 12500, 12500, 200);
  EXPECT_EQ(host_.links(), 1u) << "the other two have sent nothing for some round trips";
  Pause();
  Send(1, 1000, 1000, 1);
  EXPECT_EQ(host_.links(), 1u);
}

TEST_F(HostLanesTest, LinksThatStopWithoutAPauseOfTheHostCountNoMore) {
  Send(3, 12500, 12500, 2000);
  Send(1, 12500, 12500, 600);
  EXPECT_EQ(host_.links(), 3u) << "the end of an op";
  Send(1, 12500, 12500, 700);
  EXPECT_EQ(host_.links(), 1u);
}

TEST_F(HostLanesTest, FewerBusyLinksUseAsManyLanesInAll) {
  Send(3, 60000, 1500, 20000);
  ASSERT_EQ(host_.lanes(), 16u);
  const int changes = changes_;
  Pause();
  Send(2, 12500, 12500, 20000);
  EXPECT_EQ(host_.lanes(), 16u) << "48 / 2, rounded down";
  Send(1, 12500, 12500, 20000);
  EXPECT_EQ(host_.lanes(), 32u);
  EXPECT_EQ(changes_, changes) << "nothing is measured";
  Pause();
  Send(3, 60000, 1500, 2000);
  EXPECT_EQ(host_.lanes(), 16u);
  EXPECT_TRUE(host_.found());
}

TEST_F(HostLanesTest, AfterManyBurstsOfFewerLinksTheSearchBeginsAnew) {
  Send(3, 60000, 1500, 20000);
  ASSERT_EQ(host_.lanes(), 16u);
  for (int i = 0; i < 40; ++i) {
    Pause();
    Send(1, 12500, 12500, 100);
  }
  EXPECT_EQ(host_.lanes(), 0u) << "a link alone counts by itself";
  Pause();
  Send(2, 12500, 12500, 20000);
  EXPECT_EQ(host_.lanes(), 8u);
}

TEST_F(HostLanesTest, AFewBytesMakeNoLinkBusy) {
  Send(1, 12500, 12500, 100);
  host_.Sent(2, kRttUs, 1000, now_);
  EXPECT_EQ(host_.links(), 1u);
}

TEST_F(HostLanesTest, ALinkThatIsGoneIsNotBusy) {
  Send(2, 12500, 12500, 1000);
  ASSERT_EQ(host_.links(), 2u);
  host_.Remove(2);
  EXPECT_EQ(host_.lanes(), 0u);
  Send(1, 12500, 12500, 1);
  EXPECT_EQ(host_.links(), 1u);
}

TEST_F(HostLanesTest, PausesDoNotCountAsTime) {
  Send(2, 10000, 10000, 1000);
  const HostLanes::Busy busy = host_.PopBusy();
  EXPECT_EQ(busy.bytes, 10000000u);
  host_.QueueEmptied(1);
  host_.QueueEmptied(2);
  Send(2, 10000, 10000, 1);
  EXPECT_EQ(host_.PopBusy().us, Millis(1)) << "that both links wait for other hosts is no pause";
  Pause();
  Send(2, 10000, 10000, 1);
  EXPECT_EQ(host_.PopBusy().us, kRttUs) << "until the last bytes had arrived";
}

}  // namespace
}  // namespace longhaul::peerd
