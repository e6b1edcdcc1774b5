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
  EXPECT_EQ(e.verdict, "the coordinator waits for nothing; no op is in flight");
  EXPECT_THAT(e.facts, IsEmpty());
}

TEST(Explain, GroupWithoutMembers) {
  EXPECT_EQ(Explain(GroupView{}, 1500).verdict, "the group has no admitted member");
}

TEST(Explain, NamesWhoKeepsANewcomerWaiting) {
  GroupView group = TwoPeers();
  group.waiting_for = "waiting for 1 of 2 votes: m2";
  group.members[0].voting = true;
  group.members.push_back({MemberId(3), PeerId(0xc), "new", Epoch(), false});
  const Explanation e = Explain(group, 1500);
  EXPECT_EQ(e.verdict, "waiting for 1 of 2 votes: m2");
  EXPECT_THAT(e.facts,
              ElementsAre(HasSubstr("members that wait for admission: m3(new);"),
                          HasSubstr("members that have not reached the step boundary: m2;"),
                          HasSubstr("members that wait at the step boundary: m1(left)")));
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
                                    "if it does not return within 6000 ms of the loss, its "
                                    "members m2 count as dead (at once if another peer reports "
                                    "it silent)")));
}

TEST(Explain, NamesThePeerThatHasNotPosted) {
  GroupView group = TwoPeers();
  group.ring[0].load.ops_open = 2;
  const Explanation e = Explain(group, 1500);
  EXPECT_THAT(e.verdict, HasSubstr("a peer has up to 2 ops in flight"));
  EXPECT_THAT(e.facts, ElementsAre("ops in flight by peer: pa=2 pb=0",
                                   HasSubstr("peers without an op in flight: peer pb")));
}

TEST(Explain, TellsWhichStateWasAgreedOn) {
  GroupView group = TwoPeers();
  group.state = StateRecord{13, {0x1f, 2}};
  group.waiting_for = "sync waiting for 1 of 2 members: m2";
  const Explanation e = Explain(group, 1500);
  EXPECT_EQ(e.verdict, "sync waiting for 1 of 2 members: m2");
  EXPECT_THAT(e.facts, ElementsAre("the shared state of the last sync: revision 13, digest "
                                   "000000000000001f0000000000000002"));
}

TEST(Explain, NamesWhomTheLastFaultWasOf) {
  GroupView group = TwoPeers();
  group.fault_epoch = Epoch(3);
  group.fault = FaultRecord{"silence", "pa", 1500, 40, "m3 at pc (host h3)"};
  EXPECT_THAT(
      Explain(group, 1500).facts,
      ElementsAre("the last epoch after a fault was epoch 3: silence of m3 at pc (host h3), "
                  "seen by pa after 1500 ms of silence, committed within 40 ms"));
}

TEST(Explain, NamesTheLinksOnWhichLargePacketsVanish) {
  GroupView group = TwoPeers();
  group.small_packets = {{PeerId(0xa), PeerId(0xb)}};
  EXPECT_THAT(Explain(group, 1500).facts,
              ElementsAre("large packets vanish between pa and pb; their link uses small packets "
                          "and is slower: check the MTU of the path, and let ICMP \"fragmentation "
                          "needed\" through"));
}

TEST(Explain, LongListsAreCut) {
  GroupView group = TwoPeers();
  for (uint64_t i = 10; i < 30; ++i) group.members.push_back({MemberId(i), PeerId(0xc)});
  EXPECT_THAT(Explain(group, 1500).facts[0], HasSubstr("m17 and 12 more;"));
}

}  // namespace
}  // namespace longhaul::coordinator
