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

}  // namespace
}  // namespace longhaul::peerd
