// What the trainers of a simulated run reduce, and what must come of it.
//
// An op's description, input and result are functions of its name, so that every trainer posts the
// same without talking to the others. Inputs are small integers in every dtype, exact under every
// reduction that is used; in the wider dtypes a sum shows who took part, as each member has a bit
// of its own.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/wire/op_desc.h"

namespace longhaul::sim {

struct OpName {
  uint32_t group = 0;
  uint64_t step = 0;  // boundaries that the group passed before
  uint64_t tag = 0;
  uint32_t turn = 0;  // of the ops with this tag in the step
  friend auto operator<=>(const OpName&, const OpName&) = default;
};
std::string ToString(const OpName& name);

struct OpShape {
  OpDesc desc;
  bool mismatched = false;  // members differ about it
};

// The tag of ops that are awaited one step later. They are never aborted by a fault: started again,
// one would meet some of the others before the boundary, and some behind it.
inline constexpr uint64_t kLateTag = 100;

// Members of one group in one run, at most: each has a slot of its own.
inline constexpr uint32_t kSlotsMax = 20;

OpShape ShapeOf(uint64_t seed, const OpName& name);
// What the member in `slot` posts.
OpDesc DescOf(uint64_t seed, const OpName& name, uint32_t slot);
std::vector<uint8_t> InputOf(const OpName& name, const OpDesc& desc, uint32_t slot);
std::vector<uint8_t> ResultOf(const OpName& name, const OpDesc& desc,
                              const std::vector<uint32_t>& slots);

}  // namespace longhaul::sim
