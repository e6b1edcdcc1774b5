// Tests links of two peers that cannot reach each other. The links go through a third peer.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "peerd/transport/auth.h"
#include "peerd/transport/testing.h"
#include "proto/wire/handshake.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

constexpr int kA = 0;
constexpr int kB = 1;
constexpr int kRelay = 2;

class TunnelWorld : public PeerWorld {
 public:
  explicit TunnelWorld(Rings rings, int count = 3, uint32_t lanes = 2,
                       LaneEncryption encryption = LaneEncryption::kOff)
      : PeerWorld(rings, 1, count, {.lanes = lanes, .detect_ms = 600, .encryption = encryption}) {
    for (const auto& peer : peers) peer->memory.assign(kBytes, uint8_t(peer->id.value()));
  }

  // A dials B through the relay.
  void OpenThrough(int relay, uint64_t epoch = 1, int64_t ms = 5000) {
    OpenBetween(kA, kB, relay, epoch, ms);
  }
  void OpenBetween(int a, int b, int relay, uint64_t epoch = 1, int64_t ms = 5000) {
    for (const int from : {a, b}) {
      LinkRequest request = Request(from == a ? b : a, from == a, true);
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
  // B waits for a lane from A through the relay, and A does not dial.
  void AwaitAAtB() {
    OpenToRelay(kRelay);
    LinkRequest request = Request(kA, false, true);
    request.relay = at(kRelay).id;
    at(kB).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {request}, Now() + Seconds(20));
  }
  SocketAddress RelayAddress() {
    return *NumericAddress(*ParseHostPort(at(kRelay).transport->listen_address()));
  }
  void OpenAll() {
    OpenToRelay(kRelay);
    OpenThrough(kRelay);
    ASSERT_TRUE(Until([&] { return Linked(kA, kB); }));
  }
  // Sends frames and segments in both directions, and waits until all have arrived.
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
INSTANTIATE_TEST_SUITE_P(Rings, TunnelTest,
                         testing::Values(Rings::kFake, Rings::kEach, Rings::kEpollEach));

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
  // The next epoch wants a straight link again.
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

// A relay has to know both peers: nobody can make it connect to other hosts.
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

// A link keeps its path while one group wants it. Another group then uses the same path.
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

// ------------------------------------------------------------------------------ a relay that lies

// The relay changes one byte of what it carries, in each direction of each lane. The bit is flipped
// on the connection that the relay has dialled, so between the relay and B.
TEST(TunnelForgery, AByteOfASealedLaneThatTheRelayChangesCostsOneLaneAndNoData) {
  uint64_t unauthentic = 0;
  int tries = 0;
  for (int connection = 0; connection < 6; ++connection) {
    for (const bool to_b : {true, false}) {
      SCOPED_TRACE(testing::Message() << "connection " << connection << (to_b ? " to B" : " to A"));
      TunnelWorld world(Rings::kFake, 3, 2, LaneEncryption::kRequire);
      Traffic traffic(&world);
      world.OpenToRelay(kRelay);
      const int begin = world.fake->connections();
      world.OpenThrough(kRelay);
      ASSERT_TRUE(world.Until([&] { return world.Linked(kA, kB); }));
      const int forged = begin + connection;
      ASSERT_EQ(world.fake->connections(), begin + 6) << "three lanes, with two connections each";
      world.fake->FlipBit(forged, to_b, world.fake->BytesSent(forged, to_b) + 3);
      for (const auto& [from, to] : {std::pair(kA, kB), std::pair(kB, kA)}) {
        traffic.Frame(from, to, 100);
        for (int n = 0; n < 8; ++n) traffic.Segment(from, to, 5000 * n, 5000);
      }
      ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
      traffic.ExpectOnce();
      for (const auto& peer : world.peers) unauthentic += peer->transport->GetStats().unauthentic;
      EXPECT_EQ(world.at(kRelay).transport->GetStats().unauthentic, 0u);
      ExpectNoLinkWasLost(&world);
      ++tries;
    }
  }
  EXPECT_GT(unauthentic, static_cast<uint64_t>(tries / 2)) << "the others hit lanes not in use";
}

// Somebody without the token repeats a HELLO that it saw, which names a peer as its relay.
TEST(TunnelForgery, ARelayAsksForTheTokenAndCountsWhoDoesNotHaveIt) {
  TunnelWorld world(Rings::kFake);
  LogLines log;
  world.AwaitAAtB();
  const SocketAddress relay = world.RelayAddress();
  const int fd = *world.fake->sockets().Open(relay.family());
  LaneHello hello = HelloOf(world.at(kA).id, world.at(kB).id);
  hello.relay = world.at(kRelay).id;
  hello.sealed = SealedByDefault();
  const auto first = Encode(hello);
  const auto confirm = Encode(LaneConfirm{});
  std::string sent(first.begin(), first.end());
  sent.append(confirm.begin(), confirm.end());
  bool connected = false;
  world.fake->Connect(fd, relay.get(), relay.length, [&](IoResult) { connected = true; });
  ASSERT_TRUE(world.Until([&] { return connected; }));
  bool done = false;
  world.fake->Send(fd, sent.data(), sent.size(), true, [&](IoResult) { done = true; });
  ASSERT_TRUE(world.Until([&] { return done; }));
  EXPECT_TRUE(
      world.Until([&] { return RefusedFor(world.at(kRelay), CallerRefusal::kToken) == 1; }));
  EXPECT_EQ(log.Count("caller at the data port refused reason=token peer=p1 "), 1);
  EXPECT_FALSE(world.at(kB).up.contains(world.at(kA).id));
  EXPECT_TRUE(world.Until([&] { return world.at(kRelay).transport->GetStats().tunnels == 0; }));
  world.fake->sockets().Close(fd);
}

// ------------------------------------------------------------------------------ limits

// The HELLO of a control lane from `dialer` to `acceptor` through `relay`.
std::string HelloThrough(PeerId dialer, PeerId acceptor, PeerId relay, uint8_t nonce) {
  LaneHello hello = HelloOf(dialer, acceptor, nonce);
  hello.relay = relay;
  const auto bytes = Encode(hello);
  return std::string(bytes.begin(), bytes.end());
}

// A stranger who repeats the HELLO of a peer can make a relay connect to another peer. The stranger
// can do no more.
TEST(TunnelLimits, OfLanesThatAreBeingOpenedTheOldestMakesRoom) {
  TunnelWorld world(Rings::kFake);
  world.AwaitAAtB();  // A comes later
  const SocketAddress relay = world.RelayAddress();
  constexpr int kStrangers = LH_TUNNELS_OPENING_MAX + 10;
  std::vector<int> fds;
  std::vector<std::string> hellos;
  int ended = 0;
  int answered = 0;
  uint32_t most = 0;
  std::vector<std::array<char, kLaneAnswerBytes>> answers(kStrangers);
  hellos.reserve(kStrangers);
  for (int i = 0; i < kStrangers; ++i) {
    fds.push_back(*world.fake->sockets().Open(relay.family()));
    hellos.push_back(HelloThrough(world.at(kA).id, world.at(kB).id, world.at(kRelay).id,
                                  static_cast<uint8_t>(i)));
    bool sent = false;
    world.fake->Connect(fds[i], relay.get(), relay.length, [](IoResult) {});
    world.Step();
    world.fake->Send(fds[i], hellos[i].data(), hellos[i].size(), true,
                     [&](IoResult) { sent = true; });
    ASSERT_TRUE(world.Until([&] { return sent; }));
    world.fake->Recv(fds[i], answers[i].data(), answers[i].size(), true,
                     [&](IoResult result) { ++(result.value > 0 ? answered : ended); });
    for (int step = 0; step < 3; ++step) {
      world.Step();
      most = std::max(most, world.at(kRelay).transport->GetStats().tunnels);
    }
  }
  EXPECT_GE(most, LH_TUNNELS_OPENING_MAX);
  EXPECT_LE(most, LH_TUNNELS_OPENING_MAX + 1) << "one makes room";
  // A peer with the token gets through meanwhile.
  world.OpenThrough(kRelay);
  ASSERT_TRUE(world.Until([&] { return world.Linked(kA, kB); }, 1000));
  // The strangers that got an ANSWER send no CONFIRM. All of them end in time.
  EXPECT_TRUE(world.Until([&] { return answered + ended == kStrangers; }));
  EXPECT_GT(answered, 0);
  EXPECT_TRUE(world.Until([&] { return world.at(kRelay).transport->GetStats().tunnels == 3; }));
  world.Exchange();
  for (const int fd : fds) world.fake->sockets().Close(fd);
}

TEST(TunnelLimits, ARelayThatCarriesAsManyAsItMayRefusesMoreUntilSomeEnd) {
  constexpr int kC = 3;
  TunnelWorld world(Rings::kFake, 4, LH_LANES_MAX);
  for (const int end : {kA, kB, kC}) world.Open(end, kRelay, 1, /*data=*/false);
  ASSERT_TRUE(world.Until([&] {
    return world.Linked(kA, kRelay) && world.Linked(kB, kRelay) && world.Linked(kC, kRelay);
  }));
  const auto carried = [&] { return world.at(kRelay).transport->GetStats().tunnels; };
  world.OpenThrough(kRelay);
  ASSERT_TRUE(world.Until([&] { return world.Linked(kA, kB); }));
  ASSERT_EQ(carried(), LH_LANES_MAX + 1u);
  // The relay has two lanes too few, so the link uses fewer.
  world.OpenBetween(kA, kC, kRelay, 1, 20000);
  ASSERT_TRUE(world.Until([&] { return world.Linked(kA, kC) && carried() == LH_TUNNELS_MAX; }));
  world.OpenBetween(kB, kC, kRelay, 1, 2000);
  ASSERT_TRUE(world.Until([&] {
    EXPECT_LE(carried(), LH_TUNNELS_MAX);
    return !world.at(kB).downs[world.at(kC).id].empty();
  }));
  const std::string reason = world.at(kB).downs[world.at(kC).id].front();
  EXPECT_NE(reason.find("carries as many lanes as it may"), std::string::npos) << reason;
  EXPECT_TRUE(world.Linked(kA, kB) && world.Linked(kA, kC)) << "nobody makes room";
  world.Exchange();
  // A and B drop their link through the relay.
  for (const int end : {kA, kB}) {
    world.at(end).transport->KeepLinks(kRun, 0, Epoch(1), {world.at(kRelay).id, world.at(kC).id});
  }
  world.OpenBetween(kB, kC, kRelay, 1, 20000);
  EXPECT_TRUE(world.Until([&] { return world.Linked(kB, kC); }));
}

}  // namespace
}  // namespace longhaul::peerd
