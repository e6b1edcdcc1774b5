// Tests of the network model, of slicing super-packets and of the commands, on a virtual clock.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/wan/commands.h"
#include "tests/wan/network.h"
#include "tests/wan/packet.h"
#include "tests/wan/units.h"

namespace longhaul::wan {
namespace {

using ::testing::HasSubstr;

constexpr size_t kVnet = 10;
constexpr int kHeaders = 40;  // IPv4 and TCP
constexpr int kMss = 1460;
constexpr uint32_t kSequence = 0xfffff000;  // wraps around
constexpr int64_t kByteAUs = 8'000'000;     // a rate: one byte a microsecond

// A TCP super-packet as the kernel makes it. Each byte of the payload gives its own position.
std::vector<uint8_t> TcpFrame(int src, int dst, int payload, uint16_t port = 5000) {
  std::vector<uint8_t> frame(kVnet + kHeaders + static_cast<size_t>(payload));
  frame[0] = 1;  // the checksum is not complete yet,
  if (payload > kMss) {
    frame[1] = 1;  // and neither is TCPv4 segmentation
    std::memcpy(&frame[4], &kMss, 2);
  }
  uint8_t* const ip = &frame[kVnet];
  ip[0] = 0x45;
  const uint16_t length = htons(static_cast<uint16_t>(kHeaders + payload));
  std::memcpy(ip + 2, &length, 2);
  ip[8] = 64;
  ip[9] = IPPROTO_TCP;
  const uint8_t addresses[] = {10, 77, 0, static_cast<uint8_t>(src),
                               10, 77, 0, static_cast<uint8_t>(dst)};
  std::memcpy(ip + 12, addresses, 8);
  uint8_t* const tcp = ip + 20;
  const uint16_t ports[] = {htons(port), htons(80)};
  std::memcpy(tcp, ports, 4);
  const uint32_t sequence = htonl(kSequence);
  std::memcpy(tcp + 4, &sequence, 4);
  tcp[12] = 5 << 4;
  tcp[13] = 0x80 | 0x10 | 0x08 | 0x01;  // CWR ACK PSH FIN
  for (int i = 0; i < payload; ++i) tcp[20 + i] = static_cast<uint8_t>(i % 251);
  return frame;
}

Packet TcpPacket(int src, int dst, int payload, uint16_t port = 5000) {
  return *Packet::FromFrame(TcpFrame(src, dst, payload, port));
}

uint32_t Load(const uint8_t* at, int bytes) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value = value << 8 | at[i];
  return value;
}

uint32_t OnesSum(const uint8_t* at, int bytes, uint32_t sum = 0) {
  for (int i = 0; i < bytes; i += 2) sum += Load(at + i, 2);
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

TEST(PacketTest, IgnoresWhatIsNotBetweenHosts) {
  EXPECT_FALSE(Packet::FromFrame({}));
  const std::vector<uint8_t> good = TcpFrame(1, 2, 100);
  EXPECT_TRUE(Packet::FromFrame(good));
  std::vector<uint8_t> multicast = good;
  multicast[kVnet + 16] = 224;
  EXPECT_FALSE(Packet::FromFrame(multicast));
  std::vector<uint8_t> broadcast = good;
  broadcast[kVnet + 19] = 255;
  EXPECT_FALSE(Packet::FromFrame(broadcast));
}

TEST(PacketTest, FramesCutAnywhereAreIgnoredOrTakenAsTheyAre) {
  const std::vector<uint8_t> whole = TcpFrame(1, 2, 3 * kMss);
  for (size_t bytes = 0; bytes < kVnet + kHeaders + 10; ++bytes) {
    const auto packet = Packet::FromFrame(std::span(whole).first(bytes));
    // A super-packet without a complete header cannot be segmented.
    EXPECT_EQ(packet.has_value(), bytes >= kVnet + kHeaders) << bytes;
  }
}

TEST(PacketTest, CountsSegmentsAndBytesOfTheWire) {
  const Packet one = TcpPacket(3, 4, 100);
  EXPECT_EQ(one.src(), 3);
  EXPECT_EQ(one.dst(), 4);
  EXPECT_EQ(one.segments(), 1);
  EXPECT_EQ(one.wire_bytes(), 140);
  EXPECT_EQ(one.flow(), (FlowKey{IPPROTO_TCP, 5000, 80}));
  const Packet many = TcpPacket(3, 4, 2 * kMss + 1);
  EXPECT_EQ(many.segments(), 3);
  EXPECT_EQ(many.wire_bytes(), 2 * kMss + 1 + 3 * kHeaders);
}

// Slices a super-packet in all ways, and checks every header field that has to change.
TEST(PacketTest, SlicesAreWhatSegmentationWouldHaveSent) {
  constexpr int kPayload = 4 * kMss + 123;
  const Packet whole = TcpPacket(1, 2, kPayload);
  for (int first = 0; first < 5; ++first) {
    for (int count = 1; first + count <= 5; ++count) {
      SCOPED_TRACE(testing::Message() << first << " " << count);
      const Packet slice = whole.Slice(first, count);
      const uint8_t* const frame = slice.frame().data();
      const uint8_t* const ip = frame + kVnet;
      const uint8_t* const tcp = ip + 20;
      const bool last = first + count == 5;
      const int payload = last ? kPayload - first * kMss : count * kMss;
      ASSERT_EQ(slice.segments(), count);
      ASSERT_EQ(slice.frame().size(), kVnet + kHeaders + static_cast<size_t>(payload));
      EXPECT_EQ(slice.wire_bytes(), payload + count * kHeaders);
      EXPECT_EQ(frame[1], count == 1 ? 0 : 1) << "gso_type";
      EXPECT_EQ(Load(ip + 2, 2), static_cast<uint32_t>(kHeaders + payload));
      EXPECT_EQ(OnesSum(ip, 20), 0xffffu) << "checksum of IP";
      EXPECT_EQ(Load(tcp + 4, 4), kSequence + static_cast<uint32_t>(first * kMss));
      EXPECT_EQ((tcp[13] & 0x80) != 0, first == 0) << "CWR";
      EXPECT_EQ((tcp[13] & 0x09) != 0, last) << "PSH FIN";
      EXPECT_EQ(Load(tcp + 16, 2),
                OnesSum(ip + 12, 8, IPPROTO_TCP + 20 + static_cast<uint32_t>(payload)))
          << "sum of the pseudo-header";
      for (int i = 0; i < payload; ++i) ASSERT_EQ(tcp[20 + i], (first * kMss + i) % 251);
    }
  }
}

// A network of hosts 1 to 3, and the packets that come out of it.
class NetworkTest : public testing::Test {
 protected:
  struct Delivery {
    Nanos due;
    int segments;
    FlowKey flow;
  };

  NetworkTest()
      : network_(1, [this](const Packet& packet, Nanos due) {
          delivered_.push_back({due, packet.segments(), packet.flow()});
        }) {
    for (const int host : {1, 2, 3}) network_.AddHost(host);
  }

  int64_t Segments() const {
    int64_t sum = 0;
    for (const Delivery& delivery : delivered_) sum += delivery.segments;
    return sum;
  }

  Network network_;
  std::vector<Delivery> delivered_;
};

TEST_F(NetworkTest, DelayHoldsForOneDirection) {
  network_.SetPair(1, 2, {.delay = 40 * kMillisecond});
  network_.Enter(TcpPacket(1, 2, 100), 1000);
  network_.Enter(TcpPacket(2, 1, 100), 1000);
  EXPECT_EQ(delivered_.size(), 1u);
  network_.Run(network_.NextDue() - 1);
  EXPECT_EQ(delivered_.size(), 1u);
  network_.Run(network_.NextDue());
  ASSERT_EQ(delivered_.size(), 2u);
  EXPECT_EQ(delivered_[1].due, 1000 + 40 * kMillisecond);
  EXPECT_EQ(network_.NextDue(), -1);
}

TEST_F(NetworkTest, RateSpacesPackets) {
  network_.SetPair(1, 2, {.delay = kMillisecond, .rate = kByteAUs});
  for (int i = 0; i < 3; ++i) network_.Enter(TcpPacket(1, 2, 960), 0);
  network_.Run(kSecond);
  ASSERT_EQ(delivered_.size(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(delivered_[i].due, kMillisecond * (i + 2));
}

TEST_F(NetworkTest, FullQueueDropsTheTailOfASuperPacket) {
  network_.SetPair(1, 2, {.rate = kByteAUs, .queue = {.time = 0, .bytes = 30'000}});
  network_.Enter(TcpPacket(1, 2, 30 * kMss), 0);
  network_.Enter(TcpPacket(1, 2, 100), 0);
  network_.Run(kSecond);
  EXPECT_EQ(Segments(), 20);  // 20 * 1500 are 30000 bytes; then the queue is full
  EXPECT_EQ(network_.counters(1, 2).dropped, 11);
  EXPECT_EQ(network_.counters(1, 2).queued_max, 30 * kMillisecond);
  network_.Enter(TcpPacket(1, 2, 100), kSecond);
  network_.Run(2 * kSecond);
  EXPECT_EQ(Segments(), 21);
}

TEST_F(NetworkTest, NoQueueIsShorterThanAFewPackets) {
  network_.SetPair(1, 2, {.rate = 1000, .queue = {.time = 0, .bytes = 1}});
  network_.Enter(TcpPacket(1, 2, 20 * kMss), 0);
  network_.Run(1000 * kSecond);
  EXPECT_EQ(Segments(), 10);
}

TEST_F(NetworkTest, AccessIsSharedByThePairsOfAHost) {
  network_.SetAccess(1, {.up = kByteAUs, .down = 0, .queue = {}});
  network_.SetAccess(3, {.up = 0, .down = kByteAUs / 2, .queue = {}});
  network_.Enter(TcpPacket(1, 2, 960), 0);
  network_.Enter(TcpPacket(1, 3, 960), 0);
  network_.Run(kSecond);
  ASSERT_EQ(delivered_.size(), 2u);
  EXPECT_EQ(delivered_[0].due, kMillisecond);
  EXPECT_EQ(delivered_[1].due, (2 + 2) * kMillisecond);
}

TEST_F(NetworkTest, FlowRateHoldsForEachFlowByItself) {
  network_.SetPair(1, 2, {.flow_rate = kByteAUs});
  for (const uint16_t port : {1, 2}) {
    network_.Enter(TcpPacket(1, 2, 960, port), 0);
    network_.Enter(TcpPacket(1, 2, 960, port), 0);
  }
  network_.Run(kSecond);
  ASSERT_EQ(delivered_.size(), 4u);
  EXPECT_EQ(delivered_[0].due, kMillisecond);
  EXPECT_EQ(delivered_[1].due, kMillisecond);
  EXPECT_NE(delivered_[0].flow, delivered_[1].flow);
  EXPECT_EQ(delivered_[3].due, 2 * kMillisecond);
}

TEST_F(NetworkTest, OneFlowMayHaveARateOfItsOwn) {
  network_.SetPair(1, 2, {.flow_rate = kByteAUs});
  network_.SetFlowRate(1, 2, {IPPROTO_TCP, 7, 80}, kByteAUs / 20);
  // A new configuration of the pair does not change the flow's own rate.
  network_.SetPair(1, 2, {.delay = kMillisecond, .flow_rate = kByteAUs});
  for (const uint16_t port : {7, 8}) network_.Enter(TcpPacket(1, 2, 960, port), 0);
  network_.Run(kSecond);
  ASSERT_EQ(delivered_.size(), 2u);
  EXPECT_EQ(delivered_[0].due, 2 * kMillisecond);
  EXPECT_EQ(delivered_[1].due, 21 * kMillisecond);
  const std::vector<FlowView> flows = network_.Flows(1, 2);
  ASSERT_EQ(flows.size(), 2u);
  EXPECT_TRUE(flows[0].rate_is_own);
  EXPECT_EQ(flows[0].rate, kByteAUs / 20);
  EXPECT_EQ(flows[0].delivered_bytes, 1000);
  EXPECT_FALSE(flows[1].rate_is_own);
  EXPECT_EQ(flows[1].rate, kByteAUs);
}

TEST_F(NetworkTest, FlowsBeyondTheLimitPushOutTheMostSilent) {
  for (size_t i = 0; i < kFlowsMax + 10; ++i) {
    network_.Enter(TcpPacket(1, 2, 10, static_cast<uint16_t>(1 + i)), static_cast<Nanos>(i));
    network_.Enter(TcpPacket(1, 2, 10, 1), static_cast<Nanos>(i));
  }
  const std::vector<FlowView> flows = network_.Flows(1, 2);
  EXPECT_EQ(flows.size(), kFlowsMax);
  EXPECT_EQ(flows[0].key.src_port, 1);   // was never silent
  EXPECT_EQ(flows[1].key.src_port, 12);  // 2 to 11 are forgotten
}

TEST_F(NetworkTest, JitterDoesNotReorder) {
  network_.SetPair(1, 2, {.delay = kMillisecond, .jitter = kMillisecond});
  for (uint16_t i = 0; i < 1000; ++i) network_.Enter(TcpPacket(1, 2, 100, i), i * kMicrosecond);
  network_.Run(kSecond);
  ASSERT_EQ(delivered_.size(), 1000u);
  for (uint16_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(delivered_[i].flow.src_port, i);
    EXPECT_GE(delivered_[i].due, i * kMicrosecond + kMillisecond);
    EXPECT_LE(delivered_[i].due, i * kMicrosecond + 2 * kMillisecond);
  }
}

TEST_F(NetworkTest, AShorterDelayOrNoRateDoesNotReorder) {
  network_.SetPair(1, 2, {.delay = 40 * kMillisecond, .flow_rate = kByteAUs / 1000});
  network_.Enter(TcpPacket(1, 2, 960), 0);
  network_.SetPair(1, 2, {});
  network_.Enter(TcpPacket(1, 2, 100), 1);
  network_.Run(100 * kSecond);
  ASSERT_EQ(delivered_.size(), 2u);
  EXPECT_EQ(delivered_[0].due, delivered_[1].due);
  EXPECT_EQ(network_.counters(1, 2).delivered_bytes, 1140);
}

TEST_F(NetworkTest, DownSwallowsWhatIsInFlightToo) {
  network_.SetPair(1, 2, {.delay = kMillisecond});
  network_.Enter(TcpPacket(1, 2, 100), 0);
  network_.SetHostDown(2, true);
  network_.Enter(TcpPacket(1, 2, 100), 0);
  network_.Run(kSecond);
  EXPECT_EQ(network_.counters(1, 2).blackholed, 2);
  network_.SetHostDown(2, false);
  network_.SetPair(2, 1, {.down = true});
  network_.Enter(TcpPacket(1, 2, 100), kSecond);
  network_.Enter(TcpPacket(2, 1, 100), kSecond);
  network_.Run(2 * kSecond);
  EXPECT_EQ(Segments(), 1);
  EXPECT_EQ(network_.counters(2, 1).blackholed, 1);
}

TEST_F(NetworkTest, PacketsOfStrangersAreIgnored) {
  network_.Enter(TcpPacket(1, 9, 100), 0);
  network_.Enter(TcpPacket(9, 1, 100), 0);
  EXPECT_EQ(network_.NextDue(), -1);
  EXPECT_TRUE(delivered_.empty());
}

class LossTest : public NetworkTest, public testing::WithParamInterface<int> {};

// The loss is a share of the segments, however they are bundled into super-packets.
TEST_P(LossTest, StrikesSegments) {
  const int bundle = GetParam();
  constexpr int kTotal = 400'000;
  network_.SetPair(1, 2, {.loss = 0.01});
  for (int i = 0; i < kTotal / bundle; ++i) network_.Enter(TcpPacket(1, 2, bundle * kMss), i);
  const PairCounters& counters = network_.counters(1, 2);
  EXPECT_EQ(counters.entered, kTotal);
  EXPECT_EQ(counters.delivered, Segments());
  EXPECT_EQ(counters.delivered + counters.lost, kTotal);
  EXPECT_NEAR(static_cast<double>(counters.lost) / kTotal, 0.01, 0.001);
}
INSTANTIATE_TEST_SUITE_P(Bundles, LossTest, testing::Values(1, 4, 40));

TEST(LossProcessTest, SameSeedSameLossesHoweverTheyAreTaken) {
  for (const double rate : {0.0001, 0.5, 1.0, 0.0}) {
    LossProcess one(3);
    LossProcess bundled(3);
    one.Configure(rate);
    bundled.Configure(rate);
    std::vector<int> lost_one;
    std::vector<int> lost_bundled;
    for (int i = 0; i < 30000; ++i) {
      if (one.TakePassing(1) == 1) continue;
      one.TakeLost();
      lost_one.push_back(i);
    }
    for (int i = 0; i < 30000; i += 3) {
      for (int at = 0; at < 3; ++at) {
        at += bundled.TakePassing(3 - at);
        if (at == 3) break;
        bundled.TakeLost();
        lost_bundled.push_back(i + at);
      }
    }
    EXPECT_EQ(lost_one, lost_bundled) << rate;
    EXPECT_NEAR(static_cast<double>(lost_one.size()) / 30000, rate, 0.01);
  }
}

TEST(UnitsTest, QuantitiesCarryTheirUnit) {
  EXPECT_EQ(*ParseDuration("40ms"), 40 * kMillisecond);
  EXPECT_EQ(*ParseDuration("1.5s"), 1500 * kMillisecond);
  EXPECT_EQ(*ParseDuration("0"), 0);
  EXPECT_EQ(*ParseRate("2.5gbit"), 2'500'000'000);
  EXPECT_EQ(*ParseBytes("256KiB"), 262144);
  EXPECT_DOUBLE_EQ(*ParseFraction("0.1%"), 0.001);
  EXPECT_DOUBLE_EQ(*ParseFraction("0.25"), 0.25);
  EXPECT_EQ(*ParseInteger("17"), 17);
  for (const char* bad : {"", "40", "-1ms", "4 ms", "ms", "1e400s", "nan", "inf", "1e9s"}) {
    EXPECT_FALSE(ParseDuration(bad).ok()) << bad;
  }
  EXPECT_FALSE(ParseFraction("101%").ok());
  EXPECT_FALSE(ParseInteger("1x").ok());
}

class CommandsTest : public NetworkTest {
 protected:
  CommandsTest()
      : commands_(&fresh_,
                  {.attach =
                       [this](int number, const std::string& netns, const std::string& device) {
                         attached_.push_back(absl::StrCat(number, " ", netns, " ", device));
                         return attach_;
                       },
                   .emulator = [] { return std::string("{\"cpu_s\":1}"); },
                   .reset = [this] { ++resets_; }}) {}

  void AddTwo() {
    EXPECT_EQ(commands_.Execute("host a 1 /run/netns/a eth0"), "{\"ok\":true}");
    EXPECT_EQ(commands_.Execute("host b 2 /run/netns/b eth0"), "{\"ok\":true}");
  }

  Network fresh_{1, [](const Packet&, Nanos) {}};
  absl::Status attach_;
  std::vector<std::string> attached_;
  int resets_ = 0;
  Commands commands_;
};

TEST_F(CommandsTest, HostsAreAttachedOnce) {
  AddTwo();
  EXPECT_THAT(attached_, testing::ElementsAre("1 /run/netns/a eth0", "2 /run/netns/b eth0"));
  EXPECT_THAT(commands_.Execute("host a 3 /x eth0"), HasSubstr("is there already"));
  EXPECT_THAT(commands_.Execute("host c 2 /x eth0"), HasSubstr("is there already"));
  EXPECT_THAT(commands_.Execute("host c 255 /x eth0"), HasSubstr("1 to 254"));
  EXPECT_THAT(commands_.Execute("host c\"d 3 /x eth0"), HasSubstr("letters, digits"));
  EXPECT_EQ(attached_.size(), 2u);
}

TEST_F(CommandsTest, AHostThatCannotBeAttachedIsNone) {
  attach_ = absl::FailedPreconditionError("no \"driver\"\n");
  EXPECT_EQ(commands_.Execute("host a 1 /x eth0"), R"({"error":"no \"driver\"\u000a"})");
  EXPECT_FALSE(fresh_.HasHost(1));
  EXPECT_THAT(commands_.Execute("down a"), HasSubstr("no host a"));
}

TEST_F(CommandsTest, PairsAreSetOneWayAndBothWays) {
  AddTwo();
  EXPECT_EQ(commands_.Execute("link * * delay=40ms rate=500mbit queue=64KiB"), "{\"ok\":true}");
  EXPECT_EQ(commands_.Execute("set a b loss=0.1% flow_rate=25mbit flow_queue=20ms jitter=1ms"),
            "{\"ok\":true}");
  EXPECT_EQ(fresh_.pair(1, 2).delay, 40 * kMillisecond);
  EXPECT_EQ(fresh_.pair(1, 2).queue, (QueueLimit{50 * kMillisecond, 65536}));
  EXPECT_DOUBLE_EQ(fresh_.pair(1, 2).loss, 0.001);
  EXPECT_EQ(fresh_.pair(1, 2).flow_rate, 25'000'000);
  EXPECT_EQ(fresh_.pair(2, 1).rate, 500'000'000);
  EXPECT_EQ(fresh_.pair(2, 1).loss, 0);
  EXPECT_THAT(commands_.Execute("show"), HasSubstr("\"src\":\"a\",\"dst\":\"b\",\"delay_ms\":40,"));
}

TEST_F(CommandsTest, AWrongLineChangesNothing) {
  AddTwo();
  for (const char* line :
       {"", "nonsense", "set a", "set a b", "set a c delay=1ms", "set a b delay=2ms loss=200%",
        "set a b delay=2ms loss", "set a b delay=2ms color=red", "access a up=1", "flow a b 1 80 x",
        "flow a b 70000 80 1mbit", "down", "down a b c", "flows a", "stats now"}) {
    EXPECT_THAT(commands_.Execute(line), testing::StartsWith("{\"error\":\"")) << line;
  }
  EXPECT_EQ(fresh_.pair(1, 2).delay, 0);
}

TEST_F(CommandsTest, HostsAndPairsGoDownAndUp) {
  AddTwo();
  commands_.Execute("down a");
  EXPECT_TRUE(fresh_.host_down(1));
  commands_.Execute("up a");
  EXPECT_FALSE(fresh_.host_down(1));
  commands_.Execute("down a b");
  EXPECT_TRUE(fresh_.pair(1, 2).down);
  EXPECT_FALSE(fresh_.pair(2, 1).down);
  commands_.Execute("up * *");
  EXPECT_FALSE(fresh_.pair(1, 2).down);
}

TEST_F(CommandsTest, CountersTellWhatPairsAndFlowsCarried) {
  AddTwo();
  EXPECT_EQ(commands_.Execute("access b down=1mbit"), "{\"ok\":true}");
  EXPECT_EQ(fresh_.access(2).down, 1'000'000);
  EXPECT_EQ(commands_.Execute("flow a b 5000 80 20mbit"), "{\"ok\":true}");
  fresh_.Enter(TcpPacket(1, 2, 100), 0);
  fresh_.Run(kSecond);
  EXPECT_THAT(commands_.Execute("stats"),
              HasSubstr("\"src\":\"a\",\"dst\":\"b\",\"packets\":1,\"entered\":1,\"delivered\":1,"
                        "\"delivered_bytes\":140,"));
  EXPECT_THAT(commands_.Execute("stats"), HasSubstr("\"emulator\":{\"cpu_s\":1}"));
  EXPECT_EQ(commands_.Execute("flows a b"),
            "{\"ok\":true,\"flows\":[{\"protocol\":6,\"src_port\":5000,\"dst_port\":80,"
            "\"rate_bits\":20000000,\"own_rate\":true,\"delivered_bytes\":140,\"dropped\":0}]}");
  commands_.Execute("reset");
  EXPECT_EQ(resets_, 1);
  EXPECT_EQ(commands_.Execute("stats"), "{\"ok\":true,\"pairs\":[],\"emulator\":{\"cpu_s\":1}}");
}

}  // namespace
}  // namespace longhaul::wan
