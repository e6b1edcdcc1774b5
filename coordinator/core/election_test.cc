#include "coordinator/core/election.h"

#include <algorithm>
#include <string>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using Do = SyncVerdict::Do;

constexpr Hash128 kNames{1, 1};
constexpr Hash128 kOtherNames{0, 9};

Hash128 State(uint64_t value) { return {value, 0}; }

Candidate Offer(uint64_t member, uint64_t state, uint64_t revision = 0,
                SyncStrategy strategy = SyncStrategy::kPopular) {
  return {MemberId(member), {1, strategy, revision, kNames, State(state)}};
}

const SyncVerdict& Of(const Election& election, uint64_t member) {
  const auto it = std::find_if(election.verdicts.begin(), election.verdicts.end(),
                               [&](const auto& v) { return v.member == MemberId(member); });
  EXPECT_NE(it, election.verdicts.end());
  return *it;
}

std::string Actions(const Election& election) {
  std::string text;
  for (const SyncVerdict& v : election.verdicts) {
    text += v.action == Do::kKeep ? 'k' : v.action == Do::kFetch ? 'f' : 'r';
  }
  return text;
}

TEST(Election, EqualStatesAreKept) {
  const Election e = Elect({Offer(1, 5), Offer(2, 5), Offer(3, 5)}, std::nullopt);
  EXPECT_TRUE(e.elected);
  EXPECT_EQ(Actions(e), "kkk");
  EXPECT_EQ(e.holders, (std::vector<MemberId>{MemberId(1), MemberId(2), MemberId(3)}));
}

TEST(Election, ThePopularStateWinsWhateverTheOrder) {
  std::vector<Candidate> offers = {Offer(1, 9), Offer(2, 5), Offer(3, 5)};
  std::sort(offers.begin(), offers.end(),
            [](const auto& a, const auto& b) { return a.member < b.member; });
  do {
    const Election e = Elect(offers, std::nullopt);
    EXPECT_EQ(Actions(e), "fkk");
    EXPECT_EQ(e.state, State(5));
  } while (std::next_permutation(offers.begin(), offers.end(),
                                 [](const auto& a, const auto& b) { return a.member < b.member; }));
}

TEST(Election, WhereOnlyWhatIsFetchedMayWinAllOfferAgain) {
  Candidate first = Offer(1, 5, 3);
  first.offer.complete = false;
  first.offer.strategy = SyncStrategy::kReceive;
  Candidate fetching = Offer(2, 6, 4);
  fetching.offer.complete = false;
  Election e = Elect({Offer(3, 6, 4), fetching}, std::nullopt);
  EXPECT_EQ(e.again, "");
  e = Elect({fetching}, std::nullopt);
  EXPECT_FALSE(e.elected);
  EXPECT_TRUE(e.verdicts.empty());
  EXPECT_EQ(e.again, "no member offers a state that can be elected, and m2 was still fetching one");
  EXPECT_EQ(e.revision, 4U);
  // A state below the committed revision cannot be elected, either.
  EXPECT_FALSE(Elect({Offer(1, 5, 3), fetching}, Agreed{4, 5}).again.empty());
  // A state that is being fetched is not waited for if its member only receives.
  fetching.offer.strategy = SyncStrategy::kReceive;
  e = Elect({first, fetching}, std::nullopt);
  EXPECT_EQ(e.again, "");
  EXPECT_EQ(Actions(e), "rr");
}

TEST(Election, WhatIsFetchedIsNotWaitedForWhereAnotherStateIsElected) {
  Candidate fetching = Offer(2, 6, 4);
  fetching.offer.complete = false;
  const Election e = Elect({Offer(1, 5, 3), fetching}, Agreed{3, 4});
  EXPECT_EQ(e.again, "");
  EXPECT_EQ(Actions(e), "kf");
}

TEST(Election, ATieGoesToTheLowestDigest) {
  const Election e = Elect({Offer(1, 9), Offer(2, 5)}, std::nullopt);
  EXPECT_EQ(e.state, State(5));
  EXPECT_EQ(Actions(e), "fk");
}

TEST(Election, TheFirstSyncTakesTheHighestRevision) {
  const Election e = Elect({Offer(1, 5, 13), Offer(2, 6, 0), Offer(3, 6, 0)}, std::nullopt);
  EXPECT_EQ(e.revision, 13U);
  EXPECT_EQ(Actions(e), "kff");
}

TEST(Election, AnOutdatedMemberIsPulledForwardThoughPopular) {
  const Election e = Elect({Offer(1, 7, 4), Offer(2, 5, 3), Offer(3, 5, 3)}, Agreed{3, 4});
  EXPECT_EQ(e.revision, 4U);
  EXPECT_EQ(Actions(e), "kff");
}

TEST(Election, WithoutACurrentMemberTheHighestOutdatedRevisionWins) {
  const Election e = Elect({Offer(1, 7, 3), Offer(2, 5, 2), Offer(3, 5, 2)}, Agreed{3, 4});
  EXPECT_EQ(e.revision, 3U);
  EXPECT_EQ(Actions(e), "kff");
}

TEST(Election, ARevisionBelowTheCommittedOneIsNeverElected) {
  const Election e = Elect({Offer(1, 7, 2), Offer(2, 5, 1)}, Agreed{3, 4});
  EXPECT_FALSE(e.elected);
  EXPECT_EQ(Actions(e), "rr");
  EXPECT_EQ(Of(e, 1).refusal.code, Code::kStateMismatch);
  EXPECT_NE(Of(e, 1).refusal.text.find("offers is 2, committed was 3"), std::string::npos);
}

TEST(Election, WhatWasKeptFromAnotherHistoryIsPulledForward) {
  Candidate kept = Offer(1, 7, 100);
  kept.offer.kept = true;
  const Election e = Elect({kept, Offer(2, 5, 4), Offer(3, 100, 100)}, Agreed{3, 4});
  EXPECT_EQ(e.revision, 4U);
  EXPECT_EQ(Actions(e), "fkr");
  // Alone, a kept state of a higher revision elects nobody: it counts as outdated.
  EXPECT_FALSE(Elect({kept}, Agreed{3, 4}).elected);
}

TEST(Election, MembersThatDidNotSyncAtEachBoundaryBringMoreThanOneNewRevision) {
  // Committed: 3. There were four boundaries since, so 8 is too high.
  const Election e =
      Elect({Offer(1, 5, 7), Offer(2, 5, 7), Offer(3, 6, 5), Offer(4, 8, 8)}, Agreed{3, 7});
  EXPECT_EQ(e.revision, 7U);
  EXPECT_EQ(Actions(e), "kkfr");
}

TEST(Election, WhatWasKeptWinsLikeAnyOtherWhereItIsDue) {
  Candidate kept = Offer(1, 7, 100);
  kept.offer.kept = true;
  EXPECT_EQ(Actions(Elect({kept, Offer(2, 5, 4)}, std::nullopt)), "kf");
  EXPECT_EQ(Actions(Elect({kept, Offer(2, 5, 99)}, Agreed{99, 100})), "kf");
}

TEST(Election, AnIncompleteStateNeverWins) {
  Candidate fetching = Offer(1, 4, 3);
  fetching.offer.complete = false;
  const Election e = Elect({fetching, Offer(2, 5, 3), Offer(3, 6, 2)}, Agreed{2, 3});
  EXPECT_EQ(e.state, State(5));
  EXPECT_EQ(e.holders, std::vector<MemberId>{MemberId(2)});
  EXPECT_EQ(Actions(e), "fkf");
  fetching.offer.state = State(5);
  EXPECT_EQ(Actions(Elect({fetching, Offer(2, 5, 3)}, Agreed{2, 3})), "fk");
  EXPECT_FALSE(Elect({fetching}, Agreed{2, 3}).elected);
}

TEST(Election, AMemberThatOnlyLagsInItsRevisionKeepsItsBits) {
  const Election e = Elect({Offer(1, 7, 4), Offer(2, 7, 3)}, Agreed{3, 4});
  EXPECT_EQ(Actions(e), "kk");
  EXPECT_EQ(e.holders.size(), 2U);
}

TEST(Election, AnIncrementByTwoIsRefusedAndTheOthersGoOn) {
  const Election e = Elect({Offer(1, 7, 4), Offer(2, 7, 4), Offer(3, 8, 6)}, Agreed{3, 4});
  EXPECT_EQ(Actions(e), "kkr");
  EXPECT_EQ(Of(e, 3).refusal.code, Code::kStateMismatch);
  EXPECT_NE(Of(e, 3).refusal.text.find("revision is 6, due is 4"), std::string::npos);
}

TEST(Election, AnotherManifestIsRefusedAndToldWhomToCompareWith) {
  Candidate odd = Offer(1, 7);
  odd.offer.manifest = kOtherNames;
  const Election e = Elect({odd, Offer(2, 7), Offer(3, 7)}, std::nullopt);
  EXPECT_EQ(Actions(e), "rkk");
  EXPECT_EQ(Of(e, 1).compare_to, MemberId(2));
}

TEST(Election, AManifestMayNotWinByMembersThatAreRefused) {
  Candidate ahead = Offer(1, 7, 9);
  ahead.offer.manifest = kOtherNames;
  Candidate ahead_too = Offer(2, 7, 9);
  ahead_too.offer.manifest = kOtherNames;
  const Election e = Elect({ahead, ahead_too, Offer(3, 7, 1)}, Agreed{0, 1});
  EXPECT_EQ(Actions(e), "rrk");
  EXPECT_EQ(e.manifest, kNames);
}

// What a group has agreed on: revision 3, state 7, kNames.
const Agreed kAgreed{3, 4, State(7), kNames};

Candidate Holder(uint64_t member, uint64_t state, uint64_t revision,
                 SyncStrategy strategy = SyncStrategy::kPopular) {
  Candidate holder = Offer(member, state, revision, strategy);
  holder.holds = true;
  return holder;
}

Candidate Foreign(uint64_t member, uint64_t state, uint64_t revision) {
  Candidate foreign = Offer(member, state, revision);
  foreign.offer.manifest = kOtherNames;
  return foreign;
}

// However many newcomers come, and whatever revision they claim.
TEST(Election, NewcomersWithOtherTensorsAreRefusedWhileOneMemberHoldsWhatWasAgreedOn) {
  for (uint64_t revision : {0, 3, 4}) {
    std::vector<Candidate> offers = {Holder(9, 8, 4)};
    for (uint64_t newcomer = 1; newcomer <= 4; ++newcomer) {
      offers.push_back(Foreign(newcomer, 5, revision));
      const Election e = Elect(offers, kAgreed);
      EXPECT_TRUE(e.elected);
      EXPECT_EQ(e.manifest, kNames);
      EXPECT_EQ(e.state, State(8));
      EXPECT_EQ(Actions(e), std::string(newcomer, 'r') + "k");
      EXPECT_EQ(Of(e, 1).refusal.code, Code::kStateMismatch);
      EXPECT_EQ(Of(e, 1).compare_to, MemberId(9));
    }
  }
}

TEST(Election, OneThatOnlyReceivesOrStillFetchesHoldsTheManifestToo) {
  EXPECT_EQ(Actions(Elect({Foreign(1, 5, 4), Foreign(2, 5, 4),
                           Holder(3, 8, 4, SyncStrategy::kReceive), Holder(4, 8, 4)},
                          kAgreed)),
            "rrrk");  // m3 for its strategy
  Candidate receiver = Holder(3, 7, 3, SyncStrategy::kReceive);
  Candidate sender = Foreign(1, 5, 4);
  sender.offer.strategy = SyncStrategy::kSend;
  Candidate second = Offer(2, 6, 4, SyncStrategy::kSend);
  EXPECT_EQ(Actions(Elect({sender, second, receiver}, kAgreed)), "rkf");
}

TEST(Election, ANewcomerWithTheVeryStateHoldsItAsWell) {
  EXPECT_EQ(Actions(Elect({Foreign(1, 5, 3), Foreign(2, 5, 3), Offer(3, 7, 3)}, kAgreed)), "rrk");
  // Another state of the same tensors does not.
  EXPECT_EQ(Actions(Elect({Foreign(1, 5, 3), Foreign(2, 5, 3), Offer(3, 8, 3)}, kAgreed)), "kkr");
}

TEST(Election, MembersMayChangeTheirTensorsTogether) {
  std::vector<Candidate> offers = {Foreign(1, 8, 4), Foreign(2, 8, 4), Holder(3, 8, 4),
                                   Offer(4, 1, 0)};
  offers[0].holds = offers[1].holds = true;
  const Election e = Elect(offers, kAgreed);
  EXPECT_EQ(e.manifest, kOtherNames);
  EXPECT_EQ(Actions(e), "kkrr");
  // One of two: what was agreed on stands, though it is not the lowest digest.
  offers.erase(offers.begin());
  EXPECT_EQ(Actions(Elect(offers, kAgreed)), "rkf");
}

TEST(Election, NewcomersDoNotOutvoteTheStrategyOfMembers) {
  const Election e = Elect(
      {Offer(1, 5, 4, SyncStrategy::kSend), Holder(2, 8, 4), Offer(3, 5, 4, SyncStrategy::kSend)},
      kAgreed);
  EXPECT_EQ(Actions(e), "rkr");
  EXPECT_EQ(Of(e, 1).refusal.code, Code::kInvalidArgument);
}

TEST(Election, NewcomersDoNotOutvoteTheStateOfMembers) {
  // As many revisions as are due, and more votes: weights of another run.
  EXPECT_EQ(Actions(Elect({Offer(1, 5, 4), Holder(2, 8, 3), Offer(3, 5, 4)}, kAgreed)), "fkf");
  // Not even the lowest digest of a tie.
  EXPECT_EQ(Actions(Elect({Offer(1, 5, 4), Holder(2, 8, 4)}, kAgreed)), "fk");
  EXPECT_EQ(
      Actions(Elect({Offer(1, 5, 4, SyncStrategy::kSend), Holder(2, 8, 4, SyncStrategy::kSend)},
                    kAgreed)),
      "rk");
  // Where the members only receive, it is for newcomers to send.
  EXPECT_EQ(
      Actions(Elect({Offer(1, 5, 4, SyncStrategy::kSend), Holder(2, 8, 4, SyncStrategy::kReceive)},
                    kAgreed)),
      "kf");
  // A member that has lost what was agreed on keeps nobody out.
  EXPECT_EQ(Actions(Elect({Offer(1, 5, 4), Holder(2, 8, 2)}, kAgreed)), "kf");
}

TEST(Election, PopularIsUsedByAllOrByNone) {
  for (int world = 2; world <= 4; ++world) {
    std::vector<Candidate> offers;
    for (int i = 1; i < world; ++i) offers.push_back(Offer(i, 5));
    offers.push_back(Offer(world, 5, 0, SyncStrategy::kReceive));
    const Election e = Elect(offers, std::nullopt);
    EXPECT_TRUE(e.elected);
    EXPECT_EQ(Of(e, world).action, Do::kRefuse) << world;
    EXPECT_EQ(Of(e, world).refusal.code, Code::kInvalidArgument);
    EXPECT_EQ(Of(e, 1).action, Do::kKeep) << world;
  }
}

TEST(Election, ReceiversNeverWin) {
  const Election e =
      Elect({Offer(1, 9, 0, SyncStrategy::kReceive), Offer(2, 9, 0, SyncStrategy::kReceive),
             Offer(3, 5, 0, SyncStrategy::kSend)},
            std::nullopt);
  EXPECT_EQ(Actions(e), "ffk");
  EXPECT_EQ(e.holders, std::vector<MemberId>{MemberId(3)});
}

// A fetcher may reach the receiver and no sender.
TEST(Election, AReceiverWithTheSameBitsIsASource) {
  const Election e = Elect(
      {Offer(1, 5, 0, SyncStrategy::kReceive), Offer(2, 5, 0, SyncStrategy::kSend)}, std::nullopt);
  EXPECT_EQ(Actions(e), "kk");
  EXPECT_EQ(e.holders, (std::vector<MemberId>{MemberId(1), MemberId(2)}));
}

TEST(Election, OnlyReceiversElectNobody) {
  const Election e =
      Elect({Offer(1, 5, 0, SyncStrategy::kReceive), Offer(2, 5, 0, SyncStrategy::kReceive)},
            std::nullopt);
  EXPECT_FALSE(e.elected);
  EXPECT_EQ(Actions(e), "rr");
  EXPECT_EQ(Of(e, 1).refusal.code, Code::kFailedPrecondition);
}

TEST(Election, OfTwoSendersTheLessPopularIsRefused) {
  const Election e =
      Elect({Offer(1, 5, 0, SyncStrategy::kSend), Offer(2, 5, 0, SyncStrategy::kSend),
             Offer(3, 4, 0, SyncStrategy::kSend), Offer(4, 1, 0, SyncStrategy::kReceive)},
            std::nullopt);
  EXPECT_EQ(Actions(e), "kkrf");
}

TEST(Election, NobodyOffersNothing) {
  const Election e = Elect({}, std::nullopt);
  EXPECT_FALSE(e.elected);
  EXPECT_TRUE(e.verdicts.empty());
}

}  // namespace
}  // namespace longhaul::coordinator
