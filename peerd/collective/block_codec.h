// Codecs: float32 as bfloat16, or as whole numbers of 8 or 4 bits with one scale for each block.
// Pure.
//
// Format of int8 and int4. `block` consecutive elements are a block; the last block of a range may
// be shorter. An encoded block is its scale (float32, little-endian), then its numbers: for int8
// one byte each, in two's complement; for int4 half a byte each, the first of two in the low half.
// An odd last number leaves the high half 0. Blocks follow each other without gaps.
//
//   int8   scale = max|x| / 127, numbers from -127 to 127
//   int4   scale = max|x| / 7, numbers from -7 to 7
//
// (If the greatest number times the scale would overflow, the scale is the next smaller float.)
// An element decodes as number * scale, rounded once. Rounding of x / scale, which is itself
// rounded to float32:
//   nearest      to the nearest whole number, halves to even. The error is at most half a scale
//                (and a rounding error of float32).
//   stochastic   up or down by chance, so that the mean error is 0. The chance of "up" is the
//                fraction, in steps of 2^-15. The error is below one scale. The random numbers
//                depend on the seed and the position of the element only.
//
// A block with a NaN or an infinity has the scale NaN and all numbers 0. It decodes as NaN. A block
// whose scale would be denormal has scale and numbers 0, so denormal numbers play no role, whether
// or not the processor flushes them to zero.
//
// Format of bfloat16: two bytes for each element, little-endian. A finite element stays finite: one
// beyond the greatest bfloat16 becomes that. NaN and infinities stay what they are, and do not
// change their neighbours. Blocks only count for the random numbers, and for what Encode() and
// Decode() return. Rounding is to the nearest bfloat16, halves to even; or up or down by chance, in
// steps of 2^-16 of the distance between the two.
//
// The bytes depend on the input, the options, the seed and the positions only: not on alignment,
// and not on the instruction set. Divisions and multiplications are those of IEEE 754, and none is
// fused with an addition.
//
// Literature: stochastic rounding of gradients with a scale, Alistarh et al., "QSGD", 2017; scales
// for blocks, Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
#pragma once

#include <cstdint>
#include <span>

namespace longhaul::peerd {

enum class BlockFormat : uint8_t { kInt8, kInt4, kBfloat16 };

struct BlockOptions {
  BlockFormat format = BlockFormat::kInt8;
  uint32_t block = 128;  // elements: a power of two from kBlockMin to kBlockMax
  bool stochastic = false;
};
inline constexpr uint32_t kBlockMin = 32;
inline constexpr uint32_t kBlockMax = 4096;

// The bytes of so many encoded elements.
uint64_t EncodedBytes(const BlockOptions& options, uint64_t count);

// Encodes `count` elements into EncodedBytes() bytes. `first`: the position of the first element in
// its tensor, a multiple of the block; only the random numbers depend on it. Returns how many
// blocks have an element that is not finite. The ranges do not overlap.
uint64_t Encode(const BlockOptions& options, uint64_t seed, uint64_t first, const float* in,
                uint64_t count, uint8_t* out);

// out[i] = the decoded element. Returns how many blocks have an element that is not finite. The
// ranges do not overlap.
uint64_t Decode(const BlockOptions& options, const uint8_t* in, uint64_t count, float* out);

// out[i] += the decoded element.
uint64_t DecodeAdd(const BlockOptions& options, const uint8_t* in, uint64_t count, float* out);

// One implementation: "avx512", "avx2", or "generic" (on aarch64 the compiler uses NEON there). All
// give the same bits.
struct BlockKernels {
  const char* name;
  uint64_t (*encode)(const BlockOptions&, uint64_t, uint64_t, const float*, uint64_t, uint8_t*);
  uint64_t (*decode)(const BlockOptions&, const uint8_t*, uint64_t, float*);
  uint64_t (*decode_add)(const BlockOptions&, const uint8_t*, uint64_t, float*);
};
// Of so many elements, how many blocks have one that is not finite.
uint64_t BlocksNotFinite(const BlockOptions& options, const float* in, uint64_t count);

// Those that this processor can run, the fastest first.
std::span<const BlockKernels> SupportedBlockKernels();

}  // namespace longhaul::peerd
