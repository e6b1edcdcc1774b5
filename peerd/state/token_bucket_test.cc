#include "peerd/state/token_bucket.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "base/prng.h"

namespace longhaul::peerd {
namespace {

constexpr Tick kStart{Seconds(100)};

TEST(TokenBucketTest, WithoutALimitEverythingGoesAtOnce) {
  TokenBucket bucket;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_LE(bucket.NextAt(), kStart);
    bucket.Spend(UINT32_MAX, kStart);
  }
}

TEST(TokenBucketTest, APieceIsPaidForInTime) {
  TokenBucket bucket(1000000);
  bucket.Spend(250000, kStart);
  EXPECT_EQ(bucket.NextAt(), kStart + Millis(250) + -TokenBucket::kBurstUs);
  const Tick next = bucket.NextAt();
  bucket.Spend(1000, next);
  EXPECT_EQ(bucket.NextAt(), next + Millis(1)) << "nothing is left of the burst";
}

TEST(TokenBucketTest, APauseIsWorthNoMoreThanTheBurst) {
  TokenBucket bucket(1000000);
  bucket.Spend(1, kStart);
  const Tick later = kStart + Seconds(3600);
  uint64_t sent = 0;
  while (bucket.NextAt() <= later) {
    bucket.Spend(1000, later);
    sent += 1000;
  }
  EXPECT_EQ(sent, 21000u);
}

TEST(TokenBucketTest, RatesThatDoNotDivideAMicrosecondAreKeptExactly) {
  TokenBucket bucket(3000000007);
  Tick now = kStart;
  bucket.Spend(1, now);
  for (int i = 0; i < 3000; ++i) {
    now = std::max(now, bucket.NextAt());
    bucket.Spend(1000000, now);
  }
  EXPECT_NEAR(static_cast<double>(bucket.NextAt() - kStart), 1e6, TokenBucket::kBurstUs + 1);
}

TEST(TokenBucketTest, OverNoStretchOfTimeMoreThanTheRateAndTheBurst) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Prng random(seed);
    const uint64_t rate = 1 + random.Below(uint64_t{1} << (10 + random.Below(24)));
    constexpr uint32_t kPieceMax = 256 << 10;
    TokenBucket bucket(rate);
    std::vector<std::pair<Tick, uint32_t>> sent;
    Tick now = kStart;
    for (int i = 0; i < 300; ++i) {
      if (random.Chance(0.1)) now = now + static_cast<int64_t>(random.Below(Seconds(1)));
      now = std::max(now, bucket.NextAt());
      const auto bytes = static_cast<uint32_t>(1 + random.Below(kPieceMax));
      bucket.Spend(bytes, now);
      sent.emplace_back(now, bytes);
    }
    for (size_t from = 0; from < sent.size(); from += 7) {
      double bytes = 0;
      for (size_t to = from; to < sent.size(); ++to) {
        bytes += sent[to].second;
        const auto us = static_cast<double>(sent[to].first - sent[from].first);
        ASSERT_LE(bytes, static_cast<double>(rate) * 1e-6 *
                                 (us + static_cast<double>(TokenBucket::kBurstUs) + 1) +
                             kPieceMax)
            << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace longhaul::peerd
