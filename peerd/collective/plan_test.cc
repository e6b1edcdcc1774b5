#include "peerd/collective/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

namespace longhaul::peerd {
namespace {

using Piece = Plan::Piece;

class PlanTest : public testing::TestWithParam<std::tuple<uint64_t, int, uint32_t>> {};

TEST_P(PlanTest, SegmentsCoverEveryByteOnceAndAreFound) {
  const auto [bytes, size, segment_bytes] = GetParam();
  const Plan plan(bytes, size, segment_bytes);
  ASSERT_EQ(plan.chunks(), size);
  EXPECT_LE(plan.segment_bytes(), std::max(segment_bytes, 64u));
  uint64_t at = 0;
  uint64_t segment = 0;
  for (int chunk = 0; chunk < size; ++chunk) {
    ASSERT_EQ(plan.Chunk(chunk).offset, at);
    ASSERT_EQ(plan.FirstSegment(chunk), segment);
    const uint64_t end = at + plan.Chunk(chunk).bytes;
    for (; at < end; ++segment) {
      const Piece piece = plan.Segment(segment);
      ASSERT_EQ(piece.offset, at);
      ASSERT_EQ(piece.offset % 64, 0u);
      ASSERT_GT(piece.bytes, 0u);
      ASSERT_LE(piece.bytes, plan.segment_bytes());
      ASSERT_EQ(plan.ChunkOf(segment), chunk);
      ASSERT_EQ(plan.Find(piece), segment);
      at += piece.bytes;
    }
    ASSERT_EQ(at, end);
  }
  EXPECT_EQ(at, bytes);
  EXPECT_EQ(plan.segments(), segment);
}

TEST_P(PlanTest, ChunksDifferByOneBlockAtMost) {
  const auto [bytes, size, segment_bytes] = GetParam();
  const Plan plan(bytes, size, segment_bytes);
  uint64_t least = bytes;
  uint64_t most = 0;
  for (int chunk = 0; chunk < size; ++chunk) {
    least = std::min(least, plan.Chunk(chunk).bytes);
    most = std::max(most, plan.Chunk(chunk).bytes);
  }
  // The tensor's last block may be cut short.
  EXPECT_LT(most - least, 2 * 64u);
}

TEST_P(PlanTest, FindsNothingElse) {
  const auto [bytes, size, segment_bytes] = GetParam();
  const Plan plan(bytes, size, segment_bytes);
  for (uint64_t segment = 0; segment < std::min<uint64_t>(plan.segments(), 50); ++segment) {
    const Piece piece = plan.Segment(segment);
    EXPECT_FALSE(plan.Find({piece.offset, piece.bytes + 1}));
    EXPECT_FALSE(plan.Find({piece.offset, piece.bytes - 1}));
    EXPECT_FALSE(plan.Find({piece.offset + 1, piece.bytes}));
    EXPECT_FALSE(plan.Find({piece.offset + 1, piece.bytes - 1}));
  }
  EXPECT_FALSE(plan.Find({bytes, 0}));
  EXPECT_FALSE(plan.Find({bytes, 64}));
  EXPECT_FALSE(plan.Find({0, 0}));
  EXPECT_FALSE(plan.Find({UINT64_MAX, UINT64_MAX}));
  EXPECT_FALSE(plan.Find({UINT64_MAX - 63, 64}));
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, PlanTest,
    testing::Combine(testing::Values(0, 1, 8, 63, 64, 65, 4096, 4100, 1000000, (1 << 20) + 24),
                     testing::Values(1, 2, 3, 5, 16, 64), testing::Values(64, 100, 4096, 1 << 19)));

TEST(PlanOfExtremesTest, LargestTensorAndManyPositionsDoNotOverflow) {
  constexpr uint64_t kBytes = uint64_t{8} << 48;
  const Plan plan(kBytes, 1024, 4 << 20);
  EXPECT_EQ(plan.Chunk(1023).offset, kBytes / 1024 * 1023);
  EXPECT_EQ(plan.segments(), kBytes >> 22);
  EXPECT_EQ(plan.Find({kBytes - (4 << 20), 4 << 20}), plan.segments() - 1);
}

TEST(PlanOfExtremesTest, ChunksAreCutFineButNotBelowWhatACallIsWorth) {
  EXPECT_EQ(Plan(64 << 10, 2, 512 << 10).segment_bytes(), 64u << 10);
  EXPECT_EQ(Plan(4 << 20, 2, 512 << 10).segment_bytes(), 64u << 10);
  EXPECT_EQ(Plan(8 << 20, 2, 512 << 10).segment_bytes(), 128u << 10);
  EXPECT_EQ(Plan(64 << 20, 2, 512 << 10).segment_bytes(), 512u << 10);
  EXPECT_EQ(Plan(64 << 20, 2, 96 << 10).segment_bytes(), 96u << 10);
}

}  // namespace
}  // namespace longhaul::peerd
