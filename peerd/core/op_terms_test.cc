#include "peerd/core/op_terms.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "peerd/core/op_table_testing.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::Fate;
using control::OpFate;

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

// ------------------------------------------------------------------------------ kinds: who owns a
// part, and who gets it

// Position and post of the owner, position and post of the receiver.
using CutText = std::tuple<int, int, int, int>;

std::vector<CutText> CutTexts(const std::vector<CutOwner>& cuts) {
  std::vector<CutText> texts;
  for (const CutOwner& cut : cuts) {
    texts.emplace_back(cut.position, cut.post, cut.to_position, cut.to_post);
  }
  return texts;
}

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

// ------------------------------------------------------------------------------ roots

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
    // The trainer takes itself for the root, or another member, and the rank says otherwise. The
    // tensors of a broadcast fit both roles, and still it means another member than the others.
    for (const uint64_t rank : {0, 1}) {
      LocalPost post = PostOf(1, tag++, RootedOf(kind, WorldOf(kind, 3), 0));
      post.root_rank = rank;
      post.is_root = rank != 0;
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

// ------------------------------------------------------------------------------ weights

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

// ------------------------------------------------------------------------------ parts of unequal
// lengths

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

TEST_F(UnequalTest, WeightsThatAreTooLargeRefuseTheOpThoughItsLengthsFit) {
  EnterThree();
  OpDesc desc = Unequal(OpKind::kReduceScatter);
  desc.weighted = true;
  const Lengths parts = {3, 5, 0};
  LocalPost post = RootedPost(7, desc);
  post.terms = {1e308, parts, {3}};
  Post(post);
  for (const uint64_t peer : {2, 3}) {
    PeerReady ready = ReadyOf(peer, 7, desc);
    ready.terms = {{1e308, parts, {parts[peer - 1]}}};
    Ready(ready);
  }
  EXPECT_EQ(Refusal(),
            "reduce-scatter tag 7 refused: the sum of the members' weights is too large for a "
            "double; give smaller ones");
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

// ------------------------------------------------------------------------------ order

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

// ------------------------------------------------------------------------------ min_world

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

// ------------------------------------------------------------------------------ members in the
// background

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
