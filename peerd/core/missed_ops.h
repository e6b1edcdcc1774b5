// Ops that ended Aborted at other peers before local members posted them: a member that posts one
// is answered at once. Plain value.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/op_state.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

class MissedOps {
 public:
  void Add(MemberId member, const OpKey& key, OpKind kind, const std::string& cause);
  // The member posts an op. If it missed that op: returns why the op was aborted. A member posts
  // the ops of a key in order, so from now on those before this post are forgotten.
  std::optional<std::string> Take(MemberId member, const OpKey& key, OpKind kind);
  // The member has passed a boundary: it does not post any more what it missed.
  void Pass(MemberId member) { missed_.erase(member); }
  // Forgets members that are not in the epoch.
  void KeepMembersOf(const EpochRecord& record);
  void Clear() { missed_.clear(); }

  void CheckInvariants() const;
  LH_STATE(MissedOps, LH_FIELD(missed_));

 private:
  struct Missed {
    OpKind kind = OpKind::kAllReduce;
    std::string cause;
    LH_FIELDS(Missed, LH_FIELD(kind), LH_FIELD(cause));
  };
  std::map<MemberId, std::map<OpKey, std::vector<Missed>>> missed_;  // in the order of the ops
};

}  // namespace longhaul::peerd
