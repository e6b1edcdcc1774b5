#include "peerd/transport/zero_copy_gate.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace longhaul::peerd {
namespace {

constexpr Tick kStart{Seconds(1000)};

TEST(ZeroCopyGateTest, NeverMeansNever) {
  ZeroCopyGate gate(ZeroCopyGate::Use::kNever);
  EXPECT_FALSE(gate.open());
  EXPECT_FALSE(gate.Pass(kStart));
}

TEST(ZeroCopyGateTest, AfterAFailureOneSendIsTriedInEachPauseUntilOneWorks) {
  for (const bool refused : {false, true}) {
    ZeroCopyGate gate(ZeroCopyGate::Use::kWhereOfUse);
    const auto fail = [&](Tick begun, Tick now) {
      refused ? gate.Refused(begun, now) : gate.Copied(begun, now);
    };
    EXPECT_TRUE(gate.Pass(kStart));
    EXPECT_TRUE(gate.Pass(kStart));
    fail(kStart, kStart + 10);
    EXPECT_FALSE(gate.open());
    EXPECT_FALSE(gate.Pass(kStart + 11));
    // The outcome of an earlier send changes nothing.
    fail(kStart + 5, kStart + 12);
    gate.Worked(kStart + 5);
    EXPECT_FALSE(gate.Pass(kStart + 9 + ZeroCopyGate::kPauseUsMin));
    const Tick trial = kStart + 10 + ZeroCopyGate::kPauseUsMin;
    EXPECT_TRUE(gate.Pass(trial));
    EXPECT_FALSE(gate.Pass(trial + 1)) << "one is enough";
    EXPECT_FALSE(gate.open());
    gate.Worked(trial);
    EXPECT_TRUE(gate.open());
    EXPECT_TRUE(gate.Pass(trial + 2));
  }
}

TEST(ZeroCopyGateTest, PausesDoubleUpToTheLongestAndBeginAnewOnceASendHasWorked) {
  ZeroCopyGate gate(ZeroCopyGate::Use::kWhereOfUse);
  Tick now = kStart;
  gate.Refused(now, now);
  int64_t pause = ZeroCopyGate::kPauseUsMin;
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(gate.Pass(now + (pause - 1)));
    now = now + pause;
    ASSERT_TRUE(gate.Pass(now));
    gate.Refused(now, now);
    pause = std::min(2 * pause, ZeroCopyGate::kPauseUsMax);
  }
  EXPECT_EQ(pause, ZeroCopyGate::kPauseUsMax);
  now = now + pause;
  ASSERT_TRUE(gate.Pass(now));
  gate.Worked(now);
  now = now + 1;
  gate.Refused(now, now);
  EXPECT_TRUE(gate.Pass(now + ZeroCopyGate::kPauseUsMin));
}

TEST(ZeroCopyGateTest, ATrialOfWhichNothingIsHeardIsFollowedByAnother) {
  ZeroCopyGate gate(ZeroCopyGate::Use::kWhereOfUse);
  gate.Refused(kStart, kStart);
  const Tick trial = kStart + ZeroCopyGate::kPauseUsMin;
  ASSERT_TRUE(gate.Pass(trial));
  EXPECT_FALSE(gate.Pass(trial + (ZeroCopyGate::kPauseUsMin - 1)));
  EXPECT_TRUE(gate.Pass(trial + ZeroCopyGate::kPauseUsMin));
}

TEST(ZeroCopyGateTest, AlwaysMeansAlsoWhereTheKernelCopiesButNotWhereItRefuses) {
  ZeroCopyGate gate(ZeroCopyGate::Use::kAlways);
  gate.Copied(kStart, kStart);
  EXPECT_TRUE(gate.open());
  gate.Refused(kStart, kStart);
  EXPECT_FALSE(gate.open());
  ASSERT_TRUE(gate.Pass(kStart + ZeroCopyGate::kPauseUsMin));
  gate.Copied(kStart + ZeroCopyGate::kPauseUsMin, kStart + ZeroCopyGate::kPauseUsMin + 1);
  EXPECT_TRUE(gate.open()) << "it was not refused";
}

}  // namespace
}  // namespace longhaul::peerd
