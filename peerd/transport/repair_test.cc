// Tests links that lose lanes. Lanes are cut at every byte, are stalled, or are lost all at once.
// The peer is alive, is gone, or has given the link up. The tests use the in-memory network, with
// seeds, and loopback TCP.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/prng.h"
#include "peerd/io/fake_ring.h"
#include "peerd/transport/testing.h"

namespace longhaul::peerd {
namespace {

using ::testing::HasSubstr;

// ------------------------------------------------------------------------------ every byte

class RepairSeeds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, RepairSeeds, ::testing::Range(1, 21));

// Connection 0 is the control lane, connections 1 and 2 are data lanes.
TEST_P(RepairSeeds, CutAtEveryByteOfEveryLaneLosesNothingAndRepeatsNothing) {
  constexpr uint64_t kHandshakeBytes = 128 + 40;
  uint64_t lost = 0;
  for (int connection = 0; connection < 3; ++connection) {
    for (uint64_t byte = GetParam(); byte < 700; byte += 20) {
      const bool from_dialer = (byte / 20 + GetParam()) % 2 == 0;
      const uint64_t cut = byte + (from_dialer ? kHandshakeBytes : 96);
      TransportOptions options;
      if (byte % 3 == 0) options.zero_copy = TransportOptions::ZeroCopy::kOn;
      PeerWorld world(Rings::kFake, GetParam() * 10000 + byte * 3 + connection, 2, options);
      world.fake->CutConnection(connection, from_dialer, cut);
      Traffic traffic(&world);
      world.Open(0, 1);
      ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
      for (int i = 0; i < 6; ++i) {
        traffic.Segment(0, 1, 100 * i, 50 + i);
        traffic.Segment(1, 0, 3000 * i, i == 3 ? 40000 : 10 + i);
        // Some are too long for a control lane: they come in parts.
        traffic.Frame(0, 1, i == 2 ? 15000 : kReadyBodyBytes + i);
        traffic.Frame(1, 0, kReadyBodyBytes + 5 * i);
      }
      ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }))
          << "connection " << connection << " cut after " << cut;
      traffic.ExpectOnce();
      ExpectNoLinkWasLost(&world);
      lost += world.at(0).transport->GetStats().lanes_lost;
    }
  }
  EXPECT_GT(lost, 30u) << "most of the cuts hit a lane in use";
}

// ------------------------------------------------------------------------------ which lanes

TEST_P(RepairSeeds, AnyNumberOfLanesMayBreakAtOnceWithThePeerAlive) {
  for (int mask = 1; mask < 16; ++mask) {
    TransportOptions options;
    options.lanes = 3;
    PeerWorld world(Rings::kFake, GetParam() * 100 + mask, 2, options);
    Prng random(GetParam() * 31 + mask);
    Traffic traffic(&world);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    for (int i = 0; i < 10; ++i) {
      traffic.Segment(0, 1, 1000 * i, 30000);
      traffic.Segment(1, 0, 7000 * i, 30000);
      traffic.Frame(0, 1, 500);
      traffic.Frame(1, 0, 500);
    }
    for (uint64_t i = random.Below(30); i > 0; --i) world.Step();
    for (int connection = 0; connection < 4; ++connection) {
      if (mask >> connection & 1) world.fake->CutConnection(connection, random.Chance(0.5), 0);
    }
    for (int i = 0; i < 5; ++i) traffic.Frame(1, 0, 100);
    ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); })) << "mask " << mask;
    ASSERT_TRUE(world.Until([&] {
      return world.at(0).transport->GetStats().lanes_up == 4 &&
             world.at(1).transport->GetStats().lanes_up == 4;
    })) << "they come back";
    traffic.ExpectOnce();
    ExpectNoLinkWasLost(&world);
    const TransportStats stats = world.at(0).transport->GetStats();
    EXPECT_EQ(stats.lanes_lost, static_cast<uint64_t>(__builtin_popcount(mask)));
    EXPECT_EQ(stats.lanes_redialled, stats.lanes_lost);
    if (mask == 1) {
      EXPECT_EQ(stats.segments_repeated, 0u);
    }
  }
}

TEST_P(RepairSeeds, StalledLaneIsReplacedWhileOthersAreHeard) {
  for (int stalled = 0; stalled < 3; ++stalled) {
    PeerWorld world(Rings::kFake, GetParam() * 10 + stalled, 2);
    Traffic traffic(&world);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    world.fake->StallConnection(stalled, true);
    for (int i = 0; i < 10; ++i) {
      traffic.Segment(0, 1, 1000 * i, 30000);
      traffic.Segment(1, 0, 7000 * i, 30000);
      traffic.Frame(i % 2, 1 - i % 2, 500);
    }
    const Tick start = world.Now();
    ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
    EXPECT_LE(world.Now() - start, Millis(2200)) << "detect_ms and a PING";
    traffic.ExpectOnce();
    ExpectNoLinkWasLost(&world);
    EXPECT_GE(world.at(0).transport->GetStats().lanes_lost, 1u);
  }
}

// A tunnel with a small MTU behind a firewall that drops ICMP: handshakes and PINGs pass.
TEST_P(RepairSeeds, WhereLargePacketsVanishLanesUseSmallOnes) {
  TransportOptions options;
  options.lanes = 1 + GetParam() % 8;
  PeerWorld world(Rings::kFake, GetParam(), 2, options);
  Traffic traffic(&world);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  world.fake->SwallowLarge(600);
  // Traffic to the dialer, to the acceptor, or to both.
  for (int i = 0; i < 10; ++i) {
    if (GetParam() % 3 != 0) traffic.Segment(0, 1, 1000 * i, 30000);
    if (GetParam() % 3 != 1) traffic.Segment(1, 0, 7000 * i, 30000);
  }
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }, 30000));
  traffic.ExpectOnce();
  ExpectNoLinkWasLost(&world);
  for (auto& peer : world.peers) {
    EXPECT_LE(peer->transport->GetStats().lanes_up, 1 + options.lanes) << "each is lost once";
  }
  const uint64_t small = world.at(0).transport->GetStats().links_small_packets +
                         world.at(1).transport->GetStats().links_small_packets;
  EXPECT_GE(small, 1u);
}

// Over a sealed control lane, the handshake of TLS is longer than the largest packet.
TEST_P(RepairSeeds, WhereLargePacketsVanishALostControlLaneIsReplaced) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  Traffic traffic(&world);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  world.fake->SwallowLarge(600);
  world.fake->CutConnection(0, true, 0);
  ASSERT_TRUE(world.Until([&] { return world.at(0).transport->GetStats().lanes_redialled == 1; }));
  traffic.Segment(0, 1, 1000, 500);
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
  ExpectNoLinkWasLost(&world);
}

TEST_P(RepairSeeds, IdleStalledLanesAreNoticedAndSilenceStillEndsTheLink) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  world.fake->StallConnection(1 + GetParam() % 2, true);
  ASSERT_TRUE(world.Until([&] { return world.at(0).transport->GetStats().lanes_redialled == 1; }));
  ASSERT_TRUE(!world.Until([&] { return !world.Linked(0, 1); }, 5000));
  for (int i = 0; i < world.fake->connections(); ++i) world.fake->StallConnection(i, true);
  const Tick start = world.Now();
  ASSERT_TRUE(world.Until([&] { return world.at(0).up.empty() && world.at(1).up.empty(); }));
  EXPECT_LE(world.Now() - start, Millis(1700));
  EXPECT_THAT(world.at(0).downs[PeerId(2)][0] + world.at(1).downs[PeerId(1)][0],
              HasSubstr("silent for 1500 ms"));
  EXPECT_GE(world.at(0).silences[PeerId(2)] + world.at(1).silences[PeerId(1)], 1500u);
}

TEST_P(RepairSeeds, ForgottenSegmentsAreNotSentAgain) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  Traffic traffic(&world);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (int i = 0; i < 20; ++i) traffic.Segment(0, 1, 1000 * i, 200000, 1 + i % 2);
  for (int i = 0; i < GetParam(); ++i) world.Step();
  // Owners 1 and 2 do not want their segments repeated, whether these are dropped or not.
  world.at(0).transport->DropSegments(FrameType::kData, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  world.at(0).forgotten = {1, 2};
  world.fake->CutConnection(1, true, 0);
  world.fake->CutConnection(2, false, 0);
  ASSERT_TRUE(world.Until([&] {
    return world.at(0).sent == world.at(0).started &&
           world.at(0).transport->GetStats().lanes_redialled == 2;
  }));
  EXPECT_EQ(world.at(0).transport->GetStats().segments_repeated, 0u);
  for (const auto& [segment, times] : world.at(1).arrived) EXPECT_EQ(times, 1);
  ExpectNoLinkWasLost(&world);
}

// A detach while the lane breaks is answered, and then nothing writes to the memory.
TEST_P(RepairSeeds, DetachOfALaneThatBreaksIsAnswered) {
  for (int steps = 0; steps < 30; steps += 3) {
    PeerWorld world(Rings::kFake, GetParam() * 100 + steps, 2);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    world.at(0).memory.assign(2 << 20, 'x');
    world.at(1).memory.assign(2 << 20, 'o');
    world.at(0).Send(PeerId(2), 0, 1 << 20, 1);
    world.at(0).Send(PeerId(2), 1 << 20, 1 << 20, 2);
    ASSERT_TRUE(world.Until([&] { return world.at(1).headers > 0; }));
    world.fake->CutConnection(1, true, 0);
    world.fake->CutConnection(2, true, 0);
    for (int i = 0; i < steps; ++i) world.Step();
    world.at(1).discard = true;
    world.at(1).transport->DetachReceives(kRun, {.op = OpOrdinal(1), .attempt = Epoch(1)}, 7);
    ASSERT_TRUE(world.Until([&] { return world.at(1).detached[7] == 1; }));
    const auto frozen = world.at(1).memory;
    ASSERT_TRUE(world.Until([&] {
      return world.at(0).sent == world.at(0).started &&
             world.at(0).transport->GetStats().lanes_redialled == 2;
    }));
    for (int i = 0; i < 50; ++i) world.Step();
    EXPECT_EQ(world.at(1).memory, frozen);
    ExpectNoLinkWasLost(&world);
  }
}

// ------------------------------------------------------------------------------ which end

TEST_P(RepairSeeds, PeerThatIsGoneIsReportedAtOnceByBothKindsOfEnds) {
  for (const int gone : {0, 1}) {
    PeerWorld world(Rings::kFake, GetParam() * 2 + gone, 2);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    const std::string address = world.at(gone).transport->listen_address();
    world.fake->Refuse(address, true);
    for (int i = 0; i < 3; ++i) world.fake->CutConnection(i, true, 0);
    const Tick start = world.Now();
    auto& survivor = world.at(1 - gone);
    ASSERT_TRUE(world.Until([&] { return survivor.up.empty(); }));
    EXPECT_LE(world.Now() - start, Millis(20));
    EXPECT_EQ(survivor.downs.begin()->second[0],
              "connection refused by " + address + " after a lane broke");
  }
}

TEST_P(RepairSeeds, PeerThatHasGivenTheLinkUpSaysSoToWhoeverDialsAgain) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (int i = 0; i < 3; ++i) world.fake->StallConnection(i, true);
  world.at(1).transport->KeepLinks(kRun, 0, Epoch(2), {});
  for (int i = 0; i < 20; ++i) world.Step();
  for (int i = 0; i < 3; ++i) world.fake->StallConnection(i, false);
  for (int i = 0; i < 3; ++i) world.fake->CutConnection(i, true, 0);
  const Tick start = world.Now();
  ASSERT_TRUE(world.Until([&] { return world.at(0).up.empty(); }));
  EXPECT_LE(world.Now() - start, Millis(600));
  EXPECT_THAT(world.at(0).downs[PeerId(2)][0],
              ::testing::AnyOf(HasSubstr("the other side has given the link up"),
                               HasSubstr("closed by the other side")));
  EXPECT_TRUE(world.at(1).downs.empty());
  // The peer lives. A broken connection could mean a death, and this report must not.
  const bool given_up = world.at(0).downs[PeerId(2)][0].ends_with("given the link up");
  EXPECT_EQ(world.at(0).silences[PeerId(2)], given_up ? TransportOptions().detect_ms : 0u);
}

TEST_P(RepairSeeds, OneEndThatBreaksTheLinkTellsTheOther) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  const int breaker = GetParam() % 2;
  world.at(breaker).transport->BreakLink({kRun, world.at(1 - breaker).id}, "for a reason");
  const Tick start = world.Now();
  ASSERT_TRUE(world.Until([&] { return world.at(0).up.empty() && world.at(1).up.empty(); }));
  EXPECT_LE(world.Now() - start, Millis(600));
  EXPECT_EQ(world.at(breaker).downs.begin()->second[0], "for a reason");
  // The next epoch builds the link anew.
  world.Open(0, 1, 2);
  EXPECT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
}

TEST_P(RepairSeeds, LinkIsGivenUpWhenItsDataLanesCannotBeDialledAgain) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  // New connections stall.
  for (int i = 3; i < 200; ++i) world.fake->StallConnection(i, true);
  world.fake->CutConnection(1, true, 0);
  world.fake->CutConnection(2, true, 0);
  const Tick start = world.Now();
  ASSERT_TRUE(world.Until([&] { return world.at(0).up.empty() && world.at(1).up.empty(); }));
  EXPECT_GE(world.Now() - start, Millis(3000));
  EXPECT_LE(world.Now() - start, Millis(3300));
  EXPECT_THAT(world.at(0).downs[PeerId(2)][0] + world.at(1).downs[PeerId(1)][0],
              HasSubstr("were lost and none was replaced in 3000 ms"));
}

TEST_P(RepairSeeds, LinkStaysWhenDataLanesThatItCanDoWithoutCannotBeBuilt) {
  for (const int wants : {0, 1}) {
    PeerWorld world(Rings::kFake, GetParam(), 2);
    world.Open(0, 1, 1, false);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    for (int i = 1; i < 200; ++i) world.fake->StallConnection(i, true);
    Peer& from = world.at(wants);
    Peer& to = world.at(1 - wants);
    from.memory.resize(1000, 'x');
    to.memory.resize(1000);
    from.transport->WantDataLanes({kRun, to.id});
    from.SendChunk(to.id, 0, 1000, 1);
    const Tick later = world.Now() + Seconds(8);
    ASSERT_TRUE(world.Until([&] { return world.Now() >= later; }));
    EXPECT_TRUE(world.Linked(0, 1));
    EXPECT_TRUE(world.at(0).downs.empty() && world.at(1).downs.empty());
    EXPECT_EQ(to.segments, 0);
    for (int i = 1; i < 200; ++i) world.fake->StallConnection(i, false);
    from.transport->WantDataLanes({kRun, to.id});
    EXPECT_TRUE(world.Until([&] { return to.segments == 1; })) << "what was queued goes on";
  }
}

TEST_P(RepairSeeds, NewEpochDoesNotWaitForALaneThatIsMissing) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (int i = 3; i < 200; ++i) world.fake->StallConnection(i, true);
  world.fake->CutConnection(1, true, 0);
  ASSERT_TRUE(world.Until([&] { return world.at(0).transport->GetStats().lanes_lost == 1; }));
  world.Open(0, 1, 2);
  ASSERT_TRUE(world.Until(
      [&] { return world.at(0).ups[PeerId(2)] == 2 && world.at(1).ups[PeerId(1)] == 2; }, 1000));
  EXPECT_TRUE(world.at(0).downs.empty());
}

TEST_P(RepairSeeds, LanesAreDialledWithTheTokenThatBothHave) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  // One end is an epoch ahead, and the other end does not know that epoch yet.
  const int ahead = GetParam() % 2;
  world.at(ahead).transport->OpenLinks(kRun, 0, Epoch(2), "the next token",
                                       {world.Request(1 - ahead, ahead == 0, true)},
                                       world.Now() + Seconds(5));
  for (int i = 0; i < 3; ++i) world.fake->CutConnection(i, true, 0);
  ASSERT_TRUE(world.Until([&] { return world.at(0).transport->GetStats().lanes_redialled == 3; }));
  ASSERT_TRUE(world.Linked(0, 1));
}

// ------------------------------------------------------------------------------ while it waits

TEST(RepairTest, AsManyOpsAsMembersMayHaveOpenBreakNoLink) {
  PeerWorld world(Rings::kFake, 1, 2, {}, {.partial = false});
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  // Nothing is acknowledged before everything is sent.
  world.fake->StallConnection(0, true);
  const uint64_t ops = 4 * LH_OPS_OPEN_MAX;
  for (uint64_t op = 1; op <= ops; ++op) {
    world.at(0).SendReady(world.at(1).id, op, LH_ONE_SHOT_BYTES_MAX);
  }
  for (int i = 0; i < 10; ++i) world.Step();
  world.fake->StallConnection(0, false);
  EXPECT_TRUE(world.Until([&] { return world.at(1).frames.size() == ops; }));
  ExpectNoLinkWasLost(&world);
}

// One op has more segments than may be kept for repair.
TEST(RepairTest, WhatIsKeptForRepairDoesNotGrowWithTheOp) {
  PeerWorld world(Rings::kFake, 1, 2, {}, {.partial = false});
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (int i = 0; i < 2; ++i) world.at(i).memory.resize(1 << 10);
  constexpr int kCount = 2 * LH_SEGMENTS_UNACKED_MAX + 1000;
  for (int i = 0; i < kCount; ++i) world.at(0).Send(PeerId(2), 0, 16, 1 + i);
  uint64_t most = 0;
  ASSERT_TRUE(world.Until([&] {
    most = std::max(most, world.at(0).transport->GetStats().segments_unacked);
    return world.at(1).segments == kCount;
  }));
  EXPECT_LE(most, uint64_t{LH_SEGMENTS_UNACKED_MAX});
  // PINGs acknowledge the rest.
  EXPECT_TRUE(world.Until([&] { return world.at(0).transport->GetStats().segments_unacked == 0; }));
  ExpectNoLinkWasLost(&world);
}

// Nothing is acknowledged, so lanes get exactly as many segments as are kept. Then all lanes are
// lost.
TEST(RepairTest, AtTheLimitOfWhatIsKeptForRepairTheRestWaitsAndALostLaneLosesNothing) {
  TransportOptions options;
  options.detect_ms = 60000;
  PeerWorld world(Rings::kFake, 1, 2, options, {.stream_bytes_max = 64 << 20, .partial = false});
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (int i = 0; i < 2; ++i) world.at(i).memory.resize(1 << 10);
  for (int i = 1; i < world.fake->connections(); ++i) world.fake->StallConnection(i, true);
  constexpr int kCount = LH_SEGMENTS_UNACKED_MAX + 1000;
  for (int i = 0; i < kCount; ++i) world.at(0).Send(PeerId(2), 0, 16, 1 + i);
  for (int i = 0; i < 20000; ++i) world.Step();
  EXPECT_EQ(world.at(0).transport->GetStats().segments_unacked, uint64_t{LH_SEGMENTS_UNACKED_MAX});
  EXPECT_EQ(world.at(0).sent.size(), size_t{LH_SEGMENTS_UNACKED_MAX});
  EXPECT_EQ(world.at(1).segments, 0);
  for (int i = 1; i < world.fake->connections(); ++i) world.fake->CutConnection(i, true, 0);
  for (int i = 1; i < world.fake->connections(); ++i) world.fake->StallConnection(i, false);
  ASSERT_TRUE(world.Until([&] { return world.at(1).segments == kCount; }));
  for (const auto& [segment, times] : world.at(1).arrived) ASSERT_EQ(times, 1);
  EXPECT_EQ(world.at(1).arrived.size(), size_t{kCount});
  EXPECT_GT(world.at(0).transport->GetStats().segments_repeated, 0u);
  ExpectNoLinkWasLost(&world);
}

TEST_P(RepairSeeds, NobodyIsBusyWhileALaneIsMissing) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  const auto steps_in = [&](int64_t us) {
    const Tick end = world.Now() + us;
    int steps = 0;
    for (; world.Now() < end; ++steps) world.Step();
    return steps;
  };
  // Longer than the first requests for lanes are valid.
  steps_in(Seconds(5));
  for (int i = 3; i < 200; ++i) world.fake->StallConnection(i, true);
  world.fake->CutConnection(1, true, 0);
  steps_in(Millis(10));
  ASSERT_EQ(world.at(0).transport->GetStats().lanes_lost, 1u);
  // A step lasts a millisecond if there is nothing to do.
  EXPECT_LT(steps_in(Seconds(1)), 2000);
}

TEST_P(RepairSeeds, ProbeThatGetsNoAnswerMakesNobodyElseLookAlive) {
  PeerWorld world(Rings::kFake, GetParam(), 3);
  world.Open(1, 0);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  world.Open(2, 0);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 2); }));
  ASSERT_EQ(world.fake->connections(), 6);
  const int64_t detect = Millis(TransportOptions().detect_ms);
  // The lanes of one peer break, and probes of that peer get no answer.
  world.fake->Ignore(world.at(1).transport->listen_address(), true);
  for (int i = 6; i < 200; ++i) world.fake->StallConnection(i, true);
  for (int i = 0; i < 3; ++i) world.fake->CutConnection(i, true, 0);
  const Tick half = world.Now() + detect / 2;
  ASSERT_TRUE(world.Until([&] { return world.Now() >= half; }));
  // Meanwhile another peer falls silent.
  for (int i = 3; i < 6; ++i) world.fake->StallConnection(i, true);
  const Tick silent = world.Now();
  ASSERT_TRUE(world.Until([&] { return !world.at(0).up.count(PeerId(3)); }));
  EXPECT_LE(world.Now() - silent, detect + detect / 5);
}

// ------------------------------------------------------------------------------ at random

// Three peers. Connections are cut or stalled for a while at random, replacements included.
TEST_P(RepairSeeds, EverythingArrivesOnceWhateverIsCut) {
  const uint64_t seed = GetParam();
  Prng random(seed * 77);
  TransportOptions options;
  options.lanes = 1 + random.Below(4);
  if (random.Chance(0.5)) options.zero_copy = TransportOptions::ZeroCopy::kOn;
  PeerWorld world(Rings::kFake, seed, 3, options,
                  {.stream_bytes_max = 20000 + random.Below(200000)});
  Traffic traffic(&world);
  world.Open(0, 1);
  world.Open(0, 2);
  world.Open(2, 1);
  const auto linked = [&] {
    return world.Linked(0, 1) && world.Linked(0, 2) && world.Linked(1, 2);
  };
  ASSERT_TRUE(world.Until(linked));
  int stalled = -1;
  for (int round = 0; round < 400; ++round) {
    for (uint64_t k = random.Below(20); k > 0; --k) world.Step();
    const int from = static_cast<int>(random.Below(3));
    const int to = (from + 1 + static_cast<int>(random.Below(2))) % 3;
    const int connection = static_cast<int>(random.Below(world.fake->connections() + 1));
    switch (random.Below(10)) {
      case 0:
        world.fake->CutConnection(connection, random.Chance(0.5), random.Below(300000));
        break;
      case 1:
        if (stalled >= 0) world.fake->StallConnection(stalled, false);
        stalled = stalled >= 0 ? -1 : connection;
        if (stalled >= 0) world.fake->StallConnection(stalled, true);
        break;
      case 2:
      case 3:
        traffic.Frame(from, to, kReadyBodyBytes + random.Below(random.Chance(0.3) ? 300000 : 4000));
        break;
      default: {
        const auto bytes =
            static_cast<uint32_t>(1 + random.Below(random.Chance(0.5) ? 200000 : 2000));
        traffic.Segment(from, to, random.Below((1 << 20) - bytes), bytes);
      }
    }
  }
  if (stalled >= 0) world.fake->StallConnection(stalled, false);
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
  traffic.ExpectOnce();
  ExpectNoLinkWasLost(&world);
}

// ------------------------------------------------------------------------------ TCP

// Returns the sockets of this process whose local or remote port is one of these.
std::vector<int> ConnectedTo(const std::vector<uint16_t>& ports) {
  std::vector<int> found;
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  for (int fd = 3; fd < static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 4096)); ++fd) {
    sockaddr_in local{}, remote{};
    socklen_t length = sizeof(local);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) != 0) continue;
    length = sizeof(remote);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &length) != 0) continue;
    if (local.sin_family != AF_INET) continue;
    for (const uint16_t port : ports) {
      if (ntohs(local.sin_port) == port || ntohs(remote.sin_port) == port) found.push_back(fd);
    }
  }
  return found;
}

TEST(RepairTcpTest, EverythingArrivesOnceOverTcpWhoseConnectionsAreShutDown) {
  for (const auto& [rings, zero_copy] :
       {std::pair{Rings::kEach, false}, {Rings::kEach, true}, {Rings::kEpollEach, false}}) {
    TransportOptions options;
    options.lanes = 3;
    if (zero_copy) options.zero_copy = TransportOptions::ZeroCopy::kOn;
    PeerWorld world(rings, 1, 2, options);
    Prng random(5);
    Traffic traffic(&world);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    std::vector<uint16_t> ports;
    for (int i = 0; i < 2; ++i) {
      const auto address = ParseHostPort(world.at(i).transport->listen_address());
      ports.push_back(address->port);
    }
    for (int round = 0; round < 200; ++round) {
      for (int i = 0; i < 4; ++i) {
        traffic.Segment(i % 2, 1 - i % 2, random.Below(1 << 19), 1 + random.Below(1 << 19));
        traffic.Frame(i % 2, 1 - i % 2, i == 3 ? 100000 : 100);
      }
      for (uint64_t i = random.Below(6); i > 0; --i) world.Step();
      if (round % 4 != 0) continue;
      const auto sockets = ConnectedTo(ports);
      if (sockets.empty()) continue;
      // Shuts down one direction, the other, or both. Sometimes shuts down all sockets.
      const int how = static_cast<int>(random.Below(3));
      const int kinds[] = {SHUT_RDWR, SHUT_WR, SHUT_RD};
      const bool all = random.Chance(0.1);
      for (const int fd : sockets) {
        if (all || fd == sockets[random.Below(sockets.size())]) shutdown(fd, all ? 2 : kinds[how]);
      }
    }
    ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
    traffic.ExpectOnce();
    ExpectNoLinkWasLost(&world);
    EXPECT_GE(world.at(0).transport->GetStats().lanes_lost, 10u);
    ASSERT_TRUE(world.Until([&] { return world.at(0).transport->GetStats().lanes_up == 4; }));
  }
}

}  // namespace
}  // namespace longhaul::peerd
