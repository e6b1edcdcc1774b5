#include <gtest/gtest.h>

#include <cstring>

#include "peerd/collective/attempt.h"

namespace longhaul::peerd {
namespace {

TEST(ScratchPoolTest, BuffersAreAlignedAndWritable) {
  const auto pool = MakeScratchPool(64 << 20);
  std::vector<uint8_t*> taken;
  for (const uint64_t bytes : {0, 1, 100, 65536, 65537, 1 << 20, (2 << 20) + 1, 5 << 20}) {
    const auto data = pool->Take(bytes);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*data) % 64, 0u);
    std::memset(*data, 1, bytes);
    taken.push_back(*data);
  }
  for (uint8_t* data : taken) pool->Give(data);
}

TEST(ScratchPoolTest, GivenBuffersAreReused) {
  const auto pool = MakeScratchPool(64 << 20);
  uint8_t* const first = *pool->Take(10 << 20);
  pool->Give(first);
  uint8_t* const again = *pool->Take((10 << 20) - 4096);
  EXPECT_EQ(again, first);
  pool->Give(again);
}

TEST(ScratchPoolTest, RefusesBeyondTheLimitAndRecovers) {
  const auto pool = MakeScratchPool(8 << 20);
  uint8_t* const large = *pool->Take(8 << 20);
  const auto refused = pool->Take(1);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().ToString().find("8388608"), std::string::npos) << refused.status();
  pool->Give(large);
  uint8_t* const small = *pool->Take(1);
  pool->Give(small);
}

TEST(ScratchPoolTest, KeptBuffersMakeRoomForOthers) {
  const auto pool = MakeScratchPool(8 << 20);
  for (int round = 0; round < 3; ++round) {
    std::vector<uint8_t*> small;
    for (int i = 0; i < 8; ++i) small.push_back(*pool->Take(1 << 20));
    for (uint8_t* data : small) pool->Give(data);
    const auto large = pool->Take(7 << 20);
    ASSERT_TRUE(large.ok()) << large.status();
    pool->Give(*large);
  }
}

TEST(ScratchPoolTest, RefusesWhatNoMachineHas) {
  const auto pool = MakeScratchPool(UINT64_MAX);
  EXPECT_EQ(pool->Take(UINT64_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool->Take(uint64_t{1} << 62).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(ScratchPoolTest, AtMostAQuarterMoreThanAskedForCounts) {
  for (uint64_t bytes = 1 << 20; bytes < 40 << 20; bytes += 777777) {
    const auto pool = MakeScratchPool(bytes + bytes / 4 + 64);
    const auto data = pool->Take(bytes);
    ASSERT_TRUE(data.ok()) << data.status();
    pool->Give(*data);
  }
}

}  // namespace
}  // namespace longhaul::peerd
