#include "base/fields.h"

namespace longhaul {
namespace {

constexpr size_t kSeenMax = 80;  // an error shows at most this many bytes of a foreign value

// Returns the bytes of the UTF-8 character at `at`; 0: there is no valid one.
size_t CharacterBytes(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(at);
  size_t length = 0;
  uint32_t code = 0;
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) {
    length = 2;
    code = first & 0x1f;
  } else if (first >= 0xe0 && first < 0xf0) {
    length = 3;
    code = first & 0x0f;
  } else if (first >= 0xf0 && first < 0xf5) {
    length = 4;
    code = first & 0x07;
  } else {
    return 0;
  }
  if (at + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(at + i) & 0x3f);
  }
  // Refuses overlong forms, surrogates, and numbers beyond Unicode.
  if (length == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) return 0;
  if (length == 4 && (code < 0x10000 || code > 0x10ffff)) return 0;
  return length;
}

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
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = CharacterBytes(text, at);
    if (out.size() + (bytes == 0 ? 1 : bytes) > bytes_max) break;
    if (bytes == 0) {
      out += '?';
      ++at;
      continue;
    }
    out.append(text, at, bytes);
    at += bytes;
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
