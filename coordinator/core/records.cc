#include "coordinator/core/records.h"

#include <algorithm>
#include <utility>

namespace longhaul::coordinator {
namespace {

struct Applier {
  Records* records;

  void operator()(const PutStore& put) const { records->store = put.record; }
  void operator()(const PutRun& put) const { records->runs[put.record.run] = put.record; }
  void operator()(const DeleteRun& del) const { records->runs.erase(del.run); }
  void operator()(const PutGroup& put) const { records->groups[put.record.group] = put.record; }
  void operator()(const DeleteGroup& del) const { records->groups.erase(del.group); }
  void operator()(const PutDrain& put) const { records->drains[put.record.peer] = put.record; }
  void operator()(const DeleteDrain& del) const { records->drains.erase(del.peer); }
};

}  // namespace

const MemberRecord* FindMember(const GroupRecord& record, MemberId member) {
  const auto it = std::find_if(record.members.begin(), record.members.end(),
                               [member](const MemberRecord& m) { return m.member == member; });
  return it == record.members.end() ? nullptr : &*it;
}

MemberRecord* FindMember(GroupRecord& record, MemberId member) {
  return const_cast<MemberRecord*>(FindMember(std::as_const(record), member));
}

void Apply(const Mutation& mutation, Records* records) { std::visit(Applier{records}, mutation); }

}  // namespace longhaul::coordinator
