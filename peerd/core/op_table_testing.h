// What the tests of op tables share: a table of peer 1, told by short calls what happens.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "base/digest.h"
#include "peerd/core/op_table.h"
#include "peerd/core/testing.h"

namespace longhaul::peerd {

// Peer 1 is under test. Members 1, 2 and 3 are at peers 1, 2 and 3, unless a test says otherwise.
inline const std::vector<MemberId> kThree = {MemberId(1), MemberId(2), MemberId(3)};

class OpTableTest : public testing::Test {
 protected:
  void Enter(const control::PrepareEpoch& prepare, const std::vector<control::OpFate>& fates = {},
             const std::vector<control::MissedOp>& missed = {}, const std::set<PeerId>& lost = {}) {
    out_.clear();
    history_.Add(RecordOf(prepare));
    ops_.Commit(fates, missed, lost, now_, &out_);
    Settled();
  }
  void EnterThree() { Enter(MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}})); }
  // Commits an epoch without peer 3.
  void LoseThree(const std::vector<control::OpFate>& fates,
                 const std::vector<control::MissedOp>& missed = {}) {
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
    ops_.Cancel({LocalId(member), tag}, &out_);
    Settled();
    return out_;
  }
  Actions& Pass(uint64_t member, const Place& place) {
    out_.clear();
    ops_.Pass(MemberId(member), place, &out_);
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
    OpTable copy = ops_;
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
    EXPECT_EQ(DigestOf(OpTable(ops_)), DigestOf(ops_)) << "a copy differs";
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

inline OpDesc Wanting(Algorithm algorithm, OpDesc desc = Large()) {
  desc.algorithm = algorithm;
  return desc;
}

inline OpDesc OfKind(OpKind kind, uint16_t world, uint64_t count = 8 << 20) {
  OpDesc desc = Desc(count);
  desc.kind = kind;
  desc.world = world;
  return desc;
}

inline OpDesc BroadcastOf(uint64_t root, uint64_t count = 8 << 20) {
  OpDesc desc = OfKind(OpKind::kBroadcast, 0, count);
  desc.root = MemberId(root);
  return desc;
}

inline OpDesc RootedOf(OpKind kind, uint16_t world, uint64_t root, uint64_t count = 8 << 20) {
  OpDesc desc = OfKind(kind, world, count);
  desc.root = MemberId(root);
  return desc;
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

}  // namespace longhaul::peerd
