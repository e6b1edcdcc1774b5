#include "coordinator/core/cohorts.h"

#include <algorithm>

#include "base/check.h"

namespace longhaul::coordinator {
namespace {

// Calls `call(key, group, members)` for each group of the cohort, with its members there.
template <class GroupMap, class Call>
void ForEachGroup(const Cohort& cohort, GroupMap& groups, Call call) {
  for (auto it = groups.lower_bound({cohort.run, 0});
       it != groups.end() && it->first.run == cohort.run; ++it) {
    const auto members = it->second.Cohort(cohort.peer, cohort.name);
    if (!members.empty()) call(it->first, it->second, members);
  }
}

// The cohorts of the members of these groups that are `wanted(group, member)`.
template <class Wanted>
std::set<Cohort> CohortsIn(const std::set<GroupKey>& keys, const Groups& groups, Wanted wanted) {
  std::set<Cohort> cohorts;
  for (const GroupKey& key : keys) {
    const auto group = groups.find(key);
    if (group == groups.end()) continue;
    for (const MemberRecord& member : group->second.record().members) {
      if (wanted(group->second, member)) cohorts.insert({key.run, member.peer, member.cohort});
    }
  }
  return cohorts;
}

// Each group of the cohort is to admit its member in the same ballot: the first one that none of
// these groups has begun.
void SetBallot(const Cohort& cohort, Groups* groups, std::set<GroupKey>* touched) {
  uint64_t newest = 0;
  ForEachGroup(cohort, *groups, [&](const GroupKey&, const Group& group, const auto&) {
    newest = std::max(newest, group.NewestBallot());
  });
  ForEachGroup(cohort, *groups, [&](const GroupKey& key, Group& group, const auto&) {
    group.AdmitCohortAfter(cohort.peer, cohort.name, newest);
    touched->insert(key);
  });
}

}  // namespace

std::vector<GroupKey> GroupsOf(const Cohort& cohort, const Groups& groups) {
  std::vector<GroupKey> keys;
  ForEachGroup(cohort, groups,
               [&](const GroupKey& key, const Group&, const auto&) { keys.push_back(key); });
  return keys;
}

size_t CountMembers(const Cohort& cohort, const Groups& groups, uint32_t* size) {
  size_t count = 0;
  ForEachGroup(cohort, groups, [&](const GroupKey&, const Group&, const auto& members) {
    *size = members.back()->cohort_size;
    count += members.size();
  });
  return count;
}

bool HasBegun(const Cohort& cohort, const Groups& groups) {
  bool begun = false;
  ForEachGroup(cohort, groups, [&](const GroupKey&, const Group& group, const auto& members) {
    begun = begun || std::any_of(members.begin(), members.end(), [&](const MemberRecord* member) {
              return group.AdmittedOrPrepared(*member);
            });
  });
  return begun;
}

void Cohorts::Add(const GroupKey& group, const std::vector<CohortLoss>& losses) {
  for (const CohortLoss& loss : losses) {
    const MemberRecord& member = loss.member;
    lost_.push_back({{group.run, member.peer, member.cohort},
                     "its cohort " + member.cohort + " lost " + ToString(member.member) + " of " +
                         ToString(group) + ": " + loss.reason});
  }
}

std::optional<Cohorts::Loss> Cohorts::TakeLost() {
  if (lost_.empty()) return std::nullopt;
  Loss first = std::move(lost_.front());
  lost_.erase(lost_.begin());
  return first;
}

bool Cohorts::Complete(Groups* groups, std::set<GroupKey>* touched) {
  const auto incomplete = [](const Group&, const MemberRecord& member) {
    return member.after == kCohortIncomplete;
  };
  bool any = false;
  for (const Cohort& cohort : CohortsIn(*touched, *groups, incomplete)) {
    uint32_t size = 0;
    if (CountMembers(cohort, *groups, &size) != size) continue;
    bool reached = true;
    ForEachGroup(cohort, *groups, [&](const GroupKey&, const Group& group, const auto&) {
      reached = reached && group.Reached(cohort.peer);
    });
    if (!reached) continue;
    SetBallot(cohort, groups, touched);
    any = true;
  }
  return any;
}

void Cohorts::MindPassedOver(Groups* groups, std::set<GroupKey>* touched) {
  const auto passed_over = [](const Group& group, const MemberRecord& member) {
    return group.PassedOver(member);
  };
  for (const Cohort& cohort : CohortsIn(*touched, *groups, passed_over)) {
    if (!HasBegun(cohort, *groups)) {
      SetBallot(cohort, groups, touched);
    } else {
      lost_.push_back({cohort, "cohort " + cohort.name +
                                   " could not be admitted in all its groups at one boundary: "
                                   "join again"});
    }
  }
}

void CheckCohorts(const std::map<GroupKey, GroupRecord>& groups) {
  struct Seen {
    size_t count = 0;
    uint32_t size = 0;
    bool admitted = false;
  };
  std::map<Cohort, Seen> cohorts;
  for (const auto& [key, record] : groups) {
    for (const MemberRecord& member : record.members) {
      if (member.cohort.empty() || member.departs) continue;
      Seen& seen = cohorts[{key.run, member.peer, member.cohort}];
      LH_CHECK(seen.count == 0 || seen.size == member.cohort_size) << "cohort " << member.cohort;
      ++seen.count;
      seen.size = member.cohort_size;
      seen.admitted = seen.admitted || member.joined;
    }
  }
  for (const auto& [cohort, seen] : cohorts) {
    LH_CHECK(!seen.admitted || seen.count == seen.size)
        << "cohort " << cohort.name << " has " << seen.count << " of " << seen.size;
  }
}

}  // namespace longhaul::coordinator
