#include "peerd/engine/op_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <variant>
#include <vector>

#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

const PeerId kSelf(1), kOther(2);
const GroupKey kGroup{"demo", 0};

// A transport that takes `room` bytes of segments. All further segments wait in its queue.
class Narrow final : public Transport {
 public:
  struct Queued {
    uint64_t bytes = 0;
    uint64_t cookie = 0;
  };

  uint64_t QueuedBytes() const {
    uint64_t bytes = 0;
    for (const Queued& queued : queue) bytes += queued.bytes;
    return bytes;
  }

  void SendSegment(const LinkKey&, const FrameHeader& header, const uint8_t*, uint64_t cookie,
                   uint64_t) override {
    queue.push_back({header.payload_bytes, cookie});
  }
  void DropSegments(FrameType, const std::vector<uint64_t>& cookies) override {
    std::erase_if(queue, [&](const Queued& queued) {
      if (std::find(cookies.begin(), cookies.end(), queued.cookie) == cookies.end()) return false;
      dropped.push_back(queued.cookie);
      return true;
    });
  }
  void DetachReceives(const std::string&, const ReceiveKey&, uint64_t cookie) override {
    detached.push_back(cookie);
  }
  uint64_t StateBytes(const LinkKey&) const override { return 0; }
  LinkUse BestUse(const LinkKey&) const override { return {1 << 20, false}; }

  void SetSegmentListeners(const SegmentListeners&) override {}
  std::string listen_address() const override { return ""; }
  void OpenLinks(const std::string&, uint32_t, Epoch, const std::string&,
                 const std::vector<LinkRequest>&, Tick) override {}
  void KeepLinks(const std::string&, uint32_t, Epoch, const std::vector<PeerId>&) override {}
  void TryPeer(const GroupKey&, uint64_t, PeerId, const std::vector<std::string>&, Tick) override {}
  void SendControl(const LinkKey&, const FrameHeader&, std::span<const uint8_t>) override {}
  void SendControlInTime(const LinkKey&, const FrameHeader&, std::span<const uint8_t>) override {}
  void WantDataLanes(const LinkKey&) override {}
  void BreakLink(const LinkKey&, const std::string&) override {}
  void AddMemory(const uint8_t*, size_t) override {}
  void RemoveMemory(const uint8_t*) override {}
  void SetDetectMs(uint32_t) override {}
  TransportStats GetStats() const override { return {}; }
  std::vector<LinkStats> GetLinkStats() const override { return {}; }
  std::vector<std::pair<LinkKey, LinkWait>> PopWaits() override { return {}; }
  std::vector<std::pair<LinkKey, RateSample>> PopRates() override { return {}; }
  HostSample PopArrivals() override { return {}; }
  bool StartProbe(const LinkKey&) override { return false; }
  std::optional<LinkProbe> PopProbe() override { return std::nullopt; }
  void Close() override {}
  bool closed() const override { return true; }

  std::deque<Queued> queue;
  std::vector<uint64_t> dropped;   // cookies for which OnSegmentSent() is due
  std::vector<uint64_t> detached;  // cookies for which OnReceivesDetached() is due
};

OpDesc Sum(uint64_t count) {
  OpDesc desc;
  desc.dtype = DType::kFloat32;
  desc.count = count;
  return desc;
}

// An attempt in a ring of this peer and another peer.
StartAttempt Ring(uint64_t ordinal, const OpDesc& desc, const std::vector<PostRef>& posts) {
  StartAttempt start;
  start.group = kGroup;
  start.ordinal = OpOrdinal(ordinal);
  start.attempt = Epoch(1);
  start.desc = desc;
  start.ring = {kSelf, kOther};
  start.members = static_cast<uint32_t>(posts.size()) + 1;
  start.posts = posts;
  start.contributes.assign(posts.size(), true);
  start.ring_contributes = {static_cast<uint32_t>(posts.size()), 1};
  return start;
}

// The buffers of an op with one piece. Post() says how long it is.
PostBuffers At(const float* source, float* target) {
  PostBuffers buffers;
  buffers.pieces.resize(1);
  buffers.sources = {reinterpret_cast<const uint8_t*>(source)};
  buffers.targets = {reinterpret_cast<uint8_t*>(target)};
  return buffers;
}
PostBuffers OutOfPlace(const std::vector<float>& source, std::vector<float>* target) {
  return At(source.data(), target->data());
}
PostBuffers InPlace(std::vector<float>* tensor) { return OutOfPlace(*tensor, tensor); }

// Makes a post as the driver does. Local n is member n. `together`: posts of the same op that wait.
Outcome Post(OpRunner* runner, const LocalPost& local, const PostBuffers& buffers,
             const std::vector<PostRef>& together = {}, size_t peers = 2) {
  runner->AddPost(local, buffers);
  const PostRef post = local.post;
  PostView view;
  view.member = MemberId(post.local.value());
  view.peers = peers;
  for (const PostRef& other : together) {
    view.together.emplace_back(other, MemberId(other.local.value()));
  }
  Outcome outcome = runner->Admit(local, view);
  if (!outcome.ok()) runner->EndPost(post);
  return outcome;
}
Outcome Post(OpRunner* runner, const PostRef& post, const OpDesc& desc, PostBuffers buffers,
             const std::vector<PostRef>& together = {}, size_t peers = 2, uint64_t tag = 7) {
  buffers.pieces[0] = {desc.dtype, desc.count};
  return Post(runner, LocalPost{post, tag, desc}, buffers, together, peers);
}

TEST(OpRunner, AnOpThatIsStoppedQueuesNothingMore) {
  Narrow transport;
  OpRunner runner(&transport, {.self = kSelf});
  std::vector<float> tensor(8 << 20, 1);
  const PostRef post{LocalId(1), 1};
  const OpDesc desc = Sum(tensor.size());
  ASSERT_TRUE(Post(&runner, post, desc, InPlace(&tensor)).ok());
  runner.Start(Ring(1, desc, {post}));
  runner.Credit({kGroup, OpOrdinal(1), Epoch(1), kOther, OpOrdinal(1)});
  EXPECT_EQ(transport.QueuedBytes(), 1u << 20);

  runner.Stop({kGroup, OpOrdinal(1), Epoch(1)});
  EXPECT_EQ(transport.QueuedBytes(), 0u);
  const auto deliver = [&] {
    for (const uint64_t cookie : std::exchange(transport.dropped, {})) {
      runner.segments()->OnSegmentSent(cookie);
    }
  };
  deliver();
  for (const uint64_t cookie : transport.detached) runner.segments()->OnReceivesDetached(cookie);
  deliver();
  EXPECT_EQ(transport.QueuedBytes(), 0u);
  const std::vector<Event> events = runner.PopEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(std::get<AttemptStopped>(events[0]).ordinal, OpOrdinal(1));
  EXPECT_TRUE(runner.Idle());
  runner.EndPost(post);
}

// Stops every op that `runner` has started, up to `ordinal`.
void StopAll(OpRunner* runner, Narrow* transport, uint64_t ordinal) {
  for (uint64_t op = 1; op <= ordinal; ++op) runner->Stop({kGroup, OpOrdinal(op), Epoch(1)});
  for (const uint64_t cookie : std::exchange(transport->detached, {})) {
    runner->segments()->OnReceivesDetached(cookie);
  }
}

// ------------------------------------------------------------------------------ slices

// An attempt in which only this peer takes part.
StartAttempt Alone(uint64_t ordinal, const OpDesc& desc, const std::vector<PostRef>& posts) {
  StartAttempt start = Ring(ordinal, desc, posts);
  start.ring = {kSelf};
  start.ring_contributes = {static_cast<uint32_t>(posts.size())};
  start.members = static_cast<uint32_t>(posts.size());
  start.algorithm = Algorithm::kLocal;
  return start;
}

class Slices : public testing::Test {
 protected:
  using Tensor = std::vector<float>;

  // Starts an op of several local members, in place. It is complete at once.
  void RunLocal(OpRunner* runner, uint64_t ordinal, std::vector<Tensor>* tensors) {
    const OpDesc desc = Sum(tensors->front().size());
    std::vector<PostRef> posts;
    for (Tensor& tensor : *tensors) {
      const PostRef post{LocalId(posts.size() + 1), ordinal};
      ASSERT_TRUE(Post(runner, post, desc, InPlace(&tensor), posts, 1, ordinal).ok());
      posts.push_back(post);
    }
    runner->Start(Alone(ordinal, desc, posts));
    const std::vector<Event> events = runner->PopEvents();
    ASSERT_EQ(events.size(), 1u);
    ASSERT_EQ(std::get<AttemptComplete>(events[0]).ordinal, OpOrdinal(ordinal));
  }
  // The number of bytes of the elements that have `value`.
  static uint64_t Bytes(const std::vector<Tensor>& tensors, float value) {
    uint64_t bytes = 0;
    for (const Tensor& tensor : tensors) {
      bytes += sizeof value * std::count(tensor.begin(), tensor.end(), value);
    }
    return bytes;
  }
  // The ordinals of the ops for which AttemptFinished came since the last call.
  static std::vector<uint64_t> Finished(OpRunner* runner) {
    std::vector<uint64_t> ordinals;
    for (const Event& event : runner->PopEvents()) {
      ordinals.push_back(std::get<AttemptFinished>(event).ordinal.value());
    }
    return ordinals;
  }
  Narrow transport_;
};

TEST_F(Slices, OneTurnWorksOnABoundedNumberOfBytesForAllOps) {
  constexpr uint64_t kTurn = 256 << 10;
  // The last piece of a turn may go beyond the limit.
  constexpr uint64_t kBound = kTurn + 4 * (16 << 10);
  OpRunner runner(&transport_, {.self = kSelf, .turn_bytes_max = kTurn});
  std::vector<Tensor> first(2, Tensor(1 << 18, 1)), second(2, Tensor(1 << 18, 1));
  RunLocal(&runner, 1, &first);
  RunLocal(&runner, 2, &second);
  runner.Finish({kGroup, OpOrdinal(1), true});
  runner.Finish({kGroup, OpOrdinal(2), true});
  uint64_t written = 0;
  int turns = 0;
  for (std::vector<uint64_t> told; told.size() < 2; ++turns) {
    const uint64_t now = Bytes(first, 2) + Bytes(second, 2);
    ASSERT_LE(now - written, kBound) << "in turn " << turns;
    written = now;
    for (const uint64_t ordinal : Finished(&runner)) {
      told.push_back(ordinal);
      EXPECT_EQ(Bytes(ordinal == 1 ? first : second, 2), 2u << 20) << "told before it was so";
    }
    ASSERT_EQ(runner.HasWork(), told.size() < 2);
    runner.Work();
  }
  EXPECT_GE(turns, 15);
  EXPECT_TRUE(runner.Idle());
}

TEST_F(Slices, ASmallOpIsFinishedAtOnceAndNoLargeOneHoldsItUp) {
  OpRunner runner(&transport_, {.self = kSelf});
  std::vector<Tensor> small(2, Tensor(10000, 1)), large(2, Tensor(4 << 20, 1)),
      behind(2, Tensor(10000, 1));
  RunLocal(&runner, 1, &small);
  runner.Finish({kGroup, OpOrdinal(1), true});
  EXPECT_EQ(Finished(&runner), std::vector<uint64_t>{1});
  EXPECT_FALSE(runner.HasWork());
  RunLocal(&runner, 2, &large);
  RunLocal(&runner, 3, &behind);
  runner.Finish({kGroup, OpOrdinal(2), true});
  runner.Finish({kGroup, OpOrdinal(3), true});
  EXPECT_TRUE(Finished(&runner).empty());
  runner.Work();
  EXPECT_EQ(Finished(&runner), std::vector<uint64_t>{3});
  while (runner.HasWork()) runner.Work();
  EXPECT_EQ(Finished(&runner), std::vector<uint64_t>{2});
}

TEST_F(Slices, AStoppedAttemptIsAnsweredWhenAllOriginalsAreBack) {
  constexpr uint64_t kTurn = 256 << 10;
  OpRunner runner(&transport_, {.self = kSelf, .turn_bytes_max = kTurn});
  std::vector<Tensor> tensors(1, Tensor(2 << 20, 1));
  const PostRef post{LocalId(1), 1};
  const OpDesc desc = Sum(tensors[0].size());
  ASSERT_TRUE(Post(&runner, post, desc, InPlace(&tensors[0])).ok());
  runner.Start(Ring(1, desc, {post}));
  runner.Credit({kGroup, OpOrdinal(1), Epoch(1), kOther, OpOrdinal(1)});
  // The other peer sends its part of the chunk that this peer finishes.
  FrameHeader header;
  header.type = FrameType::kData;
  header.op = OpOrdinal(1);
  header.attempt = Epoch(1);
  header.payload_bytes = 1 << 20;
  for (header.offset = 4 << 20; header.offset < 8 << 20; header.offset += 1 << 20) {
    auto* const place =
        reinterpret_cast<float*>(*runner.segments()->OnDataHeader({"demo", kOther}, header));
    std::fill_n(place, (1 << 20) / sizeof(float), 4.0f);
    ASSERT_TRUE(runner.segments()->OnDataReceived({"demo", kOther}, header).ok());
  }
  ASSERT_EQ(Bytes(tensors, 5), 4u << 20);
  StopAll(&runner, &transport_, 1);
  uint64_t left = 4 << 20;
  int turns = 0;
  for (;; ++turns) {
    for (const uint64_t cookie : std::exchange(transport_.dropped, {})) {
      runner.segments()->OnSegmentSent(cookie);
    }
    const uint64_t now = Bytes(tensors, 5);
    ASSERT_LE(left - now, kTurn) << "in turn " << turns;
    left = now;
    const std::vector<Event> events = runner.PopEvents();
    if (!events.empty()) {
      ASSERT_EQ(std::get<AttemptStopped>(events[0]).ordinal, OpOrdinal(1));
      break;
    }
    runner.Work();
  }
  EXPECT_EQ(left, 0u);
  EXPECT_EQ(Bytes(tensors, 1), 8u << 20);
  EXPECT_GE(turns, 20);
  EXPECT_TRUE(runner.Idle());
}

// ------------------------------------------------------------------------------ memory of ops

TEST(OpRunner, AllOpsThatTheScratchLimitAdmitsCanRun) {
  Narrow transport;
  OpRunner runner(&transport, {.self = kSelf, .scratch_limit = 1 << 20});
  std::vector<float> tensor(1280, 1);
  const OpDesc desc = Sum(tensor.size());
  uint64_t ops = 0;
  while (Post(&runner, {LocalId(1), ops + 1}, desc, InPlace(&tensor)).ok()) {
    ++ops;
    runner.Start(Ring(ops, desc, {{LocalId(1), ops}}));
  }
  EXPECT_GE(ops, 50u);
  StopAll(&runner, &transport, ops);
  EXPECT_TRUE(runner.Idle());
}

TEST(OpRunner, ScratchIsTakenOnceForAllLocalPostsOfAnOp) {
  Narrow transport;
  std::vector<std::vector<float>> tensors(3, std::vector<float>(5000, 1));
  const OpDesc desc = Sum(5000);
  OpRunner runner(
      &transport,
      {.self = kSelf, .scratch_limit = ScratchBytesMax(desc, /*in_place=*/true, 2, false, false)});
  std::vector<PostRef> posts;
  for (uint64_t local = 1; local <= 3; ++local) {
    const PostRef post{LocalId(local), 1};
    const Outcome outcome = Post(&runner, post, desc, InPlace(&tensors[local - 1]), posts);
    ASSERT_TRUE(outcome.ok()) << outcome.text;
    posts.push_back(post);
  }
  // Another op is refused until this one is over.
  std::vector<float> other(5000, 1);
  const PostRef more{LocalId(1), 2};
  const Outcome refused = Post(&runner, more, desc, InPlace(&other), {}, 2, 8);
  EXPECT_EQ(refused.code, Code::kUnavailable);
  EXPECT_EQ(refused.text,
            "all-reduce tag 8 refused: it needs 20032 bytes of scratch memory, ops in flight hold "
            "20032 and the limit is 20032: wait for some of them, or raise --scratch-limit of "
            "peerd");
  runner.Start(Ring(1, desc, posts));
  StopAll(&runner, &transport, 1);
  runner.EndPost(posts[0]);
  runner.EndPost(posts[1]);
  EXPECT_EQ(Post(&runner, more, desc, InPlace(&other), {}, 2, 8).code, Code::kUnavailable);
  runner.EndPost(posts[2]);
  EXPECT_TRUE(Post(&runner, more, desc, InPlace(&other), {}, 2, 8).ok());
}

TEST(OpRunner, ScratchIsTakenOnlyWhereAnAttemptNeedsIt) {
  Narrow transport;
  OpRunner runner(&transport, {.self = kSelf, .scratch_limit = 0});
  std::vector<float> source(5000, 1), target(5000);
  const OpDesc desc = Sum(5000);
  uint64_t call = 0;
  const auto accepted = [&](const OpDesc& desc, bool in_place, size_t peers) {
    const PostRef post{LocalId(1), ++call};
    const PostBuffers buffers = in_place ? InPlace(&target) : OutOfPlace(source, &target);
    return Post(&runner, post, desc, buffers, {}, peers).ok();
  };
  EXPECT_TRUE(accepted(desc, /*in_place=*/false, 2));  // a ring uses the target, not scratch memory
  EXPECT_FALSE(accepted(desc, /*in_place=*/true, 2));
  EXPECT_FALSE(accepted(desc, /*in_place=*/false, 3));  // may be a mesh
  OpDesc ring = desc;
  ring.algorithm = Algorithm::kRing;
  EXPECT_TRUE(accepted(ring, /*in_place=*/false, 3));
  EXPECT_TRUE(accepted(desc, /*in_place=*/true, 1));  // alone
  EXPECT_TRUE(accepted(Sum(16), /*in_place=*/true, 3));
}

// An out-of-place ring keeps partial sums in the target of a member. This member may be gone when
// the op is redone.
TEST(OpRunner, AnOpInPlaceCanRunWithoutTheOneThatWasNot) {
  Narrow transport;
  OpRunner runner(&transport, {.self = kSelf});
  std::vector<float> source(5000, 1), target(5000), tensor(5000);
  const OpDesc desc = Sum(5000);
  const PostRef first{LocalId(1), 1}, second{LocalId(2), 1};
  ASSERT_TRUE(Post(&runner, first, desc, OutOfPlace(source, &target)).ok());
  ASSERT_TRUE(Post(&runner, second, desc, InPlace(&tensor), {first}).ok());
  runner.Start(Ring(1, desc, {first, second}));
  StopAll(&runner, &transport, 1);
  runner.EndPost(first);
  runner.Start(Ring(1, desc, {second}));
  StopAll(&runner, &transport, 1);
  EXPECT_TRUE(runner.Idle());
}

TEST(OpRunner, WithoutMemoryThePostIsRefusedAndTheNextOneIsTaken) {
  Narrow transport;
  OpRunner runner(&transport, {.self = kSelf, .scratch_limit = UINT64_MAX});
  // No machine has so much memory. The tensor is never read.
  std::vector<float> tensor(5000, 1);
  OpDesc huge = Sum(LH_COUNT_MAX);
  huge.algorithm = Algorithm::kRing;
  const Outcome refused = Post(&runner, {LocalId(1), 1}, huge, InPlace(&tensor));
  EXPECT_EQ(refused.code, Code::kUnavailable);
  EXPECT_NE(refused.text.find("the host has no more"), std::string::npos) << refused.text;
  EXPECT_TRUE(Post(&runner, {LocalId(1), 2}, Sum(5000), InPlace(&tensor)).ok());
}

// ------------------------------------------------------------------- tensors that share memory

class SharedMemory : public testing::Test {
 protected:
  // Posts an op for m1 and then for m2. Returns how the post of m2 is refused, or "". The arguments
  // are indexes of elements in one array. Each tensor has 2000 elements.
  std::string Refusal(size_t source1, size_t target1, size_t source2, size_t target2) {
    OpRunner runner(&transport_, {.self = kSelf});
    const auto at = [&](size_t source, size_t target) {
      return At(memory_.data() + source, memory_.data() + target);
    };
    const PostRef first{LocalId(1), 1}, second{LocalId(2), 1};
    EXPECT_TRUE(Post(&runner, first, Sum(2000), at(source1, target1)).ok());
    const Outcome outcome = Post(&runner, second, Sum(2000), at(source2, target2), {first});
    EXPECT_TRUE(outcome.ok() || outcome.code == Code::kInvalidArgument);
    // m2 may post the op again with another tensor, while the post of m1 waits.
    const PostRef again{LocalId(2), 2};
    if (!outcome.ok()) {
      EXPECT_TRUE(Post(&runner, again, Sum(2000), at(8000, 8000), {first}).ok());
    }
    return outcome.text;
  }
  Narrow transport_;
  std::vector<float> memory_ = std::vector<float>(10000);
};

TEST_F(SharedMemory, IsRefusedWhereOneMemberWritesAndNamesBoth) {
  EXPECT_EQ(Refusal(0, 2000, 2000, 4000),
            "all-reduce tag 7 refused: the source of member m2 shares memory with the target of "
            "member m1 in the same op; post it again with a tensor of its own");
  EXPECT_EQ(Refusal(0, 2000, 6000, 3999),
            "all-reduce tag 7 refused: the target of member m2 shares memory with the target of "
            "member m1 in the same op; post it again with a tensor of its own");
  // With both: the one that begins first is named.
  EXPECT_EQ(Refusal(0, 2000, 4000, 1999),
            "all-reduce tag 7 refused: the target of member m2 shares memory with the source of "
            "member m1 in the same op; post it again with a tensor of its own");
  EXPECT_EQ(Refusal(0, 2000, 4000, 0),
            "all-reduce tag 7 refused: the target of member m2 shares memory with the source of "
            "member m1 in the same op; post it again with a tensor of its own");
  EXPECT_NE(Refusal(0, 0, 0, 0), "");
  EXPECT_NE(Refusal(0, 0, 1999, 4000), "");
}

TEST_F(SharedMemory, IsFineBetweenSourcesAndBesideEachOther) {
  EXPECT_EQ(Refusal(0, 2000, 0, 4000), "");
  EXPECT_EQ(Refusal(0, 3000, 1000, 5000), "");
  EXPECT_EQ(Refusal(0, 0, 2000, 2000), "");
}

// Two pieces of 1000 elements each, at these indexes.
TEST_F(SharedMemory, EveryPieceOfAListCounts) {
  const auto list = [&](size_t source1, size_t source2, size_t target1, size_t target2) {
    PostBuffers buffers;
    buffers.pieces.assign(2, {DType::kFloat32, 1000});
    for (const size_t at : {source1, source2}) {
      buffers.sources.push_back(reinterpret_cast<const uint8_t*>(memory_.data() + at));
    }
    for (const size_t at : {target1, target2}) {
      buffers.targets.push_back(reinterpret_cast<uint8_t*>(memory_.data() + at));
    }
    return buffers;
  };
  OpDesc desc;
  desc.list = 7;
  desc.list_bytes = 8064;
  const auto refusal = [&](const PostBuffers& second) {
    OpRunner runner(&transport_, {.self = kSelf});
    const PostRef one{LocalId(1), 1}, two{LocalId(2), 1};
    EXPECT_TRUE(Post(&runner, LocalPost{one, 7, desc}, list(0, 1000, 2000, 3000)).ok());
    return Post(&runner, LocalPost{two, 7, desc}, second, {one}).text;
  };
  EXPECT_EQ(refusal(list(0, 1000, 4000, 5000)), "");
  EXPECT_EQ(refusal(list(4000, 5000, 6000, 1999)),
            "all-reduce tag 7 refused: the target of member m2 shares memory with the source of "
            "member m1 in the same op; post it again with a tensor of its own");
  EXPECT_EQ(refusal(list(4000, 3999, 6000, 7000)),
            "all-reduce tag 7 refused: the source of member m2 shares memory with the target of "
            "member m1 in the same op; post it again with a tensor of its own");
}

TEST_F(SharedMemory, ATensorThatAMemberDoesNotHaveSharesNothing) {
  // Members 1 and 2 give their inputs to the root, which is neither.
  OpDesc desc = Sum(2000);
  desc.kind = OpKind::kReduce;
  desc.root = MemberId(3);
  OpRunner runner(&transport_, {.self = kSelf});
  const PostRef one{LocalId(1), 1}, two{LocalId(2), 1};
  EXPECT_TRUE(Post(&runner, one, desc, At(memory_.data(), nullptr)).ok());
  EXPECT_TRUE(Post(&runner, two, desc, At(memory_.data(), nullptr), {one}).ok());
}

}  // namespace
}  // namespace longhaul::peerd
