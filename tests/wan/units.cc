#include "tests/wan/units.h"

#include <charconv>
#include <cmath>
#include <span>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace longhaul::wan {
namespace {

struct Unit {
  std::string_view suffix;
  double factor;  // 0: this suffix is for the number 0 only
};

constexpr Unit kDurations[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {"", 0}};
constexpr Unit kRates[] = {{"bit", 1}, {"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"", 0}};
constexpr Unit kSizes[] = {{"B", 1},       {"KB", 1e3},       {"MB", 1e6},
                           {"KiB", 1024.}, {"MiB", 1048576.}, {"", 0}};
constexpr Unit kFractions[] = {{"", 1}, {"%", 0.01}};

absl::StatusOr<double> Parse(std::string_view text, std::span<const Unit> units, const char* kind) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc() && number >= 0 && std::isfinite(number)) {
    const std::string_view suffix(rest, static_cast<size_t>(end - rest));
    for (const Unit& unit : units) {
      if (unit.suffix != suffix || (unit.factor == 0 && number != 0)) continue;
      const double value = number * unit.factor;
      if (value <= kQuantityMax) return value;
    }
  }
  std::string units_text;
  for (const Unit& unit : units) {
    if (!unit.suffix.empty()) absl::StrAppend(&units_text, " ", std::string(unit.suffix));
  }
  return absl::InvalidArgumentError(absl::StrCat("'", std::string(text), "' is no ", kind,
                                                 ": give a number of at least 0 with one of",
                                                 units_text));
}

absl::StatusOr<int64_t> ParseWhole(std::string_view text, std::span<const Unit> units,
                                   const char* kind) {
  const auto value = Parse(text, units, kind);
  if (!value.ok()) return value.status();
  return std::llround(*value);
}

}  // namespace

absl::StatusOr<int64_t> ParseInteger(std::string_view text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || value < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(text), "' is no whole number of at least 0"));
  }
  return value;
}

absl::StatusOr<Nanos> ParseDuration(std::string_view text) {
  return ParseWhole(text, kDurations, "duration");
}

absl::StatusOr<int64_t> ParseRate(std::string_view text) {
  return ParseWhole(text, kRates, "rate");
}

absl::StatusOr<int64_t> ParseBytes(std::string_view text) {
  return ParseWhole(text, kSizes, "size");
}

absl::StatusOr<double> ParseFraction(std::string_view text) {
  const auto value = Parse(text, kFractions, "fraction");
  if (value.ok() && *value > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(text), "' is no fraction: it is more than 1 (100%)"));
  }
  return value;
}

}  // namespace longhaul::wan
