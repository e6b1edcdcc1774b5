// Element-wise arithmetic on tensors, for all twelve dtypes. Pure; unaligned pointers are allowed.
//
// Integers wrap. float16 and bfloat16 are computed in float32 and rounded to nearest even per call.
// min and max: NaN wins, whichever side it stands on. Results depend on operands only, never on
// alignment, length or the instruction set chosen.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// accumulator[i] = accumulator[i] op input[i]; avg adds, Divide() follows once at the end.
void ReduceInto(uint8_t* accumulator, const uint8_t* input, uint64_t count, DType dtype, ReduceOp op);

// out[i] = a[i] op b[i]; out may be a or b.
void Reduce(uint8_t* out, const uint8_t* a, const uint8_t* b, uint64_t count, DType dtype, ReduceOp op);

// data[i] /= divisor: floats by division, integers rounding towards zero. divisor >= 1.
void Divide(uint8_t* data, uint64_t count, DType dtype, uint32_t divisor);

}  // namespace longhaul::peerd
