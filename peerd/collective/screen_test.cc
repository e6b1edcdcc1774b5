#include "peerd/collective/screen.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
Tally TallyOf(const std::vector<T>& values, DType dtype) {
  Tally tally;
  Look(reinterpret_cast<const uint8_t*>(values.data()), values.size(), dtype, &tally);
  return tally;
}

// A tally of `count` values with this root mean square.
Tally Of(double rms, uint64_t count = 10) {
  return {.finite = count, .squares = rms * rms * static_cast<double>(count)};
}

Seen SeenOf(const std::vector<Tally>& positions, const std::vector<Tally>& locals = {}) {
  Seen seen(0, 0);
  seen.positions = positions;
  seen.locals = locals;
  return seen;
}

template <class T>
void CountsAndMeasures(DType dtype) {
  // Longer than a step, and not a multiple of the lanes.
  std::vector<T> values(10007, static_cast<T>(-3));
  Tally tally = TallyOf(values, dtype);
  EXPECT_EQ(tally.finite, values.size());
  EXPECT_EQ(tally.nan + tally.inf, 0);
  EXPECT_DOUBLE_EQ(tally.Rms(), 3);
  values.front() = values.back() = static_cast<T>(kNan);
  values[5000] = static_cast<T>(-kInf);
  tally = TallyOf(values, dtype);
  EXPECT_EQ(tally.nan, 2);
  EXPECT_EQ(tally.inf, 1);
  EXPECT_EQ(tally.finite, values.size() - 3);
  EXPECT_DOUBLE_EQ(tally.Rms(), 3);
}

TEST(ScreenTest, LooksAtFloat32) { CountsAndMeasures<float>(DType::kFloat32); }
TEST(ScreenTest, LooksAtFloat64) { CountsAndMeasures<double>(DType::kFloat64); }

TEST(ScreenTest, LooksAtHalves) {
  // 1, -2, infinity, NaN
  const Tally bfloat16 = TallyOf<uint16_t>({0x3f80, 0xc000, 0x7f80, 0x7fc0}, DType::kBfloat16);
  const Tally float16 = TallyOf<uint16_t>({0x3c00, 0xc000, 0x7c00, 0x7e00}, DType::kFloat16);
  for (const Tally& tally : {bfloat16, float16}) {
    EXPECT_EQ(tally.finite, 2);
    EXPECT_EQ(tally.inf, 1);
    EXPECT_EQ(tally.nan, 1);
    EXPECT_DOUBLE_EQ(tally.squares, 5);
  }
}

TEST(ScreenTest, LeavesOutIntegers) {
  EXPECT_EQ(TallyOf<int32_t>({1, -1}, DType::kInt32).finite, 0);
}

TEST(ScreenTest, HasNoNormOfNothing) {
  EXPECT_EQ(TallyOf<float>({}, DType::kFloat32).Rms(), 0);
  const Tally tally = TallyOf<float>({NAN, INFINITY}, DType::kFloat32);
  EXPECT_EQ(tally.finite, 0);
  EXPECT_EQ(tally.Rms(), 0);
}

TEST(ScreenTest, MeasuresTheLargestAndTheSmallestFloat32) {
  const float largest = std::numeric_limits<float>::max();
  EXPECT_DOUBLE_EQ(TallyOf<float>({largest, largest}, DType::kFloat32).Rms(), largest);
  EXPECT_DOUBLE_EQ(TallyOf<float>({1e-30F, 1e-30F}, DType::kFloat32).Rms(), double{1e-30F});
}

TEST(ScreenTest, TakesSquaresThatOverflowForInfinite) {
  const Tally tally = TallyOf<double>({1e200, 1}, DType::kFloat64);
  EXPECT_EQ(tally.finite, 2);
  EXPECT_EQ(tally.inf, 0);
  EXPECT_EQ(tally.Rms(), kInf);
}

TEST(ScreenTest, AddsUpCalls) {
  Tally tally;
  const float values[] = {3, 4};
  Look(reinterpret_cast<const uint8_t*>(values), 1, DType::kFloat32, &tally);
  Look(reinterpret_cast<const uint8_t*>(values + 1), 1, DType::kFloat32, &tally);
  EXPECT_EQ(tally.finite, 2);
  EXPECT_EQ(tally.squares, 25);
}

TEST(ScreenTest, LooksAtSumsButNotAtMaxima) {
  EXPECT_TRUE(MayScreen({.kind = OpKind::kAllReduce, .reduce = ReduceOp::kAvg}));
  EXPECT_TRUE(MayScreen({.kind = OpKind::kReduceScatter, .reduce = ReduceOp::kSum}));
  EXPECT_FALSE(MayScreen({.kind = OpKind::kAllReduce, .reduce = ReduceOp::kMax}));
  EXPECT_FALSE(MayScreen({.kind = OpKind::kBroadcast}));
}

TEST(ScreenTest, SuspectsAPositionWithValuesThatAreNotFinite) {
  Tally bad = Of(1);
  bad.nan = 2;
  bad.inf = 1;
  const auto found = Judge(SeenOf({Of(1), bad}), /*self=*/0, 100);
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].position, 1);
  EXPECT_EQ(found[0].nan, 2);
  EXPECT_EQ(found[0].inf, 1);
  EXPECT_EQ(NormText(found[0]), "");
}

TEST(ScreenTest, NamesTheLocalMembersWithValuesThatAreNotFinite) {
  Tally sum = Of(1);
  sum.nan = 7;  // of the sum of all members: it does not say whose they are
  Tally bad = Of(1);
  bad.nan = 3;
  const auto found = Judge(SeenOf({sum, Of(1)}, {Of(1), bad, Of(1)}), /*self=*/0, 100);
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].position, 0);
  EXPECT_EQ(found[0].locals, std::vector<int>{1});
  EXPECT_EQ(found[0].nan, 3);
}

TEST(ScreenTest, SuspectsANormFarAboveTheMedian) {
  EXPECT_TRUE(Judge(SeenOf({Of(1), Of(1), Of(100)}), 0, 100).empty());
  const auto found = Judge(SeenOf({Of(1), Of(2), Of(1e6)}), 0, 100);
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].position, 2);
  EXPECT_EQ(found[0].nan + found[0].inf, 0);
  EXPECT_EQ(NormText(found[0]), "rms=1e+06 median=2 hosts=3");
}

TEST(ScreenTest, SuspectsItsOwnNorm) {
  EXPECT_EQ(Judge(SeenOf({Of(1e6), Of(2), Of(1)}), 0, 100).size(), 1);
}

TEST(ScreenTest, ComparesNoNormsOfTwo) {
  EXPECT_TRUE(Judge(SeenOf({Of(1), Of(1e9)}), 0, 100).empty());
  // The third position has contributed nothing.
  EXPECT_TRUE(Judge(SeenOf({Of(1), Of(1e9), Tally()}), 0, 100).empty());
}

TEST(ScreenTest, ComparesNothingWithAMedianOfZero) {
  EXPECT_TRUE(Judge(SeenOf({Of(0), Of(0), Of(1)}), 0, 100).empty());
}

TEST(ScreenTest, HalfOfTheHostsDoNotMoveTheMedian) {
  const auto found = Judge(SeenOf({Of(1), Of(1e6), Of(1), Of(1e6)}), 0, 100);
  ASSERT_EQ(found.size(), 2);
  EXPECT_EQ(found[0].position, 1);
  EXPECT_EQ(found[1].position, 3);
}

TEST(ScreenTest, SuspectsNobodyIfAllAreLarge) {
  EXPECT_TRUE(Judge(SeenOf({Of(1e30), Of(1e30), Of(1e30)}), 0, 100).empty());
}

}  // namespace
}  // namespace longhaul::peerd
