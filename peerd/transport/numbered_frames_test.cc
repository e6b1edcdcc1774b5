#include "peerd/transport/numbered_frames.h"

#include <gtest/gtest.h>

#include <string>

namespace longhaul::peerd {
namespace {

FrameHeader Done(uint64_t op) {
  FrameHeader header{.type = FrameType::kDone};
  header.op = OpOrdinal(op);
  header.attempt = Epoch(1);
  return header;
}

// Returns the ops of these frames, which have no payload.
std::string Ops(std::span<const uint8_t> bytes) {
  std::string ops;
  for (size_t at = 0; at < bytes.size(); at += kFrameHeaderBytes) {
    const auto header =
        ParseFrameHeader(bytes.subspan(at).first<kFrameHeaderBytes>(), LaneKind::kControl);
    EXPECT_TRUE(header.ok()) << header.status();
    if (header.ok()) ops += std::to_string(header->op.value()) + " ";
  }
  return ops;
}

TEST(NumberedFramesTest, EachGoesOntoTheLaneOnce) {
  NumberedFrames frames;
  ASSERT_TRUE(frames.Keep(Done(1), {}));
  EXPECT_EQ(Ops(frames.TakeForLane()), "1 ");
  EXPECT_EQ(Ops(frames.TakeForLane()), "");
  ASSERT_TRUE(frames.Keep(Done(2), {}));
  ASSERT_TRUE(frames.OnAcked(1).ok());
  ASSERT_TRUE(frames.Keep(Done(3), {}));
  EXPECT_EQ(Ops(frames.TakeForLane()), "2 3 ");
}

TEST(NumberedFramesTest, AnotherLaneBeginsWithWhatTheOtherEndHasNot) {
  NumberedFrames frames;
  for (int i = 1; i <= 3; ++i) ASSERT_TRUE(frames.Keep(Done(i), {}));
  EXPECT_EQ(Ops(frames.TakeForLane()), "1 2 3 ");
  frames.BeginLane();
  ASSERT_TRUE(frames.Keep(Done(4), {}));
  EXPECT_EQ(Ops(frames.TakeForLane()), "") << "not before it is known";
  const auto repeated = frames.OnResume(1);
  ASSERT_TRUE(repeated.ok());
  EXPECT_EQ(*repeated, 2u) << "the last one is new";
  EXPECT_EQ(Ops(frames.TakeForLane()), "2 3 4 ");
  ASSERT_TRUE(frames.OnAcked(4).ok());
  EXPECT_EQ(Ops(frames.TakeForLane()), "");
}

TEST(NumberedFramesTest, WhatCannotBeIsRefused) {
  NumberedFrames frames;
  ASSERT_TRUE(frames.Keep(Done(1), {}));
  EXPECT_EQ(frames.OnAcked(2).message(), "acknowledges 2 frames where 1 were sent");
  EXPECT_EQ(frames.OnResume(0).status().message(), "RESUME on a lane that was not lost");
  ASSERT_TRUE(frames.OnAcked(1).ok());
  frames.BeginLane();
  EXPECT_EQ(frames.OnReceived().message(), "a frame before RESUME");
  EXPECT_EQ(frames.OnResume(0).status().message(),
            "RESUME after 0 frames where 1 were acknowledged");
  EXPECT_TRUE(frames.OnResume(1).ok());
  EXPECT_TRUE(frames.OnReceived().ok());
  EXPECT_EQ(frames.received(), 1u);
}

TEST(NumberedFramesTest, AcknowledgesOftenEnough) {
  NumberedFrames frames;
  for (int i = 1; i < 64; ++i) EXPECT_FALSE(frames.AckIsDue(64));
  EXPECT_TRUE(frames.AckIsDue(64));
  EXPECT_FALSE(frames.AckIsDue((64 << 10) - 1));
  EXPECT_TRUE(frames.AckIsDue(1));
}

TEST(NumberedFramesTest, WhatIsKeptIsBounded) {
  NumberedFrames frames;
  const std::vector<uint8_t> payload(LH_CONTROL_PAYLOAD_BYTES_MAX);
  FrameHeader ready{.type = FrameType::kReady, .payload_bytes = LH_CONTROL_PAYLOAD_BYTES_MAX};
  ready.op = OpOrdinal(1);
  constexpr size_t kBytes = kFrameHeaderBytes + LH_CONTROL_PAYLOAD_BYTES_MAX;
  constexpr size_t kMax =
      size_t{LH_LOCAL_MEMBERS_MAX} * LH_OPS_OPEN_MAX * (kBytes + kFrameHeaderBytes) / kBytes;
  for (size_t i = 0; i < kMax; ++i) ASSERT_TRUE(frames.Keep(ready, payload));
  EXPECT_FALSE(frames.Keep(ready, payload));
  EXPECT_EQ(frames.sent(), kMax);
}

}  // namespace
}  // namespace longhaul::peerd
