#include "peerd/collective/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/prng.h"

namespace longhaul::peerd {
namespace {

// ------------------------------------------------------------------------------ reference
// Computes one element at a time from its bits, with simple exact arithmetic.

// A binary floating-point format of 16 bits.
struct Format {
  int mantissa_bits;
  int exponent_bias;
  uint16_t infinity;
  uint16_t nan;
};
constexpr Format kHalf = {10, 15, 0x7c00, 0x7e00};
constexpr Format kBrain = {7, 127, 0x7f80, 0x7fc0};

float Decode(uint16_t bits, const Format& f) {
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  const int rest = bits & 0x7fff;
  if (rest > f.infinity) return std::numeric_limits<float>::quiet_NaN();
  if (rest == f.infinity) return static_cast<float>(sign * HUGE_VAL);
  const int exponent = rest >> f.mantissa_bits;
  const int mantissa = rest & ((1 << f.mantissa_bits) - 1);
  const int whole = exponent == 0 ? mantissa : mantissa + (1 << f.mantissa_bits);
  const int scale = std::max(exponent, 1) - f.exponent_bias - f.mantissa_bits;
  return static_cast<float>(sign * std::ldexp(whole, scale));
}

uint16_t Encode(float value, const Format& f) {
  if (std::isnan(value)) return f.nan;
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double a = std::fabs(static_cast<double>(value));
  if (std::isinf(a)) return sign | f.infinity;
  if (a == 0) return sign;
  const int exponent = std::max(std::ilogb(a), 1 - f.exponent_bias);
  // Rounds to nearest even; a carry moves into the exponent, and from the largest one to infinity.
  const auto whole = static_cast<int>(std::nearbyint(std::ldexp(a, f.mantissa_bits - exponent)));
  const int biased = exponent + f.exponent_bias - 1;
  const int bits = whole + (biased << f.mantissa_bits);
  return sign | static_cast<uint16_t>(std::min<int>(bits, f.infinity));
}

template <class T>
T ReferenceFloat(T a, T b, ReduceOp op) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  if (std::isnan(a) || std::isnan(b)) return nan;
  const bool less = a < b || (a == b && std::signbit(a));
  switch (op) {
    case ReduceOp::kMin:
      return less ? a : b;
    case ReduceOp::kMax:
      return less ? b : a;
    case ReduceOp::kProd: {
      const T product = a * b;
      return std::isnan(product) ? nan : product;
    }
    default: {
      const T sum = a + b;
      return std::isnan(sum) ? nan : sum;
    }
  }
}

template <class T>
T ReferenceInteger(T a, T b, ReduceOp op) {
  const __int128 x = a;
  const __int128 y = b;
  switch (op) {
    case ReduceOp::kMin:
      return static_cast<T>(std::min(x, y));
    case ReduceOp::kMax:
      return static_cast<T>(std::max(x, y));
    case ReduceOp::kProd:
      // Unsigned 128-bit arithmetic wraps and keeps the low bits.
      return static_cast<T>(static_cast<unsigned __int128>(x) * static_cast<unsigned __int128>(y));
    default:
      return static_cast<T>(x + y);
  }
}

template <class T>
T Get(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}
template <class T>
void Put(uint8_t* data, T value) {
  std::memcpy(data, &value, sizeof(T));
}

// Calls f with a value of the integer type.
template <class F>
void WithInteger(DType dtype, F f) {
  switch (dtype) {
    case DType::kUint8:
      return f(uint8_t{});
    case DType::kInt8:
      return f(int8_t{});
    case DType::kUint16:
      return f(uint16_t{});
    case DType::kInt16:
      return f(int16_t{});
    case DType::kUint32:
      return f(uint32_t{});
    case DType::kInt32:
      return f(int32_t{});
    case DType::kUint64:
      return f(uint64_t{});
    default:
      return f(int64_t{});
  }
}

void ReferenceReduce(uint8_t* out, const uint8_t* a, const uint8_t* b, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return Put(out, Encode(ReferenceFloat(Decode(Get<uint16_t>(a), kHalf),
                                            Decode(Get<uint16_t>(b), kHalf), op),
                             kHalf));
    case DType::kBfloat16:
      return Put(out, Encode(ReferenceFloat(Decode(Get<uint16_t>(a), kBrain),
                                            Decode(Get<uint16_t>(b), kBrain), op),
                             kBrain));
    case DType::kFloat32:
      return Put(out, ReferenceFloat(Get<float>(a), Get<float>(b), op));
    case DType::kFloat64:
      return Put(out, ReferenceFloat(Get<double>(a), Get<double>(b), op));
    default:
      WithInteger(dtype, [&](auto zero) {
        using T = decltype(zero);
        Put(out, ReferenceInteger(Get<T>(a), Get<T>(b), op));
      });
  }
}

template <class T>
T Quiet(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

void ReferenceDivide(uint8_t* data, DType dtype, uint32_t divisor) {
  const auto by = static_cast<float>(divisor);
  switch (dtype) {
    case DType::kFloat16:
      return Put(data, Encode(Decode(Get<uint16_t>(data), kHalf) / by, kHalf));
    case DType::kBfloat16:
      return Put(data, Encode(Decode(Get<uint16_t>(data), kBrain) / by, kBrain));
    case DType::kFloat32:
      return Put(data, Quiet(Get<float>(data) / by));
    case DType::kFloat64:
      return Put(data, Quiet(Get<double>(data) / static_cast<double>(divisor)));
    default:
      WithInteger(dtype, [&](auto zero) {
        using T = decltype(zero);
        Put(data, static_cast<T>(static_cast<__int128>(Get<T>(data)) / divisor));
      });
  }
}

// ------------------------------------------------------------------------------ inputs

// Bit patterns at the edges of a type. For floats: signed zeros, subnormals, the largest numbers,
// infinities, and quiet and signalling NaNs with sign and payload. For integers: the ends of the
// range.
std::vector<uint64_t> Edges(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x8400, 0x3c00, 0xbc00, 0x3c01,
              0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe00, 0x7c01, 0xfdff, 0x7fff, 0x1400};
    case DType::kBfloat16:
      return {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x8080, 0x3f80, 0xbf80, 0x3f81,
              0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81, 0xffbf, 0x7fff, 0x3b80};
    case DType::kFloat32:
      return {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000,
              0x3f800000, 0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
              0x7fc00000, 0xffc00000, 0x7f800001, 0xffbfffff, 0x7fffffff, 0x33800000};
    case DType::kFloat64:
      return {0,
              uint64_t{1} << 63,
              1,
              (uint64_t{1} << 63) | 1,
              0x000fffffffffffff,
              0x0010000000000000,
              0x3ff0000000000000,
              0xbff0000000000000,
              0x7fefffffffffffff,
              0xffefffffffffffff,
              0x7ff0000000000000,
              0xfff0000000000000,
              0x7ff8000000000000,
              0xfff8000000000000,
              0x7ff0000000000001,
              0x7fffffffffffffff};
    default: {
      const uint64_t high = uint64_t{1} << (8 * SizeOf(dtype) - 1);
      return {0, 1, 2, 3, 127, 128, 255, high, high - 1, high + 1, ~uint64_t{0}, ~uint64_t{1}};
    }
  }
}

std::vector<uint8_t> Elements(DType dtype, const std::vector<uint64_t>& bits) {
  std::vector<uint8_t> data(bits.size() * SizeOf(dtype));
  for (size_t i = 0; i < bits.size(); ++i) {
    std::memcpy(data.data() + i * SizeOf(dtype), &bits[i], SizeOf(dtype));
  }
  return data;
}

// Random patterns, edges, and pairs of values that lie close together.
std::vector<uint64_t> RandomBits(DType dtype, size_t count, Prng* prng) {
  const std::vector<uint64_t> edges = Edges(dtype);
  std::vector<uint64_t> bits(count);
  for (uint64_t& b : bits) {
    b = prng->Next();
    if (prng->Chance(0.3)) b = edges[prng->Below(edges.size())];
    if (prng->Chance(0.3)) b = edges[prng->Below(edges.size())] + prng->Below(5) - 2;
  }
  return bits;
}

std::string Hex(const uint8_t* data, size_t bytes) {
  std::string text;
  char digits[3];
  for (size_t i = bytes; i-- > 0;) {
    std::snprintf(digits, sizeof(digits), "%02x", data[i]);
    text += digits;
  }
  return text;
}

class KernelsTest : public testing::TestWithParam<int> {
 protected:
  DType dtype() const { return static_cast<DType>(GetParam()); }
  size_t width() const { return SizeOf(dtype()); }

  // Computes whole ranges with the reference.
  std::vector<uint8_t> Expected(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b,
                                ReduceOp op) const {
    std::vector<uint8_t> out(a.size());
    for (size_t i = 0; i < a.size(); i += width()) {
      ReferenceReduce(out.data() + i, a.data() + i, b.data() + i, dtype(), op);
    }
    return out;
  }

  void ExpectEqual(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want,
                   const std::vector<uint8_t>& a, const std::vector<uint8_t>& b,
                   const std::string& what) const {
    if (got == want) return;
    for (size_t i = 0; i < want.size(); i += width()) {
      ASSERT_EQ(Hex(got.data() + i, width()), Hex(want.data() + i, width()))
          << what << " " << Name(dtype()) << " element " << i / width() << " of "
          << want.size() / width() << ": " << Hex(a.data() + i, width()) << ", "
          << (b.empty() ? "" : Hex(b.data() + i, width()));
    }
  }
};

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd, ReduceOp::kMin,
                             ReduceOp::kMax};

TEST_P(KernelsTest, EveryPairOfEdgesEqualsTheReference) {
  const std::vector<uint64_t> edges = Edges(dtype());
  std::vector<uint64_t> left;
  std::vector<uint64_t> right;
  for (const uint64_t l : edges) {
    for (const uint64_t r : edges) {
      left.push_back(l);
      right.push_back(r);
    }
  }
  const std::vector<uint8_t> a = Elements(dtype(), left);
  const std::vector<uint8_t> b = Elements(dtype(), right);
  for (const Kernels& kernels : SupportedKernels()) {
    for (const ReduceOp op : kOps) {
      std::vector<uint8_t> out(a.size());
      kernels.reduce(out.data(), a.data(), b.data(), left.size(), dtype(), op);
      ExpectEqual(out, Expected(a, b, op), a, b, std::string(kernels.name) + " " + Name(op));
    }
  }
}

TEST_P(KernelsTest, RandomBitsEqualTheReferenceAndCommute) {
  Prng prng(GetParam());
  constexpr size_t kCount = 20000;
  const std::vector<uint8_t> a = Elements(dtype(), RandomBits(dtype(), kCount, &prng));
  const std::vector<uint8_t> b = Elements(dtype(), RandomBits(dtype(), kCount, &prng));
  for (const Kernels& kernels : SupportedKernels()) {
    for (const ReduceOp op : kOps) {
      const std::vector<uint8_t> expected = Expected(a, b, op);
      std::vector<uint8_t> out(a.size());
      kernels.reduce(out.data(), a.data(), b.data(), kCount, dtype(), op);
      ExpectEqual(out, expected, a, b, std::string(kernels.name) + " " + Name(op));
      kernels.reduce(out.data(), b.data(), a.data(), kCount, dtype(), op);
      ExpectEqual(out, expected, a, b, std::string(kernels.name) + " swapped " + Name(op));
    }
  }
}

TEST_P(KernelsTest, TheIdentityChangesNoBitsButThoseOfNan) {
  const DType dtype = static_cast<DType>(GetParam());
  const uint64_t size = SizeOf(dtype);
  Prng prng(GetParam());
  for (int op = 0; op < LH_WIRE_REDUCE_COUNT; ++op) {
    constexpr uint64_t kCount = 4096;
    std::vector<uint8_t> bits(kCount * size);
    for (uint8_t& byte : bits) byte = static_cast<uint8_t>(prng.Next());
    // Use zeros of both signs.
    std::fill_n(bits.begin(), 2 * size, uint8_t{0});
    if (dtype >= DType::kFloat16) bits[2 * size - 1] = 0x80;
    std::vector<uint8_t> identity(kCount * size);
    FillIdentity(identity.data(), kCount, dtype, static_cast<ReduceOp>(op));
    std::vector<uint8_t> once = bits;
    ReduceInto(once.data(), identity.data(), kCount, dtype, static_cast<ReduceOp>(op));
    // Dividing by one makes every NaN the same.
    if (dtype >= DType::kFloat16) Divide(bits.data(), kCount, dtype, 1);
    ASSERT_EQ(once, bits) << "op " << op;
  }
}

TEST_P(KernelsTest, AnyLengthAndAlignmentWritesItsElementsOnly) {
  Prng prng(GetParam());
  std::vector<size_t> counts;
  for (size_t count = 0; count < 70; ++count) counts.push_back(count);
  counts.insert(counts.end(), {127, 128, 129, 255, 256, 257, 519, 1031});
  for (const Kernels& kernels : SupportedKernels()) {
    for (const size_t count : counts) {
      const std::vector<uint8_t> a = Elements(dtype(), RandomBits(dtype(), count, &prng));
      const std::vector<uint8_t> b = Elements(dtype(), RandomBits(dtype(), count, &prng));
      for (const ReduceOp op : kOps) {
        const std::vector<uint8_t> expected = Expected(a, b, op);
        const size_t skip_out = prng.Below(64);
        const size_t skip_a = prng.Below(64);
        const size_t skip_b = prng.Below(64);
        std::vector<uint8_t> in_a(a.size() + 64, 0x5a);
        std::vector<uint8_t> in_b(b.size() + 64, 0x5a);
        std::copy(a.begin(), a.end(), in_a.begin() + skip_a);
        std::copy(b.begin(), b.end(), in_b.begin() + skip_b);
        for (const int alias : {0, 1, 2}) {  // out apart, out is a, out is b
          std::vector<uint8_t> memory_a = in_a;
          std::vector<uint8_t> memory_b = in_b;
          std::vector<uint8_t> apart(a.size() + 64, 0x5a);
          std::vector<uint8_t>& memory = alias == 0 ? apart : alias == 1 ? memory_a : memory_b;
          const size_t skip = alias == 0 ? skip_out : alias == 1 ? skip_a : skip_b;
          kernels.reduce(memory.data() + skip, memory_a.data() + skip_a, memory_b.data() + skip_b,
                         count, dtype(), op);
          const auto begin = memory.begin() + static_cast<ptrdiff_t>(skip);
          const std::vector<uint8_t> got(begin, begin + static_cast<ptrdiff_t>(a.size()));
          ExpectEqual(got, expected, a, b, std::string(kernels.name) + " " + Name(op));
          const auto untouched = [](uint8_t byte) { return byte == 0x5a; };
          ASSERT_TRUE(std::all_of(memory.begin(), begin, untouched));
          ASSERT_TRUE(
              std::all_of(begin + static_cast<ptrdiff_t>(a.size()), memory.end(), untouched));
        }
      }
    }
  }
}

TEST_P(KernelsTest, DivisionEqualsTheReference) {
  Prng prng(GetParam());
  for (const Kernels& kernels : SupportedKernels()) {
    for (const uint32_t divisor : {1u, 2u, 3u, 7u, 10u, 16u, 127u, 128u, 255u, 256u, 1000u, 32768u,
                                   65535u, 65536u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      for (const size_t count : {1, 7, 16, 33, 64, 3001}) {
        const std::vector<uint8_t> a = Elements(dtype(), RandomBits(dtype(), count, &prng));
        std::vector<uint8_t> expected = a;
        for (size_t i = 0; i < a.size(); i += width()) {
          ReferenceDivide(expected.data() + i, dtype(), divisor);
        }
        std::vector<uint8_t> memory(a.size() + 1);
        std::copy(a.begin(), a.end(), memory.begin() + 1);
        kernels.divide(memory.data() + 1, count, dtype(), divisor);
        const std::vector<uint8_t> got(memory.begin() + 1, memory.end());
        ExpectEqual(got, expected, a, {},
                    std::string(kernels.name) + " divided by " + std::to_string(divisor));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, KernelsTest, testing::Range(0, +LH_WIRE_DTYPE_COUNT),
                         [](const auto& info) {
                           return std::string(Name(static_cast<DType>(info.param)));
                         });

TEST(KernelsOf16BitsTest, EveryFloat16AndBfloat16SurvivesADivisionByOne) {
  std::vector<uint64_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  for (const auto& [dtype, format] : std::vector<std::pair<DType, Format>>{
           {DType::kFloat16, kHalf}, {DType::kBfloat16, kBrain}}) {
    for (const Kernels& kernels : SupportedKernels()) {
      std::vector<uint8_t> data = Elements(dtype, all);
      kernels.divide(data.data(), all.size(), dtype, 1);
      for (size_t i = 0; i < all.size(); ++i) {
        const bool nan = (i & 0x7fff) > format.infinity;
        ASSERT_EQ(Get<uint16_t>(data.data() + 2 * i), nan ? format.nan : i) << kernels.name;
      }
    }
  }
}

TEST(CopyAsideTest, AnyLengthAndAlignmentCopiesItsBytesOnly) {
  std::vector<uint8_t> in(700);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * 7 + 1);
  for (size_t bytes = 0; bytes < 300; ++bytes) {
    for (const size_t skip : {0, 1, 15, 16, 33, 63}) {
      std::vector<uint8_t> out(500, 0);
      std::vector<uint8_t> expected = out;
      std::copy_n(in.begin() + static_cast<ptrdiff_t>(2 * skip + 3), bytes,
                  expected.begin() + static_cast<ptrdiff_t>(skip));
      CopyAside(out.data() + skip, in.data() + 2 * skip + 3, bytes);
      ASSERT_EQ(out, expected) << bytes << " bytes at " << skip;
    }
  }
}

TEST(CopyAsideTest, BlocksOfPagesArriveWhole) {
  constexpr size_t kBlock = 16 << 10;
  std::vector<uint8_t> in(3 * kBlock + 200);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * 7 + i / 251);
  for (const size_t bytes : {kBlock - 1, kBlock, kBlock + 1, kBlock + 64, 2 * kBlock, 3 * kBlock}) {
    for (const size_t skip : {0, 1, 63}) {
      std::vector<uint8_t> out(in.size(), 0);
      std::vector<uint8_t> expected = out;
      std::copy_n(in.begin() + 5, bytes, expected.begin() + static_cast<ptrdiff_t>(skip));
      CopyAside(out.data() + skip, in.data() + 5, bytes);
      ASSERT_EQ(out, expected) << bytes << " bytes at " << skip;
    }
  }
}

TEST(KernelsInUseTest, AddAndDivide) {
  float a[3] = {1, 2, 3};
  const float b[3] = {10, 20, 30};
  ReduceInto(reinterpret_cast<uint8_t*>(a), reinterpret_cast<const uint8_t*>(b), 3, DType::kFloat32,
             ReduceOp::kAvg);
  Divide(reinterpret_cast<uint8_t*>(a), 3, DType::kFloat32, 2);
  EXPECT_EQ(a[0], 5.5f);
  EXPECT_EQ(a[2], 16.5f);
}

TEST(SupportedKernelsTest, BeginWithGenericAndEndWithTheBest) {
#if defined(__aarch64__)
  const std::vector<std::string> known = {"generic", "neon"};
#else
  const std::vector<std::string> known = {"generic", "avx2", "avx512"};
#endif
  const std::vector<Kernels>& supported = SupportedKernels();
  ASSERT_GE(supported.size(), 1u);
  ASSERT_LE(supported.size(), known.size());
  for (size_t i = 0; i < supported.size(); ++i) EXPECT_EQ(supported[i].name, known[i]);
#if defined(__x86_64__)
  EXPECT_EQ(supported.size() == 3,
            __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
#elif defined(__aarch64__)
  EXPECT_EQ(supported.size(), 2u);
#endif
}

}  // namespace
}  // namespace longhaul::peerd
