#include "peerd/collective/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

#include "base/check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Tells the compiler that the iterations of a loop do not depend on each other. It cannot see this
// from the pointers.
#if defined(__clang__)
#define LH_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LH_INDEPENDENT _Pragma("GCC ivdep")
#endif
// Keeps each loop a function of its own, so that the switch that chooses one stays small.
#define LH_LOOP __attribute__((noinline))

namespace longhaul::peerd {
namespace {

// Of the sums that Combine() keeps on the stack: half of a small first-level cache.
constexpr uint64_t kSumBytes = 16 << 10;

namespace generic {
#define LH_TARGET
#define LH_VECTOR 0
#include "peerd/collective/kernels_loops.inc"
#undef LH_VECTOR
#undef LH_TARGET
}  // namespace generic

// A Vector is what an instruction set offers to the 16-bit formats: kLanes values of float32, and
// as many halves (float16), brains (bfloat16) and singles (float32) in memory.

#if defined(__x86_64__)
namespace avx2 {
#define LH_TARGET __attribute__((target("avx2,f16c")))
#define LH_VECTOR 1
struct Vector {
  static constexpr uint64_t kLanes = 8;
  using Value = __m256;
  using Mask = __m256;
  LH_TARGET static Value Fill(float v) { return _mm256_set1_ps(v); }
  LH_TARGET static Value Nan() { return _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)); }
  LH_TARGET static Value Sum(Value a, Value b) { return _mm256_add_ps(a, b); }
  LH_TARGET static Value Product(Value a, Value b) { return _mm256_mul_ps(a, b); }
  LH_TARGET static Value Quotient(Value a, Value b) { return _mm256_div_ps(a, b); }
  LH_TARGET static Value Or(Value a, Value b) { return _mm256_or_ps(a, b); }
  LH_TARGET static Value And(Value a, Value b) { return _mm256_and_ps(a, b); }
  LH_TARGET static Mask Less(Value a, Value b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  LH_TARGET static Mask Equal(Value a, Value b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  LH_TARGET static Mask Unordered(Value a, Value b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
  LH_TARGET static Value Select(Mask mask, Value yes, Value no) {
    return _mm256_blendv_ps(no, yes, mask);
  }
  LH_TARGET static Value LoadHalves(const uint8_t* data) { return _mm256_cvtph_ps(Read(data)); }
  LH_TARGET static void StoreHalves(uint8_t* data, Value v) {
    Write(data, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  LH_TARGET static Value LoadBrains(const uint8_t* data) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Read(data)), 16));
  }
  // A NaN in `v` must be canonical: the rounding would carry another NaN into the sign bit.
  LH_TARGET static void StoreBrains(uint8_t* data, Value v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m128i low = _mm256_castsi256_si128(rounded);
    const __m128i high = _mm256_extracti128_si256(rounded, 1);
    Write(data, _mm_packus_epi32(low, high));
  }
  LH_TARGET static Value LoadSingles(const uint8_t* data) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(data));
  }
  LH_TARGET static void StoreSingles(uint8_t* data, Value v) {
    _mm256_storeu_ps(reinterpret_cast<float*>(data), v);
  }

 private:
  LH_TARGET static __m128i Read(const uint8_t* data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  }
  LH_TARGET static void Write(uint8_t* data, __m128i v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(data), v);
  }
};
#include "peerd/collective/kernels_loops.inc"
#undef LH_VECTOR
#undef LH_TARGET
}  // namespace avx2

namespace avx512 {
// gcc must be told to prefer vectors of 512 bits. clang does not know this attribute, and prefers
// no other length unless it is told to build for a certain processor.
#if defined(__clang__)
#define LH_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define LH_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define LH_VECTOR 1
struct Vector {
  static constexpr uint64_t kLanes = 16;
  using Value = __m512;
  using Mask = __mmask16;
  LH_TARGET static Value Fill(float v) { return _mm512_set1_ps(v); }
  LH_TARGET static Value Nan() { return _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)); }
  LH_TARGET static Value Sum(Value a, Value b) { return _mm512_add_ps(a, b); }
  LH_TARGET static Value Product(Value a, Value b) { return _mm512_mul_ps(a, b); }
  LH_TARGET static Value Quotient(Value a, Value b) { return _mm512_div_ps(a, b); }
  LH_TARGET static Value Or(Value a, Value b) { return _mm512_or_ps(a, b); }
  LH_TARGET static Value And(Value a, Value b) { return _mm512_and_ps(a, b); }
  LH_TARGET static Mask Less(Value a, Value b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  LH_TARGET static Mask Equal(Value a, Value b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  LH_TARGET static Mask Unordered(Value a, Value b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
  }
  LH_TARGET static Value Select(Mask mask, Value yes, Value no) {
    return _mm512_mask_blend_ps(mask, no, yes);
  }
  LH_TARGET static Value LoadHalves(const uint8_t* data) { return _mm512_cvtph_ps(Read(data)); }
  LH_TARGET static void StoreHalves(uint8_t* data, Value v) {
    Write(data, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  LH_TARGET static Value LoadBrains(const uint8_t* data) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Read(data)), 16));
  }
  // A NaN in `v` must be canonical: the rounding would carry another NaN into the sign bit.
  LH_TARGET static void StoreBrains(uint8_t* data, Value v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    Write(data, _mm512_cvtepi32_epi16(rounded));
  }
  LH_TARGET static Value LoadSingles(const uint8_t* data) {
    return _mm512_loadu_ps(reinterpret_cast<const float*>(data));
  }
  LH_TARGET static void StoreSingles(uint8_t* data, Value v) {
    _mm512_storeu_ps(reinterpret_cast<float*>(data), v);
  }

 private:
  LH_TARGET static __m256i Read(const uint8_t* data) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  }
  LH_TARGET static void Write(uint8_t* data, __m256i v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), v);
  }
};
#include "peerd/collective/kernels_loops.inc"
#undef LH_VECTOR
#undef LH_TARGET
}  // namespace avx512

bool HasAvx2AndF16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  // The first test also asks whether the operating system supports the registers.
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 &&
         (ecx & bit_F16C) != 0;
}

// On a Xeon with AMX, avx512 is 1.2 to 2 times as fast as avx2 on data in the caches, and at least
// as fast on data in memory. Only on data in the caches, products of 8-bit integers are slower by a
// fifth, and some divisions by a twentieth. Intel's processors before VBMI2 (Skylake, Cascade Lake)
// lower their clock for vectors of 512 bits, which slows down everything else that runs. So these
// processors use avx2.
bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2");
}
#endif

#if defined(__aarch64__)
// Every aarch64 processor has NEON, so the compiler uses it for the generic loops, too. This
// implementation differs from them in the 16-bit formats.
namespace neon {
#define LH_TARGET
#define LH_VECTOR 1
struct Vector {
  static constexpr uint64_t kLanes = 4;
  using Value = float32x4_t;
  using Mask = uint32x4_t;
  static Value Fill(float v) { return vdupq_n_f32(v); }
  static Value Nan() { return ToValue(vdupq_n_u32(0x7fc00000)); }
  static Value Sum(Value a, Value b) { return vaddq_f32(a, b); }
  static Value Product(Value a, Value b) { return vmulq_f32(a, b); }
  static Value Quotient(Value a, Value b) { return vdivq_f32(a, b); }
  static Value Or(Value a, Value b) { return ToValue(vorrq_u32(ToBits(a), ToBits(b))); }
  static Value And(Value a, Value b) { return ToValue(vandq_u32(ToBits(a), ToBits(b))); }
  static Mask Less(Value a, Value b) { return vcltq_f32(a, b); }
  static Mask Equal(Value a, Value b) { return vceqq_f32(a, b); }
  static Mask Unordered(Value a, Value b) {
    return vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b)));
  }
  static Value Select(Mask mask, Value yes, Value no) { return vbslq_f32(mask, yes, no); }
  static Value LoadHalves(const uint8_t* data) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(data)));
  }
  static void StoreHalves(uint8_t* data, Value v) {
    vst1_u8(data, vreinterpret_u8_f16(vcvt_f16_f32(v)));
  }
  static Value LoadBrains(const uint8_t* data) {
    return ToValue(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(data)), 16));
  }
  // A NaN in `v` must be canonical: the rounding would carry another NaN into the sign bit.
  static void StoreBrains(uint8_t* data, Value v) {
    const uint32x4_t bits = ToBits(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t half = vaddq_u32(odd, vdupq_n_u32(0x7fff));
    vst1_u8(data, vreinterpret_u8_u16(vshrn_n_u32(vaddq_u32(bits, half), 16)));
  }
  static Value LoadSingles(const uint8_t* data) { return vreinterpretq_f32_u8(vld1q_u8(data)); }
  static void StoreSingles(uint8_t* data, Value v) { vst1q_u8(data, vreinterpretq_u8_f32(v)); }

 private:
  static uint32x4_t ToBits(Value v) { return vreinterpretq_u32_f32(v); }
  static Value ToValue(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }
};
#include "peerd/collective/kernels_loops.inc"
#undef LH_VECTOR
#undef LH_TARGET
}  // namespace neon
#endif

std::vector<Kernels> Detect() {
  std::vector<Kernels> kernels = {{"generic", generic::CombineEntry}};
#if defined(__x86_64__)
  if (HasAvx2AndF16c()) kernels.push_back({"avx2", avx2::CombineEntry});
  if (HasAvx512()) kernels.push_back({"avx512", avx512::CombineEntry});
#elif defined(__aarch64__)
  kernels.push_back({"neon", neon::CombineEntry});
#endif
  return kernels;
}

const Kernels& InUse() {
  static const Kernels kernels = SupportedKernels().back();
  return kernels;
}

}  // namespace

const std::vector<Kernels>& SupportedKernels() {
  static const auto* const kernels = new std::vector<Kernels>(Detect());
  return *kernels;
}

namespace {

void CheckReduction(DType dtype, ReduceOp op, bool weighted) {
  const std::string fault = ReductionFault(dtype, op, weighted);
  LH_CHECK(fault.empty()) << fault;
}

}  // namespace

void Combine(uint8_t* out, bool out_wide, std::span<const Term> terms, uint64_t count, DType dtype,
             ReduceOp op, double divisor) {
  bool weighted = false;
  bool wide = out_wide;
  for (const Term& term : terms) {
    weighted |= term.weight != 1;
    wide |= term.wide;
  }
  CheckReduction(dtype, op, weighted);
  LH_CHECK(!terms.empty() && (!wide || IsHalf(dtype))) << terms.size() << " of " << Name(dtype);
  const bool whole = dtype <= DType::kInt64;
  LH_CHECK(divisor == 0 ||
           (op == ReduceOp::kAvg &&
            (!whole || (divisor >= 1 && divisor <= 0xffffffffu && divisor == std::trunc(divisor)))))
      << Name(op) << " of " << Name(dtype) << " divided by " << divisor;
  InUse().combine(out, out_wide, terms, count, dtype, op, divisor);
}

namespace {

template <class T>
void Fill(uint8_t* out, uint64_t count, T value) {
  for (uint64_t i = 0; i < count; ++i) std::memcpy(out + i * sizeof(T), &value, sizeof(T));
}

// Fills `out` with the identity of the op, which is one of these values: zero (-0 for floats), one,
// the largest value or the least.
template <class T>
void FillOneOf(uint8_t* out, uint64_t count, ReduceOp op, T zero, T one, T most, T least) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return Fill(out, count, zero);
    case ReduceOp::kProd:
      return Fill(out, count, one);
    case ReduceOp::kMin:
      return Fill(out, count, most);
    case ReduceOp::kMax:
      return Fill(out, count, least);
  }
}

template <class T>
void FillInteger(uint8_t* out, uint64_t count, ReduceOp op) {
  FillOneOf<T>(out, count, op, 0, 1, std::numeric_limits<T>::max(), std::numeric_limits<T>::min());
}

}  // namespace

void FillIdentity(uint8_t* out, uint64_t count, DType dtype, ReduceOp op) {
  CheckReduction(dtype, op, false);
  switch (dtype) {
    case DType::kUint8:
      return FillInteger<uint8_t>(out, count, op);
    case DType::kInt8:
      return FillInteger<int8_t>(out, count, op);
    case DType::kUint16:
      return FillInteger<uint16_t>(out, count, op);
    case DType::kInt16:
      return FillInteger<int16_t>(out, count, op);
    case DType::kUint32:
      return FillInteger<uint32_t>(out, count, op);
    case DType::kInt32:
      return FillInteger<int32_t>(out, count, op);
    case DType::kUint64:
      return FillInteger<uint64_t>(out, count, op);
    case DType::kInt64:
      return FillInteger<int64_t>(out, count, op);
    case DType::kFloat16:
      return FillOneOf<uint16_t>(out, count, op, 0x8000, 0x3c00, 0x7c00, 0xfc00);
    case DType::kBfloat16:
      return FillOneOf<uint16_t>(out, count, op, 0x8000, 0x3f80, 0x7f80, 0xff80);
    case DType::kFloat32:
      return FillOneOf<uint32_t>(out, count, op, 0x80000000u, 0x3f800000u, 0x7f800000u,
                                 0xff800000u);
    case DType::kFloat64:
      return FillOneOf<uint64_t>(out, count, op, uint64_t{1} << 63, 0x3ff0000000000000u,
                                 0x7ff0000000000000u, 0xfff0000000000000u);
    case DType::kBool:
      return FillOneOf<uint8_t>(out, count, op, 0, 1, 1, 0);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;  // CheckReduction() has refused it
  }
}

#if defined(__x86_64__)
namespace {

constexpr uint64_t kLine = 64;

// Copies one cache line; `out` is aligned to a line. These stores do not read the old line first.
void StreamLine(uint8_t* out, const uint8_t* in) {
  const auto* const from = reinterpret_cast<const __m128i*>(in);
  auto* const to = reinterpret_cast<__m128i*>(out);
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

}  // namespace
#endif

void CopyAside(uint8_t* out, const uint8_t* in, uint64_t bytes) {
#if defined(__x86_64__)
  const uint64_t head = std::min(-reinterpret_cast<uintptr_t>(out) % kLine, bytes);
  std::memcpy(out, in, head);
  uint64_t done = head;
  // A processor prefetches by itself, but not beyond the end of a page. A prefetch never faults, so
  // it may go beyond the end of `in`, too. The source stays in the caches, because most callers
  // read it next.
  constexpr uint64_t kAhead = 2048;
  for (; done + kLine <= bytes; done += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(in + done + kAhead), _MM_HINT_T0);
    StreamLine(out + done, in + done);
  }
  std::memcpy(out + done, in + done, bytes - done);
  // Streaming stores are not ordered like plain ones. Order them before what follows.
  _mm_sfence();
#else
  std::memcpy(out, in, bytes);
#endif
}

}  // namespace longhaul::peerd
