#include "coordinator/core/link_reports.h"

#include <vector>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

constexpr PeerId kOne(1);
constexpr PeerId kTwo(2);
constexpr PeerId kThree(3);
const LinkEnds kLink{kOne, kTwo};
const control::BlockedPair kPair = control::MakeBlockedPair(kOne, kTwo);

class LinkReportsTest : public ::testing::Test {
 protected:
  static Tick At(int64_t ms) { return Tick{Seconds(1000) + Millis(ms)}; }
  bool Lose(const LinkReports::Evidence& evidence, uint64_t epoch = 1) {
    return reports_.Lose(kLink, evidence, {Tick(), Epoch(epoch), "reset", {}}, At(0));
  }

  LinkReports reports_{1000};
};

TEST_F(LinkReportsTest, ABrokenLinkAccusesAtOnceAndIsLostAfterATenth) {
  reports_.Accuse(kLink, {0, false, 3}, At(0));
  EXPECT_TRUE(reports_.Accuses(kLink, At(0)));
  EXPECT_FALSE(reports_.Accuses({kTwo, kOne}, kNever));
  EXPECT_TRUE(Lose({0, false, 3}));
  EXPECT_FALSE(Lose({0, false, 3})) << "it is known";
  EXPECT_EQ(reports_.NextDeadline(), At(100));
  EXPECT_TRUE(reports_.LossesDue(At(99)).empty());
  EXPECT_EQ(reports_.LossesDue(At(100)), std::vector<LinkEnds>{kLink});
  EXPECT_EQ(reports_.RemoveLoss(kLink)->reason, "reset");
  EXPECT_FALSE(reports_.RemoveLoss(kLink).has_value());
}

TEST_F(LinkReportsTest, ASilenceIsDoubtedForLongerWhereOthersWouldMissTheAccused) {
  reports_.Accuse(kLink, {1000, false, 2}, At(0));
  EXPECT_FALSE(reports_.Accuses(kLink, At(499)));
  EXPECT_TRUE(reports_.Accuses(kLink, At(500)));
  reports_.Accuse({kThree, kTwo}, {1000, false, 1}, At(0));
  EXPECT_TRUE(reports_.Accuses({kThree, kTwo}, At(100)));
  reports_.Accuse({kThree, kOne}, {1000, true, 1}, At(0));
  EXPECT_FALSE(reports_.Accuses({kThree, kOne}, At(199)));
  EXPECT_TRUE(reports_.Accuses({kThree, kOne}, At(200)));
}

TEST_F(LinkReportsTest, AnAccusationIsToldOnceAndStandsUntilItsReporterHasAllLinks) {
  reports_.Accuse(kLink, {1000, false, 2}, At(0));
  EXPECT_TRUE(reports_.NewlyAccused(At(499)).empty());
  EXPECT_EQ(reports_.NewlyAccused(At(500)), std::vector<PeerId>{kTwo});
  EXPECT_TRUE(reports_.NewlyAccused(At(501)).empty());
  EXPECT_TRUE(reports_.Accuses(kLink, At(501)));
  reports_.Absolve(kTwo, Epoch(9));
  EXPECT_TRUE(reports_.Accuses(kLink, At(501)));
  reports_.Absolve(kOne, Epoch(9));
  EXPECT_FALSE(reports_.Accuses(kLink, kNever));
}

TEST_F(LinkReportsTest, ALossOfTheEpochThatItsReporterIsReadyForStays) {
  Lose({0, false, 0}, 4);
  reports_.Absolve(kOne, Epoch(4));
  EXPECT_EQ(reports_.losses().size(), 1u);
  reports_.Absolve(kOne, Epoch(5));
  EXPECT_TRUE(reports_.losses().empty());
}

TEST_F(LinkReportsTest, WhatTheCoordinatorSleptThroughDoesNotCount) {
  reports_.Accuse(kLink, {1000, false, 2}, At(0));
  Lose({1000, false, 2});
  reports_.Postpone(Millis(70));
  EXPECT_EQ(reports_.NextDeadline(), At(170));
  EXPECT_FALSE(reports_.Accuses(kLink, At(569)));
}

TEST_F(LinkReportsTest, APairThatIsLostFourTimesInAMinuteStrikesTooOften) {
  for (int i = 0; i < 3; ++i) reports_.Strike(kPair, At(i * 59000));
  EXPECT_FALSE(reports_.StrikesTooOften(kPair));
  reports_.Strike(kPair, At(3 * 59000));
  EXPECT_TRUE(reports_.StrikesTooOften(kPair));
  reports_.Strike(kPair, At(3 * 59000 + 60001));
  EXPECT_FALSE(reports_.StrikesTooOften(kPair));
}

TEST_F(LinkReportsTest, APairThatFallsSilentIsTriedAgainLaterEachTime) {
  reports_.Strike(kPair, At(0));
  EXPECT_EQ(reports_.NextSilentRetry(kPair), Seconds(30));
  EXPECT_EQ(reports_.NextSilentRetry(kPair), Seconds(120));
  EXPECT_EQ(reports_.NextSilentRetry(kPair), Seconds(480));
  EXPECT_EQ(reports_.NextSilentRetry(kPair), Seconds(600));
  EXPECT_EQ(reports_.NextSilentRetry(kPair), Seconds(600));
  reports_.Strike(kPair, At(1200001));
  EXPECT_EQ(reports_.NextSilentRetry(kPair), Seconds(30));
}

TEST_F(LinkReportsTest, ABlockedPairIsTriedAgainWhenItsTimeHasComeOrAnEndCameBack) {
  EXPECT_TRUE(reports_.Block(kPair, Seconds(30), At(0)));
  EXPECT_FALSE(reports_.Block(kPair, Seconds(30), At(1000))) << "it was blocked already";
  EXPECT_FALSE(reports_.TryDue(kPair, At(30999)));
  EXPECT_TRUE(reports_.TryDue(kPair, At(31000)));
  EXPECT_TRUE(reports_.BlockedBefore(kPair, At(1001)));
  EXPECT_FALSE(reports_.BlockedBefore(kPair, At(1000)));
  reports_.TryAgain(kThree);
  EXPECT_FALSE(reports_.TryDue(kPair, At(2000)));
  reports_.TryAgain(kTwo);
  EXPECT_TRUE(reports_.TryDue(kPair, At(2000)));
}

TEST_F(LinkReportsTest, AfterARestartTheTimeOfABlockedPairBeginsAgain) {
  reports_.Restore(kPair);
  reports_.Start(At(0));
  reports_.Start(At(5000));
  EXPECT_FALSE(reports_.TryDue(kPair, At(599999)));
  EXPECT_TRUE(reports_.TryDue(kPair, At(600000)));
}

TEST_F(LinkReportsTest, StrangersAreForgotten) {
  reports_.Accuse(kLink, {0, false, 0}, At(0));
  reports_.Block(kPair, Seconds(30), At(0));
  reports_.ForgetReportsOf([](PeerId peer) { return peer == kTwo; });
  EXPECT_FALSE(reports_.Accuses(kLink, kNever));
  reports_.ForgetPairsOf([](PeerId) { return false; }, [](const auto&) { return false; });
  EXPECT_EQ(reports_.CountBlocked(), 0u);
  EXPECT_FALSE(reports_.Knows(kPair));
}

}  // namespace
}  // namespace longhaul::coordinator
