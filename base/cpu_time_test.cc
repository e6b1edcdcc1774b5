#include "base/cpu_time.h"

#include <time.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul {
namespace {

// Works until this thread has used so much processor time more.
void Burn(double seconds) {
  timespec from{};
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
  do {
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  } while (static_cast<double>(now.tv_sec - from.tv_sec) +
               static_cast<double>(now.tv_nsec - from.tv_nsec) * 1e-9 <
           seconds);
}

TEST(CpuTime, CountsThreadsThatRunAndThreadsThatHaveEnded) {
  const std::vector<std::string> parts = {"a", "b"};
  const std::vector<double> before = CpuSeconds(parts);
  ASSERT_EQ(before.size(), 3u);
  std::thread([] {
    const CpuTime cpu("a");
    Burn(0.02);
  }).join();
  std::atomic<bool> burnt = false;
  std::atomic<bool> over = false;
  std::thread running([&] {
    const CpuTime cpu("b");
    Burn(0.01);
    burnt = true;
    while (!over) std::this_thread::yield();
  });
  while (!burnt) std::this_thread::yield();
  const std::vector<double> after = CpuSeconds(parts);
  over = true;
  running.join();
  EXPECT_GE(after[0] - before[0], 0.02);
  EXPECT_GE(after[1] - before[1], 0.01);
  EXPECT_GE(CpuSeconds(parts)[1], after[1]) << "what a thread used stays counted when it ends";
}

TEST(CpuTime, CountsThreadsThatSayNothingAsTheRest) {
  const double before = CpuSeconds({"a"}).back();
  std::thread([] { Burn(0.02); }).join();
  EXPECT_GE(CpuSeconds({"a"}).back() - before, 0.02);
}

}  // namespace
}  // namespace longhaul
