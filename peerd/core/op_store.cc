#include "peerd/core/op_store.h"

#include <algorithm>

#include "base/check.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// The most bytes of larger results that lingering ops keep. Beyond, ops are answered when every
// participant is done.
constexpr uint64_t kLingeringBytesMax = LH_READY_INPUTS_AHEAD_BYTES_MAX;

// The most refused calls that linger, of all names.
constexpr ptrdiff_t kRefusedMax = LH_OPS_OPEN_MAX;

}  // namespace

OpStore::OpStore(const OpStore& other) : open_(other.open_), lingering_(other.lingering_) {
  for (auto& [key, op] : open_) {
    if (op.ordinal) by_ordinal_.emplace(op.ordinal, &op);
  }
  for (auto& [key, op] : lingering_) by_ordinal_.emplace(op.ordinal, &op);
}

OpState& OpStore::Add(const OpKey& key) {
  OpState& op = open_[key];
  op.key = key;
  return op;
}

OpState& OpStore::AddLingering(const OpKey& key, OpOrdinal ordinal) {
  OpState& op = lingering_.emplace(key, OpState())->second;
  op.key = key;
  op.lingers = true;
  SetOrdinal(ordinal, &op);
  return op;
}

const OpState* OpStore::Find(const OpKey& key) const {
  const auto it = open_.find(key);
  return it == open_.end() ? nullptr : &it->second;
}

OpState* OpStore::Find(const OpKey& key) {
  const auto it = open_.find(key);
  return it == open_.end() ? nullptr : &it->second;
}

OpState* OpStore::Find(OpOrdinal ordinal) {
  const auto it = by_ordinal_.find(ordinal);
  return it == by_ordinal_.end() ? nullptr : it->second;
}

void OpStore::SetOrdinal(OpOrdinal ordinal, OpState* op) {
  op->ordinal = ordinal;
  by_ordinal_.emplace(ordinal, op);
}

void OpStore::Linger(OpState* op) {
  op->lingers = true;
  lingering_.insert(open_.extract(op->key));
}

void OpStore::Erase(const OpState& op) {
  if (op.ordinal) by_ordinal_.erase(op.ordinal);
  if (!op.lingers) {
    open_.erase(OpKey(op.key));
    return;
  }
  const auto [first, last] = lingering_.equal_range(op.key);
  lingering_.erase(
      std::find_if(first, last, [&](const auto& entry) { return &entry.second == &op; }));
}

OpState* OpStore::Expecting(const OpKey& key, PeerId peer) {
  const auto expects = [peer](const OpState& op) {
    return op.said.announced && !op.said.readies.contains(peer);
  };
  const auto [first, last] = lingering_.equal_range(key);
  for (auto it = first; it != last; ++it) {
    if (expects(it->second)) return &it->second;
  }
  OpState* const op = Find(key);
  return op != nullptr && expects(*op) ? op : nullptr;
}

bool OpStore::HasRoomToLinger(const OpState& op) const {
  if (IsOneShot(op.desc)) return true;
  uint64_t bytes = op.desc.bytes();
  for (const auto& [key, other] : lingering_) {
    if (!IsOneShot(other.desc)) bytes += other.result->bytes.size();
  }
  return bytes <= kLingeringBytesMax;
}

bool OpStore::HasRoomForRefusal(const OpKey& key) const {
  const auto is_refused = [](const auto& entry) { return entry.second.refusal.has_value(); };
  const auto [first, last] = lingering_.equal_range(key);
  return std::count_if(first, last, is_refused) < static_cast<ptrdiff_t>(kRefusalsAheadMax) &&
         std::count_if(lingering_.begin(), lingering_.end(), is_refused) < kRefusedMax;
}

OpState* OpStore::FindRefusal(const OpKey& key, OpKind kind, uint64_t step) {
  const auto [first, last] = lingering_.equal_range(key);
  const auto it = std::find_if(first, last, [&](const auto& entry) {
    const OpState& op = entry.second;
    return op.refusal && !op.participants && op.desc.kind == kind && op.refusal->step <= step;
  });
  return it == last ? nullptr : &it->second;
}

void OpStore::ForgetRefusals(MemberId member, const Place& before) {
  std::vector<const OpState*> old;
  for (const auto& [key, op] : lingering_) {
    const bool unmet = op.refusal && op.refusal->member == member && op.said.readies.empty();
    if (unmet && Place{key.boundary, op.refusal->step} < before) old.push_back(&op);
  }
  for (const OpState* const op : old) Erase(*op);
}

uint64_t OpStore::InputBytesWith(const OpState& op) const {
  uint64_t sum = op.participants->ring.size() * OneShotPayloadBytes(op.desc);
  for (const auto& [ordinal, other] : by_ordinal_) {
    if (other == &op || !other->said.announced || other->said.input != ReadyInput::kCarried)
      continue;
    sum += other->participants->ring.size() * OneShotPayloadBytes(other->desc);
  }
  return sum;
}

std::vector<OpState*> OpStore::All() {
  std::vector<OpState*> all;
  all.reserve(open_.size() + lingering_.size());
  for (const auto& [ordinal, op] : by_ordinal_) all.push_back(op);
  for (auto& [key, op] : open_) {
    if (!op.ordinal) all.push_back(&op);
  }
  return all;
}

// ------------------------------------------------------------------------------ for tests

void OpStore::CheckInvariants() const {
  size_t ordinals = 0;
  const auto check = [&](const OpKey& key, const OpState& op, bool lingers) {
    const std::string name = "tag " + std::to_string(key.tag);
    LH_CHECK(key == op.key && lingers == op.lingers) << name;
    LH_CHECK(op.ordinal || !lingers) << name;
    if (!op.ordinal) return;
    ++ordinals;
    const auto it = by_ordinal_.find(op.ordinal);
    LH_CHECK(it != by_ordinal_.end() && it->second == &op) << name;
  };
  for (const auto& [key, op] : open_) check(key, op, false);
  for (const auto& [key, op] : lingering_) check(key, op, true);
  LH_CHECK(ordinals == by_ordinal_.size());
}

}  // namespace longhaul::peerd
