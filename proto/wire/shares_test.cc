#include "proto/wire/shares.h"

#include <gtest/gtest.h>

#include <numeric>

namespace longhaul {
namespace {

TEST(SharesTest, ThePositionsThatAreLeftKeepTheirProportions) {
  const Shares all{kShareUnits / 2, 0, kShareUnits / 4, kShareUnits / 4};
  EXPECT_EQ(SharesOf(all, {0, 1, 2, 3}), all);
  EXPECT_EQ(SharesOf(all, {3, 1, 2}), (Shares{kShareUnits / 2, 0, kShareUnits / 2}));
  const Shares three = SharesOf(
      {kShareUnits / 2, kShareUnits / 8, kShareUnits / 8, kShareUnits / 8, kShareUnits / 8},
      {1, 2, 4});
  EXPECT_EQ(std::accumulate(three.begin(), three.end(), 0u), kShareUnits);
  EXPECT_EQ(three, (Shares{kShareUnits - 2 * (kShareUnits / 3), kShareUnits / 3, kShareUnits / 3}));
}

TEST(SharesTest, WithoutAnyOwnerLeftSharesAreEqual) {
  EXPECT_EQ(SharesOf({kShareUnits, 0, 0}, {1, 2}), Shares{});
  EXPECT_EQ(SharesOf({}, {1, 2}), Shares{});
}

TEST(SharesTest, NobodyGetsMoreThanTheGreatestShare) {
  EXPECT_EQ(GreatestShare(2), kShareUnits);
  EXPECT_EQ(GreatestShare(5), kShareUnits);
  EXPECT_EQ(GreatestShare(9), kShareUnits / 2);
  Shares one_left(10, 0);
  one_left[0] = one_left[1] = one_left[2] = kShareUnits / 4;
  one_left[3] = kShareUnits / 4;
  EXPECT_EQ(SharesFault(one_left, 10), "");
  // Without the other owners, position 0 would own all of it.
  EXPECT_EQ(SharesOf(one_left, {0, 4, 5, 6, 7, 8, 9}), Shares{});
}

TEST(SharesTest, FaultsAreNamed) {
  EXPECT_EQ(SharesFault({}, 3), "");
  EXPECT_EQ(SharesFault({kShareUnits}, 2), "1 shares for 2 peers");
  EXPECT_EQ(SharesFault({1, 2}, 2), "shares add up to 3, expected 65536");
  Shares much(9, 0);
  much[8] = kShareUnits;
  EXPECT_EQ(SharesFault(much, 9), "a share of 65536, expected at most 32768 among 9 peers");
}

}  // namespace
}  // namespace longhaul
