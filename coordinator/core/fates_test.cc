#include "coordinator/core/fates.h"

#include <algorithm>
#include <ctime>
#include <string>

#include "base/prng.h"
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

TEST(Fates, NothingReportedNoFate) { EXPECT_TRUE(FatesOf({{kA, {}}, {kB, {}}}).empty()); }

TEST(Fates, DoneAtAllCommits) {
  const std::vector<FatesRecord> fates =
      FatesOf({{kA, {Op(1, true, {At(kB, 5)})}}, {kB, {Op(5, true, {At(kA, 1)})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
}

TEST(Fates, NotDoneSomewhereIsRedoneByAll) {
  const std::vector<FatesRecord> fates = FatesOf({{kA, {Op(1, true, {At(kB, 5), At(kC, 9)})}},
                                                  {kB, {Op(5, false, {At(kA, 1)})}},
                                                  {kC, {Op(9, true, {At(kA, 1), At(kB, 5)})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
  EXPECT_EQ(FateOf(fates, kC, 9), Fate::kRedo);
}

TEST(Fates, SettledAtOneCommitsAtTheOther) {
  const std::vector<FatesRecord> fates =
      FatesOf({{kA, {Op(1, true, {At(kB, 5)})}}, {kB, {Op(6, false, {})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kB, 6), Fate::kRedo);
}

TEST(Fates, WhoDoesNotSurviveCountsForNothing) {
  const std::vector<FatesRecord> fates = FatesOf(
      {{kA, {Op(1, true, {At(kB, 5), At(kC, 9)})}}, {kB, {Op(5, true, {At(kA, 1), At(kC, 9)})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
}

TEST(Fates, NotDoneWithoutMatchesIsRedone) {
  const std::vector<FatesRecord> fates = FatesOf({{kA, {Op(1, false, {})}}, {kB, {}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
}

TEST(Fates, AbortTakesThePlaceOfRedoOnly) {
  OpReport not_done = Op(1, false, {At(kB, 5)});
  OpReport done_elsewhere_not = Op(5, true, {At(kA, 1)});
  OpReport all_done = Op(6, true, {At(kA, 2)});
  for (OpReport* op : {&not_done, &done_elsewhere_not, &all_done}) op->abort_on_fault = true;
  const std::vector<FatesRecord> fates =
      FatesOf({{kA, {not_done, Op(2, true, {At(kB, 6)})}}, {kB, {done_elsewhere_not, all_done}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 6), Fate::kCommit);
}

TEST(Fates, OneFatePerReportedOpInItsOrder) {
  const std::vector<FatesRecord> fates =
      FatesOf({{kA, {Op(4, false, {}), Op(2, true, {}), Op(3, false, {})}}});
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

// Peer A aborts on a fault, and peer B retries. Either each has the other's READY, or neither has
// it yet. Peer C is gone, and had not announced the op.
TEST(Fates, AnOpThatOneAbortsAndAnotherRetriesIsRedoneByBothWhichRefuseIt) {
  for (const bool matched : {true, false}) {
    OpReport retried = Aborting(5, 7, {});
    retried.abort_on_fault = false;
    std::vector<control::OpMatch> matches;
    if (matched) matches = {At(kB, 5)};
    const std::vector<FatesRecord> fates =
        FatesOf({{kA, {Aborting(1, 7, matches)}}, {kB, {retried}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
    EXPECT_TRUE(Of(fates, kA).missed.empty() && Of(fates, kB).missed.empty());
  }
}

// Peer B has announced only the earlier op of the same name. It is another op, so its `on_fault`
// may differ.
TEST(Fates, TheOpBeforeOfWhoIsBehindDoesNotDiffer) {
  OpReport before = Aborting(5, 7, {At(kA, 1)});
  before.abort_on_fault = false;
  before.done = true;
  const std::vector<FatesRecord> fates =
      FatesOf({{kA, {Aborting(2, 7, {})}}, {kB, {before}}, {kC, {Aborting(9, 7, {})}}});
  EXPECT_EQ(FateOf(fates, kA, 2), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kC, 9), Fate::kAbort);
  EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}}));
}

TEST(Fates, AnAbortedOpIsMissedByWhoHasNotAnnouncedIt) {
  const std::vector<FatesRecord> fates =
      FatesOf({{kA, {Aborting(1, 7, {})}}, {kB, {Aborting(5, 8, {})}}, {kC, {}}});
  EXPECT_EQ(Of(fates, kA).missed, (std::vector<control::MissedOp>{{Epoch(4), 8}}));
  EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}}));
  EXPECT_EQ(Of(fates, kC).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}, {Epoch(4), 8}}));
}

TEST(Fates, AnOpWhoseReadyHadNotArrivedIsNotMissed) {
  const std::vector<FatesRecord> fates = FatesOf({{kA, {Aborting(1, 7, {})}},
                                                  {kB, {Aborting(5, 7, {At(kA, 1)})}},
                                                  {kC, {Aborting(9, 7, {})}}});
  for (const FatesRecord& record : fates) EXPECT_TRUE(record.missed.empty());
  EXPECT_EQ(fates.size(), 3u);
}

TEST(Fates, TheNextOpOfATagIsMissedByWhoStillWaitsForDonesOfTheOneBefore) {
  // A has settled its o1 and has announced o2. B's o5 is the op that A calls o1, and is done.
  OpReport before = Aborting(5, 7, {At(kA, 1)});
  before.done = true;
  const std::vector<FatesRecord> fates = FatesOf({{kA, {Aborting(2, 7, {})}}, {kB, {before}}});
  EXPECT_EQ(FateOf(fates, kA, 2), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
  EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}}));
  EXPECT_TRUE(Of(fates, kA).missed.empty());
}

TEST(Fates, TheNextOpOfATagIsMissedByWhoWasKeptFromTheResultOfTheOneBefore) {
  // A is done with o1 and has announced o2. B calls the first op o5; A's READY of it has arrived at
  // B, or not.
  for (const bool arrived : {true, false}) {
    OpReport first = Op(1, true, {At(kB, 5)});
    first.boundary = Epoch(4);
    first.tag = 7;
    OpReport behind =
        Op(5, false, arrived ? std::vector{At(kA, 1)} : std::vector<control::OpMatch>());
    behind.boundary = Epoch(4);
    behind.tag = 7;
    const std::vector<FatesRecord> fates =
        FatesOf({{kA, {first, Aborting(2, 7, {})}}, {kB, {behind}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
    EXPECT_EQ(FateOf(fates, kA, 2), Fate::kAbort);
    EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}})) << arrived;
    EXPECT_TRUE(Of(fates, kA).missed.empty());
  }
}

TEST(Fates, WhatIsRedoneOrCommittedIsNotMissed) {
  OpReport redo = Aborting(1, 7, {});
  redo.abort_on_fault = false;
  EXPECT_TRUE(Of(FatesOf({{kA, {redo}}, {kB, {}}}), kB).missed.empty());
  OpReport done = Aborting(1, 7, {At(kB, 5)});
  done.done = true;
  EXPECT_TRUE(Of(FatesOf({{kA, {done}}, {kB, {}}}), kB).missed.empty());
}

// Tries every combination of states that one op can have at three survivors: not yet announced,
// announced, done, settled. The op gets the same fate at all of them.
TEST(Fates, AgreesAtAllSurvivorsForEveryPossibleState) {
  enum State { kUnposted, kAnnounced, kDone, kSettled };
  const PeerId peers[] = {kA, kB, kC};
  int decided = 0;
  for (int code = 0; code < 64; ++code) {
    const int states[] = {code & 3, (code >> 2) & 3, (code >> 4) & 3};
    bool some_done = false, some_settled = false, some_unposted = false, some_not_done = false;
    for (int s : states) {
      some_done = some_done || s >= kDone;
      some_settled = some_settled || s == kSettled;
      some_unposted = some_unposted || s == kUnposted;
      some_not_done = some_not_done || s < kDone;
    }
    // A peer is done only with the READY of all, and has settled only with the DONE of all.
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
    for (const FatesRecord& record : FatesOf(reports)) {
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
    ++decided;
  }
  EXPECT_GT(decided, 15);
}

// ---- cancelled ops

OpReport Named(uint64_t ordinal, bool done, std::vector<control::OpMatch> matches,
               uint64_t set = 0) {
  OpReport op = Op(ordinal, done, std::move(matches));
  op.boundary = Epoch(4);
  op.tag = 7;
  op.set = set;
  return op;
}
OpReport Cancelled(OpReport op) {
  op.cancelled = true;
  return op;
}

TEST(FatesOfCancelled, AllThatHaveAnnouncedAbortItAndTheOthersAreToldAsMissed) {
  for (const bool arrived : {true, false}) {
    std::vector<control::OpMatch> a, b;
    if (arrived) a = {At(kB, 5)}, b = {At(kA, 1)};
    const std::vector<FatesRecord> fates =
        FatesOf({{kA, {Cancelled(Named(1, false, a))}}, {kB, {Named(5, false, b)}}, {kC, {}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kAbort);
    EXPECT_TRUE(Of(fates, kA).missed.empty());
    EXPECT_TRUE(Of(fates, kB).missed.empty());
    EXPECT_EQ(Of(fates, kC).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}}));
  }
}

TEST(FatesOfCancelled, AnOpOfAnotherKindUnderTheSameTagIsAnotherOp) {
  OpReport cancelled = Cancelled(Named(1, false, {}));
  cancelled.kind = 1;
  cancelled.step = 6;
  OpReport other = Named(5, false, {});
  other.kind = 3;
  const std::vector<FatesRecord> fates = FatesOf({{kA, {cancelled}}, {kB, {other}}, {kC, {}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
  const std::vector<control::MissedOp> missed{{Epoch(4), 7, 0, 1, 6}};
  EXPECT_EQ(Of(fates, kB).missed, missed);
  EXPECT_EQ(Of(fates, kC).missed, missed);
}

TEST(FatesOfCancelled, WhatIsMissedWasPostedAtTheLatestStepOfAll) {
  OpReport first = Cancelled(Named(1, false, {}));
  first.step = 2;
  OpReport second = Cancelled(Named(5, false, {}));
  second.step = 3;
  const std::vector<FatesRecord> fates = FatesOf({{kA, {first}}, {kB, {second}}, {kC, {}}});
  EXPECT_EQ(Of(fates, kC).missed, (std::vector<control::MissedOp>{{Epoch(4), 7, 0, 0, 3}}));
}

TEST(FatesOfCancelled, OtherOpsGetTheirFateAsAlways) {
  OpReport other = Named(2, false, {});
  other.tag = 8;
  OpReport kept = Named(6, true, {At(kA, 9)});
  kept.tag = 9;
  const std::vector<FatesRecord> fates =
      FatesOf({{kA, {Cancelled(Named(1, false, {})), other}}, {kB, {Named(5, false, {}), kept}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kA, 2), Fate::kRedo);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 6), Fate::kCommit);
}

TEST(FatesOfCancelled, ItIsTooLateWhenAPeerIsDone) {
  // The peer that is done has cancelled it itself, or another one has.
  for (const bool by_the_done : {true, false}) {
    OpReport done = Named(1, true, {At(kB, 5), At(kC, 9)});
    OpReport not_done = Named(5, false, {At(kA, 1)});
    (by_the_done ? done : not_done).cancelled = true;
    const std::vector<FatesRecord> fates =
        FatesOf({{kA, {done}}, {kB, {not_done}}, {kC, {Named(9, false, {At(kA, 1)})}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo) << by_the_done;
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo) << by_the_done;
    EXPECT_EQ(FateOf(fates, kC, 9), Fate::kRedo) << by_the_done;
    for (const PeerId peer : {kA, kB, kC}) EXPECT_TRUE(Of(fates, peer).missed.empty());
  }
}

TEST(FatesOfCancelled, WhatAllAreDoneWithIsKept) {
  const std::vector<FatesRecord> fates = FatesOf(
      {{kA, {Cancelled(Named(1, true, {At(kB, 5)}))}}, {kB, {Named(5, true, {At(kA, 1)})}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kCommit);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kCommit);
}

// Peer A has answered its trainers: its first op lingers, and it may have announced the next one.
TEST(FatesOfCancelled, ItIsTooLateWhenASmallOpIsAnsweredAlsoByAPeerThatIsAtTheNextOne) {
  for (int variant = 0; variant < 8; ++variant) {
    const bool at_the_next = (variant & 1) != 0;
    const bool flag_left = (variant & 2) != 0;
    const bool c_is_done = (variant & 4) != 0;
    OpReport first = Named(1, true, {At(kB, 5), At(kC, 9)});
    first.cancelled = flag_left;
    std::vector<OpReport> of_a = {first};
    if (at_the_next) of_a.push_back(Named(2, false, {}));
    const std::vector<FatesRecord> fates =
        FatesOf({{kA, of_a},
                 {kB, {Cancelled(Named(5, false, {At(kA, 1)}))}},
                 {kC, {Named(9, c_is_done, {At(kA, 1), At(kB, 5)})}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
    if (at_the_next) {
      EXPECT_EQ(FateOf(fates, kA, 2), Fate::kRedo);
    }
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
    EXPECT_EQ(FateOf(fates, kC, 9), Fate::kRedo);
    for (const PeerId peer : {kA, kB, kC}) EXPECT_TRUE(Of(fates, peer).missed.empty());
  }
}

TEST(FatesOfCancelled, TheNextOpIsAbortedAndTheOneThatLingersIsNot) {
  // Peer B was kept from the result of the first op, and has perhaps cancelled that one.
  for (const bool both : {false, true}) {
    OpReport behind = Named(5, false, {At(kA, 1)});
    behind.cancelled = both;
    const std::vector<FatesRecord> fates = FatesOf(
        {{kA, {Named(1, true, {At(kB, 5)}), Cancelled(Named(2, false, {}))}}, {kB, {behind}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kRedo);
    EXPECT_EQ(FateOf(fates, kA, 2), Fate::kAbort);
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
    EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7}}));
    EXPECT_TRUE(Of(fates, kA).missed.empty());
  }
}

TEST(FatesOfCancelled, MembersThatDifferInOnFaultAbortItAlike) {
  for (const bool the_aborting : {true, false}) {
    OpReport aborting = Named(1, false, {At(kB, 5)});
    aborting.abort_on_fault = true;
    aborting.cancelled = the_aborting;
    OpReport retrying = Named(5, false, {At(kA, 1)});
    retrying.cancelled = !the_aborting;
    const std::vector<FatesRecord> fates = FatesOf({{kA, {aborting}}, {kB, {retrying}}, {kC, {}}});
    EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
    EXPECT_EQ(FateOf(fates, kB, 5), Fate::kAbort);
    EXPECT_EQ(Of(fates, kC).missed.size(), 1u);
  }
}

TEST(FatesOfCancelled, AnOpThatAbortsOnFaultsDoesSoThoughOnePeerIsDone) {
  OpReport done = Named(1, true, {At(kB, 5)});
  OpReport not_done = Cancelled(Named(5, false, {At(kA, 1)}));
  done.abort_on_fault = not_done.abort_on_fault = true;
  const std::vector<FatesRecord> fates = FatesOf({{kA, {done}}, {kB, {not_done}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kAbort);
}

TEST(FatesOfCancelled, OpsOfOneTagWithDifferentSetsAreDifferentOps) {
  const std::vector<FatesRecord> fates = FatesOf({{kA, {Cancelled(Named(1, false, {}, 11))}},
                                                  {kB, {Named(5, false, {}, 22)}},
                                                  {kC, {Named(9, false, {}, 11)}}});
  EXPECT_EQ(FateOf(fates, kA, 1), Fate::kAbort);
  EXPECT_EQ(FateOf(fates, kB, 5), Fate::kRedo);
  EXPECT_EQ(FateOf(fates, kC, 9), Fate::kAbort);
  EXPECT_EQ(Of(fates, kB).missed, (std::vector<control::MissedOp>{{Epoch(4), 7, 11}}));
  EXPECT_TRUE(Of(fates, kA).missed.empty());
}

// Tries every state of one op at three survivors, and everybody who may cancel it.
TEST(FatesOfCancelled, AgreesAtAllSurvivorsForEveryPossibleState) {
  enum State { kUnposted, kAnnounced, kDone, kSettled };
  const PeerId peers[] = {kA, kB, kC};
  int decided = 0;
  for (int code = 0; code < 512; ++code) {
    const int states[] = {code & 3, (code >> 2) & 3, (code >> 4) & 3};
    const int cancels = code >> 6;
    bool some_done = false, some_settled = false, some_unposted = false, some_not_done = false;
    for (int s : states) {
      some_done = some_done || s >= kDone;
      some_settled = some_settled || s == kSettled;
      some_unposted = some_unposted || s == kUnposted;
      some_not_done = some_not_done || s < kDone;
    }
    if ((some_done && some_unposted) || (some_settled && some_not_done)) continue;
    Reports reports;
    bool cancelled = false;
    for (int i = 0; i < 3; ++i) {
      reports[peers[i]];
      if (states[i] == kUnposted || states[i] == kSettled) continue;
      std::vector<control::OpMatch> matches;
      for (int j = 0; j < 3; ++j) {
        if (j != i && states[j] != kUnposted) matches.push_back(At(peers[j], 10 + j));
      }
      OpReport op = Named(10 + i, states[i] == kDone, matches);
      op.cancelled = (cancels >> i & 1) != 0;
      cancelled = cancelled || op.cancelled;
      reports[peers[i]].push_back(op);
    }
    if (!cancelled) continue;
    const Fate wanted = some_settled || !some_not_done ? Fate::kCommit
                        : some_done                    ? Fate::kRedo
                                                       : Fate::kAbort;
    const std::vector<FatesRecord> fates = FatesOf(reports);
    for (int i = 0; i < 3; ++i) {
      if (!reports[peers[i]].empty()) {
        EXPECT_EQ(FateOf(fates, peers[i], 10 + i), wanted) << "code " << code;
      }
      const bool misses = wanted == Fate::kAbort && states[i] == kUnposted;
      EXPECT_EQ(Of(fates, peers[i]).missed.size(), misses ? 1u : 0u) << "code " << code;
    }
    ++decided;
  }
  EXPECT_GT(decided, 50);
}

// ---- many peers

// Whether `other` has announced `op` of `owner`. A slow second way to find it: pair by pair.
bool HasAnnounced(const std::vector<OpReport>& others, PeerId other,
                  const std::vector<OpReport>& owners, PeerId owner, const OpReport& op) {
  const auto same_name = [&](const OpReport& report) {
    return report.boundary == op.boundary && report.tag == op.tag && report.set == op.set;
  };
  const auto newest = std::find_if(others.rbegin(), others.rend(), same_name);
  if (newest == others.rend()) return false;
  for (const OpReport& before : owners) {
    if (!same_name(before) || before.ordinal >= op.ordinal) continue;
    for (const control::OpMatch& match : before.matches) {
      if (match == control::OpMatch{other, newest->ordinal}) return false;
    }
  }
  return std::all_of(newest->matches.begin(), newest->matches.end(),
                     [&](const control::OpMatch& match) {
                       return match.peer != owner || match.ordinal == op.ordinal;
                     });
}

TEST(Fates, MissedIsWhatOnePairAfterTheOtherHasNotAnnounced) {
  size_t missed = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    Prng random(seed);
    const uint64_t peers = 2 + random.Below(4);
    Reports reports;
    for (uint64_t p = 1; p <= peers; ++p) {
      std::vector<OpReport>& ops = reports[PeerId(p)];
      for (uint64_t ordinal = 1; ordinal <= 4; ++ordinal) {
        if (random.Below(3) == 0) continue;
        OpReport& op = ops.emplace_back(Op(ordinal, random.Below(2) == 0, {}));
        op.boundary = Epoch(1);
        op.tag = random.Below(2);
        op.set = random.Below(8) == 0 ? 5 : 0;
        op.abort_on_fault = random.Below(2) == 0;
        for (uint64_t other = 1; other <= peers + 1; ++other) {
          if (other != p && random.Below(2) == 0)
            op.matches.push_back(At(PeerId(other), 1 + random.Below(4)));
        }
      }
    }
    const std::vector<FatesRecord> decided = FatesOf(reports);
    std::map<PeerId, std::set<control::MissedOp>> expected;
    for (const auto& [owner, ops] : reports) {
      for (const OpReport& op : ops) {
        if (FateOf(decided, owner, op.ordinal.value()) != Fate::kAbort) continue;
        for (const auto& [other, theirs] : reports) {
          if (other == owner || HasAnnounced(theirs, other, ops, owner, op)) continue;
          expected[other].insert({op.boundary, op.tag, op.set});
        }
      }
    }
    for (const auto& [peer, ops] : reports) {
      const std::vector<control::MissedOp> told = Of(decided, peer).missed;
      const std::set<control::MissedOp>& wanted = expected[peer];
      ASSERT_EQ(told, (std::vector<control::MissedOp>{wanted.begin(), wanted.end()}))
          << "seed " << seed << " " << ToString(peer);
      missed += told.size();
    }
  }
  EXPECT_GT(missed, 1000u);
}

// FatesOf() runs on the thread that hears all peers. If its time were not linear in the reports,
// the coordinator would hear no peer for seconds. The length of the reports grows with the number
// of pairs of peers.
TEST(Fates, AbortsOfManyPeersTakeOnePassOfTheReports) {
  constexpr uint64_t kPeers = 1024;
  constexpr uint64_t kOps = 4;
  Reports reports;
  for (uint64_t p = 1; p <= kPeers; ++p) {
    for (uint64_t k = 1; k <= kOps; ++k) {
      std::vector<control::OpMatch> matches;
      for (uint64_t other = 1; other <= kPeers; ++other) {
        if (other != p) matches.push_back(At(PeerId(other), k));
      }
      reports[PeerId(p)].push_back(Aborting(k, k, std::move(matches)));
    }
  }
  // Measures processor time, so that other processes on this machine make no difference.
  const std::clock_t begun = std::clock();
  const std::vector<FatesRecord> fates = FatesOf(reports);
  const double took_s = static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC;
  EXPECT_EQ(fates.size(), kPeers);
  EXPECT_TRUE(fates.back().missed.empty());
  // It takes 0.2 s. Going through all matches for each pair of peers would take 14 s.
  EXPECT_LT(took_s, 5);
}

}  // namespace
}  // namespace longhaul::coordinator
