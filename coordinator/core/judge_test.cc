#include "coordinator/core/judge.h"

#include <string>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using control::Fate;
using control::OpReport;

const PeerId kA(1), kB(2), kC(3);

OpReport Op(uint64_t ordinal, bool done, std::vector<control::OpMatch> matches) {
  OpReport op;
  op.ordinal = OpOrdinal(ordinal);
  op.done = done;
  op.matches = std::move(matches);
  return op;
}
control::OpMatch At(PeerId peer, uint64_t ordinal) { return {peer, OpOrdinal(ordinal)}; }

FatesRecord Of(const std::vector<FatesRecord>& fates, PeerId peer) {
  for (const FatesRecord& record : fates) {
    if (record.peer == peer) return record;
  }
  return {peer, {}, {}};
}
Fate FateOf(const std::vector<FatesRecord>& fates, PeerId peer, uint64_t ordinal) {
  for (const control::OpFate& fate : Of(fates, peer).fates) {
    if (fate.ordinal == OpOrdinal(ordinal)) return fate.fate;
  }
  ADD_FAILURE() << "no fate of o" << ordinal;
  return Fate::kRedo;
}

TEST(Judge, NothingReportedNothingJudged) { EXPECT_TRUE(Judge({{kA, {}}, {kB, {}}}).empty()); }

TEST(Judge, DoneAtAllCommits) {
  const std::vector<FatesRecord> fates =
      Judge({{kA, {Op(1, true, {At(kB, 5)})}}, {kB, {Op(5, true, {At(kA, 1)})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
}

TEST(Judge, NotDoneSomewhereIsRedoneByAll) {
  const std::vector<FatesRecord> fates = Judge({{kA, {Op(1, true, {At(kB, 5), At(kC, 9)})}},
                                                {kB, {Op(5, false, {At(kA, 1)})}},
                                                {kC, {Op(9, true, {At(kA, 1), At(kB, 5)})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
  EXPECT_EQ(FateOf(fates, kC, 9), Fate::kRedo);
}

TEST(Judge, SettledAtOneCommitsAtTheOther) {
  const std::vector<FatesRecord> fates =
      Judge({{kA, {Op(1, true, {At(kB, 5)})}}, {kB, {Op(6, false, {})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kB, 6), Fate::kRedo);
}

TEST(Judge, WhoDoesNotSurviveCountsForNothing) {
  const std::vector<FatesRecord> fates = Judge(
      {{kA, {Op(1, true, {At(kB, 5), At(kC, 9)})}}, {kB, {Op(5, true, {At(kA, 1), At(kC, 9)})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
}

TEST(Judge, NotDoneWithoutMatchesIsRedone) {
  const std::vector<FatesRecord> fates = Judge({{kA, {Op(1, false, {})}}, {kB, {}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
}

TEST(Judge, AbortTakesThePlaceOfRedoOnly) {
  OpReport not_done = Op(1, false, {At(kB, 5)});
  OpReport done_elsewhere_not = Op(5, true, {At(kA, 1)});
  OpReport all_done = Op(6, true, {At(kA, 2)});
  for (OpReport* op : {&not_done, &done_elsewhere_not, &all_done}) op->abort_on_fault = true;
  const std::vector<FatesRecord> fates =
      Judge({{kA, {not_done, Op(2, true, {At(kB, 6)})}}, {kB, {done_elsewhere_not, all_done}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 6), Fate::kCommit);
}

TEST(Judge, OneFatePerReportedOpInItsOrder) {
  const std::vector<FatesRecord> fates =
      Judge({{kA, {Op(4, false, {}), Op(2, true, {}), Op(3, false, {})}}});
  ASSERT_EQ(fates.size(), 1u);
  ASSERT_EQ(fates[0].fates.size(), 3u);
  EXPECT_EQ(fates[0].fates[0].ordinal, OpOrdinal(4));
  EXPECT_EQ(fates[0].fates[1].ordinal, OpOrdinal(2));
  EXPECT_EQ(fates[0].fates[2].ordinal, OpOrdinal(3));
}

OpReport Aborting(uint64_t ordinal, uint64_t tag, std::vector<control::OpMatch> matches) {
  OpReport op = Op(ordinal, false, std::move(matches));
  op.boundary = Epoch(4);
  op.tag = tag;
  op.abort_on_fault = true;
  return op;
}

TEST(Judge, AnAbortedOpIsMissedByWhoHasNotAnnouncedIt) {
  const std::vector<FatesRecord> fates =
      Judge({{kA, {Aborting(1, 7, {})}}, {kB, {Aborting(5, 8, {})}}, {kC, {}}});
  EXPECT_EQ(Of(fates, kA).missed, (std::vector<control::MissedOp>{{Epoch(4), 8}}));
  EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}}));
  EXPECT_EQ(Of(fates, kC).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}, {Epoch(4), 8}}));
}

TEST(Judge, AnOpWhoseReadyHadNotArrivedIsNotMissed) {
  const std::vector<FatesRecord> fates = Judge({{kA, {Aborting(1, 7, {})}},
                                                {kB, {Aborting(5, 7, {At(kA, 1)})}},
                                                {kC, {Aborting(9, 7, {})}}});
  for (const FatesRecord& record : fates) EXPECT_TRUE(record.missed.empty());
  EXPECT_EQ(fates.size(), 3u);
}

TEST(Judge, TheNextOpOfATagIsMissedByWhoStillWaitsForDonesOfTheOneBefore) {
  // A has settled its o1 and has announced o2; B's o5 was o1 and is done.
  OpReport before = Aborting(5, 7, {At(kA, 1)});
  before.done = true;
  const std::vector<FatesRecord> fates = Judge({{kA, {Aborting(2, 7, {})}}, {kB, {before}}});
  EXPECT_EQ(FateOf(fates, kA, 2), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
  EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}}));
  EXPECT_TRUE(Of(fates, kA).missed.empty());
}

TEST(Judge, TheNextOpOfATagIsMissedByWhoWasKeptFromTheResultOfTheOneBefore) {
  // A is done with o1, which B knows as o5 and has A's READY of, or not; A has announced o2.
  for (const bool arrived : {true, false}) {
    OpReport first = Op(1, true, {At(kB, 5)});
    first.boundary = Epoch(4);
    first.tag = 7;
    OpReport behind =
        Op(5, false, arrived ? std::vector{At(kA, 1)} : std::vector<control::OpMatch>());
    behind.boundary = Epoch(4);
    behind.tag = 7;
    const std::vector<FatesRecord> fates =
        Judge({{kA, {first, Aborting(2, 7, {})}}, {kB, {behind}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
    EXPECT_EQ(FateOf(fates, kA, 2), Fate::kAbort);
    EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}})) << arrived;
    EXPECT_TRUE(Of(fates, kA).missed.empty());
  }
}

TEST(Judge, WhatIsRedoneOrCommittedIsNotMissed) {
  OpReport redo = Aborting(1, 7, {});
  redo.abort_on_fault = false;
  EXPECT_TRUE(Of(Judge({{kA, {redo}}, {kB, {}}}), kB).missed.empty());
  OpReport done = Aborting(1, 7, {At(kB, 5)});
  done.done = true;
  EXPECT_TRUE(Of(Judge({{kA, {done}}, {kB, {}}}), kB).missed.empty());
}

// Every combination of what three survivors can truthfully report of one op (not yet announced,
// announced, done, settled) gives the same judgement at all of them.
TEST(Judge, AgreesAtAllSurvivorsForEveryPossibleState) {
  enum State { kUnposted, kAnnounced, kDone, kSettled };
  const PeerId peers[] = {kA, kB, kC};
  int judged = 0;
  for (int code = 0; code < 64; ++code) {
    const int states[] = {code & 3, (code >> 2) & 3, (code >> 4) & 3};
    bool some_done = false, some_settled = false, some_unposted = false, some_not_done = false;
    for (int s : states) {
      some_done = some_done || s >= kDone;
      some_settled = some_settled || s == kSettled;
      some_unposted = some_unposted || s == kUnposted;
      some_not_done = some_not_done || s < kDone;
    }
    // Done takes everybody's READY; settled takes everybody's DONE.
    if ((some_done && some_unposted) || (some_settled && some_not_done)) continue;
    Reports reports;
    for (int i = 0; i < 3; ++i) {
      reports[peers[i]];
      if (states[i] == kUnposted || states[i] == kSettled) continue;
      std::vector<control::OpMatch> matches;
      for (int j = 0; j < 3; ++j) {
        if (j != i && states[j] != kUnposted) matches.push_back(At(peers[j], 10 + j));
      }
      reports[peers[i]].push_back(Op(10 + i, states[i] == kDone, matches));
    }
    std::set<Fate> fates;
    for (const FatesRecord& record : Judge(reports)) {
      for (const control::OpFate& fate : record.fates) fates.insert(fate.fate);
      EXPECT_TRUE(record.missed.empty());
    }
    EXPECT_LE(fates.size(), 1u) << "states " << code;
    if (some_settled && !fates.empty()) {
      EXPECT_EQ(*fates.begin(), Fate::kCommit) << code;
    }
    if (some_not_done && !fates.empty()) {
      EXPECT_EQ(*fates.begin(), Fate::kRedo) << code;
    }
    ++judged;
  }
  EXPECT_GT(judged, 15);
}

}  // namespace
}  // namespace longhaul::coordinator
