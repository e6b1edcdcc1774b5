// What several members on one host contribute: their tensors reduced together, in order. Pure.
#pragma once

#include <cstdint>

#include "peerd/collective/attempt.h"

namespace longhaul::peerd {

// out = sources[0] op sources[1] ..., for the bytes [offset, offset + bytes) of the tensors. `out`
// overlaps none of the sources.
void ReduceSources(const AttemptSpec& spec, uint64_t offset, uint64_t bytes, uint8_t* out);

// accumulator = accumulator op sources[0] op sources[1] ...
void AddSources(const AttemptSpec& spec, uint64_t offset, uint64_t bytes, uint8_t* accumulator);

// The last step of an average, on complete sums; nothing for the other ops.
void DivideSums(const AttemptSpec& spec, uint64_t bytes, uint8_t* data);

// Aborts the process if the spec is not one that the header of attempt.h allows.
void CheckSpec(const AttemptSpec& spec);

}  // namespace longhaul::peerd
