// The members that a group removed lately, so that their peers can be told why when they name them.
//
// Plain value: no clock, no thread. Bounded by kFormerMembersMax.
#pragma once

#include <map>
#include <string>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

inline constexpr size_t kFormerMembersMax = 1024;

class FormerMembers {
 public:
  // `by`: as FaultRecord::detector.
  void Add(MemberId member, control::Removal why, const std::string& reason, const std::string& by,
           Tick now);
  // The answer to a peer that names a member that the group does not have.
  control::Removed AnswerFor(MemberId member, const GroupKey& group, Tick now) const;

  LH_STATE(FormerMembers, LH_FIELD(gone_));

 private:
  struct Gone {
    Tick at;
    std::string text;
    LH_FIELDS(Gone, LH_FIELD(at), LH_FIELD(text));
  };
  std::map<MemberId, Gone> gone_;
};

}  // namespace longhaul::coordinator
