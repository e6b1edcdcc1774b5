// Texts for people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/ids.h"
#include "base/text.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {

// Returns `text` as one line: without control characters, and not longer than an error text may be.
// The coordinator passes the reasons that peers give through here, before it writes them to the log
// or sends them to other peers.
inline std::string Clean(std::string text) {
  if (text.size() > LH_ERROR_TEXT_BYTES_MAX) {
    size_t end = LH_ERROR_TEXT_BYTES_MAX;
    // Do not cut a UTF-8 sequence.
    while (end > 0 && (static_cast<uint8_t>(text[end]) & 0xc0) == 0x80) --end;
    text.resize(end);
  }
  for (char& c : text) {
    if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return text;
}

// The number as 16 hexadecimal digits.
inline std::string HexText(uint64_t number) {
  std::string text(16, '0');
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = "0123456789abcdef"[number >> (60 - 4 * i) & 0xf];
  }
  return text;
}

inline constexpr size_t kNamesShownMax = 8;

// "m1,m4,m9". With more than `max` ids: the first `max`, and how many more there are.
template <class Ids>
std::string List(const Ids& ids, const char* separator = ",", size_t max = SIZE_MAX) {
  std::string text;
  size_t count = 0;
  for (const auto& id : ids) {
    if (count++ >= max) continue;
    if (!text.empty()) text += separator;
    text += ToString(id);
  }
  if (count > max) text += " and " + std::to_string(count - max) + " more";
  return text;
}

inline std::string LinkText(PeerId from, PeerId to, const std::string& reason) {
  return ToString(from) + " lost its link to " + ToString(to) + ": " + reason;
}
inline std::string Unreached(PeerId from, PeerId to, const std::string& reason) {
  return ToString(from) + " cannot reach " + ToString(to) + ": " + reason;
}

}  // namespace longhaul::coordinator
