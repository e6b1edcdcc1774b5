// Ops that ended before local members posted them: Aborted at other peers, or refused to another
// local member. A member that posts one is answered at once. Plain value.
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
  struct Missed {
    OpKind kind = OpKind::kAllReduce;
    uint64_t step = 0;                 // of those who called it, as in NewPost
    std::string cause;                 // why it was aborted
    std::optional<OpRefusal> refusal;  // set: it was refused
    LH_FIELDS(Missed, LH_FIELD(kind), LH_FIELD(step), LH_FIELD(cause), LH_FIELD(refusal));
  };
  void Add(MemberId member, const OpKey& key, Missed missed);
  // The member posts an op. If it missed that op: returns how that ended. A member posts the ops of
  // a key in order, so from now on those before this post are forgotten. An abort meets a post of
  // its kind; a refusal stands for a call, and meets any post of the key, as other peers see it.
  std::optional<Missed> Take(MemberId member, const OpKey& key, OpKind kind);
  // The member has passed the boundary before this step: it does not post any more what it missed
  // in older ones. Another local member may have passed it before.
  void Pass(MemberId member, Epoch boundary, uint64_t step);
  // Forgets members that are not in the epoch.
  void KeepMembersOf(const EpochRecord& record);
  void Clear() { missed_.clear(); }

  void CheckInvariants() const;
  LH_STATE(MissedOps, LH_FIELD(missed_));

 private:
  std::map<MemberId, std::map<OpKey, std::vector<Missed>>> missed_;  // in the order of the ops
};

}  // namespace longhaul::peerd
