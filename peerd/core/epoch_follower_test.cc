#include "peerd/core/epoch_follower.h"

#include <gtest/gtest.h>

#include "peerd/core/testing.h"

namespace longhaul::peerd {
namespace {

constexpr PeerId kSelf(1);
constexpr PeerId kTwo(2);
constexpr PeerId kThree(3);

class EpochFollowerTest : public testing::Test {
 protected:
  bool Prepare(const control::PrepareEpoch& message, int64_t ms = 0) {
    out_.clear();
    const bool started = epochs_.Prepare(message, 1000, Tick{Millis(ms)}, &out_);
    epochs_.CheckInvariants();
    return started;
  }
  bool Commit(uint64_t epoch) {
    out_.clear();
    const bool done = epochs_.Commit({kGroup, Epoch(epoch), {}}, Tick{5000}, &out_);
    epochs_.CheckInvariants();
    return done;
  }
  void Down(PeerId peer, bool was_up, const std::string& reason = "reset") {
    out_.clear();
    epochs_.LinkDown(peer, was_up, {reason, 700}, &out_);
    epochs_.CheckInvariants();
  }
  void UpAll() {
    for (const PeerId peer : {kTwo, kThree, PeerId(4)}) epochs_.LinkUp(peer);
  }
  // Two peers in epoch 1.
  void Begin() {
    ASSERT_TRUE(Prepare(First()));
    epochs_.LinkUp(kTwo);
    epochs_.AnswerReady({}, &out_);
    ASSERT_TRUE(Commit(1));
  }
  static control::PrepareEpoch First() { return MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}}); }
  static control::PrepareEpoch Admit(uint64_t epoch) {
    return MakePrepare(epoch, 1, epoch, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, epoch}});
  }
  static control::PrepareEpoch Repair(uint64_t epoch) {
    return MakePrepare(epoch, 1, 1, epoch, {{1, 1, 1}, {2, 2, 1}});
  }

  EpochFollower epochs_{kGroup, kSelf};
  Actions out_;
};

TEST_F(EpochFollowerTest, AsksForLinksAndIsReadyWhenAllAreUp) {
  ASSERT_TRUE(Prepare(First(), 7));
  const auto open = Get<OpenLinks>(out_);
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].token, "token1");
  EXPECT_EQ(open[0].deadline, Tick{Millis(4007)});
  EXPECT_FALSE(epochs_.WantsReady());
  epochs_.LinkUp(kThree);
  EXPECT_FALSE(epochs_.WantsReady());
  epochs_.LinkUp(kTwo);
  ASSERT_TRUE(epochs_.WantsReady());
  out_.clear();
  epochs_.AnswerReady({}, &out_);
  EXPECT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
  ASSERT_TRUE(Commit(1));
  EXPECT_EQ(Get<KeepLinks>(out_)[0].peers, std::vector<PeerId>{kTwo});
  EXPECT_FALSE(epochs_.preparing());
}

TEST_F(EpochFollowerTest, AWorldOfOneNeedsNoLinks) {
  ASSERT_TRUE(Prepare(MakePrepare(1, 0, 1, 0, {{1, 1, 1}})));
  EXPECT_TRUE(Get<OpenLinks>(out_).empty());
  EXPECT_TRUE(epochs_.WantsReady());
}

TEST_F(EpochFollowerTest, ARepeatedPrepareIsAnsweredAgain) {
  ASSERT_TRUE(Prepare(First()));
  EXPECT_FALSE(Prepare(First()));
  EXPECT_TRUE(out_.empty());
  epochs_.LinkUp(kTwo);
  epochs_.AnswerReady({}, &out_);
  EXPECT_FALSE(Prepare(First()));
  EXPECT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
  out_.clear();
  epochs_.Resend(&out_);
  EXPECT_EQ(Sent<control::EpochReady>(out_).size(), 1u);
}

TEST_F(EpochFollowerTest, AnotherPreparationOfTheSameNumberIsNotAnswered) {
  ASSERT_TRUE(Prepare(First()));
  epochs_.LinkUp(kTwo);
  epochs_.AnswerReady({}, &out_);
  EXPECT_EQ(Sent<control::EpochReady>(out_).at(0).preparation, First().preparation);
  control::PrepareEpoch other = First();
  other.preparation = 5;
  EXPECT_FALSE(Prepare(other));
  EXPECT_TRUE(Sent<control::EpochReady>(out_).empty());
  EXPECT_EQ(Get<LogLine>(out_).size(), 1u);
  EXPECT_EQ(epochs_.prepared()->preparation, First().preparation);
}

TEST_F(EpochFollowerTest, TellsAllThatFailedOnceEveryLinkIsDecided) {
  ASSERT_TRUE(Prepare(Admit(1)));
  Down(kTwo, false, "refused by h:1");
  epochs_.FailIfDue(Tick{}, &out_);
  EXPECT_TRUE(out_.empty());
  Down(kThree, false, "refused by h:2");
  epochs_.FailIfDue(Tick{}, &out_);
  const auto failed = Sent<control::EpochFailed>(out_);
  ASSERT_EQ(failed.size(), 1u);
  ASSERT_EQ(failed[0].unreachable.size(), 2u);
  EXPECT_EQ(failed[0].unreachable[0].reason, "refused by h:1");
  EXPECT_EQ(epochs_.NextDeadline(), kNever);
  out_.clear();
  epochs_.Resend(&out_);
  EXPECT_EQ(Sent<control::EpochFailed>(out_).size(), 1u);
  EXPECT_FALSE(Commit(1));
}

TEST_F(EpochFollowerTest, ALinkOfWhichNothingIsHeardFailsAtTheDeadline) {
  ASSERT_TRUE(Prepare(Admit(1)));
  epochs_.LinkUp(kTwo);
  const Tick due = epochs_.NextDeadline();
  EXPECT_GT(due, Tick{Millis(1000)});
  out_.clear();
  epochs_.FailIfDue(due, &out_);
  const auto failed = Sent<control::EpochFailed>(out_);
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].unreachable[0].peer, kThree);
}

TEST_F(EpochFollowerTest, AFailureIsToldAgainAsItWasThoughTheLinkCameUpSince) {
  ASSERT_TRUE(Prepare(First()));
  out_.clear();
  epochs_.FailIfDue(Tick{Seconds(9)}, &out_);
  const auto told = Sent<control::EpochFailed>(out_);
  ASSERT_EQ(told.size(), 1u);
  epochs_.LinkUp(kTwo);
  out_.clear();
  epochs_.Resend(&out_);
  EXPECT_EQ(Sent<control::EpochFailed>(out_), told);
  EXPECT_FALSE(epochs_.WantsReady());
}

TEST_F(EpochFollowerTest, ALinkThatStoodAndBreaksIsLostNotFailed) {
  Begin();
  ASSERT_TRUE(Prepare(Repair(2)));
  epochs_.LinkUp(kTwo);
  epochs_.AnswerReady({}, &out_);
  Down(kTwo, true);
  const auto lost = Sent<control::LinkLost>(out_);
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].epoch, Epoch(2));
  EXPECT_EQ(lost[0].silent_ms, 700u);
  Down(kTwo, false);
  EXPECT_TRUE(out_.empty());
  epochs_.FailIfDue(Tick{Millis(9999)}, &out_);
  EXPECT_TRUE(out_.empty());
  // The coordinator may have committed before it heard of the loss.
  ASSERT_TRUE(Commit(2));
  EXPECT_TRUE(epochs_.LostPeers().contains(kTwo));
  out_.clear();
  epochs_.Resend(&out_);
  EXPECT_EQ(Sent<control::LinkLost>(out_).size(), 1u);
}

TEST_F(EpochFollowerTest, ALostLinkIsToldOncePerEpoch) {
  Begin();
  Down(kTwo, true);
  EXPECT_EQ(Sent<control::LinkLost>(out_).size(), 1u);
  Down(kTwo, true);
  EXPECT_TRUE(out_.empty());
  Down(kThree, true);
  EXPECT_TRUE(out_.empty());
  ASSERT_TRUE(Prepare(Repair(2)));
  EXPECT_TRUE(Sent<control::LinkLost>(out_).empty());
  epochs_.LinkUp(kTwo);
  epochs_.AnswerReady({}, &out_);
  ASSERT_TRUE(Commit(2));
  EXPECT_TRUE(epochs_.LostPeers().empty());
}

TEST_F(EpochFollowerTest, AnEpochThatOnlyAdmitsIsNotReadyOverALostLink) {
  Begin();
  Down(kTwo, true);
  ASSERT_TRUE(Prepare(Admit(2)));
  const auto lost = Sent<control::LinkLost>(out_);
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].epoch, Epoch(2));
  epochs_.LinkUp(kTwo);
  epochs_.LinkUp(kThree);
  EXPECT_FALSE(epochs_.WantsReady());
  // After the abort the loss belongs to the old epoch again.
  out_.clear();
  EXPECT_TRUE(epochs_.Abort({kGroup, Epoch(2), "gone"}, &out_));
  EXPECT_EQ(Sent<control::LinkLost>(out_)[0].epoch, Epoch(1));
  EXPECT_EQ(Get<KeepLinks>(out_)[0].peers, std::vector<PeerId>{kTwo});
}

// The ring is 1, 2, 3, 4. The link between peers 1 and 3 goes through peer 2.
control::PrepareEpoch Square(uint64_t epoch, uint64_t base, uint64_t last_freeze) {
  auto prepare =
      MakePrepare(epoch, base, 1, last_freeze, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 1}});
  prepare.blocked = {{kSelf, kThree, kTwo}};
  return prepare;
}

TEST_F(EpochFollowerTest, ABlockedPairHasALinkThroughItsRelay) {
  ASSERT_TRUE(Prepare(Square(1, 0, 0)));
  std::vector<std::pair<PeerId, PeerId>> wanted;
  const OpenLinks open = Get<OpenLinks>(out_).at(0);
  for (const LinkWanted& link : open.links) wanted.emplace_back(link.peer.peer, link.relay);
  EXPECT_EQ(wanted, (std::vector<std::pair<PeerId, PeerId>>{
                        {kTwo, PeerId()}, {kThree, kTwo}, {PeerId(4), PeerId()}}));
  UpAll();
  ASSERT_TRUE(epochs_.WantsReady());
  epochs_.AnswerReady({}, &out_);
  ASSERT_TRUE(Commit(1));
  EXPECT_EQ(Get<KeepLinks>(out_).at(0).peers, (std::vector<PeerId>{kTwo, kThree, PeerId(4)}));
  // A link through a relay is lost like any other, and no other link is lost with it.
  Down(kThree, true);
  EXPECT_EQ(Sent<control::LinkLost>(out_).at(0).peer, kThree);
  EXPECT_EQ(epochs_.LostPeers(), std::set<PeerId>{kThree});
}

TEST_F(EpochFollowerTest, ThatALinkGoesAnotherWayIsNoLoss) {
  auto straight = Square(1, 0, 0);
  straight.blocked.clear();
  ASSERT_TRUE(Prepare(straight));
  UpAll();
  epochs_.AnswerReady({}, &out_);
  ASSERT_TRUE(Commit(1));
  ASSERT_TRUE(Prepare(Square(2, 1, 2)));
  out_.clear();
  Down(kThree, true);  // the old link
  EXPECT_TRUE(out_.empty());
  UpAll();
  EXPECT_TRUE(epochs_.WantsReady());
  // The new link.
  Down(kThree, true);
  EXPECT_EQ(Sent<control::LinkLost>(out_).size(), 1u);
  // A new preparation has another relay.
  auto other = Square(3, 1, 3);
  other.blocked = {{kSelf, kThree, PeerId(4)}};
  ASSERT_TRUE(Prepare(other));
  out_.clear();
  Down(kThree, false);
  epochs_.LinkUp(kTwo);
  epochs_.LinkUp(PeerId(4));
  epochs_.FailIfDue(Tick(), &out_);
  EXPECT_EQ(Sent<control::EpochFailed>(out_).at(0).unreachable.at(0).peer, kThree);
}

TEST_F(EpochFollowerTest, ALinkGoesAnotherWayByAFreezeOnly) {
  ASSERT_TRUE(Prepare(Square(1, 0, 0)));
  UpAll();
  epochs_.AnswerReady({}, &out_);
  ASSERT_TRUE(Commit(1));
  auto admit = Square(2, 1, 0);
  admit.boundary = Epoch(2);
  admit.members.push_back({MemberId(5), PeerId(5), Epoch(2), "n"});
  admit.peers.push_back({PeerId(5), {"h:1"}, 0});
  auto freed = admit;
  freed.blocked.clear();
  EXPECT_FALSE(Prepare(freed));
  auto more = admit;
  more.blocked = {{kSelf, kThree, kTwo}, {kTwo, PeerId(4), kThree}};
  EXPECT_FALSE(Prepare(more));
  auto other = admit;
  other.blocked = {{kSelf, kThree, PeerId(4)}};
  EXPECT_FALSE(Prepare(other));
  // No frames to or from a newcomer are in flight, so its link may go through a relay.
  admit.blocked = {{kSelf, kThree, kTwo}, {kTwo, PeerId(5), kSelf}};
  EXPECT_TRUE(Prepare(admit));
  freed = Square(3, 1, 3);
  freed.blocked.clear();
  EXPECT_TRUE(Prepare(freed));
}

TEST_F(EpochFollowerTest, ALossOfAPeerThatTheNextEpochLeavesOutIsNotTold) {
  Begin();
  ASSERT_TRUE(Prepare(MakePrepare(2, 1, 1, 2, {{1, 1, 1}})));
  Down(kTwo, true);
  EXPECT_TRUE(out_.empty());
  EXPECT_TRUE(epochs_.LostPeers().contains(kTwo));
}

TEST_F(EpochFollowerTest, IgnoresWhatMakesNoSense) {
  EXPECT_FALSE(Commit(1));
  EXPECT_EQ(Get<LogLine>(out_).size(), 1u);
  Begin();
  EXPECT_FALSE(Commit(1));  // repeated: ignored without a log line
  EXPECT_TRUE(out_.empty());
  const auto refused = [&](const control::PrepareEpoch& message) {
    return !Prepare(message) && Get<LogLine>(out_).size() == 1 && !epochs_.preparing();
  };
  EXPECT_TRUE(refused(First()));
  EXPECT_TRUE(refused(MakePrepare(2, 1, 2, 0, {{2, 2, 1}})));
  EXPECT_TRUE(refused(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}})));  // wrong base
  EXPECT_TRUE(refused(MakePrepare(3, 1, 1, 0, {{1, 1, 1}})));             // drops, no freeze
  auto back = Admit(3);
  back.members.pop_back();
  back.peers.pop_back();
  back.boundary = Epoch(1);
  back.last_freeze = Epoch(2);
  EXPECT_TRUE(refused(back));  // last_freeze changes without freeze
  EXPECT_TRUE(refused(MakePrepare(3, 1, 3, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}})));
  EXPECT_TRUE(refused(MakePrepare(3, 1, 3, 0, {{1, 1, 1}, {2, 2, 3}})));
  out_.clear();
  EXPECT_FALSE(epochs_.Abort({kGroup, Epoch(3), ""}, &out_));
  ASSERT_TRUE(Prepare(Repair(4)));
  out_.clear();
  EXPECT_FALSE(epochs_.Abort({kGroup, Epoch(4), ""}, &out_));
  EXPECT_FALSE(Prepare(Admit(5)));  // ops are frozen: only an epoch that freezes may follow
  EXPECT_TRUE(epochs_.freezing());
}

TEST_F(EpochFollowerTest, ABoundaryDoesNotGoBack) {
  ASSERT_TRUE(Prepare(Admit(2)));
  epochs_.LinkUp(kTwo);
  epochs_.LinkUp(kThree);
  epochs_.AnswerReady({}, &out_);
  ASSERT_TRUE(Commit(2));
  EXPECT_FALSE(Prepare(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}})));
}

TEST_F(EpochFollowerTest, ANewerPreparationReplacesAnOlderOne) {
  ASSERT_TRUE(Prepare(Admit(2)));
  epochs_.LinkUp(kTwo);
  ASSERT_TRUE(Prepare(Admit(3)));
  EXPECT_FALSE(epochs_.WantsReady());
  EXPECT_FALSE(Prepare(Admit(2)));
  epochs_.LinkUp(kTwo);
  epochs_.LinkUp(kThree);
  EXPECT_TRUE(epochs_.WantsReady());
  EXPECT_FALSE(Commit(2));
}

TEST_F(EpochFollowerTest, ANewcomerFollowsOutOfAFreezeThatCameToNothing) {
  // The last other member has gone, so there is nothing to freeze any more.
  ASSERT_TRUE(Prepare(MakePrepare(2, 1, 2, 2, {{1, 1, 2}, {2, 2, 1}})));
  ASSERT_TRUE(Prepare(MakePrepare(4, 3, 4, 2, {{1, 1, 4}})));
  EXPECT_TRUE(epochs_.WantsReady());
}

TEST_F(EpochFollowerTest, ResetKeepsThePreparation) {
  Begin();
  ASSERT_TRUE(Prepare(Repair(2)));
  epochs_.Reset();
  EXPECT_TRUE(epochs_.history().empty());
  EXPECT_TRUE(epochs_.preparing());
  EXPECT_EQ(epochs_.OtherPeers(), std::set<PeerId>{kTwo});
}

}  // namespace
}  // namespace longhaul::peerd
