#include "coordinator/core/former_members.h"

#include "coordinator/core/text.h"

namespace longhaul::coordinator {

void FormerMembers::Add(MemberId member, control::Removal why, const std::string& reason,
                        const std::string& by, Tick now) {
  const std::string who = by == "coordinator" || by == "operator" ? "the " + by : by;
  gone_[member] = {now, std::string(NameOf(why)) + ", found by " + who + ": " + reason};
  if (gone_.size() > kFormerMembersMax) gone_.erase(gone_.begin());
}

control::Removed FormerMembers::AnswerFor(MemberId member, const GroupKey& group, Tick now) const {
  const auto gone = gone_.find(member);
  const std::string text =
      gone == gone_.end()
          ? "the coordinator does not know the member: it was removed before the coordinator "
            "started, or so many others have been since"
          : "the coordinator removed it " + std::to_string((now - gone->second.at) / Millis(1)) +
                " ms before its peer came back (" + gone->second.text + ")";
  return {group, member, control::Removal::kUnknown, Clean(text)};
}

}  // namespace longhaul::coordinator
