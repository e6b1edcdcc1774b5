#include "peerd/ipc/ipc_server.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "proto/wire/ipc.h"
#include "tests/support/ipc_harness.h"
#include "tests/support/raw_trainer.h"

namespace longhaul::peerd {
namespace {

TEST(IpcServerTest, AnswersHelloJoinStepMembersAndLeave) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    for (uint64_t i = 0; i < 30; ++i) handler.members.push_back(MemberId(500 + i));
    handler.step_members = {MemberId(7)};
  });
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  EXPECT_NE(member, 0u);
  EXPECT_EQ(client.reply().world.member_id, 100 + member);
  EXPECT_EQ(client.reply().world.size, 2u);
  EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 4, member)), 0);
  EXPECT_EQ(client.reply().call, 4u);
  EXPECT_EQ(client.reply().world.epoch, 1u);
  lh_ipc_request members = Request(LH_IPC_MEMBERS, 5, member);
  members.u.members.first = 28;
  EXPECT_EQ(client.Ask(members), 0);
  EXPECT_EQ(client.reply().u.members.count, 2u);
  EXPECT_EQ(client.reply().u.members.member_ids[1], 529u);
  members.u.members.first = UINT32_MAX;
  EXPECT_EQ(client.Ask(members), 0);
  EXPECT_EQ(client.reply().u.members.count, 0u);
  members.u.members = {0, 1};
  EXPECT_EQ(client.Ask(members), 0);
  EXPECT_EQ(client.reply().u.members.count, 1u);
  EXPECT_EQ(client.reply().u.members.member_ids[0], 7u);
  EXPECT_EQ(client.Ask(Request(LH_IPC_LEAVE, 6, member)), 0);
  EXPECT_EQ(harness.Events(), (std::vector<std::string>{"join 1 run/0 raw", "step 1", "leave 1"}));
  EXPECT_EQ(harness.Stats().members, 0u);
  EXPECT_EQ(harness.Stats().requests_refused, 0u);
}

TEST(IpcServerTest, CarriesAnOpInSharedMemory) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  const int fd = MakeMemfd(kRegionBytes, F_SEAL_SHRINK);
  auto* const data =
      static_cast<float*>(mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  for (int i = 0; i < 4; ++i) data[i] = static_cast<float>(i + 1);
  lh_ipc_request region = Request(LH_IPC_REGION, 2);
  region.u.region = {1, kRegionBytes, 0, 0};
  ASSERT_EQ(client.Ask(region, {fd}), 0);
  close(fd);
  const uint64_t member = client.Join();
  ASSERT_EQ(client.Ask(Op(4, member, 7)), 0);
  EXPECT_EQ(data[16], 2.0f);
  EXPECT_EQ(data[19], 8.0f);
  EXPECT_EQ(client.reply().u.op.size, 2u);
  EXPECT_EQ(client.reply().u.op.retries, 1u);
  EXPECT_EQ(client.reply().u.op.bytes_sent, 16u);
  EXPECT_EQ(client.reply().u.op.seconds_total_ns, 3000000u);
  munmap(data, kRegionBytes);
}

// ------------------------------------------------------------------- queues in shared memory

// A ring that polls for so long does not sleep during a test.
constexpr uint32_t kForever = 3600U * 1000 * 1000;
// What Attach() sends and reads over the socket.
constexpr uint64_t kAttachFrames = 3;

lh_ipc_request JoinOf(uint64_t call, const char* run) {
  lh_ipc_request join = Request(LH_IPC_JOIN, call);
  strcpy(join.u.join.run, run);
  return join;
}

TEST(IpcServerTest, AWishThatCannotBeIsRefusedWithTheNameOfTheField) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  uint64_t call = 10;
  const auto refusal = [&](auto spoil) {
    lh_ipc_request join = JoinOf(++call, "run");
    spoil(join.u.join);
    EXPECT_EQ(client.Ask(join), static_cast<int>(Code::kInvalidArgument));
    return std::string(client.reply().u.text);
  };
  EXPECT_EQ(refusal([](lh_ipc_join& join) { join.background = 2; }),
            "join refused: background is 2, not 0 or 1");
  EXPECT_EQ(refusal([](lh_ipc_join& join) { join.step_deadline_ms = UINT32_MAX; }),
            "join refused: step_deadline_ms is 4294967295, not at most 86400000");
  EXPECT_EQ(refusal([](lh_ipc_join& join) { join.members = LH_MEMBERS_MAX + 1; }),
            "join refused: members is 1025, not at most 1024");
  EXPECT_EQ(refusal([](lh_ipc_join& join) { join.cohort_size = 2; }),
            "join refused: cohort_size is 2, not 0, as there is no cohort");
  EXPECT_EQ(refusal([](lh_ipc_join& join) { strcpy(join.cohort, "host"); }),
            "join refused: cohort_size is 0, not 1 to 64");
  EXPECT_EQ(refusal([](lh_ipc_join& join) {
              strcpy(join.cohort, "a/b");
              join.cohort_size = 2;
            }),
            "join refused: cohort is \"a/b\", not 0 to 64 bytes of [A-Za-z0-9._-]");
  EXPECT_NE(refusal([](lh_ipc_join& join) { memset(join.cohort, 'a', sizeof join.cohort); }), "");
  EXPECT_TRUE(harness.Events().empty());
  EXPECT_NE(client.Join(), 0u) << "the connection is as it was";
}

TEST(IpcServerTest, RequestsAndRepliesTakeTheQueuesWhileBothSidesAreAwake) {
  Harness harness({}, kForever);
  RawQueues queues;
  RawClient client(harness.path());
  const uint64_t member = client.Attach(&queues);
  lh_ipc_queue_wake(&queues->replies, 1);
  ASSERT_TRUE(queues.UntilAwake());
  constexpr uint32_t kSteps = 5 * LH_IPC_QUEUE_ENTRIES;
  for (uint64_t call = 100; call < 100 + kSteps; ++call) {
    ASSERT_TRUE(queues.Put(Request(LH_IPC_STEP, call, member), kAttachFrames));
    ASSERT_EQ(client.NextCall(), call);
    EXPECT_EQ(client.reply().status, 0);
  }
  EXPECT_EQ(queues.taken(), kSteps);
}

TEST(IpcServerTest, RequestsKeepTheirOrderWhicheverWayTheyTake) {
  Harness harness({}, kForever);
  RawQueues queues;
  RawClient client(harness.path());
  client.Attach(&queues);
  ASSERT_TRUE(queues.UntilAwake());
  harness.Run([&](ScriptedHandler&, IpcServer&) {
    queues.Put(JoinOf(10, "a"), kAttachFrames);
    ASSERT_TRUE(client.Send(JoinOf(11, "b")));
    queues.Put(JoinOf(12, "c"), kAttachFrames + 1);
    queues.Put(JoinOf(13, "d"), kAttachFrames + 1);
    ASSERT_TRUE(client.Send(JoinOf(14, "e")));
    // Comes behind a request that is sent later.
    queues.Put(JoinOf(16, "g"), kAttachFrames + 3);
  });
  for (uint64_t call = 10; call < 15; ++call) EXPECT_EQ(client.NextCall(), call);
  ASSERT_TRUE(client.Send(JoinOf(15, "f")));
  EXPECT_EQ(client.NextCall(), 15u);
  EXPECT_EQ(client.NextCall(), 16u);
  std::string runs;
  for (const std::string& event : harness.Events()) runs += event.substr(event.find('/') - 1, 1);
  EXPECT_EQ(runs, "nabcdefg");
}

TEST(IpcServerTest, APeerdThatSleepsIsToldToLook) {
  Harness harness;
  RawQueues queues;
  RawClient client(harness.path());
  const uint64_t member = client.Attach(&queues);
  EXPECT_FALSE(queues.Put(Request(LH_IPC_STEP, 10, member), kAttachFrames));
  lh_ipc_request look = Request(LH_IPC_LOOK, 0);
  ASSERT_TRUE(client.Send(look));
  EXPECT_EQ(client.NextCall(), 10u);
  // While a request of the socket is on its way, peerd is about to look.
  harness.Run([&](ScriptedHandler&, IpcServer&) {
    ASSERT_TRUE(client.Send(Request(LH_IPC_STEP, 11, member)));
    EXPECT_TRUE(queues.Put(Request(LH_IPC_MEMBERS, 12, member), kAttachFrames + 2));
  });
  EXPECT_EQ(client.NextCall(), 11u);
  EXPECT_EQ(client.NextCall(), 12u);
}

TEST(IpcServerTest, RepliesThatFindNoRoomInTheQueueKeepTheirOrder) {
  Harness harness({}, kForever);
  RawQueues queues;
  RawClient client(harness.path());
  const uint64_t member = client.Attach(&queues);
  lh_ipc_queue_wake(&queues->replies, 1);
  constexpr uint64_t kCalls = 3 * LH_IPC_QUEUE_ENTRIES;
  for (uint64_t call = 100; call < 100 + kCalls; ++call) {
    ASSERT_TRUE(client.Send(Request(LH_IPC_STEP, call, member)));
  }
  ASSERT_TRUE(harness.Until(
      [](ScriptedHandler& handler, IpcServer&) { return handler.events.size() == 1 + kCalls; }));
  harness.Run([](ScriptedHandler&, IpcServer&) {});  // the last replies are on their way, too
  for (uint64_t call = 100; call < 100 + kCalls; ++call) ASSERT_EQ(client.NextCall(), call);
  EXPECT_EQ(queues.taken(), LH_IPC_QUEUE_ENTRIES);
}

// Otherwise a trainer that leaves and exits at once would count as dead.
TEST(IpcServerTest, RequestsInTheQueueCountAlsoIfTheConnectionEndsAtOnce) {
  Harness harness({}, kForever);
  RawQueues queues;
  RawClient client(harness.path());
  const uint64_t member = client.Attach(&queues);
  ASSERT_TRUE(queues.UntilAwake());
  harness.Run([&](ScriptedHandler&, IpcServer&) {
    queues.Put(Request(LH_IPC_STEP, 9, member), kAttachFrames);
    queues.Put(Request(LH_IPC_LEAVE, 10, member), kAttachFrames);
    client.Close();
  });
  ASSERT_TRUE(harness.Until(
      [](ScriptedHandler&, IpcServer& server) { return server.GetStats().clients == 0; }));
  EXPECT_EQ(harness.Events(), (std::vector<std::string>{"join 1 run/0 raw", "step 1", "leave 1"}));
}

TEST(IpcServerTest, MemoryThatCannotHoldTheQueuesIsNotUsed) {
  Harness harness;
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  RawQueues may_shrink(F_SEAL_GROW);
  RawQueues may_grow(F_SEAL_SHRINK);
  const int small = MakeMemfd(sizeof(lh_ipc_shared) - 1, kSeals);
  const int large = MakeMemfd(sizeof(lh_ipc_shared) + 1, kSeals);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  uint64_t refused = 0;
  for (const int fd : {may_shrink.fd(), may_grow.fd(), small, large, pipes[0]}) {
    RawClient client(harness.path());
    ASSERT_EQ(client.Ask(Hello(), {fd}), 0);
    EXPECT_EQ(client.reply().flags, 0u);
    EXPECT_EQ(harness.Stats().requests_refused, ++refused);
    EXPECT_EQ(client.AddRegion(1, kRegionBytes), 0);
    client.Join();
  }
  for (const int fd : {small, large, pipes[0], pipes[1]}) close(fd);
}

// ------------------------------------------------------------------------------------------

TEST(IpcServerTest, TakesARequestInParts) {
  Harness harness;
  RawClient client(harness.path());
  const lh_ipc_request hello = Hello();
  for (size_t i = 0; i < sizeof hello; ++i) {
    ASSERT_TRUE(client.SendBytes(reinterpret_cast<const char*>(&hello) + i, 1));
  }
  EXPECT_EQ(client.Status(), 0);
}

// A request of another version may be shorter. Then no more bytes follow.
TEST(IpcServerTest, AnotherVersionIsRefusedBeforeItsHelloIsWhole) {
  Harness harness;
  RawClient client(harness.path());
  lh_ipc_request hello = Hello();
  hello.u.hello.version = LH_IPC_VERSION - 1;
  ASSERT_TRUE(client.SendBytes(&hello, 128));
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kFailedPrecondition));
  EXPECT_NE(client.text().find("install matching releases"), std::string::npos) << client.text();
  EXPECT_EQ(client.Status(), -1);
}

TEST(IpcServerTest, WhatIsAgainstTheProtocolEndsTheConnectionAndIsCounted) {
  Harness harness;
  const std::vector<std::function<void(lh_ipc_request*)>> before_hello = {
      [](lh_ipc_request* r) { memset(r, 0xff, sizeof *r); },
      [](lh_ipc_request* r) { memset(r, 0, sizeof *r); },
      [](lh_ipc_request* r) { r->type = 9999; },
      [](lh_ipc_request* r) { r->u.hello.version = LH_IPC_VERSION + 1; },
      [](lh_ipc_request* r) { r->call = 0; },
      [](lh_ipc_request* r) { r->u.hello.name[3] = '\n'; },
      [](lh_ipc_request* r) { memset(r->u.hello.name, 'a', sizeof r->u.hello.name); },
      [](lh_ipc_request* r) { r->type = LH_IPC_STEP; },
  };
  uint64_t refused = 0;
  for (const auto& spoil : before_hello) {
    RawClient client(harness.path());
    lh_ipc_request request = Hello();
    spoil(&request);
    EXPECT_EQ(client.Ask(request), static_cast<int>(Code::kFailedPrecondition));
    EXPECT_EQ(client.reply().type, uint32_t{LH_IPC_GONE});
    EXPECT_EQ(client.reply().member, 0u);
    EXPECT_NE(client.text(), "");
    EXPECT_EQ(client.Status(), -1);
    EXPECT_EQ(harness.Stats().connections_refused, ++refused);
  }
  const std::vector<std::function<void(lh_ipc_request*)>> after_hello = {
      [](lh_ipc_request* r) { *r = Hello(9); },
      [](lh_ipc_request* r) { r->magic = 7; },
      [](lh_ipc_request* r) { r->u.bytes[50] = 1; },
      [](lh_ipc_request* r) { r->member = 0; },
      [](lh_ipc_request* r) { r->u.sync.revision = 1; },
      [](lh_ipc_request* r) { r->u.sync.state = 1; },
      [](lh_ipc_request* r) { *r = Request(LH_IPC_REGION, 9), r->u.region.region = 5; },
  };
  uint64_t cut = 0;
  for (const auto& spoil : after_hello) {
    RawClient client(harness.path());
    const uint64_t member = client.Attach();
    lh_ipc_request request = Request(LH_IPC_STEP, 9, member);
    spoil(&request);
    EXPECT_EQ(client.Ask(request), static_cast<int>(Code::kFailedPrecondition));
    EXPECT_EQ(client.Status(), -1);
    EXPECT_EQ(harness.Stats().connections_cut, ++cut);
  }
  EXPECT_TRUE(harness.Until([](ScriptedHandler&, IpcServer& server) {
    return server.GetStats().clients == 0 && server.GetStats().members == 0;
  }));
  RawClient client(harness.path());
  EXPECT_EQ(client.Ask(Hello()), 0);
}

TEST(IpcServerTest, ARequestThatIsCutOffIsCounted) {
  Harness harness;
  {
    RawClient client(harness.path());
    const lh_ipc_request hello = Hello();
    client.SendBytes(&hello, 100);
  }
  EXPECT_TRUE(harness.Until(
      [](ScriptedHandler&, IpcServer& s) { return s.GetStats().connections_refused == 1; }));
}

TEST(IpcServerTest, ACallInUseEndsTheConnection) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_steps = true; });
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  client.Send(Request(LH_IPC_STEP, 9, member));
  EXPECT_EQ(client.Ask(Request(LH_IPC_LEAVE, 9, member)),
            static_cast<int>(Code::kFailedPrecondition));
  EXPECT_EQ(client.Status(), -1);
}

TEST(IpcServerTest, RegionsAreSealedMemfdsOfTheirSize) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  const int invalid = static_cast<int>(Code::kInvalidArgument);
  const auto offer = [&client](int fd, uint64_t bytes) {
    lh_ipc_request request = Request(LH_IPC_REGION, 2);
    request.u.region = {1, bytes, 0, 0};
    const int status = client.Ask(request, {fd});
    close(fd);
    return status;
  };
  EXPECT_EQ(offer(MakeMemfd(4096, 0), 4096), invalid);
  EXPECT_NE(client.text().find("sealed"), std::string::npos) << client.text();
  EXPECT_EQ(offer(MakeMemfd(4096, F_SEAL_GROW), 4096), invalid);
  EXPECT_EQ(offer(MakeMemfd(4096, F_SEAL_SHRINK), 8192), invalid);
  EXPECT_EQ(offer(MakeMemfd(4096, F_SEAL_SHRINK), 0), invalid);
  EXPECT_EQ(offer(MakeMemfd(4096, F_SEAL_SHRINK), LH_REGION_BYTES_MAX + 1), invalid);
  EXPECT_EQ(offer(MakeMemfd(4096, F_SEAL_SHRINK | F_SEAL_WRITE), 4096),
            static_cast<int>(Code::kUnavailable));
  EXPECT_EQ(offer(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), 4096), invalid);
  EXPECT_EQ(offer(socket(AF_UNIX, SOCK_STREAM, 0), 4096), invalid);
  EXPECT_EQ(harness.Stats().arena_bytes, 0u);
  EXPECT_EQ(offer(MakeMemfd(4096, F_SEAL_SHRINK), 4096), 0);
  EXPECT_EQ(offer(MakeMemfd(4096, F_SEAL_SHRINK), 4096), invalid);  // number taken
  EXPECT_EQ(harness.Stats().arena_bytes, 4096u);
}

TEST(IpcServerTest, RequestsThatComeTogetherKeepTheirOrderAndTheirDescriptors) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  // While the server's thread is held here, all requests come.
  constexpr uint64_t kRegions = 50;
  harness.Run([&client](ScriptedHandler&, IpcServer&) {
    for (uint64_t i = 1; i <= kRegions; ++i) {
      lh_ipc_request region = Request(LH_IPC_REGION, 100 + i);
      region.u.region = {i, i * 4096, 0, 0};
      const int fd = MakeMemfd(i * 4096, F_SEAL_SHRINK);
      ASSERT_TRUE(client.Send(region, {fd}));
      close(fd);
      // Without a descriptor, and refused: there is no such region.
      lh_ipc_request unregion = Request(LH_IPC_UNREGION, 1000 + i);
      unregion.u.region.region = i + 1;
      ASSERT_TRUE(client.Send(unregion));
    }
  });
  for (uint64_t i = 1; i <= kRegions; ++i) {
    EXPECT_EQ(client.Status(), 0) << client.text();
    EXPECT_EQ(client.Status(), static_cast<int>(Code::kInvalidArgument));
  }
  EXPECT_EQ(harness.Stats().arena_bytes, 4096 * kRegions * (kRegions + 1) / 2);
}

TEST(IpcServerTest, TheArenaLimitCountsAllClients) {
  IpcServerOptions options;
  options.arena_limit = uint64_t{3} * 4096;
  Harness harness(options);
  RawClient first(harness.path());
  RawClient second(harness.path());
  ASSERT_EQ(first.Ask(Hello()), 0);
  ASSERT_EQ(second.Ask(Hello()), 0);
  EXPECT_EQ(first.AddRegion(1, 8192), 0);
  EXPECT_EQ(second.AddRegion(1, 8192), static_cast<int>(Code::kUnavailable));
  EXPECT_NE(second.text().find("arena limit"), std::string::npos) << second.text();
  EXPECT_EQ(second.AddRegion(1, 4096), 0);
  first.Close();
  EXPECT_TRUE(harness.Until(
      [](ScriptedHandler&, IpcServer& s) { return s.GetStats().arena_bytes == 4096; }));
  EXPECT_EQ(second.AddRegion(2, 8192), 0);
}

TEST(IpcServerTest, AClientHasABoundedNumberOfRegions) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  for (uint64_t i = 1; i <= LH_REGIONS_MAX; ++i) ASSERT_EQ(client.AddRegion(i, 4096), 0);
  EXPECT_EQ(client.AddRegion(LH_REGIONS_MAX + 1, 4096), static_cast<int>(Code::kUnavailable));
}

TEST(IpcServerTest, ARegionInUseStays) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_posts = true; });
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  ASSERT_TRUE(client.Send(Op(10, member, 1)));
  lh_ipc_request unregion = Request(LH_IPC_UNREGION, 11);
  unregion.u.region.region = 1;
  EXPECT_EQ(client.Ask(unregion), static_cast<int>(Code::kFailedPrecondition));
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  EXPECT_EQ(client.Status(), 0);
  EXPECT_EQ(client.Ask(unregion), 0);
  EXPECT_EQ(client.Ask(unregion), static_cast<int>(Code::kInvalidArgument));
  EXPECT_TRUE(harness.Until([](ScriptedHandler& handler, IpcServer& server) {
    return handler.bytes_removed == kRegionBytes && server.GetStats().arena_bytes == 0;
  }));
}

TEST(IpcServerTest, MemoryOutlivesATrainerThatDiesWithAnOpInFlight) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_posts = true; });
  {
    RawClient client(harness.path());
    const uint64_t member = client.Attach();
    client.Send(Op(10, member, 1));
    ASSERT_TRUE(harness.Until(
        [](ScriptedHandler& handler, IpcServer&) { return handler.posts.size() == 1; }));
  }
  ASSERT_TRUE(harness.Until([](ScriptedHandler& handler, IpcServer&) {
    return handler.events.back() == "gone 1 trainer closed its connection";
  }));
  harness.Run([](ScriptedHandler& handler, IpcServer& server) {
    EXPECT_EQ(server.GetStats().arena_bytes, kRegionBytes);
    EXPECT_EQ(server.GetStats().posts_open, 0u);
    EXPECT_EQ(handler.bytes_removed, 0u);
    handler.FinishPost();  // writes to the memory; nobody gets the answer
    EXPECT_EQ(handler.bytes_removed, 0u) << "not inside the call that releases";
  });
  EXPECT_TRUE(harness.Until([](ScriptedHandler& handler, IpcServer& server) {
    return handler.bytes_removed == kRegionBytes && server.GetStats().arena_bytes == 0;
  }));
}

TEST(IpcServerTest, OpsAreCheckedAgainstTheirRegions) {
  Harness harness;
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  const int invalid = static_cast<int>(Code::kInvalidArgument);
  lh_ipc_request op = Op(10, member, 1);
  op.u.op.source.region = 2;
  EXPECT_EQ(client.Ask(op), invalid);
  op = Op(10, member, 1);
  op.u.op.target.offset = kRegionBytes - 12;
  EXPECT_EQ(client.Ask(op), invalid);
  op.u.op.target.offset = UINT64_MAX - 3;
  EXPECT_EQ(client.Ask(op), invalid);
  op = Op(10, member, 1);
  op.u.op.count = LH_COUNT_MAX;
  EXPECT_EQ(client.Ask(op), invalid);
  op = Op(10, member, 1);
  op.u.op.dtype = 77;
  EXPECT_EQ(client.Ask(op), invalid);
  EXPECT_EQ(harness.Stats().requests_refused, 5u);
  EXPECT_EQ(client.Ask(Op(10, member, 1)), 0);
  // The other participants are told of each call that names an op.
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    ASSERT_EQ(handler.refusals.size(), 5u);
    for (const LocalRefusal& refusal : handler.refusals) {
      EXPECT_EQ(refusal.op.tag, 1u);
      EXPECT_EQ(refusal.op.desc.kind, OpKind::kAllReduce);
      EXPECT_FALSE(refusal.why.empty());
    }
    handler.refusals.clear();
  });
  op = Op(11, member, 2);
  op.u.op.kind = 77;
  EXPECT_EQ(client.Ask(op), invalid);
  harness.Run([](ScriptedHandler& handler, IpcServer&) { EXPECT_TRUE(handler.refusals.empty()); });
}

TEST(IpcServerTest, AMemberIsAskedForInOrder) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    handler.hold_joins = handler.hold_steps = handler.hold_leaves = true;
  });
  const int failed = static_cast<int>(Code::kFailedPrecondition);
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  ASSERT_EQ(client.AddRegion(1, kRegionBytes), 0);
  lh_ipc_request join = Request(LH_IPC_JOIN, 3);
  strcpy(join.u.join.run, "run");
  client.Send(join);
  EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 4, 77)), failed);  // no such member
  EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 4, 1)), failed);   // not admitted
  EXPECT_EQ(client.Ask(Op(4, 1, 1)), failed);
  harness.Run([](ScriptedHandler& handler, IpcServer& server) {
    server.JoinDone(LocalId(1), {}, handler.WorldOf(LocalId(1)), /*newcomer=*/false);
  });
  EXPECT_EQ(client.Status(), 0);
  client.Send(Request(LH_IPC_STEP, 5, 1));
  EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 6, 1)), failed);  // at a boundary
  client.Send(Request(LH_IPC_LEAVE, 7, 1));
  EXPECT_EQ(client.Ask(Request(LH_IPC_LEAVE, 8, 1)), failed);  // leaving
  EXPECT_EQ(client.Ask(Op(9, 1, 1)), failed);
  harness.Run([](ScriptedHandler&, IpcServer& server) {
    server.LeaveDone(LocalId(1), {});
    server.StepDone(LocalId(1), {}, {});  // for a member that has ended
  });
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kAborted));  // the step
  EXPECT_EQ(client.Status(), 0);                                 // the leave
  EXPECT_EQ(harness.Events(), (std::vector<std::string>{"join 1 run/0 raw", "step 1", "leave 1"}));
}

TEST(IpcServerTest, AJoinIsWithdrawnByItsCall) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_joins = true; });
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  lh_ipc_request join = Request(LH_IPC_JOIN, 3);
  strcpy(join.u.join.run, "run");
  client.Send(join);
  lh_ipc_request leave = Request(LH_IPC_LEAVE, 4);
  leave.u.leave.join = 3;
  EXPECT_EQ(client.Ask(leave), static_cast<int>(Code::kAborted));  // the join
  EXPECT_EQ(client.reply().call, 3u);
  EXPECT_EQ(client.Status(), 0);
  EXPECT_EQ(client.reply().call, 4u);
  EXPECT_EQ(harness.Stats().members, 0u);
}

TEST(IpcServerTest, LocalMembersAreBounded) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  for (uint64_t i = 0; i < LH_LOCAL_MEMBERS_MAX; ++i) client.Join(10 + i);
  lh_ipc_request join = Request(LH_IPC_JOIN, 3);
  strcpy(join.u.join.run, "run");
  EXPECT_EQ(client.Ask(join), static_cast<int>(Code::kUnavailable));
}

TEST(IpcServerTest, AMemberThatIsGoneIsToldWithItsOpenRequests) {
  Harness harness;
  harness.Run(
      [](ScriptedHandler& handler, IpcServer&) { handler.hold_steps = handler.hold_posts = true; });
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  client.Send(Op(9, member, 1));
  client.Send(Request(LH_IPC_STEP, 10, member));
  ASSERT_TRUE(harness.Until(
      [](ScriptedHandler& handler, IpcServer&) { return handler.events.size() == 2; }));
  harness.Run([member](ScriptedHandler&, IpcServer& server) {
    server.MemberGone(LocalId(member), {Code::kEvicted, "evicted by an operator"});
  });
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(client.reply().type, uint32_t{LH_IPC_GONE});
  EXPECT_EQ(client.reply().member, member);
  EXPECT_EQ(client.text(), "evicted by an operator");
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(harness.Stats().posts_open, 0u);
  // A request that was sent before GONE was read gets the reason for which the member ended.
  EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 11, member)), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(client.text(), "evicted by an operator");
}

TEST(IpcServerTest, WorldsAreCoalescedForAClientThatDoesNotRead) {
  Harness harness;
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  constexpr uint64_t kWorlds = 50000;
  harness.Run([member](ScriptedHandler& handler, IpcServer& server) {
    for (uint64_t i = 2; i <= kWorlds; ++i) {
      handler.epoch = i;
      server.WorldChanged(LocalId(member), handler.WorldOf(LocalId(member)));
    }
    handler.epoch = kWorlds + 1;
  });
  // The world in the answer to a step comes after the older ones.
  ASSERT_TRUE(client.Send(Request(LH_IPC_STEP, 20, member)));
  int frames = 0;
  uint64_t epoch = 0;
  do {
    ASSERT_EQ(client.Status(), 0);
    ++frames;
    EXPECT_GT(client.reply().world.epoch, epoch);
    epoch = client.reply().world.epoch;
  } while (client.reply().type == LH_IPC_WORLD);
  EXPECT_EQ(epoch, kWorlds + 1);
  EXPECT_LE(frames, 4);
}

TEST(IpcServerTest, AClientThatDoesNotReadIsCutAtTheBoundAndOthersAreServed) {
  Harness harness;
  RawClient client(harness.path());
  const uint64_t member = client.Attach();
  RawClient other(harness.path());
  const uint64_t others_member = other.Attach();
  lh_ipc_request op = Op(10, member, 1);
  op.u.op.count = 0;  // so the op is refused, with an answer
  int sent = 0;
  while (sent < 100000 && client.Send(op)) {
    if (++sent % 1000 != 0) continue;
    EXPECT_EQ(other.Ask(Request(LH_IPC_STEP, 100 + sent, others_member)), 0) << sent;
  }
  EXPECT_GT(sent, 2 * LH_OPS_OPEN_MAX);
  EXPECT_LT(sent, 100000);
  EXPECT_TRUE(harness.Until([](ScriptedHandler& handler, IpcServer& server) {
    return handler.events.back() == "gone 1 trainer does not read its replies" &&
           server.GetStats().connections_cut == 1 && server.GetStats().clients == 1;
  }));
  EXPECT_EQ(other.Ask(Request(LH_IPC_STEP, 99, others_member)), 0);
}

TEST(IpcServerTest, ClientsBeyondTheLimitAreToldSo) {
  Harness harness;
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < LH_CLIENTS_MAX; ++i) {
    clients.push_back(std::make_unique<RawClient>(harness.path()));
    ASSERT_EQ(clients.back()->Ask(Hello()), 0);
  }
  RawClient more(harness.path());
  EXPECT_EQ(more.Status(), static_cast<int>(Code::kUnavailable));
  EXPECT_EQ(more.reply().type, uint32_t{LH_IPC_GONE});
  EXPECT_EQ(more.Status(), -1);
  clients.pop_back();
  EXPECT_TRUE(harness.Until([](ScriptedHandler&, IpcServer& server) {
    return server.GetStats().clients == LH_CLIENTS_MAX - 1;
  }));
  RawClient again(harness.path());
  EXPECT_EQ(again.Ask(Hello()), 0);
}

TEST(IpcServerTest, AConnectionThatSaysNothingIsClosed) {
  IpcServerOptions options;
  options.hello_timeout_ms = 1;
  Harness harness(options);
  RawClient client(harness.path());
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kDeadlineExceeded));
  EXPECT_EQ(client.Status(), -1);
}

TEST(IpcServerTest, LinesAboutClientsAreBounded) {
  Harness harness;
  std::atomic<int> lines{0};
  SetLogSink([&lines](std::string_view line) {
    lines += line.find("trainer attached") != std::string_view::npos;
  });
  constexpr int kClients = 500;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kClients; ++i) {
    RawClient client(harness.path());
    EXPECT_EQ(client.Ask(Hello()), 0);
  }
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - begin)
          .count();
  EXPECT_GE(lines, 2);
  EXPECT_LE(lines, 2 * LH_LOCAL_MEMBERS_MAX + seconds + 1);
  SetLogSink([](std::string_view) {});
}

TEST(IpcServerTest, LosesNoDescriptors) {
  Harness harness;
  const int fd = MakeMemfd(4096, F_SEAL_SHRINK);
  const int before = OpenDescriptors();
  for (int round = 0; round < 10; ++round) {
    RawClient client(harness.path());
    client.Attach();
    EXPECT_EQ(client.AddRegion(2, 4096), 0);
    lh_ipc_request region = Request(LH_IPC_REGION, 50);
    region.u.region = {3, 8192, 0, 0};
    EXPECT_EQ(client.Ask(region, {fd}), static_cast<int>(Code::kInvalidArgument));
    region.u.region = {3, 4096, 0, 0};
    // Two descriptors where one belongs; more than one read takes; three where none belongs.
    const int ends = static_cast<int>(Code::kFailedPrecondition);
    if (round % 3 == 0) {
      EXPECT_EQ(client.Ask(region, {fd, fd}), ends);
    } else if (round % 3 == 1) {
      EXPECT_EQ(client.Ask(region, {fd, fd, fd, fd, fd, fd, fd, fd, fd, fd}), ends);
    } else {
      EXPECT_EQ(client.Ask(Request(LH_IPC_STEP, 9, 1), {fd, fd, fd}), ends);
    }
    EXPECT_EQ(client.Status(), -1);
  }
  {
    // A client that sends only the first part of a request.
    RawClient client(harness.path());
    const lh_ipc_request hello = Hello();
    ASSERT_TRUE(client.SendBytes(&hello, 64));
  }
  ASSERT_TRUE(harness.Until(
      [](ScriptedHandler&, IpcServer& server) { return server.GetStats().clients == 0; }));
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(harness.Stats().arena_bytes, 0u);
  close(fd);
}

TEST(IpcServerTest, CloseSendsWhatWasAnsweredAndTakesNobodyAnyMore) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_leaves = true; });
  RawClient client(harness.path());
  RawClient idle(harness.path());
  const uint64_t member = client.Attach();
  client.Send(Request(LH_IPC_LEAVE, 9, member));
  ASSERT_TRUE(harness.Until(
      [](ScriptedHandler& handler, IpcServer&) { return handler.events.size() == 2; }));
  harness.Run([member](ScriptedHandler&, IpcServer& server) {
    server.LeaveDone(LocalId(member), {});
    server.Close();
    EXPECT_FALSE(server.closed());
  });
  EXPECT_EQ(client.Status(), 0);
  EXPECT_EQ(client.reply().call, 9u);
  EXPECT_EQ(client.Status(), static_cast<int>(Code::kUnavailable));
  EXPECT_EQ(client.reply().type, uint32_t{LH_IPC_GONE});
  EXPECT_EQ(client.Status(), -1);
  EXPECT_EQ(idle.Status(), static_cast<int>(Code::kUnavailable));
  EXPECT_NE(access(harness.path().c_str(), F_OK), 0);
  EXPECT_TRUE(harness.Until([](ScriptedHandler&, IpcServer& server) { return server.closed(); }));
}

TEST(IpcServerTest, MayGoWithEverythingInFlight) {
  const int before = OpenDescriptors();
  {
    Harness harness;
    harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_posts = true; });
    RawClient client(harness.path());
    const uint64_t member = client.Attach();
    client.Send(Op(9, member, 1));
    ASSERT_TRUE(harness.Until(
        [](ScriptedHandler& handler, IpcServer&) { return handler.posts.size() == 1; }));
    harness.Stop();
    EXPECT_EQ(client.Status(), -1);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

// ------------------------------------------------------------------------------ states

constexpr uint64_t kTableAt = 4096;
constexpr uint64_t kChangedAt = 65536;
constexpr uint64_t kTouchedAt = 65536 + 4096;
constexpr uint64_t kTensorsAt = 131072 + 3;  // not aligned

// A joined trainer with a region 1 that the test can write to. Two tensors: "w" of 100 float32 and
// "m" of 2 x 3 bools, which may be unequal.
struct StateTrainer {
  explicit StateTrainer(Harness& harness) : client(harness.path()) {
    LH_CHECK(client.Ask(Hello()) == 0);
    LH_CHECK(client.AddRegion(1, kRegionBytes, &memory) == 0);
    member = client.Join();
    Write(0, "w", LH_WIRE_FLOAT32, {100}, 400, {1, kTensorsAt});
    Write(1, "m", LH_WIRE_BOOL, {2, 3}, 6, {1, kTensorsAt + 400}, LH_IPC_ALLOW_UNEQUAL);
  }
  ~StateTrainer() { munmap(memory, kRegionBytes); }

  void Write(size_t index, const char* name, uint8_t dtype, std::vector<uint64_t> shape,
             uint64_t bytes, lh_ipc_range data, uint8_t flags = 0) {
    lh_ipc_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    std::string_view(name).copy(tensor.name, sizeof tensor.name - 1);
    tensor.dtype = dtype;
    tensor.dims = static_cast<uint8_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) tensor.shape[i] = shape[i];
    tensor.bytes = bytes;
    tensor.data = data;
    tensor.inbox = data;
    tensor.flags = flags;
    memcpy(memory + kTableAt + index * sizeof tensor, &tensor, sizeof tensor);
  }
  void Inbox(size_t index, lh_ipc_range inbox) {
    memcpy(memory + kTableAt + index * sizeof(lh_ipc_tensor) + offsetof(lh_ipc_tensor, inbox),
           &inbox, sizeof inbox);
  }
  lh_ipc_request State(uint64_t state, uint32_t count = 2) {
    lh_ipc_request request = Request(LH_IPC_STATE, 50);
    request.u.state = {state, {1, kTableAt}, {1, kChangedAt}, count, 0};
    return request;
  }
  int Register(uint64_t state = 7, uint32_t count = 2) { return client.Ask(State(state, count)); }
  int Unregister(uint64_t state = 7) {
    lh_ipc_request request = Request(LH_IPC_UNSTATE, 51);
    request.u.state.state = state;
    return client.Ask(request);
  }
  lh_ipc_request Sync(uint64_t call, uint32_t type = LH_IPC_SYNC, uint64_t state = 7) {
    lh_ipc_request request = Request(type, call, member);
    request.u.sync.state = state;
    request.u.sync.revision = 12;
    request.u.sync.strategy = LH_WIRE_RECEIVE;
    return request;
  }
  bool Says(const std::string& part) { return client.text().find(part) != std::string::npos; }

  RawClient client;
  uint8_t* memory = nullptr;
  uint64_t member = 0;
};

constexpr int kInvalid = static_cast<int>(Code::kInvalidArgument);
constexpr int kPrecondition = static_cast<int>(Code::kFailedPrecondition);

TEST(IpcServerTest, AStateIsHandedOverWithItsMemory) {
  Harness harness;
  StateTrainer trainer(harness);
  trainer.memory[kTensorsAt] = 42;
  trainer.memory[kTensorsAt + 400] = 1;
  ASSERT_EQ(trainer.Register(), 0) << trainer.client.text();
  lh_ipc_request sync = trainer.Sync(60);
  sync.u.sync.touched = {1, kTouchedAt};
  trainer.memory[kTouchedAt + 1] = 1;
  ASSERT_EQ(trainer.client.Ask(sync), 0);
  const lh_ipc_reply& reply = trainer.client.reply();
  EXPECT_EQ(reply.call, 60u);
  EXPECT_EQ(reply.flags, 0u);
  EXPECT_EQ(reply.u.sync.revision, 12u);
  EXPECT_EQ(reply.u.sync.hash_high, 0xau);
  EXPECT_EQ(reply.u.sync.hash_low, 0xbu);
  EXPECT_EQ(reply.u.sync.seconds_ns, 5000000u);
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    ASSERT_EQ(handler.syncs.size(), 1u);
    const StateSync& got = handler.syncs[0];
    EXPECT_EQ(got.strategy, control::SyncStrategy::kReceive);
    EXPECT_EQ(got.revision, 12u);
    EXPECT_EQ(got.touched, (std::vector<uint8_t>{0, 1}));
    const LocalState& state = *got.state;
    EXPECT_EQ(state.manifest, (Manifest{{"w", LH_WIRE_FLOAT32, {100}, 400, false},
                                        {"m", LH_WIRE_BOOL, {2, 3}, 6, true}}));
    EXPECT_EQ(state.Tensor(0)[0], 42);
    EXPECT_EQ(state.Tensor(1)[0], 1);
    ASSERT_EQ(state.changed.size(), 2u);
    state.changed[1] = 1;
  });
  EXPECT_EQ(trainer.memory[kChangedAt], 0);
  EXPECT_EQ(trainer.memory[kChangedAt + 1], 1);
}

TEST(IpcServerTest, AnInboxIsWhereItsTensorIsOrApartFromAllTensors) {
  Harness harness;
  StateTrainer trainer(harness);
  const auto refused = [&](const std::string& reason) {
    EXPECT_EQ(trainer.Register(), kInvalid) << reason;
    EXPECT_TRUE(trainer.Says(reason)) << trainer.client.text();
  };
  trainer.Inbox(0, {9, 0});
  refused("tensor 0 \"w\" has an inbox that lies outside");
  trainer.Inbox(0, {1, kRegionBytes - 399});
  refused("has an inbox that lies outside");
  trainer.Inbox(0, {1, kTensorsAt + 7});
  refused("share memory");
  trainer.Inbox(0, {1, kTensorsAt + 405});
  refused("share memory");
  trainer.Inbox(0, {1, kTensorsAt + 406});
  ASSERT_EQ(trainer.Register(), 0) << trainer.client.text();
  ASSERT_EQ(trainer.client.Ask(trainer.Sync(60)), 0);
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    const LocalState& state = *handler.syncs.back().state;
    EXPECT_EQ(state.inbox[0], state.places[0] + 406);
    EXPECT_EQ(state.inbox[1], state.places[1]);
    handler.syncs.clear();
  });
}

TEST(IpcServerTest, NobodySendsFromARegionOfInboxes) {
  Harness harness;
  RawClient client(harness.path());
  ASSERT_EQ(client.Ask(Hello()), 0);
  lh_ipc_request request = Request(LH_IPC_REGION, 2);
  request.u.region = {1, 8192, LH_IPC_REGION_INBOX, 0};
  const int fd = MakeMemfd(8192, F_SEAL_SHRINK);
  EXPECT_EQ(client.Ask(request, {fd}), 0);
  close(fd);
  harness.Run([](ScriptedHandler& handler, IpcServer&) { EXPECT_EQ(handler.bytes_added, 0U); });
  EXPECT_EQ(harness.Stats().arena_bytes, 8192U);
}

TEST(IpcServerTest, AJoinNamesItsMemberOrTheHelloDid) {
  Harness harness;
  StateTrainer trainer(harness);
  lh_ipc_request join = Request(LH_IPC_JOIN, 61);
  strcpy(join.u.join.run, "run");
  strcpy(join.u.join.name, "other");
  ASSERT_EQ(trainer.client.Ask(join), 0);
  const std::vector<std::string> events = harness.Events();
  ASSERT_GE(events.size(), 2u);
  EXPECT_EQ(events[events.size() - 2], "join 1 run/0 raw");
  EXPECT_EQ(events.back(), "join 2 run/0 other");
}

TEST(IpcServerTest, WhatIsKeptIsToldOfAMemberAndAStateThatAreThere) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  lh_ipc_request kept = Request(LH_IPC_KEPT, 60, trainer.member);
  kept.u.state.state = 7;
  ASSERT_EQ(trainer.client.Ask(kept), 0);
  EXPECT_EQ(trainer.client.reply().u.kept.kept, 0u);
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.kept_revision = 5; });
  ASSERT_EQ(trainer.client.Ask(kept), 0);
  EXPECT_EQ(trainer.client.reply().call, 60u);
  EXPECT_EQ(trainer.client.reply().u.kept.kept, 1u);
  EXPECT_EQ(trainer.client.reply().u.kept.revision, 5u);
  kept.u.state.state = 8;
  EXPECT_EQ(trainer.client.Ask(kept), kInvalid);
  kept.u.state.state = 7;
  kept.member = 99;
  EXPECT_EQ(trainer.client.Ask(kept), kPrecondition);
}

TEST(IpcServerTest, AStateIsPreparedWithoutAMemberAndInUseUntilThen) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  lh_ipc_request prepare = Request(LH_IPC_PREPARE, 60);
  prepare.u.state.state = 8;
  EXPECT_EQ(trainer.client.Ask(prepare), kInvalid);
  prepare.u.state.state = 7;
  ASSERT_EQ(trainer.client.Ask(prepare), 0);
  EXPECT_EQ(trainer.client.reply().call, 60u);
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    ASSERT_EQ(handler.prepared.size(), 1u);
    EXPECT_EQ(handler.prepared[0].size(), 2u);
    handler.hold_prepares = true;
  });
  trainer.client.Send(prepare);
  ASSERT_TRUE(harness.Until(
      [](ScriptedHandler& handler, IpcServer&) { return handler.prepares.size() == 1; }));
  lh_ipc_request again = prepare;
  again.call = 61;
  EXPECT_EQ(trainer.client.Ask(again), kPrecondition);
  lh_ipc_request remove = Request(LH_IPC_UNSTATE, 62);
  remove.u.state.state = 7;
  EXPECT_EQ(trainer.client.Ask(remove), kPrecondition);
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.prepares.at(0)(); });
  EXPECT_EQ(trainer.client.Status(), 0);
  EXPECT_EQ(trainer.client.reply().call, 60u);
  EXPECT_EQ(trainer.client.Ask(remove), 0);
}

TEST(IpcServerTest, ATrainerMayGoWhileItsStateIsPrepared) {
  Harness harness;
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_prepares = true; });
  {
    StateTrainer trainer(harness);
    ASSERT_EQ(trainer.Register(), 0);
    lh_ipc_request prepare = Request(LH_IPC_PREPARE, 60);
    prepare.u.state.state = 7;
    trainer.client.Send(prepare);
    ASSERT_TRUE(harness.Until(
        [](ScriptedHandler& handler, IpcServer&) { return handler.prepares.size() == 1; }));
  }
  ASSERT_TRUE(harness.Until(
      [](ScriptedHandler&, IpcServer& server) { return server.GetStats().clients == 0; }));
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.prepares.at(0)(); });
  EXPECT_EQ(harness.Stats().clients, 0u);
}

TEST(IpcServerTest, TheAnswerTellsWhatBecameOfTheTensors) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    handler.sync_info.resumed = true;
    handler.sync_info.changed = true;
  });
  ASSERT_EQ(trainer.client.Ask(trainer.Sync(60)), 0);
  EXPECT_EQ(trainer.client.reply().flags, uint32_t{LH_IPC_RESUMED | LH_IPC_CHANGED});
}

TEST(IpcServerTest, ATableIsCopiedBeforeItIsChecked) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  memset(trainer.memory + kTableAt, 0xff, 2 * sizeof(lh_ipc_tensor));
  ASSERT_EQ(trainer.client.Ask(trainer.Sync(60)), 0);
  harness.Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.syncs[0].state->manifest[0].name, "w");
  });
}

TEST(IpcServerTest, StatesThatDoNotFitAreRefusedWithTheirReason) {
  Harness harness;
  StateTrainer trainer(harness);
  const auto refused = [&](const std::string& reason, uint32_t count = 2) {
    EXPECT_EQ(trainer.Register(7, count), kInvalid) << reason;
    EXPECT_TRUE(trainer.Says(reason)) << trainer.client.text();
  };
  refused("are possible", 0);
  refused("are possible", LH_STATE_TENSORS_MAX + 1);
  refused("table", 60000);
  trainer.Write(1, "m", LH_WIRE_BOOL, {2, 3}, 7, {1, kTensorsAt + 400});
  refused("tensor 1");
  trainer.Write(1, "m", LH_WIRE_BOOL, {2, 3}, 6, {2, kTensorsAt + 400});
  refused("outside");
  trainer.Write(1, "m", LH_WIRE_BOOL, {2, 3}, 6, {1, kRegionBytes - 5});
  refused("outside");
  trainer.Write(1, "m", LH_WIRE_BOOL, {2, 3}, 6, {1, UINT64_MAX});
  refused("outside");
  trainer.Write(1, "m", LH_WIRE_BOOL, {2, 3}, 6, {1, kTensorsAt + 399});
  refused("share memory");
  trainer.Write(1, "w", LH_WIRE_BOOL, {2, 3}, 6, {1, kTensorsAt + 400});
  refused("two tensors are called");
  trainer.Write(1, "m", LH_WIRE_BOOL, {2, 3}, 6, {1, kTensorsAt + 400});
  lh_ipc_request request = trainer.State(7);
  request.u.state.changed.offset = kRegionBytes - 1;
  EXPECT_EQ(trainer.client.Ask(request), kInvalid);
  EXPECT_TRUE(trainer.Says("marks")) << trainer.client.text();
  request = trainer.State(7);
  request.u.state.table.region = 9;
  EXPECT_EQ(trainer.client.Ask(request), kInvalid);
  EXPECT_EQ(trainer.Register(), 0);
  EXPECT_EQ(trainer.Register(), kInvalid);
  EXPECT_TRUE(trainer.Says("exists already")) << trainer.client.text();
}

TEST(IpcServerTest, TensorsWithoutElementsHaveNoPlace) {
  Harness harness;
  StateTrainer trainer(harness);
  trainer.Write(0, "empty", LH_WIRE_FLOAT32, {0, 5}, 0, {0, 0});
  lh_ipc_request request = trainer.State(7, 1);
  request.u.state.changed = {0, 0};
  ASSERT_EQ(trainer.client.Ask(request), 0) << trainer.client.text();
  EXPECT_EQ(trainer.client.Ask(trainer.Sync(60)), 0);
}

TEST(IpcServerTest, AClientHasABoundedNumberOfStates) {
  Harness harness;
  StateTrainer trainer(harness);
  for (uint64_t i = 1; i <= LH_STATES_MAX; ++i) ASSERT_EQ(trainer.Register(i), 0);
  EXPECT_EQ(trainer.Register(LH_STATES_MAX + 1), static_cast<int>(Code::kUnavailable));
  EXPECT_EQ(trainer.Unregister(3), 0);
  EXPECT_EQ(trainer.Register(LH_STATES_MAX + 1), 0);
  EXPECT_EQ(trainer.Unregister(3), kInvalid);
}

TEST(IpcServerTest, ARegionWithAStateStays) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  lh_ipc_request unregion = Request(LH_IPC_UNREGION, 11);
  unregion.u.region.region = 1;
  EXPECT_EQ(trainer.client.Ask(unregion), kPrecondition);
  EXPECT_EQ(trainer.Unregister(), 0);
  EXPECT_EQ(trainer.client.Ask(unregion), 0);
}

TEST(IpcServerTest, SyncsAreCheckedAgainstTheState) {
  Harness harness;
  StateTrainer trainer(harness);
  EXPECT_EQ(trainer.client.Ask(trainer.Sync(60)), kInvalid);
  EXPECT_TRUE(trainer.Says("no state 7")) << trainer.client.text();
  ASSERT_EQ(trainer.Register(), 0);
  lh_ipc_request sync = trainer.Sync(60);
  sync.u.sync.touched = {1, kRegionBytes - 1};
  EXPECT_EQ(trainer.client.Ask(sync), kInvalid);
  sync = trainer.Sync(60);
  sync.u.sync.revision = LH_REVISION_MAX + 1;
  EXPECT_EQ(trainer.client.Ask(sync), kInvalid);
  sync = trainer.Sync(60);
  sync.member = 99;
  EXPECT_EQ(trainer.client.Ask(sync), kPrecondition);
  EXPECT_EQ(trainer.client.Ask(trainer.Sync(60)), 0);
}

TEST(IpcServerTest, OneSyncOrStepOfAMemberAndOneSyncOfAState) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  harness.Run(
      [](ScriptedHandler& handler, IpcServer&) { handler.hold_syncs = handler.hold_steps = true; });
  trainer.client.Send(trainer.Sync(60));
  EXPECT_EQ(trainer.client.Ask(trainer.Sync(61)), kPrecondition);
  EXPECT_EQ(trainer.client.Ask(Request(LH_IPC_STEP, 61, trainer.member)), kPrecondition);
  EXPECT_EQ(trainer.Unregister(), kPrecondition);
  const uint64_t other = trainer.client.Join();
  lh_ipc_request sync = trainer.Sync(61);
  sync.member = other;
  EXPECT_EQ(trainer.client.Ask(sync), kPrecondition);
  EXPECT_TRUE(trainer.Says("another sync uses this state")) << trainer.client.text();
  harness.Run(
      [&](ScriptedHandler& handler, IpcServer&) { handler.FinishSync(LocalId(trainer.member)); });
  EXPECT_EQ(trainer.client.Status(), 0);
  trainer.client.Send(Request(LH_IPC_STEP, 62, trainer.member));
  EXPECT_EQ(trainer.client.Ask(trainer.Sync(61)), kPrecondition);
  harness.Run([&](ScriptedHandler& handler, IpcServer& server) {
    server.StepDone(LocalId(trainer.member), {}, handler.WorldOf(LocalId(trainer.member)));
  });
  EXPECT_EQ(trainer.client.Status(), 0);
  EXPECT_EQ(trainer.Unregister(), 0);
}

TEST(IpcServerTest, AStepWithASyncHasOneAnswerForBoth) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  const LocalId local(trainer.member);
  harness.Run(
      [](ScriptedHandler& handler, IpcServer&) { handler.hold_syncs = handler.hold_steps = true; });
  const auto answered = [&](const Outcome& sync, const Outcome& step) {
    trainer.client.Send(trainer.Sync(60, LH_IPC_STEP));
    EXPECT_TRUE(harness.Until([&](ScriptedHandler& handler, IpcServer& server) {
      if (handler.syncs.empty()) return false;
      handler.FinishSync(local, sync);
      handler.syncs.clear();
      server.StepDone(local, step, handler.WorldOf(local));
      return true;
    }));
    return trainer.client.Status();
  };
  const Outcome aborted{Code::kAborted, "source died"};
  const Outcome evicted{Code::kEvicted, "too late"};
  const lh_ipc_reply& reply = trainer.client.reply();
  EXPECT_EQ(answered({}, {}), 0);
  EXPECT_EQ(reply.flags, uint32_t{LH_IPC_PASSED});
  EXPECT_EQ(reply.u.sync.revision, 12u);
  EXPECT_EQ(reply.world.epoch, 1u);
  EXPECT_EQ(answered(aborted, {}), static_cast<int>(Code::kAborted));
  EXPECT_EQ(reply.flags, uint32_t{LH_IPC_PASSED});
  EXPECT_TRUE(trainer.Says("source died"));
  EXPECT_EQ(reply.world.epoch, 1u);
  EXPECT_EQ(answered(aborted, evicted), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(reply.flags, 0u);
  EXPECT_TRUE(trainer.Says("too late"));
}

TEST(IpcServerTest, ProgressIsToldOfOpenSyncsOnly) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  const LocalId local(trainer.member);
  harness.Run([&](ScriptedHandler& handler, IpcServer& server) {
    handler.hold_syncs = true;
    server.SyncProgress(local, {1, 1, 1, 1});
  });
  trainer.client.Send(trainer.Sync(60));
  ASSERT_TRUE(
      harness.Until([](ScriptedHandler& handler, IpcServer&) { return !handler.syncs.empty(); }));
  harness.Run([&](ScriptedHandler&, IpcServer& server) {
    server.SyncProgress(local, {10, 100, 5, 2});
  });
  ASSERT_EQ(trainer.client.Status(), 0);
  EXPECT_EQ(trainer.client.reply().type, uint32_t{LH_IPC_PROGRESS});
  EXPECT_EQ(trainer.client.reply().member, trainer.member);
  EXPECT_EQ(trainer.client.reply().u.progress.bytes_done, 10u);
  EXPECT_EQ(trainer.client.reply().u.progress.bytes_total, 100u);
  EXPECT_EQ(trainer.client.reply().u.progress.bytes_per_second, 5u);
  EXPECT_EQ(trainer.client.reply().u.progress.sources, 2u);
  // While the trainer does not read, only the newest PROGRESS waits. It comes before the answer.
  harness.Run([&](ScriptedHandler& handler, IpcServer& server) {
    for (uint64_t i = 0; i < 100000; ++i) server.SyncProgress(local, {i, 100000, 5, 2});
    handler.FinishSync(local);
  });
  int frames = 0;
  uint64_t last = 0;
  while (trainer.client.Status() == 0 && trainer.client.reply().type == LH_IPC_PROGRESS) {
    last = trainer.client.reply().u.progress.bytes_done;
    ++frames;
  }
  EXPECT_EQ(trainer.client.reply().type, uint32_t{LH_IPC_DONE});
  EXPECT_EQ(last, 99999u);
  EXPECT_LE(frames, 3);
}

TEST(IpcServerTest, AStateThatIsFetchedIntoInTheBackgroundIsHeldUntilItIsTaken) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  const LocalId local(trainer.member);
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_syncs = true; });
  const auto end = [&](bool background) {
    ASSERT_TRUE(
        harness.Until([](ScriptedHandler& handler, IpcServer&) { return !handler.syncs.empty(); }));
    harness.Run([&](ScriptedHandler& handler, IpcServer& server) {
      StateSyncInfo info;
      info.background = background;
      server.SyncDone(local, {}, info);
      handler.syncs.clear();
    });
    EXPECT_EQ(trainer.client.Status(), 0);
    EXPECT_EQ((trainer.client.reply().flags & LH_IPC_BACKGROUND) != 0, background);
  };
  trainer.client.Send(trainer.Sync(60));
  end(true);
  EXPECT_EQ(trainer.Unregister(), static_cast<int>(Code::kFailedPrecondition));
  // The member itself may use the state again.
  trainer.client.Send(trainer.Sync(61));
  end(true);
  lh_ipc_request take = trainer.Sync(62);
  take.type = LH_IPC_TAKE;
  memset(&take.u, 0, sizeof take.u);
  take.u.take.timeout_ms = 70;
  trainer.client.Send(take);
  ASSERT_TRUE(harness.Until([](ScriptedHandler& handler, IpcServer&) {
    return handler.events.back().starts_with("take ");
  }));
  EXPECT_EQ(harness.Events().back(), "take " + std::to_string(trainer.member) + " 70");
  // No other call of the member is possible meanwhile.
  trainer.client.Send(trainer.Sync(63));
  EXPECT_EQ(trainer.client.Status(), static_cast<int>(Code::kFailedPrecondition));
  harness.Run([&](ScriptedHandler&, IpcServer& server) {
    StateSyncInfo info;
    info.background = true;
    server.TakeDone(local, {Code::kDeadlineExceeded, "not yet"}, info);
  });
  EXPECT_EQ(trainer.client.Status(), static_cast<int>(Code::kDeadlineExceeded));
  EXPECT_EQ(trainer.client.reply().call, 62u);
  EXPECT_EQ(trainer.Unregister(), static_cast<int>(Code::kFailedPrecondition));
  take.call = 64;
  trainer.client.Send(take);
  ASSERT_TRUE(harness.Until([](ScriptedHandler& handler, IpcServer&) {
    return std::count(handler.events.begin(), handler.events.end(), handler.events.back()) == 2;
  }));
  harness.Run([&](ScriptedHandler&, IpcServer& server) {
    StateSyncInfo info;
    info.revision = 5;
    server.TakeDone(local, {}, info);
  });
  EXPECT_EQ(trainer.client.Status(), 0);
  EXPECT_EQ(trainer.client.reply().u.sync.revision, 5u);
  EXPECT_EQ(trainer.Unregister(), 0);
}

TEST(IpcServerTest, AMemberThatIsOutHoldsItsStateNoMore) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_syncs = true; });
  trainer.client.Send(trainer.Sync(60));
  ASSERT_TRUE(
      harness.Until([](ScriptedHandler& handler, IpcServer&) { return !handler.syncs.empty(); }));
  harness.Run([&](ScriptedHandler& handler, IpcServer& server) {
    StateSyncInfo info;
    info.background = true;
    server.SyncDone(LocalId(trainer.member), {}, info);
    handler.syncs.clear();
    server.MemberGone(LocalId(trainer.member), {Code::kEvicted, "too late"});
  });
  EXPECT_EQ(trainer.client.Status(), 0);
  EXPECT_EQ(trainer.client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(trainer.Unregister(), 0);
}

TEST(IpcServerTest, TheEndOfAMemberAnswersItsSync) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_syncs = true; });
  trainer.client.Send(trainer.Sync(60));
  ASSERT_TRUE(
      harness.Until([](ScriptedHandler& handler, IpcServer&) { return !handler.syncs.empty(); }));
  harness.Run([&](ScriptedHandler&, IpcServer& server) {
    server.MemberGone(LocalId(trainer.member), {Code::kEvicted, "too late"});
    server.SyncDone(LocalId(trainer.member), {}, {});
  });
  EXPECT_EQ(trainer.client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(trainer.client.reply().type, uint32_t{LH_IPC_GONE});
  EXPECT_EQ(trainer.client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(trainer.client.reply().call, 60u);
  EXPECT_EQ(trainer.Unregister(), 0);
}

TEST(IpcServerTest, TheEndOfAMemberTellsWhatItsSyncHasDoneThoughItsStepIsOpen) {
  Harness harness;
  StateTrainer trainer(harness);
  ASSERT_EQ(trainer.Register(), 0);
  harness.Run(
      [](ScriptedHandler& handler, IpcServer&) { handler.hold_syncs = handler.hold_steps = true; });
  trainer.client.Send(trainer.Sync(60, LH_IPC_STEP));
  ASSERT_TRUE(
      harness.Until([](ScriptedHandler& handler, IpcServer&) { return !handler.syncs.empty(); }));
  harness.Run([&](ScriptedHandler& handler, IpcServer& server) {
    handler.FinishSync(LocalId(trainer.member), {Code::kAborted, "source died"});
    server.MemberGone(LocalId(trainer.member), {Code::kEvicted, "too late"});
  });
  EXPECT_EQ(trainer.client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(trainer.client.reply().type, uint32_t{LH_IPC_GONE});
  EXPECT_EQ(trainer.client.Status(), static_cast<int>(Code::kEvicted));
  EXPECT_EQ(trainer.client.reply().call, 60u);
  EXPECT_EQ(trainer.client.reply().flags, 0U);
}

TEST(IpcServerTest, AStateOutlivesItsTrainerAsLongAsItIsHeld) {
  Harness harness;
  {
    StateTrainer trainer(harness);
    trainer.memory[kTensorsAt] = 42;
    ASSERT_EQ(trainer.Register(), 0);
    harness.Run([](ScriptedHandler& handler, IpcServer&) { handler.hold_syncs = true; });
    trainer.client.Send(trainer.Sync(60));
    ASSERT_TRUE(
        harness.Until([](ScriptedHandler& handler, IpcServer&) { return !handler.syncs.empty(); }));
  }
  ASSERT_TRUE(
      harness.Until([](ScriptedHandler&, IpcServer& s) { return s.GetStats().clients == 0; }));
  harness.Run([](ScriptedHandler& handler, IpcServer& server) {
    EXPECT_EQ(handler.syncs[0].state->Tensor(0)[0], 42);
    EXPECT_EQ(server.GetStats().arena_bytes, kRegionBytes);
    handler.syncs.clear();
  });
  EXPECT_TRUE(
      harness.Until([](ScriptedHandler&, IpcServer& s) { return s.GetStats().arena_bytes == 0; }));
}

}  // namespace
}  // namespace longhaul::peerd
