#include "peerd/collective/kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

// Iterations do not depend on each other, whatever the compiler can see of the pointers.
#if defined(__clang__)
#define LH_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LH_INDEPENDENT _Pragma("GCC ivdep")
#endif
// A function of its own for each loop: the dispatching switch stays small.
#define LH_LOOP __attribute__((noinline))

namespace longhaul::peerd {
namespace {

namespace generic {
#define LH_TARGET
#define LH_F16C 0
#include "peerd/collective/kernels_loops.inc"
#undef LH_F16C
#undef LH_TARGET
}  // namespace generic

#if defined(__x86_64__)
namespace avx2 {
#define LH_TARGET __attribute__((target("avx2,f16c")))
#define LH_F16C 1
#include "peerd/collective/kernels_loops.inc"
#undef LH_F16C
#undef LH_TARGET
}  // namespace avx2

bool HasAvx2AndF16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  // The first asks the operating system's support for the registers too.
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 &&
         (ecx & bit_F16C) != 0;
}
#endif

std::vector<Kernels> Detect() {
  std::vector<Kernels> kernels = {{"generic", generic::ReduceEntry, generic::DivideEntry}};
#if defined(__x86_64__)
  if (HasAvx2AndF16c()) kernels.push_back({"avx2", avx2::ReduceEntry, avx2::DivideEntry});
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

void ReduceInto(uint8_t* accumulator, const uint8_t* input, uint64_t count, DType dtype,
                ReduceOp op) {
  InUse().reduce(accumulator, accumulator, input, count, dtype, op);
}

void Reduce(uint8_t* out, const uint8_t* a, const uint8_t* b, uint64_t count, DType dtype,
            ReduceOp op) {
  InUse().reduce(out, a, b, count, dtype, op);
}

void Divide(uint8_t* data, uint64_t count, DType dtype, uint32_t divisor) {
  LH_CHECK(divisor >= 1);
  InUse().divide(data, count, dtype, divisor);
}

namespace {

template <class T>
void Fill(uint8_t* out, uint64_t count, T value) {
  for (uint64_t i = 0; i < count; ++i) std::memcpy(out + i * sizeof(T), &value, sizeof(T));
}

// With what each op begins: the bits of zero (-0 of floats), one, the largest and the least.
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
  }
}

void CopyAside(uint8_t* out, const uint8_t* in, uint64_t bytes) {
#if defined(__x86_64__)
  // Stores that do not fetch the lines they fill; they need the alignment.
  constexpr uint64_t kLine = 64;
  const uint64_t head = std::min(-reinterpret_cast<uintptr_t>(out) % kLine, bytes);
  std::memcpy(out, in, head);
  uint64_t done = head;
  // Several pages in turns: a processor reads ahead by itself, but not beyond the end of a page.
  constexpr uint64_t kPage = 4096;
  constexpr uint64_t kBlock = 4 * kPage;
  for (; done + kBlock <= bytes; done += kBlock) {
    for (uint64_t line = done; line < done + kPage; line += kLine) {
      for (uint64_t at = line; at < line + kBlock; at += kPage) {
        const auto* const from = reinterpret_cast<const __m128i*>(in + at);
        auto* const to = reinterpret_cast<__m128i*>(out + at);
        const __m128i a = _mm_loadu_si128(from);
        const __m128i b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2);
        const __m128i d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
      }
    }
  }
  for (; done + kLine <= bytes; done += kLine) {
    for (uint64_t i = done; i < done + kLine; i += sizeof(__m128i)) {
      const __m128i piece = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), piece);
    }
  }
  std::memcpy(out + done, in + done, bytes - done);
  // Orders them with what follows, as plain stores are.
  _mm_sfence();
#else
  std::memcpy(out, in, bytes);
#endif
}

}  // namespace longhaul::peerd
