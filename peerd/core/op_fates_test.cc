#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "peerd/core/op_table.h"
#include "peerd/core/op_table_testing.h"

namespace longhaul::peerd {
namespace {

using control::Fate;
using control::OpFate;

TEST_F(OpTableTest, WhatIsMissedIsTheOpAfterTheOneThatIsRedone) {
  EnterThree();
  Post(7, Small());
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}}, {{Epoch(1), 7, 0, 1}});
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  Ready(2, 7, Small(), 2);
  EXPECT_TRUE(Get<PostDone>(Complete(1, 2, std::string(16, 'r'))).at(0).outcome.ok());
  EXPECT_EQ(Get<PostDone>(Post(7, Small())).at(0).outcome.code, Code::kAborted);
}

// ------------------------------------------------------------------------------ faults

TEST_F(OpTableTest, FreezingStopsWhatIsNotDoneAndReportsWhatWasAnnounced) {
  EnterThree();
  RunToDone(5);      // o1, done
  Post(6, Large());  // o2, running
  Post(7, Small());  // o3, waits for inputs
  Ready(2, 7, Small());
  Post(8, Large());  // o4, complete, but a READY is missing
  Ready(2, 8, Large());
  Complete(4);
  const auto stops = Get<StopAttempt>(Freeze());
  ASSERT_EQ(stops.size(), 2u);
  EXPECT_EQ(stops[0].ordinal, OpOrdinal(2));
  EXPECT_EQ(stops[1].ordinal, OpOrdinal(4));
  EXPECT_TRUE(ops_.Stopping());
  // While frozen, no op is settled or announced.
  EXPECT_TRUE(Done(2, 1).empty());
  EXPECT_TRUE(Done(3, 1).empty());
  EXPECT_TRUE(Ready(3, 7, Small()).empty());
  EXPECT_TRUE(Complete(2).empty());
  EXPECT_TRUE(Post(9, Large()).empty());
  EXPECT_TRUE(Stopped(2).empty());
  EXPECT_TRUE(Stopped(4).empty());
  EXPECT_FALSE(ops_.Stopping());

  const auto reports = ops_.Report();
  ASSERT_EQ(reports.size(), 4u);
  EXPECT_EQ(reports[0],
            (control::OpReport{OpOrdinal(1),
                               Epoch(1),
                               5,
                               0,
                               true,
                               false,
                               false,
                               {{PeerId(2), OpOrdinal(205)}, {PeerId(3), OpOrdinal(305)}},
                               0,
                               static_cast<uint32_t>(OpKind::kAllReduce)}));
  EXPECT_FALSE(reports[1].done);
  EXPECT_EQ(reports[2].matches.size(), 1u);
  EXPECT_FALSE(reports[3].done);
  EXPECT_TRUE(reports[3].matches.empty()) << "it is redone, whoever has announced it";

  LoseThree({{OpOrdinal(1), Fate::kCommit},
             {OpOrdinal(2), Fate::kRedo},
             {OpOrdinal(3), Fate::kRedo},
             {OpOrdinal(4), Fate::kRedo}});
  const auto settled = Get<PostDone>(out_);
  ASSERT_EQ(settled.size(), 1u);
  EXPECT_TRUE(settled[0].outcome.ok());
  EXPECT_EQ(settled[0].info.members, kThree);  // the dead member took part
  EXPECT_TRUE(Get<FinishAttempt>(out_).at(0).commit);
  const auto readies = Get<SendReady>(out_);
  ASSERT_EQ(readies.size(), 4u);
  for (const SendReady& ready : readies) {
    EXPECT_EQ(ready.to, PeerId(2));
    EXPECT_EQ(ready.attempt, Epoch(2));
  }
  EXPECT_EQ(readies[3].ordinal, OpOrdinal(5));
  EXPECT_EQ(counters_.retries, 0u);  // no attempt had begun
}

TEST_F(OpTableTest, ADoneOpJudgedRedoIsStoppedAndRunsAgain) {
  EnterThree();
  RunToDone(7);
  EXPECT_TRUE(Get<StopAttempt>(Freeze()).empty());
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  ASSERT_EQ(Get<StopAttempt>(out_).size(), 1u);
  EXPECT_EQ(Get<StopAttempt>(out_)[0].attempt, Epoch());
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  EXPECT_TRUE(ops_.Report().empty());
  Stopped(1);
  EXPECT_EQ(Get<SendReady>(out_).at(0).ordinal, OpOrdinal(1));
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).members, 2u);
  Ready(2, 7, Large(), 2);
  Complete(1, 2);
  Done(2, 1, 2);
  const PostDone post = Get<PostDone>(out_).at(0);
  EXPECT_TRUE(post.outcome.ok());
  EXPECT_EQ(post.info.retries, 1u);
  EXPECT_EQ(post.info.members.size(), 2u);
  EXPECT_EQ(post.info.epoch, Epoch(2));
}

TEST_F(OpTableTest, AnswersOfAnOlderAttemptDoNotCount) {
  EnterThree();
  RunToDone(7);
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_TRUE(Stopped(1, 9).empty());
  Stopped(1);
  EXPECT_TRUE(Complete(1, 0).empty());
  EXPECT_TRUE(Stopped(1, 2).empty());
  EXPECT_TRUE(Stopped(77).empty());
  EXPECT_TRUE(Complete(77).empty());
  EXPECT_EQ(Get<BreakLink>(Done(2, 1, 2)).size(), 1u);
}

TEST_F(OpTableTest, FramesOfTheNextAttemptWaitForTheCommit) {
  EnterThree();
  Post(7, Large());
  Freeze();
  Stopped(1);
  EXPECT_TRUE(Ready(2, 7, Large(), 2).empty());
  EXPECT_TRUE(Ready(2, 8, Large(), 5).empty());
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<CreditAttempt>(out_).at(0).theirs, OpOrdinal(207));
  // A READY of a still newer attempt goes on waiting.
  Freeze();
  Stopped(1, 2);
  Enter(MakePrepare(5, 2, 1, 5, {{1, 1, 1}, {2, 2, 1}}), {{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<CreditAttempt>(Post(8, Large())).size(), 1u);
}

TEST_F(OpTableTest, AnEarlyDoneIsReplayedToo) {
  EnterThree();
  Ready(2, 7, Large(), 2);
  Done(2, 1, 2);
  LoseThree({});
  // The DONE names an op that does not exist. This shows only when the attempt has begun.
  EXPECT_EQ(Get<BreakLink>(out_).size(), 1u);
}

TEST_F(OpTableTest, AFrozenCommitDropsTheMatchesOfTheOldAttempt) {
  EnterThree();
  Ready(2, 7, Large());
  Freeze();
  LoseThree({});
  Post(7, Large());
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
}

TEST_F(OpTableTest, AnAbortedOpNamesTheCause) {
  EnterThree();
  const OpDesc desc = Desc(1 << 20, DType::kFloat32, OnFault::kAbort);
  Post(7, desc);
  Ready(2, 7, desc);
  Ready(3, 7, desc);
  Complete(1);
  Post(8, desc);
  Ready(2, 8, desc);
  Freeze();
  Stopped(2);
  EXPECT_TRUE(ops_.Report()[0].abort_on_fault);
  EXPECT_TRUE(ops_.Report()[1].abort_on_fault);
  EXPECT_EQ(ops_.Report()[1].matches.size(), 1u);
  LoseThree({{OpOrdinal(1), Fate::kAbort}, {OpOrdinal(2), Fate::kAbort}});
  // The attempt of the op that was done must be undone first.
  ASSERT_EQ(Get<StopAttempt>(out_).size(), 1u);
  ASSERT_EQ(Get<PostDone>(out_).size(), 1u);
  EXPECT_FALSE(Get<FinishAttempt>(out_).at(0).commit);
  Stopped(1);
  const Outcome outcome = Get<PostDone>(out_).at(0).outcome;
  EXPECT_EQ(outcome.code, Code::kAborted);
  EXPECT_NE(outcome.text.find("all-reduce tag 7 aborted: test;"), std::string::npos);
  EXPECT_EQ(counters_.aborted, 2u);
  EXPECT_EQ(counters_.retries, 0u);
  EXPECT_EQ(ops_.open(), 0u);
}

TEST_F(OpTableTest, ARefusedOpIsSettledAsRefusedByArbitration) {
  EnterThree();
  Post(7, Small());
  Ready(2, 7, Large());
  Ready(3, 7, Small());
  Freeze();
  EXPECT_TRUE(ops_.Report()[0].done);
  LoseThree({{OpOrdinal(1), Fate::kCommit}});
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kInvalidArgument);
}

TEST_F(OpTableTest, AnOpThatOthersAbortedEndsAbortedWhenItIsPosted) {
  EnterThree();
  Freeze();
  LoseThree({}, {{Epoch(1), 7, 0, 1}});
  const auto posts = Get<PostDone>(Post(7, Large()));
  ASSERT_EQ(posts.size(), 1u);
  EXPECT_EQ(posts[0].outcome.code, Code::kAborted);
  EXPECT_EQ(ops_.open(), 0u);
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
  // Only one post ends like this: the next one is a new op.
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 1u);
}

TEST_F(OpTableTest, APostThatCameWhileFrozenEndsAsTheOthersAborted) {
  EnterThree();
  Freeze();
  Post(7, Large());
  LoseThree({}, {{Epoch(1), 7, 0, 1}});
  ASSERT_EQ(Get<PostDone>(out_).size(), 1u);
  EXPECT_EQ(Get<PostDone>(out_)[0].outcome.code, Code::kAborted);
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 1u);
}

TEST_F(OpTableTest, OpsAbortedTwiceElsewhereAreMissedTwice) {
  EnterThree();
  Freeze();
  LoseThree({}, {{Epoch(1), 7, 0, 1}});
  Freeze();
  Enter(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}}), {}, {{Epoch(1), 7, 0, 1}});
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Get<PostDone>(Post(7, Large())).at(0).outcome.code, Code::kAborted);
  }
  EXPECT_TRUE(Get<PostDone>(Post(7, Large())).empty());
}

TEST_F(OpTableTest, WhatWasMissedIsForgottenBehindTheNextBoundary) {
  EnterThree();
  Freeze();
  LoseThree({}, {{Epoch(1), 7, 0, 1}, {Epoch(1), 8, 0, 1}});
  EXPECT_TRUE(Get<PostDone>(Post(7, Large(), 1, 2)).empty());
  EXPECT_EQ(Get<SendReady>(out_).size(), 1u);
  EXPECT_TRUE(Get<PostDone>(Post(8, Large(), 1, 2)).empty());
}

TEST_F(OpTableTest, TheOneBeforeIsCommittedAndTheNextOfItsTagIsMissed) {
  EnterThree();
  Post(7, Large());
  Ready(2, 7, Large());
  Ready(3, 7, Large());
  Complete(1);
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kCommit}}, {{Epoch(1), 7, 0, 1}});
  EXPECT_TRUE(Get<PostDone>(out_).at(0).outcome.ok());
  EXPECT_EQ(Get<PostDone>(Post(7, Large())).at(0).outcome.code, Code::kAborted);
}

TEST_F(OpTableTest, AFateThatMakesNoSenseIsLoggedAndTheOpRunsAgain) {
  EnterThree();
  Post(7, Large());
  Post(8, Large());
  Freeze();
  Stopped(1);
  Stopped(2);
  LoseThree({{OpOrdinal(1), Fate::kCommit}});
  EXPECT_EQ(Get<LogLine>(out_).size(), 2u);
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);
}

// ------------------------------------------------------------------------------ members that go

class LocalPairTest : public OpTableTest {
 protected:
  // Members 1 and 4 are here, member 2 is at peer 2.
  LocalPairTest() { Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}})); }
  void WithoutFour(const std::vector<OpFate>& fates) {
    Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}}), fates);
  }
};

TEST_F(LocalPairTest, OneThatNeverPostedIsNotWaitedForAfterTheCommit) {
  Post(7, Large(), 1);
  EXPECT_TRUE(Evict(4).empty());
  Freeze();
  EXPECT_TRUE(ops_.Report().empty());
  WithoutFour({});
  EXPECT_EQ(Get<SendReady>(out_).at(0).posts.size(), 1u);
}

TEST_F(LocalPairTest, AMissedOpEndsAtEachMemberOnce) {
  Post(7, Large(), 4);
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}), {}, {{Epoch(1), 7, 0, 1}});
  ASSERT_EQ(Get<PostDone>(out_).size(), 1u);
  EXPECT_EQ(Get<PostDone>(out_)[0].post.local, LocalId(4));
  EXPECT_EQ(Get<PostDone>(out_)[0].outcome.code, Code::kAborted);
  // Member 4 starts the op again before member 1 posts it for the first time.
  EXPECT_TRUE(Post(7, Large(), 4).empty());
  EXPECT_EQ(Get<PostDone>(Post(7, Large(), 1)).at(0).outcome.code, Code::kAborted);
  EXPECT_EQ(Get<SendReady>(Post(7, Large(), 1)).size(), 1u);
}

TEST_F(LocalPairTest, WhatAMemberMissedGoesWithIt) {
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}), {}, {{Epoch(1), 7, 0, 1}});
  Freeze();
  Enter(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}}));
  EXPECT_EQ(Get<PostDone>(Post(7, Large(), 1)).at(0).outcome.code, Code::kAborted);
}

TEST_F(LocalPairTest, OneThatPostedBeforeTheOpBeganIsAnsweredAtOnce) {
  Post(7, Large(), 4);
  EXPECT_EQ(Get<PostDone>(Evict(4)).at(0).outcome.code, Code::kEvicted);
  EXPECT_TRUE(Get<FinishAttempt>(out_).empty());
  EXPECT_EQ(ops_.open(), 0u);
}

TEST_F(LocalPairTest, ARunningOpIsStoppedAndGoesOnWithTheOthersAfterTheCommit) {
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  EXPECT_EQ(Get<StopAttempt>(Evict(4)).size(), 1u);
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  EXPECT_EQ(Get<PostDone>(Stopped(1)).at(0).post.local, LocalId(4));
  // The op rests, even if other peers go on.
  EXPECT_TRUE(Ready(2, 7, Large()).empty());
  Freeze();
  EXPECT_FALSE(ops_.Report()[0].done);
  WithoutFour({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).at(0).posts, (std::vector<PostRef>{{LocalId(1), 7}}));
}

TEST_F(LocalPairTest, ADoneOpSharesItsOutcomeWithTheOneThatWentMeanwhile) {
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  Ready(2, 7, Large());
  Complete(1);
  EXPECT_TRUE(Evict(4).empty());
  EXPECT_EQ(ops_.PostsOf(LocalId(4)), 1u);
  Freeze();
  WithoutFour({{OpOrdinal(1), Fate::kCommit}});
  const auto posts = Get<PostDone>(out_);
  ASSERT_EQ(posts.size(), 2u);
  EXPECT_TRUE(posts[0].outcome.ok());
  EXPECT_TRUE(posts[1].outcome.ok());
}

TEST_F(LocalPairTest, ADoneOpJudgedRedoGoesOnWithoutTheOneThatWent) {
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  Ready(2, 7, Large());
  Complete(1);
  Freeze();
  EXPECT_TRUE(Evict(4).empty());
  WithoutFour({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<StopAttempt>(out_).size(), 1u);
  Stopped(1);
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).posts.size(), 1u);
}

TEST_F(LocalPairTest, OneThatIsNotInTheNewEpochIsOutOfItsOps) {
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  Freeze();
  Stopped(1);
  WithoutFour({{OpOrdinal(1), Fate::kRedo}});
  const auto posts = Get<PostDone>(out_);
  ASSERT_EQ(posts.size(), 1u);
  EXPECT_EQ(posts[0].outcome.code, Code::kEvicted);
  EXPECT_NE(posts[0].outcome.text.find("not in epoch 2"), std::string::npos);
}

TEST_F(LocalPairTest, AnOpWhoseMembersAllGoIsUndone) {
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  Ready(2, 7, Large());
  Complete(1);
  EXPECT_TRUE(Evict(4).empty());
  EXPECT_EQ(Get<StopAttempt>(Evict(1)).size(), 1u);
  EXPECT_TRUE(ops_.Report().empty());
  Stopped(1);
  EXPECT_EQ(Get<PostDone>(out_).size(), 2u);
  EXPECT_FALSE(Get<FinishAttempt>(out_).at(0).commit);
  EXPECT_EQ(ops_.open(), 0u);
  history_.Clear();
  ops_.Reset();
  ops_.CheckInvariants();
}

// ------------------------------------------------------------------------------ cancelled ops

using control::CancelOp;

class CancelTest : public KindsTest {
 protected:
  // Commits an epoch with the same three members, which judges the ops.
  void Judge(uint64_t epoch, const std::vector<OpFate>& fates) {
    Enter(MakePrepare(epoch, epoch - 1, 1, epoch, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), fates);
  }
  static CancelOp Asking(uint64_t after, uint64_t member = 1) {
    return {kGroup, MemberId(member), Epoch(after),
            ToString(MemberId(member)) + " cancelled all-reduce tag 7"};
  }
  // An all-reduce with tag 7 that others have aborted.
  static control::MissedOp Missed() {
    return {Epoch(1), 7, 0, static_cast<uint32_t>(OpKind::kAllReduce), 0};
  }
};

// Members 1, 4 and 5 are here; member 2 is at another peer.
class CancelOfManyTest : public CancelTest {
 protected:
  static control::PrepareEpoch Four(uint64_t epoch, uint64_t boundary, uint64_t last_freeze) {
    return MakePrepare(epoch, epoch - 1, boundary, last_freeze,
                       {{1, 1, 1}, {4, 1, 1}, {5, 1, 1}, {2, 2, 1}});
  }
  CancelOfManyTest() { Enter(Four(1, 1, 0)); }
};

TEST_F(CancelOfManyTest, WhatWasNeverAnnouncedEndsAtAllMembersToo) {
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  EXPECT_EQ(Sent<CancelOp>(Cancel(7, 1)), std::vector<CancelOp>{Asking(0)});
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  EXPECT_EQ(Sent<CancelOp>(AskAgain()).size(), 1u);
  Freeze();
  const auto report = ops_.Report();
  ASSERT_EQ(report.size(), 1u);
  EXPECT_TRUE(report[0].cancelled && !report[0].done && report[0].matches.empty());
  Enter(Four(2, 1, 2), {{report[0].ordinal, Fate::kAbort}});
  EXPECT_TRUE(Get<FinishAttempt>(out_).empty()) << "there was no attempt";
  const auto done = Get<PostDone>(out_);
  ASSERT_EQ(done.size(), 2u);
  for (const PostDone& each : done) EXPECT_EQ(each.outcome.code, Code::kAborted);
  // Members 1 and 4 start it again. Member 5 starts it for the first time.
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  EXPECT_EQ(Get<PostDone>(Post(7, Large(), 5)).at(0).outcome.code, Code::kAborted);
  EXPECT_EQ(Get<SendReady>(Post(7, Large(), 5)).size(), 1u);
}

TEST_F(CancelOfManyTest, WhatIsAnnouncedMeanwhileIsAskedForOnce) {
  Post(7, Large(), 1);
  Cancel(7, 1);
  Post(7, Large(), 4);
  EXPECT_EQ(Get<SendReady>(Post(7, Large(), 5)).size(), 1u);
  EXPECT_TRUE(Sent<CancelOp>(out_).empty());
  Freeze();
  Stopped(1);
  EXPECT_TRUE(ops_.Report().at(0).cancelled);
}

TEST_F(CancelTest, WhatWasAnnouncedIsAbortedByTheCoordinator) {
  EnterThree();
  Post(7, Large());
  Ready(2, 7, Large());
  Cancel(7);
  EXPECT_EQ(Sent<CancelOp>(out_), std::vector<CancelOp>{Asking(0)});
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  EXPECT_TRUE(Get<StopAttempt>(out_).empty()) << "it may still be done in time";
  EXPECT_TRUE(Cancel(7).empty()) << "it is asked for once";
  Freeze();
  Stopped(1);
  const auto report = ops_.Report();
  ASSERT_EQ(report.size(), 1u);
  EXPECT_TRUE(report[0].cancelled);
  EXPECT_FALSE(report[0].done);
  EXPECT_EQ(report[0].matches, (std::vector<control::OpMatch>{{PeerId(2), OpOrdinal(207)}}))
      << "the coordinator must see who has announced it";
  Judge(2, {{OpOrdinal(1), Fate::kAbort}});
  const PostDone done = Get<PostDone>(out_).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("all-reduce tag 7 aborted: test"), std::string::npos)
      << done.outcome.text;
  EXPECT_EQ(ops_.open(), 0u);
  EXPECT_EQ(counters_.aborted, 1u);
}

TEST_F(CancelTest, ARedoMeansThatItWasTooLate) {
  EnterThree();
  Post(7, Large());
  Cancel(7);
  Freeze();
  Stopped(1);
  Judge(2, {{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);
  EXPECT_TRUE(Sent<CancelOp>(out_).empty());
  EXPECT_TRUE(AskAgain().empty());
  Freeze();
  Stopped(1, 2);
  EXPECT_FALSE(ops_.Report().at(0).cancelled);
  Judge(3, {{OpOrdinal(1), Fate::kRedo}});
  // The trainer may ask again.
  EXPECT_EQ(Sent<CancelOp>(Cancel(7)), std::vector<CancelOp>{Asking(3)});
}

TEST_F(CancelTest, WhileFrozenItIsAskedForAfterTheCommit) {
  EnterThree();
  Post(7, Large());
  Freeze();
  Stopped(1);
  // The report may be on its way.
  EXPECT_TRUE(Cancel(7).empty());
  EXPECT_FALSE(ops_.Report().at(0).cancelled);
  EXPECT_TRUE(AskAgain().empty());
  Judge(2, {{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);
  EXPECT_EQ(Sent<CancelOp>(out_), std::vector<CancelOp>{Asking(2)});
  Freeze();
  Stopped(1, 2);
  EXPECT_TRUE(ops_.Report().at(0).cancelled);
  Judge(3, {{OpOrdinal(1), Fate::kAbort}});
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kAborted);
}

// Members 1 and 2 cancel the op at the same time. The other peer's cancel is judged first.
TEST_F(CancelTest, CancelsThatCrossEndTheOpOnce) {
  EnterThree();
  Freeze();
  Post(7, Large());
  EXPECT_TRUE(Cancel(7).empty()) << "the report was sent without it";
  EXPECT_TRUE(ops_.Report().empty());
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {}, {Missed()});
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kAborted);
  EXPECT_TRUE(Sent<CancelOp>(out_).empty());
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u) << "nothing is owed any more";
}

TEST_F(CancelTest, WhileFrozenWhatWasNeverAnnouncedIsAskedForAfterTheCommit) {
  EnterThree();
  Freeze();
  Post(7, Large());
  EXPECT_TRUE(Cancel(7).empty());
  Judge(2, {});
  EXPECT_EQ(Sent<CancelOp>(out_), std::vector<CancelOp>{Asking(2)});
}

// ------------------------------------------------------------------------------ what is owed

TEST_F(CancelTest, WhatIsOwedMeetsNoOpOfAnotherKind) {
  EnterThree();
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {}, {Missed()});
  EXPECT_EQ(Get<SendReady>(Post(7, OfKind(OpKind::kAllGather, 3))).size(), 2u);
  // The member has left the missed op out for good.
  EXPECT_TRUE(ops_.Report().size() == 1);
  Ready(2, 7, OfKind(OpKind::kAllGather, 3), 2);
  Ready(3, 7, OfKind(OpKind::kAllGather, 3), 2);
  Complete(1, 2);
  Done(2, 1, 2);
  ASSERT_EQ(Get<PostDone>(Done(3, 1, 2)).size(), 1u);
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u);
}

TEST_F(CancelTest, SeveralThatAreOwedMeetTheirOpsInOrder) {
  EnterThree();
  control::MissedOp gather = Missed();
  gather.kind = static_cast<uint32_t>(OpKind::kAllGather);
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {}, {Missed()});
  Freeze();
  Enter(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {}, {gather});
  EXPECT_EQ(Get<PostDone>(Post(7, Large())).size(), 1u);
  EXPECT_EQ(Get<PostDone>(Post(7, OfKind(OpKind::kAllGather, 3))).size(), 1u);
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u);
}

TEST_F(CancelTest, WhatIsOwedEndsAtTheNextBoundary) {
  EnterThree();
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {}, {Missed()});
  Pass(1, {Epoch(1), 1});
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u);
}

TEST_F(CancelTest, WhatComesAfterTheBoundaryIsNotOwed) {
  EnterThree();
  Pass(1, {Epoch(1), 1});
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {}, {Missed()});
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u);
}

TEST_F(CancelTest, WhatWasPostedAfterTheBoundaryIsAnotherOp) {
  EnterThree();
  Pass(1, {Epoch(1), 1});
  Freeze();
  ops_.Post({PostOf(1, 7, Large()), MemberId(1), Epoch(1), 1}, now_, &out_);
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {}, {Missed()});
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);
}

// ------------------------------------------------------------------------------ stranded ops

// Member 1 calls the op at boundary 1. Then an epoch is made at boundary 2.
class StrandedTest : public CancelTest {
 protected:
  StrandedTest() {
    EnterThree();
    Post(7, Large());
    Enter(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}));
  }
  Actions& ReadyAt(uint64_t boundary) {
    PeerReady ready = ReadyOf(2, 7, Large());
    ready.boundary = Epoch(boundary);
    return Ready(ready);
  }
};

TEST_F(StrandedTest, AnOpThatAnotherMemberCallsAtALaterBoundaryEndsWithBothNumbers) {
  Pass(1, {Epoch(2), 0});
  EXPECT_TRUE(Sent<CancelOp>(out_).empty()) << "the others may have called it in time";
  const auto asked = Sent<CancelOp>(ReadyAt(2));
  ASSERT_EQ(asked.size(), 1u);
  const std::string why = "m1 called it at boundary 1, and m2 has called it at boundary 2";
  EXPECT_EQ(asked[0].what, "all-reduce tag 7 cannot end well: " + why);
  EXPECT_TRUE(Sent<CancelOp>(ReadyAt(2)).empty()) << "it is asked for once";
  Freeze();
  Stopped(1);
  EXPECT_TRUE(ops_.Report().at(0).cancelled);
  Enter(MakePrepare(3, 2, 2, 3, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), {{OpOrdinal(1), Fate::kAbort}});
  const PostDone done = Get<PostDone>(out_).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_EQ(done.outcome.text,
            "all-reduce tag 7 aborted: " + why +
                "; the source is unchanged: look at the world and start it again");
  // Started again, it is called at the boundary of the others.
  EXPECT_EQ(Get<SendReady>(Post(7, Large(), 1, 2)).at(0).boundary, Epoch(2));
}

TEST_F(StrandedTest, ItWaitsWhileStartedAgainItWouldNotMeetTheOthersEither) {
  EXPECT_TRUE(Sent<CancelOp>(ReadyAt(2)).empty());
  Pass(1, {Epoch(2), 0});
  EXPECT_EQ(Sent<CancelOp>(out_).size(), 1u);
}

TEST_F(StrandedTest, WhatAllHaveCalledGoesOnAcrossBoundaries) {
  ReadyAt(1);
  Ready(3, 7, Large());
  for (uint64_t step = 0; step < 5; ++step) {
    Pass(1, {Epoch(2), step});
    EXPECT_TRUE(Sent<CancelOp>(out_).empty());
  }
}

TEST_F(StrandedTest, AMemberThatGoesOnWithoutACallEndsTheOpTwoBoundariesLater) {
  Pass(1, {Epoch(2), 0});
  Pass(1, {Epoch(2), 1});
  EXPECT_TRUE(Sent<CancelOp>(out_).empty()) << "a READY may be on its way";
  Pass(1, {Epoch(2), 2});
  const auto asked = Sent<CancelOp>(out_);
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].what,
            "all-reduce tag 7 cannot end well: m1 called it at boundary 1, and m2 has not called "
            "it and has passed boundary 2");
}

TEST_F(StrandedTest, ReadysThatNoLocalMemberCanMeetAreForgotten) {
  PeerReady ready = ReadyOf(2, 8, Large());
  Ready(ready);
  const uint64_t before = DigestOf(ops_);
  Pass(1, {Epoch(2), 0});
  OpTable other = ops_;
  EXPECT_NE(DigestOf(ops_), before);
  // The limit on READYs of one tag counts them no more.
  for (int i = 0; i < 2; ++i) {
    ready.ordinal = OpOrdinal(300 + static_cast<uint64_t>(i));
    ready.boundary = Epoch(2);
    EXPECT_TRUE(Get<BreakLink>(Ready(ready)).empty());
  }
}

TEST_F(CancelOfManyTest, AMemberHereThatPassesABoundaryWithoutTheCallEndsTheOp) {
  Post(7, Large(), 1);
  Enter(Four(2, 2, 0));
  Pass(1, {Epoch(2), 0});
  EXPECT_TRUE(Sent<CancelOp>(out_).empty());
  Pass(4, {Epoch(2), 0});
  const auto asked = Sent<CancelOp>(out_);
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_NE(asked[0].what.find("m4 has not called it and has passed boundary 2"), std::string::npos)
      << asked[0].what;
}

// ------------------------------------------------------------------------------ again

TEST_F(CancelTest, ACoordinatorThatComesBackIsAskedAgain) {
  EnterThree();
  Post(7, Large());
  Post(8, Large());
  EXPECT_TRUE(AskAgain().empty());
  Cancel(7);
  EXPECT_EQ(Sent<CancelOp>(AskAgain()), std::vector<CancelOp>{Asking(0)});
  EXPECT_EQ(Sent<CancelOp>(AskAgain()).size(), 1u);
  Freeze();
  EXPECT_TRUE(AskAgain().empty()) << "the report says it";
}

TEST_F(CancelTest, WhatIsDoneIsNotCancelled) {
  EnterThree();
  RunToDone(7);
  EXPECT_TRUE(Cancel(7).empty());
  Done(2, 1);
  EXPECT_TRUE(Get<PostDone>(Done(3, 1)).at(0).outcome.ok());
  EXPECT_TRUE(Cancel(7).empty()) << "it is over";
}

TEST_F(CancelTest, WhatIsDoneSinceIsNotAskedForAgain) {
  EnterThree();
  Post(7, Large());
  Cancel(7);
  Ready(2, 7, Large());
  Ready(3, 7, Large());
  ASSERT_EQ(Get<SendDone>(Complete(1)).size(), 2u);
  EXPECT_TRUE(AskAgain().empty());
  Done(2, 1);
  EXPECT_TRUE(Get<PostDone>(Done(3, 1)).at(0).outcome.ok());
}

TEST_F(CancelTest, WhatLingersIsNotCancelledAnyMore) {
  EnterThree();
  Post(7, Small());
  Cancel(7);
  Ready(2, 7, Small());
  Ready(3, 7, Small());
  ASSERT_EQ(Get<PostDone>(Complete(1, 0, std::string(16, 'r'))).size(), 1u);
  EXPECT_TRUE(AskAgain().empty());
  EXPECT_TRUE(Cancel(7).empty());
  // The next op of this name is another op.
  Post(7, Small());
  Freeze();
  for (const control::OpReport& report : ops_.Report()) EXPECT_FALSE(report.cancelled);
}

TEST_F(CancelTest, ForOneMemberItEndsAtTheOtherLocalMembersToo) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}));
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  EXPECT_EQ(Sent<CancelOp>(Cancel(7, 4)), std::vector<CancelOp>{Asking(0, 4)});
  Freeze();
  Stopped(1);
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}), {{OpOrdinal(1), Fate::kAbort}});
  const auto done = Get<PostDone>(out_);
  ASSERT_EQ(done.size(), 2u);
  for (const PostDone& each : done) EXPECT_EQ(each.outcome.code, Code::kAborted);
}

TEST_F(CancelTest, OfAMemberThatIsOutDoesNothing) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}));
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  Evict(4);
  EXPECT_TRUE(Cancel(7, 4).empty());
  EXPECT_TRUE(Cancel(99, 1).empty());
}

TEST_F(CancelTest, IsPartOfTheDigest) {
  EnterThree();
  Post(7, Large());
  const uint64_t before = DigestOf(ops_);
  Cancel(7);
  EXPECT_NE(DigestOf(ops_), before);
}

TEST_F(OpTableTest, CountsTheFatesAndNotesWhenTheFirstRedoneOpEnds) {
  EnterThree();
  Post(7, Large());
  Post(8, Desc(1 << 20, DType::kFloat32, OnFault::kAbort));
  Freeze();
  Stopped(1);
  Stopped(2);
  out_.clear();
  history_.Add(RecordOf(MakePrepare(2, 1, 1, 2, {{1, 1, 1}})));
  const FateCounts counts =
      ops_.Commit({{OpOrdinal(1), Fate::kRedo}, {OpOrdinal(2), Fate::kAbort}}, {}, {}, now_, &out_);
  EXPECT_EQ(counts.redone, 1u);
  EXPECT_EQ(counts.aborted, 1u);
  EXPECT_EQ(counts.committed, 0u);
  EXPECT_FALSE(ops_.resumed());
  Complete(1, 2);
  EXPECT_TRUE(ops_.resumed());
}

}  // namespace
}  // namespace longhaul::peerd
