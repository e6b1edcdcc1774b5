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
  // Peer 1 reaches only peer 4, so it cannot have two neighbours.
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

// If every peer reaches more than half of the other peers, a ring exists, and the repair finds it.
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

BlockedPair Through(uint64_t a, uint64_t b, uint64_t relay) { return {P(a), P(b), P(relay)}; }

TEST(RelayTest, IsThatOfThePairWhicheverEndAsks) {
  const BlockedPairs blocked = {Through(1, 3, 2), Through(2, 9, 3)};
  EXPECT_EQ(RelayOf(blocked, P(1), P(3)), P(2));
  EXPECT_EQ(RelayOf(blocked, P(3), P(1)), P(2));
  EXPECT_EQ(RelayOf(blocked, P(9), P(2)), P(3));
  EXPECT_EQ(RelayOf(blocked, P(1), P(2)), PeerId()) << "not blocked";
  EXPECT_EQ(RelayOf(blocked, P(3), P(9)), PeerId());
  EXPECT_TRUE(IsBlocked(blocked, P(3), P(1))) << "whatever its relay";
}

TEST(RelayTest, ReachesBoth) {
  const BlockedPairs blocked = Pairs({{1, 3}, {1, 9}});
  EXPECT_TRUE(CanRelay(blocked, blocked[0], P(2)));
  EXPECT_FALSE(CanRelay(blocked, blocked[0], P(9)));
  EXPECT_FALSE(CanRelay(blocked, blocked[0], P(1)));
  EXPECT_FALSE(CanRelay(blocked, blocked[0], P(3)));
  EXPECT_FALSE(CanRelay(blocked, blocked[0], PeerId()));
}

TEST(BlockedFaultTest, NamesWhatIsWrong) {
  const std::vector<PeerId> peers = {P(1), P(3), P(2), P(4)};
  EXPECT_EQ(BlockedFault(peers, {}), "");
  EXPECT_EQ(BlockedFault(peers, {Through(1, 2, 4), Through(1, 3, 4)}), "");
  EXPECT_EQ(BlockedFault(peers, {Through(1, 7, 2)}),
            "blocked pair p1-p7 is no pair of peers of the epoch, the smaller first");
  EXPECT_EQ(BlockedFault(peers, {Through(2, 1, 3)}),
            "blocked pair p2-p1 is no pair of peers of the epoch, the smaller first");
  EXPECT_EQ(BlockedFault(peers, {Through(1, 2, 3), Through(1, 2, 4)}),
            "blocked pair p1-p2 is out of order");
  EXPECT_EQ(BlockedFault(peers, Pairs({{1, 2}})), "blocked pair p1-p2 has no relay");
  for (const auto& [relay, name] : {std::pair(1, "p1"), std::pair(3, "p3"), std::pair(7, "p7")}) {
    EXPECT_EQ(BlockedFault(peers, {Through(1, 2, relay), Through(1, 3, 4)}),
              std::string("blocked pair p1-p2 has relay ") + name + ", which does not reach both");
  }
}

}  // namespace
}  // namespace longhaul::control
