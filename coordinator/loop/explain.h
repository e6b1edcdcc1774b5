// Why a group is waiting, in sentences for an operator. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/core/records.h"

namespace longhaul::coordinator {

struct Explanation {
  std::string verdict;             // one sentence
  std::vector<std::string> facts;  // a sentence each, the most telling ones first
};

Explanation Explain(const GroupView& group, uint32_t detect_ms);

}  // namespace longhaul::coordinator
