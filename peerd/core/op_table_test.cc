#include "peerd/core/op_table.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "peerd/core/op_table_testing.h"

namespace longhaul::peerd {
namespace {

using control::Fate;

TEST_F(OpTableTest, TellsHowLongAnOpWaitedAndHowLongItsBytesWentThrough) {
  EnterThree();
  finishes_ = false;
  Post(7, Large());
  Ready(2, 7, Large());
  now_ = now_ + 100;
  Ready(3, 7, Large());
  now_ = now_ + 20;
  Complete(1);
  Done(2, 1);
  now_ = now_ + 3;
  Done(3, 1);
  now_ = now_ + 4;
  const std::vector<PostDone> done = Get<PostDone>(Finished(1));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].info.wait_us, 100);
  EXPECT_EQ(done[0].info.transfer_us, 20);
  EXPECT_EQ(done[0].info.total_us, 127);
}

TEST_F(OpTableTest, ARingOpGoesFromPostToSettled) {
  EnterThree();
  Post(7, Large());
  const auto readies = Get<SendReady>(out_);
  ASSERT_EQ(readies.size(), 2u);
  EXPECT_EQ(readies[0].to, PeerId(2));
  EXPECT_EQ(readies[1].to, PeerId(3));
  EXPECT_EQ(readies[0].ordinal, OpOrdinal(1));
  EXPECT_FALSE(readies[0].one_shot);
  const auto start = Get<StartAttempt>(out_);
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].ring.size(), 3u);
  EXPECT_EQ(start[0].members, 3u);
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());

  now_ = Tick{3000};
  const auto credit = Get<CreditAttempt>(Ready(2, 7, Large()));
  ASSERT_EQ(credit.size(), 1u);
  EXPECT_EQ(credit[0].theirs, OpOrdinal(207));
  // The result is complete, but a READY is missing: the op is not done.
  EXPECT_TRUE(Complete(1).empty());
  now_ = Tick{4000};
  const auto dones = Get<SendDone>(Ready(3, 7, Large()));
  ASSERT_EQ(dones.size(), 2u);
  EXPECT_EQ(dones[0].to, PeerId(2));
  EXPECT_EQ(dones[0].ordinal, OpOrdinal(207));
  EXPECT_TRUE(Done(2, 1).empty());
  now_ = Tick{9000};
  Done(3, 1);
  EXPECT_TRUE(Get<FinishAttempt>(out_).at(0).commit);
  const PostDone post = Get<PostDone>(out_).at(0);
  EXPECT_TRUE(post.outcome.ok());
  EXPECT_EQ(post.info,
            (OpInfo{Epoch(1), kThree, history_.HostsOf(kThree), 0, 8000, 3000, Algorithm::kRing}));
  EXPECT_EQ(ops_.open(), 0u);
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
  EXPECT_EQ(counters_.committed, 1u);
}

// ------------------------------------------------------------------------------ results on their
// way to targets

TEST_F(OpTableTest, ACommittedOpIsAnsweredWhenItsResultIsInAllTargets) {
  EnterThree();
  finishes_ = false;
  RunToDone(7);
  Done(2, 1);
  now_ = Tick{3000};
  EXPECT_TRUE(Get<FinishAttempt>(Done(3, 1)).at(0).commit);
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  EXPECT_EQ(counters_.committed, 1u);
  // The op is still open: its member has an open post, and its tag is in use.
  EXPECT_EQ(ops_.open(), 1u);
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 1u);
  EXPECT_EQ(Get<PostDone>(Post(7, Large())).at(0).outcome.code, Code::kInvalidArgument);
  now_ = Tick{9000};
  const auto answers = Get<PostDone>(Finished(1));
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_TRUE(answers[0].outcome.ok());
  EXPECT_EQ(answers[0].info,
            (OpInfo{Epoch(1), kThree, history_.HostsOf(kThree), 0, 8000, 0, Algorithm::kRing}));
  EXPECT_EQ(ops_.open(), 0u);
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
  EXPECT_TRUE(Finished(1).empty());
}

TEST_F(OpTableTest, NoFaultUndoesAnOpWhoseResultIsOnItsWay) {
  EnterThree();
  finishes_ = false;
  RunToDone(7);
  Done(2, 1);
  Done(3, 1);
  EXPECT_TRUE(Freeze().empty());
  EXPECT_FALSE(ops_.Stopping());
  EXPECT_TRUE(ops_.Report().empty());
  LoseThree({});
  EXPECT_TRUE(out_.empty());
  EXPECT_TRUE(Evict(1).empty());
  EXPECT_TRUE(Get<PostDone>(Finished(1)).at(0).outcome.ok());
  EXPECT_FALSE(ops_.resumed());
}

TEST_F(OpTableTest, AnOpThatWasRedoneHasResumedWhenItIsAnswered) {
  EnterThree();
  finishes_ = false;
  Post(7, Large());
  Freeze();
  Stopped(1);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  Ready(2, 7, Large(), 2);
  Complete(1, 2);
  EXPECT_TRUE(Get<FinishAttempt>(Done(2, 1, 2)).at(0).commit);
  EXPECT_FALSE(ops_.resumed());
  Finished(1);
  EXPECT_TRUE(ops_.resumed());
}

TEST_F(OpTableTest, WhatLingersIsAnsweredOnceThoughAllAreDoneBefore) {
  EnterThree();
  finishes_ = false;
  Post(7, Small());
  Ready(2, 7, Small());
  Ready(3, 7, Small());
  EXPECT_TRUE(Get<PostDone>(Complete(1, 0, std::string(16, 'r'))).empty());
  Done(2, 1);
  EXPECT_TRUE(Done(3, 1).empty());
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 0u);
  EXPECT_EQ(Get<PostDone>(Finished(1)).size(), 1u);
}

// ------------------------------------------------------------------------------ ops in sequence

TEST_F(OpTableTest, CreditsFollowTheStartWhenReadiesWereThereBefore) {
  EnterThree();
  EXPECT_TRUE(Ready(3, 7, Large()).empty());
  EXPECT_TRUE(Ready(2, 7, Large()).empty());
  Post(7, Large());
  ASSERT_EQ(out_.size(), 5u);
  EXPECT_TRUE(std::holds_alternative<StartAttempt>(out_[2]));
  EXPECT_EQ(Get<CreditAttempt>(out_).size(), 2u);
}

TEST_F(OpTableTest, AOneShotOpStartsWithAllInputsInRingOrder) {
  EnterThree();
  Post(7, Small());
  EXPECT_TRUE(Get<SendReady>(out_)[0].one_shot);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  auto third = ReadyOf(3, 7, Small());
  third.payload = std::string(16, 'c');
  EXPECT_TRUE(Ready(third).empty());
  Ready(2, 7, Small());
  const auto start = Get<StartAttempt>(out_);
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kOneShot);
  EXPECT_EQ(start[0].payloads, (std::vector<std::string>{"", std::string(16, 'x'), third.payload}));
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
  // The op is answered when it is done here. DONEs of other peers matter only after a fault.
  const Actions& done = Complete(1, 0, std::string(16, 'r'));
  ASSERT_EQ(done.size(), 4u);
  EXPECT_TRUE(std::get<FinishAttempt>(done[0]).commit);
  EXPECT_TRUE(Get<PostDone>(done).at(0).outcome.ok());
  for (const SendDone& told : Get<SendDone>(done)) EXPECT_TRUE(told.may_wait);
  EXPECT_EQ(ops_.open(), 0u);
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 1u);
  EXPECT_EQ(ops_.LingeringOf(LocalId(2)), 0u);
  EXPECT_TRUE(Done(2, 1).empty());
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 1u);
  EXPECT_TRUE(Done(3, 1).empty());
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 0u);
}

TEST_F(OpTableTest, ASmallOpThatAbortsOnAFaultIsAnsweredWhenAllAreDone) {
  EnterThree();
  OpDesc desc = Small();
  desc.on_fault = OnFault::kAbort;
  Post(7, desc);
  Ready(2, 7, desc);
  Ready(3, 7, desc);
  Complete(1, 0, std::string(16, 'r'));
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  EXPECT_FALSE(Get<SendDone>(out_).at(0).may_wait);
  Done(2, 1);
  EXPECT_EQ(Get<PostDone>(Done(3, 1)).size(), 1u);
}

TEST_F(OpTableTest, WhoHasTheResultTellsItToThoseWhoWereKeptFromIt) {
  EnterThree();
  LingerSmall(7);
  Freeze();
  const auto report = ops_.Report();
  ASSERT_EQ(report.size(), 1u);
  EXPECT_TRUE(report[0].done);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  const auto ready = Get<SendReady>(out_);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].result, (OneShotResult{Epoch(1), kThree, std::string(16, 'r')}));
  EXPECT_FALSE(ready[0].one_shot);
  EXPECT_TRUE(ready[0].posts.empty());
  EXPECT_FALSE(ops_.Report().at(0).done) << "its matches are not complete";
  // The next op of this key is another op, even while the first one is announced again.
  EXPECT_EQ(Get<SendReady>(Post(7, Small())).at(0).ordinal, OpOrdinal(2));
  auto theirs = ReadyOf(2, 7, Small(), 2);
  EXPECT_EQ(Get<SendDone>(Ready(theirs)).at(0).ordinal, OpOrdinal(207));
  EXPECT_TRUE(Done(2, 1, 2).empty());
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 0u);
  theirs.ordinal = OpOrdinal(208);
  EXPECT_EQ(Get<StartAttempt>(Ready(theirs)).at(0).ordinal, OpOrdinal(2));
}

TEST_F(OpTableTest, WhoWasKeptFromAResultEndsWithIt) {
  EnterThree();
  Post(7, Small());
  Ready(2, 7, Small());
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  auto ready = ReadyOf(2, 7, Small(), 2);
  ready.payload.clear();
  ready.result = OneShotResult{Epoch(1), kThree, std::string(16, 'r')};
  const auto start = Get<StartAttempt>(Ready(ready));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].result, std::string(16, 'r'));
  EXPECT_TRUE(start[0].payloads.empty());
  const PostDone done = Get<PostDone>(Complete(1, 2, std::string(16, 'r'))).at(0);
  EXPECT_TRUE(done.outcome.ok());
  EXPECT_EQ(done.info.epoch, Epoch(1));
  EXPECT_EQ(done.info.members, kThree);
  EXPECT_EQ(done.info.hosts, history_.HostsOf(kThree)) << "the hosts of the epoch before the fault";
}

TEST_F(OpTableTest, AResultStandsAlsoWhereTooFewAreLeft) {
  EnterThree();
  OpDesc desc = Small();
  desc.min_world = 3;
  Post(7, desc);
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  auto ready = ReadyOf(2, 7, desc, 2);
  ready.payload.clear();
  ready.result = OneShotResult{Epoch(1), kThree, std::string(16, 'r')};
  Ready(ready);
  EXPECT_TRUE(Get<PostDone>(Complete(1, 2, std::string(16, 'r'))).at(0).outcome.ok());
}

TEST_F(OpTableTest, AnAnsweredOpThatComesBackAsAnotherBreaksTheLink) {
  EnterThree();
  LingerSmall(7);
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<BreakLink>(Ready(2, 7, Desc(5), 2)).size(), 1u);
}

TEST_F(OpTableTest, LingeringOpsOfAPeerThatNeverSaysDoneAreBounded) {
  EnterThree();
  uint64_t ordinal = 0;
  for (;;) {
    ASSERT_LT(++ordinal, 100u);
    Post(7, Small());
    auto ready = ReadyOf(2, 7, Small());
    ready.ordinal = OpOrdinal(1000 + ordinal);
    if (!Get<BreakLink>(Ready(ready)).empty()) break;
    ready = ReadyOf(3, 7, Small());
    ready.ordinal = OpOrdinal(2000 + ordinal);
    Ready(ready);
    ASSERT_EQ(Get<PostDone>(Complete(ordinal, 0, std::string(16, 'r'))).size(), 1u);
  }
}

TEST_F(OpTableTest, WhatLingersIsForgottenWhenAllHaveItAndWithTheLastMember) {
  EnterThree();
  LingerSmall(7);
  Freeze();
  EXPECT_TRUE(Get<SendReady>((LoseThree({{OpOrdinal(1), Fate::kCommit}}), out_)).empty());
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 0u);
  EXPECT_TRUE(ops_.Report().empty());
}

TEST_F(OpTableTest, AnEmptyOpIsOneShot) {
  EnterThree();
  Post(7, Desc(0));
  Ready(2, 7, Desc(0));
  EXPECT_EQ(Get<StartAttempt>(Ready(3, 7, Desc(0))).at(0).algorithm, Algorithm::kOneShot);
}

TEST_F(OpTableTest, AMeshOpRunsAsAnyOtherAndSaysThatItWasOne) {
  EnterThree();
  const OpDesc desc = Wanting(Algorithm::kMesh);
  const auto start = Get<StartAttempt>(Post(7, desc));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kMesh);
  EXPECT_EQ(start[0].ring_contributes, std::vector<uint32_t>(3, 1));
  EXPECT_EQ(Get<CreditAttempt>(Ready(2, 7, desc)).size(), 1u);
  EXPECT_EQ(Get<CreditAttempt>(Ready(3, 7, desc)).size(), 1u);
  Complete(1);
  Done(2, 1);
  EXPECT_EQ(Get<PostDone>(Done(3, 1)).at(0).info.algorithm, Algorithm::kMesh);
}

TEST_F(OpTableTest, WhatIsSmallIsNoOneShotOpIfTheCallerWantsAnother) {
  EnterThree();
  for (const Algorithm wanted : {Algorithm::kMesh, Algorithm::kRing}) {
    const auto tag = static_cast<uint64_t>(wanted);
    Post(tag, Wanting(wanted, Small()));
    EXPECT_FALSE(Get<SendReady>(out_).at(0).one_shot);
    EXPECT_EQ(Get<StartAttempt>(out_).at(0).algorithm, wanted);
  }
  Post(7, Wanting(Algorithm::kOneShot, Small()));
  EXPECT_TRUE(Get<SendReady>(out_).at(0).one_shot);
}

TEST_F(OpTableTest, MembersThatWantDifferentAlgorithmsAreRefusedWithBothNames) {
  EnterThree();
  Post(7, Wanting(Algorithm::kMesh));
  Ready(2, 7, Wanting(Algorithm::kRing));
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
  Ready(3, 7, Wanting(Algorithm::kMesh));
  Stopped(1);
  Done(2, 1, 0, true);
  Done(3, 1, 0, true);
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome,
            (Outcome{Code::kInvalidArgument,
                     "all-reduce tag 7 refused: member m2 offered sum of float32 x 33554432 "
                     "algorithm ring, this member sum of float32 x 33554432 algorithm mesh"}));
}

OpDesc Quantized(uint64_t count) {
  OpDesc desc = Desc(count);
  desc.quantization = Quantization::kInt8;
  desc.block = 128;
  return desc;
}

TEST_F(OpTableTest, MembersWithDifferentCodecsAreRefusedWithBothNames) {
  EnterThree();
  OpDesc other = Quantized(1 << 20);
  other.quantization = Quantization::kInt4;
  Post(7, Quantized(1 << 20));
  Ready(2, 7, other);
  Ready(3, 7, Quantized(1 << 20));
  Stopped(1);
  Done(2, 1, 0, true);
  Done(3, 1, 0, true);
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome,
            (Outcome{Code::kInvalidArgument,
                     "all-reduce tag 7 refused: member m2 offered sum of float32 x 1048576 "
                     "quantization int4 block 128, this member sum of float32 x 1048576 "
                     "quantization int8 block 128"}));
}

TEST_F(OpTableTest, ARedoHasTheSameSeedForRandomNumbersAndAnotherOpHasAnotherOne) {
  EnterThree();
  const auto first = Get<StartAttempt>(Post(7, Quantized(1 << 20))).at(0);
  EXPECT_EQ(first.algorithm, Algorithm::kMesh);
  EXPECT_NE(Get<StartAttempt>(Post(8, Quantized(1 << 20))).at(0).seed, first.seed);
  Freeze();
  Stopped(1);
  Stopped(2);
  LoseThree({{OpOrdinal(1), Fate::kRedo}, {OpOrdinal(2), Fate::kRedo}});
  const auto again = Get<StartAttempt>(out_);
  ASSERT_EQ(again.size(), 2u);
  EXPECT_NE(again[0].attempt, first.attempt);
  EXPECT_EQ(again[0].seed, first.seed);
  EXPECT_EQ(again[0].algorithm, Algorithm::kMesh) << "between two peers, too";
}

TEST_F(OpTableTest, ARedoChoosesAnewAmongThoseThatAreLeft) {
  EnterThree();
  const OpDesc desc = Desc(4096);
  EXPECT_EQ(Get<StartAttempt>(Post(7, desc)).at(0).algorithm, Algorithm::kMesh);
  Freeze();
  Stopped(1);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).algorithm, Algorithm::kRing);
}

TEST_F(OpTableTest, WhatLinksCostDecides) {
  auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  Enter(prepare);
  EXPECT_EQ(Get<StartAttempt>(Post(7, Desc(1 << 20))).at(0).algorithm, Algorithm::kRing);
  // An epoch that only admits members says that the peers are far apart.
  prepare = MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  prepare.cost = {40000, 60'000'000, 60'000'000};
  Enter(prepare);
  EXPECT_EQ(Get<StartAttempt>(Post(8, Desc(1 << 20))).at(0).algorithm, Algorithm::kRing);
  EXPECT_EQ(Get<StartAttempt>(Post(9, Desc(1 << 20), 1, 2)).at(0).algorithm, Algorithm::kMesh);
}

// ------------------------------------------------------------------------------ more ops

TEST_F(OpTableTest, AWorldOfOneSettlesWhenItsAttemptIsComplete) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}}));
  for (const OpDesc& desc : {Large(), Small()}) {
    Post(7, desc);
    EXPECT_TRUE(Get<SendReady>(out_).empty());
    const auto start = Get<StartAttempt>(out_);
    ASSERT_EQ(start.size(), 1u);
    EXPECT_EQ(start[0].algorithm, Algorithm::kLocal);
    Complete(start[0].ordinal.value());
    EXPECT_TRUE(Get<PostDone>(out_).at(0).outcome.ok());
    EXPECT_EQ(Get<PostDone>(out_).at(0).info.members.size(), 1u);
  }
}

TEST_F(OpTableTest, TagsInAnyOrderDoNotWaitForEachOther) {
  EnterThree();
  Ready(2, 9, Large());
  Ready(2, 8, Large());
  Post(8, Large());
  Post(9, Large());
  EXPECT_EQ(Get<CreditAttempt>(out_).at(0).theirs, OpOrdinal(209));
  Ready(3, 9, Large());
  EXPECT_EQ(Get<SendDone>(Complete(2)).size(), 2u);
  Done(2, 2);
  EXPECT_EQ(Get<PostDone>(Done(3, 2)).at(0).post.call, 9u);
  EXPECT_EQ(ops_.open(), 1u);
}

// ------------------------------------------------------------------------------ several local
// members

TEST_F(OpTableTest, AnOpBeginsWhenAllLocalMembersHavePosted) {
  Enter(MakePrepare(1, 0, 1, 0, {{4, 1, 1}, {1, 1, 1}, {2, 2, 1}}));
  EXPECT_TRUE(Post(7, Large(), 1).empty());
  const auto ready = Get<SendReady>(Post(7, Large(), 4));
  ASSERT_EQ(ready.size(), 1u);
  // The posts are in rank order.
  EXPECT_EQ(ready[0].posts[0].local, LocalId(4));
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).members, 3u);
}

TEST_F(OpTableTest, LocalMembersThatDifferRefuseTheOpAndSendNoBytes) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}));
  Post(7, Small(), 1);
  Post(7, Desc(2), 4);
  const auto ready = Get<SendReady>(out_);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].other_offer, (OtherOffer{MemberId(4), Desc(2)}));
  EXPECT_FALSE(ready[0].one_shot);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  EXPECT_TRUE(Get<SendDone>(Ready(2, 7, Small())).at(0).refused);
  Done(2, 1, 0, true);
  const auto posts = Get<PostDone>(out_);
  ASSERT_EQ(posts.size(), 2u);
  EXPECT_EQ(posts[0].outcome.text,
            "all-reduce tag 7 refused: member m4 offered sum of float32 x 2, this member sum of "
            "float32 x 4");
  EXPECT_EQ(posts[1].outcome.text,
            "all-reduce tag 7 refused: member m1 offered sum of float32 x 4, this member sum of "
            "float32 x 2");
  EXPECT_FALSE(Get<FinishAttempt>(out_).at(0).commit);
}

TEST_F(OpTableTest, ARefusalOfListsNamesTheTensorThatDiffers) {
  const auto list = [](uint64_t digest) {
    OpDesc desc = Large();
    desc.count = 0;
    desc.list = digest;
    desc.list_bytes = uint64_t{64} << 20;
    return desc;
  };
  const std::string five = "\x01\x5a";  // float32 x 5
  const std::string six = "\x01\x6a";
  const std::string seven = "\x01\x7a";
  const std::string same =
      "sum of tensors of 67108864 bytes, this member sum of tensors of 67108864 bytes: tensor[0] ";
  // At another peer: its first member, or another one.
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 2, 1}}));
  LocalPost post = PostOf(1, 7, list(1));
  post.outline = five;
  Post(post);
  EXPECT_EQ(Get<SendReady>(out_).at(0).outline, five);
  PeerReady ready = ReadyOf(2, 7, list(2));
  ready.outline = six;
  Ready(ready);
  Stopped(1);
  Done(2, 1, 0, true);
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.text,
            "all-reduce tag 7 refused: member m2 offered " + same +
                "is float32 x 6 there, and float32 x 5 here");
  post = PostOf(1, 8, list(1));
  post.outline = five;
  Post(post);
  ready = ReadyOf(2, 8, list(1));
  ready.outline = five;
  ready.other_offer = OtherOffer{MemberId(3), list(3), seven};
  Ready(ready);
  Stopped(2);
  Done(2, 2, 0, true);
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.text,
            "all-reduce tag 8 refused: member m3 offered " + same +
                "is float32 x 7 there, and float32 x 5 here");
}

TEST_F(OpTableTest, LocalMembersThatDifferTellBothLists) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}));
  OpDesc desc = Large();
  desc.count = 0;
  desc.list_bytes = uint64_t{64} << 20;
  for (const uint64_t member : {1, 4}) {
    desc.list = member;
    LocalPost post = PostOf(member, 7, desc);
    post.outline = member == 1 ? "\x01\x5a" : "\x01\x6a";
    Post(post);
  }
  const SendReady ready = Get<SendReady>(out_).at(0);
  EXPECT_EQ(ready.outline, "\x01\x5a");
  EXPECT_EQ(ready.other_offer->outline, "\x01\x6a");
  Ready(2, 7, Small());
  Done(2, 1, 0, true);
  const std::string text = Get<PostDone>(out_).at(0).outcome.text;
  EXPECT_NE(text.find(": tensor[0] is float32 x 6 there, and float32 x 5 here"), std::string::npos)
      << text;
}

TEST_F(OpTableTest, APeerWhoseMembersDifferAmongThemselvesRefusesTheOpForAll) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 2, 1}}));
  Post(7, Small());
  auto ready = ReadyOf(2, 7, Small());
  ready.other_offer = OtherOffer{MemberId(3), Large()};
  ready.payload.clear();
  EXPECT_TRUE(Get<SendDone>(Ready(ready)).at(0).refused);
  Done(2, 1, 0, true);
  const Outcome outcome = Get<PostDone>(out_).at(0).outcome;
  EXPECT_EQ(outcome.code, Code::kInvalidArgument);
  EXPECT_EQ(outcome.text,
            "all-reduce tag 7 refused: member m3 offered sum of float32 x 33554432, this member "
            "sum of float32 x 4");
}

// ------------------------------------------------------------------------------ mismatch

TEST_F(OpTableTest, AMismatchStopsTheAttemptAndIsSettledByAll) {
  EnterThree();
  Post(7, Large());
  Ready(2, 7, Desc(1 << 20, DType::kBfloat16));
  EXPECT_EQ(Get<StopAttempt>(out_).size(), 1u);
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
  EXPECT_TRUE(Ready(3, 7, Large()).empty());
  EXPECT_TRUE(Done(2, 1, 0, true).empty());
  const auto dones = Get<SendDone>(Stopped(1));
  ASSERT_EQ(dones.size(), 2u);
  EXPECT_TRUE(dones[0].refused);
  Done(3, 1, 0, true);
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome,
            (Outcome{Code::kInvalidArgument,
                     "all-reduce tag 7 refused: member m2 offered sum of bfloat16 x 1048576, this "
                     "member sum of float32 x 33554432"}));
  EXPECT_EQ(counters_.refused, 1u);
}

TEST_F(OpTableTest, ARefusedOpWaitsForEveryReady) {
  EnterThree();
  Post(7, Small());
  EXPECT_TRUE(Ready(2, 7, Large()).empty());
  EXPECT_EQ(Get<SendDone>(Ready(3, 7, Small())).size(), 2u);
}

// ------------------------------------------------------------------------------ blocked pairs: the
// ring is 1, 2, 3, 4; the link of peers 1 and 3 goes through peer 2

class BlockedPairTest : public OpTableTest {
 protected:
  static control::PrepareEpoch Square(uint64_t epoch, uint64_t attempt) {
    auto prepare =
        MakePrepare(epoch, epoch - 1, 1, attempt, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 1}});
    prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
    return prepare;
  }
};

TEST_F(BlockedPairTest, AllAreSpokenToAlikeAndTheRingIsKept) {
  Enter(Square(1, 0));
  Post(7, Large());
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).ring,
            (std::vector<PeerId>{PeerId(1), PeerId(2), PeerId(3), PeerId(4)}));
  EXPECT_EQ(Get<SendReady>(out_).size(), 3u);
  Ready(2, 7, Large());
  Ready(4, 7, Large());
  EXPECT_EQ(Get<CreditAttempt>(Ready(3, 7, Large())).at(0).peer, PeerId(3));
  EXPECT_EQ(Get<SendDone>(Complete(1)).size(), 3u);
  Done(2, 1);
  Done(4, 1);
  EXPECT_TRUE(Get<PostDone>(Done(3, 1)).at(0).outcome.ok());
  EXPECT_EQ(counters_.frames_refused, 0u);
}

TEST_F(BlockedPairTest, ThereIsNoMeshAndWhoWantsOneGetsTheRing) {
  Enter(Square(1, 0));
  uint64_t tag = 7;
  for (const OpDesc& desc : {Desc(4096), Wanting(Algorithm::kMesh)}) {
    EXPECT_EQ(Get<StartAttempt>(Post(tag++, desc)).at(0).algorithm, Algorithm::kRing);
  }
}

TEST_F(BlockedPairTest, WhereNoRingAvoidsThePairTheRingUsesIt) {
  // Peer 4 came later: peers 1, 2 and 3 take part in the op of boundary 1.
  auto prepare = MakePrepare(3, 2, 2, 3, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 2}});
  prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
  Enter(prepare);
  Post(7, Large());
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).ring,
            (std::vector<PeerId>{PeerId(1), PeerId(2), PeerId(3)}));
  Ready(2, 7, Large(), 3);
  Ready(3, 7, Large(), 3);
  EXPECT_EQ(Get<SendDone>(Complete(1, 3)).size(), 2u);
  Done(2, 1, 3);
  EXPECT_TRUE(Get<PostDone>(Done(3, 1, 3)).at(0).outcome.ok());
}

TEST_F(OpTableTest, DigestsTellStatesApart) {
  const auto digest = [&] { return Digester().Add(ops_).Add(history_).value(); };
  std::set<uint64_t> seen{digest()};
  const auto fresh = [&] { return seen.insert(digest()).second; };
  EnterThree();
  EXPECT_TRUE(fresh());
  Post(7, Large());
  EXPECT_TRUE(fresh());
  Ready(2, 7, Large());
  EXPECT_TRUE(fresh());
  Ready(2, 8, Large());
  EXPECT_TRUE(fresh());
  Ready(2, 8, Large(), 3);
  EXPECT_TRUE(fresh());
  Done(2, 1, 3);
  EXPECT_TRUE(fresh());
  Done(2, 1);
  EXPECT_TRUE(fresh());
  ops_.Lose({PeerId(2)});
  EXPECT_TRUE(fresh());
  ops_.Expect({PeerId(5)});
  EXPECT_TRUE(fresh());
  Freeze();
  EXPECT_TRUE(fresh());
}

}  // namespace
}  // namespace longhaul::peerd
