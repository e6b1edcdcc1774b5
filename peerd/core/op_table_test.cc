#include "peerd/core/op_table.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <tuple>
#include <type_traits>

#include "base/crypto/identity.h"
#include "base/crypto/secrets.h"
#include "peerd/core/signed_readies.h"
#include "peerd/core/testing.h"
#include "proto/control/signed_ready.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::Fate;
using control::MissedOp;
using control::OpFate;

// Peer 1 is under test. Members 1, 2 and 3 are at peers 1, 2 and 3, unless a test says otherwise.
const std::vector<MemberId> kThree = {MemberId(1), MemberId(2), MemberId(3)};

class OpTableTest : public testing::Test {
 protected:
  void Enter(const control::PrepareEpoch& prepare, const std::vector<OpFate>& fates = {},
             const std::vector<MissedOp>& missed = {}, const std::set<PeerId>& lost = {}) {
    out_.clear();
    history_.Add(RecordOf(prepare));
    ops_.Commit(fates, missed, lost, now_, &out_);
    Settled();
  }
  void EnterThree() { Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}})); }
  // Commits an epoch without peer 3.
  void LoseThree(const std::vector<OpFate>& fates, const std::vector<MissedOp>& missed = {}) {
    Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {2, 2, 1}}), fates, missed);
  }
  Actions& Post(uint64_t tag, const OpDesc& desc, uint64_t member = 1, uint64_t boundary = 1) {
    return Post(PostOf(member, tag, desc), boundary);
  }
  static LocalPost PostOf(uint64_t member, uint64_t tag, const OpDesc& desc) {
    return {{LocalId(member), tag}, tag, desc};
  }
  // Local n is member n.
  Actions& Post(const LocalPost& post, uint64_t boundary = 1) {
    out_.clear();
    ops_.Post({post, MemberId(post.post.local.value()), Epoch(boundary)}, now_, &out_);
    Settled();
    return out_;
  }
  Actions& Cancel(uint64_t tag, uint64_t member = 1) {
    out_.clear();
    ops_.Cancel({LocalId(member), tag}, now_, &out_);
    Settled();
    return out_;
  }
  Actions& AskAgain() {
    out_.clear();
    ops_.AskAgain(&out_);
    return out_;
  }
  // The sender's ordinal is 100 * peer + tag.
  static PeerReady ReadyOf(uint64_t peer, uint64_t tag, const OpDesc& desc, uint64_t attempt = 0) {
    PeerReady ready;
    ready.group = kGroup;
    ready.peer = PeerId(peer);
    ready.ordinal = OpOrdinal(100 * peer + tag);
    ready.attempt = Epoch(attempt);
    ready.boundary = Epoch(1);
    ready.tag = tag;
    ready.desc = desc;
    ready.payload = PayloadOf(desc);
    return ready;
  }
  Actions& Ready(const PeerReady& ready) {
    out_.clear();
    ops_.OnReady(ready, now_, &out_);
    Settled();
    return out_;
  }
  Actions& Ready(uint64_t peer, uint64_t tag, const OpDesc& desc, uint64_t attempt = 0) {
    return Ready(ReadyOf(peer, tag, desc, attempt));
  }
  Actions& Done(uint64_t peer, uint64_t ordinal, uint64_t attempt = 0, bool refused = false) {
    out_.clear();
    ops_.OnDone({kGroup, PeerId(peer), OpOrdinal(ordinal), Epoch(attempt), refused}, now_, &out_);
    Settled();
    return out_;
  }
  // Whether the frame would break the link. A copy of the table gets the frame, because a table
  // ignores a peer that has broken the protocol once.
  template <class Frame>
  bool Breaks(const Frame& frame) {
    OpTable copy(ops_, &history_, &counters_);
    Actions out;
    if constexpr (std::is_same_v<Frame, PeerReady>) {
      copy.OnReady(frame, now_, &out);
    } else {
      copy.OnDone(frame, now_, &out);
    }
    copy.CheckInvariants();
    return Get<BreakLink>(out).size() == 1;
  }
  static PeerDone DoneOf(uint64_t peer, uint64_t ordinal, uint64_t attempt = 0) {
    return {kGroup, PeerId(peer), OpOrdinal(ordinal), Epoch(attempt), false};
  }
  Actions& Complete(uint64_t ordinal, uint64_t attempt = 0, const std::string& result = {}) {
    out_.clear();
    ops_.OnComplete({kGroup, OpOrdinal(ordinal), Epoch(attempt), result}, now_, &out_);
    Settled();
    return out_;
  }
  Actions& Stopped(uint64_t ordinal, uint64_t attempt = 0) {
    out_.clear();
    ops_.OnStopped({kGroup, OpOrdinal(ordinal), Epoch(attempt)}, now_, &out_);
    Settled();
    return out_;
  }
  Actions& Freeze() {
    out_.clear();
    ops_.Freeze(now_, &out_);
    Settled();
    return out_;
  }
  Actions& Evict(uint64_t member) {
    out_.clear();
    ops_.Evict(MemberId(member), {Code::kEvicted, "out"}, now_, &out_);
    Settled();
    return out_;
  }
  Actions& Finished(uint64_t ordinal) {
    out_.clear();
    ops_.OnFinished({kGroup, OpOrdinal(ordinal)}, now_, &out_);
    Settled();
    return out_;
  }
  static uint64_t DigestOf(const OpTable& table) { return Digester().Add(table).value(); }
  // Acts as a driver that puts results into the targets at once.
  void Settled() {
    for (size_t i = 0; finishes_ && i < out_.size(); ++i) {
      const auto* const finish = std::get_if<FinishAttempt>(&out_[i]);
      if (finish == nullptr || !finish->commit) continue;
      ops_.OnFinished({kGroup, finish->ordinal}, now_, &out_);
    }
    ops_.CheckInvariants();
    if (!copies_) return;
    EXPECT_EQ(DigestOf(OpTable(ops_, &history_, &counters_)), DigestOf(ops_)) << "a copy differs";
  }
  // Runs the first op of the test until it is answered and lingers.
  void LingerSmall(uint64_t tag) {
    Post(tag, Small());
    Ready(2, tag, Small());
    Ready(3, tag, Small());
    ASSERT_EQ(Get<PostDone>(Complete(1, 0, std::string(16, 'r'))).size(), 1u);
  }
  void RunToDone(uint64_t tag) {
    Post(tag, Large());
    Ready(2, tag, Large());
    Ready(3, tag, Large());
    ASSERT_EQ(Get<SendDone>(Complete(1)).size(), 2u);
  }

  EpochHistory history_;
  OpCounters counters_;
  OpTable ops_{kGroup, PeerId(1), &history_, &counters_};
  Tick now_{1000};
  Actions out_;
  bool finishes_ = true;  // false: the test says when
  bool copies_ = true;    // false: copies take long, because the READYs are long
};

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

// -------------------------------------------------------------- results on their way to targets

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

TEST_F(OpTableTest, WhatIsMissedIsTheOpAfterTheOneThatIsRedone) {
  EnterThree();
  Post(7, Small());
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}}, {{Epoch(1), 7}});
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  Ready(2, 7, Small(), 2);
  EXPECT_TRUE(Get<PostDone>(Complete(1, 2, std::string(16, 'r'))).at(0).outcome.ok());
  EXPECT_EQ(Get<PostDone>(Post(7, Small())).at(0).outcome.code, Code::kAborted);
}

TEST_F(OpTableTest, AnEmptyOpIsOneShot) {
  EnterThree();
  Post(7, Desc(0));
  Ready(2, 7, Desc(0));
  EXPECT_EQ(Get<StartAttempt>(Ready(3, 7, Desc(0))).at(0).algorithm, Algorithm::kOneShot);
}

OpDesc Wanting(Algorithm algorithm, OpDesc desc = Large()) {
  desc.algorithm = algorithm;
  return desc;
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

// ------------------------------------------------------------------------------ inputs in READY

class CarriedInputTest : public OpTableTest {
 protected:
  CarriedInputTest() { copies_ = false; }
  // The peers are far apart, as the epoch says.
  void EnterFar(size_t peers = 3) {
    auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
    if (peers == 2) prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}});
    prepare.cost = {100'000, 60'000'000, 60'000'000};
    Enter(prepare);
  }
  static OpDesc Middle() { return Desc(16384); }
  static PeerReady Carrying(uint64_t peer, uint64_t tag, uint64_t attempt = 0) {
    PeerReady ready = ReadyOf(peer, tag, Middle(), attempt);
    ready.input = ReadyInput::kCarried;
    ready.payload = std::string(OneShotPayloadBytes(Middle()), static_cast<char>('0' + peer));
    return ready;
  }
  static PeerReady Withholding(uint64_t peer, uint64_t tag, uint64_t attempt = 0) {
    PeerReady ready = ReadyOf(peer, tag, Middle(), attempt);
    ready.input = ReadyInput::kWithheld;
    return ready;
  }
  static PeerDone StartedBy(uint64_t peer, uint64_t ordinal, uint64_t attempt = 0) {
    PeerDone done = DoneOf(peer, ordinal, attempt);
    done.started = true;
    return done;
  }
  Actions& Started(uint64_t peer, uint64_t ordinal, uint64_t attempt = 0) {
    out_.clear();
    ops_.OnDone(StartedBy(peer, ordinal, attempt), now_, &out_);
    Settled();
    return out_;
  }
};

TEST_F(CarriedInputTest, FarPeersExchangeTheirInputsWithReady) {
  EnterFar();
  Post(7, Middle());
  for (const SendReady& ready : Get<SendReady>(out_)) {
    EXPECT_TRUE(ready.one_shot);
    EXPECT_EQ(ready.input, ReadyInput::kCarried);
  }
  EXPECT_TRUE(Ready(Carrying(3, 7)).empty());
  const auto start = Get<StartAttempt>(Ready(Carrying(2, 7)));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kOneShot);
  EXPECT_EQ(start[0].payloads[1], Carrying(2, 7).payload);
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
  EXPECT_TRUE(Get<SendDone>(out_).empty()) << "nobody waits to hear that it has started";
  const auto done = Get<PostDone>(Complete(1, 0, std::string(Middle().bytes(), 'r')));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].outcome.ok());
  EXPECT_EQ(done[0].info.algorithm, Algorithm::kOneShot);
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 1u);
  Done(2, 1);
  Done(3, 1);
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 0u);
}

TEST_F(CarriedInputTest, WhatThisPeerHasMeasuredCountsIfTheEpochSaysNothing) {
  EnterThree();
  EXPECT_EQ(Get<SendReady>(Post(7, Middle())).at(0).input, ReadyInput::kSegments);
  ops_.NoteLatency(PeerId(3), 100'000);
  EXPECT_EQ(Get<SendReady>(Post(8, Middle())).at(0).input, ReadyInput::kCarried);
}

TEST_F(CarriedInputTest, IfOneWithholdsItsInputSegmentsMoveToThoseThatHaveStarted) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(3, 7));
  const auto start = Get<StartAttempt>(Ready(Withholding(2, 7)));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kMesh);
  EXPECT_TRUE(start[0].payloads.empty());
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
  const auto told = Get<SendDone>(out_);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_TRUE(told[0].started && told[1].started);
  EXPECT_EQ(Get<CreditAttempt>(Started(2, 1)).at(0).peer, PeerId(2));
  EXPECT_TRUE(Breaks(StartedBy(2, 1))) << "twice";
  EXPECT_EQ(Get<CreditAttempt>(Started(3, 1)).at(0).peer, PeerId(3));
  EXPECT_EQ(Get<SendDone>(Complete(1)).size(), 2u);
}

TEST_F(CarriedInputTest, APeerThatTakesItForAnOpOfSegmentsIsCreditedAtOnce) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(3, 7));
  Ready(2, 7, Middle());
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).algorithm, Algorithm::kMesh);
  const auto credits = Get<CreditAttempt>(out_);
  ASSERT_EQ(credits.size(), 1u);
  EXPECT_EQ(credits[0].peer, PeerId(2));
  EXPECT_TRUE(Breaks(StartedBy(2, 1))) << "it has not said that it starts late";
}

TEST_F(CarriedInputTest, WhoTakesItForAnOpOfSegmentsWaitsForThoseThatStartLate) {
  EnterThree();
  Post(7, Middle());
  EXPECT_EQ(Get<StartAttempt>(out_).size(), 1u);
  EXPECT_TRUE(Get<CreditAttempt>(Ready(Carrying(2, 7))).empty());
  EXPECT_EQ(Get<CreditAttempt>(Ready(3, 7, Middle())).size(), 1u);
  EXPECT_EQ(Get<CreditAttempt>(Started(2, 1)).size(), 1u);
}

TEST_F(CarriedInputTest, NoPeerIsSentMoreThanItTakesBeforeItAnnounces) {
  EnterFar(2);
  const OpDesc whole = Desc(LH_READY_INPUT_BYTES_MAX / 4);
  constexpr uint64_t kAhead = LH_READY_INPUTS_AHEAD_BYTES_MAX / LH_READY_INPUT_BYTES_MAX;
  for (uint64_t tag = 0; tag < kAhead; ++tag) {
    EXPECT_EQ(Get<SendReady>(Post(tag, whole)).at(0).input, ReadyInput::kCarried);
  }
  EXPECT_EQ(Get<SendReady>(Post(50, whole)).at(0).input, ReadyInput::kWithheld);
  // An op that the other peer has announced does not count.
  PeerReady ready = ReadyOf(2, 60, whole);
  ready.input = ReadyInput::kCarried;
  ready.payload = std::string(whole.bytes(), 'x');
  Ready(ready);
  EXPECT_EQ(Get<SendReady>(Post(60, whole)).at(0).input, ReadyInput::kCarried);
  ready.tag = 0;
  Ready(ready);
  EXPECT_EQ(Get<SendReady>(Post(51, whole)).at(0).input, ReadyInput::kCarried);
}

TEST_F(CarriedInputTest, AnswersBeyondTheRoomForResultsComeWhenAllAreDone) {
  EnterFar(2);
  const OpDesc whole = Desc(LH_READY_INPUT_BYTES_MAX / 4);
  constexpr uint64_t kRoom = LH_READY_INPUTS_AHEAD_BYTES_MAX / LH_READY_INPUT_BYTES_MAX;
  for (uint64_t tag = 0; tag <= kRoom; ++tag) {
    Post(tag, whole);
    PeerReady ready = ReadyOf(2, tag, whole);
    ready.input = ReadyInput::kCarried;
    ready.payload = std::string(whole.bytes(), 'x');
    Ready(ready);
    const size_t answers =
        Get<PostDone>(Complete(tag + 1, 0, std::string(whole.bytes(), 'r'))).size();
    EXPECT_EQ(answers, tag < kRoom ? 1u : 0u) << tag;
  }
  EXPECT_EQ(Get<PostDone>(Done(2, kRoom + 1)).size(), 1u);
}

TEST_F(CarriedInputTest, ReadiesThatMeetNoOpAreBoundedInBytes) {
  EnterFar(2);
  PeerReady ready = ReadyOf(2, 0, Desc(LH_READY_INPUT_BYTES_MAX / 4));
  ready.input = ReadyInput::kCarried;
  ready.payload = std::string(LH_READY_INPUT_BYTES_MAX, 'x');
  constexpr uint64_t kMost = LH_READY_INPUTS_UNMATCHED_BYTES_MAX / LH_READY_INPUT_BYTES_MAX;
  for (uint64_t tag = 0; tag < kMost; ++tag) {
    ready.tag = tag;
    EXPECT_TRUE(Ready(ready).empty());
  }
  ready.tag = kMost;
  EXPECT_TRUE(Breaks(ready));
  ready.attempt = Epoch(2);
  for (uint64_t tag = 0; tag < kMost; ++tag) EXPECT_TRUE(Ready(ready).empty());
  EXPECT_TRUE(Breaks(ready));
}

TEST_F(CarriedInputTest, WhoWasKeptFromTheResultTakesItThoughTheOpGoesAnotherWayNow) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(2, 7));
  Freeze();
  EXPECT_EQ(ops_.Report().at(0).matches.size(), 1u) << "an earlier op may linger elsewhere";
  // Nobody says any more that the peers are far apart.
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).at(0).input, ReadyInput::kWithheld);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty()) << "the other one may have the result";
  auto ready = ReadyOf(2, 7, Middle(), 2);
  ready.result = OneShotResult{Epoch(1), kThree, std::string(Middle().bytes(), 'r')};
  const auto start = Get<StartAttempt>(Ready(ready));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kOneShot);
  EXPECT_EQ(start[0].result, ready.result->bytes);
  EXPECT_TRUE(Get<SendDone>(out_).empty());
  const auto done = Get<PostDone>(Complete(1, 2, ready.result->bytes));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].info.members, kThree);
}

TEST_F(CarriedInputTest, WithoutAResultTheRedoneOpMovesSegments) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(2, 7));
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<StartAttempt>(Ready(Withholding(2, 7, 2))).at(0).algorithm, Algorithm::kRing);
  EXPECT_EQ(Get<CreditAttempt>(Started(2, 1, 2)).size(), 1u);
}

TEST_F(CarriedInputTest, AResultOfAnOpThatNeverHadOneBreaksTheLink) {
  EnterThree();
  Post(7, Middle());
  Ready(2, 7, Middle());
  Freeze();
  Stopped(1);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  auto ready = ReadyOf(2, 7, Middle(), 2);
  ready.result = OneShotResult{Epoch(1), kThree, std::string(Middle().bytes(), 'r')};
  EXPECT_TRUE(Breaks(ready));
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

TEST_F(OpTableTest, PostsBeyondTheRulesAreRefused) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}}));
  Post(7, Large());
  const auto twice = Get<PostDone>(Post(7, Large()));
  EXPECT_EQ(twice.at(0).outcome.code, Code::kInvalidArgument);
  EXPECT_NE(twice[0].outcome.text.find("in flight"), std::string::npos);
  EXPECT_EQ(Get<PostDone>(Post(8, Desc(LH_COUNT_MAX + 1))).at(0).outcome.code,
            Code::kInvalidArgument);
  for (uint64_t tag = 100; ops_.open() < LH_OPS_OPEN_MAX; ++tag) {
    ops_.Post({PostOf(1, tag, Large()), MemberId(1), Epoch(1)}, now_, &out_);
  }
  EXPECT_EQ(Get<PostDone>(Post(9, Large())).at(0).outcome.code, Code::kUnavailable);
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), size_t{LH_OPS_OPEN_MAX});
}

TEST_F(OpTableTest, AFirstPostThatIsRefusedLeavesNoTrace) {
  EnterThree();
  Post(8, Desc(LH_COUNT_MAX + 1));
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
}

// ------------------------------------------------------------------------ several local members

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

TEST_F(OpTableTest, ADoneWithAnotherVerdictIsDisputed) {
  EnterThree();
  RunToDone(7);
  const auto disputes = Sent<control::Dispute>(Done(2, 1, 0, true));
  ASSERT_EQ(disputes.size(), 1u);
  EXPECT_EQ(disputes[0].peer, PeerId(2));
  EXPECT_EQ(disputes[0].tag, 7u);
  EXPECT_EQ(disputes[0].what, "all-reduce tag 7");
  EXPECT_TRUE(disputes[0].statements.empty());
  EXPECT_TRUE(Done(3, 1).empty());
  EXPECT_EQ(ops_.open(), 1u);
  EXPECT_EQ(Sent<control::Dispute>(AskAgain()), disputes);
  // The coordinator sees that the verdicts differ, and says redo.
  Freeze();
  EXPECT_EQ(ops_.Report().at(0).verdict, 0u);
  EXPECT_TRUE(ops_.Report().at(0).done);
}

// The refusal of the other peer keeps this one from getting done. So the dispute does not wait for
// that.
TEST_F(OpTableTest, ARefusalByOneOtherIsDisputedWhileTheAttemptRuns) {
  EnterThree();
  Post(7, Large());
  Ready(2, 7, Large());
  EXPECT_TRUE(Done(2, 1, 0, true).empty()) << "the READY of peer 3 may explain it";
  EXPECT_EQ(Sent<control::Dispute>(Ready(3, 7, Large())).size(), 1u);
}

// ------------------------------------------------------------------------------ signed READYs

class SignedOpTest : public OpTableTest {
 protected:
  static Identity IdentityOf(uint64_t peer) { return Identity::ForTest(peer); }
  void EnterSigned() {
    control::PrepareEpoch prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
    prepare.sign_ops = true;
    for (control::PeerInfo& peer : prepare.peers) {
      peer.key = IdentityOf(peer.peer.value()).public_key();
    }
    Enter(prepare);
  }
  static PeerReady SignedBy(uint64_t peer, uint64_t tag, const OpDesc& desc, uint64_t index = 0,
                            const std::string& said = "") {
    PeerReady ready = ReadyOf(peer, tag, desc);
    const std::string digest = Sha256(said);
    const control::ReadyName name{kGroup, Epoch(0), Epoch(1), tag, 0, index};
    ready.signature = {index, digest, IdentityOf(peer).Sign(control::TextToSign(name, digest))};
    return ready;
  }
  Actions& Signed(uint64_t ordinal, const std::string& said = "mine") {
    out_.clear();
    ops_.OnSigned({kGroup, OpOrdinal(ordinal), Epoch(0), Sha256(said)}, now_, &out_);
    Settled();
    return out_;
  }
  // What an honest peer's DONE says after these READYs.
  static Hash128 ReadiesDigestOf(const std::string& of_3, bool refused = false) {
    SignedReadies readies;
    readies.own = Sha256("mine");
    readies.others[PeerId(2)] = {PeerId(2), Sha256(""), ""};
    readies.others[PeerId(3)] = {PeerId(3), Sha256(of_3), ""};
    return peerd::DigestOf(readies, PeerId(1), refused);
  }
  Actions& DoneWith(uint64_t peer, std::optional<Hash128> readies_digest, bool refused = false) {
    out_.clear();
    PeerDone done{kGroup, PeerId(peer), OpOrdinal(1), Epoch(0), refused};
    done.readies_digest = readies_digest;
    ops_.OnDone(done, now_, &out_);
    Settled();
    return out_;
  }
};

TEST_F(SignedOpTest, ASmallOpEndsWhenAllHaveSaidThatTheyGotTheSame) {
  EnterSigned();
  const auto sent = Get<SendReady>(Post(7, Small()));
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].sign, 0u);
  Signed(1);
  Ready(SignedBy(2, 7, Small()));
  Ready(SignedBy(3, 7, Small()));
  const auto dones = Get<SendDone>(Complete(1, 0, PayloadOf(Small())));
  ASSERT_EQ(dones.size(), 2u) << "and nothing is answered yet";
  EXPECT_EQ(dones[0].readies_digest, ReadiesDigestOf(""));
  DoneWith(2, ReadiesDigestOf(""));
  EXPECT_EQ(Get<FinishAttempt>(DoneWith(3, ReadiesDigestOf(""))).size(), 1u);
}

TEST_F(SignedOpTest, InputsThatDifferAreDisputedWithProofs) {
  EnterSigned();
  Post(7, Small());
  Signed(1);
  Ready(SignedBy(2, 7, Small()));
  Ready(SignedBy(3, 7, Small(), 0, "what 2 did not get"));
  Complete(1, 0, PayloadOf(Small()));
  const auto disputes = Sent<control::Dispute>(DoneWith(2, ReadiesDigestOf("")));
  ASSERT_EQ(disputes.size(), 1u);
  ASSERT_EQ(disputes[0].statements.size(), 2u);
  const control::ReadyName name{kGroup, Epoch(0), Epoch(1), 7, 0, 0};
  for (const control::Statement& statement : disputes[0].statements) {
    EXPECT_TRUE(
        control::IsStatementOf(IdentityOf(statement.peer.value()).public_key(), name, statement));
  }
}

TEST_F(SignedOpTest, AReadyWithoutAGoodSignatureBreaksTheLink) {
  EnterSigned();
  Post(7, Large());
  Signed(1);
  EXPECT_TRUE(Breaks(ReadyOf(2, 7, Large()))) << "not signed";
  EXPECT_TRUE(Breaks(SignedBy(2, 7, Large(), 1))) << "of another op of this name";
  PeerReady ready = SignedBy(2, 7, Large());
  ready.signature->signature[5] ^= 1;
  EXPECT_TRUE(Breaks(ready));
  ready = SignedBy(3, 7, Large());
  ready.peer = PeerId(2);
  EXPECT_TRUE(Breaks(ready)) << "signed by another peer";
  EXPECT_FALSE(Breaks(SignedBy(2, 7, Large())));
}

// Members hear of a change of the world at different times. That is nobody's fault.
TEST_F(SignedOpTest, OffersForAnotherWorldAreSignedAndCountInTheDigest) {
  EnterSigned();
  OpDesc three = Large();
  three.kind = OpKind::kAllGather;
  three.world = 3;
  OpDesc four = three;
  four.world = 4;
  Post(7, three);
  Signed(1);
  EXPECT_TRUE(Breaks(ReadyOf(2, 7, four)));
  Ready(SignedBy(2, 7, four));
  Ready(SignedBy(3, 7, three));
  const auto dones = Get<SendDone>(Stopped(1));
  ASSERT_FALSE(dones.empty());
  EXPECT_TRUE(dones[0].refused);
  EXPECT_EQ(dones[0].readies_digest, ReadiesDigestOf("", /*refused=*/true));
}

TEST_F(SignedOpTest, ADoneWithoutADigestBreaksTheLink) {
  EnterSigned();
  Post(7, Large());
  Signed(1);
  Ready(SignedBy(2, 7, Large()));
  EXPECT_EQ(Get<BreakLink>(DoneWith(2, std::nullopt)).size(), 1u);
}

TEST_F(SignedOpTest, ACopyGoesOnCountingTheReadiesOfAName) {
  EnterSigned();
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).at(0).sign, 0u);
  Signed(1);
  Ready(SignedBy(2, 7, Large()));
  Ready(SignedBy(3, 7, Large()));
  Complete(1);
  DoneWith(2, ReadiesDigestOf(""));
  DoneWith(3, ReadiesDigestOf(""));
  OpTable copy(ops_, &history_, &counters_);
  EXPECT_EQ(DigestOf(copy), DigestOf(ops_));
  Actions out;
  copy.Post({PostOf(1, 7, Large()), MemberId(1), Epoch(1)}, now_, &out);
  EXPECT_EQ(Get<SendReady>(out).at(0).sign, 1u);
}

TEST_F(SignedOpTest, WhoRefusesGivesItsEvidenceWhenOpsAreFrozen) {
  EnterSigned();
  Post(7, Large());
  Signed(1);
  Ready(SignedBy(2, 7, Large()));
  Ready(SignedBy(3, 7, Small()));
  const auto evidence = Sent<control::Dispute>(Freeze());
  ASSERT_EQ(evidence.size(), 1u);
  EXPECT_EQ(evidence[0].peer, PeerId());
  EXPECT_EQ(evidence[0].statements.size(), 2u);
}

TEST_F(OpTableTest, ASignatureNobodyAskedForBreaksTheLink) {
  EnterThree();
  Post(7, Large());
  PeerReady ready = ReadyOf(2, 7, Large());
  ready.signature = ReadySignature{0, Sha256(""), "signature"};
  EXPECT_TRUE(Breaks(ready));
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
                               {{PeerId(2), OpOrdinal(205)}, {PeerId(3), OpOrdinal(305)}}}));
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
  LoseThree({}, {{Epoch(1), 7}});
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
  LoseThree({}, {{Epoch(1), 7}});
  ASSERT_EQ(Get<PostDone>(out_).size(), 1u);
  EXPECT_EQ(Get<PostDone>(out_)[0].outcome.code, Code::kAborted);
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).size(), 1u);
}

TEST_F(OpTableTest, OpsAbortedTwiceElsewhereAreMissedTwice) {
  EnterThree();
  Freeze();
  LoseThree({}, {{Epoch(1), 7}});
  Freeze();
  Enter(MakePrepare(3, 2, 1, 3, {{1, 1, 1}, {2, 2, 1}}), {}, {{Epoch(1), 7}});
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Get<PostDone>(Post(7, Large())).at(0).outcome.code, Code::kAborted);
  }
  EXPECT_TRUE(Get<PostDone>(Post(7, Large())).empty());
}

TEST_F(OpTableTest, WhatWasMissedIsForgottenBehindTheNextBoundary) {
  EnterThree();
  Freeze();
  LoseThree({}, {{Epoch(1), 7}, {Epoch(1), 8}});
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
  LoseThree({{OpOrdinal(1), Fate::kCommit}}, {{Epoch(1), 7}});
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
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}), {}, {{Epoch(1), 7}});
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
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}), {}, {{Epoch(1), 7}});
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

// ---- blocked pairs: the ring is 1, 2, 3, 4; the link of peers 1 and 3 goes through peer 2

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

// ---- lost peers

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

// ---- chunks that belong to members

OpDesc OfKind(OpKind kind, uint16_t world, uint64_t count = 8 << 20) {
  OpDesc desc = Desc(count);
  desc.kind = kind;
  desc.world = world;
  return desc;
}

OpDesc BroadcastOf(uint64_t root, uint64_t count = 8 << 20) {
  OpDesc desc = OfKind(OpKind::kBroadcast, 0, count);
  desc.root = MemberId(root);
  return desc;
}

TEST_F(OpTableTest, AChunkBelongsToAMemberAtItsPositionInTheRing) {
  // Ranks and ring differ: members 1 and 4 are at peer 1.
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {4, 1, 1}, {3, 3, 1}}));
  Post(7, OfKind(OpKind::kAllGather, 4), 4);
  const auto start = Get<StartAttempt>(Post(7, OfKind(OpKind::kAllGather, 4), 1));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kRing);
  std::vector<std::pair<int, int>> cuts;
  for (const CutOwner& cut : start[0].cuts) cuts.emplace_back(cut.position, cut.post);
  EXPECT_EQ(cuts, (std::vector<std::pair<int, int>>{{0, 0}, {1, -1}, {0, 1}, {2, -1}}));

  Post(8, BroadcastOf(3), 4);
  const auto broadcast = Get<StartAttempt>(Post(8, BroadcastOf(3), 1));
  ASSERT_EQ(broadcast.at(0).cuts.size(), 1u);
  EXPECT_EQ(broadcast[0].cuts[0].position, 2);
  EXPECT_EQ(broadcast[0].cuts[0].post, -1);
}

TEST_F(OpTableTest, ARankNamesTheRootInTheNewestEpoch) {
  EnterThree();
  const auto post = [&](uint64_t tag, uint64_t rank) -> OpDesc {
    LocalPost local = PostOf(1, tag, BroadcastOf(0));
    local.root_rank = rank;
    return Get<SendReady>(Post(local)).at(0).desc;
  };
  EXPECT_EQ(post(7, 2).root, MemberId(3));
  // Nobody has this rank: the op goes on, so that it ends at all members.
  EXPECT_EQ(post(8, 3).root, MemberId());
  Ready(2, 8, BroadcastOf(0));
  Ready(3, 8, BroadcastOf(0));
  Done(2, 2, 0, true);
  const PostDone done = Get<PostDone>(Done(3, 2, 0, true)).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("its root is not in the world"), std::string::npos);
}

TEST_F(OpTableTest, AReduceScatterOfALargerWorldEndsAbortedOnceEverybodyKnows) {
  EnterThree();
  const OpDesc desc = OfKind(OpKind::kReduceScatter, 3);
  Post(7, desc);
  Freeze();
  Stopped(1);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  ASSERT_EQ(Get<SendReady>(out_).size(), 1u);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  EXPECT_TRUE(Get<PostDone>(out_).empty());
  const auto dones = Get<SendDone>(Ready(2, 7, desc, 2));
  ASSERT_EQ(dones.size(), 1u);
  EXPECT_TRUE(dones[0].refused);
  const PostDone done = Get<PostDone>(Done(2, 1, 2, true)).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("laid out for 3 members, and 2 take part"), std::string::npos)
      << done.outcome.text;
  EXPECT_EQ(counters_.aborted, 1u);
  EXPECT_EQ(counters_.refused, 0u);
}

TEST_F(OpTableTest, ABroadcastEndsAbortedWithoutItsRootAndIsRedoneWithIt) {
  EnterThree();
  Post(7, BroadcastOf(3));
  Post(8, BroadcastOf(2));
  Freeze();
  Stopped(1);
  Stopped(2);
  LoseThree({{OpOrdinal(1), Fate::kRedo}, {OpOrdinal(2), Fate::kRedo}});
  const auto start = Get<StartAttempt>(out_);
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].ordinal, OpOrdinal(2));
  Ready(2, 7, BroadcastOf(3), 2);
  const PostDone done = Get<PostDone>(Done(2, 1, 2, true)).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("its root, member m3 (n), does not take part"),
            std::string::npos)
      << done.outcome.text;
}

TEST_F(OpTableTest, WorldsOrRootsThatDifferEndAbortedAndOtherDifferencesAreRefused) {
  EnterThree();
  Post(7, OfKind(OpKind::kAllGather, 3));
  Ready(2, 7, OfKind(OpKind::kAllGather, 4));
  // The attempt has begun: it stops, and then everybody says so.
  ASSERT_EQ(Get<StopAttempt>(out_).size(), 1u);
  Stopped(1);
  EXPECT_TRUE(Get<SendDone>(Ready(3, 7, OfKind(OpKind::kAllGather, 3))).at(0).refused);
  Done(2, 1, 0, true);
  PostDone done = Get<PostDone>(Done(3, 1, 0, true)).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("world 4"), std::string::npos) << done.outcome.text;

  Post(8, OfKind(OpKind::kAllGather, 3));
  Ready(2, 8, OfKind(OpKind::kReduceScatter, 3));
  Stopped(2);
  Ready(3, 8, OfKind(OpKind::kAllGather, 3));
  Done(2, 2, 0, true);
  done = Get<PostDone>(Done(3, 2, 0, true)).at(0);
  EXPECT_EQ(done.outcome.code, Code::kInvalidArgument);
  EXPECT_NE(done.outcome.text.find("reduce-scatter"), std::string::npos) << done.outcome.text;
}

TEST_F(OpTableTest, LocalMembersThatDifferInTheWorldMakeTheOpUnfitForAll) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}));
  Post(7, OfKind(OpKind::kReduceScatter, 3), 1);
  const auto readies = Get<SendReady>(Post(7, OfKind(OpKind::kReduceScatter, 4), 4));
  ASSERT_EQ(readies.size(), 1u);
  EXPECT_FALSE(readies[0].other_offer.has_value());
  EXPECT_EQ(readies[0].desc.world, 1);
  EXPECT_EQ(FaultIn(readies[0].desc), "");
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
}

TEST_F(OpTableTest, AResultWithMorePartsThanTheWorldIsRefused) {
  EnterThree();
  const OpDesc desc = OfKind(OpKind::kAllGather, 3, 4);
  Post(7, desc);
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  PeerReady ready = ReadyOf(2, 7, desc, 2);
  ready.payload.clear();
  ready.result = OneShotResult{Epoch(1), kThree, std::string(desc.bytes(), 'r')};
  EXPECT_FALSE(Breaks(ready));
  ready.result->members.push_back(MemberId(4));
  EXPECT_TRUE(Breaks(ready));
}

TEST_F(OpTableTest, ASmallReduceScatterIsAnsweredWhenAllAreDone) {
  EnterThree();
  const OpDesc desc = OfKind(OpKind::kReduceScatter, 3, 4);
  Post(7, desc);
  Ready(2, 7, desc);
  Ready(3, 7, desc);
  EXPECT_TRUE(Get<PostDone>(Complete(1, 0, std::string(desc.bytes(), 'r'))).empty());
  Done(2, 1);
  EXPECT_TRUE(Get<PostDone>(Done(3, 1)).at(0).outcome.ok());
}

// ---- kinds: who owns a part, and who gets it

OpDesc RootedOf(OpKind kind, uint16_t world, uint64_t root, uint64_t count = 8 << 20) {
  OpDesc desc = OfKind(kind, world, count);
  desc.root = MemberId(root);
  return desc;
}

// Position and post of the owner, position and post of the receiver.
using CutText = std::tuple<int, int, int, int>;
std::vector<CutText> CutTexts(const std::vector<CutOwner>& cuts) {
  std::vector<CutText> texts;
  for (const CutOwner& cut : cuts) {
    texts.emplace_back(cut.position, cut.post, cut.to_position, cut.to_post);
  }
  return texts;
}

class KindsTest : public OpTableTest {
 protected:
  // Members 1 and 4 are here. Ranks: 1, 2, 4, 3. Ring: peers 1, 2, 3.
  void EnterFour() { Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {4, 1, 1}, {3, 3, 1}})); }
  // Both local members post; a member named in the description is the root.
  StartAttempt Begin(const OpDesc& desc) {
    for (const uint64_t member : {4, 1}) {
      LocalPost post = PostOf(member, 7, desc);
      post.is_root = desc.root == MemberId(member);
      Post(post);
    }
    const auto starts = Get<StartAttempt>(out_);
    return starts.size() == 1 ? starts[0] : StartAttempt();
  }
  LocalPost RootedPost(uint64_t tag, const OpDesc& desc) {
    LocalPost post = PostOf(1, tag, desc);
    post.is_root = desc.root == MemberId(1);
    return post;
  }
  // Posts the op, lets peers 2 and 3 announce it, and returns how it ends. It must not run.
  PostDone EndOf(const LocalPost& post, uint64_t set = 0, std::vector<uint64_t> peers = {2, 3}) {
    const auto readies = Get<SendReady>(Post(post));
    EXPECT_TRUE(Get<StartAttempt>(out_).empty());
    if (readies.empty()) return Get<PostDone>(out_).at(0);
    for (const uint64_t peer : peers) {
      PeerReady ready = ReadyOf(peer, post.tag, readies[0].desc);
      ready.set = set;
      Ready(ready);
    }
    for (const SendDone& done : Get<SendDone>(out_)) EXPECT_TRUE(done.refused);
    for (const uint64_t peer : peers) Done(peer, readies[0].ordinal.value(), 0, true);
    return Get<PostDone>(out_).at(0);
  }
};

constexpr int kM1 = 0, kM4 = 1;  // indices of the local posts, in rank order

TEST_F(KindsTest, InAReduceTheRootHasTheWhole) {
  EnterFour();
  EXPECT_EQ(CutTexts(Begin(RootedOf(OpKind::kReduce, 0, 4)).cuts),
            (std::vector<CutText>{{0, kM4, 0, -1}}));
}

TEST_F(KindsTest, InAReduceScatterEachMemberOwnsAPart) {
  EnterFour();
  EXPECT_EQ(
      CutTexts(Begin(OfKind(OpKind::kReduceScatter, 4)).cuts),
      (std::vector<CutText>{{0, kM1, 0, -1}, {1, -1, 0, -1}, {0, kM4, 0, -1}, {2, -1, 0, -1}}));
}

TEST_F(KindsTest, InAGatherEachMemberGivesAPartToTheRoot) {
  EnterFour();
  const StartAttempt start = Begin(RootedOf(OpKind::kGather, 4, 4));
  EXPECT_EQ(
      CutTexts(start.cuts),
      (std::vector<CutText>{{0, kM1, 0, kM4}, {1, -1, 0, kM4}, {0, kM4, 0, kM4}, {2, -1, 0, kM4}}));
  EXPECT_EQ(start.algorithm, Algorithm::kMesh);
}

TEST_F(KindsTest, InAScatterTheRootGivesAPartToEachMember) {
  EnterFour();
  EXPECT_EQ(
      CutTexts(Begin(RootedOf(OpKind::kScatter, 4, 3)).cuts),
      (std::vector<CutText>{{2, -1, 0, kM1}, {2, -1, 1, -1}, {2, -1, 0, kM4}, {2, -1, 2, -1}}));
}

TEST_F(KindsTest, InAnAllToAllThereIsAPartForEachPair) {
  EnterFour();
  const std::vector<std::pair<int, int>> members = {{0, kM1}, {1, -1}, {0, kM4}, {2, -1}};
  std::vector<CutText> expected;
  for (const auto& [position, post] : members) {
    for (const auto& [to, to_post] : members) expected.emplace_back(position, post, to, to_post);
  }
  EXPECT_EQ(CutTexts(Begin(OfKind(OpKind::kAllToAll, 4)).cuts), expected);
}

TEST_F(KindsTest, ASendIsOfItsTwoMembersAlone) {
  EnterFour();
  LocalPost post = PostOf(4, 7, OfKind(OpKind::kSendRecv, 0));
  post.is_root = true;
  post.partner = MemberId(3);
  const auto readies = Get<SendReady>(Post(post));
  ASSERT_EQ(readies.size(), 1u) << "member 1 is not waited for, and peer 2 is not told";
  EXPECT_EQ(readies[0].to, PeerId(3));
  EXPECT_EQ(readies[0].set, SetOf(OpKind::kSendRecv, {MemberId(4), MemberId(3)}));
  const StartAttempt start = Get<StartAttempt>(out_).at(0);
  EXPECT_EQ(start.ring, (std::vector<PeerId>{PeerId(1), PeerId(3)}));
  EXPECT_EQ(CutTexts(start.cuts), (std::vector<CutText>{{0, 0, 1, -1}}));
  EXPECT_EQ(start.posts.size(), 1u);
}

TEST_F(KindsTest, ASendWithinAHostIsLocal) {
  EnterFour();
  LocalPost send = PostOf(4, 7, OfKind(OpKind::kSendRecv, 0));
  send.is_root = true;
  send.partner = MemberId(1);
  EXPECT_TRUE(Post(send).empty());
  LocalPost receive = PostOf(1, 7, OfKind(OpKind::kSendRecv, 0));
  receive.partner = MemberId(4);
  const StartAttempt start = Get<StartAttempt>(Post(receive)).at(0);
  EXPECT_EQ(start.algorithm, Algorithm::kLocal);
  EXPECT_EQ(CutTexts(start.cuts), (std::vector<CutText>{{0, kM4, 0, kM1}}));
  EXPECT_EQ(Get<PostDone>(Complete(1)).size(), 2u);
}

TEST_F(KindsTest, EachPositionSaysHowManyInputsItHas) {
  Enter(MakePrepare(1, 0, 1, 0,
                    {{1, 1, 1}, {2, 2, 1, control::kInBackground}, {4, 1, 1}, {3, 3, 1}}));
  EXPECT_EQ(Begin(Large()).ring_contributes, (std::vector<uint32_t>{2, 0, 1}));
}

// ---- roots

const std::vector<OpKind> kRooted = {OpKind::kBroadcast, OpKind::kReduce, OpKind::kGather,
                                     OpKind::kScatter};
uint16_t WorldOf(OpKind kind, uint16_t world) { return IsInParts(kind) ? world : 0; }

TEST_F(KindsTest, ARootIsNamedByRankOrById) {
  EnterThree();
  uint64_t tag = 10;
  for (const OpKind kind : kRooted) {
    LocalPost post = PostOf(1, tag++, RootedOf(kind, WorldOf(kind, 3), 0));
    post.root_rank = 2;
    EXPECT_EQ(Get<SendReady>(Post(post)).at(0).desc.root, MemberId(3)) << Name(kind);
    post = RootedPost(tag++, RootedOf(kind, WorldOf(kind, 3), 1));
    EXPECT_EQ(Get<SendReady>(Post(post)).at(0).desc.root, MemberId(1)) << Name(kind);
    EXPECT_EQ(Get<StartAttempt>(out_).size(), 1u) << Name(kind);
  }
}

TEST_F(KindsTest, ARoleThatDoesNotFitAnyMoreEndsAborted) {
  EnterThree();
  uint64_t tag = 10;
  for (const OpKind kind : kRooted) {
    // The trainer takes itself for the root, or another member, and the rank says otherwise.
    for (const uint64_t rank : {0, 1}) {
      LocalPost post = PostOf(1, tag++, RootedOf(kind, WorldOf(kind, 3), 0));
      post.root_rank = rank;
      post.is_root = rank != 0;
      if (kind == OpKind::kBroadcast) {
        EXPECT_EQ(Get<StartAttempt>(Post(post)).size(), 1u) << "its tensors fit both roles";
        continue;
      }
      const PostDone done = EndOf(post);
      EXPECT_EQ(done.outcome.code, Code::kAborted) << Name(kind);
      EXPECT_NE(done.outcome.text.find("its root is not in the world any more"), std::string::npos)
          << done.outcome.text;
    }
  }
}

TEST_F(KindsTest, ARootThatDiedEndsAbortedWithItsName) {
  EnterThree();
  uint64_t tag = 10, ordinal = 0;
  std::vector<OpFate> fates;
  for (const OpKind kind : kRooted) {
    Post(RootedPost(tag++, RootedOf(kind, WorldOf(kind, 3), 3)));
    fates.push_back({OpOrdinal(++ordinal), Fate::kRedo});
  }
  Freeze();
  for (uint64_t i = 1; i <= ordinal; ++i) Stopped(i);
  LoseThree(fates);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  tag = 10;
  ordinal = 0;
  for (const OpKind kind : kRooted) {
    Ready(2, tag++, RootedOf(kind, WorldOf(kind, 3), 3), 2);
    const PostDone done = Get<PostDone>(Done(2, ++ordinal, 2, true)).at(0);
    EXPECT_EQ(done.outcome.code, Code::kAborted);
    const std::string wanted = "its root, member m3 (n), does not take part";
    EXPECT_NE(done.outcome.text.find(wanted), std::string::npos) << done.outcome.text;
  }
}

TEST_F(KindsTest, ARootInTheBackgroundMayGetAndMayNotGive) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1, control::kInBackground}}));
  uint64_t tag = 10;
  for (const OpKind kind : kRooted) {
    const LocalPost post = RootedPost(tag++, RootedOf(kind, WorldOf(kind, 3), 3));
    if (kind == OpKind::kReduce || kind == OpKind::kGather) {
      const StartAttempt start = Get<StartAttempt>(Post(post)).at(0);
      EXPECT_EQ(start.cuts.size(), kind == OpKind::kReduce ? 1u : 2u);
      continue;
    }
    const PostDone done = EndOf(post);
    EXPECT_EQ(done.outcome.code, Code::kAborted);
    EXPECT_NE(done.outcome.text.find("its root, member m3 (n), is in the background"),
              std::string::npos)
        << done.outcome.text;
  }
}

TEST_F(KindsTest, AGatherGoesOnWithoutTheDeadAndAScatterOrAllToAllDoesNot) {
  EnterThree();
  const std::vector<OpDesc> descs = {RootedOf(OpKind::kGather, 3, 1),
                                     RootedOf(OpKind::kScatter, 3, 1),
                                     OfKind(OpKind::kAllToAll, 3)};
  for (size_t i = 0; i < descs.size(); ++i) Post(RootedPost(10 + i, descs[i]));
  Freeze();
  for (const uint64_t ordinal : {1, 2, 3}) Stopped(ordinal);
  LoseThree(
      {{OpOrdinal(1), Fate::kRedo}, {OpOrdinal(2), Fate::kRedo}, {OpOrdinal(3), Fate::kRedo}});
  const auto starts = Get<StartAttempt>(out_);
  ASSERT_EQ(starts.size(), 1u);
  EXPECT_EQ(CutTexts(starts[0].cuts), (std::vector<CutText>{{0, 0, 0, 0}, {1, -1, 0, 0}}));
  for (const uint64_t i : {1, 2}) {
    Ready(2, 10 + i, descs[i], 2);
    const PostDone done = Get<PostDone>(Done(2, i + 1, 2, true)).at(0);
    EXPECT_EQ(done.outcome.code, Code::kAborted);
    EXPECT_NE(done.outcome.text.find("laid out for 3 members, and 2 take part"), std::string::npos)
        << done.outcome.text;
  }
}

// ---- send and receive

class SendTest : public KindsTest {
 protected:
  static OpDesc Sent() { return OfKind(OpKind::kSendRecv, 0); }
  // Member 1 sends to the partner, or receives from it.
  LocalPost With(uint64_t tag, uint64_t partner, bool sends) {
    LocalPost post = PostOf(1, tag, Sent());
    post.partner = MemberId(partner);
    post.is_root = sends;
    return post;
  }
  static uint64_t Pair(uint64_t from, uint64_t to) {
    return SetOf(OpKind::kSendRecv, {MemberId(from), MemberId(to)});
  }
};

TEST_F(SendTest, BothDirectionsOfAPairMayHaveOneTagAtOnce) {
  EnterThree();
  ASSERT_NE(Pair(1, 2), Pair(2, 1));
  EXPECT_EQ(Get<SendReady>(Post(With(7, 2, true))).at(0).set, Pair(1, 2));
  LocalPost receive = With(7, 2, false);
  receive.post.call = 8;
  EXPECT_EQ(Get<SendReady>(Post(receive)).at(0).set, Pair(2, 1));
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 2u);
  // The READY of one direction is not that of the other.
  PeerReady ready = ReadyOf(2, 7, Sent());
  ready.set = Pair(2, 1);
  EXPECT_EQ(Get<CreditAttempt>(Ready(ready)).at(0).ordinal, OpOrdinal(2));
  Complete(2);
  EXPECT_EQ(Get<PostDone>(Done(2, 2)).at(0).post.call, 8u);
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 1u);
  EXPECT_EQ(Get<PostDone>(Post(With(7, 2, true))).at(0).outcome.code, Code::kInvalidArgument)
      << "this direction is still in flight";
  ready.set = Pair(1, 2);
  ready.ordinal = OpOrdinal(299);
  Ready(ready);
  Complete(1);
  EXPECT_EQ(Get<PostDone>(Done(2, 1)).at(0).post.call, 7u);
}

TEST_F(SendTest, APartnerIsNamedByRank) {
  EnterThree();
  LocalPost post = With(7, 0, true);
  post.root_rank = 2;
  const SendReady ready = Get<SendReady>(Post(post)).at(0);
  EXPECT_EQ(ready.to, PeerId(3));
  EXPECT_EQ(ready.set, Pair(1, 3));
  post = With(8, 0, false);
  post.root_rank = 3;
  const PostDone done = Get<PostDone>(Post(post)).at(0);
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("its partner has rank 3, and the group has 3 members"),
            std::string::npos)
      << done.outcome.text;
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 1u);
}

TEST_F(SendTest, AStrangerOrOneselfIsRefused) {
  EnterThree();
  for (const bool sends : {true, false}) {
    Outcome outcome = Get<PostDone>(Post(With(7, 9, sends))).at(0).outcome;
    EXPECT_EQ(outcome.code, Code::kInvalidArgument);
    EXPECT_EQ(outcome.text, "send-recv tag 7 refused: its partner, m9, is no member of the group");
    outcome = Get<PostDone>(Post(With(7, 1, sends))).at(0).outcome;
    EXPECT_EQ(outcome.code, Code::kInvalidArgument);
    EXPECT_EQ(outcome.text, "send-recv tag 7 refused: a member cannot send to itself");
  }
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
}

TEST_F(SendTest, APartnerThatDiedEndsAbortedWithItsName) {
  EnterThree();
  Post(With(7, 3, true));
  Post(With(8, 3, false));
  Freeze();
  Stopped(1);
  Stopped(2);
  LoseThree({{OpOrdinal(1), Fate::kRedo}, {OpOrdinal(2), Fate::kRedo}});
  auto done = Get<PostDone>(out_);
  ASSERT_EQ(done.size(), 2u) << "nobody else takes part, so nobody is waited for";
  for (const PostDone& each : done) EXPECT_EQ(each.outcome.code, Code::kAborted);
  EXPECT_NE(done[0].outcome.text.find("its receiver, member m3 (n), does not take part"),
            std::string::npos)
      << done[0].outcome.text;
  EXPECT_NE(done[1].outcome.text.find("its sender, member m3 (n), does not take part"),
            std::string::npos)
      << done[1].outcome.text;
  // A trainer that has not heard of the death gets the same answer.
  EXPECT_EQ(Get<PostDone>(Post(With(9, 3, true))).at(0).outcome.code, Code::kAborted);
}

TEST_F(SendTest, OneInTheBackgroundMayReceiveAndMayNotSend) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1, control::kInBackground}}));
  EXPECT_EQ(Get<StartAttempt>(Post(With(7, 3, true))).size(), 1u);
  const PostDone done = EndOf(With(8, 3, false), Pair(3, 1), {3});
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("its sender, member m3 (n), is in the background"),
            std::string::npos)
      << done.outcome.text;
}

// ---- sets of members

class SetTest : public KindsTest {
 protected:
  static LocalPost Among(uint64_t member, uint64_t tag, std::vector<uint64_t> ids,
                         const OpDesc& desc = Large()) {
    LocalPost post = PostOf(member, tag, desc);
    for (const uint64_t id : ids) post.participants.emplace_back(id);
    return post;
  }
  static uint64_t Set(std::vector<uint64_t> ids) {
    std::vector<MemberId> members;
    for (const uint64_t id : ids) members.emplace_back(id);
    return SetOf(OpKind::kAllReduce, members);
  }
  PeerReady ReadyAmong(uint64_t peer, uint64_t tag, std::vector<uint64_t> ids,
                       uint64_t attempt = 0) {
    PeerReady ready = ReadyOf(peer, tag, Large(), attempt);
    ready.set = Set(std::move(ids));
    return ready;
  }
};

TEST_F(SetTest, NobodyInParticularIsEverybody) {
  EXPECT_EQ(Set({}), 0u);
  EXPECT_NE(Set({1}), 0u);
  EXPECT_NE(Set({1, 2}), Set({1, 3}));
  EXPECT_NE(Set({1, 2}), SetOf(OpKind::kSendRecv, {MemberId(1), MemberId(2)}));
}

TEST_F(SetTest, TwoDisjointSetsMayHaveOneTagAtTheSameTime) {
  EnterFour();
  const auto first = Get<SendReady>(Post(Among(1, 7, {1, 2})));
  ASSERT_EQ(first.size(), 1u) << "member 4 is not waited for";
  EXPECT_EQ(first[0].to, PeerId(2));
  EXPECT_EQ(first[0].set, Set({1, 2}));
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).ring, (std::vector<PeerId>{PeerId(1), PeerId(2)}));
  const auto second = Get<SendReady>(Post(Among(4, 7, {3, 4})));
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].to, PeerId(3));
  EXPECT_EQ(second[0].set, Set({3, 4}));
  Ready(ReadyAmong(3, 7, {3, 4}));
  Complete(2);
  const PostDone done = Get<PostDone>(Done(3, 2)).at(0);
  EXPECT_EQ(done.post.local, LocalId(4));
  EXPECT_EQ(done.info.members, (std::vector<MemberId>{MemberId(4), MemberId(3)}));
  EXPECT_EQ(done.info.hosts, history_.HostsOf(done.info.members));
  Ready(ReadyAmong(2, 7, {1, 2}));
  Complete(1);
  EXPECT_EQ(Get<PostDone>(Done(2, 1)).at(0).post.local, LocalId(1));
}

TEST_F(SetTest, OneMemberMayBeInTwoSetsWithOneTagButNotTwiceInOne) {
  EnterThree();
  LocalPost post = Among(1, 7, {1, 2});
  EXPECT_EQ(Get<SendReady>(Post(post)).size(), 1u);
  post.post.call = 8;
  const Outcome twice = Get<PostDone>(Post(post)).at(0).outcome;
  EXPECT_EQ(twice.code, Code::kInvalidArgument);
  EXPECT_NE(twice.text.find("in flight"), std::string::npos) << twice.text;
  LocalPost other = Among(1, 7, {1, 3});
  other.post.call = 9;
  EXPECT_EQ(Get<SendReady>(Post(other)).size(), 1u);
  LocalPost all = PostOf(1, 7, Large());
  all.post.call = 10;
  EXPECT_EQ(Get<SendReady>(Post(all)).size(), 2u);
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 3u);
}

TEST_F(SetTest, AReadyOfAPeerOutsideOfTheSetBreaksTheLink) {
  EnterThree();
  Post(Among(1, 7, {1, 2}));
  EXPECT_TRUE(Breaks(ReadyAmong(3, 7, {1, 2})));
  EXPECT_FALSE(Breaks(ReadyAmong(3, 7, {1, 3})));
}

TEST_F(SetTest, ItGoesOnWithoutAMemberThatDied) {
  EnterThree();
  Post(Among(1, 7, {1, 2, 3}));
  Post(Among(1, 8, {1, 3}));
  Freeze();
  Stopped(1);
  Stopped(2);
  LoseThree({{OpOrdinal(1), Fate::kRedo}, {OpOrdinal(2), Fate::kRedo}});
  const auto readies = Get<SendReady>(out_);
  ASSERT_EQ(readies.size(), 1u);
  EXPECT_EQ(readies[0].set, Set({1, 2, 3})) << "its name stays";
  Ready(ReadyAmong(2, 7, {1, 2, 3}, 2));
  Complete(1, 2);
  EXPECT_EQ(Get<PostDone>(Done(2, 1, 2)).at(0).info.members,
            (std::vector<MemberId>{MemberId(1), MemberId(2)}));
  // Alone in the set.
  EXPECT_TRUE(Get<PostDone>(Complete(2, 2)).at(0).outcome.ok());
  // A trainer that has not heard of the death names the dead member, too.
  EXPECT_EQ(Get<SendReady>(Post(Among(1, 9, {1, 2, 3}))).at(0).set, Set({1, 2, 3}));
}

TEST_F(SetTest, ItsMembersAreKnownInOrderAndThePosterIsOneOfThem) {
  EnterThree();
  const auto refusal = [&](std::vector<uint64_t> ids) {
    const Outcome outcome = Get<PostDone>(Post(Among(1, 7, std::move(ids)))).at(0).outcome;
    EXPECT_EQ(outcome.code, Code::kInvalidArgument);
    return outcome.text;
  };
  EXPECT_EQ(refusal({2, 1}), "all-reduce tag 7 refused: its participants are not in rising order");
  EXPECT_EQ(refusal({1, 1}), "all-reduce tag 7 refused: its participants are not in rising order");
  EXPECT_EQ(refusal({1, 9}),
            "all-reduce tag 7 refused: m9 is among its participants, and is no member of the "
            "group; give ids of members");
  EXPECT_EQ(refusal({2, 3}),
            "all-reduce tag 7 refused: this member, m1, is not among its participants");
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
}

TEST_F(SetTest, WhatIsMissedIsTheOpOfThatSetOnly) {
  EnterThree();
  Freeze();
  LoseThree({}, {{Epoch(1), 7, Set({1, 2})}});
  EXPECT_EQ(Get<SendReady>(Post(PostOf(1, 7, Large()))).size(), 1u);
  EXPECT_EQ(Get<PostDone>(Post(Among(1, 7, {1, 2}))).at(0).outcome.code, Code::kAborted);
  LocalPost next = Among(1, 7, {1, 2});
  EXPECT_EQ(Get<SendReady>(Post(next)).size(), 1u);
}

TEST_F(SetTest, ARootOutsideOfTheSetDoesNotTakePart) {
  EnterThree();
  const OpDesc desc = BroadcastOf(3);
  const PostDone done = EndOf(Among(1, 7, {1, 2}, desc), Set({1, 2}), {2});
  EXPECT_EQ(done.outcome.code, Code::kAborted);
  EXPECT_NE(done.outcome.text.find("its root, member m3 (n), does not take part"),
            std::string::npos)
      << done.outcome.text;
}

TEST_F(SetTest, WhatIsToBePostedShowsWhoWaitsAndHowManyTakePart) {
  EnterFour();
  Post(Among(1, 7, {1, 3, 4}));
  const auto view = [&](const LocalPost& post) {
    PostView seen;
    ops_.ViewPost({post, MemberId(4), Epoch(1)}, &seen);
    return seen;
  };
  PostView seen = view(Among(4, 7, {1, 3, 4}));
  EXPECT_EQ(seen.peers, 2u);
  EXPECT_TRUE(seen.crowded);
  ASSERT_EQ(seen.together.size(), 1u);
  EXPECT_EQ(seen.together[0].second, MemberId(1));
  seen = view(Among(4, 7, {3, 4}));
  EXPECT_EQ(seen.peers, 2u);
  EXPECT_FALSE(seen.crowded);
  EXPECT_TRUE(seen.together.empty());
}

// ---- weights

class WeightsTest : public KindsTest {
 protected:
  static OpDesc Weighted(OpDesc desc = Large()) {
    desc.weighted = true;
    return desc;
  }
  LocalPost With(uint64_t member, double weight, const OpDesc& desc = Weighted()) {
    LocalPost post = PostOf(member, 7, desc);
    post.terms.weight = weight;
    return post;
  }
  PeerReady ReadyWith(uint64_t peer, std::vector<double> weights, uint64_t attempt = 0,
                      const OpDesc& desc = Weighted()) {
    PeerReady ready = ReadyOf(peer, 7, desc, attempt);
    for (const double weight : weights) ready.terms.push_back({weight, {}, {}});
    return ready;
  }
};

TEST_F(WeightsTest, AreSentInRankOrderAndAddedUpBeforeTheStart) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {4, 1, 1}}));
  Post(With(4, 2));
  const auto readies = Get<SendReady>(Post(With(1, 0.5)));
  ASSERT_EQ(readies.size(), 1u);
  EXPECT_EQ(readies[0].terms, (std::vector<OpTerms>{{0.5, {}, {}}, {2, {}, {}}}));
  EXPECT_EQ(readies[0].weights, (std::vector<double>{0.5, 2}));
  EXPECT_TRUE(Get<StartAttempt>(out_).empty()) << "the sum of the weights is not known yet";
  const auto start = Get<StartAttempt>(Ready(ReadyWith(2, {1.25})));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].weights, (std::vector<double>{0.5, 2}));
  EXPECT_EQ(start[0].weight_sum, 3.75);
}

TEST_F(WeightsTest, OfMembersInTheBackgroundDoNotCount) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1, control::kInBackground}}));
  Post(With(1, 0.5));
  Ready(ReadyWith(2, {1}));
  EXPECT_EQ(Get<StartAttempt>(Ready(ReadyWith(3, {100}))).at(0).weight_sum, 1.5);
}

TEST_F(WeightsTest, AreAddedUpAnewAfterADeath) {
  EnterThree();
  Post(With(1, 0.5));
  Ready(ReadyWith(2, {1}));
  EXPECT_EQ(Get<StartAttempt>(Ready(ReadyWith(3, {4}))).at(0).weight_sum, 5.5);
  Freeze();
  Stopped(1);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  EXPECT_EQ(Get<StartAttempt>(Ready(ReadyWith(2, {1}, 2))).at(0).weight_sum, 1.5);
}

TEST_F(WeightsTest, ThatAreAllZeroEndTheOpForAll) {
  EnterThree();
  for (const OpDesc& desc : {Weighted(), Weighted(Small())}) {
    const auto ordinal = Get<SendReady>(Post(With(1, 0, desc))).at(0).ordinal;
    Ready(ReadyWith(2, {0}, 0, desc));
    const auto dones = Get<SendDone>(Ready(ReadyWith(3, {0}, 0, desc)));
    EXPECT_TRUE(Get<StartAttempt>(out_).empty());
    ASSERT_EQ(dones.size(), 2u);
    EXPECT_TRUE(dones[0].refused);
    Done(2, ordinal.value(), 0, true);
    const PostDone done = Get<PostDone>(Done(3, ordinal.value(), 0, true)).at(0);
    EXPECT_EQ(done.outcome.code, Code::kTooFewMembers);
    EXPECT_EQ(done.outcome.text,
              "all-reduce tag 7 ended: the weights of all members are 0; the input is intact");
  }
}

TEST_F(WeightsTest, OneZeroIsNoFault) {
  EnterThree();
  Post(With(1, 0));
  Ready(ReadyWith(2, {0}));
  EXPECT_EQ(Get<StartAttempt>(Ready(ReadyWith(3, {2}))).at(0).weight_sum, 2);
}

TEST_F(WeightsTest, OfAnotherNumberOfMembersBreakTheLink) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {5, 2, 1}}));
  Post(With(1, 1));
  EXPECT_TRUE(Breaks(ReadyWith(2, {1})));
  EXPECT_TRUE(Breaks(ReadyWith(2, {1, 1, 1})));
  EXPECT_FALSE(Breaks(ReadyWith(2, {1, 1})));
}

TEST_F(WeightsTest, AResultOfAnEarlierAttemptNeedsNone) {
  EnterThree();
  const OpDesc desc = Weighted(Small());
  Post(With(1, 1, desc));
  Ready(ReadyWith(2, {1}, 0, desc));
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  PeerReady ready = ReadyWith(2, {}, 2, desc);
  ready.payload.clear();
  ready.result = OneShotResult{Epoch(1), kThree, std::string(16, 'r')};
  EXPECT_EQ(Get<StartAttempt>(Ready(ready)).at(0).result, std::string(16, 'r'));
  EXPECT_TRUE(Get<PostDone>(Complete(1, 2, std::string(16, 'r'))).at(0).outcome.ok());
}

TEST_F(WeightsTest, AndNoneAreDifferentOffers) {
  EnterThree();
  Post(With(1, 1));
  Ready(2, 7, Large());
  Ready(ReadyWith(3, {1}));
  Done(2, 1, 0, true);
  const Outcome outcome = Get<PostDone>(Done(3, 1, 0, true)).at(0).outcome;
  EXPECT_EQ(outcome.code, Code::kInvalidArgument);
  EXPECT_NE(outcome.text.find("weighted 1"), std::string::npos) << outcome.text;
}

// ---- parts of unequal lengths

using Lengths = std::vector<uint64_t>;

class UnequalTest : public KindsTest {
 protected:
  static OpDesc Unequal(OpKind kind, uint64_t root = 0) {
    OpDesc desc = RootedOf(kind, 3, root, 0);
    desc.unequal = true;
    return desc;
  }
  struct Terms {
    Lengths gives, gets;
  };
  // Posts the op at member 1, and gives it the READYs of members 2 and 3.
  Actions& Offer(const OpDesc& desc, const std::vector<Terms>& terms) {
    LocalPost post = RootedPost(7, desc);
    post.terms = {1, terms[0].gives, terms[0].gets};
    EXPECT_EQ(Get<SendReady>(Post(post)).at(0).terms.at(0), post.terms);
    EXPECT_TRUE(Get<StartAttempt>(out_).empty());
    for (const uint64_t peer : {2, 3}) {
      if (terms.size() >= peer) Ready(ReadyWith(peer, desc, terms[peer - 1]));
    }
    return out_;
  }
  PeerReady ReadyWith(uint64_t peer, const OpDesc& desc, const Terms& terms, uint64_t attempt = 0) {
    PeerReady ready = ReadyOf(peer, 7, desc, attempt);
    ready.terms = {{1, terms.gives, terms.gets}};
    return ready;
  }
  static Lengths Counts(const StartAttempt& start) {
    Lengths counts;
    for (const CutOwner& cut : start.cuts) counts.push_back(cut.count);
    return counts;
  }
  // What the op that was offered starts with; empty: it does not start.
  Lengths Started() {
    const auto starts = Get<StartAttempt>(out_);
    return starts.size() == 1 ? Counts(starts[0]) : Lengths();
  }
  // How the op that was offered ends, if it is refused.
  std::string Refusal() {
    EXPECT_TRUE(Get<StartAttempt>(out_).empty());
    const auto dones = Get<SendDone>(out_);
    EXPECT_EQ(dones.size(), 2u);
    for (const SendDone& done : dones) EXPECT_TRUE(done.refused);
    Done(2, 1, 0, true);
    const PostDone done = Get<PostDone>(Done(3, 1, 0, true)).at(0);
    EXPECT_EQ(done.outcome.code, Code::kInvalidArgument);
    return done.outcome.text;
  }
};

TEST_F(UnequalTest, PartsOfAnAllGatherAreAsTheirOwnersSay) {
  EnterThree();
  const Lengths all = {3, 5, 0};
  Offer(Unequal(OpKind::kAllGather), {{{3}, all}, {{5}, all}, {{0}, all}});
  EXPECT_EQ(Started(), all);
}

TEST_F(UnequalTest, AnAllGatherWhoseLengthsDoNotFitNamesBothMembers) {
  EnterThree();
  const Lengths all = {3, 5, 0};
  Offer(Unequal(OpKind::kAllGather), {{{3}, all}, {{6}, {3, 6, 0}}, {{0}, all}});
  EXPECT_EQ(Refusal(),
            "all-gather tag 7 refused: member m2 gives 6 elements to member m1, which expects 5 "
            "elements");
}

// The op is laid out for three members, and two take part. So ranks do not say whose part is whose.
TEST_F(UnequalTest, AnAllGatherInAnotherWorldMustFitIntoEachTarget) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}}));
  const Lengths all = {3, 5, 0};
  const OpDesc desc = Unequal(OpKind::kAllGather);
  const auto offer = [&](uint64_t tag, uint64_t gives) {
    LocalPost post = RootedPost(tag, desc);
    post.terms = {1, {gives}, all};
    Post(post);
    PeerReady ready = ReadyOf(2, tag, desc);
    ready.terms = {{1, {5}, all}};
    Ready(ready);
  };
  offer(7, 3);
  EXPECT_EQ(Started(), (Lengths{3, 5}));
  offer(8, 4);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  EXPECT_EQ(Get<PostDone>(Done(2, 2, 0, true)).at(0).outcome.text,
            "all-gather tag 8 refused: the members give 9 elements in all, and member m1 has room "
            "for 8");
}

TEST_F(UnequalTest, PartsOfAReduceScatterAreTheSameForAll) {
  EnterThree();
  const Lengths all = {3, 5, 0};
  Offer(Unequal(OpKind::kReduceScatter), {{all, {3}}, {all, {5}}, {all, {0}}});
  EXPECT_EQ(Started(), all);
}

TEST_F(UnequalTest, AReduceScatterWhoseLengthsDoNotFitNamesBothMembers) {
  EnterThree();
  const Lengths all = {3, 5, 0};
  Offer(Unequal(OpKind::kReduceScatter), {{all, {3}}, {{3, 5, 1}, {5}}, {all, {0}}});
  EXPECT_EQ(Refusal(),
            "reduce-scatter tag 7 refused: members m1 and m2 give different lengths of parts");
}

TEST_F(UnequalTest, AReduceScatterKnowsWhatEachMemberExpects) {
  EnterThree();
  const Lengths all = {3, 5, 0};
  Offer(Unequal(OpKind::kReduceScatter), {{all, {3}}, {all, {5}}, {all, {2}}});
  EXPECT_EQ(Refusal(),
            "reduce-scatter tag 7 refused: member m1 gives 0 elements to member m3, which expects "
            "2 elements");
}

TEST_F(UnequalTest, AGatherFitsIfItsRootSaysSo) {
  EnterThree();
  Offer(Unequal(OpKind::kGather, 3), {{{3}, {}}, {{5}, {}}, {{0}, {3, 5, 0}}});
  EXPECT_EQ(Started(), (Lengths{3, 5, 0}));
}

TEST_F(UnequalTest, AGatherWhoseLengthsDoNotFitNamesBothMembers) {
  EnterThree();
  Offer(Unequal(OpKind::kGather, 3), {{{3}, {}}, {{5}, {}}, {{0}, {3, 4, 0}}});
  EXPECT_EQ(Refusal(),
            "gather tag 7 refused: member m2 gives 5 elements to member m3, which expects 4 "
            "elements");
}

TEST_F(UnequalTest, AScatterFitsIfItsRootSaysSo) {
  EnterThree();
  Offer(Unequal(OpKind::kScatter, 2), {{{}, {3}}, {{3, 5, 0}, {5}}, {{}, {0}}});
  EXPECT_EQ(Started(), (Lengths{3, 5, 0}));
}

TEST_F(UnequalTest, AScatterWhoseLengthsDoNotFitNamesBothMembers) {
  EnterThree();
  Offer(Unequal(OpKind::kScatter, 2), {{{}, {4}}, {{3, 5, 0}, {5}}, {{}, {0}}});
  EXPECT_EQ(Refusal(),
            "scatter tag 7 refused: member m2 gives 3 elements to member m1, which expects 4 "
            "elements");
}

TEST_F(UnequalTest, AnAllToAllHasALengthForEachPair) {
  EnterThree();
  Offer(Unequal(OpKind::kAllToAll),
        {{{1, 2, 3}, {1, 4, 7}}, {{4, 5, 6}, {2, 5, 8}}, {{7, 8, 9}, {3, 6, 9}}});
  EXPECT_EQ(Started(), (Lengths{1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST_F(UnequalTest, AnAllToAllWhoseLengthsDoNotFitNamesBothMembers) {
  EnterThree();
  Offer(Unequal(OpKind::kAllToAll),
        {{{1, 2, 3}, {1, 4, 7}}, {{4, 5, 6}, {2, 5, 0}}, {{7, 8, 9}, {3, 6, 9}}});
  EXPECT_EQ(Refusal(),
            "all-to-all tag 7 refused: member m3 gives 8 elements to member m2, which expects 0 "
            "elements");
}

TEST_F(UnequalTest, AMissingLengthIsAMismatchToo) {
  EnterThree();
  Offer(Unequal(OpKind::kAllToAll),
        {{{1, 2, 3}, {1, 4, 7}}, {{4, 5}, {2, 5, 8}}, {{7, 8, 9}, {3, 6, 9}}});
  EXPECT_EQ(Refusal(),
            "all-to-all tag 7 refused: member m2 gives no length to member m3, which expects 6 "
            "elements");
}

TEST_F(UnequalTest, AnAllGatherIsCompactAfterADeath) {
  EnterThree();
  const Lengths all = {3, 5, 2};
  const OpDesc desc = Unequal(OpKind::kAllGather);
  // The member in the middle dies.
  Offer(desc, {{{3}, all}, {{5}, all}, {{2}, all}});
  ASSERT_EQ(Started(), all);
  Freeze();
  Stopped(1);
  Enter(MakePrepare(2, 1, 1, 2, {{1, 1, 1}, {3, 3, 1}}), {{OpOrdinal(1), Fate::kRedo}});
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  Ready(ReadyWith(3, desc, {{2}, all}, 2));
  EXPECT_EQ(Started(), (Lengths{3, 2}));
  Complete(1, 2);
  EXPECT_TRUE(Get<PostDone>(Done(3, 1, 2)).at(0).outcome.ok());
}

TEST_F(UnequalTest, LengthsOfAHostAreBounded) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}));
  OpDesc desc = Unequal(OpKind::kAllToAll);
  desc.world = LH_ALL_TO_ALL_MEMBERS_MAX;
  LocalPost post = PostOf(1, 7, desc);
  post.terms.gives.assign(LH_ALL_TO_ALL_MEMBERS_MAX, 1);
  post.terms.gets.assign(LH_ALL_TO_ALL_MEMBERS_MAX - 1, 1);
  EXPECT_TRUE(Post(post).empty()) << "it waits for member 4";
  post.tag = 8;
  post.terms.gets.push_back(1);
  const Outcome outcome = Get<PostDone>(Post(post)).at(0).outcome;
  EXPECT_EQ(outcome.code, Code::kInvalidArgument);
  EXPECT_EQ(outcome.text,
            "all-to-all tag 8 refused: the lengths of its parts take 4100 bytes, and those of all "
            "members of a host may take at most 8192; use parts of equal lengths");
}

// ---- order

class OrderTest : public KindsTest {
 protected:
  static OpDesc ByRank(OpDesc desc = Desc(1 << 20)) {
    desc.order = Order::kRank;
    return desc;
  }
};

TEST_F(OrderTest, ByRankIsTheOrderOfTheFirstMembersThatCount) {
  // The ring is 3, 1, 2. Ranks: 1, 2, 4, 3; member 1 does not count.
  auto prepare =
      MakePrepare(1, 0, 1, 0, {{1, 1, 1, control::kInBackground}, {2, 2, 1}, {4, 1, 1}, {3, 3, 1}});
  std::rotate(prepare.peers.begin(), prepare.peers.end() - 1, prepare.peers.end());
  Enter(prepare);
  const StartAttempt start = Begin(ByRank());
  EXPECT_EQ(start.ring, (std::vector<PeerId>{PeerId(3), PeerId(1), PeerId(2)}));
  EXPECT_EQ(start.order, (std::vector<int>{2, 1, 0}));
  EXPECT_EQ(start.algorithm, Algorithm::kMesh);
}

TEST_F(OrderTest, AnyHasNone) {
  EnterFour();
  EXPECT_TRUE(Begin(Large()).order.empty());
}

TEST_F(OrderTest, ByRankHoldsForSmallOpsToo) {
  auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  std::swap(prepare.peers[0], prepare.peers[2]);
  Enter(prepare);
  const OpDesc desc = ByRank(Small());
  Post(7, desc);
  Ready(2, 7, desc);
  const StartAttempt start = Get<StartAttempt>(Ready(3, 7, desc)).at(0);
  EXPECT_EQ(start.algorithm, Algorithm::kOneShot);
  EXPECT_EQ(start.order, (std::vector<int>{2, 1, 0}));
}

TEST_F(OrderTest, ByRankCannotRunWhereOnlyTheRingIs) {
  auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
  prepare.blocked = {{PeerId(1), PeerId(3), PeerId(2)}};
  Enter(prepare);
  const PostDone done = EndOf(PostOf(1, 7, ByRank()));
  EXPECT_EQ(done.outcome.code, Code::kFailedPrecondition);
  EXPECT_NE(done.outcome.text.find("order rank needs links between all hosts, at most 64"),
            std::string::npos)
      << done.outcome.text;
  // A small one needs no ring.
  Post(8, ByRank(Small()));
  Ready(2, 8, ByRank(Small()));
  EXPECT_EQ(Get<StartAttempt>(Ready(3, 8, ByRank(Small()))).size(), 1u);
}

// ---- cancelled ops

using control::CancelOp;

class CancelTest : public KindsTest {
 protected:
  // Commits an epoch with the same three members, which judges the ops.
  void Judge(uint64_t epoch, const std::vector<OpFate>& fates) {
    Enter(MakePrepare(epoch, epoch - 1, 1, epoch, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}}), fates);
  }
  static CancelOp Asking(uint64_t after, uint64_t member = 1) {
    return {kGroup, MemberId(member), Epoch(after), "all-reduce tag 7"};
  }
};

TEST_F(CancelTest, WhatWasNeverAnnouncedEndsHere) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {5, 1, 1}, {2, 2, 1}}));
  Post(7, Large(), 1);
  Post(7, Large(), 4);
  const auto done = Get<PostDone>(Cancel(7, 1));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].post.local, LocalId(1));
  EXPECT_EQ(done[0].outcome.code, Code::kAborted);
  EXPECT_EQ(done[0].outcome.text,
            "all-reduce tag 7 cancelled before its host had announced it; the source is unchanged");
  EXPECT_TRUE(Sent<CancelOp>(out_).empty());
  EXPECT_EQ(ops_.PostsOf(LocalId(1)), 0u);
  EXPECT_EQ(ops_.PostsOf(LocalId(4)), 1u) << "the others wait on";
  Post(7, Large(), 5);
  EXPECT_TRUE(Get<SendReady>(out_).empty());
  EXPECT_EQ(Get<SendReady>(Post(7, Large(), 1)).size(), 1u);
}

TEST_F(CancelTest, TheLastPostThatIsCancelledLeavesNoTrace) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {4, 1, 1}, {2, 2, 1}}));
  Post(7, Large(), 1);
  EXPECT_EQ(Get<PostDone>(Cancel(7, 1)).size(), 1u);
  EXPECT_EQ(ops_.open(), 0u);
  EXPECT_TRUE(Cancel(7, 1).empty());
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

TEST_F(CancelTest, WhileFrozenWhatWasNeverAnnouncedEndsHereToo) {
  EnterThree();
  Freeze();
  Post(7, Large());
  EXPECT_EQ(Get<PostDone>(Cancel(7)).at(0).outcome.code, Code::kAborted);
  Judge(2, {});
  EXPECT_TRUE(Get<SendReady>(out_).empty());
}

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
  const auto digest = [&] {
    Digester digester;
    ops_.AddTo(&digester);
    return digester.value();
  };
  Post(7, Large());
  const uint64_t before = digest();
  Cancel(7);
  EXPECT_NE(digest(), before);
}

// ---- min_world

OpDesc AtLeast(uint16_t min_world, OpDesc desc = Large()) {
  desc.min_world = min_world;
  return desc;
}

TEST_F(OpTableTest, AnOpOfTooFewEndsAtAllOnceEverybodyKnows) {
  EnterThree();
  for (const OpDesc& desc : {AtLeast(4), AtLeast(4, Small())}) {
    const uint64_t tag = desc.count;
    const auto ordinal = Get<SendReady>(Post(tag, desc)).at(0).ordinal;
    EXPECT_TRUE(Get<StartAttempt>(out_).empty());
    EXPECT_TRUE(Ready(2, tag, desc).empty());
    const auto dones = Get<SendDone>(Ready(3, tag, desc));
    ASSERT_EQ(dones.size(), 2u);
    EXPECT_TRUE(dones[0].refused);
    Done(2, ordinal.value(), 0, true);
    Done(3, ordinal.value(), 0, true);
    const PostDone done = Get<PostDone>(out_).at(0);
    EXPECT_EQ(done.outcome.code, Code::kTooFewMembers);
    EXPECT_EQ(done.outcome.text,
              "all-reduce tag " + std::to_string(tag) +
                  " ended: 3 members take part, min_world asks for 4; the input is intact");
    EXPECT_FALSE(Get<FinishAttempt>(out_).at(0).commit);
  }
}

TEST_F(OpTableTest, EnoughMembersAreEnough) {
  EnterThree();
  EXPECT_EQ(Get<StartAttempt>(Post(7, AtLeast(3))).size(), 1u);
}

TEST_F(OpTableTest, AnOpIsOfTooFewAfterADeath) {
  EnterThree();
  Post(7, AtLeast(3));
  Ready(2, 7, AtLeast(3));
  Freeze();
  Stopped(1);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).size(), 1u);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  EXPECT_TRUE(Get<SendDone>(Ready(2, 7, AtLeast(3), 2)).at(0).refused);
  EXPECT_EQ(Get<PostDone>(Done(2, 1, 2, true)).at(0).outcome.code, Code::kTooFewMembers);
  EXPECT_EQ(counters_.refused, 1u);
}

TEST_F(OpTableTest, AloneIsTooFewOrEnoughAsTheCallerChose) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}}));
  EXPECT_EQ(Get<PostDone>(Post(7, AtLeast(2))).at(0).outcome.code, Code::kTooFewMembers);
  Post(8, Large());
  EXPECT_TRUE(Get<PostDone>(Complete(2)).at(0).outcome.ok());
}

TEST_F(OpTableTest, MembersThatAskForDifferentWorldsAreToldSo) {
  EnterThree();
  Post(7, AtLeast(4));
  Ready(2, 7, AtLeast(2));
  Ready(3, 7, AtLeast(4));
  Done(2, 1, 0, true);
  const Outcome outcome = Get<PostDone>(Done(3, 1, 0, true)).at(0).outcome;
  EXPECT_EQ(outcome.code, Code::kInvalidArgument);
  EXPECT_NE(outcome.text.find("min_world 2"), std::string::npos) << outcome.text;
  EXPECT_NE(outcome.text.find("min_world 4"), std::string::npos) << outcome.text;
}

TEST_F(OpTableTest, AnOpOfTooFewIsSettledByArbitrationToo) {
  EnterThree();
  Post(7, AtLeast(4));
  Ready(2, 7, AtLeast(4));
  Ready(3, 7, AtLeast(4));
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kCommit}});
  EXPECT_EQ(Get<PostDone>(out_).at(0).outcome.code, Code::kTooFewMembers);
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

TEST_F(OpTableTest, DigestsTellStatesApart) {
  const auto digest = [&] {
    Digester digester;
    ops_.AddTo(&digester);
    history_.AddTo(&digester);
    return digester.value();
  };
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

// ---- members in the background

TEST_F(OpTableTest, WhoDoesNotCountTakesPartWithoutAnInput) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1, control::kInBackground}}));
  Post(7, Large());
  EXPECT_EQ(Get<SendReady>(out_).size(), 2u);
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).members, 2u);
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).contributes, std::vector<bool>{true});
  Ready(2, 7, Large());
  Ready(3, 7, Large());
  Complete(1);
  Done(2, 1);
  EXPECT_EQ(Get<PostDone>(Done(3, 1)).at(0).info.members.size(), 2u);
}

TEST_F(OpTableTest, SmallOpsLeaveItOutByItsPlaceInTheRing) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1, control::kInBackground}, {2, 2, 1}, {3, 3, 1}}));
  EXPECT_EQ(Get<SendReady>(Post(7, Small())).at(0).contributes, std::vector<bool>{false});
  Ready(2, 7, Small());
  Ready(3, 7, Small());
  const auto start = Get<StartAttempt>(out_).at(0);
  EXPECT_EQ(start.ring_contributes, (std::vector<uint32_t>{0, 1, 1}));
  EXPECT_EQ(start.members, 2u);
}

TEST_F(OpTableTest, AnOpOfAnOlderBoundaryLeavesItOutAlsoWhenItIsRedone) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1, control::kInBackground}}));
  Post(7, Large());
  Ready(2, 7, Large());
  Ready(3, 7, Large());
  Enter(MakePrepare(2, 1, 2, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1, Epoch(2)}}));
  Freeze();
  Stopped(1);
  Enter(MakePrepare(3, 2, 2, 3, {{1, 1, 1}, {3, 3, 1, Epoch(2)}}), {{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).members, 1u);
  EXPECT_EQ(Get<StartAttempt>(Post(8, Large(), 1, 2)).at(0).members, 2u);
}

TEST_F(OpTableTest, AnOpToWhichNobodyContributesEndsTooFewMembers) {
  Enter(MakePrepare(1, 0, 1, 0,
                    {{1, 1, 1, control::kInBackground}, {2, 2, 1, control::kInBackground}}));
  Post(7, Large());
  EXPECT_TRUE(Get<StartAttempt>(out_).empty());
  Ready(2, 7, Large());
  const auto done = Get<PostDone>(Done(2, 1, 0, /*refused=*/true));
  EXPECT_EQ(done.at(0).outcome.code, Code::kTooFewMembers);
  EXPECT_NE(done.at(0).outcome.text.find("are in the background"), std::string::npos);
}

TEST_F(OpTableTest, MinWorldMeansThoseThatCount) {
  Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1, control::kInBackground}}));
  Post(7, AtLeast(2));
  Ready(2, 7, AtLeast(2));
  EXPECT_EQ(Get<PostDone>(Done(2, 1, 0, /*refused=*/true)).at(0).outcome.text,
            "all-reduce tag 7 ended: 1 members take part, min_world asks for 2; the input is "
            "intact");
}

}  // namespace
}  // namespace longhaul::peerd
