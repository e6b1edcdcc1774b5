// For fuzz targets: reads choices and values from the bytes of an input.
//
// Small numbers are the most likely ones, so that ids often name something that exists. When the
// bytes are used up, every choice is 0 and every list is empty. Draw() fills any struct that lists
// its fields (base/fields.h). The value may break the rules of its fields, so the caller asks
// FaultIn() if a parser would have refused such a value. Plain value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/fields_json.h"
#include "base/ids.h"

namespace longhaul {

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : rest_(data, size) {}

  bool empty() const { return rest_.empty(); }
  size_t size() const { return rest_.size(); }

  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const uint8_t byte = rest_[0];
    rest_ = rest_.subspan(1);
    return byte;
  }
  // A number in [0, n).
  size_t Below(size_t n) {
    const size_t value = n > 256 ? size_t{Byte()} << 8 | Byte() : Byte();
    return n == 0 ? 0 : value % n;
  }
  bool Bool() { return (Byte() & 1) != 0; }
  // Mostly below 8. Some are at the limits of types.
  uint64_t Number() {
    const uint8_t byte = Byte();
    if (byte < 0xe0) return byte % 8;
    if (byte < 0xf0) return Byte();
    if (byte < 0xf8) return uint64_t{Byte()} << (8 * (byte % 8));
    static constexpr uint64_t kLimits[] = {UINT64_MAX,        UINT64_MAX - 1,    uint64_t{1} << 63,
                                           INT64_MAX,         uint64_t{1} << 62, UINT32_MAX,
                                           uint64_t{1} << 32, uint64_t{1} << 31};
    return kLimits[byte % 8];
  }
  std::string Bytes(size_t max) {
    const size_t n = std::min(Below(max + 1), rest_.size());
    const auto* data = reinterpret_cast<const char*>(rest_.data());
    std::string bytes(data, n);
    rest_ = rest_.subspan(n);
    return bytes;
  }
  std::string Rest() {
    std::string bytes(rest_.begin(), rest_.end());
    rest_ = {};
    return bytes;
  }

  template <class T>
  T Draw() {
    T value{};
    Fill(&value, rule::Any{});
    return value;
  }
  // A value of any kind of the variant.
  template <class Variant>
  Variant DrawKind() {
    return DrawKind<Variant>(Below(std::variant_size_v<Variant>));
  }

 private:
  template <class Variant, size_t kKind = 0>
  Variant DrawKind(size_t kind) {
    if constexpr (kKind + 1 < std::variant_size_v<Variant>) {
      if (kind != kKind) return DrawKind<Variant, kKind + 1>(kind);
    }
    return Draw<std::variant_alternative_t<kKind, Variant>>();
  }

  template <class T, class Rule>
  void Fill(T* value, const Rule& rule) {
    if constexpr (kIsOptional<T>) {
      if (Bool()) Fill(&value->emplace(), rule);
    } else if constexpr (kIsId<T>) {
      *value = T(Number());
    } else if constexpr (HasNames<T>) {
      const auto names = NamesOf(T());
      *value = static_cast<T>(names.first + Below(names.last() - names.first + 1));
    } else if constexpr (std::is_same_v<T, bool>) {
      *value = Bool();
    } else if constexpr (std::is_integral_v<T>) {
      *value = static_cast<T>(Number());
    } else if constexpr (std::is_same_v<T, std::string>) {
      FillText(value, rule);
    } else if constexpr (kIsVector<T>) {
      value->resize(Below(4));
      for (auto& element : *value) {
        if constexpr (requires { rule.element; }) {
          Fill(&element, rule.element);
        } else {
          Fill(&element, rule::Any{});
        }
      }
    } else if constexpr (std::is_same_v<T, GroupKey>) {
      *value = {Below(4) == 3 ? "other" : "run", static_cast<uint32_t>(Below(3))};
    } else {
      ForEachField<T>([&](const auto& field) { Fill(&(value->*field.member), field.rule); });
    }
  }
  template <class Rule>
  void FillText(std::string* value, const Rule& rule) {
    if constexpr (std::is_same_v<Rule, rule::Endpoint>) {
      *value = "h" + std::to_string(Below(4)) + ":1";
    } else if constexpr (std::is_same_v<Rule, rule::Bytes> || std::is_same_v<Rule, rule::Secret>) {
      const uint8_t byte = Byte();
      value->assign((byte & 1) != 0 ? rule.max : rule.min, static_cast<char>(byte));
    } else if constexpr (std::is_same_v<Rule, rule::Name>) {
      value->assign(Below(2), static_cast<char>('a' + Below(3)));
    } else {
      *value = Bytes(4);
    }
  }

  std::span<const uint8_t> rest_;
};

}  // namespace longhaul
