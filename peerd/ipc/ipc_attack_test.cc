// What a hostile trainer can send to the Unix socket. It may end its own connection, or get an
// error. It must not reach memory of others, crash peerd, or keep others from being served.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/ipc/ipc_socket.h"
#include "proto/wire/ipc.h"
#include "tests/support/ipc_harness.h"
#include "tests/support/raw_trainer.h"

namespace longhaul::peerd {
namespace {

constexpr int kInvalid = static_cast<int>(Code::kInvalidArgument);
constexpr int kPrecondition = static_cast<int>(Code::kFailedPrecondition);
constexpr int kUnavailable = static_cast<int>(Code::kUnavailable);

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

lh_ipc_request Region(uint64_t call, uint64_t region, uint64_t bytes) {
  lh_ipc_request request = Request(LH_IPC_REGION, call);
  request.u.region = {region, bytes, 0, 0};
  return request;
}

// Runs `task` on a thread whose connections come from another user. Returns false if this process
// may not change its user. (The kernel keeps the user for each thread; only libc changes it for the
// whole process.)
bool AsUser(uid_t uid, const std::function<void()>& task) {
  bool changed = false;
  std::thread([&] {
    changed =
        syscall(SYS_setresgid, uid, uid, uid) == 0 && syscall(SYS_setresuid, uid, uid, uid) == 0;
    if (changed) task();
  }).join();
  return changed;
}

IpcServerOptions ForEverybody() {
  IpcServerOptions options;
  options.mode = 0666;
  return options;
}

// ------------------------------------------------------------------------------ queues

constexpr uint32_t kForever = 3600U * 1000 * 1000;  // the ring never sleeps

TEST(IpcAttackTest, ImpossibleCountsInTheQueueEndTheConnection) {
  Harness harness({}, kForever);
  RawClient other(harness.path());
  const uint64_t served = other.Attach();
  uint64_t cut = 0;
  for (const uint32_t put : {LH_IPC_QUEUE_ENTRIES + 1, UINT32_MAX, 1U << 31}) {
    RawQueues queues;
    RawClient client(harness.path());
    client.Attach(&queues);
    ASSERT_TRUE(queues.UntilAwake());
    lh_ipc_queue_show(&queues->requests, put, 0);
    EXPECT_EQ(client.Status(), kPrecondition);
    EXPECT_TRUE(Has(client.text(), "impossible counts")) << client.text();
    EXPECT_EQ(client.Status(), -1);
    EXPECT_EQ(harness.Stats().connections_cut, ++cut);
    EXPECT_EQ(other.Ask(Request(LH_IPC_STEP, 9, served)), 0);
  }
}

TEST(IpcAttackTest, WhatIsInTheQueueIsCheckedLikeAnyRequest) {
  Harness harness({}, kForever);
  const auto cut = [&](const lh_ipc_request& request) {
    RawQueues queues;
    RawClient client(harness.path());
    client.Attach(&queues);
    ASSERT_TRUE(queues.UntilAwake());
    queues.Put(request, 3);
    EXPECT_EQ(client.Status(), kPrecondition);
    EXPECT_EQ(client.Status(), -1);
  };
  cut(Hello(9));
  cut(Request(LH_IPC_REGION, 9));  // it needs a descriptor
  lh_ipc_request request = Request(LH_IPC_STEP, 9, 1);
  request.magic = 0;
  cut(request);
}

TEST(IpcAttackTest, AnEntryBehindRequestsThatNeverComeHoldsUpNobody) {
  Harness harness({}, kForever);
  RawQueues queues;
  RawClient client(harness.path());
  RawClient other(harness.path());
  const uint64_t member = client.Attach(&queues);
  const uint64_t served = other.Attach();
  queues.Put(Request(LH_IPC_STEP, 9, member), UINT64_MAX);
  EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 10, member)), 0);
  EXPECT_EQ(client.reply().call, 10u);
  EXPECT_EQ(other.Ask(Request(LH_IPC_STEP, 11, served)), 0);
}

TEST(IpcAttackTest, ATrainerThatScribblesOverTheQueuesHarmsOnlyItself) {
  Harness harness({}, kForever);
  RawClient other(harness.path());
  const uint64_t served = other.Attach();
  std::mt19937_64 random(7);
  for (uint64_t round = 0; round < 40; ++round) {
    RawQueues queues;
    RawClient client(harness.path());
    const uint64_t member = client.Attach(&queues);
    std::atomic<bool> stop = false;
    std::thread scribbler([&, seed = random()] {
      std::mt19937_64 any(seed);
      while (!stop) {
        queues.Put(Op(any() % 100, member, any() % 3), any() % 6);
        auto* const bytes = reinterpret_cast<uint8_t*>(queues.get());
        // Mostly the entries, seldom the counts.
        const size_t first = any() % 64 == 0 ? 0 : 2 * sizeof(lh_ipc_queue);
        bytes[first + any() % (sizeof(lh_ipc_shared) - first)] = static_cast<uint8_t>(any());
      }
    });
    for (uint64_t call = 100; call < 120; ++call) {
      client.Send(Request(LH_IPC_STEP, call, member));
      ASSERT_EQ(other.Ask(Request(LH_IPC_STEP, call, served)), 0);
    }
    stop = true;
    scribbler.join();
  }
}

// ------------------------------------------------------------------------------ memory

TEST(IpcAttackTest, NoOpReachesBeyondItsRegionOrOverlaps) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_posts = true; });
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  RawClient other(harness.path());  // its region lies anywhere in the memory of peerd
  other.Attach();
  const std::vector<uint64_t> offsets = {0,
                                         1,
                                         4,
                                         8,
                                         16,
                                         kRegionBytes / 2,
                                         kRegionBytes - 16,
                                         kRegionBytes - 15,
                                         kRegionBytes - 4,
                                         kRegionBytes,
                                         kRegionBytes + 4,
                                         uint64_t{1} << 32,
                                         uint64_t{1} << 47,
                                         UINT64_MAX - 15,
                                         UINT64_MAX - 3};
  const std::vector<uint64_t> counts = {1,
                                        4,
                                        5,
                                        kRegionBytes / 8,
                                        kRegionBytes / 4,
                                        kRegionBytes / 4 + 1,
                                        LH_COUNT_MAX,
                                        uint64_t{1} << 62,
                                        UINT64_MAX / 4 + 2,
                                        UINT64_MAX};
  int accepted = 0;
  int refused = 0;
  uint64_t call = 100;
  for (const uint64_t source : offsets) {
    for (const uint64_t target : offsets) {
      for (const uint64_t count : counts) {
        lh_ipc_request op = Op(++call, member, 1);
        op.u.op.count = count;
        op.u.op.source.offset = source;
        op.u.op.target.offset = target;
        const auto inside = [&](uint64_t offset) {
          return count <= kRegionBytes / 4 && offset <= kRegionBytes &&
                 count * 4 <= kRegionBytes - offset && offset % 4 == 0;
        };
        const bool apart = source + count * 4 <= target || target + count * 4 <= source;
        const bool right = inside(source) && inside(target) && (source == target || apart);
        ASSERT_TRUE(client.Send(op));
        if (right) {
          ++accepted;
          ASSERT_TRUE(harness.Until([](ScriptedHandler& handler, IpcServer&) {
            return handler.posts.size() == 1;
          })) << source
              << " " << target << " " << count;
          harness.Run([&](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
          ASSERT_EQ(client.Status(), 0);
        } else {
          ++refused;
          ASSERT_EQ(client.Status(), kInvalid) << source << " " << target << " " << count;
        }
      }
    }
  }
  EXPECT_GT(accepted, 10);
  EXPECT_GT(refused, 2000);
  harness.Run([&](ScriptedHandler& handler, IpcServer&) { EXPECT_TRUE(handler.posts.empty()); });
}

TEST(IpcAttackTest, RegionsMembersAndStatesOfOthersAreUnknown) {
  Harness harness;
  RawClient victim(harness.path());
  const uint64_t victims_member = victim.Attach();
  ASSERT_EQ(victim.AddRegion(77, kRegionBytes), 0);
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  lh_ipc_request op = Op(10, member, 1);
  op.u.op.source.region = 77;
  EXPECT_EQ(client.Ask(op), kInvalid);
  op = Op(10, member, 1);
  op.u.op.pieces = 1;
  op.u.op.table = {77, 0};
  EXPECT_EQ(client.Ask(op), kInvalid);
  EXPECT_EQ(client.Ask(Op(10, victims_member, 1)), kPrecondition);
  EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 11, victims_member)), kPrecondition);
  EXPECT_EQ(client.Ask(Request(LH_IPC_LEAVE, 11, victims_member)), kPrecondition);
  lh_ipc_request leave = Request(LH_IPC_LEAVE, 11);
  leave.u.leave.join = 3;  // the call of both joins: it must name the own one only
  EXPECT_EQ(client.Ask(leave), 0);
  EXPECT_EQ(harness.Events().back(), "leave " + std::to_string(member));
  lh_ipc_request unregion = Request(LH_IPC_UNREGION, 12);
  unregion.u.region.region = 77;
  EXPECT_EQ(client.Ask(unregion), kInvalid);
  lh_ipc_request state = Request(LH_IPC_STATE, 13);
  state.u.state.state = 5;
  state.u.state.count = 1;
  state.u.state.table = {77, 0};
  EXPECT_EQ(client.Ask(state), kInvalid);
  // The victim goes on.
  EXPECT_EQ(victim.Ask(Request(LH_IPC_STEP, 20, victims_member)), 0);
}

// Access to a page that the file has lost raises SIGBUS, which would end peerd.
TEST(IpcAttackTest, ARegionThatShrinksOrLosesItsPagesDoesNotHarm) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  const int fd = MakeMemfd(kRegionBytes, 0);
  EXPECT_EQ(client.Ask(Region(2, 1, kRegionBytes), {fd}), kInvalid) << "not sealed yet";
  ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  ASSERT_EQ(client.Ask(Region(2, 1, kRegionBytes), {fd}), 0);
  const uint64_t member = client.Join();
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(ftruncate(fd, kRegionBytes - 4096), 0);
  EXPECT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kRegionBytes), 0);
  EXPECT_EQ(client.Ask(Op(10, member, 1)), 0) << "a hole is zeros";
  // Growing is allowed. Peerd keeps to the bytes that were announced.
  EXPECT_EQ(ftruncate(fd, 2 * kRegionBytes), 0);
  lh_ipc_request op = Op(11, member, 2);
  op.u.op.target.offset = kRegionBytes;
  EXPECT_EQ(client.Ask(op), kInvalid);
  EXPECT_NE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0) << "peerd has it mapped for writing";
  close(fd);
}

TEST(IpcAttackTest, OnlyMemfdsBecomeRegions) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  std::vector<int> wrong = {pipe_ends[0],
                            pipe_ends[1],
                            epoll_create1(0),
                            socket(AF_INET, SOCK_STREAM, 0),
                            socket(AF_UNIX, SOCK_STREAM, 0),
                            dup(client.fd()),
                            open("/dev/zero", O_RDWR),
                            open("/dev/null", O_RDWR),
                            open("/proc/self/maps", O_RDONLY),
                            open("/tmp", O_RDONLY | O_DIRECTORY),
                            open("/tmp", O_PATH),
                            open("/tmp", O_TMPFILE | O_RDWR, 0600),
                            open("/dev/shm", O_TMPFILE | O_RDWR, 0600),
                            static_cast<int>(syscall(447 /* memfd_secret */, 0)),
                            memfd_create("huge", MFD_HUGETLB | MFD_ALLOW_SEALING),
                            memfd_create("unsealed", 0)};
  int tried = 0;
  for (const int fd : wrong) {
    if (fd < 0) continue;  // this kernel does not have it
    (void)!ftruncate(fd, 2 << 20);
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);
    if (fd == wrong.back()) continue;
    EXPECT_EQ(client.Ask(Region(2, 1, 4096), {fd}), kInvalid) << "descriptor " << tried;
    EXPECT_TRUE(Has(client.text(), "memfd")) << client.text();
    ++tried;
  }
  EXPECT_GT(tried, 8);
  EXPECT_EQ(client.Ask(Region(2, 1, 4096), {wrong.back()}), kInvalid) << "cannot be sealed";
  EXPECT_EQ(harness.Stats().arena_bytes, 0u);
  for (const int fd : wrong) close(fd);
}

// ------------------------------------------------------------------------------ bytes

TEST(IpcAttackTest, ARequestMayEndAtEachByte) {
  Harness harness;
  {
    RawClient warm(harness.path());
    ASSERT_EQ(warm.Ask(Hello()), 0);
  }
  ASSERT_TRUE(
      harness.Until([](ScriptedHandler&, IpcServer& s) { return s.GetStats().clients == 0; }));
  const int before = OpenDescriptors();
  const int fd = MakeMemfd(kRegionBytes, F_SEAL_SHRINK);
  for (size_t bytes = 0; bytes < sizeof(lh_ipc_request); ++bytes) {
    {
      RawClient client(harness.path());
      if (bytes > 0) {
        ASSERT_TRUE(client.SendPart(Hello(), 0, bytes, {fd}));
      }
    }
    RawClient client(harness.path());
    ASSERT_EQ(client.Ask(Hello()), 0);
    if (bytes > 0) {
      ASSERT_TRUE(client.SendPart(Region(2, 1, kRegionBytes), 0, bytes, {fd}));
    }
  }
  close(fd);
  EXPECT_TRUE(harness.Until([&](ScriptedHandler&, IpcServer& server) {
    return server.GetStats().clients == 0 && OpenDescriptors() == before;
  }));
  EXPECT_EQ(harness.Stats().arena_bytes, 0u);
}

TEST(IpcAttackTest, EndlessRandomBytesEndTheConnection) {
  Harness harness;
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    RawClient client(harness.path());
    if (round % 2 == 1) {
      ASSERT_EQ(client.Ask(Hello()), 0);
    }
    std::vector<uint64_t> bytes(1 << 13);
    for (uint64_t& word : bytes) word = random();
    // Every second stream has a right head, so that it comes further.
    if (round % 4 >= 2) {
      lh_ipc_request request = Request(static_cast<uint32_t>(1 + random() % 16), 5, random() % 3);
      memcpy(bytes.data(), &request, offsetof(lh_ipc_request, u));
    }
    int sent = 0;
    while (sent < 1000 && client.SendBytes(bytes.data(), bytes.size() * 8)) ++sent;
    EXPECT_LT(sent, 1000);
  }
  EXPECT_TRUE(
      harness.Until([](ScriptedHandler&, IpcServer& s) { return s.GetStats().clients == 0; }));
  EXPECT_EQ(harness.Stats().connections_refused + harness.Stats().connections_cut, 200u);
}

// ------------------------------------------------------------------------------ descriptors

TEST(IpcAttackTest, ARequestInPartsBringsAtMostOneDescriptor) {
  Harness harness;
  const int fd = MakeMemfd(4096, F_SEAL_SHRINK);
  const lh_ipc_request hello = Hello();
  RawClient client(harness.path());
  ASSERT_TRUE(client.SendPart(hello, 0, 1, {fd}));
  ASSERT_TRUE(client.SendPart(hello, 1, 1, {fd}));
  EXPECT_EQ(client.Status(), kPrecondition);
  EXPECT_TRUE(Has(client.text(), "2 descriptors")) << client.text();
  EXPECT_EQ(client.Status(), -1);
  RawClient many(harness.path());
  ASSERT_TRUE(many.SendPart(hello, 0, 1, std::vector<int>(253, fd)));
  EXPECT_EQ(many.Status(), kPrecondition);
  EXPECT_TRUE(Has(many.text(), "253 descriptors")) << many.text();
  close(fd);
}

// A TCP socket with unsent bytes whose close() waits for an hour, and the other end of it.
class SlowToClose {
 public:
  SlowToClose() {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    LH_CHECK(bind(listener.get(), name, length) == 0 && listen(listener.get(), 1) == 0);
    LH_CHECK(getsockname(listener.get(), name, &length) == 0);
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    LH_CHECK(connect(fd_, name, length) == 0);
    other_end_ = accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
    LH_CHECK(fcntl(fd_, F_SETFL, O_NONBLOCK) == 0);
    const std::string bytes(1 << 20, 'x');
    while (send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    }
    LH_CHECK(fcntl(fd_, F_SETFL, 0) == 0);
    const linger hour = {1, 3600};
    LH_CHECK(setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hour, sizeof hour) == 0);
  }
  ~SlowToClose() {
    // The connection is reset, so whoever waits in close() goes on.
    const linger at_once = {1, 0};
    setsockopt(other_end_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(other_end_);
    if (fd_ >= 0) close(fd_);
  }
  // Sends the request with this descriptor, so that peerd closes the last copy of it.
  bool SendTo(RawClient& client, const lh_ipc_request& request) {
    // The first byte brings the descriptor, and peerd keeps it until the request is whole.
    const bool sent = client.SendPart(request, 0, 1, {fd_});
    Forget();
    return sent && client.SendPart(request, 1, sizeof request - 1);
  }

 private:
  void Forget() {
    linger now{};
    socklen_t length = sizeof now;
    LH_CHECK(getsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, &length) == 0 && now.l_linger == 3600);
    close(fd_);
    fd_ = -1;
  }

  int fd_ = -1;
  int other_end_ = -1;
};

// Returns whether peerd answers another trainer at once.
bool Serves(Harness& harness) {
  const auto begin = std::chrono::steady_clock::now();
  RawClient other(harness.path());
  const bool answered = other.Ask(Hello()) == 0;
  return answered && std::chrono::steady_clock::now() - begin < std::chrono::seconds(10);
}

TEST(IpcAttackTest, ADescriptorThatIsSlowToCloseHoldsUpNobody) {
  Harness harness;
  // In a request that is refused.
  SlowToClose first;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  ASSERT_TRUE(first.SendTo(client, Region(2, 1, 4096)));
  EXPECT_EQ(client.Status(), kInvalid);
  EXPECT_TRUE(Serves(harness));
  // In a request where none belongs, which ends the connection.
  SlowToClose second;
  ASSERT_TRUE(second.SendTo(client, Request(LH_IPC_UNREGION, 3)));
  EXPECT_EQ(client.Status(), kPrecondition);
  EXPECT_TRUE(Serves(harness));
  // Behind the request that ends the connection: peerd never reads that far.
  SlowToClose third;
  harness.Run([&](ScriptedHandler&, IpcServer&) {
    RawClient queued(harness.path());
    LH_CHECK(queued.Send(Request(LH_IPC_STEP, 3)));
    LH_CHECK(third.SendTo(queued, Region(2, 1, 4096)));
  });
  EXPECT_TRUE(Serves(harness));
}

TEST(IpcAttackTest, AUserWhoSendsManySuchDescriptorsLosesItsConnectionsUntilTheyAreClosed) {
  Harness harness(ForEverybody());
  std::vector<std::unique_ptr<SlowToClose>> slow;
  for (int i = 0; i < LH_FOREIGN_DESCRIPTORS_MAX + 1; ++i) {
    slow.push_back(std::make_unique<SlowToClose>());
  }
  const bool possible = AsUser(4001, [&] {
    RawClient innocent(harness.path());
    ASSERT_EQ(innocent.Ask(Hello()), 0);
    RawClient client(harness.path());
    ASSERT_EQ(client.Ask(Hello()), 0);
    uint64_t call = 10;
    for (const auto& each : slow) {
      ASSERT_TRUE(each->SendTo(client, Region(++call, 1, 4096)));
      if (each == slow.back()) break;
      EXPECT_EQ(client.Status(), kInvalid);
    }
    while (client.Status() != -1) {
    }
    EXPECT_EQ(innocent.Status(), kUnavailable) << innocent.text();
    EXPECT_TRUE(Has(innocent.text(), "user 4001")) << innocent.text();
    RawClient again(harness.path());
    EXPECT_EQ(again.Status(), kUnavailable);
    EXPECT_TRUE(Has(again.text(), "still closing 9 file descriptors")) << again.text();
  });
  if (!possible) GTEST_SKIP() << "needs the right to act as another user";
  EXPECT_TRUE(Serves(harness)) << "another user";
  slow.clear();
  bool back = false;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!back && std::chrono::steady_clock::now() < deadline) {
    AsUser(4001, [&] {
      RawClient again(harness.path());
      back = again.Send(Hello()) && again.Status() == 0;
    });
  }
  EXPECT_TRUE(back);
}

// ------------------------------------------------------------------------------ numbers

TEST(IpcAttackTest, SilentConnectionsOfOneUserKeepNobodyOut) {
  Harness harness(ForEverybody());
  std::vector<std::unique_ptr<RawClient>> silent;
  const auto connect = [&](int count) {
    for (int i = 0; i < count; ++i) silent.push_back(std::make_unique<RawClient>(harness.path()));
  };
  RawClient early(harness.path());  // of another user, older than all silent ones
  const bool possible = AsUser(4001, [&] {
    for (int round = 0; round < 100; ++round) {
      connect(10);
      RawClient client(harness.path());
      ASSERT_EQ(client.Ask(Hello()), 0) << "one that speaks at once, of the same user";
    }
  });
  if (!possible) GTEST_SKIP() << "needs the right to act as another user";
  EXPECT_EQ(early.Ask(Hello()), 0);
  EXPECT_LE(harness.Stats().clients, uint32_t{LH_CLIENTS_WITHOUT_HELLO_MAX} + 2);
  EXPECT_EQ(silent.front()->Status(), kUnavailable);
  EXPECT_TRUE(Has(silent.front()->text(), "connections without HELLO")) << silent.front()->text();
  EXPECT_GE(harness.Stats().connections_refused, uint64_t{1000 - LH_CLIENTS_WITHOUT_HELLO_MAX});
}

TEST(IpcAttackTest, AUserHoldsNoMoreThanItsShare) {
  IpcServerOptions options = ForEverybody();
  options.user_share = 50;
  options.arena_limit = 100 * 4096;
  Harness harness(options);
  std::vector<std::unique_ptr<RawClient>> clients;
  const bool possible = AsUser(4001, [&] {
    for (int i = 0; i < LH_CLIENTS_MAX / 2; ++i) {
      clients.push_back(std::make_unique<RawClient>(harness.path()));
      ASSERT_EQ(clients.back()->Ask(Hello()), 0);
    }
    RawClient more(harness.path());
    EXPECT_EQ(more.Status(), kUnavailable);
    EXPECT_TRUE(Has(more.text(), "user 4001 may have at most 128 connections (--user-share=50"))
        << more.text();
    EXPECT_EQ(clients[0]->AddRegion(1, 40 * 4096), 0);
    EXPECT_EQ(clients[1]->AddRegion(1, 11 * 4096), kUnavailable);
    EXPECT_TRUE(Has(clients[1]->text(), "user 4001 may have at most 204800 bytes of arena"))
        << clients[1]->text();
    EXPECT_EQ(clients[1]->AddRegion(1, 10 * 4096), 0);
    for (uint64_t i = 0; i < LH_LOCAL_MEMBERS_MAX / 2; ++i) clients[i]->Join();
    lh_ipc_request join = Request(LH_IPC_JOIN, 9);
    strcpy(join.u.join.run, "run");
    EXPECT_EQ(clients[0]->Ask(join), kUnavailable);
    EXPECT_TRUE(Has(clients[0]->text(), "user 4001 may have at most 32 members"))
        << clients[0]->text();
  });
  if (!possible) GTEST_SKIP() << "needs the right to act as another user";
  RawClient other(harness.path());
  ASSERT_EQ(other.Ask(Hello()), 0);
  EXPECT_EQ(other.AddRegion(1, 50 * 4096), 0);
  other.Join();
  EXPECT_EQ(harness.Stats().limits_reached, 3u);
  // What a connection held is free again when the connection has ended.
  clients[0]->Close();
  ASSERT_TRUE(harness.Until([](ScriptedHandler&, IpcServer& server) {
    return server.GetStats().arena_bytes == uint64_t{60} * 4096;
  }));
  EXPECT_EQ(clients[1]->AddRegion(2, 40 * 4096), 0);
}

TEST(IpcAttackTest, RegionsOfAllClientsAreBounded) {
  Harness harness;
  std::vector<std::unique_ptr<RawClient>> clients;
  const int fd = MakeMemfd(4096, F_SEAL_SHRINK);
  for (int i = 0; i < LH_REGIONS_OF_ALL_MAX / LH_REGIONS_MAX; ++i) {
    clients.push_back(std::make_unique<RawClient>(harness.path()));
    ASSERT_EQ(clients.back()->Ask(Hello()), 0);
    for (uint64_t region = 1; region <= LH_REGIONS_MAX; ++region) {
      ASSERT_EQ(clients.back()->Ask(Region(2, region, 4096), {fd}), 0);
    }
  }
  RawClient more(harness.path());
  ASSERT_EQ(more.Ask(Hello()), 0);
  EXPECT_EQ(more.Ask(Region(2, 1, 4096), {fd}), kUnavailable);
  EXPECT_TRUE(Has(more.text(), "arena regions")) << more.text();
  clients.pop_back();
  EXPECT_TRUE(harness.Until([](ScriptedHandler&, IpcServer& server) {
    return server.GetStats().arena_bytes ==
           uint64_t{4096} * (LH_REGIONS_OF_ALL_MAX - LH_REGIONS_MAX);
  }));
  EXPECT_EQ(more.Ask(Region(2, 1, 4096), {fd}), 0);
  close(fd);
}

TEST(IpcAttackTest, TensorsOfRegisteredStatesAreBounded) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  const size_t bytes = LH_STATE_TENSORS_MAX * sizeof(lh_ipc_tensor);
  uint8_t* memory = nullptr;
  ASSERT_EQ(client.AddRegion(1, bytes, &memory), 0);
  auto* const table = reinterpret_cast<lh_ipc_tensor*>(memory);
  for (size_t i = 0; i < LH_STATE_TENSORS_MAX; ++i) {
    snprintf(table[i].name, sizeof table[i].name, "tensor %zu", i);
    table[i].dims = 1;
    table[i].dtype = LH_WIRE_FLOAT32;
  }
  const auto add = [&](uint64_t number, uint32_t count) {
    lh_ipc_request request = Request(LH_IPC_STATE, 100 + number);
    request.u.state.state = number;
    request.u.state.count = count;
    request.u.state.table = {1, 0};
    return client.Ask(request);
  };
  for (uint64_t i = 1; i <= LH_CLIENT_TENSORS_MAX / LH_STATE_TENSORS_MAX; ++i) {
    ASSERT_EQ(add(i, LH_STATE_TENSORS_MAX), 0) << client.text();
  }
  EXPECT_EQ(add(9, 1), kUnavailable);
  EXPECT_TRUE(Has(client.text(), "a connection may have at most 262144 tensors")) << client.text();
  lh_ipc_request unstate = Request(LH_IPC_UNSTATE, 5);
  unstate.u.state.state = 1;
  EXPECT_EQ(client.Ask(unstate), 0);
  EXPECT_EQ(add(9, 1), 0);
  munmap(memory, bytes);
}

TEST(IpcAttackTest, PiecesOfOpsInFlightAreBounded) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_posts = true; });
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  const size_t table_bytes = LH_PIECES_MAX * sizeof(lh_ipc_piece);
  const size_t bytes = table_bytes + size_t{LH_PIECES_MAX} * 4;
  uint8_t* memory = nullptr;
  ASSERT_EQ(client.AddRegion(1, bytes, &memory), 0);
  auto* const pieces = reinterpret_cast<lh_ipc_piece*>(memory);
  for (size_t i = 0; i < LH_PIECES_MAX; ++i) {
    pieces[i].count = 1;
    pieces[i].source = pieces[i].target = {1, table_bytes + 4 * i};
    pieces[i].dtype = LH_WIRE_FLOAT32;
  }
  const uint64_t member = client.Join();
  const auto post = [&](uint64_t call) {
    lh_ipc_request op = Op(call, member, call);
    op.u.op.count = 0;
    op.u.op.source = op.u.op.target = {0, 0};
    op.u.op.pieces = LH_PIECES_MAX;
    op.u.op.list = 1;
    op.u.op.table = {1, 0};
    return client.Send(op);
  };
  const size_t most = LH_CLIENT_PIECES_MAX / LH_PIECES_MAX;
  for (uint64_t i = 0; i < most; ++i) ASSERT_TRUE(post(100 + i));
  ASSERT_TRUE(post(200));
  EXPECT_EQ(client.Status(), kUnavailable) << client.text();
  EXPECT_EQ(client.reply().call, 200u);
  EXPECT_TRUE(Has(client.text(), "pieces of ops in flight")) << client.text();
  harness.Run([&](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.posts.size(), most);
    handler.FinishPost({Code::kAborted, "ended"});
  });
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kAborted));
  ASSERT_TRUE(post(300));
  EXPECT_TRUE(harness.Until(
      [&](ScriptedHandler& handler, IpcServer&) { return handler.posts.size() == most; }));
  munmap(memory, bytes);
}

// To register 65536 tensors takes many milliseconds of the reactor.
TEST(IpcAttackTest, CostlyRequestsOfOneUserLeaveTheReactorTimeForOthers) {
  Harness harness;
  std::vector<std::unique_ptr<RawClient>> clients;
  const size_t bytes = LH_STATE_TENSORS_MAX * sizeof(lh_ipc_tensor);
  for (int i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<RawClient>(harness.path()));
    ASSERT_EQ(clients.back()->Ask(Hello()), 0);
    uint8_t* memory = nullptr;
    ASSERT_EQ(clients.back()->AddRegion(1, bytes, &memory), 0);
    auto* const table = reinterpret_cast<lh_ipc_tensor*>(memory);
    for (size_t t = 0; t < LH_STATE_TENSORS_MAX; ++t) {
      snprintf(table[t].name, sizeof table[t].name, "tensor %zu", t);
      table[t].dims = 1;
      table[t].dtype = LH_WIRE_FLOAT32;
    }
    munmap(memory, bytes);
  }
  RawClient other(harness.path());
  const uint64_t member = other.Attach();
  for (const auto& client : clients) {
    lh_ipc_request request = Request(LH_IPC_STATE, 100);
    request.u.state.state = 1;
    request.u.state.count = LH_STATE_TENSORS_MAX;
    request.u.state.table = {1, 0};
    ASSERT_TRUE(client->Send(request));
  }
  // All eight are sent. Without pauses the reactor would carry them out in one turn, and then
  // answer the other trainer.
  int rounds = 0;
  uint64_t states = 0;
  while (states < clients.size()) {
    ASSERT_EQ(other.Ask(Request(LH_IPC_STEP, uint64_t{1000} + rounds, member)), 0);
    ++rounds;
    harness.Run([&](ScriptedHandler&, IpcServer& server) { states = server.GetStats().states; });
  }
  EXPECT_GT(rounds, 20);
  for (const auto& client : clients) EXPECT_EQ(client->Status(), 0) << client->text();
}

// ------------------------------------------------------------------------------ users

TEST(IpcAttackTest, AUserWhoIsNotAllowedIsToldSoAndCounted) {
  IpcServerOptions options = ForEverybody();
  options.allow_users = {"4002"};
  options.allow_groups = {"4003"};
  Harness harness(options);
  const bool possible = AsUser(4001, [&] {
    RawClient client(harness.path());
    EXPECT_EQ(client.Status(), kPrecondition);
    EXPECT_EQ(client.reply().type, uint32_t{LH_IPC_GONE});
    EXPECT_TRUE(Has(client.text(), "user 4001, process " + std::to_string(getpid()) +
                                       ", may not use this peerd; it admits root, users"))
        << client.text();
    EXPECT_EQ(client.Status(), -1);
  });
  if (!possible) GTEST_SKIP() << "needs the right to act as another user";
  for (const uid_t uid : {4002u, 4003u}) {
    AsUser(uid, [&] {
      RawClient client(harness.path());
      EXPECT_EQ(client.Ask(Hello()), 0);
    });
  }
  EXPECT_EQ(harness.Stats().users_refused, 1u);
  EXPECT_EQ(harness.Stats().connections_refused, 1u);
}

}  // namespace
}  // namespace longhaul::peerd
