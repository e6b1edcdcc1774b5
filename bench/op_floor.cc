// Measures the floor of a small op: N trainers each ask a process of their own, which sends a
// message to the processes of all others over TCP, and answers its trainer once it has theirs.
// Nothing else is on the way: no op is looked up, and nothing is added up.
//
//   bazel run -c opt //bench:op_floor -- --members=2,4 --rounds=20000
//
// The output is one line of JSON for each number of members and each way between a trainer and its
// process:
//   socket  a Unix socket; the trainer sleeps in recv(), as on a host with few processors
//   futex   shared memory; the trainer sleeps on a futex
//   shared  shared memory; the trainer polls it and yields the processor
// The processes in the middle always poll and yield, as peerd does while an op is open. `us` is the
// median time of a round at the first trainer.
#include <arpa/inet.h>
#include <linux/futex.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "base/check.h"

ABSL_FLAG(std::vector<std::string>, members, std::vector<std::string>({"2", "4"}),
          "numbers of members");
ABSL_FLAG(int, rounds, 20000, "rounds to measure");

namespace longhaul {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 200;
constexpr size_t kRequestBytes = 256;
constexpr size_t kReplyBytes = 64;
constexpr size_t kMessageBytes = 256;

enum class Way { kSocket, kFutex, kShared };
constexpr const char* kNames[] = {"socket", "futex", "shared"};

// What a trainer and its process share.
struct Page {
  alignas(64) std::atomic<uint32_t> asked = 0;
  alignas(64) std::atomic<uint32_t> answered = 0;
  alignas(64) double median_us = 0;
};

void Wait(std::atomic<uint32_t>* word, uint32_t while_it_is) {
  syscall(SYS_futex, word, FUTEX_WAIT, while_it_is, nullptr, nullptr, 0);
}
void WakeOne(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void SendAll(int fd, const void* data, size_t bytes) {
  LH_CHECK(send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
}

// Connects two sockets on loopback.
void Connect(int listener, int* a, int* b) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  LH_CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  *a = socket(AF_INET, SOCK_STREAM, 0);
  LH_CHECK(*a >= 0 && connect(*a, reinterpret_cast<sockaddr*>(&address), length) == 0);
  *b = accept(listener, nullptr, nullptr);
  LH_CHECK(*b >= 0);
  const int on = 1;
  for (const int fd : {*a, *b}) {
    LH_CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
  }
}

// One trainer. Writes its median to the page.
void BeTrainer(Way way, int fd, Page* page) {
  char buffer[kRequestBytes] = {};
  std::vector<double> us;
  const int rounds = absl::GetFlag(FLAGS_rounds) + kWarmUp;
  for (int i = 1; i <= rounds; ++i) {
    const auto begun = Clock::now();
    if (way == Way::kSocket) {
      SendAll(fd, buffer, kRequestBytes);
      LH_CHECK(recv(fd, buffer, kReplyBytes, MSG_WAITALL) == kReplyBytes);
    } else {
      page->asked.store(i, std::memory_order_release);
      uint32_t seen;
      while ((seen = page->answered.load(std::memory_order_acquire)) != static_cast<uint32_t>(i)) {
        if (way == Way::kFutex) {
          Wait(&page->answered, seen);
        } else {
          sched_yield();
        }
      }
    }
    if (i > kWarmUp) {
      us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
    }
  }
  std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
  page->median_us = us[us.size() / 2];
}

// The process between a trainer and the others. Ends when it is killed. `others`: its sockets.
[[noreturn]] void BeInTheMiddle(Way way, int trainer, const std::vector<int>& others, Page* page) {
  const int poll = epoll_create1(0);
  LH_CHECK(poll >= 0);
  const auto watch = [poll](int fd) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    LH_CHECK(epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) == 0);
  };
  watch(trainer);
  for (const int fd : others) watch(fd);
  char buffer[std::max(kRequestBytes, kMessageBytes)] = {};
  uint32_t asked = 0;
  const size_t needed = kMessageBytes * others.size();  // the others' messages of a round
  size_t arrived = 0;  // bytes of such messages; some may come before the trainer asks
  bool open = false;
  const auto begin = [&] {
    open = true;
    for (const int fd : others) SendAll(fd, buffer, kMessageBytes);
  };
  while (true) {
    bool worked = false;
    if (way != Way::kSocket && page->asked.load(std::memory_order_acquire) != asked) {
      ++asked;
      begin();
      worked = true;
    }
    epoll_event events[16];
    const int count = epoll_wait(poll, events, 16, 0);
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      const ssize_t got = recv(fd, buffer, fd == trainer ? kRequestBytes : kMessageBytes, 0);
      LH_CHECK(got >= 0);
      if (got == 0) _exit(0);  // the other side has ended
      worked = true;
      if (fd == trainer) {
        begin();
      } else {
        arrived += static_cast<size_t>(got);
      }
    }
    if (open && arrived >= needed) {
      arrived -= needed;
      open = false;
      if (way == Way::kSocket) {
        SendAll(trainer, buffer, kReplyBytes);
      } else {
        page->answered.store(asked, std::memory_order_release);
        if (way == Way::kFutex) WakeOne(&page->answered);
      }
    }
    if (!worked) sched_yield();
  }
}

double Measure(Way way, int members) {
  const size_t bytes = sizeof(Page) * members;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  LH_CHECK(memory != MAP_FAILED);
  Page* const pages = static_cast<Page*>(memory);
  for (int i = 0; i < members; ++i) new (&pages[i]) Page();
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  LH_CHECK(listener >= 0 && bind(listener, reinterpret_cast<sockaddr*>(&any), sizeof any) == 0);
  LH_CHECK(listen(listener, 1) == 0);
  std::vector<std::vector<int>> links(members);
  // Of each member: the trainer's end, and that of its process.
  std::vector<std::array<int, 2>> local(members);
  for (int i = 0; i < members; ++i) {
    LH_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, local[i].data()) == 0);
    for (int j = 0; j < i; ++j) {
      int ends[2];
      Connect(listener, &ends[0], &ends[1]);
      links[i].push_back(ends[0]);
      links[j].push_back(ends[1]);
    }
  }
  std::vector<pid_t> middle;
  std::vector<pid_t> trainers;
  for (int i = 0; i < members; ++i) {
    middle.push_back(fork());
    LH_CHECK(middle.back() >= 0);
    if (middle.back() == 0) BeInTheMiddle(way, local[i][1], links[i], &pages[i]);
  }
  for (int i = 0; i < members; ++i) {
    trainers.push_back(fork());
    LH_CHECK(trainers.back() >= 0);
    if (trainers.back() == 0) {
      BeTrainer(way, local[i][0], &pages[i]);
      _exit(0);
    }
  }
  for (const pid_t pid : trainers) {
    int status = 0;
    LH_CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  }
  for (const pid_t pid : middle) {
    kill(pid, SIGKILL);
    LH_CHECK(waitpid(pid, nullptr, 0) == pid);
  }
  for (const std::array<int, 2>& ends : local) {
    for (const int fd : ends) close(fd);
  }
  for (const std::vector<int>& row : links) {
    for (const int fd : row) close(fd);
  }
  close(listener);
  const double us = pages[0].median_us;
  munmap(memory, bytes);
  return us;
}

int Main() {
  if (absl::GetFlag(FLAGS_rounds) < 1) {
    fprintf(stderr, "--rounds is below 1\n");
    return 2;
  }
  for (const std::string& text : absl::GetFlag(FLAGS_members)) {
    const int members = atoi(text.c_str());
    if (members < 2 || members > 64) {
      fprintf(stderr, "--members has '%s'; give numbers from 2 to 64\n", text.c_str());
      return 2;
    }
    for (const Way way : {Way::kSocket, Way::kFutex, Way::kShared}) {
      printf("{\"bench\": \"op_floor\", \"members\": %d, \"way\": \"%s\", \"us\": %.1f}\n", members,
             kNames[static_cast<int>(way)], Measure(way, members));
      fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return longhaul::Main();
}
