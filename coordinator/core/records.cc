#include "coordinator/core/records.h"

namespace longhaul::coordinator {
namespace {

struct Applier {
  Records* records;

  void operator()(const PutRun& put) const { records->runs[put.record.run] = put.record; }
  void operator()(const DeleteRun& del) const { records->runs.erase(del.run); }
  void operator()(const PutGroup& put) const { records->groups[put.record.group] = put.record; }
  void operator()(const DeleteGroup& del) const { records->groups.erase(del.group); }
};

}  // namespace

void Apply(const Mutation& mutation, Records* records) { std::visit(Applier{records}, mutation); }

}  // namespace longhaul::coordinator
