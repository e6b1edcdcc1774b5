#include "peerd/engine/op_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <variant>
#include <vector>

namespace longhaul::peerd {
namespace {

const PeerId kSelf(1), kOther(2);
const GroupKey kGroup{"demo", 0};

// Takes `room` bytes of segments and no more: those behind them wait in the queue.
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
  void DropSegments(const std::vector<uint64_t>& cookies) override {
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

  std::string listen_address() const override { return ""; }
  void OpenLinks(const std::string&, uint32_t, Epoch, const std::string&,
                 const std::vector<LinkRequest>&, Tick) override {}
  void KeepLinks(const std::string&, uint32_t, Epoch, const std::vector<PeerId>&) override {}
  void SendControl(const LinkKey&, const FrameHeader&, std::span<const uint8_t>) override {}
  void SendControlInTime(const LinkKey&, const FrameHeader&, std::span<const uint8_t>) override {}
  void WantDataLanes(const LinkKey&) override {}
  void ForgetSegments(uint64_t) override {}
  void BreakLink(const LinkKey&, const std::string&) override {}
  void AddMemory(const uint8_t*, size_t) override {}
  void RemoveMemory(const uint8_t*) override {}
  void SetDetectMs(uint32_t) override {}
  TransportStats GetStats() const override { return {}; }
  std::vector<LinkStats> GetLinkStats() const override { return {}; }
  std::vector<LinkDelivery> TakeDeliveries() override { return {}; }
  bool StartProbe(const LinkKey&) override { return false; }
  std::optional<LinkProbe> TakeProbe() override { return std::nullopt; }
  void Close() override {}
  bool closed() const override { return true; }

  std::deque<Queued> queue;
  std::vector<uint64_t> dropped;   // OnSegmentSent() is due
  std::vector<uint64_t> detached;  // OnReceivesDetached() is due
};

OpDesc Sum(uint64_t count) {
  OpDesc desc;
  desc.dtype = DType::kFloat32;
  desc.count = count;
  return desc;
}

StartAttempt Ring(uint64_t ordinal, const OpDesc& desc, const PostRef& post) {
  StartAttempt start;
  start.group = kGroup;
  start.ordinal = OpOrdinal(ordinal);
  start.attempt = Epoch(1);
  start.desc = desc;
  start.ring = {kSelf, kOther};
  start.members = 2;
  start.posts = {post};
  start.counts = {true};
  start.ring_counts = {true, true};
  return start;
}

PostBuffers InPlace(std::vector<float>* tensor) {
  PostBuffers buffers;
  buffers.source = reinterpret_cast<const uint8_t*>(tensor->data());
  buffers.target = reinterpret_cast<uint8_t*>(tensor->data());
  return buffers;
}

TEST(OpRunner, AnOpThatIsStoppedQueuesNothingMore) {
  Narrow transport;
  OpRunner runner(&transport, {.self = kSelf});
  std::vector<float> tensor(8 << 20, 1);
  const PostRef post{LocalId(1), 1};
  const OpDesc desc = Sum(tensor.size());
  ASSERT_TRUE(runner.AddPost(post, desc, InPlace(&tensor)).ok());
  runner.Start(Ring(1, desc, post));
  runner.Credit({kGroup, OpOrdinal(1), Epoch(1), kOther, OpOrdinal(1)});
  EXPECT_EQ(transport.QueuedBytes(), 1u << 20);

  runner.Stop({kGroup, OpOrdinal(1), Epoch(1)});
  EXPECT_EQ(transport.QueuedBytes(), 0u);
  const auto deliver = [&] {
    for (const uint64_t cookie : std::exchange(transport.dropped, {})) {
      runner.OnSegmentSent(cookie);
    }
  };
  deliver();
  for (const uint64_t cookie : transport.detached) runner.OnReceivesDetached(cookie);
  deliver();
  EXPECT_EQ(transport.QueuedBytes(), 0u);
  const std::vector<Event> events = runner.TakeEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(std::get<AttemptStopped>(events[0]).ordinal, OpOrdinal(1));
  EXPECT_TRUE(runner.Idle());
  runner.TakePost(post);
}

TEST(OpRunner, AllOpsThatTheScratchLimitAdmitsCanRun) {
  Narrow transport;
  OpRunner runner(&transport, {.self = kSelf, .scratch_limit = 1 << 20});
  std::vector<float> tensor(1280, 1);
  const OpDesc desc = Sum(tensor.size());
  uint64_t ops = 0;
  while (runner.AddPost({LocalId(1), ops + 1}, desc, InPlace(&tensor)).ok()) {
    ++ops;
    runner.Start(Ring(ops, desc, {LocalId(1), ops}));
  }
  EXPECT_GE(ops, 50u);
  for (uint64_t op = 1; op <= ops; ++op) runner.Stop({kGroup, OpOrdinal(op), Epoch(1)});
  for (const uint64_t cookie : transport.detached) runner.OnReceivesDetached(cookie);
  EXPECT_TRUE(runner.Idle());
}

}  // namespace
}  // namespace longhaul::peerd
