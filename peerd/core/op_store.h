// The ops of a table: those that are not answered, by key, and those that linger. It finds them by
// ordinal, too.
//
// An op stays at its address until it is erased. Plain value: a copy has copies of all ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "peerd/core/new_post.h"
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
  // Whether there is room to keep the op's result while it lingers.
  bool HasRoomToLinger(const OpState& op) const;
  // Whether another refused call of this key may linger. Otherwise it is not announced, and the
  // others wait for it.
  bool HasRoomForRefusal(const OpKey& key) const;
  // A refused call of the key, kind and step, or an older one, that was never announced; or
  // nullptr.
  OpState* FindRefusal(const OpKey& key, OpKind kind, uint64_t step);
  // The member passes a boundary. `before`: the one before it. Refused calls of older steps meet no
  // call any more. One of the last step may: a READY of it may be on the way.
  void ForgetRefusals(MemberId member, const Place& before);
  // The bytes of the inputs, of all participants, of announced ops whose READYs carry them. This op
  // counts as one of them.
  uint64_t InputBytesWith(const OpState& op) const;
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
