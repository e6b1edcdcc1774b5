// Reduces the tensors of the members on one host together, in their order. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "peerd/collective/attempt.h"

namespace longhaul::peerd {

using Inputs = std::vector<const uint8_t*>;

// The local sources that contribute.
Inputs InputsOf(const AttemptSpec& spec);

// Whether a source at this position contributes.
bool PositionContributes(const AttemptSpec& spec, int position);

// out = inputs[0] op inputs[1] ..., for the bytes [offset, offset + bytes) of the tensors. There is
// at least one input. `out` points to the result of byte `offset`, and overlaps no input.
void ReduceInputs(const OpDesc& desc, const Inputs& inputs, uint64_t offset, uint64_t bytes,
                  uint8_t* out);

// accumulator = accumulator op inputs[0] op inputs[1] ..., for the same bytes.
void AddInputs(const OpDesc& desc, const Inputs& inputs, uint64_t offset, uint64_t bytes,
               uint8_t* accumulator);

// The last step of avg: divides complete sums. Does nothing for the other ops.
void DivideSums(const AttemptSpec& spec, uint64_t bytes, uint8_t* data);

// Aborts the process (LH_CHECK) if the spec breaks the rules in attempt.h.
void CheckSpec(const AttemptSpec& spec);

}  // namespace longhaul::peerd
