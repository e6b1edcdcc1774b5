#include "coordinator/core/pauses.h"

#include <string>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

const Pauses::Endpoints kThere{"10.0.0.9:29700"};
constexpr Tick kNow{Seconds(1000)};

TEST(Pauses, GetLongerWithEachFailureUntilTheAddressIsReached) {
  Pauses pauses(1500);
  EXPECT_FALSE(pauses.Waits(kThere, kNow));
  for (const int64_t seconds : {60, 120, 240, 480, 600, 600}) {
    EXPECT_EQ(pauses.Begin(kThere, kNow), Seconds(seconds));
    EXPECT_TRUE(pauses.Waits(kThere, kNow + Seconds(seconds) + -1));
    EXPECT_FALSE(pauses.Waits(kThere, kNow + Seconds(seconds)));
  }
  EXPECT_FALSE(pauses.Waits({"10.0.0.8:29700"}, kNow));
  pauses.Forget(kThere);
  EXPECT_EQ(pauses.Begin(kThere, kNow), Seconds(60));
}

TEST(Pauses, AreBounded) {
  Pauses pauses(1500);
  for (size_t i = 0; i < kPausesMax + 10; ++i) {
    pauses.Begin({"host" + std::to_string(i) + ":1"}, kNow + static_cast<int64_t>(i));
  }
  EXPECT_FALSE(pauses.Waits({"host9:1"}, kNow));
  EXPECT_TRUE(pauses.Waits({"host10:1"}, kNow));
}

}  // namespace
}  // namespace longhaul::coordinator
