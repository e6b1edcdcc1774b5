#include "peerd/daemon/advertise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/log.h"

namespace longhaul::peerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A host with these addresses. `routes`: by the address that a packet goes to.
OwnAddresses Host(std::string ipv4, std::string ipv6,
                  std::map<std::string, std::string> routes = {}) {
  return {[routes](const std::string& host) {
            const auto route = routes.find(host);
            return route == routes.end() ? "" : route->second;
          },
          [ipv4, ipv6](bool ipv4_only) { return ipv4.empty() && !ipv4_only ? ipv6 : ipv4; }};
}

TEST(AdvertisedEndpoints, AreTheBoundAddressUnlessThatIsAWildcard) {
  const OwnAddresses host = Host("10.0.0.1", "fd00::1");
  EXPECT_THAT(AdvertisedEndpoints("127.0.0.1:4000", "10.0.0.9:1", host),
              ElementsAre("127.0.0.1:4000"));
  EXPECT_THAT(AdvertisedEndpoints("[fd00::7]:4000", "127.0.0.1:1", host),
              ElementsAre("[fd00::7]:4000"));
}

TEST(AdvertisedEndpoints, AreOnTheRouteToTheCoordinator) {
  const OwnAddresses host =
      Host("10.0.0.1", "fd00::1", {{"192.168.0.9", "192.168.0.1"}, {"fd00::9", "fd00::1"}});
  for (const char* const listen : {"0.0.0.0:4000", "[::]:4000"}) {
    EXPECT_THAT(AdvertisedEndpoints(listen, "192.168.0.9:1", host),
                ElementsAre("192.168.0.1:4000"));
    EXPECT_THAT(AdvertisedEndpoints(listen, "172.16.0.9:1", host), ElementsAre("10.0.0.1:4000"))
        << "no route any more";
    EXPECT_THAT(AdvertisedEndpoints(listen, "", host), ElementsAre("10.0.0.1:4000"))
        << "peerd serves before it has reached a coordinator";
  }
  EXPECT_THAT(AdvertisedEndpoints("[::]:4000", "[fd00::9]:1", host), ElementsAre("[fd00::1]:4000"));
  EXPECT_THAT(AdvertisedEndpoints("0.0.0.0:4000", "[fd00::9]:1", host),
              ElementsAre("10.0.0.1:4000"))
      << "it does not listen there";
}

TEST(AdvertisedEndpoints, BesideTheCoordinatorAreNotOnLoopbackAlone) {
  for (const char* const coordinator : {"127.0.0.1:1", "127.0.1.1:1", "[::1]:1"}) {
    EXPECT_THAT(AdvertisedEndpoints("0.0.0.0:4000", coordinator, Host("10.0.0.1", "fd00::1")),
                ElementsAre("10.0.0.1:4000", "127.0.0.1:4000"));
    EXPECT_THAT(AdvertisedEndpoints("[::]:4000", coordinator, Host("", "fd00::1")),
                ElementsAre("[fd00::1]:4000", "127.0.0.1:4000"));
    EXPECT_THAT(AdvertisedEndpoints("0.0.0.0:4000", coordinator, Host("", "fd00::1")),
                ElementsAre("127.0.0.1:4000"))
        << "it listens at IPv4 only";
    EXPECT_THAT(AdvertisedEndpoints("[::]:4000", coordinator, Host("", "")),
                ElementsAre("127.0.0.1:4000"))
        << "a machine without a network";
  }
}

TEST(SystemAddresses, AreNeverOnLoopback) {
  const OwnAddresses own = SystemAddresses();
  for (const char* const local : {"127.0.0.1", "127.0.1.1", "::1", "no-address"}) {
    EXPECT_EQ(own.towards(local), "") << local;
  }
  for (const bool ipv4_only : {true, false}) {
    const std::string host = own.general(ipv4_only);
    EXPECT_NE(host.substr(0, 4), "127.");
    EXPECT_NE(host, "::1");
    EXPECT_EQ(own.towards(host), host) << "if there is one, packets to it come from it";
  }
}

TEST(ReachedFrom, TakesTheCoordinatorsMachineForLoopback) {
  // The coordinator's machine has two networks, and names the one that this host is not in.
  const std::vector<std::string> beside = {"192.168.0.1:4000", "127.0.0.1:4000"};
  EXPECT_THAT(ReachedFrom("10.0.0.9:1", beside), ElementsAre("10.0.0.9:4000", "192.168.0.1:4000"));
  EXPECT_THAT(ReachedFrom("[fd00::9]:1", beside),
              ElementsAre("[fd00::9]:4000", "192.168.0.1:4000"));
  EXPECT_THAT(ReachedFrom("192.168.0.1:1", beside), ElementsAre("192.168.0.1:4000"));
  // On the same machine, or both have a tunnel to the coordinator.
  EXPECT_EQ(ReachedFrom("127.0.0.1:1", beside), beside);
  EXPECT_EQ(ReachedFrom("", beside), beside);
}

TEST(ReachedFrom, KeepsOtherAddresses) {
  const std::vector<std::string> elsewhere = {"10.0.0.1:4000", "host:4000"};
  EXPECT_EQ(ReachedFrom("10.0.0.9:1", elsewhere), elsewhere);
  // It listens on loopback only, on this host; or it runs beside the coordinator and had no network
  // when it started.
  EXPECT_THAT(ReachedFrom("10.0.0.9:1", {"127.0.0.1:4000"}),
              ElementsAre("127.0.0.1:4000", "10.0.0.9:4000"));
  EXPECT_THAT(ReachedFrom("10.0.0.9:1", {}), ElementsAre());
}

// If the address was derived only once, other peers would dial a host's old address for ever.
TEST(AdvertisedAddress, IsDerivedAnewEachTime) {
  std::string here = "10.0.0.1:4000";
  std::vector<std::string> coordinators;
  AdvertisedAddress address("", [&](const std::string& coordinator) {
    coordinators.push_back(coordinator);
    return std::vector<std::string>{here};
  });
  EXPECT_THAT(address.Get(), ElementsAre());
  address.Refresh("10.0.0.9:1");
  EXPECT_THAT(address.Get(), ElementsAre("10.0.0.1:4000"));
  here = "10.0.0.2:4000";
  address.Refresh("10.0.0.8:1");
  EXPECT_THAT(address.Get(), ElementsAre("10.0.0.2:4000"));
  EXPECT_THAT(coordinators, ElementsAre("10.0.0.9:1", "10.0.0.8:1"));
  EXPECT_THAT(address.Reached({"127.0.0.1:5"}), ElementsAre("127.0.0.1:5", "10.0.0.8:5"));
}

TEST(AdvertisedAddress, OfTheOperatorStays) {
  AdvertisedAddress address("host:4000", [](const auto&) -> std::vector<std::string> {
    ADD_FAILURE() << "derived";
    return {"10.0.0.1:4000"};
  });
  address.Refresh("127.0.0.1:1");
  EXPECT_THAT(address.Get(), ElementsAre("host:4000"));
}

TEST(AdvertisedAddress, WarnsIfOthersCannotReachIt) {
  std::string log;
  SetLogSink([&](std::string_view line) { log += std::string(line) + "\n"; });
  AdvertisedAddress address("",
                            [](const auto&) { return std::vector<std::string>{"127.0.0.1:5"}; });
  address.Refresh("");
  address.Refresh("127.0.0.1:1");
  EXPECT_EQ(log, "") << "nobody else may be there";
  address.Refresh("10.0.0.9:1");
  EXPECT_THAT(log, HasSubstr("WARNING other hosts cannot reach this peer"));
  const std::string once = log;
  address.Refresh("10.0.0.9:1");
  SetLogSink(nullptr);
  EXPECT_EQ(log, once);
}

TEST(WhereKernelListens, ChangesOnlyTheWildcardOfIpv6) {
  EXPECT_EQ(WhereKernelListens("0.0.0.0:4000"), "0.0.0.0:4000");
  EXPECT_EQ(WhereKernelListens("[::1]:4000"), "[::1]:4000");
  const std::string anywhere = WhereKernelListens("[::]:4000");
  EXPECT_TRUE(anywhere == "[::]:4000" || anywhere == "0.0.0.0:4000") << anywhere;
}

}  // namespace
}  // namespace longhaul::peerd
