// Identifiers. Each kind is a type of its own, so that a member cannot be passed as a peer.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <tuple>

#include "base/fields.h"

namespace longhaul {

template <class Kind>
class Id {
 public:
  constexpr Id() = default;
  explicit constexpr Id(uint64_t value) : value_(value) {}
  constexpr uint64_t value() const { return value_; }
  // Whether there is an id: 0 means "none" for every kind.
  explicit constexpr operator bool() const { return value_ != 0; }
  friend constexpr auto operator<=>(Id, Id) = default;

 private:
  uint64_t value_ = 0;
};

// One running peerd process. Drawn at random when the daemon starts, never reused.
using PeerId = Id<struct PeerIdKind>;
// One trainer in one group. Numbered by the coordinator, unique in the run.
using MemberId = Id<struct MemberIdKind>;
// One agreed membership of one group. The number rises with each preparation. Numbers may be
// skipped. No number is committed twice.
using Epoch = Id<struct EpochKind>;
// One op at one peer. The number rises with each op that this peer announces in a group, and is
// never reused. Two peers have different ordinals for the same op.
using OpOrdinal = Id<struct OpOrdinalKind>;

inline constexpr size_t kRunNameBytesMax = 64;

// Names a group: group `group` of run `run`. Members of one group combine their tensors.
struct GroupKey {
  std::string run;
  uint32_t group = 0;
  friend auto operator<=>(const GroupKey&, const GroupKey&) = default;
  LH_FIELDS(GroupKey, LH_FIELD(run, rule::Name{1, kRunNameBytesMax}), LH_FIELD(group));
};

// Ids as text, as in logs: p1f (hexadecimal), m3, o7; an epoch is a plain number.
inline std::string ToString(PeerId id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint64_t v = id.value(); v != 0 || text.empty(); v >>= 4)
    text.insert(text.begin(), kDigits[v & 15]);
  return "p" + text;
}
inline std::string ToString(MemberId id) { return "m" + std::to_string(id.value()); }
inline std::string ToString(Epoch epoch) { return std::to_string(epoch.value()); }
inline std::string ToString(OpOrdinal ordinal) { return "o" + std::to_string(ordinal.value()); }
inline std::string ToString(const GroupKey& key) {
  return key.run + "/" + std::to_string(key.group);
}

// Returns the letter before the number in ToString(), or 0 if there is none.
template <class Kind>
constexpr char IdPrefix(Id<Kind>) {
  return 0;
}
constexpr char IdPrefix(PeerId) { return 'p'; }
constexpr char IdPrefix(MemberId) { return 'm'; }
constexpr char IdPrefix(OpOrdinal) { return 'o'; }

// Parses what ToString() writes. Returns false for any other text, and leaves *id unchanged.
template <class Kind>
bool ParseId(const std::string& text, Id<Kind>* id) {
  constexpr uint64_t kBase = IdPrefix(Id<Kind>()) == 'p' ? 16 : 10;
  const size_t letters = IdPrefix(*id) == 0 ? 0 : 1;
  if (text.size() <= letters || (letters != 0 && text[0] != IdPrefix(*id))) return false;
  uint64_t value = 0;
  for (size_t i = letters; i < text.size(); ++i) {
    const char c = text[i];
    uint64_t digit = kBase;
    if (c >= '0' && c <= '9') digit = static_cast<uint64_t>(c - '0');
    if (c >= 'a' && c <= 'f') digit = static_cast<uint64_t>(c - 'a') + 10;
    if (digit >= kBase || value > (UINT64_MAX - digit) / kBase) return false;
    value = value * kBase + digit;
  }
  *id = Id<Kind>(value);
  return true;
}

}  // namespace longhaul
