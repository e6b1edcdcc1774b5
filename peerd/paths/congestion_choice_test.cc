#include "peerd/paths/congestion_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
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
  explicit CongestionChoiceTest(std::string system_default = "bbr")
      : default_(std::move(system_default)) {}

  // Sends for so many seconds, in samples of half a second.
  void Send(const Path& with_default, const Path& with_other, int64_t seconds) {
    for (int64_t i = 0; i < 2 * seconds; ++i) {
      const Path& path = choice_.in_use() == default_ ? with_default : with_other;
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

  const std::string default_;
  CongestionChoice choice_{default_, CongestionChoice::OtherThan(default_)};
  Tick now_{Seconds(1000)};
  std::vector<std::string> reasons_;
};

TEST_F(CongestionChoiceTest, StaysWithADefaultThatRepeatsLittle) {
  Send({.per_mille = 5}, {.rate = 50000000}, 1000);
  EXPECT_EQ(choice_.in_use(), "bbr");
  EXPECT_TRUE(reasons_.empty());
}

TEST_F(CongestionChoiceTest, TakesTheOtherIfItCarriesAsMuchAndRepeatsLess) {
  Send({.per_mille = 140}, {.rate = 12000000, .per_mille = 2}, 3);
  EXPECT_EQ(choice_.in_use(), "cubic");
  Send({.per_mille = 140}, {.rate = 12000000, .per_mille = 2}, 1000);
  EXPECT_EQ(choice_.in_use(), "cubic");
  ASSERT_EQ(reasons_.size(), 1u);
  EXPECT_THAT(reasons_[0], HasSubstr("bbr repeats much: 140 per mille at 12500000 bytes/s"));
}

TEST_F(CongestionChoiceTest, GoesBackIfTheOtherCarriesClearlyLess) {
  Send({.per_mille = 20}, {.rate = 6000000, .per_mille = 14}, 26);
  EXPECT_EQ(choice_.in_use(), "bbr");
  ASSERT_EQ(reasons_.size(), 2u);
  EXPECT_THAT(reasons_[1], HasSubstr("cubic is not better"));
  Send({.per_mille = 20}, {.rate = 6000000, .per_mille = 14}, 270);
  EXPECT_EQ(reasons_.size(), 2u) << "not tried again yet";
  Send({.per_mille = 20}, {.rate = 6000000, .per_mille = 14}, 60);
  EXPECT_EQ(reasons_.size(), 4u) << "tried again after a while";
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CongestionChoiceTest, OneLowMeasurementDoesNotDecide) {
  Send({.per_mille = 140}, {.rate = 3000000, .per_mille = 2}, 2 + 4 + 6);
  ASSERT_EQ(choice_.in_use(), "cubic");
  Send({.per_mille = 140}, {.per_mille = 2}, 20);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, KeepsTheFasterOneThoughItRepeatsMore) {
  Send({.rate = 5000000, .per_mille = 20}, {.rate = 12000000, .per_mille = 50}, 20);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, WhatIsRepeatedCostsOtherHostsAsWell) {
  Send({.rate = 10000000, .per_mille = 190}, {.rate = 8000000, .per_mille = 20}, 20);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, StaysWithTheOtherIfBothAreAsGood) {
  Send({.per_mille = 20}, {.per_mille = 20}, 20);
  EXPECT_EQ(choice_.in_use(), "cubic");
  EXPECT_EQ(reasons_.size(), 1u);
}

TEST_F(CongestionChoiceTest, TakesASlowerOneThatRepeatsFewer) {
  Send({.per_mille = 70}, {.rate = 7000000, .per_mille = 13}, 30);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, ARateOfWhichMuchIsRepeatedIsNoMeasure) {
  Send({.rate = 13800000, .per_mille = 318}, {.rate = 2600000, .per_mille = 12}, 30);
  EXPECT_EQ(choice_.in_use(), "cubic");
  EXPECT_EQ(reasons_.size(), 1u);
}

TEST_F(CongestionChoiceTest, KeepsOneThatRepeatsFewerWhileOtherHostsMakeItSlow) {
  Send({.rate = 7400000, .per_mille = 62}, {.rate = 2850000, .per_mille = 17}, 30);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, GoesBackFromOneThatRepeatsFewerAndIsFarSlower) {
  Send({.per_mille = 20}, {.rate = 4000000, .per_mille = 2}, 30);
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CongestionChoiceTest, OneThatRepeatsFewerIsTriedAgainSoon) {
  // The other hosts of the op are slow while they change their controls.
  Send({.per_mille = 200}, {.rate = 1800000, .per_mille = 30}, 30);
  ASSERT_EQ(choice_.in_use(), "bbr");
  Send({.per_mille = 200}, {.rate = 11000000, .per_mille = 5}, 40);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, OneThatOverrunsQueuesTooIsTriedAgainSoon) {
  Send({.per_mille = 56}, {.rate = 6000000, .per_mille = 49}, 30);
  EXPECT_EQ(choice_.in_use(), "bbr") << "perhaps the other hosts filled the queues";
  ASSERT_EQ(reasons_.size(), 2u);
  Send({.per_mille = 56}, {.per_mille = 1}, 40);
  EXPECT_EQ(choice_.in_use(), "cubic");
  EXPECT_EQ(reasons_.size(), 3u);
}

TEST_F(CongestionChoiceTest, ASlowOneIsTriedLessAndLessOften) {
  // Trials begin after 2 s and take 16 s. Between them: 20, 40, 80, 160, 300, 300 s.
  Send({.per_mille = 200}, {.rate = 1000000, .per_mille = 30}, 1030);
  EXPECT_EQ(choice_.in_use(), "bbr");
  EXPECT_EQ(reasons_.size(), 14u);
}

TEST_F(CongestionChoiceTest, GoesBackFromOneThatRepeatsFewerAndLosesPacketsAtRandom) {
  Send({.rate = 20000000, .per_mille = 42},
       {.rate = 11000000, .per_mille = 10, .queued_us = kShortQueueUs, .lanes = 192}, 30);
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CongestionChoiceTest, OneThatSeemedToLosePacketsAtRandomIsTriedAgainLater) {
  Send({.rate = 20000000, .per_mille = 42},
       {.rate = 11000000, .per_mille = 10, .queued_us = kShortQueueUs, .lanes = 192}, 30);
  ASSERT_EQ(choice_.in_use(), "bbr");
  Send({.rate = 20000000, .per_mille = 42}, {.rate = 20000000}, 40);
  EXPECT_EQ(choice_.in_use(), "bbr") << "60 s have not passed";
  Send({.rate = 20000000, .per_mille = 42}, {.rate = 20000000}, 40);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, AWinnerStaysAfterOneMeasurementWithManyRepeatedBytes) {
  Send({.per_mille = 140}, {.per_mille = 2}, 400);
  ASSERT_EQ(choice_.in_use(), "cubic");
  Send({.per_mille = 140}, {.per_mille = 200}, 1);
  Send({.per_mille = 140}, {.per_mille = 2}, 20);
  EXPECT_EQ(reasons_.size(), 1u);
  Send({.per_mille = 140}, {.per_mille = 200}, 10);
  EXPECT_EQ(reasons_.size(), 2u) << "two measurements in a row";
}

TEST_F(CongestionChoiceTest, WhatRepeatsVeryMuchIsLeftSoon) {
  Send({.per_mille = 40}, {}, 3);
  EXPECT_EQ(choice_.in_use(), "bbr");
  Send({.per_mille = 140}, {}, 1);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, AWinnerThatHasBecomeSlowIsQuestioned) {
  Send({.per_mille = 140}, {.per_mille = 2}, 20);
  ASSERT_EQ(choice_.in_use(), "cubic");
  // Now packets are lost at random.
  Send({.rate = 12000000, .per_mille = 2}, {.rate = 3000000, .per_mille = 2}, 330);
  EXPECT_EQ(choice_.in_use(), "bbr");
  EXPECT_THAT(reasons_.at(1), HasSubstr("cubic has become slow"));
}

class CubicIsTheDefaultTest : public CongestionChoiceTest {
 protected:
  CubicIsTheDefaultTest() : CongestionChoiceTest("cubic") {}
};

TEST_F(CubicIsTheDefaultTest, BbrIsTakenWherePacketsAreLostAtRandom) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 40000000, .per_mille = 2}, 1000);
  EXPECT_EQ(choice_.in_use(), "bbr");
  ASSERT_EQ(reasons_.size(), 1u);
  EXPECT_THAT(reasons_[0],
              HasSubstr("cubic loses packets at random: 1 per mille at 20000000 bytes/s"));
}

TEST_F(CubicIsTheDefaultTest, FullQueuesAreNoReasonForBbr) {
  Send({.per_mille = 30}, {.rate = 40000000}, 1000);
  EXPECT_EQ(choice_.in_use(), "cubic");
  EXPECT_TRUE(reasons_.empty());
}

TEST_F(CubicIsTheDefaultTest, LossesInBurstsAreNoReasonForBbr) {
  // Of so many lanes at random losses, each would have 5 packets on the way, and not 40.
  Send({.rate = 20000000, .per_mille = 50, .queued_us = kShortQueueUs}, {.rate = 40000000}, 1000);
  EXPECT_EQ(choice_.in_use(), "cubic");
  EXPECT_TRUE(reasons_.empty());
  // Eight times as many lanes would.
  Send({.rate = 20000000, .per_mille = 50, .queued_us = kShortQueueUs, .lanes = 512},
       {.rate = 40000000}, 20);
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CubicIsTheDefaultTest, FewLossesAreNoReasonForBbr) {
  Send({.queued_us = kShortQueueUs}, {.rate = 40000000}, 1000);
  EXPECT_TRUE(reasons_.empty());
}

TEST_F(CubicIsTheDefaultTest, BbrIsGivenUpUnlessItIsClearlyBetter) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 22000000, .per_mille = 1}, 40);
  EXPECT_EQ(choice_.in_use(), "cubic");
  ASSERT_EQ(reasons_.size(), 2u);
  EXPECT_THAT(reasons_[1], HasSubstr("bbr is not better"));
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 22000000, .per_mille = 1}, 200);
  EXPECT_EQ(reasons_.size(), 2u) << "not tried again yet";
}

TEST_F(CubicIsTheDefaultTest, BbrThatOverrunsQueuesMustBeFarFaster) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs},
       {.rate = 27000000, .per_mille = 200}, 40);
  EXPECT_EQ(choice_.in_use(), "cubic");
  Send({.rate = 8000000, .per_mille = 10, .queued_us = kShortQueueUs},
       {.rate = 22000000, .per_mille = 330}, 400);
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CubicIsTheDefaultTest, BbrThatHasBecomeSlowIsQuestioned) {
  Send({.rate = 20000000, .per_mille = 1, .queued_us = kShortQueueUs}, {.rate = 40000000}, 100);
  ASSERT_EQ(choice_.in_use(), "bbr");
  Send({.rate = 30000000}, {.rate = 10000000}, 400);
  EXPECT_EQ(choice_.in_use(), "cubic");
}

TEST_F(CongestionChoiceTest, LittleTrafficSaysNothing) {
  for (int i = 0; i < 100; ++i) {
    const CongestionChoice::Sample sample = {
        .us = Millis(100), .bytes = 10000, .bytes_repeated = 2000};
    EXPECT_EQ(choice_.Add(sample, now_), "");
  }
  EXPECT_EQ(choice_.in_use(), "bbr");
}

TEST_F(CongestionChoiceTest, WithoutAnOtherControlTheDefaultStays) {
  for (const std::string other : {"", "bbr"}) {
    CongestionChoice choice("bbr", other);
    for (int i = 0; i < 100; ++i) {
      const CongestionChoice::Sample sample = {
          .us = Seconds(1), .bytes = 10000000, .bytes_repeated = 2000000};
      EXPECT_EQ(choice.Add(sample, now_), "");
    }
    EXPECT_EQ(choice.in_use(), "bbr");
  }
}

}  // namespace
}  // namespace longhaul::peerd
