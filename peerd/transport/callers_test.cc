#include "peerd/transport/callers.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace longhaul::peerd {
namespace {

AddressBlock Block(const std::string& host) {
  const auto address = NumericAddress({.host = host, .port = 1});
  EXPECT_TRUE(address.has_value()) << host;
  return AddressBlock::Of(*address);
}

// Returns a block of 20.0.0.0/8, another one for each number.
AddressBlock Elsewhere(int i) {
  return Block("20." + std::to_string(i / 256) + "." + std::to_string(i % 256) + ".1");
}

// Turns a caller away, as the data port does when it is full.
uint64_t PutOut(Callers* callers) {
  const uint64_t caller = callers->First().caller;
  callers->Remove(caller);
  return caller;
}

TEST(AddressBlockTest, IsWhatOneHostCanHaveAtWill) {
  EXPECT_EQ(Block("10.1.2.3"), Block("10.1.2.254"));
  EXPECT_NE(Block("10.1.2.3"), Block("10.1.3.3"));
  EXPECT_EQ(Block("2001:db8:0:7::1"), Block("2001:db8:0:7:ffff::9"));
  EXPECT_NE(Block("2001:db8:0:7::1"), Block("2001:db8:0:8::1"));
  EXPECT_EQ(ToString(Block("10.1.2.3")), "10.1.2.0/24");
  EXPECT_EQ(ToString(Block("2001:db8:0:7::1")), "2001:db8:0:7::/64");
}

TEST(AddressBlockTest, Ipv4AddressesOfADualStackSocketAreIpv4) {
  EXPECT_EQ(Block("::ffff:10.1.2.3"), Block("10.1.2.3"));
  EXPECT_NE(Block("::ffff:10.1.2.3"), Block("::ffff:10.1.3.3"));
}

TEST(CallersTest, TheOldestOfTheBlockThatHasTheMostGoes) {
  Callers callers;
  callers.Add(Block("10.0.0.1"), false);
  const uint64_t oldest = callers.Add(Block("10.0.1.1"), false);
  const uint64_t second = callers.Add(Block("10.0.1.2"), false);
  callers.Add(Block("10.0.1.3"), false);
  EXPECT_EQ(callers.First().block, Block("10.0.1.0"));
  EXPECT_EQ(PutOut(&callers), oldest);
  EXPECT_EQ(PutOut(&callers), second);
  EXPECT_EQ(callers.size(), 2u);
}

TEST(CallersTest, WhoHasSentAGoodHelloStaysBeforeWhoHasNot) {
  Callers callers;
  const uint64_t judged = callers.Add(Block("10.0.0.1"), false);
  const uint64_t judged_too = callers.Add(Block("10.0.0.1"), false);
  const uint64_t silent = callers.Add(Block("10.0.1.1"), false);
  callers.SetJudged(judged);
  callers.SetJudged(judged_too);
  EXPECT_EQ(PutOut(&callers), silent);
  EXPECT_EQ(PutOut(&callers), judged);
}

TEST(CallersTest, WhereAPeerIsKnownCallersStayThroughAFloodFromEverywhere) {
  Callers callers;
  std::set<uint64_t> good;
  for (int i = 0; i < 10; ++i) good.insert(callers.Add(Block("10.0.0.1"), true));
  // Half of these callers repeat a HELLO that they overheard.
  for (int i = 0; i < 5000; ++i) {
    const uint64_t caller = callers.Add(Elsewhere(i), false);
    if (i % 2 == 0) callers.SetJudged(caller);
    if (callers.size() > LH_HANDSHAKES_MAX) {
      EXPECT_FALSE(good.contains(PutOut(&callers)));
    }
  }
}

TEST(CallersTest, OneBlockDoesNotHoldAllPlacesWithHellosThatItHasOverheard) {
  Callers callers;
  std::vector<uint64_t> flood;
  for (int i = 0; i < LH_HANDSHAKES_MAX; ++i) {
    flood.push_back(callers.Add(Block("10.0.0.1"), /*known=*/true));
    callers.SetJudged(flood.back());
  }
  const uint64_t good = callers.Add(Block("10.0.1.1"), false);
  size_t put_out = 0;
  while (callers.size() > kCallersPerBlockMax + 1) EXPECT_EQ(PutOut(&callers), flood[put_out++]);
  EXPECT_EQ(PutOut(&callers), good) << "no more than its bound is taken from a block";
}

TEST(CallersTest, WhoIsGoneCountsNoMore) {
  Callers callers;
  const uint64_t a = callers.Add(Block("10.0.0.1"), false);
  const uint64_t b = callers.Add(Block("10.0.0.1"), false);
  const uint64_t c = callers.Add(Block("10.0.1.1"), false);
  callers.SetJudged(b);
  callers.Remove(a);
  callers.Remove(a);
  callers.SetJudged(a);
  EXPECT_EQ(callers.size(), 2u);
  EXPECT_EQ(PutOut(&callers), c);
  EXPECT_EQ(PutOut(&callers), b);
  EXPECT_EQ(callers.size(), 0u);
}

}  // namespace
}  // namespace longhaul::peerd
