// The client library against the IPC server of peerd, both as they are shipped.
#include <longhaul/longhaul.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "client/cpp/longhaul.hpp"
#include "client/src/objects.h"
#include "gtest/gtest.h"
#include "proto/wire/limits.h"
#include "tests/support/ipc_harness.h"

extern "C" {
#include "client/src/replies.h"
}

namespace longhaul::peerd {
namespace {

constexpr int64_t kPatienceMs = 60000;
constexpr uint64_t kMiB = uint64_t{1} << 20;

bool Says(const std::string& part) {
  return std::string(lh_last_error()).find(part) != std::string::npos;
}

// Waits until the condition is true. Returns false after 20 s, which is enough on a busy host.
bool Soon(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

class ClientTest : public testing::Test {
 protected:
  ~ClientTest() override {
    lh_close(client_);  // frees communicators and ops
  }

  void Start(IpcServerOptions options = {}) {
    harness_ = std::make_unique<Harness>(options, poll_us_);
  }
  void Open() {
    lh_open_options options = LH_OPEN_OPTIONS_INIT;
    options.socket_path = harness_->path().c_str();
    options.name = "tester";
    ASSERT_EQ(lh_open(&options, &client_), LH_OK) << lh_last_error();
  }
  lh_status Join() {
    lh_join_options options = LH_JOIN_OPTIONS_INIT;
    options.run = "run";
    options.group = 3;
    options.timeout_ms = kPatienceMs;
    return lh_join(client_, &options, &comm_);
  }
  void StartJoined(IpcServerOptions options = {}) {
    Start(options);
    ASSERT_NO_FATAL_FAILURE(Open());
    ASSERT_EQ(Join(), LH_OK) << lh_last_error();
    // This call is for the boundary that admitted the member. Later steps go to peerd.
    ASSERT_EQ(lh_begin_step(comm_, 0), LH_OK) << lh_last_error();
  }
  float* Alloc(size_t count) {
    void* data = nullptr;
    EXPECT_EQ(lh_alloc(client_, count * sizeof(float), &data), LH_OK) << lh_last_error();
    return static_cast<float*>(data);
  }
  lh_op* AllReduce(const float* source, float* target, uint64_t count, uint64_t tag = 0) {
    lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
    options.source = source;
    options.target = target;
    options.count = count;
    options.tag = tag;
    lh_op* op = nullptr;
    EXPECT_EQ(lh_all_reduce_start(comm_, &options, &op), LH_OK) << lh_last_error();
    return op;
  }
  void Hold(bool ScriptedHandler::*what, bool hold = true) {
    harness_->Run([=](ScriptedHandler& handler, IpcServer&) { handler.*what = hold; });
  }
  bool UntilEvents(size_t count) {
    return harness_->Until(
        [count](ScriptedHandler& handler, IpcServer&) { return handler.events.size() == count; });
  }
  bool UntilPosts(size_t count) {
    return harness_->Until(
        [count](ScriptedHandler& handler, IpcServer&) { return handler.posts.size() == count; });
  }

  uint32_t poll_us_ = 0;  // of peerd
  std::unique_ptr<Harness> harness_;
  lh_client* client_ = nullptr;
  lh_comm* comm_ = nullptr;
};

// ------------------------------------------------------------------------------ open

TEST_F(ClientTest, OpenNamesThePathThatNobodyAnswersOn) {
  lh_open_options options = LH_OPEN_OPTIONS_INIT;
  options.socket_path = "/tmp/no-such-directory/peerd.sock";
  options.timeout_ms = 0;
  EXPECT_EQ(lh_open(&options, &client_), LH_UNAVAILABLE);
  EXPECT_EQ(client_, nullptr);
  EXPECT_TRUE(Says("/tmp/no-such-directory/peerd.sock")) << lh_last_error();
  EXPECT_TRUE(Says("No such file")) << lh_last_error();
}

TEST_F(ClientTest, OpenWaitsForPeerdToAppear) {
  Start();
  const std::string path = harness_->path() + ".late";
  std::thread late([&] { LH_CHECK(link(harness_->path().c_str(), path.c_str()) == 0); });
  lh_open_options options = LH_OPEN_OPTIONS_INIT;
  options.socket_path = path.c_str();
  options.timeout_ms = kPatienceMs;
  EXPECT_EQ(lh_open(&options, &client_), LH_OK) << lh_last_error();
  late.join();
  unlink(path.c_str());
}

// Tries that failed before the one that went well are no calls of the program.
TEST_F(ClientTest, ACallThatSucceedsAtASecondTryLeavesNoError) {
  IpcServerOptions limited;
  limited.arena_limit = 8 * kMiB;
  Start(limited);
  // Somebody takes the first connection, gives the place to peerd, and hangs up.
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = harness_->path() + ".late";
  memcpy(address.sun_path, path.c_str(), path.size());
  const int first = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(first, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(first, 8), 0);
  std::thread late([&] {
    const int connection = accept(first, nullptr, nullptr);
    unlink(path.c_str());
    LH_CHECK(link(harness_->path().c_str(), path.c_str()) == 0);
    close(connection);
    close(first);
  });
  // The text belongs to the thread, so that of a new thread is empty.
  std::thread fresh([&] {
    lh_open_options options = LH_OPEN_OPTIONS_INIT;
    options.socket_path = path.c_str();
    options.timeout_ms = kPatienceMs;
    EXPECT_EQ(lh_open(&options, &client_), LH_OK) << lh_last_error();
    EXPECT_STREQ(lh_last_error(), "");
    // A region of the usual size is refused, and a smaller one is not.
    void* data = nullptr;
    EXPECT_EQ(lh_alloc(client_, 100, &data), LH_OK);
    EXPECT_STREQ(lh_last_error(), "");
    // What failed before stays.
    EXPECT_EQ(lh_alloc(client_, 0, &data), LH_INVALID_ARGUMENT);
    EXPECT_EQ(lh_alloc(client_, 5 * kMiB, &data), LH_OK);
    EXPECT_TRUE(Says("ask for at least 1")) << lh_last_error();
  });
  fresh.join();
  late.join();
  unlink(path.c_str());
}

TEST_F(ClientTest, OpenTakesNoLongerThanItIsTold) {
  char directory[] = "/tmp/lh_open_XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = std::string(directory) + "/silent.sock";
  memcpy(address.sun_path, path.c_str(), path.size());
  const int silent = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(silent, 8), 0);
  lh_open_options options = LH_OPEN_OPTIONS_INIT;
  options.socket_path = path.c_str();
  options.timeout_ms = 250;
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(lh_open(&options, &client_), LH_UNAVAILABLE);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(1900));
  EXPECT_TRUE(Says("does not answer")) << lh_last_error();
  close(silent);
  unlink(path.c_str());
  rmdir(directory);
}

TEST_F(ClientTest, OpenChecksItsArguments) {
  lh_open_options options = LH_OPEN_OPTIONS_INIT;
  options.timeout_ms = 0;
  EXPECT_EQ(lh_open(&options, nullptr), LH_INVALID_ARGUMENT);
  options.struct_size = 8;
  EXPECT_EQ(lh_open(&options, &client_), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("LH_OPEN_OPTIONS_INIT")) << lh_last_error();
  options.struct_size = sizeof options;
  options.timeout_ms = -2;
  EXPECT_EQ(lh_open(&options, &client_), LH_INVALID_ARGUMENT);
  options.timeout_ms = 0;
  const std::string path(200, 'a');
  options.socket_path = path.c_str();
  EXPECT_EQ(lh_open(&options, &client_), LH_INVALID_ARGUMENT);
  options.socket_path = "";
  EXPECT_EQ(lh_open(&options, &client_), LH_INVALID_ARGUMENT);
  options.socket_path = "/tmp/x";
  options.name = "not a name";
  EXPECT_EQ(lh_open(&options, &client_), LH_INVALID_ARGUMENT);
}

TEST_F(ClientTest, OptionsOfALaterVersionPassWhileTheyAreZero) {
  Start();
  struct {
    lh_open_options known = LH_OPEN_OPTIONS_INIT;
    uint64_t later = 0;
  } options;
  options.known.struct_size = sizeof options;
  options.known.socket_path = harness_->path().c_str();
  options.later = 1;
  EXPECT_EQ(lh_open(&options.known, &client_), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("does not know")) << lh_last_error();
  options.later = 0;
  EXPECT_EQ(lh_open(&options.known, &client_), LH_OK) << lh_last_error();
}

TEST_F(ClientTest, OpenPassesOnWhyPeerdRefuses) {
  Start();
  std::vector<lh_client*> clients(LH_CLIENTS_MAX);
  lh_open_options options = LH_OPEN_OPTIONS_INIT;
  options.socket_path = harness_->path().c_str();
  for (lh_client*& client : clients) ASSERT_EQ(lh_open(&options, &client), LH_OK);
  options.timeout_ms = 0;
  // The timeout is 0, so peerd on a busy host may answer too late. Then try again.
  do {
    ASSERT_EQ(lh_open(&options, &client_), LH_UNAVAILABLE);
  } while (Says("does not answer"));
  EXPECT_TRUE(Says("peerd may have at most 256 connections")) << lh_last_error();
  for (lh_client* client : clients) lh_close(client);
}

// ------------------------------------------------------------------------------ membership

TEST_F(ClientTest, JoinsSeesTheWorldStepsAndLeaves) {
  StartJoined();
  lh_world_info world = LH_WORLD_INFO_INIT;
  ASSERT_EQ(lh_world(comm_, &world), LH_OK);
  EXPECT_EQ(world.struct_size, sizeof world);
  EXPECT_EQ(world.epoch, 1u);
  EXPECT_EQ(world.size, 2u);
  EXPECT_EQ(world.member_id, 101u);
  harness_->Run([](ScriptedHandler& handler, IpcServer& server) {
    World changed = handler.WorldOf(LocalId(1));
    changed.pending = 4;
    server.WorldChanged(LocalId(1), changed);
    handler.epoch = 5;
  });
  while (world.pending != 4) ASSERT_EQ(lh_world(comm_, &world), LH_OK);
  ASSERT_EQ(lh_begin_step(comm_, kPatienceMs), LH_OK) << lh_last_error();
  ASSERT_EQ(lh_world(comm_, &world), LH_OK);
  EXPECT_EQ(world.epoch, 5u);
  ASSERT_EQ(lh_begin_step(comm_, kPatienceMs), LH_OK);
  ASSERT_EQ(lh_leave(comm_, kPatienceMs), LH_OK);
  EXPECT_EQ(lh_begin_step(comm_, kPatienceMs), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("has left")) << lh_last_error();
  EXPECT_EQ(lh_leave(comm_, kPatienceMs), LH_FAILED_PRECONDITION);
  EXPECT_EQ(harness_->Events(),
            (std::vector<std::string>{"join 1 run/3 tester", "step 1", "step 1", "leave 1"}));
}

TEST_F(ClientTest, TheWorldOfTheBoundaryStaysWhenAMemberGoes) {
  StartJoined();
  const auto lose_one = [&](uint64_t epoch) {
    harness_->Run([&](ScriptedHandler& handler, IpcServer& server) {
      World changed = handler.WorldOf(LocalId(1));
      changed.epoch = Epoch(epoch);
      changed.size = 1;
      server.WorldChanged(LocalId(1), changed);
    });
  };
  lh_world_info world = LH_WORLD_INFO_INIT;
  lose_one(2);
  while (world.epoch != 2) ASSERT_EQ(lh_world(comm_, &world), LH_OK);
  EXPECT_EQ(world.size, 1u);
  EXPECT_EQ(world.step_epoch, 1u) << "that of the join";
  EXPECT_EQ(world.step_size, 2u);
  // A member goes before the call has returned.
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    handler.epoch = 5;
    handler.hold_steps = true;
  });
  lh_op* op = nullptr;
  ASSERT_EQ(lh_begin_step_start(comm_, &op), LH_OK) << lh_last_error();
  ASSERT_TRUE(UntilEvents(2)) << "the join and this step";
  harness_->Run([](ScriptedHandler& handler, IpcServer& server) {
    server.StepDone(LocalId(1), {}, handler.WorldOf(LocalId(1)));
  });
  lose_one(6);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  while (world.epoch != 6) ASSERT_EQ(lh_world(comm_, &world), LH_OK);
  EXPECT_EQ(world.size, 1u);
  EXPECT_EQ(world.step_epoch, 5u);
  EXPECT_EQ(world.step_rank, 0u);
  EXPECT_EQ(world.step_size, 2u);
  lh_op_free(op);
}

TEST_F(ClientTest, TheFirstStepAfterAJoinIsTheBoundaryThatAdmittedIt) {
  Start();
  Hold(&ScriptedHandler::hold_steps);
  Open();
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_OK) << lh_last_error();
  lh_world_info world = LH_WORLD_INFO_INIT;
  ASSERT_EQ(lh_world(comm_, &world), LH_OK);
  EXPECT_EQ(world.epoch, 1u) << "as the join left it";
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_DEADLINE_EXCEEDED) << "the second waits for the others";
  EXPECT_TRUE(UntilEvents(2));
}

TEST_F(ClientTest, AfterAnOpTheFirstStepIsABoundaryOfItsOwn) {
  Start();
  Hold(&ScriptedHandler::hold_steps);
  Open();
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  float* const data = Alloc(4);
  lh_op* const op = AllReduce(data, data, 4);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_DEADLINE_EXCEEDED);
  EXPECT_TRUE(UntilEvents(2));
  lh_op_free(op);
}

TEST_F(ClientTest, ARefusedCallOfAllMembersCountsAsAnOpAndACallOfSomeDoesNot) {
  Start();
  Hold(&ScriptedHandler::hold_steps);
  for (const bool all : {false, true}) {
    Open();
    ASSERT_EQ(Join(), LH_OK) << lh_last_error();
    const uint64_t ids[] = {101, 7};
    lh_barrier_options barrier = LH_BARRIER_OPTIONS_INIT;
    barrier.participants = ids;
    barrier.participant_count = 2;
    lh_op* op = nullptr;
    ASSERT_EQ(lh_barrier_start(comm_, &barrier, &op), LH_OK) << lh_last_error();
    EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
    lh_op_free(op);
    lh_refuse_options refused = LH_REFUSE_OPTIONS_INIT;
    refused.call = "lh_all_gather";
    refused.why = "a test";
    if (!all) {
      refused.participants = ids;
      refused.participant_count = 2;
    }
    ASSERT_EQ(lh_refuse(comm_, &refused), LH_OK) << lh_last_error();
    EXPECT_EQ(lh_begin_step(comm_, 0), all ? LH_DEADLINE_EXCEEDED : LH_OK) << lh_last_error();
    lh_close(std::exchange(client_, nullptr));
  }
}

TEST_F(ClientTest, ANewcomerStartsNothingBeforeItsFirstBoundary) {
  Start();
  Hold(&ScriptedHandler::newcomers);
  ASSERT_NO_FATAL_FAILURE(Open());
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  float* const data = Alloc(4);
  const uint64_t ids[] = {101, 7};
  const uint64_t shape = 4;
  lh_tensor tensor = LH_TENSOR_INIT;
  tensor.name = "w";
  tensor.data = data;
  tensor.shape = &shape;
  tensor.dims = 1;
  lh_sync_options sync = LH_SYNC_OPTIONS_INIT;
  ASSERT_EQ(lh_state_new(client_, &tensor, 1, &sync.state), LH_OK) << lh_last_error();
  lh_all_reduce_options reduce = LH_ALL_REDUCE_OPTIONS_INIT;
  reduce.source = reduce.target = data;
  reduce.count = 4;
  lh_all_reduce_options bad = reduce;
  bad.target = data + 1;
  lh_barrier_options barrier = LH_BARRIER_OPTIONS_INIT;
  barrier.tag = 9;
  barrier.participants = ids;
  barrier.participant_count = 2;
  lh_send_options send = LH_SEND_OPTIONS_INIT;
  send.dtype = LH_INT32;  // the harness writes sums of float32 only
  send.source = data;
  send.count = 4;
  send.to = 1;
  lh_refuse_options refused = LH_REFUSE_OPTIONS_INIT;
  refused.call = "lh_barrier";
  refused.why = "a test";
  lh_op* op = nullptr;
  const std::vector<std::function<lh_status()>> calls = {
      [&] { return lh_all_reduce_start(comm_, &reduce, &op); },
      [&] { return lh_all_reduce_start(comm_, &bad, &op); },  // whose refusal others would hear
      [&] { return lh_barrier_start(comm_, &barrier, &op); },
      [&] { return lh_send_start(comm_, &send, &op); },
      [&] { return lh_refuse(comm_, &refused); },
      [&] { return lh_sync_state_start(comm_, &sync, &op); },
  };
  for (int round = 0; round < 2; ++round) {
    for (const auto& call : calls) {
      EXPECT_EQ(call(), LH_FAILED_PRECONDITION);
      EXPECT_TRUE(Says("has passed no step boundary yet")) << lh_last_error();
      EXPECT_TRUE(Says("call lh_begin_step() first")) << lh_last_error();
      EXPECT_EQ(op, nullptr);
    }
  }
  ASSERT_EQ(lh_begin_step(comm_, 0), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_TRUE(handler.refusals.empty());
    EXPECT_EQ(handler.events.size(), 1u) << "the join";
  });
  for (const size_t good : {0, 2, 3, 5}) {
    ASSERT_EQ(calls[good](), LH_OK) << lh_last_error();
    EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
    lh_op_free(op);
  }
  EXPECT_EQ(lh_state_free(sync.state), LH_OK) << lh_last_error();
}

TEST_F(ClientTest, ListsMembersOverSeveralPages) {
  StartJoined();
  for (const size_t size : {size_t{1}, size_t{28}, size_t{29}, size_t{1024}}) {
    harness_->Run([size](ScriptedHandler& handler, IpcServer&) {
      handler.members.clear();
      for (size_t i = 0; i < size; ++i) handler.members.push_back(MemberId(1000 + i));
    });
    std::vector<uint64_t> ids(2000, 7);
    uint32_t count = 0;
    ASSERT_EQ(lh_members(comm_, ids.data(), 2000, &count), LH_OK) << lh_last_error();
    ASSERT_EQ(count, size);
    for (size_t i = 0; i < size; ++i) EXPECT_EQ(ids[i], 1000 + i);
    EXPECT_EQ(ids[size], 7u);
    ids.assign(2000, 7);
    ASSERT_EQ(lh_members(comm_, ids.data(), 1, &count), LH_OK);
    EXPECT_EQ(count, size);
    EXPECT_EQ(ids[1], 7u);
  }
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.step_members = {MemberId(7)}; });
  uint64_t id = 0;
  uint32_t count = 0;
  ASSERT_EQ(lh_step_members(comm_, &id, 1, &count), LH_OK) << lh_last_error();
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(id, 7u);
}

TEST_F(ClientTest, AJoinNamesItsCohortAndDeadline) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Open());
  lh_join_options options = LH_JOIN_OPTIONS_INIT;
  options.run = "run";
  options.cohort = "host-7";
  options.cohort_size = 2;
  options.step_deadline_ms = 5000;
  options.members = 4;
  ASSERT_EQ(lh_join(client_, &options, &comm_), LH_OK) << lh_last_error();
  EXPECT_EQ(harness_->Events(),
            (std::vector<std::string>{
                "join 1 run/0 tester cohort host-7 of 2 members 4 step_deadline_ms 5000"}));
}

TEST_F(ClientTest, AJoinMayNameItsMember) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Open());
  lh_join_options options = LH_JOIN_OPTIONS_INIT;
  options.name = "host-7.gpu-0";
  ASSERT_EQ(lh_join(client_, &options, &comm_), LH_OK) << lh_last_error();
  EXPECT_EQ(harness_->Events(), (std::vector<std::string>{"join 1 default/0 host-7.gpu-0"}));
}

TEST_F(ClientTest, JoinChecksItsOptions) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Open());
  const auto refused = [&](const std::string& part, auto set) {
    lh_join_options options = LH_JOIN_OPTIONS_INIT;
    set(&options);
    lh_comm* comm = nullptr;
    EXPECT_EQ(lh_join(client_, &options, &comm), LH_INVALID_ARGUMENT);
    EXPECT_TRUE(Says(part)) << lh_last_error();
  };
  refused("cohort", [](lh_join_options* o) { o->cohort_size = 2; });
  refused("cohort_size", [](lh_join_options* o) { o->cohort = "host"; });
  refused("cohort_size", [](lh_join_options* o) {
    o->cohort = "host";
    o->cohort_size = LH_LOCAL_MEMBERS_MAX + 1;
  });
  refused("cohort", [](lh_join_options* o) {
    o->cohort = "not a name";
    o->cohort_size = 2;
  });
  refused("step_deadline_ms",
          [](lh_join_options* o) { o->step_deadline_ms = LH_STEP_DEADLINE_MS_MAX + 1; });
  refused("members is 1025, not at most 1024", [](lh_join_options* o) { o->members = 1025; });
  refused("members is 65536, and there is no such value",
          [](lh_join_options* o) { o->members = 65536; });
  refused("background is 2, not 0 or 1",
          [](lh_join_options* o) { o->mode = static_cast<lh_join_mode>(2); });
  refused("on_fault", [](lh_join_options* o) { o->on_fault = LH_AS_JOINED; });
  refused("name", [](lh_join_options* o) { o->name = "not a name"; });
  EXPECT_TRUE(harness_->Events().empty());
}

TEST_F(ClientTest, AnOpTakesItsFaultPolicyFromTheJoinUnlessItSays) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Open());
  lh_join_options join = LH_JOIN_OPTIONS_INIT;
  join.on_fault = LH_ABORT;
  ASSERT_EQ(lh_join(client_, &join, &comm_), LH_OK) << lh_last_error();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(4);
  std::vector<lh_op*> ops;
  for (const lh_on_fault on_fault : {LH_AS_JOINED, LH_RETRY, LH_ABORT}) {
    lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
    EXPECT_EQ(options.on_fault, LH_AS_JOINED);
    options.source = options.target = data;
    options.count = 4;
    options.tag = static_cast<uint64_t>(on_fault);
    options.on_fault = on_fault;
    options.min_world = on_fault;
    options.algorithm = static_cast<lh_algorithm>(on_fault + 1);
    ops.push_back(nullptr);
    ASSERT_EQ(lh_all_reduce_start(comm_, &options, &ops.back()), LH_OK) << lh_last_error();
  }
  ASSERT_TRUE(UntilPosts(3));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.posts[0].desc.on_fault, OnFault::kAbort);
    EXPECT_EQ(handler.posts[0].desc.min_world, 2);
    EXPECT_EQ(handler.posts[0].desc.algorithm, Algorithm::kRing);
    EXPECT_EQ(handler.posts[1].desc.algorithm, Algorithm::kOneShot);
    EXPECT_EQ(handler.posts[2].desc.algorithm, Algorithm::kMesh);
    EXPECT_EQ(handler.posts[1].desc.on_fault, OnFault::kRetry);
    EXPECT_EQ(handler.posts[1].desc.min_world, 0);
    EXPECT_EQ(handler.posts[2].desc.on_fault, OnFault::kAbort);
    EXPECT_EQ(handler.posts[2].desc.min_world, 0);
    handler.FinishPost({Code::kTooFewMembers, "2 members take part"}, 0);
    handler.FinishPost();
    handler.FinishPost();
  });
  EXPECT_EQ(lh_op_wait(ops[0], kPatienceMs), LH_TOO_FEW_MEMBERS);
  EXPECT_TRUE(Says("2 members take part")) << lh_last_error();
  for (lh_op* op : ops) {
    (void)lh_op_wait(op, kPatienceMs);
    lh_op_free(op);
  }
}

TEST_F(ClientTest, EachCollectiveTellsPeerdItsKindItsShapeAndItsRoot) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Open());
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  Hold(&ScriptedHandler::hold_posts);
  longhaul::Comm comm(std::exchange(comm_, nullptr));
  float* const data = Alloc(12);
  std::vector<longhaul::Op> ops;
  lh_reduce_scatter_options scatter = LH_REDUCE_SCATTER_OPTIONS_INIT;
  scatter.source = data;
  scatter.target = data + 8;
  scatter.count = 4;
  scatter.world = 2;
  scatter.op = LH_AVG;
  ops.push_back(comm.ReduceScatterStart(scatter));
  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  gather.source = data + 8;
  gather.target = data;
  gather.count = 4;
  gather.world = 2;
  gather.tag = 1;
  ops.push_back(comm.AllGatherStart(gather));
  lh_broadcast_options broadcast = LH_BROADCAST_OPTIONS_INIT;
  broadcast.source = broadcast.target = data;
  broadcast.count = 12;
  broadcast.root = 1;
  broadcast.tag = 2;
  ops.push_back(comm.BroadcastStart(broadcast));
  broadcast.root_member = 77;
  broadcast.tag = 3;
  ops.push_back(comm.BroadcastStart(broadcast));
  lh_barrier_options barrier = LH_BARRIER_OPTIONS_INIT;
  barrier.on_fault = LH_ABORT;
  barrier.tag = 4;
  barrier.min_world = 2;
  ops.push_back(comm.BarrierStart(barrier));
  ASSERT_TRUE(UntilPosts(5));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    const auto desc = [&](size_t i) -> const OpDesc& { return handler.posts[i].desc; };
    EXPECT_EQ(desc(0).kind, OpKind::kReduceScatter);
    EXPECT_EQ(desc(0).reduce, ReduceOp::kAvg);
    EXPECT_EQ(desc(0).count, 4u);
    EXPECT_EQ(desc(0).world, 2);
    EXPECT_EQ(handler.posts[0].targets[0] - handler.posts[0].sources[0], 32);
    EXPECT_EQ(desc(1).kind, OpKind::kAllGather);
    EXPECT_EQ(desc(1).bytes(), 32u);
    EXPECT_EQ(desc(2).kind, OpKind::kBroadcast);
    EXPECT_EQ(handler.posts[2].root_rank, 1u);
    EXPECT_EQ(handler.posts[2].sources[0], handler.posts[2].targets[0]);
    EXPECT_EQ(desc(3).root, MemberId(77));
    EXPECT_FALSE(handler.posts[3].root_rank.has_value());
    EXPECT_EQ(desc(4).kind, OpKind::kBarrier);
    EXPECT_EQ(desc(4).on_fault, OnFault::kAbort);
    EXPECT_EQ(desc(4).min_world, 2);
    for (int i = 0; i < 5; ++i) handler.FinishPost({Code::kTooFewMembers, "enough"}, 0);
  });
  ops.clear();
}

TEST_F(ClientTest, AShapeThatCannotBeIsRefusedBeforePeerdHearsOfIt) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Open());
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  float* const data = Alloc(12);
  lh_op* op = nullptr;
  lh_reduce_scatter_options scatter = LH_REDUCE_SCATTER_OPTIONS_INIT;
  scatter.source = scatter.target = data;
  scatter.count = 4;
  EXPECT_EQ(lh_reduce_scatter_start(comm_, &scatter, &op), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("world is 0")) << lh_last_error();
  scatter.world = LH_MEMBERS_MAX + 1;
  EXPECT_EQ(lh_reduce_scatter_start(comm_, &scatter, &op), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("world is 1025")) << lh_last_error();
  lh_broadcast_options broadcast = LH_BROADCAST_OPTIONS_INIT;
  broadcast.source = data;
  broadcast.target = data + 2;
  broadcast.count = 4;
  EXPECT_EQ(lh_broadcast_start(comm_, &broadcast, &op), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("overlap")) << lh_last_error();
  broadcast.target = data;
  broadcast.root = 2;
  EXPECT_EQ(lh_broadcast_start(comm_, &broadcast, &op), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("root is rank 2, and the group has 2 members")) << lh_last_error();
  EXPECT_EQ(op, nullptr);
}

TEST_F(ClientTest, AnOpNamesItsMembersHoweverManyTheyAre) {
  StartJoined();
  for (const uint32_t count : {1u, LH_IPC_OP_MEMBERS_MAX + 0u, LH_IPC_OP_MEMBERS_MAX + 1u, 1024u}) {
    SCOPED_TRACE(count);
    harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
      handler.op_members.clear();
      for (uint64_t id = 1; id <= count; ++id) handler.op_members.emplace_back(7 * id);
    });
    float* const data = Alloc(4);
    lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
    options.source = options.target = data;
    options.count = 4;
    std::vector<uint64_t> ids(1025, 99);
    lh_op_info_t info = LH_OP_INFO_INIT;
    info.members = ids.data();
    info.members_capacity = 1024;
    lh_op* op = nullptr;
    ASSERT_EQ(lh_all_reduce(comm_, &options, LH_FOREVER, &info, &op), LH_OK) << lh_last_error();
    EXPECT_EQ(info.world_size, count);
    EXPECT_EQ(info.members, ids.data()) << "the caller's array stays in its struct";
    for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(ids[i], 7 * (i + 1));
    EXPECT_EQ(ids[count], 99u);
    EXPECT_EQ(info.hosts, 77u);
    // With too small an array the first ids come.
    ids.assign(2, 99);
    info.members = ids.data();
    info.members_capacity = 1;
    ASSERT_EQ(lh_all_reduce_start(comm_, &options, &op), LH_OK) << lh_last_error();
    ASSERT_EQ(lh_op_wait(op, LH_FOREVER), LH_OK);
    ASSERT_EQ(lh_op_info(op, &info), LH_OK);
    EXPECT_EQ(ids, (std::vector<uint64_t>{7, 99}));
    EXPECT_EQ(info.world_size, count);
    lh_op_free(op);
    EXPECT_EQ(lh_free(client_, data), LH_OK);
  }
}

TEST_F(ClientTest, OperationsBeyondTheLimitWaitAndNothingOvertakesThem) {
  constexpr size_t kOps = LH_OPS_OPEN_MAX + 40;
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(kOps);
  std::vector<lh_op*> ops;
  for (size_t i = 0; i < kOps; ++i) ops.push_back(AllReduce(data + i, data + i, 1, /*tag=*/i));
  ASSERT_TRUE(UntilPosts(LH_OPS_OPEN_MAX));
  // A tag in flight is refused, whether its op is at peerd or waits.
  for (const uint64_t tag : {uint64_t{0}, uint64_t{kOps - 1}}) {
    lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
    options.source = options.target = data;
    options.count = 1;
    options.tag = tag;
    lh_op* op = nullptr;
    EXPECT_EQ(lh_all_reduce_start(comm_, &options, &op), LH_INVALID_ARGUMENT);
    EXPECT_TRUE(Says("use another tag")) << lh_last_error();
  }
  const size_t events = harness_->Events().size();
  EXPECT_EQ(lh_begin_step(comm_, 1), LH_DEADLINE_EXCEEDED);
  EXPECT_EQ(harness_->Events().size(), events) << "the step waits behind the ops";
  uint64_t ids[4];
  uint32_t count = 0;
  EXPECT_EQ(lh_members(comm_, ids, 4, &count), LH_OK) << "a question does not wait";
  // Each op that ends lets one go, in order.
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost({}, 0); });
  EXPECT_EQ(lh_op_wait(ops[0], kPatienceMs), LH_OK);
  ASSERT_TRUE(UntilPosts(LH_OPS_OPEN_MAX));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.posts.back().tag, uint64_t{LH_OPS_OPEN_MAX});
    handler.hold_posts = false;
    while (!handler.posts.empty()) handler.FinishPost();
  });
  for (lh_op* op : ops) EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_begin_step(comm_, kPatienceMs), LH_OK) << lh_last_error();
  EXPECT_EQ(harness_->Events().back(), "step 1");
  for (lh_op* op : ops) lh_op_free(op);
}

// ------------------------------------------------------------------------------ queues

TEST_F(ClientTest, WhileBothSidesAreAwakeAnOpNeedsNoSocket) {
  poll_us_ = 3600U * 1000 * 1000;
  StartJoined();
  float* const data = Alloc(1);
  ASSERT_TRUE(Soon(
      [&] { return __atomic_load_n(&client_->shared->requests.awake, __ATOMIC_SEQ_CST) != 0; }));
  const uint64_t sent = client_->sent;
  const uint64_t read = client_->read;
  Hold(&ScriptedHandler::hold_posts);
  for (uint32_t i = 1; i <= 100; ++i) {
    lh_op* const op = AllReduce(data, data, 1);
    // As if a thread were looking for the reply.
    lh_ipc_queue_wake(&client_->shared->replies, 1);
    ASSERT_TRUE(UntilPosts(1));
    harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
    ASSERT_TRUE(Soon(
        [&] { return __atomic_load_n(&client_->shared->replies.put, __ATOMIC_SEQ_CST) == i; }));
    EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
    lh_op_free(op);
  }
  EXPECT_EQ(client_->sent, sent);
  EXPECT_EQ(client_->read, read);
  EXPECT_EQ(client_->taken, 100u);
}

// Both sides fall asleep and wake up again and again, at any moment.
TEST_F(ClientTest, NothingIsLostBetweenTheQueuesAndTheSocket) {
  poll_us_ = 20;
  StartJoined();
  client_->spin_ns = 20 * 1000;
  constexpr size_t kThreads = 4;
  constexpr size_t kOps = 1500;
  float* const data = Alloc(kThreads);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < kOps; ++i) {
        data[t] = static_cast<float>(i);
        lh_op* const op = AllReduce(data + t, data + t, 1, t);
        ASSERT_NE(op, nullptr);
        ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
        lh_op_free(op);
        ASSERT_EQ(data[t], static_cast<float>(2 * i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(client_->put, 0u);
  EXPECT_GT(client_->sent, 0u);
}

TEST_F(ClientTest, OperationsThatWaitEndWithPeerd) {
  constexpr size_t kOps = LH_OPS_OPEN_MAX + 40;
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(kOps);
  std::vector<lh_op*> ops;
  for (size_t i = 0; i < kOps; ++i) ops.push_back(AllReduce(data + i, data + i, 1, /*tag=*/i));
  lh_op_free(ops.back());  // nobody waits for this one
  ops.pop_back();
  harness_.reset();
  for (lh_op* op : ops) EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_UNAVAILABLE);
  for (lh_op* op : ops) lh_op_free(op);
}

TEST_F(ClientTest, AMemberTellsWhoAnotherOneIs) {
  StartJoined();
  lh_member_info info = LH_MEMBER_INFO_INIT;
  ASSERT_EQ(lh_member(comm_, 7, &info), LH_OK) << lh_last_error();
  EXPECT_EQ(info.member_id, 7u);
  EXPECT_EQ(info.peer_id, 9u);
  EXPECT_EQ(info.current, 1u);
  EXPECT_EQ(info.rank, 2u);
  EXPECT_STREQ(info.name, "gpu-3");
  EXPECT_STREQ(info.cohort, "host-b");
  EXPECT_STREQ(info.host, "b.example");
  EXPECT_EQ(lh_member(comm_, 8, &info), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("member m8 is no member of the group")) << lh_last_error();
  EXPECT_EQ(lh_member(comm_, 0, &info), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_member(comm_, 7, nullptr), LH_INVALID_ARGUMENT);
}

TEST_F(ClientTest, PeerdIsAskedWhyAGroupWaits) {
  StartJoined();
  char text[64];
  ASSERT_EQ(lh_why(client_, "demo", 3, kPatienceMs, text, sizeof text), LH_OK) << lh_last_error();
  EXPECT_STREQ(text, "m2 of demo/3 is missing");
  ASSERT_EQ(lh_why(client_, "demo", 3, kPatienceMs, text, 3), LH_OK);
  EXPECT_STREQ(text, "m2");
  EXPECT_EQ(lh_why(client_, "a run", 0, 0, text, sizeof text), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_why(nullptr, "demo", 0, 0, text, sizeof text), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_why(client_, "demo", 0, 0, nullptr, 5), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_why(client_, "demo", 0, 0, text, 0), LH_INVALID_ARGUMENT);
  Hold(&ScriptedHandler::hold_whys);
  EXPECT_EQ(lh_why(client_, "demo", 0, 1, text, sizeof text), LH_DEADLINE_EXCEEDED);
  EXPECT_STREQ(text, "");
}

bool Readable(int fd, int timeout_ms) {
  pollfd poll_fd{fd, POLLIN, 0};
  return poll(&poll_fd, 1, timeout_ms) == 1;
}

TEST_F(ClientTest, TheDescriptorIsReadableWhenAnOperationHasEnded) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  int fd = -1;
  ASSERT_EQ(lh_event_fd(client_, &fd), LH_OK) << lh_last_error();
  ASSERT_EQ(lh_event_take(client_), LH_OK);
  float* const data = Alloc(8);
  lh_op* const first = AllReduce(data, data, 4);
  lh_op* const second = AllReduce(data + 4, data + 4, 4, /*tag=*/1);
  ASSERT_TRUE(UntilPosts(2));
  ASSERT_EQ(lh_event_take(client_), LH_OK) << "the reply to lh_alloc() ended a question";
  EXPECT_FALSE(Readable(fd, 0));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost({}, 0); });
  ASSERT_TRUE(Readable(fd, kPatienceMs));
  int finished = 0;
  // Another thread's call may read the reply of an op: the descriptor says so all the same.
  ASSERT_EQ(lh_op_test(second, &finished), LH_OK);
  EXPECT_EQ(finished, 0);
  EXPECT_TRUE(Readable(fd, 0));
  ASSERT_EQ(lh_event_take(client_), LH_OK);
  EXPECT_FALSE(Readable(fd, 0));
  ASSERT_EQ(lh_op_test(first, &finished), LH_OK);
  EXPECT_EQ(finished, 1);
  int again = -1;
  ASSERT_EQ(lh_event_fd(client_, &again), LH_OK);
  EXPECT_EQ(again, fd);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  EXPECT_EQ(lh_op_wait(second, kPatienceMs), LH_OK);
  lh_op_free(first);
  lh_op_free(second);
}

// What has arrived may be for another thread, which is awake and does not run yet. An event loop
// must not turn until it runs.
TEST_F(ClientTest, TheDescriptorIsNotReadableForWhatAnotherThreadIsAboutToRead) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  int fd = -1;
  ASSERT_EQ(lh_event_fd(client_, &fd), LH_OK) << lh_last_error();
  float* const data = Alloc(4);
  lh_op* const op = AllReduce(data, data, 4);
  ASSERT_TRUE(UntilPosts(1));
  ASSERT_EQ(lh_event_take(client_), LH_OK);
  pthread_mutex_lock(&client_->mutex);
  client_->reading = true;  // the other thread
  pthread_mutex_unlock(&client_->mutex);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  ASSERT_TRUE(Readable(fd, kPatienceMs));
  ASSERT_EQ(lh_event_take(client_), LH_OK);
  EXPECT_FALSE(Readable(fd, 0));
  int finished = 0;
  ASSERT_EQ(lh_op_test(op, &finished), LH_OK);
  EXPECT_EQ(finished, 0);
  // The other thread runs.
  pthread_mutex_lock(&client_->mutex);
  lhi_read_round_locked(client_, 0, false);
  pthread_mutex_unlock(&client_->mutex);
  EXPECT_TRUE(Readable(fd, 0));
  ASSERT_EQ(lh_event_take(client_), LH_OK);
  EXPECT_FALSE(Readable(fd, 0));
  ASSERT_EQ(lh_op_test(op, &finished), LH_OK);
  EXPECT_EQ(finished, 1);
  lh_op_free(op);
}

TEST_F(ClientTest, AnEventLoopBesideAHelperTurnsAFewTimesForEachOperation) {
  constexpr int kOps = 300;
  StartJoined();
  int fd = -1;
  ASSERT_EQ(lh_event_fd(client_, &fd), LH_OK) << lh_last_error();
  std::atomic<bool> over = false;
  std::thread helper([&] {
    while (!over) EXPECT_EQ(lh_help(client_, 20), LH_DEADLINE_EXCEEDED);
  });
  std::vector<float> plain(1000, 1.0f);
  int turns = 0;
  for (int i = 0; i < kOps; ++i) {
    lh_op* const op = AllReduce(plain.data(), plain.data(), plain.size());
    int finished = 0;
    while (finished == 0) {
      ASSERT_TRUE(Readable(fd, kPatienceMs)) << "nothing tells of operation " << i;
      ASSERT_EQ(lh_event_take(client_), LH_OK);
      ++turns;
      ASSERT_EQ(lh_op_test(op, &finished), LH_OK);
    }
    lh_op_free(op);
  }
  EXPECT_LT(turns, 8 * kOps);
  over = true;
  helper.join();
}

TEST_F(ClientTest, TheDescriptorTellsOfTheEndOfPeerd) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  int fd = -1;
  ASSERT_EQ(lh_event_fd(client_, &fd), LH_OK);
  ASSERT_EQ(lh_event_take(client_), LH_OK);
  float* const data = Alloc(4);
  lh_op* const op = AllReduce(data, data, 4);
  ASSERT_TRUE(UntilPosts(1));
  harness_.reset();
  ASSERT_TRUE(Readable(fd, kPatienceMs));
  while (lh_event_take(client_) == LH_OK) ASSERT_TRUE(Readable(fd, kPatienceMs));
  int finished = 0;
  ASSERT_EQ(lh_op_test(op, &finished), LH_OK);
  EXPECT_EQ(finished, 1);
  EXPECT_EQ(lh_op_wait(op, 0), LH_UNAVAILABLE);
  lh_op_free(op);
}

TEST_F(ClientTest, AWaitForSeveralEndsWithTheFirst) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(4);
  float plain[4] = {1, 2, 3, 4};
  lh_op* const ops[] = {AllReduce(data, data, 4), AllReduce(plain, plain, 4, /*tag=*/1)};
  ASSERT_TRUE(UntilPosts(2));
  uint32_t index = 7;
  EXPECT_EQ(lh_wait_any(client_, ops, 2, 1, &index), LH_DEADLINE_EXCEEDED);
  EXPECT_TRUE(Says("none of 2 operations")) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost({}, 1); });
  ASSERT_EQ(lh_wait_any(client_, ops, 2, kPatienceMs, &index), LH_OK) << lh_last_error();
  EXPECT_EQ(index, 1u);
  EXPECT_EQ(plain[3], 8.0f) << "the result is in the caller's tensor";
  EXPECT_EQ(lh_op_wait(ops[1], 0), LH_OK);
  EXPECT_EQ(lh_wait_any(client_, ops, 0, 0, &index), LH_INVALID_ARGUMENT);
  lh_op* const none[] = {ops[1], nullptr};
  EXPECT_EQ(lh_wait_any(client_, none, 2, 0, &index), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("ops[1] is NULL")) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    handler.FinishPost({Code::kAborted, "somebody died"});
  });
  ASSERT_EQ(lh_wait_any(client_, ops, 1, kPatienceMs, &index), LH_OK) << "a bad end is an end";
  EXPECT_EQ(lh_op_wait(ops[0], 0), LH_ABORTED);
  for (lh_op* op : ops) lh_op_free(op);
}

// The result of the first has to be copied, that of the second has not.
TEST_F(ClientTest, AWaitForSeveralNamesTheFirstInTheArrayOfThoseThatHaveEnded) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(8);
  float plain[4] = {1, 2, 3, 4};
  lh_op* const ops[] = {AllReduce(data, data, 4, /*tag=*/1), AllReduce(plain, plain, 4, /*tag=*/2),
                        AllReduce(data + 4, data + 4, 4, /*tag=*/3)};
  ASSERT_TRUE(UntilPosts(3));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    handler.FinishPost({}, 1);
    handler.FinishPost({}, 1);
  });
  ASSERT_EQ(lh_op_wait(ops[2], kPatienceMs), LH_OK) << "the answer before it has been read, too";
  uint32_t index = 7;
  ASSERT_EQ(lh_wait_any(client_, ops, 3, 0, &index), LH_OK);
  EXPECT_EQ(index, 1u);
  EXPECT_EQ(plain[3], 8.0f);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  EXPECT_EQ(lh_op_wait(ops[0], kPatienceMs), LH_OK);
  for (lh_op* op : ops) lh_op_free(op);
}

TEST_F(ClientTest, AnAnswerThatWasNotReadYetCountsForTheFirstThatHasEnded) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(4);
  float plain[4] = {1, 2, 3, 4};
  lh_op* const ops[] = {AllReduce(plain, plain, 4, /*tag=*/1), AllReduce(data, data, 4, /*tag=*/2)};
  ASSERT_TRUE(UntilPosts(2));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost({}, 1); });
  ASSERT_EQ(lh_op_wait(ops[1], kPatienceMs), LH_OK);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  pollfd poll_fd{client_->fd, POLLIN, 0};
  ASSERT_EQ(poll(&poll_fd, 1, kPatienceMs), 1) << "the answer has arrived";
  uint32_t index = 7;
  ASSERT_EQ(lh_wait_any(client_, ops, 2, 0, &index), LH_OK);
  EXPECT_EQ(index, 0u);
  EXPECT_EQ(plain[3], 8.0f);
  for (lh_op* op : ops) lh_op_free(op);
}

TEST_F(ClientTest, AnInfoThatWasNotInitializedIsRefusedAndLeftAlone) {
  StartJoined();
  float* const data = Alloc(4);
  lh_op* const op = AllReduce(data, data, 4);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  for (const uint32_t size : {0u, 3u, 40u, 5000u, 0xffffffffu}) {
    uint64_t ids[4] = {7, 7, 7, 7};
    lh_op_info_t info;
    memset(static_cast<void*>(&info), 0x5a, sizeof info);
    info.struct_size = size;
    info.members = ids;
    info.members_capacity = 4;
    lh_op_info_t before;
    memcpy(&before, &info, sizeof info);
    EXPECT_EQ(lh_op_info(op, &info), LH_INVALID_ARGUMENT) << size;
    EXPECT_TRUE(Says("LH_OP_INFO_INIT")) << lh_last_error();
    EXPECT_EQ(ids[0], 7u) << size;
    EXPECT_EQ(memcmp(&before, &info, sizeof info), 0) << size;
    lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
    options.source = options.target = data;
    options.count = 4;
    lh_op* none = nullptr;
    EXPECT_EQ(lh_all_reduce(comm_, &options, 0, &info, &none), LH_INVALID_ARGUMENT) << size;
    EXPECT_EQ(none, nullptr);
    EXPECT_EQ(memcmp(&before, &info, sizeof info), 0) << size;
  }
  lh_op_free(op);
}

TEST_F(ClientTest, TheHelperCopiesResultsThatNobodyWaitsFor) {
  StartJoined();
  EXPECT_EQ(lh_help(client_, 0), LH_DEADLINE_EXCEEDED);
  std::thread helper([this] { EXPECT_EQ(lh_help(client_, LH_FOREVER), LH_FAILED_PRECONDITION); });
  std::vector<float> plain(1000, 1.0f);
  lh_op* const op = AllReduce(plain.data(), plain.data(), plain.size());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  const auto ended = [&] {
    pthread_mutex_lock(&client_->mutex);
    const bool result = op->state == LHI_ENDED;
    pthread_mutex_unlock(&client_->mutex);
    return result;
  };
  while (!ended()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  EXPECT_EQ(plain.back(), 2.0f);
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  EXPECT_EQ(plain.front(), 2.0f);
  lh_op_free(op);
  // Other threads wait as before, and an op may be freed while its result is copied.
  for (int i = 0; i < 100; ++i) {
    lh_op* const next = AllReduce(plain.data(), plain.data(), plain.size());
    if (i % 2 == 0) {
      ASSERT_EQ(lh_op_wait(next, kPatienceMs), LH_OK) << lh_last_error();
    } else {
      int finished = 0;
      while (finished == 0) ASSERT_EQ(lh_op_test(next, &finished), LH_OK);
    }
    lh_op_free(next);
    std::fill(plain.begin(), plain.end(), 1.0f);
  }
  lh_comm_free(comm_);
  comm_ = nullptr;
  lh_close(std::exchange(client_, nullptr));
  helper.join();
}

TEST_F(ClientTest, AnAllReduceInOneCallGivesItsOutcomeOrTheOperationThatGoesOn) {
  Start();
  Open();
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  float* const data = Alloc(4);
  float plain[4] = {1, 2, 3, 4};
  lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
  options.source = plain;
  options.target = data;
  options.count = 4;
  lh_op_info_t info = LH_OP_INFO_INIT;
  lh_op* op = reinterpret_cast<lh_op*>(8);
  ASSERT_EQ(lh_all_reduce(comm_, &options, kPatienceMs, &info, &op), LH_OK) << lh_last_error();
  EXPECT_EQ(op, nullptr);
  EXPECT_EQ(data[3], 8.0F);
  EXPECT_EQ(info.world_size, 2U);
  EXPECT_EQ(info.staged, 1U);
  EXPECT_EQ(lh_all_reduce(comm_, &options, kPatienceMs, nullptr, &op), LH_OK) << "info may be NULL";

  options.min_world = LH_MEMBERS_MAX + 1;
  EXPECT_EQ(lh_all_reduce(comm_, &options, kPatienceMs, &info, &op), LH_INVALID_ARGUMENT);
  EXPECT_EQ(op, nullptr);
  options.min_world = 0;
  EXPECT_EQ(lh_all_reduce(comm_, &options, -7, &info, &op), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_all_reduce(comm_, &options, 0, &info, nullptr), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_all_reduce(nullptr, &options, 0, &info, &op), LH_INVALID_ARGUMENT);
  info.struct_size = 3;
  EXPECT_EQ(lh_all_reduce(comm_, &options, kPatienceMs, &info, &op), LH_INVALID_ARGUMENT);
  info.struct_size = sizeof info;

  Hold(&ScriptedHandler::hold_posts);
  plain[0] = 7;
  EXPECT_EQ(lh_all_reduce(comm_, &options, 1, &info, &op), LH_DEADLINE_EXCEEDED);
  EXPECT_TRUE(Says("within 1 ms")) << lh_last_error();
  ASSERT_NE(op, nullptr);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  EXPECT_EQ(data[0], 14.0F);
  lh_op_free(op);

  std::thread peerd([&] {
    EXPECT_TRUE(UntilPosts(1));
    harness_->Run([](ScriptedHandler& handler, IpcServer&) {
      handler.FinishPost({Code::kTooFewMembers, "2 members take part"});
    });
  });
  EXPECT_EQ(lh_all_reduce(comm_, &options, kPatienceMs, &info, &op), LH_TOO_FEW_MEMBERS);
  peerd.join();
  EXPECT_TRUE(Says("2 members take part")) << lh_last_error();
  EXPECT_EQ(op, nullptr);
}

TEST_F(ClientTest, WhatPeerdRefusesIsTheOutcomeOfAnOpAndTheMemberGoesOn) {
  StartJoined();
  float* const data = Alloc(1025);
  lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
  EXPECT_EQ(options.algorithm, LH_AUTO);
  options.source = options.target = data;
  options.count = 1025;
  options.algorithm = LH_ONESHOT;
  lh_op* op = nullptr;
  ASSERT_EQ(lh_all_reduce_start(comm_, &options, &op), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("at most 4096 bytes, this one 4100")) << lh_last_error();
  lh_op_free(op);
  options.algorithm = LH_LOCAL;
  EXPECT_EQ(lh_all_reduce(comm_, &options, kPatienceMs, nullptr, &op), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("all-reduce refused: algorithm is 4, not at most 3")) << lh_last_error();
  EXPECT_EQ(op, nullptr);
  options.algorithm = LH_AUTO;
  EXPECT_EQ(lh_all_reduce(comm_, &options, kPatienceMs, nullptr, &op), LH_OK) << lh_last_error();
}

TEST_F(ClientTest, AJoinThatTakesTooLongIsWithdrawn) {
  Start();
  Hold(&ScriptedHandler::hold_joins);
  Open();
  lh_join_options options = LH_JOIN_OPTIONS_INIT;
  options.timeout_ms = 1;
  EXPECT_EQ(lh_join(client_, &options, &comm_), LH_DEADLINE_EXCEEDED);
  EXPECT_EQ(comm_, nullptr);
  EXPECT_TRUE(Says("withdrawn")) << lh_last_error();
  EXPECT_TRUE(harness_->Until([](ScriptedHandler& handler, IpcServer& server) {
    return handler.events.size() == 2 && handler.events[1] == "leave 1" &&
           server.GetStats().members == 0;
  }));
  // The connection still works.
  Hold(&ScriptedHandler::hold_joins, false);
  EXPECT_EQ(lh_join(client_, nullptr, &comm_), LH_OK) << lh_last_error();
}

TEST_F(ClientTest, AJoinThatIsRefusedGivesTheReason) {
  Start();
  Hold(&ScriptedHandler::hold_joins);
  Open();
  lh_op* op = nullptr;
  ASSERT_EQ(lh_join_start(client_, nullptr, &comm_, &op), LH_OK);
  EXPECT_EQ(lh_op_wait(op, 0), LH_DEADLINE_EXCEEDED);
  lh_world_info world = LH_WORLD_INFO_INIT;
  EXPECT_EQ(lh_world(comm_, &world), LH_FAILED_PRECONDITION);
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_FAILED_PRECONDITION);
  ASSERT_TRUE(UntilEvents(1));
  harness_->Run([](ScriptedHandler&, IpcServer& server) {
    server.JoinDone(LocalId(1), {Code::kUnavailable, "no coordinator"}, {}, false);
  });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_UNAVAILABLE);
  EXPECT_STREQ(lh_last_error(), "no coordinator");
  EXPECT_EQ(lh_world(comm_, &world), LH_UNAVAILABLE);
  lh_op_free(op);
  lh_comm_free(comm_);
  EXPECT_EQ(harness_->Stats().members, 0u);
}

TEST_F(ClientTest, AStepThatTookTooLongIsWaitedForByTheNextCall) {
  StartJoined();
  Hold(&ScriptedHandler::hold_steps);
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_DEADLINE_EXCEEDED);
  EXPECT_EQ(lh_begin_step(comm_, 1), LH_DEADLINE_EXCEEDED);
  ASSERT_TRUE(UntilEvents(2));
  harness_->Run([](ScriptedHandler& handler, IpcServer& server) {
    handler.epoch = 9;
    server.StepDone(LocalId(1), {}, handler.WorldOf(LocalId(1)));
  });
  EXPECT_EQ(lh_begin_step(comm_, kPatienceMs), LH_OK) << lh_last_error();
  EXPECT_EQ(harness_->Events().size(), 2u) << "one step only";
  lh_op* op = nullptr;
  ASSERT_EQ(lh_begin_step_start(comm_, &op), LH_OK);
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_FAILED_PRECONDITION);
  lh_op_free(op);
}

TEST_F(ClientTest, ALeaveThatTookTooLongIsWaitedForByTheNextCall) {
  StartJoined();
  Hold(&ScriptedHandler::hold_leaves);
  EXPECT_EQ(lh_leave(comm_, 0), LH_DEADLINE_EXCEEDED);
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_FAILED_PRECONDITION);
  ASSERT_TRUE(UntilEvents(2));
  harness_->Run([](ScriptedHandler&, IpcServer& server) { server.LeaveDone(LocalId(1), {}); });
  EXPECT_EQ(lh_leave(comm_, kPatienceMs), LH_OK) << lh_last_error();
}

// A program that polls lh_leave() and does other things meanwhile.
TEST_F(ClientTest, ALeaveWhoseAnswerAnotherCallHasReadIsStillOk) {
  StartJoined();
  Hold(&ScriptedHandler::hold_leaves);
  EXPECT_EQ(lh_leave(comm_, 0), LH_DEADLINE_EXCEEDED);
  ASSERT_TRUE(UntilEvents(2));
  harness_->Run([](ScriptedHandler&, IpcServer& server) { server.LeaveDone(LocalId(1), {}); });
  lh_world_info world = LH_WORLD_INFO_INIT;
  while (lh_world(comm_, &world) == LH_OK) std::this_thread::yield();
  EXPECT_TRUE(Says("has left")) << lh_last_error();
  EXPECT_EQ(lh_leave(comm_, 0), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_leave(comm_, 0), LH_FAILED_PRECONDITION) << "it was told";
}

// A peerd that is stopped: its reactor waits until the test lets it go on.
TEST_F(ClientTest, APeerdThatReadsNothingHoldsUpNoCallThatOnlyBegins) {
  constexpr size_t kOps = 700;  // the socket has room for some 230
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(kOps + 1);
  lh_op* const waited = AllReduce(data + kOps, data + kOps, 1, /*tag=*/kOps);
  ASSERT_TRUE(UntilPosts(1));
  std::thread waiter([&] { EXPECT_EQ(lh_op_wait(waited, kPatienceMs), LH_OK); });
  ASSERT_TRUE(Soon([&] {
    pthread_mutex_lock(&client_->mutex);
    const bool reading = client_->reading;
    pthread_mutex_unlock(&client_->mutex);
    return reading;
  })) << "the waiter is the reader";
  std::promise<void> stopped, go_on;
  std::thread stopper([&] {
    harness_->Run([&](ScriptedHandler&, IpcServer&) {
      stopped.set_value();
      go_on.get_future().wait();
    });
  });
  stopped.get_future().wait();

  auto begun = std::chrono::steady_clock::now();
  std::vector<lh_op*> ops;
  for (size_t i = 0; i < kOps; ++i) ops.push_back(AllReduce(data + i, data + i, 1, /*tag=*/i));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));
  EXPECT_NE(client_->unsent, nullptr);
  EXPECT_EQ(lh_op_wait(ops.back(), 0), LH_DEADLINE_EXCEEDED);
  begun = std::chrono::steady_clock::now();
  lh_join_options options = LH_JOIN_OPTIONS_INIT;
  options.timeout_ms = 200;
  lh_comm* other = nullptr;
  EXPECT_EQ(lh_join(client_, &options, &other), LH_DEADLINE_EXCEEDED);
  EXPECT_TRUE(Says("peerd does not answer")) << lh_last_error();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));

  go_on.set_value();
  stopper.join();
  // Nobody calls the library but the thread that waits.
  ASSERT_TRUE(UntilPosts(kOps + 1));
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    for (size_t i = 0; i <= kOps; ++i) handler.FinishPost({}, 0);
  });
  waiter.join();
  for (lh_op* op : ops) EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  for (lh_op* op : ops) lh_op_free(op);
  lh_op_free(waited);
  EXPECT_EQ(client_->unsent, nullptr);
}

// The same for a program that waits for the descriptor.
TEST_F(ClientTest, TheDescriptorTellsThatRequestsThatWaitCanBeSent) {
  constexpr size_t kOps = 700;
  StartJoined();
  float* const data = Alloc(kOps);
  int fd = -1;
  ASSERT_EQ(lh_event_fd(client_, &fd), LH_OK);
  std::promise<void> stopped, go_on;
  std::thread stopper([&] {
    harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
      handler.hold_posts = true;
      stopped.set_value();
      go_on.get_future().wait();
    });
  });
  stopped.get_future().wait();
  std::vector<lh_op*> ops;
  for (size_t i = 0; i < kOps; ++i) ops.push_back(AllReduce(data + i, data + i, 1, /*tag=*/i));
  ASSERT_NE(client_->unsent, nullptr);
  ASSERT_EQ(lh_event_take(client_), LH_OK);
  pollfd poll_fd{fd, POLLIN, 0};
  EXPECT_EQ(poll(&poll_fd, 1, 0), 0);
  go_on.set_value();
  stopper.join();
  while (client_->unsent != nullptr) {
    ASSERT_EQ(poll(&poll_fd, 1, kPatienceMs), 1);
    ASSERT_EQ(lh_event_take(client_), LH_OK);
  }
  ASSERT_TRUE(UntilPosts(kOps));
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    for (size_t i = 0; i < kOps; ++i) handler.FinishPost({}, 0);
  });
  for (lh_op* op : ops) EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  for (lh_op* op : ops) lh_op_free(op);
}

TEST_F(ClientTest, FreeingACommunicatorLeaves) {
  StartJoined();
  lh_comm_free(comm_);
  EXPECT_TRUE(harness_->Until(
      [](ScriptedHandler&, IpcServer& server) { return server.GetStats().members == 0; }));
  EXPECT_EQ(harness_->Events().back(), "leave 1");
}

TEST_F(ClientTest, AMemberThatWasRemovedIsToldWhy) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(4);
  lh_op* const op = AllReduce(data, data, 4);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler&, IpcServer& server) {
    server.MemberGone(LocalId(1), {Code::kEvicted, "evicted by an operator"});
  });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_EVICTED);
  lh_world_info world = LH_WORLD_INFO_INIT;
  EXPECT_EQ(lh_world(comm_, &world), LH_EVICTED);
  EXPECT_TRUE(Says("evicted by an operator")) << lh_last_error();
  EXPECT_EQ(lh_begin_step(comm_, kPatienceMs), LH_EVICTED);
  EXPECT_EQ(lh_leave(comm_, kPatienceMs), LH_OK) << "it is out";
  lh_op_free(op);
}

// ------------------------------------------------------------------------------ operations

TEST_F(ClientTest, ArenaTensorsTravelWithoutACopy) {
  StartJoined();
  constexpr size_t kCount = 1 << 18;
  float* const source = Alloc(kCount);
  float* const target = Alloc(kCount);
  std::iota(source, source + kCount, 0.0f);
  lh_op* const op = AllReduce(source, target, kCount, 7);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  for (size_t i = 0; i < kCount; i += 1001) EXPECT_EQ(target[i], 2.0f * static_cast<float>(i));
  EXPECT_EQ(source[5], 5.0f);
  lh_op_info_t info = LH_OP_INFO_INIT;
  ASSERT_EQ(lh_op_info(op, &info), LH_OK);
  EXPECT_EQ(info.staged, 0u);
  EXPECT_EQ(info.world_size, 2u);
  EXPECT_EQ(info.retries, 1u);
  EXPECT_EQ(info.bytes_sent, kCount * 4);
  EXPECT_DOUBLE_EQ(info.seconds, 0.003);
  EXPECT_DOUBLE_EQ(info.seconds_wait, 0.001);
  EXPECT_EQ(info.algorithm, LH_MESH);
  EXPECT_EQ(lh_op_wait(op, 0), LH_OK) << "the outcome stays";
  lh_op_free(op);
}

TEST_F(ClientTest, AnInPlaceOpInTheArenaIsOneRange) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(16);
  lh_op* const op = AllReduce(data + 4, data + 4, 8);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.posts[0].sources[0], handler.posts[0].targets[0]);
    handler.FinishPost();
  });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  lh_op_free(op);
}

TEST_F(ClientTest, OtherTensorsAreStaged) {
  StartJoined();
  std::vector<float> source(1000, 3.0f);
  std::vector<float> target(1000, 1.0f);
  lh_op* op = AllReduce(source.data(), target.data(), 1000);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  EXPECT_EQ(target, std::vector<float>(1000, 6.0f));
  EXPECT_EQ(source, std::vector<float>(1000, 3.0f));
  lh_op_info_t info = LH_OP_INFO_INIT;
  ASSERT_EQ(lh_op_info(op, &info), LH_OK);
  EXPECT_EQ(info.staged, 1u);
  lh_op_free(op);
  op = AllReduce(source.data(), source.data(), 1000);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  EXPECT_EQ(source, std::vector<float>(1000, 6.0f));
  lh_op_free(op);
  float* const arena = Alloc(1000);
  op = AllReduce(source.data(), arena, 1000);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  EXPECT_EQ(arena[999], 12.0f);
  lh_op_free(op);
  op = AllReduce(arena, target.data(), 1000);
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  EXPECT_EQ(target[999], 24.0f);
  lh_op_free(op);
}

TEST_F(ClientTest, AStagedOpInPlaceHasATargetOfItsOwn) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  std::vector<float> data(100, 3.0f);
  lh_op* const op = AllReduce(data.data(), data.data(), 100);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_NE(handler.posts[0].sources[0], handler.posts[0].targets[0]);
    handler.posts[0].targets[0][0] = 99;  // half a result
    handler.FinishPost({Code::kAborted, "a member died"});
  });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_ABORTED);
  EXPECT_STREQ(lh_last_error(), "a member died");
  EXPECT_EQ(data, std::vector<float>(100, 3.0f)) << "untouched";
  lh_op_free(op);
}

TEST_F(ClientTest, TestNeverBlocks) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  std::vector<float> data(10, 1.0f);
  lh_op* const op = AllReduce(data.data(), data.data(), 10);
  int finished = 7;
  ASSERT_EQ(lh_op_test(op, &finished), LH_OK);
  EXPECT_EQ(finished, 0);
  lh_op_info_t info = LH_OP_INFO_INIT;
  EXPECT_EQ(lh_op_info(op, &info), LH_FAILED_PRECONDITION);
  EXPECT_EQ(lh_op_wait(op, 1), LH_DEADLINE_EXCEEDED);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  while (finished == 0) ASSERT_EQ(lh_op_test(op, &finished), LH_OK);
  EXPECT_EQ(data[9], 2.0f);
  EXPECT_EQ(lh_op_wait(op, 0), LH_OK);
  lh_op_free(op);
}

TEST_F(ClientTest, ManyThreadsWaitAtOnceForOutcomesInAnyOrder) {
  StartJoined();
  constexpr int kThreads = 6;
  constexpr int kRounds = 60;
  std::atomic<int> wrong{0};
  std::atomic<int> running{kThreads};
  Hold(&ScriptedHandler::hold_posts);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<float> staged(256 + static_cast<size_t>(t));
      for (int round = 0; round < kRounds; ++round) {
        const auto value = static_cast<float>(t * 1000 + round);
        std::fill(staged.begin(), staged.end(), value);
        lh_op* const op =
            AllReduce(staged.data(), staged.data(), staged.size(), static_cast<uint64_t>(t));
        if (round % 3 == 0) (void)lh_op_wait(op, 0);
        if (lh_op_wait(op, kPatienceMs) != LH_OK) ++wrong;
        for (const float x : staged) wrong += x != 2 * value;
        lh_op_free(op);
        lh_world_info world = LH_WORLD_INFO_INIT;
        if (lh_world(comm_, &world) != LH_OK) ++wrong;
      }
      --running;
    });
  }
  size_t turn = 0;
  while (running > 0) {
    harness_->Run([&turn](ScriptedHandler& handler, IpcServer&) {
      if (!handler.posts.empty()) handler.FinishPost({}, turn++ % handler.posts.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ClientTest, TwoThreadsMayWaitForOneOp) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  std::vector<float> data(1 << 16, 1.0f);
  lh_op* const op = AllReduce(data.data(), data.data(), data.size());
  std::thread other([op, &data] {
    EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
    EXPECT_EQ(data.back(), 2.0f);
  });
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  EXPECT_EQ(data.back(), 2.0f);
  other.join();
  lh_op_free(op);
}

TEST_F(ClientTest, OpsThatNobodyWaitsForDoNotPileUp) {
  StartJoined();
  float* const data = Alloc(4);
  for (int i = 0; i < 10000; ++i) {
    lh_op* const op = AllReduce(data, data, 4, static_cast<uint64_t>(i));
    lh_op_free(op);
  }
  EXPECT_EQ(harness_->Stats().connections_cut, 0u);
  EXPECT_EQ(lh_begin_step(comm_, kPatienceMs), LH_OK) << lh_last_error();
}

TEST_F(ClientTest, PeerdAnswersWhatTheClientCannotKnow) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(8);
  lh_op* const first = AllReduce(data, data, 4, 5);
  lh_op* const second = AllReduce(data + 4, data + 4, 4, 5);  // the same tag
  ASSERT_TRUE(harness_->Until(
      [](ScriptedHandler& handler, IpcServer&) { return handler.posts.size() == 2; }));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    handler.FinishPost({Code::kInvalidArgument, "all-reduce tag 5 refused"});
  });
  EXPECT_EQ(lh_op_wait(second, kPatienceMs), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("tag 5")) << lh_last_error();
  lh_op_free(second);
  lh_op_free(first);
}

TEST_F(ClientTest, AllReduceChecksItsArguments) {
  StartJoined();
  float* const data = Alloc(64);
  lh_op* op = nullptr;
  const auto start = [&](auto spoil) {
    lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
    options.source = data;
    options.target = data;
    options.count = 16;
    spoil(&options);
    op = reinterpret_cast<lh_op*>(8);
    const lh_status status = lh_all_reduce_start(comm_, &options, &op);
    if (status != LH_OK) {
      EXPECT_EQ(op, nullptr);
      EXPECT_STRNE(lh_last_error(), "");
    }
    return status;
  };
  using Options = lh_all_reduce_options;
  EXPECT_EQ(start([](Options* o) { o->source = nullptr; }), LH_INVALID_ARGUMENT);
  EXPECT_EQ(start([](Options* o) { o->target = nullptr; }), LH_INVALID_ARGUMENT);
  EXPECT_EQ(start([](Options* o) { o->count = UINT64_MAX; }), LH_INVALID_ARGUMENT);
  EXPECT_EQ(start([](Options* o) { o->count = 65; }), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("lh_alloc")) << lh_last_error();
  EXPECT_EQ(start([](Options* o) { o->dtype = static_cast<lh_dtype>(15); }), LH_INVALID_ARGUMENT);
  EXPECT_EQ(start([](Options* o) { o->op = static_cast<lh_reduce_op>(300); }), LH_INVALID_ARGUMENT);
  // peerd checks what the request can carry.
  EXPECT_EQ(start([](Options* o) { o->op = static_cast<lh_reduce_op>(5); }), LH_OK);
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_INVALID_ARGUMENT);
  lh_op_free(op);
  EXPECT_EQ(start([&](Options* o) { o->target = data + 15; }), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("overlap")) << lh_last_error();
  EXPECT_EQ(start([&](Options* o) { o->target = reinterpret_cast<char*>(data) + 65; }),
            LH_INVALID_ARGUMENT);
  EXPECT_EQ(start([](Options* o) { o->struct_size = 4; }), LH_INVALID_ARGUMENT);
  EXPECT_EQ(start([&](Options* o) { o->target = data + 16; }), LH_OK);
  EXPECT_EQ(lh_op_wait(op, -7), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  lh_op_free(op);
  lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
  EXPECT_EQ(lh_all_reduce_start(nullptr, &options, &op), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_all_reduce_start(comm_, nullptr, &op), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_all_reduce_start(comm_, &options, nullptr), LH_INVALID_ARGUMENT);
}

TEST_F(ClientTest, NullIsRefusedEverywhere) {
  StartJoined();
  void* data = nullptr;
  uint32_t count = 0;
  int finished = 0;
  lh_op* op = nullptr;
  lh_world_info world = LH_WORLD_INFO_INIT;
  lh_op_info_t info = LH_OP_INFO_INIT;
  EXPECT_EQ(lh_alloc(nullptr, 8, &data), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_alloc(client_, 8, nullptr), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_alloc(client_, 0, &data), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_alloc(client_, SIZE_MAX, &data), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_client_check(nullptr), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_free(nullptr, &data), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_free(client_, &data), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_free(client_, nullptr), LH_OK);
  EXPECT_EQ(lh_join(nullptr, nullptr, &comm_), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_join(client_, nullptr, nullptr), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_join_start(client_, nullptr, nullptr, &op), LH_INVALID_ARGUMENT);
  lh_join_options join = LH_JOIN_OPTIONS_INIT;
  for (const char* run : {static_cast<const char*>(nullptr), "", "a b"}) {
    join.run = run;
    EXPECT_EQ(lh_join(client_, &join, &comm_), LH_INVALID_ARGUMENT);
  }
  EXPECT_EQ(lh_world(nullptr, &world), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_members(nullptr, nullptr, 0, &count), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_step_members(nullptr, nullptr, 0, &count), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_begin_step(nullptr, 0), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_begin_step_start(nullptr, &op), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_leave(nullptr, 0), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_leave_start(nullptr, &op), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_op_wait(nullptr, 0), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_op_test(nullptr, &finished), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_op_info(nullptr, &info), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_op_cancel(nullptr), LH_INVALID_ARGUMENT);
  lh_op_free(nullptr);
  lh_comm_free(nullptr);
  lh_close(nullptr);
  EXPECT_EQ(lh_dtype_size(LH_BFLOAT16), 2u);
  EXPECT_EQ(lh_dtype_size(static_cast<lh_dtype>(99)), 0u);
  EXPECT_STREQ(lh_strerror(LH_STATE_MISMATCH), "LH_STATE_MISMATCH");
  EXPECT_STREQ(lh_version(), "0.1.0");
}

// ------------------------------------------------------------------------------ arena

TEST_F(ClientTest, RegionsComeWithDemandAndGoWithIt) {
  Start();
  Open();
  EXPECT_EQ(harness_->Stats().arena_bytes, 0u) << "nothing before it is needed";
  std::vector<void*> blocks(8);
  for (void*& block : blocks) ASSERT_EQ(lh_alloc(client_, 200 * kMiB, &block), LH_OK);
  EXPECT_EQ(harness_->Stats().arena_bytes, 1600 * kMiB);
  for (void* block : blocks) EXPECT_EQ(lh_free(client_, block), LH_OK);
  EXPECT_TRUE(harness_->Until([](ScriptedHandler&, IpcServer& server) {
    return server.GetStats().arena_bytes == 200 * kMiB;
  }));
  void* small = nullptr;
  ASSERT_EQ(lh_alloc(client_, 100, &small), LH_OK);
  EXPECT_EQ(harness_->Stats().arena_bytes, 200 * kMiB) << "what was kept is used";
}

TEST_F(ClientTest, ABufferInUseIsNotFreed) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(64);
  lh_op* const op = AllReduce(data + 8, data + 8, 8);
  EXPECT_EQ(lh_free(client_, data), LH_FAILED_PRECONDITION);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  EXPECT_EQ(lh_free(client_, data + 8), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_free(client_, data), LH_OK);
  EXPECT_EQ(lh_free(client_, data), LH_INVALID_ARGUMENT) << "twice";
  lh_op_free(op);
}

TEST_F(ClientTest, ABufferIsFreeWhenItsOpHasEndedThoughNobodyWaitedForIt) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(64);
  lh_op_free(AllReduce(data, data, 8));
  EXPECT_EQ(lh_free(client_, data), LH_FAILED_PRECONDITION);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
  EXPECT_TRUE(Soon([&] { return lh_free(client_, data) == LH_OK; })) << lh_last_error();
}

TEST_F(ClientTest, TheArenaLimitOfPeerdIsNamed) {
  IpcServerOptions options;
  options.arena_limit = 8 * kMiB;
  StartJoined(options);
  void* data = nullptr;
  // The block is smaller than a default region, and the arena limit has room for it.
  ASSERT_EQ(lh_alloc(client_, 5 * kMiB, &data), LH_OK) << lh_last_error();
  void* more = nullptr;
  EXPECT_EQ(lh_alloc(client_, 5 * kMiB, &more), LH_UNAVAILABLE);
  EXPECT_EQ(more, nullptr);
  EXPECT_TRUE(Says("arena limit")) << lh_last_error();
  std::vector<float> tensor(2 * kMiB);
  lh_all_reduce_options op_options = LH_ALL_REDUCE_OPTIONS_INIT;
  op_options.source = op_options.target = tensor.data();
  op_options.count = tensor.size();
  lh_op* op = nullptr;
  EXPECT_EQ(lh_all_reduce_start(comm_, &op_options, &op), LH_UNAVAILABLE) << "cannot be staged";
  EXPECT_EQ(lh_free(client_, data), LH_OK);
  op_options.count = kMiB / 2;
  ASSERT_EQ(lh_all_reduce_start(comm_, &op_options, &op), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK);
  lh_op_free(op);
}

// ------------------------------------------------------------------------------ ends

TEST_F(ClientTest, WhenPeerdDiesEveryOpEnds) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  std::vector<float> data(100, 1.0f);
  lh_op* const first = AllReduce(data.data(), data.data(), 50, 1);
  lh_op* const second = AllReduce(data.data() + 50, data.data() + 50, 50, 2);
  ASSERT_TRUE(UntilPosts(2));
  std::thread waiter([first] { EXPECT_EQ(lh_op_wait(first, LH_FOREVER), LH_UNAVAILABLE); });
  harness_->Stop();
  EXPECT_EQ(lh_op_wait(second, LH_FOREVER), LH_UNAVAILABLE);
  EXPECT_TRUE(Says("peerd closed the connection")) << lh_last_error();
  waiter.join();
  EXPECT_EQ(data, std::vector<float>(100, 1.0f));
  lh_world_info world = LH_WORLD_INFO_INIT;
  EXPECT_EQ(lh_world(comm_, &world), LH_UNAVAILABLE);
  EXPECT_EQ(lh_begin_step(comm_, LH_FOREVER), LH_UNAVAILABLE);
  EXPECT_EQ(lh_leave(comm_, LH_FOREVER), LH_UNAVAILABLE);
  lh_comm* comm = nullptr;
  EXPECT_EQ(lh_join(client_, nullptr, &comm), LH_UNAVAILABLE);
  void* memory = nullptr;
  EXPECT_EQ(lh_alloc(client_, 64, &memory), LH_UNAVAILABLE);
  lh_op_free(first);
  lh_op_free(second);
  lh_comm_free(comm_);
}

TEST_F(ClientTest, AnOrderlyShutdownOfPeerdSaysSo) {
  StartJoined();
  harness_->Run([](ScriptedHandler&, IpcServer& server) { server.Close(); });
  EXPECT_EQ(lh_begin_step(comm_, LH_FOREVER), LH_UNAVAILABLE);
  EXPECT_TRUE(Says("peerd has shut down")) << lh_last_error();
}

TEST_F(ClientTest, AClientTellsWhetherItsConnectionStandsWithoutBeingUsed) {
  StartJoined();
  EXPECT_EQ(lh_client_check(client_), LH_OK) << lh_last_error();
  harness_->Stop();
  EXPECT_EQ(lh_client_check(client_), LH_UNAVAILABLE);
  EXPECT_TRUE(Says("peerd closed the connection")) << lh_last_error();
}

TEST_F(ClientTest, ClosingWithoutLeavingIsADeath) {
  StartJoined();
  Hold(&ScriptedHandler::hold_posts);
  float* const data = Alloc(4);
  (void)AllReduce(data, data, 4);
  ASSERT_TRUE(UntilPosts(1));
  const int before = OpenDescriptors();
  lh_close(client_);
  client_ = nullptr;
  EXPECT_TRUE(harness_->Until([](ScriptedHandler& handler, IpcServer& server) {
    return handler.events.back() == "gone 1 trainer closed its connection" &&
           server.GetStats().clients == 0;
  }));
  EXPECT_EQ(OpenDescriptors(), before - 3) << "one at each end, and that of the region";
}

// ThreadSanitizer does not support threads on both sides of a fork().
#if !defined(__SANITIZE_THREAD__)
TEST_F(ClientTest, AForkedChildIsRefusedAndDoesNotKeepTheConnection) {
  StartJoined();
  float* const data = Alloc(4);
  int to_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(to_child[1]);
    lh_op* op = nullptr;
    void* memory = nullptr;
    lh_comm* comm = nullptr;
    lh_world_info world = LH_WORLD_INFO_INIT;
    const bool refused = lh_begin_step_start(comm_, &op) == LH_FAILED_PRECONDITION &&
                         lh_alloc(client_, 8, &memory) == LH_FAILED_PRECONDITION &&
                         lh_free(client_, data) == LH_FAILED_PRECONDITION &&
                         lh_join(client_, nullptr, &comm) == LH_FAILED_PRECONDITION &&
                         lh_client_check(client_) == LH_FAILED_PRECONDITION &&
                         lh_world(comm_, &world) == LH_FAILED_PRECONDITION && Says("forked");
    lh_comm_free(comm_);
    lh_close(client_);
    char byte;
    (void)!read(to_child[0], &byte, 1);  // lives until the parent has closed
    _exit(refused ? 0 : 1);
  }
  close(to_child[0]);
  EXPECT_EQ(lh_begin_step(comm_, kPatienceMs), LH_OK) << lh_last_error();
  lh_close(client_);
  client_ = nullptr;
  EXPECT_TRUE(harness_->Until([](ScriptedHandler&, IpcServer& server) {
    return server.GetStats().clients == 0;
  })) << "the child holds the connection open";
  close(to_child[1]);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// The memory is shared with peerd, but not with children of fork().
TEST_F(ClientTest, AForkedChildWritesToMemoryOfItsOwn) {
  StartJoined();
  float* const data = Alloc(4);
  std::iota(data, data + 4, 1.0f);
  // What the region holds, as peerd sees it: allocated blocks of the file.
  const int region = dup(client_->arena.regions->fd);
  ASSERT_GE(region, 0);
  int to_child[2];
  int to_parent[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(to_parent), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(to_child[1]);
    const bool reads = data[3] == 4.0f;
    for (int i = 0; i < 4; ++i) data[i] = -1.0f;
    char byte = 0;
    const bool told = write(to_parent[1], &byte, 1) == 1 && read(to_child[0], &byte, 1) == 0;
    _exit(reads && told && data[0] == -1.0f ? 0 : 1);
  }
  close(to_child[0]);
  char byte;
  ASSERT_EQ(read(to_parent[0], &byte, 1), 1);
  EXPECT_EQ(data[0], 1.0f) << "the child has written to the parent's memory";
  lh_op* const op = AllReduce(data, data, 4);
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  EXPECT_EQ(data[3], 8.0f);
  lh_op_free(op);
  struct stat file = {};
  ASSERT_EQ(fstat(region, &file), 0);
  EXPECT_GT(file.st_blocks, 0);
  lh_close(client_);
  client_ = nullptr;
  ASSERT_EQ(fstat(region, &file), 0);
  EXPECT_EQ(file.st_blocks, 0) << "the child keeps the memory of the host";
  close(region);
  close(to_child[1]);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(to_parent[0]);
  close(to_parent[1]);
}
#endif

// ------------------------------------------------------------------------------ C++

// A copy of an info outlives the info, and so does the C struct that is a part of it.
TEST_F(ClientTest, ACppInfoCanBeCopied) {
  Start();
  longhaul::Client client(harness_->path(), "cpp");
  longhaul::Comm comm = client.Join("run", 1);
  longhaul::Buffer<float> x(client, 4);
  longhaul::OpInfo copy;
  lh_op_info_t slice;
  {
    const longhaul::OpInfo info = comm.AllReduce(x);
    copy = info;
    slice = info;
    EXPECT_EQ(info.members, (std::vector<uint64_t>{1, 2}));
  }
  EXPECT_EQ(copy.members, (std::vector<uint64_t>{1, 2}));
  const longhaul::OpInfo again = copy;
  for (const lh_op_info_t& each : std::vector<lh_op_info_t>{slice, copy, again}) {
    EXPECT_EQ(each.world_size, 2u);
    EXPECT_EQ(each.members, nullptr);
    EXPECT_EQ(each.members_capacity, 0u);
  }
}

TEST_F(ClientTest, TheCppHeaderCleansUpAfterItself) {
  Start();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.members = {MemberId(7)}; });
  {
    longhaul::Client client(harness_->path(), "cpp");
    longhaul::Comm comm = client.Join("run", 1);
    longhaul::Buffer<float> x(client, 1000);
    std::fill(x.begin(), x.end(), 1.5f);
    comm.BeginStep();
    const lh_op_info_t info = comm.AllReduce(x, LH_SUM);
    EXPECT_EQ(info.world_size, 2u);
    EXPECT_EQ(x[999], 3.0f);
    EXPECT_EQ(comm.World().size, 2u);
    EXPECT_EQ(comm.Members(), std::vector<uint64_t>{7});
    longhaul::Op op = comm.AllReduceStart(x.data(), x.data(), x.size(), LH_SUM, 9);
    longhaul::Op moved = std::move(op);
    EXPECT_TRUE(moved.Wait(kPatienceMs));
    EXPECT_TRUE(moved.Finished());
    try {
      comm.AllReduce(x.data(), 2000);
      ADD_FAILURE() << "more elements than the buffer has passed";
    } catch (const longhaul::Error& error) {
      EXPECT_EQ(error.status(), LH_INVALID_ARGUMENT);
      EXPECT_NE(std::string(error.what()).find("not within one buffer"), std::string::npos);
    }
  }
  EXPECT_TRUE(harness_->Until([](ScriptedHandler& handler, IpcServer& server) {
    return server.GetStats().clients == 0 && server.GetStats().arena_bytes == 0 &&
           handler.events.back() == "leave 1";
  }));
  EXPECT_THROW(longhaul::Client("/tmp/no-such-directory/x", "", 0), longhaul::Error);
}

// A polling loop meets the outcome at any moment, also between the look at the socket and the look
// at the op.
TEST_F(ClientTest, ACppWaitThatTimesOutAsTheOutcomeComesIsNoError) {
  Start();
  Hold(&ScriptedHandler::hold_posts);
  longhaul::Client client(harness_->path(), "cpp");
  longhaul::Comm comm = client.Join("run", 1);
  comm.BeginStep();
  std::vector<float> x(1, 1.0f);
  for (int i = 0; i < 300; ++i) {
    longhaul::Op op = comm.AllReduceStart(x.data(), x.data(), x.size());
    ASSERT_TRUE(UntilPosts(1));
    std::thread peer(
        [&] { harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); }); });
    EXPECT_NO_THROW({
      while (!op.Wait(0)) {
      }
    });
    peer.join();
  }
}

// ------------------------------------------------------------------------------ states

// A state of two tensors of 3.5 MiB each: "w" in the arena, "m" outside of it.
class IpcClientStateTest : public ClientTest {
 protected:
  static constexpr uint64_t kSize = 7 * kMiB / 2;

  ~IpcClientStateTest() override { EXPECT_EQ(lh_state_free(state_), LH_OK) << lh_last_error(); }
  lh_tensor Tensor(const char* name, void* data, uint32_t flags = 0) {
    lh_tensor tensor = LH_TENSOR_INIT;
    tensor.name = name;
    tensor.dtype = LH_UINT8;
    tensor.data = data;
    tensor.shape = &kShape;
    tensor.dims = 1;
    tensor.flags = flags;
    return tensor;
  }
  lh_status New(const std::vector<lh_tensor>& tensors) {
    return lh_state_new(client_, tensors.data(), static_cast<uint32_t>(tensors.size()), &state_);
  }
  void StartWithState() {
    StartJoined();
    in_place_ = reinterpret_cast<uint8_t*>(Alloc(kSize));
    memset(in_place_, 1, kSize);
    memset(copied_.data(), 2, kSize);
    ASSERT_EQ(New({Tensor("w", in_place_), Tensor("m", copied_.data(), LH_ALLOW_UNEQUAL)}), LH_OK)
        << lh_last_error();
  }
  lh_sync_options Options(lh_hash hash = LH_HASH_ALWAYS) {
    lh_sync_options options = LH_SYNC_OPTIONS_INIT;
    options.state = state_;
    options.revision = 12;
    options.hash = hash;
    return options;
  }
  lh_status Sync(lh_hash hash = LH_HASH_ALWAYS) {
    const lh_sync_options options = Options(hash);
    info_ = LH_SYNC_INFO_INIT;
    return lh_sync_state(comm_, &options, kPatienceMs, &info_);
  }
  // Starts an all-reduce of bytes with tag 7.
  lh_status ReduceStart(const uint8_t* source, uint8_t* target, uint64_t count, lh_op** op) {
    lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
    options.source = source;
    options.target = target;
    options.count = count;
    options.dtype = LH_UINT8;
    options.tag = 7;
    return lh_all_reduce_start(comm_, &options, op);
  }
  lh_op* Reduce(const uint8_t* source, uint8_t* target, uint64_t count) {
    lh_op* op = nullptr;
    EXPECT_EQ(ReduceStart(source, target, count, &op), LH_OK) << lh_last_error();
    return op;
  }
  lh_status ReduceFails(const uint8_t* source, uint8_t* target, uint64_t count) {
    lh_op* op = nullptr;
    const lh_status status = ReduceStart(source, target, count, &op);
    EXPECT_EQ(op, nullptr);
    return status;
  }
  std::vector<uint8_t> TouchedLast() {
    std::vector<uint8_t> touched;
    harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
      touched = handler.syncs.back().touched;
      handler.syncs.pop_back();
    });
    return touched;
  }
  bool UntilSyncs(size_t count) {
    return harness_->Until(
        [count](ScriptedHandler& handler, IpcServer&) { return handler.syncs.size() == count; });
  }
  // Ends the sync that is held: chunks 2 and 3 of both tensors came from other members.
  void Fetch(const Outcome& outcome = {}) {
    ASSERT_TRUE(UntilSyncs(1));
    harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
      const StateSync sync = std::move(handler.syncs.back());
      LocalState& state = *sync.state;
      for (size_t tensor = 0; tensor < 2; ++tensor) {
        EXPECT_EQ(state.Tensor(tensor)[0], tensor + 1);
        EXPECT_EQ(state.Tensor(tensor)[kSize - 1], tensor + 1);
        // Writes the whole inbox, but reports only the third and the fourth chunk as changed.
        memset(state.inbox[tensor], static_cast<int>(10 + tensor), kSize);
        state.changed[tensor * 4 + 2] = 1;
        state.changed[tensor * 4 + 3] = 1;
      }
      handler.sync_info.bytes = 3 * kMiB;
      handler.sync_info.sources = 2;
      handler.sync_info.changed = outcome.ok();
      handler.FinishSync(LocalId(1), outcome);
      handler.syncs.clear();
      handler.sync_info = {};
    });
  }

  // The same, but fills the inbox of all tensors and reports every chunk as changed.
  void Fill(const Outcome& outcome, const StateSyncInfo& info) {
    ASSERT_TRUE(UntilSyncs(1));
    harness_->Run([&](ScriptedHandler& handler, IpcServer& server) {
      const StateSync sync = std::move(handler.syncs.back());
      handler.syncs.clear();
      LocalState& state = *sync.state;
      for (size_t tensor = 0; tensor < state.places.size(); ++tensor) {
        memset(state.inbox[tensor], static_cast<int>(10 + tensor), kSize);
      }
      std::fill(state.changed.begin(), state.changed.end(), uint8_t{1});
      server.SyncDone(LocalId(1), outcome, info);
    });
  }

  const uint64_t kShape = kSize;
  uint8_t* in_place_ = nullptr;
  std::vector<uint8_t> copied_ = std::vector<uint8_t>(kSize);
  lh_state* state_ = nullptr;
  lh_sync_info_t info_ = LH_SYNC_INFO_INIT;
};

TEST_F(IpcClientStateTest, ASyncOfEqualStatesSaysWhatAllHold) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  EXPECT_EQ(info_.struct_size, sizeof info_);
  EXPECT_EQ(info_.revision, 12u);
  EXPECT_EQ(info_.hash_high, 0xau);
  EXPECT_EQ(info_.hash_low, 0xbu);
  EXPECT_EQ(info_.bytes, 0u);
  EXPECT_NEAR(info_.seconds, 0.005, 1e-9);
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.events.back(), "sync 1 revision 12");
    const StateSync& sync = handler.syncs.back();
    EXPECT_EQ(sync.strategy, control::SyncStrategy::kPopular);
    EXPECT_TRUE(sync.touched.empty());
    EXPECT_EQ(sync.state->manifest, (Manifest{{"w", LH_UINT8, {kSize}, kSize, false},
                                              {"m", LH_UINT8, {kSize}, kSize, true}}));
    EXPECT_EQ(sync.state->Tensor(0)[0], 1);
    EXPECT_EQ(sync.state->Tensor(1)[kSize - 1], 2);
    handler.syncs.clear();
  });
}

TEST_F(IpcClientStateTest, InTheBackgroundTheTensorsAreWrittenWhenTheyAreTaken) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  EXPECT_EQ(lh_state_take(comm_, state_, 0, nullptr), LH_FAILED_PRECONDITION);
  std::shared_ptr<LocalState> state;
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = true; });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  EXPECT_EQ(info_.background, 1u);
  EXPECT_EQ(lh_state_free(state_), LH_FAILED_PRECONDITION);
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    state = handler.syncs.back().state;
    handler.syncs.clear();
    memset(state->places[1], 77, kSize);  // what peerd has fetched so far
  });
  // peerd writes to the copy now. So this sync does not copy the tensor again.
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  EXPECT_EQ(state->Tensor(1)[0], 77);
  EXPECT_EQ(copied_[0], 2);
  const auto answer = [&](const Outcome& outcome, const StateSyncInfo& info) {
    return std::thread([this, outcome, info] {
      ASSERT_TRUE(harness_->Until([](ScriptedHandler& handler, IpcServer&) {
        return handler.events.back().starts_with("take ");
      }));
      harness_->Run([&](ScriptedHandler& handler, IpcServer& server) {
        handler.events.emplace_back("answered");
        server.TakeDone(LocalId(1), outcome, info);
      });
    });
  };
  StateSyncInfo held;
  held.background = true;
  std::thread peer = answer({Code::kDeadlineExceeded, "not yet"}, held);
  EXPECT_EQ(lh_state_take(comm_, state_, 5, nullptr), LH_DEADLINE_EXCEEDED);
  peer.join();
  EXPECT_EQ(lh_state_free(state_), LH_FAILED_PRECONDITION);
  harness_->Run([&](ScriptedHandler&, IpcServer&) { state->changed[4 + 1] = 1; });
  StateSyncInfo taken;
  taken.revision = 9;
  taken.bytes = kMiB;
  taken.changed = true;
  peer = answer({}, taken);
  lh_sync_info_t info = LH_SYNC_INFO_INIT;
  EXPECT_EQ(lh_state_take(comm_, state_, 5, &info), LH_OK) << lh_last_error();
  peer.join();
  EXPECT_EQ(info.revision, 9u);
  EXPECT_EQ(info.background, 0u);
  EXPECT_EQ(copied_[0], 2) << "has not changed";
  EXPECT_EQ(copied_[kMiB], 77);
  state = nullptr;
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    handler.syncs.clear();
    handler.sync_info.background = false;
  });
}

TEST_F(IpcClientStateTest, ATakeThatPeerdDoesNotAnswerEndsAndIsWaitedForByTheNext) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = true; });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  std::shared_ptr<LocalState> state;
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    state = handler.syncs.back().state;
    handler.syncs.clear();
    handler.sync_info.background = false;
    memset(state->places[1], 77, kSize);
    state->changed[4 + 1] = 1;
  });
  lh_sync_info_t info = LH_SYNC_INFO_INIT;
  EXPECT_EQ(lh_state_take(comm_, state_, 5, &info), LH_DEADLINE_EXCEEDED);
  EXPECT_EQ(info.background, 0u) << "nothing was said";
  // It is not known whether the caller may use the tensors.
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("lh_state_take")) << lh_last_error();
  EXPECT_EQ(Sync(), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("lh_state_take")) << lh_last_error();
  EXPECT_EQ(lh_state_free(state_), LH_FAILED_PRECONDITION);
  harness_->Run([](ScriptedHandler&, IpcServer& server) {
    StateSyncInfo taken;
    taken.revision = 9;
    taken.bytes = kMiB;
    taken.changed = true;
    server.TakeDone(LocalId(1), {}, taken);
  });
  EXPECT_EQ(Sync(), LH_FAILED_PRECONDITION) << "also once the answer is here";
  EXPECT_EQ(copied_[kMiB], 2);
  EXPECT_EQ(lh_state_take(comm_, state_, 5, &info), LH_OK) << lh_last_error();
  EXPECT_EQ(info.revision, 9u);
  EXPECT_EQ(copied_[kMiB], 77);
  EXPECT_EQ(harness_->Events().back(), "take 1 5") << "asked once";
  state = nullptr;
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
}

TEST_F(IpcClientStateTest, ATakeThatIsAnsweredLateByNotYetIsForgotten) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = true; });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_state_take(comm_, state_, 0, nullptr), LH_DEADLINE_EXCEEDED);
  harness_->Run([](ScriptedHandler&, IpcServer& server) {
    StateSyncInfo held;
    held.background = true;
    server.TakeDone(LocalId(1), {Code::kDeadlineExceeded, "not yet"}, held);
  });
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = false; });
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
}

TEST_F(IpcClientStateTest, ATakeThatNobodyWaitsForGoesWithItsCommunicator) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = true; });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_state_take(comm_, state_, 0, nullptr), LH_DEADLINE_EXCEEDED);
  lh_comm_free(comm_);
  comm_ = nullptr;
  EXPECT_TRUE(harness_->Until(
      [](ScriptedHandler& handler, IpcServer&) { return handler.events.back() == "leave 1"; }));
  while (lh_state_free(state_) == LH_FAILED_PRECONDITION) std::this_thread::yield();
  state_ = nullptr;
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
}

TEST_F(IpcClientStateTest, WhatCameFromOthersIsWrittenToTheTensors) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  std::thread peer([this] { Fetch(); });
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  peer.join();
  EXPECT_EQ(info_.bytes, 3 * kMiB);
  EXPECT_EQ(info_.sources, 2u);
  EXPECT_EQ(in_place_[0], 1) << "did not change";
  EXPECT_EQ(in_place_[2 * kMiB - 1], 1);
  EXPECT_EQ(in_place_[2 * kMiB], 10);
  EXPECT_EQ(in_place_[kSize - 1], 10);
  EXPECT_EQ(copied_[0], 2) << "did not change";
  EXPECT_EQ(copied_[2 * kMiB - 1], 2);
  EXPECT_EQ(copied_[2 * kMiB], 11);
  EXPECT_EQ(copied_[kSize - 1], 11);
  for (const uint32_t tensor : {0u, 1u}) {
    uint64_t offset = 5;
    uint64_t bytes = 0;
    ASSERT_EQ(lh_state_next_change(state_, tensor, &offset, &bytes), LH_OK);
    EXPECT_EQ(offset, 2 * kMiB);
    EXPECT_EQ(bytes, kSize - 2 * kMiB);
    offset += bytes;
    ASSERT_EQ(lh_state_next_change(state_, tensor, &offset, &bytes), LH_OK);
    EXPECT_EQ(bytes, 0u);
  }
}

TEST_F(IpcClientStateTest, ASyncThatFailsLeavesAllTensorsAsTheyWere) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  std::thread peer([this] { Fetch({Code::kAborted, "source died"}); });
  EXPECT_EQ(Sync(), LH_ABORTED);
  peer.join();
  EXPECT_TRUE(Says("source died")) << lh_last_error();
  EXPECT_EQ(std::vector<uint8_t>(in_place_, in_place_ + kSize), std::vector<uint8_t>(kSize, 1));
  EXPECT_EQ(copied_, std::vector<uint8_t>(kSize, 2));
  Hold(&ScriptedHandler::hold_syncs, false);
  ASSERT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK);
  EXPECT_EQ(TouchedLast(), (std::vector<uint8_t>{1, 1}));
}

// The inbox is empty most of the time, and must not use memory then.
TEST_F(IpcClientStateTest, AnInboxHasMemoryOnlyFromTheFetchToTheEndOfTheSync) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  const auto resident = [](const uint8_t* data) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    std::vector<uint8_t> pages(kSize / page - 1);
    EXPECT_EQ(mincore(reinterpret_cast<void*>(first), pages.size() * page, pages.data()), 0);
    return std::count_if(pages.begin(), pages.end(), [](uint8_t p) { return (p & 1) != 0; });
  };
  const uint8_t* inbox = nullptr;
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    inbox = handler.syncs.back().state->inbox[0];
    EXPECT_NE(inbox, handler.syncs.back().state->places[0]);
    EXPECT_EQ(resident(inbox), 0);
    handler.syncs.clear();
  });
  Hold(&ScriptedHandler::hold_syncs);
  std::thread peer([this] { Fetch(); });
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  peer.join();
  harness_->Run([&](ScriptedHandler&, IpcServer&) { EXPECT_EQ(resident(inbox), 0); });
  // After a failed sync the inbox keeps its memory until a sync ends well, whether or not that sync
  // needs the fetched chunks.
  memset(in_place_, 1, kSize);
  std::fill(copied_.begin(), copied_.end(), uint8_t{2});
  peer = std::thread([this] { Fetch({Code::kAborted, "source died"}); });
  EXPECT_EQ(Sync(), LH_ABORTED);
  peer.join();
  harness_->Run([&](ScriptedHandler&, IpcServer&) { EXPECT_GT(resident(inbox), 0); });
  Hold(&ScriptedHandler::hold_syncs, false);
  const std::vector<uint8_t> before(in_place_, in_place_ + kSize);
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  EXPECT_EQ(std::vector<uint8_t>(in_place_, in_place_ + kSize), before);
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(resident(inbox), 0);
    handler.syncs.clear();
  });
}

TEST_F(IpcClientStateTest, WhatWasKeptReachesTheTensorsThoughNothingCameFromOthers) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  StateSyncInfo info;
  info.revision = 20;
  info.resumed = true;
  info.changed = true;
  std::thread peer([&] { Fill({}, info); });
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  peer.join();
  EXPECT_EQ(info_.resumed, 1u);
  EXPECT_EQ(info_.revision, 20u);
  EXPECT_EQ(in_place_[0], 10);
  EXPECT_EQ(copied_, std::vector<uint8_t>(kSize, 11));
}

TEST_F(IpcClientStateTest, PeerdSaysWhichRevisionIsKept) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  uint64_t revision = 0;
  ASSERT_EQ(lh_kept_revision(comm_, state_, &revision), LH_OK) << lh_last_error();
  EXPECT_EQ(revision, LH_NO_REVISION);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    ASSERT_EQ(handler.kept_asked.size(), 1u);
    EXPECT_EQ(handler.kept_asked[0], (Manifest{{"w", LH_UINT8, {kSize}, kSize, false},
                                               {"m", LH_UINT8, {kSize}, kSize, true}}));
    handler.kept_revision = 20;
  });
  ASSERT_EQ(lh_kept_revision(comm_, state_, &revision), LH_OK) << lh_last_error();
  EXPECT_EQ(revision, 20u);
  EXPECT_EQ(lh_kept_revision(nullptr, state_, &revision), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_kept_revision(comm_, nullptr, &revision), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_kept_revision(comm_, state_, nullptr), LH_INVALID_ARGUMENT);
}

TEST_F(IpcClientStateTest, WhatWasPreparedIsUntouchedToTheNextSync) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  memset(copied_.data(), 7, kSize);
  ASSERT_EQ(lh_state_prepare(state_, -1), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    ASSERT_EQ(handler.prepared.size(), 1u);
    EXPECT_EQ(handler.prepared[0].size(), 2u);
  });
  memset(copied_.data(), 9, kSize);
  ASSERT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.syncs.back().state->Tensor(1)[0], 7) << "it was copied ahead";
  });
  EXPECT_EQ(TouchedLast(), (std::vector<uint8_t>{0, 0}));
  // Copies and hashes all tensors once more, whatever was touched.
  ASSERT_EQ(lh_state_prepare(state_, -1), LH_OK) << lh_last_error();
  ASSERT_EQ(lh_state_touch(state_, 0), LH_OK);
  ASSERT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.syncs.back().state->Tensor(1)[0], 9);
  });
  EXPECT_EQ(TouchedLast(), (std::vector<uint8_t>{1, 0}));
}

TEST_F(IpcClientStateTest, AStateIsInUseWhileItIsPrepared) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_prepares);
  EXPECT_EQ(lh_state_prepare(state_, 10), LH_DEADLINE_EXCEEDED);
  EXPECT_EQ(lh_state_prepare(state_, 10), LH_FAILED_PRECONDITION);
  EXPECT_EQ(Sync(), LH_FAILED_PRECONDITION);
  EXPECT_EQ(lh_state_free(state_), LH_FAILED_PRECONDITION);
  ASSERT_TRUE(harness_->Until(
      [](ScriptedHandler& handler, IpcServer&) { return handler.prepares.size() == 1; }));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.prepares[0](); });
  lh_op* op = nullptr;
  Hold(&ScriptedHandler::hold_prepares, false);
  ASSERT_EQ(lh_state_prepare_start(state_, &op), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_op_wait(op, -1), LH_OK) << lh_last_error();
  lh_op_free(op);
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_state_prepare(nullptr, 0), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_state_prepare_start(state_, nullptr), LH_INVALID_ARGUMENT);
}

TEST_F(IpcClientStateTest, OnChangeNamesWhatWasTouchedSinceTheLastGoodSync) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  ASSERT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK);
  EXPECT_EQ(TouchedLast(), (std::vector<uint8_t>{1, 1}));
  memset(copied_.data(), 7, kSize);
  ASSERT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK);
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.syncs.back().state->Tensor(1)[0], 2) << "nobody said that it changed";
  });
  EXPECT_EQ(TouchedLast(), (std::vector<uint8_t>{0, 0}));
  ASSERT_EQ(lh_state_touch(state_, 1), LH_OK);
  ASSERT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK);
  harness_->Run([&](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.syncs.back().state->Tensor(1)[0], 7);
  });
  EXPECT_EQ(TouchedLast(), (std::vector<uint8_t>{0, 1}));
  ASSERT_EQ(lh_state_touch(state_, LH_ALL_TENSORS), LH_OK);
  ASSERT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK);
  EXPECT_EQ(TouchedLast(), (std::vector<uint8_t>{1, 1}));
  EXPECT_EQ(lh_state_touch(state_, 2), LH_INVALID_ARGUMENT);
}

TEST_F(IpcClientStateTest, CopiesNeedNoInbox) {
  StartJoined();
  in_place_ = reinterpret_cast<uint8_t*>(Alloc(kSize));
  memset(in_place_, 1, kSize);
  ASSERT_EQ(New({Tensor("w", in_place_, LH_STAGED), Tensor("m", copied_.data())}), LH_OK);
  Hold(&ScriptedHandler::hold_syncs);
  StateSyncInfo info;
  info.changed = true;
  std::thread peer([&] {
    ASSERT_TRUE(UntilSyncs(1));
    harness_->Run([](ScriptedHandler& handler, IpcServer&) {
      const LocalState& state = *handler.syncs.back().state;
      EXPECT_EQ(state.inbox, state.places);
    });
    Fill({}, info);
  });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  peer.join();
  EXPECT_EQ(in_place_[0], 10) << "the caller looks there";
  EXPECT_EQ(copied_, std::vector<uint8_t>(kSize, 11));
}

TEST_F(IpcClientStateTest, TensorsThatShareBytesAreCopied) {
  StartJoined();
  in_place_ = reinterpret_cast<uint8_t*>(Alloc(kSize));
  memset(in_place_, 1, 2 * kSize);
  ASSERT_EQ(New({Tensor("w", in_place_), Tensor("tied", in_place_), Tensor("view", in_place_ + 7)}),
            LH_OK)
      << lh_last_error();
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    const LocalState& state = *handler.syncs.back().state;
    EXPECT_NE(state.places[0], state.places[1]);
    EXPECT_EQ(memcmp(state.places[0], state.places[1], kSize), 0);
    handler.syncs.clear();
  });
}

TEST_F(IpcClientStateTest, AStepAndItsSyncAreOneCall) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  const lh_sync_options options = Options();
  ASSERT_EQ(lh_begin_step_sync(comm_, &options, kPatienceMs, &info_), LH_OK) << lh_last_error();
  EXPECT_EQ(info_.passed, 1u);
  EXPECT_EQ(info_.revision, 12u);
  EXPECT_EQ(harness_->Events(),
            (std::vector<std::string>{"join 1 run/3 tester", "step 1", "sync 1 revision 12"}));
}

TEST_F(IpcClientStateTest, AStepAndItsSyncMayBeWaitedForLater) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  const lh_sync_options options = Options();
  lh_op* op = nullptr;
  ASSERT_EQ(lh_begin_step_sync_start(comm_, &options, &op), LH_OK) << lh_last_error();
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  ASSERT_EQ(lh_sync_info(op, &info_), LH_OK) << lh_last_error();
  EXPECT_EQ(info_.passed, 1u);
  EXPECT_EQ(info_.revision, 12u);
  EXPECT_EQ(harness_->Events(),
            (std::vector<std::string>{"join 1 run/3 tester", "step 1", "sync 1 revision 12"}));
  lh_op_free(op);
}

TEST_F(IpcClientStateTest, ABoundaryMayBePassedAndTheSyncFail) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.epoch = 9; });
  Hold(&ScriptedHandler::hold_syncs);
  Hold(&ScriptedHandler::hold_steps);
  const lh_sync_options options = Options();
  std::thread peer([this] {
    Fetch({Code::kAborted, "source died"});
    harness_->Run([](ScriptedHandler& handler, IpcServer& server) {
      server.StepDone(LocalId(1), {}, handler.WorldOf(LocalId(1)));
    });
  });
  EXPECT_EQ(lh_begin_step_sync(comm_, &options, kPatienceMs, &info_), LH_ABORTED);
  peer.join();
  EXPECT_EQ(info_.passed, 1u);
  lh_world_info world = LH_WORLD_INFO_INIT;
  ASSERT_EQ(lh_world(comm_, &world), LH_OK);
  EXPECT_EQ(world.epoch, 9u);
}

TEST_F(IpcClientStateTest, ANewcomerOnlyJoinsTheSyncOfTheBoundaryThatAdmittedIt) {
  Start();
  ASSERT_NO_FATAL_FAILURE(Open());
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  ASSERT_EQ(New({Tensor("m", copied_.data())}), LH_OK) << lh_last_error();
  const lh_sync_options options = Options();
  ASSERT_EQ(lh_begin_step_sync(comm_, &options, kPatienceMs, &info_), LH_OK) << lh_last_error();
  EXPECT_EQ(info_.passed, 1u);
  EXPECT_EQ(harness_->Events(),
            (std::vector<std::string>{"join 1 run/3 tester", "sync 1 revision 12"}));
  ASSERT_EQ(lh_begin_step_sync(comm_, &options, kPatienceMs, &info_), LH_OK) << lh_last_error();
  EXPECT_EQ(harness_->Events().size(), 4u) << "a boundary of its own";
}

TEST_F(IpcClientStateTest, ASyncWhoseTimeRanOutGoesOn) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  const lh_sync_options options = Options();
  for (const bool step : {false, true}) {
    const auto call = step ? lh_begin_step_sync : lh_sync_state;
    EXPECT_EQ(call(comm_, &options, 0, &info_), LH_DEADLINE_EXCEEDED);
    ASSERT_TRUE(UntilSyncs(1));
    EXPECT_EQ(call(comm_, &options, 0, nullptr), LH_DEADLINE_EXCEEDED);
    EXPECT_EQ(lh_state_free(state_), LH_FAILED_PRECONDITION);
    std::thread peer([this] {
      harness_->Run([](ScriptedHandler& handler, IpcServer&) {
        handler.hold_steps = false;
        handler.FinishSync(LocalId(1));
        EXPECT_EQ(handler.syncs.size(), 1u);
        handler.syncs.clear();
      });
    });
    if (step) {
      // Wait for the sync's end first, or the scripted handler ends the step before its sync.
      peer.join();
      harness_->Run([](ScriptedHandler& handler, IpcServer& server) {
        server.StepDone(LocalId(1), {}, handler.WorldOf(LocalId(1)));
      });
    }
    EXPECT_EQ(call(comm_, &options, kPatienceMs, &info_), LH_OK) << lh_last_error();
    if (!step) peer.join();
    EXPECT_EQ(info_.revision, 12u);
    Hold(&ScriptedHandler::hold_steps);
  }
}

TEST_F(IpcClientStateTest, OneSyncAtATime) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  const lh_sync_options options = Options();
  lh_op* op = nullptr;
  ASSERT_EQ(lh_sync_state_start(comm_, &options, &op), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_sync_state(comm_, &options, 0, nullptr), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("in a sync")) << lh_last_error();
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_FAILED_PRECONDITION);
  EXPECT_EQ(lh_sync_info(op, &info_), LH_FAILED_PRECONDITION);
  Fetch();
  ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  ASSERT_EQ(lh_sync_info(op, &info_), LH_OK);
  EXPECT_EQ(info_.sources, 2u);
  EXPECT_EQ(copied_[kSize - 1], 11);
  lh_op_free(op);
}

TEST_F(IpcClientStateTest, AResultThatNobodyWaitsForIsNotCopied) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  const lh_sync_options options = Options();
  lh_op* op = nullptr;
  ASSERT_EQ(lh_sync_state_start(comm_, &options, &op), LH_OK) << lh_last_error();
  lh_op_free(op);
  Fetch();
  while (lh_state_free(state_) == LH_FAILED_PRECONDITION) std::this_thread::yield();
  state_ = nullptr;
  EXPECT_EQ(copied_[kSize - 1], 2);
}

TEST_F(IpcClientStateTest, ProgressIsToldByTheThreadThatWaits) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  struct Seen {
    std::thread::id thread = std::this_thread::get_id();
    std::atomic<uint64_t> bytes = 0;
  } seen;
  lh_sync_options options = Options();
  options.progress_context = &seen;
  options.progress = [](const lh_progress* progress, void* context) {
    auto* const seen = static_cast<Seen*>(context);
    EXPECT_EQ(seen->thread, std::this_thread::get_id());
    EXPECT_EQ(progress->struct_size, sizeof *progress);
    EXPECT_EQ(progress->bytes_total, 100u);
    EXPECT_EQ(progress->bytes_per_second, 7u);
    EXPECT_EQ(progress->sources, 2u);
    seen->bytes = progress->bytes_done;
  };
  std::thread peer([&] {
    ASSERT_TRUE(UntilSyncs(1));
    for (uint64_t bytes = 1; bytes <= 3; ++bytes) {
      harness_->Run([&](ScriptedHandler&, IpcServer& server) {
        server.SyncProgress(LocalId(1), {bytes, 100, 7, 2});
      });
      while (seen.bytes != bytes) std::this_thread::yield();
    }
    Fetch();
  });
  EXPECT_EQ(lh_sync_state(comm_, &options, kPatienceMs, nullptr), LH_OK) << lh_last_error();
  peer.join();
}

TEST_F(IpcClientStateTest, ProgressMayBeAskedForBetweenCalls) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  const lh_sync_options options = Options();
  lh_progress progress = LH_PROGRESS_INIT;
  EXPECT_EQ(lh_sync_progress(comm_, nullptr), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_sync_progress(nullptr, &progress), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_sync_state(comm_, &options, 0, nullptr), LH_DEADLINE_EXCEEDED);
  EXPECT_EQ(lh_sync_progress(comm_, &progress), LH_OK) << lh_last_error();
  EXPECT_EQ(progress.bytes_total, 0u) << "nothing is fetched yet";
  ASSERT_TRUE(UntilSyncs(1));
  harness_->Run([](ScriptedHandler&, IpcServer& server) {
    server.SyncProgress(LocalId(1), {30, 100, 7, 2});
  });
  while (progress.bytes_total == 0) ASSERT_EQ(lh_sync_progress(comm_, &progress), LH_OK);
  EXPECT_EQ(progress.bytes_done, 30u);
  EXPECT_EQ(progress.bytes_total, 100u);
  EXPECT_EQ(progress.bytes_per_second, 7u);
  EXPECT_EQ(progress.sources, 2u);
  EXPECT_EQ(progress.struct_size, sizeof progress);
  Fetch();
  EXPECT_EQ(lh_sync_state(comm_, &options, kPatienceMs, nullptr), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_sync_progress(comm_, &progress), LH_OK);
  EXPECT_EQ(progress.bytes_total, 0u) << "no sync goes on";
}

TEST_F(IpcClientStateTest, BuffersOfAStateAreNotFreed) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  EXPECT_EQ(lh_free(client_, in_place_), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("lh_state_free")) << lh_last_error();
  ASSERT_EQ(lh_state_free(state_), LH_OK);
  state_ = nullptr;
  EXPECT_EQ(lh_free(client_, in_place_), LH_OK) << lh_last_error();
}

// Tests ops on the tensors of the state, and on other memory.
TEST_F(IpcClientStateTest, ASyncIsRefusedWhileAnOpUsesATensorOfItsState) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_posts);
  std::vector<uint8_t> other(64);
  const std::pair<uint8_t*, std::string> tensors[] = {{in_place_, "\"w\""},
                                                      {copied_.data(), "\"m\""}};
  for (const auto& [tensor, name] : tensors) {
    for (const bool written : {false, true}) {
      lh_op* const op = written ? Reduce(other.data(), tensor + kSize - 64, 64)
                                : Reduce(tensor + kSize - 64, other.data(), 64);
      EXPECT_EQ(Sync(), LH_FAILED_PRECONDITION);
      EXPECT_TRUE(Says(name) && Says("tag 7")) << lh_last_error();
      const lh_sync_options options = Options();
      EXPECT_EQ(lh_begin_step_sync(comm_, &options, 0, &info_), LH_FAILED_PRECONDITION);
      EXPECT_TRUE(Says(name)) << lh_last_error();
      EXPECT_EQ(info_.passed, 0u);
      EXPECT_EQ(lh_state_prepare(state_, 0), LH_FAILED_PRECONDITION);
      EXPECT_TRUE(Says(name)) << lh_last_error();
      ASSERT_TRUE(UntilPosts(1));
      harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.FinishPost(); });
      ASSERT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
      EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
      lh_op_free(op);
    }
  }
  // An op without a handle no longer uses the caller's memory: its staged result is not copied.
  lh_op_free(Reduce(copied_.data(), copied_.data(), 64));
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
}

TEST_F(IpcClientStateTest, AnOpIsRefusedWhileASyncOwnsItsTensor) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  const lh_sync_options options = Options();
  ASSERT_EQ(lh_sync_state(comm_, &options, 0, nullptr), LH_DEADLINE_EXCEEDED);
  std::vector<uint8_t> other(64);
  EXPECT_EQ(ReduceFails(in_place_, other.data(), 64), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("source of tag 7") && Says("\"w\"")) << lh_last_error();
  EXPECT_EQ(ReduceFails(other.data(), copied_.data() + kSize - 1, 1), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("target of tag 7") && Says("\"m\"")) << lh_last_error();
  lh_op* const apart = Reduce(other.data(), other.data(), 64);
  EXPECT_EQ(lh_op_wait(apart, kPatienceMs), LH_OK) << lh_last_error();
  lh_op_free(apart);
  ASSERT_TRUE(UntilSyncs(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    handler.FinishSync(LocalId(1));
    handler.syncs.clear();
  });
  ASSERT_EQ(lh_sync_state(comm_, &options, kPatienceMs, nullptr), LH_OK) << lh_last_error();
  lh_op* const after = Reduce(in_place_, copied_.data(), 64);
  EXPECT_EQ(lh_op_wait(after, kPatienceMs), LH_OK) << lh_last_error();
  lh_op_free(after);
}

TEST_F(IpcClientStateTest, WhatIsHeldIsReadByOpsAndNotWritten) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = true; });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  Hold(&ScriptedHandler::hold_posts);
  std::vector<uint8_t> other(64);
  EXPECT_EQ(ReduceFails(in_place_, in_place_, 64), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("lh_state_take()") && Says("\"w\"")) << lh_last_error();
  lh_op* const op = Reduce(in_place_, other.data(), 64);
  EXPECT_EQ(lh_state_take(comm_, state_, 0, &info_), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("tag 7") && Says("\"w\"")) << lh_last_error();
  EXPECT_EQ(info_.background, 1u);
  ASSERT_TRUE(UntilPosts(1));
  harness_->Run([](ScriptedHandler& handler, IpcServer& server) {
    handler.FinishPost();
    handler.syncs.clear();
    server.MemberGone(LocalId(1), {Code::kEvicted, "enough"});
  });
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  lh_op_free(op);
}

TEST_F(IpcClientStateTest, AnInfoIsOfItsKindOfOp) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  lh_op* const op = Reduce(in_place_, in_place_, 64);
  EXPECT_EQ(lh_op_wait(op, kPatienceMs), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_sync_info(op, &info_), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("lh_op_info()")) << lh_last_error();
  lh_op_free(op);
  lh_op* sync = nullptr;
  const lh_sync_options options = Options();
  ASSERT_EQ(lh_sync_state_start(comm_, &options, &sync), LH_OK) << lh_last_error();
  EXPECT_EQ(lh_op_wait(sync, kPatienceMs), LH_OK) << lh_last_error();
  lh_op_info_t info = LH_OP_INFO_INIT;
  EXPECT_EQ(lh_op_info(sync, &info), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("lh_sync_info()")) << lh_last_error();
  EXPECT_EQ(lh_sync_info(sync, &info_), LH_OK) << lh_last_error();
  lh_op_free(sync);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
}

TEST_F(IpcClientStateTest, AStoppedPeerdIsNotWaitedForWithoutEnd) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  const uint64_t arena_bytes = harness_->Stats().arena_bytes;
  const int64_t answer_ns = std::exchange(client_->answer_ns, int64_t{200} * 1000 * 1000);
  std::promise<void> stopped;
  std::promise<void> goes_on;
  std::thread stop([&] {
    harness_->Run([&](ScriptedHandler&, IpcServer&) {
      stopped.set_value();
      goes_on.get_future().wait();
    });
  });
  stopped.get_future().wait();
  void* data = nullptr;
  EXPECT_EQ(lh_alloc(client_, 80 * kMiB, &data), LH_UNAVAILABLE);
  EXPECT_TRUE(Says("stopped or hangs")) << lh_last_error();
  std::vector<uint8_t> more(kSize);
  const lh_tensor tensor = Tensor("x", more.data());
  lh_state* state = nullptr;
  EXPECT_EQ(lh_state_new(client_, &tensor, 1, &state), LH_UNAVAILABLE);
  EXPECT_TRUE(Says("stopped or hangs")) << lh_last_error();
  uint64_t revision = 0;
  EXPECT_EQ(lh_kept_revision(comm_, state_, &revision), LH_UNAVAILABLE);
  EXPECT_TRUE(Says("stopped or hangs")) << lh_last_error();
  uint32_t count = 0;
  EXPECT_EQ(lh_members(comm_, nullptr, 0, &count), LH_UNAVAILABLE);
  EXPECT_TRUE(Says("stopped or hangs")) << lh_last_error();
  goes_on.set_value();
  stop.join();
  // What peerd did too late is undone.
  client_->answer_ns = answer_ns;
  EXPECT_EQ(lh_members(comm_, nullptr, 0, &count), LH_OK) << lh_last_error();
  EXPECT_TRUE(Soon([&] { return harness_->Stats().arena_bytes == arena_bytes; }));
  EXPECT_EQ(harness_->Stats().requests_refused, 0u);
  EXPECT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
}

// Other threads may give regions back to the host at any time.
TEST_F(IpcClientStateTest, PeerdHearsThatAStateIsGoneBeforeItsMemoryIs) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&] {
      while (!done) {
        void* data = nullptr;
        if (lh_alloc(client_, 64, &data) == LH_OK) (void)lh_free(client_, data);
      }
    });
  }
  const lh_tensor tensor = Tensor("x", in_place_);
  for (int i = 0; i < 300; ++i) {
    lh_state* state = nullptr;
    ASSERT_EQ(lh_state_new(client_, &tensor, 1, &state), LH_OK) << lh_last_error();
    ASSERT_EQ(lh_state_free(state), LH_OK);
  }
  done = true;
  for (std::thread& other : others) other.join();
  EXPECT_EQ(harness_->Stats().requests_refused, 0u);
}

TEST_F(IpcClientStateTest, ManyStatesComeAndGo) {
  StartJoined();
  for (int i = 0; i < 3 * LH_STATES_MAX; ++i) {
    ASSERT_EQ(New({Tensor("m", copied_.data())}), LH_OK) << lh_last_error();
    ASSERT_EQ(lh_state_free(state_), LH_OK);
    state_ = nullptr;
  }
  EXPECT_EQ(harness_->Stats().requests_refused, 0u);
}

TEST_F(IpcClientStateTest, WhatPeerdRefusesHasItsReason) {
  StartJoined();
  EXPECT_EQ(New({Tensor("a\nb", copied_.data())}), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("UTF-8")) << lh_last_error();
  EXPECT_EQ(state_, nullptr);
  EXPECT_EQ(New({Tensor("m", copied_.data()), Tensor("m", copied_.data())}), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("two tensors are called")) << lh_last_error();
}

TEST_F(IpcClientStateTest, ChecksItsArguments) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  const auto refused = [&](const std::string& part, auto set) {
    lh_tensor tensor = Tensor("x", copied_.data());
    set(&tensor);
    lh_state* state = nullptr;
    EXPECT_EQ(lh_state_new(client_, &tensor, 1, &state), LH_INVALID_ARGUMENT);
    EXPECT_TRUE(Says(part)) << lh_last_error();
  };
  const std::string long_name(LH_STATE_NAME_BYTES_MAX + 1, 'n');
  const std::vector<uint64_t> huge(8, 1 << 20);
  refused("struct_size", [](lh_tensor* t) { t->struct_size = 3; });
  refused("name", [](lh_tensor* t) { t->name = nullptr; });
  refused("name", [](lh_tensor* t) { t->name = ""; });
  refused("name", [&](lh_tensor* t) { t->name = long_name.c_str(); });
  refused("dtype", [](lh_tensor* t) { t->dtype = static_cast<lh_dtype>(15); });
  refused("data", [](lh_tensor* t) { t->data = nullptr; });
  refused("shape", [](lh_tensor* t) { t->shape = nullptr; });
  refused("dimensions", [](lh_tensor* t) { t->dims = 9; });
  refused("2^40", [&](lh_tensor* t) { t->shape = huge.data(), t->dims = 8; });
  refused("flags", [](lh_tensor* t) { t->flags = 4; });
  refused("within one buffer", [&](lh_tensor* t) { t->data = in_place_ + 4 * kSize - 1; });
  lh_state* state = nullptr;
  EXPECT_EQ(lh_state_new(client_, nullptr, 1, &state), LH_INVALID_ARGUMENT);
  const lh_tensor tensor = Tensor("x", copied_.data());
  EXPECT_EQ(lh_state_new(client_, &tensor, 0, &state), LH_INVALID_ARGUMENT);

  const auto sync_refused = [&](const std::string& part, auto set) {
    lh_sync_options options = Options();
    set(&options);
    EXPECT_EQ(lh_sync_state(comm_, &options, 0, nullptr), LH_INVALID_ARGUMENT);
    EXPECT_TRUE(Says(part)) << lh_last_error();
  };
  sync_refused("struct_size", [](lh_sync_options* o) { o->struct_size = 3; });
  sync_refused("state", [](lh_sync_options* o) { o->state = nullptr; });
  sync_refused("strategy", [](lh_sync_options* o) { o->strategy = static_cast<lh_strategy>(0); });
  sync_refused("hash", [](lh_sync_options* o) { o->hash = static_cast<lh_hash>(2); });
  sync_refused("revision", [](lh_sync_options* o) { o->revision = UINT64_MAX; });
  const lh_sync_options options = Options();
  lh_sync_info_t info = LH_SYNC_INFO_INIT;
  info.struct_size = 3;
  EXPECT_EQ(lh_sync_state(comm_, &options, 0, &info), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_sync_state(nullptr, &options, 0, nullptr), LH_INVALID_ARGUMENT);
  EXPECT_EQ(lh_sync_state(comm_, nullptr, 0, nullptr), LH_INVALID_ARGUMENT);
}

TEST_F(IpcClientStateTest, ASyncEndsWithTheConnection) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  std::thread peer([this] {
    ASSERT_TRUE(UntilSyncs(1));
    harness_->Stop();
  });
  EXPECT_EQ(Sync(), LH_UNAVAILABLE);
  peer.join();
  EXPECT_EQ(Sync(), LH_UNAVAILABLE);
}

TEST_F(IpcClientStateTest, APeerdThatDiesInTheMiddleOfAFetchLeavesTheTensorsAsTheyWere) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  std::thread peer([this] {
    ASSERT_TRUE(UntilSyncs(1));
    harness_->Run([](ScriptedHandler& handler, IpcServer&) {
      for (uint8_t* const inbox : handler.syncs[0].state->inbox) memset(inbox, 77, kMiB);
    });
    harness_->Stop();
  });
  EXPECT_EQ(Sync(), LH_UNAVAILABLE);
  peer.join();
  EXPECT_EQ(std::vector<uint8_t>(in_place_, in_place_ + kSize), std::vector<uint8_t>(kSize, 1));
  EXPECT_EQ(copied_, std::vector<uint8_t>(kSize, 2));
}

TEST_F(IpcClientStateTest, WhatWasHeldIsTheCallersAgainWhenItsMemberIsOut) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = true; });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer& server) {
    for (uint8_t* const inbox : handler.syncs.back().state->inbox) memset(inbox, 77, kSize);
    handler.syncs.clear();
    handler.sync_info.background = false;
    server.MemberGone(LocalId(1), {Code::kEvicted, "too late"});
  });
  EXPECT_EQ(Sync(), LH_EVICTED);
  EXPECT_EQ(info_.background, 0u);
  EXPECT_EQ(in_place_[0], 1);
  // The copies may differ from the tensors now, so the next sync reads all tensors.
  lh_comm_free(comm_);
  ASSERT_EQ(Join(), LH_OK) << lh_last_error();
  EXPECT_EQ(Sync(LH_HASH_ON_CHANGE), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) {
    EXPECT_EQ(handler.syncs.back().touched, (std::vector<uint8_t>{1, 1}));
    EXPECT_EQ(handler.syncs.back().state->Tensor(1)[0], 2);
    handler.syncs.clear();
  });
}

TEST_F(IpcClientStateTest, SoItIsWhenPeerdIsGone) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.sync_info.background = true; });
  ASSERT_EQ(Sync(), LH_OK) << lh_last_error();
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
  harness_->Stop();
  EXPECT_EQ(lh_state_take(comm_, state_, 5, &info_), LH_UNAVAILABLE);
  EXPECT_EQ(info_.background, 0u);
  EXPECT_EQ(in_place_[0], 1);
}

TEST_F(IpcClientStateTest, AStepWithAStateAndOneWithoutAreNotMixedUp) {
  ASSERT_NO_FATAL_FAILURE(StartWithState());
  Hold(&ScriptedHandler::hold_syncs);
  Hold(&ScriptedHandler::hold_steps);
  const lh_sync_options options = Options();
  const auto finish = [this](bool sync) {
    harness_->Run([sync](ScriptedHandler& handler, IpcServer& server) {
      if (sync) handler.FinishSync(LocalId(1));
      handler.syncs.clear();
      server.StepDone(LocalId(1), {}, handler.WorldOf(LocalId(1)));
    });
  };
  EXPECT_EQ(lh_begin_step_sync(comm_, &options, 0, &info_), LH_DEADLINE_EXCEEDED);
  ASSERT_TRUE(UntilSyncs(1));
  finish(true);
  EXPECT_EQ(lh_state_free(state_), LH_FAILED_PRECONDITION) << "the next call names it";
  EXPECT_EQ(lh_begin_step(comm_, 0), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("lh_begin_step_sync() again")) << lh_last_error();
  EXPECT_EQ(lh_begin_step_sync(comm_, &options, kPatienceMs, &info_), LH_OK) << lh_last_error();
  EXPECT_EQ(info_.revision, 12u);

  EXPECT_EQ(lh_begin_step(comm_, 0), LH_DEADLINE_EXCEEDED);
  ASSERT_TRUE(harness_->Until([](ScriptedHandler& handler, IpcServer&) {
    return handler.events.back() == "step 1" && handler.events.size() == 4;
  })) << harness_->Events().size();
  finish(false);
  EXPECT_EQ(lh_begin_step_sync(comm_, &options, 0, &info_), LH_FAILED_PRECONDITION);
  EXPECT_TRUE(Says("lh_begin_step() again")) << lh_last_error();
  EXPECT_EQ(lh_begin_step(comm_, kPatienceMs), LH_OK) << lh_last_error();
}

template <class Size>
concept IsASize = requires(float* data, Size&& size) {
  longhaul::Tensor("w", data, std::forward<Size>(size));
};
// The result of Tensor() points to its size, so a temporary must not compile.
static_assert(IsASize<const uint64_t&>);
static_assert(!IsASize<uint64_t>, "as v.size() is");
static_assert(!IsASize<const int&>, "a copy of it would be");

TEST_F(IpcClientStateTest, CppSyncsAState) {
  Start();
  Client client(harness_->path());
  Comm comm = client.Join("run");
  comm.BeginStep();
  const uint64_t size = 100;
  Buffer<float> w(client, size);
  std::vector<double> m(size);
  const bool flags[] = {true, false};
  bool copy[] = {true, false};
  const uint64_t two = 2;
  memcpy(copy, flags, sizeof copy);
  State state(client, {longhaul::Tensor("w", w.data(), size), longhaul::Tensor("m", m.data(), size),
                       longhaul::Tensor("flags", copy, two, LH_ALLOW_UNEQUAL)});
  state.Touch();
  EXPECT_EQ(comm.SyncState(state, 3).revision, 3u);
  lh_sync_options options = LH_SYNC_OPTIONS_INIT;
  options.state = state.get();
  options.revision = 4;
  EXPECT_EQ(comm.BeginStep(options).revision, 4u);
  EXPECT_EQ(comm.KeptRevision(state), std::nullopt);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.kept_revision = 9; });
  EXPECT_EQ(comm.KeptRevision(state), 9u);
  harness_->Run([](ScriptedHandler& handler, IpcServer&) { handler.syncs.clear(); });
}

}  // namespace
}  // namespace longhaul::peerd
