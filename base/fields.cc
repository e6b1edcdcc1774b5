#include "base/fields.h"

#include <algorithm>

#include "base/text.h"

namespace longhaul {
namespace {

constexpr size_t kSeenMax = 80;  // an error shows at most this many bytes of a foreign value

std::string Bounds(size_t min, size_t max) {
  return std::to_string(min) + " to " + std::to_string(max);
}

std::string Quoted(const std::string& text) { return "\"" + text + "\""; }

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

bool IsPort(std::string_view text) {
  if (text.empty() || text.size() > 5) return false;
  uint32_t number = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    number = number * 10 + static_cast<uint32_t>(c - '0');
  }
  return number >= 1 && number <= 65535;
}

bool IsEndpoint(std::string_view text, size_t max) {
  if (text.size() > max) return false;
  for (const char c : text) {
    if (c <= ' ' || c > '~') return false;
  }
  const size_t colon = text.rfind(':');
  return colon != std::string_view::npos && colon != 0 && IsPort(text.substr(colon + 1));
}

}  // namespace

std::string CleanText(const std::string& text, size_t bytes_max) {
  std::string out;
  for (std::string_view rest = text; !rest.empty();) {
    const Character first = FirstCharacter(rest);
    // Lines and tabs are for whoever shows the text.
    const bool kept = first.shown || (first.bytes == 1 && rest.front() != 0x7f);
    if (out.size() + (kept ? first.bytes : 1) > bytes_max) break;
    if (kept) {
      out.append(rest.substr(0, first.bytes));
    } else {
      out += '?';
    }
    rest.remove_prefix(std::max<size_t>(first.bytes, 1));
  }
  return out;
}

std::string Refusal(std::string_view field, const std::string& seen, const std::string& wanted) {
  return std::string(field) + " is " + CleanText(seen, kSeenMax) + ", not " + wanted;
}

namespace fields_internal {

std::string NumberFault(uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return "";
  return Refusal("", std::to_string(value),
                 min == 0 ? "at most " + std::to_string(max)
                          : std::to_string(min) + " to " + std::to_string(max));
}

std::string NeededFault(uint64_t value) { return value == 0 ? Refusal("", "0", "an id") : ""; }

std::string NameFault(const std::string& value, size_t min, size_t max) {
  bool good = value.size() >= min && value.size() <= max;
  for (size_t i = 0; good && i < value.size(); ++i) good = IsNameByte(value[i]);
  if (good) return "";
  return Refusal("", Quoted(value), Bounds(min, max) + " bytes of [A-Za-z0-9._-]");
}

std::string BytesFault(const std::string& value, size_t min, size_t max) {
  if (value.size() >= min && value.size() <= max) return "";
  return Refusal("", std::to_string(value.size()) + " bytes", Bounds(min, max));
}

std::string EndpointFault(const std::string& value, size_t max) {
  if (IsEndpoint(value, max)) return "";
  return Refusal("", Quoted(value), "host:port of at most " + std::to_string(max) + " bytes");
}

std::string CountFault(size_t count, size_t min, size_t max) {
  if (count >= min && count <= max) return "";
  return Refusal("", std::to_string(count) + " long", Bounds(min, max));
}

}  // namespace fields_internal
}  // namespace longhaul
