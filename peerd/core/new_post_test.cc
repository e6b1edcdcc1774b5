#include "peerd/core/new_post.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "peerd/core/op_table_testing.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::Fate;

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

// ------------------------------------------------------------------------------ send and receive

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

// ------------------------------------------------------------------------------ sets of members

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
  LoseThree({}, {{Epoch(1), 7, Set({1, 2}), 1}});
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

}  // namespace
}  // namespace longhaul::peerd
