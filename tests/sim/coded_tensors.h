// The tensors of ops that encode (OpDesc::Encodes()), and what must come of them.
//
// All is a function of the op's hash, its description and slots (tensors.h). The inputs are whole
// numbers. There are two kinds:
//
// - Exact ones come through a codec as they were. In a block of int8 or int4 all elements have the
//   same magnitude, a multiple of the greatest number (127 or 7), and the same signs at all
//   members. So sums are like that, too, and are encoded without loss. Those of bfloat16 have few
//   bits. Results are compared bit by bit.
// - Rough ones lose something, by chance if the op rounds so. All members must still get the same
//   bits, near the true result. They show whether an op that is redone draws other random numbers.
//
// Some members bring an error. Source and error together are what the member would post without
// an error. So a result shows whether the error was added once.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/wire/op_desc.h"

namespace longhaul::sim {

// Gives the op a codec, if its kind, dtype and reduction allow one and the hash says so.
void DrawCodec(uint64_t hash, OpDesc* desc);
// Changes the codec, for an offer that differs from those of other members. It may stay the same.
void DrawOtherCodec(uint64_t hash, OpDesc* desc);

// What a member posts.
std::vector<uint8_t> CodedInputOf(uint64_t hash, const OpDesc& desc, uint32_t slot);
// Its error; empty if it keeps none. The weight does not count for errors.
std::vector<float> CodedErrorOf(uint64_t hash, const OpDesc& desc, uint32_t slot, int64_t weight);

// The result of the members in `slots`, which have these weights. `encoded`: the sum is encoded
// before members get it.
std::vector<uint8_t> CodedResultOf(uint64_t hash, const OpDesc& desc,
                                   const std::vector<uint32_t>& slots,
                                   const std::vector<int64_t>& weights, bool encoded);
// How far an element may be from that. 0: the bits are the same.
double SlackOf(uint64_t hash, const OpDesc& desc, const std::vector<int64_t>& weights);
// How far from 0 an error may be after the op.
double ErrorSlackOf(uint64_t hash, const OpDesc& desc, const std::vector<int64_t>& weights);

// Whether the elements differ by at most `slack`. False if the lengths differ.
bool Near(DType dtype, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, double slack);

}  // namespace longhaul::sim
