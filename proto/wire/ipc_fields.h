// Reads a C struct of the socket (proto/wire/ipc.h) into a struct that names its fields.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/fields.h"

namespace longhaul {

// Sets each field of `to` that `from` has under the same name: numbers, enums, flags, and texts
// that end with a NUL or with their array. Ids are left out, since `from` may mean them otherwise.
// Returns which number a field cannot hold, in the style of FaultIn(), or "". FaultIn(*to) checks
// the rest.
template <HasFields T, class C>
std::string TakeFields(const C& from, T* to) {
  std::string fault;
  ForEachField<T>([&](const auto& field) {
    const auto seen = field.proto(Asking<ProtoAsk::kPlain>(), from);
    auto& member = to->*field.member;
    using Member = std::remove_reference_t<decltype(member)>;
    if constexpr (std::is_null_pointer_v<std::remove_const_t<decltype(seen)>> || kIsId<Member>) {
      return;
    } else if constexpr (std::is_same_v<Member, std::string>) {
      member.assign(*seen, strnlen(*seen, sizeof *seen));
    } else {
      member = static_cast<Member>(*seen);
      if (static_cast<uint64_t>(member) == *seen || !fault.empty()) return;
      fault = Refusal(field.name, std::to_string(*seen),
                      std::is_same_v<Member, bool> ? "0 or 1" : "so large");
    }
  });
  return fault;
}

}  // namespace longhaul
