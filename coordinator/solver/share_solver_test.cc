#include "coordinator/solver/share_solver.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace longhaul::coordinator {
namespace {

uint32_t Sum(const Shares& units) { return std::accumulate(units.begin(), units.end(), 0u); }

ShareProblem HostsOf(const std::vector<double>& rates) {
  ShareProblem problem(rates.size());
  for (size_t i = 0; i < rates.size(); ++i) problem.SetHost(i, rates[i], rates[i]);
  return problem;
}

TEST(ShareSolverTest, EqualHostsOwnEqualShares) {
  const ShareSolution found = SolveShares(HostsOf({1e6, 1e6, 1e6, 1e6}));
  EXPECT_EQ(found.shares, Shares{});
  EXPECT_NEAR(found.seconds_per_byte, 1.5e-6, 1e-9);
}

TEST(ShareSolverTest, AHostAtHalfTheRateOwnsNothingAmongEight) {
  std::vector<double> rates(8, 1e6);
  rates[3] = 0.5e6;
  const ShareSolution found = SolveShares(HostsOf(rates));
  // It sends its input in 2 us a byte. With equal shares it would take 3.5.
  EXPECT_NEAR(found.seconds_per_byte, 2e-6, 2e-9);
  EXPECT_LT(found.shares[3], kShareUnits / 1000);
  EXPECT_EQ(Sum(found.shares), kShareUnits);
}

TEST(ShareSolverTest, TheSlowerDirectionOfAHostCounts) {
  ShareProblem problem(3);
  for (size_t i = 0; i < 3; ++i) problem.SetHost(i, 1e6, 1e6);
  problem.SetHost(1, 0.2e6, 1e6);
  EXPECT_NEAR(SolveShares(problem).seconds_per_byte, 5e-6, 5e-9);
}

TEST(ShareSolverTest, ASlowPairIsAvoidedByOwnersElsewhere) {
  ShareProblem problem = HostsOf({1e6, 1e6, 1e6, 1e6});
  problem.SetPair(0, 1, 1e4);  // equal shares would take 50 us a byte
  const ShareSolution found = SolveShares(problem);
  // Hosts 2 and 3 own half each and send twice their input.
  EXPECT_NEAR(found.seconds_per_byte, 2e-6, 4e-8);
  EXPECT_NEAR(found.seconds_per_byte, SecondsPerByte(problem, found.shares), 1e-12);
}

TEST(ShareSolverTest, HostsOfABlockedPairOwnNothing) {
  ShareProblem problem = HostsOf({1e6, 1e6, 1e6});
  problem.SetPair(2, 0, 0);
  const ShareSolution found = SolveShares(problem);
  EXPECT_EQ(found.shares, (Shares{0, kShareUnits, 0}));
  EXPECT_NEAR(found.seconds_per_byte, 2e-6, 2e-9);
}

TEST(ShareSolverTest, WithoutAHostThatReachesAllThereIsNoMesh) {
  ShareProblem problem = HostsOf({1e6, 1e6, 1e6, 1e6});
  problem.SetPair(0, 1, 0);
  problem.SetPair(2, 3, 0);
  EXPECT_FALSE(SolveShares(problem).possible);
  ShareProblem two = HostsOf({1e6, 1e6});
  two.SetPair(0, 1, 0);
  EXPECT_FALSE(SolveShares(two).possible);
}

TEST(ShareSolverTest, NothingKnownGivesEqualShares) {
  const ShareSolution found = SolveShares(ShareProblem(3));
  EXPECT_TRUE(found.possible);
  EXPECT_EQ(found.shares, Shares{});
  EXPECT_EQ(found.seconds_per_byte, 0);
  EXPECT_EQ(SolveShares(ShareProblem(1)).shares, Shares{});
}

TEST(ShareSolverTest, NobodyGetsMoreThanTheGreatestShare) {
  std::vector<double> rates(13, 1e6);
  rates[4] = 1e9;
  const ShareSolution found = SolveShares(HostsOf(rates));
  EXPECT_EQ(found.shares[4], GreatestShare(13));
  EXPECT_EQ(Sum(found.shares), kShareUnits);
  // Three owners of a third each are just allowed.
  ShareProblem few(13);
  for (size_t i = 3; i < 13; ++i) {
    for (size_t j = i + 1; j < 13; ++j) few.SetPair(i, j, 0);
  }
  const ShareSolution thirds = SolveShares(few);
  ASSERT_TRUE(thirds.possible);
  EXPECT_EQ(SharesFault(thirds.shares, 13), "");
  EXPECT_EQ(thirds.shares[3], 0u);
}

TEST(ShareSolverTest, WithoutEnoughOwnersThereIsNoMesh) {
  // Only hosts 0 and 1 reach all others, and each may own a third.
  ShareProblem problem(13);
  for (size_t i = 2; i < 13; ++i) {
    for (size_t j = i + 1; j < 13; ++j) problem.SetPair(i, j, 0);
  }
  EXPECT_FALSE(SolveShares(problem).possible);
}

// The search for pairs agrees with the equation for hosts where pairs do not limit, and with more
// pairs the time never falls.
TEST(ShareSolverTest, SlowPairsOnlyAddTime) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> draw(0.2, 1);
  for (int round = 0; round < 200; ++round) {
    const size_t n = 3 + round % 14;
    ShareProblem problem(n);
    for (size_t i = 0; i < n; ++i) problem.SetHost(i, 1e6 * draw(random), 1e6 * draw(random));
    double before = SolveShares(problem).seconds_per_byte;
    for (int pair = 0; pair < 6; ++pair) {
      const size_t i = random() % n;
      problem.SetPair(i, (i + 1 + random() % (n - 1)) % n, 2e5 * draw(random));
      const ShareSolution found = SolveShares(problem);
      ASSERT_TRUE(found.possible);
      EXPECT_EQ(SharesFault(found.shares, n), "");
      EXPECT_NEAR(SecondsPerByte(problem, found.shares), found.seconds_per_byte, 1e-15);
      EXPECT_LE(found.seconds_per_byte, SecondsPerByte(problem, {}));
      EXPECT_GE(found.seconds_per_byte, before * 0.997);
      before = std::max(before, found.seconds_per_byte);
    }
  }
}

TEST(ShareSolverTest, SharesThatABlockedPairNeedsTakeForever) {
  ShareProblem problem = HostsOf({1e6, 1e6, 1e6});
  problem.SetPair(0, 1, 0);
  EXPECT_EQ(SecondsPerByte(problem, {kShareUnits / 2, kShareUnits / 2, 0}),
            std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace longhaul::coordinator
