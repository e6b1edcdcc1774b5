#include "base/text.h"

#include <cstdint>

namespace longhaul {
namespace {

bool Shown(uint32_t code) {
  const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  const bool line = code == 0x2028 || code == 0x2029;
  const bool direction = code == 0x61c || code == 0x200e || code == 0x200f ||
                         (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  return !control && !line && !direction;
}

}  // namespace

Character FirstCharacter(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  size_t length = 0;
  uint32_t code = 0;
  if (first < 0x80) {
    length = 1;
    code = first;
  } else if (first >= 0xc2 && first < 0xe0) {
    length = 2;
    code = first & 0x1f;
  } else if (first >= 0xe0 && first < 0xf0) {
    length = 3;
    code = first & 0x0f;
  } else if (first >= 0xf0 && first < 0xf5) {
    length = 4;
    code = first & 0x07;
  } else {
    return {};
  }
  if (length > text.size()) return {};
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  // Refuses overlong forms, surrogates, and numbers beyond Unicode.
  if (length == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) return {};
  if (length == 4 && (code < 0x10000 || code > 0x10ffff)) return {};
  return {length, Shown(code)};
}

std::string LogField(std::string_view key, std::string_view value) {
  bool quote = value.empty();
  for (const char c : value) {
    quote |= c == ' ' || c == '"' || c == '\\' || static_cast<uint8_t>(c) < 0x20;
  }
  std::string out = " " + std::string(key) + "=";
  if (!quote) return out.append(value);
  out += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

}  // namespace longhaul
