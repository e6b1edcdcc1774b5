// A call that is refused at one member ends the op at all (OpTable::Refuse()).
#include <gtest/gtest.h>

#include <string>

#include "peerd/core/op_table_testing.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

class RefusalTest : public KindsTest {
 protected:
  Actions& Refuse(uint64_t member, uint64_t tag, uint64_t step = 0) {
    return Refuse(PostOf(member, tag, Large()), step);
  }
  Actions& Refuse(const LocalPost& post, uint64_t step = 0) {
    out_.clear();
    ops_.Refuse({post, MemberId(post.post.local.value()), Epoch(1), step}, "it is too long", now_,
                &out_);
    Settled();
    return out_;
  }
  Actions& PostInStep(uint64_t step, const LocalPost& post) {
    out_.clear();
    ops_.Post({post, MemberId(post.post.local.value()), Epoch(1), step}, now_, &out_);
    Settled();
    return out_;
  }
  // The READY of another peer whose member of the same number was refused.
  static PeerReady RefusedAt(uint64_t peer, uint64_t tag, OpKind kind = OpKind::kAllReduce,
                             uint64_t step = 0) {
    PeerReady ready = ReadyOf(peer, tag, RefusedDesc(kind));
    ready.refusal = OpRefusal{MemberId(peer), step, "it is too long"};
    ready.step = step;
    return ready;
  }
  static PeerReady InStep(uint64_t step, PeerReady ready) {
    ready.step = step;
    return ready;
  }
};

TEST_F(RefusalTest, ItIsAnnouncedAndTheNextCallOfItsNameIsAnotherOp) {
  EnterThree();
  const auto readies = Get<SendReady>(Refuse(1, 7));
  ASSERT_EQ(readies.size(), 2u);
  EXPECT_EQ(readies[0].refusal, (OpRefusal{MemberId(1), 0, "it is too long"}));
  EXPECT_EQ(readies[0].desc, RefusedDesc(OpKind::kAllReduce));
  EXPECT_TRUE(readies[0].posts.empty());
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 0u) << "a member that leaves does not wait for it";

  ASSERT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u);
  // The READYs of the others are for the first call, whatever they offer.
  Ready(2, 7, Large());
  const auto dones = Get<SendDone>(Ready(3, 7, Small()));
  ASSERT_EQ(dones.size(), 2u);
  for (const SendDone& done : dones) EXPECT_TRUE(done.refused && !done.may_wait);
  Done(2, 1, 0, true);
  EXPECT_TRUE(Get<PostDone>(Done(3, 1, 0, true)).empty());
  Ready(2, 7, Large());
  EXPECT_EQ(Get<CreditAttempt>(Ready(3, 7, Large())).size(), 1u) << "the second call runs";
  Complete(2);
  Done(2, 2);
  EXPECT_TRUE(Get<PostDone>(Done(3, 2)).at(0).outcome.ok());
}

TEST_F(RefusalTest, AnotherMembersRefusalEndsTheOpWithItsReason) {
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kBarrier, OpKind::kAllToAll}) {
    for (const bool first : {false, true}) {
      ops_.Reset();
      history_.Clear();
      EnterThree();
      const uint64_t ordinal = counters_.next_ordinal;
      const PeerReady refused = RefusedAt(2, 7, kind);
      if (first) Ready(refused);
      Post(7, Large());
      if (!first) {
        Ready(refused);
        Stopped(ordinal);
      }
      ASSERT_EQ(Get<SendDone>(Ready(3, 7, Large())).size(), 2u);
      Done(2, ordinal, 0, true);
      const Outcome outcome = Get<PostDone>(Done(3, ordinal, 0, true)).at(0).outcome;
      EXPECT_EQ(outcome.code, Code::kInvalidArgument);
      EXPECT_EQ(outcome.text, std::string("all-reduce tag 7 refused: the ") + Name(kind) +
                                  " of member m2 was refused there, so it ends at all: it is too "
                                  "long");
    }
  }
}

TEST_F(RefusalTest, RefusalsOfAllMembersMeet) {
  EnterThree();
  Ready(RefusedAt(2, 7));
  Refuse(1, 7);
  EXPECT_EQ(Get<SendDone>(Ready(RefusedAt(3, 7))).size(), 2u);
  Done(2, 1, 0, true);
  Done(3, 1, 0, true);
  EXPECT_TRUE(ops_.Report().empty());
}

TEST_F(RefusalTest, WhatTheCoreObjectsToIsAnnounced) {
  EnterThree();
  OpDesc desc = Large();
  desc.count = LH_COUNT_MAX + 1;
  EXPECT_EQ(Get<PostDone>(Post(7, desc)).at(0).outcome.code, Code::kInvalidArgument);
  const auto readies = Get<SendReady>(out_);
  ASSERT_EQ(readies.size(), 2u);
  EXPECT_NE(readies[0].refusal->why.find("beyond the limit"), std::string::npos);
}

TEST_F(RefusalTest, ATagInFlightIsNotTheCallThatOthersWaitFor) {
  EnterThree();
  Post(7, Large());
  EXPECT_TRUE(Refuse(1, 7).empty());
  EXPECT_EQ(Get<PostDone>(Post(7, Large())).at(0).outcome.code, Code::kInvalidArgument);
  EXPECT_TRUE(Get<SendReady>(out_).empty());
}

TEST_F(RefusalTest, AFaultAnnouncesItAgainUnlessItIsOver) {
  EnterThree();
  Refuse(1, 7);
  Freeze();
  ASSERT_EQ(ops_.Report().size(), 1u);
  Refuse(1, 8);  // waits for the commit
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  LoseThree({{OpOrdinal(1), control::Fate::kRedo}});
  const auto readies = Get<SendReady>(out_);
  ASSERT_EQ(readies.size(), 2u);
  EXPECT_EQ(readies[0].tag, 7u);
  EXPECT_EQ(readies[1].tag, 8u);
  EXPECT_TRUE(readies[0].refusal && readies[1].refusal);
  PeerReady ready = ReadyOf(2, 7, Large(), 2);
  EXPECT_EQ(Get<SendDone>(Ready(ready)).size(), 1u);
  Freeze();
  EXPECT_EQ(ops_.Report().at(0).verdict, 2u);
  Enter(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}}),
        {{OpOrdinal(1), control::Fate::kCommit}, {OpOrdinal(2), control::Fate::kAbort}});
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  Freeze();
  EXPECT_TRUE(ops_.Report().empty());
}

TEST_F(RefusalTest, MembersAtTheSamePeerAreTold) {
  EnterFour();
  Post(PostOf(4, 7, Large()));
  const Outcome told = Get<PostDone>(Refuse(1, 7)).at(0).outcome;
  EXPECT_EQ(told.code, Code::kInvalidArgument);
  EXPECT_NE(told.text.find("of member m1 was refused"), std::string::npos) << told.text;
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);

  // One that has not called yet hears it when it does, once, also if its own call is refused.
  EXPECT_EQ(Get<SendReady>(Refuse(1, 8)).size(), 2u);
  EXPECT_TRUE(Refuse(4, 8).empty());
  // So it does if it calls something else: other peers say that of two offers that differ, too.
  Refuse(1, 9);
  EXPECT_EQ(Get<PostDone>(Post(PostOf(4, 9, OfKind(OpKind::kBarrier, 0, 0)))).at(0).outcome.code,
            Code::kInvalidArgument);
  // A member that has passed the boundary has left the call out.
  Refuse(1, 10);
  Pass(4, {Epoch(1), 1});
  Pass(1, {Epoch(1), 1});
  for (const uint64_t tag : {7, 8, 9, 10}) {
    EXPECT_TRUE(Get<PostDone>(Post(PostOf(4, tag, Large()))).empty());
    EXPECT_EQ(Get<SendReady>(Post(PostOf(1, tag, Large()))).size(), 2u) << tag;
  }
}

TEST_F(RefusalTest, AMemberThatDiesOrLeavesTakesItsRefusalAlong) {
  // Member 1 has gone and peer 1 has no other one: it announces nothing again.
  EnterThree();
  Refuse(1, 7);
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{2, 2, 1}, {3, 3, 1}}), {{OpOrdinal(1), control::Fate::kRedo}});
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  Freeze();
  EXPECT_TRUE(ops_.Report().empty());

  // Member 2 was refused elsewhere, and has gone: the op goes on without it.
  ops_.Reset();
  history_.Clear();
  EnterThree();
  const uint64_t ordinal = counters_.next_ordinal;
  Post(8, Large());
  Ready(RefusedAt(2, 8));
  Stopped(ordinal);
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {3, 3, 1}}),
        {{OpOrdinal(ordinal), control::Fate::kRedo}});
  Ready(3, 8, Large(), 2);
  Complete(ordinal, 2);
  EXPECT_TRUE(Get<PostDone>(Done(3, ordinal, 2)).at(0).outcome.ok());
}

TEST_F(RefusalTest, ARefusedCallIsTheOneThatAnAbortIsOwedTo) {
  // Others abort the op while this member's call is refused.
  EnterThree();
  Freeze();
  Refuse(1, 7);
  const control::MissedOp missed{Epoch(1), 7, 0, static_cast<uint32_t>(OpKind::kAllReduce), 0};
  LoseThree({}, {missed});
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 1u) << "nothing is owed any more";

  // The abort is owed before the call is made and refused.
  Freeze();
  Enter(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}}), {{OpOrdinal(2), control::Fate::kRedo}},
        {{Epoch(1), 8, 0, static_cast<uint32_t>(OpKind::kAllReduce), 0}});
  EXPECT_TRUE(Refuse(1, 8).empty());
  EXPECT_EQ(Get<SendReady>(Post(8, Large())).size(), 1u);
}

TEST_F(RefusalTest, ACallThatIsRefusedWhenItsOpIsToEndOwesItNothing) {
  EnterFour();
  Post(PostOf(4, 7, Large()));
  ASSERT_EQ(Get<ToCoordinator>(Cancel(7, 4)).size(), 1u);
  EXPECT_TRUE(Refuse(1, 7).empty());
  Freeze();
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}, {4, 1, 1}, {3, 3, 1}}),
        {{OpOrdinal(1), control::Fate::kAbort}});
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kAborted);
  Post(PostOf(1, 7, Large()));
  EXPECT_TRUE(Get<PostDone>(out_).empty()) << "the member's call was refused: it owes none";
}

TEST_F(RefusalTest, AMemberAtTheSamePeerMayPassTheBoundaryLater) {
  EnterFour();
  Pass(1, {Epoch(1), 1});
  Refuse(1, 7, /*step=*/1);
  Pass(4, {Epoch(1), 1});
  EXPECT_EQ(Get<PostDone>(PostInStep(1, PostOf(4, 7, Large()))).at(0).outcome.code,
            Code::kInvalidArgument);
}

TEST_F(RefusalTest, ACallOfALaterStepIsAnotherOp) {
  EnterThree();
  // This member was refused, and no other one made the call. All pass a boundary.
  Refuse(1, 7);
  Pass(1, {Epoch(1), 1});
  PostInStep(1, PostOf(1, 7, Large()));
  EXPECT_TRUE(Get<SendDone>(Ready(InStep(1, ReadyOf(2, 7, Large())))).empty());
  Ready(InStep(1, ReadyOf(3, 7, Large())));
  Complete(2);
  Done(2, 2);
  EXPECT_TRUE(Get<PostDone>(Done(3, 2)).at(0).outcome.ok());
  EXPECT_TRUE(ops_.Report().empty()) << "the refused op is forgotten";

  // Another member was, in whichever order the READYs come.
  for (const bool first : {true, false}) {
    const uint64_t tag = first ? 8 : 9;
    if (first) Ready(RefusedAt(2, tag));
    PostInStep(1, PostOf(1, tag, Large()));
    if (!first) Ready(RefusedAt(2, tag));
    for (const uint64_t peer : {2, 3}) Ready(InStep(1, ReadyOf(peer, tag, Large())));
    const uint64_t ordinal = first ? 3 : 4;
    Complete(ordinal);
    Done(2, ordinal);
    EXPECT_TRUE(Get<PostDone>(Done(3, ordinal)).at(0).outcome.ok());
  }
}

TEST_F(RefusalTest, ARefusalOfALaterStepMeetsNoneOfTheStepBefore) {
  EnterThree();
  Ready(RefusedAt(2, 7));
  Refuse(1, 7, /*step=*/1);
  EXPECT_TRUE(Get<SendDone>(Ready(RefusedAt(3, 7, OpKind::kAllReduce, 1))).empty());
  EXPECT_EQ(Get<SendDone>(Ready(InStep(1, ReadyOf(2, 7, Large())))).size(), 2u);
  // Here the older one is this member's.
  Refuse(1, 8);
  Ready(RefusedAt(2, 8, OpKind::kAllReduce, 1));
  Freeze();
  EXPECT_EQ(ops_.Report().size(), 1u);
}

TEST_F(RefusalTest, TwoBoundariesLaterNobodyWaitsForARefusedCall) {
  EnterThree();
  Refuse(1, 7);
  Refuse(1, 8);
  Ready(2, 8, Large());
  Pass(1, {Epoch(1), 1});
  Freeze();
  EXPECT_EQ(ops_.Report().size(), 2u) << "a READY of the step before may be on the way";
  Pass(1, {Epoch(1), 2});
  ASSERT_EQ(ops_.Report().size(), 1u);
  EXPECT_EQ(ops_.Report()[0].tag, 8u) << "member 2 waits for it";
}

TEST_F(RefusalTest, SetsHaveTheirOwnRefusals) {
  EnterThree();
  LocalPost among = PostOf(1, 7, Large());
  among.participants = {MemberId(1), MemberId(2)};
  const auto readies = Get<SendReady>(Refuse(among));
  ASSERT_EQ(readies.size(), 1u);
  EXPECT_EQ(readies[0].to, PeerId(2));
  EXPECT_EQ(readies[0].set, SetOf(OpKind::kAllReduce, among.participants));
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 2u);
  EXPECT_TRUE(Get<SendDone>(Ready(2, 7, Large())).empty()) << "an op of all is another one";

  // A set without this member, and a partner that is not there, name no op.
  among.participants = {MemberId(2), MemberId(3)};
  EXPECT_TRUE(Refuse(among).empty());
  LocalPost send = PostOf(1, 9, Large());
  send.desc.kind = OpKind::kSendRecv;
  send.is_root = true;
  send.root_rank = 5;
  EXPECT_TRUE(Refuse(send).empty());
  send.root_rank = 2;
  const auto sent = Get<SendReady>(Refuse(send));
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].to, PeerId(3));
}

TEST_F(RefusalTest, ALoopOfRefusedCallsBreaksNoLink) {
  EnterThree();
  size_t announced = 0;
  for (int i = 0; i < 100; ++i) announced += Get<SendReady>(Refuse(1, 7)).size();
  EXPECT_EQ(announced, 2 * kRefusalsAheadMax);
  // Another peer may do the same, and be one op ahead.
  for (size_t i = 0; i < kRefusalsAheadMax; ++i) {
    EXPECT_TRUE(Get<BreakLink>(Ready(RefusedAt(2, 9))).empty());
  }
  EXPECT_TRUE(Get<BreakLink>(Ready(2, 9, Large())).empty());
  // In the next step it begins anew, and what nobody has met is forgotten.
  for (size_t i = 0; i < kRefusalsAheadMax; ++i) {
    EXPECT_TRUE(Get<BreakLink>(Ready(RefusedAt(2, 9, OpKind::kAllReduce, 1))).empty());
  }
}

TEST_F(RefusalTest, AMemberOfASigningGroupCountsWhatItLeavesOut) {
  control::PrepareEpoch prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  prepare.sign_ops = true;
  Enter(prepare);
  PeerReady refused = RefusedAt(2, 7);
  refused.signature = ReadySignature{0, "", ""};
  Ready(refused);
  const auto readies = Get<SendReady>(PostInStep(1, PostOf(1, 7, Large())));
  ASSERT_EQ(readies.size(), 2u);
  EXPECT_EQ(readies[0].sign, 1u) << "peer 2 has announced one of this name before";
}

TEST_F(RefusalTest, ARefusedReadyCarriesNothing) {
  EnterThree();
  PeerReady ready = RefusedAt(2, 7);
  ready.payload = "x";
  EXPECT_TRUE(Breaks(ready));
}

}  // namespace
}  // namespace longhaul::peerd
