// What follows from the spec of an attempt: which local sources are added up, how, and whether sums
// of halves are float32 on the way. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "peerd/collective/attempt.h"
#include "peerd/collective/block_codec.h"
#include "peerd/collective/kernels.h"
#include "peerd/collective/layout.h"

namespace longhaul::peerd {

// A local source that contributes and does not have weight 0.
struct LocalInput {
  int member = 0;  // its index among the local members
  double weight = 1;
};
using Inputs = std::vector<LocalInput>;
Inputs InputsOf(const AttemptSpec& spec);

// Bytes [skip, skip + ...) of a chunk in each of these inputs, in their order. After an input comes
// its error, if it has one.
std::vector<Term> TermsOf(const AttemptSpec& spec, const Inputs& inputs, const Layout::Chunk& chunk,
                          uint64_t skip);

// Whether a local member keeps errors.
bool KeepsErrors(const AttemptSpec& spec);
// Where the error of this element of a chunk is; nullptr: the member has none.
float* ErrorOf(const AttemptSpec& spec, int member, const Layout::Chunk& chunk, uint64_t skip);

// out = the sum of the inputs, for the bytes [skip, skip + bytes) of a chunk, not divided. Without
// inputs: the identity. `wide`: float32 for a chunk of halves. `out` overlaps no input.
void SumInputs(const AttemptSpec& spec, const Inputs& inputs, const Layout::Chunk& chunk,
               uint64_t skip, uint64_t bytes, uint8_t* out, bool wide);
// Fills `out` with the identity of the op, for `bytes` bytes of a tensor of this dtype.
void FillWithIdentity(ReduceOp reduce, DType dtype, uint64_t bytes, uint8_t* out, bool wide);
// What sums are divided by at the end (Combine()). 0: nothing.
double DivisorOf(const AttemptSpec& spec);

// Whether a source at this position contributes.
bool PositionContributes(const AttemptSpec& spec, int position);
// The order in which the inputs of the positions are added.
std::vector<int> OrderOf(const AttemptSpec& spec);

// Whether there are halves whose sums are float32 on the way. Not if the op encodes.
bool SumsHalves(const AttemptSpec& spec);
// Whether such sums are float32 in the ring, and in the input that a position sends in the mesh.
// The same at every peer.
bool IsWideInRing(const AttemptSpec& spec);
bool IsWideFrom(const AttemptSpec& spec, int position);

// Whether the targets of a local member are its sources.
bool IsInPlace(const AttemptSpec& spec, int member);

// Aborts the process (LH_CHECK) if the spec breaks the rules in attempt.h.
void CheckSpec(const AttemptSpec& spec);

}  // namespace longhaul::peerd
