// Cohorts: members of one run at one peer that come and go together, in one group or several.
//
// A cohort is complete when its last member has joined, and the members of all its groups can reach
// its peer. Then each of its groups admits its member in the ballot of the same number. If a cohort
// loses a member, all of it is removed.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/group.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

using Groups = std::map<GroupKey, Group>;

struct Cohort {
  std::string run;
  PeerId peer;
  std::string name;
  friend auto operator<=>(const Cohort&, const Cohort&) = default;
};

// The groups that members of the cohort are in.
std::vector<GroupKey> GroupsOf(const Cohort& cohort, const Groups& groups);
// Returns how many members of the cohort there are. Sets `*size` to how many there have to be.
size_t CountMembers(const Cohort& cohort, const Groups& groups, uint32_t* size);
// Whether a member of the cohort is admitted in some group, or in a preparation that would admit
// it.
bool HasBegun(const Cohort& cohort, const Groups& groups);

// What one step has to do to cohorts. Empty between steps.
class Cohorts {
 public:
  struct Loss {
    Cohort cohort;
    std::string reason;
  };

  // A group has removed members of cohorts. The rest of each cohort is to be removed.
  void Add(const GroupKey& group, const std::vector<CohortLoss>& losses);
  bool any_lost() const { return !lost_.empty(); }
  // The next cohort to remove.
  std::optional<Loss> TakeLost();
  // Looks at the cohorts of the groups in `*touched`, and adds the groups that it changes. Returns
  // whether a cohort became complete.
  static bool Complete(Groups* groups, std::set<GroupKey>* touched);
  // Handles cohorts of the groups in `*touched` that a ballot has passed over: it did not admit a
  // member that it was to admit, because the peer was not attached or had begun to drain. If no
  // group has admitted a member of the cohort, the whole cohort waits for a later ballot. Otherwise
  // the whole cohort is to be removed, because its members can no longer come in together.
  void MindPassedOver(Groups* groups, std::set<GroupKey>* touched);

 private:
  std::vector<Loss> lost_;
};

// Aborts the process with a reason if a cohort is there in part. A cohort is complete before one of
// its members is admitted, and is removed in one step.
void CheckCohorts(const std::map<GroupKey, GroupRecord>& groups);

}  // namespace longhaul::coordinator
