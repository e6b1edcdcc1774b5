#include "peerd/daemon/advertise.h"

#include <gtest/gtest.h>

namespace longhaul::peerd {
namespace {

TEST(AdvertisedEndpoint, IsTheBoundAddressUnlessThatIsAWildcard) {
  EXPECT_EQ(*AdvertisedEndpoint("127.0.0.1:4000", {}), "127.0.0.1:4000");
  EXPECT_EQ(*AdvertisedEndpoint("0.0.0.0:4000", {"127.0.0.1:1"}), "127.0.0.1:4000");
}

TEST(AdvertisedEndpoint, SaysWhatToDoWhenNothingIsKnown) {
  const auto endpoint = AdvertisedEndpoint("0.0.0.0:4000", {});
  ASSERT_FALSE(endpoint.ok());
  EXPECT_NE(endpoint.status().message().find("--advertise"), absl::string_view::npos);
}

// If the address was derived only once, other peers would dial a host's old address for ever.
TEST(AdvertisedAddress, IsDerivedAnewEachTime) {
  absl::StatusOr<std::string> here = "10.0.0.1:4000";
  std::vector<std::string> coordinators;
  AdvertisedAddress address("", [&](const std::vector<std::string>& from) {
    coordinators = from;
    return here;
  });
  EXPECT_EQ(address.Get(), "");
  EXPECT_TRUE(address.Refresh({"coordinator:1"}).ok());
  EXPECT_EQ(coordinators, std::vector<std::string>{"coordinator:1"});
  EXPECT_EQ(address.Get(), "10.0.0.1:4000");
  here = "10.0.0.2:4000";
  EXPECT_TRUE(address.Refresh({}).ok());
  EXPECT_EQ(address.Get(), "10.0.0.2:4000");
  here = absl::FailedPreconditionError("no way");
  EXPECT_TRUE(address.Refresh({}).ok()) << "the last one may still be right";
  EXPECT_EQ(address.Get(), "10.0.0.2:4000");
}

TEST(AdvertisedAddress, IsAnErrorIfItWasNeverKnown) {
  AdvertisedAddress address("",
                            [](const auto&) { return absl::FailedPreconditionError("no way"); });
  EXPECT_EQ(address.Refresh({}).message(), "no way");
}

TEST(AdvertisedAddress, OfTheOperatorStays) {
  AdvertisedAddress address("host:4000", [](const auto&) -> absl::StatusOr<std::string> {
    ADD_FAILURE() << "derived";
    return "10.0.0.1:4000";
  });
  EXPECT_TRUE(address.Refresh({}).ok());
  EXPECT_EQ(address.Get(), "host:4000");
}

}  // namespace
}  // namespace longhaul::peerd
