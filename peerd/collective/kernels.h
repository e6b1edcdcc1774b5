// Element-wise arithmetic on tensors, for all twelve dtypes. Pure; unaligned pointers are allowed.
//
// Integers wrap. float16 and bfloat16 are computed in float32 and rounded to nearest even per call.
// A NaN is always the dtype's quiet NaN without sign or payload; min and max: NaN wins, and -0 is
// less than +0. So every op is commutative in all bits, and results depend on operands only, never
// on alignment, length or the instruction set chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// accumulator[i] = accumulator[i] op input[i]; avg adds, Divide() follows once at the end. The two
// are the same range or do not overlap.
void ReduceInto(uint8_t* accumulator, const uint8_t* input, uint64_t count, DType dtype,
                ReduceOp op);

// out[i] = a[i] op b[i]; out is a, or b, or does not overlap either.
void Reduce(uint8_t* out, const uint8_t* a, const uint8_t* b, uint64_t count, DType dtype,
            ReduceOp op);

// data[i] /= divisor: floats by division (in float32 if they are narrower), integers rounding
// towards zero. divisor >= 1.
void Divide(uint8_t* data, uint64_t count, DType dtype, uint32_t divisor);

// What changes no value: x op identity is x, in all bits unless x is NaN. sum and avg: -0 for
// floats, 0 for integers; prod: 1; min: infinity, or the largest integer; max: -infinity, or the
// smallest.
void FillIdentity(uint8_t* out, uint64_t count, DType dtype, ReduceOp op);

// Copies ranges that do not overlap, past the cache: for bytes that are not needed again soon.
void CopyAside(uint8_t* out, const uint8_t* in, uint64_t bytes);

// One implementation of the arithmetic. Names the instruction set: "generic" (what the compiler
// makes of the plain loops: with NEON on aarch64), then "avx2" and "avx512", or "neon".
struct Kernels {
  const char* name;
  void (*reduce)(uint8_t* out, const uint8_t* a, const uint8_t* b, uint64_t count, DType dtype,
                 ReduceOp op);
  void (*divide)(uint8_t* data, uint64_t count, DType dtype, uint32_t divisor);
};
// Those that run on this CPU, generic first, the one in use last. For tests and benchmarks.
const std::vector<Kernels>& SupportedKernels();

}  // namespace longhaul::peerd
