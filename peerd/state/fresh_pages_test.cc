#include "peerd/state/fresh_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

class FreshPagesTest : public ::testing::Test {
 protected:
  static constexpr size_t kPages = 64;

  void SetUp() override {
    const int fd = memfd_create("fresh", MFD_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(ftruncate(fd, static_cast<off_t>(bytes_)), 0);
    void* const base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    ASSERT_NE(base, MAP_FAILED);
    // Without huge pages, a touch makes one page only.
    (void)madvise(base, bytes_, MADV_NOHUGEPAGE);
    base_ = static_cast<uint8_t*>(base);
  }
  void TearDown() override { munmap(base_, bytes_); }

  size_t page() const { return bytes_ / kPages; }
  size_t Made() {
    std::vector<unsigned char> in(kPages);
    EXPECT_EQ(mincore(base_, bytes_, in.data()), 0);
    return static_cast<size_t>(std::count_if(in.begin(), in.end(), [](int i) { return i & 1; }));
  }

  const size_t bytes_ = kPages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  uint8_t* base_ = nullptr;
};

TEST_F(FreshPagesTest, MakesThePagesThatAreTouchedAndNoOthers) {
  EXPECT_EQ(Made(), 0u);
  TouchPages({base_ + 4 * page(), 8 * page()});
  EXPECT_EQ(Made(), 8u);
}

TEST_F(FreshPagesTest, TakesPartsOfPages) {
  TouchPages({base_ + page() - 1, page() + 2});
  EXPECT_EQ(Made(), 3u);
  TouchPages({base_ + page() / 2, 1});
  TouchPages({base_, 0});
  EXPECT_EQ(Made(), 3u);
}

TEST_F(FreshPagesTest, LeavesTheBytes) {
  for (size_t at = 0; at < bytes_; at += 512) base_[at] = static_cast<uint8_t>(at / 512 + 1);
  TouchPages({base_, bytes_});
  for (size_t at = 0; at < bytes_; at += 512) {
    ASSERT_EQ(base_[at], static_cast<uint8_t>(at / 512 + 1)) << at;
  }
}

}  // namespace
}  // namespace longhaul::peerd
