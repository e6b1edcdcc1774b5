// A plain Combine(), until the one of kernels.cc is merged. Delete this file then.
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "peerd/collective/kernels.h"

namespace longhaul::peerd {
namespace {

float FromHalf(uint16_t s, bool brain) {
  if (brain) return __builtin_bit_cast(float, static_cast<uint32_t>(s) << 16);
  const uint32_t sign = static_cast<uint32_t>(s & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(s & 0x7fffu) << 13;
  const uint32_t normal = rest + (112u << 23);
  const uint32_t special = rest | 0x7f800000u;
  const uint32_t subnormal =
      __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, normal + (1u << 23)) -
                                       __builtin_bit_cast(float, 113u << 23));
  const uint32_t finite = rest < (1u << 23) ? subnormal : normal;
  return __builtin_bit_cast(float, sign | (rest >= (31u << 23) ? special : finite));
}
uint16_t ToHalf(float v, bool brain) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  if (brain) {
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(v != v ? 0x7fc0u : rounded);
  }
  const uint32_t sign = bits & 0x80000000u;
  const uint32_t rest = bits ^ sign;
  const uint32_t normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1)) >> 13;
  const uint32_t subnormal =
      __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, rest) + 0.5f) - 0x3f000000u;
  const uint32_t finite = rest < (113u << 23) ? subnormal : normal;
  const uint32_t bounded = rest >= 0x477ff000u ? 0x7c00u : finite;
  return static_cast<uint16_t>(v != v ? 0x7e00u : (sign >> 16) | bounded);
}

template <class T>
T Canonical(T v) {
  if constexpr (std::is_same_v<T, float>)
    return v != v ? __builtin_bit_cast(float, 0x7fc00000u) : v;
  if constexpr (std::is_same_v<T, double>) {
    return v != v ? __builtin_bit_cast(double, 0x7ff8000000000000u) : v;
  }
  return v;
}

template <class T>
T Apply(T a, T b, ReduceOp op) {
  if constexpr (std::is_floating_point_v<T>) {
    const bool nan = a != a || b != b;
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        return Canonical(a + b);
      case ReduceOp::kProd:
        return Canonical(a * b);
      case ReduceOp::kMin:
        if (nan) return Canonical(a + b);
        return a == b ? (__builtin_signbit(a) ? a : b) : (a < b ? a : b);
      case ReduceOp::kMax:
        if (nan) return Canonical(a + b);
        return a == b ? (__builtin_signbit(a) ? b : a) : (a < b ? b : a);
    }
  } else {
    using W = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
      case ReduceOp::kProd:
        return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
      case ReduceOp::kMin:
        return b < a ? b : a;
      case ReduceOp::kMax:
        return a < b ? b : a;
    }
  }
  LH_CHECK(false);
  return a;
}

template <class V, class Load, class Store>
void Loop(std::span<const Term> terms, uint64_t count, ReduceOp op, double divisor,
          const Load& load, const Store& store) {
  for (uint64_t i = 0; i < count; ++i) {
    V sum{};
    for (size_t t = 0; t < terms.size(); ++t) {
      V v = load(terms[t], i);
      if constexpr (std::is_floating_point_v<V>) {
        if (terms[t].weight != 1) {
          // Kept from being fused with the addition.
          volatile V scaled = v * static_cast<V>(terms[t].weight);
          v = Canonical<V>(scaled);
        }
      }
      sum = t == 0 ? v : Apply<V>(sum, v, op);
    }
    if (divisor != 0) sum = Canonical<V>(static_cast<V>(sum / static_cast<V>(divisor)));
    store(i, sum);
  }
}

template <class T>
T Get(const uint8_t* data, uint64_t i) {
  T v;
  std::memcpy(&v, data + i * sizeof(T), sizeof(T));
  return v;
}

template <class T>
void Plain(uint8_t* out, std::span<const Term> terms, uint64_t count, ReduceOp op, double divisor) {
  using W = std::conditional_t<std::is_integral_v<T>,
                               std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>, T>;
  Loop<T>(
      terms, count, op, 0, [](const Term& t, uint64_t i) { return Get<T>(t.data, i); },
      [&](uint64_t i, T v) {
        if (divisor != 0) {
          v = static_cast<T>(Canonical<W>(static_cast<W>(v) / static_cast<W>(divisor)));
        }
        std::memcpy(out + i * sizeof(T), &v, sizeof(T));
      });
}

}  // namespace

void Combine(uint8_t* out, bool out_wide, std::span<const Term> terms, uint64_t count, DType dtype,
             ReduceOp op, double divisor) {
  LH_CHECK(!terms.empty());
  const bool half = IsHalf(dtype);
  for (const Term& term : terms) LH_CHECK(half || !term.wide);
  LH_CHECK(half || !out_wide);
  const bool brain = dtype == DType::kBfloat16;
  switch (dtype) {
    case DType::kUint8:
      return Plain<uint8_t>(out, terms, count, op, divisor);
    case DType::kInt8:
      return Plain<int8_t>(out, terms, count, op, divisor);
    case DType::kUint16:
      return Plain<uint16_t>(out, terms, count, op, divisor);
    case DType::kInt16:
      return Plain<int16_t>(out, terms, count, op, divisor);
    case DType::kUint32:
      return Plain<uint32_t>(out, terms, count, op, divisor);
    case DType::kInt32:
      return Plain<int32_t>(out, terms, count, op, divisor);
    case DType::kUint64:
      return Plain<uint64_t>(out, terms, count, op, divisor);
    case DType::kInt64:
      return Plain<int64_t>(out, terms, count, op, divisor);
    case DType::kFloat32:
      return Plain<float>(out, terms, count, op, divisor);
    case DType::kFloat64:
      return Plain<double>(out, terms, count, op, divisor);
    case DType::kFloat16:
    case DType::kBfloat16:
      return Loop<float>(
          terms, count, op, divisor,
          [&](const Term& t, uint64_t i) {
            return t.wide ? Get<float>(t.data, i) : FromHalf(Get<uint16_t>(t.data, i), brain);
          },
          [&](uint64_t i, float v) {
            const uint16_t h = ToHalf(v, brain);
            if (out_wide) {
              std::memcpy(out + i * 4, &v, 4);
            } else {
              std::memcpy(out + i * 2, &h, 2);
            }
          });
    case DType::kBool:
      for (uint64_t i = 0; i < count; ++i) {
        const bool all = op == ReduceOp::kMin;
        bool v = all;
        for (const Term& term : terms) v = all ? v && term.data[i] != 0 : v || term.data[i] != 0;
        out[i] = v ? 1 : 0;
      }
      return;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  LH_CHECK(false) << "dtype " << static_cast<int>(dtype);
}

}  // namespace longhaul::peerd
