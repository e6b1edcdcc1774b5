// Pairs of peers that cannot reach each other, step deadlines, and what fault records say.
#include <string>
#include <vector>

#include "coordinator/core/coordinator_core.h"
#include "gtest/gtest.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using Texts = std::vector<std::string>;

class RoutingTest : public testing::Test {
 protected:
  static GroupKey G() { return Harness::G(); }
  static PeerId P(uint64_t n) { return PeerId(n); }
  static MemberId M(uint64_t n) { return MemberId(n); }

  void Join(uint64_t i, uint32_t step_deadline_ms = 0) {
    h.AddLively(P(i));
    control::Join join{.request = 1, .group = G(), .name = "t"};
    join.wish.step_deadline_ms = step_deadline_ms;
    h.LivelyJoin(P(i), join);
    h.Run();
  }
  void VoteAll(uint64_t n) {
    for (uint64_t j = 1; j <= n; ++j) {
      if (h.HasStream(P(j))) h.LivelyVote(P(j), M(j));
    }
    h.Run();
  }
  // Adds peers 1..n with one admitted member each, m1..mn.
  void Found(uint64_t n, uint32_t step_deadline_ms = 0) {
    for (uint64_t i = 1; i <= n; ++i) {
      Join(i, step_deadline_ms);
      VoteAll(i - 1);
    }
    ASSERT_EQ(Ring().size(), 3 * n - 1) << Ring();
    h.ForgetReceived();
  }
  void Cut(uint64_t a, uint64_t b) {
    h.Lively(P(a)).cannot_reach.insert(P(b));
    h.Lively(P(b)).cannot_reach.insert(P(a));
  }
  void Mend(uint64_t a, uint64_t b) {
    h.Lively(P(a)).cannot_reach.erase(P(b));
    h.Lively(P(b)).cannot_reach.erase(P(a));
  }
  void Lose(uint64_t from, uint64_t to, uint32_t silent_ms = 0) {
    const Epoch newest = std::max(h.View().committed, h.View().preparing);
    h.Say(P(from), control::LinkLost{G(), newest, P(to), "reset", silent_ms});
    h.Wait(100);
  }
  std::string Ring() {
    std::string text;
    for (const PeerView& peer : h.View().ring) {
      text += (text.empty() ? "" : ",") + ToString(peer.peer);
    }
    return text;
  }
  std::string Blocked() {
    std::string text;
    for (const BlockedRecord& b : h.Stored().blocked) {
      text += (text.empty() ? "" : " ") + ToString(b.pair.a) + "-" + ToString(b.pair.b);
    }
    return text;
  }
  // The relay of the pair in the committed epoch; 0: none.
  PeerId Relay(uint64_t a, uint64_t b) {
    for (const BlockedRecord& record : h.Stored().blocked) {
      if (record.pair.a == P(a) && record.pair.b == P(b)) return record.pair.relay;
    }
    return PeerId();
  }
  // A peer reports that it lost the link through the relay of a blocked pair.
  void LoseRelayed(uint64_t from, uint64_t to, uint32_t silent_ms = 0) {
    Lose(from, to, silent_ms);
    h.Wait(200);
  }

  Harness h;
};

TEST_F(RoutingTest, APairAmongFourThatCannotMeetIsRoutedAround) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  EXPECT_EQ(h.Take(P(3)),
            (Texts{"Prepare 5 base=4 boundary=4 last_freeze=5 freeze members=m1@1,m2@2,m3@3,m4@4 "
                   "ring=p1,p2,p3,p4",
                   "Prepare 6 base=4 boundary=4 last_freeze=6 freeze members=m1@1,m2@2,m3@3,m4@4 "
                   "ring=p1,p3,p2,p4 blocked=p1-p2 through p3",
                   "Commit 6"}));
  EXPECT_EQ(Ring(), "p1,p3,p2,p4");
  EXPECT_EQ(Blocked(), "p1-p2");
  EXPECT_EQ(h.View().blocked[0].reason, "p1 cannot reach p2: no route to 10.0.0.2:29700");
  EXPECT_EQ(h.Notices("evict"), Texts{});
  EXPECT_EQ(h.Notices("block"),
            Texts{"pair routed around a=p1 b=p2 reason=\"p1 cannot reach p2: no "
                  "route to 10.0.0.2:29700\""});
}

TEST_F(RoutingTest, AmongThreeTheThirdIsTheRelayAndNobodyGoes) {
  for (const uint64_t reporter : {1, 2}) {
    for (const uint32_t silent_ms : {0, 1000}) {
      h = Harness();
      Found(3);
      h.Lively(P(reporter)).cannot_reach = {P(3 - reporter)};
      Lose(reporter, 3 - reporter, silent_ms);
      EXPECT_EQ(Ring(), "p1,p2,p3") << "no ring avoids the pair";
      EXPECT_EQ(Blocked(), "p1-p2");
      EXPECT_EQ(Relay(1, 2), P(3));
      EXPECT_EQ(h.Notices("evict"), Texts{});
      // A link that broke is rebuilt first; a link that fell silent is blocked at once.
      EXPECT_EQ(h.View().committed, Epoch(silent_ms == 0 ? 5 : 4));
    }
  }
}

TEST_F(RoutingTest, OfTwoThatCannotMeetTheYoungerGoes) {
  Found(2);
  Cut(1, 2);
  Lose(1, 2, 1000);
  EXPECT_EQ(Ring(), "p1");
}

TEST_F(RoutingTest, AHostThatOneOtherReachesStays) {
  Found(5);
  Cut(1, 2);
  Cut(1, 3);
  Cut(1, 4);
  Lose(2, 1);
  EXPECT_EQ(h.View().members.size(), 5u);
  EXPECT_EQ(Blocked(), "p1-p2 p1-p3 p1-p4");
  for (const uint64_t other : {2, 3, 4}) EXPECT_EQ(Relay(1, other), P(5));
}

TEST_F(RoutingTest, WhoIsReachedByNobodyGoesAndTheOthersStay) {
  Found(5);
  for (const uint64_t other : {2, 3, 4, 5}) Cut(1, other);
  Lose(2, 1);
  EXPECT_EQ(Ring(), "p2,p3,p4,p5");
  EXPECT_EQ(h.Take(P(1)).back(), "Removed m1 unreachable");
  EXPECT_EQ(Blocked(), "");
}

TEST_F(RoutingTest, AKnownPairThatCanMeetAgainCostsNobodyItsPlace) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  ASSERT_EQ(Blocked(), "p1-p2");
  // The path of the blocked pair p1-p2 works again. Now p2 is the only peer that reaches p1.
  Mend(1, 2);
  Cut(1, 3);
  Cut(1, 4);
  Lose(1, 3);
  EXPECT_EQ(h.View().members.size(), 4u);
  EXPECT_EQ(Blocked(), "p1-p3 p1-p4");
  EXPECT_EQ(h.Notices("evict"), Texts{});
}

TEST_F(RoutingTest, PairsThatAreKnownCountForTheNextVictim) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  ASSERT_EQ(Blocked(), "p1-p2");
  // No peer reaches p1 any more. p3 is younger than p1, but more peers reach p3.
  Cut(1, 3);
  Cut(1, 4);
  Lose(3, 1);
  EXPECT_EQ(Ring(), "p3,p2,p4");
  EXPECT_EQ(Blocked(), "");
}

// ------------------------------------------------------------------------------ relays

TEST_F(RoutingTest, ALostLinkThroughARelayIsBuiltAgainAndBlamesNobody) {
  Found(3);
  Cut(1, 2);
  Lose(1, 2);
  const Epoch before = h.View().committed;
  LoseRelayed(1, 2);
  EXPECT_GT(h.View().committed, before) << "frames may be missing";
  EXPECT_EQ(h.Stored().last_freeze, h.View().committed);
  EXPECT_EQ(Ring(), "p1,p2,p3");
  EXPECT_EQ(Relay(1, 2), P(3)) << "there is no other one";
  // A peer that the coordinator does not hear is dead soon if another peer reports it silent. A
  // report of a link through a relay does not count.
  h.Hang(P(2));
  h.Wait(500);
  h.Say(P(1), control::LinkLost{G(), h.View().committed, P(2), "silent", 1000});
  h.Wait(2000);
  EXPECT_EQ(h.Notices("death"), Texts{});
  h.Say(P(3), control::LinkLost{G(), h.View().committed, P(2), "silent", 1000});
  h.Wait(1000);
  EXPECT_EQ(h.Notices("death").size(), 1u);
}

TEST_F(RoutingTest, WhatCrossesTheFreezeIsOfTheStraightLink) {
  Found(3);
  const Epoch before = h.View().committed;
  Lose(1, 2, 1000);
  const Epoch after = h.View().committed;
  h.Say(P(2), control::LinkLost{G(), before, P(1), "silent", 1000});
  h.Wait(5000);
  EXPECT_EQ(h.View().committed, after);
}

TEST_F(RoutingTest, ALinkThatFellSilentThroughARelayGetsAnotherOne) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  ASSERT_EQ(Relay(1, 2), P(3));
  LoseRelayed(1, 2);
  EXPECT_EQ(Relay(1, 2), P(3)) << "it broke, and stands again";
  LoseRelayed(1, 2, 1000);
  EXPECT_EQ(Relay(1, 2), P(4));
  EXPECT_EQ(h.View().members.size(), 4u);
}

TEST_F(RoutingTest, ARelayThatCannotBeUsedMakesWayForAnotherOneThenOneOfThePairGoes) {
  Found(4);
  for (const uint64_t end : {1, 2}) h.Lively(P(end)).no_way_through = {P(3)};
  Cut(1, 2);
  Lose(1, 2);
  EXPECT_EQ(h.View().members.size(), 4u);
  EXPECT_EQ(Relay(1, 2), P(4));
  for (const uint64_t end : {1, 2}) h.Lively(P(end)).no_way_through = {P(3), P(4)};
  LoseRelayed(1, 2);
  EXPECT_EQ(Ring(), "p1,p3,p4");
}

TEST_F(RoutingTest, ARelayThatDiesTakesNobodyWithIt) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  ASSERT_EQ(Relay(1, 2), P(3));
  h.Say(P(1), control::LinkLost{G(), h.View().committed, P(2), "reset", 0});
  h.Say(P(2), control::LinkLost{G(), h.View().committed, P(1), "reset", 0});
  h.Kill(P(3));
  h.Wait(4000);
  EXPECT_EQ(h.View().members.size(), 3u);
  EXPECT_EQ(Ring().find("p3"), std::string::npos);
  EXPECT_EQ(Relay(1, 2), P(4));
}

TEST_F(RoutingTest, ARelayThatLosesItsLinkToAnEndOfThePairMakesWayForAnotherOne) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  ASSERT_EQ(Relay(1, 2), P(3));
  Cut(1, 3);
  Lose(1, 3);
  EXPECT_EQ(Blocked(), "p1-p2 p1-p3");
  EXPECT_EQ(Relay(1, 2), P(4));
  EXPECT_EQ(Relay(1, 3), P(4));
  EXPECT_EQ(h.Notices("evict"), Texts{});
}

TEST_F(RoutingTest, ARelayStaysThoughAnOlderOneWouldDo) {
  Found(4);
  h.Lively(P(1)).no_way_through = {P(3)};
  Cut(1, 2);
  Lose(1, 2);
  ASSERT_EQ(Relay(1, 2), P(4));
  // The new coordinator does not know why p3 is not the relay.
  h.Boot();
  for (uint64_t i = 1; i <= 4; ++i) h.Reattach(P(i));
  Join(5);
  VoteAll(4);
  EXPECT_EQ(h.View().members.size(), 5u);
  EXPECT_EQ(Relay(1, 2), P(4));
}

// ------------------------------------------------------------------------------ newcomers

TEST_F(RoutingTest, ANewcomerThatOneOfTwoCannotReachIsTaken) {
  for (const bool trial_shows_it : {true, false}) {
    h = Harness();
    Found(2);
    h.AddLively(P(3));
    Cut(1, 3);
    h.Lively(P(1)).tries_well = !trial_shows_it;
    Join(3);
    VoteAll(2);
    EXPECT_EQ(Ring(), "p1,p2,p3");
    EXPECT_EQ(Relay(1, 3), P(2));
    EXPECT_EQ(h.Stored().last_freeze, Epoch(0));
    EXPECT_EQ(h.Notices("prepare").size(), trial_shows_it ? 3u : 4u)
        << "nobody waits for a link that is known not to come up";
    EXPECT_EQ(h.Notices("block"),
              Texts{"pair routed around a=p1 b=p3 reason=\"p1 cannot reach p3: no route to "
                    "10.0.0.3:29700\""});
  }
}

TEST_F(RoutingTest, WhatATrialHasShownIsForgottenWithTheNewcomer) {
  Found(2);
  h.AddLively(P(3));
  Cut(1, 3);
  Join(3);
  EXPECT_EQ(Blocked(), "p1-p3");
  h.LivelyLeave(P(3), M(3));
  h.Run();
  EXPECT_EQ(Blocked(), "");
}

TEST_F(RoutingTest, ANewcomerThatMostReachIsTakenWithItsBlockedPair) {
  Found(3);
  Join(4);
  Cut(1, 4);
  VoteAll(3);
  EXPECT_EQ(Ring(), "p1,p2,p4,p3");
  EXPECT_EQ(Blocked(), "p1-p4");
  // No op in flight uses a link that was never up, so nothing is frozen.
  EXPECT_EQ(h.Stored().last_freeze, Epoch(0));
}

TEST_F(RoutingTest, ANewcomerBehindABlockedPairIsTakenWithThoseWhoCameAfterIt) {
  Found(1);
  Join(2);
  Cut(1, 2);
  h.Lively(P(2)).mute = true;
  VoteAll(1);
  Join(3);
  Join(4);
  h.Lively(P(2)).mute = false;
  h.Say(P(2), control::EpochFailed{G(), h.View().preparing, {{P(1), "no route to p1"}}});
  EXPECT_EQ(Ring(), "p1,p3,p2,p4");
  EXPECT_EQ(Blocked(), "p1-p2");
  EXPECT_EQ(h.Notices("refuse"), Texts{});
}

// Later newcomers do not become relays for a newcomer that most members cannot reach.
TEST_F(RoutingTest, AClosedNewcomerIsRefusedHoweverManyWait) {
  Found(2);
  Join(3);
  Cut(1, 3);
  Cut(2, 3);
  h.Lively(P(3)).mute = true;
  VoteAll(2);
  for (uint64_t i : {4, 5}) Join(i);
  Cut(4, 3);
  Cut(5, 3);
  h.Lively(P(3)).mute = false;
  h.Say(P(3), control::EpochFailed{G(), h.View().preparing, {{P(1), "no route to p1"}}});
  EXPECT_EQ(h.Take(P(3)).back(), "Removed m3 unreachable");
  EXPECT_EQ(Ring(), "p1,p2");
  VoteAll(2);
  EXPECT_EQ(Ring(), "p1,p2,p4,p5");
}

TEST_F(RoutingTest, ANewcomerThatHalfOfTheOthersCannotReachIsRefused) {
  Found(4);
  Join(5);
  Cut(1, 5);
  Cut(2, 5);
  VoteAll(4);
  EXPECT_EQ(Ring(), "p1,p2,p3,p4");
  EXPECT_EQ(Blocked(), "");
  EXPECT_EQ(
      h.Notices("refuse"),
      Texts{"member removed member=m5 peer=p5 why=unreachable reason=\"p1 cannot reach p5: no "
            "route to 10.0.0.5:29700; open 10.0.0.5:29700 (TCP) of that host for the hosts of "
            "the group, or name the address that they reach with --advertise of its "
            "longhaul-peerd; the group tries this address again in 40 s at the earliest\""});
}

// The refusal waits for no boundary, and not for answers of members that can change nothing.
TEST_F(RoutingTest, ANewcomerThatMembersCannotReachIsRefusedBeforeItHoldsAnybody) {
  Found(4);
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).cannot_reach = {P(5)};
  for (const uint64_t n : {3, 4}) h.Lively(P(n)).tries_nobody = true;
  Join(5);
  EXPECT_EQ(h.Take(P(5)), (Texts{"JoinPending 1 m5", "Removed m5 unreachable"}));
  VoteAll(4);
  for (const uint64_t n : {1, 2, 3, 4}) {
    const Texts got = h.Take(P(n));
    ASSERT_EQ(got.size(), 1u) << n;
    EXPECT_EQ(got[0].substr(0, 10), "VoteResult") << "nothing was prepared";
    EXPECT_EQ(h.pending_count(P(n)), 0u) << "nobody has to hurry to a boundary for it";
  }
  EXPECT_EQ(
      h.Notices("refuse"),
      Texts{
          "member removed member=m5 peer=p5 why=unreachable reason=\"p1 cannot reach p5: no route "
          "to 10.0.0.5:29700, p2 cannot reach p5: no route to 10.0.0.5:29700 (2 of the 4 members "
          "that tried cannot); open 10.0.0.5:29700 (TCP) of that host for the hosts of the "
          "group, or name the address that they reach with --advertise of its longhaul-peerd; "
          "the group tries this address again in 1 s at the earliest\""});
}

TEST_F(RoutingTest, ANewcomerThatIsBeingTriedHoldsNobody) {
  Found(2);
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).tries_nobody = true;
  Join(3);
  VoteAll(2);
  EXPECT_EQ(Ring(), "p1,p2");
  EXPECT_EQ(h.View().preparing, Epoch());
  EXPECT_EQ(h.pending_count(P(1)), 0u);
  h.Wait(2499);
  EXPECT_EQ(h.pending_count(P(1)), 0u);
  h.Wait(1);
  EXPECT_EQ(h.pending_count(P(1)), 1u) << "nobody has said that it cannot be reached";
  VoteAll(2);
  EXPECT_EQ(Ring(), "p1,p2,p3");
}

// The newcomer joins again and again. Each time it waits longer for the next try.
TEST_F(RoutingTest, ANewcomerThatCouldNotBeReachedIsTriedLessAndLessOften) {
  Found(2);
  h.AddLively(P(3));
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).cannot_reach = {P(3)};
  uint64_t request = 0;
  for (const int64_t seconds : {0, 1, 2, 4, 8, 16, 32, 40, 40}) {
    h.LivelyJoin(P(3), ++request);
    h.Run();
    if (seconds > 0) {
      h.Wait(seconds * 1000 - 1);
      EXPECT_EQ(h.Notices("refuse").size(), request - 1) << seconds;
      EXPECT_NE(h.View().waiting_for.find("not tried again yet, since members could not reach it: "
                                          "p3"),
                std::string::npos);
      h.Wait(1);
    }
    EXPECT_EQ(h.Notices("refuse").size(), request) << seconds;
  }
  EXPECT_EQ(h.Notices("prepare").size(), 2u) << "those of Found()";
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).cannot_reach.clear();
  h.LivelyJoin(P(3), ++request);
  h.Wait(40 * 1000);
  VoteAll(2);
  EXPECT_EQ(Ring(), "p1,p2,p3");
}

// The trials succeed, but the preparation fails. So the group has waited for the newcomer, and must
// not wait for it often.
TEST_F(RoutingTest, ANewcomerThatTheGroupWaitedForInVainWaitsLongBeforeEachTry) {
  Found(2);
  h.AddLively(P(3));
  for (const uint64_t n : {1, 2}) {
    h.Lively(P(n)).cannot_reach = {P(3)};
    h.Lively(P(n)).tries_well = true;
  }
  uint64_t request = 0;
  for (const int64_t seconds : {0, 40, 80, 160, 320, 400, 400}) {
    h.LivelyJoin(P(3), ++request);
    h.Run();
    for (int64_t left = seconds; left > 0; left -= 10) {
      h.ForgetReceived();
      VoteAll(2);
      EXPECT_EQ(h.Take(P(3)), Texts{}) << left;
      EXPECT_EQ(h.Take(P(1)).size(), 1u) << "the vote is answered, and nothing is prepared";
      h.Wait(10000);
    }
    VoteAll(2);
    EXPECT_EQ(h.Notices("refuse").size(), request) << seconds;
  }
  // Once the newcomer is admitted, its pauses begin anew.
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).cannot_reach.clear();
  h.LivelyJoin(P(3), ++request);
  h.Wait(400 * 1000);
  VoteAll(2);
  EXPECT_EQ(Ring(), "p1,p2,p3");
}

// p1 is a member. p1 and p2 cannot reach each other, and p3 reaches both.
TEST_F(RoutingTest, ANewcomerWaitsForAnotherOneThatMayBeTheWayAround) {
  for (const bool first : {false, true}) {
    h = Harness();
    Found(1);
    h.AddLively(P(2));
    h.AddLively(P(3));
    Cut(1, 2);
    h.LivelyJoin(P(first ? 2 : 3), 1);
    h.LivelyJoin(P(first ? 3 : 2), 1);
    h.Run();
    EXPECT_EQ(h.Notices("refuse"), Texts{}) << first;
    VoteAll(1);
    EXPECT_EQ(Ring(), "p1,p3");
    h.Wait(1000);
    for (const uint64_t m : {1, 2, 3}) {
      for (const uint64_t n : {1, 3}) h.LivelyVote(P(n), M(m));
    }
    h.Run();
    EXPECT_EQ(h.View().members.size(), 3u);
    EXPECT_EQ(Relay(1, 2), P(3)) << first;
  }
}

// The newcomer that can be the relay is admitted while the other newcomer is being tried.
TEST_F(RoutingTest, AMemberThatComesInDuringATrialTakesPartInIt) {
  Found(1);
  for (const uint64_t n : {2, 3}) h.AddLively(P(n));
  Cut(1, 2);
  h.Lively(P(1)).tries_nobody = true;
  h.LivelyJoin(P(2), 1);
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.Say(P(1), control::PeerTried{G(), 2, P(3), ""});
  h.Lively(P(1)).tries_nobody = false;
  h.LivelyVote(P(1), M(1));
  h.Run();
  EXPECT_EQ(Ring(), "p1,p3");
  h.Say(P(1), control::PeerTried{G(), 1, P(2), "no answer in time"});
  EXPECT_EQ(h.Notices("refuse"), Texts{});
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(3), M(3));
  h.Run();
  EXPECT_EQ(h.View().members.size(), 3u);
  EXPECT_EQ(Relay(1, 2), P(3));
}

TEST_F(RoutingTest, OfTwoNewcomersThatNobodyReachesNeitherIsTheWayAround) {
  Found(1);
  for (const uint64_t n : {2, 3}) h.AddLively(P(n));
  h.Lively(P(1)).cannot_reach = {P(2), P(3)};
  for (const uint64_t n : {2, 3}) h.LivelyJoin(P(n), 1);
  h.Run();
  EXPECT_EQ(h.Notices("refuse").size(), 1u) << "one of them was being tried when the other failed";
  h.Wait(1000);
  EXPECT_EQ(h.Notices("refuse").size(), 2u);
}

TEST_F(RoutingTest, ANewcomerThatComesBackWithAnotherAddressIsTriedAgain) {
  Found(2);
  Join(3);
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).cannot_reach = {P(3)};
  h.Close(P(3));
  h.Reattach(P(3));
  h.Run();
  EXPECT_EQ(h.Notices("refuse"), Texts{}) << "it is known to be reached";
  h.Close(P(3));
  h.SetAddress(P(3), P(33));
  h.Reattach(P(3));
  h.Run();
  EXPECT_EQ(h.Notices("refuse").size(), 1u);
}

TEST_F(RoutingTest, EightMembersTryANewcomer) {
  Found(9);
  for (uint64_t n = 1; n <= 9; ++n) h.Lively(P(n)).cannot_reach = {P(10)};
  Join(10);
  const Texts refused = h.Notices("refuse");
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_NE(refused[0].find("of the 8 members that tried cannot"), std::string::npos);
}

TEST_F(RoutingTest, ABlockedPairIsNotTriedByEveryPreparationButAfterTenMinutes) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  Mend(1, 2);
  h.Wait(599 * 1000);
  Lose(3, 4);
  EXPECT_EQ(Blocked(), "p1-p2");
  h.Wait(1000);
  Lose(3, 4);
  EXPECT_EQ(Blocked(), "");
  EXPECT_EQ(Ring(), "p1,p3,p2,p4") << "the order stays as it is";
}

TEST_F(RoutingTest, AnAdmissionThatFreezesNothingKeepsTheBlockedPairs) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  Mend(1, 2);
  h.Wait(600 * 1000);
  h.ForgetReceived();
  Join(5);
  VoteAll(4);
  EXPECT_EQ(h.Take(P(3)).front(),
            "Prepare 7 base=6 boundary=7 last_freeze=6 members=m1@1,m2@2,m3@3,m4@4,m5@7 "
            "ring=p1,p3,p2,p4,p5 blocked=p1-p2 through p3");
  EXPECT_EQ(Blocked(), "p1-p2");
  Lose(3, 4);
  EXPECT_EQ(Blocked(), "");
}

TEST_F(RoutingTest, APairThatStillCannotMeetWhenTriedAgainIsKept) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  h.Wait(600 * 1000);
  Lose(3, 4);
  EXPECT_EQ(Ring(), "p1,p3,p2,p4");
  EXPECT_EQ(Blocked(), "p1-p2");
  EXPECT_EQ(h.Notices("block").size(), 1u);
}

TEST_F(RoutingTest, ANewStreamOfEitherEndMakesThePairTriedAgain) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  Mend(1, 2);
  h.Close(P(2));
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(Blocked(), "p1-p2") << "nothing is prepared for that alone";
  Lose(3, 4);
  EXPECT_EQ(Blocked(), "");
}

TEST_F(RoutingTest, APairIsForgottenWithThePeerThatLeaves) {
  Found(5);
  Cut(1, 2);
  Lose(1, 2);
  ASSERT_EQ(Blocked(), "p1-p2");
  h.LivelyLeave(P(2), M(2));
  h.Run();
  EXPECT_EQ(Blocked(), "");
  EXPECT_EQ(Ring(), "p1,p3,p4,p5");
}

TEST_F(RoutingTest, WhenNobodyIsLeftToBeTheRelayThePairIsTriedAgain) {
  for (const bool mended : {true, false}) {
    h = Harness();
    Found(4);
    Cut(1, 2);
    Lose(1, 2);
    if (mended) Mend(1, 2);
    h.Kill(P(4));
    h.Wait(4000);
    EXPECT_EQ(Ring(), "p1,p3,p2");
    EXPECT_EQ(Blocked(), "p1-p2");
    h.Kill(P(3));
    h.Wait(4000);
    EXPECT_EQ(Ring(), mended ? "p1,p2" : "p1");
    EXPECT_EQ(Blocked(), "");
  }
}

// Connections come up and break again, for instance because a firewall forgets them or a path loses
// large packets. If such a link were always repaired, the same ops would be redone for ever.
TEST_F(RoutingTest, ALinkThatBreaksAgainAndAgainIsRoutedAround) {
  Found(4);
  for (int i = 0; i < 3; ++i) {
    Lose(1, 2);
    h.Wait(2000);
  }
  EXPECT_EQ(Blocked(), "");
  Lose(1, 2);
  EXPECT_EQ(Blocked(), "p1-p2");
  EXPECT_EQ(Ring(), "p1,p3,p2,p4");
}

TEST_F(RoutingTest, ALinkThatBreaksNowAndThenIsRepairedEveryTime) {
  Found(4);
  for (int i = 0; i < 10; ++i) {
    Lose(1, 2);
    h.Wait(61 * 1000);
  }
  EXPECT_EQ(Blocked(), "");
}

TEST_F(RoutingTest, ALinkThatFellSilentIsRoutedAroundAtOnce) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2, 1000);
  EXPECT_EQ(h.Take(P(3)),
            (Texts{"Prepare 5 base=4 boundary=4 last_freeze=5 freeze members=m1@1,m2@2,m3@3,m4@4 "
                   "ring=p1,p3,p2,p4 blocked=p1-p2 through p3",
                   "Commit 5"}));
  EXPECT_EQ(Blocked(), "p1-p2");
}

// The report comes while a freeze is prepared for another reason. The freeze would wait for the
// link.
TEST_F(RoutingTest, ALinkThatFellSilentIsRoutedAroundWhileAFreezeIsPrepared) {
  for (const bool rebuilt : {false, true}) {
    h = Harness();
    Found(5);
    h.Lively(P(1)).mute = h.Lively(P(2)).mute = true;
    h.LivelyLeave(P(5), M(5));
    h.Run();
    ASSERT_EQ(h.View().preparing, Epoch(6));
    h.Say(P(1), control::LinkLost{G(), Epoch(5), P(2), "silent", 1000});
    h.Lively(P(1)).mute = h.Lively(P(2)).mute = false;
    if (rebuilt) {
      h.Say(P(1), control::EpochReady{G(), Epoch(6), {}});
      h.Say(P(2), control::EpochReady{G(), Epoch(6), {}});
      EXPECT_EQ(h.View().committed, Epoch(6)) << "waits for a link that stands";
    }
    h.Wait(200);
    EXPECT_EQ(h.View().committed, Epoch(rebuilt ? 6 : 7));
    EXPECT_EQ(Blocked(), rebuilt ? "" : "p1-p2");
  }
}

// A freeze is prepared for the first pair. It would wait for the link of the second pair.
TEST_F(RoutingTest, TwoPairsThatFallSilentWithinAMomentAreBothRoutedAround) {
  for (const int64_t apart_ms : {0, 50, 99, 100, 150, 300}) {
    h = Harness();
    Found(5);
    Cut(1, 2);
    Cut(3, 4);
    // Peers try to build a link for four detect_ms before they report that they cannot.
    for (const uint64_t n : {1, 2, 3, 4}) h.Lively(P(n)).patient = true;
    const auto report = [&](uint64_t from, uint64_t to) {
      h.Say(P(from), control::LinkLost{G(), Epoch(5), P(to), "silent", 1000});
    };
    const Tick begun = h.now();
    report(1, 2);
    report(2, 1);
    h.Wait(apart_ms);
    report(3, 4);
    report(4, 3);
    h.Wait(101);
    EXPECT_EQ(h.View().preparing, Epoch()) << apart_ms << " " << h.View().waiting_for;
    EXPECT_EQ(Blocked(), "p1-p2 p3-p4") << apart_ms;
    EXPECT_EQ(h.View().members.size(), 5u);
    EXPECT_LE(h.now() - begun, Millis(101 + apart_ms));
  }
}

// Then a peer has to be removed. The answers to that preparation show which one.
TEST_F(RoutingTest, ASecondSilenceWithoutARelayIsLeftToTheFreezeThatIsPrepared) {
  Found(3);
  for (const uint64_t n : {2, 3}) {
    Cut(1, n);
    h.Lively(P(n)).patient = true;
  }
  h.Lively(P(1)).patient = true;
  for (const uint64_t n : {2, 3}) {
    h.Say(P(1), control::LinkLost{G(), Epoch(3), P(n), "silent", 1000});
    h.Wait(10);
  }
  h.Wait(1000);
  EXPECT_EQ(h.View().preparing, Epoch(4)) << "nobody is made to begin again";
  EXPECT_EQ(h.View().members.size(), 3u);
}

TEST_F(RoutingTest, APairThatFellSilentIsTriedAgainSoonAndThenLessAndLessOften) {
  Found(4);
  for (const int64_t seconds : {30, 120, 480, 600, 600}) {
    Lose(1, 2, 1000);
    EXPECT_EQ(Blocked(), "p1-p2");
    h.Wait((seconds - 1) * 1000);
    Lose(3, 4);
    EXPECT_EQ(Blocked(), "p1-p2") << seconds;
    h.Wait(1000);
    Lose(3, 4);
    EXPECT_EQ(Blocked(), "") << seconds;
    h.Wait(61 * 1000);
  }
}

TEST_F(RoutingTest, OfTwoWhoseLinkIsLostAgainAndAgainNobodyIsEvictedWhileItCanBeRepaired) {
  Found(2);
  for (int i = 0; i < 10; ++i) {
    Lose(1, 2, 1000);
    h.Wait(2000);
  }
  EXPECT_EQ(Ring(), "p1,p2");
}

TEST_F(RoutingTest, BlockedPairsOutliveTheCoordinator) {
  Found(4);
  Cut(1, 2);
  Lose(1, 2);
  h.Boot();
  for (uint64_t i = 1; i <= 4; ++i) h.Reattach(P(i));
  h.ForgetReceived();
  Lose(3, 4);
  EXPECT_EQ(h.Take(P(1))[0],
            "Prepare 7 base=6 boundary=4 last_freeze=7 freeze members=m1@1,m2@2,m3@3,m4@4 "
            "ring=p1,p3,p2,p4 blocked=p1-p2 through p3");
}

// ------------------------------------------------------------------------------ step deadlines

TEST_F(RoutingTest, WhoDoesNotVoteWithinItsDeadlineOfTheFirstIsEvicted) {
  Found(3, 5000);
  h.Wait(60 * 1000);
  EXPECT_EQ(Ring(), "p1,p2,p3") << "nobody has come to the boundary: nobody is late";
  VoteAll(2);
  h.Wait(4999);
  EXPECT_EQ(Ring(), "p1,p2,p3");
  h.Wait(1);
  EXPECT_EQ(Ring(), "p1,p2");
  EXPECT_EQ(h.Take(P(3)).back(), "Removed m3 evicted");
  EXPECT_EQ(h.Take(P(1)).back(), "VoteResult m1 number=3 epoch=4");
  EXPECT_EQ(
      h.Notices("evict"),
      Texts{"member removed member=m3 peer=p3 why=evicted reason=\"late at the step boundary: no "
            "vote within 5000 ms of the first\""});
  EXPECT_EQ(h.View().fault.cause, "step_deadline");
  EXPECT_EQ(h.View().fault.detect_ms, 5000u);
}

TEST_F(RoutingTest, TheDeadlineIsEachMembersOwn) {
  Join(1);
  Join(2);
  VoteAll(1);
  Join(3, 700);
  VoteAll(2);
  h.LivelyVote(P(3), M(3));
  h.Run();
  h.Wait(60 * 1000);
  EXPECT_EQ(Ring(), "p1,p2,p3") << "only m3 has a deadline, and it has voted";
}

TEST_F(RoutingTest, ADeadlineStandsStillWhileOpsAreFrozen) {
  Found(2, 1000);
  VoteAll(1);
  h.Wait(500);
  h.Lively(P(2)).mute = true;
  Lose(1, 2);
  h.Wait(1500);
  const Epoch preparing = h.View().preparing;
  ASSERT_NE(preparing, Epoch());
  h.Say(P(2), control::EpochReady{G(), preparing, {}});
  EXPECT_EQ(Ring(), "p1,p2");
  h.Wait(390);
  EXPECT_EQ(Ring(), "p1,p2");
  h.Wait(20);
  EXPECT_EQ(Ring(), "p1");
}

// ------------------------------------------------------------------------------ faults

TEST_F(RoutingTest, TheCommitSaysWhoFoundTheFaultAndHowLongItTook) {
  Found(3);
  h.Lively(P(3)).mute = true;
  h.Say(P(1), control::LinkLost{G(), Epoch(3), P(2), "no ping", 1000});
  h.Wait(350);
  h.Say(P(3), control::EpochReady{G(), Epoch(4), {}});
  EXPECT_EQ(h.View().fault_epoch, Epoch(4));
  EXPECT_EQ(h.View().fault, (FaultRecord{"silence", "p1", 1000, 350, "p2 (host host2)"}));
  EXPECT_EQ(h.Notices("commit").back(),
            "epoch committed epoch=4 members=3 joined= left= ring=p1,p2,p3 took_ms=250 "
            "cause=silence detector=p1 detect_ms=1000 agree_ms=350");
}

TEST_F(RoutingTest, ADeathThatAPeerReportedFirstIsItsFinding) {
  Found(3);
  h.Say(P(1), control::LinkLost{G(), Epoch(3), P(2), "reset", 0});
  h.Wait(20);
  h.Kill(P(2));
  EXPECT_EQ(h.View().fault, (FaultRecord{"reset", "p1", 0, 20, "m2 at p2 (host host2)"}));
}

TEST_F(RoutingTest, CausesAreNamed) {
  Found(5);
  h.LivelyLeave(P(5), M(5));
  h.Run();
  EXPECT_EQ(h.View().fault.cause, "leave");
  h.Say(P(4), control::Leave{G(), M(4), true, "killed"});
  EXPECT_EQ(h.View().fault.cause, "trainer_died");
  h.Evict(M(3));
  EXPECT_EQ(h.View().fault, (FaultRecord{"evict", "operator", 0, 0, "m3 at p3 (host host3)"}));
  h.Hang(P(2));
  h.Wait(5000);
  EXPECT_EQ(h.View().fault,
            (FaultRecord{"silence", "coordinator", 4000, 0, "m2 at p2 (host host2)"}));
}

TEST_F(RoutingTest, AnEpochThatOnlyAdmitsHasNoFault) {
  Found(3);
  EXPECT_EQ(h.View().fault_epoch, Epoch());
}

// An op in which the leaving member took part was settled at its peer, so all peers are done with
// it. An op that the member did not start has not begun anywhere.
TEST_F(RoutingTest, ALeaveMakesNobodyRedoWhatHadBegun) {
  Found(3);
  for (uint64_t n : {1, 2}) {
    control::OpReport settled_by_the_leaver{OpOrdinal(1), Epoch(3), 7, 0, true};
    settled_by_the_leaver.matches = {{P(3 - n), OpOrdinal(1)}, {P(3), OpOrdinal(1)}};
    h.Lively(P(n)).groups[G()].ops = {settled_by_the_leaver};
  }
  h.Drain(P(3));
  EXPECT_EQ(h.Take(P(3)), Texts{"Drain"});
  h.LivelyLeave(P(3), M(3));
  h.Run();
  EXPECT_EQ(h.Take(P(1)).back(), "Commit 4 o1=commit");
  EXPECT_EQ(h.Take(P(2)).back(), "Commit 4 o1=commit");
}

// ------------------------------------------------------------------------------ operators

TEST_F(RoutingTest, AnEvictionThatWasOrderedOutlivesTheCoordinator) {
  Found(3);
  h.Lively(P(1)).mute = true;
  h.CrashAt(1, true);
  h.Evict(M(2));
  ASSERT_TRUE(h.crashed());
  h.Lively(P(1)).mute = false;
  h.Boot();
  for (uint64_t i = 1; i <= 3; ++i) h.Reattach(P(i));
  h.Run();
  EXPECT_EQ(Ring(), "p1,p3");
  const Texts got = h.Take(P(2));
  EXPECT_EQ(got.back(), "Removed m2 evicted");
}

TEST_F(RoutingTest, AStreamOfAnotherProtocolIsRefusedWithBothNumbers) {
  const SessionId session(77);
  std::vector<Action> actions = h.core().Step(SessionOpened{session}, h.now());
  control::Hello hello;
  hello.peer = P(9);
  hello.endpoints = {"h:1"};
  hello.protocol = control::kProtocolVersion + 1;
  hello.version = "9.9";
  actions = h.core().Step(FromPeer{session, hello}, h.now());
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(std::get<CloseSession>(actions[0]).reason,
            "against the protocol: p9 (release 9.9) speaks protocol " +
                std::to_string(control::kProtocolVersion + 1) + ", this coordinator " +
                std::to_string(control::kProtocolVersion) + ": run the same release at both ends");
}

}  // namespace
}  // namespace longhaul::coordinator
