// Syncs of shared state, through the whole core. election.h has the rules.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/prng.h"
#include "coordinator/core/election.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using control::SyncOffer;
using Texts = std::vector<std::string>;

class SyncTest : public testing::Test {
 protected:
  static PeerId P(uint64_t n) { return Harness::P(n); }
  static MemberId M(uint64_t n) { return Harness::M(n); }
  static SyncOffer State(uint64_t state, uint64_t revision = 0,
                         SyncStrategy strategy = SyncStrategy::kPopular, uint64_t manifest = 1) {
    return {0, strategy, revision, {manifest, 0}, {state, 0}};
  }

  // Adds members 1 to n, member n at peer n, all admitted.
  void Enter(uint64_t members) {
    for (uint64_t n = 1; n <= members; ++n) Add(n);
    h_.ForgetReceived();
  }
  // Adds two members. The second one has a step deadline.
  void EnterWithDeadline(uint32_t ms) {
    Enter(1);
    h_.AddLively(P(2));
    control::Join join{1, Harness::G(), "t"};
    join.wish.step_deadline_ms = ms;
    h_.LivelyJoin(P(2), join);
    h_.Run();
    h_.LivelyVote(P(1), M(1));
    h_.Run();
    ASSERT_TRUE(Member(2).admitted);
    h_.ForgetReceived();
  }
  // Adds member n, which a boundary of the other members admits.
  void Add(uint64_t n) {
    h_.AddLively(P(n));
    h_.LivelyJoin(P(n), 1);
    h_.Run();
    for (uint64_t other = 1; other < n; ++other) h_.LivelyVote(P(other), M(other));
    h_.Run();
    ASSERT_TRUE(h_.Lively(P(n)).members.at(M(n)).admitted);
  }
  void Sync(uint64_t n, const SyncOffer& offer) {
    h_.LivelySync(P(n), M(n), offer);
    h_.Run();
  }
  void Step(uint64_t n, std::optional<SyncOffer> offer) {
    h_.LivelyVote(P(n), M(n), offer);
    h_.Run();
  }
  bool Waits(uint64_t n) { return Member(n).sync.has_value(); }
  LivelyPeer::LocalMember& Member(uint64_t n) { return h_.Lively(P(n)).members.at(M(n)); }
  // The outcome of the last sync of the member.
  const control::SyncResult& End(uint64_t n) {
    EXPECT_FALSE(Waits(n)) << "m" << n;
    return Member(n).sync_results.back();
  }
  bool Committed(uint64_t n, uint64_t state, uint64_t revision = 0) {
    return !Waits(n) && End(n).outcome.ok() && End(n).state == Hash128{state, 0} &&
           End(n).revision == revision;
  }
  // Whether the member had to fetch in its last sync.
  bool Fetched(uint64_t n) {
    const auto& results = Member(n).sync_results;
    return results.size() >= 2 &&
           results[results.size() - 2].action == control::SyncAction::kFetch &&
           results[results.size() - 2].number == results.back().number;
  }

  Harness h_;
};

TEST_F(SyncTest, EqualStatesAreCommittedWithoutATransfer) {
  Enter(3);
  for (uint64_t n = 1; n <= 3; ++n) Sync(n, State(5));
  EXPECT_EQ(h_.Take(P(1)), Texts{"Sync m1 1 end revision=0 state=5"});
  EXPECT_EQ(h_.Take(P(3)), Texts{"Sync m3 1 end revision=0 state=5"});
  EXPECT_EQ(h_.Stored().state, (StateRecord{0, {5, 0}, {1, 0}, 3}));
}

TEST_F(SyncTest, NobodyIsAnsweredBeforeAllHaveOffered) {
  Enter(3);
  Sync(1, State(5));
  Sync(2, State(5));
  EXPECT_TRUE(Waits(1) && Waits(2));
  EXPECT_EQ(h_.View().waiting_for, "sync waiting for 1 of 3 members: m3");
  h_.Wait(60000);
  EXPECT_TRUE(Waits(1));
  Sync(3, State(5));
  EXPECT_TRUE(Committed(1, 5) && Committed(3, 5));
  EXPECT_EQ(h_.View().waiting_for, "");
}

TEST_F(SyncTest, ATieGoesToTheLowestDigestWithOneTransfer) {
  Enter(2);
  Sync(1, State(9));
  Sync(2, State(5));
  EXPECT_TRUE(Committed(1, 5) && Committed(2, 5));
  EXPECT_TRUE(Fetched(1));
  EXPECT_FALSE(Fetched(2));
}

TEST_F(SyncTest, ThePopularStateWinsWhateverTheOrder) {
  std::vector<uint64_t> order = {1, 2, 3};
  do {
    h_ = Harness();
    Enter(3);
    for (const uint64_t n : order) Sync(n, State(n == 1 ? 4 : 7));
    for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 7)) << n;
    EXPECT_TRUE(Fetched(1));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(SyncTest, AFetcherIsToldWhoHasTheStateAndTheOthersWaitForIt) {
  Enter(3);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(9));
  Sync(3, State(5));
  EXPECT_EQ(h_.Take(P(1)), Texts{"Sync m1 1 serve revision=0 state=5"});
  EXPECT_EQ(h_.Take(P(2)), Texts{"Sync m2 1 fetch revision=0 state=5 sources=m3,m1"});
  EXPECT_EQ(h_.View().waiting_for, "sync of revision 0: m2 of 3 still fetch it");
  EXPECT_FALSE(h_.Stored().state);
  h_.LivelyFetched(P(2), M(2), {}, 4096);
  h_.Run();
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 5)) << n;
  EXPECT_EQ(h_.Notices("sync"),
            Texts{"state committed revision=0 state=" + ToString(Hash128{5, 0}) +
                  " members=3 fetched=m2 sources=m3 bytes=4096 took_ms=0"});
}

TEST_F(SyncTest, AFetcherThatIsDoneIsASourceForTheOthers) {
  Enter(3);
  h_.Lively(P(2)).fetches = false;
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5, 2));
  Sync(2, State(9, 1));
  Sync(3, State(9, 1));
  h_.ForgetReceived();
  h_.LivelyFetched(P(2), M(2));
  h_.Run();
  EXPECT_EQ(h_.Take(P(3)), Texts{"Sync m3 1 fetch revision=2 state=5 sources=m1,m2"});
  h_.LivelyFetched(P(3), M(3));
  h_.Run();
  EXPECT_TRUE(Committed(3, 5, 2));
}

TEST_F(SyncTest, TheFirstSyncMayBeAtRevision13) {
  Enter(2);
  Sync(1, State(5, 13));
  Sync(2, State(5, 13));
  EXPECT_TRUE(Committed(1, 5, 13));
  Sync(1, State(6, 14));
  Sync(2, State(6, 14));
  EXPECT_TRUE(Committed(2, 6, 14));
}

TEST_F(SyncTest, TheFirstSyncTakesTheHighestRevision) {
  Enter(3);
  Sync(1, State(5, 0));
  Sync(2, State(5, 0));
  Sync(3, State(6, 13));
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 6, 13)) << n;
}

TEST_F(SyncTest, ManyStepsOfEqualStatesMoveNothing) {
  Enter(3);
  for (uint64_t revision = 0; revision < 20; ++revision) {
    for (uint64_t n = 1; n <= 3; ++n) Sync(n, State(100 + revision, revision));
    for (uint64_t n = 1; n <= 3; ++n) {
      EXPECT_TRUE(Committed(n, 100 + revision, revision));
      EXPECT_FALSE(Fetched(n));
    }
  }
}

TEST_F(SyncTest, AMemberThatOnlyRaisesItsRevisionIsCorrectedEachTime) {
  Enter(3);
  for (uint64_t revision = 0; revision < 5; ++revision) {
    for (uint64_t n = 1; n <= 2; ++n) Sync(n, State(100 + revision, revision));
    Sync(3, State(99, revision));
    EXPECT_TRUE(Committed(3, 100 + revision, revision));
    EXPECT_TRUE(Fetched(3));
  }
}

TEST_F(SyncTest, AMemberThatLagsIsPulledForwardThoughPopular) {
  Enter(3);
  for (uint64_t n = 1; n <= 3; ++n) Sync(n, State(5, 0));
  Sync(1, State(6, 1));
  Sync(2, State(5, 0));
  Sync(3, State(5, 0));
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 6, 1)) << n;
  EXPECT_FALSE(Fetched(1));
}

TEST_F(SyncTest, AnIncrementByTwoIsThatMembersErrorAlone) {
  Enter(3);
  for (uint64_t n = 1; n <= 3; ++n) Sync(n, State(5, 3));
  Sync(1, State(6, 4));
  Sync(2, State(6, 4));
  Sync(3, State(7, 5));
  EXPECT_TRUE(Committed(1, 6, 4) && Committed(2, 6, 4));
  EXPECT_EQ(End(3).outcome.code, Code::kStateMismatch);
  EXPECT_EQ(
      End(3).outcome.text,
      "revision is 5, due is 4: a revision rises by at most one in each step since the last sync");
  EXPECT_EQ(h_.Notices("sync_refused").size(), 1U);
}

TEST_F(SyncTest, ARefusedMemberIsBackWithTheNextSync) {
  Enter(2);
  Sync(1, State(5, 3));
  Sync(2, State(5, 3));
  Sync(1, State(6, 4));
  Sync(2, State(7, 9));
  ASSERT_EQ(End(2).outcome.code, Code::kStateMismatch);
  Sync(2, State(7, 3));
  EXPECT_TRUE(Waits(2));
  Sync(1, State(8, 5));
  EXPECT_TRUE(Committed(1, 8, 5) && Committed(2, 8, 5));
}

// If the refused member were told before, and the coordinator restarted, the other members would
// have to offer again and wait for the refused member, while that member waits for them elsewhere.
TEST_F(SyncTest, WhoIsRefusedIsToldWhenTheOthersAreDone) {
  Enter(3);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5, 3));
  Sync(2, State(9, 3));
  Sync(3, State(5, 3, SyncStrategy::kPopular, /*manifest=*/8));
  EXPECT_TRUE(Waits(1) && Waits(2) && Waits(3));
  EXPECT_EQ(h_.Take(P(3)), Texts{});
  h_.Boot();
  for (uint64_t n = 1; n <= 3; ++n) h_.Reattach(P(n));
  h_.Run();
  EXPECT_TRUE(Waits(3));
  h_.LivelyFetched(P(2), M(2));
  h_.Run();
  EXPECT_TRUE(Committed(1, 5, 3) && Committed(2, 5, 3));
  EXPECT_EQ(End(3).outcome.code, Code::kStateMismatch);
}

TEST_F(SyncTest, WhenASyncFailsTheRefusedVoteAgainToo) {
  Enter(3);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5, 3));
  Sync(2, State(9, 3));
  Sync(3, State(5, 3, SyncStrategy::kPopular, /*manifest=*/8));
  h_.LivelyFetched(P(2), M(2), {Code::kUnavailable, "x"});
  h_.Run();
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_EQ(End(n).outcome.code, Code::kAborted) << n;
  EXPECT_TRUE(h_.Notices("sync_refused").empty());
}

TEST_F(SyncTest, ARefusalOutlivesTheCoordinator) {
  Enter(3);
  Sync(1, State(5, 3));
  Sync(2, State(5, 3));
  Sync(3, State(7, 3, SyncStrategy::kPopular, /*manifest=*/8));
  ASSERT_EQ(End(3).outcome.code, Code::kStateMismatch);
  h_.Boot();
  for (uint64_t n = 1; n <= 3; ++n) h_.Reattach(P(n));
  h_.Run();
  h_.ForgetReceived();
  // m3 repeats its offer, as if the answer had been lost.
  SyncOffer repeated = State(7, 3, SyncStrategy::kPopular, 8);
  repeated.number = 1;
  h_.Say(P(3), control::SyncVote{Harness::G(), M(3), repeated});
  const auto code = static_cast<int>(Code::kStateMismatch);
  EXPECT_EQ(h_.Take(P(3)), Texts{"Sync m3 1 end code=" + std::to_string(code)});
  EXPECT_EQ(h_.View().waiting_for, "");
}

TEST_F(SyncTest, WhoWasRefusedAndComesBackAloneStartsNoDeadline) {
  EnterWithDeadline(5000);
  Sync(1, State(5, 3));
  Sync(2, State(5, 3, SyncStrategy::kPopular, /*manifest=*/8));
  ASSERT_EQ(End(2).outcome.code, Code::kStateMismatch);
  Sync(2, State(5, 3));
  h_.Wait(20000);
  EXPECT_TRUE(Waits(2));
  EXPECT_TRUE(h_.Notices("evict").empty());
  Sync(1, State(6, 4));
  EXPECT_TRUE(Committed(1, 6, 4) && Committed(2, 6, 4));
}

TEST_F(SyncTest, ARevisionThatDidNotRiseMaySyncAgain) {
  Enter(2);
  for (int i = 0; i < 2; ++i) {
    Sync(1, State(5, 3));
    Sync(2, State(5, 3));
    EXPECT_TRUE(Committed(1, 5, 3));
  }
}

TEST_F(SyncTest, TheGroupNeverFallsBehindTheCommittedRevision) {
  Enter(2);
  Sync(1, State(5, 3));
  Sync(2, State(5, 3));
  Sync(1, State(4, 2));
  Sync(2, State(4, 2));
  EXPECT_EQ(End(1).outcome.code, Code::kStateMismatch);
  EXPECT_EQ(End(2).outcome.code, Code::kStateMismatch);
  EXPECT_EQ(h_.Stored().state, (StateRecord{3, {5, 0}, {1, 0}, 2}));
}

TEST_F(SyncTest, AnotherManifestIsThatMembersErrorAloneAndNamesWhomToCompareWith) {
  Enter(3);
  Sync(1, State(5, 0, SyncStrategy::kPopular, /*manifest=*/9));
  Sync(2, State(5));
  Sync(3, State(5));
  EXPECT_EQ(End(1).outcome.code, Code::kStateMismatch);
  EXPECT_EQ(End(1).sources, (std::vector<control::SyncSource>{{M(2), P(2)}}));
  EXPECT_TRUE(Committed(2, 5) && Committed(3, 5));
}

// Newcomers are as many as the member that has trained, then more. The coordinator restarts
// between.
TEST_F(SyncTest, NewcomersWithOtherTensorsNeverTakeTheGroupOver) {
  Enter(1);
  Sync(1, State(9, 3));
  ASSERT_TRUE(Committed(1, 9, 3));
  Add(2);
  Sync(1, State(9, 4));
  Sync(2, State(1, 4, SyncStrategy::kPopular, /*manifest=*/0));
  EXPECT_TRUE(Committed(1, 9, 4));
  ASSERT_EQ(End(2).outcome.code, Code::kStateMismatch);
  EXPECT_EQ(End(2).sources, (std::vector<control::SyncSource>{{M(1), P(1)}}));
  Add(3);
  h_.Boot();
  for (uint64_t n = 1; n <= 3; ++n) h_.Reattach(P(n));
  h_.Run();
  Sync(1, State(9, 5));
  for (uint64_t n = 2; n <= 3; ++n) Sync(n, State(1, 5, SyncStrategy::kPopular, /*manifest=*/0));
  EXPECT_TRUE(Committed(1, 9, 5));
  EXPECT_EQ(End(2).outcome.code, Code::kStateMismatch);
  EXPECT_EQ(End(3).outcome.code, Code::kStateMismatch);
}

TEST_F(SyncTest, AMemberAddedBetweenStepsGetsTheState) {
  Enter(2);
  Sync(1, State(5, 7));
  Sync(2, State(5, 7));
  Add(3);
  Sync(1, State(6, 8));
  Sync(2, State(6, 8));
  EXPECT_TRUE(Waits(1));
  Sync(3, State(77, 0));
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 6, 8)) << n;
  EXPECT_TRUE(Fetched(3));
}

TEST_F(SyncTest, ANewcomerAheadOfTheGroupIsRefused) {
  Enter(2);
  Sync(1, State(5, 7));
  Sync(2, State(5, 7));
  Add(3);
  Sync(1, State(6, 8));
  Sync(2, State(6, 8));
  Sync(3, State(77, 100));
  EXPECT_TRUE(Committed(1, 6, 8));
  EXPECT_EQ(End(3).outcome.code, Code::kStateMismatch);
}

// ---- strategies

TEST_F(SyncTest, PopularIsUsedByAllOrByNone) {
  for (uint64_t world = 2; world <= 4; ++world) {
    for (const SyncStrategy odd : {SyncStrategy::kReceive, SyncStrategy::kSend}) {
      h_ = Harness();
      Enter(world);
      for (uint64_t n = 1; n < world; ++n) Sync(n, State(5));
      Sync(world, State(5, 0, odd));
      EXPECT_EQ(End(world).outcome.code, Code::kInvalidArgument) << world;
      for (uint64_t n = 1; n < world; ++n) EXPECT_TRUE(Committed(n, 5)) << n;
    }
  }
}

TEST_F(SyncTest, OneSenderGivesItsStateToAllReceivers) {
  Enter(3);
  Sync(1, State(9, 0, SyncStrategy::kReceive));
  Sync(2, State(9, 0, SyncStrategy::kReceive));
  Sync(3, State(5, 0, SyncStrategy::kSend));
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 5)) << n;
  EXPECT_FALSE(Fetched(3));
}

// A receiver without a link to any sender can get the state only from another receiver.
TEST_F(SyncTest, AReceiverIsASourceFromTheEndOfItsFetchOn) {
  Enter(3);
  h_.Lively(P(2)).fetches = false;
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5, 0, SyncStrategy::kSend));
  Sync(2, State(9, 0, SyncStrategy::kReceive));
  Sync(3, State(9, 0, SyncStrategy::kReceive));
  h_.ForgetReceived();
  h_.LivelyFetched(P(2), M(2));
  h_.Run();
  EXPECT_EQ(h_.Take(P(3)), Texts{"Sync m3 1 fetch revision=0 state=5 sources=m1,m2"});
  h_.LivelyFetched(P(3), M(3));
  h_.Run();
  EXPECT_TRUE(Committed(3, 5));
}

TEST_F(SyncTest, OnlyReceiversElectNobody) {
  Enter(2);
  Sync(1, State(5, 0, SyncStrategy::kReceive));
  Sync(2, State(5, 0, SyncStrategy::kReceive));
  EXPECT_EQ(End(1).outcome.code, Code::kFailedPrecondition);
  EXPECT_EQ(End(2).outcome.code, Code::kFailedPrecondition);
  EXPECT_FALSE(h_.Stored().state);
}

TEST_F(SyncTest, EqualSendersAreCommitted) {
  Enter(3);
  for (uint64_t n = 1; n <= 3; ++n) Sync(n, State(5, 0, SyncStrategy::kSend));
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 5)) << n;
}

TEST_F(SyncTest, OfTwoSendersTheLessPopularIsRefused) {
  Enter(4);
  Sync(1, State(4, 0, SyncStrategy::kSend));
  Sync(2, State(5, 0, SyncStrategy::kSend));
  Sync(3, State(5, 0, SyncStrategy::kSend));
  Sync(4, State(1, 0, SyncStrategy::kReceive));
  EXPECT_EQ(End(1).outcome.code, Code::kStateMismatch);
  for (uint64_t n = 2; n <= 4; ++n) EXPECT_TRUE(Committed(n, 5)) << n;
}

// ---- groups

TEST_F(SyncTest, GroupsAreApart) {
  const GroupKey other{"run", 1};
  Enter(2);
  for (uint64_t n = 1; n <= 2; ++n) {
    h_.LivelyJoin(P(n), 2, other);
    h_.Run();
  }
  h_.LivelyVote(P(1), M(3));
  h_.Run();
  ASSERT_TRUE(h_.Lively(P(2)).members.at(M(4)).admitted);
  // The syncs of the two groups overlap in time, and one has a refusal.
  Sync(1, State(5, 3));
  h_.LivelySync(P(1), M(3), State(8, 40, SyncStrategy::kPopular, 2));
  h_.LivelySync(P(2), M(4), State(8, 40, SyncStrategy::kPopular, 3));
  h_.Run();
  EXPECT_TRUE(Waits(1));
  const auto& members1 = h_.Lively(P(1)).members;
  const auto& members2 = h_.Lively(P(2)).members;
  EXPECT_TRUE(members1.at(M(3)).sync_results.back().outcome.ok());
  EXPECT_EQ(members2.at(M(4)).sync_results.back().outcome.code, Code::kStateMismatch);
  Sync(2, State(5, 3));
  EXPECT_TRUE(Committed(1, 5, 3));
  EXPECT_EQ(h_.Stored().state, (StateRecord{3, {5, 0}, {1, 0}, 2}));
  EXPECT_EQ(h_.Stored(other).state, (StateRecord{40, {8, 0}, {2, 0}, 2}));
}

// ---- with a step boundary

TEST_F(SyncTest, AStepIsOneMessageThereAndTwoBackInOneTransaction) {
  Enter(3);
  Step(1, State(5));
  Step(2, State(5));
  const int persists = h_.persists();
  Step(3, State(5));
  EXPECT_EQ(h_.persists(), persists + 1);
  EXPECT_EQ(h_.Take(P(3)),
            (Texts{"VoteResult m3 number=1 epoch=3", "Sync m3 1 end revision=0 state=5"}));
}

TEST_F(SyncTest, AnOfferWithAVoteCountsAfterTheAdmissionAndWaitsForTheNewcomer) {
  Enter(2);
  for (uint64_t n = 1; n <= 2; ++n) Sync(n, State(5));
  h_.AddLively(P(3));
  h_.LivelyJoin(P(3), 1);
  h_.Run();
  Step(1, State(6, 1));
  Step(2, State(6, 1));
  EXPECT_EQ(h_.View().members.size(), 3U);
  EXPECT_FALSE(Member(1).voting);
  EXPECT_TRUE(Waits(1));
  EXPECT_EQ(h_.View().waiting_for, "sync waiting for 1 of 3 members: m3");
  Sync(3, State(0));
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 6, 1)) << n;
}

TEST_F(SyncTest, AnOfferAloneMeetsOneThatCameWithAVote) {
  Enter(2);
  Step(1, State(5));
  Step(2, std::nullopt);
  EXPECT_TRUE(Waits(1));
  Sync(2, State(5));
  EXPECT_TRUE(Committed(1, 5) && Committed(2, 5));
}

TEST_F(SyncTest, AMemberThatNeverSyncsIsNamedInsteadOfWaitedForForEver) {
  Enter(3);
  Sync(1, State(5));
  Sync(2, State(5));
  Step(3, std::nullopt);
  EXPECT_EQ(End(1).outcome.code, Code::kFailedPrecondition);
  EXPECT_EQ(End(2).outcome.text,
            "sync refused: m3 came to the next step boundary without one: all members of a group "
            "sync between the same two boundaries, or none");
  EXPECT_TRUE(Member(3).voting);
}

// The member is not late: the sync in which it takes part holds it up.
TEST_F(SyncTest, WhoStillFetchesIsNotLateAtTheStepBoundary) {
  EnterWithDeadline(5000);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(9));
  // m1 votes while it waits for the sync. No correct peer does that, but the core accepts it.
  Step(1, std::nullopt);
  h_.Wait(60000);
  EXPECT_TRUE(h_.Notices("evict").empty());
  h_.LivelyFetched(P(2), M(2));
  h_.Run();
  EXPECT_TRUE(Committed(2, 5));
  h_.Wait(4900);
  EXPECT_TRUE(h_.Notices("evict").empty()) << "its time begins with the end of the sync";
  h_.Wait(200);
  EXPECT_EQ(h_.Notices("evict").size(), 1U);
}

TEST_F(SyncTest, WhoWaitsForAnotherOnesOfferIsNotLateAtTheStepBoundary) {
  EnterWithDeadline(5000);
  Add(3);
  Sync(2, State(5));
  Step(1, std::nullopt);
  h_.Wait(60000);
  EXPECT_TRUE(Waits(2));
  EXPECT_TRUE(h_.Notices("evict").empty());
}

TEST_F(SyncTest, AMemberThatIsLateForTheSyncByItsDeadlineIsEvicted) {
  EnterWithDeadline(5000);
  Sync(1, State(5));
  h_.Wait(4900);
  EXPECT_TRUE(Waits(1));
  h_.Wait(200);
  EXPECT_TRUE(Committed(1, 5));
  EXPECT_EQ(h_.Notices("evict").size(), 1U);
}

// ---- faults

TEST_F(SyncTest, AMemberThatLeavesNoLongerCounts) {
  Enter(3);
  Sync(1, State(5));
  Sync(2, State(5));
  h_.LivelyLeave(P(3), M(3));
  h_.Run();
  EXPECT_TRUE(Committed(1, 5) && Committed(2, 5));
}

TEST_F(SyncTest, AFetcherThatDiesNoLongerCounts) {
  Enter(3);
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(5));
  Sync(3, State(9));
  EXPECT_TRUE(Waits(1));
  h_.Kill(P(3));
  h_.Wait(10000);
  EXPECT_TRUE(Committed(1, 5) && Committed(2, 5));
}

TEST_F(SyncTest, AFetcherIsToldOfASourceThatLeft) {
  Enter(3);
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(5));
  Sync(3, State(9));
  h_.ForgetReceived();
  h_.LivelyLeave(P(1), M(1));
  h_.Run();
  const Texts told = h_.Take(P(3));
  EXPECT_NE(std::find(told.begin(), told.end(), "Sync m3 1 fetch revision=0 state=5 sources=m2"),
            told.end());
  h_.LivelyFetched(P(3), M(3));
  h_.Run();
  EXPECT_TRUE(Committed(2, 5) && Committed(3, 5));
}

TEST_F(SyncTest, WithoutAHolderTheSyncFailsForAllAndIsVotedAgain) {
  Enter(3);
  h_.Lively(P(2)).fetches = false;
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5, 4));
  Sync(2, State(9, 3));
  Sync(3, State(8, 3));
  h_.LivelyLeave(P(1), M(1));
  h_.Run();
  EXPECT_EQ(End(2).outcome.code, Code::kAborted);
  EXPECT_EQ(End(2).outcome.text,
            "sync of revision 4 failed: nobody is left who has it; sync again");
  EXPECT_FALSE(h_.Stored().state);
  // An incomplete state, as a transfer leaves it, does not win.
  SyncOffer fetching = State(1, 3);
  fetching.complete = false;
  h_.Lively(P(2)).fetches = true;
  Sync(2, fetching);
  Sync(3, State(8, 3));
  EXPECT_TRUE(Committed(2, 8, 3) && Committed(3, 8, 3));
}

TEST_F(SyncTest, WhereNobodyHasAStateAndOneWasFetchedAllAreToldToSyncAgain) {
  Enter(3);
  SyncOffer fetching = State(1, 3);
  fetching.complete = false;
  SyncOffer other = State(2, 3);
  other.complete = false;
  Sync(1, fetching);
  Sync(2, other);
  Sync(3, State(9, 3, SyncStrategy::kPopular, /*manifest=*/2));
  // The member that would be refused is told the same, because the others will wait for its offer.
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_EQ(End(n).outcome.code, Code::kAborted) << n;
  EXPECT_EQ(End(3).outcome.text,
            "sync of revision 3 failed: no member offers a state that can be elected, and m1 was "
            "still fetching one; sync again");
  EXPECT_EQ(h_.Notices("sync_failed").size(), 1U);
  // Nothing of the failed sync is stored.
  EXPECT_FALSE(h_.Stored().state);
  for (const MemberRecord& member : h_.Stored().members) EXPECT_EQ(member.syncs, 0U);
  Sync(1, State(1, 3));
  Sync(2, other);
  Sync(3, State(9, 3, SyncStrategy::kPopular, /*manifest=*/2));
  EXPECT_TRUE(Committed(1, 1, 3) && Committed(2, 1, 3));
  EXPECT_EQ(End(3).outcome.code, Code::kStateMismatch);
}

TEST_F(SyncTest, AFetcherThatIsDoneStandsInForTheLastHolder) {
  Enter(3);
  h_.Lively(P(2)).fetches = false;
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5, 4));
  Sync(2, State(9, 3));
  Sync(3, State(8, 3));
  h_.LivelyFetched(P(2), M(2));
  h_.LivelyLeave(P(1), M(1));
  h_.Run();
  EXPECT_TRUE(Waits(2) && Waits(3));
  h_.LivelyFetched(P(3), M(3));
  h_.Run();
  EXPECT_TRUE(Committed(2, 5, 4) && Committed(3, 5, 4));
}

TEST_F(SyncTest, AFetchThatFailsFailsTheSyncAsAWhole) {
  Enter(2);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(9));
  h_.LivelyFetched(P(2), M(2), {Code::kUnavailable, "no chunk from m1 for 6000 ms"});
  h_.Run();
  EXPECT_EQ(End(1).outcome.code, Code::kAborted);
  EXPECT_EQ(End(1).outcome.text,
            "sync of revision 0 failed: m2: no chunk from m1 for 6000 ms; sync again");
  EXPECT_EQ(h_.Notices("sync_failed").size(), 1U);
  h_.Lively(P(2)).fetches = true;
  Sync(1, State(5));
  Sync(2, State(9));
  EXPECT_TRUE(Committed(1, 5) && Committed(2, 5));
}

TEST_F(SyncTest, AnOfferThatIsSaidAgainWhileItsFailureIsOnItsWayIsNotVotedOn) {
  Enter(2);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(9));
  const control::SyncVote again{Harness::G(), M(2), Member(2).sync.value()};
  h_.LivelyLeave(P(1), M(1));
  h_.Run();
  EXPECT_EQ(End(2).outcome.code, Code::kAborted);
  h_.Say(P(2), again);
  h_.Run();
  EXPECT_EQ(End(2).outcome.code, Code::kAborted);
  EXPECT_FALSE(h_.Stored().state);
  Sync(2, State(9));
  EXPECT_TRUE(Committed(2, 9));
}

TEST_F(SyncTest, AnEndWithAnotherStateFailsTheSync) {
  Enter(2);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(9));
  h_.Say(P(2), control::FetchDone{Harness::G(), M(2), 1, {}, {6, 0}, 1, {}, {}});
  EXPECT_EQ(End(1).outcome.code, Code::kAborted);
}

TEST_F(SyncTest, ACorruptSourceIsReported) {
  Enter(3);
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(5));
  Sync(3, State(9));
  h_.LivelyFetched(P(3), M(3), {}, 100, {M(2)});
  h_.Run();
  EXPECT_TRUE(Committed(3, 5));
  EXPECT_EQ(h_.Notices("state_corrupt"), Texts{"corrupt state member=m2 detector=m3 revision=0"});
}

TEST_F(SyncTest, AFreezingEpochInTheMiddleDoesNotTouchIt) {
  Enter(3);
  h_.Lively(P(3)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(5));
  Sync(3, State(9));
  const Epoch before = h_.View().committed;
  h_.Say(P(1), control::LinkLost{Harness::G(), before, P(3), "reset"});
  h_.Wait(1000);
  ASSERT_GT(h_.View().committed, before);
  EXPECT_TRUE(Waits(1) && Waits(3));
  h_.LivelyFetched(P(3), M(3));
  h_.Run();
  EXPECT_TRUE(Committed(1, 5) && Committed(3, 5));
}

TEST_F(SyncTest, TheLastHolderThatLeavesEndsTheGroupsMemory) {
  Enter(1);
  Sync(1, State(5, 90));
  EXPECT_TRUE(Committed(1, 5, 90));
  h_.LivelyLeave(P(1), M(1));
  h_.Run();
  EXPECT_FALSE(h_.Stored().state);
  h_.LivelyJoin(P(1), 2);
  h_.Run();
  h_.LivelySync(P(1), M(2), State(4, 80));
  h_.Run();
  EXPECT_EQ(h_.Stored().state, (StateRecord{80, {4, 0}, {1, 0}, 2}));
}

TEST_F(SyncTest, AStrangersOffersAreAgainstTheProtocol) {
  Enter(1);
  h_.Attach(P(9));
  h_.Say(P(9), control::SyncVote{Harness::G(), M(1), State(1)});
  EXPECT_EQ(h_.Take(P(9)), Texts{"Removed m1 unknown"});
  h_.Say(P(9), control::Join{1, Harness::G(), "t"});
  SyncOffer offer = State(1);
  offer.number = 1;
  h_.Say(P(9), control::SyncVote{Harness::G(), M(2), offer});
  EXPECT_EQ(h_.closings().back(), "against the protocol: sync of m2, which is not admitted");
}

// ---- repetition and restarts

TEST_F(SyncTest, ARepeatedOfferIsAnsweredAgain) {
  Enter(2);
  h_.Lively(P(2)).fetches = false;
  Sync(1, State(5));
  Sync(2, State(9));
  h_.ForgetReceived();
  h_.Close(P(2));
  h_.Reattach(P(2));
  h_.Run();
  EXPECT_EQ(h_.Take(P(2)), Texts{"Sync m2 1 fetch revision=0 state=5 sources=m1"});
  h_.LivelyFetched(P(2), M(2));
  h_.Run();
  h_.ForgetReceived();
  SyncOffer repeated = State(5);
  repeated.number = 1;
  h_.Say(P(2), control::SyncVote{Harness::G(), M(2), repeated});
  EXPECT_EQ(h_.Take(P(2)), Texts{"Sync m2 1 end revision=0 state=5"});
}

TEST_F(SyncTest, ARepeatedOfferThatWasRefusedIsRefusedAgain) {
  Enter(2);
  Sync(1, State(5, 0, SyncStrategy::kPopular, 9));
  Sync(2, State(5));
  h_.ForgetReceived();
  SyncOffer repeated = State(5, 0, SyncStrategy::kPopular, 9);
  repeated.number = 1;
  h_.Say(P(1), control::SyncVote{Harness::G(), M(1), repeated});
  h_.Say(P(2), control::SyncVote{Harness::G(), M(2), repeated});
  EXPECT_EQ(h_.Take(P(1)).size() + h_.Take(P(2)).size(), 2U);
  EXPECT_FALSE(h_.Notices("sync_refused").size() > 1);
}

TEST_F(SyncTest, RevisionAndStateSurviveTheCoordinator) {
  Enter(2);
  Sync(1, State(5, 7));
  Sync(2, State(5, 7));
  h_.Boot();
  for (uint64_t n = 1; n <= 2; ++n) h_.Reattach(P(n));
  h_.Run();
  EXPECT_EQ(h_.View().state, (StateRecord{7, {5, 0}, {1, 0}, 2}));
  Sync(1, State(6, 8));
  Sync(2, State(7, 9));
  EXPECT_TRUE(Committed(1, 6, 8));
  EXPECT_EQ(End(2).outcome.code, Code::kStateMismatch);
}

TEST_F(SyncTest, OffersAreSaidAgainToAnotherCoordinator) {
  Enter(3);
  Step(1, State(5));
  Sync(2, State(5));
  h_.Boot();
  for (uint64_t n = 1; n <= 3; ++n) h_.Reattach(P(n));
  h_.Run();
  EXPECT_TRUE(Waits(1) && Waits(2));
  h_.LivelyVote(P(3), M(3), State(9));
  h_.Run();
  EXPECT_EQ(End(2).outcome.code, Code::kFailedPrecondition) << "m1 and m3 stand at a boundary";
  h_.LivelyVote(P(2), M(2), State(5));
  h_.Run();
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 5)) << n;
}

TEST_F(SyncTest, ATransferGoesOnUnderAnotherCoordinator) {
  Enter(3);
  for (uint64_t n = 1; n <= 3; ++n) h_.Lively(P(n)).fetches = false;
  Sync(1, State(5, 4));
  Sync(2, State(9, 3));
  Sync(3, State(9, 3));
  h_.LivelyFetched(P(2), M(2));
  h_.Boot();
  for (uint64_t n = 1; n <= 3; ++n) h_.Reattach(P(n));
  h_.Run();
  EXPECT_EQ(h_.Take(P(3)).back(), "Sync m3 1 fetch revision=4 state=5 sources=m1,m2");
  h_.LivelyFetched(P(3), M(3));
  h_.Run();
  for (uint64_t n = 1; n <= 3; ++n) EXPECT_TRUE(Committed(n, 5, 4)) << n;
}

// The coordinator dies at each write of a sync with a transfer: before the write, or after it and
// before its messages are sent.
TEST_F(SyncTest, TheCoordinatorMayDieAtAnyWrite) {
  for (int write = 1; write <= 6; ++write) {
    for (const bool kept : {false, true}) {
      h_ = Harness();
      Enter(3);
      for (uint64_t n = 1; n <= 3; ++n) Sync(n, State(5, 7));
      h_.CrashAt(write, kept);
      const auto step = [&](uint64_t n, const SyncOffer& offer) {
        h_.LivelyVote(P(n), M(n), offer);
        h_.Run();
        if (!h_.crashed()) return;
        h_.Boot();
        for (uint64_t p = 1; p <= 3; ++p) h_.Reattach(P(p));
        h_.Run();
      };
      for (uint64_t revision = 8; revision <= 11; ++revision) {
        for (uint64_t n = 1; n <= 3; ++n) step(n, State(n == 3 ? 99 : revision, revision));
        for (uint64_t n = 1; n <= 3; ++n) {
          EXPECT_TRUE(Committed(n, revision, revision)) << write << kept << " m" << n;
        }
      }
    }
  }
}

// Members join, leave, differ, fail and reconnect, and the coordinator restarts. The harness and
// the core check: nothing is sent before it is durable, no member that only sends is told to fetch,
// and a member that is told OK has the committed state. This test checks that the revision never
// falls, and that all members have the same state in the end.
TEST_F(SyncTest, RandomSyncsComeToOneState) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng prng(seed);
    h_ = Harness();
    Enter(4);
    std::set<uint64_t> here = {1, 2, 3, 4};
    std::map<uint64_t, uint64_t> revisions;
    uint64_t newest = 0;
    const auto learn = [&] {
      for (const uint64_t n : here) {
        const auto& results = Member(n).sync_results;
        if (results.empty() || Waits(n) || !results.back().outcome.ok()) continue;
        revisions[n] = results.back().revision;
      }
      if (!h_.Stored().state) return;
      EXPECT_GE(h_.Stored().state->revision, newest);
      newest = h_.Stored().state->revision;
    };
    for (int i = 0; i < 120; ++i) {
      std::vector<uint64_t> all(here.begin(), here.end());
      const uint64_t n = all[prng.Below(all.size())];
      const auto& results = Member(n).sync_results;
      const bool fetching = Waits(n) && !results.empty() &&
                            results.back().number == Member(n).sync->number &&
                            results.back().action == control::SyncAction::kFetch;
      switch (prng.Below(10)) {
        case 0:
          h_.Lively(P(n)).fetches = prng.Chance(0.5);
          break;
        case 1:
          if (fetching) {
            h_.LivelyFetched(P(n), M(n),
                             prng.Chance(0.7) ? Outcome{} : Outcome{Code::kUnavailable, "x"});
          }
          break;
        case 2:
          h_.Close(P(n));
          h_.Reattach(P(n));
          break;
        case 3:
          if (prng.Chance(0.2)) {
            h_.Boot();
            for (const uint64_t p : all) h_.Reattach(P(p));
          } else if (prng.Chance(0.15) && here.size() > 2) {
            h_.LivelyLeave(P(n), M(n));
            here.erase(n);
          }
          break;
        default: {
          if (Waits(n) || Member(n).voting) break;
          SyncOffer offer = State(prng.Below(2) + 10 * newest, newest + prng.Below(2));
          offer.complete = prng.Chance(0.8);
          if (prng.Chance(0.3)) {
            h_.LivelyVote(P(n), M(n), offer);
          } else {
            h_.LivelySync(P(n), M(n), offer);
          }
        }
      }
      h_.Run();
      learn();
    }
    // From now on all members fetch, and all streams work.
    for (const uint64_t n : here) {
      h_.Lively(P(n)).fetches = true;
      h_.Close(P(n));
      h_.Reattach(P(n));
    }
    h_.Run();
    for (int i = 0; i < 4; ++i) {
      for (const uint64_t n : here) {
        if (!Waits(n) && !Member(n).voting) h_.LivelyVote(P(n), M(n), State(7, newest));
      }
      h_.Run();
      learn();
    }
    for (const uint64_t n : here) {
      if (!Waits(n) && !Member(n).voting) h_.LivelyVote(P(n), M(n), State(8, newest));
    }
    h_.Run();
    for (const uint64_t n : here) {
      EXPECT_FALSE(Waits(n)) << "m" << n << ": " << h_.View().waiting_for;
      EXPECT_EQ(End(n).state, h_.Stored().state->state);
    }
  }
}

}  // namespace
}  // namespace longhaul::coordinator
