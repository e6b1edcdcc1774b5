// What several members on one host contribute: their tensors reduced together, in order. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "peerd/collective/attempt.h"

namespace longhaul::peerd {

using Inputs = std::vector<const uint8_t*>;

// The sources that contribute.
Inputs InputsOf(const AttemptSpec& spec);

// A source there contributes.
bool PositionContributes(const AttemptSpec& spec, int position);

// out = inputs[0] op inputs[1] ..., for the bytes [offset, offset + bytes) of the tensors. `out`
// overlaps none of the inputs, of which there is at least one.
void ReduceInputs(const OpDesc& desc, const Inputs& inputs, uint64_t offset, uint64_t bytes,
                  uint8_t* out);

// accumulator = accumulator op inputs[0] op inputs[1] ...
void AddInputs(const OpDesc& desc, const Inputs& inputs, uint64_t offset, uint64_t bytes,
               uint8_t* accumulator);

// The last step of an average, on complete sums; nothing for the other ops.
void DivideSums(const AttemptSpec& spec, uint64_t bytes, uint8_t* data);

// Aborts the process if the spec is not one that the header of attempt.h allows.
void CheckSpec(const AttemptSpec& spec);

}  // namespace longhaul::peerd
