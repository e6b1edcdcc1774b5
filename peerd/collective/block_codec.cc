#include "peerd/collective/block_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace longhaul::peerd {
namespace {

#define LH_LOOP __attribute__((noinline))

constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: the unit of its last place is 1
constexpr uint32_t kMagicBits = 0x4b400000;
// |x| * 2^15 is below 2^22 for |x| <= 127.
constexpr int kFractionBits = 15;
constexpr float kFraction = 1 << kFractionBits;
constexpr float kScaleMin = 1.17549435e-38F;  // the least that is not denormal
constexpr float kFloatMax = 3.40282347e+38F;
constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;
constexpr uint32_t kBfloat16Max = 0x7f7f;

// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
uint32_t SeedOf(uint64_t seed, uint64_t block) {
  uint64_t x = seed + (block + 1) * 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return static_cast<uint32_t>(x ^ (x >> 31));
}

namespace generic {
#define LH_TARGET
#include "peerd/collective/block_codec_loops.inc"
#undef LH_TARGET
}  // namespace generic

#if defined(__x86_64__)
namespace avx2 {
#define LH_TARGET __attribute__((target("avx2")))
#include "peerd/collective/block_codec_loops.inc"
#undef LH_TARGET
}  // namespace avx2
namespace avx512 {
// clang does not know this option, and ignores the whole attribute then.
#if defined(__clang__)
#define LH_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#else
#define LH_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#endif
#include "peerd/collective/block_codec_loops.inc"
#undef LH_TARGET
}  // namespace avx512
#endif

std::vector<BlockKernels> Usable() {
  std::vector<BlockKernels> usable;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    usable.push_back({"avx512", &avx512::EncodeBlocks, &avx512::DecodeBlocks<false>,
                      &avx512::DecodeBlocks<true>});
  }
  if (__builtin_cpu_supports("avx2")) {
    usable.push_back(
        {"avx2", &avx2::EncodeBlocks, &avx2::DecodeBlocks<false>, &avx2::DecodeBlocks<true>});
  }
#endif
  usable.push_back({"generic", &generic::EncodeBlocks, &generic::DecodeBlocks<false>,
                    &generic::DecodeBlocks<true>});
  return usable;
}

}  // namespace

uint64_t EncodedBytes(const BlockOptions& options, uint64_t count) {
  if (options.format == BlockFormat::kBfloat16) return 2 * count;
  const uint64_t blocks = count / options.block + (count % options.block != 0);
  // All blocks but the last have an even number of elements.
  return blocks * sizeof(float) +
         (options.format == BlockFormat::kInt4 ? count / 2 + count % 2 : count);
}

uint64_t BlocksNotFinite(const BlockOptions& options, const float* in, uint64_t count) {
  uint64_t blocks = 0;
  for (uint64_t done = 0; done < count; done += options.block) {
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(options.block, count - done));
    blocks += generic::Greatest(in + done, n) >= kInfinityBits ? 1 : 0;
  }
  return blocks;
}

std::span<const BlockKernels> SupportedBlockKernels() {
  static const std::vector<BlockKernels>* const all = new std::vector<BlockKernels>(Usable());
  return *all;
}

uint64_t Encode(const BlockOptions& options, uint64_t seed, uint64_t first, const float* in,
                uint64_t count, uint8_t* out) {
  return SupportedBlockKernels().front().encode(options, seed, first, in, count, out);
}
uint64_t Decode(const BlockOptions& options, const uint8_t* in, uint64_t count, float* out) {
  return SupportedBlockKernels().front().decode(options, in, count, out);
}
uint64_t DecodeAdd(const BlockOptions& options, const uint8_t* in, uint64_t count, float* out) {
  return SupportedBlockKernels().front().decode_add(options, in, count, out);
}

}  // namespace longhaul::peerd
