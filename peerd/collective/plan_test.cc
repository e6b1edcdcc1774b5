#include "peerd/collective/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

namespace longhaul::peerd {
namespace {

using Piece = Plan::Piece;

using Grains = Plan::Grains;

class PlanTest : public testing::TestWithParam<std::tuple<uint64_t, int, uint32_t>> {};

TEST_P(PlanTest, GrainsCoverEveryByteOnceAndAreFound) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Plan plan(bytes, size, grain_bytes);
  ASSERT_EQ(plan.chunks(), size);
  EXPECT_EQ(plan.grain_bytes(), grain_bytes);
  uint64_t at = 0;
  uint64_t grain = 0;
  for (int chunk = 0; chunk < size; ++chunk) {
    ASSERT_EQ(plan.Chunk(chunk).offset, at);
    ASSERT_EQ(plan.GrainsOf(chunk).first, grain);
    const uint64_t end = at + plan.Chunk(chunk).bytes;
    for (; at < end; ++grain) {
      const Piece piece = plan.PieceOf({grain, 1});
      ASSERT_EQ(piece.offset, at);
      ASSERT_EQ(piece.offset % 64, 0u);
      ASSERT_GT(piece.bytes, 0u);
      ASSERT_LE(piece.bytes, plan.grain_bytes());
      ASSERT_EQ(plan.ChunkOf(grain), chunk);
      ASSERT_EQ(plan.Find(piece), (Grains{grain, 1}));
      at += piece.bytes;
    }
    ASSERT_EQ(at, end);
    ASSERT_EQ(plan.GrainsOf(chunk).end(), grain);
  }
  EXPECT_EQ(at, bytes);
  EXPECT_EQ(plan.grains(), grain);
}

TEST_P(PlanTest, GrainsThatFollowEachOtherInAChunkAreFoundAsOnePiece) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Plan plan(bytes, size, grain_bytes);
  for (int chunk = 0; chunk < size; ++chunk) {
    const Grains all = plan.GrainsOf(chunk);
    if (all.count == 0) continue;
    ASSERT_EQ(plan.PieceOf(all), plan.Chunk(chunk));
    ASSERT_EQ(plan.Find(plan.Chunk(chunk)), all);
    const Grains tail{all.first + all.count / 2, all.count - all.count / 2};
    ASSERT_EQ(plan.Find(plan.PieceOf(tail)), tail);
    const Grains head{all.first, (all.count + 1) / 2};
    ASSERT_EQ(plan.Find(plan.PieceOf(head)), head);
  }
}

TEST_P(PlanTest, ChunksDifferByOneBlockAtMost) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Plan plan(bytes, size, grain_bytes);
  uint64_t least = bytes;
  uint64_t most = 0;
  for (int chunk = 0; chunk < size; ++chunk) {
    least = std::min(least, plan.Chunk(chunk).bytes);
    most = std::max(most, plan.Chunk(chunk).bytes);
  }
  // The last block of a tensor may be short.
  EXPECT_LT(most - least, 2 * 64u);
}

TEST_P(PlanTest, FindsNothingElse) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Plan plan(bytes, size, grain_bytes);
  for (uint64_t grain = 0; grain < std::min<uint64_t>(plan.grains(), 50); ++grain) {
    const Piece piece = plan.PieceOf({grain, 1});
    const Piece chunk = plan.Chunk(plan.ChunkOf(grain));
    const bool to_the_end = piece.offset + piece.bytes + 1 == chunk.offset + chunk.bytes;
    EXPECT_EQ(plan.Find({piece.offset, piece.bytes + 1}).has_value(), to_the_end);
    EXPECT_FALSE(plan.Find({piece.offset, piece.bytes - 1}));
    EXPECT_FALSE(plan.Find({piece.offset + 1, piece.bytes}));
    EXPECT_FALSE(plan.Find({piece.offset + 1, piece.bytes - 1}));
  }
  for (int chunk = 0; chunk + 1 < size; ++chunk) {
    const Piece piece = plan.Chunk(chunk);
    const Piece next = plan.Chunk(chunk + 1);
    if (piece.bytes == 0 || next.bytes == 0) continue;
    EXPECT_FALSE(plan.Find({piece.offset, piece.bytes + next.bytes})) << "two chunks";
  }
  EXPECT_FALSE(plan.Find({bytes, 0}));
  EXPECT_FALSE(plan.Find({bytes, 64}));
  EXPECT_FALSE(plan.Find({0, 0}));
  EXPECT_FALSE(plan.Find({UINT64_MAX, UINT64_MAX}));
  EXPECT_FALSE(plan.Find({UINT64_MAX - 63, 64}));
  EXPECT_FALSE(plan.Find({0, UINT64_MAX / 64 * 64}));
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, PlanTest,
    testing::Combine(testing::Values(0, 1, 8, 63, 64, 65, 4096, 4100, 1000000, (1 << 20) + 24),
                     testing::Values(1, 2, 3, 5, 16, 64), testing::Values(64, 192, 4096, 1 << 16)));

TEST(PlanOfExtremesTest, LargestTensorAndManyPositionsDoNotOverflow) {
  constexpr uint64_t kBytes = uint64_t{8} << 48;
  const Plan plan(kBytes, 1024, 4 << 20);
  EXPECT_EQ(plan.Chunk(1023).offset, kBytes / 1024 * 1023);
  EXPECT_EQ(plan.grains(), kBytes >> 22);
  EXPECT_EQ(plan.Find({kBytes - (4 << 20), 4 << 20}), (Grains{plan.grains() - 1, 1}));
}

}  // namespace
}  // namespace longhaul::peerd
