#include "coordinator/solver/ring_solver.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/prng.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using Order = std::vector<uint32_t>;

constexpr uint64_t kMega = 1000000;

Order InOrder(size_t nodes) {
  Order order(nodes);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

Order Shuffled(size_t nodes, Prng* prng) {
  Order order = InOrder(nodes);
  for (size_t i = nodes; i > 1; --i) std::swap(order[i - 1], order[prng->Below(i)]);
  return order;
}

// Returns random links; some are blocked, some unknown. The two directions of a link are
// independent.
LinkMatrix RandomLinks(size_t nodes, double blocked, double unknown, Prng* prng) {
  LinkMatrix links(nodes);
  // Few different bandwidths make many rings that differ by latency alone.
  const uint64_t bandwidths = 1 + prng->Below(20);
  for (size_t from = 0; from < nodes; ++from) {
    for (size_t to = 0; to < nodes; ++to) {
      if (from == to) continue;
      LinkQuality& link = links.At(from, to);
      link.blocked = prng->Chance(blocked);
      if (!prng->Chance(unknown)) link.bytes_per_second = kMega * (1 + prng->Below(bandwidths));
      if (!prng->Chance(unknown)) link.latency_us = 100 + static_cast<uint32_t>(prng->Below(90000));
    }
  }
  return links;
}

RingScore BruteForce(const LinkMatrix& links) {
  Order order = InOrder(links.nodes());
  RingScore best = ScoreRing(links, order);
  while (std::next_permutation(order.begin() + 1, order.end())) {
    const RingScore score = ScoreRing(links, order);
    if (Compare(score, best) < 0) best = score;
  }
  return best;
}

// Checks what must be true of every solution.
void CheckSolution(const RingProblem& problem, const RingSolution& solution) {
  Order sorted = solution.order;
  std::sort(sorted.begin(), sorted.end());
  ASSERT_EQ(sorted, InOrder(problem.links.nodes()));
  if (!sorted.empty()) {
    EXPECT_EQ(solution.order.front(), problem.present.front());
  }
  EXPECT_EQ(solution.score, ScoreRing(problem.links, solution.order));
  EXPECT_EQ(solution.present, ScoreRing(problem.links, problem.present));
  const int compared = Compare(solution.score, solution.present);
  EXPECT_LE(compared, 0);
  if (compared == 0) {
    EXPECT_EQ(solution.order, problem.present);
  }
}

// Gives the links of a random ring this bandwidth, and returns the ring.
Order HideRing(RingProblem* problem, uint64_t bytes_per_second, Prng* prng) {
  Order hidden = Shuffled(problem->links.nodes(), prng);
  for (size_t i = 0; i < hidden.size(); ++i) {
    LinkQuality& link = problem->links.At(hidden[i], hidden[(i + 1) % hidden.size()]);
    link = {bytes_per_second, link.latency_us, false};
  }
  return hidden;
}

TEST(RingSolver, EqualsBruteForce) {
  Prng prng(11);
  for (size_t nodes = 3; nodes <= 8; ++nodes) {
    for (int round = 0; round < 100; ++round) {
      SCOPED_TRACE("nodes " + std::to_string(nodes) + " round " + std::to_string(round));
      const double blocked = 0.1 * static_cast<double>(prng.Below(6));
      const double unknown = 0.1 * static_cast<double>(prng.Below(5));
      RingProblem problem{RandomLinks(nodes, blocked, unknown, &prng), Shuffled(nodes, &prng)};
      const RingSolution solution = SolveRing(problem);
      CheckSolution(problem, solution);
      EXPECT_TRUE(solution.exact);
      EXPECT_EQ(Compare(solution.score, BruteForce(problem.links)), 0);
    }
  }
}

TEST(RingSolver, IsNeverWorseThanThePresentRing) {
  Prng prng(12);
  for (int round = 0; round < 150; ++round) {
    const size_t nodes = 4 + prng.Below(57);
    SCOPED_TRACE("nodes " + std::to_string(nodes) + " round " + std::to_string(round));
    const double blocked = 0.1 * static_cast<double>(prng.Below(8));
    const double unknown = 0.1 * static_cast<double>(prng.Below(9));
    RingProblem problem{RandomLinks(nodes, blocked, unknown, &prng), Shuffled(nodes, &prng),
                        prng.Next(), 1 + prng.Below(20000)};
    const RingSolution solution = SolveRing(problem);
    CheckSolution(problem, solution);
    // A search that begins with this solution must not make it worse.
    problem.present = solution.order;
    CheckSolution(problem, SolveRing(problem));
  }
}

TEST(RingSolver, FindsAHiddenRingAmongSlowerLinks) {
  Prng prng(13);
  for (const size_t nodes : {9, 12, 13, 20, 40, 60}) {
    for (int round = 0; round < 5; ++round) {
      SCOPED_TRACE("nodes " + std::to_string(nodes) + " round " + std::to_string(round));
      RingProblem problem{RandomLinks(nodes, 0.1, 0, &prng), Shuffled(nodes, &prng), prng.Next()};
      HideRing(&problem, 50 * kMega, &prng);
      const RingSolution solution = SolveRing(problem);
      CheckSolution(problem, solution);
      EXPECT_EQ(solution.score.bottleneck, 50 * kMega);
    }
  }
}

// There are very many rings over links of 10 MB/s or more, but at a single node nothing shows which
// link belongs to one of them.
TEST(RingSolver, FindsARingInASparseGraph) {
  Prng prng(14);
  for (const size_t nodes : {30, 100}) {
    RingProblem problem{LinkMatrix(nodes), InOrder(nodes), 7};
    for (size_t from = 0; from < nodes; ++from) {
      for (size_t to = 0; to < nodes; ++to) {
        if (from == to) continue;
        problem.links.At(from, to) = {
            prng.Chance(10.0 / static_cast<double>(nodes)) ? 10 * kMega : kMega, 1000, false};
      }
    }
    const RingSolution solution = SolveRing(problem);
    CheckSolution(problem, solution);
    EXPECT_EQ(solution.score.bottleneck, 10 * kMega) << nodes;
  }
}

// The hosts of a site are near to each other. A ring should visit each site once.
TEST(RingSolver, VisitsEachSiteOnceWhereBandwidthsAreEqual) {
  constexpr size_t kSites = 6;
  constexpr size_t kHosts = 36;
  RingProblem problem{LinkMatrix(kHosts), InOrder(kHosts), 1};
  for (size_t from = 0; from < kHosts; ++from) {
    for (size_t to = 0; to < kHosts; ++to) {
      const bool near = from % kSites == to % kSites;
      problem.links.At(from, to) = {100 * kMega, near ? 500u : 40000u, false};
    }
  }
  const RingSolution solution = SolveRing(problem);
  CheckSolution(problem, solution);
  EXPECT_EQ(solution.present.latency_us, kHosts * 40000);
  EXPECT_EQ(solution.score.latency_us, kSites * 40000 + (kHosts - kSites) * 500);
}

TEST(RingSolver, PrefersMeasuredLinks) {
  for (const size_t nodes : {6, 20}) {
    RingProblem problem{LinkMatrix(nodes), InOrder(nodes), 3};
    Prng prng(15);
    const Order hidden = HideRing(&problem, kMega, &prng);
    // This link is very fast, but a ring over it needs unknown links, too.
    problem.links.At(hidden[0], hidden[2]).bytes_per_second = 900 * kMega;
    const RingSolution solution = SolveRing(problem);
    CheckSolution(problem, solution);
    EXPECT_EQ(solution.score.unknown, 0u);
    EXPECT_EQ(solution.score.bottleneck, kMega);
  }
}

TEST(RingSolver, GoesAroundBlockedLinks) {
  for (const size_t nodes : {5, 24}) {
    RingProblem problem{LinkMatrix(nodes), InOrder(nodes), 3};
    for (size_t from = 0; from < nodes; ++from) {
      for (size_t to = 0; to < nodes; ++to) {
        const size_t apart = (to + nodes - from) % nodes;
        problem.links.At(from, to) = {kMega, 1000, apart == 1 || apart == nodes - 1};
      }
    }
    const RingSolution solution = SolveRing(problem);
    CheckSolution(problem, solution);
    EXPECT_EQ(solution.present.blocked, nodes);
    EXPECT_EQ(solution.score.blocked, 0u);
  }
}

TEST(RingSolver, KeepsTheRingWhereAllLinksAreBlockedOrNoneIsKnown) {
  Prng prng(16);
  for (const size_t nodes : {3, 7, 30}) {
    for (const bool blocked : {true, false}) {
      RingProblem problem{LinkMatrix(nodes), Shuffled(nodes, &prng), 5, 100000};
      for (size_t i = 0; i < nodes * nodes; ++i) {
        problem.links.At(i / nodes, i % nodes).blocked = blocked;
      }
      const RingSolution solution = SolveRing(problem);
      CheckSolution(problem, solution);
      EXPECT_EQ(solution.order, problem.present);
      EXPECT_EQ(solution.score.blocked, blocked ? nodes : 0u);
      EXPECT_EQ(solution.score.unknown, blocked ? 0u : nodes);
    }
  }
}

TEST(RingSolver, TakesRingsOfUpToThree) {
  for (size_t nodes = 0; nodes <= 3; ++nodes) {
    RingProblem problem{LinkMatrix(nodes), InOrder(nodes)};
    const RingSolution solution = SolveRing(problem);
    CheckSolution(problem, solution);
    EXPECT_EQ(solution.order, problem.present);
    EXPECT_EQ(solution.score.unknown, nodes < 2 ? 0u : nodes);
  }
  RingProblem problem{LinkMatrix(3), InOrder(3)};
  for (size_t node = 0; node < 3; ++node) {
    problem.links.At(node, (node + 1) % 3) = {kMega, 10, false};
    problem.links.At((node + 1) % 3, node) = {2 * kMega, 10, false};
  }
  EXPECT_EQ(SolveRing(problem).order, (Order{0, 2, 1}));
}

TEST(RingSolver, IsTheSameForTheSameProblem) {
  Prng prng(17);
  Digester digest;
  for (const size_t nodes : {12, 13, 37, 60}) {
    const RingProblem problem{RandomLinks(nodes, 0.1, 0.1, &prng), Shuffled(nodes, &prng), 99,
                              300000};
    const RingSolution solution = SolveRing(problem);
    CheckSolution(problem, solution);
    const RingSolution again = SolveRing(problem);
    EXPECT_EQ(solution.order, again.order);
    EXPECT_EQ(solution.steps, again.steps);
    for (const uint32_t node : solution.order) digest.Add(uint64_t{node});
    digest.Add(solution.steps);
  }
  // The result is the same on every machine and with every compiler.
  EXPECT_EQ(digest.value(), 16351114226119943838u);
}

TEST(RingSolver, KeepsToItsSteps) {
  Prng prng(18);
  const RingProblem problem{RandomLinks(100, 0, 0, &prng), InOrder(100), 1, 2000000};
  const RingSolution solution = SolveRing(problem);
  CheckSolution(problem, solution);
  EXPECT_GE(solution.steps, problem.steps_max / 2);
  EXPECT_LE(solution.steps, problem.steps_max + problem.steps_max / 10);
}

TEST(RingSolver, TakesAThousandNodes) {
  constexpr size_t kNodes = 1000;
  Prng prng(19);
  RingProblem problem{LinkMatrix(kNodes), Shuffled(kNodes, &prng), 1};
  // The hosts are at random places on a square. Bandwidths lie between 1 and 1000 MB/s.
  std::vector<std::pair<int64_t, int64_t>> places;
  for (size_t i = 0; i < kNodes; ++i) {
    const int64_t x = static_cast<int64_t>(prng.Below(1000));
    places.emplace_back(x, prng.Below(1000));
  }
  const auto apart = [&](size_t a, size_t b) {
    const int64_t x = places[a].first - places[b].first;
    const int64_t y = places[a].second - places[b].second;
    return static_cast<uint32_t>(100 + 50 * (x < 0 ? -x : x) + 50 * (y < 0 ? -y : y));
  };
  for (size_t from = 0; from < kNodes; ++from) {
    for (size_t to = 0; to < kNodes; ++to) {
      problem.links.At(from, to) = {kMega + kMega * prng.Below(1000), apart(from, to), false};
    }
  }
  const RingSolution solution = SolveRing(problem);
  CheckSolution(problem, solution);
  // Almost certainly there is a ring of which each link is among the fastest 2 %.
  EXPECT_GE(solution.score.bottleneck, 970 * kMega);
  EXPECT_LT(solution.score.latency_us, solution.present.latency_us);
  RecordProperty("bottleneck_mb", std::to_string(solution.score.bottleneck / kMega));
  RecordProperty("latency_us", std::to_string(solution.score.latency_us));
}

TEST(BandwidthStep, RisesByAboutThreePercent) {
  EXPECT_EQ(BandwidthStep(0), 0u);
  EXPECT_EQ(BandwidthStep(1), 1u);
  for (uint64_t rate = 1000; rate < UINT64_MAX / 2; rate += rate / 7) {
    EXPECT_LT(BandwidthStep(rate), BandwidthStep(rate + rate / 25)) << rate;
    EXPECT_LE(BandwidthStep(rate + rate / 40), BandwidthStep(rate) + 1) << rate;
  }
  EXPECT_GT(BandwidthStep(UINT64_MAX), BandwidthStep(UINT64_MAX / 2));
}

TEST(WorthChanging, AsksForATenthMoreBandwidth) {
  const RingScore present{0, 0, 100 * kMega, 80000};
  EXPECT_FALSE(WorthChanging(present, present));
  EXPECT_FALSE(WorthChanging(present, {0, 0, 101 * kMega, 80000}));
  EXPECT_FALSE(WorthChanging(present, {0, 0, 109 * kMega, 80000}));
  EXPECT_TRUE(WorthChanging(present, {0, 0, 110 * kMega, 80000}));
  EXPECT_TRUE(WorthChanging(present, {0, 0, 110 * kMega, 900000}));
  EXPECT_FALSE(WorthChanging(present, {0, 0, 90 * kMega, 10}));
}

TEST(WorthChanging, AsksForAQuarterLessLatencyWhereTheBandwidthIsTheSame) {
  const RingScore present{0, 0, 100 * kMega, 80000};
  EXPECT_FALSE(WorthChanging(present, {0, 0, 100 * kMega, 61000}));
  EXPECT_TRUE(WorthChanging(present, {0, 0, 100 * kMega, 60000}));
  EXPECT_TRUE(WorthChanging(present, {0, 0, 97 * kMega, 60000}));
  EXPECT_FALSE(WorthChanging(present, {0, 0, 96 * kMega, 60000}));
  EXPECT_FALSE(WorthChanging({0, 0, 100 * kMega, 800}, {0, 0, 100 * kMega, 100}))
      << "less than a millisecond";
  EXPECT_FALSE(WorthChanging({0, 0, 100 * kMega, 80000, 1}, {0, 0, 100 * kMega, 100}))
      << "it is a guess that the present one is slow";
}

TEST(WorthChanging, MindsBlockedAndUnknownLinksFirst) {
  const RingScore present{1, 1, 100 * kMega, 80000};
  EXPECT_TRUE(WorthChanging(present, {0, 3, kMega, 800000}));
  EXPECT_FALSE(WorthChanging(present, {2, 0, 900 * kMega, 100}));
  EXPECT_FALSE(WorthChanging(present, {1, 2, 900 * kMega, 100}));
  EXPECT_TRUE(WorthChanging(present, {1, 0, 900 * kMega, 100}));
  EXPECT_FALSE(WorthChanging({0, 4, 0, 80000}, {0, 0, kMega, 80000}))
      << "the present one may be faster";
}

}  // namespace
}  // namespace longhaul::coordinator
