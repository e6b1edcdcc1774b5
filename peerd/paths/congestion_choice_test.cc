#include "peerd/paths/congestion_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/tick.h"

namespace longhaul::peerd {
namespace {

using ::testing::HasSubstr;

// How a control fares.
struct Path {
  uint64_t rate = 12500000;    // bytes a second
  uint64_t per_mille = 0;      // repeated
  uint64_t queued_us = 60000;  // for which a packet waits in queues; the round trip takes 200 ms
  double lanes = 64;
};

constexpr uint64_t kShortQueueUs = 9000;

class CongestionChoiceTest : public ::testing::Test {
 protected:
  explicit CongestionChoiceTest(bool offers_bbr = true) : choice_(offers_bbr) {}

  // Sends for so many seconds, in samples of half a second.
  void Send(const Path& with_cubic, const Path& with_bbr, int64_t seconds) {
    for (int64_t i = 0; i < 2 * seconds; ++i) {
      const Path& path = choice_.in_use() == "cubic" ? with_cubic : with_bbr;
      const uint64_t bytes = path.rate / 2;
      const std::string why = choice_.Add({.us = Seconds(1) / 2,
                                           .bytes = bytes,
                                           .bytes_repeated = bytes * path.per_mille / 1000,
                                           .arrived = bytes,
                                           .queued_us = bytes * path.queued_us,
                                           .rtt_us = 200000,
                                           .round_trips = path.lanes * 5},
                                          now_);
      if (!why.empty()) reasons_.push_back(why);
      now_ = now_ + Seconds(1) / 2;
    }
  }

  CongestionChoice choice_;
  Tick now_{Seconds(1000)};
  std::vector<std::string> reasons_;
};

TEST_F(CongestionChoiceTest, BbrIsTakenWherePacketsAreLostAtRandom) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 40000000, .per_mille = 2}, 1000);
  EXPECT_EQ(choice_.in_use(), "bbr");
  ASSERT_EQ(reasons_.size(), 1u);
  EXPECT_THAT(reasons_[0],
              HasSubstr("cubic loses packets at random: 1 per mille at 20000000 bytes/s"));
}

TEST_F(CongestionChoiceTest, FullQueuesAreNoReasonForBbr) {
  Send({.per_mille = 30}, {.rate = 40000000}, 1000);
  EXPECT_EQ(choice_.in_use(), "cubic");
  EXPECT_TRUE(reasons_.empty());
}

TEST_F(CongestionChoiceTest, LossesInBurstsAreNoReasonForBbr) {
  // Of so many lanes at random losses, each would have 5 packets on the way, and not 40.
  Send({.rate = 20000000, .per_mille = 50, .queued_us = kShortQueueUs}, {.rate = 40000000}, 1000);
  EXPECT_EQ(choice_.in_use(), "cubic");
  EXPECT_TRUE(reasons_.empty());
  // Eight times as many lanes would.
  Send({.rate = 20000000, .per_mille = 50, .queued_us = kShortQueueUs, .lanes = 512},
       {.rate = 40000000}, 20);
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CongestionChoiceTest, FewLossesAreNoReasonForBbr) {
  Send({.queued_us = kShortQueueUs}, {.rate = 40000000}, 1000);
  EXPECT_TRUE(reasons_.empty());
}

TEST_F(CongestionChoiceTest, BbrIsGivenUpUnlessItIsClearlyBetter) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 22000000, .per_mille = 1}, 40);
  EXPECT_EQ(choice_.in_use(), "cubic");
  ASSERT_EQ(reasons_.size(), 2u);
  EXPECT_THAT(reasons_[1], HasSubstr("bbr is not better"));
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 22000000, .per_mille = 1}, 200);
  EXPECT_EQ(reasons_.size(), 2u) << "not tried again yet";
}

TEST_F(CongestionChoiceTest, BbrThatOverrunsQueuesMustBeFarFaster) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 27000000, .per_mille = 200}, 40);
  EXPECT_EQ(choice_.in_use(), "cubic");
  Send({.rate = 8000000, .per_mille = 10, .queued_us = kShortQueueUs},
       {.rate = 22000000, .per_mille = 330}, 400);
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CongestionChoiceTest, OneLowMeasurementOfBbrDoesNotDecide) {
  const Path cubic = {.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs};
  Send(cubic, {.rate = 10000000}, 6 + 4 + 6);
  ASSERT_EQ(choice_.in_use(), "bbr");
  Send(cubic, {.rate = 40000000}, 20);
  EXPECT_EQ(choice_.in_use(), "bbr");
  EXPECT_EQ(reasons_.size(), 1u);
}

TEST_F(CongestionChoiceTest, BbrThatRepeatsMuchIsQuestionedLater) {
  const Path lossy = {.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs};
  Send(lossy, {.rate = 40000000, .per_mille = 20}, 300);
  ASSERT_EQ(choice_.in_use(), "bbr");
  // Nothing is lost at random any more, and queues fill.
  Send({.rate = 40000000}, {.rate = 40000000, .per_mille = 20}, 100);
  EXPECT_EQ(choice_.in_use(), "cubic");
  ASSERT_EQ(reasons_.size(), 2u);
  EXPECT_THAT(reasons_[1], HasSubstr("bbr repeats much: 20 per mille"));
}

TEST_F(CongestionChoiceTest, LittleTrafficSaysNothing) {
  for (int i = 0; i < 100; ++i) {
    const CongestionChoice::Sample sample = {
        .us = Millis(100), .bytes = 10000, .bytes_repeated = 2000, .arrived = 10000};
    EXPECT_EQ(choice_.Add(sample, now_), "");
  }
}

class WithoutBbr : public CongestionChoiceTest {
 protected:
  WithoutBbr() : CongestionChoiceTest(/*offers_bbr=*/false) {}
};

TEST_F(WithoutBbr, CubicStays) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs}, {}, 100);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

}  // namespace
}  // namespace longhaul::peerd
