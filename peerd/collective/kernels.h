// Element-wise arithmetic on tensors, for all dtypes but float8, which is only moved. Pure.
// Pointers need not be aligned.
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
#include <span>
#include <vector>

#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// Fills `out` with the identity of the op: x op identity is x in all bits, unless x is NaN. For sum
// and avg: -0 for floats, 0 for integers. For prod: 1. For min: infinity, or the largest integer.
// For max: -infinity, or the smallest integer. For bool: 1 for min, else 0.
void FillIdentity(uint8_t* out, uint64_t count, DType dtype, ReduceOp op);

// One input of Combine().
struct Term {
  const uint8_t* data = nullptr;
  bool wide = false;  // float32 in place of a half (IsHalf())
  double weight = 1;
};
// out = terms[0] * weight op terms[1] * weight ..., in this order, then divided by `divisor` unless
// that is 0. All of it is computed in float32 for halves, else in the dtype (weights are rounded to
// float32 for float32), and rounded to the dtype once, at the end. `out_wide`: the result of halves
// stays float32. There is at least one term. Weights other than 1 are for floats, sum and avg;
// divisors are for avg: whole numbers for integers, which are rounded towards zero. A sum or a
// maximum of bool is "or", a minimum is "and", and the result is 0 or 1. `out` is equal to the data
// of terms of its own width, or overlaps none.
void Combine(uint8_t* out, bool out_wide, std::span<const Term> terms, uint64_t count, DType dtype,
             ReduceOp op, double divisor);

// Copies past the caches, for bytes that are not needed again soon. The ranges must not overlap.
void CopyAside(uint8_t* out, const uint8_t* in, uint64_t bytes);

// One implementation of the arithmetic. `name` is the instruction set: "avx2", "avx512", "neon", or
// "generic" for what the compiler makes of plain loops (on aarch64 it uses NEON there, too).
struct Kernels {
  const char* name;
  void (*combine)(uint8_t* out, bool out_wide, std::span<const Term> terms, uint64_t count,
                  DType dtype, ReduceOp op, double divisor);
};
// The implementations that this processor can run. "generic" comes first, and the one in use comes
// last. For tests and benchmarks.
const std::vector<Kernels>& SupportedKernels();

}  // namespace longhaul::peerd
