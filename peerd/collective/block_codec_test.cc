#include "peerd/collective/block_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "base/prng.h"

namespace longhaul::peerd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeastNormal = std::numeric_limits<float>::min();

// The options of a test, and how far numbers go.
struct Format {
  BlockOptions options;
  int most = 127;
};
void PrintTo(const Format& format, std::ostream* out) {
  *out << (format.options.format == BlockFormat::kInt8 ? "int8" : "int4") << " block "
       << format.options.block << (format.options.stochastic ? " stochastic" : " nearest");
}

std::vector<uint8_t> Encoded(const Format& format, const std::vector<float>& in, uint64_t seed = 1,
                             uint64_t* not_finite = nullptr) {
  std::vector<uint8_t> out(EncodedBytes(format.options, in.size()), 0xee);
  const uint64_t bad = Encode(format.options, seed, 0, in.data(), in.size(), out.data());
  if (not_finite != nullptr) *not_finite = bad;
  return out;
}

std::vector<float> RoundTrip(const Format& format, const std::vector<float>& in,
                             uint64_t seed = 1) {
  std::vector<float> out(in.size());
  Decode(format.options, Encoded(format, in, seed).data(), in.size(), out.data());
  return out;
}

std::vector<float> Normal(uint64_t count, uint64_t seed) {
  Prng prng(seed);
  std::vector<float> values;
  for (uint64_t i = 0; i < count; ++i) {
    double sum = -6;
    for (int k = 0; k < 12; ++k) sum += static_cast<double>(prng.Below(1 << 20)) / (1 << 20);
    values.push_back(static_cast<float>(sum));
  }
  return values;
}

// The scale of the block that holds element i.
float ScaleOf(const Format& format, const std::vector<float>& in, size_t i) {
  const size_t begin = i / format.options.block * format.options.block;
  const size_t end = std::min(in.size(), begin + format.options.block);
  float greatest = 0;
  for (size_t k = begin; k < end; ++k) greatest = std::max(greatest, std::fabs(in[k]));
  return greatest / static_cast<float>(format.most);
}

class CodecTest : public testing::TestWithParam<Format> {
 protected:
  bool stochastic() const { return GetParam().options.stochastic; }
  uint32_t block() const { return GetParam().options.block; }
};

class StochasticCodecTest : public CodecTest {};

TEST_P(CodecTest, TheErrorIsBounded) {
  for (const size_t count : {size_t{1}, size_t{block()} - 1, size_t{block()}, size_t{block()} + 1,
                             3 * size_t{block()} + 17}) {
    const std::vector<float> in = Normal(count, count);
    const std::vector<float> out = RoundTrip(GetParam(), in);
    for (size_t i = 0; i < count; ++i) {
      const double scale = ScaleOf(GetParam(), in, i);
      const double most = (stochastic() ? 1.0 : 0.5) * scale * (1 + 1e-5);
      ASSERT_LE(std::fabs(double{out[i]} - in[i]), most) << i << " of " << count;
    }
  }
}

TEST_P(CodecTest, TheGreatestAndZeroStay) {
  std::vector<float> in(block(), 0.0F);
  in[3] = -2.5F;
  in[5] = 2.5F;
  const std::vector<float> out = RoundTrip(GetParam(), in);
  for (size_t i = 0; i < in.size(); ++i) ASSERT_NEAR(out[i], in[i], 1e-6) << i;
  EXPECT_EQ(out[3], -out[5]);
}

TEST_P(CodecTest, AllImplementationsGiveTheSameBitsAtAnyAlignment) {
  Prng prng(3);
  for (int run = 0; run < 200; ++run) {
    const uint64_t count = prng.Below(3 * block() + 2);
    std::vector<float> in = Normal(count + 1, prng.Next());
    for (float& x : in) {
      if (prng.Chance(0.01)) x *= 1e30F;
      if (prng.Chance(0.01)) x *= 1e-38F;
      if (prng.Chance(0.002)) x = prng.Chance(0.5) ? kNan : -kInfinity;
    }
    const uint64_t bytes = EncodedBytes(GetParam().options, count);
    const uint64_t first = block() * prng.Below(1000);
    std::vector<std::string> encoded;
    std::vector<std::string> decoded;
    for (const BlockKernels& kernels : SupportedBlockKernels()) {
      for (const size_t shift : {0, 1}) {
        std::vector<float> source(in.size());
        std::copy_n(in.begin(), count, source.begin() + static_cast<ptrdiff_t>(shift));
        std::vector<uint8_t> out(bytes + 3, 0xee);
        kernels.encode(GetParam().options, 9, first, source.data() + shift, count,
                       out.data() + shift);
        ASSERT_EQ(out[bytes + shift], 0xee) << "no byte more than it says";
        encoded.emplace_back(out.begin() + static_cast<ptrdiff_t>(shift),
                             out.begin() + static_cast<ptrdiff_t>(bytes + shift));
        std::vector<float> sums(in.size(), 0.125F);
        std::vector<float> values(in.size());
        kernels.decode_add(GetParam().options, out.data() + shift, count, sums.data() + shift);
        kernels.decode(GetParam().options, out.data() + shift, count, values.data() + shift);
        std::string bits(count * 8, '\0');
        if (count > 0) {
          std::memcpy(bits.data(), sums.data() + shift, count * 4);
          std::memcpy(bits.data() + count * 4, values.data() + shift, count * 4);
        }
        for (uint64_t i = 0; i < count; ++i) {
          const float sum = 0.125F + values[i + shift];
          ASSERT_TRUE(sum == sums[i + shift] || std::isnan(sum));
        }
        decoded.push_back(bits);
      }
    }
    for (size_t i = 1; i < encoded.size(); ++i) {
      ASSERT_EQ(encoded[i], encoded[0]) << SupportedBlockKernels()[i / 2].name;
      ASSERT_EQ(decoded[i], decoded[0]) << SupportedBlockKernels()[i / 2].name;
    }
  }
}

TEST_P(CodecTest, ABlockWithAnElementThatIsNotFiniteDecodesAsNan) {
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    std::vector<float> in = Normal(3 * block(), 5);
    in[block() + 7] = bad;
    uint64_t not_finite = 0;
    const std::vector<uint8_t> encoded = Encoded(GetParam(), in, 1, &not_finite);
    EXPECT_EQ(not_finite, 1u);
    std::vector<float> out(in.size());
    Decode(GetParam().options, encoded.data(), in.size(), out.data());
    for (size_t i = 0; i < in.size(); ++i) {
      ASSERT_EQ(std::isnan(out[i]), i / block() == 1) << i;
    }
  }
}

TEST_P(CodecTest, ExtremeValuesKeepTheBound) {
  const float large = std::numeric_limits<float>::max();
  for (const float x : {0.0F, -0.0F, large, -large, kLeastNormal, kLeastNormal / 2, 1e-45F,
                        200 * kLeastNormal, 1e-30F}) {
    const std::vector<float> in(block(), x);
    const std::vector<float> out = RoundTrip(GetParam(), in);
    for (const float y : out) {
      ASSERT_TRUE(std::isfinite(y)) << x;
      ASSERT_LE(std::fabs(double{y} - x),
                std::max(std::fabs(double{x}) * 1e-6, 128 * double{kLeastNormal}))
          << x << " " << y;
    }
  }
}

TEST_P(CodecTest, OneOutlierCostsItsBlockOnly) {
  std::vector<float> in = Normal(3 * block(), 6);
  in[block()] = 1e6F;
  const std::vector<float> out = RoundTrip(GetParam(), in);
  for (size_t i = 0; i < in.size(); ++i) {
    if (i / block() == 1) continue;
    ASSERT_LE(std::fabs(out[i] - in[i]), 6.0F / 7) << i;
  }
}

TEST_P(StochasticCodecTest, TheMeanErrorOfStochasticRoundingIsZero) {
  const uint64_t count = 10'000'000 / block() * block();
  Prng prng(8);
  std::vector<float> in(count);
  for (float& x : in) x = static_cast<float>(prng.Below(1 << 24)) / (1 << 24);
  for (uint64_t i = 0; i < count; i += block()) in[i] = 1;  // all scales are equal
  const std::vector<float> out = RoundTrip(GetParam(), in);
  const double scale = 1.0 / GetParam().most;
  double sum = 0;
  double squares = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const double error = (double{out[i]} - in[i]) / scale;
    sum += error;
    squares += error * error;
  }
  const double n = static_cast<double>(count);
  EXPECT_LT(std::fabs(sum / n), 4 * std::sqrt(squares / n / n));
}

TEST_P(StochasticCodecTest, RandomNumbersDependOnSeedAndPositionOnly) {
  const std::vector<float> in = Normal(4 * block(), 9);
  const std::vector<uint8_t> whole = Encoded(GetParam(), in, 5);
  EXPECT_NE(Encoded(GetParam(), in, 6), whole);
  // Block by block, as segments are encoded.
  std::vector<uint8_t> parts(whole.size());
  for (uint64_t i = 0; i < 4; ++i) {
    Encode(GetParam().options, 5, i * block(), in.data() + i * block(), block(),
           parts.data() + EncodedBytes(GetParam().options, i * block()));
  }
  EXPECT_EQ(parts, whole);
}

constexpr Format kNearest[] = {{{BlockFormat::kInt8, 32, false}, 127},
                               {{BlockFormat::kInt8, 256, false}, 127},
                               {{BlockFormat::kInt4, 256, false}, 7},
                               {{BlockFormat::kInt4, 4096, false}, 7}};
constexpr Format kStochastic[] = {{{BlockFormat::kInt8, 256, true}, 127},
                                  {{BlockFormat::kInt8, 4096, true}, 127},
                                  {{BlockFormat::kInt4, 32, true}, 7},
                                  {{BlockFormat::kInt4, 256, true}, 7}};
INSTANTIATE_TEST_SUITE_P(Nearest, CodecTest, testing::ValuesIn(kNearest));
INSTANTIATE_TEST_SUITE_P(Stochastic, CodecTest, testing::ValuesIn(kStochastic));
INSTANTIATE_TEST_SUITE_P(Stochastic, StochasticCodecTest, testing::ValuesIn(kStochastic));

TEST(CodecFormatTest, IsAsTheHeaderSays) {
  const BlockOptions int8{BlockFormat::kInt8, 32, false};
  std::vector<float> in = {1.27F, -0.1F, 0.005F, 0.015F, -1.27F};
  std::vector<uint8_t> out(EncodedBytes(int8, in.size()));
  ASSERT_EQ(out.size(), 9u);
  Encode(int8, 0, 0, in.data(), in.size(), out.data());
  float scale = 0;
  std::memcpy(&scale, out.data(), 4);
  EXPECT_FLOAT_EQ(scale, 0.01F);
  EXPECT_EQ(out[4], 127);
  EXPECT_EQ(out[5], 0xf6);
  EXPECT_EQ(out[8], 0x81);
  const BlockOptions int4{BlockFormat::kInt4, 32, false};
  in = {7, -1, 3, -7, 2};
  out.assign(EncodedBytes(int4, in.size()), 0xee);
  ASSERT_EQ(out.size(), 7u);
  Encode(int4, 0, 0, in.data(), in.size(), out.data());
  EXPECT_EQ(out[4], 0xf7);
  EXPECT_EQ(out[5], 0x93);
  EXPECT_EQ(out[6], 0x02) << "the high half stays 0";
}

TEST(CodecFormatTest, MovesAboutAQuarterAndAnEighthOfTheBytes) {
  const uint64_t count = 16 << 20;
  const uint64_t bytes = count * sizeof(float);
  EXPECT_LE(EncodedBytes({.format = BlockFormat::kInt8}, count) * 100, bytes * 26);
  EXPECT_LE(EncodedBytes({.format = BlockFormat::kInt4}, count) * 1000, bytes * 133);
}

}  // namespace
}  // namespace longhaul::peerd
