#include "base/fields_json.h"

namespace longhaul::fields_internal {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

void AppendQuoted(const std::string& text, std::string* out) {
  *out += '"';
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (c == '"' || c == '\\') *out += '\\';
    if (byte >= 0x20 && byte != 0x7f) {
      *out += c;
      continue;
    }
    *out += "\\u00";
    *out += kDigits[byte >> 4];
    *out += kDigits[byte & 15];
  }
  *out += '"';
}

std::string ToHex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    text += kDigits[static_cast<uint8_t>(c) >> 4];
    text += kDigits[static_cast<uint8_t>(c) & 15];
  }
  return text;
}

bool FromHex(const std::string& text, std::string* bytes) {
  bytes->clear();
  if (text.size() % 2 != 0) return false;
  for (size_t i = 0; i < text.size(); i += 2) {
    const int high = HexValue(text[i]);
    const int low = HexValue(text[i + 1]);
    if (high < 0 || low < 0) return false;
    bytes->push_back(static_cast<char>(high * 16 + low));
  }
  return true;
}

void JsonReader::Fail(const std::string& what) {
  if (ok()) fault_ = what + " at byte " + std::to_string(at_) + " of its record";
}

void JsonReader::SkipSpace() {
  while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
}

bool JsonReader::Take(char c) {
  SkipSpace();
  if (!ok() || at_ == text_.size() || text_[at_] != c) return false;
  ++at_;
  return true;
}

void JsonReader::Expect(char c) {
  if (!Take(c)) Fail(std::string("no '") + c + "'");
}

void JsonReader::Word(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) return Fail("no " + std::string(word));
  at_ += word.size();
}

std::string JsonReader::String() {
  std::string out;
  Expect('"');
  while (ok()) {
    if (at_ == text_.size()) {
      Fail("no end of a string");
    } else if (text_[at_] == '"') {
      ++at_;
      break;
    } else if (text_[at_] != '\\') {
      out += text_[at_++];
    } else if (text_.substr(at_, 4) == "\\u00" && at_ + 6 <= text_.size()) {
      std::string byte;
      if (!FromHex(std::string(text_.substr(at_ + 4, 2)), &byte)) Fail("no character");
      at_ += 6;
      out += byte;
    } else if (at_ + 2 <= text_.size() && (text_[at_ + 1] == '"' || text_[at_ + 1] == '\\')) {
      out += text_[at_ + 1];
      at_ += 2;
    } else {
      Fail("no character");
    }
  }
  return out;
}

uint64_t JsonReader::Number(uint64_t max) {
  SkipSpace();
  uint64_t number = 0;
  const size_t from = at_;
  for (; ok() && at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
    const auto digit = static_cast<uint64_t>(text_[at_] - '0');
    if (number > (max - digit) / 10) Fail("too large a number");
    number = number * 10 + digit;
  }
  if (at_ == from) Fail("no number");
  return number;
}

bool JsonReader::Bool() {
  SkipSpace();
  const bool value = text_.substr(at_, 1) == "t";
  Word(value ? "true" : "false");
  return value;
}

void JsonReader::End() {
  SkipSpace();
  if (at_ != text_.size()) Fail("more than one value");
}

}  // namespace longhaul::fields_internal
