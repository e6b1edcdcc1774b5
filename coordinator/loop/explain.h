// Says why a group waits, in sentences for an operator (`lhctl why`). Pure functions: no state, any
// thread, nothing can fail.
//
// Each peer tells with its heartbeats what its oldest open op waits for, and for which other peer
// its link keeps it waiting. The oldest op of all is the best witness: with several ops in flight,
// the others wait behind it. Its phase says whom to look at: members that have not called the op,
// or the links that carry its bytes. If several peers hear nothing from one, that one is the cause;
// if only one does, it is the path between the two.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/core/records.h"

namespace longhaul::coordinator {

struct Explanation {
  std::string verdict;             // who or what keeps the group waiting, in one sentence
  std::vector<std::string> facts;  // one sentence each; the most useful facts come first
};

// `slow_write_ms`: the longest write of the store in the last seconds.
Explanation Explain(const GroupView& group, uint32_t detect_ms, uint32_t slow_write_ms = 0);

// The same for a trainer that waits, in one sentence: the verdict, and where the members are that
// have not come to the step boundary.
std::string ExplainToTrainer(const GroupView& group, uint32_t detect_ms,
                             uint32_t slow_write_ms = 0);

}  // namespace longhaul::coordinator
