#include "client/src/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>

#include "gtest/gtest.h"

namespace {

constexpr size_t kBytes = size_t{4} << 20;

class ArenaTest : public testing::Test {
 protected:
  ~ArenaTest() override { lhi_arena_clear(&arena_); }

  lhi_region* Add(size_t bytes = kBytes) {
    uint8_t* base = nullptr;
    int fd = -1;
    EXPECT_EQ(lhi_region_map(bytes, &base, &fd), nullptr);
    close(fd);
    return lhi_arena_add(&arena_, next_id_++, base, bytes);
  }
  // Checks the list of blocks: they cover the region in order, no two free blocks are neighbours,
  // and `used` is the sum of the used blocks.
  void CheckBlocks() {
    for (const lhi_region* region = arena_.regions; region != nullptr; region = region->next) {
      size_t offset = 0;
      size_t used = 0;
      const lhi_block* previous = nullptr;
      for (const lhi_block* block = region->blocks; block != nullptr; block = block->next) {
        ASSERT_EQ(block->offset, offset);
        ASSERT_GT(block->bytes, 0u);
        ASSERT_EQ(block->previous, previous);
        ASSERT_FALSE(previous != nullptr && !previous->used && !block->used);
        offset += block->bytes;
        used += block->used ? block->bytes : 0;
        previous = block;
      }
      ASSERT_EQ(offset, region->bytes);
      ASSERT_EQ(used, region->used);
    }
  }

  lhi_arena arena_ = {};
  uint64_t next_id_ = 1;
};

TEST(RegionTest, IsZeroAndSealedInItsSize) {
  uint8_t* base = nullptr;
  int fd = -1;
  ASSERT_EQ(lhi_region_map(kBytes, &base, &fd), nullptr);
  EXPECT_EQ(base[0], 0);
  EXPECT_EQ(base[kBytes - 1], 0);
  EXPECT_NE(ftruncate(fd, 4096), 0);
  EXPECT_NE(ftruncate(fd, 2 * kBytes), 0);
  EXPECT_EQ(fcntl(fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  munmap(base, kBytes);
  close(fd);
}

TEST_F(ArenaTest, GivesNothingWithoutARegion) {
  EXPECT_EQ(lhi_arena_take(&arena_, 1), nullptr);
  EXPECT_EQ(lhi_arena_region(&arena_, &arena_), nullptr);
  EXPECT_FALSE(lhi_arena_give(&arena_, &arena_));
}

TEST_F(ArenaTest, BlocksAreAlignedLargeOnesToPages) {
  Add();
  const auto small = reinterpret_cast<uintptr_t>(lhi_arena_take(&arena_, 1));
  const auto large = reinterpret_cast<uintptr_t>(lhi_arena_take(&arena_, 1 << 20));
  EXPECT_EQ(small % 64, 0u);
  EXPECT_EQ(large % 4096, 0u);
  CheckBlocks();
  // The gap before the page-aligned block is used for small blocks.
  const auto next = reinterpret_cast<uintptr_t>(lhi_arena_take(&arena_, 64));
  EXPECT_EQ(next, small + 64);
  CheckBlocks();
}

TEST_F(ArenaTest, AWholeRegionFitsAndNotAByteMore) {
  Add();
  void* const all = lhi_arena_take(&arena_, kBytes);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(lhi_arena_take(&arena_, 1), nullptr);
  EXPECT_TRUE(lhi_arena_give(&arena_, all));
  EXPECT_EQ(lhi_arena_take(&arena_, kBytes + 1), nullptr);
  CheckBlocks();
}

TEST_F(ArenaTest, NeighboursMergeOnBothSides) {
  Add();
  void* const a = lhi_arena_take(&arena_, 64);
  void* const b = lhi_arena_take(&arena_, 64);
  void* const c = lhi_arena_take(&arena_, 64);
  EXPECT_TRUE(lhi_arena_give(&arena_, a));
  EXPECT_TRUE(lhi_arena_give(&arena_, c));
  EXPECT_TRUE(lhi_arena_give(&arena_, b));
  CheckBlocks();
  EXPECT_EQ(arena_.regions->blocks->next, nullptr);
  EXPECT_EQ(arena_.regions->used, 0u);
}

TEST_F(ArenaTest, OnlyTheBeginningOfAUsedBlockIsGivenBack) {
  Add();
  auto* const a = static_cast<uint8_t*>(lhi_arena_take(&arena_, 128));
  EXPECT_FALSE(lhi_arena_give(&arena_, a + 64));
  EXPECT_FALSE(lhi_arena_give(&arena_, a + 128));
  EXPECT_TRUE(lhi_arena_give(&arena_, a));
  EXPECT_FALSE(lhi_arena_give(&arena_, a));
}

TEST_F(ArenaTest, FindsTheBlockOfARange) {
  Add();
  lhi_region* const region = Add();
  auto* const a = static_cast<uint8_t*>(lhi_arena_take(&arena_, 128));
  EXPECT_EQ(lhi_arena_region(&arena_, a + 5), region);
  EXPECT_NE(lhi_region_block(region, a, 128), nullptr);
  EXPECT_NE(lhi_region_block(region, a + 100, 28), nullptr);
  EXPECT_EQ(lhi_region_block(region, a + 100, 29), nullptr);
  EXPECT_EQ(lhi_region_block(region, a + 128, 1), nullptr) << "free";
}

TEST_F(ArenaTest, APinHoldsTheBlockThatItsRangeLiesIn) {
  lhi_region* const region = Add(kBytes);
  auto* const a = static_cast<uint8_t*>(lhi_arena_take(&arena_, 128));
  auto* const b = static_cast<uint8_t*>(lhi_arena_take(&arena_, 128));
  lhi_pin pin = {};
  lhi_pin other = {};
  ASSERT_TRUE(lhi_arena_pin(&arena_, a + 100, 28, &pin));
  ASSERT_TRUE(lhi_arena_pin(&arena_, a, 1, &other));
  EXPECT_EQ(pin.region, region);
  EXPECT_EQ(lhi_region_block(region, a, 1)->pins, 2u);
  EXPECT_EQ(lhi_region_block(region, b, 1)->pins, 0u);
  lhi_unpin(&other);
  lhi_unpin(&other);
  EXPECT_EQ(lhi_region_block(region, a, 1)->pins, 1u) << "twice is once";
  lhi_unpin(&pin);
  EXPECT_EQ(lhi_region_block(region, a, 1)->pins, 0u);
  EXPECT_FALSE(lhi_arena_pin(&arena_, a + 100, 29, &pin)) << "it goes on in another block";
  EXPECT_FALSE(lhi_arena_pin(&arena_, b + 128, 1, &pin)) << "free";
  int outside = 0;
  EXPECT_TRUE(lhi_arena_pin(&arena_, &outside, sizeof outside, &pin));
  EXPECT_EQ(pin.region, nullptr);
}

TEST_F(ArenaTest, EmptyRegionsAreSurplusBeyondWhatIsKept) {
  lhi_region* const first = Add(LHI_EMPTY_BYTES_MAX);
  EXPECT_EQ(lhi_arena_surplus(&arena_), nullptr);
  lhi_region* const second = Add(kBytes);
  EXPECT_EQ(lhi_arena_surplus(&arena_), first);
  lhi_arena_give(&arena_, lhi_arena_take(&arena_, LHI_EMPTY_BYTES_MAX));
  EXPECT_EQ(lhi_arena_surplus(&arena_), second) << "the other one was of use since";
  lhi_arena_remove(&arena_, second);
  EXPECT_EQ(lhi_arena_surplus(&arena_), nullptr);
  EXPECT_EQ(arena_.bytes, LHI_EMPTY_BYTES_MAX);
}

TEST_F(ArenaTest, WhatOperationsStagedOfLateIsKeptToo) {
  lhi_region* const region = Add(LHI_EMPTY_BYTES_MAX + 2 * kBytes);
  lhi_arena_stage(&arena_, kBytes);
  lhi_arena_stage(&arena_, kBytes);
  lhi_arena_unstage(&arena_, kBytes);
  EXPECT_EQ(lhi_arena_surplus(&arena_), region) << "half of it is in another region now";
  lhi_arena_unstage(&arena_, kBytes);
  for (int look = 0; look < LHI_STAGED_LOOKS; ++look) {
    lhi_arena_look(&arena_);
    EXPECT_EQ(lhi_arena_surplus(&arena_), nullptr) << look;
  }
  // A whole period without staged blocks follows.
  for (int look = 1; look < LHI_STAGED_LOOKS; ++look) lhi_arena_look(&arena_);
  EXPECT_EQ(lhi_arena_surplus(&arena_), nullptr);
  lhi_arena_look(&arena_);
  EXPECT_EQ(lhi_arena_surplus(&arena_), region);
}

TEST_F(ArenaTest, RegionsGrowWithTheArena) {
  EXPECT_EQ(lhi_region_bytes(&arena_, 1, false), LHI_REGION_BYTES_MIN);
  EXPECT_EQ(lhi_region_bytes(&arena_, 1, true), LHI_REGION_ROUND);
  EXPECT_EQ(lhi_region_bytes(&arena_, LHI_REGION_BYTES_MIN + 1, false),
            LHI_REGION_BYTES_MIN + LHI_REGION_ROUND);
  arena_.bytes = size_t{80} << 30;
  EXPECT_EQ(lhi_region_bytes(&arena_, 1, false), size_t{10} << 30);
  arena_.bytes = 0;
}

TEST_F(ArenaTest, RandomUseKeepsBlocksApart) {
  const unsigned seed = 20241121;
  std::mt19937 random(seed);
  Add();
  Add();
  std::map<uint8_t*, size_t> live;
  for (int i = 0; i < 4000; ++i) {
    if (live.size() < 60 && random() % 2 == 0) {
      const size_t bytes = 1 + random() % (random() % 8 == 0 ? (3u << 19) : 5000u);
      auto* const data = static_cast<uint8_t*>(lhi_arena_take(&arena_, bytes));
      if (data == nullptr) continue;
      const auto after = live.lower_bound(data);
      ASSERT_TRUE(after == live.end() || data + bytes <= after->first) << "seed " << seed;
      if (after != live.begin()) {
        const auto before = std::prev(after);
        ASSERT_LE(before->first + before->second, data) << "seed " << seed;
      }
      live[data] = bytes;
    } else if (!live.empty()) {
      auto victim = live.begin();
      std::advance(victim, static_cast<long>(random() % live.size()));
      ASSERT_TRUE(lhi_arena_give(&arena_, victim->first));
      live.erase(victim);
    }
    if (i % 16 == 0) CheckBlocks();
  }
}

}  // namespace
