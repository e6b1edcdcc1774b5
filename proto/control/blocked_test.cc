#include "proto/control/blocked.h"

#include <algorithm>
#include <numeric>

#include "base/prng.h"
#include "gtest/gtest.h"

namespace longhaul::control {
namespace {

PeerId P(uint64_t n) { return PeerId(n); }

std::vector<PeerId> Peers(uint64_t n) {
  std::vector<PeerId> peers;
  for (uint64_t i = 1; i <= n; ++i) peers.push_back(P(i));
  return peers;
}

BlockedPairs Pairs(std::vector<std::pair<uint64_t, uint64_t>> pairs) {
  BlockedPairs blocked;
  for (const auto& [x, y] : pairs) blocked.push_back(MakeBlockedPair(P(x), P(y)));
  std::sort(blocked.begin(), blocked.end());
  return blocked;
}

bool Avoids(const std::vector<PeerId>& ring, const BlockedPairs& blocked) {
  for (size_t i = 0; i < ring.size(); ++i) {
    if (IsBlocked(blocked, ring[i], ring[(i + 1) % ring.size()])) return false;
  }
  return true;
}

BlockedPairs RandomPairs(uint64_t peers, double chance, Prng* prng) {
  BlockedPairs blocked;
  for (uint64_t a = 1; a <= peers; ++a) {
    for (uint64_t b = a + 1; b <= peers; ++b) {
      if (prng->Chance(chance)) blocked.push_back({P(a), P(b)});
    }
  }
  return blocked;
}

TEST(RingTest, AnOrderWithoutBlockedNeighboursIsKept) {
  EXPECT_EQ(RingAvoiding(Peers(5), {}), Peers(5));
  EXPECT_EQ(RingAvoiding(Peers(5), Pairs({{1, 3}, {2, 5}})), Peers(5));
  EXPECT_EQ(RingAvoiding(Peers(20), Pairs({{1, 3}, {2, 5}})), Peers(20));
}

TEST(RingTest, APairAmongFourIsSplit) {
  EXPECT_EQ(RingAvoiding(Peers(4), Pairs({{1, 2}})), (std::vector{P(1), P(3), P(2), P(4)}));
  EXPECT_EQ(RingAvoiding(Peers(4), Pairs({{4, 1}})), (std::vector{P(1), P(2), P(4), P(3)}));
}

TEST(RingTest, TwoAndThreeHaveNoRingAroundAPair) {
  EXPECT_EQ(RingAvoiding(Peers(2), Pairs({{1, 2}})), std::nullopt);
  EXPECT_EQ(RingAvoiding(Peers(3), Pairs({{1, 3}})), std::nullopt);
  // Somebody who is blocked with all but one has one neighbour at most.
  EXPECT_EQ(RingAvoiding(Peers(4), Pairs({{1, 2}, {1, 3}})), std::nullopt);
}

TEST(RingTest, OneAloneIsARing) { EXPECT_EQ(RingAvoiding(Peers(1), {}), Peers(1)); }

TEST(RingTest, SmallRingsAreFoundWheneverThereIsOne) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Prng prng(seed);
    const uint64_t n = 2 + prng.Below(6);
    const BlockedPairs blocked = RandomPairs(n, 0.1 + 0.1 * static_cast<double>(seed % 6), &prng);
    std::vector<PeerId> order = Peers(n);
    bool exists = false;
    do {
      exists = exists || Avoids(order, blocked);
    } while (std::next_permutation(order.begin() + 1, order.end()));
    const auto ring = RingAvoiding(Peers(n), blocked);
    ASSERT_EQ(ring.has_value(), exists) << "seed " << seed;
    if (!ring) continue;
    EXPECT_TRUE(Avoids(*ring, blocked)) << "seed " << seed;
    EXPECT_EQ(ring->front(), P(1));
    std::vector<PeerId> sorted = *ring;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, Peers(n)) << "seed " << seed;
  }
}

// Where everybody reaches more than half of the others, a ring exists; the repair finds it.
TEST(RingTest, LargeRingsAreFoundWhereMostReachMost) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Prng prng(seed);
    const uint64_t n = 9 + prng.Below(60);
    const BlockedPairs blocked = RandomPairs(n, 0.02 * static_cast<double>(seed % 10), &prng);
    const auto ring = RingAvoiding(Peers(n), blocked);
    ASSERT_TRUE(ring.has_value()) << "seed " << seed;
    EXPECT_TRUE(Avoids(*ring, blocked)) << "seed " << seed;
    EXPECT_EQ(ring->front(), P(1));
    std::vector<PeerId> sorted = *ring;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, Peers(n)) << "seed " << seed;
  }
}

TEST(RingTest, OnePairAmongManyMovesOnePeer) {
  std::vector<PeerId> wanted = Peers(12);
  std::swap(wanted[4], wanted[5]);
  EXPECT_EQ(RingAvoiding(Peers(12), Pairs({{4, 5}})), wanted);
}

TEST(RelayTest, IsTheFirstInTheRingThatReachesBoth) {
  const std::vector<PeerId> ring = {P(9), P(3), P(1), P(2)};
  const BlockedPairs blocked = Pairs({{1, 3}, {9, 1}});
  EXPECT_EQ(RelayBetween(ring, blocked, P(1), P(3)), P(2));
  EXPECT_EQ(RelayBetween(ring, blocked, P(3), P(1)), P(2));
  EXPECT_EQ(RelayBetween(ring, blocked, P(2), P(1)), P(1)) << "not blocked: no relay";
  EXPECT_EQ(RelayBetween(ring, Pairs({{1, 3}, {3, 9}, {2, 3}}), P(1), P(3)), PeerId());
}

TEST(RingFaultTest, NamesWhatIsWrong) {
  const std::vector<PeerId> ring = {P(1), P(3), P(2), P(4)};
  EXPECT_EQ(RingFault(ring, {}), "");
  EXPECT_EQ(RingFault(ring, Pairs({{1, 2}})), "");
  EXPECT_EQ(RingFault(ring, Pairs({{1, 3}})), "blocked pair p1-p3 are neighbours");
  EXPECT_EQ(RingFault(ring, Pairs({{1, 4}})), "blocked pair p1-p4 are neighbours");
  EXPECT_EQ(RingFault(ring, Pairs({{1, 7}})),
            "blocked pair p1-p7 is no pair of peers of the epoch, the smaller first");
  EXPECT_EQ(RingFault(ring, {{P(2), P(1)}}),
            "blocked pair p2-p1 is no pair of peers of the epoch, the smaller first");
  EXPECT_EQ(RingFault(ring, {{P(1), P(2)}, {P(1), P(2)}}), "blocked pair p1-p2 is out of order");
  EXPECT_EQ(RingFault({P(1), P(2)}, Pairs({{1, 2}})), "blocked pair p1-p2 are neighbours");
  // A ring of five in which nobody reaches both ends.
  EXPECT_EQ(RingFault({P(1), P(2), P(3), P(4), P(5), P(6)},
                      Pairs({{1, 4}, {1, 3}, {1, 5}, {2, 4}, {4, 6}})),
            "blocked pair p1-p4 has no relay");
}

}  // namespace
}  // namespace longhaul::control
