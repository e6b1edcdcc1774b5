// Members that join in the background. They are admitted without contributing, and no sync waits
// for them. They contribute from the boundary at which they say that they are ready
// (docs/life_of_a_sync.md, "In the background").
#include <gtest/gtest.h>

#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using control::SyncOffer;
using Texts = std::vector<std::string>;

class BackgroundTest : public testing::Test {
 protected:
  static PeerId P(uint64_t n) { return Harness::P(n); }
  static MemberId M(uint64_t n) { return Harness::M(n); }
  static SyncOffer State(uint64_t state, uint64_t revision = 0) {
    return {0, control::SyncStrategy::kPopular, revision, {1, 0}, {state, 0}};
  }

  void Join(uint64_t n, bool background) {
    h_.AddLively(P(n));
    control::Join join{1, Harness::G(), "t"};
    join.wish.background = background;
    h_.LivelyJoin(P(n), join);
    h_.Run();
  }
  // m1 and m2 have agreed on state 5 of revision 0; m3 is admitted in the background.
  void Enter() {
    Join(1, false);
    Join(2, false);
    Step(1);
    ASSERT_TRUE(Member(2).admitted);
    Sync(1, State(5));
    Sync(2, State(5));
    Join(3, true);
    Step(1);
    Step(2);
    ASSERT_TRUE(Member(3).admitted);
  }
  void Step(uint64_t n, std::optional<SyncOffer> offer = std::nullopt, bool ready = false) {
    h_.LivelyVote(P(n), M(n), std::move(offer), ready);
    h_.Run();
  }
  void Sync(uint64_t n, const SyncOffer& offer) {
    h_.LivelySync(P(n), M(n), offer);
    h_.Run();
  }
  LivelyPeer::LocalMember& Member(uint64_t n) { return h_.Lively(P(n)).members.at(M(n)); }
  bool Votes(uint64_t n) { return Member(n).voting; }
  bool Committed(uint64_t n, uint64_t state, uint64_t revision) {
    return !Member(n).sync && !Member(n).sync_results.empty() &&
           Member(n).sync_results.back().outcome.ok() &&
           Member(n).sync_results.back().state == Hash128{state, 0} &&
           Member(n).sync_results.back().revision == revision;
  }
  const control::MemberInfo& Info(uint64_t n) {
    for (const control::MemberInfo& info : h_.Prepared(P(1)).members) {
      if (info.member == M(n)) return info;
    }
    ADD_FAILURE() << "m" << n << " is not in the epoch";
    return h_.Prepared(P(1)).members.front();
  }
  const MemberRecord& Stored(uint64_t n) { return *FindMember(h_.Stored(), M(n)); }

  Harness h_;
};

TEST_F(BackgroundTest, WhoJoinsAnEmptyGroupContributesAtOnce) {
  Join(1, true);
  EXPECT_EQ(h_.Prepared(P(1)).members.front().background_until, Epoch());
  EXPECT_EQ(Stored(1).background_until, Epoch());
  Sync(1, State(5));
  EXPECT_TRUE(Committed(1, 5, 0));
}

TEST_F(BackgroundTest, ANewcomerIsAdmittedWithoutCountingAndToldWhatWasAgreed) {
  Enter();
  EXPECT_EQ(Info(1).background_until, Epoch());
  EXPECT_EQ(Info(3).background_until, control::kInBackground);
  EXPECT_TRUE(h_.View().members[2].background);
  EXPECT_EQ(h_.Lively(P(3)).agreed, (control::StateAgreed{Harness::G(), 0, {1, 0}, {5, 0}}));
  EXPECT_FALSE(h_.Lively(P(1)).agreed.has_value());
}

TEST_F(BackgroundTest, NoSyncWaitsForItAndItHearsOfEach) {
  Enter();
  Sync(1, State(6, 1));
  EXPECT_EQ(h_.View().waiting_for, "sync waiting for 1 of 2 members: m2");
  Sync(2, State(6, 1));
  EXPECT_TRUE(Committed(1, 6, 1) && Committed(2, 6, 1));
  EXPECT_EQ(h_.Lively(P(3)).agreed->revision, 1u);
  EXPECT_EQ(h_.Lively(P(3)).agreed->state, (Hash128{6, 0}));
}

TEST_F(BackgroundTest, ItVotesAtBoundariesLikeAllOthers) {
  Enter();
  Step(1);
  Step(2);
  EXPECT_TRUE(Votes(1));
  EXPECT_EQ(h_.View().waiting_for, "waiting for 1 of 3 votes: m3");
  Step(3);
  EXPECT_FALSE(Votes(1) || Votes(3));
  EXPECT_EQ(Stored(3).background_until, control::kInBackground);
}

TEST_F(BackgroundTest, AReadyVoteLetsItCountFromThatBoundaryOn) {
  Enter();
  const Epoch before = h_.Stored().committed;
  h_.ForgetReceived();
  Step(1, State(6, 1));
  Step(2, State(6, 1));
  Step(3, State(6, 1), /*ready=*/true);
  const Epoch epoch(before.value() + 1);
  EXPECT_EQ(h_.Stored().committed, epoch);
  EXPECT_EQ(h_.Stored().boundary, epoch);
  EXPECT_EQ(Info(3).background_until, epoch);
  EXPECT_LT(Info(3).joined, epoch);
  EXPECT_EQ(
      h_.Take(P(3)),
      (Texts{"Prepare 4 base=3 boundary=4 last_freeze=0 members=m1@1,m2@2,m3@3+4 ring=p1,p2,p3",
             "Commit 4", "VoteResult m3 number=1 epoch=4", "Sync m3 1 end revision=1 state=6"}));
  EXPECT_TRUE(Committed(1, 6, 1) && Committed(2, 6, 1));
  EXPECT_FALSE(h_.View().members[2].background);
  EXPECT_EQ(h_.Notices("ready"), Texts{"member contributes member=m3 epoch=4"});
}

TEST_F(BackgroundTest, OnceItContributesSyncsWaitForIt) {
  Enter();
  Step(1);
  Step(2);
  Step(3, std::nullopt, /*ready=*/true);
  Sync(1, State(6, 1));
  Sync(2, State(6, 1));
  EXPECT_EQ(h_.View().waiting_for, "sync waiting for 1 of 3 members: m3");
  SyncOffer fetching = State(9, 0);
  fetching.complete = false;
  Sync(3, fetching);
  EXPECT_TRUE(Committed(1, 6, 1) && Committed(3, 6, 1));
}

TEST_F(BackgroundTest, ANewcomerOfTheSameBoundaryComesInTheSameEpoch) {
  Enter();
  Join(4, true);
  const Epoch before = h_.Stored().committed;
  Step(1);
  Step(2);
  Step(3, std::nullopt, /*ready=*/true);
  EXPECT_EQ(h_.Stored().committed, Epoch(before.value() + 1));
  EXPECT_EQ(Info(3).background_until, h_.Stored().committed);
  EXPECT_EQ(Info(4).background_until, control::kInBackground);
}

TEST_F(BackgroundTest, ANewcomerThatNobodyReachesDoesNotKeepItBack) {
  Enter();
  Join(4, false);
  for (uint64_t n = 1; n <= 3; ++n) h_.Lively(P(n)).cannot_reach.insert(P(4));
  Step(1);
  Step(2);
  Step(3, std::nullopt, /*ready=*/true);
  EXPECT_FALSE(Votes(1) || Votes(3));
  EXPECT_EQ(Stored(3).background_until, h_.Stored().committed);
  EXPECT_EQ(h_.Stored().members.size(), 3u);
}

TEST_F(BackgroundTest, ADeathWhileTheEpochIsPreparedFreezesAndLetsItCountAllTheSame) {
  Enter();
  h_.Lively(P(1)).mute = true;
  Step(1);
  Step(2);
  Step(3, std::nullopt, /*ready=*/true);
  EXPECT_TRUE(Votes(3));
  h_.LivelyLeave(P(1), M(1));
  h_.Run();
  EXPECT_FALSE(Votes(3));
  EXPECT_EQ(Stored(3).background_until, h_.Stored().committed);
  EXPECT_EQ(h_.Stored().last_freeze, h_.Stored().committed);
  EXPECT_EQ(h_.Stored().members.size(), 2u);
}

TEST_F(BackgroundTest, TheOneThatIsReadyMayDieWhileItsEpochIsPrepared) {
  Enter();
  h_.Lively(P(1)).mute = true;
  Step(1);
  Step(2);
  Step(3, std::nullopt, /*ready=*/true);
  h_.LivelyLeave(P(3), M(3));
  h_.Lively(P(1)).mute = false;
  h_.Reattach(P(1));
  h_.Run();
  EXPECT_FALSE(Votes(1) || Votes(2));
  EXPECT_EQ(h_.Stored().members.size(), 2u);
}

TEST_F(BackgroundTest, ItsOfferWithoutReadyIsAgainstTheProtocol) {
  Enter();
  Step(3, State(6, 1));
  EXPECT_EQ(h_.closings(), Texts{"against the protocol: offer of m3, which is in the background"});
}

TEST_F(BackgroundTest, ItsSyncIsAgainstTheProtocol) {
  Enter();
  Sync(3, State(6, 1));
  EXPECT_EQ(h_.closings(), Texts{"against the protocol: offer of m3, which is in the background"});
}

TEST_F(BackgroundTest, AnotherCoordinatorKnowsWhoContributesAndTellsWhatWasAgreed) {
  Enter();
  h_.Boot();
  h_.Lively(P(3)).agreed.reset();
  for (uint64_t n = 1; n <= 3; ++n) h_.Reattach(P(n));
  h_.Run();
  EXPECT_EQ(h_.Lively(P(3)).agreed, (control::StateAgreed{Harness::G(), 0, {1, 0}, {5, 0}}));
  Sync(1, State(6, 1));
  Sync(2, State(6, 1));
  EXPECT_TRUE(Committed(1, 6, 1));
}

TEST_F(BackgroundTest, AReadyVoteIsSaidAgainToAnotherCoordinatorAtEveryWrite) {
  for (const bool kept : {false, true}) {
    for (int at = 1; at <= 4; ++at) {
      h_ = Harness();
      Enter();
      Step(1, State(6, 1));
      Step(2, State(6, 1));
      h_.CrashAt(at, kept);
      Step(3, State(6, 1), /*ready=*/true);
      if (h_.crashed()) {
        h_.Boot();
        for (uint64_t n = 1; n <= 3; ++n) h_.Reattach(P(n));
        h_.Run();
      }
      const std::string name = "persist " + std::to_string(at) + (kept ? " kept" : " lost");
      EXPECT_EQ(Stored(3).background_until, h_.Stored().boundary) << name;
      EXPECT_TRUE(Committed(1, 6, 1) && Committed(3, 6, 1)) << name;
    }
  }
}

TEST_F(BackgroundTest, ItIsLetInWhenNobodyElseIsLeft) {
  Enter();
  h_.LivelyLeave(P(1), M(1));
  h_.LivelyLeave(P(2), M(2));
  h_.Run();
  EXPECT_EQ(Stored(3).background_until, control::kInBackground);
  Step(3, std::nullopt, /*ready=*/true);
  EXPECT_EQ(Stored(3).background_until, h_.Stored().boundary);
}

TEST_F(BackgroundTest, AStepDeadlineDoesNotAskItForAnOffer) {
  Join(1, false);
  h_.AddLively(P(2));
  control::Join join{1, Harness::G(), "t"};
  join.wish.background = true;
  join.wish.step_deadline_ms = 500;
  h_.LivelyJoin(P(2), join);
  h_.Run();
  Step(1);
  ASSERT_TRUE(Member(2).admitted);
  Sync(1, State(5));
  EXPECT_TRUE(Committed(1, 5, 0));
  h_.Wait(5000);
  EXPECT_EQ(h_.Stored().members.size(), 2u);
}

}  // namespace
}  // namespace longhaul::coordinator
