#include "peerd/core/epoch_record.h"

#include <gtest/gtest.h>

#include "base/digest.h"
#include "peerd/core/algorithm.h"
#include "peerd/core/testing.h"

namespace longhaul::peerd {
namespace {

std::vector<PeerId> Peers(const std::vector<uint64_t>& values) {
  std::vector<PeerId> peers;
  for (const uint64_t value : values) peers.push_back(PeerId(value));
  return peers;
}

control::PrepareEpoch Good() { return MakePrepare(5, 4, 5, 3, {{1, 1, 1}, {2, 2, 5}}); }

TEST(ProblemOf, SaysWhatMakesNoSense) {
  EXPECT_EQ(ProblemOf(Good(), PeerId(1)), "");
  EXPECT_EQ(ProblemOf(Good(), PeerId(9)), "this peer is not in the ring");
  auto twice = Good();
  twice.peers.push_back(twice.peers[0]);
  EXPECT_EQ(ProblemOf(twice, PeerId(1)), "peer p1 stands twice");
  auto boundary = Good();
  boundary.boundary = Epoch(6);
  EXPECT_NE(ProblemOf(boundary, PeerId(1)), "");
  auto older = Good();
  older.freeze = true;
  EXPECT_EQ(ProblemOf(older, PeerId(1)), "it freezes, and its last_freeze is older");
  auto member = Good();
  member.members.push_back(member.members[0]);
  EXPECT_EQ(ProblemOf(member, PeerId(1)), "member m1 stands twice");
  auto stray = Good();
  stray.members[1].peer = PeerId(7);
  EXPECT_EQ(ProblemOf(stray, PeerId(1)), "member m2 is at no peer of the ring");
  auto late = Good();
  late.boundary = Epoch(4);
  EXPECT_EQ(ProblemOf(late, PeerId(1)), "member m2 joined after the boundary");
  auto idle = Good();
  idle.peers.push_back({PeerId(7), {}, 0});
  EXPECT_EQ(ProblemOf(idle, PeerId(1)), "a peer of the ring has no member");
}

TEST(ProblemOf, NamesABlockedPairWithoutARelay) {
  auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 1}});
  prepare.blocked = {{PeerId(1), PeerId(2), PeerId(4)}};
  EXPECT_EQ(ProblemOf(prepare, PeerId(1)), "");
  prepare.blocked = {{PeerId(1), PeerId(2), PeerId()}};
  EXPECT_EQ(ProblemOf(prepare, PeerId(1)), "blocked pair p1-p2 has no relay");
}

TEST(LinksOf, ABlockedPairIsLinkedThroughItsRelayAndHasDataLanesWhereTheRingNeedsIt) {
  // A ring of four peers avoids the blocked pair; a ring of three cannot.
  for (const bool four : {true, false}) {
    std::vector<At> members = {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}};
    if (four) members.push_back({4, 4, 1});
    auto prepare = MakePrepare(1, 0, 1, 0, members);
    prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
    for (const uint64_t self : {1, 3}) {
      const uint64_t other = 4 - self;
      const auto links = LinksOf(prepare, PeerId(self));
      EXPECT_EQ(links.size(), members.size() - 1);
      for (const LinkWanted& link : links) {
        const bool blocked = link.peer.peer == PeerId(other);
        EXPECT_EQ(link.relay, blocked ? PeerId(2) : PeerId());
        EXPECT_EQ(link.data, !blocked || !four);
        if (blocked) {
          EXPECT_EQ(link.dial, self == 1);
        }
      }
    }
  }
}

TEST(LinksOf, TheElderDialsThenTheSmallerId) {
  const auto prepare = MakePrepare(5, 4, 5, 3, {{1, 9, 1}, {2, 2, 5}, {3, 3, 5}});
  const auto links = LinksOf(prepare, PeerId(2));
  ASSERT_EQ(links.size(), 2u);
  EXPECT_FALSE(links[0].dial);  // p9 came into the group first
  EXPECT_TRUE(links[1].dial);   // p2 and p3 came together: the lower number dials
  for (const auto& link : links) EXPECT_TRUE(link.data);
  for (const auto& link : LinksOf(prepare, PeerId(9))) EXPECT_TRUE(link.dial);
}

TEST(LinksOf, ManyPeersGetDataLanesToRingNeighboursOnlyAndBothEndsAgree) {
  std::vector<At> members;
  // Every second peer came later. In the ring of an older boundary its two neighbours are adjacent.
  constexpr uint64_t kPeers = kMeshPeersMax + 2;
  for (uint64_t i = 1; i <= kPeers; ++i) members.push_back({i, i, i % 2 == 0 ? 5u : 1u});
  const auto prepare = MakePrepare(5, 4, 5, 3, members);
  for (uint64_t a = 1; a <= kPeers; a += 7) {
    for (const LinkWanted& link : LinksOf(prepare, PeerId(a))) {
      const uint64_t b = link.peer.peer.value();
      const uint64_t distance = std::min((a + kPeers - b) % kPeers, (b + kPeers - a) % kPeers);
      EXPECT_EQ(link.data, distance == 1 || (distance == 2 && a % 2 == 1)) << a << " " << b;
      for (const LinkWanted& back : LinksOf(prepare, PeerId(b))) {
        if (back.peer.peer != PeerId(a)) continue;
        EXPECT_EQ(back.data, link.data);
        EXPECT_NE(back.dial, link.dial);
      }
    }
  }
}

TEST(LinksOf, AmongManyPeersLinksThatOnlyTheMeshNeedsBeginWithOneLane) {
  for (const uint64_t peers : {16, 17, 64}) {
    std::vector<At> members;
    for (uint64_t i = 1; i <= peers; ++i) members.push_back({i, i, 1u});
    size_t one_lane = 0;
    for (const LinkWanted& link : LinksOf(MakePrepare(1, 0, 1, 0, members), PeerId(1))) {
      EXPECT_TRUE(link.data);
      if (link.one_lane) ++one_lane;
    }
    EXPECT_EQ(one_lane, peers > 16 ? peers - 3 : 0) << peers;
  }
}

TEST(EpochHistory, KnowsTheMembersOfOlderEpochsUntilItIsToldToForgetThem) {
  EpochHistory history;
  history.Add(RecordOf(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}})));
  history.Add(RecordOf(MakePrepare(4, 1, 1, 4, {{2, 2, 1}})));  // freezes: the record is forgotten
  EXPECT_EQ(*history.MembersOf(Epoch(1)), (std::vector{MemberId(1), MemberId(2)}));
  EXPECT_EQ(*history.MembersOf(Epoch(4)), std::vector{MemberId(2)});
  EXPECT_EQ(history.MembersOf(Epoch(2)), nullptr);
  history.ForgetMembersBefore(Epoch(4));
  EXPECT_EQ(history.MembersOf(Epoch(1)), nullptr);
  EXPECT_NE(history.MembersOf(Epoch(4)), nullptr);
}

TEST(EpochHistory, ThereIsAMeshWhereAllLinksHaveDataLanesAndNoneIsBlocked) {
  for (const uint64_t peers : {2, 17, 64, 65}) {
    std::vector<At> members;
    for (uint64_t i = 1; i <= peers; ++i) members.push_back({i, i, i == peers ? 2u : 1u});
    auto prepare = MakePrepare(2, 1, 2, 0, members);
    bool all_data = true;
    for (const LinkWanted& link : LinksOf(prepare, PeerId(1))) all_data = all_data && link.data;
    EXPECT_EQ(all_data, peers <= 64);
    EpochHistory history;
    history.Add(RecordOf(prepare));
    EXPECT_EQ(history.For(Epoch(2))->mesh, all_data) << peers;
    // The last peer came later. It takes no part in ops of boundary 1, so a blocked pair with this
    // peer does not matter for these ops.
    prepare.epoch = Epoch(3);
    prepare.blocked = {{PeerId(2), PeerId(peers), PeerId(1)}};
    if (peers == 2) prepare.blocked.clear();
    EpochHistory later;
    later.Add(RecordOf(prepare));
    EXPECT_EQ(later.For(Epoch(1))->mesh, all_data) << peers;
    EXPECT_EQ(later.For(Epoch(3))->mesh, all_data && peers == 2) << peers;
  }
}

TEST(EpochHistory, NewcomersTakeNoPartInOpsOfAnOlderBoundary) {
  EpochHistory history;
  history.Add(RecordOf(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}})));
  history.Add(RecordOf(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {3, 3, 2}, {2, 2, 1}})));
  EXPECT_EQ(history.committed(), Epoch(2));
  EXPECT_EQ(history.For(Epoch(1))->ring, Peers({1, 2}));
  EXPECT_EQ(history.For(Epoch(1))->epoch, Epoch(1));
  EXPECT_EQ(history.For(Epoch(2))->ring, Peers({1, 3, 2}));
  EXPECT_EQ(history.For(Epoch(2))->FirstMemberOf(PeerId(3)), MemberId(3));
  EXPECT_EQ(history.For(Epoch(2))->FirstMemberOf(PeerId(4)), MemberId());
}

TEST(EpochHistory, AnOpKeepsItsRingWhenAnEpochThatOnlyAdmitsOrdersItAnew) {
  EpochHistory history;
  history.Add(RecordOf(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}})));
  history.Add(RecordOf(MakePrepare(2, 1, 2, 0, {{3, 3, 1}, {1, 1, 1}, {2, 2, 1}, {4, 4, 2}})));
  EXPECT_EQ(history.For(Epoch(1))->ring, Peers({1, 2, 3}));
}

TEST(EpochHistory, AnOpKeepsTheCostOfTheEpochThatItRunsIn) {
  EpochHistory history;
  auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}});
  history.Add(RecordOf(prepare));
  prepare = MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}});
  prepare.cost = {40000, 5000000, 7000000, 8000000, {kShareUnits, 0}};
  history.Add(RecordOf(prepare));
  EXPECT_EQ(history.For(Epoch(1))->cost, control::LinkCost{}) << "nothing was known then";
  EXPECT_EQ(history.For(Epoch(2))->cost, prepare.cost);
}

TEST(EpochHistory, SharesFollowThePeersThatTakePart) {
  EpochHistory history;
  // Peer 4 is new, so ops of boundary 1 are without it.
  auto prepare = MakePrepare(3, 2, 2, 3, {{1, 1, 1}, {4, 4, 2}, {2, 2, 1}, {3, 3, 1}});
  prepare.cost = {1, 2, 300, 400, {kShareUnits / 4, kShareUnits / 2, kShareUnits / 4, 0}};
  history.Add(RecordOf(prepare));
  EXPECT_EQ(history.For(Epoch(2))->cost, prepare.cost);
  const auto old = history.For(Epoch(1));
  EXPECT_EQ(old->ring, Peers({1, 2, 3}));
  EXPECT_EQ(old->cost.shares, (Shares{kShareUnits / 2, kShareUnits / 2, 0}));
  EXPECT_EQ(old->cost.mesh_bytes_per_second, 400u);
  Participants some = *old;
  some.KeepMembers({MemberId(2), MemberId(3)});
  EXPECT_EQ(some.ring, Peers({2, 3}));
  EXPECT_EQ(some.cost.shares, (Shares{kShareUnits, 0}));
  some.KeepMembers({MemberId(3)});
  EXPECT_EQ(some.cost.shares, Shares{}) << "nobody is left who owns anything";
  EXPECT_EQ(some.cost.mesh_bytes_per_second, 300u);
}

TEST(EpochHistory, ABlockedPairThatOwnsNothingDoesNotNeedALinkInTheMesh) {
  auto prepare = MakePrepare(3, 2, 2, 3, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 1}});
  prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
  prepare.cost.shares = {0, kShareUnits / 2, 0, kShareUnits / 2};
  EpochHistory history;
  history.Add(RecordOf(prepare));
  EXPECT_FALSE(history.For(Epoch(2))->mesh);
  EXPECT_TRUE(history.For(Epoch(2))->mesh_of_owners);
  // Without the owners, shares are equal, and the mesh would need the blocked link.
  Participants some = *history.For(Epoch(2));
  some.KeepMembers({MemberId(1), MemberId(3)});
  EXPECT_FALSE(some.mesh_of_owners);
  EpochHistory owner;
  prepare.cost.shares = {kShareUnits / 4, kShareUnits / 2, 0, kShareUnits / 4};
  owner.Add(RecordOf(prepare));
  EXPECT_FALSE(owner.For(Epoch(2))->mesh_of_owners);
}

TEST(EpochHistory, WithoutNewcomersTheRingAvoidsBlockedPairsInItsOwnOrder) {
  EpochHistory history;
  // Without peer 5, peer 1 would have the neighbours 3 and 4.
  auto prepare = MakePrepare(3, 2, 2, 3, {{1, 1, 1}, {5, 5, 2}, {3, 3, 1}, {2, 2, 1}, {4, 4, 1}});
  prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
  ASSERT_EQ(ProblemOf(prepare, PeerId(1)), "");
  history.Add(RecordOf(prepare));
  EXPECT_EQ(history.For(Epoch(2))->ring, Peers({1, 5, 3, 2, 4}));
  const auto old = history.For(Epoch(1));
  ASSERT_EQ(old->ring.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_FALSE(control::IsBlocked(prepare.blocked, old->ring[i], old->ring[(i + 1) % 4])) << i;
  }
}

TEST(EpochHistory, ThreeOfWhichTwoAreBlockedHaveTheRingOfTheirOrder) {
  EpochHistory history;
  auto prepare = MakePrepare(3, 2, 2, 3, {{1, 1, 1}, {5, 5, 2}, {3, 3, 1}, {2, 2, 1}});
  prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
  history.Add(RecordOf(prepare));
  EXPECT_EQ(history.For(Epoch(1))->ring, Peers({1, 3, 2}));
}

TEST(EpochHistory, AFreezingEpochReplacesAllOlderOnes) {
  EpochHistory history;
  history.Add(RecordOf(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}})));
  history.Add(RecordOf(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 2}})));
  history.Add(RecordOf(MakePrepare(4, 2, 2, 4, {{3, 3, 2}, {1, 1, 1}})));
  EpochHistory newest;
  newest.Add(RecordOf(MakePrepare(4, 2, 2, 4, {{3, 3, 2}, {1, 1, 1}})));
  history.ForgetMembersBefore(Epoch(4));  // no boundary is older
  EXPECT_EQ(Digester().Add(history).value(), Digester().Add(newest).value());
  EXPECT_EQ(history.For(Epoch(1))->ring, Peers({1}));
  EXPECT_EQ(history.For(Epoch(2))->ring, Peers({3, 1}));
  EXPECT_EQ(history.For(Epoch(2))->epoch, Epoch(4));
  // A skipped number stands for the first epoch after it.
  history.Add(RecordOf(MakePrepare(7, 4, 6, 4, {{3, 3, 2}, {1, 1, 1}, {5, 5, 6}})));
  EXPECT_EQ(history.For(Epoch(6))->epoch, Epoch(7));
  EXPECT_EQ(history.For(Epoch(9))->epoch, Epoch(7));
  history.Clear();
  EXPECT_EQ(history.committed(), Epoch());
}

TEST(EpochHistory, KnowsMembersAlsoAfterTheirTime) {
  EpochHistory history;
  auto first = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  first.peers[0].host = "a";
  first.peers[1].host = "b";
  first.members[1].name = "gpu-1";
  first.members[1].cohort = "b-all";
  history.Add(RecordOf(first));
  auto later = MakePrepare(2, 1, 1, 2, {{1, 1, 1}});
  later.peers[0].host = "a";
  history.Add(RecordOf(later));
  const KnownMember* const former = history.Member(MemberId(2));
  ASSERT_NE(former, nullptr);
  EXPECT_EQ(former->host, "b");
  EXPECT_EQ(former->info.name, "gpu-1");
  EXPECT_EQ(former->info.cohort, "b-all");
  EXPECT_EQ(history.Member(MemberId(4)), nullptr);
  history.Clear();
  EXPECT_EQ(history.Member(MemberId(1)), nullptr);
}

TEST(EpochHistory, KnowsAtLeastFourThousandFormerMembers) {
  EpochHistory history;
  for (uint64_t epoch = 1; epoch <= 6000; ++epoch) {
    history.Add(RecordOf(MakePrepare(epoch, epoch - 1, epoch, epoch, {{epoch, 1, epoch}})));
  }
  EXPECT_NE(history.Member(MemberId(6000 - 4096)), nullptr);
  EXPECT_EQ(history.Member(MemberId(1)), nullptr);
}

// Two peers of one host are one host. The order and the number of its members do not matter.
TEST(EpochHistory, TheDigestOfHostsIsThatOfTheirSet) {
  EpochHistory history;
  auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 3, 1}, {5, 4, 1}});
  const char* const hosts[] = {"a", "b", "b", ""};
  for (size_t i = 0; i < 4; ++i) prepare.peers[i].host = hosts[i];
  history.Add(RecordOf(prepare));
  const auto digest = [&](std::vector<uint64_t> ids) {
    std::vector<MemberId> members;
    for (const uint64_t id : ids) members.emplace_back(id);
    return history.HostsOf(members);
  };
  EXPECT_EQ(digest({1, 2}), digest({3, 1}));
  EXPECT_EQ(digest({1, 2}), digest({1, 2, 3, 4}));
  EXPECT_NE(digest({1, 2}), digest({1}));
  EXPECT_NE(digest({1, 5}), digest({1}));
  EXPECT_NE(digest({1, 9}), digest({1, 8})) << "of unknown members";
  EXPECT_EQ(history.For(Epoch(1))->hosts, digest({1, 2, 3, 4, 5}));
}

TEST(EpochRecord, SourcesAreThoseThatCountFromTheNextRankOn) {
  const EpochRecord record = RecordOf(MakePrepare(
      5, 4, 5, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 5, control::kInBackground}, {4, 4, 1}}));
  EXPECT_TRUE(record.AnyInBackground());
  EXPECT_TRUE(record.InBackground(MemberId(3)));
  EXPECT_FALSE(record.InBackground(MemberId(4)));
  const std::vector<control::SyncSource> sources = {
      {MemberId(4), PeerId(4)}, {MemberId(1), PeerId(1)}, {MemberId(2), PeerId(2)}};
  EXPECT_EQ(record.SourcesFor(MemberId(3)), sources);
}

TEST(ProblemOf, ABackgroundEndsAtABoundary) {
  auto late = Good();
  late.boundary = Epoch(4);
  late.members[1].joined = Epoch(2);
  late.members[1].background_until = Epoch(5);
  EXPECT_EQ(ProblemOf(late, PeerId(1)), "member m2 is in the background until after the boundary");
  late.members[1].background_until = control::kInBackground;
  EXPECT_EQ(ProblemOf(late, PeerId(1)), "");
}

}  // namespace
}  // namespace longhaul::peerd
