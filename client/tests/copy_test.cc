#include "client/src/copy.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace {

constexpr size_t kAround = 256;  // bytes before and behind the target that stay as they are
constexpr size_t kBlock = 16 << 10;
constexpr size_t kMost = LHI_STREAM_BYTES_MIN + 2 * kBlock + 1;

class CopyTest : public testing::Test {
 protected:
  CopyTest() : from_(kMost + kAround) {
    std::mt19937_64 random(1);
    for (uint8_t& byte : from_) byte = static_cast<uint8_t>(random());
  }

  // Checks a copy whose target is `to` bytes and whose source is `from` bytes beyond the beginning
  // of a cache line.
  void Check(size_t bytes, size_t to, size_t from) {
    SCOPED_TRACE(testing::Message() << bytes << " bytes to " << to << " from " << from);
    std::vector<uint8_t> memory(bytes + 2 * kAround + 128, 7);
    uint8_t* const target = LineIn(memory.data() + kAround) + to;
    const uint8_t* const source = LineIn(from_.data()) + from;
    const size_t before = static_cast<size_t>(target - memory.data());
    std::vector<uint8_t> expected = memory;
    std::memcpy(expected.data() + before, source, bytes);
    lhi_copy(target, source, bytes);
    EXPECT_TRUE(memory == expected);
  }

 private:
  static uint8_t* LineIn(uint8_t* at) { return at + (-reinterpret_cast<uintptr_t>(at) & 63); }

  std::vector<uint8_t> from_;
};

TEST_F(CopyTest, CopiesAllAndNothingElse) {
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{4096}, LHI_STREAM_BYTES_MIN - 1, LHI_STREAM_BYTES_MIN,
        LHI_STREAM_BYTES_MIN + 1, LHI_STREAM_BYTES_MIN + kBlock - 1, LHI_STREAM_BYTES_MIN + kBlock,
        LHI_STREAM_BYTES_MIN + kBlock + 63, kMost}) {
    Check(bytes, 0, 0);
  }
}

TEST_F(CopyTest, NeitherSideNeedsAnAlignment) {
  for (const size_t to : {0, 1, 16, 63}) {
    for (const size_t from : {0, 1, 16, 63}) Check(LHI_STREAM_BYTES_MIN + 5, to, from);
  }
}

}  // namespace
