// Tests sealed lanes against somebody on the path, who flips bits, records, replays, and poses as a
// peer. The network is in memory. (The other tests of links run once with sealed lanes, too.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "peerd/transport/lane_handshake.h"
#include "peerd/transport/testing.h"
#include "peerd/transport/tls_session.h"

namespace longhaul::peerd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TransportOptions Options(LaneEncryption encryption) {
  TransportOptions options;
  options.encryption = encryption;
  options.lanes = 2;
  return options;
}

// Some traffic of all kinds between peers 0 and 1.
void SendSome(Traffic* traffic) {
  for (int i = 0; i < 6; ++i) {
    traffic->Segment(0, 1, 100 * i, 50 + i);
    traffic->Segment(1, 0, 3000 * i, i == 3 ? 40000 : 10 + i);
    traffic->Frame(0, 1, kReadyBodyBytes + i);
    traffic->Frame(1, 0, kReadyBodyBytes + 5 * i);
  }
}

// ------------------------------------------------------------------------------ changed bytes

// Connection 0 is the control lane, connections 1 and 2 are data lanes. A flipped bit costs one
// connection at most: in the handshake another attempt, later a lane that is dialled again.
class FlippedBits : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, FlippedBits, ::testing::Range(0, 16, 5));

TEST_P(FlippedBits, AtAnyByteOfASealedLaneTheyCostOneLaneAndNoData) {
  uint64_t unauthentic = 0;
  for (int connection = 0; connection < 3; ++connection) {
    const uint64_t end = connection == 0 ? 2600 : 1400;
    for (uint64_t byte = GetParam(); byte < end; byte += 16) {
      for (const bool from_dialer : {true, false}) {
        SCOPED_TRACE(testing::Message() << "connection " << connection << " byte " << byte
                                        << (from_dialer ? " from" : " to") << " the dialer");
        PeerWorld world(Rings::kFake, byte * 3 + connection, 2, Options(LaneEncryption::kRequire));
        world.fake->FlipBit(connection, from_dialer, byte);
        Traffic traffic(&world);
        world.Open(0, 1, 1, true, 20000);
        ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
        SendSome(&traffic);
        ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
        traffic.ExpectOnce();
        for (auto& peer : world.peers) {
          unauthentic += peer->transport->GetStats().unauthentic;
          EXPECT_EQ(peer->transport->GetStats().frames_refused, 0u);
        }
      }
    }
  }
  EXPECT_GT(unauthentic, 30u) << "many of the bits hit a lane in use";
}

// The test above finds something: without sealing a changed byte of a payload goes unnoticed.
TEST(ClearLinkTest, AFlippedBitOfAPayloadIsNotNoticed) {
  PeerWorld world(Rings::kFake, 1, 2, Options(LaneEncryption::kOff));
  world.at(0).memory.assign(1 << 20, 7);
  world.at(1).memory.assign(1 << 20, 7);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (const int connection : {1, 2}) {
    world.fake->FlipBit(connection, true, world.fake->BytesSent(connection, true) + 1000);
  }
  world.at(0).Send(PeerId(2), 0, 100000, 1);
  ASSERT_TRUE(world.Until([&] { return world.at(1).segments == 1; }));
  EXPECT_NE(world.at(1).memory, std::vector<uint8_t>(1 << 20, 7));
}

// ------------------------------------------------------------------------------ seen bytes

// Returns whether `text` went over any connection.
bool Seen(const PeerWorld& world, const std::string& text) {
  for (int i = 0; i < world.fake->connections(); ++i) {
    for (const bool by_dialer : {true, false}) {
      if (world.fake->Recorded(i, by_dialer).find(text) != std::string::npos) return true;
    }
  }
  return false;
}

TEST(SealedLinkTest, NoByteOfATensorOrOfAFrameIsSeenOnTheWay) {
  for (const LaneEncryption encryption : {LaneEncryption::kOff, LaneEncryption::kRequire}) {
    const bool clear = encryption == LaneEncryption::kOff;
    PeerWorld world(Rings::kFake, 3, 2, Options(encryption));
    world.fake->Record();
    const std::string pattern = "the plain bytes of a tensor";
    for (auto& peer : world.peers) {
      peer->scatter = true;
      peer->memory.resize(1 << 20);
      for (size_t i = 0; i < peer->memory.size(); ++i) peer->memory[i] = pattern[i % 27];
    }
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    for (int i = 0; i < 20; ++i) world.at(i % 2).Send(PeerId(2 - i % 2), 0, 30000, i + 1);
    world.at(0).SendReady(PeerId(2), 'x', 1000);
    ASSERT_TRUE(world.Until([&] {
      return world.at(0).segments == 10 && world.at(1).segments == 10 &&
             !world.at(1).frames.empty();
    }));
    EXPECT_EQ(Seen(world, pattern.substr(0, 8)), clear);
    EXPECT_EQ(Seen(world, std::string(8, 'x')), clear);  // the payload of READY
    // The magic number of frames.
    EXPECT_EQ(Seen(world, "LHF1"), clear);
  }
}

// ------------------------------------------------------------------------------ who it is

// A member of the epoch, which knows the token, poses as another member.
class Impostor {
 public:
  explicit Impostor(PeerWorld* world) : world_(world), ring_(world->at(0).ring) {}
  ~Impostor() {
    if (fd_ >= 0) ring_->sockets().Abort(fd_);
  }

  // Dials peer 1 of the world in the name of peer 0, with a key of its own. Returns how it ended.
  std::string DialInTheNameOfPeer0(const Identity& identity, LaneEncryption encryption) {
    const TlsContext tls(identity);
    const LaneHello hello = HelloOf(PeerId(1), PeerId(2), 1);
    DialSpec spec{
        .address = *NumericAddress(*ParseHostPort(world_->at(1).transport->listen_address())),
        .tuning = {},
        .hello = hello,
        .token = kToken,
        .encryption = encryption,
        .tls = &tls,
        .peer_key = PeerWorld::IdentityOf(1).public_key()};
    bool done = false;
    std::string error;
    LaneDial dial(ring_, std::move(spec), kNever, [&](LaneHandshake* h) {
      done = true;
      error = h->error();
      if (h->ok()) fd_ = h->TakeFd();
    });
    EXPECT_TRUE(world_->Until([&] { return done; }));
    for (int i = 0; i < 200; ++i) world_->Step();
    return error;
  }

 private:
  PeerWorld* const world_;
  Ring* const ring_;
  int fd_ = -1;
};

TEST(SealedLinkTest, AMemberCannotPoseAsAnotherMember) {
  LogLines log;
  PeerWorld world(Rings::kFake, 5, 2, Options(LaneEncryption::kRequire));
  world.at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(0, false, false)},
                                   world.Now() + Seconds(60));
  Impostor impostor(&world);
  // Its own side of the handshake is over before the victim has seen its key.
  impostor.DialInTheNameOfPeer0(Identity::ForTest(9), LaneEncryption::kRequire);
  EXPECT_TRUE(world.at(1).up.empty());
  EXPECT_EQ(world.at(1).transport->GetStats().handshakes_untrusted, 1u);
  EXPECT_EQ(log.Count("caller at the data port refused reason=key peer=p1 "), 1);
  // In clear it proves nothing, so it is not let in either.
  EXPECT_THAT(impostor.DialInTheNameOfPeer0(Identity::ForTest(9), LaneEncryption::kOff),
              HasSubstr("--lane-encryption"));
  EXPECT_TRUE(world.at(1).up.empty());
  EXPECT_EQ(RefusedFor(world.at(1), CallerRefusal::kKey), 1u);
  EXPECT_EQ(RefusedFor(world.at(1), CallerRefusal::kSealing), 1u);
  // The peer itself has an effect only after that.
  world.at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(1, true, false)},
                                   world.Now() + Seconds(60));
  EXPECT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
}

// Also where lanes are in clear.
TEST(ClearLinkTest, AMemberCannotPoseAsAnotherMember) {
  PeerWorld world(Rings::kFake, 5, 2, Options(LaneEncryption::kOff));
  world.at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(0, false, false)},
                                   world.Now() + Seconds(60));
  Impostor impostor(&world);
  impostor.DialInTheNameOfPeer0(Identity::ForTest(9), LaneEncryption::kOff);
  EXPECT_TRUE(world.at(1).up.empty());
  EXPECT_EQ(RefusedFor(world.at(1), CallerRefusal::kKey), 1u);
  world.at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(1, true, false)},
                                   world.Now() + Seconds(60));
  EXPECT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
}

// A third member of the epoch, which has seen the HELLO of a link, opens a data lane of it.
TEST(ClearLinkTest, ADataLaneOfALinkIsOnlyForItsEnds) {
  PeerWorld world(Rings::kFake, 6, 2, Options(LaneEncryption::kOff));
  world.fake->Record();
  Traffic traffic(&world);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  const std::string seen = world.fake->Recorded(0, true);
  std::array<uint8_t, kLaneHelloBytes> first{};
  std::copy_n(seen.begin(), first.size(), first.begin());
  LaneHello hello = HelloOf(PeerId(1), PeerId(2), 3);
  hello.kind = LaneKind::kData;
  hello.link = NewLinkId(*ParseLaneHello(first));
  hello.serial = 1000;
  hello.lanes = 2;
  DialSpec spec{.address = *NumericAddress(*ParseHostPort(world.at(1).transport->listen_address())),
                .tuning = {},
                .hello = hello,
                .token = kToken};
  bool done = false;
  LaneDial dial(world.at(0).ring, std::move(spec), kNever, [&](LaneHandshake* h) {
    EXPECT_FALSE(h->ok());
    EXPECT_THAT(h->error(), HasSubstr("does not have the epoch's token"));
    done = true;
  });
  EXPECT_TRUE(world.Until([&] { return done; }));
  SendSome(&traffic);
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
  ExpectNoLinkWasLost(&world);
}

TEST(SealedLinkTest, AnImpostorDoesNotDisturbALinkThatIsUp) {
  PeerWorld world(Rings::kFake, 6, 2, Options(LaneEncryption::kRequire));
  Traffic traffic(&world);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  Impostor impostor(&world);
  impostor.DialInTheNameOfPeer0(Identity::ForTest(9), LaneEncryption::kRequire);
  SendSome(&traffic);
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
  ExpectNoLinkWasLost(&world);
  EXPECT_EQ(world.at(1).transport->GetStats().handshakes_refused, 1u);
}

TEST(SealedLinkTest, APeerThatAnswersWithAnotherKeyIsNotTalkedTo) {
  PeerWorld world(Rings::kFake, 7, 2, Options(LaneEncryption::kRequire));
  LinkRequest request = world.Request(1, true, false);
  request.public_key = Identity::ForTest(9).public_key();  // not the one that peer 1 has
  world.at(0).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {request}, world.Now() + Millis(500));
  world.at(1).transport->OpenLinks(kRun, 0, Epoch(1), kToken, {world.Request(0, false, false)},
                                   world.Now() + Millis(500));
  ASSERT_TRUE(world.Until([&] { return !world.at(0).downs[PeerId(2)].empty(); }));
  EXPECT_THAT(world.at(0).downs[PeerId(2)][0], HasSubstr("and the epoch names the key"));
  EXPECT_TRUE(world.at(1).up.empty());
}

// ------------------------------------------------------------------------------ replays

// Somebody sends again what a dialer sent before, on a connection of his own.
TEST(SealedLinkTest, RecordedConnectionsAreOfNoUse) {
  PeerWorld world(Rings::kFake, 8, 2, Options(LaneEncryption::kRequire));
  world.fake->Record();
  Traffic traffic(&world);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  SendSome(&traffic);
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
  const int before = world.fake->connections();
  Ring* const ring = world.at(0).ring;
  const SocketAddress victim =
      *NumericAddress(*ParseHostPort(world.at(1).transport->listen_address()));
  for (int i = 0; i < before; ++i) {
    const std::string recorded = world.fake->Recorded(i, true);
    const int fd = *ring->sockets().Open(victim.family());
    int connected = 1;
    ring->Connect(fd, victim.get(), victim.length, [&](IoResult r) { connected = r.value; });
    ASSERT_TRUE(world.Until([&] { return connected <= 0; }));
    bool sent = false;
    ring->Send(fd, recorded.data(), recorded.size(), true, [&](IoResult) { sent = true; });
    ASSERT_TRUE(world.Until([&] { return sent; }));
    for (int step = 0; step < 200; ++step) world.Step();
    ring->sockets().Abort(fd);
  }
  EXPECT_GE(world.at(1).transport->GetStats().handshakes_refused, static_cast<uint64_t>(before));
  for (int step = 0; step < 200; ++step) world.Step();
  traffic.ExpectOnce();
  SendSome(&traffic);
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
  traffic.ExpectOnce();
  ExpectNoLinkWasLost(&world);
}

// Somebody on the path sends one segment twice, or two of them in the other order. Each byte of
// them is one that the sender has sealed.
TEST(SealedLinkTest, RepeatedAndMovedSegmentsCostOneLaneAndNoData) {
  for (const bool repeat : {true, false}) {
    TransportOptions options = Options(LaneEncryption::kRequire);
    options.lanes = 1;
    PeerWorld world(Rings::kFake, 12, 2, options);
    Traffic traffic(&world);
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    constexpr int kDataLane = 1;
    const auto send = [&] {
      traffic.Segment(0, 1, 5000, 1000);
      EXPECT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
      return world.fake->BytesSent(kDataLane, true);
    };
    const uint64_t first = send();
    const uint64_t second = send();
    const uint64_t third = 2 * second - first;
    if (repeat) {
      world.fake->RepeatBytes(kDataLane, true, second, third);
    } else {
      world.fake->DelayBytes(kDataLane, true, second, third, 2 * third - second);
    }
    for (int i = 0; i < 4; ++i) traffic.Segment(0, 1, 5000, 1000);
    ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
    traffic.ExpectOnce();
    ExpectNoLinkWasLost(&world);
    const TransportStats stats = world.at(1).transport->GetStats();
    EXPECT_EQ(stats.unauthentic, 1u) << (repeat ? "repeated" : "moved");
    EXPECT_EQ(stats.lanes_lost, 1u);
  }
}

// ------------------------------------------------------------------------------ which lanes

TEST(SealedLinkTest, AutoSealsWhatLeavesTheHost) {
  for (const bool leaves : {false, true}) {
    TransportOptions options = Options(LaneEncryption::kAuto);
    options.listen = leaves ? "10.0.0.1:0" : "127.0.0.1:0";
    PeerWorld world(Rings::kFake, 9, 2, options);
    if (leaves) world.fake->DialFrom("10.0.0.2");
    world.Open(0, 1);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    for (auto& peer : world.peers) {
      for (const LinkStats& link : peer->transport->GetLinkStats()) {
        EXPECT_EQ(link.sealed, leaves);
      }
    }
  }
}

// A proxy on this host forwards to a peer on another one, as a published port of a container does.
TEST(SealedLinkTest, AutoSealsWhatOnlyLooksLocal) {
  for (const int from : {0, 1}) {
    PeerWorld world(Rings::kFake, 9, 1, Options(LaneEncryption::kAuto));
    TransportOptions elsewhere = Options(LaneEncryption::kAuto);
    elsewhere.host[0] ^= 1;
    world.Add(elsewhere);
    Traffic traffic(&world);
    world.Open(from, 1 - from);
    ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
    for (auto& peer : world.peers) {
      ASSERT_EQ(peer->transport->GetLinkStats().size(), 1u);
      EXPECT_TRUE(peer->transport->GetLinkStats()[0].sealed);
    }
    SendSome(&traffic);
    ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
    ExpectNoLinkWasLost(&world);
  }
}

TEST(SealedLinkTest, PeersThatDisagreeAreToldTheFlag) {
  for (const bool dialer_seals : {false, true}) {
    PeerWorld world(Rings::kFake, 10, 2, Options(LaneEncryption::kOff));
    TransportOptions other = Options(LaneEncryption::kRequire);
    other.self = PeerId(1);
    other.listen = "127.0.0.1:0";
    other.seed = 77;
    other.identity = PeerWorld::IdentityOf(0);
    world.at(0).transport->Close();
    ASSERT_TRUE(world.Until([&] { return world.at(0).transport->closed(); }));
    world.at(0).transport = *MakeTransport(other, world.at(0).ring, &world.at(0));
    world.at(0).transport->SetSegmentListeners(world.at(0).Segments());
    const int from = dialer_seals ? 0 : 1;
    world.Open(from, 1 - from, 1, true, 500);
    const PeerId to = world.at(1 - from).id;
    ASSERT_TRUE(world.Until([&] { return !world.at(from).downs[to].empty(); }));
    EXPECT_THAT(world.at(from).downs[to][0], HasSubstr("give both the same --lane-encryption"));
    EXPECT_TRUE(world.at(0).up.empty());
  }
}

// ------------------------------------------------------------------------------ keys

TEST(SealedLinkTest, AKeyThatHasSealedEnoughIsReplacedWithItsLane) {
  TransportOptions options = Options(LaneEncryption::kRequire);
  options.sealed_bytes_max = 100000;
  PeerWorld world(Rings::kFake, 11, 2, options);
  Traffic traffic(&world);
  world.Open(0, 1);
  ASSERT_TRUE(world.Until([&] { return world.Linked(0, 1); }));
  for (int i = 0; i < 40; ++i) traffic.Segment(0, 1, 1000 * i, 30000);
  ASSERT_TRUE(world.Until([&] { return traffic.AllIsThere(); }));
  traffic.ExpectOnce();
  ExpectNoLinkWasLost(&world);
  EXPECT_GE(world.at(0).transport->GetStats().lanes_redialled, 4u);
  EXPECT_EQ(world.at(1).transport->GetStats().unauthentic, 0u);
}

}  // namespace
}  // namespace longhaul::peerd
