#include "proto/control/convert.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/fields.h"
#include "proto/longhaul/v1/coordinator.pb.h"
#include "proto/wire/limits.h"

namespace longhaul::control {
namespace {

constexpr Asking<ProtoAsk::kGet> kGet;
constexpr Asking<ProtoAsk::kSet> kSet;
constexpr Asking<ProtoAsk::kMutable> kMutable;
constexpr Asking<ProtoAsk::kHas> kHas;

// ------------------------------------------------------------------------------ to protobuf

template <HasFields T, class Proto>
void Put(const T& in, Proto* out);

// Returns the value of a plain field in the form that protobuf takes.
template <class T, class Rule>
decltype(auto) Plain(const T& value, const Rule& rule) {
  if constexpr (kIsId<T>) {
    return value.value();
  } else if constexpr (std::is_same_v<Rule, rule::Text>) {
    return CleanText(value, rule.max);
  } else {
    return (value);
  }
}

template <class T, class Rule, class Repeated>
void PutList(const std::vector<T>& in, const rule::List<Rule>& rule, Repeated* out) {
  for (const T& element : in) {
    if constexpr (HasFields<T>) {
      Put(element, out->Add());
    } else if constexpr (std::is_same_v<T, std::string>) {
      *out->Add() = element;
    } else {
      out->Add(Plain(element, rule.element));
    }
  }
}

template <class T, class Field, class Proto>
void PutField(const T& in, const Field& field, Proto* out) {
  if constexpr (kIsOptional<T>) {
    if (in) Put(*in, field.proto(kMutable, *out));
  } else if constexpr (std::is_same_v<std::decay_t<decltype(field.rule)>, rule::Flat>) {
    Put(in, out);
  } else if constexpr (HasFields<T>) {
    if (in != T()) Put(in, field.proto(kMutable, *out));
  } else if constexpr (kIsVector<T>) {
    PutList(in, field.rule, field.proto(kMutable, *out));
  } else if constexpr (HasNames<T>) {
    field.proto(kSet, *out, static_cast<std::decay_t<decltype(field.proto(kGet, *out))>>(in));
  } else {
    field.proto(kSet, *out, Plain(in, field.rule));
  }
}

template <HasFields T, class Proto>
void Put(const T& in, Proto* out) {
  ForEachField<T>([&](const auto& field) { PutField(in.*field.member, field, out); });
}

// ------------------------------------------------------------------------------ from protobuf

// Fills *out, which must be newly constructed. Checks only what cannot be checked afterwards: that
// each enum holds one of its numbers, and that no list is too long or too short. FaultIn() checks
// the rest. Returns the path to the first fault and what is wrong there, or "".
template <HasFields T, class Proto>
std::string Get(const Proto& in, T* out);

template <class T, class Rule, class Seen>
void GetPlain(const Seen& in, const Rule& rule, T* out) {
  if constexpr (std::is_same_v<Rule, rule::Text>) {
    *out = CleanText(in, rule.max);
  } else if constexpr (std::is_same_v<Rule, rule::Capped>) {
    *out = static_cast<T>(std::min<uint64_t>(in, rule.max));
  } else {
    *out = T(in);
  }
}

template <class T, class Rule, class Repeated>
std::string GetList(const Repeated& in, const rule::List<Rule>& rule, std::vector<T>* out) {
  std::string fault =
      fields_internal::CountFault(static_cast<size_t>(in.size()), rule.min, rule.max);
  if (!fault.empty()) return fault;  // a list that is too long is not copied
  out->reserve(static_cast<size_t>(in.size()));
  for (const auto& element : in) {
    if constexpr (HasFields<T>) {
      fault = Get(element, &out->emplace_back());
      if (!fault.empty()) return absl::StrCat("[", out->size() - 1, "].", fault);
    } else {
      GetPlain(element, rule.element, &out->emplace_back());
    }
  }
  return fault;
}

// Fills one field. Returns a fault without the name of the field, which the caller puts in front.
template <class T, class Field, class Proto>
std::string GetField(const Proto& in, const Field& field, T* out) {
  if constexpr (kIsOptional<T>) {
    return field.proto(kHas, in) ? GetField(in, field, &out->emplace()) : "";
  } else if constexpr (std::is_same_v<std::decay_t<decltype(field.rule)>, rule::Flat>) {
    return Get(in, out);
  } else if constexpr (HasFields<T>) {
    const std::string fault = Get(field.proto(kGet, in), out);
    return fault.empty() ? fault : absl::StrCat(".", fault);
  } else if constexpr (kIsVector<T>) {
    return GetList(field.proto(kGet, in), field.rule, out);
  } else if constexpr (HasNames<T>) {
    const auto names = NamesOf(T());
    const auto number = static_cast<uint64_t>(field.proto(kGet, in));
    *out = static_cast<T>(number);
    return fields_internal::NumberFault(number, names.first, names.last());
  } else {
    GetPlain(field.proto(kGet, in), field.rule, out);
    return "";
  }
}

template <HasFields T, class Proto>
std::string Get(const Proto& in, T* out) {
  std::string fault;
  ForEachField<T>([&](const auto& field) {
    if (!fault.empty()) return;
    fault = GetField(in, field, &(out->*field.member));
    using Rule = std::decay_t<decltype(field.rule)>;
    if (!fault.empty() && !std::is_same_v<Rule, rule::Flat>) fault.insert(0, field.name);
  });
  return fault;
}

// ------------------------------------------------------------------------------ envelopes

template <class Proto, class Message>
Proto Wrap(const Message& message) {
  Proto proto;
  std::visit([&](const auto& m) { Put(m, std::decay_t<decltype(m)>::Kind()(kMutable, proto)); },
             message);
  return proto;
}

template <class Kind, class Message, class Proto>
absl::StatusOr<Message> Unwrap(const Proto& proto) {
  Kind message;
  std::string fault = Get(Kind::Kind()(kGet, proto), &message);
  if (fault.empty()) fault = FaultIn(message);
  if (fault.empty()) return Message(std::move(message));
  return absl::InvalidArgumentError(absl::StrCat(Kind::kName, ": ", fault));
}

template <class... Kinds, class Proto>
absl::StatusOr<std::variant<Kinds...>> Find(const Proto& proto, const std::variant<Kinds...>*) {
  using Message = std::variant<Kinds...>;
  absl::StatusOr<Message> found = absl::InvalidArgumentError(
      "message is of no kind that this release knows; run the same release at both ends");
  const auto take = [&]<class Kind>(const Kind*) {
    if (!Kind::Kind()(kHas, proto)) return false;
    found = Unwrap<Kind, Message>(proto);
    return true;
  };
  (take(static_cast<const Kinds*>(nullptr)) || ...);
  return found;
}

template <class Message, class Proto>
absl::StatusOr<Message> Parse(const std::string& bytes) {
  if (bytes.size() > LH_CONTROL_MESSAGE_BYTES_MAX) {
    return absl::InvalidArgumentError(
        Refusal("message", absl::StrCat(bytes.size(), " bytes"),
                absl::StrCat("at most ", LH_CONTROL_MESSAGE_BYTES_MAX)));
  }
  Proto proto;
  if (!proto.ParseFromString(bytes)) {
    return absl::InvalidArgumentError("message is not a valid protobuf");
  }
  return FromProto(proto);
}

}  // namespace

v1::PeerMessage ToProto(const PeerMessage& message) { return Wrap<v1::PeerMessage>(message); }
v1::CoordinatorMessage ToProto(const CoordinatorMessage& message) {
  return Wrap<v1::CoordinatorMessage>(message);
}

absl::StatusOr<PeerMessage> FromProto(const v1::PeerMessage& proto) {
  return Find(proto, static_cast<const PeerMessage*>(nullptr));
}
absl::StatusOr<CoordinatorMessage> FromProto(const v1::CoordinatorMessage& proto) {
  return Find(proto, static_cast<const CoordinatorMessage*>(nullptr));
}

std::string Serialize(const PeerMessage& message) { return ToProto(message).SerializeAsString(); }
std::string Serialize(const CoordinatorMessage& message) {
  return ToProto(message).SerializeAsString();
}

absl::StatusOr<PeerMessage> ParsePeerMessage(const std::string& bytes) {
  return Parse<PeerMessage, v1::PeerMessage>(bytes);
}
absl::StatusOr<CoordinatorMessage> ParseCoordinatorMessage(const std::string& bytes) {
  return Parse<CoordinatorMessage, v1::CoordinatorMessage>(bytes);
}

}  // namespace longhaul::control
