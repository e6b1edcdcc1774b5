// Better rings by measured links (docs/adr/0016-ring-order.md).
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using Texts = std::vector<std::string>;

constexpr uint64_t kMega = 1000000;

class RingOrderTest : public testing::Test {
 protected:
  static PeerId P(uint64_t n) { return Harness::P(n); }
  static MemberId M(uint64_t n) { return Harness::M(n); }

  // Adds peers 1 to n with a member each: p1 is admitted in epoch 1, the others in epoch 2.
  void Enter(uint64_t peers) {
    for (uint64_t n = 1; n <= peers; ++n) {
      h_.AddLively(P(n));
      h_.LivelyJoin(P(n), 1);
      h_.Run();
    }
    h_.LivelyVote(P(1), M(1));
    h_.Run();
    ASSERT_EQ(h_.Stored().committed, Epoch(2));
    peers_ = peers;
    h_.ForgetReceived();
  }
  // Each peer reports its links to the others, in MB/s. 0: it does not report this link.
  void Measure(const std::function<uint64_t(uint64_t from, uint64_t to)>& mega) {
    for (uint64_t from = 1; from <= peers_; ++from) {
      control::LinkReport report;
      for (uint64_t to = 1; to <= peers_; ++to) {
        if (from == to || mega(from, to) == 0) continue;
        report.links.push_back({P(from), P(to), mega(from, to) * kMega, 40000, 0});
      }
      h_.Say(P(from), report);
    }
  }
  // All links carry 10 MB/s, except that from p1 to p2: it carries 2 MB/s.
  void MeasureASlowLink() {
    Measure([](uint64_t from, uint64_t to) { return from == 1 && to == 2 ? 2 : 10; });
  }
  // Makes a better ring known: p1 > p3 > p2 > p4, then the others by number.
  void FindARing() {
    Measure([this](uint64_t from, uint64_t to) {
      static constexpr uint64_t kNext[] = {0, 3, 4, 2};
      const uint64_t next = from < 4 ? kNext[from] : from % peers_ + 1;
      return to == next ? 10 : 2;
    });
    h_.Wait(6000);
    ASSERT_EQ(h_.ring_orders().size(), 1u);
    h_.AnswerRing();
    ASSERT_EQ(h_.Notices("ring").size(), 1u);
  }
  void Vote() {
    for (const auto& member : h_.Stored().members) {
      if (member.joined) h_.LivelyVote(member.peer, member.member);
    }
    h_.Run();
  }
  std::vector<uint64_t> Ring() {
    std::vector<uint64_t> ring;
    for (const PeerView& peer : h_.View().ring) ring.push_back(peer.peer.value());
    return ring;
  }
  bool Neighbours(uint64_t from, uint64_t to) {
    const std::vector<uint64_t> ring = Ring();
    for (size_t i = 0; i < ring.size(); ++i) {
      if (ring[i] == from && ring[(i + 1) % ring.size()] == to) return true;
    }
    return false;
  }

  Harness h_;
  uint64_t peers_ = 0;
  size_t answered_ = 0;
};

TEST_F(RingOrderTest, TheNextBoundaryAdoptsABetterRingWithoutAFreeze) {
  Enter(4);
  FindARing();
  EXPECT_EQ(Ring(), (std::vector<uint64_t>{1, 2, 3, 4}));
  EXPECT_EQ(h_.Take(P(1)), Texts{}) << "ops and trainers go on";
  EXPECT_EQ(h_.Notices("ring").front(),
            "better ring found ring=p1,p3,p2,p4 slowest_mb_s=10.0 was=2.0 rtt_sum_ms=160 was=160");
  Vote();
  EXPECT_EQ(h_.Take(P(1)),
            (Texts{"Prepare 3 base=2 boundary=3 last_freeze=0 members=m1@1,m2@2,m3@2,m4@2 "
                   "ring=p1,p3,p2,p4",
                   "Commit 3", "VoteResult m1 number=2 epoch=3"}));
  EXPECT_EQ(Ring(), (std::vector<uint64_t>{1, 3, 2, 4}));
  EXPECT_EQ(h_.Notices("ring").back(),
            "ring ordered anew epoch=3 ring=p1,p3,p2,p4 slowest_mb_s=10.0 was=2.0 rtt_sum_ms=160 "
            "was=160");
  EXPECT_EQ(h_.View().ring_epoch, Epoch(3));
  EXPECT_EQ(h_.Stored().last_freeze, Epoch());
  Vote();
  EXPECT_EQ(h_.Take(P(2)).back(), "VoteResult m2 number=2 epoch=3");
}

TEST_F(RingOrderTest, OperatorsAreShownEachMeasuredDirection) {
  Enter(3);
  EXPECT_TRUE(h_.core().LinksOf(h_.View()).empty());
  control::LinkReport report;
  report.links.push_back({P(2), P(1), 5 * kMega, 40000, 0, true, true});
  report.links.push_back({P(2), P(9), kMega, 0, 0});  // no peer of this group
  h_.Say(P(2), report);
  h_.Wait(2500);
  const std::vector<DirectionView> links = h_.core().LinksOf(h_.View());
  ASSERT_EQ(links.size(), 2u);
  // Of the direction that nobody measured, the round trip is known.
  EXPECT_EQ(links[0].from, P(1));
  EXPECT_EQ(links[0].to, P(2));
  EXPECT_EQ(links[0].link.bytes_per_second, 0u);
  EXPECT_EQ(links[0].link.rtt_us, 40000u);
  EXPECT_FALSE(links[0].small_packets);
  EXPECT_EQ(links[1].from, P(2));
  EXPECT_EQ(links[1].to, P(1));
  EXPECT_EQ(links[1].link.bytes_per_second, 5 * kMega);
  EXPECT_EQ(links[1].link.age_s, 2u);
  EXPECT_TRUE(links[1].link.at_least);
  EXPECT_TRUE(links[1].small_packets);
  EXPECT_FALSE(links[1].held);
}

TEST_F(RingOrderTest, OperatorsAreShownWhatEachHostCarries) {
  Enter(3);
  h_.Say(P(2), control::LinkReport{{}, 5 * kMega, 7 * kMega});
  const std::vector<PeerView> ring = h_.View().ring;
  ASSERT_EQ(ring.size(), 3u);
  EXPECT_EQ(ring[0].up_bytes_per_second, 0u);
  EXPECT_EQ(ring[1].peer, P(2));
  EXPECT_EQ(ring[1].up_bytes_per_second, 5 * kMega);
  EXPECT_EQ(ring[1].down_bytes_per_second, 7 * kMega);
}

TEST_F(RingOrderTest, AllPeersHearWhatTheLinksCostWhenAnEpochIsPrepared) {
  Enter(4);
  EXPECT_EQ(h_.Prepared(P(1)).cost, control::LinkCost{});
  FindARing();
  Vote();
  for (uint64_t n = 1; n <= 4; ++n) {
    const control::LinkCost& cost = h_.Prepared(P(n)).cost;
    EXPECT_EQ(cost.latency_us, 20000u);
    EXPECT_EQ(cost.ring_bytes_per_second, 10 * kMega);
    EXPECT_EQ(cost.even_bytes_per_second, 4 * kMega) << "half a tensor at 2 MB/s";
    EXPECT_EQ(cost, h_.Prepared(P(1)).cost);
  }
}

TEST_F(RingOrderTest, WhatLinksCostIsToldAtTheNextBoundaryThoughNoRingIsBetter) {
  Enter(4);
  Measure([](uint64_t, uint64_t) { return 10; });
  h_.Wait(6000);
  h_.AnswerRing();
  EXPECT_EQ(h_.Take(P(1)), Texts{}) << "ops and trainers go on";
  Vote();
  EXPECT_EQ(h_.Take(P(1)),
            (Texts{"Prepare 3 base=2 boundary=3 last_freeze=0 members=m1@1,m2@2,m3@2,m4@2 "
                   "ring=p1,p2,p3,p4",
                   "Commit 3", "VoteResult m1 number=2 epoch=3"}));
  EXPECT_EQ(h_.Prepared(P(4)).cost,
            (control::LinkCost{20000, 10 * kMega, 20 * kMega, 20 * kMega, {}}));
  EXPECT_EQ(h_.Notices("ring"), Texts{"link costs told epoch=3 latency_us=20000 ring_mb_s=10.0 "
                                      "mesh_mb_s=20.0 shares=equal"});
  EXPECT_EQ(h_.View().ring_epoch, Epoch()) << "the ring is as it was";
}

TEST_F(RingOrderTest, WhatLinksCostIsToldOnceAndAgainWhenItHasChangedByMuch) {
  Enter(4);
  const auto tell = [&](uint64_t slow, uint64_t ms) {
    Measure([&](uint64_t from, uint64_t to) { return from == 1 && to == 3 ? slow : 10; });
    h_.Wait(ms);
    if (h_.ring_orders().size() > answered_) h_.AnswerRing();
    answered_ = h_.ring_orders().size();
    Vote();
    return h_.Stored().committed;
  };
  EXPECT_EQ(tell(10, 31000), Epoch(3));
  EXPECT_EQ(tell(9, 31000), Epoch(3)) << "nothing to speak of";
  EXPECT_EQ(tell(1, 31000), Epoch(4)) << "off the ring, and slow: the mesh would wait for it";
  EXPECT_EQ(tell(1, 31000), Epoch(4));
  EXPECT_EQ(Ring(), (std::vector<uint64_t>{1, 2, 3, 4}));
}

TEST_F(RingOrderTest, SharesAreToldSoonAndWithoutASearchForARing) {
  Enter(4);
  const auto slow_third = [](uint64_t mega) {
    return [mega](uint64_t from, uint64_t to) { return from == 3 || to == 3 ? mega : 10; };
  };
  Measure([](uint64_t, uint64_t) { return 10; });
  h_.Wait(1500);
  Vote();
  EXPECT_EQ(h_.Stored().committed, Epoch(3));
  EXPECT_EQ(h_.Prepared(P(1)).cost.shares, Shares{});
  Measure(slow_third(1));
  h_.Wait(2500);
  Vote();
  EXPECT_EQ(h_.Stored().committed, Epoch(4));
  const Shares shares = h_.Prepared(P(1)).cost.shares;
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_LT(shares[2], kShareUnits / 10);
  EXPECT_EQ(h_.Stored().last_freeze, Epoch()) << "no op was stopped";
  Vote();
  EXPECT_EQ(h_.Stored().committed, Epoch(4)) << "nothing has changed since";
  Measure(slow_third(10));
  h_.Wait(2500);
  Vote();
  EXPECT_EQ(h_.Stored().committed, Epoch(5));
  EXPECT_EQ(h_.Prepared(P(1)).cost.shares, Shares{});
  EXPECT_TRUE(h_.ring_orders().size() <= 1);
}

TEST_F(RingOrderTest, NewSharesStayForAWhileIfOthersAreHardlyBetter) {
  Enter(4);
  const auto sends = [this](uint64_t peer, uint64_t tenths) {
    control::LinkReport report;
    report.up_bytes_per_second = tenths * kMega / 10;
    report.links.push_back({P(peer), P(peer % 4 + 1), 1, 40000, 0, /*at_least=*/true});
    h_.Say(P(peer), report);
  };
  for (uint64_t peer = 1; peer <= 3; ++peer) sends(peer, 100);
  sends(4, 50);
  h_.Wait(2500);
  Vote();
  const Shares shares = h_.Prepared(P(1)).cost.shares;
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_LT(shares[3], kShareUnits / 100) << "at half of the rate, it owns nothing";
  const Epoch epoch = h_.Stored().committed;
  sends(4, 70);
  h_.Wait(2500);
  Vote();
  EXPECT_EQ(h_.Stored().committed, epoch) << "with 7 % for it, an op would be faster by 3 %";
  h_.Wait(20000);
  Vote();
  EXPECT_GT(h_.Stored().committed, epoch);
  EXPECT_GT(h_.Prepared(P(1)).cost.shares[3], kShareUnits / 20);
  sends(4, 20);
  h_.Wait(2500);
  Vote();
  EXPECT_LT(h_.Prepared(P(1)).cost.shares[3], kShareUnits / 100) << "that is clearly better";
}

TEST_F(RingOrderTest, RanksStayWhatTheyAre) {
  Enter(4);
  FindARing();
  Vote();
  h_.LivelyLeave(P(3), M(3));
  h_.Run();
  const std::vector<control::MemberInfo>& members = h_.Prepared(P(1)).members;
  ASSERT_EQ(members.size(), 3u);
  EXPECT_EQ(members[0].member, M(1));
  EXPECT_EQ(members[1].member, M(2));
  EXPECT_EQ(members[2].member, M(4));
  EXPECT_EQ(Ring(), (std::vector<uint64_t>{1, 2, 4}));
  EXPECT_EQ(h_.Stored().members[1].member, M(2));
}

TEST_F(RingOrderTest, NoiseChangesNothing) {
  Enter(5);
  Measure([](uint64_t from, uint64_t to) { return 100 + (from * 7 + to * 3) % 9; });
  h_.Wait(6000);
  ASSERT_EQ(h_.ring_orders().size(), 1u);
  h_.AnswerRing();
  EXPECT_EQ(h_.Notices("ring"), Texts{});
  Measure([](uint64_t from, uint64_t to) { return 100 + (from * 7 + to * 3 + 1) % 9; });
  h_.Wait(20000);
  EXPECT_EQ(h_.ring_orders().size(), 1u) << "it was looked for a moment ago";
}

TEST_F(RingOrderTest, NothingIsSolvedWhereNothingWasMeasured) {
  Enter(4);
  h_.Wait(3600000);
  EXPECT_TRUE(h_.ring_orders().empty());
  Measure([](uint64_t from, uint64_t to) { return from == 1 && to == 2 ? 2 : 0; });
  h_.Wait(6000);
  ASSERT_EQ(h_.ring_orders().size(), 1u);
  h_.AnswerRing();
  EXPECT_EQ(h_.Notices("ring"), Texts{}) << "nothing is known of any other ring";
}

TEST_F(RingOrderTest, ABlockedPairStaysApart) {
  Enter(5);
  h_.Lively(P(1)).cannot_reach = {P(3)};
  h_.Lively(P(3)).cannot_reach = {P(1)};
  h_.Say(P(1), control::LinkLost{Harness::G(), Epoch(2), P(3), "reset"});
  h_.Wait(1000);
  ASSERT_EQ(h_.View().blocked.size(), 1u);
  // The blocked links, p1 to p3 and back, would be the fastest ones.
  Measure([](uint64_t from, uint64_t to) {
    if (from + to == 4) return 900;
    return from == 1 && to == 2 ? 1 : 20;
  });
  h_.Wait(6000);
  ASSERT_EQ(h_.ring_orders().size(), 1u);
  h_.AnswerRing();
  ASSERT_EQ(h_.Notices("ring").size(), 1u);
  Vote();
  EXPECT_FALSE(Neighbours(1, 3) || Neighbours(3, 1) || Neighbours(1, 2));
  EXPECT_EQ(h_.Prepared(P(1)).blocked.size(), 1u);
  EXPECT_FALSE(h_.Prepared(P(1)).freeze);
}

TEST_F(RingOrderTest, ARingWhosePairWasBlockedMeanwhileIsDropped) {
  Enter(5);
  FindARing();
  const auto neighbours = h_.Notices("ring").front();
  ASSERT_NE(neighbours.find("ring=p1,p3,"), std::string::npos) << neighbours;
  h_.Lively(P(1)).cannot_reach = {P(3)};
  h_.Lively(P(3)).cannot_reach = {P(1)};
  h_.Say(P(1), control::LinkLost{Harness::G(), Epoch(2), P(3), "reset"});
  h_.Wait(1000);
  ASSERT_EQ(h_.View().blocked.size(), 1u);
  const Epoch epoch = h_.Stored().committed;
  Vote();
  EXPECT_EQ(h_.Stored().committed, epoch);
}

TEST_F(RingOrderTest, AnAnswerThatIsTooLateIsAskedForAgain) {
  Enter(5);
  MeasureASlowLink();
  h_.Wait(6000);
  ASSERT_EQ(h_.ring_orders().size(), 1u);
  h_.LivelyLeave(P(5), M(5));
  h_.Run();
  h_.AnswerRing();
  EXPECT_EQ(h_.Notices("ring"), Texts{});
  h_.Wait(31000);
  ASSERT_EQ(h_.ring_orders().size(), 2u);
  EXPECT_EQ(h_.ring_orders().back().peers.size(), 4u);
  h_.AnswerRing();
  EXPECT_EQ(h_.Notices("ring").size(), 1u);
}

TEST_F(RingOrderTest, IsNotOrderedAnewAgainBeforeTheInterval) {
  Enter(4);
  FindARing();
  Vote();
  ASSERT_TRUE(Neighbours(1, 3));
  Measure([](uint64_t from, uint64_t to) { return from == 1 && to == 3 ? 2 : 10; });
  h_.Wait(290000);
  EXPECT_EQ(h_.ring_orders().size(), 1u);
  h_.Wait(11000);
  ASSERT_EQ(h_.ring_orders().size(), 2u);
  h_.AnswerRing();
  Vote();
  EXPECT_FALSE(Neighbours(1, 3));
}

TEST_F(RingOrderTest, AnIntervalOfZeroLeavesRingsAlone) {
  h_ = Harness(1000, 0);
  Enter(4);
  MeasureASlowLink();
  h_.Wait(60000);
  EXPECT_TRUE(h_.ring_orders().empty());
  EXPECT_EQ(h_.View().ring[0].next->bytes_per_second, 2 * kMega) << "they are shown";
}

TEST_F(RingOrderTest, APeerThatCannotBuildItsLinksKeepsTheRing) {
  Enter(4);
  FindARing();
  h_.Lively(P(3)).cannot_reach = {P(2)};
  Vote();
  EXPECT_EQ(h_.Take(P(1)),
            (Texts{"Prepare 3 base=2 boundary=3 last_freeze=0 members=m1@1,m2@2,m3@2,m4@2 "
                   "ring=p1,p3,p2,p4",
                   "Abort 3", "VoteResult m1 number=2 epoch=2"}));
  EXPECT_EQ(h_.Notices("ring").back(),
            "ring kept reason=\"p3 cannot reach p2: no route to 10.0.0.2:29700\"");
  EXPECT_TRUE(h_.View().blocked.empty());
  EXPECT_EQ(h_.View().members.size(), 4u);
  // Another search comes, but not soon.
  h_.Lively(P(3)).cannot_reach.clear();
  h_.Wait(290000);
  EXPECT_EQ(h_.ring_orders().size(), 1u);
  h_.Wait(20000);
  ASSERT_EQ(h_.ring_orders().size(), 2u);
}

TEST_F(RingOrderTest, APeerThatDoesNotAnswerKeepsTheRing) {
  Enter(4);
  FindARing();
  h_.Lively(P(3)).mute = true;
  Vote();
  EXPECT_EQ(h_.View().preparing, Epoch(3));
  h_.Wait(6500);
  EXPECT_EQ(h_.View().preparing, Epoch());
  EXPECT_EQ(h_.Take(P(1)).back(), "VoteResult m1 number=2 epoch=2");
  EXPECT_EQ(h_.Notices("ring").back(), "ring kept reason=\"p3 did not answer in time\"");
  EXPECT_EQ(h_.View().members.size(), 4u);
}

TEST_F(RingOrderTest, NobodyWaitsForAPeerThatIsAway) {
  Enter(4);
  FindARing();
  Vote();
  ASSERT_EQ(h_.Stored().committed, Epoch(3));
  Measure([](uint64_t from, uint64_t to) { return from == 1 && to == 3 ? 2 : 10; });
  h_.Wait(302000);
  ASSERT_EQ(h_.ring_orders().size(), 2u);
  h_.AnswerRing();
  // p4 votes, and then its stream breaks.
  h_.LivelyVote(P(4), M(4));
  h_.Close(P(4));
  for (uint64_t n = 1; n <= 3; ++n) h_.LivelyVote(P(n), M(n));
  h_.Run();
  EXPECT_EQ(h_.Stored().committed, Epoch(3));
  EXPECT_EQ(h_.Take(P(1)).back(), "VoteResult m1 number=3 epoch=3");
  h_.Reattach(P(4));
  h_.Run();
  Vote();
  EXPECT_EQ(h_.Stored().committed, Epoch(4)) << "the boundary after that";
}

TEST_F(RingOrderTest, ANewcomerGoesFirst) {
  Enter(4);
  FindARing();
  h_.AddLively(P(5));
  h_.LivelyJoin(P(5), 1);
  h_.Run();
  Vote();
  EXPECT_EQ(h_.Stored().committed, Epoch(3));
  EXPECT_EQ(Ring(), (std::vector<uint64_t>{1, 2, 3, 4, 5}));
  peers_ = 5;
  MeasureASlowLink();
  h_.Wait(31000);
  ASSERT_EQ(h_.ring_orders().size(), 2u);
  h_.AnswerRing();
  Vote();
  EXPECT_EQ(h_.Stored().committed, Epoch(4));
  EXPECT_FALSE(Neighbours(1, 2));
}

TEST_F(RingOrderTest, ADeathDuringThePreparationIsRepairedAsEver) {
  Enter(5);
  FindARing();
  h_.Lively(P(3)).mute = true;
  Vote();
  ASSERT_EQ(h_.View().preparing, Epoch(3));
  h_.Kill(P(3));
  h_.Say(P(2), control::LinkLost{Harness::G(), Epoch(3), P(3), "reset"});
  h_.Wait(2000);
  EXPECT_EQ(h_.Stored().committed, Epoch(4));
  EXPECT_TRUE(h_.Prepared(P(1)).freeze);
  EXPECT_EQ(Ring(), (std::vector<uint64_t>{1, 2, 4, 5}));
  EXPECT_EQ(h_.Take(P(1)).back(), "VoteResult m1 number=2 epoch=4");
}

TEST_F(RingOrderTest, ARestartForgetsItAndAnswersTheVotes) {
  for (const bool kept : {false, true}) {
    h_ = Harness();
    Enter(4);
    FindARing();
    h_.CrashAt(1, kept);
    Vote();
    ASSERT_TRUE(h_.crashed());
    h_.Boot();
    for (uint64_t n = 1; n <= 4; ++n) h_.Reattach(P(n));
    h_.Run();
    EXPECT_EQ(h_.Stored().committed, Epoch(2)) << kept;
    EXPECT_EQ(h_.Take(P(1)).back(), "VoteResult m1 number=2 epoch=2") << kept;
    EXPECT_EQ(h_.View().members.size(), 4u);
  }
}

// Groups whose ring is due wait while another ring is solved. That wait must not look as if the
// coordinator had been held up: then it would postpone all deadlines, with each ring again.
TEST_F(RingOrderTest, AQueueOfSolvesPostponesNeitherRepairsNorDeaths) {
  constexpr uint32_t kGroups = 16;
  for (uint64_t n = 1; n <= 4; ++n) {
    h_.AddLively(P(n));
    for (uint32_t g = 0; g < kGroups; ++g) h_.LivelyJoin(P(n), g + 1, Harness::G(g));
    h_.Run();
  }
  for (const auto& [key, record] : h_.store().groups) {
    for (const auto& member : record.members) {
      if (member.joined) h_.LivelyVote(member.peer, member.member);
    }
  }
  h_.Run();
  ASSERT_EQ(h_.View(Harness::G(kGroups - 1)).ring.size(), 4u);
  peers_ = 4;
  MeasureASlowLink();
  h_.Wait(6000);
  ASSERT_EQ(h_.ring_orders().size(), 1u) << "one at a time, all of them due";
  h_.Wait(600);

  const Epoch before = h_.Stored().committed;
  h_.Say(P(1), control::LinkLost{Harness::G(), before, P(2), "reset"});
  h_.Hang(P(4));
  for (size_t solved = 1; solved < kGroups; ++solved) {
    h_.AnswerRing();
    ASSERT_EQ(h_.ring_orders().size(), solved + 1) << "the next one is asked for at once";
    h_.Wait(300);
    if (solved > 1) continue;
    EXPECT_GT(h_.Stored().committed, before) << "the lost link is not repaired";
  }
  EXPECT_EQ(h_.View().ring.size(), 3u) << "the silent peer is still there after 4500 ms";
}

TEST_F(RingOrderTest, TheRingOfAGroupThatIsGoneGivesWayToTheNext) {
  Enter(4);
  for (uint64_t n = 1; n <= 4; ++n) h_.LivelyJoin(P(n), 2, {"other", 0});
  h_.Run();
  h_.LivelyVote(P(1), M(1));
  h_.Run();
  ASSERT_EQ(h_.View({"other", 0}).ring.size(), 4u);
  MeasureASlowLink();
  h_.Wait(6000);
  ASSERT_EQ(h_.ring_orders().back().group, (GroupKey{"other", 0}));
  for (uint64_t n = 1; n <= 4; ++n) h_.LivelyLeave(P(n), M(n));
  h_.Run();
  h_.Wait(601000);
  ASSERT_TRUE(h_.View({"other", 0}).members.empty());
  ASSERT_EQ(h_.ring_orders().size(), 1u);
  h_.AnswerRing();
  ASSERT_EQ(h_.ring_orders().size(), 2u);
  EXPECT_EQ(h_.ring_orders().back().group, Harness::G());
}

TEST_F(RingOrderTest, AReportOfOthersLinksIsAgainstTheProtocol) {
  Enter(3);
  h_.Say(P(1), control::LinkReport{{{P(2), P(3), kMega, 1000, 0}}});
  ASSERT_EQ(h_.closings().size(), 1u);
  EXPECT_EQ(h_.closings().front(),
            "against the protocol: a measurement of the link from p2 to p3, of which it is no end");
}

TEST_F(RingOrderTest, APathOnWhichLargePacketsVanishIsAnEventOnce) {
  Enter(3);
  control::LinkMeasure measure{P(1), P(2), 0, 0};
  measure.small_packets = true;
  h_.Say(P(1), control::LinkReport{{measure}});
  h_.Say(P(1), control::LinkReport{{measure}});
  std::swap(measure.from, measure.to);
  h_.Say(P(2), control::LinkReport{{measure}});
  const std::vector<std::string> events = h_.Notices("large_packets_vanish");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].find("large packets vanish from=p1 to=p2"), 0u) << events[0];
  EXPECT_EQ(h_.View().small_packets, (std::set<std::pair<PeerId, PeerId>>{{P(1), P(2)}}));
}

TEST_F(RingOrderTest, LinksAreShownUntilTheyAreOld) {
  Enter(3);
  h_.Say(P(1), control::LinkReport{{{P(1), P(2), 3 * kMega, 40000, 5000, /*at_least=*/true},
                                    {P(1), P(77), kMega, 40000, 0}}});
  const PeerView first = h_.View().ring[0];
  ASSERT_TRUE(first.next);
  EXPECT_EQ(first.next->bytes_per_second, 3 * kMega);
  EXPECT_EQ(first.next->rtt_us, 40000u);
  EXPECT_EQ(first.next->age_s, 5u);
  EXPECT_TRUE(first.next->at_least);
  EXPECT_FALSE(h_.View().ring[1].next);
  h_.Wait(900000);
  EXPECT_FALSE(h_.View().ring[0].next);
}

}  // namespace
}  // namespace longhaul::coordinator
