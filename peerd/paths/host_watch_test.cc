#include "peerd/paths/host_watch.h"

#include "gtest/gtest.h"
#include "peerd/paths/news.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kMega = 1000000;

class HostWatchTest : public ::testing::Test {
 protected:
  // The host sends and receives at these rates for `ms`.
  void Move(uint64_t up, uint64_t down, int64_t ms) { Op(up, down, ms, {}, /*ends=*/false); }
  // The host has more to send all the time, unless `idle`.
  void Op(uint64_t up, uint64_t down, int64_t ms, HostWatch::Queues queues, bool ends = true,
          bool idle = false) {
    queues.waiting_us = idle ? 0 : HostWatch::kBusy;
    for (int64_t t = 0; t < ms; t += 100) {
      now_ = now_ + Millis(100);
      arrived_ += up / 10;
      received_ += down / 10;
      watch_.Add(now_, arrived_, received_, rtt_us_, ends && t + 100 >= ms, queues);
    }
  }
  bool Report() {
    report_ = {};
    return watch_.PopReport(now_, &report_);
  }

  HostWatch watch_;
  uint32_t rtt_us_ = 40000;
  Tick now_{Seconds(1000)};
  uint64_t arrived_ = 0;
  uint64_t received_ = 0;
  control::LinkReport report_;
};

TEST_F(HostWatchTest, SaysWhatHasChanged) {
  EXPECT_FALSE(Report()) << "nothing is known";
  Move(100 * kMega, 50 * kMega, 4000);
  EXPECT_TRUE(Report());
  EXPECT_EQ(report_.up_bytes_per_second, watch_.up());
  EXPECT_EQ(report_.down_bytes_per_second, watch_.down());
  EXPECT_NEAR(static_cast<double>(watch_.up()), 100e6, 7e6);
  EXPECT_NEAR(static_cast<double>(watch_.down()), 50e6, 6e6);
  Move(100 * kMega, 50 * kMega, 1000);
  EXPECT_FALSE(Report()) << "it was said";
  Move(100 * kMega, 60 * kMega, 1000);
  EXPECT_TRUE(Report());
}

TEST_F(HostWatchTest, WhatAHostThatIsNotBusyHappensToSendIsNoLimit) {
  rtt_us_ = 200;
  // Small ops, all the time: 2.4 MB/s.
  for (int i = 0; i < 20; ++i)
    Op(2400000, 2400000, 1000, HostWatch::Queues{}, /*ends=*/true, /*idle=*/true);
  EXPECT_EQ(watch_.up(), 0u);
  EXPECT_TRUE(Report());
  EXPECT_EQ(report_.up_bytes_per_second, control::kNoLimitBytesPerSecond);
  // It was busy once, and that counts, also after hours of small ops.
  for (int i = 0; i < 3; ++i) Op(400 * kMega, 2400000, 1000, HostWatch::Queues{});
  EXPECT_TRUE(Report());
  EXPECT_NEAR(static_cast<double>(report_.up_bytes_per_second), 400e6, 30e6);
  for (int i = 0; i < 7200; ++i)
    Op(2400000, 2400000, 1000, HostWatch::Queues{}, /*ends=*/true, /*idle=*/true);
  EXPECT_NEAR(static_cast<double>(watch_.up()), 400e6, 30e6);
  // More without being busy: the limit was none.
  Op(800 * kMega, 2400000, 1000, HostWatch::Queues{}, /*ends=*/true, /*idle=*/true);
  EXPECT_EQ(watch_.up(), 0u);
  EXPECT_TRUE(Report());
  EXPECT_EQ(report_.up_bytes_per_second, control::kNoLimitBytesPerSecond);
  // And it is busy again, and slower.
  for (int i = 0; i < 8; ++i) Op(100 * kMega, 2400000, 1000, HostWatch::Queues{});
  EXPECT_NEAR(static_cast<double>(watch_.up()), 100e6, 8e6);
}

TEST_F(HostWatchTest, SaysItAgainBeforeItIsForgotten) {
  Move(100 * kMega, 50 * kMega, 1000);
  EXPECT_TRUE(Report());
  now_ = now_ + (kReportRepeat + -1);
  EXPECT_FALSE(Report());
  now_ = now_ + 1;
  EXPECT_TRUE(Report());
  watch_.SayAgain();
  EXPECT_TRUE(Report()) << "another coordinator";
}

TEST_F(HostWatchTest, ALinkIsHeldIfItCarriesLessThanItsPartWhileItsSegmentsWait) {
  Move(90 * kMega, 50 * kMega, 1000);
  EXPECT_FALSE(watch_.Holds(Millis(1000), 40000, 1, 3)) << "the host sends all it can";
  Move(30 * kMega, 50 * kMega, 500);
  EXPECT_FALSE(watch_.Holds(Millis(1000), 40000, 1, 3)) << "it carries a third";
  EXPECT_TRUE(watch_.Holds(Millis(1000), 40000, 2, 3)) << "two links together carry too little";
  Move(20 * kMega, 50 * kMega, 500);
  EXPECT_TRUE(watch_.Holds(Millis(1000), 40000, 1, 3));
  EXPECT_FALSE(watch_.Holds(Millis(700), 40000, 1, 3)) << "perhaps it only starts";
  EXPECT_FALSE(watch_.Holds(Millis(1000), 200000, 1, 3)) << "it starts slowly";
}

}  // namespace
}  // namespace longhaul::peerd
