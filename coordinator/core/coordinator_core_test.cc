#include "coordinator/core/coordinator_core.h"

#include <string>
#include <vector>

#include "coordinator/core/token.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/wire/limits.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Texts = std::vector<std::string>;

class CoordinatorCoreTest : public testing::Test {
 protected:
  static GroupKey G(uint32_t group = 0) { return Harness::G(group); }
  static PeerId P(uint64_t n) { return PeerId(n); }
  static MemberId M(uint64_t n) { return MemberId(n); }

  void Found(uint64_t n) {
    h.Found(n);
    ASSERT_EQ(Admitted(), n);
  }
  uint64_t Admitted() {
    uint64_t count = 0;
    for (const MemberView& member : h.View().members) count += member.joined ? 1 : 0;
    return count;
  }
  std::string Ring() {
    std::string text;
    for (const PeerView& peer : h.View().ring)
      text += (text.empty() ? "" : ",") + ToString(peer.peer);
    return text;
  }
  Epoch Committed() { return h.View().committed; }
  control::Vote V(uint64_t member, uint64_t number) { return {G(), M(member), number}; }
  control::EpochReady Ready(uint64_t epoch) { return {G(), Epoch(epoch), {}}; }
  control::LinkLost Lost(PeerId peer) {
    return {G(), std::max(Committed(), h.View().preparing), peer, "reset"};
  }

  Harness h;
};

// ------------------------------------------------------------------------------ joining

TEST_F(CoordinatorCoreTest, AMemberAloneIsAdmittedAtOnce) {
  h.Attach(P(1));
  h.Say(P(1), control::Join{7, G(), "t"});
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"JoinPending 7 m1",
                   "Prepare 1 base=0 boundary=1 last_freeze=0 members=m1@1 ring=p1"}));
  EXPECT_EQ(h.View().waiting_for, "epoch 1 waiting for 1 of 1 peers: p1");
  h.Say(P(1), Ready(1));
  EXPECT_EQ(h.Take(P(1)), Texts{"Commit 1"});
  EXPECT_EQ(h.View().waiting_for, "");
  EXPECT_EQ(h.Notices("commit"),
            Texts{"epoch committed epoch=1 members=1 joined=m1 left= ring=p1 took_ms=0"});
}

TEST_F(CoordinatorCoreTest, SecondJoinerWaitsForTheVote) {
  Found(1);
  h.AddLively(P(2));
  h.LivelyJoin(P(2), 1);
  h.Wait(5000);
  EXPECT_EQ(h.Take(P(2)), Texts{"JoinPending 1 m2"});
  EXPECT_EQ(h.View().waiting_for, "waiting for 1 of 1 votes: m1; pending: 1");
  EXPECT_EQ(h.pending_count(P(1)), 1u);
  h.LivelyVote(P(1), M(1));
  h.Run();
  const Texts expected = {"Prepare 2 base=1 boundary=2 last_freeze=0 members=m1@1,m2@2 ring=p1,p2",
                          "Commit 2"};
  EXPECT_EQ(h.Take(P(2)), expected);
  Texts voter = expected;
  voter.push_back("VoteResult m1 number=1 epoch=2");
  EXPECT_EQ(h.Take(P(1)), voter);
  EXPECT_EQ(h.pending_count(P(1)), 0u);
}

TEST_F(CoordinatorCoreTest, UnanimousVoteAdmitsTwoJoiners) {
  Found(2);
  for (uint64_t i : {4, 3}) {
    h.AddLively(P(i));
    h.LivelyJoin(P(i), 1);
  }
  h.LivelyVote(P(1), M(1));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), Texts{});
  EXPECT_EQ(h.View().waiting_for, "waiting for 1 of 2 votes: m2; pending: 2");
  EXPECT_TRUE(h.View().members[0].voting);
  h.LivelyVote(P(2), M(2));
  h.Run();
  // Newcomers rank behind the others, in ring order.
  EXPECT_EQ(
      h.Take(P(1)),
      (Texts{
          "Prepare 3 base=2 boundary=3 last_freeze=0 members=m1@1,m2@2,m4@3,m3@3 ring=p1,p2,p3,p4",
          "Commit 3", "VoteResult m1 number=2 epoch=3"}));
  EXPECT_EQ(h.View().members[2].member, M(4));
}

TEST_F(CoordinatorCoreTest, WithNobodyPendingVotersGetTheirResultInTheSameEpoch) {
  Found(2);
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), Texts{"VoteResult m1 number=2 epoch=2"});
  EXPECT_EQ(h.Take(P(2)), Texts{"VoteResult m2 number=1 epoch=2"});
}

TEST_F(CoordinatorCoreTest, AnAnsweredVoteIsAnsweredAgainAndOpensNothing) {
  Found(1);
  h.LivelyVote(P(1), M(1));
  h.Run();
  h.Say(P(1), V(1, 1));
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"VoteResult m1 number=1 epoch=1", "VoteResult m1 number=1 epoch=1"}));
  EXPECT_FALSE(h.View().members[0].voting);
}

TEST_F(CoordinatorCoreTest, ARepeatedAnswerNamesTheEpochOfItsBoundary) {
  Found(2);
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  h.Say(P(2), control::Leave{G(), M(2), /*died=*/true, "killed"});
  h.Run();
  h.Take(P(1));
  h.Say(P(1), V(1, 2));
  EXPECT_EQ(h.Take(P(1)), Texts{"VoteResult m1 number=2 epoch=2"});
  EXPECT_GT(h.View().committed, Epoch(2));
}

TEST_F(CoordinatorCoreTest, ARepeatedJoinIsTheSameMember) {
  Found(1);
  h.Attach(P(2));
  h.Say(P(2), control::Join{5, G(), "t"});
  h.Say(P(2), control::Join{5, G(), "t"});
  EXPECT_EQ(h.Take(P(2)), (Texts{"JoinPending 5 m2", "JoinPending 5 m2"}));
  EXPECT_EQ(h.View().members.size(), 2u);
}

TEST_F(CoordinatorCoreTest, WhoJoinsDuringThePreparationWaits) {
  h.Attach(P(1));
  h.Say(P(1), control::Join{1, G(), "t"});
  h.Attach(P(2));
  h.Say(P(2), control::Join{1, G(), "t"});
  EXPECT_EQ(h.Take(P(2)), Texts{"JoinPending 1 m2"});
  h.Say(P(1), Ready(1));
  EXPECT_EQ(Admitted(), 1u);
}

TEST_F(CoordinatorCoreTest, MembersOfOnePeerShareItsPlaceInTheRingAndHaveRanksOfTheirOwn) {
  Found(2);
  h.LivelyJoin(P(1), 2);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  EXPECT_EQ(Ring(), "p1,p2");
  EXPECT_EQ(h.View().members[1].member, M(2)) << "the newcomer moves nobody";
  EXPECT_EQ(h.View().members[2].member, M(3));
}

TEST_F(CoordinatorCoreTest, APendingMemberOfADetachedPeerDoesNotHoldTheVoters) {
  Found(1);
  h.Attach(P(2));
  h.Say(P(2), control::Join{5, G(), "t"});
  h.Close(P(2));
  h.LivelyVote(P(1), M(1));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), Texts{"VoteResult m1 number=1 epoch=1"});
}

TEST_F(CoordinatorCoreTest, GroupsOfARunAreIndependent) {
  h.AddLively(P(1));
  h.AddLively(P(2));
  for (uint64_t i : {1, 2}) {
    h.LivelyJoin(P(i), 1, G(i));
    h.Run();
  }
  EXPECT_EQ(h.View(G(1)).members[0].member, M(1));
  EXPECT_EQ(h.View(G(2)).members[0].member, M(2));
  h.ForgetReceived();
  h.Kill(P(1));
  h.Wait(5000);
  EXPECT_EQ(h.Take(P(2)), Texts{});
  EXPECT_EQ(h.View(G(1)).members.size(), 0u);
  EXPECT_EQ(h.View(G(2)).members.size(), 1u);
}

TEST_F(CoordinatorCoreTest, TokensDifferByEpochAndGroup) {
  Found(1);
  const std::string first = h.Prepared(P(1)).token;
  h.LivelyJoin(P(1), 2, G(1));
  h.Run();
  const std::string other_group = h.Prepared(P(1)).token;
  EXPECT_EQ(first.size(), 32u);
  EXPECT_NE(first, other_group);
  EXPECT_EQ(h.Prepared(P(1)).peers[0].endpoints[0], "10.0.0.1:29700");
  EXPECT_EQ(h.Prepared(P(1)).peers[0].lanes, 2u);
  EXPECT_EQ(h.Prepared(P(1)).members[0].name, "t");
}

// ------------------------------------------------------------------------------ leaving

TEST_F(CoordinatorCoreTest, ALeaverIsOutWithTheNextEpochAndHearsOfItThen) {
  Found(3);
  h.Lively(P(1)).mute = true;
  h.LivelyLeave(P(3), M(3));
  h.Run();
  EXPECT_EQ(h.Take(P(3)), Texts{});
  EXPECT_EQ(h.View().waiting_for, "epoch 4 waiting for 1 of 2 peers: p1");
  h.Say(P(1), Ready(4));
  EXPECT_EQ(h.Take(P(3)), Texts{"Removed m3 left"});
  EXPECT_EQ(h.Take(P(2)),
            (Texts{"Prepare 4 base=3 boundary=3 last_freeze=4 freeze members=m1@1,m2@2 ring=p1,p2",
                   "Commit 4"}));
  EXPECT_EQ(h.Notices("commit").back(),
            "epoch committed epoch=4 members=2 joined= left=m3 ring=p1,p2 took_ms=0 "
            "cause=leave detector=p3 detect_ms=0 agree_ms=0");
}

TEST_F(CoordinatorCoreTest, LeaverDecidesTheBallot) {
  Found(3);
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.LivelyLeave(P(3), M(3));
  h.Run();
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"Prepare 4 base=3 boundary=3 last_freeze=4 freeze members=m1@1,m2@2 ring=p1,p2",
                   "Commit 4", "VoteResult m1 number=3 epoch=4"}));
}

TEST_F(CoordinatorCoreTest, ALeaverWhosePeerKeepsAMemberIsInTheEpochItself) {
  Found(2);
  h.LivelyJoin(P(1), 2);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  h.ForgetReceived();
  h.LivelyLeave(P(1), M(1));
  h.Run();
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"Prepare 4 base=3 boundary=3 last_freeze=4 freeze members=m2@2,m3@3 ring=p1,p2",
                   "Commit 4", "Removed m1 left"}));
}

TEST_F(CoordinatorCoreTest, APendingMemberThatLeavesIsForgotten) {
  Found(1);
  h.AddLively(P(2));
  h.LivelyJoin(P(2), 1);
  h.Run();
  EXPECT_EQ(h.pending_count(P(1)), 1u);
  h.LivelyLeave(P(2), M(2));
  h.Run();
  EXPECT_EQ(h.Take(P(2)), (Texts{"JoinPending 1 m2", "Removed m2 left"}));
  EXPECT_EQ(h.pending_count(P(1)), 0u);
  EXPECT_EQ(h.Take(P(1)), Texts{});
  EXPECT_EQ(h.View().members.size(), 1u);
}

TEST_F(CoordinatorCoreTest, TheLastLeaverEndsInAnEmptyEpochAndNumbersGoOn) {
  Found(1);
  h.LivelyLeave(P(1), M(1));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), Texts{"Removed m1 left"});
  EXPECT_EQ(Committed(), Epoch(2));
  EXPECT_EQ(h.Stored().members.size(), 0u);
  EXPECT_EQ(h.Stored().peers.size(), 0u);
  h.LivelyJoin(P(1), 2);
  h.Run();
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"JoinPending 2 m2",
                   "Prepare 3 base=2 boundary=3 last_freeze=0 members=m2@3 ring=p1", "Commit 3"}));
}

TEST_F(CoordinatorCoreTest, WhenAllAreGoneThePendingAreAdmittedAtOnce) {
  Found(1);
  h.AddLively(P(2));
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.LivelyLeave(P(1), M(1));
  h.Run();
  EXPECT_EQ(h.View().members[0].member, M(2));
  EXPECT_EQ(Admitted(), 1u);
  EXPECT_EQ(Committed(), Epoch(3));
}

TEST_F(CoordinatorCoreTest, ALeaveThatIsRepeatedOrUnknownIsAnswered) {
  Found(2);
  h.Lively(P(1)).mute = true;
  h.Say(P(2), control::Leave{G(), M(2), true, "trainer died"});
  h.Say(P(2), control::Leave{G(), M(2), false, "again"});
  h.Say(P(1), Ready(3));
  EXPECT_EQ(h.Take(P(2)), Texts{"Removed m2 died"});
  h.Say(P(2), control::Leave{G(), M(2), false, "again"});
  h.Say(P(2), control::Leave{G(), M(1), false, "not mine"});
  h.Say(P(2), control::Leave{G(9), M(1), false, "no such group"});
  EXPECT_EQ(h.Take(P(2)), (Texts{"Removed m2 left", "Removed m1 left", "Removed m1 left"}));
  EXPECT_EQ(Admitted(), 1u);
}

TEST_F(CoordinatorCoreTest, AnEvictedMemberIsRemovedWithTheReason) {
  Found(2);
  h.Evict(M(2));
  EXPECT_EQ(h.Take(P(2)), Texts{"Removed m2 evicted"});
  EXPECT_EQ(
      h.Notices("evict"),
      Texts{
          "member removed member=m2 peer=p2 why=evicted reason=\"evicted by an operator: test\""});
  h.Evict(M(2));
  h.Evict(M(77));
  EXPECT_EQ(Admitted(), 1u);
}

TEST_F(CoordinatorCoreTest, APendingMemberIsEvictedAtOnce) {
  Found(1);
  h.AddLively(P(2));
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.Evict(M(2));
  EXPECT_EQ(h.Take(P(2)), (Texts{"JoinPending 1 m2", "Removed m2 evicted"}));
}

// ------------------------------------------------------------------------------ death

TEST_F(CoordinatorCoreTest, APeerIsDeadWhenItHasNoStreamForFourDetectMs) {
  Found(3);
  h.Kill(P(3));
  h.Wait(3999);
  EXPECT_EQ(h.Take(P(1)), Texts{});
  h.Wait(1);
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"Prepare 4 base=3 boundary=3 last_freeze=4 freeze members=m1@1,m2@2 ring=p1,p2",
                   "Commit 4"}));
  EXPECT_EQ(h.Notices("death").size(), 1u);
}

TEST_F(CoordinatorCoreTest, APeerThatReattachesInTimeStays) {
  Found(2);
  h.Close(P(2));
  h.Wait(900);
  h.Reattach(P(2));
  h.Wait(5000);
  EXPECT_EQ(Admitted(), 2u);
  EXPECT_EQ(Committed(), Epoch(2));
}

TEST_F(CoordinatorCoreTest, ASilentPeerIsDeadAndItsStreamClosed) {
  Found(2);
  h.Hang(P(2));
  h.Lively(P(2)).mute = true;
  h.Wait(3500);
  EXPECT_EQ(Admitted(), 2u);
  h.Wait(1500);
  EXPECT_EQ(Admitted(), 1u);
  EXPECT_EQ(h.closings(), Texts{"silent for 4000 ms"});
}

// One end closes a stalled stream after it was silent for some time. The peer does not get the time
// of silence again.
TEST_F(CoordinatorCoreTest, AStreamThatClosesLateGivesNoSecondPeriod) {
  for (const bool admitted : {true, false}) {
    h = Harness();
    Found(2);
    h.AddLively(P(3));
    h.LivelyJoin(P(3), 1);
    h.Run();
    const uint64_t silent = admitted ? 2 : 3;
    h.Say(P(silent), control::Heartbeat{});
    h.Hang(P(silent));
    h.Wait(1900);
    h.Close(P(silent));
    h.Wait(admitted ? 2099 : 99);
    EXPECT_EQ(h.Notices("death").size(), 0u);
    h.Wait(1);
    EXPECT_EQ(h.Notices("death").size(), 1u);
  }
}

TEST_F(CoordinatorCoreTest, AStreamThatClosedWhileTheCoordinatorStoodStillGivesTheWholePeriod) {
  Found(2);
  h.Stall(20000);
  h.Close(P(2));
  h.Say(P(1), control::Heartbeat{});
  h.Wait(3999);
  EXPECT_EQ(Admitted(), 2u);
  h.Wait(1);
  EXPECT_EQ(Admitted(), 1u);
}

TEST_F(CoordinatorCoreTest, WhoIsHeardByNobodyElseIsNotRemovedByACoordinatorThatHearsNobody) {
  for (const int64_t cut_ms : {7000, 13000, 27000}) {
    for (const bool closed : {true, false}) {
      h = Harness();
      Found(4);
      for (const uint64_t n : {1, 2, 3, 4}) h.Hang(P(n));
      h.Wait(2500);
      for (const uint64_t n : {1, 2, 3, 4}) {
        if (closed) h.Close(P(n));
      }
      h.Wait(cut_ms - 2500);
      EXPECT_EQ(h.Notices("death"), Texts{});
      EXPECT_THAT(h.View().waiting_for, HasSubstr("hears no peer"));
      // The peers attach again, one after the other.
      for (const uint64_t n : {3, 1, 4, 2}) {
        h.Unhang(P(n));
        h.Reattach(P(n));
        h.Wait(1000);
      }
      h.Wait(10000);
      EXPECT_EQ(Admitted(), 4u);
      EXPECT_EQ(h.Notices("death"), Texts{});
      EXPECT_EQ(h.Notices("isolated").size(), 2u);
      EXPECT_EQ(h.View().waiting_for, "");
    }
  }
}

// Streams that end cleanly say no more than silent ones: it may be this coordinator that ended
// them, for their age, and lets nobody in again.
TEST_F(CoordinatorCoreTest, WhenAllStreamsHaveClosedNobodyIsRemovedBeforeAPeerComes) {
  Found(3);
  for (const uint64_t n : {1, 2, 3}) h.Close(P(n));
  h.Wait(600'000);
  EXPECT_EQ(Admitted(), 3u);
  EXPECT_EQ(h.Notices("isolated").size(), 1u);
  EXPECT_THAT(h.View().waiting_for, HasSubstr("hears no peer"));
  h.Reattach(P(2));
  h.Wait(2000);
  h.Reattach(P(1));
  h.Wait(1999);
  EXPECT_EQ(Admitted(), 3u);
  h.Wait(1);  // who does not come back now is dead
  EXPECT_EQ(Ring(), "p1,p2");
}

// A certificate for another name: streams end one after another, and each host that comes back is
// not let in. The last streams still stand, so the coordinator is not isolated.
TEST_F(CoordinatorCoreTest, WhileEveryPeerThatComesIsRefusedNobodyIsRemoved) {
  Found(3);
  const auto knock_for = [this](int64_t ms, std::vector<uint64_t> refused) {
    for (int64_t waited = 0; waited < ms; waited += 500) {
      for (const uint64_t n : refused) h.Knock(P(n));
      h.Wait(500);
    }
  };
  h.Close(P(1));
  knock_for(20000, {1});
  EXPECT_EQ(h.Notices("detach").size(), 2u);  // its end, and that its host connects
  h.Close(P(2));
  knock_for(20000, {1, 2});
  h.Close(P(3));
  knock_for(60000, {1, 2, 3});
  EXPECT_EQ(h.Notices("death"), Texts{});
  EXPECT_EQ(Admitted(), 3u);
  for (const uint64_t n : {3, 2, 1}) {
    h.Reattach(P(n));
    h.Wait(1000);
  }
  h.Wait(20000);
  EXPECT_EQ(Admitted(), 3u);
  EXPECT_EQ(h.View().waiting_for, "");
}

// Peer 1 alone has a certificate that nobody trusts.
TEST_F(CoordinatorCoreTest, WhoIsRefusedWhileOthersAreLetInIsRemovedInTime) {
  Found(3);
  h.Close(P(1));
  const auto knock_for = [this](int64_t ms) {
    for (int64_t waited = 0; waited < ms; waited += 500) {
      h.Knock(P(1));
      h.Wait(500);
    }
  };
  knock_for(10000);
  EXPECT_EQ(Admitted(), 3u);
  h.Reattach(P(2));
  knock_for(3000);
  EXPECT_EQ(Admitted(), 3u);
  knock_for(1500);
  EXPECT_EQ(Ring(), "p2,p3");
}

// A path was cut for longer than TCP waits between two tries. A new connection comes through first.
TEST_F(CoordinatorCoreTest, AQuietPeerWhoseHostConnectsGetsTheTimeToComeBackOnce) {
  Found(2);
  h.Say(P(2), control::Heartbeat{});
  h.Hang(P(2));
  h.Knock(P(2));  // not quiet yet: says nothing
  h.Wait(3900);
  h.Knock(P(2));
  h.Wait(1000);
  EXPECT_EQ(Admitted(), 2u);
  h.Knock(P(2));
  h.Wait(3200);
  EXPECT_EQ(Admitted(), 1u);
}

TEST_F(CoordinatorCoreTest, WhoDoesNotComeBackAfterAnIsolationIsDeadThen) {
  Found(3);
  for (const uint64_t n : {1, 2, 3}) h.Hang(P(n));
  h.Wait(9000);
  for (const uint64_t n : {1, 2}) {
    h.Unhang(P(n));
    h.Reattach(P(n));
  }
  h.Wait(3999);
  EXPECT_EQ(h.Notices("death"), Texts{});
  h.Wait(1);
  EXPECT_EQ(h.Notices("death").size(), 1u);
  EXPECT_EQ(Ring(), "p1,p2");
}

TEST_F(CoordinatorCoreTest, APeerThatTheOthersReportAfterAnIsolationIsNotWaitedForSoLong) {
  Found(4);
  for (const uint64_t n : {1, 2, 3, 4}) h.Hang(P(n));
  h.Wait(9000);
  for (const uint64_t n : {1, 2, 3}) {
    h.Unhang(P(n));
    h.Reattach(P(n));
  }
  for (const uint64_t n : {1, 2, 3}) {
    h.Say(P(n), control::LinkLost{G(), Epoch(4), P(4), "silent for 1000 ms", 1000});
  }
  EXPECT_EQ(h.Notices("death").size(), 1u);
}

// While the coordinator is cut off, no peer can answer and no member can vote.
TEST_F(CoordinatorCoreTest, APreparationAndAStepDeadlineStandStillWhileNobodyIsHeard) {
  Found(2);
  control::Join late{.request = 1, .group = G(), .name = "t"};
  late.wish.step_deadline_ms = 5000;
  h.AddLively(P(3));
  h.LivelyJoin(P(3), late);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  ASSERT_EQ(Admitted(), 3u);
  h.LivelyVote(P(1), M(1));
  h.Run();
  for (const uint64_t n : {1, 2, 3}) h.Hang(P(n));
  h.Wait(30000);
  for (const uint64_t n : {1, 2, 3}) {
    h.Unhang(P(n));
    h.Reattach(P(n));
  }
  h.Run();
  h.Wait(3000);
  EXPECT_EQ(Admitted(), 3u);
  h.Wait(60000);
  EXPECT_EQ(Admitted(), 2u) << "the deadline goes on";
}

// The peer attaches again and names a member that was removed.
TEST_F(CoordinatorCoreTest, APeerThatWasRemovedHearsByWhomAndWhenAndWhy) {
  Found(3);
  h.Hang(P(3));
  h.Wait(6000);
  ASSERT_EQ(Admitted(), 2u);
  h.Reattach(P(3));
  EXPECT_EQ(h.RemovedText(P(3)),
            "the coordinator removed it 2000 ms before its peer came back (died, found by the "
            "coordinator: silent for 4000 ms)");
  h.Boot();
  for (const uint64_t n : {1, 2}) h.Reattach(P(n));
  h.Attach(P(3), {{.group = G(), .committed = Epoch(3), .members = {M(3)}}});
  EXPECT_THAT(h.RemovedText(P(3)), HasSubstr("before the coordinator started"));
}

TEST_F(CoordinatorCoreTest, APeerThatOthersReportedHearsWhoDid) {
  Found(3);
  h.Hang(P(3));
  h.Wait(1500);
  for (const uint64_t n : {1, 2}) {
    EXPECT_EQ(Admitted(), 3u);
    h.Wait(10);
    h.Say(P(n), control::LinkLost{G(), Epoch(3), P(3), "silent for 1000 ms", 1000});
  }
  ASSERT_EQ(Admitted(), 2u);
  const std::string text = "it is silent for 1000 ms and lost by p1 p2 of run/0";
  EXPECT_EQ(h.RemovedText(P(3)), text) << "said on a stream that nobody reads";
  h.Wait(700);
  h.Attach(P(3), {{.group = G(), .committed = Epoch(3), .members = {M(3)}}});
  EXPECT_EQ(h.RemovedText(P(3)),
            "the coordinator removed it 700 ms before its peer came back (died, found by p1: " +
                text + ")");
}

TEST_F(CoordinatorCoreTest, APeerThatIsSilentToAnotherOneTooIsDeadAfterDetectMs) {
  Found(3);
  h.Hang(P(3));
  h.Lively(P(3)).mute = true;
  h.Lively(P(1)).mute = true;
  h.Say(P(1), control::LinkLost{G(), Epoch(3), P(3), "silent"});
  h.Wait(600);
  EXPECT_EQ(h.Notices("death").size(), 0u);
  h.Wait(500);
  EXPECT_EQ(h.Notices("death").size(), 1u);
  EXPECT_EQ(h.closings(), Texts{});
}

TEST_F(CoordinatorCoreTest, AReportOfSilenceCountsAMomentLater) {
  for (const uint64_t peers : {2, 3}) {
    for (const bool comes_back : {false, true}) {
      h = Harness();
      Found(peers);
      h.Hang(P(peers));
      h.Lively(P(peers)).mute = h.Lively(P(1)).mute = true;  // waits for its link
      h.Wait(1400);
      h.Say(P(1), control::LinkLost{G(), Epoch(peers), P(peers), "silent for 1000 ms", 1000});
      EXPECT_EQ(h.Notices("death").size(), 0u);
      // The report counts later if a second peer would report the silence, too.
      h.Wait(peers == 2 ? 190 : 490);
      EXPECT_EQ(h.Notices("death").size(), 0u);
      if (comes_back) h.Say(P(peers), control::Heartbeat{});
      h.Wait(20);
      EXPECT_EQ(h.Notices("death").size(), comes_back ? 0u : 1u);
    }
  }
}

TEST_F(CoordinatorCoreTest, WhomNobodyHearsIsDeadAtOnce) {
  Found(4);
  h.Hang(P(4));
  h.Lively(P(4)).mute = true;
  h.Wait(1400);
  for (const uint64_t n : {1, 2, 3}) {
    EXPECT_EQ(h.Notices("death").size(), 0u);
    h.Say(P(n), control::LinkLost{G(), Epoch(4), P(4), "silent for 1000 ms", 1000});
  }
  EXPECT_EQ(h.Notices("death").size(), 1u);
}

TEST_F(CoordinatorCoreTest, WhoIsSilentItselfIsNotAskedWhetherItHearsAnother) {
  Found(5);
  for (const uint64_t n : {4, 5}) {
    h.Hang(P(n));
    h.Lively(P(n)).mute = true;
  }
  h.Wait(1400);
  for (const uint64_t n : {1, 2, 3}) {
    EXPECT_EQ(h.Notices("death").size(), 0u);
    h.Say(P(n), control::LinkLost{G(), Epoch(5), P(4), "silent for 1000 ms", 1000});
  }
  EXPECT_EQ(h.Notices("death").size(), 1u);
}

TEST_F(CoordinatorCoreTest, AReportOfSilenceOutlivesAnotherFault) {
  Found(4);
  h.Hang(P(3));
  h.Lively(P(1)).mute = h.Lively(P(3)).mute = true;
  h.Wait(1400);
  h.Say(P(1), control::LinkLost{G(), Epoch(4), P(3), "silent for 1000 ms", 1000});
  h.Kill(P(4));
  h.Say(P(1), Lost(P(4)));
  h.Wait(480);
  EXPECT_EQ(h.Notices("death").size(), 1u);
  h.Wait(30);
  EXPECT_EQ(h.Notices("death").size(), 2u);
}

TEST_F(CoordinatorCoreTest, APeerThatIsSilentToOthersButHeardHereStays) {
  Found(3);
  h.Say(P(1), control::LinkLost{G(), Epoch(3), P(3), "silent"});
  h.Wait(6000);
  EXPECT_EQ(Admitted(), 3u);
}

TEST_F(CoordinatorCoreTest, LinkLostAndClosedStreamTogetherAreDeathAtOnce) {
  Found(3);
  h.Close(P(3));
  h.Say(P(1), Lost(P(3)));
  EXPECT_EQ(Admitted(), 2u);
  EXPECT_EQ(Committed(), Epoch(4));
}

TEST_F(CoordinatorCoreTest, ClosedStreamAfterLinkLostIsDeathAtOnce) {
  Found(3);
  h.Say(P(1), Lost(P(3)));
  EXPECT_EQ(Admitted(), 3u);
  h.Close(P(3));
  EXPECT_EQ(Admitted(), 2u);
  EXPECT_EQ(Committed(), Epoch(4));
}

// The accusers may lie, and answer the freeze as late as they may.
TEST_F(CoordinatorCoreTest, AStreamThatTheCoordinatorEndsIsNoSignOfDeathWhateverOthersSay) {
  for (const uint64_t peers : {2, 3}) {
    for (const uint64_t liars : {uint64_t{1}, peers - 1}) {
      for (const bool report_first : {false, true}) {
        h = Harness();
        Found(peers);
        const auto report = [&] {
          for (uint64_t n = 1; n <= liars; ++n) h.Say(P(n), Lost(P(peers)));
        };
        for (uint64_t n = 1; n <= liars; ++n) h.Lively(P(n)).mute = true;
        if (report_first) report();
        h.Wait(2800);
        h.Close(P(peers), /*ended_here=*/true);
        if (!report_first) report();
        h.Wait(600);
        EXPECT_EQ(h.Notices("death"), Texts{});
        h.Reattach(P(peers));
        h.Wait(900);
        for (uint64_t n = 1; n <= liars; ++n) {
          h.Lively(P(n)).mute = false;
          h.Reattach(P(n));
        }
        EXPECT_EQ(h.Notices("death"), Texts{});
        EXPECT_EQ(Admitted(), peers);
      }
    }
  }
}

TEST_F(CoordinatorCoreTest, WhoseStreamTheCoordinatorEndedIsAwaitedAsLongAsASilentPeer) {
  for (const bool accused : {false, true}) {
    h = Harness();
    Found(3);
    h.Hang(P(3));
    h.Say(P(3), control::Heartbeat{});
    h.Lively(P(1)).mute = h.Lively(P(3)).mute = true;
    if (accused) h.Say(P(1), Lost(P(3)));
    h.Wait(100);
    h.Close(P(3), /*ended_here=*/true);
    h.Wait(accused ? 850 : 3850);
    EXPECT_EQ(h.Notices("death"), Texts{}) << accused;
    h.Wait(100);
    EXPECT_EQ(h.Notices("death").size(), 1u) << accused;
  }
}

TEST_F(CoordinatorCoreTest, AReportFromBeforeAFreezeStillNamesWhoIsSilent) {
  Found(3);
  h.Lively(P(1)).mute = h.Lively(P(3)).mute = true;
  h.LivelyLeave(P(2), M(2));
  h.Run();
  ASSERT_EQ(h.View().preparing, Epoch(4));
  h.Say(P(1), control::LinkLost{G(), Epoch(3), P(3), "refused"});
  EXPECT_EQ(h.View().preparing, Epoch(4));
  h.Close(P(3));
  EXPECT_EQ(h.Notices("death").size(), 1u);
}

TEST_F(CoordinatorCoreTest, WhoReportsALostLinkAndDetachesIsNotDeadForIt) {
  Found(2);
  h.Say(P(1), Lost(P(2)));
  h.Close(P(1));
  EXPECT_EQ(h.View().preparing, Epoch(0));
  EXPECT_EQ(Admitted(), 2u);
}

TEST_F(CoordinatorCoreTest, DeathWhileVotingDecidesTheBallot) {
  Found(3);
  h.AddLively(P(4));
  h.LivelyJoin(P(4), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  h.ForgetReceived();
  h.Kill(P(3));
  h.Wait(4000);
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"Prepare 4 base=3 boundary=3 last_freeze=4 freeze members=m1@1,m2@2 ring=p1,p2",
                   "Commit 4",
                   "Prepare 5 base=4 boundary=5 last_freeze=4 members=m1@1,m2@2,m4@5 ring=p1,p2,p4",
                   "Commit 5", "VoteResult m1 number=3 epoch=5"}));
}

TEST_F(CoordinatorCoreTest, DeathDuringAnAdmissionStartsTheNextNumberWithEverythingSoFar) {
  Found(2);
  h.AddLively(P(3)).mute = true;
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  EXPECT_EQ(h.View().preparing, Epoch(3));
  h.ForgetReceived();
  h.Kill(P(2));
  h.Lively(P(3)).mute = false;
  h.Wait(4000);
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"Prepare 4 base=2 boundary=4 last_freeze=4 freeze members=m1@1,m3@4 ring=p1,p3",
                   "Commit 4", "VoteResult m1 number=2 epoch=4"}));
  EXPECT_EQ(h.Notices("commit").back(),
            "epoch committed epoch=4 members=2 joined=m3 left=m2 ring=p1,p3 took_ms=4000 "
            "cause=silence detector=coordinator detect_ms=4000 agree_ms=0");
}

TEST_F(CoordinatorCoreTest, DeathDuringARemovalFreezesAgain) {
  Found(3);
  h.Lively(P(2)).mute = true;
  h.LivelyLeave(P(3), M(3));
  h.Run();
  h.Kill(P(2));
  h.Wait(4000);
  EXPECT_EQ(
      h.Take(P(1)),
      (Texts{"Prepare 4 base=3 boundary=3 last_freeze=4 freeze members=m1@1,m2@2 ring=p1,p2",
             "Prepare 5 base=3 boundary=3 last_freeze=5 freeze members=m1@1 ring=p1", "Commit 5"}));
  EXPECT_EQ(h.Take(P(3)), Texts{"Removed m3 left"});
}

TEST_F(CoordinatorCoreTest, ANewcomersDeathDuringItsAdmissionGivesTheEpochUp) {
  Found(1);
  h.AddLively(P(2)).mute = true;
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.Run();
  h.Kill(P(2));
  h.Wait(4000);
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"Prepare 2 base=1 boundary=2 last_freeze=0 members=m1@1,m2@2 ring=p1,p2",
                   "Abort 2", "VoteResult m1 number=1 epoch=1"}));
  EXPECT_EQ(h.Notices("abort").size(), 1u);
}

TEST_F(CoordinatorCoreTest, AllVotersDeadDuringAnAdmissionLeavesTheNewcomers) {
  Found(1);
  h.AddLively(P(2)).mute = true;
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.Run();
  h.Kill(P(1));
  h.Lively(P(2)).mute = false;
  h.Wait(4000);
  EXPECT_EQ(h.Take(P(2)).back(), "Commit 3");
  EXPECT_EQ(Admitted(), 1u);
  EXPECT_EQ(h.Stored().boundary, Epoch(3));
}

TEST_F(CoordinatorCoreTest, TheDeathOfASharedPeerTouchesAllItsGroups) {
  Found(2);
  h.LivelyJoin(P(2), 2, G(1));
  h.Run();
  h.Kill(P(2));
  h.Wait(4000);
  EXPECT_EQ(Admitted(), 1u);
  EXPECT_EQ(h.View(G(1)).members.size(), 0u);
  EXPECT_EQ(h.View(G(1)).committed, Epoch(2));
}

TEST_F(CoordinatorCoreTest, TheCoordinatorsOwnStallKillsNobody) {
  Found(3);
  h.Stall(60000);
  h.Pass();
  h.Wait(900);
  EXPECT_EQ(Admitted(), 3u);
  EXPECT_EQ(Committed(), Epoch(3));
}

TEST_F(CoordinatorCoreTest, AStallDoesNotEndAPreparationEither) {
  Found(2);
  h.Lively(P(1)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(200);
  ASSERT_EQ(h.View().preparing, Epoch(3));
  h.Close(P(1));
  h.Stall(60000);
  h.Pass();
  EXPECT_EQ(h.View().preparing, Epoch(3));
  h.Reattach(P(1));
  h.Say(P(1), Ready(3));
  EXPECT_EQ(Committed(), Epoch(3));
}

// ------------------------------------------------------------------------------ lost links

TEST_F(CoordinatorCoreTest, LostLinkBetweenLivingPeersIsRepairedWithTheSameMembers) {
  Found(2);
  h.Say(P(1), Lost(P(2)));
  h.Say(P(2), Lost(P(1)));
  h.Wait(99);
  EXPECT_EQ(h.Take(P(1)), Texts{});
  h.Wait(1);
  EXPECT_EQ(h.Take(P(1)),
            (Texts{"Prepare 3 base=2 boundary=2 last_freeze=3 freeze members=m1@1,m2@2 ring=p1,p2",
                   "Commit 3"}));
  h.Wait(5000);
  EXPECT_EQ(Committed(), Epoch(3));
}

TEST_F(CoordinatorCoreTest, AReportFromBeforeTheLastFreezeIsStale) {
  Found(2);
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  ASSERT_EQ(Committed(), Epoch(3));
  h.Say(P(2), control::LinkLost{G(), Epoch(2), P(1), "late"});
  h.Wait(4000);
  EXPECT_EQ(Committed(), Epoch(3));
}

// An admission freezes nothing. So a link that was lost in the epoch before still needs a repair.
TEST_F(CoordinatorCoreTest, AReportFromBeforeAnAdmissionStillCounts) {
  Found(2);
  ASSERT_EQ(h.Stored().last_freeze, Epoch(0));
  h.Say(P(1), control::LinkLost{G(), Epoch(1), P(2), "late"});
  h.Wait(4000);
  EXPECT_EQ(Committed(), Epoch(3));
  EXPECT_EQ(h.Stored().last_freeze, Epoch(3));
}

TEST_F(CoordinatorCoreTest, ALostLinkDuringAnAdmissionMakesItFreeze) {
  Found(2);
  h.AddLively(P(3)).mute = true;
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  h.Say(P(1), Lost(P(2)));
  h.Lively(P(3)).mute = false;
  h.ForgetReceived();
  h.Wait(100);
  EXPECT_EQ(
      h.Take(P(3)),
      (Texts{
          "Prepare 4 base=2 boundary=4 last_freeze=4 freeze members=m1@1,m2@2,m3@4 ring=p1,p2,p3",
          "Commit 4"}));
}

TEST_F(CoordinatorCoreTest, ANewcomersLostLinkRebuildsWithoutFreezingAndNotForEver) {
  Found(1);
  h.AddLively(P(2)).mute = true;
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.Run();
  for (int i = 0; i < 4; ++i) {
    h.Say(P(1), Lost(P(2)));
    h.Wait(100);
  }
  const Texts got = h.Take(P(1));
  EXPECT_EQ(got[3], "Prepare 5 base=1 boundary=5 last_freeze=0 members=m1@1,m2@5 ring=p1,p2");
  EXPECT_EQ(got[4], "Abort 5");
  EXPECT_EQ(got[5], "VoteResult m1 number=1 epoch=1");
  EXPECT_EQ(h.Take(P(2)).back(), "Removed m2 unreachable");
}

// For instance, a peer closes its links when its last member has left. When it joins again, it
// builds them anew.
TEST_F(CoordinatorCoreTest, ALinkThatANewcomerLosesBeforeTheCommitFreezesNothing) {
  Found(1);
  h.AddLively(P(2));
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.Lively(P(1)).mute = true;
  h.LivelyVote(P(1), M(1));
  h.Run();  // p2 is ready
  h.ForgetReceived();
  h.Say(P(2), Lost(P(1)));
  h.Lively(P(1)).mute = false;
  h.Say(P(1), Ready(2));
  EXPECT_EQ(h.View().waiting_for,
            "epoch 2 waiting for whether p1 is gone: p2 lost its link to p1: reset");
  h.Wait(99);
  EXPECT_EQ(Committed(), Epoch(1));
  h.Wait(1);
  EXPECT_EQ(h.Take(P(2)),
            (Texts{"Prepare 3 base=1 boundary=3 last_freeze=0 members=m1@1,m2@3 ring=p1,p2",
                   "Commit 3"}));
}

// Both ends are in the committed epoch, so ops may have lost a frame with the link.
TEST_F(CoordinatorCoreTest, ALinkLostBetweenMembersBeforeTheCommitFreezesOnce) {
  Found(2);
  h.AddLively(P(3)).mute = true;
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  h.ForgetReceived();
  h.Say(P(1), Lost(P(2)));
  h.Lively(P(3)).mute = false;
  h.Say(P(3), Ready(3));
  EXPECT_EQ(h.Take(P(3)), Texts{});
  h.Wait(100);
  EXPECT_EQ(
      h.Take(P(3)),
      (Texts{
          "Prepare 4 base=2 boundary=4 last_freeze=4 freeze members=m1@1,m2@2,m3@4 ring=p1,p2,p3",
          "Commit 4"}));
  h.Wait(4000);
  EXPECT_EQ(Committed(), Epoch(4));
}

TEST_F(CoordinatorCoreTest, ALinkThatBreaksAgainAndAgainDuringItsRepairCostsTheYounger) {
  Found(2);
  h.Lively(P(2)).mute = true;
  for (int i = 0; i < 5; ++i) {
    h.Say(P(2), Lost(P(1)));
    h.Wait(100);
  }
  EXPECT_EQ(Admitted(), 1u);
  EXPECT_EQ(h.View().members[0].member, M(1));
  EXPECT_EQ(h.Take(P(2)).back(), "Removed m2 unreachable");
}

TEST_F(CoordinatorCoreTest, ReportsOfPeersOutsideTheGroupCountNothing) {
  Found(2);
  h.Attach(P(9));
  h.Say(P(9), control::LinkLost{G(), Epoch(2), P(1), "x"});
  h.Say(P(1), control::LinkLost{G(), Epoch(2), P(9), "x"});
  h.Say(P(1), control::LinkLost{G(), Epoch(2), P(1), "x"});
  h.Say(P(1), control::LinkLost{G(5), Epoch(2), P(2), "x"});
  h.Wait(4000);
  EXPECT_EQ(Committed(), Epoch(2));
}

// ------------------------------------------------------------------------------ not reached

TEST_F(CoordinatorCoreTest, AnUnreachableNewcomerIsRefusedAndTheVotersGoOn) {
  Found(2);
  h.AddLively(P(3));
  // The address fails between the trial and the preparation.
  for (const uint64_t n : {1, 2}) {
    h.Lively(P(n)).tries_well = true;
    h.Lively(P(n)).cannot_reach = {P(3)};
  }
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  EXPECT_EQ(h.Take(P(3)).back(), "Removed m3 unreachable");
  const Texts got = h.Take(P(1));
  EXPECT_EQ(got[1], "Abort 3");
  EXPECT_EQ(got[2], "VoteResult m1 number=2 epoch=2");
  EXPECT_EQ(
      h.Notices("refuse"),
      Texts{"member removed member=m3 peer=p3 why=unreachable reason=\"p1 cannot reach p3: no "
            "route to 10.0.0.3:29700; open 10.0.0.3:29700 (TCP) of that host for the hosts of "
            "the group, or name the address that they reach with --advertise of its "
            "longhaul-peerd; the group tries this address again in 40 s at the earliest\""});
}

// A refused newcomer joins again at once. It does not hold the voters a second time.
TEST_F(CoordinatorCoreTest, ABallotTriesNewcomersOnce) {
  Found(1);
  h.AddLively(P(2));
  h.AddLively(P(3));
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.Lively(P(2)).mute = true;
  h.LivelyVote(P(1), M(1));
  h.Run();
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.LivelyLeave(P(2), M(2));
  h.Run();
  EXPECT_EQ(h.Take(P(1)).back(), "VoteResult m1 number=1 epoch=1");
  EXPECT_EQ(h.View().preparing, Epoch(0));
  EXPECT_EQ(h.View().members.size(), 2u);
}

TEST_F(CoordinatorCoreTest, TheOtherNewcomersAreAdmittedAllTheSame) {
  Found(1);
  h.AddLively(P(2));
  h.AddLively(P(3)).cannot_reach = {P(1), P(2)};
  h.LivelyJoin(P(2), 1);
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.Run();
  EXPECT_EQ(Ring(), "p1,p2");
  EXPECT_EQ(h.Take(P(3)).back(), "Removed m3 unreachable");
}

TEST_F(CoordinatorCoreTest, ThePeerWithMostFailedPairsGoesWhoeverReports) {
  Found(3);
  h.Lively(P(1)).cannot_reach = {P(2)};
  h.Lively(P(3)).cannot_reach = {P(2)};
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  EXPECT_EQ(Ring(), "p1,p3");
  EXPECT_EQ(h.Take(P(2)).back(), "Removed m2 unreachable");
}

TEST_F(CoordinatorCoreTest, AmongEqualsTheOneThatJoinedLastGoes) {
  Found(3);
  h.Lively(P(2)).cannot_reach = {P(1)};
  for (const uint64_t n : {1, 2}) h.Lively(P(n)).no_way_through = {P(3)};
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  EXPECT_EQ(Ring(), "p1,p3");
}

TEST_F(CoordinatorCoreTest, TheVerdictWaitsForAllAnswers) {
  Found(3);
  h.Lively(P(3)).mute = true;
  h.Lively(P(1)).cannot_reach = {P(2)};
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  EXPECT_EQ(h.View().waiting_for, "epoch 4 waiting for 2 of 3 peers: p1 (cannot reach p2) p3");
  h.Lively(P(3)).mute = false;
  h.Say(P(3), Ready(4));
  EXPECT_EQ(Ring(), "p1,p2,p3");
  EXPECT_EQ(h.View().blocked.size(), 1u);
}

TEST_F(CoordinatorCoreTest, ALaterAnswerReplacesAnEarlierOne) {
  Found(2);
  h.Lively(P(1)).mute = h.Lively(P(2)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  h.Say(P(1), control::EpochFailed{G(), Epoch(3), {{P(2), "x"}}});
  h.Say(P(1), Ready(3));
  h.Say(P(2), Ready(3));
  EXPECT_EQ(Committed(), Epoch(3));
  EXPECT_EQ(Admitted(), 2u);
}

TEST_F(CoordinatorCoreTest, AnAnswerToAnotherPreparationOfTheNumberDoesNotCount) {
  Found(2);
  h.Lively(P(1)).mute = h.Lively(P(2)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  const uint64_t other = h.Prepared(P(2)).preparation + 1;
  h.Say(P(1), Ready(3));
  h.Say(P(2), control::EpochReady{G(), Epoch(3), {}, other});
  EXPECT_EQ(h.View().preparing, Epoch(3));
  h.Say(P(2), control::EpochFailed{G(), Epoch(3), {{P(1), "x"}}, other});
  EXPECT_EQ(h.View().preparing, Epoch(3));
  h.Say(P(2), Ready(3));
  EXPECT_EQ(Committed(), Epoch(3));
  EXPECT_EQ(Admitted(), 2u);
}

TEST_F(CoordinatorCoreTest, AFailureThatNamesADetachedPeerIsItsDeath) {
  Found(2);
  h.Lively(P(2)).mute = true;
  h.Lively(P(1)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  h.Say(P(1), Ready(3));
  h.Close(P(2));
  EXPECT_EQ(Ring(), "p1,p2");
  h.Lively(P(1)).mute = false;
  h.Say(P(1), control::EpochFailed{G(), Epoch(3), {{P(2), "refused"}}});
  EXPECT_EQ(Ring(), "p1");
}

TEST_F(CoordinatorCoreTest, WhoAnswersNothingByTheDeadlineIsRemovedAsSilent) {
  Found(3);
  h.Lively(P(2)).mute = true;
  h.Say(P(1), Lost(P(3)));
  h.Wait(100 + 5999);
  EXPECT_EQ(Admitted(), 3u);
  h.Wait(1);
  EXPECT_EQ(Ring(), "p1,p3");
  EXPECT_EQ(h.Take(P(2)).back(), "Removed m2 unreachable");
}

TEST_F(CoordinatorCoreTest, OfTwoNewcomersThatCannotMeetTheLaterOneIsRefused) {
  h.AddLively(P(1)).mute = true;
  h.LivelyJoin(P(1), 1);
  h.Run();
  h.AddLively(P(2)).cannot_reach = {P(3)};
  h.LivelyJoin(P(2), 1);
  h.AddLively(P(3));
  h.LivelyJoin(P(3), 1);
  h.LivelyLeave(P(1), M(1));
  h.Run();
  EXPECT_EQ(Ring(), "p2");
  EXPECT_EQ(h.Take(P(3)),
            (Texts{"JoinPending 1 m3",
                   "Prepare 2 base=0 boundary=2 last_freeze=0 members=m2@2,m3@2 ring=p2,p3",
                   "Removed m3 unreachable"}));
}

TEST_F(CoordinatorCoreTest, AFirstEpochWhoseMembersAreGoneIsGivenUp) {
  h.AddLively(P(1)).mute = true;
  h.LivelyJoin(P(1), 1);
  h.LivelyLeave(P(1), M(1));
  h.Run();
  h.LivelyLeave(P(1), M(1));
  h.Run();
  EXPECT_EQ(h.View().preparing, Epoch());
  EXPECT_EQ(h.Notices("abort").size(), 1u);
  EXPECT_EQ(Committed(), Epoch());
}

// ------------------------------------------------------------------------------ streams

TEST_F(CoordinatorCoreTest, TheFirstMessageIsHello) {
  h.Step(SessionOpened{SessionId(500)});
  h.Step(FromPeer{SessionId(500), control::Heartbeat{}});
  EXPECT_EQ(h.closings(), Texts{"against the protocol: the first message is not Hello"});
  h.Step(FromPeer{SessionId(500), control::Heartbeat{}});  // was on its way already
  h.Step(SessionClosed{SessionId(500)});
  h.Step(SessionOpened{SessionId(501)});
  h.Step(FromPeer{SessionId(501), control::Hello{}});
  EXPECT_EQ(h.closings().back(), "against the protocol: Hello names no peer");
}

TEST_F(CoordinatorCoreTest, AStreamWithoutHelloIsClosedAsSilent) {
  h.Step(SessionOpened{SessionId(500)});
  EXPECT_EQ(h.core().NextDeadline(), h.now() + Millis(1000));
  h.Wait(4000);
  EXPECT_EQ(h.closings(), Texts{"silent for 4000 ms"});
  EXPECT_EQ(h.core().NextDeadline(), kNever);
}

TEST_F(CoordinatorCoreTest, ASecondStreamReplacesTheFirst) {
  Found(2);
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(h.closings(), Texts{"replaced by a newer stream of p2"});
  h.Wait(3000);
  EXPECT_EQ(Admitted(), 2u);
}

// Another key may have the same id, because ids are short. Its owner must not take the place of the
// peer: that would remove the peer's members.
TEST_F(CoordinatorCoreTest, AnotherKeyDoesNotReplaceTheStreamOfAPeer) {
  Found(2);
  const auto refused = [&](const std::string& key) {
    const SessionId stranger(500 + h.closings().size());
    h.Step(SessionOpened{stranger});
    control::Hello hello;
    hello.peer = P(2);
    hello.endpoints = {"10.6.6.6:29700"};
    hello.protocol = control::kProtocolVersion;
    hello.key = key;
    h.Step(FromPeer{stranger, hello});
    EXPECT_THAT(h.closings().back(), HasSubstr("p2 is known here with another key"));
    h.Step(SessionClosed{stranger});
  };
  refused("");
  refused(Harness::KeyOf(P(1)));
  EXPECT_EQ(h.closings().size(), 2u);
  EXPECT_TRUE(h.HasStream(P(2)));
  h.Wait(3000);
  EXPECT_EQ(Admitted(), 2u);
  EXPECT_EQ(h.Stored().committed, Epoch(2));
  EXPECT_EQ(h.View().ring[1].endpoint, "10.0.0.2:29700");
  // A coordinator that starts again knows the keys of its members' peers.
  h.Boot();
  refused(Harness::KeyOf(P(1)));
  for (const uint64_t p : {1, 2}) h.Reattach(P(p));
  h.Run();
  h.Wait(5000);
  EXPECT_EQ(Admitted(), 2u);
}

TEST_F(CoordinatorCoreTest, APeerWithItsKeyReplacesItsOwnStream) {
  Found(2);
  h.Hang(P(2));
  h.Wait(100);
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(h.closings(), Texts{"replaced by a newer stream of p2"});
  EXPECT_EQ(Admitted(), 2u);
}

// Peers verify each other by the keys in the epoch.
TEST_F(CoordinatorCoreTest, AnEpochNamesTheKeysOfItsPeers) {
  Found(2);
  for (const control::PeerInfo& peer : h.Prepared(P(1)).peers) {
    EXPECT_EQ(peer.key, Harness::KeyOf(peer.peer));
  }
}

TEST_F(CoordinatorCoreTest, RunsAreBounded) {
  h.SetUnchecked(true);
  size_t runs = 0;
  const auto join = [&](const std::string& run) {
    const PeerId peer = P(1 + runs / LH_GROUPS_MAX);
    if (!h.HasStream(peer)) h.Attach(peer);
    h.Say(peer, control::Join{++runs, {run, 0}, "t"});
    return h.Take(peer).back();
  };
  for (size_t i = 0; i < LH_COORDINATOR_RUNS_MAX; ++i) {
    ASSERT_THAT(join("run" + std::to_string(i)), Not(HasSubstr("refused")));
  }
  EXPECT_EQ(h.store().runs.size(), LH_COORDINATOR_RUNS_MAX);
  EXPECT_THAT(join("one-too-many"),
              AllOf(HasSubstr("the coordinator has 1024 runs, the most it can have "
                              "(LH_COORDINATOR_RUNS_MAX)"),
                    HasSubstr("no member for 600 s is forgotten")));
  EXPECT_FALSE(h.store().runs.contains("one-too-many"));
  EXPECT_EQ(h.Notices("refuse").size(), 1u);
  // The runs that exist take members as before.
  EXPECT_THAT(join("run7"), Not(HasSubstr("refused")));
}

TEST_F(CoordinatorCoreTest, GroupsOfAllRunsTogetherAreBounded) {
  h.SetUnchecked(true);
  uint32_t groups = 0;
  const auto join = [&](const std::string& run) {
    const PeerId peer = P(1 + groups / LH_GROUPS_MAX);
    if (!h.HasStream(peer)) h.Attach(peer);
    h.Say(peer, control::Join{++groups, {run, groups}, "t"});
    return h.Take(peer).back();
  };
  for (size_t i = 0; i < LH_COORDINATOR_GROUPS_MAX; ++i) {
    ASSERT_THAT(join(i % 2 == 0 ? "even" : "odd"), Not(HasSubstr("refused")));
  }
  EXPECT_THAT(join("even"), HasSubstr("4096 groups of all its runs, the most it can have "
                                      "(LH_COORDINATOR_GROUPS_MAX)"));
  EXPECT_EQ(h.store().groups.size(), LH_COORDINATOR_GROUPS_MAX);
  // The groups that exist take members as before.
  h.Attach(P(1000));
  h.Say(P(1000), control::Join{1, {"even", 1}, "t"});
  EXPECT_THAT(h.Take(P(1000)).back(), Not(HasSubstr("refused")));
}

TEST_F(CoordinatorCoreTest, WhatIsAgainstTheProtocolEndsTheStream) {
  Found(1);
  h.Attach(P(2));
  h.Say(P(2), control::Join{1, G(), "t"});
  const std::vector<control::PeerMessage> wrong = {
      control::Hello{},
      V(2, 1),
      control::EpochReady{G(), Epoch(99), {}},
      control::EpochFailed{G(), Epoch(99), {}},
      control::LinkLost{G(), Epoch(99), P(1), ""},
  };
  for (const control::PeerMessage& message : wrong) {
    const size_t before = h.closings().size();
    h.Say(P(2), message);
    EXPECT_EQ(h.closings().size(), before + 1);
    EXPECT_FALSE(h.HasStream(P(2)));
    h.Attach(P(2), {{G(), Epoch(), {M(2)}}});
  }
  h.Say(P(1), V(1, 0));
  EXPECT_EQ(h.closings().back(), "against the protocol: vote of m1 has no number");
  EXPECT_EQ(h.View().members.size(), 2u);
}

TEST_F(CoordinatorCoreTest, AFailureThatNamesNobodyOfTheEpochIsAgainstTheProtocol) {
  h.Attach(P(1));
  h.Say(P(1), control::Join{1, G(), "t"});
  h.Say(P(1), control::EpochFailed{G(), Epoch(1), {{P(1), "self"}, {P(5), "who"}}});
  EXPECT_EQ(h.closings().back(),
            "against the protocol: failure of epoch 1 names no other peer of that epoch");
}

TEST_F(CoordinatorCoreTest, StaleAndForeignMessagesChangeNothing) {
  Found(2);
  h.Attach(P(9));
  const GroupRecord before = h.Stored();
  h.Say(P(1), Ready(1));
  h.Say(P(1), Ready(2));
  h.Say(P(1), control::EpochFailed{G(), Epoch(1), {{P(2), "x"}}});
  h.Say(P(9), Ready(2));
  h.Say(P(9), control::EpochReady{G(9), Epoch(1), {}});
  h.Say(P(9), control::EpochFailed{G(9), Epoch(1), {{P(2), "x"}}});
  h.Say(P(9), V(1, 9));
  h.Say(P(9), control::Vote{G(9), M(1), 9});
  EXPECT_EQ(h.Stored(), before);
  EXPECT_TRUE(h.closings().empty());
  EXPECT_EQ(h.Take(P(9)), (Texts{"Removed m1 unknown", "Removed m1 unknown"}));
}

TEST_F(CoordinatorCoreTest, AnswersOfPeersOutsideThePreparationChangeNothing) {
  Found(2);
  h.Attach(P(9));
  h.Lively(P(1)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  h.Say(P(9), Ready(3));
  h.Say(P(9), control::EpochFailed{G(), Epoch(3), {{P(2), "x"}}});
  EXPECT_EQ(h.View().waiting_for, "epoch 3 waiting for 1 of 2 peers: p1");
}

TEST_F(CoordinatorCoreTest, MembersThatTheCoordinatorDoesNotKnowAreRemoved) {
  Found(1);
  h.Attach(P(7), {{G(), Epoch(1), {M(1), M(50)}}, {G(3), Epoch(4), {M(2)}}});
  EXPECT_EQ(h.Take(P(7)),
            (Texts{"Removed m1 unknown", "Removed m50 unknown", "Removed m2 unknown"}));
  EXPECT_EQ(Admitted(), 1u);
}

TEST_F(CoordinatorCoreTest, MembersThatHelloDoesNotNameAreGone) {
  Found(2);
  h.LivelyJoin(P(2), 9);
  h.Run();
  h.Lively(P(2)).members.clear();
  h.Lively(P(2)).groups.clear();
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(Ring(), "p1");
  EXPECT_EQ(h.View().members.size(), 1u);
  EXPECT_EQ(h.Notices("death").size(), 2u);
}

TEST_F(CoordinatorCoreTest, AReattachingPeerGetsTheOpenPreparationAgain) {
  Found(2);
  h.Lively(P(2)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  h.Close(P(2));
  EXPECT_EQ(h.View().waiting_for, "epoch 3 waiting for 1 of 2 peers: p2 (not attached)");
  h.ForgetReceived();
  h.Lively(P(2)).mute = false;
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(h.Take(P(2)),
            (Texts{"Prepare 3 base=2 boundary=2 last_freeze=3 freeze members=m1@1,m2@2 ring=p1,p2",
                   "Commit 3"}));
}

// A peer that attaches again and again does not get more time to answer.
TEST_F(CoordinatorCoreTest, TheTimeToAnswerRunsOnce) {
  Found(2);
  h.Lively(P(2)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  for (int i = 0; i < 4; ++i) {
    h.Wait(1499);
    h.Reattach(P(2));
    h.Run();
  }
  h.Wait(4);
  EXPECT_EQ(Ring(), "p1");
}

TEST_F(CoordinatorCoreTest, AnEpochThatWasGivenUpIsSaidAgain) {
  Found(1);
  h.AddLively(P(2)).mute = true;
  h.LivelyJoin(P(2), 1);
  h.Run();
  h.LivelyVote(P(1), M(1));
  h.Run();
  h.Close(P(1));
  h.LivelyLeave(P(2), M(2));
  h.Run();
  h.ForgetReceived();
  h.Reattach(P(1));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), (Texts{"Abort 2", "VoteResult m1 number=1 epoch=1"}));
}

// ------------------------------------------------------------------------------ fates

class FatesTest : public CoordinatorCoreTest {
 protected:
  static control::OpReport Op(uint64_t ordinal, bool done, PeerId other, uint64_t theirs) {
    control::OpReport op;
    op.ordinal = OpOrdinal(ordinal);
    op.boundary = Epoch(3);
    op.tag = ordinal % 10;
    op.done = done;
    op.matches = {{other, OpOrdinal(theirs)}};
    return op;
  }
  // p3 dies; p1 and p2 survive. Their ops, as p1/p2 number them: 11/21 is done at both; 12/22 is
  // not done at p2; 13 is settled at p2; 14 aborts on a fault, and p2 has not announced it.
  void Fail() {
    Found(3);
    control::OpReport aborting = Op(14, false, P(2), 0);
    aborting.matches.clear();
    aborting.abort_on_fault = true;
    h.Lively(P(1)).groups[G()].ops = {Op(11, true, P(2), 21), Op(12, true, P(2), 22),
                                      Op(13, true, P(2), 23), aborting};
    h.Lively(P(2)).groups[G()].ops = {Op(21, true, P(1), 11), Op(22, false, P(1), 12)};
    h.Kill(P(3));
  }
};

TEST_F(FatesTest, AreJudgedFromTheReportsAndSentWithTheCommit) {
  Fail();
  h.Wait(4000);
  EXPECT_EQ(h.Take(P(1)).back(), "Commit 4 o11=commit o12=redo o13=commit o14=abort");
  EXPECT_EQ(h.Take(P(2)).back(), "Commit 4 o21=commit o22=redo missed=3/4");
}

TEST_F(FatesTest, AreSentAgainToAPeerThatDidNotHearTheCommit) {
  Fail();
  h.Lively(P(1)).mute = true;
  h.Wait(4000);
  ASSERT_EQ(h.View().waiting_for, "epoch 4 waiting for 1 of 2 peers: p1");
  h.Close(P(2));  // p2 was ready
  h.Say(P(1), control::EpochReady{G(), Epoch(4), h.Lively(P(1)).groups[G()].ops});
  ASSERT_EQ(Committed(), Epoch(4));
  h.ForgetReceived();
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(h.Take(P(2)), Texts{"Commit 4 o21=commit o22=redo missed=3/4"});
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(h.Take(P(2)), Texts{});
}

TEST_F(FatesTest, AreSentAgainAfterARestart) {
  Fail();
  h.Lively(P(1)).mute = true;
  h.Wait(4000);
  h.CrashAt(1, true);
  h.Say(P(1), control::EpochReady{G(), Epoch(4), h.Lively(P(1)).groups[G()].ops});
  ASSERT_TRUE(h.crashed());
  h.Boot();
  h.ForgetReceived();
  h.Reattach(P(1));
  h.Reattach(P(2));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), Texts{"Commit 4 o11=commit o12=redo o13=commit o14=abort"});
  EXPECT_EQ(h.Take(P(2)), Texts{"Commit 4 o21=commit o22=redo missed=3/4"});
}

TEST_F(FatesTest, AreForgottenWithTheNextCommit) {
  Fail();
  h.Wait(4000);
  EXPECT_EQ(h.Stored().fates.size(), 2u);
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  EXPECT_EQ(h.Stored().committed, Epoch(5));
  EXPECT_TRUE(h.Stored().fates.empty());
}

// ------------------------------------------------------------------------------ drain, limits

TEST_F(CoordinatorCoreTest, ADrainingPeerGetsNoNewMembers) {
  Found(2);
  h.LivelyJoin(P(2), 5);
  h.Run();
  h.ForgetReceived();
  h.Drain(P(2));
  EXPECT_EQ(h.Take(P(2)), Texts{"Drain"});
  EXPECT_TRUE(h.core().GetOverview().groups[0].ring[1].draining);
  h.Say(P(2), control::Draining{});
  h.LivelyJoin(P(2), 6);
  h.Run();
  EXPECT_EQ(
      h.Take(P(2)),
      Texts{
          "JoinRefused 6 join of run/0 at p2 refused: the peer is draining; join at another host"});
  // The pending member at that peer is not admitted. The voters go on.
  h.LivelyVote(P(1), M(1));
  h.LivelyVote(P(2), M(2));
  h.Run();
  EXPECT_EQ(h.Take(P(1)), Texts{"VoteResult m1 number=2 epoch=2"});
  h.Reattach(P(2));
  EXPECT_EQ(h.Take(P(2)).at(1), "Drain");
  h.Drain(P(77));
}

TEST_F(CoordinatorCoreTest, WithNobodyAdmittedADrainingPeersMemberWaits) {
  h.Attach(P(1));
  h.Say(P(1), control::Join{1, G(), "t"});
  h.Say(P(1), control::Draining{});
  h.Say(P(1), control::Join{2, G(1), "t"});
  EXPECT_EQ(
      h.Take(P(1)).back(),
      "JoinRefused 2 join of run/1 at p1 refused: the peer is draining; join at another host");
}

TEST_F(CoordinatorCoreTest, LocalMembersOfAPeerAreBounded) {
  h.Attach(P(1));
  for (uint64_t i = 1; i <= LH_LOCAL_MEMBERS_MAX; ++i) h.Say(P(1), control::Join{i, G(), "t"});
  EXPECT_EQ(h.View().members.size(), size_t{LH_LOCAL_MEMBERS_MAX});
  h.Say(P(1), control::Join{1000, G(), "t"});
  EXPECT_NE(h.Take(P(1)).back().find("LH_LOCAL_MEMBERS_MAX"), std::string::npos);
  EXPECT_EQ(h.View().members.size(), size_t{LH_LOCAL_MEMBERS_MAX});
}

TEST_F(CoordinatorCoreTest, MembersOfAGroupAreBounded) {
  h.SetUnchecked(true);
  for (uint64_t p = 1; p <= LH_MEMBERS_MAX / LH_LOCAL_MEMBERS_MAX; ++p) {
    h.Attach(P(p));
    for (uint64_t i = 1; i <= LH_LOCAL_MEMBERS_MAX; ++i) h.Say(P(p), control::Join{i, G(), "t"});
  }
  EXPECT_EQ(h.View().members.size(), size_t{LH_MEMBERS_MAX});
  h.SetUnchecked(false);
  h.Attach(P(900));
  h.Say(P(900), control::Join{1, G(), "t"});
  EXPECT_NE(h.Take(P(900)).back().find("LH_MEMBERS_MAX"), std::string::npos);
}

TEST_F(CoordinatorCoreTest, GroupsOfAPeerAreBounded) {
  h.Attach(P(1));
  h.SetUnchecked(true);
  for (uint32_t g = 0; g <= LH_GROUPS_MAX; ++g) h.Say(P(1), control::Join{g + 1, G(g), "t"});
  h.SetUnchecked(false);
  h.Pass();
  EXPECT_NE(h.Take(P(1)).back().find("LH_GROUPS_MAX"), std::string::npos);
  EXPECT_EQ(h.core().GetOverview().groups.size(), size_t{LH_GROUPS_MAX});
}

TEST_F(CoordinatorCoreTest, ARunEmptyForTenMinutesIsForgotten) {
  Found(1);
  const std::string secret = h.store().runs.at("run").secret;
  h.LivelyLeave(P(1), M(1));
  h.Run();
  h.Wait(599999);
  EXPECT_EQ(h.store().groups.size(), 1u);
  h.Wait(1);
  EXPECT_TRUE(h.store().groups.empty());
  EXPECT_TRUE(h.store().runs.empty());
  h.LivelyJoin(P(1), 2);
  h.Run();
  EXPECT_EQ(Admitted(), 1u);
  EXPECT_NE(h.store().runs.at("run").secret, secret);
}

TEST_F(CoordinatorCoreTest, ARunThatIsUsedAgainInTimeIsKept) {
  Found(1);
  h.LivelyLeave(P(1), M(1));
  h.Run();
  h.Wait(500000);
  h.LivelyJoin(P(1), 2);
  h.Run();
  h.Wait(500000);
  EXPECT_EQ(Committed(), Epoch(3));
}

TEST_F(CoordinatorCoreTest, TheOverviewShowsPeersAndLoads) {
  Found(2);
  control::GroupLoad load{G(), 3, 70, 1000, 2000};
  h.Say(P(2), control::Heartbeat{{load, control::GroupLoad{G(9), 1, 1, 1, 1}}});
  h.Close(P(1));
  const Overview overview = h.core().GetOverview();
  EXPECT_EQ(overview.incarnation, "c1");
  ASSERT_EQ(overview.groups.size(), 1u);
  const std::vector<PeerView>& ring = overview.groups[0].ring;
  EXPECT_EQ(ring[1].load, load);
  EXPECT_EQ(ring[1].host, "host2");
  EXPECT_EQ(ring[1].endpoint, "10.0.0.2:29700");
  EXPECT_TRUE(ring[1].attached);
  EXPECT_FALSE(ring[0].attached);
}

TEST_F(CoordinatorCoreTest, TheOverviewShowsWhoFetchesUntilTheHeartbeatThatDoesNot) {
  Found(2);
  const control::FetchProgress progress{10, 20, 5, 3};
  control::Heartbeat beat;
  beat.fetches = {{G(), M(2), progress}, {G(9), M(1), {}}};
  h.Say(P(2), beat);
  EXPECT_EQ(h.core().GetOverview().groups[0].members[1].fetch, progress);
  EXPECT_FALSE(h.core().GetOverview().groups[0].members[0].fetch);
  h.Say(P(2), control::Heartbeat{});
  EXPECT_FALSE(h.core().GetOverview().groups[0].members[1].fetch);
}

TEST_F(CoordinatorCoreTest, LongListsOfNamesAreCut) {
  Found(12);
  h.LivelyVote(P(1), M(1));
  EXPECT_EQ(h.View().waiting_for, "waiting for 11 of 12 votes: m2 m3 m4 m5 m6 m7 m8 m9 and 3 more");
  for (uint64_t i = 2; i <= 12; ++i) h.Lively(P(i)).mute = true;
  h.Say(P(1), Lost(P(2)));
  h.Wait(100);
  EXPECT_EQ(h.View().waiting_for,
            "epoch 13 waiting for 11 of 12 peers: p2 p3 p4 p5 p6 p7 p8 p9 and 3 more");
}

TEST_F(CoordinatorCoreTest, ForeignTextsAreCutAndStayOnOneLine) {
  Found(2);
  h.Say(P(2), control::Leave{G(), M(2), false, std::string(5000, 'x') + "\n"});
  const std::string line = h.Notices("leave").back();
  EXPECT_LT(line.size(), 600u);
  EXPECT_EQ(Clean("a\nb\x7f"), "a b ");
  const std::string wide = Clean(std::string(LH_ERROR_TEXT_BYTES_MAX - 1, 'x') + "\xc3\xa4");
  EXPECT_EQ(wide, std::string(LH_ERROR_TEXT_BYTES_MAX - 1, 'x'));
}

TEST(CoordinatorCoreDeathTest, EntropyOfTheWrongSizeIsABug) {
  CoreConfig config;
  EXPECT_DEATH(CoordinatorCore(config, {}), "entropy has 0 bytes");
}

TEST(CoordinatorCore, EqualHistoriesHaveEqualDigestsAndOthersNot) {
  const auto run = [](uint64_t request) {
    Harness h;
    h.AddLively(PeerId(1));
    h.LivelyJoin(PeerId(1), request);
    h.Run();
    return h.core().Digest();
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

}  // namespace
}  // namespace longhaul::coordinator
