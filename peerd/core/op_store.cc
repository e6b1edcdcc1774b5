#include "peerd/core/op_store.h"

#include <algorithm>

#include "base/check.h"

namespace longhaul::peerd {

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

size_t OpStore::CountRefused(const OpKey& key) const {
  const auto [first, last] = lingering_.equal_range(key);
  return std::count_if(first, last,
                       [](const auto& entry) { return entry.second.refusal.has_value(); });
}

size_t OpStore::CountRefused() const {
  return std::count_if(lingering_.begin(), lingering_.end(),
                       [](const auto& entry) { return entry.second.refusal.has_value(); });
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
