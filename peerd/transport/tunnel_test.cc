// Links between two peers that cannot reach each other, through a third one.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "peerd/transport/testing.h"

namespace longhaul::peerd {
namespace {

constexpr int kA = 0;
constexpr int kB = 1;
constexpr int kRelay = 2;

class TunnelWorld : public PeerWorld {
 public:
  explicit TunnelWorld(Rings rings, int count = 3)
      : PeerWorld(rings, 1, count, {.lanes = 2, .detect_ms = 600}) {
    for (const auto& peer : peers) peer->memory.assign(kBytes, uint8_t(peer->id.value()));
  }

  // A dials B through the relay.
  void OpenThrough(int relay, uint64_t epoch = 1, int64_t ms = 5000) {
    for (const int from : {kA, kB}) {
      LinkRequest request = Request(1 - from, from == kA, true);
      request.relay = at(relay).id;
      request.endpoints = {at(relay).transport->listen_address()};
      at(from).transport->OpenLinks(kRun, 0, Epoch(epoch), kToken, {request}, Now() + Millis(ms));
    }
  }
  void OpenToRelay(int relay, uint64_t epoch = 1) {
    Open(kA, relay, epoch);
    Open(relay, kB, epoch);
    ASSERT_TRUE(Until([&] { return Linked(kA, relay) && Linked(kB, relay); }));
  }
  void OpenAll() {
    OpenToRelay(kRelay);
    OpenThrough(kRelay);
    ASSERT_TRUE(Until([&] { return Linked(kA, kB); }));
  }
  // Some of each in both directions, all of which arrive.
  void Exchange() {
    for (const auto& [from, to] : {std::pair(kA, kB), std::pair(kB, kA)}) {
      const uint64_t before = at(to).received;
      const size_t frames = at(to).frames.size();
      at(from).SendReady(at(to).id, ++cookie_, 100);
      for (uint64_t offset = 0; offset < kBytes; offset += kSegment) {
        at(from).Send(at(to).id, offset, kSegment, ++cookie_);
      }
      EXPECT_TRUE(Until([&] {
        return at(to).received == before + kBytes && at(to).frames.size() == frames + 1;
      }));
      EXPECT_EQ(at(to).memory, std::vector<uint8_t>(kBytes, uint8_t(at(from).id.value())));
      at(to).memory.assign(kBytes, uint8_t(at(to).id.value()));
    }
  }
  PeerId RelayOf(int from, int to) {
    for (const LinkStats& link : at(from).transport->GetLinkStats()) {
      if (link.link.peer == at(to).id) return link.relay;
    }
    return PeerId();
  }

  static constexpr uint32_t kSegment = 256 << 10;
  static constexpr uint64_t kBytes = 16 * kSegment;
  uint64_t cookie_ = 0;
};

class TunnelTest : public testing::TestWithParam<Rings> {};
INSTANTIATE_TEST_SUITE_P(Rings, TunnelTest, testing::Values(Rings::kFake, Rings::kEach));

TEST_P(TunnelTest, FramesAndSegmentsArriveInBothDirections) {
  TunnelWorld world(GetParam());
  world.OpenAll();
  EXPECT_EQ(world.RelayOf(kA, kB), world.at(kRelay).id);
  EXPECT_EQ(world.RelayOf(kB, kA), world.at(kRelay).id);
  EXPECT_EQ(world.RelayOf(kA, kRelay), PeerId());
  world.Exchange();
  const TransportStats stats = world.at(kRelay).transport->GetStats();
  EXPECT_EQ(stats.tunnels, 3u) << "a control lane and two data lanes";
  EXPECT_GE(stats.bytes_carried, 2 * world.kBytes);
  EXPECT_EQ(world.at(kRelay).received, 0u);
}

TEST_P(TunnelTest, TheLinkEndsWithItsRelay) {
  TunnelWorld world(GetParam());
  world.OpenAll();
  world.at(kRelay).transport->Close();
  EXPECT_TRUE(world.Until(
      [&] { return !world.Linked(kA, kB) && world.at(kA).up.empty() && world.at(kB).up.empty(); }));
}

TEST_P(TunnelTest, AStandingLinkGivesWayAndTheOldOneIsTold) {
  TunnelWorld world(GetParam());
  world.Open(kA, kB);
  ASSERT_TRUE(world.Until([&] { return world.Linked(kA, kB); }));
  const int ups = world.at(kA).ups[world.at(kB).id];
  world.OpenToRelay(kRelay, 2);
  world.OpenThrough(kRelay, 2);
  ASSERT_TRUE(world.Until([&] {
    return world.at(kA).ups[world.at(kB).id] > ups && world.RelayOf(kA, kB) &&
           world.RelayOf(kB, kA);
  }));
  EXPECT_EQ(world.at(kA).downs[world.at(kB).id].front(), "the link is to go another way");
  world.Exchange();
  // And back.
  const int through = world.at(kA).ups[world.at(kB).id];
  const int back = world.at(kB).ups[world.at(kA).id];
  world.Open(kA, kB, 3);
  ASSERT_TRUE(world.Until([&] {
    return world.at(kA).ups[world.at(kB).id] > through && world.at(kB).ups[world.at(kA).id] > back;
  }));
  EXPECT_EQ(world.RelayOf(kA, kB), PeerId());
  world.Exchange();
  EXPECT_TRUE(world.Until([&] { return world.at(kRelay).transport->GetStats().tunnels == 0; }));
}

TEST_P(TunnelTest, AnotherRelayTakesOver) {
  TunnelWorld world(GetParam(), 4);
  world.OpenAll();
  world.OpenToRelay(3, 2);
  world.OpenThrough(3, 2);
  ASSERT_TRUE(world.Until([&] {
    return world.Linked(kA, kB) && world.RelayOf(kA, kB) == world.at(3).id &&
           world.RelayOf(kB, kA) == world.at(3).id;
  }));
  world.Exchange();
}

// The relay has to know both: nobody makes it connect to where it does not go itself.
TEST_P(TunnelTest, APeerThatDoesNotKnowBothIsNoRelay) {
  TunnelWorld world(GetParam());
  world.Open(kA, kRelay);
  ASSERT_TRUE(world.Until([&] { return world.Linked(kA, kRelay); }));
  world.OpenThrough(kRelay, 1, 800);
  EXPECT_TRUE(world.Until([&] { return !world.at(kA).downs[world.at(kB).id].empty(); }));
  EXPECT_NE(world.at(kA).downs[world.at(kB).id].front().find("the epoch is not known there"),
            std::string::npos)
      << world.at(kA).downs[world.at(kB).id].front();
  EXPECT_EQ(world.at(kRelay).transport->GetStats().tunnels, 0u);
}

// A link of another group keeps its way: what one group has, the other one may use.
TEST_P(TunnelTest, TheWayThatAnotherGroupWantsIsGoodEnough) {
  TunnelWorld world(GetParam());
  world.OpenAll();
  for (const int from : {kA, kB}) {
    world.at(from).transport->OpenLinks(kRun, 7, Epoch(1), kToken,
                                        {world.Request(1 - from, from == kA, true)},
                                        world.Now() + Millis(5000));
  }
  const int ups = world.at(kA).ups[world.at(kB).id];
  EXPECT_TRUE(world.Until([&] { return world.at(kA).ups[world.at(kB).id] > ups; }));
  EXPECT_TRUE(world.at(kA).downs.empty());
  EXPECT_EQ(world.RelayOf(kA, kB), world.at(kRelay).id);
}

}  // namespace
}  // namespace longhaul::peerd
