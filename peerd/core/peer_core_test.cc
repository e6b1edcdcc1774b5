#include "peerd/core/peer_core.h"

#include <gtest/gtest.h>

#include <set>

#include "peerd/core/testing.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::Fate;
using control::Removal;
using control::SyncAction;
using control::SyncStrategy;

// Peer 1 is under test. The test plays the coordinator, the trainers and the other peers.
class PeerCoreTest : public testing::Test {
 protected:
  static CoreConfig Config() {
    CoreConfig config;
    config.peer = PeerId(1);
    config.endpoints = {"h:1"};
    config.detect_ms = 1500;
    return config;
  }
  // Steps the core; out_ then has the actions of this step.
  Actions& Give(const Event& event) {
    out_ = core_.Step(event, now_);
    core_.CheckInvariants();
    // Act as a driver that puts results into the targets at once.
    for (size_t i = 0; finishes_ && i < out_.size(); ++i) {
      const auto* const finish = std::get_if<FinishAttempt>(&out_[i]);
      if (finish == nullptr || !finish->commit) continue;
      const Actions answers = core_.Step(AttemptFinished{finish->group, finish->ordinal}, now_);
      core_.CheckInvariants();
      out_.insert(out_.end(), answers.begin(), answers.end());
    }
    return out_;
  }
  Actions& Say(control::CoordinatorMessage message) {
    return Give(FromCoordinator{std::move(message)});
  }
  Actions& Join(uint64_t local) {
    Give(LocalJoin{LocalId(local), kGroup, "t"});
    return Say(control::JoinPending{local, kGroup, MemberId(local)});
  }
  Actions& Commit(uint64_t epoch, std::vector<control::OpFate> fates = {}) {
    return Say(control::CommitEpoch{kGroup, Epoch(epoch), std::move(fates)});
  }
  Actions& Up(uint64_t peer) { return Give(LinkUp{"run", PeerId(peer)}); }
  Actions& Down(uint64_t peer) { return Give(LinkDown{"run", PeerId(peer), "reset"}); }
  Actions& Removed(uint64_t member, Removal why) {
    return Say(control::Removed{kGroup, MemberId(member), why, "reason"});
  }
  Actions& Post(uint64_t local, uint64_t tag, const OpDesc& desc) {
    return Give(LocalPost{{LocalId(local), tag}, tag, desc});
  }
  Actions& Ready(uint64_t peer, uint64_t tag, const OpDesc& desc, uint64_t attempt = 0) {
    PeerReady ready;
    ready.group = kGroup;
    ready.peer = PeerId(peer);
    ready.ordinal = OpOrdinal(100 * peer + tag);
    ready.attempt = Epoch(attempt);
    ready.boundary = Epoch(1);
    ready.tag = tag;
    ready.desc = desc;
    ready.payload = PayloadOf(desc);
    return Give(ready);
  }
  // Member 1 is here and member 2 is at peer 2, in epoch 1.
  void EnterTwo() {
    Give(CoordinatorUp{});
    Say(control::Welcome{"c", 0});
    Join(1);
    Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}}));
    Up(2);
    ASSERT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
    Commit(1);
    ASSERT_TRUE(Get<JoinDone>(out_).at(0).outcome.ok());
  }
  // Runs op o1 of member 1 until it is done.
  void RunToDone() {
    Post(1, 7, Large());
    Ready(2, 7, Large());
    Give(AttemptComplete{kGroup, OpOrdinal(1), Epoch()});
    ASSERT_EQ(Get<SendDone>(out_).size(), 1u);
  }

  // ---- syncs: all states have revision 3 and the same manifest, and differ in one number.
  static SyncRequest State(uint64_t state, SyncStrategy strategy = SyncStrategy::kPopular) {
    return {strategy, 3, {1, 1}, {state, 0}};
  }
  Actions& Step(uint64_t local, uint64_t state) {
    return Give(LocalStep{LocalId(local), State(state)});
  }
  Actions& Sync(uint64_t local, uint64_t state) {
    return Give(LocalSync{LocalId(local), State(state)});
  }
  Actions& Passed(uint64_t member, uint64_t number = 1, uint64_t epoch = 1) {
    return Say(control::VoteResult{kGroup, MemberId(member), number, Epoch(epoch)});
  }
  Actions& Result(uint64_t member, SyncAction action, uint64_t state, uint64_t number = 1) {
    control::SyncResult result{kGroup, MemberId(member), number, action, {}, 4, {1, 1}, {state, 0}};
    if (action == SyncAction::kFetch) result.sources = {{MemberId(2), PeerId(2)}};
    return Say(result);
  }
  Actions& Refuse(uint64_t member, const Outcome& outcome,
                  std::vector<control::SyncSource> compare = {}) {
    return Say(control::SyncResult{
        kGroup, MemberId(member), 1, SyncAction::kEnd, outcome, 0, {}, {}, std::move(compare)});
  }
  Actions& Transferred(uint64_t local, const Outcome& outcome = {}) {
    return Give(TransferEnded{LocalId(local), outcome, 100, {MemberId(2)}, {}});
  }
  // Member 1 fetches a state in a step whose vote is answered.
  void FetchInStep() {
    EnterTwo();
    Step(1, 9);
    Passed(1);
    ASSERT_EQ(Get<StartTransfer>(Result(1, SyncAction::kFetch, 5)).size(), 1u);
  }
  // The index of the first action of this kind.
  template <class T>
  size_t Index() const {
    size_t i = 0;
    while (i < out_.size() && !std::holds_alternative<T>(out_[i])) ++i;
    return i;
  }

  PeerCore core_{Config()};
  Tick now_{Seconds(100)};
  Actions out_;
  bool finishes_ = true;  // false: the test says when
};

TEST_F(PeerCoreTest, HelloIsTheFirstWord) {
  const auto hello = Sent<control::Hello>(Give(CoordinatorUp{}));
  ASSERT_EQ(hello.size(), 1u);
  EXPECT_EQ(hello[0].peer, PeerId(1));
  EXPECT_GT(hello[0].protocol, 0u);
  EXPECT_TRUE(hello[0].groups.empty());
}

TEST_F(PeerCoreTest, AJoinerIsToldItsWorldWhenItsEpochIsCommitted) {
  EnterTwo();
  EXPECT_EQ(Get<JoinDone>(out_).at(0).world,
            (World{Epoch(1), MemberId(1), 0, 2, 0, false, Epoch(1), {Epoch(1), 0, 2}}));
  EXPECT_EQ(Get<KeepLinks>(out_).at(0).peers, std::vector<PeerId>{PeerId(2)});
  EXPECT_EQ(core_.GetMembers(LocalId(1)).members,
            (std::vector<MemberId>{MemberId(1), MemberId(2)}));
  EXPECT_TRUE(core_.GetMembers(LocalId(9)).members.empty());
  EXPECT_EQ(core_.GetStats().members, 1u);
}

TEST_F(PeerCoreTest, NothingIsSaidWhileTheStreamIsDownAndAllOfItAfterwards) {
  EXPECT_TRUE(Get<ToCoordinator>(Give(LocalJoin{LocalId(1), kGroup, "t"})).empty());
  EXPECT_EQ(Sent<control::Join>(Give(CoordinatorUp{})).size(), 1u);
  Say(control::JoinPending{1, kGroup, MemberId(1)});
  Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}}));
  Give(CoordinatorDown{});
  EXPECT_TRUE(Get<ToCoordinator>(Up(2)).empty());
  Give(CoordinatorUp{});
  ASSERT_GE(out_.size(), 3u);
  EXPECT_EQ(Sent<control::Hello>(out_).at(0).groups.at(0),
            (control::GroupState{kGroup, Epoch(), {MemberId(1)}, Epoch(1), 1001}));
  EXPECT_EQ(Sent<control::Join>(out_).size(), 1u);
  EXPECT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
  Commit(1);
  Give(CoordinatorDown{});
  Give(LocalStep{LocalId(1)});
  Down(2);
  Give(CoordinatorUp{});
  EXPECT_EQ(Sent<control::Hello>(out_).at(0).groups.at(0).committed, Epoch(1));
  EXPECT_EQ(Sent<control::Vote>(out_).size(), 1u);
  EXPECT_EQ(Sent<control::LinkLost>(out_).size(), 1u);
  EXPECT_TRUE(Sent<control::Join>(out_).empty());
  Give(CoordinatorDown{});
  Give(LocalLeave{LocalId(1)});
  EXPECT_EQ(Sent<control::Leave>(Give(CoordinatorUp{})).size(), 1u);
}

TEST_F(PeerCoreTest, OpsGoOnWithoutTheCoordinator) {
  EnterTwo();
  Give(CoordinatorDown{});
  RunToDone();
  EXPECT_EQ(Get<PostDone>(Give(PeerDone{kGroup, PeerId(2), OpOrdinal(1), Epoch(), false})).size(),
            1u);
  EXPECT_EQ(core_.GetStats().ops_committed, 1u);
}

// The store of the coordinator may have lost the prepared epoch.
TEST_F(PeerCoreTest, HelloTellsWhatIsPreparedAndAnswersNameIt) {
  EnterTwo();
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}}));
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  EXPECT_EQ(Sent<control::Hello>(out_).at(0).groups.at(0),
            (control::GroupState{kGroup, Epoch(1), {MemberId(1)}, Epoch(2), 1002, true}));
  EXPECT_TRUE(Sent<control::EpochReady>(out_).empty());
  Up(2);
  ASSERT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
  EXPECT_EQ(Sent<control::EpochReady>(out_)[0].preparation, 1002u);
}

// A deferred PrepareEpoch is prepared when an attempt has stopped.
TEST_F(PeerCoreTest, HelloTellsOfAPreparationThatWaits) {
  EnterTwo();
  Join(5);
  Post(1, 7, Large());
  Removed(1, Removal::kEvicted);
  Say(MakePrepare(3, 0, 3, 0, {{5, 1, 3}}));
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  EXPECT_EQ(Sent<control::Hello>(out_).at(0).groups.at(0),
            (control::GroupState{kGroup, Epoch(1), {MemberId(5)}, Epoch(3), 1003}));
}

TEST_F(PeerCoreTest, HelloTellsOfAnEpochWhoseMembersHereAreGone) {
  EnterTwo();
  Post(1, 7, Large());
  Removed(1, Removal::kEvicted);
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  ASSERT_EQ(Sent<control::Hello>(out_).at(0).groups.size(), 1u);
  EXPECT_EQ(Sent<control::Hello>(out_)[0].groups[0], (control::GroupState{kGroup, Epoch(1), {}}));
}

TEST_F(PeerCoreTest, WhoIsForgottenBeforeItsFirstEpochFollowsLowerNumbersAgain) {
  Give(CoordinatorUp{});
  Join(1);
  Say(MakePrepare(7, 0, 7, 0, {{1, 1, 7}, {2, 2, 7}}));
  Removed(1, Removal::kUnknown);
  ASSERT_EQ(Sent<control::Join>(out_).size(), 1u);
  EXPECT_EQ(Get<KeepLinks>(out_).size(), 1u);
  Say(control::JoinPending{1, kGroup, MemberId(3)});
  Say(MakePrepare(1, 0, 1, 0, {{3, 1, 1}}));
  EXPECT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, ALowerTermOfItsStoreIsRefused) {
  Give(CoordinatorUp{});
  Say(control::Welcome{"c5", 300, 77, 5});
  EXPECT_TRUE(out_.empty());
  Give(CoordinatorDown{});
  const auto hello = Sent<control::Hello>(Give(CoordinatorUp{}));
  EXPECT_EQ(hello.at(0).store, 77u);
  EXPECT_EQ(hello.at(0).term, 5u);
  EXPECT_EQ(hello.at(0).coordinator, "c5");
  Say(control::Welcome{"c4", 300, 77, 4});
  ASSERT_EQ(Get<RefuseCoordinator>(out_).size(), 1u);
  EXPECT_EQ(Get<LogLine>(out_).at(0).text,
            "coordinator refused coordinator=c4 term=4 known_coordinator=c5 known_term=5 why=\"a "
            "later start of a coordinator on its store is known here\"");
  // Later messages on this stream are ignored, and nothing is sent on it.
  Give(LocalJoin{LocalId(1), kGroup, "t"});
  EXPECT_TRUE(Get<ToCoordinator>(out_).empty());
  EXPECT_TRUE(
      Say(control::JoinRefused{1, kGroup, {Code::kFailedPrecondition, "not here"}}).empty());
  EXPECT_EQ(core_.NextDeadline(), kNever);
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  EXPECT_EQ(Sent<control::Join>(out_).size(), 1u);
  // Two starts of a coordinator have the same term, because the store lost one of them.
  Say(control::Welcome{"other", 300, 77, 5});
  EXPECT_EQ(Get<RefuseCoordinator>(out_).size(), 1u);
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  EXPECT_TRUE(Get<RefuseCoordinator>(Say(control::Welcome{"other", 300, 77, 6})).empty());
}

TEST_F(PeerCoreTest, AnotherStoreIsRefusedWhileThereAreMembers) {
  Give(CoordinatorUp{});
  Say(control::Welcome{"a", 300, 77, 5});
  Join(1);
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  EXPECT_EQ(Get<RefuseCoordinator>(Say(control::Welcome{"b", 300, 78, 9})).size(), 1u);
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  Say(control::Welcome{"a2", 300, 77, 6});
  EXPECT_TRUE(Get<RefuseCoordinator>(out_).empty());
  Give(LocalLeave{LocalId(1)});
  Removed(1, Removal::kLeft);
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  EXPECT_TRUE(Get<RefuseCoordinator>(Say(control::Welcome{"b", 300, 78, 9})).empty());
}

TEST_F(PeerCoreTest, AStepEndsWithTheVoteResult) {
  EnterTwo();
  EXPECT_EQ(Sent<control::Vote>(Give(LocalStep{LocalId(1)})).at(0).number, 1u);
  EXPECT_EQ(Get<StepDone>(Say(control::VoteResult{kGroup, MemberId(1), 1, Epoch(1)})).size(), 1u);
}

TEST_F(PeerCoreTest, HeartbeatsCarryTheLoadAndFollowTheCoordinatorsKnob) {
  EnterTwo();
  Say(control::Welcome{"c", 300});
  Say(control::Welcome{"c", 0});
  core_.SetBytes(kGroup, 10, 20);
  core_.SetBytes({"other", 1}, 1, 1);
  Post(1, 7, Large());
  now_ = now_ + Millis(99);
  EXPECT_TRUE(Sent<control::Heartbeat>(Give(TimePassed{})).empty());
  EXPECT_EQ(core_.NextDeadline(), now_ + Millis(1));
  now_ = core_.NextDeadline();
  const auto beat = Sent<control::Heartbeat>(Give(TimePassed{}));
  ASSERT_EQ(beat.size(), 1u);
  const control::OldestOp oldest{7, Epoch(1), control::OpPhase::kReady, 100, {}, {PeerId(2)}, 1};
  EXPECT_EQ(beat[0].loads.at(0), (control::GroupLoad{kGroup, 1, 0, 10, 20, oldest}));
  EXPECT_EQ(core_.NextDeadline(), now_ + Millis(100));
  Give(CoordinatorDown{});
  EXPECT_EQ(core_.NextDeadline(), kNever);
}

TEST_F(PeerCoreTest, HeartbeatsTellHowFarAFetchIs) {
  const auto beat = [this] {
    now_ = now_ + Seconds(1);
    return Sent<control::Heartbeat>(Give(TimePassed{})).at(0).fetches;
  };
  FetchInStep();
  EXPECT_EQ(beat(), (std::vector<control::FetchLoad>{{kGroup, MemberId(1), {}}}));
  const control::FetchProgress progress{10, 20, 5, 1};
  core_.SetProgress(LocalId(1), progress);
  core_.SetProgress(LocalId(9), progress);
  EXPECT_EQ(beat(), (std::vector<control::FetchLoad>{{kGroup, MemberId(1), progress}}));
  Transferred(1);
  core_.SetProgress(LocalId(1), progress);
  EXPECT_TRUE(beat().empty());
}

TEST_F(PeerCoreTest, PendingCountsReachTheMembers) {
  EnterTwo();
  EXPECT_EQ(Get<WorldChanged>(Say(control::PendingCount{kGroup, 3})).at(0).world.pending, 3u);
  EXPECT_TRUE(Say(control::PendingCount{kGroup, 3}).empty());
  EXPECT_TRUE(Say(control::PendingCount{{"x", 0}, 3}).empty());
}

TEST_F(PeerCoreTest, WhoWasAdmittedIsNotPendingAnyMore) {
  EnterTwo();
  Say(control::PendingCount{kGroup, 3});
  Step(1, 5);
  // Two newcomers are admitted, and the third is late. The coordinator sends its new count later.
  Say(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 2}, {4, 3, 2}}));
  Up(2);
  Up(3);
  EXPECT_EQ(Get<WorldChanged>(Commit(2)).at(0).world,
            (World{Epoch(2), MemberId(1), 0, 4, 1, false, Epoch(1), {Epoch(1), 0, 2}}));
  EXPECT_TRUE(Say(control::PendingCount{kGroup, 1}).empty());
}

TEST_F(PeerCoreTest, PostsOutOfPlaceAreRefused) {
  Give(CoordinatorUp{});
  Join(1);
  EXPECT_EQ(Get<PostDone>(Post(1, 7, Large())).at(0).outcome.code, Code::kFailedPrecondition);
  EXPECT_EQ(Get<PostDone>(Post(2, 7, Large())).at(0).outcome.code, Code::kEvicted);
}

TEST_F(PeerCoreTest, WhatIsForGroupsThatAreNotHereIsIgnored) {
  Give(CoordinatorUp{});
  EXPECT_EQ(Get<LogLine>(Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}}))).size(), 1u);
  EXPECT_EQ(Get<LogLine>(Commit(1)).size(), 1u);
  EXPECT_EQ(Get<LogLine>(Say(control::AbortEpoch{kGroup, Epoch(1), ""})).size(), 1u);
  EXPECT_TRUE(Say(control::VoteResult{kGroup, MemberId(1), 1, Epoch(1)}).empty());
  EXPECT_TRUE(Removed(1, Removal::kLeft).empty());
  EXPECT_TRUE(Ready(2, 7, Large()).empty());
  EXPECT_TRUE(Give(PeerDone{kGroup, PeerId(2), OpOrdinal(1), Epoch(), false}).empty());
  EXPECT_TRUE(Give(AttemptComplete{kGroup, OpOrdinal(1), Epoch()}).empty());
  EXPECT_TRUE(Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()}).empty());
  EXPECT_TRUE(Up(2).empty());
  EXPECT_TRUE(Down(2).empty());
  EXPECT_EQ(core_.GetStats().frames_stale, 2u);
}

TEST_F(PeerCoreTest, AFreezingEpochIsReadyWhenLinksAndStoppedAttemptsHaveAnswered) {
  EnterTwo();
  Post(1, 7, Large());
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}}));
  EXPECT_EQ(Get<StopAttempt>(out_).size(), 1u);
  EXPECT_TRUE(Sent<control::EpochReady>(Up(2)).empty());
  const auto ready = Sent<control::EpochReady>(Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()}));
  ASSERT_EQ(ready.size(), 1u);
  ASSERT_EQ(ready[0].ops.size(), 1u);
  EXPECT_FALSE(ready[0].ops[0].done);
  // Another preparation replaces the first: the ops are reported again.
  Say(MakePrepare(3, 1, 1, 3, {{1, 1, 1}, {2, 2, 1}}));
  EXPECT_EQ(Sent<control::EpochReady>(Up(2)).size(), 1u);
  Commit(3, {{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).at(0).attempt, Epoch(3));
  EXPECT_EQ(Get<WorldChanged>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, ADoneOpIsCommittedByArbitration) {
  EnterTwo();
  RunToDone();
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}}));
  EXPECT_TRUE(Sent<control::EpochReady>(out_).at(0).ops.at(0).done);
  EXPECT_TRUE(Get<PostDone>(Commit(2, {{OpOrdinal(1), Fate::kCommit}})).at(0).outcome.ok());
}

TEST_F(PeerCoreTest, ALostLinkSilencesTheGroupTowardsThatPeer) {
  EnterTwo();
  EXPECT_EQ(Sent<control::LinkLost>(Down(2)).at(0).epoch, Epoch(1));
  EXPECT_TRUE(Sent<control::LinkLost>(Down(2)).empty());
  EXPECT_TRUE(Get<SendReady>(Post(1, 7, Large())).empty());
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}}));
  Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()});
  Up(2);
  EXPECT_EQ(Get<SendReady>(Commit(2, {{OpOrdinal(1), Fate::kRedo}})).size(), 1u);
}

TEST_F(PeerCoreTest, ALostLinkIsToldForEachGroupOfTheRun) {
  EnterTwo();
  const GroupKey second{"run", 5};
  Give(LocalJoin{LocalId(8), second, "t"});
  Say(control::JoinPending{8, second, MemberId(8)});
  auto prepare = MakePrepare(1, 0, 1, 0, {{8, 1, 1}, {9, 2, 1}});
  prepare.group = second;
  Say(prepare);
  Up(2);
  Say(control::CommitEpoch{second, Epoch(1), {}});
  EXPECT_EQ(Sent<control::LinkLost>(Down(2)).size(), 2u);
  EXPECT_TRUE(Give(LinkDown{"other", PeerId(2), "x"}).empty());
}

TEST_F(PeerCoreTest, ALostLinkIsToldWithItsSilence) {
  EnterTwo();
  const auto lost = Sent<control::LinkLost>(Give(LinkDown{"run", PeerId(2), "silent", 1500}));
  EXPECT_EQ(lost.at(0).silent_ms, 1500u);
  Give(CoordinatorDown{});
  EXPECT_EQ(Sent<control::LinkLost>(Give(CoordinatorUp{})).at(0).silent_ms, 1500u);
}

TEST_F(PeerCoreTest, AFaultIsToldWhenTheFirstRedoneOpHasEnded) {
  EnterTwo();
  Post(1, 7, Large());
  Post(1, 8, Desc(1 << 20, DType::kFloat32, OnFault::kAbort));
  Post(1, 9, Large());
  const auto prepare = MakePrepare(2, 1, 1, 2, {{1, 1, 1}});
  Say(prepare);
  now_ = now_ + Millis(30);
  for (const uint64_t ordinal : {1, 2, 3}) {
    Give(AttemptStopped{kGroup, OpOrdinal(ordinal), Epoch()});
  }
  now_ = now_ + Millis(10);
  EXPECT_TRUE(Get<FaultOver>(Commit(2, {{OpOrdinal(1), Fate::kRedo},
                                        {OpOrdinal(2), Fate::kAbort},
                                        {OpOrdinal(3), Fate::kRedo}}))
                  .empty());
  now_ = now_ + Millis(250);
  const auto over = Get<FaultOver>(Give(AttemptComplete{kGroup, OpOrdinal(1), Epoch(2)}));
  ASSERT_EQ(over.size(), 1u);
  EXPECT_EQ(over[0].agree_us, Millis(40));
  EXPECT_EQ(over[0].resume_us, Millis(250));
  EXPECT_EQ(Get<LogLine>(out_).at(0).text,
            "fault over group=run/0 epoch=2 ops_frozen=3 committed=0 redone=2 aborted=1 "
            "agree_ms=40 resume_ms=250 cause=test");
  EXPECT_TRUE(Get<FaultOver>(Give(AttemptComplete{kGroup, OpOrdinal(3), Epoch(2)})).empty());
}

TEST_F(PeerCoreTest, AFaultThatLeavesNothingToRedoIsToldAtItsCommit) {
  EnterTwo();
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}}));
  now_ = now_ + Millis(5);
  const auto over = Get<FaultOver>(Commit(2));
  ASSERT_EQ(over.size(), 1u);
  EXPECT_EQ(over[0].agree_us, Millis(5));
  EXPECT_EQ(over[0].resume_us, -1);
}

TEST_F(PeerCoreTest, AFaultBeforeTheLastOneIsOverIsTheNext) {
  EnterTwo();
  Post(1, 7, Large());
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}}));
  Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()});
  Up(2);
  Commit(2, {{OpOrdinal(1), Fate::kRedo}});
  now_ = now_ + Millis(100);
  EXPECT_EQ(Get<FaultOver>(Say(MakePrepare(3, 2, 1, 3, {{1, 1, 1}}))).at(0).resume_us, -1);
  Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch(2)});
  Commit(3, {{OpOrdinal(1), Fate::kRedo}});
  now_ = now_ + Millis(7);
  const auto over = Get<FaultOver>(Give(AttemptComplete{kGroup, OpOrdinal(1), Epoch(3)}));
  EXPECT_EQ(over.at(0).agree_us, 0);
  EXPECT_EQ(over.at(0).resume_us, Millis(7));
}

TEST_F(PeerCoreTest, ADeathInOneGroupLeavesTheOpsOfAnotherAlone) {
  // Peer 3 is in the second group only.
  EnterTwo();
  const GroupKey second{"run", 1};
  Give(LocalJoin{LocalId(8), second, "t"});
  Say(control::JoinPending{8, second, MemberId(8)});
  auto prepare = MakePrepare(1, 0, 1, 0, {{8, 1, 1}, {9, 2, 1}, {10, 3, 1}});
  prepare.group = second;
  Say(prepare);
  Up(2);
  Up(3);
  Say(control::CommitEpoch{second, Epoch(1), {}});
  Post(1, 7, Large());
  Give(LocalPost{{LocalId(8), 7}, 7, Large()});

  const auto lost = Sent<control::LinkLost>(Down(3));
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].group, second);
  auto repair = MakePrepare(2, 1, 1, 2, {{8, 1, 1}, {9, 2, 1}});
  repair.group = second;
  const auto stops = Get<StopAttempt>(Say(repair));
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_EQ(stops[0].group, second);
  // The ops of the first group go on while the second group handles its fault.
  EXPECT_EQ(Get<CreditAttempt>(Ready(2, 7, Large())).size(), 1u);
  EXPECT_EQ(Get<SendDone>(Give(AttemptComplete{kGroup, OpOrdinal(1), Epoch()})).size(), 1u);
  const auto done =
      Get<PostDone>(Give(PeerDone{kGroup, PeerId(2), OpOrdinal(1), Epoch(), false})).at(0);
  EXPECT_TRUE(done.outcome.ok());
  EXPECT_EQ(done.info.retries, 0u);
  EXPECT_EQ(Get<SendReady>(Post(1, 8, Large())).size(), 1u);
}

// From the freeze on, the link to peer 3 goes another way. The end of the old link is not reported.
// If the new link cannot be built, the epoch fails.
TEST_F(PeerCoreTest, ALinkThatIsToGoThroughARelayFailsTheEpochIfItCannot) {
  Give(CoordinatorUp{});
  Join(1);
  Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}));
  Up(2);
  Up(3);
  Say(control::CommitEpoch{kGroup, Epoch(1), {}});
  auto prepare = MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
  Say(prepare);
  EXPECT_EQ(Get<OpenLinks>(out_).at(0).links.at(1).relay, PeerId(2));
  Down(3);
  EXPECT_TRUE(Sent<control::LinkLost>(out_).empty());
  Up(2);
  EXPECT_EQ(Sent<control::EpochFailed>(Down(3)).at(0).unreachable.at(0).peer, PeerId(3));
}

TEST_F(PeerCoreTest, ALinkThatWasNeverUpFailsTheEpochAfterItsDeadline) {
  Give(CoordinatorUp{});
  Join(1);
  Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}));
  Up(2);
  EXPECT_EQ(Sent<control::EpochFailed>(Down(3)).at(0).unreachable.at(0).peer, PeerId(3));
  Say(MakePrepare(2, 0, 2, 0, {{1, 1, 2}, {3, 3, 2}}));
  now_ = now_ + Millis(6000);
  EXPECT_TRUE(Sent<control::EpochFailed>(Give(TimePassed{})).empty());
  now_ = now_ + Millis(400);
  EXPECT_EQ(Sent<control::EpochFailed>(Give(TimePassed{})).size(), 1u);
}

TEST_F(PeerCoreTest, AnAbortedAdmissionChangesNothing) {
  EnterTwo();
  RunToDone();
  Say(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 2}}));
  Say(control::AbortEpoch{kGroup, Epoch(2), "newcomer gone"});
  EXPECT_EQ(Get<KeepLinks>(out_).at(0).peers, std::vector<PeerId>{PeerId(2)});
  EXPECT_EQ(Get<PostDone>(Give(PeerDone{kGroup, PeerId(2), OpOrdinal(1), Epoch(), false})).size(),
            1u);
}

TEST_F(PeerCoreTest, OpsAreNotTouchedByAnAdmission) {
  EnterTwo();
  RunToDone();
  Say(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 2}}));
  EXPECT_TRUE(Get<StopAttempt>(out_).empty());
  Up(2);
  EXPECT_TRUE(Sent<control::EpochReady>(Up(3)).at(0).ops.empty());
  Commit(2);
  // Only the old members take part in an op of the old boundary.
  EXPECT_EQ(Get<SendReady>(Post(1, 8, Large())).size(), 1u);
  EXPECT_EQ(Get<PostDone>(Give(PeerDone{kGroup, PeerId(2), OpOrdinal(1), Epoch(), false})).size(),
            1u);
}

TEST_F(PeerCoreTest, ALeaverGoesWhenItsOpsAreSettled) {
  EnterTwo();
  RunToDone();
  EXPECT_TRUE(Sent<control::Leave>(Give(LocalLeave{LocalId(1)})).empty());
  Give(PeerDone{kGroup, PeerId(2), OpOrdinal(1), Epoch(), false});
  EXPECT_EQ(Sent<control::Leave>(out_).size(), 1u);
  Removed(1, Removal::kLeft);
  EXPECT_TRUE(Get<LeaveDone>(out_).at(0).outcome.ok());
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
  // No local member is left in the group.
  EXPECT_TRUE(Get<KeepLinks>(out_).at(0).peers.empty());
  EXPECT_TRUE(Removed(1, Removal::kLeft).empty());
}

TEST_F(PeerCoreTest, ADeadTrainersOpsFinishForTheOthers) {
  EnterTwo();
  Post(1, 7, Large());
  EXPECT_TRUE(Sent<control::Leave>(Give(LocalDied{LocalId(1), "killed"})).empty());
  Ready(2, 7, Large());
  EXPECT_EQ(Get<SendDone>(Give(AttemptComplete{kGroup, OpOrdinal(1), Epoch()})).size(), 1u);
  Give(PeerDone{kGroup, PeerId(2), OpOrdinal(1), Epoch(), false});
  EXPECT_TRUE(Sent<control::Leave>(out_).at(0).died);
}

TEST_F(PeerCoreTest, ADeadTrainerDoesNotWaitForEverForOthersToPost) {
  EnterTwo();
  Post(1, 7, Large());
  Give(LocalDied{LocalId(1), "killed"});
  now_ = now_ + Millis(3000);
  EXPECT_EQ(Sent<control::Leave>(Give(TimePassed{})).size(), 1u);
  Removed(1, Removal::kDied);
  EXPECT_EQ(Get<StopAttempt>(out_).size(), 1u);
  EXPECT_TRUE(Get<MemberGone>(out_).empty());
  Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()});
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
  EXPECT_EQ(Get<KeepLinks>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, AnEvictedMemberIsAnsweredBeforeItIsGone) {
  EnterTwo();
  Post(1, 7, Small());
  Give(LocalStep{LocalId(1)});
  Removed(1, Removal::kEvicted);
  size_t gone = 0;
  for (size_t i = 0; i < out_.size(); ++i) {
    if (std::holds_alternative<MemberGone>(out_[i])) gone = i;
  }
  ASSERT_GT(gone, 0u);
  EXPECT_EQ(Get<PostDone>(out_).size(), 1u);
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_TRUE(std::holds_alternative<StepDone>(out_[gone - 1]));
}

TEST_F(PeerCoreTest, APostOfOneThatTheEpochLeftOutIsRefused) {
  Give(CoordinatorUp{});
  Join(1);
  Join(3);
  Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {3, 1, 1}}));
  Commit(1);
  EXPECT_EQ(Get<JoinDone>(out_).size(), 2u);
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}}));
  Commit(2);
  EXPECT_EQ(Get<PostDone>(Post(3, 7, Small())).at(0).outcome.code, Code::kEvicted);
  EXPECT_TRUE(core_.GetMembers(LocalId(3)).members.empty());
  EXPECT_EQ(Get<MemberGone>(Removed(3, Removal::kEvicted)).size(), 1u);
}

TEST_F(PeerCoreTest, AGroupWhoseMembersAllWentBeginsAnewForThoseThatWait) {
  EnterTwo();
  Join(5);
  Post(1, 7, Large());
  Removed(1, Removal::kEvicted);
  // The coordinator may send the next epoch before the attempt has stopped.
  Say(MakePrepare(3, 0, 3, 0, {{5, 1, 3}}));
  EXPECT_TRUE(Sent<control::EpochReady>(out_).empty());
  Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()});
  EXPECT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
  EXPECT_EQ(Get<JoinDone>(Commit(3)).at(0).local, LocalId(5));
  EXPECT_EQ(Get<StartAttempt>(Post(5, 7, Small())).size(), 1u);
}

TEST_F(PeerCoreTest, APreparationThatWaitedForThatMayBeAborted) {
  EnterTwo();
  Join(5);
  Post(1, 7, Large());
  Removed(1, Removal::kEvicted);
  Say(MakePrepare(3, 0, 3, 0, {{5, 1, 3}}));
  Say(control::AbortEpoch{kGroup, Epoch(3), ""});
  EXPECT_TRUE(
      Sent<control::EpochReady>(Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()})).empty());
}

TEST_F(PeerCoreTest, AFrameAgainstTheProtocolBreaksTheLink) {
  EnterTwo();
  EXPECT_EQ(
      Get<BreakLink>(Give(PeerDone{kGroup, PeerId(2), OpOrdinal(5), Epoch(), false})).at(0).group,
      kGroup);
  EXPECT_EQ(core_.GetStats().frames_refused, 1u);
}

// ------------------------------------------------------------------------------ syncs

TEST_F(PeerCoreTest, AStepWithAStateIsOneVoteAndReturnsWhenBothAnswersAreIn) {
  EnterTwo();
  const auto votes = Sent<control::Vote>(Step(1, 5));
  ASSERT_EQ(votes.size(), 1u);
  EXPECT_EQ(votes[0].sync,
            (control::SyncOffer{1, SyncStrategy::kPopular, 3, {1, 1}, {5, 0}, true}));
  EXPECT_TRUE(Sent<control::SyncVote>(out_).empty());
  EXPECT_TRUE(Passed(1).empty());
  EXPECT_TRUE(Passed(1).empty()) << "said again";
  Result(1, SyncAction::kEnd, 5);
  EXPECT_EQ(Get<SyncDone>(out_).at(0), (SyncDone{LocalId(1), {}, 4, {5, 0}}));
  EXPECT_TRUE(Get<StepDone>(out_).at(0).outcome.ok());
  EXPECT_LT(Index<SyncDone>(), Index<StepDone>());
}

TEST_F(PeerCoreTest, AStepReturnsWithItsVoteWhenItsSyncWasAnsweredBefore) {
  EnterTwo();
  Step(1, 5);
  Refuse(1, {Code::kStateMismatch, "no"});
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.code, Code::kStateMismatch);
  EXPECT_TRUE(Get<StepDone>(out_).empty());
  EXPECT_TRUE(Get<StepDone>(Passed(1)).at(0).outcome.ok());
}

TEST_F(PeerCoreTest, AStepWithoutAStateDoesNotWaitForTheSyncOfAnother) {
  Give(CoordinatorUp{});
  Join(1);
  Join(3);
  Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {3, 1, 1}}));
  Commit(1);
  Step(1, 5);
  Give(LocalStep{LocalId(3)});
  EXPECT_TRUE(Get<StepDone>(Passed(1)).empty());
  EXPECT_EQ(Get<StepDone>(Passed(3)).at(0).local, LocalId(3));
}

TEST_F(PeerCoreTest, AStepThatWaitsForItsSyncTellsTheWorldOfThenAndThatOfItsBoundary) {
  FetchInStep();
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}}));
  EXPECT_TRUE(Get<StopTransfer>(out_).empty()) << "a sync is about members, not epochs";
  Commit(2);
  EXPECT_TRUE(Get<StopTransfer>(out_).empty());
  EXPECT_EQ(Get<WorldChanged>(out_).size(), 1u);
  Transferred(1);
  Result(1, SyncAction::kEnd, 5);
  EXPECT_EQ(Get<StepDone>(out_).at(0).world,
            (World{Epoch(2), MemberId(1), 0, 1, 0, false, Epoch(1), {Epoch(1), 0, 2}}));
}

// The stream breaks with the answer, and a member has died before it is repeated. The members that
// heard the first answer were told two members.
TEST_F(PeerCoreTest, ARepeatedAnswerTellsTheWorldOfItsBoundary) {
  EnterTwo();
  Give(LocalStep{LocalId(1)});
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}}));
  Commit(2);
  EXPECT_EQ(Get<StepDone>(Passed(1)).at(0).world,
            (World{Epoch(2), MemberId(1), 0, 1, 0, false, Epoch(1), {Epoch(1), 0, 2}}));
  Give(LocalStep{LocalId(1)});
  EXPECT_EQ(Get<StepDone>(Passed(1, 2, 2)).at(0).world.step, (StepWorld{Epoch(2), 0, 1}));
  Give(LocalStep{LocalId(1)});
  EXPECT_EQ(Get<LogLine>(Passed(1, 3, 1)).size(), 1u) << "epochs before its boundary are forgotten";
}

TEST_F(PeerCoreTest, ASyncOutsideAStepIsAnsweredByItself) {
  EnterTwo();
  EXPECT_EQ(Sent<control::SyncVote>(Sync(1, 5)).at(0).offer.number, 1u);
  EXPECT_EQ(Get<ServeState>(out_).size(), 1u);
  Result(1, SyncAction::kEnd, 5);
  EXPECT_EQ(Get<EndServe>(out_).size(), 1u);
  EXPECT_EQ(Get<SyncDone>(out_).size(), 1u);
  EXPECT_TRUE(Get<StepDone>(out_).empty());
}

TEST_F(PeerCoreTest, AFetchedStateIsReportedAndServed) {
  FetchInStep();
  Transferred(1);
  const auto done = Sent<control::FetchDone>(out_);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].state, (Hash128{5, 0}));
  EXPECT_EQ(done[0].sources, std::vector<MemberId>{MemberId(2)});
  EXPECT_EQ(Get<ServeState>(out_).size(), 1u);
  EXPECT_TRUE(Get<StepDone>(out_).empty());
}

TEST_F(PeerCoreTest, SyncsOutOfPlaceSayWhy) {
  Give(CoordinatorUp{});
  const auto refused = [this] { return Get<SyncDone>(out_).at(0).outcome.code; };
  Sync(1, 5);
  EXPECT_EQ(refused(), Code::kEvicted) << "nobody";
  Step(1, 5);
  EXPECT_EQ(refused(), Code::kEvicted);
  EXPECT_LT(Index<SyncDone>(), Index<StepDone>());
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kEvicted);
  Join(1);
  Sync(1, 5);
  EXPECT_EQ(refused(), Code::kFailedPrecondition) << "not admitted";
  Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}}));
  Commit(1);
  Sync(1, 5);
  Sync(1, 5);
  EXPECT_EQ(refused(), Code::kFailedPrecondition) << "in a sync";
  EXPECT_EQ(Get<StepDone>(Give(LocalStep{LocalId(1)})).at(0).outcome.text,
            "this member is in a sync: wait for its end");
  EXPECT_TRUE(Sent<control::Vote>(Step(1, 5)).empty());
  EXPECT_EQ(refused(), Code::kFailedPrecondition);
  Result(1, SyncAction::kEnd, 5);
  Give(LocalStep{LocalId(1)});
  Sync(1, 5);
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.text,
            "this member stands at a step boundary: sync with the step, or after it");
}

TEST_F(PeerCoreTest, AStepWhoseSyncFailedIsPassedAllTheSame) {
  FetchInStep();
  Transferred(1, {Code::kUnavailable, "nobody has it"});
  Refuse(1, {Code::kAborted, "sync again"});
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.code, Code::kAborted);
  EXPECT_TRUE(Get<StepDone>(out_).at(0).outcome.ok()) << "the boundary is passed";
  EXPECT_TRUE(Sent<control::Vote>(Step(1, 7)).at(0).sync->complete);
}

TEST_F(PeerCoreTest, AnOfferIsSaidAgainWithItsVoteAndThenByItself) {
  EnterTwo();
  const auto reconnect = [this] {
    Give(CoordinatorDown{});
    Give(CoordinatorUp{});
  };
  Step(1, 5);
  reconnect();
  EXPECT_EQ(Sent<control::Vote>(out_).at(0).sync->number, 1u);
  EXPECT_TRUE(Sent<control::SyncVote>(out_).empty());
  Passed(1);
  reconnect();
  EXPECT_TRUE(Sent<control::Vote>(out_).empty());
  EXPECT_TRUE(Sent<control::SyncVote>(out_).at(0).offer.complete);
  Result(1, SyncAction::kFetch, 6);
  reconnect();
  EXPECT_FALSE(Sent<control::SyncVote>(out_).at(0).offer.complete) << "half is there";
  EXPECT_EQ(Get<ChangeSources>(Result(1, SyncAction::kFetch, 6)).size(), 1u) << "goes on";
  Give(CoordinatorDown{});
  EXPECT_TRUE(Get<ToCoordinator>(Transferred(1)).empty());
  Give(CoordinatorUp{});
  const auto votes = Sent<control::SyncVote>(out_);
  EXPECT_TRUE(votes.at(0).offer.complete);
  EXPECT_EQ(votes[0].offer.state, (Hash128{6, 0}));
  EXPECT_EQ(Get<StepDone>(Result(1, SyncAction::kEnd, 6)).size(), 1u);
}

TEST_F(PeerCoreTest, AnEvictedMemberIsGoneWhenNothingWritesToItsTensors) {
  FetchInStep();
  Removed(1, Removal::kEvicted);
  EXPECT_EQ(Get<StopTransfer>(out_).size(), 1u);
  EXPECT_TRUE(Get<MemberGone>(out_).empty());
  Transferred(1, {Code::kAborted, "stopped"});
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_LT(Index<SyncDone>(), Index<StepDone>());
  EXPECT_LT(Index<StepDone>(), Index<MemberGone>());
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, AGroupBeginsAnewOnlyWhenTheTransfersOfTheOldOneHaveStopped) {
  FetchInStep();
  Join(5);
  Removed(1, Removal::kEvicted);
  Say(MakePrepare(3, 0, 3, 0, {{5, 1, 3}}));
  EXPECT_TRUE(Sent<control::EpochReady>(out_).empty());
  Transferred(1, {Code::kAborted, "stopped"});
  EXPECT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
  EXPECT_EQ(Get<JoinDone>(Commit(3)).at(0).local, LocalId(5));
}

TEST_F(PeerCoreTest, ALeaverDoesNotWaitForItsSync) {
  FetchInStep();
  EXPECT_EQ(Sent<control::Leave>(Give(LocalLeave{LocalId(1)})).size(), 1u);
  Transferred(1);
  EXPECT_TRUE(Get<StepDone>(Result(1, SyncAction::kEnd, 5)).empty()) << "it is on its way out";
  EXPECT_EQ(Get<SyncDone>(out_).size(), 1u);
  Removed(1, Removal::kLeft);
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kFailedPrecondition);
  EXPECT_EQ(Get<LeaveDone>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, ADeadTrainersTransferStopsWhenItIsOut) {
  EnterTwo();
  Sync(1, 9);
  Result(1, SyncAction::kFetch, 5);
  EXPECT_TRUE(Sent<control::Leave>(Give(LocalDied{LocalId(1), "killed"})).at(0).died);
  EXPECT_EQ(Get<StopTransfer>(Removed(1, Removal::kDied)).size(), 1u);
  Transferred(1, {Code::kAborted, "stopped"});
  EXPECT_EQ(Get<SyncDone>(out_).size(), 1u);
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, AnOfferThatIsMadeWhileDrainingEndsWithTheMember) {
  EnterTwo();
  Give(DrainRequested{now_ + Seconds(30)});
  Step(1, 5);
  EXPECT_TRUE(Sent<control::Vote>(out_).empty());
  EXPECT_EQ(Sent<control::Leave>(out_).size(), 1u);
  Removed(1, Removal::kLeft);
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_EQ(Get<Drained>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, TheDifferenceOfManifestsIsWaitedForNoLongerThanDetectMs) {
  EnterTwo();
  Say(control::Welcome{"c", 300});
  Sync(1, 5);
  Refuse(1, {Code::kStateMismatch, "differs"}, {{MemberId(2), PeerId(2)}});
  EXPECT_EQ(Get<CompareManifest>(out_).size(), 1u);
  EXPECT_TRUE(Get<SyncDone>(out_).empty());
  const Tick due = now_ + Millis(300);
  while (now_ < due) {
    EXPECT_LE(core_.NextDeadline(), due);
    now_ = core_.NextDeadline();
    Give(TimePassed{});
  }
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.text, "differs");
  EXPECT_TRUE(Give(ManifestCompared{LocalId(1), "late"}).empty());
}

TEST_F(PeerCoreTest, AnAnswerForAMemberThatIsNotHereIsIgnored) {
  EXPECT_TRUE(Result(1, SyncAction::kEnd, 5).empty());
  EnterTwo();
  EXPECT_TRUE(Result(2, SyncAction::kServe, 5).empty());
  EXPECT_TRUE(Result(1, SyncAction::kServe, 5).empty()) << "it did not ask";
}

// ------------------------------------------------------------------------------ drain

TEST_F(PeerCoreTest, ADrainWithNobodyHereIsDoneAtOnce) {
  Give(CoordinatorUp{});
  Give(DrainRequested{now_ + Seconds(30)});
  EXPECT_EQ(Sent<control::Draining>(out_).size(), 1u);
  EXPECT_EQ(Get<Drained>(out_).size(), 1u);
  EXPECT_TRUE(Get<Drained>(Give(DrainRequested{now_})).empty());
}

TEST_F(PeerCoreTest, ADrainWaitsForTheStepBoundary) {
  EnterTwo();
  Give(DrainRequested{now_ + Seconds(30)});
  EXPECT_TRUE(Sent<control::Leave>(out_).empty());
  EXPECT_EQ(Sent<control::Leave>(Give(LocalStep{LocalId(1)})).size(), 1u);
  Removed(1, Removal::kLeft);
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_EQ(Get<Drained>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, AnOperatorsDrainHasADeadlineToo) {
  EnterTwo();
  Say(control::Drain{"kernel update"});
  EXPECT_EQ(Sent<control::Draining>(out_).size(), 1u);
  EXPECT_EQ(Get<JoinDone>(Give(LocalJoin{LocalId(4), kGroup, "t"})).at(0).outcome.text,
            "join refused: this peer is draining (kernel update); join at another peer");
  now_ = now_ + Seconds(30);
  EXPECT_EQ(Sent<control::Leave>(Give(TimePassed{})).at(0).reason,
            "peer is draining: kernel update");
}

TEST_F(PeerCoreTest, ADrainIsToldAgainAfterAReconnect) {
  EnterTwo();
  Give(DrainRequested{now_ + Seconds(30)});
  Give(CoordinatorDown{});
  EXPECT_EQ(Sent<control::Draining>(Give(CoordinatorUp{})).size(), 1u);
}

TEST_F(PeerCoreTest, ADrainEndsEvenIfTheCoordinatorDoesNotComeBack) {
  EnterTwo();
  Post(1, 7, Large());
  Give(DrainRequested{now_ + Seconds(2)});
  Give(CoordinatorDown{});
  now_ = core_.NextDeadline();
  EXPECT_TRUE(Get<StopAttempt>(Give(TimePassed{})).empty());
  now_ = core_.NextDeadline();
  EXPECT_EQ(Get<StopAttempt>(Give(TimePassed{})).size(), 1u);
  Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()});
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
  EXPECT_EQ(Get<Drained>(out_).size(), 1u);
  EXPECT_EQ(core_.NextDeadline(), kNever);
}

TEST_F(PeerCoreTest, ADrainEndsEvenIfTheCoordinatorRefusesThisPeerAgainAndAgain) {
  EnterTwo();
  Give(DrainRequested{now_ + Seconds(2)});
  Give(CoordinatorDown{});
  const Tick down = now_;
  while (Get<MemberGone>(out_).empty()) {
    Give(CoordinatorUp{});
    Give(CoordinatorDown{});
    now_ = now_ + Millis(250);
    Give(TimePassed{});
    ASSERT_LE(now_ - down, Seconds(10));
  }
  EXPECT_EQ(Get<Drained>(out_).size(), 1u);
}

TEST_F(PeerCoreTest, ACancelIsSentToTheCoordinatorAndAgainWhenItComesBack) {
  EnterTwo();
  Post(1, 7, Large());
  const control::CancelOp wanted{kGroup, MemberId(1), Epoch(), "m1 cancelled all-reduce tag 7"};
  EXPECT_EQ(Sent<control::CancelOp>(Give(LocalCancel{{LocalId(1), 7}})),
            std::vector<control::CancelOp>{wanted});
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  Give(CoordinatorDown{});
  EXPECT_TRUE(Sent<control::CancelOp>(Give(CoordinatorUp{})).empty());
  EXPECT_EQ(Sent<control::CancelOp>(Say(control::Welcome{"c", 0})),
            std::vector<control::CancelOp>{wanted});
}

TEST_F(PeerCoreTest, ACancelledOpEndsWithTheEpochThatAbortsIt) {
  EnterTwo();
  Post(1, 7, Large());
  Give(LocalCancel{{LocalId(1), 7}});
  Say(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}}));
  Give(AttemptStopped{kGroup, OpOrdinal(1), Epoch()});
  Up(2);
  const auto ready = Sent<control::EpochReady>(out_);
  ASSERT_EQ(ready.size(), 1u);
  ASSERT_EQ(ready[0].ops.size(), 1u);
  EXPECT_TRUE(ready[0].ops[0].cancelled);
  Commit(2, {{OpOrdinal(1), Fate::kAbort}});
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kAborted);
}

TEST_F(PeerCoreTest, ACancelOfNobodyOrOfAnOpThatIsOverDoesNothing) {
  EXPECT_TRUE(Give(LocalCancel{{LocalId(1), 7}}).empty());
  EnterTwo();
  EXPECT_TRUE(Give(LocalCancel{{LocalId(1), 7}}).empty());
  EXPECT_TRUE(Give(LocalCancel{{LocalId(9), 7}}).empty());
}

TEST_F(PeerCoreTest, EqualHistoriesGiveEqualDigests) {
  const auto run = [](int steps) {
    PeerCore core(Config());
    const std::vector<Event> events = {
        CoordinatorUp{},
        LocalJoin{LocalId(1), kGroup, "t"},
        FromCoordinator{control::JoinPending{1, kGroup, MemberId(1)}},
        FromCoordinator{MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}})},
        LinkUp{"run", PeerId(2)},
        FromCoordinator{control::CommitEpoch{kGroup, Epoch(1), {}}},
        LocalPost{{LocalId(1), 1}, 7, Large()},
        LocalCancel{{LocalId(1), 1}},
        LocalStep{LocalId(1), State(5)},
        FromCoordinator{control::VoteResult{kGroup, MemberId(1), 1, Epoch(1)}},
        DrainRequested{Tick{Seconds(5)}},
        CoordinatorDown{},
    };
    for (int i = 0; i < steps; ++i) core.Step(events[static_cast<size_t>(i)], Tick{i});
    return core.Digest();
  };
  std::set<uint64_t> digests;
  for (int steps = 0; steps <= 12; ++steps) {
    EXPECT_EQ(run(steps), run(steps));
    EXPECT_TRUE(digests.insert(run(steps)).second) << steps;
  }
}

TEST_F(PeerCoreTest, ACoreCanBeMoved) {
  EnterTwo();
  PeerCore other = std::move(core_);
  EXPECT_EQ(other.GetStats().members, 1u);
  core_ = std::move(other);
  EXPECT_EQ(core_.GetStats().members, 1u);
}

// ------------------------------------------------------------------------------ the background

class BackgroundCoreTest : public PeerCoreTest {
 protected:
  // Members 2 and 3 contribute, at other peers. Member 1 joins here, in the background.
  void Enter() {
    Give(CoordinatorUp{});
    Give(LocalJoin{LocalId(1), kGroup, "t", {.background = true}});
    EXPECT_TRUE(Sent<control::Join>(out_).at(0).wish.background);
    Say(control::JoinPending{1, kGroup, MemberId(1)});
    Say(MakePrepare(2, 0, 2, 0, {{2, 2, 1}, {3, 3, 1}, {1, 1, 2, control::kInBackground}}));
    Up(2);
    Up(3);
    Commit(2);
    ASSERT_TRUE(Get<JoinDone>(out_).at(0).outcome.ok());
    EXPECT_TRUE(Get<JoinDone>(out_).at(0).world.background);
  }
  Actions& Agreed(uint64_t revision) {
    return Say(control::StateAgreed{kGroup, revision, {1, 1}, {100 + revision, 0}});
  }
  // Member 1 contributes from epoch 3 on.
  void Raise() {
    Say(MakePrepare(3, 2, 3, 0, {{2, 2, 1}, {3, 3, 1}, {1, 1, 2, Epoch(3)}}));
    Up(2);
    Up(3);
    Commit(3);
    Passed(1, 1, 3);
  }
  Actions& Bring(uint64_t state, uint64_t revision) {
    return Give(
        LocalStep{LocalId(1), SyncRequest{SyncStrategy::kPopular, revision, {1, 1}, {state, 0}}});
  }
};

TEST_F(BackgroundCoreTest, ItsStepIsAVoteWithoutAnOfferAndTheFetchBeginsBehindIt) {
  Enter();
  Agreed(3);
  EXPECT_TRUE(Get<StartTransfer>(out_).empty());
  Bring(7, 0);
  ASSERT_EQ(Sent<control::Vote>(out_).size(), 1u);
  EXPECT_FALSE(Sent<control::Vote>(out_)[0].sync.has_value());
  EXPECT_FALSE(Sent<control::Vote>(out_)[0].ready);
  EXPECT_TRUE(Get<SyncDone>(out_).at(0).background);
  Passed(1, 1, 2);
  EXPECT_TRUE(Get<StepDone>(out_).at(0).outcome.ok());
  const StartTransfer start = Get<StartTransfer>(out_).at(0);
  EXPECT_TRUE(start.background);
  EXPECT_EQ(start.state, (Hash128{103, 0}));
  EXPECT_EQ(start.sources,
            (std::vector<control::SyncSource>{{MemberId(2), PeerId(2)}, {MemberId(3), PeerId(3)}}));
}

TEST_F(BackgroundCoreTest, ASyncAloneBeginsToFetchAtOnceAndFollowsEachCommit) {
  Enter();
  Agreed(3);
  Sync(1, 7);
  EXPECT_TRUE(Get<SyncDone>(out_).at(0).background);
  EXPECT_EQ(Get<StartTransfer>(out_).size(), 1u);
  EXPECT_EQ(Get<StopTransfer>(Agreed(4)).size(), 1u);
  Give(TransferEnded{LocalId(1), {Code::kAborted, "stopped"}});
  EXPECT_EQ(Get<StartTransfer>(out_).at(0).revision, 4u);
}

TEST_F(BackgroundCoreTest, TheStepThatIsReadyCarriesAnOfferAndIsInTheSyncOfItsBoundary) {
  Enter();
  Agreed(3);
  Sync(1, 7);
  Give(TransferEnded{LocalId(1), {}});
  Give(LocalTake{LocalId(1), now_});
  EXPECT_EQ(Get<TakeDone>(out_).at(0).revision, 3u);
  Bring(8, 4);
  const control::Vote vote = Sent<control::Vote>(out_).at(0);
  EXPECT_TRUE(vote.ready);
  EXPECT_EQ(vote.sync->state, (Hash128{8, 0}));
  Raise();
  EXPECT_TRUE(Get<StepDone>(out_).empty());
  Result(1, SyncAction::kEnd, 8);
  EXPECT_FALSE(Get<SyncDone>(out_).at(0).background);
  EXPECT_FALSE(Get<StepDone>(out_).at(0).world.background);
}

TEST_F(BackgroundCoreTest, ItCannotSendBeforeItContributes) {
  Enter();
  Agreed(3);
  Give(LocalStep{LocalId(1), State(7, SyncStrategy::kSend)});
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.code, Code::kInvalidArgument);
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kInvalidArgument);
  EXPECT_TRUE(Sent<control::Vote>(out_).empty());
}

TEST_F(BackgroundCoreTest, AReadyVoteIsSaidAgain) {
  Enter();
  Agreed(3);
  Sync(1, 103);
  Give(LocalTake{LocalId(1), now_});
  Bring(8, 4);
  Give(CoordinatorDown{});
  Give(CoordinatorUp{});
  EXPECT_TRUE(Sent<control::Vote>(out_).at(0).ready);
  EXPECT_TRUE(Sent<control::Vote>(out_)[0].sync.has_value());
}

TEST_F(BackgroundCoreTest, WhereNothingWasAgreedOnItIsReadyAtItsFirstBoundary) {
  Enter();
  Give(LocalStep{LocalId(1)});
  EXPECT_TRUE(Sent<control::Vote>(out_).at(0).ready);
}

TEST_F(BackgroundCoreTest, WhereNobodyElseContributesItIsReady) {
  Enter();
  Agreed(3);
  Say(MakePrepare(3, 2, 2, 3, {{1, 1, 2, control::kInBackground}}));
  Commit(3);
  Give(LocalStep{LocalId(1)});
  EXPECT_TRUE(Sent<control::Vote>(out_).at(0).ready);
}

TEST_F(BackgroundCoreTest, AnEpochInTheMiddleNamesTheSourcesThatAreLeft) {
  Enter();
  Agreed(3);
  Sync(1, 7);
  Say(MakePrepare(3, 2, 2, 3, {{3, 3, 1}, {1, 1, 2, control::kInBackground}}));
  Up(3);
  Commit(3);
  EXPECT_EQ(Get<ChangeSources>(out_).at(0).sources,
            (std::vector<control::SyncSource>{{MemberId(3), PeerId(3)}}));
}

TEST_F(BackgroundCoreTest, ItLeavesWhenNothingWritesToItsTensors) {
  Enter();
  Agreed(3);
  Sync(1, 7);
  Give(LocalLeave{LocalId(1)});
  Removed(1, Removal::kLeft);
  EXPECT_EQ(Get<StopTransfer>(out_).size(), 1u);
  EXPECT_TRUE(Get<LeaveDone>(out_).empty());
  Give(TransferEnded{LocalId(1), {Code::kAborted, "stopped"}});
  EXPECT_EQ(Get<LeaveDone>(out_).size(), 1u);
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
}

TEST_F(BackgroundCoreTest, ACallBetweenRemovalAndEndIsNotToldThatItsTensorsAreFree) {
  Enter();
  Agreed(3);
  Sync(1, 7);
  Removed(1, Removal::kEvicted);
  EXPECT_EQ(Get<StopTransfer>(out_).size(), 1u);
  Bring(7, 0);
  EXPECT_EQ(Get<SyncDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_TRUE(Get<SyncDone>(out_)[0].background);
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_TRUE(Get<MemberGone>(out_).empty());
  Give(TransferEnded{LocalId(1), {Code::kAborted, "stopped"}});
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
}

TEST_F(BackgroundCoreTest, HoldersServeOnBehindTheCommitWhileSomebodyFetches) {
  Give(CoordinatorUp{});
  Join(1);
  Say(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1, control::kInBackground}}));
  Up(2);
  Commit(1);
  Sync(1, 5);
  Result(1, SyncAction::kEnd, 5);
  EXPECT_TRUE(Get<ServeState>(out_).at(0).may_change);
  Say(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1, Epoch(2)}}));
  Up(2);
  EXPECT_EQ(Get<EndServe>(Commit(2)).size(), 1u);
}

}  // namespace
}  // namespace longhaul::peerd
