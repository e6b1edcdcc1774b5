#include "peerd/paths/black_hole.h"

#include <gtest/gtest.h>

namespace longhaul::peerd {
namespace {

using Verdict = BlackHole::Verdict;

constexpr uint32_t kDetectMs = 1500;
constexpr Tick At(int64_t ms) { return Tick{Millis(ms)}; }

TEST(BlackHoleTest, TwoBarrenLanesInARowMakeNewLanesSmall) {
  BlackHole hole;
  EXPECT_EQ(hole.OnBarren(false, At(0), kDetectMs), Verdict::kWait);
  EXPECT_FALSE(hole.small());
  EXPECT_EQ(hole.OnBarren(false, At(750), kDetectMs), Verdict::kDialSmall);
  EXPECT_TRUE(hole.small());
}

TEST(BlackHoleTest, ASegmentThatArrivesInBetweenSpeaksAgainstIt) {
  BlackHole hole;
  for (int64_t ms = 0; ms < 10000; ms += 500) {
    EXPECT_EQ(hole.OnBarren(false, At(ms), kDetectMs), Verdict::kWait);
    hole.OnAcknowledged();
  }
  EXPECT_FALSE(hole.small());
}

TEST(BlackHoleTest, SegmentsThatArriveDoNotSpeakForTheControlLane) {
  BlackHole hole;
  EXPECT_EQ(hole.OnBarren(true, At(0), kDetectMs), Verdict::kWait);
  hole.OnAcknowledged();
  EXPECT_EQ(hole.OnBarren(true, At(750), kDetectMs), Verdict::kDialSmall);
}

TEST(BlackHoleTest, LossesLongApartHaveNothingToDoWithEachOther) {
  BlackHole hole;
  EXPECT_EQ(hole.OnBarren(false, At(0), kDetectMs), Verdict::kWait);
  EXPECT_EQ(hole.OnBarren(false, At(3001), kDetectMs), Verdict::kWait);
  EXPECT_EQ(hole.OnBarren(false, At(6001), kDetectMs), Verdict::kDialSmall);
}

TEST(BlackHoleTest, WhereSmallLanesAreBarrenTooTheLinkIsGivenUp) {
  BlackHole hole;
  hole.OnBarren(false, At(0), kDetectMs);
  ASSERT_EQ(hole.OnBarren(false, At(0), kDetectMs), Verdict::kDialSmall);
  EXPECT_EQ(hole.OnBarren(false, At(750), kDetectMs), Verdict::kWait);
  EXPECT_EQ(hole.OnBarren(false, At(3749), kDetectMs), Verdict::kWait);
  EXPECT_EQ(hole.OnBarren(false, At(3750), kDetectMs), Verdict::kBreak);
}

TEST(BlackHoleTest, SmallLanesThatCarrySomethingStaySmall) {
  BlackHole hole;
  hole.OnBarren(false, At(0), kDetectMs);
  hole.OnBarren(false, At(0), kDetectMs);
  hole.OnAcknowledged();
  EXPECT_TRUE(hole.small());
  EXPECT_EQ(hole.OnBarren(false, At(5000), kDetectMs), Verdict::kWait);
  EXPECT_EQ(hole.OnBarren(false, At(5000), kDetectMs), Verdict::kWait);
}

}  // namespace
}  // namespace longhaul::peerd
