// Structs that name their fields (base/fields.h) as JSON text, and back.
//
// Stores keep these texts. People read them, too: operators with sqlite3, and in logs and test
// failures.
//
//   id               as in logs: "p1f", "m3"; an epoch is a number
//   enum             its name
//   bytes, Hash128   hexadecimal digits
//   number           exact, up to 64 bits
//   map              a list of its values; each value knows its key, as Key()
//   variant          an object with one field, named after the struct:
//                    {"EvictMember":{"member":"m3"}}
//
// FromJson() reads what ToJson() writes, with fields in any order and with white space. A missing
// field keeps its default, so a newer release reads what an older one wrote. An unknown field is
// refused, because only a newer release can have written it.
#pragma once

#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/fields.h"
#include "base/hash128.h"
#include "base/ids.h"

namespace longhaul {

// Whether ToJson() writes the fields that have these rules.
struct JsonParts {
  bool secrets = true;  // rule::Secret
  bool rows = true;     // rule::Rows
};

template <class T>
std::string ToJson(const T& value, JsonParts parts);
// For values without secrets. If a value may have a secret, the caller has to say whether the text
// shows it: most texts end in a log or on a page.
template <class T>
std::string ToJson(const T& value);

// Fills *value, which must be newly constructed. Returns what is wrong with the text and where, or
// "".
template <class T>
std::string FromJson(std::string_view text, T* value);

namespace fields_internal {

void AppendQuoted(const std::string& text, std::string* out);
std::string ToHex(const std::string& bytes);
bool FromHex(const std::string& text, std::string* bytes);

// Reads one text from front to end. After the first fault it reads nothing more, so a caller can
// read everything first and ask for the fault once.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // Skips `c` if it is the next character. Returns whether it was.
  bool Take(char c);
  // Each of these reads what must come next. Anything else is a fault.
  void Expect(char c);
  void Word(std::string_view word);
  std::string String();
  uint64_t Number(uint64_t max);
  bool Bool();
  void End();

  void Fail(const std::string& what);
  bool ok() const { return fault_.empty(); }
  const std::string& fault() const { return fault_; }

 private:
  void SkipSpace();

  const std::string_view text_;
  size_t at_ = 0;
  std::string fault_;
};

// ------------------------------------------------------------------------------ writing

template <class T>
inline constexpr bool kIsVariant = false;
template <class... Kinds>
inline constexpr bool kIsVariant<std::variant<Kinds...>> = true;
template <class T>
inline constexpr bool kIsMap = false;
template <class K, class V>
inline constexpr bool kIsMap<std::map<K, V>> = true;

template <class Rule>
inline constexpr bool kIsHex =
    std::is_same_v<Rule, rule::Bytes> || std::is_same_v<Rule, rule::Secret>;

template <class T, class Rule>
void AppendJson(const T& value, const Rule& rule, JsonParts parts, std::string* out);

// Appends the fields of `value`. `*first` says whether the object is still empty: a comma goes
// before each field except the first of the object.
template <HasFields T>
void AppendFields(const T& value, JsonParts parts, bool* first, std::string* out) {
  ForEachField<T>([&](const auto& field) {
    const auto& member = value.*field.member;
    using Member = std::decay_t<decltype(member)>;
    using Rule = std::decay_t<decltype(field.rule)>;
    if constexpr (std::is_same_v<Rule, rule::Flat>) {
      AppendFields(member, parts, first, out);
    } else {
      if (std::is_same_v<Rule, rule::Secret> && !parts.secrets) return;
      if (std::is_same_v<Rule, rule::Rows> && !parts.rows) return;
      if constexpr (kIsOptional<Member>) {
        if (!member) return;
      }
      if (!*first) *out += ',';
      *first = false;
      AppendQuoted(field.name, out);
      *out += ':';
      AppendJson(member, field.rule, parts, out);
    }
  });
}

template <class T, class Rule>
void AppendJson(const T& value, const Rule& rule, JsonParts parts, std::string* out) {
  if constexpr (kIsOptional<T>) {
    AppendJson(*value, rule, parts, out);
  } else if constexpr (std::is_same_v<T, Hash128>) {
    AppendQuoted(ToString(value), out);
  } else if constexpr (HasFields<T>) {
    bool first = true;
    *out += '{';
    AppendFields(value, parts, &first, out);
    *out += '}';
  } else if constexpr (kIsVariant<T>) {
    std::visit(
        [&](const auto& kind) {
          *out += '{';
          AppendQuoted(std::decay_t<decltype(kind)>::kName, out);
          *out += ':';
          AppendJson(kind, rule::Any(), parts, out);
          *out += '}';
        },
        value);
  } else if constexpr (kIsVector<T> || kIsMap<T>) {
    *out += '[';
    for (const auto& element : value) {
      if (out->back() != '[') *out += ',';
      if constexpr (kIsMap<T>) {
        AppendJson(element.second, rule::Any(), parts, out);
      } else {
        AppendJson(element, rule::Any(), parts, out);
      }
    }
    *out += ']';
  } else if constexpr (HasNames<T>) {
    AppendQuoted(NameOf(value), out);
  } else if constexpr (std::is_same_v<T, std::string>) {
    AppendQuoted(kIsHex<Rule> ? ToHex(value) : value, out);
  } else if constexpr (std::is_same_v<T, bool>) {
    *out += value ? "true" : "false";
  } else if constexpr (kIsId<T>) {
    if constexpr (IdPrefix(T()) == 0) {
      *out += std::to_string(value.value());
    } else {
      AppendQuoted(ToString(value), out);
    }
  } else {
    static_assert(std::is_unsigned_v<T>);
    *out += std::to_string(value);
  }
}

// Whether any value of the type may have a field with rule::Secret, at any depth.
template <class T>
constexpr bool HasSecrets() {
  if constexpr (kIsOptional<T> || kIsVector<T>) {
    return HasSecrets<typename T::value_type>();
  } else if constexpr (kIsMap<T>) {
    return HasSecrets<typename T::mapped_type>();
  } else if constexpr (kIsVariant<T>) {
    return []<class... Kinds>(const std::variant<Kinds...>*) {
      return (HasSecrets<Kinds>() || ...);
    }(static_cast<const T*>(nullptr));
  } else if constexpr (HasFields<T>) {
    bool any = false;
    ForEachField<T>([&](const auto& field) {
      using Member = std::decay_t<decltype(std::declval<T>().*field.member)>;
      any |=
          std::is_same_v<std::decay_t<decltype(field.rule)>, rule::Secret> || HasSecrets<Member>();
    });
    return any;
  } else {
    return false;
  }
}

// ------------------------------------------------------------------------------ reading

template <class T, class Rule>
void ReadJson(const Rule& rule, JsonReader* in, T* value);

// Reads the value of the field `name`. Returns false if the struct has no such field.
template <HasFields T>
bool ReadField(const std::string& name, JsonReader* in, T* value) {
  bool found = false;
  ForEachField<T>([&](const auto& field) {
    using Rule = std::decay_t<decltype(field.rule)>;
    auto& member = value->*field.member;
    if (found) return;
    if constexpr (std::is_same_v<Rule, rule::Flat>) {
      found = ReadField(name, in, &member);
    } else if (name == field.name) {
      found = true;
      ReadJson(field.rule, in, &member);
    }
  });
  return found;
}

template <HasFields T>
void ReadObject(JsonReader* in, T* value) {
  in->Expect('{');
  if (in->Take('}')) return;
  do {
    const std::string name = in->String();
    in->Expect(':');
    if (!in->ok()) return;
    if (!ReadField(name, in, value)) in->Fail("field \"" + name + "\" is not known here");
  } while (in->Take(','));
  in->Expect('}');
}

template <class T>
void ReadList(JsonReader* in, std::vector<T>* list) {
  in->Expect('[');
  if (in->Take(']')) return;
  do {
    ReadJson(rule::Any(), in, &list->emplace_back());
  } while (in->Take(','));
  in->Expect(']');
}

template <class K, class V>
void ReadMap(JsonReader* in, std::map<K, V>* map) {
  std::vector<V> list;
  ReadList(in, &list);
  for (V& element : list) {
    const K key = element.Key();
    if (!map->emplace(key, std::move(element)).second) in->Fail("a key comes twice");
  }
}

template <class... Kinds>
void ReadKind(JsonReader* in, std::variant<Kinds...>* value) {
  in->Expect('{');
  const std::string name = in->String();
  in->Expect(':');
  const auto read = [&]<class Kind>(const Kind*) {
    if (name != Kind::kName) return false;
    ReadJson(rule::Any(), in, &value->template emplace<Kind>());
    return true;
  };
  if (!(read(static_cast<const Kinds*>(nullptr)) || ...)) {
    in->Fail("kind \"" + name + "\" is not known here");
  }
  in->Expect('}');
}

template <HasNames T>
void ReadName(JsonReader* in, T* value) {
  const std::string text = in->String();
  const auto names = NamesOf(T());
  for (uint64_t number = names.first; number <= names.last(); ++number) {
    if (text != names.names[number - names.first]) continue;
    *value = static_cast<T>(number);
    return;
  }
  in->Fail("\"" + text + "\" is no name of a value");
}

template <class T, class Rule>
void ReadJson(const Rule& rule, JsonReader* in, T* value) {
  if (!in->ok()) return;
  if constexpr (kIsOptional<T>) {
    ReadJson(rule, in, &value->emplace());
  } else if constexpr (std::is_same_v<T, Hash128>) {
    if (!ParseHash128(in->String(), value)) in->Fail("no digest");
  } else if constexpr (HasFields<T>) {
    ReadObject(in, value);
  } else if constexpr (kIsVariant<T>) {
    ReadKind(in, value);
  } else if constexpr (kIsMap<T>) {
    ReadMap(in, value);
  } else if constexpr (kIsVector<T>) {
    ReadList(in, value);
  } else if constexpr (HasNames<T>) {
    ReadName(in, value);
  } else if constexpr (kIsHex<Rule>) {
    if (!FromHex(in->String(), value)) in->Fail("no hexadecimal digits");
  } else if constexpr (std::is_same_v<T, std::string>) {
    *value = in->String();
  } else if constexpr (std::is_same_v<T, bool>) {
    *value = in->Bool();
  } else if constexpr (kIsId<T>) {
    if constexpr (IdPrefix(T()) == 0) {
      *value = T(in->Number(std::numeric_limits<uint64_t>::max()));
    } else if (!ParseId(in->String(), value)) {
      in->Fail("no id");
    }
  } else {
    *value = static_cast<T>(in->Number(std::numeric_limits<T>::max()));
  }
}

}  // namespace fields_internal

template <class T>
std::string ToJson(const T& value, JsonParts parts) {
  std::string text;
  fields_internal::AppendJson(value, rule::Any(), parts, &text);
  return text;
}

template <class T>
std::string ToJson(const T& value) {
  static_assert(!fields_internal::HasSecrets<T>(), "say whether the text shows secrets");
  return ToJson(value, JsonParts());
}

template <class T>
std::string FromJson(std::string_view text, T* value) {
  fields_internal::JsonReader in(text);
  fields_internal::ReadJson(rule::Any(), &in, value);
  in.End();
  return in.fault();
}

}  // namespace longhaul
