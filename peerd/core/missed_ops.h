// Ops that ended Aborted at other peers before local members posted them: a member that posts one
// is answered at once. Plain value.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/fields.h"
#include "base/ids.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/op_state.h"

namespace longhaul::peerd {

class MissedOps {
 public:
  void Add(MemberId member, const OpKey& key, const std::string& cause);
  // The member posts an op. If it missed that op: returns why the op was aborted.
  std::optional<std::string> Take(MemberId member, const OpKey& key);
  // Forgets members that are not in the epoch.
  void KeepMembersOf(const EpochRecord& record);
  void Clear() { missed_.clear(); }

  void CheckInvariants() const;
  LH_STATE(MissedOps, LH_FIELD(missed_));

 private:
  struct Missed {
    uint32_t count = 0;  // ops of the key that are still to be posted
    std::string cause;
    LH_FIELDS(Missed, LH_FIELD(count), LH_FIELD(cause));
  };
  std::map<MemberId, std::map<OpKey, Missed>> missed_;
};

}  // namespace longhaul::peerd
