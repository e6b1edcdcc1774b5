// Element-wise arithmetic on tensors, for all twelve dtypes. Pure. Pointers need not be aligned.
//
// - Integers wrap.
// - float16 and bfloat16 are computed in float32. Each call rounds the result to nearest even.
// - A NaN in a result is always the quiet NaN of the dtype, without sign and payload.
// - min and max give NaN if one operand is NaN, and treat -0 as less than +0.
// So every op is commutative in all bits. A result depends on the operands only, and not on
// alignment, length or instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// accumulator[i] = accumulator[i] op input[i]. For avg it adds; call Divide() once at the end. The
// two ranges are equal or do not overlap.
void ReduceInto(uint8_t* accumulator, const uint8_t* input, uint64_t count, DType dtype,
                ReduceOp op);

// out[i] = a[i] op b[i]. `out` is equal to `a` or to `b`, or overlaps neither.
void Reduce(uint8_t* out, const uint8_t* a, const uint8_t* b, uint64_t count, DType dtype,
            ReduceOp op);

// data[i] /= divisor, for a divisor of at least 1. float16 and bfloat16 are divided in float32.
// Integers are rounded towards zero.
void Divide(uint8_t* data, uint64_t count, DType dtype, uint32_t divisor);

// Fills `out` with the identity of the op: x op identity is x in all bits, unless x is NaN. For sum
// and avg: -0 for floats, 0 for integers. For prod: 1. For min: infinity, or the largest integer.
// For max: -infinity, or the smallest integer.
void FillIdentity(uint8_t* out, uint64_t count, DType dtype, ReduceOp op);

// Copies past the caches, for bytes that are not needed again soon. The ranges must not overlap.
void CopyAside(uint8_t* out, const uint8_t* in, uint64_t bytes);

// One implementation of the arithmetic. `name` is the instruction set: "avx2", "avx512", "neon", or
// "generic" for what the compiler makes of plain loops (on aarch64 it uses NEON there, too).
struct Kernels {
  const char* name;
  void (*reduce)(uint8_t* out, const uint8_t* a, const uint8_t* b, uint64_t count, DType dtype,
                 ReduceOp op);
  void (*divide)(uint8_t* data, uint64_t count, DType dtype, uint32_t divisor);
};
// The implementations that this processor can run. "generic" comes first, and the one in use comes
// last. For tests and benchmarks.
const std::vector<Kernels>& SupportedKernels();

}  // namespace longhaul::peerd
