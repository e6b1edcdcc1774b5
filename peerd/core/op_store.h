// The ops of a table: those that are not answered, by key, and those that linger. It finds them by
// ordinal, too.
//
// An op stays at its address until it is erased. Plain value: a copy has copies of all ops.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "peerd/core/op_state.h"

namespace longhaul::peerd {

class OpStore {
 public:
  OpStore() = default;
  OpStore(const OpStore& other);
  OpStore& operator=(const OpStore&) = delete;

  // The op of this key that is not answered. The first adds one if there is none, the others return
  // nullptr.
  OpState& Add(const OpKey& key);
  OpState* Find(const OpKey& key);
  const OpState* Find(const OpKey& key) const;
  // Returns nullptr if no op has the ordinal.
  OpState* Find(OpOrdinal ordinal);
  // Adds an op that lingers from its first moment. The ordinal is higher than all others.
  OpState& AddLingering(const OpKey& key, OpOrdinal ordinal);
  // The op gets the ordinal, for good.
  void SetOrdinal(OpOrdinal ordinal, OpState* op);
  // The op is answered, and lingers from now on. It must have an ordinal that is higher than those
  // of the ops of its key that linger.
  void Linger(OpState* op);
  void Erase(const OpState& op);

  // Returns the op that a peer means with its next READY of this key: the oldest op of the key that
  // is announced here and has no READY of the peer. nullptr: there is none.
  OpState* Expecting(const OpKey& key, PeerId peer);
  size_t CountLingering(const OpKey& key) const { return lingering_.count(key); }
  // Of those that linger, the refused ones: of the key, and all.
  size_t CountRefused(const OpKey& key) const;
  size_t CountRefused() const;
  // All ops: those with an ordinal, by ordinal, then the others by key.
  std::vector<OpState*> All();

  const std::map<OpKey, OpState>& open() const { return open_; }
  std::map<OpKey, OpState>& open() { return open_; }
  const std::multimap<OpKey, OpState>& lingering() const { return lingering_; }
  const std::map<OpOrdinal, OpState*>& by_ordinal() const { return by_ordinal_; }

  void CheckInvariants() const;
  LH_STATE(OpStore, LH_FIELD(open_), LH_FIELD(lingering_), LH_FIELD(by_ordinal_, rule::Aside{}));

 private:
  std::map<OpKey, OpState> open_;
  std::multimap<OpKey, OpState> lingering_;  // those of one key in order of their ordinals
  std::map<OpOrdinal, OpState*> by_ordinal_;
};

}  // namespace longhaul::peerd
