// A struct for a message or record lists its fields once, next to its members:
//
//   struct Join {
//     uint64_t request = 0;
//     std::string name;
//     LH_FIELDS(Join, LH_FIELD(request, rule::Needed{}), LH_FIELD(name, rule::Name{0, 64}))
//   };
//
// Everything that must know the fields uses this list:
// - FaultIn() below, which checks a value against the rules
// - proto/control/convert.cc, which converts to and from the protobuf message with the same names
// - base/fields_json.h, the text in stores and logs
// - base/digest.h, digests
// The macro also defines ==. List every field, in the order of their declaration: the compiler
// refuses a list in which one is missing. (Of a class with private members it compares sizes only,
// so a small member may hide beside another one.)
//
// The internal state of a core lists its fields as well: digests derive from the list, and copies
// are the compiler's. LH_STATE is the list of a class that has no ==.
//
// A struct may also have
//   std::string Fault() const;  checks fields against each other; returns the fault in the style of
//                               FaultIn(), or ""
//   auto Key() const;           a list of such structs may hold each key only once
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace longhaul {

template <class Kind>
class Id;

// Rules: what a field may hold, beyond what its type says. An enum is always checked against its
// names. The word before the colon says which type of field a rule is for.
namespace rule {

struct Any {};
// Id or number: not 0.
struct Needed {};
// Number: from min to max.
struct Range {
  uint64_t min;
  uint64_t max;
};
// Number for people and histograms: a larger value is cut to max, not refused.
struct Capped {
  uint64_t max;
};
// String: min to max characters of [A-Za-z0-9._-].
struct Name {
  size_t min;
  size_t max;
};
// String for people: cut to max bytes and made valid UTF-8 (CleanText()), never refused.
struct Text {
  size_t max;
};
// String of binary bytes: min to max of them.
struct Bytes {
  size_t min;
  size_t max;
};
// String of secret bytes: min to max of them. The bytes appear in no log and no digest.
struct Secret {
  size_t min;
  size_t max;
};
// String: host:port, at most max bytes.
struct Endpoint {
  size_t max;
};
// Vector: min to max elements, and the rule `element` for each of them. Ids must differ from each
// other and must not be 0. Keys (Key()) must differ from each other, too.
template <class Element = Any>
struct List {
  size_t min;
  size_t max;
  Element element = {};
};
List(size_t, size_t)->List<Any>;
template <class Element>
List(size_t, size_t, Element) -> List<Element>;
// Vector of structs in a record: a store keeps each element as a row of its own.
struct Rows {};
// Struct: its fields are merged into the outer struct, in the protobuf message and in texts.
struct Flat {};
// Internal state that follows from other fields, or that decides nothing: it is in no digest.
struct Aside {};

}  // namespace rule

// The names of the values of an enum. The values are consecutive and begin at `first`. Define next
// to the enum:
//   constexpr auto NamesOf(Fate) { return EnumNames{1, {"commit", "redo", "abort"}}; }
template <size_t kCount>
struct EnumNames {
  constexpr EnumNames(uint64_t first_value, const char* const (&list)[kCount])
      : first(first_value) {
    for (size_t i = 0; i < kCount; ++i) names[i] = list[i];
  }
  uint64_t first;
  const char* names[kCount] = {};

  uint64_t last() const { return first + kCount - 1; }
  bool Has(uint64_t value) const { return value >= first && value <= last(); }
};

template <class T>
concept HasNames = std::is_enum_v<T> && requires(T value) {
  NamesOf(value);
};

// The name of an enum value, such as "evicted". "?" for a number that is not a value of the enum.
template <HasNames T>
const char* NameOf(T value) {
  const auto names = NamesOf(T());
  const auto number = static_cast<uint64_t>(value);
  return names.Has(number) ? names.names[number - names.first] : "?";
}

// How to access a field of a protobuf message by its name: get, set, get mutable, or ask whether it
// is set. kPlain is for a C struct: it gives a pointer to the member of that name, or nullptr if
// the struct has no such member.
enum class ProtoAsk { kGet, kSet, kMutable, kHas, kPlain };
template <ProtoAsk kAsk>
using Asking = std::integral_constant<ProtoAsk, kAsk>;

template <class Struct, class T, class Rule, class Proto>
struct Field {
  constexpr Field(const char* field, T Struct::*of, Rule holds, Proto ask)
      : name(field), member(of), rule(holds), proto(ask) {}
  const char* name;
  T Struct::*member;
  Rule rule;
  Proto proto;  // accesses the field in a message: proto(Asking<...>(), message, value...)
};

namespace fields_internal {
constexpr rule::Any RuleOr() { return {}; }
template <class Rule>
constexpr Rule RuleOr(Rule rule) {
  return rule;
}

// Whether the list `Fields` has all members of the class, in order.
template <class Self, class Fields>
struct Lists;
template <class Self, class... T, class... Rule, class... Proto>
struct Lists<Self, std::tuple<Field<Self, T, Rule, Proto>...>> {
  static constexpr bool All() {
    if constexpr (std::is_aggregate_v<Self>) {
      constexpr bool fits = requires { Self{std::declval<T>()...}; };
      constexpr bool has_more = requires { Self{std::declval<T>()..., {}}; };
      return fits && !has_more;
    } else {
      size_t end = 0;
      const auto place = [&end](size_t size, size_t align) {
        end = (end + align - 1) / align * align + size;
      };
      (place(sizeof(T), alignof(T)), ...);  // NOLINT(bugprone-sizeof-expression): T is a field
      place(0, alignof(Self));
      return end == sizeof(Self);
    }
  }
};
}  // namespace fields_internal

#define LH_PROTO(field)                                                            \
  [](auto ask, auto& message, auto&&... value) -> decltype(auto) {                 \
    if constexpr (decltype(ask)::value == ::longhaul::ProtoAsk::kGet) {            \
      return (message.field());                                                    \
    } else if constexpr (decltype(ask)::value == ::longhaul::ProtoAsk::kSet) {     \
      message.set_##field(value...);                                               \
    } else if constexpr (decltype(ask)::value == ::longhaul::ProtoAsk::kMutable) { \
      return message.mutable_##field();                                            \
    } else if constexpr (decltype(ask)::value == ::longhaul::ProtoAsk::kPlain) {   \
      if constexpr (requires { message.field; }) {                                 \
        return &message.field;                                                     \
      } else {                                                                     \
        return nullptr;                                                            \
      }                                                                            \
    } else {                                                                       \
      return message.has_##field();                                                \
    }                                                                              \
  }
// One field in LH_FIELDS. A second argument gives its rule; without one the rule is rule::Any.
#define LH_FIELD(field, ...)                                                                \
  ::longhaul::Field(#field, &Self::field, ::longhaul::fields_internal::RuleOr(__VA_ARGS__), \
                    LH_PROTO(field))
#define LH_STATE(Struct, ...)                                                      \
  static constexpr auto Fields() {                                                 \
    using Self = Struct;                                                           \
    constexpr auto fields = std::tuple(__VA_ARGS__);                               \
    using Listed = std::remove_const_t<decltype(fields)>;                          \
    static_assert(::longhaul::fields_internal::Lists<Self, Listed>::All(),         \
                  "a field is missing from the list, or stands in another place"); \
    return fields;                                                                 \
  }                                                                                \
  static_assert(true)
#define LH_FIELDS(Struct, ...)   \
  LH_STATE(Struct, __VA_ARGS__); \
  friend bool operator==(const Struct&, const Struct&) = default
// LH_FIELDS for a struct that is an alternative of a std::variant. Defines its name in texts, too.
#define LH_NAMED(Struct, ...)                   \
  static constexpr const char* kName = #Struct; \
  LH_FIELDS(Struct, __VA_ARGS__)

// LH_NAMED for a message. `field` is its name in the oneof of the protobuf envelope.
#define LH_MESSAGE(Struct, field, ...)                     \
  static constexpr auto Kind() { return LH_PROTO(field); } \
  LH_NAMED(Struct, __VA_ARGS__)

template <class T>
concept HasFields = requires {
  T::Fields();
};

// Calls visit(field) for each Field of T, in order.
template <HasFields T, class Visit>
constexpr void ForEachField(Visit&& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, T::Fields());
}

namespace fields_internal {
template <class T>
struct IsIdType : std::false_type {};
template <class Kind>
struct IsIdType<Id<Kind>> : std::true_type {};
template <class T>
struct IsVectorType : std::false_type {};
template <class T>
struct IsVectorType<std::vector<T>> : std::true_type {};
template <class T>
struct IsOptionalType : std::false_type {};
template <class T>
struct IsOptionalType<std::optional<T>> : std::true_type {};
}  // namespace fields_internal

template <class T>
inline constexpr bool kIsId = fields_internal::IsIdType<T>::value;
template <class T>
inline constexpr bool kIsVector = fields_internal::IsVectorType<T>::value;
template <class T>
inline constexpr bool kIsOptional = fields_internal::IsOptionalType<T>::value;

// ------------------------------------------------------------------------------ checks

// Replaces by '?' what is not UTF-8, or may not be shown (base/text.h; but U+0000 to U+001F stay),
// and cuts the text to at most `bytes_max` bytes, at the border of a character. Every text for
// people passes through here when it is sent and when it is received.
std::string CleanText(const std::string& text, size_t bytes_max);

// Builds texts of the form "field is seen, not wanted".
std::string Refusal(std::string_view field, const std::string& seen, const std::string& wanted);

namespace fields_internal {

// Each function below checks one value. Returns the fault without the name of the field, such as
// " is 0, not an id", or "".
std::string NumberFault(uint64_t value, uint64_t min, uint64_t max);
std::string NeededFault(uint64_t value);
std::string NameFault(const std::string& value, size_t min, size_t max);
std::string BytesFault(const std::string& value, size_t min, size_t max);
std::string EndpointFault(const std::string& value, size_t max);
std::string CountFault(size_t count, size_t min, size_t max);

template <class T>
std::string KeyText(const T& key) {
  return ToString(key);
}
template <class A, class B>
std::string KeyText(const std::pair<A, B>& key) {
  return ToString(key.first) + "-" + ToString(key.second);
}

}  // namespace fields_internal

template <HasFields T>
std::string FaultIn(const T& value);

namespace fields_internal {

template <class T, class Rule>
std::string ValueFault(const T& value, const Rule& rule);

template <class T>
std::string TwiceFault(const std::vector<T>& list) {
  const auto key_of = [](const T& element) {
    if constexpr (HasFields<T>) {
      return element.Key();
    } else {
      return element;
    }
  };
  std::set<decltype(key_of(list[0]))> seen;
  for (const T& element : list) {
    if (!seen.insert(key_of(element)).second) {
      return " has " + KeyText(key_of(element)) + " twice";
    }
  }
  return "";
}

template <class T, class Element>
std::string ListFault(const std::vector<T>& list, const rule::List<Element>& rule) {
  std::string fault = CountFault(list.size(), rule.min, rule.max);
  for (size_t i = 0; fault.empty() && i < list.size(); ++i) {
    if constexpr (kIsId<T>) {
      fault = NeededFault(list[i].value());
    } else {
      fault = ValueFault(list[i], rule.element);
    }
    if (!fault.empty()) fault.insert(0, "[" + std::to_string(i) + "]");
  }
  if constexpr (kIsId<T> || requires(const T& element) { element.Key(); }) {
    if (fault.empty()) fault = TwiceFault(list);
  }
  return fault;
}

template <class T, class Rule>
std::string ValueFault(const T& value, const Rule& rule) {
  if constexpr (kIsOptional<T>) {
    return value ? ValueFault(*value, rule) : "";
  } else if constexpr (HasFields<T>) {
    std::string fault = FaultIn(value);
    if (!fault.empty() && !std::is_same_v<Rule, rule::Flat>) fault.insert(0, 1, '.');
    return fault;
  } else if constexpr (HasNames<T>) {
    const auto names = NamesOf(T());
    return NumberFault(static_cast<uint64_t>(value), names.first, names.last());
  } else if constexpr (std::is_same_v<Rule, rule::Needed>) {
    if constexpr (kIsId<T>) {
      return NeededFault(value.value());
    } else {
      return NeededFault(value);
    }
  } else if constexpr (std::is_same_v<Rule, rule::Range>) {
    return NumberFault(value, rule.min, rule.max);
  } else if constexpr (std::is_same_v<Rule, rule::Name>) {
    return NameFault(value, rule.min, rule.max);
  } else if constexpr (std::is_same_v<Rule, rule::Bytes> || std::is_same_v<Rule, rule::Secret>) {
    return BytesFault(value, rule.min, rule.max);
  } else if constexpr (std::is_same_v<Rule, rule::Endpoint>) {
    return EndpointFault(value, rule.max);
  } else if constexpr (kIsVector<T>) {
    static_assert(!std::is_same_v<Rule, rule::Any>, "a list needs bounds: rule::List");
    if constexpr (std::is_same_v<Rule, rule::Rows>) {
      return ListFault(value, rule::List<>{0, SIZE_MAX});
    } else {
      return ListFault(value, rule);
    }
  } else {
    return "";
  }
}

}  // namespace fields_internal

// Checks a value against its rules. Returns the first fault, with the path to the field and what
// was seen there, such as "ops[3].ordinal is 0, not an id". Returns "" if there is none. Checks the
// rules of the fields first, then Fault() of the struct.
template <HasFields T>
std::string FaultIn(const T& value) {
  std::string fault;
  ForEachField<T>([&](const auto& field) {
    if (!fault.empty()) return;
    fault = fields_internal::ValueFault(value.*field.member, field.rule);
    using Rule = std::decay_t<decltype(field.rule)>;
    if (!fault.empty() && !std::is_same_v<Rule, rule::Flat>) fault.insert(0, field.name);
  });
  if constexpr (requires { value.Fault(); }) {
    if (fault.empty()) fault = value.Fault();
  }
  return fault;
}

}  // namespace longhaul
