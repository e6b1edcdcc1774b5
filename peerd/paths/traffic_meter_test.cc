#include "peerd/paths/traffic_meter.h"

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kMega = 1000000;

// A host's traffic, looked at each 100 ms.
class TrafficMeterTest : public ::testing::Test {
 protected:
  // The host moves this many bytes a second for `ms`.
  void Move(uint64_t rate, int64_t ms, uint32_t rtt_us = 0) {
    for (int64_t t = 0; t < ms; t += 100) {
      now_ = now_ + Millis(100);
      bytes_ += rate / 10;
      meter_.Add(now_, bytes_, rtt_us);
    }
  }
  // Nothing moves. The daemon looks each 500 ms.
  void Pause(int64_t ms) {
    for (int64_t t = 0; t < ms; t += 500) {
      now_ = now_ + Millis(500);
      meter_.Add(now_, bytes_, 0);
    }
  }
  // An op of a second, and a pause.
  void Op(uint64_t rate) {
    Move(rate, 1000);
    meter_.OpEnded();
    Pause(1000);
  }
  void ExpectNear(uint64_t rate) {
    EXPECT_LE(meter_.bytes_per_second(), rate);
    EXPECT_GE(meter_.bytes_per_second(), rate * 96 / 100);
  }

  TrafficMeter meter_{{.stretch = Millis(100), .late_percent = 150, .late_max = Millis(75)}};
  Tick now_{Seconds(1000)};
  uint64_t bytes_ = 0;
};

TEST_F(TrafficMeterTest, KnowsNothingWithoutAStretch) {
  EXPECT_EQ(meter_.bytes_per_second(), 0u);
  EXPECT_FALSE(meter_.Slack(Millis(100), 0.6));
  meter_.Add(now_, 0, 0);
  meter_.Add(now_ + Millis(99), 10 * kMega, 0);
  EXPECT_EQ(meter_.bytes_per_second(), 0u);
}

TEST_F(TrafficMeterTest, FindsTheRateOfAnOp) {
  Pause(1000);
  Op(100 * kMega);
  ExpectNear(100 * kMega);
}

TEST_F(TrafficMeterTest, FindsItBetweenASlowStartAndASlowEnd) {
  Pause(1000);
  Move(20 * kMega, 300);
  Move(100 * kMega, 1000);
  Move(40 * kMega, 1000);
  ExpectNear(100 * kMega);
}

TEST_F(TrafficMeterTest, AClumpOfAcknowledgementsMakesNoHostFaster) {
  Pause(1000);
  Move(100 * kMega, 900, 40000);
  Move(70 * kMega, 100, 40000);   // those of the last 30 ms waited in a queue
  Move(130 * kMega, 100, 40000);  // and come now
  Move(100 * kMega, 900, 40000);
  ExpectNear(100 * kMega);
}

TEST_F(TrafficMeterTest, AStretchTakesTwoRoundTrips) {
  meter_.Add(now_, 0, 0);
  Move(100 * kMega, 300, 200000);
  EXPECT_EQ(meter_.bytes_per_second(), 0u);
  Move(100 * kMega, 100, 200000);
  EXPECT_GT(meter_.bytes_per_second(), 80 * kMega);
}

TEST_F(TrafficMeterTest, ASlowerHostShowsAfterThreeOpsAndFiveSeconds) {
  Pause(1000);
  Op(100 * kMega);
  Op(50 * kMega);
  Op(50 * kMega);
  ExpectNear(100 * kMega);
  Op(50 * kMega);
  Op(50 * kMega);
  ExpectNear(50 * kMega);
  Op(80 * kMega);
  ExpectNear(80 * kMega);
}

TEST_F(TrafficMeterTest, WithoutOpsASlowerHostShowsAfterTenMinutes) {
  Move(100 * kMega, 20000);
  Move(50 * kMega, 599000);
  ExpectNear(100 * kMega);
  Move(50 * kMega, 4000);
  ExpectNear(50 * kMega);
}

TEST_F(TrafficMeterTest, ALongOpMayKeepTheHostBusyOnlyAtItsBeginning) {
  for (int i = 0; i < 10; ++i) {
    Move(100 * kMega, 1000);
    Move(30 * kMega, 8000);
    meter_.OpEnded();
    ExpectNear(100 * kMega);
  }
}

TEST_F(TrafficMeterTest, SmallOpsForgetNothing) {
  Op(100 * kMega);
  for (int i = 0; i < 100; ++i) {
    Move(1 * kMega, 900);
    meter_.OpEnded();
    Pause(500);
  }
  ExpectNear(100 * kMega);
}

TEST_F(TrafficMeterTest, AfterFiveShortOpsWithLongPausesItShowsToo) {
  const auto short_op = [this](uint64_t rate) {
    Move(rate, 200);
    meter_.OpEnded();
    Pause(30000);
  };
  Pause(1000);
  short_op(100 * kMega);
  const uint64_t before = meter_.bytes_per_second();
  EXPECT_GT(before, 85 * kMega) << "of a short op, less is seen";
  for (int i = 0; i < 4; ++i) short_op(50 * kMega);
  EXPECT_EQ(meter_.bytes_per_second(), before);
  for (int i = 0; i < 2; ++i) short_op(50 * kMega);
  EXPECT_LE(meter_.bytes_per_second(), 50 * kMega);
}

TEST_F(TrafficMeterTest, APauseForgetsNothing) {
  Op(100 * kMega);
  const uint64_t before = meter_.bytes_per_second();
  Pause(3600000);
  EXPECT_EQ(meter_.bytes_per_second(), before);
  Op(50 * kMega);
  EXPECT_EQ(meter_.bytes_per_second(), before) << "a single op";
}

TEST_F(TrafficMeterTest, PingsOfIdleLanesAreNoTraffic) {
  Op(100 * kMega);
  const uint64_t before = meter_.bytes_per_second();
  for (int i = 0; i < 1000; ++i) {
    bytes_ += 10000;
    Pause(500);
  }
  EXPECT_EQ(meter_.bytes_per_second(), before);
}

TEST_F(TrafficMeterTest, TellsSlackFromTheFastestStretchOfThisBurst) {
  Op(100 * kMega);
  Move(50 * kMega, 1000);
  EXPECT_FALSE(meter_.Slack(Millis(400), 0.6)) << "perhaps the host has become slower";
  Pause(1000);
  Move(100 * kMega, 500);
  EXPECT_FALSE(meter_.Slack(Millis(400), 0.6));
  Move(50 * kMega, 100);
  EXPECT_FALSE(meter_.Slack(Millis(400), 0.6)) << "not for so long yet";
  Move(50 * kMega, 300);
  EXPECT_TRUE(meter_.Slack(Millis(400), 0.6));
  EXPECT_FALSE(meter_.Slack(Seconds(2), 0.6)) << "the burst is younger";
  Move(50 * kMega, 1000);
  EXPECT_TRUE(meter_.Slack(Millis(400), 0.6)) << "a burst that is cut goes on";
  Move(70 * kMega, 500);
  EXPECT_FALSE(meter_.Slack(Millis(400), 0.6));
}

TEST_F(TrafficMeterTest, KeepsFewSamples) {
  for (uint64_t i = 0; i < 1000000; ++i) {
    meter_.Add(now_ + static_cast<int64_t>(i), i * 100, 0);
  }
  EXPECT_LE(meter_.bytes_per_second(), 100 * kMega);
}

}  // namespace
}  // namespace longhaul::peerd
