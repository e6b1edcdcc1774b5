#include "peerd/core/op_inbox.h"

#include <gtest/gtest.h>

#include <string>

#include "peerd/core/op_table_testing.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::Fate;

TEST_F(OpTableTest, AResultThatCannotBeOneBreaksTheLink) {
  EnterThree();
  Post(7, Small());
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  const auto refused = [&](Epoch epoch, size_t bytes, const OpDesc& desc) {
    auto ready = ReadyOf(2, 7, desc, 2);
    ready.payload.clear();
    ready.result = OneShotResult{epoch, kThree, std::string(bytes, 'r')};
    return Breaks(ready);
  };
  EXPECT_TRUE(refused(Epoch(1), 15, Small()));
  EXPECT_TRUE(refused(Epoch(2), 16, Small()));
  OpDesc aborts = Small();
  aborts.on_fault = OnFault::kAbort;
  EXPECT_TRUE(refused(Epoch(1), 16, aborts));
  EXPECT_TRUE(refused(Epoch(1), Large().bytes(), Large()));
}

TEST_F(OpTableTest, APeerMayBeOneOpAhead) {
  EnterThree();
  RunToDone(7);
  // Peer 2 has settled the op and announces the next one with the same tag.
  Done(2, 1);
  auto next = ReadyOf(2, 7, Large());
  next.ordinal = OpOrdinal(250);
  EXPECT_TRUE(Ready(next).empty());
  EXPECT_EQ(Get<PostDone>(Done(3, 1)).size(), 1u);
  EXPECT_EQ(Get<CreditAttempt>(Post(7, Large())).at(0).theirs, OpOrdinal(250));
}

TEST_F(OpTableTest, TooManyReadiesOfATagBreakTheLink) {
  EnterThree();
  Ready(2, 7, Large());
  EXPECT_TRUE(Ready(2, 7, Large()).empty());
  EXPECT_EQ(Get<BreakLink>(Ready(2, 7, Large())).at(0).peer, PeerId(2));
  EXPECT_EQ(counters_.frames_refused, 1u);
}

TEST_F(OpTableTest, UnmatchedAndEarlyFramesAreBounded) {
  EnterThree();
  for (uint64_t tag = 0; tag < LH_READY_UNMATCHED_MAX; ++tag) {
    ops_.OnReady(ReadyOf(2, tag, Large()), now_, &out_);
    ops_.OnReady(ReadyOf(3, tag, Large(), 2), now_, &out_);
  }
  ops_.CheckInvariants();
  EXPECT_TRUE(Get<BreakLink>(out_).empty());
  EXPECT_EQ(Get<BreakLink>(Ready(2, 99999, Large())).size(), 1u);
  EXPECT_TRUE(Breaks(ReadyOf(3, 99999, Large(), 2)));
  EXPECT_TRUE(Breaks(DoneOf(3, 1, 2)));
  // Each peer has its own limit.
  EXPECT_TRUE(Ready(3, 0, Large()).empty());
}

// ------------------------------------------------------------------------------ frames

TEST_F(OpTableTest, FramesOfOlderAttemptsAndOfStrangersAreStale) {
  EnterThree();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}));
  EXPECT_TRUE(Ready(2, 7, Large(), 0).empty());
  EXPECT_TRUE(Done(2, 1, 1).empty());
  EXPECT_TRUE(Ready(9, 7, Large(), 2).empty());
  EXPECT_TRUE(Done(9, 7, 2).empty());
  EXPECT_EQ(counters_.frames_stale, 4u);
}

TEST_F(OpTableTest, DonesForWhatNeverWasBreakTheLink) {
  EnterThree();
  EXPECT_TRUE(Breaks(DoneOf(2, 1)));
  EXPECT_TRUE(Breaks(DoneOf(2, 0)));
  Post(7, Large());
  EXPECT_TRUE(Breaks(DoneOf(2, 1)));  // before its READY
  Ready(2, 7, Large());
  EXPECT_TRUE(Done(2, 1).empty());
  EXPECT_TRUE(Breaks(DoneOf(2, 1)));  // a second time
  EXPECT_EQ(counters_.frames_refused, 4u);
  EXPECT_EQ(counters_.frames_stale, 0u);
}

TEST_F(OpTableTest, ADoneForASettledOpIsStale) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}}));
  Post(7, Large());
  Ready(2, 7, Large());
  Complete(1);
  Done(2, 1);
  EXPECT_TRUE(Done(2, 1).empty());
  EXPECT_EQ(counters_.frames_stale, 1u);
}

TEST_F(OpTableTest, AReadyOfTheWrongSizeBreaksTheLink) {
  EnterThree();
  auto small = ReadyOf(2, 7, Small());
  small.payload.pop_back();
  EXPECT_TRUE(Breaks(small));
  auto large = ReadyOf(2, 7, Large());
  large.payload = "x";
  EXPECT_TRUE(Breaks(large));
}

TEST_F(OpTableTest, AReadyForAnOpFromBeforeThePeerJoinedBreaksTheLink) {
  EnterThree();
  Enter(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 2}}));
  Post(7, Large());
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);
  EXPECT_EQ(Get<BreakLink>(Ready(4, 7, Large())).size(), 1u);
}

TEST_F(OpTableTest, ReadiesOfANewerBoundaryWait) {
  EnterThree();
  ops_.Expect({PeerId(4)});
  auto ready = ReadyOf(4, 7, Large());
  ready.boundary = Epoch(2);
  EXPECT_TRUE(Ready(ready).empty());
  Enter(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 2}}));
  Post(7, Large(), 1, 2);
  EXPECT_EQ(Get<CreditAttempt>(out_).at(0).peer, PeerId(4));
}

TEST_F(OpTableTest, WhatAPeerSentThatIsNotExpectedAnyMoreIsForgotten) {
  EnterThree();
  ops_.Expect({PeerId(4)});
  auto ready = ReadyOf(4, 7, Large());
  ready.boundary = Epoch(2);
  Ready(ready);
  Ready(4, 8, Large(), 2);
  ops_.Expect({});
  Enter(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 2}}));
  EXPECT_TRUE(Get<CreditAttempt>(Post(7, Large(), 1, 2)).empty());
}

TEST_F(OpTableTest, NothingIsSentToALostPeerUntilTheNextCommit) {
  EnterThree();
  RunToDone(5);
  Ready(3, 7, Large());
  ops_.Lose({PeerId(3)});
  Post(7, Large());
  EXPECT_EQ(Get<SendReady>(out_).size(), 1u);
  Ready(2, 7, Large());
  EXPECT_EQ(Get<SendDone>(Complete(2)).size(), 1u);
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}),
        {{OpOrdinal(1), Fate::kCommit}, {OpOrdinal(2), Fate::kCommit}});
  EXPECT_EQ(Get<PostDone>(out_).size(), 2u);
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u);
}

// ------------------------------------------------------------------------------ lost peers

class LostPeerTest : public OpTableTest {
 protected:
  static control::PrepareEpoch Again(uint64_t epoch) {
    return MakePrepare(epoch, epoch - 1, 1, epoch, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  }
  void Redo() {
    Freeze();
    Stopped(1);
    Ready(3, 7, Large(), 2);
    Enter(Again(2), {{OpOrdinal(1), Fate::kRedo}});
  }
};

TEST_F(LostPeerTest, NothingIsSaidToThemAndNothingTakenUntilTheNextAttempt) {
  EnterThree();
  ops_.Lose({PeerId(3)});
  const auto readies = Get<SendReady>(Post(7, Large()));
  ASSERT_EQ(readies.size(), 1u);
  EXPECT_EQ(readies[0].to, PeerId(2));
  // A READY that was sent before may be missing.
  EXPECT_TRUE(Done(3, 1).empty());
  EXPECT_TRUE(Ready(3, 7, Large()).empty());
  // An epoch that does not freeze changes nothing: the attempt is the same.
  Enter(MakePrepare(2, 1, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}));
  EXPECT_TRUE(Ready(3, 7, Large()).empty());
  EXPECT_EQ(Get<SendReady>(Post(8, Large())).size(), 1u);
  // Frames of the next attempt wait for that attempt.
  Freeze();
  Stopped(1);
  Stopped(2);
  Ready(3, 7, Large(), 3);
  Enter(Again(3), {{OpOrdinal(1), Fate::kRedo}, {OpOrdinal(2), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).size(), 4u);
  EXPECT_EQ(Get<CreditAttempt>(out_).at(0).peer, PeerId(3));
  EXPECT_EQ(counters_.frames_refused, 0u);
}

TEST_F(LostPeerTest, WhoIsLostAgainBeforeTheCommitStaysLostAfterIt) {
  EnterThree();
  Freeze();
  Ready(3, 7, Large(), 2);
  Enter(Again(2), {}, {}, {PeerId(3)});
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 1u);
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
}

TEST_F(LostPeerTest, WhoBreaksTheRulesIsNotHeardAnyMoreInTheAttempt) {
  EnterThree();
  const BreakLink broken = Get<BreakLink>(Done(3, 1000000)).at(0);
  EXPECT_EQ(broken.group, kGroup);
  EXPECT_EQ(broken.peer, PeerId(3));
  EXPECT_EQ(counters_.frames_refused, 1u);
  // Later frames of the peer may depend on the refused one.
  Post(7, Large());
  EXPECT_TRUE(Ready(3, 7, Large()).empty());
  EXPECT_FALSE(Get<CreditAttempt>(Ready(2, 7, Large())).empty());
  Redo();
  EXPECT_EQ(Get<CreditAttempt>(out_).at(0).peer, PeerId(3));
}

TEST_F(LostPeerTest, AWrongVerdictCountsForNobody) {
  EnterThree();
  RunToDone(7);
  EXPECT_EQ(Sent<control::Dispute>(Done(3, 1, 0, /*refused=*/true)).at(0).peer, PeerId(3));
  EXPECT_TRUE(Get<PostDone>(Done(2, 1)).empty());
}

TEST_F(LostPeerTest, TooManyEarlyFramesCountInTheirAttempt) {
  EnterThree();
  for (uint64_t tag = 0; tag < LH_READY_UNMATCHED_MAX; ++tag) Ready(3, tag, Large(), 2);
  EXPECT_TRUE(out_.empty());
  EXPECT_EQ(Get<BreakLink>(Ready(3, 99999, Large(), 2)).size(), 1u);
  // Later frames are ignored, and the link is broken only once.
  EXPECT_TRUE(Ready(3, 99999, Large(), 2).empty());
  EXPECT_EQ(counters_.frames_refused, 1u);
  EXPECT_TRUE(Ready(2, 7, Large(), 2).empty());
  Enter(Again(2));
  EXPECT_EQ(Get<SendReady>(Post(8, Large())).size(), 1u);
  // A refused frame of an attempt that never comes does not affect frames of other attempts.
  Ready(2, 9, Small(), 77);
  auto bad = ReadyOf(2, 9, Small(), 77);
  bad.payload.clear();
  EXPECT_EQ(Get<BreakLink>(Ready(bad)).size(), 1u);
  Freeze();
  Stopped(1, 2);
  Enter(Again(3), {{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);
}

}  // namespace
}  // namespace longhaul::peerd
