// How long a group stands still after a fault, and which members the fault removes.
//
// Each trainer reduces one tensor after the other, and passes a step boundary after each. A fault
// comes at a time that depends on the seed. The tests check the longest time in which no op ended,
// and who was removed.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/sim/busy_trainer.h"
#include "tests/sim/simulation.h"

namespace longhaul::sim {
namespace {

constexpr int64_t kDetect = Millis(1500);

class FaultTimesTest : public BusyGroup, public testing::TestWithParam<uint64_t> {
 protected:
  FaultTimesTest() : BusyGroup(GetParam()) {}

  void Start(int n) { ASSERT_TRUE(Found(n)); }
  // Blocks both directions; 0 is the coordinator.
  void Cut(int a, int b, int64_t us) {
    sim_.Block(a, b, us);
    sim_.Block(b, a, us);
  }
  // Returns the longest time since the fault without an op, over all present members.
  int64_t LongestGap() const {
    int64_t longest = 0;
    for (const auto& trainer : trainers_) {
      if (trainer->member()) longest = std::max(longest, trainer->LongestGap(from_, sim_.now()));
    }
    return longest;
  }
};

INSTANTIATE_TEST_SUITE_P(Seeds, FaultTimesTest, testing::Range(uint64_t{1}, Seeds() + 1));

TEST_P(FaultTimesTest, TwoPairsThatAreCutShortlyAfterEachOtherCostTheTimeOfOne) {
  Start(5);
  Cut(1, 2, Seconds(60));
  Pass(sim_.world().Between(0, Millis(200)));
  Cut(3, 4, Seconds(60));
  Pass(Seconds(20));
  EXPECT_EQ(Members(), 5);
  EXPECT_LT(LongestGap(), Millis(2500));
}

TEST_P(FaultTimesTest, OfThreeHostsTheThirdCarriesForAPairThatIsCut) {
  Start(3);
  Cut(1, 2, Seconds(60));
  Pass(Seconds(20));
  EXPECT_EQ(Members(), 3);
  EXPECT_LT(LongestGap(), 2 * kDetect);
}

TEST_P(FaultTimesTest, ACoordinatorThatIsCutOffRemovesNobody) {
  for (const int64_t seconds : {10, 20, 40}) {
    if (trainers_.empty()) Start(4);
    for (int host = 1; host <= 4; ++host) Cut(0, host, Seconds(seconds));
    Pass(Seconds(seconds + 10));
    EXPECT_EQ(Members(), 4) << seconds;
    // Boundaries wait for the coordinator. Nothing else may take long.
    EXPECT_LT(LongestGap(), Seconds(seconds) + 3 * kDetect);
    from_ = sim_.now();
  }
}

// However often the newcomer asks, the group keeps 99 % of its ops, and no boundary waits for the
// newcomer.
TEST_P(FaultTimesTest, ANewcomerThatNobodyReachesCostsTheGroupNothing) {
  const bool refuses = GetParam() % 2 == 0;
  Start(4);
  const Tick before = sim_.now();
  Pass(Seconds(60));
  from_ = sim_.now();
  PeerHost* const host = sim_.AddPeer();
  sim_.ClosePort(host, refuses ? ModelTransport::Port::kRefuses : ModelTransport::Port::kDrops,
                 Seconds(60));
  trainers_.push_back(
      std::make_unique<BusyTrainer>(&sim_, host, static_cast<uint32_t>(trainers_.size())));
  BusyTrainer& newcomer = *trainers_.back();
  newcomer.Insist();
  Pass(Seconds(60));
  EXPECT_FALSE(newcomer.member());
  EXPECT_GE(newcomer.refusals(), 4u);
  const std::string seen = refuses ? "Connection refused" : "no answer in time";
  EXPECT_NE(newcomer.end().text.find(seen), std::string::npos) << newcomer.end().text;
  for (size_t i = 0; i < 4; ++i) {
    const int64_t usual = trainers_[i]->OpsWithin(before, from_);
    const int64_t kept = trainers_[i]->OpsWithin(from_, sim_.now());
    EXPECT_GE(100 * kept, 99 * usual) << kept << " of " << usual;
  }
  EXPECT_LT(LongestGap(), Millis(200));
  // From now on the port is open.
  EXPECT_TRUE(sim_.RunUntil(sim_.now() + 45 * kDetect, [&] { return newcomer.member(); }));
}

// The newcomer is admitted at the next boundary. From the start, its link to the member that does
// not reach it goes through a relay.
TEST_P(FaultTimesTest, ANewcomerThatOneOfTheMembersDoesNotReachHoldsNobody) {
  Start(3);
  BusyTrainer& newcomer = Add();
  Cut(1, 4, Seconds(60));
  EXPECT_TRUE(sim_.RunUntil(sim_.now() + 3 * kDetect, [&] { return newcomer.member(); }));
  Pass(Seconds(5));
  EXPECT_EQ(Members(), 4);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_LT(trainers_[i]->LongestGap(from_, sim_.now()), Millis(200));
  }
}

// The host's links are up, so only the coordinator misses it. The stream closes before the period
// is over, and that must not begin another period.
TEST_P(FaultTimesTest, AHostThatTheCoordinatorDoesNotHearIsRemovedAfterOnePeriod) {
  Start(3);
  Cut(0, 3, Seconds(60));
  Pass(Seconds(20));
  EXPECT_FALSE(trainers_[2]->member() && trainers_[2]->LongestGap(from_, sim_.now()) < Seconds(10));
  const int64_t gap = std::max(trainers_[0]->LongestGap(from_, sim_.now()),
                               trainers_[1]->LongestGap(from_, sim_.now()));
  EXPECT_GT(gap, 3 * kDetect);
  EXPECT_LT(gap, 4 * kDetect + kDetect / 2);
}

}  // namespace
}  // namespace longhaul::sim
