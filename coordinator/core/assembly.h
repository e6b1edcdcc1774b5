// An assembly: pending members of a group without admitted members that asked to be admitted
// together (control::Join::members). It keeps what they were told of each other.
//
// Plain value: no clock, no thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/records.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// The number of members that wait for each other; 0: there is no assembly.
uint32_t AssemblySize(const GroupRecord& group);

class Assembly {
 public:
  // A member of this name has joined.
  void Join(const std::string& name);
  // The pending member is being removed.
  void Leave(const MemberRecord& member, const EpochState& epochs, const std::string& why);
  // Says who has come, and who has left again. "": there is no assembly.
  std::string Text(const EpochState& epochs, const PeerDirectory& peers) const;
  // The answer to the Join that has made this pending member.
  control::JoinPending PendingOf(MemberId member, const EpochState& epochs,
                                 const PeerDirectory& peers) const;
  // Sends Text() to the members that wait, if it has changed.
  void Tell(const EpochState& epochs, const GroupStep& step);

  LH_STATE(Assembly, LH_FIELD(told_), LH_FIELD(present_), LH_FIELD(left_));

 private:
  std::string told_;
  uint32_t present_ = 0;  // how many had come when they were told last
  // Who has left, and why: the last kNamesShownMax of them. For people.
  std::vector<std::pair<std::string, std::string>> left_;
};

}  // namespace longhaul::coordinator
