#include "peerd/collective/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "base/prng.h"
#include "peerd/collective/layout.h"
#include "peerd/collective/testing.h"

namespace longhaul::peerd {
namespace {

using Range = Plan::Range;
using Grains = Plan::Grains;
using Chunk = Layout::Chunk;

AttemptSpec Spec(OpKind kind, std::vector<Piece> pieces, int size) {
  AttemptSpec spec;
  spec.desc.kind = kind;
  spec.pieces = std::move(pieces);
  spec.size = size;
  spec.sources.resize(2);
  spec.targets.resize(2);
  return spec;
}
Layout LayoutOf(const AttemptSpec& spec) { return {spec, spec.size}; }
Layout LayoutOf(uint64_t bytes, int size) {
  return LayoutOf(Spec(OpKind::kAllReduce, {{DType::kUint8, bytes}}, size));
}
Plan PlanOf(uint64_t bytes, int size, uint32_t grain_bytes) {
  return LayoutOf(bytes, size).MakePlan(grain_bytes);
}

// ------------------------------------------------------------------------------ one tensor

class PlanTest : public testing::TestWithParam<std::tuple<uint64_t, int, uint32_t>> {};

TEST_P(PlanTest, GrainsCoverEveryByteOnceAndAreFound) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Plan plan = PlanOf(bytes, size, grain_bytes);
  ASSERT_LE(plan.chunks(), size);
  EXPECT_EQ(plan.grain_bytes(), grain_bytes);
  uint64_t at = 0;
  uint64_t grain = 0;
  for (int chunk = 0; chunk < plan.chunks(); ++chunk) {
    ASSERT_EQ(plan.Chunk(chunk).offset, at);
    ASSERT_EQ(plan.GrainsOf(chunk).first, grain);
    ASSERT_GT(plan.Chunk(chunk).bytes, 0u);
    const uint64_t end = at + plan.Chunk(chunk).bytes;
    for (; at < end; ++grain) {
      const Range range = plan.RangeOf({grain, 1});
      ASSERT_EQ(range.offset, at);
      ASSERT_EQ(range.offset % 64, 0u);
      ASSERT_GT(range.bytes, 0u);
      ASSERT_LE(range.bytes, plan.grain_bytes());
      ASSERT_EQ(plan.ChunkOf(grain), chunk);
      ASSERT_EQ(plan.ChunkAt(at + range.bytes - 1), chunk);
      ASSERT_EQ(plan.Find(range), (Grains{grain, 1}));
      at += range.bytes;
    }
    ASSERT_EQ(at, end);
    ASSERT_EQ(plan.GrainsOf(chunk).end(), grain);
  }
  EXPECT_EQ(at, bytes);
  EXPECT_EQ(plan.grains(), grain);
}

TEST_P(PlanTest, GrainsThatFollowEachOtherInAChunkAreFoundAsOneRange) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Plan plan = PlanOf(bytes, size, grain_bytes);
  for (int chunk = 0; chunk < plan.chunks(); ++chunk) {
    const Grains all = plan.GrainsOf(chunk);
    ASSERT_EQ(plan.RangeOf(all), plan.Chunk(chunk));
    ASSERT_EQ(plan.Find(plan.Chunk(chunk)), all);
    const Grains tail{all.first + all.count / 2, all.count - all.count / 2};
    ASSERT_EQ(plan.Find(plan.RangeOf(tail)), tail);
    const Grains head{all.first, (all.count + 1) / 2};
    ASSERT_EQ(plan.Find(plan.RangeOf(head)), head);
  }
}

// The chunk of position c begins after blocks * c / size blocks of 64 bytes.
TEST_P(PlanTest, EachPositionOwnsAnEqualShareOfTheBlocks) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Layout layout = LayoutOf(bytes, size);
  const uint64_t blocks = (bytes + 63) / 64;
  auto chunk = layout.chunks().begin();
  for (int c = 0; c < size; ++c) {
    const uint64_t begin = std::min(blocks * c / size * 64, bytes);
    const uint64_t end = std::min(blocks * (c + 1) / size * 64, bytes);
    if (begin == end) continue;
    ASSERT_NE(chunk, layout.chunks().end());
    Chunk expected;
    expected.offset = expected.source = expected.target = begin;
    expected.bytes = end - begin;
    expected.position = c;
    expected.dtype = DType::kUint8;
    ASSERT_EQ(*chunk, expected) << c;
    ++chunk;
  }
  EXPECT_EQ(chunk, layout.chunks().end());
  EXPECT_EQ(layout.bytes(), bytes);
}

// The chunk of position c ends after its share, and those before it, of the blocks.
TEST_P(PlanTest, EachPositionOwnsItsShareOfTheBlocks) {
  const auto [bytes, size, grain_bytes] = GetParam();
  Prng prng(bytes + size);
  AttemptSpec spec = Spec(OpKind::kAllReduce, {{DType::kUint8, bytes}}, size);
  spec.shares = RandomShares(&prng, size);
  if (spec.shares.empty()) return;
  const Layout layout = LayoutOf(spec);
  const uint64_t blocks = (bytes + 63) / 64;
  uint64_t units = 0;
  uint64_t begin = 0;
  auto chunk = layout.chunks().begin();
  for (int c = 0; c < size; ++c) {
    units += spec.shares[c];
    const uint64_t end = std::min(blocks * units / kShareUnits * 64, bytes);
    if (begin == end) continue;
    ASSERT_NE(chunk, layout.chunks().end());
    EXPECT_EQ(chunk->offset, begin);
    EXPECT_EQ(chunk->bytes, end - begin);
    EXPECT_EQ(chunk->position, c);
    EXPECT_GT(spec.shares[c], 0u);
    begin = end;
    ++chunk;
  }
  EXPECT_EQ(chunk, layout.chunks().end());
  EXPECT_EQ(begin, bytes);
  EXPECT_EQ(layout.bytes(), bytes);
}

TEST_P(PlanTest, FindsNothingElse) {
  const auto [bytes, size, grain_bytes] = GetParam();
  const Plan plan = PlanOf(bytes, size, grain_bytes);
  for (uint64_t grain = 0; grain < std::min<uint64_t>(plan.grains(), 50); ++grain) {
    const Range range = plan.RangeOf({grain, 1});
    const Range chunk = plan.Chunk(plan.ChunkOf(grain));
    const bool to_the_end = range.offset + range.bytes + 1 == chunk.offset + chunk.bytes;
    EXPECT_EQ(plan.Find({range.offset, range.bytes + 1}).has_value(), to_the_end);
    EXPECT_FALSE(plan.Find({range.offset, range.bytes - 1}));
    EXPECT_FALSE(plan.Find({range.offset + 1, range.bytes}));
    EXPECT_FALSE(plan.Find({range.offset + 1, range.bytes - 1}));
  }
  for (int chunk = 0; chunk + 1 < plan.chunks(); ++chunk) {
    const Range range = plan.Chunk(chunk);
    const Range next = plan.Chunk(chunk + 1);
    EXPECT_FALSE(plan.Find({range.offset, range.bytes + next.bytes})) << "two chunks";
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
  const Plan plan = PlanOf(kBytes, 1024, 4 << 20);
  EXPECT_EQ(plan.Chunk(1023).offset, kBytes / 1024 * 1023);
  EXPECT_EQ(plan.grains(), kBytes >> 22);
  EXPECT_EQ(plan.Find({kBytes - (4 << 20), 4 << 20}), (Grains{plan.grains() - 1, 1}));
}

// ------------------------------------------------------------------------------ lists

TEST(ListLayoutTest, PiecesBeginAtMultiplesOf64BytesAndAreCutOneByOne) {
  const Layout layout = LayoutOf(Spec(OpKind::kAllReduce,
                                      {{DType::kFloat16, 33},  // 66 bytes, 2 blocks
                                       {DType::kFloat64, 0},
                                       {DType::kUint8, 1},
                                       {DType::kInt32, 64}},  // 256 bytes, 4 blocks
                                      2));
  const std::vector<Chunk> expected = {
      {.offset = 0, .bytes = 64, .dtype = DType::kFloat16},
      {.offset = 64,
       .bytes = 2,
       .source = 64,
       .target = 64,
       .position = 1,
       .dtype = DType::kFloat16},
      {.offset = 128, .bytes = 1, .piece = 2, .position = 1, .dtype = DType::kUint8},
      {.offset = 192, .bytes = 128, .piece = 3, .dtype = DType::kInt32},
      {.offset = 320,
       .bytes = 128,
       .source = 128,
       .target = 128,
       .piece = 3,
       .position = 1,
       .dtype = DType::kInt32}};
  EXPECT_EQ(layout.chunks(), expected);
  EXPECT_EQ(layout.bytes(), 448u);
  const Plan plan = layout.MakePlan(64);
  EXPECT_EQ(plan.ChunkAt(65), 1);
  EXPECT_EQ(plan.ChunkAt(66), -1) << "between two pieces";
  EXPECT_FALSE(plan.Find({64, 64}));
  EXPECT_EQ(plan.Find({192, 128}), (Grains{3, 2}));
}

TEST(ListLayoutTest, ManySmallPiecesAndPositionsTakeNoChunksForNothing) {
  const Layout layout = LayoutOf(
      Spec(OpKind::kAllReduce, std::vector<Piece>(LH_PIECES_MAX, {DType::kFloat32, 4}), 1024));
  EXPECT_EQ(layout.chunks().size(), size_t{LH_PIECES_MAX});
  EXPECT_EQ(layout.bytes(), 64u * (LH_PIECES_MAX - 1) + 16);
}

// ------------------------------------------------------------------------------ cuts

// What a local member needs to know of a chunk: where it is in the whole, and in its tensors.
struct Place {
  uint64_t offset, bytes, source, target;
  friend bool operator==(const Place&, const Place&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Place& place) {
    return out << place.offset << "+" << place.bytes << " from " << place.source << " to "
               << place.target;
  }
};
std::vector<Place> PlacesOf(const Layout& layout) {
  std::vector<Place> places;
  for (const Chunk& chunk : layout.chunks()) {
    places.push_back({chunk.offset, chunk.bytes, chunk.source, chunk.target});
  }
  return places;
}
using Places = std::vector<Place>;

// Two positions with one member each; this is position 0. Three parts, where local index 1 stands
// for a second member at position 0.
AttemptSpec SpecOfParts(OpKind kind, std::vector<Cut> cuts) {
  AttemptSpec spec = Spec(kind, {{DType::kInt16, 0}}, 2);
  spec.desc.unequal = true;
  spec.cuts = std::move(cuts);
  return spec;
}

TEST(CutLayoutTest, AReduceScatterReadsTheWholeAndWritesAPart) {
  const Layout layout = LayoutOf(
      SpecOfParts(OpKind::kReduceScatter, {{0, 0, 0, -1, 3}, {1, -1, 0, -1, 2}, {0, 1, 0, -1, 5}}));
  EXPECT_EQ(PlacesOf(layout), (Places{{0, 6, 0, 0}, {6, 4, 6, 0}, {10, 10, 10, 0}}));
  EXPECT_EQ(layout.chunks()[1].to_position, 1) << "the owner gets it";
  EXPECT_EQ(layout.chunks()[2].to_local, 1);
}

TEST(CutLayoutTest, AnAllGatherReadsPartsAndWritesTheWhole) {
  const Layout layout = LayoutOf(
      SpecOfParts(OpKind::kAllGather,
                  {{0, 0, 0, -1, 3}, {1, -1, 0, -1, 0}, {1, -1, 0, -1, 2}, {0, 1, 0, -1, 5}}));
  EXPECT_EQ(PlacesOf(layout), (Places{{0, 6, 0, 0}, {6, 4, 0, 6}, {10, 10, 0, 10}}));
  EXPECT_EQ(layout.chunks()[0].to_position, -1) << "everybody gets it";
}

TEST(CutLayoutTest, TheRootOfAGatherOrScatterHasAllPartsInOrder) {
  const Layout gather =
      LayoutOf(SpecOfParts(OpKind::kGather, {{0, 0, 0, 1, 3}, {1, -1, 0, 1, 2}, {0, 1, 0, 1, 5}}));
  EXPECT_EQ(PlacesOf(gather), (Places{{0, 6, 0, 0}, {6, 4, 0, 6}, {10, 10, 0, 10}}));
  const Layout scatter =
      LayoutOf(SpecOfParts(OpKind::kScatter, {{0, 1, 0, 0, 3}, {0, 1, 1, -1, 2}, {0, 1, 0, 1, 5}}));
  EXPECT_EQ(PlacesOf(scatter), (Places{{0, 6, 0, 0}, {6, 4, 6, 0}, {10, 10, 10, 0}}));
}

TEST(CutLayoutTest, AnAllToAllHasAPartForEachPair) {
  // Lengths: 1 and 2 from member 0, 4 and 8 from member 1.
  const Layout at_0 = LayoutOf(SpecOfParts(
      OpKind::kAllToAll, {{0, 0, 0, 0, 1}, {0, 0, 1, -1, 2}, {1, -1, 0, 0, 4}, {1, -1, 1, -1, 8}}));
  EXPECT_EQ(PlacesOf(at_0), (Places{{0, 2, 0, 0}, {2, 4, 2, 0}, {6, 8, 0, 2}, {14, 16, 0, 0}}));
  const Layout at_1 = LayoutOf(SpecOfParts(
      OpKind::kAllToAll, {{0, -1, 0, -1, 1}, {0, -1, 1, 0, 2}, {1, 0, 0, -1, 4}, {1, 0, 1, 0, 8}}));
  EXPECT_EQ(PlacesOf(at_1), (Places{{0, 2, 0, 0}, {2, 4, 0, 0}, {6, 8, 0, 0}, {14, 16, 8, 4}}));
}

TEST(CutLayoutTest, EachPieceOfAListHasAllCuts) {
  AttemptSpec spec = Spec(OpKind::kGather, {{DType::kUint8, 3}, {DType::kFloat32, 5}}, 2);
  spec.cuts = {{0, 0, 0, 1, 0}, {1, -1, 0, 1, 0}};
  const Layout layout = LayoutOf(spec);
  EXPECT_EQ(PlacesOf(layout),
            (Places{{0, 3, 0, 0}, {3, 3, 0, 3}, {64, 20, 0, 0}, {84, 20, 0, 20}}));
  EXPECT_EQ(layout.bytes(), 104u);
}

TEST(CutLayoutTest, ALayoutMayBeEmpty) {
  EXPECT_TRUE(LayoutOf(SpecOfParts(OpKind::kAllToAll, std::vector<Cut>(65536))).chunks().empty());
  EXPECT_EQ(LayoutOf(Spec(OpKind::kAllReduce, {{DType::kInt8, 0}}, 3)).bytes(), 0u);
}

}  // namespace
}  // namespace longhaul::peerd
