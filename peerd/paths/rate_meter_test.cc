#include "peerd/paths/rate_meter.h"

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kMega = 1000000;

Tick At(int64_t ms) { return Tick{} + Millis(1000 + ms); }

// The bytes that have arrived on a connection that doubles its rate with each round trip of 50 ms,
// up to 10 MB/s. Next() steps 25 ms.
struct Rising {
  uint64_t bytes = 0;
  uint64_t rate = kMega / 10;
  uint64_t Next() {
    bytes += rate / 40;
    return bytes;
  }
};

TEST(RateMeter, TheFastestStretchCounts) {
  RateMeter meter;
  Rising path;
  for (int64_t ms = 0; ms < 1000; ms += 25) {
    if (ms % 50 == 0) path.rate = std::min(10 * kMega, 2 * path.rate);
    meter.Add(At(ms), path.Next(), 50000);
  }
  EXPECT_EQ(meter.bytes_per_second(), 10 * kMega);
}

TEST(RateMeter, IsSettledWhenItRisesNoMore) {
  RateMeter meter;
  Rising path;
  int64_t ms = 0;
  for (; ms < 5000 && !meter.settled(); ms += 25) {
    if (ms % 50 == 0) path.rate = std::min(10 * kMega, 2 * path.rate);
    meter.Add(At(ms), path.Next(), 50000);
  }
  EXPECT_EQ(meter.bytes_per_second(), 10 * kMega);
  EXPECT_GE(ms, 600) << "it rises for 350 ms, and is watched for 300";
  EXPECT_LE(ms, 900);
}

TEST(RateMeter, SaysNothingOfAShortMoment) {
  RateMeter meter;
  meter.Add(At(0), 0, 0);
  meter.Add(At(90), 100 * kMega, 0);
  EXPECT_EQ(meter.bytes_per_second(), 0u);
  meter.Add(At(110), 100 * kMega, 200000);
  EXPECT_EQ(meter.bytes_per_second(), 0u) << "less than two round trips";
  meter.Add(At(400), 100 * kMega, 200000);
  EXPECT_EQ(meter.bytes_per_second(), 250 * kMega);
  EXPECT_FALSE(meter.settled());
}

TEST(RateMeter, NothingThatArrivesIsNeverSettled) {
  RateMeter meter;
  for (int64_t ms = 0; ms < 10000; ms += 25) meter.Add(At(ms), 0, 1000);
  EXPECT_EQ(meter.bytes_per_second(), 0u);
  EXPECT_FALSE(meter.settled());
}

}  // namespace
}  // namespace longhaul::peerd
