#include "peerd/transport/parted_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace longhaul::peerd {
namespace {

using testing::HasSubstr;

FrameHeader ReadyOf(size_t bytes) {
  return {.type = FrameType::kReady,
          .payload_bytes = static_cast<uint32_t>(bytes),
          .op = OpOrdinal(7),
          .attempt = Epoch(1)};
}

class PartedFramesTest : public testing::Test {
 protected:
  PartedSender::Split Split(size_t bytes, uint32_t lanes) {
    payload_.resize(bytes);
    for (size_t i = 0; i < bytes; ++i) payload_[i] = static_cast<uint8_t>(i * 7 + i / 253);
    PartedSender::Split split = sender_.SplitFrame(ReadyOf(bytes), payload_, lanes);
    sender_.Sent(bytes);
    return split;
  }
  absl::Status Place(const OutgoingSegment& part) {
    const absl::StatusOr<uint8_t*> place = receiver_.Place(part.header);
    if (!place.ok()) return place.status();
    std::copy_n(part.data, part.header.payload_bytes, *place);
    return absl::OkStatus();
  }
  void Give(const OutgoingSegment& part) {
    ASSERT_TRUE(Place(part).ok());
    receiver_.Received(part.header);
  }

  PartedSender sender_;
  PartedReceiver receiver_;
  std::vector<uint8_t> payload_;
};

TEST_F(PartedFramesTest, PartsAreSpreadEvenlyAndFillAPacketAtLeast) {
  EXPECT_EQ(Split(64 << 10, 16).parts.size(), 16u);
  const auto small = Split(10000, 64);
  EXPECT_EQ(small.parts.size(), 8u);
  EXPECT_EQ(small.parts[0].header.payload_bytes, 1344u);
  // No part is so long that it would be sent without a copy.
  EXPECT_EQ(Split(1 << 20, 1).parts.size(), 34u);
}

TEST_F(PartedFramesTest, AFrameIsWholeWhenAllPartsAndItsHeaderAreHereInAnyOrder) {
  const auto split = Split(20000, 4);
  ASSERT_EQ(split.parts.size(), 4u);
  Give(split.parts[3]);
  Give(split.parts[1]);
  EXPECT_FALSE(receiver_.TakeNext());
  const auto header = receiver_.Announced(split.header, split.payload);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(*header, ReadyOf(20000));
  Give(split.parts[0]);
  EXPECT_FALSE(receiver_.TakeNext());
  EXPECT_EQ(receiver_.delivered(), 0u);
  Give(split.parts[2]);
  EXPECT_EQ(receiver_.TakeNext(), payload_);
  EXPECT_EQ(receiver_.delivered(), 1u);
  EXPECT_FALSE(receiver_.TakeNext());
}

TEST_F(PartedFramesTest, AHeaderThatComesLastEndsTheFrame) {
  const auto split = Split(20000, 2);
  for (const OutgoingSegment& part : split.parts) Give(part);
  EXPECT_FALSE(receiver_.TakeNext());
  ASSERT_TRUE(receiver_.Announced(split.header, split.payload).ok());
  EXPECT_TRUE(receiver_.TakeNext());
}

TEST_F(PartedFramesTest, APartThatIsAbandonedComesAgain) {
  const auto split = Split(20000, 2);
  ASSERT_TRUE(receiver_.Announced(split.header, split.payload).ok());
  Give(split.parts[0]);
  ASSERT_TRUE(Place(split.parts[1]).ok());
  EXPECT_FALSE(receiver_.TakeNext());
  receiver_.Abandoned(split.parts[1].header);
  Give(split.parts[1]);
  EXPECT_EQ(receiver_.TakeNext(), payload_);
}

TEST_F(PartedFramesTest, PartsThatFitNoFrameAreRefused) {
  const auto first = Split(20000, 2);
  Give(first.parts[0]);
  Give(first.parts[1]);
  EXPECT_THAT(std::string(Place(first.parts[0]).message()), HasSubstr("or more, of 20000"))
      << "more bytes than the frame has";
  PartedReceiver other;
  FrameHeader part = first.parts[0].header;
  part.op = OpOrdinal(5000);
  EXPECT_THAT(std::string(other.Place(part).status().message()), HasSubstr("PART of frame 5000"));
  part = first.parts[0].header;
  ASSERT_TRUE(other.Place(part).ok());
  part.offset = 10000;
  part.stamp = 30000;
  EXPECT_FALSE(other.Place(part).ok()) << "of another length";
}

TEST_F(PartedFramesTest, APartOfAFrameThatIsWholeIsRefused) {
  const auto split = Split(20000, 1);
  ASSERT_TRUE(receiver_.Announced(split.header, split.payload).ok());
  for (const OutgoingSegment& part : split.parts) Give(part);
  ASSERT_TRUE(receiver_.TakeNext());
  EXPECT_FALSE(Place(split.parts[0]).ok());
}

TEST_F(PartedFramesTest, HeadersComeInOrderAndOfFramesThatMayBeParted) {
  const auto split = Split(20000, 1);
  FrameHeader second = split.header;
  second.op = OpOrdinal(2);
  EXPECT_FALSE(receiver_.Announced(second, split.payload).ok());
  const auto done = Encode({.type = FrameType::kDone, .op = OpOrdinal(1)});
  EXPECT_THAT(std::string(receiver_.Announced(split.header, done).status().message()),
              HasSubstr("of a frame of type 4"));
  EXPECT_FALSE(receiver_.Announced(split.header, std::vector<uint8_t>(64)).ok());
}

TEST_F(PartedFramesTest, AReceiverKeepsSoManyBytesAndNoMore) {
  FrameHeader part{.type = FrameType::kPart, .payload_bytes = 1, .stamp = 1 << 20};
  for (uint64_t number = 1; number <= LH_PARTED_HELD_BYTES_MAX >> 20; ++number) {
    part.op = OpOrdinal(number);
    ASSERT_TRUE(receiver_.Place(part).ok()) << number;
  }
  part.op = OpOrdinal(100);
  EXPECT_FALSE(receiver_.Place(part).ok());
}

TEST_F(PartedFramesTest, ASenderIsFullUntilItHearsOfFramesThatHaveComeWhole) {
  for (int i = 0; i < 32; ++i) {
    EXPECT_FALSE(sender_.full());
    (void)Split(1 << 20, 4);
  }
  EXPECT_TRUE(sender_.full());
  ASSERT_TRUE(sender_.OnDelivered(1).ok());
  EXPECT_FALSE(sender_.full());
  ASSERT_TRUE(sender_.OnDelivered(1).ok());
  // Other frames are counted, too, while one in parts is not whole.
  sender_.Sent(2 << 20);
  EXPECT_TRUE(sender_.full());
  ASSERT_TRUE(sender_.OnDelivered(32).ok());
  EXPECT_FALSE(sender_.full());
  sender_.Sent(64 << 20);
  EXPECT_FALSE(sender_.full()) << "nothing waits for them";
  EXPECT_FALSE(sender_.OnDelivered(33).ok());
}

}  // namespace
}  // namespace longhaul::peerd
