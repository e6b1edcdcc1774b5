#include "base/daemon/host_port.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(HostPort, ReadsNamesAndBothKindsOfAddresses) {
  EXPECT_EQ(*ParseHostPort("example.org:29600"), (HostPort{"example.org", 29600}));
  EXPECT_EQ(*ParseHostPort("0.0.0.0:0"), (HostPort{"0.0.0.0", 0}));
  EXPECT_EQ(*ParseHostPort("[::1]:65535"), (HostPort{"::1", 65535}));
  EXPECT_EQ(ToString(*ParseHostPort("[fe80::1%eth0]:1")), "[fe80::1%eth0]:1");
  EXPECT_EQ(ToString(*ParseHostPort("h:1")), "h:1");
}

TEST(HostPort, RefusesWithTheReason) {
  const auto error = [](const char* text) {
    return std::string(ParseHostPort(text).status().message());
  };
  EXPECT_THAT(error("host"), HasSubstr("no port"));
  EXPECT_THAT(error(":1"), HasSubstr("no host"));
  EXPECT_THAT(error("::1:29600"), HasSubstr("needs brackets"));
  EXPECT_THAT(error("[::1:29600"), HasSubstr("']' is missing"));
  EXPECT_THAT(error("[]:29600"), HasSubstr("']' is missing"));
  for (const char* text : {"h:", "h:65536", "h:-1", "h:+1", "h: 1", "h:1x", "h:999999"}) {
    EXPECT_THAT(error(text), HasSubstr("not a number from 0 to 65535")) << text;
  }
  EXPECT_THAT(error("a b:1"), HasSubstr("no host name has"));
  EXPECT_THAT(error("http://h:1"), HasSubstr("needs brackets"));
}

TEST(HostPort, LoopbackIsWhatNoOtherHostReaches) {
  for (const char* text : {"127.0.0.1:1", "127.3.2.1:1", "localhost:1", "LocalHost:1",
                           "a.localhost:1", "[::1]:1", "[::ffff:127.0.0.1]:1"}) {
    EXPECT_TRUE(IsLoopback(*ParseHostPort(text))) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.5:1", "localhost.example.org:1",
                           "127.0.0.1.example.org:1", "host:1", "[::ffff:10.0.0.1]:1", "127.1:1"}) {
    EXPECT_FALSE(IsLoopback(*ParseHostPort(text))) << text;
  }
}

TEST(HostPort, ListSkipsEmptyPiecesAndRefusesPortZero) {
  EXPECT_THAT(*ParseAddressList("a:1, b:2,"), ElementsAre("a:1", "b:2"));
  EXPECT_FALSE(ParseAddressList("").ok());
  EXPECT_FALSE(ParseAddressList("a:0").ok());
}

}  // namespace
}  // namespace longhaul
