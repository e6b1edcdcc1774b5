#include "coordinator/core/records.h"

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

TEST(Records, PutReplacesAndDeleteRemoves) {
  Records records;
  RunRecord run{"r", 1, "secret"};
  Apply(PutRun{run}, &records);
  run.next_member = 5;
  Apply(PutRun{run}, &records);
  GroupRecord group;
  group.group = {"r", 2};
  group.committed = Epoch(3);
  Apply(PutGroup{group}, &records);
  EXPECT_EQ(records.runs.at("r").next_member, 5u);
  EXPECT_EQ(records.groups.at({"r", 2}), group);

  Apply(DeleteGroup{{"r", 2}}, &records);
  Apply(DeleteGroup{{"r", 2}}, &records);
  Apply(DeleteRun{"r"}, &records);
  EXPECT_EQ(records, Records{});
}

}  // namespace
}  // namespace longhaul::coordinator
