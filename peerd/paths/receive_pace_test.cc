#include "peerd/paths/receive_pace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/tick.h"

namespace longhaul::peerd {
namespace {

constexpr int64_t kRttUs = Millis(160);
constexpr uint64_t kLongWaitUs = 45000;

class ReceivePaceTest : public ::testing::Test {
 protected:
  // The sender of each link (1, 2, ...) sends so many bytes a second, for some seconds.
  void Receive(const std::vector<uint64_t>& rates, int64_t seconds) {
    for (int64_t i = 0; i < 10 * seconds; ++i) {
      now_ = now_ + Millis(100);
      for (size_t link = 0; link < rates.size(); ++link) {
        pace_.OnTold(link + 1, {.wait_us = wait_us_, .repeated = repeated_[link], .tries = tries_});
        pace_.Received(link + 1, kRttUs, rates[link] / 10, now_);
      }
      if (const std::string why = pace_.Measure(now_); !why.empty()) reasons_.push_back(why);
    }
  }
  // An op, and the pause behind it.
  void Op(const std::vector<uint64_t>& rates, int64_t seconds) {
    Receive(rates, seconds);
    now_ = now_ + Millis(800);
  }

  ReceivePace pace_;
  Tick now_{Seconds(100)};
  uint64_t wait_us_ = kLongWaitUs;
  bool tries_ = false;
  std::vector<uint64_t> repeated_ = std::vector<uint64_t>(4);
  std::vector<std::string> reasons_;
};

TEST_F(ReceivePaceTest, WithoutQueuesThereIsNoLimit) {
  wait_us_ = 5000;
  for (int i = 0; i < 20; ++i) Op({1000000, 1000000, 1000000}, 5);
  EXPECT_EQ(pace_.rate(), 0u);
  EXPECT_EQ(pace_.RateOf(1, now_), 0u);
}

TEST_F(ReceivePaceTest, SendersGetPartsOfWhatArrivesAsTheySentBefore) {
  Op({2000000, 1000000, 1000000}, 5);
  Op({2000000, 1000000, 1000000}, 5);
  ASSERT_EQ(reasons_.size(), 1u);
  EXPECT_EQ(reasons_[0], "packets of all links wait");
  EXPECT_NEAR(static_cast<double>(pace_.rate()), 4e6, 0.3e6);
  Receive({2000000, 1000000, 1000000}, 1);
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(1, now_)), 2e6, 0.2e6);
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(2, now_)), 1e6, 0.1e6);
  Receive({2000000, 1000000}, 1);
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(1, now_)), 2.6e6, 0.3e6) << "the third one is done";
}

TEST_F(ReceivePaceTest, ASingleSenderIsNotLimited) {
  for (int i = 0; i < 10; ++i) Op({4000000}, 5);
  EXPECT_EQ(pace_.rate(), 0u);
}

TEST_F(ReceivePaceTest, KnowsWhetherTheQueueWasFull) {
  EXPECT_FALSE(pace_.PopFull().has_value());
  wait_us_ = 5000;
  for (int i = 0; i < 2; ++i) Op({1000000, 1000000}, 5);
  EXPECT_EQ(pace_.PopFull(), false);
  repeated_ = {500000, 0};
  Op({1000000, 1000000}, 5);
  EXPECT_EQ(pace_.PopFull(), true) << "the queue may be too short for packets to wait in it";
  Op({1000000, 1000000}, 5);
  EXPECT_EQ(pace_.PopFull(), false);
  tries_ = true;
  wait_us_ = kLongWaitUs;
  Op({1000000, 1000000}, 5);
  EXPECT_EQ(pace_.PopFull(), true);
}

TEST_F(ReceivePaceTest, OfASingleSenderTheQueueMayBeFull) {
  wait_us_ = 0;
  for (int i = 0; i < 2; ++i) Op({4000000}, 5);
  EXPECT_EQ(pace_.PopFull(), true) << "a single sender cannot tell where its packets wait";
}

TEST_F(ReceivePaceTest, ASenderThatTriesLanesHasNoLimit) {
  Op({1000000, 1000000}, 5);
  Op({1000000, 1000000}, 5);
  ASSERT_NE(pace_.rate(), 0u);
  pace_.OnTold(1, {.wait_us = kLongWaitUs, .tries = true});
  EXPECT_EQ(pace_.RateOf(1, now_), 0u);
  EXPECT_NE(pace_.RateOf(2, now_), 0u);
  tries_ = true;
  Receive({500000, 500000}, 1);
  EXPECT_NEAR(static_cast<double>(pace_.rate()), 2e6, 0.3e6) << "nothing is judged meanwhile";
  tries_ = false;
  Receive({1000000, 1000000}, 1);
  EXPECT_NE(pace_.RateOf(1, now_), 0u);
}

TEST_F(ReceivePaceTest, TheLimitFallsWhileMuchIsRepeated) {
  Op({1000000, 1000000}, 5);
  Op({1000000, 1000000}, 5);
  const uint64_t before = pace_.rate();
  ASSERT_NE(before, 0u);
  for (int i = 0; i < 5; ++i) {
    repeated_[0] += 200000;
    Receive({1000000, 1000000}, 1);
  }
  EXPECT_LT(pace_.rate(), before);
}

TEST_F(ReceivePaceTest, WhatASenderTellsIsBounded) {
  wait_us_ = UINT64_MAX;
  repeated_[1] = UINT64_MAX;
  Op({1000000, 1000000}, 5);
  repeated_[1] = 0;
  Op({1000000, 1000000}, 5);
  EXPECT_NEAR(static_cast<double>(pace_.rate()), 2e6, 0.3e6);
  pace_.Remove(1);
  pace_.Remove(2);
  pace_.Remove(3);
  Receive({0, 0}, 1);
}

}  // namespace
}  // namespace longhaul::peerd
