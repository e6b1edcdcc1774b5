// Members that cancel an op: the coordinator prepares an epoch that freezes ops, and judges the op.
#include <string>
#include <vector>

#include "coordinator/core/coordinator_core.h"
#include "gtest/gtest.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using control::Fate;
using Texts = std::vector<std::string>;

class CancelTest : public testing::Test {
 protected:
  static GroupKey G() { return Harness::G(); }
  static PeerId P(uint64_t n) { return PeerId(n); }
  static MemberId M(uint64_t n) { return MemberId(n); }

  // Adds peers 1..n with one admitted member each, m1..mn. The newest epoch is n.
  void Found(uint64_t n) {
    h.Found(n);
    ASSERT_EQ(h.View().committed, Epoch(n));
  }
  void Vote(uint64_t n) {
    for (uint64_t j = 1; j <= n; ++j) h.LivelyVote(P(j), M(j));
    h.Run();
  }
  static control::CancelOp CancelOf(uint64_t member, uint64_t after = 0) {
    return {G(), M(member), Epoch(after), ToString(M(member)) + " cancelled all-reduce tag 7"};
  }
  // An op with tag 7 that the peer has announced, and that nobody is done with.
  static control::OpReport Op(uint64_t ordinal, bool cancelled = false) {
    control::OpReport op;
    op.ordinal = OpOrdinal(ordinal);
    op.boundary = Epoch(3);
    op.tag = 7;
    op.cancelled = cancelled;
    return op;
  }
  void SetOp(uint64_t peer, const control::OpReport& op) {
    h.Lively(P(peer)).groups[G()].ops = {op};
  }
  size_t Closings() const { return h.closings().size(); }

  Harness h;
};

TEST_F(CancelTest, LeadsToAFreezingEpochWithTheSameMembersThatAbortsTheOp) {
  Found(3);
  SetOp(1, Op(11, /*cancelled=*/true));
  SetOp(2, Op(21));
  h.Say(P(1), CancelOf(1));
  h.Wait(100);
  const std::string prepare =
      "Prepare 4 base=3 boundary=3 last_freeze=4 freeze members=m1@1,m2@2,m3@3 ring=p1,p2,p3";
  EXPECT_EQ(h.Take(P(1)), (Texts{prepare, "Commit 4 o11=abort"}));
  EXPECT_EQ(h.Take(P(2)), (Texts{prepare, "Commit 4 o21=abort"}));
  EXPECT_EQ(h.Take(P(3)), (Texts{prepare, "Commit 4 missed=3/7"}));
  EXPECT_EQ(h.View().members.size(), 3u);
  EXPECT_EQ(h.Prepared(P(2)).cause, "joined= left= because m1 cancelled all-reduce tag 7");
}

TEST_F(CancelTest, NamesTheSetOfAMissedOp) {
  Found(2);
  control::OpReport op = Op(11, /*cancelled=*/true);
  op.boundary = Epoch(2);
  op.set = 99;
  SetOp(1, op);
  h.Say(P(1), CancelOf(1));
  h.Wait(100);
  EXPECT_EQ(h.Take(P(2)).back(), "Commit 3 missed=2/7/99");
}

TEST_F(CancelTest, AlsoOfAnOpThatNoOtherPeerHasHeardOfReachesThoseThatHaveAnnouncedIt) {
  Found(3);
  // Peer 1 has not announced the op: it still waits for another member there.
  SetOp(1, Op(11, /*cancelled=*/true));
  control::OpReport announced = Op(21);
  announced.matches = {{P(3), OpOrdinal(31)}};
  SetOp(2, announced);
  h.Say(P(1), CancelOf(1));
  h.Wait(100);
  EXPECT_EQ(h.Take(P(1)).back(), "Commit 4 o11=abort");
  EXPECT_EQ(h.Take(P(2)).back(), "Commit 4 o21=abort");
  EXPECT_EQ(h.Take(P(3)).back(), "Commit 4 missed=3/7");
}

TEST_F(CancelTest, IsAnEventAndTheCauseOfTheFault) {
  Found(2);
  h.Say(P(2), CancelOf(2));
  h.Wait(100);
  EXPECT_EQ(h.Notices("cancel"),
            Texts{"op cancelled member=m2 why=\"m2 cancelled all-reduce tag 7\""});
  EXPECT_EQ(h.View().fault_epoch, Epoch(3));
  EXPECT_EQ(h.View().fault.cause, "cancel");
  EXPECT_EQ(h.View().fault.detector, "p2");
  EXPECT_EQ(h.View().fault.detect_ms, 0u);
  EXPECT_NE(h.Notices("commit").back().find("cause=cancel detector=p2 detect_ms=0"),
            std::string::npos)
      << h.Notices("commit").back();
}

TEST_F(CancelTest, FromBeforeTheLastFreezeDoesNothing) {
  Found(2);
  h.Say(P(1), CancelOf(1));
  h.Wait(100);
  ASSERT_EQ(h.Stored().last_freeze, Epoch(3));
  h.ForgetReceived();
  // The peer sent this one before it heard of epoch 3, or sends it again after a reconnect.
  h.Say(P(1), CancelOf(1, 0));
  h.Say(P(2), CancelOf(2, 2));
  h.Wait(1000);
  EXPECT_EQ(h.Take(P(1)), Texts{});
  EXPECT_EQ(h.View().committed, Epoch(3));
  EXPECT_EQ(h.Notices("cancel").size(), 1u);
  // One that knows of that freeze counts.
  h.Say(P(1), CancelOf(1, 3));
  h.Wait(100);
  EXPECT_EQ(h.Take(P(1)).back(), "Commit 4");
  EXPECT_EQ(h.Stored().last_freeze, Epoch(4));
}

TEST_F(CancelTest, DuringAPreparationThatFreezesItIsLeftToThatOne) {
  Found(3);
  h.Lively(P(3)).mute = true;
  h.Say(P(1), CancelOf(1));
  h.Say(P(2), CancelOf(2));
  EXPECT_EQ(h.View().preparing, Epoch(4));
  h.Lively(P(3)).mute = false;
  h.Say(P(3), control::EpochReady{G(), Epoch(4), {}});
  h.Wait(1000);
  EXPECT_EQ(h.View().committed, Epoch(4));
  EXPECT_EQ(h.Notices("cancel").size(), 1u);
}

TEST_F(CancelTest, DuringAnAdmissionTheNextPreparationFreezesAndAdmits) {
  Found(2);
  h.AddLively(P(3)).mute = true;
  h.LivelyJoin(P(3), 1);
  h.Run();
  Vote(2);
  ASSERT_EQ(h.View().preparing, Epoch(3));
  ASSERT_EQ(h.Stored().last_freeze, Epoch());
  h.ForgetReceived();
  h.Say(P(1), CancelOf(1));
  EXPECT_EQ(h.View().preparing, Epoch(4));
  h.Lively(P(3)).mute = false;
  h.Say(P(3), control::EpochReady{G(), Epoch(4), {}});
  h.Wait(100);
  EXPECT_EQ(h.Take(P(1)), (Texts{"Prepare 4 base=2 boundary=4 last_freeze=4 freeze "
                                 "members=m1@1,m2@2,m3@4 ring=p1,p2,p3",
                                 "Commit 4", "VoteResult m1 number=2 epoch=4"}));
  EXPECT_EQ(h.View().fault.cause, "cancel");
  EXPECT_NE(h.Prepared(P(3)).cause.find("instead of epoch 3: m1 cancelled all-reduce tag 7"),
            std::string::npos)
      << h.Prepared(P(3)).cause;
}

TEST_F(CancelTest, FromAPeerWithoutThatMemberDoesNothing) {
  Found(2);
  h.Say(P(1), CancelOf(2));  // at another peer
  h.Say(P(1), CancelOf(9));  // nobody
  h.AddLively(P(3));
  h.LivelyJoin(P(3), 1);
  h.Run();
  h.Say(P(3), CancelOf(3));  // not admitted
  control::CancelOp foreign = CancelOf(1);
  foreign.group = Harness::G(5);
  h.Say(P(1), foreign);
  h.Wait(1000);
  EXPECT_EQ(h.View().committed, Epoch(2));
  EXPECT_EQ(h.View().preparing, Epoch());
  EXPECT_TRUE(h.Notices("cancel").empty());
  EXPECT_EQ(Closings(), 0u);
}

TEST_F(CancelTest, AfterAnEpochThatWasNeverPreparedIsAgainstTheProtocol) {
  Found(2);
  h.Say(P(1), CancelOf(1, 3));
  ASSERT_EQ(Closings(), 1u);
  EXPECT_EQ(h.closings().back(),
            "against the protocol: cancelled an op after epoch 3, which was never prepared");
  EXPECT_EQ(h.View().preparing, Epoch());
}

TEST_F(CancelTest, OfAnOpThatOneIsDoneWithRedoesIt) {
  Found(2);
  control::OpReport done = Op(21);
  done.done = true;
  done.matches = {{P(1), OpOrdinal(11)}};
  SetOp(1, Op(11, /*cancelled=*/true));
  SetOp(2, done);
  h.Say(P(1), CancelOf(1));
  h.Wait(100);
  EXPECT_EQ(h.Take(P(1)).back(), "Commit 3 o11=redo");
  EXPECT_EQ(h.Take(P(2)).back(), "Commit 3 o21=redo");
}

TEST_F(CancelTest, ACoordinatorThatForgotItIsAskedAgain) {
  Found(2);
  for (const bool kept : {false, true}) {
    const Epoch before = h.View().committed;
    const uint64_t after = h.Stored().last_freeze.value();
    SetOp(1, Op(11, /*cancelled=*/true));
    // The coordinator dies when it stores the preparation.
    h.CrashAt(1, kept);
    h.Say(P(1), CancelOf(1, after));
    ASSERT_TRUE(h.crashed());
    h.Boot();
    for (const uint64_t peer : {1, 2}) h.Reattach(P(peer));
    h.Run();
    h.Say(P(1), CancelOf(1, after));
    h.Wait(1000);
    EXPECT_GT(h.View().committed, before) << kept;
    EXPECT_EQ(h.Lively(P(1)).groups[G()].fates[OpOrdinal(11)], Fate::kAbort) << kept;
    h.Lively(P(1)).groups[G()].fates.clear();
  }
}

}  // namespace
}  // namespace longhaul::coordinator
