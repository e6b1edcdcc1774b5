// Folds a sequence of values into 64 bits. Equal sequences give equal digests. The digest is not
// cryptographic: it hides nothing.
#pragma once

#include <bit>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"

namespace longhaul {

// Add() takes:
// - numbers, enums, strings, ids and Ticks
// - structs that name their fields (base/fields.h); fields with rule::Secret and rule::Aside are
//   left out
// - classes that have a member AddTo(Digester*) const, or a function AddTo(const T&, Digester*)
// - vectors, deques, sets, maps, pairs, optionals and variants of these
class Digester {
 public:
  Digester& Add(uint64_t value) {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15u;
    state_ ^= state_ >> 29;
    return *this;
  }
  template <class T>
  requires std::is_integral_v<T> || std::is_enum_v<T> Digester& Add(T value) {
    return Add(static_cast<uint64_t>(value));
  }
  Digester& Add(const std::string& text) {
    Add(text.size());
    for (unsigned char byte : text) state_ = (state_ ^ byte) * 0x100000001b3u;
    return *this;
  }
  Digester& Add(double value) { return Add(std::bit_cast<uint64_t>(value)); }
  Digester& Add(Tick tick) { return Add(static_cast<uint64_t>(tick.us)); }
  template <class Kind>
  Digester& Add(Id<Kind> id) {
    return Add(id.value());
  }
  template <class T>
  Digester& Add(const std::optional<T>& value) {
    Add(value.has_value());
    return value ? Add(*value) : *this;
  }
  template <class T>
  Digester& Add(const std::vector<T>& list) {
    return AddEach(list);
  }
  template <class T>
  Digester& Add(const std::deque<T>& list) {
    return AddEach(list);
  }
  template <class T>
  Digester& Add(const std::set<T>& set) {
    return AddEach(set);
  }
  template <class K, class V>
  Digester& Add(const std::map<K, V>& map) {
    return AddEach(map);
  }
  template <class K, class V>
  Digester& Add(const std::multimap<K, V>& map) {
    return AddEach(map);
  }
  template <class... T>
  Digester& Add(const std::variant<T...>& value) {
    Add(value.index());
    return std::visit([this](const auto& one) -> Digester& { return Add(one); }, value);
  }
  template <class A, class B>
  Digester& Add(const std::pair<A, B>& pair) {
    return Add(pair.first).Add(pair.second);
  }
  template <class T>
  requires requires(const T& value, Digester* digest) { value.AddTo(digest); }
  Digester& Add(const T& value) {
    value.AddTo(this);
    return *this;
  }
  template <class T>
  requires requires(const T& value, Digester* digest) { AddTo(value, digest); }
  Digester& Add(const T& value) {
    AddTo(value, this);
    return *this;
  }
  template <HasFields T>
  Digester& Add(const T& value) {
    ForEachField<T>([&](const auto& field) {
      using Rule = std::decay_t<decltype(field.rule)>;
      if constexpr (!std::is_same_v<Rule, rule::Secret> && !std::is_same_v<Rule, rule::Aside>) {
        Add(value.*field.member);
      }
    });
    return *this;
  }
  uint64_t value() const { return state_; }

 private:
  template <class List>
  Digester& AddEach(const List& list) {
    Add(list.size());
    for (const auto& element : list) Add(element);
    return *this;
  }

  uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace longhaul
