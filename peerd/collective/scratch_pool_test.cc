#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "peerd/collective/attempt.h"

namespace longhaul::peerd {
namespace {

TEST(ScratchPoolTest, BuffersAreAlignedAndWritable) {
  const auto pool = MakeScratchPool(64 << 20);
  std::vector<uint8_t*> taken;
  for (const uint64_t bytes : {0, 1, 100, 65536, 65537, 1 << 20, (2 << 20) + 1, 5 << 20}) {
    const auto data = pool->Borrow(bytes);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*data) % 64, 0u);
    std::memset(*data, 1, bytes);
    taken.push_back(*data);
  }
  for (uint8_t* data : taken) pool->Give(data);
}

TEST(ScratchPoolTest, GivenBuffersAreReused) {
  const auto pool = MakeScratchPool(64 << 20);
  uint8_t* const first = *pool->Borrow(10 << 20);
  pool->Give(first);
  uint8_t* const again = *pool->Borrow((10 << 20) - 4096);
  EXPECT_EQ(again, first);
  pool->Give(again);
}

// Whether all pages of the memory are still mapped.
bool IsMapped(uint8_t* data, uint64_t bytes) {
  std::vector<unsigned char> pages((bytes + 4095) / 4096);
  return mincore(data, bytes, pages.data()) == 0;
}

TEST(ScratchPoolTest, GivesBackToTheSystemWhatIsMoreThanItMayKeep) {
  const auto pool = MakeScratchPool(8 << 20);
  uint8_t* const large = *pool->Borrow(8 << 20);
  uint8_t* const more = *pool->Borrow(1 << 20);
  pool->Give(large);
  EXPECT_FALSE(IsMapped(large, 8 << 20));
  pool->Give(more);
  EXPECT_TRUE(IsMapped(more, 1 << 20));
}

// The owner may unmap on another thread.
TEST(ScratchPoolTest, LeavesUnmappingToItsOwner) {
  std::vector<std::pair<void*, size_t>> given;
  {
    const auto pool = MakeScratchPool(
        8 << 20, [&](void* data, size_t bytes) { given.emplace_back(data, bytes); });
    uint8_t* const large = *pool->Borrow(8 << 20);
    uint8_t* const more = *pool->Borrow(1 << 20);
    pool->Give(large);
    ASSERT_EQ(given.size(), 1u);
    EXPECT_EQ(given[0], (std::pair<void*, size_t>(large, 8 << 20)));
    EXPECT_TRUE(IsMapped(large, 8 << 20));
    pool->Give(more);
  }
  EXPECT_EQ(given.size(), 2u);
  for (const auto& [data, bytes] : given) munmap(data, bytes);
}

TEST(ScratchPoolTest, KeptBuffersMakeRoomForOthers) {
  const auto pool = MakeScratchPool(8 << 20);
  std::vector<uint8_t*> small;
  for (int i = 0; i < 8; ++i) small.push_back(*pool->Borrow(1 << 20));
  for (uint8_t* data : small) pool->Give(data);
  for (uint8_t* data : small) EXPECT_TRUE(IsMapped(data, 1 << 20));
  uint8_t* const large = *pool->Borrow(7 << 20);
  // The large buffer may have taken the addresses of small ones.
  const auto kept = std::count_if(small.begin(), small.end(), [&](uint8_t* data) {
    return IsMapped(data, 1 << 20) && (data < large || data >= large + (7 << 20));
  });
  EXPECT_EQ(kept, 1);
  pool->Give(large);
}

TEST(ScratchPoolTest, RefusesWhatNoMachineHas) {
  const auto pool = MakeScratchPool(UINT64_MAX);
  EXPECT_EQ(pool->Borrow(UINT64_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool->Borrow(uint64_t{1} << 62).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(ScratchPoolTest, AtMostAQuarterMoreThanAskedForCounts) {
  for (uint64_t bytes = 1 << 20; bytes < 40 << 20; bytes += 777777) {
    const auto pool = MakeScratchPool(bytes + bytes / 4 + 64);
    uint8_t* const data = *pool->Borrow(bytes);
    pool->Give(data);
    EXPECT_TRUE(IsMapped(data, bytes)) << bytes;
  }
}

}  // namespace
}  // namespace longhaul::peerd
