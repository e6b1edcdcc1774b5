// What `lhctl token` needs besides the calls. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "proto/longhaul/v1/admin.pb.h"

namespace longhaul {

// Reads a time such as "90s", "30m", "72h" or "30d", in seconds. nullopt: the text is none, or is
// zero, or longer than a thousand years.
std::optional<uint64_t> ParseTtl(const std::string& text);

// A table of all tokens, with times in UTC.
std::string RenderTokens(const v1::ListTokensResponse& response);

// One sentence about a token that was just made.
std::string DescribeToken(const v1::Token& token);

}  // namespace longhaul
