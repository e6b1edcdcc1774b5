#include "coordinator/loop/explain.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

GroupView TwoPeers() {
  GroupView group;
  group.group = {"demo", 0};
  group.committed = Epoch(3);
  group.members = {{MemberId(1), PeerId(0xa), "left", Epoch(1), false},
                   {MemberId(2), PeerId(0xb), "", Epoch(1), false}};
  group.ring = {{PeerId(0xa), "h1", "10.0.0.1:1", true, false, {}},
                {PeerId(0xb), "h2", "10.0.0.2:1", true, false, {}}};
  return group;
}

TEST(Explain, QuietGroup) {
  const Explanation e = Explain(TwoPeers(), 1500);
  EXPECT_EQ(e.verdict, "nothing waits; no op is in flight");
  EXPECT_THAT(e.facts, IsEmpty());
}

TEST(Explain, GroupWithoutMembers) {
  EXPECT_EQ(Explain(GroupView{}, 1500).verdict, "nobody has been admitted");
}

TEST(Explain, NamesWhoKeepsANewcomerWaiting) {
  GroupView group = TwoPeers();
  group.waiting_for = "waiting for 1 of 2 votes: m2";
  group.members[0].voting = true;
  group.members.push_back({MemberId(3), PeerId(0xc), "new", Epoch(), false});
  const Explanation e = Explain(group, 1500);
  EXPECT_EQ(e.verdict, "waiting for 1 of 2 votes: m2");
  EXPECT_THAT(e.facts, ElementsAre(HasSubstr("wait for admission: m3(new);"),
                                   HasSubstr("not at a step boundary: m2;"),
                                   HasSubstr("wait at the step boundary: m1(left)")));
}

TEST(Explain, NamesThePeerWithoutAStreamAndTheDrainingOne) {
  GroupView group = TwoPeers();
  group.preparing = Epoch(4);
  group.waiting_for = "waiting for pb";
  group.ring[1].attached = false;
  group.ring[0].draining = true;
  const Explanation e = Explain(group, 1500);
  EXPECT_EQ(e.verdict, "epoch 4 is being prepared: waiting for pb");
  EXPECT_THAT(e.facts,
              ElementsAre(HasSubstr("peer pa (host h1, 10.0.0.1:1) is draining: its "
                                    "members m1 leave"),
                          HasSubstr("peer pb (host h2, 10.0.0.2:1) has no control stream: "
                                    "unless it returns within 6000 ms of its loss (at "
                                    "once if another peer reports it silent), its members m2")));
}

TEST(Explain, NamesThePeerThatHasNotPosted) {
  GroupView group = TwoPeers();
  group.ring[0].load.ops_open = 2;
  const Explanation e = Explain(group, 1500);
  EXPECT_THAT(e.verdict, HasSubstr("up to 2 ops are in flight"));
  EXPECT_THAT(e.facts, ElementsAre("ops in flight by peer: pa=2 pb=0",
                                   HasSubstr("has no op in flight while others have: peer pb")));
}

TEST(Explain, TellsWhichStateWasAgreedOn) {
  GroupView group = TwoPeers();
  group.state = StateRecord{13, {0x1f, 2}};
  group.waiting_for = "sync waiting for 1 of 2 members: m2";
  const Explanation e = Explain(group, 1500);
  EXPECT_EQ(e.verdict, "sync waiting for 1 of 2 members: m2");
  EXPECT_THAT(e.facts, ElementsAre("shared state agreed on: revision 13, digest "
                                   "000000000000001f0000000000000002"));
}

TEST(Explain, NamesWhomTheLastFaultWasOf) {
  GroupView group = TwoPeers();
  group.fault_epoch = Epoch(3);
  group.fault = FaultRecord{"silence", "pa", 1500, 40, "m3 at pc (host h3)"};
  EXPECT_THAT(Explain(group, 1500).facts,
              ElementsAre("the last change in the middle of ops was epoch 3: silence of m3 at pc "
                          "(host h3), seen by pa after 1500 ms of silence, agreed within 40 ms"));
}

TEST(Explain, NamesTheLinksOnWhichLargePacketsVanish) {
  GroupView group = TwoPeers();
  group.small_packets = {{PeerId(0xa), PeerId(0xb)}};
  EXPECT_THAT(Explain(group, 1500).facts,
              ElementsAre("large packets vanish between pa and pb, whose link uses small ones and "
                          "is slower: check the MTU of the path, and that ICMP \"fragmentation "
                          "needed\" is let through"));
}

TEST(Explain, LongListsAreCut) {
  GroupView group = TwoPeers();
  for (uint64_t i = 10; i < 30; ++i) group.members.push_back({MemberId(i), PeerId(0xc)});
  EXPECT_THAT(Explain(group, 1500).facts[0], HasSubstr("m17 and 12 more;"));
}

}  // namespace
}  // namespace longhaul::coordinator
