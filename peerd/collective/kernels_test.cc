#include "peerd/collective/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
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
    case DType::kBool: {
      const bool x = *a != 0;
      const bool y = *b != 0;
      return Put<uint8_t>(out, op == ReduceOp::kMin ? x && y : x || y);
    }
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

// One element of a term of Combine().
struct Element {
  const uint8_t* data;
  bool wide;
  double weight;
};

// Adds up in T, which is float or double. `decode` gives a value of T for an element.
template <class T, class F>
T CombineFloats(const std::vector<Element>& elements, ReduceOp op, double divisor, F decode) {
  const auto value = [&](const Element& element) {
    const T x = decode(element);
    return element.weight == 1 ? x : x * static_cast<T>(element.weight);
  };
  T sum = value(elements[0]);
  for (size_t i = 1; i < elements.size(); ++i) sum = ReferenceFloat(sum, value(elements[i]), op);
  return Quiet(divisor == 0 ? sum : sum / static_cast<T>(divisor));
}

void ReferenceCombine(uint8_t* out, bool out_wide, const std::vector<Element>& elements,
                      DType dtype, ReduceOp op, double divisor) {
  const Element& first = elements[0];
  if (elements.size() == 1 && first.wide == out_wide && first.weight == 1 && divisor == 0 &&
      dtype != DType::kBool) {
    std::memcpy(out, first.data, out_wide ? sizeof(float) : SizeOf(dtype));
    return;
  }
  if (IsHalf(dtype)) {
    const Format& format = dtype == DType::kFloat16 ? kHalf : kBrain;
    const float sum = CombineFloats<float>(elements, op, divisor, [&](const Element& element) {
      return element.wide ? Get<float>(element.data) : Decode(Get<uint16_t>(element.data), format);
    });
    return out_wide ? Put(out, sum) : Put(out, Encode(sum, format));
  }
  if (dtype == DType::kFloat32) {
    return Put(out, CombineFloats<float>(elements, op, divisor, [](const Element& element) {
                 return Get<float>(element.data);
               }));
  }
  if (dtype == DType::kFloat64) {
    return Put(out, CombineFloats<double>(elements, op, divisor, [](const Element& element) {
                 return Get<double>(element.data);
               }));
  }
  // A bool alone becomes 0 or 1 by this.
  uint8_t sum[8];
  std::memcpy(sum, first.data, SizeOf(dtype));
  if (dtype == DType::kBool) ReferenceReduce(sum, sum, sum, dtype, op);
  for (size_t i = 1; i < elements.size(); ++i) {
    ReferenceReduce(sum, sum, elements[i].data, dtype, op);
  }
  if (divisor != 0) ReferenceDivide(sum, dtype, static_cast<uint32_t>(divisor));
  std::memcpy(out, sum, SizeOf(dtype));
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

// Combine() of two terms, and of one term with a divisor.
void Reduce(const Kernels& kernels, uint8_t* out, const uint8_t* a, const uint8_t* b,
            uint64_t count, DType dtype, ReduceOp op) {
  const Term terms[] = {{.data = a}, {.data = b}};
  kernels.combine(out, /*out_wide=*/false, std::span<const Term>(terms), count, dtype, op, 0);
}
void Divide(const Kernels& kernels, uint8_t* data, uint64_t count, DType dtype, uint32_t divisor) {
  const Term term = {.data = data};
  kernels.combine(data, /*out_wide=*/false, {&term, 1}, count, dtype, ReduceOp::kAvg, divisor);
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

bool IsFloat(DType dtype) {
  return IsHalf(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

std::vector<ReduceOp> OpsOf(DType dtype) {
  if (dtype == DType::kBool) return {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};
  return {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax};
}

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
    for (const ReduceOp op : OpsOf(dtype())) {
      std::vector<uint8_t> out(a.size());
      Reduce(kernels, out.data(), a.data(), b.data(), left.size(), dtype(), op);
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
    for (const ReduceOp op : OpsOf(dtype())) {
      const std::vector<uint8_t> expected = Expected(a, b, op);
      std::vector<uint8_t> out(a.size());
      Reduce(kernels, out.data(), a.data(), b.data(), kCount, dtype(), op);
      ExpectEqual(out, expected, a, b, std::string(kernels.name) + " " + Name(op));
      Reduce(kernels, out.data(), b.data(), a.data(), kCount, dtype(), op);
      ExpectEqual(out, expected, a, b, std::string(kernels.name) + " swapped " + Name(op));
    }
  }
}

TEST_P(KernelsTest, TheIdentityChangesNoBitsButThoseOfNan) {
  const DType dtype = static_cast<DType>(GetParam());
  const uint64_t size = SizeOf(dtype);
  Prng prng(GetParam());
  for (const ReduceOp op : OpsOf(dtype)) {
    constexpr uint64_t kCount = 4096;
    std::vector<uint8_t> bits(kCount * size);
    for (uint8_t& byte : bits) {
      byte = static_cast<uint8_t>(dtype == DType::kBool ? prng.Below(2) : prng.Next());
    }
    // Use zeros of both signs.
    std::fill_n(bits.begin(), 2 * size, uint8_t{0});
    if (IsFloat(dtype)) bits[2 * size - 1] = 0x80;
    std::vector<uint8_t> identity(kCount * size);
    FillIdentity(identity.data(), kCount, dtype, op);
    std::vector<uint8_t> once = bits;
    Reduce(SupportedKernels().back(), once.data(), once.data(), identity.data(), kCount, dtype, op);
    // Dividing by one makes every NaN the same.
    if (IsFloat(dtype)) Divide(SupportedKernels().back(), bits.data(), kCount, dtype, 1);
    ASSERT_EQ(once, bits) << Name(op);
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
      for (const ReduceOp op : OpsOf(dtype())) {
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
          Reduce(kernels, memory.data() + skip, memory_a.data() + skip_a, memory_b.data() + skip_b,
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
  if (dtype() == DType::kBool) return;  // has no average
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
        Divide(kernels, memory.data() + 1, count, dtype(), divisor);
        const std::vector<uint8_t> got(memory.begin() + 1, memory.end());
        ExpectEqual(got, expected, a, {},
                    std::string(kernels.name) + " divided by " + std::to_string(divisor));
      }
    }
  }
}

// One random call of Combine(), and what it must write.
struct Call {
  std::vector<std::vector<uint8_t>> memory;  // of each term, with bytes before and after
  std::vector<size_t> skip;
  std::vector<Term> terms;  // their `data` is set by whoever makes the call
  bool out_wide = false;
  ReduceOp op = ReduceOp::kSum;
  double divisor = 0;
  uint64_t count = 0;
  std::vector<uint8_t> expected;

  std::string Text() const {
    std::string text = std::string(Name(op)) + " x " + std::to_string(count) + " of";
    for (const Term& term : terms) {
      text += (term.wide ? " wide*" : " ") + std::to_string(term.weight);
    }
    return text + " / " + std::to_string(divisor) + (out_wide ? " to wide" : "");
  }
};

Call RandomCall(DType dtype, Prng* prng) {
  Call call;
  const std::vector<ReduceOp> ops = OpsOf(dtype);
  call.op = ops[prng->Below(ops.size())];
  const bool halves = IsHalf(dtype);
  const bool adds = call.op == ReduceOp::kSum || call.op == ReduceOp::kAvg;
  const bool weighted = IsFloat(dtype) && adds && prng->Chance(0.4);
  call.out_wide = halves && prng->Chance(0.4);
  // Some calls are longer than a block of sums.
  call.count = prng->Chance(0.04) ? 4000 + prng->Below(9000) : prng->Below(300);
  if (call.op == ReduceOp::kAvg && prng->Chance(0.7)) {
    call.divisor = weighted ? 0.1 + static_cast<double>(prng->Below(1000)) / 7
                            : static_cast<double>(1 + prng->Below(300));
  }
  const size_t terms = 1 + prng->Below(6);
  for (size_t t = 0; t < terms; ++t) {
    Term term;
    term.wide = halves && prng->Chance(0.4);
    if (weighted && prng->Chance(0.8)) term.weight = static_cast<double>(prng->Below(5000)) / 999;
    const DType stored = term.wide ? DType::kFloat32 : dtype;
    const std::vector<uint8_t> data = Elements(stored, RandomBits(stored, call.count, prng));
    call.skip.push_back(prng->Below(64));
    std::vector<uint8_t> memory(data.size() + 128, 0x5a);
    std::copy(data.begin(), data.end(), memory.begin() + static_cast<ptrdiff_t>(call.skip.back()));
    call.memory.push_back(std::move(memory));
    call.terms.push_back(term);
  }
  const auto bytes = [&](bool wide) { return wide ? sizeof(float) : SizeOf(dtype); };
  call.expected.resize(call.count * bytes(call.out_wide));
  for (uint64_t i = 0; i < call.count; ++i) {
    std::vector<Element> elements;
    for (size_t t = 0; t < terms; ++t) {
      const Term& term = call.terms[t];
      elements.push_back(
          {call.memory[t].data() + call.skip[t] + i * bytes(term.wide), term.wide, term.weight});
    }
    ReferenceCombine(call.expected.data() + i * bytes(call.out_wide), call.out_wide, elements,
                     dtype, call.op, call.divisor);
  }
  return call;
}

TEST_P(KernelsTest, CombinedTermsEqualTheReferenceOnEveryInstructionSetAndInPlace) {
  const uint64_t seed = 1000 + GetParam();
  Prng prng(seed);
  for (int round = 0; round < 300; ++round) {
    const Call call = RandomCall(dtype(), &prng);
    const size_t width = call.out_wide ? sizeof(float) : SizeOf(dtype());
    const size_t out_skip = prng.Below(64);
    // The result apart, and then in the place of each term of the same width.
    for (size_t place = 0; place <= call.terms.size(); ++place) {
      const bool apart = place == call.terms.size();
      if (!apart && call.terms[place].wide != call.out_wide) continue;
      for (const Kernels& kernels : SupportedKernels()) {
        std::vector<std::vector<uint8_t>> memory = call.memory;
        memory.emplace_back(call.expected.size() + 128, 0x5a);
        std::vector<Term> terms = call.terms;
        for (size_t t = 0; t < terms.size(); ++t) terms[t].data = memory[t].data() + call.skip[t];
        const size_t skip = apart ? out_skip : call.skip[place];
        kernels.combine(memory[place].data() + skip, call.out_wide, terms, call.count, dtype(),
                        call.op, call.divisor);
        const auto begin = memory[place].begin() + static_cast<ptrdiff_t>(skip);
        const auto end = begin + static_cast<ptrdiff_t>(call.expected.size());
        const auto untouched = [](uint8_t byte) { return byte == 0x5a; };
        ASSERT_TRUE(std::all_of(memory[place].begin(), begin, untouched));
        ASSERT_TRUE(std::all_of(end, memory[place].end(), untouched));
        if (std::equal(begin, end, call.expected.begin())) continue;
        for (size_t i = 0; i < call.expected.size(); i += width) {
          ASSERT_EQ(Hex(&begin[static_cast<ptrdiff_t>(i)], width),
                    Hex(call.expected.data() + i, width))
              << kernels.name << " " << Name(dtype()) << " " << call.Text() << ", element "
              << i / width << ", place " << place << ", seed " << seed << " round " << round;
        }
      }
    }
  }
}

TEST_P(KernelsTest, OneTermWithoutWeightAndDivisorKeepsItsBits) {
  const std::vector<uint64_t> edges = Edges(dtype());
  const std::vector<uint8_t> data = Elements(dtype(), edges);
  for (const ReduceOp op : OpsOf(dtype())) {
    std::vector<uint8_t> expected = data;
    if (dtype() == DType::kBool) {
      for (uint8_t& byte : expected) byte = byte != 0;
    }
    std::vector<uint8_t> out(data.size());
    const Term term = {.data = data.data()};
    Combine(out.data(), false, {&term, 1}, edges.size(), dtype(), op, 0);
    EXPECT_EQ(out, expected) << Name(op);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, KernelsTest, testing::ValuesIn([] {
                           std::vector<int> dtypes;
                           for (int d = 0; d < LH_WIRE_DTYPE_COUNT; ++d) {
                             if (!IsFloat8(static_cast<DType>(d))) dtypes.push_back(d);
                           }
                           return dtypes;
                         }()),
                         [](const auto& info) {
                           return std::string(Name(static_cast<DType>(info.param)));
                         });

// ------------------------------------------------------------------------------ facts

// One element of each term, combined by every instruction set.
template <class T>
T CombineOne(const std::vector<T>& values, DType dtype, ReduceOp op, double divisor = 0,
             const std::vector<double>& weights = {}) {
  std::vector<Term> terms;
  for (size_t i = 0; i < values.size(); ++i) {
    terms.push_back({.data = reinterpret_cast<const uint8_t*>(&values[i]),
                     .weight = weights.empty() ? 1 : weights[i]});
  }
  T result{};
  Combine(reinterpret_cast<uint8_t*>(&result), false, terms, 1, dtype, op, divisor);
  for (const Kernels& kernels : SupportedKernels()) {
    T again{};
    kernels.combine(reinterpret_cast<uint8_t*>(&again), false, terms, 1, dtype, op, divisor);
    EXPECT_EQ(std::memcmp(&again, &result, sizeof(T)), 0) << kernels.name;
  }
  return result;
}

TEST(CombineTest, SumsOfHalvesAreRoundedOnce) {
  // Each 2^-8 is half of the last place of 1 in bfloat16, and is lost if each step rounds to even.
  constexpr uint16_t kOne = 0x3f80;
  constexpr uint16_t kSmall = 0x3b80;
  EXPECT_EQ(CombineOne<uint16_t>({kOne, kSmall, kSmall}, DType::kBfloat16, ReduceOp::kSum),
            0x3f81);  // 1 + 2^-7
  uint16_t stepwise = kOne;
  for (int i = 0; i < 2; ++i) {
    stepwise = CombineOne<uint16_t>({stepwise, kSmall}, DType::kBfloat16, ReduceOp::kSum);
  }
  EXPECT_EQ(stepwise, kOne);
  // 60000 + 60000 - 60000 is infinite if float16 holds the first sum.
  EXPECT_EQ(CombineOne<uint16_t>({0x7b53, 0x7b53, 0xfb53}, DType::kFloat16, ReduceOp::kSum),
            0x7b53);
  EXPECT_EQ(CombineOne<uint16_t>({0x7b53, 0x7b53}, DType::kFloat16, ReduceOp::kAvg, 2), 0x7b53);
}

TEST(CombineTest, AWideSumContinuesInAnotherCallAsIfItWereOne) {
  const uint64_t seed = 7;
  Prng prng(seed);
  constexpr size_t kCount = 5001;
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    std::vector<std::vector<uint8_t>> data;
    std::vector<Term> terms;
    for (int i = 0; i < 4; ++i) {
      data.push_back(Elements(dtype, RandomBits(dtype, kCount, &prng)));
      terms.push_back({.data = data.back().data()});
    }
    std::vector<uint8_t> once(kCount * 2);
    Combine(once.data(), false, terms, kCount, dtype, ReduceOp::kAvg, 4);
    std::vector<uint8_t> wide(kCount * 4);
    Combine(wide.data(), true, {terms.data(), 2}, kCount, dtype, ReduceOp::kAvg, 0);
    const Term rest[] = {{.data = wide.data(), .wide = true}, terms[2], terms[3]};
    std::vector<uint8_t> twice(kCount * 2);
    Combine(twice.data(), false, rest, kCount, dtype, ReduceOp::kAvg, 4);
    EXPECT_EQ(once, twice) << Name(dtype) << " seed " << seed;
  }
}

TEST(CombineTest, AProductWithAWeightIsRoundedBeforeItIsAdded) {
  // (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24, and 0 if the square is rounded first.
  const float x = 1 + std::ldexp(1.0f, -12);
  EXPECT_EQ(CombineOne<float>({x, -(1 + std::ldexp(1.0f, -11))}, DType::kFloat32, ReduceOp::kSum, 0,
                              {x, 1}),
            0.0f);
  const double y = 1 + std::ldexp(1.0, -30);
  EXPECT_EQ(CombineOne<double>({y, -(1 + std::ldexp(1.0, -29))}, DType::kFloat64, ReduceOp::kSum, 0,
                               {y, 1}),
            0.0);
}

TEST(CombineTest, SignsOfZerosAndNanFollowTheRules) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::signbit(CombineOne<float>({-0.0f, -0.0f}, DType::kFloat32, ReduceOp::kSum)));
  EXPECT_FALSE(std::signbit(CombineOne<float>({-0.0f, 0.0f}, DType::kFloat32, ReduceOp::kSum)));
  EXPECT_TRUE(std::signbit(CombineOne<float>({-0.0f}, DType::kFloat32, ReduceOp::kAvg, 3, {2.0})));
  EXPECT_TRUE(std::signbit(CombineOne<float>({0.0f, -0.0f}, DType::kFloat32, ReduceOp::kMin)));
  for (const std::vector<float>& values :
       {std::vector<float>{infinity, -infinity}, {1, -nan, 2}, {-nan, -nan}}) {
    EXPECT_EQ(
        __builtin_bit_cast(uint32_t, CombineOne<float>(values, DType::kFloat32, ReduceOp::kSum)),
        0x7fc00000u);
  }
  // Infinity of weight 0.
  EXPECT_EQ(__builtin_bit_cast(uint32_t, CombineOne<float>({infinity, 1}, DType::kFloat32,
                                                           ReduceOp::kSum, 0, {0, 1})),
            0x7fc00000u);
}

TEST(CombineTest, IntegersWrapAndAveragesAreRoundedTowardsZero) {
  EXPECT_EQ(CombineOne<uint8_t>({200, 100, 3}, DType::kUint8, ReduceOp::kSum), 47);
  EXPECT_EQ(CombineOne<int8_t>({-3, -4, 0}, DType::kInt8, ReduceOp::kAvg, 3), -2);
  EXPECT_EQ(CombineOne<int64_t>({-3, -4}, DType::kInt64, ReduceOp::kAvg, 2), -3);
}

TEST(CombineTest, AnyByteButZeroIsTrue) {
  EXPECT_EQ(CombineOne<uint8_t>({2, 4}, DType::kBool, ReduceOp::kMin), 1);
  EXPECT_EQ(CombineOne<uint8_t>({2, 0}, DType::kBool, ReduceOp::kMin), 0);
  EXPECT_EQ(CombineOne<uint8_t>({0, 0, 0x80}, DType::kBool, ReduceOp::kSum), 1);
  EXPECT_EQ(CombineOne<uint8_t>({0xff}, DType::kBool, ReduceOp::kMax), 1);
}

TEST(CombineDeathTest, WhatIsRefusedEarlierFailsACheck) {
  uint8_t data[8] = {};
  const auto combine = [&](Term term, DType dtype, ReduceOp op, double divisor) {
    term.data = data;
    Combine(data, false, {&term, 1}, 1, dtype, op, divisor);
  };
  EXPECT_DEATH(combine({}, DType::kBool, ReduceOp::kAvg, 0), "bool");
  EXPECT_DEATH(combine({}, DType::kBool, ReduceOp::kProd, 0), "bool");
  EXPECT_DEATH(combine({}, DType::kFloat8E4M3, ReduceOp::kSum, 0), "float8");
  EXPECT_DEATH(combine({}, DType::kFloat8E5M2, ReduceOp::kMax, 0), "float8");
  EXPECT_DEATH(combine({.weight = 2}, DType::kInt32, ReduceOp::kSum, 0), "weights");
  EXPECT_DEATH(combine({.wide = true}, DType::kFloat32, ReduceOp::kSum, 0), "float32");
  EXPECT_DEATH(combine({}, DType::kInt32, ReduceOp::kAvg, 1.5), "divided by 1.5");
  EXPECT_DEATH(combine({}, DType::kFloat32, ReduceOp::kSum, 2), "divided by 2");
}

TEST(KernelsOf16BitsTest, EveryFloat16AndBfloat16SurvivesADivisionByOne) {
  std::vector<uint64_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  for (const auto& [dtype, format] : std::vector<std::pair<DType, Format>>{
           {DType::kFloat16, kHalf}, {DType::kBfloat16, kBrain}}) {
    for (const Kernels& kernels : SupportedKernels()) {
      std::vector<uint8_t> data = Elements(dtype, all);
      Divide(kernels, data.data(), all.size(), dtype, 1);
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

TEST(CopyAsideTest, LongCopiesArriveWhole) {
  constexpr size_t kLong = 16 << 10;
  std::vector<uint8_t> in(3 * kLong + 200);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * 7 + i / 251);
  for (const size_t bytes : {kLong - 1, kLong, kLong + 1, kLong + 64, 2 * kLong, 3 * kLong}) {
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
  const Term terms[] = {{.data = reinterpret_cast<const uint8_t*>(a)},
                        {.data = reinterpret_cast<const uint8_t*>(b)}};
  Combine(reinterpret_cast<uint8_t*>(a), /*out_wide=*/false, terms, 3, DType::kFloat32,
          ReduceOp::kAvg, 2);
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
