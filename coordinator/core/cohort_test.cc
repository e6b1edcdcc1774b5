// Cohorts: their members are admitted at one boundary in all their groups, and removed in one step.
#include <string>
#include <vector>

#include "base/prng.h"
#include "coordinator/core/coordinator_core.h"
#include "gtest/gtest.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using Texts = std::vector<std::string>;

class CohortTest : public testing::Test {
 protected:
  static GroupKey G(uint32_t group) { return Harness::G(group); }
  static PeerId P(uint64_t n) { return PeerId(n); }
  static MemberId M(uint64_t n) { return MemberId(n); }

  void Join(uint64_t peer, uint32_t group, uint64_t request = 1, uint32_t size = 2) {
    control::Join join{.request = request, .group = G(group), .name = "t"};
    join.wish.cohort = "host" + std::to_string(peer);
    join.wish.cohort_size = size;
    h.LivelyJoin(P(peer), join);
    h.Run();
  }
  // Peers 1..n, each with one member in groups 0 and 1: p1 has m1 and m2, p2 has m3 and m4, ...
  void Found(uint64_t n) {
    for (uint64_t i = 1; i <= n; ++i) {
      h.AddLively(P(i));
      Join(i, 0);
      Join(i, 1, 2);
      for (uint64_t member = 1; member < 2 * i - 1; ++member) Vote(member);
    }
    ASSERT_EQ(Admitted(0), n);
    ASSERT_EQ(Admitted(1), n);
    h.ForgetReceived();
  }
  void Vote(uint64_t member) {
    h.LivelyVote(P((member + 1) / 2), M(member));
    h.Run();
  }
  size_t Admitted(uint32_t group) {
    size_t count = 0;
    for (const MemberView& member : h.View(G(group)).members) count += member.joined ? 1 : 0;
    return count;
  }
  size_t Members(uint32_t group) { return h.View(G(group)).members.size(); }

  Harness h;
};

TEST_F(CohortTest, NobodyOfAnIncompleteCohortIsAdmitted) {
  h.AddLively(P(1));
  Join(1, 0);
  h.Wait(10000);
  EXPECT_EQ(Admitted(0), 0u);
  EXPECT_EQ(h.View(G(0)).waiting_for,
            "waiting for a pending member whose peer is attached and not draining, and whose "
            "cohort, if it has one, is complete");
  Join(1, 1, 2);
  EXPECT_EQ(Admitted(0), 1u);
  EXPECT_EQ(Admitted(1), 1u);
}

TEST_F(CohortTest, AnIncompleteCohortDoesNotHoldTheVoters) {
  Found(1);
  h.AddLively(P(2));
  Join(2, 0);
  Vote(1);
  EXPECT_EQ(h.Take(P(1)), (Texts{"VoteResult m1 number=1 epoch=1"}));
}

// Group 1 completes a ballot before the cohort is complete. Group 0 could still admit its newcomer
// by the ballot of that number, but must not.
TEST_F(CohortTest, ACohortIsAdmittedByTheSameBallotOfEachGroup) {
  Found(1);
  h.AddLively(P(2));
  Join(2, 0);
  Vote(2);
  ASSERT_EQ(h.Take(P(1)), (Texts{"VoteResult m2 number=1 epoch=1"}));
  Join(2, 1, 2);
  Vote(1);
  EXPECT_EQ(Admitted(0), 1u) << "ballot 2 of group 1 went by before the cohort was complete";
  Vote(1);
  EXPECT_EQ(Admitted(0), 2u);
  EXPECT_EQ(Admitted(1), 1u);
  Vote(2);
  EXPECT_EQ(Admitted(1), 2u);
  EXPECT_EQ(h.Stored(G(0)).ballots, h.Stored(G(1)).ballots);
}

TEST_F(CohortTest, ABallotThatIsOpenWithVotesIsNotTheirs) {
  h.AddLively(P(1));
  Join(1, 0, 1, 3);
  Join(1, 1, 2, 3);
  Join(1, 1, 3, 3);
  h.AddLively(P(2));
  Join(2, 0);
  h.LivelyVote(P(1), M(2));
  h.Run();
  Join(2, 1, 2);
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(1), M(3));
  h.Run();
  EXPECT_EQ(Admitted(0), 1u);
  EXPECT_EQ(Admitted(1), 2u);
  for (uint64_t m = 1; m <= 3; ++m) h.LivelyVote(P(1), M(m));
  h.Run();
  EXPECT_EQ(Admitted(0), 2u);
  EXPECT_EQ(Admitted(1), 3u);
}

TEST_F(CohortTest, WhenOneDiesAllGoInTheSameStepAndAreToldOfTheFirst) {
  Found(3);
  h.Say(P(2), control::Leave{G(0), M(3), true, "killed"});
  EXPECT_EQ(Admitted(0), 2u);
  EXPECT_EQ(Admitted(1), 2u);
  const Texts notices = h.Notices("evict");
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_EQ(
      notices[0],
      "member removed member=m4 peer=p2 why=evicted reason=\"its cohort host2 lost m3 of run/0: "
      "killed\"");
  EXPECT_EQ(h.View(G(1)).fault.cause, "cohort");
}

TEST_F(CohortTest, EvictingOneEvictsAll) {
  Found(2);
  h.Evict(M(1));
  EXPECT_EQ(Admitted(0), 1u);
  EXPECT_EQ(Admitted(1), 1u);
}

TEST_F(CohortTest, APendingOneThatLeavesTakesTheOthersAlong) {
  h.AddLively(P(1));
  Join(1, 0);
  Join(1, 1, 2, 2);
  h.AddLively(P(2));
  Join(2, 0);
  h.LivelyLeave(P(2), M(3));
  h.Run();
  EXPECT_EQ(Members(0), 1u);
  Join(2, 0, 5);
  Join(2, 1, 6);
  EXPECT_EQ(Members(0), 2u);
  EXPECT_EQ(Members(1), 2u);
}

TEST_F(CohortTest, ARefusedNewcomerTakesItsFellowsAlong) {
  Found(2);
  h.AddLively(P(3)).cannot_reach = {P(1), P(2)};
  Join(3, 0);
  Join(3, 1, 2);
  for (uint64_t m : {1, 3}) Vote(m);
  EXPECT_EQ(Members(0), 2u);
  EXPECT_EQ(Members(1), 2u);
  EXPECT_EQ(h.Take(P(3)).back(), "Removed m6 evicted");
}

TEST_F(CohortTest, AnUnreachableNewcomerTakesItsFellowsAlongAndHoldsNobody) {
  Found(2);
  h.AddLively(P(3));
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).cannot_reach = {P(3)};
  Join(3, 0);
  EXPECT_EQ(h.Take(P(3)).back(), "Removed m5 unreachable");
  Join(3, 0, 2);
  Join(3, 1, 3);
  h.Wait(1000);
  EXPECT_EQ(Members(0), 2u);
  EXPECT_EQ(Members(1), 2u);
  h.ForgetReceived();
  for (uint64_t m = 1; m <= 4; ++m) Vote(m);
  EXPECT_EQ(h.Take(P(1)).size(), 2u) << "nothing but the answers to its votes";
}

TEST_F(CohortTest, ACohortGetsItsBallotWhenItIsReachedInAllItsGroups) {
  Found(1);
  h.AddLively(P(2));
  Join(2, 0);
  h.Lively(P(1)).tries_nobody = true;
  Join(2, 1, 2);
  for (const uint64_t m : {1, 2}) Vote(m);
  EXPECT_EQ(Admitted(0) + Admitted(1), 2u) << "in group 1 it is being tried";
  h.Wait(2500);
  for (const uint64_t m : {1, 2}) Vote(m);
  EXPECT_EQ(Admitted(0), 2u);
  EXPECT_EQ(Admitted(1), 2u);
  EXPECT_EQ(h.Stored(G(0)).ballots, h.Stored(G(1)).ballots);
}

// After a restart the coordinator does not know which newcomers the members have reached. Still the
// other members must not pass the boundary at which the rest of the cohort is to be admitted.
TEST_F(CohortTest, ACohortOfWhichSomeAreAdmittedIsNotTriedAnew) {
  Found(1);
  h.AddLively(P(2));
  Join(2, 0);
  Join(2, 1, 2);
  Vote(1);
  ASSERT_EQ(Admitted(0), 2u);
  ASSERT_EQ(Admitted(1), 1u);
  h.Lively(P(1)).tries_nobody = true;
  h.Boot();
  for (const uint64_t n : {1, 2}) h.Reattach(P(n));
  h.Run();
  Vote(2);
  EXPECT_EQ(Admitted(1), 2u);
}

TEST_F(CohortTest, SizesThatDifferAreRefused) {
  h.AddLively(P(1));
  Join(1, 0, 1, 3);
  Join(1, 1, 2, 2);
  EXPECT_EQ(
      h.Take(P(1)).back(),
      "JoinRefused 2 join of run/1 at p1 refused: cohort host1 has 2 members by this join and "
      "3 by the others': give all the same cohort_size");
}

TEST_F(CohortTest, AMemberTooManyIsRefused) {
  Found(1);
  Join(1, 0, 9);
  EXPECT_EQ(h.Take(P(1)).back(),
            "JoinRefused 9 join of run/0 at p1 refused: cohort host1 has its 2 members already: "
            "give another cohort, or a larger cohort_size at all of them");
}

TEST_F(CohortTest, OneNameAtTwoPeersIsTwoCohorts) {
  for (uint64_t p : {1, 2}) {
    h.AddLively(P(p));
    control::Join join{.request = 1, .group = G(0), .name = "t"};
    join.wish.cohort = "same";
    join.wish.cohort_size = 2;
    h.LivelyJoin(P(p), join);
    h.Run();
  }
  EXPECT_EQ(Admitted(0), 0u);
}

// Group 0 completes the ballot while the newcomers' peer has no stream. The peer attaches before
// the members of group 1 vote. The newcomers are admitted by the next ballot, in both groups.
TEST_F(CohortTest, WhoIsLateForABallotOfOneGroupIsLateInAll) {
  Found(1);
  h.AddLively(P(2));
  Join(2, 0);
  Join(2, 1, 2);
  h.Close(P(2));
  Vote(1);
  EXPECT_EQ(Admitted(0), 1u);
  h.Reattach(P(2));
  h.Run();
  Vote(2);
  EXPECT_EQ(Admitted(1), 1u);
  Vote(1);
  Vote(2);
  EXPECT_EQ(Admitted(0), 2u);
  EXPECT_EQ(Admitted(1), 2u);
}

TEST_F(CohortTest, WhoIsAdmittedInOneGroupIsWaitedForInTheOther) {
  for (const bool returns : {true, false}) {
    h = Harness();
    Found(1);
    h.AddLively(P(2));
    Join(2, 0);
    Join(2, 1, 2);
    Vote(1);
    ASSERT_EQ(Admitted(0), 2u);
    h.Close(P(2));
    Vote(2);
    EXPECT_EQ(h.View(G(1)).waiting_for,
              "waiting for p2 to come back: its cohort host2 is admitted in another group, m4 is "
              "not yet");
    if (returns) {
      h.Reattach(P(2));
      h.Run();
    } else {
      h.Wait(4000);
    }
    EXPECT_EQ(Admitted(0), returns ? 2u : 1u);
    EXPECT_EQ(Admitted(1), returns ? 2u : 1u);
    EXPECT_FALSE(h.Lively(P(1)).members.at(M(2)).voting);
  }
}

TEST_F(CohortTest, ACohortThatCannotComeInTogetherIsRemoved) {
  Found(1);
  h.AddLively(P(2));
  Join(2, 0);
  Join(2, 1, 2);
  Vote(1);
  ASSERT_EQ(Admitted(0), 2u);
  h.Say(P(2), control::Draining{});
  Vote(2);
  EXPECT_EQ(Members(1), 1u);
  EXPECT_EQ(h.View(G(0)).fault.cause, "cohort");
  EXPECT_EQ(Admitted(0), 1u);
}

TEST_F(CohortTest, TheNumberOutlivesTheCoordinator) {
  Found(1);
  h.AddLively(P(2));
  Join(2, 0);
  Vote(2);
  Join(2, 1, 2);
  h.Boot();
  h.Reattach(P(1));
  h.Reattach(P(2));
  h.Run();
  Vote(1);
  EXPECT_EQ(Admitted(0), 1u);
  Vote(1);
  Vote(2);
  EXPECT_EQ(Admitted(0), 2u);
  EXPECT_EQ(Admitted(1), 2u);
}

// Hosts join, leave, step and lose their streams in random order. A cohort may be admitted in part
// only while the other group has not completed the same ballot. In the end no member is pending.
TEST_F(CohortTest, RandomHistoriesLeaveNoCohortInPart) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng prng(seed);
    Harness run;
    std::map<uint64_t, uint64_t> requests;
    for (uint64_t p = 1; p <= 3; ++p) run.AddLively(P(p));
    const auto step_all = [&] {
      for (uint64_t p = 1; p <= 3; ++p) {
        const auto members = run.Lively(P(p)).members;
        for (const auto& [member, local] : members) {
          if (local.admitted && !local.leaving) run.LivelyVote(P(p), member);
        }
      }
      run.Run();
    };
    const auto join = [&](uint64_t p) {
      for (uint32_t g : {0u, 1u}) {
        control::Join join{.request = ++requests[p], .group = G(g), .name = "t"};
        join.wish.cohort = "c";
        join.wish.cohort_size = 2;
        run.LivelyJoin(P(p), join);
        if (prng.Chance(0.3)) step_all();
      }
      run.Run();
    };
    for (int i = 0; i < 60; ++i) {
      const uint64_t p = 1 + prng.Below(3);
      LivelyPeer& peer = run.Lively(P(p));
      switch (prng.Below(6)) {
        case 0:
          if (peer.members.empty() && peer.joins.empty()) join(p);
          break;
        case 1:
          if (!peer.members.empty()) run.LivelyLeave(P(p), peer.members.begin()->first);
          break;
        case 2:
          run.Close(P(p));
          step_all();
          run.Reattach(P(p));
          break;
        case 3:
          for (const auto& [member, local] : std::map(peer.members)) {
            if (local.admitted && prng.Chance(0.5)) run.LivelyVote(P(p), member);
          }
          break;
        default:
          step_all();
          break;
      }
      run.Run();
    }
    for (int i = 0; i < 6; ++i) step_all();
    for (const GroupView& group : run.core().GetOverview().groups) {
      for (const MemberView& member : group.members) {
        EXPECT_TRUE(member.joined) << ToString(member.member);
      }
    }
  }
}

}  // namespace
}  // namespace longhaul::coordinator
