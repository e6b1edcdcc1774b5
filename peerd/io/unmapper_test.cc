#include "peerd/io/unmapper.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>

namespace longhaul::peerd {
namespace {

constexpr size_t kPage = 4096;

uint8_t* Map(size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EXPECT_NE(data, MAP_FAILED);
  return static_cast<uint8_t*>(data);
}

bool Mapped(uint8_t* page) {
  unsigned char in_memory;
  return mincore(page, kPage, &in_memory) == 0;
}

TEST(UnmapperTest, EverythingIsGivenBackByTheEndAndNothingBesides) {
  // More than one slice, but not a whole number of slices.
  constexpr size_t kBytes = (size_t{200} << 20) + kPage;
  uint8_t* const first = Map(kBytes);
  uint8_t* const second = Map(3 * kPage);
  {
    Unmapper unmapper;
    unmapper.Unmap(first, kBytes);
    unmapper.Unmap(second + kPage, kPage);
  }
  for (const size_t at : {size_t{0}, kBytes / 2, kBytes - kPage}) {
    EXPECT_FALSE(Mapped(first + at)) << at;
  }
  EXPECT_TRUE(Mapped(second));
  EXPECT_FALSE(Mapped(second + kPage));
  EXPECT_TRUE(Mapped(second + 2 * kPage));
  munmap(second, 3 * kPage);
}

TEST(UnmapperTest, WithoutWorkItEndsAtOnce) { Unmapper unmapper; }

}  // namespace
}  // namespace longhaul::peerd
