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
  void operator()(const PutDrain& put) const { records->drains[put.peer] = put.reason; }
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

void AddTo(const GroupRecord& record, Digester* digest) {
  digest->Add(record.group.run).Add(record.group.group);
  digest->Add(record.committed).Add(record.highest).Add(record.boundary).Add(record.attempt);
  digest->Add(record.members.size());
  for (const MemberRecord& m : record.members) {
    digest->Add(m.member).Add(m.peer).Add(m.request).Add(m.name).Add(m.joined).Add(m.votes);
    digest->Add(m.syncs).Add(m.counts);
    digest->Add(m.cohort).Add(uint64_t{m.cohort_size}).Add(m.after).Add(m.step_deadline_ms);
    digest->Add(uint64_t{m.departs.has_value()});
    if (m.departs) digest->Add(static_cast<uint64_t>(m.departs->why)).Add(m.departs->reason);
  }
  digest->Add(record.peers.size());
  for (const PeerRecord& p : record.peers) {
    digest->Add(p.peer).Add(p.lanes).Add(p.host).Add(p.endpoints.size());
    for (const std::string& endpoint : p.endpoints) digest->Add(endpoint);
  }
  digest->Add(record.fates.size());
  for (const FatesRecord& f : record.fates) {
    digest->Add(f.peer).Add(f.fates.size());
    for (const control::OpFate& fate : f.fates) {
      digest->Add(fate.ordinal).Add(static_cast<uint64_t>(fate.fate));
    }
    digest->Add(f.missed.size());
    for (const control::MissedOp& op : f.missed) digest->Add(op.boundary).Add(op.tag);
  }
  digest->Add(uint64_t{record.state.has_value()});
  if (record.state) {
    digest->Add(record.state->revision).Add(record.state->state);
    digest->Add(record.state->manifest);
  }
  digest->Add(record.ballots).Add(record.blocked.size());
  for (const BlockedRecord& b : record.blocked) {
    digest->Add(b.pair.a).Add(b.pair.b).Add(b.reason);
  }
}

void Apply(const Mutation& mutation, Records* records) { std::visit(Applier{records}, mutation); }

}  // namespace longhaul::coordinator
