// Reads quantities from text: 40ms, 200mbit, 256KiB, 0.1%. Pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace longhaul::wan {

// A point on CLOCK_MONOTONIC, or a duration.
using Nanos = int64_t;

inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;

// The largest quantity. With this limit sums of a few quantities fit into an int64_t.
inline constexpr double kQuantityMax = 1e15;

// InvalidArgument: the text is no quantity of this kind, or it is negative or too large. The error
// quotes the text. Quantities need a unit, except 0, integers and fractions.
absl::StatusOr<int64_t> ParseInteger(std::string_view text);
absl::StatusOr<Nanos> ParseDuration(std::string_view text);   // ns, us, ms, s
absl::StatusOr<int64_t> ParseRate(std::string_view text);     // bit, kbit, mbit, gbit per second
absl::StatusOr<int64_t> ParseBytes(std::string_view text);    // B, KB, MB, KiB, MiB
absl::StatusOr<double> ParseFraction(std::string_view text);  // 0.001 or 0.1%, at most 1

}  // namespace longhaul::wan
