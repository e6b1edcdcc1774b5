#include "coordinator/core/suspicion.h"

#include <vector>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

constexpr PeerId kOne(1);
constexpr PeerId kTwo(2);
constexpr PeerId kThree(3);
const LostLink kLink{kOne, kTwo};
const control::BlockedPair kPair = control::MakeBlockedPair(kOne, kTwo);

class SuspicionTest : public ::testing::Test {
 protected:
  static Tick At(int64_t ms) { return Tick{Seconds(1000) + Millis(ms)}; }
  bool Lose(const Suspicion::Evidence& evidence, uint64_t epoch = 1) {
    return suspicion_.Lose(kLink, evidence, {Tick(), Epoch(epoch), "reset", {}}, At(0));
  }

  Suspicion suspicion_{1000};
};

TEST_F(SuspicionTest, ABrokenLinkAccusesAtOnceAndIsLostAfterATenth) {
  suspicion_.Accuse(kLink, {0, false, 3}, At(0));
  EXPECT_TRUE(suspicion_.Accuses(kLink, At(0)));
  EXPECT_FALSE(suspicion_.Accuses({kTwo, kOne}, kNever));
  EXPECT_TRUE(Lose({0, false, 3}));
  EXPECT_FALSE(Lose({0, false, 3})) << "it is known";
  EXPECT_EQ(suspicion_.NextDeadline(), At(100));
  EXPECT_TRUE(suspicion_.LossesDue(At(99)).empty());
  EXPECT_EQ(suspicion_.LossesDue(At(100)), std::vector<LostLink>{kLink});
  EXPECT_EQ(suspicion_.RemoveLoss(kLink)->reason, "reset");
  EXPECT_FALSE(suspicion_.RemoveLoss(kLink).has_value());
}

TEST_F(SuspicionTest, ASilenceIsDoubtedForLongerWhereOthersWouldMissTheSuspect) {
  suspicion_.Accuse(kLink, {1000, false, 2}, At(0));
  EXPECT_FALSE(suspicion_.Accuses(kLink, At(499)));
  EXPECT_TRUE(suspicion_.Accuses(kLink, At(500)));
  suspicion_.Accuse({kThree, kTwo}, {1000, false, 1}, At(0));
  EXPECT_TRUE(suspicion_.Accuses({kThree, kTwo}, At(100)));
  suspicion_.Accuse({kThree, kOne}, {1000, true, 1}, At(0));
  EXPECT_FALSE(suspicion_.Accuses({kThree, kOne}, At(199)));
  EXPECT_TRUE(suspicion_.Accuses({kThree, kOne}, At(200)));
}

TEST_F(SuspicionTest, AnAccusationIsToldOnceAndStandsUntilItsReporterHasAllLinks) {
  suspicion_.Accuse(kLink, {1000, false, 2}, At(0));
  EXPECT_TRUE(suspicion_.NewlyAccused(At(499)).empty());
  EXPECT_EQ(suspicion_.NewlyAccused(At(500)), std::vector<PeerId>{kTwo});
  EXPECT_TRUE(suspicion_.NewlyAccused(At(501)).empty());
  EXPECT_TRUE(suspicion_.Accuses(kLink, At(501)));
  suspicion_.Absolve(kTwo, Epoch(9));
  EXPECT_TRUE(suspicion_.Accuses(kLink, At(501)));
  suspicion_.Absolve(kOne, Epoch(9));
  EXPECT_FALSE(suspicion_.Accuses(kLink, kNever));
}

TEST_F(SuspicionTest, ALossOfTheEpochThatItsReporterIsReadyForStays) {
  Lose({0, false, 0}, 4);
  suspicion_.Absolve(kOne, Epoch(4));
  EXPECT_EQ(suspicion_.losses().size(), 1u);
  suspicion_.Absolve(kOne, Epoch(5));
  EXPECT_TRUE(suspicion_.losses().empty());
}

TEST_F(SuspicionTest, WhatTheCoordinatorSleptThroughDoesNotCount) {
  suspicion_.Accuse(kLink, {1000, false, 2}, At(0));
  Lose({1000, false, 2});
  suspicion_.Postpone(Millis(70));
  EXPECT_EQ(suspicion_.NextDeadline(), At(170));
  EXPECT_FALSE(suspicion_.Accuses(kLink, At(569)));
}

TEST_F(SuspicionTest, APairThatIsLostFourTimesInAMinuteStrikesTooOften) {
  for (int i = 0; i < 3; ++i) suspicion_.Strike(kPair, At(i * 59000));
  EXPECT_FALSE(suspicion_.StrikesTooOften(kPair));
  suspicion_.Strike(kPair, At(3 * 59000));
  EXPECT_TRUE(suspicion_.StrikesTooOften(kPair));
  suspicion_.Strike(kPair, At(3 * 59000 + 60001));
  EXPECT_FALSE(suspicion_.StrikesTooOften(kPair));
}

TEST_F(SuspicionTest, APairThatFallsSilentIsTriedAgainLaterEachTime) {
  suspicion_.Strike(kPair, At(0));
  EXPECT_EQ(suspicion_.NextSilentRetry(kPair), Seconds(30));
  EXPECT_EQ(suspicion_.NextSilentRetry(kPair), Seconds(120));
  EXPECT_EQ(suspicion_.NextSilentRetry(kPair), Seconds(480));
  EXPECT_EQ(suspicion_.NextSilentRetry(kPair), Seconds(600));
  EXPECT_EQ(suspicion_.NextSilentRetry(kPair), Seconds(600));
  suspicion_.Strike(kPair, At(1200001));
  EXPECT_EQ(suspicion_.NextSilentRetry(kPair), Seconds(30));
}

TEST_F(SuspicionTest, ABlockedPairIsTriedAgainWhenItsTimeHasComeOrAnEndCameBack) {
  EXPECT_TRUE(suspicion_.Block(kPair, Seconds(30), At(0)));
  EXPECT_FALSE(suspicion_.Block(kPair, Seconds(30), At(1000))) << "it was blocked already";
  EXPECT_FALSE(suspicion_.TryDue(kPair, At(30999)));
  EXPECT_TRUE(suspicion_.TryDue(kPair, At(31000)));
  EXPECT_TRUE(suspicion_.BlockedBefore(kPair, At(1001)));
  EXPECT_FALSE(suspicion_.BlockedBefore(kPair, At(1000)));
  suspicion_.TryAgain(kThree);
  EXPECT_FALSE(suspicion_.TryDue(kPair, At(2000)));
  suspicion_.TryAgain(kTwo);
  EXPECT_TRUE(suspicion_.TryDue(kPair, At(2000)));
}

TEST_F(SuspicionTest, AfterARestartTheTimeOfABlockedPairBeginsAgain) {
  suspicion_.Restore(kPair);
  suspicion_.Start(At(0));
  suspicion_.Start(At(5000));
  EXPECT_FALSE(suspicion_.TryDue(kPair, At(599999)));
  EXPECT_TRUE(suspicion_.TryDue(kPair, At(600000)));
}

TEST_F(SuspicionTest, StrangersAreForgotten) {
  suspicion_.Accuse(kLink, {0, false, 0}, At(0));
  suspicion_.Block(kPair, Seconds(30), At(0));
  suspicion_.ForgetReportsOf([](PeerId peer) { return peer == kTwo; });
  EXPECT_FALSE(suspicion_.Accuses(kLink, kNever));
  suspicion_.ForgetPairsOf([](PeerId) { return false; }, [](const auto&) { return false; });
  EXPECT_EQ(suspicion_.CountBlocked(), 0u);
  EXPECT_FALSE(suspicion_.Knows(kPair));
}

}  // namespace
}  // namespace longhaul::coordinator
