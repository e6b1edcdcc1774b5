#include "peerd/paths/lane_count.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/tick.h"

namespace longhaul::peerd {
namespace {

constexpr int64_t kRttUs = Millis(80);

// The rate of a path, of each of its connections, and of what there is to send: bytes a
// millisecond.
struct Path {
  uint64_t rate = 0;
  uint64_t lane_rate = 0;
  uint64_t supply = UINT64_MAX;
};

class LaneCountTest : public ::testing::Test {
 protected:
  void Send(LaneCount* count, const Path& path, int64_t ms) {
    for (; ms > 0; --ms) {
      now_ = now_ + Millis(1);
      const uint64_t carried = std::min(path.rate, count->lanes() * path.lane_rate);
      if (path.supply < carried) count->QueueEmptied();
      const uint64_t bytes = std::min(carried, path.supply);
      if (queued_us_ >= 0) count->Arrived(bytes, static_cast<uint64_t>(queued_us_));
      changes_ += count->Sent(bytes, now_);
      most_ = std::max(most_, count->lanes());
    }
  }

  void Pause(LaneCount* count, int64_t us) {
    count->QueueEmptied();
    now_ = now_ + us;
  }

  Tick now_{Seconds(100)};
  int64_t queued_us_ = -1;  // how long packets wait in queues; -1: not known
  int changes_ = 0;
  uint32_t most_ = 0;
};

TEST_F(LaneCountTest, BeginsWithMoreWhereRoundTripsAreLonger) {
  EXPECT_EQ(LaneCount::First(0), 4u);
  EXPECT_EQ(LaneCount::First(Millis(20)), 8u);
  EXPECT_EQ(LaneCount::First(Millis(80)), 32u);
  EXPECT_EQ(LaneCount::First(Millis(81)), 32u);
  EXPECT_EQ(LaneCount::First(Millis(100)), 64u);
  EXPECT_EQ(LaneCount::First(Seconds(10)), 64u);
}

TEST_F(LaneCountTest, GrowsWhileMoreLanesCarryMoreAndGoesBackFromThoseThatDoNot) {
  LaneCount count(16, 256, kRttUs);
  EXPECT_EQ(count.lanes(), 16u);
  Send(&count, {60000, 3000}, 10000);
  EXPECT_EQ(count.lanes(), 32u) << "20 are enough";
  EXPECT_EQ(most_, 64u) << "tried";
  EXPECT_EQ(changes_, 3) << "32, 64, and back";
  EXPECT_TRUE(count.found());
  EXPECT_EQ(count.rate(), 60000000u);
}

TEST_F(LaneCountTest, StaysWhereMoreDoNotHelpAndTriesThemAgainNowAndThen) {
  LaneCount count(16, 256, kRttUs);
  EXPECT_FALSE(count.found());
  Send(&count, {60000, 60000}, 300000);
  EXPECT_EQ(count.lanes(), 16u);
  EXPECT_EQ(changes_, 2);
  EXPECT_TRUE(count.found());
  for (int ms = 0; ms < 10000; ++ms) {
    Send(&count, {60000, 60000}, 1);
    EXPECT_TRUE(count.found()) << "also while it tries again";
  }
  EXPECT_EQ(count.lanes(), 16u);
  EXPECT_EQ(changes_, 4);
}

TEST_F(LaneCountTest, NeverUsesMoreThanTheMost) {
  LaneCount count(16, 100, kRttUs);
  Send(&count, {1000000, 1000}, 20000);
  EXPECT_EQ(count.lanes(), 64u);
  EXPECT_TRUE(count.found()) << "there are no more";
  LaneCount all(16, 256, kRttUs);
  Send(&all, {1000000, 1000}, 20000);
  EXPECT_EQ(all.lanes(), 256u);
  EXPECT_EQ(changes_, 2 + 4);
  LaneCount one(1, 1, kRttUs);
  Send(&one, {1000000, 1000}, 20000);
  EXPECT_EQ(one.lanes(), 1u);
}

TEST_F(LaneCountTest, TriesAgainWhenThePathHasChanged) {
  LaneCount count(16, 256, kRttUs);
  Send(&count, {60000, 3000}, 10000);
  ASSERT_EQ(count.lanes(), 32u);
  Send(&count, {50000, 3000}, 10000);
  EXPECT_EQ(changes_, 3) << "a little less is no other path";
  EXPECT_TRUE(count.found());
  // Each lane carries less, because packets are lost.
  for (int ms = 0; ms < 10000 && count.found(); ++ms) Send(&count, {50000, 600}, 1);
  EXPECT_FALSE(count.found());
  EXPECT_EQ(count.lanes(), 64u) << "tried";
  Send(&count, {50000, 600}, 20000);
  EXPECT_EQ(count.lanes(), 128u) << "84 are enough";
  EXPECT_TRUE(count.found());
}

TEST_F(LaneCountTest, WhatFallsByItselfIsNotTakenForAnEffectOfMoreLanes) {
  LaneCount count(32, 256, kRttUs);
  // Packets begin to be lost: within seconds each connection falls to a quarter of its rate.
  for (uint64_t rate = 1800; rate > 450; rate -= 100) Send(&count, {60000, rate}, 640);
  Send(&count, {60000, 450}, 30000);
  EXPECT_EQ(count.lanes(), 128u) << "134 would be enough";
}

TEST_F(LaneCountTest, WhatGrowsByItselfIsNotTakenForAnEffectOfMoreLanes) {
  LaneCount count(32, 256, kRttUs);
  for (uint64_t rate = 20000; rate < 60000; rate += 10000) Send(&count, {rate, 60000}, 640);
  Send(&count, {60000, 60000}, 30000);
  EXPECT_EQ(count.lanes(), 32u);
  EXPECT_EQ(most_, 64u);
}

TEST_F(LaneCountTest, OfAnUnsteadyPathTheLastOfSomeMeasurementsCounts) {
  LaneCount count(16, 64, kRttUs);
  for (int i = 0; i < 40; ++i) Send(&count, {uint64_t{1000000}, i % 2 == 0 ? 3000u : 2000u}, 640);
  EXPECT_EQ(count.lanes(), 64u);
}

TEST_F(LaneCountTest, WhileSegmentsWaitForSlowLanesThereIsNoPause) {
  LaneCount count(16, 16, kRttUs);
  for (int i = 0; i < 20; ++i) {
    now_ = now_ + 3 * kRttUs;
    changes_ += count.Sent(24000, now_);
  }
  EXPECT_EQ(count.rate(), 100000u);
}

TEST_F(LaneCountTest, TriesNothingWhileThereIsLittleToSend) {
  LaneCount count(16, 256, kRttUs);
  Send(&count, {60000, 3000, 40000}, 60000);
  EXPECT_EQ(changes_, 0);
}

TEST_F(LaneCountTest, KeepsMoreThatTakeAllThereIsWhenFewerDidNot) {
  LaneCount count(16, 256, kRttUs);
  // 16 lanes carry 48000, which is 4 percent less than the neighbour in the ring sends.
  Send(&count, {60000, 3000, 50000}, 60000);
  EXPECT_EQ(count.lanes(), 32u);
  EXPECT_EQ(changes_, 1);
}

TEST_F(LaneCountTest, GrowsByWhatItTakesWhileItsNeighbourIsSlower) {
  LaneCount count(16, 256, kRttUs);
  Send(&count, {60000, 1000}, 1700);
  ASSERT_EQ(count.lanes(), 32u);
  // The other peers of the ring still have 16 lanes. So this one is ahead of them in part of each
  // op.
  for (int i = 0; i < 20; ++i) {
    Send(&count, {60000, 1000}, 800);
    Send(&count, {60000, 1000, 16000}, 800);
    Pause(&count, Millis(200));
  }
  EXPECT_GE(count.lanes(), 64u);
}

TEST_F(LaneCountTest, GoesBackFromMoreAlsoIfItsNeighbourIsSlowerForAPart) {
  LaneCount count(32, 256, kRttUs);
  for (int i = 0; i < 20; ++i) {
    Send(&count, {60000, 3000}, 1200);
    Send(&count, {60000, 3000, 30000}, 400);
    Pause(&count, Millis(200));
  }
  EXPECT_EQ(count.lanes(), 32u);
  EXPECT_EQ(most_, 64u);
}

TEST_F(LaneCountTest, TriesNoMoreWherePacketsWaitInQueuesOfThePath) {
  LaneCount count(16, 256, kRttUs);
  queued_us_ = Millis(30);
  Send(&count, {30000, 3000}, 10000);
  EXPECT_EQ(changes_, 0);
  EXPECT_TRUE(count.found());
  // Each lane begins to lose packets, and the queues run empty.
  queued_us_ = Millis(3);
  Send(&count, {30000, 1000}, 10000);
  EXPECT_EQ(count.lanes(), 32u);
}

TEST_F(LaneCountTest, KeepsToWhatItKnowsOfQueuesWhileNothingIsReported) {
  LaneCount count(16, 256, kRttUs);
  queued_us_ = Millis(30);
  Send(&count, {30000, 3000}, 2000);
  queued_us_ = -1;
  Send(&count, {30000, 1500}, 10000);
  EXPECT_EQ(changes_, 0);
}

TEST_F(LaneCountTest, ALinkThatBecameMuchSlowerKeepsMoreThatHelp) {
  LaneCount count(16, 256, kRttUs);
  Send(&count, {30000, 30000}, 10000);
  ASSERT_EQ(count.lanes(), 16u);
  // Each lane begins to lose packets, and all together carry an eighth of before.
  Send(&count, {30000, 230}, 60000);
  EXPECT_EQ(count.lanes(), 128u) << "131 would be enough";
}

TEST_F(LaneCountTest, GoesBackFromMoreWithWhichOpsTakeLonger) {
  LaneCount count(16, 256, kRttUs);
  for (int i = 0; i < 40; ++i) {
    const bool more = count.lanes() > 16;
    Send(&count, {60000, 3000}, more ? 640 : 800);
    Send(&count, {60000, 3000, 100}, more ? 800 : 100);
  }
  EXPECT_EQ(count.lanes(), 16u) << "32 carry a quarter more, until the op waits for a slow one";
  EXPECT_EQ(most_, 32u);
  EXPECT_TRUE(count.found());
}

TEST_F(LaneCountTest, GoesBackFromMoreThatTakeAllAtOnceIfOpsTakeLonger) {
  LaneCount count(16, 256, kRttUs);
  for (int i = 0; i < 40; ++i) {
    const bool more = count.lanes() > 16;
    if (!more) Send(&count, {60000, 3000}, 800);
    if (more) changes_ += count.Sent(38400000, now_ = now_ + Millis(1));
    Send(&count, {60000, 3000, 100}, more ? 1400 : 100);
  }
  EXPECT_EQ(count.lanes(), 16u);
  EXPECT_EQ(most_, 32u);
}

TEST_F(LaneCountTest, OfALongBurstTheBeginningIsLeftOut) {
  LaneCount count(16, 16, kRttUs);
  for (int i = 0; i < 20; ++i) {
    changes_ += count.Sent(50000000, now_);  // the kernel takes more than the path
    Send(&count, {60000, 3000}, 800);
    Pause(&count, Millis(200));
  }
  EXPECT_EQ(count.rate(), 48000000u);
  EXPECT_EQ(changes_, 0);
}

TEST_F(LaneCountTest, ShortBurstsTogetherAreOneMeasurement) {
  // The length of each burst in tenths of a round trip. The longest is too short for a long burst.
  for (const int64_t tenths : {10, 20, 30, 45}) {
    LaneCount count(16, 256, kRttUs);
    changes_ = 0;
    for (int i = 0; i < 100; ++i) {
      Send(&count, {60000, 3000}, tenths * kRttUs / 10 / Millis(1));
      Pause(&count, Millis(200));
    }
    EXPECT_EQ(count.lanes(), 32u) << tenths << ": 20 are enough";
    EXPECT_EQ(changes_, 3) << "32, 64, and back";
    EXPECT_TRUE(count.found());
  }
}

TEST_F(LaneCountTest, ShortBurstsGetMoreLanesWhereConnectionsBeginSlowly) {
  // After a pause each connection sends ten packets in the first round trip, and twice as many in
  // each following one.
  LaneCount count(16, 256, kRttUs);
  for (int i = 0; i < 100; ++i) {
    int64_t left = 6000000 - count.lanes() * int64_t{32 << 10};
    now_ = now_ + Millis(1);
    changes_ +=
        count.Sent(count.lanes() * uint64_t{32 << 10}, now_);  // taken by the kernel, not sent yet
    for (int64_t ms = 0; left > 0; ++ms) {
      const uint64_t window = uint64_t{14600} << (ms / (kRttUs / Millis(1)));
      const uint64_t carried = std::min<uint64_t>(
          std::min<uint64_t>(count.lanes() * window / (kRttUs / Millis(1)), 62500), left);
      now_ = now_ + Millis(1);
      changes_ += count.Sent(carried, now_);
      left -= static_cast<int64_t>(carried);
    }
    Pause(&count, Millis(400));
  }
  EXPECT_EQ(count.lanes(), 64u);
  EXPECT_TRUE(count.found());
}

TEST_F(LaneCountTest, BurstsThatTheKernelTakesAtOnceSayNothing) {
  LaneCount count(16, 256, kRttUs);
  for (int i = 0; i < 1000; ++i) {
    changes_ += count.Sent(1000000, now_);
    Pause(&count, Millis(200));
  }
  EXPECT_EQ(changes_, 0);
  EXPECT_EQ(count.rate(), 0u);
}

TEST_F(LaneCountTest, ShortBurstsThatWaitForTheirNeighbourTryNothing) {
  LaneCount count(16, 256, kRttUs);
  for (int i = 0; i < 100; ++i) {
    Send(&count, {60000, 3000, 20000}, 200);
    Pause(&count, Millis(200));
  }
  EXPECT_EQ(changes_, 0);
}

TEST_F(LaneCountTest, OpsThatBecomeShorterOrLongerAreMeasuredAnew) {
  LaneCount count(16, 256, kRttUs);
  Send(&count, {60000, 3000}, 1700);
  ASSERT_EQ(count.lanes(), 32u) << "tried";
  for (int i = 0; i < 60; ++i) {
    Pause(&count, Millis(200));
    Send(&count, {60000, 60000}, 200);
  }
  EXPECT_EQ(count.lanes(), 16u) << "of short ones 16 carry as much";
  EXPECT_TRUE(count.found());
  Pause(&count, Millis(200));
  Send(&count, {60000, 1000}, 20000);
  EXPECT_EQ(count.lanes(), 64u);
}

TEST_F(LaneCountTest, BeginsWithMoreWhereAProbeShowedThatThePathIsFast) {
  LaneCount count(32, 256, kRttUs);
  EXPECT_FALSE(count.Probed(10000000)) << "never fewer: its connections may have lost packets";
  EXPECT_EQ(count.lanes(), 32u);
  EXPECT_TRUE(count.Probed(100000000));
  EXPECT_EQ(count.lanes(), 64u);
  EXPECT_FALSE(count.Probed(uint64_t{1} << 40)) << "as many as it begins with on the longest way";
  // Its own measurement counts more than a probe.
  LaneCount measured(32, 256, kRttUs);
  Send(&measured, {60000, 60000}, 10000);
  ASSERT_EQ(measured.lanes(), 32u);
  EXPECT_FALSE(measured.Probed(100000000));
  EXPECT_EQ(measured.lanes(), 32u);
}

TEST_F(LaneCountTest, BurstsTogetherAreOneMeasurement) {
  LaneCount count(16, 256, kRttUs);
  // 260 ms of each burst count.
  for (int i = 0; i < 40; ++i) {
    Send(&count, {60000, 3000}, 500);
    Pause(&count, Seconds(5));
  }
  EXPECT_EQ(count.lanes(), 32u);
  EXPECT_EQ(changes_, 3);
}

TEST_F(LaneCountTest, NoMoreAreTriedAtALimit) {
  LaneCount count(16, 256, kRttUs);
  count.SetLimit(50000000);
  Send(&count, {60000, 3000}, 10000);
  EXPECT_EQ(changes_, 0) << "16 lanes carry 48000";
  EXPECT_TRUE(count.found());
  count.SetLimit(100000000);
  Send(&count, {60000, 3000}, 10000);
  EXPECT_EQ(count.lanes(), 32u);
}

TEST_F(LaneCountTest, SeveralLinksTakeFewerWhileFewerCarryAsMuch) {
  LaneCount count(16, 256, kRttUs, 3);
  Send(&count, {60000, 60000}, 30000);
  EXPECT_EQ(count.lanes(), 8u) << "with 4 each there would be fewer than 16";
  EXPECT_EQ(most_, 16u);
  EXPECT_EQ(changes_, 1);
  EXPECT_TRUE(count.found());
}

TEST_F(LaneCountTest, SeveralLinksGoBackFromFewerThatCarryLessAndTryMore) {
  LaneCount count(16, 256, kRttUs, 3);
  Send(&count, {80000, 3000}, 30000);
  EXPECT_EQ(count.lanes(), 32u) << "27 are enough";
  EXPECT_EQ(changes_, 6) << "8, 16, 32, 64, 16, 32";
  EXPECT_TRUE(count.found());
}

TEST_F(LaneCountTest, FewerAreTriedAgainWhenThePathHasChanged) {
  LaneCount count(16, 256, kRttUs, 3);
  Send(&count, {48000, 3000}, 10000);
  ASSERT_EQ(count.lanes(), 16u);
  Send(&count, {24000, 3000}, 20000);
  EXPECT_EQ(count.lanes(), 8u);
}

TEST_F(LaneCountTest, SeveralLinksTakeMoreAtOnceWhereQueuesStayShort) {
  LaneCount count(4, 256, kRttUs, 3);
  queued_us_ = Millis(5);
  Send(&count, {72000, 3000}, (3 + 8 + 1) * 80);
  EXPECT_EQ(count.lanes(), 8u) << "one measurement is enough, and fewer are not tried";
  Send(&count, {72000, 3000}, 2 * (6 + 8 + 1) * 80);
  EXPECT_EQ(count.lanes(), 32u);
  Send(&count, {72000, 3000}, 10000);
  EXPECT_EQ(count.lanes(), 32u) << "24 are enough";
  EXPECT_EQ(most_, 64u) << "tried";
}

TEST_F(LaneCountTest, SeveralLinksNeedTwoMeasurementsWhereQueuesAreLong) {
  LaneCount count(4, 256, kRttUs, 3);
  queued_us_ = Millis(25);
  Send(&count, {60000, 3000}, (3 + 8 + 1) * 80);
  EXPECT_EQ(count.lanes(), 4u);
}

TEST_F(LaneCountTest, SeveralLinksAreNoFasterThanWhatArrives) {
  // The kernel takes more with more lanes, for a while.
  LaneCount count(4, 256, kRttUs, 3);
  for (int ms = 0; ms < 20000; ++ms) {
    Send(&count, {60000, 11500}, 1);
    if (ms % 250 == 0) count.ArrivesAt(45000000);
  }
  EXPECT_EQ(count.lanes(), 4u) << "8 lanes seem to carry 60000, and 4 only 46000";
  EXPECT_EQ(count.rate(), 45000000u);
}

TEST_F(LaneCountTest, SeveralLinksTryNoMoreWhileTheHostPacesThem) {
  LaneCount count(4, 256, kRttUs, 3);
  queued_us_ = Millis(5);
  count.SetPace(12000000);
  Send(&count, {12000, 3000}, 20000);
  EXPECT_EQ(count.lanes(), 4u) << "queues are short because the host sends no more";
  EXPECT_TRUE(count.found());
  count.SetPace(0);
  Send(&count, {36000, 9000}, 20000);
  EXPECT_GT(most_, 4u) << "nothing limits the host any more";
}

TEST_F(LaneCountTest, ARateOfSeveralLinksThatIsLowForAShortTimeIsNoReasonToTryMore) {
  LaneCount count(4, 256, kRttUs, 3);
  queued_us_ = Millis(25);
  Send(&count, {12000, 12000}, 30000);
  ASSERT_EQ(count.lanes(), 4u);
  ASSERT_EQ(most_, 8u);
  most_ = 0;
  queued_us_ = Millis(5);
  for (int op = 0; op < 10; ++op) {
    Send(&count, {4000, 12000}, 3000);
    Send(&count, {12000, 12000}, 3000);
  }
  EXPECT_EQ(most_, 4u) << "other hosts hold this one back now and then";
  Send(&count, {4000, 1000}, 10000);
  EXPECT_GT(most_, 4u) << "now each lane carries less";
}

TEST_F(LaneCountTest, SeveralLinksOnAPathThatBecameSlowerTryNoMore) {
  LaneCount count(4, 256, kRttUs, 3);
  queued_us_ = Millis(25);
  Send(&count, {12000, 12000}, 30000);
  most_ = 0;
  Send(&count, {6000, 12000}, 30000);
  EXPECT_EQ(most_, 4u);
  EXPECT_NEAR(static_cast<double>(count.rate()), 6e6, 0.1e6);
}

TEST_F(LaneCountTest, SeveralLinksGiveUpAddedLanesThatAreOfNoUse) {
  // Other hosts hold this one back at first.
  LaneCount count(4, 256, kRttUs, 3);
  for (int ms = 0; ms < 20000 && count.lanes() == 4; ++ms) Send(&count, {30000, 30000}, 1);
  ASSERT_EQ(count.lanes(), 8u);
  Send(&count, {60000, 60000}, 20000);
  EXPECT_EQ(most_, 16u) << "8 seemed to carry twice as much";
  EXPECT_EQ(count.lanes(), 4u);
  EXPECT_TRUE(count.found());
  EXPECT_FALSE(count.in_trial());
}

TEST_F(LaneCountTest, SeveralLinksKeepAddedLanesWithoutACheckIfPacketsHardlyWaited) {
  LaneCount count(4, 256, kRttUs, 3);
  queued_us_ = Millis(5);
  for (int ms = 0; ms < 20000 && count.lanes() == 4; ++ms) Send(&count, {30000, 7000}, 1);
  ASSERT_EQ(count.lanes(), 8u);
  queued_us_ = Millis(30);  // now the path is full
  for (int ms = 0; ms < 20000; ++ms) {
    Send(&count, {36000, 7000}, 1);
    ASSERT_GE(count.lanes(), 8u);
  }
  EXPECT_EQ(count.lanes(), 8u);
  EXPECT_TRUE(count.found());
}

// With lossy connections, rates vary.
TEST_F(LaneCountTest, SeveralLinksKeepLanesThatCarryMoreThanTheyCouldIfPacketsHardlyWait) {
  LaneCount count(4, 8, kRttUs, 3);
  queued_us_ = Millis(5);
  for (int ms = 0; ms < 20000 && count.lanes() == 4; ++ms) Send(&count, {90000, 3000}, 1);
  ASSERT_EQ(count.lanes(), 8u);
  Send(&count, {90000, 4000}, 20000);
  EXPECT_EQ(count.lanes(), 8u);
  EXPECT_EQ(changes_, 1);
}

TEST_F(LaneCountTest, SeveralLinksCheckAddedLanesAlsoAtTheirPace) {
  // Other hosts hold this one back, until twice as many lanes are being tried.
  LaneCount count(4, 256, kRttUs, 3);
  for (int ms = 0; ms < 20000 && count.lanes() == 4; ++ms) Send(&count, {35000, 35000}, 1);
  ASSERT_EQ(count.lanes(), 8u);
  count.SetPace(50000000);
  Send(&count, {50000, 50000}, 20000);
  EXPECT_EQ(most_, 8u);
  EXPECT_EQ(count.lanes(), 4u);
  EXPECT_TRUE(count.found());
  EXPECT_FALSE(count.in_trial());
}

TEST_F(LaneCountTest, SeveralLinksTryFewerAgainOnceTheyArePaced) {
  LaneCount count(4, 256, kRttUs, 3);
  Send(&count, {50000, 7500}, 30000);
  ASSERT_EQ(count.lanes(), 8u) << "4 carry 30000";
  count.SetPace(49000000);
  for (int ms = 0; ms < 10000; ++ms) {
    Send(&count, {49000, 12500}, 1);
    ASSERT_FALSE(count.tries()) << "the pace may stay";
  }
  EXPECT_EQ(count.lanes(), 4u);
}

TEST_F(LaneCountTest, FewerLanesGetTimeToGrow) {
  LaneCount count(4, 256, kRttUs, 3);
  Send(&count, {50000, 7500}, 30000);
  ASSERT_EQ(count.lanes(), 8u);
  count.SetPace(49000000);
  for (int ms = 0; ms < 10000 && count.lanes() == 8; ++ms) Send(&count, {49000, 7500}, 1);
  ASSERT_EQ(count.lanes(), 4u);
  for (uint64_t ms = 0; ms < 10000; ++ms) {
    Send(&count, {49000, std::min<uint64_t>(7500 + 4 * ms, 12500)}, 1);
  }
  EXPECT_EQ(count.lanes(), 4u) << "they carry enough after 15 round trips";
}

TEST_F(LaneCountTest, FewerLanesThatCannotBeMeasuredAreKept) {
  LaneCount count(4, 256, kRttUs, 3);
  Send(&count, {50000, 7500}, 30000);
  ASSERT_EQ(count.lanes(), 8u);
  count.SetPace(49000000);
  for (int ms = 0; ms < 10000 && count.lanes() == 8; ++ms) Send(&count, {49000, 7500}, 1);
  ASSERT_EQ(count.lanes(), 4u);
  Send(&count, {.rate = 49000, .lane_rate = 12500, .supply = 1000}, (12 * 8 + 30) * 80);
  count.SetPace(0);
  EXPECT_FALSE(count.tries()) << "the trial has ended";
  EXPECT_EQ(count.lanes(), 4u);
}

TEST_F(LaneCountTest, WhatIsEnoughAtALowPaceIsMeasuredAgainWithoutIt) {
  LaneCount count(4, 256, kRttUs, 3);
  Send(&count, {50000, 7500}, 30000);
  ASSERT_EQ(count.lanes(), 8u);
  count.SetPace(25000000);
  Send(&count, {25000, 7500}, 20000);
  ASSERT_EQ(count.lanes(), 4u);
  count.SetPace(0);
  Send(&count, {50000, 7500}, 330000);
  EXPECT_EQ(count.lanes(), 8u);
}

TEST_F(LaneCountTest, SeveralLinksKeepLanesThatTheirPaceNeeds) {
  LaneCount count(4, 256, kRttUs, 3);
  Send(&count, {50000, 7500}, 30000);
  ASSERT_EQ(count.lanes(), 8u);
  changes_ = 0;
  count.SetPace(49000000);
  for (int s = 0; s < 20; ++s) {
    Send(&count, {49000, 7500}, 1000);
    count.SetPace(49500000);
  }
  EXPECT_EQ(count.lanes(), 8u);
  EXPECT_EQ(changes_, 2) << "tried once";
}

TEST_F(LaneCountTest, SeveralLinksEndATrialThoughTheirRateVaries) {
  LaneCount count(4, 256, kRttUs, 3);
  for (int ms = 0; ms < 20000 && count.lanes() == 4; ++ms) Send(&count, {30000, 30000}, 1);
  ASSERT_EQ(count.lanes(), 8u);
  // Two measurements and a half, after 6 round trips for new connections.
  for (const uint64_t rate : {30000u, 24000u, 36000u}) {
    Send(&count, {rate, rate}, 14 * 80);
    if (count.lanes() == 4) break;
  }
  EXPECT_EQ(count.lanes(), 4u);
}

TEST_F(LaneCountTest, SeveralLinksMeasureAgainWhatTwiceAsManyCannotExplain) {
  // Other hosts hold this one back, until twice as many lanes are being tried.
  LaneCount count(4, 256, kRttUs, 3);
  for (int ms = 0; ms < 20000 && count.lanes() == 4; ++ms) Send(&count, {10000, 10000}, 1);
  ASSERT_EQ(count.lanes(), 8u);
  Send(&count, {60000, 60000}, 20000);
  EXPECT_EQ(count.lanes(), 4u);
  EXPECT_TRUE(count.found());
  EXPECT_EQ(count.rate(), 60000000u);
}

TEST_F(LaneCountTest, SeveralLinksDoNotKeepMoreThatWereHardlyMeasured) {
  LaneCount count(4, 256, kRttUs, 3);
  Send(&count, {12500, 12500}, 2 * (8 + 2) * 80);
  ASSERT_EQ(count.lanes(), 8u);
  Send(&count, {.rate = 12500, .lane_rate = 12500, .supply = 1000}, 12 * 8 * 80 + 1000);
  EXPECT_EQ(count.lanes(), 4u);
  EXPECT_TRUE(count.found());
}

TEST_F(LaneCountTest, SeveralLinksDoNotKeepMoreThatWereFastForAMoment) {
  LaneCount count(4, 256, kRttUs, 3);
  Send(&count, {12500, 12500}, 2 * (8 + 2) * 80);
  ASSERT_EQ(count.lanes(), 8u);
  // For too short a time until the neighbour is slow.
  Send(&count, {25000, 25000}, (6 + 4) * 80);
  Send(&count, {.rate = 25000, .lane_rate = 25000, .supply = 1000}, 12 * 8 * 80);
  EXPECT_EQ(count.lanes(), 4u);
  EXPECT_TRUE(count.found());
}

TEST_F(LaneCountTest, ASearchOfSeveralLinksEndsIfTheyAreNeverAllBusy) {
  LaneCount count(4, 256, kRttUs, 3);
  EXPECT_FALSE(count.found());
  Send(&count, {.rate = 12500, .lane_rate = 12500, .supply = 1000}, (3 * 8 + 3) * 80);
  EXPECT_EQ(count.lanes(), 4u);
  EXPECT_TRUE(count.found());
  EXPECT_EQ(count.rate(), 0u);
  Send(&count, {12500, 12500}, 4 * 8 * 80);
  EXPECT_EQ(most_, 8u) << "it goes on once they are";
}

TEST_F(LaneCountTest, ATrialThatCannotBeMeasuredIsKeptWhereQueuesAreShort) {
  for (const int64_t queued_us : {Millis(5), Millis(25)}) {
    LaneCount count(4, 256, kRttUs, 3);
    queued_us_ = queued_us;
    most_ = 0;
    while (most_ < 8) Send(&count, {60000, 1500}, 1);
    EXPECT_FALSE(count.found());
    Send(&count, {.rate = 60000, .lane_rate = 1500, .supply = 1000}, (12 * 8 + 6) * 80);
    EXPECT_TRUE(count.found());
    EXPECT_EQ(count.lanes(), queued_us == Millis(5) ? 8u : 4u);
  }
}

TEST_F(LaneCountTest, ShortRoundTripsAreNotMeasuredFasterThanProcessesAreScheduled) {
  LaneCount count(16, 256, 0);
  Send(&count, {60000, 3000}, 150);
  EXPECT_EQ(changes_, 0);
  Send(&count, {60000, 3000}, 1500);
  EXPECT_EQ(count.lanes(), 32u);
}

}  // namespace
}  // namespace longhaul::peerd
