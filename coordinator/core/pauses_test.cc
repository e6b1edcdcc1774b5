#include "coordinator/core/pauses.h"

#include <string>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

const Pauses::Endpoints kThere{"10.0.0.9:29700"};
constexpr Tick kNow{Seconds(1000)};

TEST(Pauses, GetLongerWithEachFailureUntilTheAddressIsReached) {
  Pauses pauses(1000);
  EXPECT_LT(pauses.Until(kThere), kNow);
  for (const int64_t seconds : {1, 2, 4, 8, 16, 32, 40, 40}) {
    EXPECT_EQ(pauses.Begin(kThere, /*held=*/false, kNow), Seconds(seconds));
    EXPECT_EQ(pauses.Until(kThere), kNow + Seconds(seconds));
  }
  EXPECT_LT(pauses.Until({"10.0.0.8:29700"}), kNow);
  pauses.Forget(kThere);
  for (const int64_t seconds : {40, 80, 160, 320, 400, 400}) {
    EXPECT_EQ(pauses.Begin(kThere, /*held=*/true, kNow), Seconds(seconds));
  }
}

TEST(Pauses, AreBounded) {
  Pauses pauses(1000);
  for (size_t i = 0; i < kPausesMax + 10; ++i) {
    pauses.Begin({"host" + std::to_string(i) + ":1"}, false, kNow + static_cast<int64_t>(i));
  }
  EXPECT_LT(pauses.Until({"host9:1"}), kNow);
  EXPECT_GT(pauses.Until({"host10:1"}), kNow);
}

}  // namespace
}  // namespace longhaul::coordinator
