#include "peerd/ipc/accounts.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

ResourceLimits AllOf(uint64_t limit) {
  ResourceLimits limits;
  limits.fill(limit);
  return limits;
}

TEST(AccountsTest, TakesUpToTheLimitAndGetsBackWhatIsNoLongerHeld) {
  const auto account = Account::Make("peerd", "", AllOf(10), nullptr);
  std::optional<Hold> hold = *account->Take(Resource::kMembers, 6);
  EXPECT_FALSE(account->Take(Resource::kMembers, 5).ok());
  const absl::StatusOr<Hold> rest = account->Take(Resource::kMembers, 4);
  EXPECT_TRUE(rest.ok());
  EXPECT_EQ(account->held(Resource::kMembers), 10u);
  EXPECT_EQ(account->held(Resource::kRegions), 0u) << "each resource counts for itself";
  hold.reset();
  EXPECT_EQ(account->held(Resource::kMembers), 4u);
}

TEST(AccountsTest, AmountsNearTheLargestNumberDoNotWrapAround) {
  const auto account = Account::Make("peerd", "", AllOf(UINT64_MAX - 1), nullptr);
  const absl::StatusOr<Hold> most = account->Take(Resource::kArenaBytes, UINT64_MAX - 2);
  ASSERT_TRUE(most.ok());
  EXPECT_FALSE(account->Take(Resource::kArenaBytes, UINT64_MAX).ok());
  EXPECT_FALSE(account->Take(Resource::kArenaBytes, 2).ok());
  EXPECT_TRUE(account->Take(Resource::kArenaBytes, 1).ok());
}

TEST(AccountsTest, WhatAnAccountTakesCountsAtItsParentsAndARefusalTakesNothing) {
  const auto peerd = Account::Make("peerd", "", AllOf(10), nullptr);
  const auto first = Account::Make("user 1", "(--user-share=80 of peerd)", AllOf(8), peerd);
  const auto second = Account::Make("user 2", "", AllOf(8), peerd);
  const auto client = Account::Make("a connection", "", AllOf(4), first);
  const absl::StatusOr<Hold> hold = client->Take(Resource::kTensors, 4);
  ASSERT_TRUE(hold.ok());
  EXPECT_EQ(first->held(Resource::kTensors), 4u);
  EXPECT_EQ(peerd->held(Resource::kTensors), 4u);
  absl::Status refused = client->Take(Resource::kTensors, 1).status();
  EXPECT_EQ(refused.message(),
            "a connection may have at most 4 tensors of registered states, and has 4; free some "
            "states");
  refused = first->Take(Resource::kTensors, 5).status();
  EXPECT_EQ(refused.message(),
            "user 1 may have at most 8 tensors of registered states (--user-share=80 of peerd), "
            "and has 4; 5 more are asked for; free some states");
  refused = second->Take(Resource::kTensors, 7).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(refused.message().substr(0, 5), "peerd");
  EXPECT_EQ(second->held(Resource::kTensors), 0u);
  EXPECT_EQ(peerd->held(Resource::kTensors), 4u);
}

TEST(AccountsTest, AHoldOutlivesWhoeverTookIt) {
  const auto peerd = Account::Make("peerd", "", AllOf(10), nullptr);
  std::vector<Hold> holds;
  {
    const auto user = Account::Make("user 1", "", AllOf(10), peerd);
    holds.push_back(*user->Take(Resource::kRegions, 3));
  }
  EXPECT_EQ(peerd->held(Resource::kRegions), 3u);
  Hold moved = std::move(holds.front());
  holds.clear();
  EXPECT_EQ(peerd->held(Resource::kRegions), 3u);
  moved = Hold();
  EXPECT_EQ(peerd->held(Resource::kRegions), 0u);
}

TEST(AccountsTest, AShareIsAtLeastOneAndNoLimitStaysNone) {
  ResourceLimits limits = AllOf(300);
  limits[static_cast<size_t>(Resource::kMembers)] = 3;
  limits[static_cast<size_t>(Resource::kArenaBytes)] = UINT64_MAX;
  const ResourceLimits share = ShareOf(limits, 33);
  EXPECT_EQ(share[static_cast<size_t>(Resource::kConnections)], 99u);
  EXPECT_EQ(share[static_cast<size_t>(Resource::kMembers)], 1u);
  EXPECT_EQ(share[static_cast<size_t>(Resource::kArenaBytes)], UINT64_MAX);
  EXPECT_EQ(ShareOf(limits, 100), limits);
}

}  // namespace
}  // namespace longhaul::peerd
