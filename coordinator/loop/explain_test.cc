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

TEST(Explain, TellsATrainerWhereThoseAreWhoAreMissing) {
  GroupView group = TwoPeers();
  EXPECT_EQ(ExplainToTrainer(group, 1500), Explain(group, 1500).verdict);
  group.waiting_for = "waiting for 1 of 2 votes: m2";
  group.members[0].voting = true;
  group.members.push_back({MemberId(3), PeerId(0xc), "new", Epoch(), false});
  EXPECT_EQ(ExplainToTrainer(group, 1500),
            "waiting for 1 of 2 votes: m2; not there: m2 at peer pb (host h2)");
}

TEST(Explain, NamesThePeerWithoutAStreamAndTheDrainingOne) {
  GroupView group = TwoPeers();
  group.preparing = Epoch(4);
  group.waiting_for = "waiting for pb";
  group.ring[1].attached = false;
  group.ring[0].draining = true;
  const Explanation e = Explain(group, 1500);
  EXPECT_EQ(e.verdict,
            "epoch 4 is being prepared: waiting for pb; peer pb (host h2) with m2 has no control "
            "stream: its longhaul-peerd stands still, or its host or network is gone");
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

TEST(Explain, NamesTheHostThatSetsThePaceAndWhatOpsTakeWithoutIt) {
  GroupView group = TwoPeers();
  group.ring[1].up_bytes_per_second = 6'250'000;
  group.pace = PaceView{PeerId(0xb), 6'250'000, 12'500'000};
  const std::vector<std::string> facts = Explain(group, 1500).facts;
  ASSERT_EQ(facts.size(), 1u);
  EXPECT_THAT(facts[0], testing::StartsWith("peer pb (host "));
  EXPECT_THAT(facts[0], testing::EndsWith(
                            ") sets the pace: its host sends at most 6.2 MB/s; an all-reduce of "
                            "64 MiB over the mesh takes 10.74 s and the latency, and without "
                            "this peer 5.37 s"));
}

// ------------------------------------------------------------------------------ the cause

control::OldestOp OpenOp(control::OpPhase phase, uint32_t age_ms) {
  control::OldestOp op;
  op.tag = 7;
  op.boundary = Epoch(3);
  op.phase = phase;
  op.age_ms = age_ms;
  return op;
}

GroupView ThreePeers() {
  GroupView group = TwoPeers();
  group.members.push_back({MemberId(3), PeerId(0xc), "", Epoch(1), false});
  group.ring.push_back({.peer = PeerId(0xc), .host = "h3", .attached = true});
  for (PeerView& peer : group.ring) peer.load.ops_open = 4;
  return group;
}

TEST(Explain, NamesTheMemberThatHasNotCalledTheOldestOp) {
  GroupView group = ThreePeers();
  for (const size_t i : {0, 2}) {
    group.ring[i].load.oldest = OpenOp(control::OpPhase::kReady, 2100 + 100 * i);
    group.ring[i].load.oldest->peers = {PeerId(0xb)};
  }
  group.ring[1].load.ops_open = 0;
  const Explanation e = Explain(group, 1500);
  EXPECT_EQ(e.verdict,
            "m2 at peer pb (host h2) has not called the op with tag 7, which others called 2.3 s "
            "ago: a trainer computes longer, or stands still");
  EXPECT_EQ(e.facts[0],
            "peer pc (host h3): its oldest op, tag 7, is open for 2.3 s and waits until it was "
            "called at pb");
}

TEST(Explain, AccusesNoMemberThatHasCalledTheOpAtALaterBoundary) {
  GroupView group = ThreePeers();
  group.ring[0].load.oldest = OpenOp(control::OpPhase::kReady, 2100);
  group.ring[0].load.oldest->peers = {PeerId(0xb)};
  group.ring[1].load.oldest = OpenOp(control::OpPhase::kReady, 900);
  group.ring[1].load.oldest->boundary = Epoch(5);
  EXPECT_EQ(Explain(group, 1500).verdict,
            "the op with tag 7 was called at peer pa (host h1) at boundary 3 and at peer pb (host "
            "h2) at boundary 5: these calls cannot meet, and the older one ends Aborted once all "
            "that made it have passed that boundary");
}

TEST(Explain, NamesTheLocalMemberThatHasNotCalledIt) {
  GroupView group = ThreePeers();
  group.members.push_back({MemberId(4), PeerId(0xb), "late", Epoch(1), false});
  group.ring[0].load.oldest = OpenOp(control::OpPhase::kReady, 900);
  group.ring[0].load.oldest->peers = {PeerId(0xb)};
  group.ring[1].load.oldest = OpenOp(control::OpPhase::kStart, 800);
  group.ring[1].load.oldest->members = {MemberId(4)};
  EXPECT_THAT(Explain(group, 1500).verdict,
              HasSubstr("m4(late) at peer pb (host h2) has not called the op with tag 7"));
}

TEST(Explain, AnOpThatIsYoungHasNoCause) {
  GroupView group = ThreePeers();
  group.ring[0].load.oldest = OpenOp(control::OpPhase::kReady, 100);
  group.ring[0].load.oldest->peers = {PeerId(0xb)};
  EXPECT_THAT(Explain(group, 1500).verdict, HasSubstr("the coordinator waits for nothing"));
}

TEST(Explain, NamesTheSlowLink) {
  GroupView group = ThreePeers();
  for (PeerView& peer : group.ring) peer.load.oldest = OpenOp(control::OpPhase::kTransfer, 3000);
  control::WorstLane lane;
  lane.peer = PeerId(0xb);
  lane.lane = 3;
  lane.waiting_bytes = 12000000;
  lane.bytes_per_second = 2000000;
  lane.rtt_us = 40000;
  group.ring[0].load.worst = lane;
  lane.peer = PeerId(0xc);
  lane.bytes_per_second = 20000000;
  group.ring[1].load.worst = lane;
  EXPECT_EQ(Explain(group, 1500).verdict,
            "the link from peer pa (host h1) to peer pb (host h2) is slow: 12.0 MB wait, and it "
            "carries 2.0 MB/s (6.0 s); its worst lane is data lane 3, round trip 40.0 ms");
  lane = {.peer = PeerId(0xb), .lane = 2, .stalled_ms = 9000, .waiting_bytes = 1000000};
  group.ring[0].load.worst = lane;
  EXPECT_THAT(Explain(group, 1500).verdict,
              HasSubstr("to peer pb (host h2) stalls: data lane 2 has had bytes for 9.0 s"));
}

TEST(Explain, TellsAPathThatIsCutFromAPeerThatIsSilent) {
  GroupView group = ThreePeers();
  group.ring[0].load.oldest = OpenOp(control::OpPhase::kDone, 1400);
  group.ring[0].load.worst = control::WorstLane{.peer = PeerId(0xb), .silent_ms = 1300};
  EXPECT_EQ(Explain(group, 1500).verdict,
            "nothing from peer pb (host h2) has reached peer pa (host h1) for 1.3 s: the path from "
            "the former to the latter is cut or very slow");
  group.ring[1].load.worst = control::WorstLane{.peer = PeerId(0xa), .silent_ms = 1200};
  EXPECT_THAT(Explain(group, 1500).verdict, HasSubstr("the path between them is cut"));
  group.ring[1].load.worst = std::nullopt;
  group.ring[2].load.worst = control::WorstLane{.peer = PeerId(0xb), .silent_ms = 1200};
  EXPECT_THAT(Explain(group, 1500).verdict,
              HasSubstr("all other peers wait for peer pb (host h2) with m2: its host"));
  group.ring[1].unheard_ms = 1300;
  EXPECT_EQ(Explain(group, 1500).verdict,
            "peer pb (host h2) with m2 was last heard 1.3 s ago: its longhaul-peerd stands still, "
            "or its host or network is gone");
}

TEST(Explain, AMissingVoteIsTheCauseUnlessItsMemberIsInAnOp) {
  GroupView group = ThreePeers();
  group.waiting_for = "waiting for 1 of 3 votes: m2";
  group.members[0].voting = group.members[2].voting = true;
  group.ring[1].load.oldest = OpenOp(control::OpPhase::kTransfer, 3000);
  group.ring[1].load.worst = control::WorstLane{.peer = PeerId(0xa), .stalled_ms = 2000};
  EXPECT_THAT(Explain(group, 1500).verdict, HasSubstr("to peer pa (host h1) stalls"));
  EXPECT_THAT(Explain(group, 1500).facts, ::testing::Contains("waiting for 1 of 3 votes: m2"));
  group.ring[1].load = {};
  EXPECT_EQ(Explain(group, 1500).verdict, "waiting for 1 of 3 votes: m2");
}

TEST(Explain, NamesTheFetchTheStoreAndTheBlockedPair) {
  GroupView group = ThreePeers();
  for (PeerView& peer : group.ring) peer.load = {};
  group.blocked = {{{PeerId(0xa), PeerId(0xb), PeerId(0xc)}, "no route"}};
  EXPECT_THAT(Explain(group, 1500).verdict, HasSubstr("peers pa and pb cannot reach each other"));
  group.waiting_for = "sync waiting for 1 of 3 members: m3";
  group.members[2].fetch = control::FetchProgress{12000000, 40000000, 3000000, 2};
  EXPECT_EQ(Explain(group, 1500).verdict,
            "m3 at peer pc fetches the shared state: 12.0 MB of 40.0 MB, 3.0 MB/s from 2 sources");
  EXPECT_THAT(Explain(group, 1500, 1800).verdict,
              HasSubstr("the coordinator's store is slow: a write took 1.8 s"));
}

TEST(Explain, LongListsAreCut) {
  GroupView group = TwoPeers();
  for (uint64_t i = 10; i < 30; ++i) group.members.push_back({MemberId(i), PeerId(0xc)});
  EXPECT_THAT(Explain(group, 1500).facts[0], HasSubstr("m17 and 12 more;"));
}

}  // namespace
}  // namespace longhaul::coordinator
