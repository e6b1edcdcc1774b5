#include "tools/lhctl/token.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tools/lhctl/render.h"

namespace longhaul {
namespace {

std::string Time(int64_t seconds) {
  return absl::FormatTime("%Y-%m-%d %H:%M", absl::FromUnixSeconds(seconds), absl::UTCTimeZone());
}

std::string Runs(const std::string& run) {
  return run == "*" ? "all runs" : absl::StrCat("run ", Printable(run));
}

// "-": there is no limit.
std::string Limit(uint32_t limit) { return limit == 0 ? "-" : absl::StrCat(limit); }

}  // namespace

std::optional<uint64_t> ParseTtl(const std::string& text) {
  constexpr uint64_t kMax = uint64_t{366000} * 86400;
  if (text.size() < 2) return std::nullopt;
  uint64_t unit = 0;
  switch (text.back()) {
    case 's':
      unit = 1;
      break;
    case 'm':
      unit = 60;
      break;
    case 'h':
      unit = 3600;
      break;
    case 'd':
      unit = 86400;
      break;
    default:
      return std::nullopt;
  }
  uint64_t count = 0;
  for (const char c : text.substr(0, text.size() - 1)) {
    if (c < '0' || c > '9') return std::nullopt;
    count = 10 * count + static_cast<uint64_t>(c - '0');
    if (count > kMax) return std::nullopt;
  }
  if (count == 0 || count > kMax / unit) return std::nullopt;
  return count * unit;
}

std::string RenderTokens(const v1::ListTokensResponse& response) {
  if (response.tokens().empty()) return "no tokens\n";
  std::vector<std::vector<std::string>> rows = {
      {"ID", "RUN", "ROLE", "STATE", "CREATED", "EXPIRES", "GROUPS", "MEMBERS", "RUNS", "LABEL"}};
  for (const v1::Token& token : response.tokens()) {
    rows.push_back({Printable(token.id()), Printable(token.run()), Printable(token.role()),
                    Printable(token.state()), Time(token.created_s()), Time(token.expires_s()),
                    Limit(token.groups()), Limit(token.members()), Limit(token.runs()),
                    token.label().empty() ? "-" : Printable(token.label())});
  }
  return RenderTable(rows);
}

std::string DescribeToken(const v1::Token& token) {
  return absl::StrCat("token ", Printable(token.id()), " for ", Runs(token.run()), ", role ",
                      Printable(token.role()), ", until ", Time(token.expires_s()),
                      " UTC; it is shown only this once\n");
}

}  // namespace longhaul
