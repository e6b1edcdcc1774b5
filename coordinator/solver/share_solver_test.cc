#include "coordinator/solver/share_solver.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

namespace longhaul::coordinator {
namespace {

uint32_t Sum(const std::vector<uint32_t>& units) {
  return std::accumulate(units.begin(), units.end(), 0u);
}

ShareProblem HostsOf(const std::vector<double>& rates) {
  ShareProblem problem(rates.size());
  for (size_t i = 0; i < rates.size(); ++i) problem.SetHost(i, rates[i], rates[i]);
  return problem;
}

TEST(ShareSolverTest, EqualHostsOwnEqualShares) {
  const Shares shares = SolveShares(HostsOf({1e6, 1e6, 1e6, 1e6}));
  EXPECT_EQ(shares.units, std::vector<uint32_t>(4, kShareUnits / 4));
  EXPECT_NEAR(shares.seconds_per_byte, 1.5e-6, 1e-9);
}

TEST(ShareSolverTest, AHostAtHalfTheRateOwnsNothingAmongEight) {
  std::vector<double> rates(8, 1e6);
  rates[3] = 0.5e6;
  const Shares shares = SolveShares(HostsOf(rates));
  // It sends its input in 2 us a byte. With equal shares it would take 3.5.
  EXPECT_NEAR(shares.seconds_per_byte, 2e-6, 2e-9);
  EXPECT_LT(shares.units[3], kShareUnits / 1000);
  EXPECT_EQ(Sum(shares.units), kShareUnits);
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
  const Shares shares = SolveShares(problem);
  // Hosts 2 and 3 own half each and send twice their input.
  EXPECT_NEAR(shares.seconds_per_byte, 2e-6, 4e-8);
  EXPECT_NEAR(shares.seconds_per_byte, SecondsPerByte(problem, shares.units), 1e-12);
}

TEST(ShareSolverTest, HostsOfABlockedPairOwnNothing) {
  ShareProblem problem = HostsOf({1e6, 1e6, 1e6});
  problem.SetPair(2, 0, 0);
  const Shares shares = SolveShares(problem);
  EXPECT_EQ(shares.units, (std::vector<uint32_t>{0, kShareUnits, 0}));
  EXPECT_NEAR(shares.seconds_per_byte, 2e-6, 2e-9);
}

TEST(ShareSolverTest, WithoutAHostThatReachesAllThereIsNoMesh) {
  ShareProblem problem = HostsOf({1e6, 1e6, 1e6, 1e6});
  problem.SetPair(0, 1, 0);
  problem.SetPair(2, 3, 0);
  EXPECT_TRUE(SolveShares(problem).units.empty());
  ShareProblem two = HostsOf({1e6, 1e6});
  two.SetPair(0, 1, 0);
  EXPECT_TRUE(SolveShares(two).units.empty());
}

TEST(ShareSolverTest, NothingKnownGivesEqualShares) {
  const Shares shares = SolveShares(ShareProblem(3));
  EXPECT_EQ(Sum(shares.units), kShareUnits);
  EXPECT_LE(shares.units[0] - shares.units[2], 1u);
  EXPECT_EQ(shares.seconds_per_byte, 0);
  EXPECT_EQ(SolveShares(ShareProblem(1)).units, std::vector<uint32_t>{kShareUnits});
}

TEST(ShareSolverTest, SharesThatABlockedPairNeedsTakeForever) {
  ShareProblem problem = HostsOf({1e6, 1e6, 1e6});
  problem.SetPair(0, 1, 0);
  EXPECT_EQ(SecondsPerByte(problem, {kShareUnits / 2, kShareUnits / 2, 0}),
            std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace longhaul::coordinator
