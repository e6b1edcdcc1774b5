// Tests lanes on the in-memory network, with partial transfers, resets and detached receives. Every
// segment must come back to its owner.
#include "peerd/transport/lane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/prng.h"
#include "peerd/io/fake_ring.h"
#include "peerd/transport/auth.h"

namespace longhaul::peerd {
namespace {

// One end of a lane: what it has to send, and what has arrived.
class End : public LaneOwner {
 public:
  absl::Status OnLaneFrame(Lane*, const FrameHeader& header,
                           std::span<const uint8_t> payload) override {
    frames.emplace_back(header, std::string(payload.begin(), payload.end()));
    return refuse ? absl::InvalidArgumentError("refused here") : absl::OkStatus();
  }
  absl::StatusOr<uint8_t*> OnLaneData(Lane*, const FrameHeader& header) override {
    headers.push_back(header);
    if (refuse) return absl::InvalidArgumentError("refused here");
    if (discard_op == header.op) return nullptr;
    if (header.offset + header.payload_bytes > memory.size()) {
      return absl::InvalidArgumentError("beyond the end");
    }
    return memory.data() + header.offset;
  }
  absl::Status OnLaneDataReceived(Lane*, const FrameHeader& header) override {
    received.push_back(header);
    return absl::OkStatus();
  }
  absl::Status OnLaneAcked(Lane*, uint64_t segments) override {
    acked = segments;
    return absl::OkStatus();
  }
  void OnLaneDataAbandoned(Lane*, const FrameHeader& header) override {
    EXPECT_EQ(headers.back(), header);
    ++abandoned;
  }
  bool NextSegment(Lane*, uint32_t bytes_max, OutgoingSegment* segment) override {
    if (queue.empty() || queue.front().header.payload_bytes > bytes_max) return false;
    *segment = queue.front();
    queue.erase(queue.begin());
    return true;
  }
  int FindBuffer(const uint8_t*, size_t) override { return -1; }
  void OnLaneSegmentSent(FrameType, uint64_t cookie) override { ++sent[cookie]; }
  void OnLaneClosing(Lane*, bool up) override {
    EXPECT_FALSE(closing) << "closing twice";
    closing = true;
    given_up = up;
  }
  void OnLanePeerEnded(Lane* lane) override {
    EXPECT_TRUE(closing);
    OnLaneBroken(lane, "closed", false);
  }
  void OnLaneBroken(Lane* lane, const std::string& why, bool protocol) override {
    EXPECT_TRUE(reason.empty()) << "broken twice";
    reason = why;
    by_protocol = protocol;
    lane->Abort();
  }
  void OnLaneEnded(Lane*) override { ++ended; }

  std::vector<OutgoingSegment> queue;
  std::vector<uint8_t> memory;
  std::vector<std::pair<FrameHeader, std::string>> frames;
  std::vector<FrameHeader> headers;
  std::vector<FrameHeader> received;
  std::map<uint64_t, int> sent;
  std::string reason;
  bool by_protocol = false;
  bool refuse = false;
  OpOrdinal discard_op;
  uint64_t acked = 0;
  bool closing = false;
  bool given_up = false;
  int abandoned = 0;
  int ended = 0;
};

class Pair {
 public:
  Pair(FakeRingOptions options, LaneKind kind, bool zero_copy = false) : ring(options) {
    const auto [a, b] = ring.Pair();
    const LaneOptions lane{.kind = kind,
                           .name = "lane",
                           .zero_copy = zero_copy ? &gate : nullptr,
                           .queue_bytes_max = 8 << 20};
    left_lane = std::make_unique<Lane>(&ring, LaneSocket{a, nullptr, ""}, lane, &left);
    right_lane = std::make_unique<Lane>(&ring, LaneSocket{b, nullptr, ""}, lane, &right);
    left_lane->StartReceiving();
    right_lane->StartReceiving();
  }

  void Step() { ASSERT_TRUE(ring.RunOnce(ring.Now() + 1000).ok()); }

  template <class Condition>
  bool Until(Condition condition) {
    for (int i = 0; i < 200000; ++i) {
      if (condition()) return true;
      EXPECT_TRUE(ring.RunOnce(ring.Now() + 1000).ok());
    }
    return false;
  }

  // Queues segments of these sizes, one behind the other in memory. Both ends have the same layout.
  void Queue(const std::vector<uint32_t>& sizes) {
    size_t total = 0;
    for (const uint32_t bytes : sizes) total += bytes;
    source.resize(total);
    for (size_t i = 0; i < total; ++i) source[i] = static_cast<uint8_t>(i * 7 + i / 255);
    right.memory.assign(total, 0);
    uint64_t offset = 0;
    for (const uint32_t bytes : sizes) {
      FrameHeader header;
      header.type = FrameType::kData;
      header.payload_bytes = bytes;
      header.op = OpOrdinal(left.queue.size() + 1);
      header.attempt = Epoch(3);
      header.offset = offset;
      left.queue.push_back({header, source.data() + offset, 100 + left.queue.size()});
      offset += bytes;
    }
    count = sizes.size();
  }

  // Ends both lanes. Checks that every pulled segment has come back once, and that nothing is left.
  void CheckEnd() {
    left_lane->Abort();
    right_lane->Abort();
    EXPECT_TRUE(Until([&] { return left_lane->ended() && right_lane->ended(); }));
    EXPECT_EQ(left.ended, 1);
    EXPECT_EQ(right.ended, 1);
    // Each header led to a whole payload, was not wanted, or was abandoned.
    EXPECT_LE(right.received.size() + right.abandoned, right.headers.size());
    EXPECT_GE(right_lane->received(), right.received.size());
    EXPECT_EQ(left.sent.size(), count - left.queue.size());
    for (const auto& [cookie, times] : left.sent) EXPECT_EQ(times, 1) << cookie;
    EXPECT_EQ(ring.operations(), 0u);
    EXPECT_EQ(ring.open_sockets(), 0u);
  }

  FakeRing ring;
  ZeroCopyGate gate{ZeroCopyGate::Use::kWhereOfUse};
  End left;
  End right;
  std::unique_ptr<Lane> left_lane;
  std::unique_ptr<Lane> right_lane;
  std::vector<uint8_t> source;
  size_t count = 0;
};

// Whether a segment is of this attempt.
std::function<bool(const FrameHeader&)> Of(uint64_t op, uint64_t attempt) {
  return [=](const FrameHeader& header) {
    return header.op == OpOrdinal(op) && header.attempt == Epoch(attempt);
  };
}

class LaneSeeds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, LaneSeeds, ::testing::Range(1, 25));

TEST_P(LaneSeeds, SegmentsArriveWholeAndInOrder) {
  const uint64_t seed = GetParam();
  Prng random(seed);
  const bool zero_copy = random.Chance(0.5);
  Pair pair({.seed = seed, .zero_copy_copies = random.Chance(0.3)}, LaneKind::kData, zero_copy);
  std::vector<uint32_t> sizes;
  sizes.reserve(30);
  for (int i = 0; i < 30; ++i) {
    sizes.push_back(1 + random.Below(random.Chance(0.3) ? 100000 : random.Chance(0.5) ? 3000 : 10));
  }
  pair.Queue(sizes);
  pair.left_lane->Pull();
  ASSERT_TRUE(pair.Until([&] {
    return pair.right.received.size() == sizes.size() && pair.left.sent.size() == sizes.size();
  }));
  EXPECT_EQ(pair.right.memory, pair.source);
  for (size_t i = 0; i < sizes.size(); ++i) EXPECT_EQ(pair.right.received[i].op.value(), i + 1);
  EXPECT_EQ(pair.right_lane->stats().bytes_received, pair.source.size());
  EXPECT_EQ(pair.left_lane->stats().bytes_sent, pair.source.size());
  pair.CheckEnd();
}

TEST_P(LaneSeeds, ControlFramesArriveWholeAndInOrder) {
  const uint64_t seed = GetParam();
  Prng random(seed);
  Pair pair({.seed = seed, .stream_bytes_max = 1 + random.Below(5000)}, LaneKind::kControl);
  const size_t count = 200;
  for (size_t i = 0; i < count; ++i) {
    FrameHeader header;
    header.type = random.Chance(0.5) ? FrameType::kReady : FrameType::kDone;
    header.op = OpOrdinal(i + 1);
    header.attempt = Epoch(1);
    std::vector<uint8_t> payload;
    if (header.type == FrameType::kReady)
      payload.resize(kReadyBodyBytes + random.Below(4097), uint8_t(i));
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    ASSERT_TRUE(pair.left_lane->SendFrame(header, payload));
    if (random.Chance(0.3)) pair.Step();
  }
  ASSERT_TRUE(pair.Until([&] { return pair.right.frames.size() == count; }));
  for (size_t i = 0; i < count; ++i) {
    const auto& [header, payload] = pair.right.frames[i];
    EXPECT_EQ(header.op.value(), i + 1);
    EXPECT_EQ(payload, std::string(header.payload_bytes, static_cast<char>(i)));
  }
  pair.CheckEnd();
}

TEST_P(LaneSeeds, AbortAtAnyMomentReturnsEverySegmentOnce) {
  for (int steps = 0; steps < 60; steps += 1 + steps / 8) {
    const uint64_t seed = GetParam() * 1000 + steps;
    Pair pair({.seed = seed, .stream_bytes_max = 50000}, LaneKind::kData, seed % 2 == 0);
    pair.Queue(std::vector<uint32_t>(20, 40000));
    pair.left_lane->Pull();
    for (int i = 0; i < steps; ++i) pair.Step();
    pair.CheckEnd();
  }
}

TEST_P(LaneSeeds, FinishSendsWhatIsQueuedAndEndsInOrder) {
  const uint64_t seed = GetParam();
  Pair pair({.seed = seed}, LaneKind::kData, seed % 2 == 0);
  pair.Queue(std::vector<uint32_t>(10, 50000));
  pair.left_lane->Pull();
  pair.Step();
  pair.left_lane->Finish();
  ASSERT_TRUE(pair.Until([&] { return pair.right.received.size() == 10; }));
  EXPECT_EQ(pair.right.memory, pair.source);
  ASSERT_TRUE(pair.Until([&] { return !pair.right.reason.empty(); }));
  EXPECT_EQ(pair.right.reason, "closed");
  pair.CheckEnd();
}

TEST_P(LaneSeeds, BothSidesMayFinishAtOnce) {
  Pair pair({.seed = static_cast<uint64_t>(GetParam())}, LaneKind::kControl);
  FrameHeader ping;
  ASSERT_TRUE(pair.left_lane->SendFrame(ping, {}));
  pair.left_lane->Finish();
  pair.right_lane->Finish();
  ASSERT_TRUE(pair.Until([&] { return pair.left_lane->ended() && pair.right_lane->ended(); }));
  EXPECT_EQ(pair.left.reason + pair.right.reason, "");
  EXPECT_EQ(pair.ring.open_sockets(), 0u);
}

// After the answer nothing writes to the memory of the detached payload, and the stream goes on
// with the next segment.
TEST_P(LaneSeeds, DetachedReceiveWritesNothingMoreAndKeepsTheFraming) {
  for (int steps = 0; steps < 40; ++steps) {
    const uint64_t seed = GetParam() * 1000 + steps;
    Pair pair({.seed = seed}, LaneKind::kData);
    pair.Queue({300, 20000, 500, 70000, 1});
    pair.left_lane->Pull();
    for (int i = 0; i < steps; ++i) pair.Step();
    bool answered[6] = {};
    std::vector<uint8_t> at_answer;
    OpOrdinal detached;
    for (uint64_t op = 1; op <= 5; ++op) {
      const bool follows = pair.right_lane->Detach(Of(op, 3), [&, op] {
        answered[op] = true;
        at_answer = pair.right.memory;
      });
      EXPECT_FALSE(answered[op]) << "answered from within the call";
      if (!follows) continue;
      EXPECT_FALSE(detached) << "two payloads at once";
      detached = OpOrdinal(op);
    }
    EXPECT_FALSE(pair.right_lane->Detach(Of(2, 4), [] { FAIL(); }));
    const size_t expected = detached ? 4 : 5;
    ASSERT_TRUE(pair.Until([&] {
      return pair.right.headers.size() == 5 && pair.right.received.size() == expected &&
             (!detached || answered[detached.value()]);
    })) << "seed "
        << seed;
    for (const FrameHeader& header : pair.right.received) {
      EXPECT_NE(header.op, detached);
      EXPECT_TRUE(std::equal(pair.source.begin() + header.offset,
                             pair.source.begin() + header.offset + header.payload_bytes,
                             pair.right.memory.begin() + header.offset));
    }
    if (detached) {
      const FrameHeader& header = pair.right.headers[detached.value() - 1];
      EXPECT_TRUE(std::equal(at_answer.begin() + header.offset,
                             at_answer.begin() + header.offset + header.payload_bytes,
                             pair.right.memory.begin() + header.offset));
    }
    pair.CheckEnd();
  }
}

TEST(LaneTest, ResetAtEveryByteLosesOnlyWhatIsNotComplete) {
  const std::vector<uint32_t> sizes = {40, 1, 70};
  const size_t total = 3 * kFrameHeaderBytes + 40 + 1 + 70;
  size_t exact = 0;
  for (size_t cut = 0; cut <= total; ++cut) {
    Pair pair({.seed = 500 + cut}, LaneKind::kData);
    pair.ring.CutConnection(0, true, cut);
    pair.Queue(sizes);
    pair.left_lane->Pull();
    ASSERT_TRUE(
        pair.Until([&] { return !pair.right.reason.empty() && !pair.left.reason.empty(); }));
    size_t whole = 0;
    for (size_t i = 0, end = 0; i < sizes.size(); ++i) {
      end += kFrameHeaderBytes + sizes[i];
      if (cut >= end) ++whole;
    }
    // Bytes in flight may be lost with the connection. Bytes that were not sent cannot arrive.
    EXPECT_LE(pair.right.received.size(), whole) << "cut after " << cut;
    if (pair.right.received.size() == whole) ++exact;
    for (const FrameHeader& header : pair.right.received) {
      EXPECT_TRUE(std::equal(pair.source.begin() + header.offset,
                             pair.source.begin() + header.offset + header.payload_bytes,
                             pair.right.memory.begin() + header.offset));
    }
    EXPECT_FALSE(pair.right.by_protocol);
    pair.CheckEnd();
    EXPECT_EQ(pair.right_lane->received(), pair.right.received.size());
    EXPECT_EQ(pair.right.headers.size(), pair.right.received.size() + pair.right.abandoned);
  }
  EXPECT_GT(exact, total / 3);
}

TEST(LaneTest, DetachOfABreakingLaneIsAnsweredOnce) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Pair pair({.seed = seed}, LaneKind::kData);
    pair.ring.CutConnection(0, true, kFrameHeaderBytes + 500);
    pair.Queue({1000});
    pair.left_lane->Pull();
    ASSERT_TRUE(
        pair.Until([&] { return !pair.right.headers.empty() || !pair.right.reason.empty(); }));
    for (uint64_t i = 0; i < seed % 4; ++i) pair.Step();
    if (seed % 3 == 0) pair.right_lane->Abort();
    int answers = 0;
    const bool first = pair.right_lane->Detach(Of(1, 3), [&] { ++answers; });
    const bool second = pair.right_lane->Detach(Of(1, 3), [&] { ++answers; });
    EXPECT_EQ(first, second);
    pair.CheckEnd();
    EXPECT_EQ(answers, first ? 2 : 0);
  }
}

TEST(LaneTest, SegmentsAreAcknowledgedAlsoByALaneThatIsSending) {
  for (const bool busy : {false, true}) {
    Pair pair({.seed = 12, .partial = false}, LaneKind::kData);
    pair.Queue(std::vector<uint32_t>(3 * LH_SEGMENTS_PER_ACK + 5, 1000));
    if (busy) {
      FrameHeader header{.type = FrameType::kData, .payload_bytes = 1000};
      header.op = OpOrdinal(1);
      header.attempt = Epoch(3);
      for (int i = 0; i < 1000; ++i) pair.right.queue.push_back({header, pair.source.data()});
      pair.left.memory.resize(1000);
      pair.right_lane->Pull();
    }
    pair.left_lane->Pull();
    ASSERT_TRUE(pair.Until([&] { return pair.left.acked + LH_SEGMENTS_PER_ACK > pair.count; }));
    EXPECT_LE(pair.left.acked, pair.right_lane->received());
    EXPECT_EQ(pair.left.reason, "");
    // The next PING acknowledges the rest.
    ASSERT_TRUE(pair.Until([&] { return pair.right_lane->received() == pair.count; }));
    ASSERT_TRUE(pair.Until([&] { return pair.right_lane->Ping(0); }));
    EXPECT_TRUE(pair.Until([&] { return pair.left.acked == pair.count; }));
    pair.CheckEnd();
  }
}

TEST(LaneTest, DiscardedPayloadIsCountedAndTouchesNothing) {
  Pair pair({.seed = 3}, LaneKind::kData);
  pair.right.discard_op = OpOrdinal(2);
  pair.Queue({100, 200000, 100});
  pair.left_lane->Pull();
  ASSERT_TRUE(pair.Until([&] { return pair.right.received.size() == 2; }));
  EXPECT_EQ(pair.right_lane->stats().bytes_discarded, 200000u);
  EXPECT_EQ(std::count(pair.right.memory.begin() + 100, pair.right.memory.begin() + 200100, 0),
            200000);
  pair.CheckEnd();
}

TEST(LaneTest, GarbageBreaksTheLaneAsAgainstTheProtocol) {
  for (const LaneKind kind : {LaneKind::kControl, LaneKind::kData}) {
    for (size_t byte = 0; byte < kFrameHeaderBytes; ++byte) {
      FakeRing ring({.seed = 9 + byte});
      const auto [a, b] = ring.Pair();
      End end;
      end.memory.resize(1 << 20);
      Lane lane(&ring, LaneSocket{b, nullptr, ""}, {.kind = kind, .name = "lane"}, &end);
      lane.StartReceiving();
      FrameHeader header;
      header.type = kind == LaneKind::kData ? FrameType::kData : FrameType::kDone;
      header.op = OpOrdinal(1);
      header.payload_bytes = kind == LaneKind::kData ? 10 : 0;
      auto bytes = Encode(header);
      bytes[byte] ^= 0xff;
      if (ParseFrameHeader(bytes, kind).ok()) {
        lane.Abort();
      } else {
        ring.Send(a, bytes.data(), bytes.size(), true, [](IoResult) {});
      }
      for (int i = 0; i < 10000 && !lane.ended(); ++i)
        ASSERT_TRUE(ring.RunOnce(ring.Now() + 9).ok());
      EXPECT_TRUE(lane.ended());
      EXPECT_EQ(end.by_protocol, !ParseFrameHeader(bytes, kind).ok()) << byte;
    }
  }
}

TEST(LaneTest, ErrorOfTheOwnerBreaksTheLane) {
  for (const LaneKind kind : {LaneKind::kControl, LaneKind::kData}) {
    Pair pair({.seed = 4}, kind);
    pair.right.refuse = true;
    if (kind == LaneKind::kControl) {
      FrameHeader ping;
      ASSERT_TRUE(pair.left_lane->SendFrame(ping, {}));
    } else {
      pair.Queue({100});
      pair.left_lane->Pull();
    }
    ASSERT_TRUE(pair.Until([&] { return !pair.right.reason.empty(); }));
    EXPECT_EQ(pair.right.reason, "lane: refused here");
    EXPECT_TRUE(pair.right.by_protocol);
    pair.CheckEnd();
  }
}

std::vector<uint8_t> DoneFrame(uint64_t op) {
  FrameHeader header;
  header.type = FrameType::kDone;
  header.op = OpOrdinal(op);
  header.attempt = Epoch(1);
  const auto bytes = Encode(header);
  return {bytes.begin(), bytes.end()};
}

TEST(LaneTest, WhatMayWaitGoesWithTheNextFrameInOrder) {
  Pair pair({.seed = 9}, LaneKind::kControl);
  ASSERT_TRUE(pair.left_lane->SendFrames(DoneFrame(1), /*may_wait=*/true));
  const Tick begin = pair.ring.Now();
  ASSERT_TRUE(pair.left_lane->SendFrames(DoneFrame(2)));
  ASSERT_TRUE(pair.Until([&] { return pair.right.frames.size() == 2; }));
  EXPECT_LT(pair.ring.Now() - begin, 2000) << "the second one waited for the first";
  EXPECT_EQ(pair.right.frames[0].first.op, OpOrdinal(1));
  pair.CheckEnd();
}

TEST(LaneTest, WhatMayWaitGoesByItselfAfterAWhile) {
  Pair pair({.seed = 10}, LaneKind::kControl);
  const Tick begin = pair.ring.Now();
  for (uint64_t i = 1; i <= 3; ++i) {
    ASSERT_TRUE(pair.left_lane->SendFrames(DoneFrame(i), /*may_wait=*/true));
  }
  ASSERT_TRUE(pair.Until([&] { return pair.right.frames.size() == 3; }));
  EXPECT_GE(pair.ring.Now() - begin, 2000);
  pair.CheckEnd();
}

TEST(LaneTest, WhatMayWaitIsSentBeforeTheEnd) {
  Pair pair({.seed = 11}, LaneKind::kControl);
  ASSERT_TRUE(pair.left_lane->SendFrames(DoneFrame(1), /*may_wait=*/true));
  pair.left_lane->Finish();
  ASSERT_TRUE(pair.Until([&] { return pair.right.closing; }));
  EXPECT_EQ(pair.right.frames.size(), 1u);
  pair.CheckEnd();
}

TEST(LaneTest, ControlQueueIsBounded) {
  Pair pair({.seed = 5}, LaneKind::kControl);
  pair.ring.StallConnection(0, true);
  FrameHeader header;
  header.type = FrameType::kReady;
  header.op = OpOrdinal(1);
  std::vector<uint8_t> payload(4000);
  header.payload_bytes = 4000;
  int accepted = 0;
  while (accepted < 10000 && pair.left_lane->SendFrame(header, payload)) ++accepted;
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(accepted, 10000);
  pair.CheckEnd();
}

TEST(LaneTest, OfWhatOnlyTheNewestMattersOneWaitsInItsPlace) {
  Pair pair({.seed = 5, .stream_bytes_max = 4096}, LaneKind::kControl);
  const auto send = [&](FrameType type, uint64_t stamp) {
    FrameHeader header{.type = type};
    header.stamp = stamp;
    return IsNumbered(type) ? pair.left_lane->SendFrame(header, {})
                            : pair.left_lane->SendNewest(header);
  };
  pair.ring.StallConnection(0, true);
  for (uint64_t i = 1; i <= 300000; ++i) {
    ASSERT_TRUE(send(FrameType::kPong, i));
    ASSERT_TRUE(send(FrameType::kAck, i));
    if (i % 1000 == 0) pair.Step();
    if (i == 200000) {
      ASSERT_TRUE(send(FrameType::kWantLanes, i));
    }
  }
  pair.ring.StallConnection(0, false);
  const auto last = [&](FrameType type) {
    const auto found = std::find_if(pair.right.frames.rbegin(), pair.right.frames.rend(),
                                    [type](const auto& frame) { return frame.first.type == type; });
    return found == pair.right.frames.rend() ? 0 : found->first.stamp;
  };
  EXPECT_TRUE(pair.Until([&] { return last(FrameType::kPong) == 300000; }));
  EXPECT_TRUE(pair.Until([&] { return last(FrameType::kAck) == 300000; }));
  EXPECT_TRUE(pair.Until([&] { return last(FrameType::kWantLanes) == 200000; }));
  EXPECT_LT(pair.right.frames.size(), 1000u);
  pair.CheckEnd();
}

TEST(LaneTest, ZeroCopyThatIsRefusedOrCopiesIsGivenUp) {
  for (const int error : {0, ENOMEM, ENOBUFS, EOPNOTSUPP, EINVAL}) {
    Pair pair({.seed = 6, .zero_copy_copies = true, .zero_copy_error = error}, LaneKind::kData,
              true);
    pair.Queue(std::vector<uint32_t>(10, 100000));
    pair.left_lane->Pull();
    ASSERT_TRUE(pair.Until(
        [&] { return pair.right.received.size() == 10 && pair.left.sent.size() == 10; }));
    EXPECT_EQ(pair.right.memory, pair.source);
    const uint64_t copied = pair.left_lane->stats().zero_copy_copied;
    if (error == 0) {
      EXPECT_GE(copied, 1u);
      EXPECT_LT(copied, 10u);
    } else {
      EXPECT_EQ(copied, 0u);
    }
    pair.CheckEnd();
  }
}

TEST(LaneTest, ZeroCopyThatWasGivenUpIsTriedAgainLater) {
  for (const int error : {0, ENOBUFS}) {
    Pair pair({.seed = 6, .zero_copy_copies = true, .zero_copy_error = error}, LaneKind::kData,
              true);
    const auto send = [&] {
      const size_t sent = pair.left.sent.size();
      const size_t before = pair.ring.zero_copy_sends();
      pair.Queue(std::vector<uint32_t>(10, 100000));
      for (auto& segment : pair.left.queue) segment.cookie += 1000 + sent;
      pair.count = sent + 10;
      pair.left_lane->Pull();
      EXPECT_TRUE(pair.Until([&] {
        return pair.left.sent.size() == pair.count && pair.right.received.size() == pair.count;
      }));
      return pair.ring.zero_copy_sends() - before;
    };
    send();
    EXPECT_EQ(send(), 0u);
    pair.ring.SetZeroCopy(false, 0);
    pair.ring.AdvanceTime(Seconds(2));
    EXPECT_GE(send(), 1u) << "a trial";
    EXPECT_GE(send(), 10u);
    pair.CheckEnd();
  }
}

TEST(AuthTest, ProofsDependOnTokenHelloNonceAndDirection) {
  HelloBytes hello{};
  Digest32 nonce{};
  const Digest32 proof = AnswerProof("token", hello, nonce);
  EXPECT_TRUE(SameProof(proof, AnswerProof("token", hello, nonce)));
  EXPECT_FALSE(SameProof(proof, AnswerProof("other", hello, nonce)));
  EXPECT_FALSE(SameProof(proof, ConfirmProof("token", hello, nonce)));
  hello[20] = 1;
  EXPECT_FALSE(SameProof(proof, AnswerProof("token", hello, nonce)));
  hello[20] = 0;
  nonce[31] = 1;
  EXPECT_FALSE(SameProof(proof, AnswerProof("token", hello, nonce)));
  const Tag16 tag = RunTag("token", "run", nonce);
  EXPECT_EQ(tag, RunTag("token", "run", nonce));
  EXPECT_NE(tag, RunTag("other", "run", nonce));
  EXPECT_NE(tag, RunTag("token", "another", nonce));
  EXPECT_NE(tag, RunTag("token", "run", Digest32{}));
  EXPECT_NE(HostTag(), Tag16());
  EXPECT_EQ(HostTag(), HostTag());
  NonceSource system(0), seeded(5), again(5);
  EXPECT_NE(system.Next(), system.Next());
  EXPECT_EQ(seeded.Next(), again.Next());
}

}  // namespace
}  // namespace longhaul::peerd
