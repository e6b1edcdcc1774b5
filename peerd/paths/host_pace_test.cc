#include "peerd/paths/host_pace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/tick.h"

namespace longhaul::peerd {
namespace {

constexpr int64_t kRttUs = Millis(40);
constexpr uint64_t kMs = 1000;

// A host whose links share an access link with a queue of 50 ms. TCP sends a tenth more than the
// access link carries if nothing limits it. What does not fit into the queue is sent again.
class HostPaceTest : public ::testing::Test {
 protected:
  // An op: each link sends so many bytes.
  void Op(const std::vector<uint64_t>& bytes_of_links, bool settled = true) {
    now_ = now_ + Seconds(1);
    std::vector<uint64_t> left = bytes_of_links;
    for (int64_t ms = 0; std::any_of(left.begin(), left.end(), [](uint64_t b) { return b > 0; });
         ++ms) {
      ASSERT_LT(ms, 60000) << "the op does not end";
      now_ = now_ + Millis(1);
      SendForAMs(&left);
      if (ms % 100 == 99) Look(settled);
    }
  }
  void Ops(int count, const std::vector<uint64_t>& bytes_of_links) {
    for (int i = 0; i < count; ++i) Op(bytes_of_links);
  }

  void SendForAMs(std::vector<uint64_t>* left) {
    uint64_t coming = 0;
    std::vector<uint64_t> sent(left->size());
    const auto busy = static_cast<uint64_t>(
        std::count_if(left->begin(), left->end(), [](uint64_t bytes) { return bytes > 0; }));
    for (size_t i = 0; i < left->size(); ++i) {
      if ((*left)[i] == 0) continue;
      uint64_t rate = tcp_ != 0 ? tcp_ : access_ * 11 / 10 / busy;
      if (const uint64_t limit = pace_.RateOf(i, now_); limit != 0) rate = std::min(rate, limit);
      if (i == held_) rate = std::min(rate, held_rate_);
      sent[i] = std::min(rate / kMs, (*left)[i]);
      (*left)[i] -= sent[i];
      coming += sent[i];
      pace_.Sent(i, kRttUs, sent[i], now_);
      if ((*left)[i] == 0) pace_.QueueEmptied(i);
    }
    const uint64_t room = access_ / kMs * 50;
    queue_ += coming;
    const uint64_t gone = std::min(queue_, access_ / kMs);
    queue_ -= gone;
    const uint64_t lost = queue_ > room ? queue_ - room : 0;
    queue_ -= lost;
    repeated_ += lost;
    sent_ += coming;
    const uint64_t us = queue_ * 1000000 / access_ + foreign_wait_us_;
    for (size_t i = 0; i < left->size(); ++i) {
      if (coming == 0) break;
      const uint64_t arrived = gone * sent[i] / coming;
      const uint64_t queued_us = arrived * (us + (i == slow_receiver_ ? Millis(50) : 0));
      pace_.Arrived(i, arrived, {.shared_us = own_queues_ ? 0 : queued_us, .any_us = queued_us});
    }
  }

  void Look(bool settled) {
    pace_.Repeated(sent_, repeated_ + sent_ * lost_elsewhere_ / 1000);
    all_sent_ += sent_;
    all_repeated_ += repeated_;
    sent_ = repeated_ = 0;
    pace_.Measure(settled, now_);
  }

  double Rate() const { return static_cast<double>(pace_.rate()); }

  HostPace pace_;
  Tick now_{Seconds(100)};
  uint64_t access_ = 12500000;  // bytes a second
  uint64_t tcp_ = 0;            // what TCP sends on each link; 0: as much as it can
  uint64_t foreign_wait_us_ = 0;
  bool own_queues_ = false;          // packets wait in queues of their connections
  uint64_t lost_elsewhere_ = 0;      // per mille of what is sent, for instance at a slow receiver
  size_t slow_receiver_ = SIZE_MAX;  // packets to this one also wait elsewhere
  size_t held_ = SIZE_MAX;           // this link carries only held_rate_ bytes a second
  uint64_t held_rate_ = 0;
  uint64_t queue_ = 0;
  uint64_t sent_ = 0;
  uint64_t repeated_ = 0;
  uint64_t all_sent_ = 0;
  uint64_t all_repeated_ = 0;
};

const std::vector<uint64_t> kEqual(3, 8 << 20);

TEST_F(HostPaceTest, WhereTheQueueIsFullItLimitsWhatIsSentToWhatArrives) {
  Ops(4, kEqual);
  EXPECT_NEAR(Rate(), 12.5e6, 1e6);
  all_sent_ = all_repeated_ = 0;
  Ops(20, kEqual);
  EXPECT_NEAR(Rate(), 12.5e6, 1e6);
  EXPECT_LT(all_repeated_ * 1000, all_sent_ * 10) << "without a limit it was 9 %";
}

TEST_F(HostPaceTest, SaysWhyThereIsALimit) {
  Op(kEqual);
  std::string why;
  now_ = now_ + Seconds(1);
  std::vector<uint64_t> left = kEqual;
  for (int ms = 0; ms < 2500 && why.empty(); ++ms) {
    now_ = now_ + Millis(1);
    SendForAMs(&left);
    if (ms % 100 == 99) why = pace_.Measure(true, now_);
  }
  EXPECT_EQ(why, "packets of all links wait");
}

TEST_F(HostPaceTest, NothingIsLimitedWhereQueuesAreShort) {
  tcp_ = 3000000;
  Ops(10, kEqual);
  EXPECT_EQ(pace_.rate(), 0u);
  EXPECT_EQ(pace_.RateOf(0, now_), 0u);
}

TEST_F(HostPaceTest, NothingIsLimitedIfPacketsWaitOnTheWayToOnePeerOnly) {
  tcp_ = 3000000;
  slow_receiver_ = 1;
  Ops(10, kEqual);
  EXPECT_EQ(pace_.rate(), 0u);
}

TEST_F(HostPaceTest, NothingIsLimitedIfTheNetworkLimitsEachConnection) {
  own_queues_ = true;
  Ops(10, kEqual);
  EXPECT_EQ(pace_.rate(), 0u);
  EXPECT_GT(all_repeated_ * 1000, all_sent_ * 5);
  EXPECT_EQ(pace_.PopFull(), false) << "what is repeated was lost in queues of connections";
}

TEST_F(HostPaceTest, NothingIsLimitedWhileOtherNumbersOfLanesAreTried) {
  for (int i = 0; i < 4; ++i) Op(kEqual, /*settled=*/false);
  EXPECT_EQ(pace_.rate(), 0u);
  Ops(4, kEqual);
  EXPECT_NE(pace_.rate(), 0u);
  Op(kEqual, /*settled=*/false);
  EXPECT_EQ(pace_.rate(), 0u);
}

TEST_F(HostPaceTest, TheLimitFollowsAnAccessLinkThatBecomesFaster) {
  Ops(4, kEqual);
  access_ *= 2;
  Ops(8, kEqual);
  EXPECT_NEAR(Rate(), 25e6, 2.5e6);
}

TEST_F(HostPaceTest, TheLimitDoesNotRiseWhileAQueueFills) {
  Ops(6, kEqual);
  const double before = Rate();
  access_ *= 2;
  foreign_wait_us_ = Millis(25);
  Ops(8, kEqual);
  EXPECT_EQ(Rate(), before);
  foreign_wait_us_ = 0;
  Ops(8, kEqual);
  EXPECT_GT(Rate(), before);
}

TEST_F(HostPaceTest, TheLimitRisesThoughOthersHoldTheHostBackNowAndThen) {
  Ops(4, kEqual);
  access_ *= 2;
  for (int i = 0; i < 12; ++i) {
    tcp_ = 0;
    Op({7 << 20, 7 << 20, 7 << 20});
    tcp_ = 1500000;
    Op({1 << 20, 1 << 20, 1 << 20});
  }
  EXPECT_GT(Rate(), 20e6) << "no op had four measurements at the limit";
}

TEST_F(HostPaceTest, TheLimitFollowsAnAccessLinkThatBecomesSlower) {
  Ops(4, kEqual);
  access_ /= 2;
  Ops(2, kEqual);
  EXPECT_NEAR(Rate(), 6.25e6, 0.7e6);
  all_sent_ = all_repeated_ = 0;
  Ops(12, kEqual);
  EXPECT_NEAR(Rate(), 6.25e6, 0.7e6);
  EXPECT_LT(all_repeated_ * 1000, all_sent_ * 10);
}

TEST_F(HostPaceTest, TheLimitDoesNotFallTwiceAtOnce) {
  Ops(4, kEqual);
  access_ /= 2;
  Ops(2, kEqual);
  access_ /= 2;
  Ops(1, kEqual);
  EXPECT_GT(Rate(), 5e6) << "packets may wait elsewhere, and the limit rises slowly";
  Ops(10, kEqual);
  EXPECT_NEAR(Rate(), 3.1e6, 0.4e6);
}

TEST_F(HostPaceTest, OfOneLinkALongQueueIsNoSlowerAccessLink) {
  Ops(4, kEqual);
  pace_.Remove(1);
  pace_.Remove(2);
  access_ /= 2;
  Op({20 << 20});
  EXPECT_GT(Rate(), 11e6) << "packets may wait at the receiver";
}

TEST_F(HostPaceTest, TheLimitStaysIfLessArrivesThoughPacketsDoNotWait) {
  Ops(6, kEqual);
  const double before = Rate();
  tcp_ = 2000000;
  Ops(8, kEqual);
  EXPECT_GE(Rate(), before) << "the access link is as fast as before";
}

TEST_F(HostPaceTest, TheLimitStaysWhileOthersHoldTheHostBack) {
  Ops(6, kEqual);
  tcp_ = 1500000;
  lost_elsewhere_ = 10;
  Ops(22, kEqual);
  EXPECT_GT(Rate(), 11e6);
}

TEST_F(HostPaceTest, KnowsWhetherTheQueueWasFull) {
  EXPECT_FALSE(pace_.PopFull().has_value());
  tcp_ = 3000000;
  Ops(2, kEqual);
  EXPECT_EQ(pace_.PopFull(), false);
  EXPECT_FALSE(pace_.PopFull().has_value()) << "nothing was measured since";
  tcp_ = 0;
  Op(kEqual);
  EXPECT_EQ(pace_.PopFull(), true);
  Ops(4, kEqual);
  ASSERT_NE(pace_.rate(), 0u);
  pace_.PopFull();
  Op(kEqual);
  EXPECT_EQ(pace_.PopFull(), true) << "the limit was reached";
  tcp_ = 3000000;
  Op(kEqual);
  EXPECT_EQ(pace_.PopFull(), false);
}

TEST_F(HostPaceTest, ManyLinksAreJudgedLikeFew) {
  const std::vector<uint64_t> many(40, 1 << 20);
  tcp_ = access_ / 80;
  Ops(10, many);
  EXPECT_EQ(pace_.rate(), 0u) << "the access link is half full";
  tcp_ = 0;
  Ops(6, many);
  EXPECT_NEAR(Rate(), 12.5e6, 1e6);
}

TEST_F(HostPaceTest, OneLinkAloneIsLimitedToo) {
  Ops(20, {24 << 20});
  EXPECT_NEAR(Rate(), 12.5e6, 1e6);
}

TEST_F(HostPaceTest, ALongQueueNowAndThenIsNoReason) {
  for (int i = 0; i < 20; ++i) {
    tcp_ = 3000000;
    Op(kEqual);
    tcp_ = 0;
    Op({4 << 20, 4 << 20, 4 << 20});
  }
  EXPECT_EQ(pace_.rate(), 0u);
}

TEST_F(HostPaceTest, SlowLanesThatTakeSegmentsLateMakeNoPauses) {
  Ops(6, kEqual);
  ASSERT_NE(pace_.rate(), 0u);
  for (int i = 0; i < 40; ++i) {
    now_ = now_ + 4 * kRttUs;
    for (uint64_t link = 0; link < 3; ++link) pace_.Sent(link, kRttUs, 1000, now_);
    pace_.Measure(true, now_);
  }
  EXPECT_NE(pace_.rate(), 0u) << "40 short ops would end the limit";
}

TEST_F(HostPaceTest, LinksGetPartsInProportionToWhatTheySentBefore) {
  const std::vector<uint64_t> unequal{12 << 20, 12 << 20, 6 << 20};
  Ops(6, unequal);
  ASSERT_NE(pace_.rate(), 0u);
  now_ = now_ + Seconds(1);
  for (uint64_t link = 0; link < 3; ++link) pace_.Sent(link, kRttUs, 100000, now_);
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(0, now_)), Rate() * 0.4, 1);
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(2, now_)), Rate() * 0.2, 1);
  // A link that has nothing to send leaves its part to the others, and so does one that is stuck.
  pace_.QueueEmptied(1);
  now_ = now_ + kRttUs;
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(0, now_)), Rate() * 2 / 3, 1);
  pace_.Sent(1, kRttUs, 1000, now_);
  for (int i = 0; i < 8; ++i) {
    now_ = now_ + kRttUs;
    pace_.Sent(0, kRttUs, 1000, now_);
  }
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(0, now_)), Rate(), 1);
  pace_.Remove(2);
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(0, now_)), Rate(), 1);
}

TEST_F(HostPaceTest, ThePartAtTheEndOfAnOpDoesNotDecideWhatLinksGet) {
  const std::vector<uint64_t> unequal{24 << 20, 24 << 20, 12 << 20};
  const auto part = [&](uint64_t link) {
    now_ = now_ + Seconds(1);
    for (uint64_t each = 0; each < 3; ++each) pace_.Sent(each, kRttUs, 1000, now_);
    return static_cast<double>(pace_.RateOf(link, now_)) / Rate();
  };
  Ops(6, unequal);
  ASSERT_NE(pace_.rate(), 0u);
  Op({0, 0, 4 << 20});
  EXPECT_NEAR(part(0), 18.0 / 49, 0.01) << "three quarters of 24 MiB";
  EXPECT_NEAR(part(2), (9.0 + 4) / 49, 0.01);
  // Another op of the size decides.
  Op({12 << 20, 24 << 20, 24 << 20});
  EXPECT_NEAR(part(0), 0.2, 0.01);
}

TEST_F(HostPaceTest, ALongOpIsOneBurst) {
  for (int i = 0; i < 3; ++i) {
    // It takes 20 s: at first all links send, at the end only one.
    now_ = now_ + Seconds(1);
    std::vector<uint64_t> left{60 << 20, 60 << 20, 120 << 20};
    for (int64_t ms = 0; left != std::vector<uint64_t>(3); ++ms) {
      now_ = now_ + Millis(1);
      SendForAMs(&left);
      if (ms % 100 == 99) Look(true);
    }
  }
  ASSERT_NE(pace_.rate(), 0u);
  now_ = now_ + Seconds(1);
  for (uint64_t each = 0; each < 3; ++each) pace_.Sent(each, kRttUs, 1000, now_);
  EXPECT_NEAR(static_cast<double>(pace_.RateOf(0, now_)) / Rate(), 0.25, 0.01);
}

TEST_F(HostPaceTest, WhatALinkDoesNotUseTheOthersGet) {
  Ops(6, kEqual);
  ASSERT_NE(pace_.rate(), 0u);
  const auto part = [&](uint64_t link) {
    return static_cast<double>(pace_.RateOf(link, now_)) / Rate();
  };
  held_ = 0;
  held_rate_ = 1250000;
  now_ = now_ + Seconds(1);
  std::vector<uint64_t> left(3, 16 << 20);
  const auto send = [&](int64_t us) {
    for (int64_t ms = 0; ms < us / Millis(1); ++ms) {
      now_ = now_ + Millis(1);
      SendForAMs(&left);
      if (ms % 100 == 99) Look(true);
    }
  };
  send(Millis(100));
  EXPECT_NEAR(part(1), 1.0 / 3, 0.01);
  send(Millis(1100));
  EXPECT_NEAR(part(1), (1 - 0.125) / 2, 0.03);
  EXPECT_NEAR(part(2), (1 - 0.125) / 2, 0.03);
  EXPECT_NEAR(part(0), 1.0 / 3, 0.01) << "its part, if nothing holds it";
  held_ = SIZE_MAX;
  send(Millis(1200));
  EXPECT_NEAR(part(1), 1.0 / 3, 0.03);
}

TEST_F(HostPaceTest, ALinkThatSentNearlyNothingGetsSomething) {
  const std::vector<uint64_t> unequal{12 << 20, 12 << 20, 2000};
  Ops(6, unequal);
  ASSERT_NE(pace_.rate(), 0u);
  now_ = now_ + Seconds(1);
  for (uint64_t link = 0; link < 3; ++link) pace_.Sent(link, kRttUs, 100000, now_);
  EXPECT_GT(static_cast<double>(pace_.RateOf(2, now_)), Rate() / 20);
  EXPECT_GT(static_cast<double>(pace_.RateOf(7, now_)), 0) << "of a link that is not known";
}

}  // namespace
}  // namespace longhaul::peerd
