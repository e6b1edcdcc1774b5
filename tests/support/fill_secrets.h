// For tests: puts a marker into all secrets of a value, so that a test can look for the marker in
// logs and recordings. It finds secrets by the lists of fields (base/fields.h), so a new
// message needs no change here.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/fields_json.h"

namespace longhaul {

inline const std::string kSecretMarker = "SeCrEt-MaRkEr\x01";

// Sets each field with rule::Secret, at any depth, to as many markers as fit, and returns how many
// fields there were. Empty lists and optionals get one element first, if it has secrets.
template <class T>
int FillSecrets(T* value) {
  if constexpr (!fields_internal::HasSecrets<T>()) {
    return 0;
  } else if constexpr (kIsOptional<T>) {
    return FillSecrets(&value->emplace());
  } else if constexpr (kIsVector<T>) {
    if (value->empty()) value->emplace_back();
    int count = 0;
    for (auto& element : *value) count += FillSecrets(&element);
    return count;
  } else if constexpr (fields_internal::kIsMap<T>) {
    if (value->empty()) (*value)[typename T::key_type()];
    int count = 0;
    for (auto& [key, element] : *value) count += FillSecrets(&element);
    return count;
  } else if constexpr (fields_internal::kIsVariant<T>) {
    return std::visit([](auto& kind) { return FillSecrets(&kind); }, *value);
  } else {
    int count = 0;
    ForEachField<T>([&](const auto& field) {
      auto& member = value->*field.member;
      if constexpr (std::is_same_v<std::decay_t<decltype(field.rule)>, rule::Secret>) {
        member.clear();
        while (member.size() + kSecretMarker.size() <= field.rule.max) member += kSecretMarker;
        member.resize(std::max(member.size(), field.rule.min), 'x');
        ++count;
      } else {
        count += FillSecrets(&member);
      }
    });
    return count;
  }
}

// Whether a text or a file shows the marker, as it is or in hexadecimal digits.
inline bool ShowsSecret(const std::string& text) {
  return text.find(kSecretMarker) != std::string::npos ||
         text.find(fields_internal::ToHex(kSecretMarker)) != std::string::npos;
}

// Calls visit(value) with a value of each kind of the variant, with its secrets filled. Returns how
// many secrets there were in all.
template <class Variant, class Visit>
int ForEachKindWithSecrets(Visit visit) {
  const auto one = [&]<class Kind>(const Kind*) {
    Kind kind{};
    const int count = FillSecrets(&kind);
    visit(kind);
    return count;
  };
  return [&]<class... Kinds>(const std::variant<Kinds...>*) {
    return (one(static_cast<const Kinds*>(nullptr)) + ...);
  }(static_cast<const Variant*>(nullptr));
}

}  // namespace longhaul
