// The tensors that simulated trainers reduce, and the results that they must get.
//
// The description, input and result of an op are functions of its name. So all trainers post the
// same op without talking to each other. Inputs are small integers in every dtype, exact under
// every reduction that is used. In the wider dtypes each member has its own bit, so a sum shows who
// took part. Ops that encode have other inputs (coded_tensors.h).
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/wire/op_desc.h"

namespace longhaul::sim {

struct OpName {
  uint32_t group = 0;
  uint64_t step = 0;  // boundaries that the group has passed before
  uint64_t tag = 0;
  uint32_t turn = 0;  // number among the step's ops of this tag
  uint32_t part = 0;  // of an op of a part of the group: which part, from 1 on; else 0
  friend auto operator<=>(const OpName&, const OpName&) = default;
};
std::string ToString(const OpName& name);

// An aborted op is posted again under the same name.
struct OpPost {
  OpName name;
  uint32_t times = 1;  // how often the member has posted it, this time included
  friend auto operator<=>(const OpPost&, const OpPost&) = default;
};

struct OpShape {
  OpDesc desc;
  bool mismatched = false;  // the members' offers differ
  // The members of even and of odd places in the step's list have an op of their own.
  bool split = false;
};

// The tag of ops that are awaited one step later. Their on_fault is never abort. An aborted op
// would be started again by some members before the boundary, and by others after it.
inline constexpr uint64_t kLateTag = 100;

// Maximal number of members of one group in one run. Each member has its own slot.
inline constexpr uint32_t kSlotsMax = 20;

OpShape ShapeOf(uint64_t seed, const OpName& name);
// What the member in `slot` posts.
OpDesc DescOf(uint64_t seed, const OpName& name, uint32_t slot);
std::vector<uint8_t> InputOf(const OpName& name, const OpDesc& desc, uint32_t slot);
// The error that it brings, if the op encodes; empty: none.
std::vector<float> ErrorOf(const OpName& name, const OpDesc& desc, uint32_t slot);
// The weight of a member, in ops that have weights.
double WeightOf(uint32_t slot);
// The whole of an op that reduces or puts parts side by side: the result of the members in `slots`.
// `encoded`: it was encoded before the members got it.
std::vector<uint8_t> ResultOf(const OpName& name, const OpDesc& desc,
                              const std::vector<uint32_t>& slots, bool encoded = false);
// How far from that result an element may be, and how far from 0 an error. Mostly 0.
struct Slack {
  double result = 0;
  double error = 0;
};
Slack SlackOf(const OpName& name, const OpDesc& desc, const std::vector<uint32_t>& slots);
// The rank of the root, where the world has so many members.
uint64_t RootRankOf(const OpName& name, uint32_t world);

}  // namespace longhaul::sim
