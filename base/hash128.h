// A 128-bit digest.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "base/fields.h"

namespace longhaul {

struct Hash128 {
  uint64_t high = 0;
  uint64_t low = 0;
  friend auto operator<=>(const Hash128&, const Hash128&) = default;
  LH_FIELDS(Hash128, LH_FIELD(high), LH_FIELD(low));
};

// Returns 32 lower-case hexadecimal digits.
inline std::string ToString(const Hash128& hash) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(32, '0');
  for (int i = 0; i < 16; ++i) {
    text[15 - i] = kDigits[(hash.high >> (4 * i)) & 15];
    text[31 - i] = kDigits[(hash.low >> (4 * i)) & 15];
  }
  return text;
}

// Parses what ToString() writes. Returns false for any other text, and leaves *hash unchanged.
inline bool ParseHash128(const std::string& text, Hash128* hash) {
  if (text.size() != 32) return false;
  uint64_t words[2] = {};
  for (int i = 0; i < 32; ++i) {
    const char c = text[i];
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return false;
    words[i / 16] = words[i / 16] << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  *hash = {words[0], words[1]};
  return true;
}

}  // namespace longhaul
