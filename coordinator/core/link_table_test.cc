#include "coordinator/core/link_table.h"

#include <limits>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using control::LinkMeasure;

constexpr Tick kNow{Seconds(5000)};
const PeerId kA(1), kB(2), kC(3);

TEST(LinkTable, TellsWhatDiffersByMoreThanNoise) {
  LinkTable links;
  EXPECT_TRUE(links.Record({kA, kB, 1000000, 50000}, kNow));
  EXPECT_FALSE(links.Record({kA, kB, 1000000, 50000}, kNow));
  EXPECT_FALSE(links.Record({kA, kB, 1020000, 53000}, kNow));
  EXPECT_TRUE(links.Record({kA, kB, 1100000, 53000}, kNow));
  EXPECT_TRUE(links.Record({kA, kB, 1100000, 80000}, kNow));
  EXPECT_TRUE(links.Record({kA, kB, 500000, 80000}, kNow));
  EXPECT_TRUE(links.Record({kB, kA, 500000, 80000}, kNow)) << "another direction";
  EXPECT_EQ(links.size(), 2u);
}

TEST(LinkTable, KeepsTheNewestOfEachKind) {
  LinkTable links;
  links.Record({kA, kB, 1000000, 0, 2000}, kNow);
  links.Record({kA, kB, 9000000, 70000, 3000}, kNow);
  EXPECT_EQ(links.Find(kA, kB, kNow), (MeasuredLink{1000000, 0, kNow + -Seconds(2)}))
      << "an older one came later";
  links.Record({kA, kB, 0, 50000, 1000}, kNow);
  EXPECT_EQ(links.Find(kA, kB, kNow), (MeasuredLink{1000000, 50000, kNow + -Seconds(1)}));
}

TEST(LinkTable, TakesTheWayThereAndBackFromTheOtherDirection) {
  LinkTable links;
  links.Record({kA, kB, 1000000, 50000}, kNow);
  EXPECT_EQ(links.Find(kB, kA, kNow), (MeasuredLink{0, 50000, kNow}));
  links.Record({kB, kA, 3000000, 0}, kNow);
  EXPECT_EQ(links.Find(kB, kA, kNow), (MeasuredLink{3000000, 50000, kNow}));
  links.Record({kB, kA, 0, 60000}, kNow);
  const LinkMatrix matrix = links.Matrix({kC, kB, kA}, kNow);
  EXPECT_EQ(matrix.At(2, 1), (LinkQuality{1000000, 50000, false}));
  EXPECT_EQ(matrix.At(1, 2), (LinkQuality{3000000, 60000, false}));
  EXPECT_EQ(matrix.At(0, 1), LinkQuality{});
}

TEST(LinkTable, AProbeWithFewConnectionsOrdersRingsAndSaysNothingOfWhatOpsWouldGet) {
  LinkTable links;
  links.Record({kA, kB, 9000000, 70000}, kNow);
  EXPECT_TRUE(links.Record({kB, kA, 1000000, 70000, 0, /*at_least=*/true}, kNow));
  EXPECT_EQ(links.Cost({kA, kB}, {}, nullptr, kNow),
            (control::LinkCost{35000, 9000000, 9000000, 9000000, {}}));
  EXPECT_EQ(links.Matrix({kA, kB}, kNow).At(1, 0), (LinkQuality{1000000, 70000, false}));
  EXPECT_TRUE(links.Record({kB, kA, 1000000, 70000}, kNow)) << "an op got no more";
  EXPECT_EQ(links.Cost({kA, kB}, {}, nullptr, kNow),
            (control::LinkCost{35000, 1000000, 1000000, 1000000, {}}));
}

TEST(LinkTable, NamesThePairsBetweenWhichLargePacketsVanish) {
  LinkTable links;
  LinkMeasure measure{kB, kA, 0, 0};
  measure.small_packets = true;
  links.Record(measure, kNow);
  links.Record({kB, kC, 5, 5}, kNow);
  const std::set<std::pair<PeerId, PeerId>> pair{{kA, kB}};
  EXPECT_EQ(links.SmallPackets({kA, kB, kC}, kNow), pair);
  EXPECT_TRUE(links.SmallPackets({kB, kC}, kNow).empty());
  EXPECT_TRUE(links.SmallPackets({kA, kB}, kNow + kLinkExpires).empty());
  links.Record({kB, kA, 5, 5}, kNow);
  EXPECT_TRUE(links.SmallPackets({kA, kB}, kNow).empty()) << "a new link has no such trouble";
}

TEST(LinkTable, ForgetsWhatIsOldAndWhoIsGone) {
  LinkTable links;
  links.Record({kA, kB, 1000000, 50000, 60000}, kNow);
  links.Record({kB, kC, 1000000, 50000}, kNow);
  const Tick later = kNow + (kLinkExpires - Seconds(30));
  EXPECT_FALSE(links.Find(kA, kB, later));
  EXPECT_TRUE(links.Find(kB, kC, later));
  EXPECT_EQ(links.Matrix({kA, kB}, later).At(0, 1), LinkQuality{});
  EXPECT_TRUE(links.Record({kA, kB, 1000000, 50000}, later)) << "it was unknown again";
  EXPECT_FALSE(links.Record({kA, kC, 1, 1, static_cast<uint32_t>(kLinkExpires / 1000)}, later));
  EXPECT_EQ(links.size(), 2u);
  links.Forget(kB);
  EXPECT_EQ(links.size(), 0u);
  EXPECT_FALSE(links.Find(kB, kC, later));
}

TEST(LinkTable, TheWorstOfWhatIsKnownIsTheCostOfAGroup) {
  LinkTable links;
  EXPECT_EQ(links.Cost({kA, kB, kC}, {}, nullptr, kNow), control::LinkCost{});
  links.Record({kA, kB, 2000000, 50000}, kNow);
  links.Record({kB, kA, 1000000, 0}, kNow);
  links.Record({kB, kC, 0, 70000}, kNow);
  links.Record({kC, PeerId(9), 10, 900000}, kNow);
  links.Record({kC, kA, 3000000, 20000, 60000}, kNow);
  // The pair of kA and kB carries its 2/3 of a tensor at 1 MB/s; the best shares give kC a part.
  const control::LinkCost cost = links.Cost({kA, kB, kC}, {}, nullptr, kNow);
  EXPECT_EQ(cost.latency_us, 35000u);
  EXPECT_EQ(cost.ring_bytes_per_second, 2000000u);
  EXPECT_EQ(cost.even_bytes_per_second, 1500000u);
  EXPECT_GT(cost.mesh_bytes_per_second, 2900000u);
  EXPECT_EQ(SharesFault(cost.shares, 3), "");
  EXPECT_EQ(links.Cost({kA, kC, kB}, {}, nullptr, kNow).ring_bytes_per_second, 1000000u);
  EXPECT_EQ(links.Cost({kC, kA}, {}, nullptr, kNow + (kLinkExpires - Seconds(30))),
            control::LinkCost{})
      << "it is too old";
}

TEST(LinkTable, PeersOfABlockedPairGetNoShare) {
  const LinkTable links;
  control::BlockedPairs blocked{control::MakeBlockedPair(kA, kC)};
  EXPECT_EQ(links.Cost({kC, kB, kA}, blocked, nullptr, kNow).shares, (Shares{0, kShareUnits, 0}));
  blocked.push_back(control::MakeBlockedPair(kB, kC));
  EXPECT_EQ(links.Cost({kC, kB, kA}, blocked, nullptr, kNow), control::LinkCost{}) << "no mesh";
  EXPECT_EQ(links.Cost({kB, kA}, blocked, nullptr, kNow), control::LinkCost{})
      << "kC is not among them";
}

TEST(LinkTable, IsBounded) {
  LinkTable links;
  for (uint64_t i = 0; i < kLinksMax; ++i) {
    links.Record({PeerId(1 + i / 1024), PeerId(5000 + i % 1024), 1000, 0}, kNow);
  }
  EXPECT_EQ(links.size(), kLinksMax);
  EXPECT_FALSE(links.Record({kA, kB, 1000, 0}, kNow));
  EXPECT_FALSE(links.Record({PeerId(9000), kB, 1000, 0}, kNow));
  EXPECT_TRUE(links.Record({kA, PeerId(5000), 9000, 0}, kNow)) << "a known one";
  EXPECT_EQ(links.size(), kLinksMax);
  for (uint64_t i = 1; i <= kHostsMax; ++i) links.RecordHost(PeerId(i), 1000, 1000, kNow);
  EXPECT_FALSE(links.RecordHost(PeerId(kHostsMax + 1), 1000, 1000, kNow));
  EXPECT_FALSE(links.HostOf(PeerId(kHostsMax + 1), kNow));
  EXPECT_TRUE(links.RecordHost(PeerId(1), 9000, 1000, kNow)) << "a known one";
}

TEST(LinkTable, TellsWhenAHostsRatesChangeByMoreThanATenth) {
  LinkTable links;
  EXPECT_FALSE(links.RecordHost(kA, 0, 0, kNow)) << "nothing is known";
  EXPECT_FALSE(links.HostOf(kA, kNow));
  EXPECT_TRUE(links.RecordHost(kA, 1000, 0, kNow));
  EXPECT_FALSE(links.RecordHost(kA, 930, 0, kNow));
  EXPECT_TRUE(links.RecordHost(kA, 880, 0, kNow)) << "small steps add up";
  EXPECT_TRUE(links.RecordHost(kA, 880, 2000, kNow));
  EXPECT_FALSE(links.RecordHost(kA, 0, 1900, kNow)) << "the rate up stays";
  EXPECT_EQ(links.HostOf(kA, kNow), (HostRates{880, 1900}));
  EXPECT_FALSE(links.HostOf(kA, kNow + kLinkExpires));
  EXPECT_TRUE(links.RecordHost(kA, 880, 0, kNow + kLinkExpires)) << "it was unknown again";
  EXPECT_EQ(links.HostOf(kA, kNow + kLinkExpires), (HostRates{880, 0}));
  links.Forget(kA);
  EXPECT_FALSE(links.HostOf(kA, kNow + kLinkExpires));
}

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

LinkMeasure Held(PeerId from, PeerId to, uint64_t rate) {
  LinkMeasure measure{from, to, rate, 1000};
  measure.held = true;
  return measure;
}

// The host sent so much in all, over a link that may carry more.
void Sends(PeerId host, uint64_t rate, LinkTable* links) {
  links->RecordHost(host, rate, 0, kNow);
  links->Record({host, host == kA ? kB : kA, 1, 0, 0, /*at_least=*/true}, kNow);
}

TEST(LinkTable, AHostCarriesWhatItWasSeenToSend) {
  LinkTable links;
  links.RecordHost(kA, 1000, 10, kNow);
  links.Record({kA, kB, 300, 1000, 0, /*at_least=*/true}, kNow);
  links.Record({kA, kC, 400, 1000}, kNow);
  const ShareProblem problem = links.Capacities({kB, kA, kC}, kNow);
  EXPECT_EQ(problem.host(1), 1000) << "that it received little says nothing";
  EXPECT_EQ(problem.host(0), 1000) << "unknown: as fast as the fastest one that is known";
  EXPECT_EQ(problem.pair(0, 1), kUnlimited) << "another link may have taken the rest";
  EXPECT_EQ(problem.pair(1, 2), 400);
  EXPECT_EQ(links.Capacities({kB, kA, kC}, kNow + kLinkExpires).host(1), kUnlimited);
}

TEST(LinkTable, AHostWhoseConnectionsAreLimitedIsUnknown) {
  LinkTable links;
  Sends(kA, 1000, &links);
  Sends(kB, 100, &links);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, kNow).host(1), 100);
  EXPECT_TRUE(links.RecordHost(kB, control::kNoLimitBytesPerSecond, 0, kNow));
  EXPECT_EQ(links.Capacities({kA, kB, kC}, kNow).host(1), 1000);
  EXPECT_EQ(links.HostOf(kB, kNow), (HostRates{0, 0}));
}

TEST(LinkTable, IfNothingIsKnownOfHostsPairsCountAsFastAsTheFastestLink) {
  LinkTable links;
  const PeerId d(4);
  const std::vector<PeerId> ring{kA, kB, kC, d};
  links.Record({kA, kB, 500, 1000, 0, /*at_least=*/true}, kNow);
  EXPECT_EQ(links.Capacities(ring, kNow).pair(2, 3), 500);
  links.Record({kC, d, 400, 1000}, kNow);
  EXPECT_EQ(links.Capacities(ring, kNow).pair(2, 3), 400);
  EXPECT_EQ(links.Capacities(ring, kNow).pair(0, 2), 500);
  EXPECT_EQ(links.Capacities(ring, kNow).host(0), kUnlimited);
  // The two that are on the slower link own less, but do not leave all to the others.
  const Shares shares = links.Cost(ring, {}, nullptr, kNow).shares;
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_GT(shares[0], shares[2]);
  EXPECT_GT(shares[2] * 2, shares[0]);
  for (const PeerId peer : ring) links.RecordHost(peer, 1000, 0, kNow);
  links.Record({kB, kC, 0, 1000}, kNow);
  EXPECT_EQ(links.Capacities(ring, kNow).pair(0, 2), kUnlimited) << "the hosts' rates bound it";
}

TEST(LinkTable, SmallOpsDoNotSayWhatAHostCarries) {
  LinkTable links;
  links.RecordHost(kA, 1000, 0, kNow);
  links.Record({kA, kB, 0, 160000}, kNow);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, kNow).host(0), kUnlimited);
  EXPECT_EQ(links.Cost({kA, kB, kC}, {}, nullptr, kNow), (control::LinkCost{80000, 0, 0, 0, {}}))
      << "the latency is known before a rate";
}

TEST(LinkTable, AHostCarriesAtLeastWhatOneOfItsLinksCarries) {
  LinkTable links;
  links.RecordHost(kA, 1000, 0, kNow);
  links.Record({kA, kB, 5000, 1000}, kNow);
  links.Record({kA, kC, 9000, 1000, 0, /*at_least=*/true}, kNow);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, kNow).host(0), 5000) << "a ring's pace is no limit";
}

// Ops move bytes on all links at once. So nothing measures the one link again for minutes.
TEST(LinkTable, AnAccessLinkThatBecameSlowerIsNotBoundByWhatALinkCarriedBefore) {
  LinkTable links;
  links.RecordHost(kA, 9000, 0, kNow);
  links.Record({kA, kB, 5000, 1000}, kNow);
  const Tick slower = kNow + Seconds(10);
  links.RecordHost(kA, 1000, 0, slower);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, slower).host(0), 5000) << "that may be a ring's pace";
  const Tick later = slower + kLinkOutlivesRate;
  links.RecordHost(kA, 1010, 0, later);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, later).host(0), 1010);
  links.Record({kA, kB, 5000, 1000}, later);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, later).host(0), 5000) << "it was measured again";
}

// Three idle hosts. One of them had an op long enough to be busy, the others only small ones.
TEST(LinkTable, WhatHostsHappenedToSendMakesNoSharesUnequal) {
  LinkTable links;
  const std::vector<PeerId> ring{kA, kB, kC};
  for (const PeerId from : ring) {
    for (const PeerId to : ring) {
      if (from == to) continue;
      links.Record({from, to, 415'000'000, 200, 0, /*at_least=*/true}, kNow);
    }
  }
  for (const PeerId idle : {kA, kC}) {
    links.RecordHost(idle, control::kNoLimitBytesPerSecond, 2'400'000, kNow);
  }
  links.RecordHost(kB, 390'000'000, 2'400'000, kNow);
  EXPECT_EQ(links.Cost(ring, {}, nullptr, kNow).shares, Shares{});
  EXPECT_EQ(links.PaceOf(ring, {}, kNow), std::nullopt);
}

TEST(LinkTable, AHostThatHoldsTwoSendersCarriesWhatItWasSeenToReceive) {
  LinkTable links;
  links.RecordHost(kA, 1000, 200, kNow);
  links.Record({kA, kB, 300, 1000, 0, /*at_least=*/true}, kNow);
  EXPECT_TRUE(links.Record({kB, kA, 100, 1000}, kNow));
  EXPECT_TRUE(links.Record(Held(kB, kA, 100), kNow)) << "that is news";
  links.Record(Held(kC, kA, 90), kNow);
  const ShareProblem problem = links.Capacities({kA, kB, kC}, kNow);
  EXPECT_EQ(problem.host(0), 200);
  links.RecordHost(kA, 1000, 50, kNow);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, kNow).host(0), 190) << "its links carry more";
  EXPECT_EQ(problem.pair(0, 1), kUnlimited) << "the host limits, not the pair";
  EXPECT_EQ(links.Capacities({kA, kB}, kNow).host(0), 1000) << "of one group only one sends";
}

TEST(LinkTable, ALinkThatAloneHoldsItsSenderLimitsThePair) {
  LinkTable links;
  links.RecordHost(kA, 1000, 200, kNow);
  links.Record({kA, kC, 300, 1000, 0, /*at_least=*/true}, kNow);
  links.Record(Held(kB, kA, 100), kNow);
  const ShareProblem problem = links.Capacities({kA, kB, kC}, kNow);
  EXPECT_EQ(problem.host(0), 1000);
  EXPECT_EQ(problem.pair(0, 1), 100);
  EXPECT_EQ(problem.pair(0, 2), kUnlimited);
  LinkMeasure bound = Held(kB, kA, 100);
  bound.at_least = true;
  links.Record(bound, kNow);
  EXPECT_EQ(links.Capacities({kA, kB, kC}, kNow).pair(0, 1), kUnlimited);
}

TEST(LinkTable, RatesThatAreNearToEachOtherCountAsEqual) {
  LinkTable links;
  const PeerId d(4);
  const PeerId e(5);
  Sends(kA, 1000, &links);
  Sends(kB, 500, &links);
  Sends(kC, 880, &links);
  Sends(d, 870, &links);
  const ShareProblem problem = links.Capacities({kA, kB, kC, d, e}, kNow);
  EXPECT_EQ(problem.host(0), 940);
  EXPECT_EQ(problem.host(1), 500);
  EXPECT_EQ(problem.host(2), 940);
  EXPECT_EQ(problem.host(3), 870) << "too far below the highest one";
  EXPECT_EQ(problem.host(4), 940) << "unknown: as fast as the fastest ones";
}

TEST(LinkTable, CostsFollowFromWhatHostsCarry) {
  LinkTable links;
  const PeerId d(4);
  for (const PeerId peer : {kA, kB, kC, d}) Sends(peer, 1000000, &links);
  const control::LinkCost even = links.Cost({kA, kB, kC, d}, {}, nullptr, kNow);
  EXPECT_EQ(even, (control::LinkCost{0, 1000000, 666666, 666666, {}}));
  Sends(kC, 250000, &links);
  const control::LinkCost cost = links.Cost({kA, kC, kB, d}, {}, nullptr, kNow);
  EXPECT_EQ(cost.ring_bytes_per_second, 250000u);
  EXPECT_EQ(cost.even_bytes_per_second, 166666u);
  EXPECT_GT(cost.mesh_bytes_per_second, 249000u);
  ASSERT_EQ(cost.shares.size(), 4u);
  EXPECT_LT(cost.shares[1], kShareUnits / 1000);
}

TEST(LinkTable, HostsKeepTheirSharesUntilOthersAreFasterByATwentieth) {
  LinkTable links;
  const PeerId d(4);
  const std::vector<PeerId> ring{kA, kB, kC, d};
  for (const PeerId peer : {kA, kB, kC}) Sends(peer, 1000000, &links);
  Sends(d, 700000, &links);
  const Shares best = links.Cost(ring, {}, nullptr, kNow).shares;
  EXPECT_EQ(links.Cost(ring, {}, &best, kNow).shares, best);
  const Shares nothing_for_d{kShareUnits / 3, kShareUnits / 3, kShareUnits / 3 + 1, 0};
  const control::LinkCost kept = links.Cost(ring, {}, &nothing_for_d, kNow);
  EXPECT_EQ(kept.shares, nothing_for_d) << "an op takes 3 % longer";
  EXPECT_NEAR(static_cast<double>(kept.mesh_bytes_per_second), 600000, 10) << "with these shares";
  const Shares equal;
  EXPECT_EQ(links.Cost(ring, {}, &equal, kNow).shares, best) << "an op takes a third longer";
  Sends(d, 1000000, &links);
  EXPECT_EQ(links.Cost(ring, {}, &best, kNow).shares, equal) << "equal shares never wait";
}

TEST(LinkTable, NamesThePeerThatSetsThePace) {
  LinkTable links;
  const PeerId d(4);
  for (const PeerId peer : {kA, kB, kC, d}) Sends(peer, 1000000, &links);
  EXPECT_EQ(links.PaceOf({kA, kB, kC, d}, {}, kNow), std::nullopt) << "all are alike";
  Sends(kC, 250000, &links);
  const std::optional<PaceView> pace = links.PaceOf({kA, kB, kC, d}, {}, kNow);
  ASSERT_TRUE(pace);
  EXPECT_EQ(pace->peer, kC);
  EXPECT_EQ(pace->bytes_per_second,
            links.Cost({kA, kB, kC, d}, {}, nullptr, kNow).mesh_bytes_per_second);
  EXPECT_EQ(pace->without, 750000u);
  EXPECT_EQ(links.PaceOf({kA, kC}, {}, kNow), std::nullopt);
}

TEST(LinkTable, ALargeRingHasNoLimits) {
  LinkTable links;
  std::vector<PeerId> ring;
  for (uint64_t i = 1; i <= kShareHostsMax + 1; ++i) {
    ring.push_back(PeerId(i));
    Sends(PeerId(i), 1000, &links);
  }
  EXPECT_EQ(links.Capacities(ring, kNow).host(0), kUnlimited);
  ring.pop_back();
  EXPECT_EQ(links.Capacities(ring, kNow).host(0), 1000);
}

}  // namespace
}  // namespace longhaul::coordinator
