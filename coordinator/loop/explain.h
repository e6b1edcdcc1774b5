// Says why a group waits, in sentences for an operator (`lhctl why`). Pure functions: no state, any
// thread, nothing can fail.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/core/records.h"

namespace longhaul::coordinator {

struct Explanation {
  std::string verdict;             // what the group waits for, in one sentence
  std::vector<std::string> facts;  // one sentence each; the most useful facts come first
};

Explanation Explain(const GroupView& group, uint32_t detect_ms);

}  // namespace longhaul::coordinator
