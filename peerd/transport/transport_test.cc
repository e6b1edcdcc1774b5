// Tests whole transports: on the in-memory network, with seeds, and over loopback TCP on io_uring,
// with one ring for all peers or one ring for each, and on epoll.
#include "peerd/transport/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/prng.h"
#include "peerd/io/fake_ring.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/lane_handshake.h"
#include "peerd/transport/testing.h"

namespace longhaul::peerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Param {
  std::string name;
  Rings rings;
  uint64_t seed;
};
std::ostream& operator<<(std::ostream& out, const Param& param) { return out << param.name; }

class TransportTest : public ::testing::TestWithParam<Param> {
 protected:
  std::unique_ptr<PeerWorld> Make(int count, TransportOptions options = {}) {
    FakeRingOptions fake;
    fake.stream_bytes_max = GetParam().seed % 2 == 0 ? 64 << 10 : 1 << 20;
    return std::make_unique<PeerWorld>(GetParam().rings, GetParam().seed, count, options, fake);
  }
};

std::vector<Param> Params() {
  std::vector<Param> params = {{"OneUring", Rings::kOne, 1},
                               {"UringEach", Rings::kEach, 1},
                               {"EpollEach", Rings::kEpollEach, 1}};
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    params.push_back({"Fake" + std::to_string(seed), Rings::kFake, seed});
  }
  return params;
}
INSTANTIATE_TEST_SUITE_P(Rings, TransportTest, ::testing::ValuesIn(Params()),
                         [](const auto& info) { return info.param.name; });

TEST_P(TransportTest, LinkComesUpWithItsLanesAndCarriesFramesAndSegmentsBothWays) {
  auto world = Make(2);
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  EXPECT_EQ(world->at(0).ups[PeerId(2)], 1);
  EXPECT_EQ(world->at(1).ups[PeerId(1)], 1);
  constexpr uint32_t kBytes = 300000;
  constexpr int kCount = 16;
  for (int i = 0; i < 2; ++i) {
    auto& memory = world->at(i).memory;
    memory.resize(kBytes * kCount * 2);
    for (size_t b = 0; b < memory.size(); ++b)
      memory[b] = static_cast<uint8_t>(b * (3 + i) + b / 253);
  }
  // Each peer sends the half that the other peer does not send. So both end with the same bytes.
  const auto first = world->at(0).memory;
  const auto second = world->at(1).memory;
  for (int i = 0; i < kCount; ++i) {
    world->at(0).Send(PeerId(2), i * kBytes, kBytes, 1000 + i);
    world->at(1).Send(PeerId(1), (kCount + i) * kBytes, kBytes, 1000 + i);
    world->at(0).SendReady(PeerId(2), i + 1, kReadyBodyBytes + i * 200);
  }
  ASSERT_TRUE(world->Until([&] {
    return world->at(0).segments == kCount && world->at(1).segments == kCount &&
           world->at(1).frames.size() == kCount && world->at(0).sent.size() == kCount &&
           world->at(1).sent.size() == kCount;
  }));
  EXPECT_TRUE(
      std::equal(first.begin(), first.begin() + kCount * kBytes, world->at(1).memory.begin()));
  EXPECT_TRUE(std::equal(second.begin() + kCount * kBytes, second.end(),
                         world->at(0).memory.begin() + kCount * kBytes));
  for (int i = 0; i < kCount; ++i) {
    EXPECT_EQ(world->at(1).frames[i].header.op.value(), i + 1u);
    EXPECT_EQ(world->at(1).frames[i].payload,
              std::string(kReadyBodyBytes + i * 200, static_cast<char>(i + 1)));
  }
  const TransportStats stats = world->at(0).transport->GetStats();
  EXPECT_EQ(stats.links_up, 1u);
  EXPECT_EQ(stats.lanes_up, 3u) << "a control lane and two data lanes on loopback";
  EXPECT_EQ(stats.bytes_sent, kBytes * kCount);
  EXPECT_EQ(stats.bytes_received, kBytes * kCount);
  EXPECT_EQ(stats.handshakes_refused + stats.frames_refused + stats.links_lost, 0u);
  const auto links = world->at(0).transport->GetLinkStats();
  ASSERT_EQ(links.size(), 1u);
  EXPECT_EQ(links[0].link, (LinkKey{kRun, PeerId(2)}));
  EXPECT_GT(links[0].rtt_us, 0);
}

TEST_P(TransportTest, KnowsTheRoundTripOfThePathBeforeAnythingWasSent) {
  auto world = Make(2);
  if (world->fake != nullptr) world->fake->SetDelivery({.rtt_us = 700});
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  for (int i = 0; i < 2; ++i) {
    const auto links = world->at(i).transport->GetLinkStats();
    ASSERT_EQ(links.size(), 1u);
    EXPECT_GT(links[0].shortest_rtt_us, 0);
    if (world->fake != nullptr) {
      EXPECT_EQ(links[0].shortest_rtt_us, 700) << "not that of a PING";
    }
  }
}

TEST_P(TransportTest, TellsOnceWhatTheLanesThatWereUsedHaveDelivered) {
  auto world = Make(2);
  if (world->fake != nullptr) world->fake->SetDelivery({5000000, true, 700});
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  Transport& sender = *world->at(0).transport;
  EXPECT_TRUE(sender.PopRates().empty()) << "nothing was sent";
  constexpr uint32_t kBytes = 200000;
  for (int i = 0; i < 2; ++i) world->at(i).memory.resize(16 * kBytes);
  for (int i = 0; i < 16; ++i) world->at(0).Send(PeerId(2), i * kBytes, kBytes, 1000 + i);
  ASSERT_TRUE(world->Until([&] { return world->at(1).segments == 16; }));
  const std::vector<std::pair<LinkKey, RateSample>> seen = sender.PopRates();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].first, (LinkKey{kRun, PeerId(2)}));
  const RateSample& rate = seen[0].second;
  if (world->fake != nullptr) {
    EXPECT_TRUE(rate.bytes_per_second == 5000000 || rate.bytes_per_second == 10000000)
        << "one or both of two lanes";
    EXPECT_TRUE(rate.limited_by_sender);
    EXPECT_EQ(rate.rtt_us, 700u);
  } else {
    EXPECT_GT(rate.bytes_per_second, 0u);
    EXPECT_GT(rate.rtt_us, 0u);
  }
  EXPECT_TRUE(sender.PopRates().empty());
  EXPECT_TRUE(world->at(1).transport->PopRates().empty()) << "it sent nothing";
}

TEST_P(TransportTest, CountsWhatHasArrivedOverAllLinks) {
  auto world = Make(3);
  if (world->fake != nullptr) world->fake->SetDelivery({5000000, true, 700});
  constexpr uint32_t kBytes = 200000;
  for (int i = 0; i < 3; ++i) world->at(i).memory.resize(16 * kBytes);
  for (int i = 1; i < 3; ++i) {
    world->Open(0, i);
    ASSERT_TRUE(world->Until([&] { return world->Linked(0, i); }));
  }
  Transport& sender = *world->at(0).transport;
  const uint64_t before = sender.PopArrivals().bytes;
  EXPECT_LT(before, kBytes) << "little more than the handshakes";
  for (int i = 0; i < 16; ++i) {
    world->at(0).Send(PeerId(2 + i % 2), i * kBytes, kBytes, 1000 + i);
  }
  HostSample there;
  ASSERT_TRUE(world->Until([&] {
    there = sender.PopArrivals();
    return world->at(1).segments + world->at(2).segments == 16 &&
           there.bytes - before >= 16 * kBytes;
  }));
  EXPECT_LT(there.bytes - before, 17 * kBytes);
  EXPECT_TRUE(there.waiting.empty());
  EXPECT_EQ(sender.PopArrivals().bytes, there.bytes);
  for (int i = 1; i < 3; ++i) {
    const TransportStats stats = world->at(i).transport->GetStats();
    EXPECT_GE(stats.bytes_taken, 8 * kBytes);
    EXPECT_LT(stats.bytes_taken, 9 * kBytes);
  }
}

TEST_P(TransportTest, TellsOnceWhatTcpHasSentAgain) {
  auto world = Make(2);
  if (world->fake == nullptr) GTEST_SKIP() << "no packet is lost on loopback";
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  for (int i = 0; i < 2; ++i) world->at(i).memory.resize(4 << 20);
  // TCP counts from the start of each connection.
  const auto repeated_after = [&](uint64_t so_far) {
    world->fake->SetDelivery({.bytes_per_second = 1000, .bytes_repeated = so_far});
    const int before = world->at(1).segments;
    world->at(0).Send(PeerId(2), 0, 4 << 20, 1000);
    EXPECT_TRUE(world->Until([&] { return world->at(1).segments == before + 1; }));
    return world->at(0).transport->PopRates().at(0).second.bytes_repeated;
  };
  // One segment goes over one of two lanes; which one is left to chance.
  uint64_t told = 0;
  for (uint64_t so_far = 100; so_far <= 1000; so_far += 100) told += repeated_after(so_far);
  EXPECT_GE(told, 1000u) << "the lane that was used last has told all of it";
  EXPECT_LE(told, 2000u) << "nothing is told twice";
}

TEST_P(TransportTest, AFewBytesSayNothingAgainstALink) {
  auto world = Make(2);
  if (world->fake == nullptr) GTEST_SKIP() << "what TCP says of it is left to chance";
  world->fake->SetDelivery({300000, false, 700});
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  for (int i = 0; i < 2; ++i) world->at(i).memory.resize(4 << 20);
  const auto limited_after = [&](uint32_t bytes) {
    const int before = world->at(1).segments;
    world->at(0).Send(PeerId(2), 0, bytes, 1000);
    EXPECT_TRUE(world->Until([&] { return world->at(1).segments == before + 1; }));
    return world->at(0).transport->PopRates().at(0).second.limited_by_sender;
  };
  EXPECT_TRUE(limited_after(32 << 10));
  EXPECT_FALSE(limited_after(2 << 20));
  EXPECT_TRUE(limited_after(32 << 10));
}

TEST_P(TransportTest, AProbeShowsWhatALinkCarriesAndLeavesItAlone) {
  auto world = Make(2);
  if (world->fake != nullptr) world->fake->SetDelivery({.rtt_us = 700});
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  // Each end probes in turn. One of them has dialled the link.
  for (const auto& [from, to] : {std::pair(0, 1), std::pair(1, 0)}) {
    Transport& transport = *world->at(from).transport;
    const LinkKey link{kRun, PeerId(static_cast<uint64_t>(to) + 1)};
    EXPECT_FALSE(transport.PopProbe());
    EXPECT_FALSE(transport.StartProbe({kRun, PeerId(9)}));
    ASSERT_TRUE(transport.StartProbe(link));
    EXPECT_FALSE(transport.StartProbe(link)) << "one at a time";
    std::optional<LinkProbe> probe;
    ASSERT_TRUE(world->Until([&] { return (probe = transport.PopProbe()).has_value(); }));
    EXPECT_EQ(probe->link, link);
    EXPECT_EQ(probe->error, "");
    EXPECT_GT(probe->rate.bytes_per_second, 0u);
    EXPECT_GT(probe->rate.rtt_us, 0u);
    EXPECT_GE(probe->rate.bytes_sent, uint64_t{1} << 20);
    EXPECT_EQ(transport.GetStats().probes, 1u);
    EXPECT_EQ(transport.GetStats().probe_bytes, probe->rate.bytes_sent);
    EXPECT_EQ(transport.GetStats().lanes_up, 3u);
  }
  EXPECT_EQ(world->at(0).transport->GetStats().lanes_lost, 0u);
  EXPECT_EQ(world->at(1).downs.size(), 0u);
  // The link is unchanged.
  world->at(0).memory.resize(1000);
  world->at(1).memory.resize(1000);
  world->at(0).Send(PeerId(2), 0, 1000, 1);
  ASSERT_TRUE(world->Until([&] { return world->at(1).segments == 1; }));
}

TEST_P(TransportTest, AProbeOfAPeerThatGoesAwayEnds) {
  auto world = Make(2);
  if (world->fake != nullptr) world->fake->SetDelivery({.rtt_us = 700});
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  ASSERT_TRUE(world->at(0).transport->StartProbe({kRun, PeerId(2)}));
  world->at(1).transport->Close();
  std::optional<LinkProbe> probe;
  ASSERT_TRUE(
      world->Until([&] { return (probe = world->at(0).transport->PopProbe()).has_value(); }));
  // The probe may have ended before the peer went away.
  EXPECT_EQ(probe->error.empty(), probe->rate.bytes_per_second != 0);
}

TEST_P(TransportTest, ATransportThatIsClosedDuringAProbeLeavesNothingBehind) {
  for (const int closing : {0, 1}) {
    auto world = Make(2);
    world->Open(0, 1);
    ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
    ASSERT_TRUE(world->at(0).transport->StartProbe({kRun, PeerId(2)}));
    const uint64_t accepted = world->at(1).transport->GetStats().connections_accepted;
    ASSERT_TRUE(world->Until(
        [&] { return world->at(1).transport->GetStats().connections_accepted > accepted; }));
    world->at(closing).transport->Close();
    ASSERT_TRUE(world->Until([&] { return world->at(closing).transport->closed(); }));
    world->at(1 - closing).transport->Close();
    ASSERT_TRUE(world->Until([&] { return world->at(1 - closing).transport->closed(); }));
    if (world->fake == nullptr) continue;
    EXPECT_EQ(world->fake->open_sockets(), 0u);
  }
}

TEST_P(TransportTest, ThreePeersLinkPairwiseAndStandingLinksAreReportedAgain) {
  TransportOptions options;
  options.lanes = 3;
  auto world = Make(3, options);
  world->Open(0, 1);
  world->Open(0, 2, 1, false);
  world->Open(2, 1);
  ASSERT_TRUE(world->Until(
      [&] { return world->Linked(0, 1) && world->Linked(0, 2) && world->Linked(1, 2); }));
  EXPECT_EQ(world->at(0).transport->GetStats().lanes_up, 5u);
  // The next epoch needs data lanes on a link that has only a control lane.
  world->at(1).up.clear();
  world->Open(0, 1, 2);
  world->Open(0, 2, 2, true);
  ASSERT_TRUE(world->Until([&] {
    return world->at(0).ups[PeerId(2)] == 2 && world->at(1).ups[PeerId(1)] == 2 &&
           world->at(0).ups[PeerId(3)] == 2 && world->at(2).ups[PeerId(1)] == 2;
  }));
  EXPECT_EQ(world->at(0).transport->GetStats().lanes_up, 8u);
  EXPECT_TRUE(world->at(0).downs.empty());
}

TEST_P(TransportTest, AcceptorThatLearnsOfTheEpochLaterIsTriedAgain) {
  auto world = Make(2);
  world->at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(1, true, true)},
                                    world->Now() + Seconds(10));
  ASSERT_TRUE(
      world->Until([&] { return world->at(1).transport->GetStats().handshakes_refused >= 2; }));
  world->at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(0, false, true)},
                                    world->Now() + Seconds(10));
  EXPECT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
}

TEST_P(TransportTest, UnreachablePeerIsReportedWithAddressAndErrno) {
  auto world = Make(1);
  const std::string address = "127.0.0.1:1";
  world->at(0).transport->OpenLinks(
      kRun, 0, Epoch(1), kToken,
      {{.peer = PeerId(9), .endpoints = {address}, .dial = true, .data = true}},
      world->Now() + Millis(60));
  ASSERT_TRUE(world->Until([&] { return !world->at(0).downs.empty(); }));
  EXPECT_EQ(world->at(0).downs[PeerId(9)],
            (std::vector<std::string>{"connect to " + address + ": Connection refused"}));
}

TEST_P(TransportTest, PeerThatIsNotThereIsReportedBeforeTheDeadline) {
  TransportOptions options;
  options.detect_ms = 100;
  auto world = Make(2, options);
  world->at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(0, false, false)},
                                    world->Now() + Seconds(100));
  LinkRequest other_peer = world->Request(1, true, false);
  other_peer.peer = PeerId(77);
  const std::string free_port = "127.0.0.1:1";
  const LinkRequest nobody{.peer = PeerId(9), .endpoints = {free_port}, .dial = true};
  // A peer may listen at the second endpoint.
  const LinkRequest one_of_two{
      .peer = PeerId(10), .endpoints = {free_port, "nowhere.invalid:1"}, .dial = true};
  world->at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {other_peer, nobody, one_of_two},
                                    world->Now() + Seconds(100));
  auto& downs = world->at(0).downs;
  ASSERT_TRUE(
      world->Until([&] { return !downs[PeerId(77)].empty() && !downs[PeerId(9)].empty(); }));
  EXPECT_THAT(downs[PeerId(77)][0], HasSubstr("another peer answers there"));
  EXPECT_THAT(downs[PeerId(9)][0], HasSubstr("Connection refused"));
  EXPECT_TRUE(downs[PeerId(10)].empty());
}

TEST_P(TransportTest, PeerThatNeverDialsIsReportedAtTheDeadline) {
  auto world = Make(1);
  world->at(0).transport->OpenLinks(
      kRun, 0, Epoch(1), kToken,
      {{.peer = PeerId(9), .endpoints = {}, .dial = false, .data = false}},
      world->Now() + Millis(60));
  ASSERT_TRUE(world->Until([&] { return !world->at(0).downs.empty(); }));
  ASSERT_EQ(world->at(0).downs[PeerId(9)].size(), 1u);
  EXPECT_THAT(world->at(0).downs[PeerId(9)][0],
              HasSubstr("peer p9 did not connect to " + world->at(0).transport->listen_address() +
                        " within "));
}

// Returns what the first peer says of a peer at these endpoints.
std::string Tried(PeerWorld* world, PeerId peer, const std::vector<std::string>& endpoints,
                  int64_t ms = 3000) {
  Peer& self = world->at(0);
  const uint64_t trial = self.tried.size() + 1;
  self.transport->TryPeer({kRun, 0}, trial, peer, endpoints, world->Now() + Millis(ms));
  EXPECT_TRUE(world->Until([&] { return self.tried.contains(trial); }));
  return self.tried[trial];
}

TEST_P(TransportTest, APeerIsTriedWithoutALink) {
  auto world = Make(2);
  const std::string free_port = "127.0.0.1:1";
  const std::string there = world->at(1).transport->listen_address();
  const PeerId peer = world->at(1).id;
  EXPECT_EQ(Tried(world.get(), peer, {there}), "");
  EXPECT_EQ(Tried(world.get(), peer, {free_port}), "no connection to 127.0.0.1:1");
  EXPECT_EQ(Tried(world.get(), PeerId(77), {there}),
            "something else than the peer answers at " + there);
  EXPECT_EQ(Tried(world.get(), peer, {}), "the peer has no endpoint to connect to");
  EXPECT_EQ(Tried(world.get(), peer, {"nonsense", free_port, "nowhere.invalid:1", there}, 20000),
            "");
  EXPECT_TRUE(world->at(0).up.empty() && world->at(0).downs.empty());
  EXPECT_TRUE(world->at(1).up.empty() && world->at(1).downs.empty());
  EXPECT_EQ(world->at(1).transport->GetStats().handshakes_refused, 3u) << "nothing is left open";
}

// A newcomer learns nothing about what answers elsewhere, and has few addresses tried.
TEST(TransportFakeTest, NobodyScansANetworkThroughAPeer) {
  PeerWorld world(Rings::kFake, 1, 1);
  LogLines log;
  SetLogLevel(LogLevel::kInfo);
  std::set<std::string> answers;
  for (int port = 1; port <= 40; ++port) {
    const std::string address = absl::StrCat("127.0.0.1:", port);
    std::string answer = Tried(&world, PeerId(2), {address});
    if (const size_t at = answer.find(address); at != std::string::npos) answer.resize(at);
    answers.insert(answer);
  }
  EXPECT_THAT(answers, ElementsAre("no connection to ",
                                   "the peer names too many addresses, or one of them too often"));
  EXPECT_EQ(log.Count("a newcomer does not answer peer=p2 address=127.0.0.1:"), 32);
  EXPECT_EQ(Tried(&world, PeerId(3), {"127.0.0.1:1"}), "no connection to 127.0.0.1:1")
      << "another newcomer has its own number";
}

// The try has no epoch, so no answer may be taken for a proof. What listens there guesses that the
// token is empty.
TEST(TransportFakeTest, AStrangerThatAcceptsATryIsNotThePeer) {
  PeerWorld world(Rings::kFake, 1, 1);
  Ring* const ring = world.at(0).ring;
  const int listener = *ring->sockets().Listen(*NumericAddress(*ParseHostPort("127.0.0.1:0")));
  const std::string there = ToString(*ring->sockets().LocalAddress(listener));
  const TlsContext tls(PeerWorld::IdentityOf(1));
  std::unique_ptr<LaneAccept> accept;
  ring->Accept(listener, [&](IoResult result) {
    const auto judge = [](const LaneHello&) {
      return LaneVerdict{LaneResult::kAccepted, "", PeerWorld::IdentityOf(0).public_key()};
    };
    accept = std::make_unique<LaneAccept>(ring, result.value, Digest32{}, &tls, kNever, judge,
                                          [](LaneHandshake*) {});
  });
  EXPECT_EQ(Tried(&world, PeerId(2), {there}), "something else than the peer answers at " + there);
  EXPECT_TRUE(world.Until([&] { return !accept->error().empty(); }));
  ring->sockets().Close(listener);
}

TEST(TransportFakeTest, APeerThatAnswersMayJoinAsOftenAsItLikes) {
  PeerWorld world(Rings::kFake, 1, 2);
  const std::string there = world.at(1).transport->listen_address();
  for (int i = 0; i < 500; ++i) ASSERT_EQ(Tried(&world, PeerId(2), {there}), "") << i;
}

TEST(TransportFakeTest, APeerThatOthersReachDoesNotDialItsOwnHost) {
  for (const std::string own : {"127.0.0.1:7", "10.0.0.1:7", "169.254.0.1:7"}) {
    TransportOptions options;
    options.own_endpoints = [own] { return std::vector{own}; };
    PeerWorld world(Rings::kFake, 1, 2, options);
    const std::string there = world.at(1).transport->listen_address();
    const bool local = own == "127.0.0.1:7";
    EXPECT_EQ(Tried(&world, PeerId(2), {there}), local ? "" : "no connection to " + there);
    world.Open(0, 1, 1, true, 500);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1) || !world.at(0).downs.empty(); }));
    EXPECT_EQ(world.Linked(0, 1), local);
    if (local) continue;
    EXPECT_THAT(world.at(0).downs[PeerId(2)][0], HasSubstr("--advertise"));
    EXPECT_EQ(world.at(1).transport->GetStats().connections_accepted, 0u);
  }
}

// The kernel, or a middlebox, accepts the connection, and no peer answers.
TEST_P(TransportTest, APortThatTakesConnectionsAndSaysNothingIsNotReached) {
  auto world = Make(1);
  Sockets& sockets = world->at(0).ring->sockets();
  const int mute = *sockets.Listen(*NumericAddress(*ParseHostPort("127.0.0.1:0")));
  const std::string there = ToString(*sockets.LocalAddress(mute));
  const Tick begun = world->Now();
  EXPECT_EQ(Tried(world.get(), PeerId(2), {there}, 80),
            "something else than the peer answers at " + there);
  EXPECT_GE(world->Now() - begun, Millis(80));
  // The transport closes during a trial.
  world->at(0).transport->TryPeer({kRun, 0}, 9, PeerId(2), {there}, world->Now() + Seconds(100));
  world->Step();
  world->at(0).transport->Close();
  EXPECT_TRUE(world->Until([&] { return world->at(0).transport->closed(); }));
  EXPECT_FALSE(world->at(0).tried.contains(9));
  sockets.Close(mute);
}

TEST_P(TransportTest, WrongTokenWrongRunAndWrongPeerAreRefused) {
  auto world = Make(2);
  const Tick deadline = world->Now() + Millis(100);
  Transport& dialer = *world->at(0).transport;
  world->at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(0, false, false)},
                                    deadline);
  dialer.OpenLinks(kRun, 0, Epoch(1), "another token", {world->Request(1, true, false)}, deadline);
  dialer.OpenLinks("another run", 0, Epoch(1), kToken, {world->Request(1, true, false)}, deadline);
  LinkRequest stranger = world->Request(1, true, false);
  stranger.peer = PeerId(77);
  dialer.OpenLinks(kRun, 0, Epoch(1), "another token", {stranger}, deadline);
  std::map<PeerId, std::vector<std::string>>& downs = world->at(0).downs;
  ASSERT_TRUE(
      world->Until([&] { return downs[PeerId(2)].size() == 2 && !downs[PeerId(77)].empty(); }));
  EXPECT_TRUE(world->at(0).up.empty());
  EXPECT_TRUE(world->at(1).up.empty());
  EXPECT_THAT(downs[PeerId(2)][0], HasSubstr("the epoch is not known there"));
  EXPECT_THAT(downs[PeerId(2)][1], HasSubstr("the epoch is not known there"));
  EXPECT_THAT(downs[PeerId(77)][0], HasSubstr("another peer answers there"));
  EXPECT_GE(world->at(1).transport->GetStats().handshakes_refused, 3u);
}

TEST_P(TransportTest, LostLaneTakesTheLinkDownAndTheNextEpochRebuildsIt) {
  auto world = Make(2);
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  world->at(0).memory.resize(8 << 20);
  world->at(1).memory.resize(100);  // the first segment breaks the protocol
  for (int i = 0; i < 8; ++i) world->at(0).Send(PeerId(2), 1 << 20, 1 << 20, i);
  ASSERT_TRUE(world->Until([&] { return world->at(0).up.empty() && world->at(1).up.empty(); }));
  EXPECT_THAT(world->at(1).downs[PeerId(1)][0], HasSubstr("beyond the end"));
  EXPECT_EQ(world->at(1).transport->GetStats().frames_refused, 1u);
  EXPECT_EQ(world->at(0).transport->GetStats().links_lost, 1u);
  world->at(0).Send(PeerId(2), 0, 100, 100);              // comes back although there is no link
  world->at(0).SendReady(PeerId(2), 1, kReadyBodyBytes);  // dropped
  world->Open(0, 1, 2);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  world->at(0).Send(PeerId(2), 0, 100, 101);
  ASSERT_TRUE(world->Until([&] { return world->at(1).segments == 1; }));
  ASSERT_TRUE(world->Until([&] { return world->at(0).sent == world->at(0).started; }));
  EXPECT_TRUE(world->at(1).frames.empty());
}

TEST_P(TransportTest, SideThatDoesNotDialGetsTheDataLanesThatItWants) {
  auto world = Make(2);
  const Tick deadline = world->Now() + Seconds(10);
  world->at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(1, true, false)},
                                    deadline);
  world->at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(0, false, true)},
                                    deadline);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  EXPECT_EQ(world->at(1).transport->GetStats().lanes_up, 3u);
  world->at(0).memory.resize(1 << 20);
  world->at(1).memory.resize(1 << 20, 'x');
  world->at(1).Send(PeerId(1), 0, 1 << 20, 1);
  EXPECT_TRUE(world->Until([&] { return world->at(0).segments == 1; }));
  EXPECT_EQ(world->at(0).memory, world->at(1).memory);
}

TEST_P(TransportTest, StandingLinkGetsDataLanesWhenSomebodyWantsThem) {
  for (const int wants : {0, 1}) {
    auto world = Make(2);
    world->Open(0, 1, 1, false);
    ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
    EXPECT_EQ(world->at(0).transport->GetStats().lanes_up, 1u);
    Peer& from = world->at(wants);
    Peer& to = world->at(1 - wants);
    from.memory.resize(1 << 20, 'x');
    to.memory.resize(1 << 20);
    from.SendChunk(to.id, 0, 1 << 20, 1);
    for (int i = 0; i < 2; ++i) from.transport->WantDataLanes({kRun, to.id});
    EXPECT_TRUE(world->Until([&] { return to.segments == 1; }));
    EXPECT_EQ(to.memory, from.memory);
    ASSERT_TRUE(world->Until([&] { return world->at(0).transport->GetStats().lanes_up == 3; }));
    EXPECT_EQ(world->at(0).ups[PeerId(2)], 1) << "it was up all the time";
    EXPECT_TRUE(world->at(0).downs.empty() && world->at(1).downs.empty());
  }
}

TEST_P(TransportTest, OpsAndSharedStateTakeTurnsByBytes) {
  TransportOptions options;
  options.lanes = 1;
  auto world = Make(2, options);
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  Peer& from = world->at(0);
  Peer& to = world->at(1);
  from.memory.resize(4 << 20);
  to.memory.resize(4 << 20);
  constexpr int kChunks = 60;
  constexpr uint32_t kPiece = 100000;
  for (int i = 0; i < kChunks; ++i) from.SendChunk(PeerId(2), i * 1000, kPiece, 100 + i);
  Prng random(GetParam().seed);
  uint64_t ops_left = 0;
  for (uint64_t cookie = 1000; cookie < 1040; ++cookie) {
    const auto bytes = static_cast<uint32_t>(1 + random.Below(200000));
    from.Send(PeerId(2), 0, bytes, cookie);
    ops_left += bytes;
  }
  ASSERT_TRUE(world->Until([&] { return to.segments == kChunks + 40; }));
  // With one lane, segments arrive in the order in which they were sent. Chunks that were on the
  // lane before the first op do not count.
  uint64_t ops = 0;
  uint64_t chunks = 0;
  bool begun = false;
  int behind = 0;
  for (const FrameHeader& header : to.order) {
    const bool op = header.type == FrameType::kData;
    begun |= op;
    if (!begun) {
      ++behind;
      continue;
    }
    if (ops_left == 0) break;
    (op ? ops : chunks) += header.payload_bytes;
    if (op) ops_left -= header.payload_bytes;
    EXPECT_LE(chunks, ops + kPiece) << "ops have half or more";
    EXPECT_LE(ops, chunks + 200000) << "and not all of it";
  }
  EXPECT_LE(behind, 2) << "an op overtakes the chunks that are queued";
}

TEST_P(TransportTest, BothSidesMayDialAtOnce) {
  auto world = Make(2);
  const Tick deadline = world->Now() + Seconds(10);
  world->at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(1, true, true)},
                                    deadline);
  world->at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(0, true, true)},
                                    deadline);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  for (int i = 0; i < 200; ++i) world->Step();
  EXPECT_TRUE(world->Linked(0, 1));
  EXPECT_EQ(world->at(0).transport->GetStats().links_up, 1u);
  EXPECT_EQ(world->at(0).transport->GetStats().lanes_up, 3u);
  EXPECT_EQ(world->at(1).transport->GetStats().lanes_up, 3u);
}

TEST_P(TransportTest, LinksThatNoGroupNeedsAreClosedWithoutAReport) {
  auto world = Make(2);
  world->Open(0, 1);
  world->at(0).transport->OpenLinks(kRun, 7, Epoch(1), kToken, {world->Request(1, true, true)},
                                    world->Now() + Seconds(5));
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  world->at(0).transport->KeepLinks(kRun, 0, Epoch(2), {});
  for (int i = 0; i < 50; ++i) world->Step();
  EXPECT_TRUE(world->Linked(0, 1)) << "another group needs it";
  world->at(0).SendReady(PeerId(2), 5, 4000);
  world->at(0).transport->KeepLinks(kRun, 7, Epoch(2), {PeerId(3)});
  ASSERT_TRUE(world->Until([&] { return !world->at(1).downs.empty(); }));
  EXPECT_THAT(world->at(1).downs[PeerId(1)][0], HasSubstr("closed by the other side"));
  ASSERT_EQ(world->at(1).frames.size(), 1u) << "what was queued is sent";
  EXPECT_TRUE(world->at(0).downs.empty());
  EXPECT_EQ(world->at(0).transport->GetStats().links_up, 0u);
}

TEST_P(TransportTest, DetachIsAnsweredAndTheRestOfThePayloadGoesNowhere) {
  auto world = Make(2);
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  world->at(0).memory.assign(4 << 20, 'x');
  world->at(1).memory.assign(4 << 20, 'o');
  world->at(1).transport->DetachReceives(kRun, {.op = OpOrdinal(1), .attempt = Epoch(1)}, 5);
  EXPECT_TRUE(world->at(1).detached.empty()) << "answered from within the call";
  ASSERT_TRUE(world->Until([&] { return world->at(1).detached[5] == 1; }));
  world->at(0).Send(PeerId(2), 0, 2 << 20, 1);
  world->at(0).Send(PeerId(2), 2 << 20, 2 << 20, 2);
  ASSERT_TRUE(world->Until([&] { return world->at(1).headers > 0; }));
  world->at(1).discard = true;
  world->at(1).transport->DetachReceives(kRun, {.op = OpOrdinal(1), .attempt = Epoch(1)}, 6);
  ASSERT_TRUE(world->Until([&] { return world->at(1).detached[6] == 1; }));
  const auto frozen = world->at(1).memory;
  ASSERT_TRUE(world->Until([&] { return world->at(0).sent.size() == 2; }));
  for (int i = 0; i < 50; ++i) world->Step();
  EXPECT_EQ(world->at(1).memory, frozen);
  EXPECT_TRUE(world->Linked(0, 1));
  EXPECT_EQ(world->at(1).detached, (std::map<uint64_t, int>{{5, 1}, {6, 1}}));
}

// An op and a transfer may have the same number.
TEST_P(TransportTest, DetachOfATransferLeavesTheOpAlone) {
  auto world = Make(2);
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  Peer& to = world->at(1);
  world->at(0).memory.assign(4 << 20, 'x');
  to.memory.assign(4 << 20, 'o');
  world->at(0).Send(PeerId(2), 0, 2 << 20, 1);
  world->at(0).SendChunk(PeerId(2), 2 << 20, 2 << 20, 2);
  ASSERT_TRUE(world->Until([&] { return to.headers == 2; }));
  to.transport->DetachReceives(
      kRun, {.type = FrameType::kChunkData, .op = OpOrdinal(1), .attempt = Epoch(1)}, 5);
  ASSERT_TRUE(world->Until([&] { return to.detached[5] == 1; }));
  const auto frozen = to.memory;
  ASSERT_TRUE(world->Until([&] { return to.arrived.count({PeerId(1), 1}) != 0; }));
  EXPECT_TRUE(
      std::equal(to.memory.begin(), to.memory.begin() + (2 << 20), world->at(0).memory.begin()));
  EXPECT_TRUE(
      std::equal(to.memory.begin() + (2 << 20), to.memory.end(), frozen.begin() + (2 << 20)));
}

TEST_P(TransportTest, DroppedSegmentsComeBackAtOnceUnlessTheyHaveBegun) {
  auto world = Make(2);
  world->Open(0, 1);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  world->at(0).memory.resize(20 << 20);
  world->at(1).memory.resize(20 << 20);
  std::vector<uint64_t> cookies;
  for (uint64_t i = 0; i < 20; ++i) {
    world->at(0).Send(PeerId(2), i << 20, 1 << 20, i);
    cookies.push_back(i);
  }
  world->at(0).transport->DropSegments(FrameType::kData, cookies);
  EXPECT_TRUE(world->at(0).sent.empty()) << "returned from within the call";
  ASSERT_TRUE(world->Until([&] { return world->at(0).sent == world->at(0).started; }));
  for (int i = 0; i < 100; ++i) world->Step();
  EXPECT_LE(world->at(1).headers, 2);
}

TEST_P(TransportTest, EveryNumberOfLanesUpToTheLimitIsBuilt) {
  TransportOptions options;
  options.lanes = LH_LANES_MAX;
  auto world = Make(2, options);
  world->Open(0, 1, 1, true, 20000);
  ASSERT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  EXPECT_EQ(world->at(1).transport->GetStats().lanes_up, LH_LANES_MAX + 1u);
}

// ------------------------------------------------------------------------------ long ways

class LongWay : public ::testing::TestWithParam<int> {  // the sending peer
 protected:
  static TransportOptions WithLanes(uint32_t lanes) {
    TransportOptions options;
    options.lanes = lanes;
    return options;
  }

  void Start(TransportOptions options, uint32_t rtt_us) {
    // With some other seeds, the first segment of a lane is slow by chance, and the lane leaves
    // segments to the others for ten seconds.
    world_ = std::make_unique<PeerWorld>(Rings::kFake, 2, 2, options,
                                         FakeRingOptions{.stream_bytes_max = 2 * kSegment});
    world_->fake->SetDelivery({.bytes_per_second = 1000000, .rtt_us = rtt_us});
    world_->at(GetParam()).memory.resize(kSegments * size_t{kSegment});
    world_->at(1 - GetParam()).discard = true;
    world_->Open(0, 1);
    ASSERT_TRUE(world_->Until([&] { return world_->Linked(0, 1); }));
  }

  // Sends all the time for `us`.
  void Send(int64_t us) {
    Peer& from = world_->at(GetParam());
    Peer& to = world_->at(1 - GetParam());
    const Tick end = world_->Now() + us;
    while (world_->Now() < end) {
      while (from.started.size() - from.sent.size() < kSegments) {
        from.Send(to.id, sent_ % kSegments * kSegment, kSegment, sent_);
        ++sent_;
      }
      for (int i = 0; i < 20; ++i) {
        world_->Step();
        world_->fake->AdvanceTime(50);
      }
      ++turn_;
      StallSlow([this](int connection) { return slow_ > 0 && (turn_ + connection) % slow_ != 0; });
    }
    StallSlow([](int) { return false; });
    ASSERT_TRUE(world_->Until([&] { return to.headers == static_cast<int>(sent_); }));
  }

  template <class IsStalled>
  void StallSlow(IsStalled is_stalled) {
    for (int i = 1; i <= 4; ++i) {
      if (all_slow_ || i == kSlow) world_->fake->StallConnection(i, is_stalled(i));
    }
  }

  TransportStats stats(int i) { return world_->at(i).transport->GetStats(); }

  static constexpr int kSlow = 2;  // the slow connection
  static constexpr uint32_t kSegment = 2000;
  static constexpr size_t kSegments = 600;
  uint64_t SentOn(int connection) const {
    return world_->fake->BytesSent(connection, GetParam() == 0);
  }

  std::unique_ptr<PeerWorld> world_;
  uint64_t sent_ = 0;
  // The slow connection moves bytes in one of `slow_` milliseconds. 0: it is not slow.
  int slow_ = 0;
  bool all_slow_ = false;  // all four connections are slow, not only kSlow
  int turn_ = 0;
};

TEST_P(LongWay, LanesArePacedAndBothEndsHaveAsManyAsTheSenderTries) {
  Start({}, 10000);
  EXPECT_EQ(stats(0).lanes_up, 5u);
  EXPECT_EQ(world_->fake->long_ways(), 8u) << "both ends of each data lane";
  Send(Seconds(1));
  ASSERT_TRUE(world_->Until([&] { return stats(0).lanes_up >= 9 && stats(1).lanes_up >= 9; }));
  // In memory more lanes need not carry more. But each end must know how many lanes it uses.
  Send(Seconds(1));
  const TransportStats from = stats(GetParam());
  const TransportStats to = stats(1 - GetParam());
  EXPECT_EQ(from.lanes_up, to.lanes_up);
  EXPECT_LE(from.lanes_used, from.lanes_up - 1);
  EXPECT_EQ(to.lanes_used, 4u) << "it sent nothing";
  EXPECT_EQ(from.lanes_lost + to.lanes_lost + from.lanes_redialled + to.lanes_redialled, 0u);
}

TEST_P(LongWay, WhereTheQueueIsFullLanesTogetherSendWhatArrives) {
  Start(WithLanes(4), 10000);
  Transport& sender = *world_->at(GetParam()).transport;
  const auto send = [&](int64_t us) {
    for (int64_t sent = 0; sent < us; sent += Millis(50)) {
      Send(Millis(50));
      sender.PopArrivals();
    }
  };
  send(Seconds(3));
  EXPECT_EQ(stats(GetParam()).pace, 0u) << "packets do not wait";
  EXPECT_TRUE(world_->fake->paces().empty());
  world_->fake->SetDelivery(
      {.bytes_per_second = 1000000, .rtt_us = 10000, .usual_rtt_us = 10000 + Millis(50)});
  world_->fake->AdvanceTime(Seconds(1));
  send(Seconds(3));
  const auto pace = static_cast<double>(stats(GetParam()).pace);
  const Tick begun = world_->Now();
  const uint64_t before = sender.PopArrivals().bytes;
  send(Millis(500));
  const double arrived = static_cast<double>(sender.PopArrivals().bytes - before) * 1e6 /
                         static_cast<double>(world_->Now() - begun);
  EXPECT_GT(pace, arrived * 0.7);
  EXPECT_LT(pace, arrived * 1.4);
  ASSERT_FALSE(world_->fake->paces().empty()) << "those lanes that a segment was put on since";
  for (const auto& [fd, each] : world_->fake->paces()) {
    // A lane that rests leaves its part to the others.
    EXPECT_GT(static_cast<double>(each), pace / 5) << "of lane " << fd;
    EXPECT_LT(static_cast<double>(each), pace / 2) << "of lane " << fd;
  }
}

TEST_P(LongWay, NothingIsLimitedWhereTheNetworkLimitsEachConnection) {
  Start(WithLanes(4), 10000);
  Transport& sender = *world_->at(GetParam()).transport;
  world_->fake->SetQueueOfEach(Millis(50));
  // Packets wait so much longer, for instance acknowledgements in queues that the other host fills.
  for (const uint32_t shared_us : {0, 30000}) {
    world_->fake->SetDelivery(
        {.bytes_per_second = 1000000, .rtt_us = 10000, .usual_rtt_us = 10000 + shared_us});
    HostSample host;
    std::optional<bool> full;
    for (int i = 0; i < 120; ++i) {
      if (i % 60 == 0) world_->fake->AdvanceTime(Seconds(1));  // a pause ends a burst
      Send(Millis(50));
      host = sender.PopArrivals();
      if (host.up_full) full = full.value_or(false) || *host.up_full;
    }
    EXPECT_GT(host.arrivals.queued_us, 0u);
    EXPECT_LT(host.arrivals.shared_queued_us, host.arrivals.queued_us / 4) << shared_us;
    EXPECT_EQ(stats(GetParam()).pace, 0u) << "lanes wait longer than the control lane";
    EXPECT_EQ(full, false) << shared_us;
  }
}

TEST_P(LongWay, AProbeSaysWithHowManyLanesToBegin) {
  Start({}, 20000);
  ASSERT_EQ(stats(0).lanes_up, 9u);
  Transport& sender = *world_->at(GetParam()).transport;
  ASSERT_TRUE(sender.StartProbe({kRun, world_->at(1 - GetParam()).id}));
  std::optional<LinkProbe> probe;
  ASSERT_TRUE(world_->Until([&] { return (probe = sender.PopProbe()).has_value(); }));
  ASSERT_GT(probe->rate.bytes_per_second, 400000000u) << probe->error;
  ASSERT_TRUE(world_->Until([&] { return stats(0).lanes_up == 65 && stats(1).lanes_up == 65; }));
  EXPECT_EQ(stats(GetParam()).lanes_used, 64u);
  EXPECT_EQ(stats(1 - GetParam()).lanes_used, 8u) << "it has probed nothing";
  // The next link to this peer begins with what is known of the path.
  sender.BreakLink({kRun, world_->at(1 - GetParam()).id}, "for a reason");
  ASSERT_TRUE(world_->Until([&] { return world_->at(0).up.empty() && world_->at(1).up.empty(); }));
  world_->Open(0, 1, 2);
  ASSERT_TRUE(world_->Until([&] { return world_->Linked(0, 1); }));
  ASSERT_TRUE(world_->Until([&] { return stats(0).lanes_up == 65 && stats(1).lanes_up == 65; }));
  EXPECT_EQ(stats(GetParam()).lanes_used, 64u);
}

TEST_P(LongWay, ANumberOfLanesThatWasAskedForStays) {
  Start(WithLanes(5), 80000);
  Send(Seconds(10));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(stats(i).lanes_up, 6u);
    EXPECT_EQ(stats(i).lanes_used, 5u);
  }
  EXPECT_EQ(world_->fake->long_ways(), 10u);
}

TEST_P(LongWay, AShortOneIsLeftAsItIs) {
  Start({}, 1000);
  Send(Seconds(10));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(stats(i).lanes_up, 3u);
    EXPECT_EQ(stats(i).lanes_used, 2u);
  }
  EXPECT_EQ(world_->fake->long_ways(), 0u);
}

TEST_P(LongWay, ALaneThatDeliversFarLessThanOthersRestsAndIsTriedAgain) {
  TransportOptions options = WithLanes(4);
  options.detect_ms = 60000;  // slow, not lost
  Start(options, 80000);
  slow_ = 1000;
  Send(Seconds(4));
  EXPECT_EQ(stats(GetParam()).lane_rests, 1u);
  EXPECT_EQ(stats(GetParam()).lanes_used, 3u);
  EXPECT_EQ(stats(1 - GetParam()).lane_rests, 0u);
  const uint64_t before = SentOn(kSlow);
  EXPECT_LT(before * 10, SentOn(kSlow + 1));
  Send(Seconds(5));
  EXPECT_LT(SentOn(kSlow), before + kSegment) << "nothing but PINGs";
  Send(Seconds(9));
  EXPECT_EQ(stats(GetParam()).lane_rests, 2u) << "it was tried, and is no better";
  slow_ = 0;
  Send(Seconds(25));
  EXPECT_EQ(stats(GetParam()).lanes_used, 4u);
  EXPECT_GT(SentOn(kSlow), before + 100 * kSegment);
  EXPECT_EQ(stats(GetParam()).lane_rests, 2u);
}

TEST_P(LongWay, APingFollowsTheLastSegmentBeforeAPause) {
  TransportOptions options = WithLanes(1);
  options.detect_ms = 60000;  // other PINGs are far apart
  Start(options, 80000);
  for (int i = 0; i < 300; ++i) world_->Step();
  const auto bytes = [&] { return SentOn(1); };
  for (int i = 1; i <= 3; ++i) {
    const uint64_t before = bytes();
    Send(1);
    const Tick sent = world_->Now();
    const uint64_t segments = before + kSegments * (kFrameHeaderBytes + kSegment);
    ASSERT_TRUE(world_->Until([&] { return bytes() >= segments + kFrameHeaderBytes; }));
    EXPECT_EQ(bytes(), segments + kFrameHeaderBytes);
    EXPECT_LT(world_->Now() - sent, Millis(100));
    for (int n = 0; n < 300; ++n) world_->Step();
    EXPECT_EQ(bytes(), segments + kFrameHeaderBytes) << "one is enough";
  }
}

TEST_P(LongWay, LanesThatDifferByLittleAreAllUsed) {
  Start(WithLanes(4), 80000);
  slow_ = 4;
  Send(Seconds(5));
  EXPECT_EQ(stats(GetParam()).lane_rests, 0u);
  EXPECT_EQ(stats(GetParam()).lanes_used, 4u);
}

TEST_P(LongWay, LanesThatAreSlowAlikeAreAllUsed) {
  TransportOptions options = WithLanes(4);
  options.detect_ms = 60000;
  Start(options, 80000);
  slow_ = 8;
  all_slow_ = true;
  Send(Seconds(20));
  EXPECT_EQ(stats(GetParam()).lane_rests, 0u);
  EXPECT_EQ(stats(GetParam()).lanes_used, 4u);
}

TEST_P(LongWay, ALaneLeavesToOthersWhatTheyWillHaveDoneSoonerUntilThatIsLongAgo) {
  Start(WithLanes(4), 80000);
  slow_ = 24;
  Send(Seconds(5));
  const uint64_t before = SentOn(kSlow);
  EXPECT_GT(before, 3 * kSegment) << "it was not known yet";
  Send(Seconds(2));
  EXPECT_LT(SentOn(kSlow), before + kSegment) << "nothing but PINGs";
  slow_ = 0;
  Send(Seconds(12));
  EXPECT_GT(SentOn(kSlow), before + 100 * kSegment);
  EXPECT_EQ(stats(GetParam()).lane_rests, 0u);
  EXPECT_EQ(stats(GetParam()).lanes_used, 4u);
}

TEST_P(LongWay, WhatAnOpQueuesGrowsWithTheLanes) {
  Start(WithLanes(64), 80000);
  EXPECT_GE(world_->at(0).transport->BestUse({kRun, PeerId(2)}).window_bytes, uint64_t{64} << 20);
  EXPECT_TRUE(world_->at(0).transport->BestUse({kRun, PeerId(2)}).long_way);
  EXPECT_EQ(world_->at(0).transport->BestUse({kRun, PeerId(3)}).window_bytes, 0u) << "no such link";
}

TEST_P(LongWay, AFrameThatIsTooLongForAnIdleLaneIsSpreadOverAllLanes) {
  Start(WithLanes(16), 80000);
  const int from = GetParam();
  world_->at(from).SendReady(world_->at(1 - from).id, 1, 64 << 10);
  world_->at(from).SendReady(world_->at(1 - from).id, 2, 100);
  ASSERT_TRUE(world_->Until([&] { return world_->at(1 - from).frames.size() == 2; }));
  EXPECT_EQ(world_->at(1 - from).frames[0].payload, std::string(64 << 10, '\1'));
  EXPECT_EQ(world_->at(1 - from).frames[1].payload, std::string(100, '\2'));
  uint32_t lanes = 0;
  for (int lane = 1; lane <= 16; ++lane) lanes += SentOn(lane) >= 4096 ? 1 : 0;
  EXPECT_EQ(lanes, 16u);
  EXPECT_NEAR(world_->at(from).transport->LatencyUs({kRun, PeerId(2u - unsigned(from))}), 40000,
              20000);
  EXPECT_EQ(world_->at(from).transport->LatencyUs({kRun, PeerId(3)}), 0u) << "no such link";
}

INSTANTIATE_TEST_SUITE_P(FromEitherEnd, LongWay, ::testing::Values(0, 1));

// ------------------------------------------------------------------------------ hostile bytes

// A raw connection to a listener. Sends bytes, and sees whether the listener closes it.
struct Raw {
  Raw(PeerWorld* world, const std::string& to) : world(world), ring(world->at(0).ring) {
    const SocketAddress address = *NumericAddress(*ParseHostPort(to));
    fd = *ring->sockets().Open(address.family());
    bool connected = false;
    ring->Connect(fd, address.get(), address.length, [&](IoResult) { connected = true; });
    EXPECT_TRUE(world->Until([&] { return connected; }));
  }
  void Send(std::string bytes) {
    if (bytes.empty()) return;
    data = std::move(bytes);
    bool done = false;
    ring->Send(fd, data.data(), data.size(), true, [&](IoResult) { done = true; });
    EXPECT_TRUE(world->Until([&] { return done; }));
  }
  void Watch() {
    id = ring->Recv(fd, buffer, sizeof(buffer), false, [this](IoResult result) {
      id = 0;
      if (result.value > 0) {
        got.append(buffer, result.value);
        Watch();
      } else if (result.value != -ECANCELED) {
        closed = true;
      } else {
        cancelled = true;
      }
    });
  }
  void Close() {
    if (id != 0) {
      ring->Cancel(id);
      EXPECT_TRUE(world->Until([&] { return id == 0; }));
    }
    ring->sockets().Close(fd);
  }
  PeerWorld* world;
  Ring* ring;
  int fd = -1;
  IoId id = 0;
  std::string data;
  char buffer[4096];
  std::string got;
  bool closed = false;
  bool cancelled = false;
};

std::string HelloText(PeerId dialer, PeerId acceptor) {
  const LaneHello hello = HelloOf(dialer, acceptor, 7);
  const auto bytes = Encode(hello);
  return std::string(bytes.begin(), bytes.end());
}

TEST_P(TransportTest, GarbageIsRefusedAtEveryStageOfTheHandshake) {
  TransportOptions options;
  options.detect_ms = 50;
  auto world = Make(2, options);
  Transport& victim = *world->at(1).transport;
  const std::string address = victim.listen_address();
  const std::string good = HelloText(PeerId(1), PeerId(2));
  victim.OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(0, false, true)},
                   world->Now() + Seconds(20));
  std::string other_version = good;
  other_version[4] = 9;
  std::string wrong_kind = good;
  wrong_kind[6] = 77;
  const std::vector<std::string> stages = {
      "",                         // connects and says nothing
      "GET / HTTP/1.1\r\n\r\n",   // another protocol, short
      std::string(128, '\xff'),   // a HELLO of garbage
      std::string(1 << 20, 'A'),  // much longer than a HELLO
      good.substr(0, 1),
      good.substr(0, 127),
      wrong_kind,
      other_version,
      good,                         // without CONFIRM
      good + std::string(40, 'x'),  // with a garbage CONFIRM
      good + std::string(1 << 20, '\0'),
  };
  uint64_t refused = 0;
  for (const std::string& bytes : stages) {
    Raw raw(world.get(), address);
    raw.Watch();
    raw.Send(bytes);
    ++refused;
    EXPECT_TRUE(world->Until([&] { return raw.closed; })) << bytes.size();
    EXPECT_TRUE(world->Until([&] { return victim.GetStats().handshakes_refused == refused; }));
    raw.Close();
    // The caller cuts the connection at the same point.
    Raw cut(world.get(), address);
    cut.Send(bytes);
    cut.Close();
    ++refused;
    EXPECT_TRUE(world->Until([&] { return victim.GetStats().handshakes_refused == refused; }));
  }
  EXPECT_EQ(victim.GetStats().connections_accepted, refused);
  EXPECT_TRUE(world->at(1).up.empty());
  // A member still gets a link.
  world->at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world->Request(1, true, true)},
                                    world->Now() + Seconds(5));
  EXPECT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
}

// The HELLO of a control lane from peer 1 to peer 2 in epoch 2, sealed as these tests seal.
LaneHello GoodHello() {
  LaneHello hello = HelloOf(PeerId(1), PeerId(2), 7);
  hello.epoch = Epoch(2);
  hello.sealed = SealedByDefault();
  return hello;
}

// What a caller learns that is refused: one byte, the reason. The rest are zeros.
TEST_P(TransportTest, TheReplyToARefusedHelloHasTheReasonAndNothingElse) {
  auto world = Make(2);
  Transport& victim = *world->at(1).transport;
  const Tick deadline = world->Now() + Seconds(60);
  for (const uint64_t epoch : {1, 2}) {
    victim.OpenLinks(kRun, 0, Epoch(epoch), kToken, {world->Request(0, false, true)}, deadline);
  }
  victim.KeepLinks(kRun, 0, Epoch(2), {PeerId(1)});
  const LaneHello good = GoodHello();
  struct Case {
    void (*change)(LaneHello*);
    LaneResult result;
    CallerRefusal counted;
  };
  const Case cases[] = {
      {[](LaneHello* h) { h->run = RunTag(kToken, "another", h->nonce); },
       LaneResult::kUnknownEpoch, CallerRefusal::kEpoch},
      {[](LaneHello* h) { h->epoch = Epoch(1); }, LaneResult::kUnknownEpoch, CallerRefusal::kEpoch},
      {[](LaneHello* h) { h->group = 5; }, LaneResult::kUnknownEpoch, CallerRefusal::kEpoch},
      {[](LaneHello* h) { h->acceptor = PeerId(3); }, LaneResult::kWrongPeer, CallerRefusal::kPeer},
      {[](LaneHello* h) { h->dialer = PeerId(3); }, LaneResult::kWrongPeer, CallerRefusal::kPeer},
      {[](LaneHello* h) { h->sealed = !h->sealed; }, LaneResult::kWrongSealing,
       CallerRefusal::kSealing},
      {[](LaneHello* h) { h->link = h->serial = 99; }, LaneResult::kUnknownLink,
       CallerRefusal::kLink},
      {[](LaneHello* h) { h->relay = PeerId(3); }, LaneResult::kUnknownEpoch,
       CallerRefusal::kEpoch},
  };
  std::map<CallerRefusal, uint64_t> expected;
  for (const Case& c : cases) {
    LaneHello hello = good;
    c.change(&hello);
    const auto bytes = Encode(hello);
    Raw raw(world.get(), victim.listen_address());
    raw.Watch();
    raw.Send(std::string(bytes.begin(), bytes.end()));
    EXPECT_TRUE(world->Until([&] { return raw.closed; }));
    const auto reply = Encode(LaneAnswer{.result = c.result});
    EXPECT_EQ(raw.got, std::string(reply.begin(), reply.end())) << Name(c.counted);
    EXPECT_TRUE(world->Until(
        [&] { return RefusedFor(world->at(1), c.counted) == expected[c.counted] + 1; }));
    ++expected[c.counted];
    raw.Close();
  }
  EXPECT_EQ(victim.GetStats().handshakes_refused, std::size(cases));
  EXPECT_TRUE(world->at(1).up.empty());
}

// Neither the token of an older epoch or of another group helps, nor a CONFIRM that was right on
// another connection.
TEST_P(TransportTest, AConfirmWithAnotherTokenOrOfAnotherConnectionIsRefused) {
  auto world = Make(2);
  LogLines log;
  Transport& victim = *world->at(1).transport;
  const Tick deadline = world->Now() + Seconds(60);
  const std::string old_token(32, 'o');
  const std::string token_of_group_1(32, 'g');
  const auto open = [&](uint32_t group, uint64_t epoch, const std::string& token) {
    victim.OpenLinks(kRun, group, Epoch(epoch), token, {world->Request(0, false, true)}, deadline);
  };
  open(0, 1, old_token);
  open(0, 2, kToken);
  open(1, 2, token_of_group_1);
  const HelloBytes bytes = Encode(GoodHello());
  // Sends HELLO, and then the CONFIRM that `make` makes for the nonce in the answer.
  const auto call = [&](const std::function<Digest32(const Digest32& nonce)>& make) {
    Raw raw(world.get(), victim.listen_address());
    raw.Watch();
    raw.Send(std::string(bytes.begin(), bytes.end()));
    EXPECT_TRUE(world->Until([&] { return raw.got.size() == kLaneAnswerBytes; }));
    std::array<uint8_t, kLaneAnswerBytes> reply{};
    std::copy(raw.got.begin(), raw.got.end(), reply.begin());
    const auto answer = ParseLaneAnswer(reply);
    ASSERT_TRUE(answer.ok() && answer->result == LaneResult::kAccepted);
    const auto confirm = Encode(LaneConfirm{make(answer->nonce)});
    raw.Send(std::string(confirm.begin(), confirm.end()));
    EXPECT_TRUE(world->Until([&] { return raw.closed; }));
    raw.Close();
  };
  Digest32 right{};
  call([&](const Digest32& nonce) {
    right = ConfirmProof(kToken, bytes, nonce);
    return ConfirmProof(old_token, bytes, nonce);
  });
  call([&](const Digest32& nonce) { return ConfirmProof(token_of_group_1, bytes, nonce); });
  call([&](const Digest32&) { return right; });
  EXPECT_TRUE(world->Until([&] { return RefusedFor(world->at(1), CallerRefusal::kToken) == 3; }));
  EXPECT_EQ(victim.GetStats().handshakes_refused, 3u);
  EXPECT_TRUE(world->at(1).up.empty());
  // One line for all, because they come within ten seconds.
  EXPECT_EQ(log.Count("caller at the data port refused reason=token peer=p1 from=127.0.0.1:"), 1);
}

TEST_P(TransportTest, ManySilentConnectionsDoNotKeepMembersOut) {
  TransportOptions options;
  options.detect_ms = 10000;
  auto world = Make(2, options);
  std::vector<std::unique_ptr<Raw>> raws;
  const std::string address = world->at(1).transport->listen_address();
  for (int i = 0; i < LH_HANDSHAKES_MAX + 40; ++i) {
    raws.push_back(std::make_unique<Raw>(world.get(), address));
  }
  ASSERT_TRUE(world->Until([&] {
    return world->at(1).transport->GetStats().handshakes_refused >= 40;
  })) << "the oldest make room";
  if (world->fake != nullptr) {
    EXPECT_LT(world->fake->operations(), LH_HANDSHAKES_MAX + 50u);
  }
  world->Open(0, 1, 1, true, 15000);
  EXPECT_TRUE(world->Until([&] { return world->Linked(0, 1); }));
  for (auto& raw : raws) raw->Close();
}

// Silent connections, one host for each number. They stay open until the end.
class Flood {
 public:
  Flood(PeerWorld* world, std::string to) : world_(world), to_(std::move(to)) {}
  ~Flood() {
    for (const int fd : fds_) world_->fake->sockets().Close(fd);
  }
  void Come(int count, const std::function<std::string(int)>& host) {
    const SocketAddress address = *NumericAddress(*ParseHostPort(to_));
    size_t connected = 0;
    for (int i = 0; i < count; ++i) {
      fds_.push_back(*world_->fake->sockets().Open(address.family()));
      world_->fake->DialFrom(host(i));
      world_->fake->Connect(fds_.back(), address.get(), address.length,
                            [&](IoResult) { ++connected; });
    }
    world_->fake->DialFrom("127.0.0.1");
    EXPECT_TRUE(world_->Until([&] { return connected == static_cast<size_t>(count); }));
  }
  size_t size() const { return fds_.size(); }

 private:
  PeerWorld* world_;
  const std::string to_;
  std::vector<int> fds_;
};

// A member calls from `host` during a flood at the data port. Its HELLO and its CONFIRM are so slow
// that meanwhile the flood fills all places four times. Returns whether the member gets a link.
bool HeardInAFlood(const std::string& host, const std::function<std::string(int)>& flood_host) {
  TransportOptions options;
  options.detect_ms = 10000;
  PeerWorld world(Rings::kFake, 1, 2, options);
  Transport& port = *world.at(1).transport;
  port.OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(0, false, false)},
                 world.Now() + Seconds(20));
  Flood flood(&world, port.listen_address());
  flood.Come(LH_HANDSHAKES_MAX, flood_host);
  world.fake->DialFrom(host);
  Raw raw(&world, port.listen_address());
  world.fake->DialFrom("127.0.0.1");
  raw.Watch();
  const auto come = [&] {
    flood.Come(4 * LH_HANDSHAKES_MAX, flood_host);
    EXPECT_TRUE(
        world.Until([&] { return port.GetStats().connections_accepted == flood.size() + 1; }));
    EXPECT_LT(world.fake->operations(), LH_HANDSHAKES_MAX + 50u);
  };
  come();
  if (!raw.closed) raw.Send(HelloText(PeerId(1), PeerId(2)));
  EXPECT_TRUE(world.Until([&] { return raw.closed || raw.got.size() >= kLaneAnswerBytes; }));
  come();
  const bool heard = !raw.closed;
  raw.Close();
  return heard;
}

std::string SomewhereElse(int i) {
  return "20." + std::to_string(i / 256) + "." + std::to_string(i % 256) + ".1";
}

TEST(TransportFakeTest, AFloodFromOneBlockOfAddressesKeepsNobodyElseOut) {
  EXPECT_TRUE(HeardInAFlood("10.9.9.9", [](int i) { return "20.0.0." + std::to_string(i % 256); }));
}

TEST(TransportFakeTest, AFloodFromEverywhereKeepsNobodyOutWhoCallsFromWhereAPeerIsKnown) {
  EXPECT_TRUE(HeardInAFlood("127.0.0.1", SomewhereElse)) << "where the peer says that it listens";
  EXPECT_FALSE(HeardInAFlood("10.9.9.9", SomewhereElse)) << "the flood is not large enough";
}

TEST(TransportFakeTest, APeerIsKnownWhereItWasLinkedFrom) {
  TransportOptions options;
  options.detect_ms = 10000;
  PeerWorld world(Rings::kFake, 1, 2, options);
  world.fake->DialFrom("10.9.9.9");  // not the address at which the peer listens
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  Raw raw(&world, world.at(1).transport->listen_address());
  raw.Watch();
  Flood flood(&world, world.at(1).transport->listen_address());
  flood.Come(4 * LH_HANDSHAKES_MAX, SomewhereElse);
  EXPECT_TRUE(world.Until([&] {
    return world.at(1).transport->GetStats().handshakes_refused >= 3u * LH_HANDSHAKES_MAX;
  }));
  EXPECT_FALSE(raw.closed);
  raw.Close();
}

// A member with a control lane to peer 2 of a world. Sends any frames on it.
class Member {
 public:
  explicit Member(PeerWorld* world) : world_(world), ring_(world->at(1).ring) {}

  // Dials peer 2, or is dialled by it. Call Watch() to see what comes.
  void Join(bool dialled_by_victim) {
    Transport& victim = *world_->at(1).transport;
    LinkRequest request{.peer = PeerId(1),
                        .public_key = PeerWorld::IdentityOf(0).public_key(),
                        .endpoints = {},
                        .dial = dialled_by_victim};
    const auto take = [this](LaneHandshake* h) {
      EXPECT_TRUE(h->ok()) << h->error();
      fd = h->TakeFd();
    };
    if (dialled_by_victim) {
      listener_ = *ring_->sockets().Listen(*NumericAddress(*ParseHostPort("127.0.0.1:0")));
      request.endpoints = {ToString(*ring_->sockets().LocalAddress(listener_))};
      ring_->Accept(listener_, [this, take](IoResult result) {
        const auto judge = [](const LaneHello&) {
          return LaneVerdict{LaneResult::kAccepted, kToken, PeerWorld::IdentityOf(1).public_key()};
        };
        handshake_ = std::make_unique<LaneAccept>(ring_, result.value, Digest32{}, &tls_, kNever,
                                                  judge, take);
      });
    }
    victim.OpenLinks(kRun, 0, Epoch(1), kToken, {request}, world_->Now() + Seconds(20));
    if (!dialled_by_victim) {
      const LaneHello hello = HelloOf(PeerId(1), PeerId(2));
      DialSpec spec{.address = *NumericAddress(*ParseHostPort(victim.listen_address())),
                    .tuning = {},
                    .hello = hello,
                    .token = kToken,
                    .tls = &tls_,
                    .peer_key = PeerWorld::IdentityOf(1).public_key()};
      handshake_ = std::make_unique<LaneDial>(ring_, std::move(spec), kNever, take);
    }
    EXPECT_TRUE(world_->Until([&] { return fd >= 0; }));
  }
  // Returns when everything is sent. The link may break meanwhile.
  void Send(FrameHeader header, int count, const std::function<void(FrameHeader*, int)>& number) {
    std::vector<uint8_t> bytes;
    for (int i = 0; i < count; ++i) {
      number(&header, i);
      const auto encoded = Encode(header);
      bytes.insert(bytes.end(), encoded.begin(), encoded.end());
    }
    bool sent = false;
    ring_->Send(fd, bytes.data(), bytes.size(), true, [&](IoResult) { sent = true; });
    EXPECT_TRUE(world_->Until([&] { return sent; }));
    for (int i = 0; i < 100; ++i) world_->Step();
  }
  // Returns the frames that have come.
  std::vector<FrameHeader> Read() {
    EXPECT_TRUE(world_->Until([&] {
      std::vector<uint8_t> more(4096);
      int got = 1;
      const IoId id = ring_->Recv(fd, more.data(), more.size(), false,
                                  [&](IoResult result) { got = result.value; });
      for (int i = 0; i < 20; ++i) world_->Step();
      ring_->Cancel(id);
      for (int i = 0; i < 20; ++i) world_->Step();
      if (got > 0) got_.insert(got_.end(), more.begin(), more.begin() + got);
      return got <= 0;
    }));
    std::vector<FrameHeader> frames;
    for (size_t at = 0; at + kFrameHeaderBytes <= got_.size(); at += kFrameHeaderBytes) {
      const auto frame = ParseFrameHeader(
          std::span<const uint8_t, kFrameHeaderBytes>(got_.data() + at, kFrameHeaderBytes),
          LaneKind::kControl);
      EXPECT_TRUE(frame.ok()) << frame.status();
      if (frame.ok()) frames.push_back(*frame);
    }
    return frames;
  }
  ~Member() {
    if (fd >= 0) ring_->sockets().Close(fd);
    if (listener_ >= 0) ring_->sockets().Close(listener_);
  }

  int fd = -1;

 private:
  PeerWorld* world_;
  Ring* ring_;
  int listener_ = -1;
  const TlsContext tls_{PeerWorld::IdentityOf(0)};
  std::unique_ptr<LaneHandshake> handshake_;
  std::vector<uint8_t> got_;
};

class MemberTest : public ::testing::Test {
 protected:
  MemberTest() : world_(Rings::kFake, 1, 2, PatientOptions()), member_(&world_) {}
  static TransportOptions PatientOptions() {
    TransportOptions options;
    options.detect_ms = 600000;
    return options;
  }
  void SendLaneLost(uint64_t first_serial, int count) {
    member_.Send({.type = FrameType::kLaneLost}, count, [&](FrameHeader* lost, int i) {
      lost->stamp = first_serial + static_cast<uint64_t>(i);
    });
  }
  uint64_t refused() { return world_.at(1).transport->GetStats().frames_refused; }
  static constexpr int kUnknownMax = 64 * LH_LANES_MAX;

  PeerWorld world_;
  Member member_;
};

TEST_F(MemberTest, WhoSendsPingsAndDoesNotReadIsOwedOneAnswer) {
  member_.Join(false);
  constexpr int kPings = 50000;
  member_.Send({.type = FrameType::kPing}, kPings,
               [](FrameHeader* ping, int i) { ping->stamp = static_cast<uint64_t>(i); });
  const std::vector<FrameHeader> frames = member_.Read();
  EXPECT_LT(frames.size(), 10000u) << "what the kernel holds, and one";
  uint64_t last = 0;
  for (const FrameHeader& frame : frames) {
    if (frame.type == FrameType::kPong) last = frame.stamp;
  }
  EXPECT_EQ(last, uint64_t{kPings - 1});
}

TEST_F(MemberTest, LostLanesThatAreNotKnownAreAnsweredAsLongAsAnswersAreAcknowledged) {
  member_.Join(false);
  for (uint64_t i = 0; i < 3; ++i) {
    SendLaneLost(1 + i * kUnknownMax, kUnknownMax);
    EXPECT_EQ(refused(), 0u);
    member_.Send({.type = FrameType::kAck}, 1,
                 [&](FrameHeader* ack, int) { ack->acked = (i + 1) * kUnknownMax; });
    EXPECT_EQ(refused(), 0u);
  }
  SendLaneLost(1, kUnknownMax);
  EXPECT_EQ(refused(), 0u);
  SendLaneLost(1, 1);
  EXPECT_EQ(refused(), 1u);
}

TEST_F(MemberTest, LaneThatWasNeverDialledCannotBeLost) {
  member_.Join(true);
  SendLaneLost(1000, 1);
  EXPECT_EQ(refused(), 1u);
}

// ------------------------------------------------------------------------------ pinned memory

// A peer that sends without copying, from memory of five pieces (4 MiB each, the last one smaller).
class PinningTest : public ::testing::Test {
 protected:
  static constexpr size_t kPiece = size_t{4} << 20;
  static constexpr size_t kBytes = 4 * kPiece + (size_t{1} << 20);
  static constexpr uint32_t kSegment = 100 << 10;

  void Start(size_t buffers_max = SIZE_MAX) {
    TransportOptions options;
    options.zero_copy = TransportOptions::ZeroCopy::kOn;
    options.lanes = 2;
    world_ = std::make_unique<PeerWorld>(
        Rings::kFake, 1, 2, options,
        FakeRingOptions{
            .stream_bytes_max = kPiece, .partial = false, .registered_buffers_max = buffers_max});
    sender().memory.resize(kBytes);
    for (size_t i = 0; i < kBytes; ++i) sender().memory[i] = static_cast<uint8_t>(i * 7 + i / 251);
    world_->at(1).memory.resize(kBytes);
    sender().transport->AddMemory(data(), kBytes);
    world_->Open(0, 1);
    ASSERT_TRUE(world_->Until([&] { return world_->Linked(0, 1); }));
  }

  Peer& sender() { return world_->at(0); }
  const uint8_t* data() { return sender().memory.data(); }

  // Sends one segment from each of these offsets, one after the other.
  void Send(const std::vector<size_t>& offsets) {
    for (const size_t offset : offsets) {
      sender().Send(PeerId(2), offset, kSegment, cookie_++);
      ASSERT_TRUE(world_->Until([&] { return sender().sent == sender().started; }));
      ASSERT_TRUE(world_->Until([&] { return world_->at(1).segments == int(cookie_); }));
      EXPECT_TRUE(std::equal(data() + offset, data() + offset + kSegment,
                             world_->at(1).memory.begin() + offset));
      for (int i = 0; i < 10; ++i) world_->Step();
    }
  }

  // Returns which pieces are pinned.
  std::set<size_t> Pinned() {
    std::set<size_t> pieces;
    for (const auto& [buffer, range] : world_->fake->registered()) {
      const size_t offset = static_cast<const uint8_t*>(range.first) - data();
      EXPECT_EQ(offset % kPiece, 0u);
      EXPECT_EQ(range.second, std::min(kPiece, kBytes - offset));
      EXPECT_TRUE(pieces.insert(offset / kPiece).second) << "pinned twice";
    }
    return pieces;
  }

  std::unique_ptr<PeerWorld> world_;
  uint64_t cookie_ = 0;
};

TEST_F(PinningTest, OnlyPiecesThatAreSentFromArePinnedAndEachOnce) {
  Start();
  EXPECT_THAT(Pinned(), ::testing::IsEmpty());
  Send({kPiece, kPiece + kSegment, 2 * kPiece - kSegment, kBytes - kSegment});
  EXPECT_THAT(Pinned(), ::testing::ElementsAre(1, 4));
}

TEST_F(PinningTest, SegmentsAcrossTwoPiecesPinNeither) {
  Start();
  Send({kPiece - kSegment / 2});
  EXPECT_THAT(Pinned(), ::testing::IsEmpty());
}

TEST_F(PinningTest, UntouchedPiecesAreSentFromAndPinnedOnceTheyHaveBeenFilled) {
  Start();
  world_->fake->SetUntouched(data() + 2 * kPiece - 1);
  Send({0, kPiece, kPiece});
  EXPECT_THAT(Pinned(), ::testing::ElementsAre(0));
  world_->fake->SetUntouched(nullptr);
  Send({kPiece});
  EXPECT_THAT(Pinned(), ::testing::ElementsAre(0, 1));
}

TEST_F(PinningTest, WhereTheSystemLetsNoMoreBePinnedSegmentsAreSentAllTheSame) {
  Start(1);
  Send({0, kPiece, 2 * kPiece});
  EXPECT_THAT(Pinned(), ::testing::ElementsAre(0));
}

TEST_F(PinningTest, RemovedMemoryIsReleasedPieceByPieceAndItsRoomIsUsedAgain) {
  Start(3);
  Send({0, kPiece, 2 * kPiece});
  ASSERT_EQ(Pinned().size(), 3u);
  sender().transport->RemoveMemory(data());
  sender().transport->AddMemory(data(), kBytes);
  const auto& registered = world_->fake->registered();
  EXPECT_EQ(registered.size(), 3u) << "released from within the call";
  size_t before = registered.size();
  EXPECT_TRUE(world_->Until([&] {
    EXPECT_LE(before - registered.size(), 1u) << "in one turn";
    before = registered.size();
    return registered.empty();
  }));
  Send({3 * kPiece});
  EXPECT_THAT(Pinned(), ::testing::ElementsAre(3));
}

TEST(TransportFakeTest, WhatOneLaneLearnsOfZeroCopyAllLanesOfTheLinkKnow) {
  TransportOptions options;
  options.zero_copy = TransportOptions::ZeroCopy::kOn;
  options.lanes = 4;
  PeerWorld world(Rings::kFake, 1, 2, options,
                  {.stream_bytes_max = 1 << 20, .zero_copy_error = ENOBUFS});
  for (int i = 0; i < 2; ++i) world.at(i).memory.resize(1 << 20);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  int sent = 0;
  const auto send = [&](int count) {
    for (int i = 0; i < count; ++i) {
      world.at(0).Send(PeerId(2), 0, 100000, ++sent);
      ASSERT_TRUE(world.Until([&] { return world.at(1).segments == sent; }));
    }
  };
  send(40);  // one by one, so that each lane has its turn
  EXPECT_LE(world.fake->zero_copy_sends(), 1u);
  // Zero-copy sends go on after refusals that do not last.
  world.fake->SetZeroCopy(false, 0);
  world.fake->AdvanceTime(Seconds(2));
  send(40);
  EXPECT_GE(world.fake->zero_copy_sends(), 39u);
}

// ------------------------------------------------------------------------------ faults, in memory

TEST(TransportFakeTest, AnAddressThatDropsPacketsIsNotReached) {
  PeerWorld world(Rings::kFake, 1, 2);
  const std::string dark = "10.0.0.9:29700";
  world.fake->Ignore(dark, true);
  const Tick begun = world.Now();
  EXPECT_EQ(Tried(&world, PeerId(2), {dark}), "no connection to " + dark);
  EXPECT_GE(world.Now() - begun, Millis(3000));
  EXPECT_LE(world.Now() - begun, Millis(3010));
  EXPECT_EQ(Tried(&world, PeerId(2), {dark, world.at(1).transport->listen_address()}), "");
}

class FakeSeeds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, FakeSeeds, ::testing::Range(1, 21));

TEST_P(FakeSeeds, SilenceTakesTheLinkDownAtBothEnds) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  ASSERT_TRUE(!world.Until([&] { return !world.Linked(0, 1); }, 10000)) << "an idle link stays";
  for (int i = 0; i < world.fake->connections(); ++i) world.fake->StallConnection(i, true);
  const Tick start = world.Now();
  ASSERT_TRUE(world.Until([&] { return world.at(0).up.empty() && world.at(1).up.empty(); }));
  EXPECT_GE(world.Now() - start, Millis(1000));
  EXPECT_LE(world.Now() - start, Millis(1700));
  // One end reports the silence first. The other end may see the reset instead.
  const std::string all = world.at(0).downs[PeerId(2)][0] + world.at(1).downs[PeerId(1)][0];
  EXPECT_THAT(all, HasSubstr("silent for 1500 ms"));
}

TEST_P(FakeSeeds, StoppedProcessDoesNotTakeItsPeersForSilent) {
  PeerWorld world(Rings::kFake, GetParam(), 2);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (int i = 0; i < 10; ++i) {
    world.fake->AdvanceTime(Seconds(60));
    for (int k = 0; k < 100; ++k) world.Step();
  }
  EXPECT_TRUE(world.Linked(0, 1));
}

TEST_P(FakeSeeds, HandshakeCutAtAnyByteIsTriedAgain) {
  for (uint64_t byte = 0; byte <= 240; byte += 1 + GetParam() % 7) {
    PeerWorld world(Rings::kFake, GetParam() * 1000 + byte, 2);
    Prng random(byte);
    for (int connection = 0; connection < 4; ++connection) {
      world.fake->CutConnection(connection, random.Chance(0.5), byte);
    }
    // PINGs cut established links too. Then the next epoch builds them again.
    uint64_t epoch = 0;
    ASSERT_TRUE(world.Until([&] {
      if (world.fake->connections() >= 4 + 3 && world.Linked(0, 1)) return true;
      if (epoch == 0 ||
          (!world.Linked(0, 1) &&
           world.at(0).downs[PeerId(2)].size() + world.at(1).downs[PeerId(1)].size() >= epoch)) {
        ++epoch;
        world.Open(0, 1, epoch, true, 5000);
      }
      return epoch > 20 || (world.Linked(0, 1) && world.fake->connections() >= 3 &&
                            world.at(0).downs.empty() && world.at(1).downs.empty());
    })) << "byte "
        << byte;
    EXPECT_LE(epoch, 20u);
    world.Close();
  }
}

// Random traffic among three peers while connections are cut at random. When a peer reports a link
// down, both ends open it again in the next epoch. Every segment comes back to its sender, arrived
// bytes are the sent bytes, and after the faults all links are up.
TEST_P(FakeSeeds, TrafficAndBooksSurviveRandomCuts) {
  const uint64_t seed = GetParam();
  Prng random(seed * 77);
  TransportOptions options;
  options.lanes = 1 + random.Below(4);
  options.zero_copy =
      random.Chance(0.5) ? TransportOptions::ZeroCopy::kOn : TransportOptions::ZeroCopy::kAuto;
  PeerWorld world(Rings::kFake, seed, 3, options, {.stream_bytes_max = 200000});
  for (int i = 0; i < 3; ++i) {
    world.at(i).scatter = true;
    world.at(i).memory.resize(1 << 20);
    for (size_t b = 0; b < world.at(i).memory.size(); ++b) {
      world.at(i).memory[b] = static_cast<uint8_t>(b * 13 + b / 241);  // the same at all peers
    }
  }
  const auto memory = world.at(0).memory;
  uint64_t epoch = 1;
  const auto open_all = [&] {
    world.Open(0, 1, epoch);
    world.Open(0, 2, epoch);
    world.Open(1, 2, epoch);
    for (int i = 0; i < 3; ++i) {
      std::vector<PeerId> others;
      for (int k = 0; k < 3; ++k) {
        if (k != i) others.push_back(world.at(k).id);
      }
      world.at(i).transport->KeepLinks(kRun, 0, Epoch(epoch), others);
    }
    ++epoch;
  };
  open_all();
  uint64_t cookie = 1;
  size_t downs_seen = 0;
  for (int round = 0; round < 300; ++round) {
    for (int k = random.Below(20); k > 0; --k) world.Step();
    const int from = random.Below(3);
    const int to = (from + 1 + random.Below(2)) % 3;
    switch (random.Below(8)) {
      case 0:
        if (round < 250) {
          world.fake->CutConnection(random.Below(world.fake->connections() + 1), random.Chance(0.5),
                                    random.Below(100000));
        }
        break;
      case 1:
        world.at(from).transport->DetachReceives(
            kRun, {.op = OpOrdinal(1 + random.Below(3)), .attempt = Epoch(1)}, cookie++);
        break;
      case 2:
        for (const FrameType type : {FrameType::kData, FrameType::kChunkData}) {
          world.at(from).transport->DropSegments(type, {cookie - 1, cookie - 2, cookie - 3});
        }
        break;
      case 3:
        world.at(from).SendReady(
            world.at(to).id, 1 + round,
            kReadyBodyBytes + random.Below(random.Chance(0.3) ? 100000 : 4000));
        break;
      default: {
        const uint32_t bytes = 1 + random.Below(random.Chance(0.5) ? 200000 : 2000);
        world.at(from).Send(world.at(to).id, random.Below(memory.size() - bytes), bytes, cookie++,
                            1 + random.Below(3));
      }
    }
    size_t downs = 0;
    for (int i = 0; i < 3; ++i) {
      for (const auto& [peer, reasons] : world.at(i).downs) downs += reasons.size();
    }
    if (downs != downs_seen) {
      downs_seen = downs;
      open_all();
    }
  }
  for (int tries = 0; tries < 20; ++tries) {
    open_all();
    if (world.Until([&] { return world.Linked(0, 1) && world.Linked(0, 2) && world.Linked(1, 2); },
                    8000)) {
      break;
    }
  }
  EXPECT_TRUE(world.Linked(0, 1) && world.Linked(0, 2) && world.Linked(1, 2));
  ASSERT_TRUE(world.Until([&] {
    return std::all_of(world.peers.begin(), world.peers.end(),
                       [](const auto& p) { return p->sent == p->started; });
  }));
  for (int i = 0; i < 3; ++i) {
    for (const auto& [id, times] : world.at(i).detached) EXPECT_EQ(times, 1);
    EXPECT_EQ(world.at(i).transport->GetStats().frames_refused, 0u);
  }
}

// ------------------------------------------------------------------------------ TCP alone

TEST(TransportUringTest, NamesAndIpv6AreDialled) {
  for (const char* listen : {"127.0.0.1:0", "[::1]:0"}) {
    TransportOptions options;
    options.listen = listen;
    if (!NumericAddress(*ParseHostPort(listen)).has_value()) continue;
    const auto probe = SystemSockets().Listen(*NumericAddress(*ParseHostPort(listen)));
    if (!probe.ok()) continue;  // this machine has no IPv6
    SystemSockets().Close(*probe);
    PeerWorld world(Rings::kOne, 1, 2, options);
    const std::string address = world.at(1).transport->listen_address();
    LinkRequest request = world.Request(1, true, true);
    if (options.listen[0] != '[') {
      request.endpoints = {"localhost" + address.substr(address.rfind(':'))};
    }
    world.at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {request},
                                     world.Now() + Seconds(20));
    world.at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(0, false, true)},
                                     world.Now() + Seconds(20));
    EXPECT_TRUE(world.Until([&] { return world.Linked(0, 1); })) << listen;
  }
}

TEST(TransportUringTest, NextEndpointIsTriedWhenOneDoesNotAnswer) {
  PeerWorld world(Rings::kOne, 1, 2);
  LinkRequest request = world.Request(1, true, true);
  request.endpoints = {"nonsense", "127.0.0.1:1", "no-such-host.invalid:1", request.endpoints[0]};
  world.at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {request}, world.Now() + Seconds(20));
  world.at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(0, false, true)},
                                   world.Now() + Seconds(20));
  EXPECT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
}

TEST(TransportUringTest, ZeroCopySegmentsOfRegisteredMemoryArriveAndCopiesAreCounted) {
  // Memory is pinned in pieces, and some segments lie in two pieces.
  constexpr size_t kBytes = 40 << 20;
  constexpr size_t kSegment = 384 << 10;
  constexpr size_t kSegments = kBytes / kSegment;
  TransportOptions options;
  options.zero_copy = TransportOptions::ZeroCopy::kOn;
  PeerWorld world(Rings::kEach, 1, 2, options);
  if (!world.at(0).ring->features().send_zero_copy) GTEST_SKIP();
  world.at(0).memory.resize(kBytes);
  for (size_t i = 0; i < world.at(0).memory.size(); ++i) world.at(0).memory[i] = uint8_t(i / 3);
  world.at(1).memory.resize(kBytes);
  world.at(0).transport->AddMemory(world.at(0).memory.data(), world.at(0).memory.size());
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (size_t i = 0; i < kSegments; ++i) {
    world.at(0).Send(PeerId(2), i * kSegment, kSegment, i);
  }
  ASSERT_TRUE(world.Until([&] {
    return world.at(1).segments == kSegments && world.at(0).sent == world.at(0).started;
  }));
  EXPECT_TRUE(std::equal(world.at(0).memory.begin(),
                         world.at(0).memory.begin() + kSegments * kSegment,
                         world.at(1).memory.begin()));
  world.at(0).transport->RemoveMemory(world.at(0).memory.data());
}

TEST(TransportFakeTest, IdleDataLanesAreHeardSeldomAndStayUp) {
  TransportOptions options;
  options.lanes = 3;
  PeerWorld world(Rings::kFake, 1, 2, options);
  for (int i = 0; i < 2; ++i) world.at(i).memory.resize(1 << 20);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  const auto pass = [&](int64_t us) {
    const Tick end = world.Now() + us;
    while (world.Now() < end) world.Step();
  };
  const auto sent = [&] {
    uint64_t bytes = 0;
    for (int c = 0; c < world.fake->connections(); ++c) {
      bytes += world.fake->BytesSent(c, true) + world.fake->BytesSent(c, false);
    }
    return bytes;
  };
  pass(Seconds(10));
  // In each second, each way: 2 PINGs and their PONGs on the control lane. On each data lane: a
  // PING in six seconds.
  const uint64_t before = sent();
  pass(Seconds(60));
  // A record of TLS is 22 bytes longer than the frame in it.
  const uint64_t frame = kFrameHeaderBytes + (SealedByDefault() ? 22 : 0);
  const uint64_t idle = (sent() - before) / frame;
  EXPECT_LT(idle, 60u * 8 + 2 * 3 * 12);
  // While segments flow, data lanes are pinged as often as the control lane.
  const uint64_t busy_from = sent();
  for (int i = 0; i < 60; ++i) {
    world.at(0).Send(PeerId(2), 0, 64, i);
    pass(Seconds(1));
  }
  const uint64_t busy = (sent() - busy_from - 60 * 64) / kFrameHeaderBytes - 60;
  EXPECT_GT(busy, 60u * 8 + 3 * 60);
  pass(Seconds(60));
  EXPECT_EQ(world.at(0).transport->GetStats().lanes_up, 4u);
  EXPECT_EQ(world.at(0).transport->GetStats().lanes_lost, 0u);
  EXPECT_EQ(world.at(1).transport->GetStats().lanes_lost, 0u);
}

TEST(TransportFakeTest, LanesOnLoopbackDoNotPaceUnlessToldTo) {
  for (const std::string asked : {"", "bbr"}) {
    TransportOptions options;
    options.congestion = asked;
    PeerWorld world(Rings::kFake, 1, 2, options);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    EXPECT_THAT(world.fake->congestions(), ElementsAre(asked.empty() ? "cubic" : asked));
  }
}

TEST(TransportUringTest, AddressesThatCannotBeBoundAreNamed) {
  PeerWorld world(Rings::kOne, 1, 1);
  Peer peer;
  const auto make = [&](TransportOptions options) {
    options.self = PeerId(5);
    return MakeTransport(options, world.at(0).ring, &peer).status();
  };
  TransportOptions options;
  options.listen = world.at(0).transport->listen_address();
  EXPECT_EQ(make(options).code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(make(options).ToString(), HasSubstr(options.listen + ": Address already in use"));
  options.listen = "nonsense";
  EXPECT_EQ(make(options).code(), absl::StatusCode::kInvalidArgument);
  options.listen = "127.0.0.1:0";
  options.congestion = "none-such";
  EXPECT_EQ(make(options).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(make(options).ToString(), HasSubstr("congestion control none-such"));
}

TEST(TransportFakeTest, SaysThatThereIsNoDescriptorToBeHad) {
  FakeRing ring({});
  Peer peer;
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  TransportOptions options;
  options.self = PeerId(1);
  options.listen = "127.0.0.1:0";
  const absl::Status status = MakeTransport(options, &ring, &peer).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.ToString(), HasSubstr("eventfd: Too many open files"));
}

// The rates are printed and not checked, because they depend on the machine.
TEST(TransportTcpTest, ThroughputForTheRecord) {
  for (const Rings rings : {Rings::kEach, Rings::kEpollEach}) {
    PeerWorld world(rings, 1, 2);
    world.at(0).memory.resize(32 << 20);
    world.at(1).memory.resize(32 << 20);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    const Tick start = world.Now();
    for (uint64_t i = 0; i < 256; ++i) world.at(0).Send(PeerId(2), (i % 64) << 19, 1 << 19, i);
    ASSERT_TRUE(world.Until([&] { return world.at(1).segments == 256; }));
    std::printf("one thread, two rings, %s: %.0f MB/s\n",
                world.at(0).ring->features().description.c_str(),
                256.0 * (1 << 19) / static_cast<double>(world.Now() - start));
  }
}

}  // namespace
}  // namespace longhaul::peerd
