// What the client library asks of peerd for each collective: requests, tables and pieces. The peerd
// of these tests is a socket and a script.
#include <longhaul/longhaul.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/longhaul.hpp"
#include "client/src/tensors.h"
#include "gtest/gtest.h"
#include "proto/wire/ipc.h"
#include "proto/wire/ipc_op.h"

namespace longhaul {
namespace {

constexpr uint64_t kMember = 7;  // the id of the tester's member; its rank is 1 of 4
constexpr uint32_t kRank = 1;
constexpr uint32_t kWorld = 4;

bool Says(const std::string& part) {
  return std::string(lh_last_error()).find(part) != std::string::npos;
}

// A table as peerd reads it.
struct Table {
  std::vector<uint64_t> participants, gives, gets;
  std::vector<lh_ipc_piece> pieces;
  std::string outline;
};

class FakePeerd {
 public:
  FakePeerd() {
    char directory[] = "/tmp/lh_fake_XXXXXX";
    EXPECT_NE(mkdtemp(directory), nullptr);
    directory_ = directory;
    path_ = directory_ + "/peerd.sock";
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path_.c_str(), path_.size());
    listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(listener_, 8), 0);
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakePeerd() {
    shutdown(listener_, SHUT_RDWR);
    if (connection_ >= 0) shutdown(connection_, SHUT_RDWR);
    thread_.join();
    close(listener_);
    if (connection_ >= 0) close(connection_);
    for (const auto& [id, region] : regions_) munmap(region.first, region.second);
    if (shared_ != nullptr) munmap(shared_, sizeof *shared_);
    unlink(path_.c_str());
    rmdir(directory_.c_str());
  }

  const std::string& path() const { return path_; }
  void Die() { shutdown(connection_, SHUT_RDWR); }
  // Waits until so many OPs, or CANCELs, have come.
  lh_ipc_request Op(size_t index) { return At(ops_, index); }
  lh_ipc_request Cancel(size_t index) { return At(cancels_, index); }
  // The name of a call that was refused here, and why.
  IpcOpName Refusal(size_t index) {
    const lh_ipc_op op = At(refusals_, index).u.op;
    const uint8_t* const at = Memory(op.table);
    std::vector<uint8_t> table(at, at + IpcTableBytes(op));
    EXPECT_EQ(op.source.region, 0u);
    EXPECT_EQ(op.target.region, 0u);
    return NameOf(op, table).value_or(IpcOpName());
  }
  size_t refusals() {
    std::lock_guard lock(mutex_);
    return refusals_.size();
  }
  size_t ops() {
    std::lock_guard lock(mutex_);
    return ops_.size();
  }
  // Where a range lies in this process. nullptr: in no region.
  uint8_t* Memory(const lh_ipc_range& range) {
    std::lock_guard lock(mutex_);
    const auto it = regions_.find(range.region);
    return it == regions_.end() ? nullptr : static_cast<uint8_t*>(it->second.first) + range.offset;
  }
  // What peerd says of an op that is not legal. "": it is legal.
  std::string RefusalOf(const lh_ipc_op& op) {
    const uint8_t* const at = Memory(op.table);
    std::vector<uint8_t> table;
    if (at != nullptr) table.assign(at, at + IpcTableBytes(op));
    std::lock_guard lock(mutex_);
    const auto parsed = ParseIpcOp(op, table, [&](uint64_t id) -> std::optional<uint64_t> {
      const auto it = regions_.find(id);
      return it == regions_.end() ? std::nullopt : std::optional<uint64_t>(it->second.second);
    });
    return std::string(parsed.status().message());
  }
  Table TableOf(const lh_ipc_op& op) {
    Table table;
    const uint8_t* at = Memory(op.table);
    if (at == nullptr) return table;
    EXPECT_EQ(op.table.offset % 8, 0u);
    const auto take = [&](auto* to, size_t count) {
      to->resize(count);
      if (count > 0) memcpy(to->data(), at, count * sizeof(to->front()));
      at += count * sizeof(to->front());
    };
    take(&table.participants, op.participants);
    take(&table.gives, op.gives);
    take(&table.gets, op.gets);
    take(&table.pieces, op.pieces);
    take(&table.outline, op.outline);
    return table;
  }
  void Answer(const lh_ipc_request& request, lh_status status = LH_OK,
              const std::string& text = "") {
    lh_ipc_reply reply = {};
    reply.magic = LH_IPC_MAGIC;
    reply.type = LH_IPC_DONE;
    reply.call = request.call;
    reply.member = 9;
    reply.status = status;
    if (request.type == LH_IPC_HELLO && shared() != nullptr) reply.flags = LH_IPC_SHARED;
    reply.world = {1, kMember, kRank, kWorld, 0, 0};
    if (request.type == LH_IPC_STEP) reply.flags = LH_IPC_PASSED;
    reply.world.step_rank = kRank;
    reply.world.step_size = step_size;
    if (status == LH_OK) {
      reply.u.op.size = 1;
      reply.u.op.algorithm = LH_WIRE_RING;
    } else {
      memcpy(reply.u.text, text.data(), text.size());
    }
    Say(reply);
  }
  void Say(const lh_ipc_reply& reply) {
    (void)!send(connection_, &reply, sizeof reply, MSG_NOSIGNAL);
  }
  // The queues, once HELLO has come. Before that, `share` says whether they are used.
  lh_ipc_shared* shared() {
    std::lock_guard lock(mutex_);
    return shared_;
  }
  std::atomic<bool> share = false;
  // Ops are not answered until the test does so.
  std::atomic<bool> hold = true;
  // The members at the last boundary, as replies say from now on.
  std::atomic<uint32_t> step_size = 0;

 private:
  lh_ipc_request At(const std::vector<lh_ipc_request>& list, size_t index) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(20), [&] { return list.size() > index; }));
    return list.size() > index ? list[index] : lh_ipc_request{};
  }

  void Serve() {
    connection_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    lh_ipc_request request;
    size_t have = 0;
    int fd = -1;
    while (connection_ >= 0) {
      iovec part = {reinterpret_cast<uint8_t*>(&request) + have, sizeof request - have};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
      msghdr message = {};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const ssize_t got = recvmsg(connection_, &message, MSG_CMSG_CLOEXEC);
      if (got <= 0) return;
      if (const cmsghdr* const head = CMSG_FIRSTHDR(&message); head != nullptr) {
        memcpy(&fd, CMSG_DATA(head), sizeof fd);
      }
      have += static_cast<size_t>(got);
      if (have < sizeof request) continue;
      have = 0;
      Take(request, &fd);
    }
  }
  void Take(const lh_ipc_request& request, int* fd) {
    EXPECT_EQ(request.magic, LH_IPC_MAGIC);
    std::unique_lock lock(mutex_);
    if (request.type == LH_IPC_HELLO && share) {
      void* const base = mmap(nullptr, sizeof *shared_, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
      EXPECT_NE(base, MAP_FAILED);
      shared_ = static_cast<lh_ipc_shared*>(base);
    }
    if (request.type == LH_IPC_HELLO) close(*fd);
    if (request.type == LH_IPC_REGION) {
      void* const base =
          mmap(nullptr, request.u.region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
      EXPECT_NE(base, MAP_FAILED);
      close(*fd);
      regions_[request.u.region.region] = {base, request.u.region.bytes};
    }
    const bool refusal = request.type == LH_IPC_OP && request.u.op.refusal != 0;
    if (request.type == LH_IPC_OP) (refusal ? refusals_ : ops_).push_back(request);
    if (request.type == LH_IPC_CANCEL) cancels_.push_back(request);
    changed_.notify_all();
    lock.unlock();
    if (request.type != LH_IPC_OP || !hold || refusal) Answer(request);
  }

  std::string directory_, path_;
  int listener_ = -1;
  std::atomic<int> connection_ = -1;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<lh_ipc_request> ops_, cancels_, refusals_;
  std::map<uint64_t, std::pair<void*, size_t>> regions_;
  lh_ipc_shared* shared_ = nullptr;
};

class CollectiveTest : public testing::Test {
 protected:
  void SetUp() override {
    lh_open_options open = LH_OPEN_OPTIONS_INIT;
    open.socket_path = peerd_.path().c_str();
    ASSERT_EQ(lh_open(&open, &client_), LH_OK) << lh_last_error();
    ASSERT_EQ(lh_join(client_, nullptr, &comm_), LH_OK) << lh_last_error();
  }
  ~CollectiveTest() override {
    for (lh_op* op : started_) lh_op_free(op);
    lh_close(client_);
  }
  float* Alloc(size_t count) {
    void* data = nullptr;
    EXPECT_EQ(lh_alloc(client_, count * sizeof(float), &data), LH_OK) << lh_last_error();
    return static_cast<float*>(data);
  }
  // Starts an op, and returns what peerd heard of it.
  template <class Options>
  lh_ipc_op Ask(lh_status (*start)(lh_comm*, const Options*, lh_op**), const Options& options) {
    lh_op* op = nullptr;
    EXPECT_EQ(start(comm_, &options, &op), LH_OK) << lh_last_error();
    if (op == nullptr) return {};
    started_.push_back(op);
    return peerd_.Op(started_.size() - 1).u.op;
  }
  // Expects that peerd hears no op.
  template <class Options>
  void Refused(lh_status (*start)(lh_comm*, const Options*, lh_op**), const Options& options,
               const std::string& text) {
    lh_op* op = nullptr;
    EXPECT_EQ(start(comm_, &options, &op), LH_INVALID_ARGUMENT) << text;
    EXPECT_TRUE(Says(text)) << lh_last_error();
    EXPECT_EQ(op, nullptr);
    EXPECT_EQ(peerd_.ops(), started_.size());
  }
  // Expects that peerd hears of the op as the caller wants it, and that its refusal is the outcome.
  template <class Options>
  void Illegal(lh_status (*start)(lh_comm*, const Options*, lh_op**), const Options& options,
               const std::string& text) {
    const std::string refusal = peerd_.RefusalOf(Ask(start, options));
    EXPECT_NE(refusal.find(text), std::string::npos) << refusal << ", not " << text;
    peerd_.Answer(peerd_.Op(started_.size() - 1), LH_INVALID_ARGUMENT, refusal);
    EXPECT_EQ(lh_op_wait(started_.back(), 20000), LH_INVALID_ARGUMENT);
    EXPECT_TRUE(Says(refusal)) << lh_last_error();
  }
  void End(size_t index, lh_status status = LH_OK) {
    peerd_.Answer(peerd_.Op(index), status, "as scripted");
    EXPECT_EQ(lh_op_wait(started_[index], 20000), status) << lh_last_error();
  }
  const float* Floats(const lh_ipc_range& range) {
    return reinterpret_cast<const float*>(peerd_.Memory(range));
  }

  FakePeerd peerd_;
  lh_client* client_ = nullptr;
  lh_comm* comm_ = nullptr;
  std::vector<lh_op*> started_;
};

TEST_F(CollectiveTest, AStatusThatThereIsNotIsABugOfPeerd) {
  lh_ipc_reply gone = {};
  gone.magic = LH_IPC_MAGIC;
  gone.type = LH_IPC_GONE;
  gone.member = 9;
  gone.status = 77;
  peerd_.Say(gone);
  lh_world_info world = LH_WORLD_INFO_INIT;
  lh_status status = LH_OK;
  while (status == LH_OK) status = lh_world(comm_, &world);
  EXPECT_EQ(status, LH_INTERNAL);
  EXPECT_TRUE(Says("unknown status 77")) << lh_last_error();
  gone.status = -1;
  gone.member = 0;
  peerd_.Say(gone);
  while (status != LH_OK) status = lh_client_check(client_) == LH_OK ? LH_INTERNAL : LH_OK;
  EXPECT_EQ(lh_client_check(client_), LH_INTERNAL);
  EXPECT_TRUE(Says("unknown status -1")) << lh_last_error();
}

TEST_F(CollectiveTest, AnAnswerWithAStatusThatThereIsNotEndsTheOpAsABug) {
  float value = 1;
  lh_all_reduce_options options = LH_ALL_REDUCE_OPTIONS_INIT;
  options.source = options.target = &value;
  options.count = 1;
  Ask(lh_all_reduce_start, options);
  peerd_.Answer(peerd_.Op(0), static_cast<lh_status>(10), "what?");
  EXPECT_EQ(lh_op_wait(started_[0], 20000), LH_INTERNAL);
  EXPECT_TRUE(Says("unknown status 10")) << lh_last_error();
}

// A queue holds 64 entries. More cannot wait in it, however high or low the number is.
TEST(SharedQueueTest, ANumberOfRepliesThatThereCannotBeEndsTheConnection) {
  for (const uint32_t put : {LH_IPC_QUEUE_ENTRIES + 1, 0x80000000u, 0xffffffffu}) {
    FakePeerd peerd;
    peerd.share = true;
    lh_open_options open = LH_OPEN_OPTIONS_INIT;
    open.socket_path = peerd.path().c_str();
    lh_client* client = nullptr;
    ASSERT_EQ(lh_open(&open, &client), LH_OK) << lh_last_error();
    ASSERT_NE(peerd.shared(), nullptr);
    __atomic_store_n(&peerd.shared()->replies.put, put, __ATOMIC_SEQ_CST);
    lh_ipc_reply look = {};
    look.magic = LH_IPC_MAGIC;
    look.type = LH_IPC_LOOK;
    peerd.Say(look);
    lh_status status = LH_OK;
    while (status == LH_OK) status = lh_client_check(client);
    EXPECT_EQ(status, LH_INTERNAL);
    EXPECT_TRUE(Says("more replies than there is room for")) << lh_last_error();
    EXPECT_EQ(__atomic_load_n(&peerd.shared()->replies.taken, __ATOMIC_SEQ_CST), 0u);
    lh_close(client);
  }
}

std::vector<float> Rising(size_t count, float first = 0) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// ------------------------------------------------------------------------------ refused calls

TEST_F(CollectiveTest, PeerdHearsThatACallWasRefused) {
  const std::vector<uint64_t> ids = {9, kMember};
  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  gather.participants = ids.data();
  gather.participant_count = 2;
  gather.tag = 5;
  Refused(lh_all_gather_start, gather, "world is 0");
  IpcOpName name = peerd_.Refusal(0);
  EXPECT_EQ(name.kind, OpKind::kAllGather);
  EXPECT_EQ(name.participants, (std::vector{MemberId(kMember), MemberId(9)}));
  EXPECT_NE(name.refusal.find("world is 0; give the number"), std::string::npos) << name.refusal;
  EXPECT_TRUE(Says("world is 0")) << "the text of the call stays";

  lh_recv_options recv = LH_RECV_OPTIONS_INIT;
  recv.count = 4;
  recv.from = 2;
  Refused(lh_recv_start, recv, "target is NULL");
  name = peerd_.Refusal(1);
  EXPECT_EQ(name.kind, OpKind::kSendRecv);
  EXPECT_FALSE(name.is_root);
  EXPECT_EQ(name.root_rank, 2u);

  // This one names no op.
  gather.participant_count = 0;
  Refused(lh_all_gather_start, gather, "participant_count is 0");
  EXPECT_EQ(peerd_.refusals(), 2u);
}

TEST_F(CollectiveTest, ALibraryOnTopCanRefuseACall) {
  lh_refuse_options refuse = LH_REFUSE_OPTIONS_INIT;
  const std::string why(300, 'w');
  refuse.call = "lh_send";
  refuse.why = why.c_str();
  refuse.partner_member = 3;
  ASSERT_EQ(lh_refuse(comm_, &refuse), LH_OK) << lh_last_error();
  const IpcOpName name = peerd_.Refusal(0);
  EXPECT_EQ(name.kind, OpKind::kSendRecv);
  EXPECT_TRUE(name.is_root);
  EXPECT_EQ(name.partner, MemberId(3));
  EXPECT_EQ(name.refusal, why.substr(0, 255));
  for (const char* const call : {"lh_all_reduce", "lh_barrier", "lh_all_to_all", "lh_recv"}) {
    refuse.call = call;
    EXPECT_EQ(lh_refuse(comm_, &refuse), LH_OK) << call;
  }
  refuse.call = "lh_join";
  EXPECT_EQ(lh_refuse(comm_, &refuse), LH_INVALID_ARGUMENT);
  refuse.call = "lh_send";
  refuse.why = nullptr;
  EXPECT_EQ(lh_refuse(comm_, &refuse), LH_INVALID_ARGUMENT);
}

// ------------------------------------------------------------------------------ one tensor

TEST_F(CollectiveTest, AnOpOnOneTensorNeedsNoTable) {
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  float* const data = Alloc(16);
  o.source = o.target = data;
  o.count = 16;
  o.tag = 3;
  o.op = LH_AVG;
  const lh_ipc_op op = Ask(lh_all_reduce_start, o);
  EXPECT_EQ(op.kind, LH_WIRE_ALL_REDUCE);
  EXPECT_EQ(op.count, 16u);
  EXPECT_EQ(op.tag, 3u);
  EXPECT_EQ(op.reduce, LH_WIRE_AVG);
  EXPECT_EQ(op.dtype, LH_WIRE_FLOAT32);
  EXPECT_EQ(op.table.region, 0u);
  EXPECT_EQ(op.list, 0u);
  EXPECT_EQ(op.source.region, op.target.region);
  EXPECT_EQ(op.source.offset, op.target.offset);
  EXPECT_EQ(op.weighted + op.unequal + op.order + op.flags + op.participants + op.pieces, 0u);
  EXPECT_EQ(op.weight, 0);
  const uint8_t zero[8] = {};
  EXPECT_EQ(memcmp(op.zero, zero, sizeof zero), 0);
}

TEST_F(CollectiveTest, AWeightAndAnOrderReachPeerd) {
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  float data[4] = {};
  const double weight = 0;
  o.source = o.target = data;
  o.count = 4;
  o.weight = &weight;
  o.order = LH_RANK_ORDER;
  const lh_ipc_op op = Ask(lh_all_reduce_start, o);
  EXPECT_EQ(op.weighted, 1);
  EXPECT_EQ(op.weight, 0);
  EXPECT_EQ(op.order, LH_WIRE_RANK_ORDER);
  EXPECT_EQ(op.table.region, 0u);
}

TEST_F(CollectiveTest, ParticipantsAreASortedSet) {
  lh_barrier_options o = LH_BARRIER_OPTIONS_INIT;
  const uint64_t ids[] = {99, kMember, 12};
  o.participants = ids;
  o.participant_count = 3;
  o.min_world = 2;
  const lh_ipc_op op = Ask(lh_barrier_start, o);
  EXPECT_EQ(op.kind, LH_WIRE_BARRIER);
  EXPECT_EQ(op.count, 1u);
  EXPECT_EQ(op.min_world, 2u);
  EXPECT_EQ(peerd_.TableOf(op).participants, (std::vector<uint64_t>{kMember, 12, 99}));
  EXPECT_EQ(ids[0], 99u) << "the caller's array is as it was";
  End(0);
}

TEST_F(CollectiveTest, ParticipantsThatCannotBeAreRefused) {
  const auto refused = [&](const std::vector<uint64_t>& ids, const char* text) {
    lh_barrier_options o = LH_BARRIER_OPTIONS_INIT;
    o.participants = ids.data();
    o.participant_count = static_cast<uint32_t>(ids.size());
    if (ids.size() > LH_MEMBERS_MAX) {
      Refused(lh_barrier_start, o, text);
    } else {
      Illegal(lh_barrier_start, o, text);
    }
  };
  refused({kMember, 2, 2}, "member m2 twice");
  refused({kMember, 0}, "member id 0, which nobody has");
  refused(std::vector<uint64_t>(1025, 1), "participant_count is 1025");
  lh_barrier_options o = LH_BARRIER_OPTIONS_INIT;
  o.participant_count = 1;
  Refused(lh_barrier_start, o, "participants is NULL");
  lh_reduce_options reduce = LH_REDUCE_OPTIONS_INIT;
  const uint64_t ids[] = {kMember, 8};
  reduce.participants = ids;
  reduce.participant_count = 2;
  reduce.root_member = 9;
  Illegal(lh_reduce_start, reduce, "the root, member m9, is not among its participants");
}

TEST_F(CollectiveTest, OnlyTheTensorsThatAMemberNeedsAreNamed) {
  float whole[8] = {};
  float part[2] = {};
  lh_reduce_options reduce = LH_REDUCE_OPTIONS_INIT;
  reduce.source = whole;
  reduce.count = 8;
  reduce.root = 0;
  lh_ipc_op op = Ask(lh_reduce_start, reduce);
  EXPECT_EQ(op.kind, LH_WIRE_REDUCE);
  EXPECT_NE(op.source.region, 0u);
  EXPECT_EQ(op.target.region, 0u);
  EXPECT_EQ(op.flags, LH_IPC_ROOT_IS_RANK);

  reduce.root = kRank;
  reduce.target = whole;
  reduce.tag = 1;
  op = Ask(lh_reduce_start, reduce);
  EXPECT_NE(op.target.region, 0u);
  EXPECT_EQ(op.flags, LH_IPC_ROOT_IS_RANK | LH_IPC_IS_ROOT);
  EXPECT_EQ(op.root, kRank);

  lh_gather_options gather = LH_GATHER_OPTIONS_INIT;
  gather.source = part;
  gather.count = 2;
  gather.world = 4;
  gather.root_member = 8;
  gather.tag = 2;
  op = Ask(lh_gather_start, gather);
  EXPECT_EQ(op.kind, LH_WIRE_GATHER);
  EXPECT_EQ(op.target.region, 0u);
  EXPECT_EQ(op.flags, 0);
  EXPECT_EQ(op.root, 8u);
  EXPECT_EQ(op.world, 4);

  lh_scatter_options scatter = LH_SCATTER_OPTIONS_INIT;
  scatter.source = whole;
  scatter.target = part;
  scatter.count = 2;
  scatter.world = 4;
  scatter.root_member = kMember;
  scatter.tag = 3;
  op = Ask(lh_scatter_start, scatter);
  EXPECT_EQ(op.kind, LH_WIRE_SCATTER);
  EXPECT_NE(op.source.region, 0u);
  EXPECT_NE(op.target.region, 0u);
  EXPECT_EQ(op.flags, LH_IPC_IS_ROOT);

  lh_send_options send = LH_SEND_OPTIONS_INIT;
  send.source = part;
  send.count = 2;
  send.to = 3;
  send.tag = 4;
  op = Ask(lh_send_start, send);
  EXPECT_EQ(op.kind, LH_WIRE_SEND_RECV);
  EXPECT_EQ(op.target.region, 0u);
  EXPECT_EQ(op.root, 3u);
  EXPECT_EQ(op.flags, LH_IPC_ROOT_IS_RANK | LH_IPC_IS_ROOT);

  lh_recv_options recv = LH_RECV_OPTIONS_INIT;
  recv.target = part;
  recv.count = 2;
  recv.from_member = 8;
  recv.tag = 5;
  op = Ask(lh_recv_start, recv);
  EXPECT_EQ(op.source.region, 0u);
  EXPECT_NE(op.target.region, 0u);
  EXPECT_EQ(op.flags, 0);
  EXPECT_EQ(op.root, 8u);
}

TEST_F(CollectiveTest, TensorsWithoutElementsHaveNoPlace) {
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  lh_ipc_op op = Ask(lh_all_reduce_start, o);
  EXPECT_EQ(op.count, 0u);
  EXPECT_EQ(op.source.region + op.source.offset + op.target.region + op.target.offset, 0u);
  lh_all_to_all_options all = LH_ALL_TO_ALL_OPTIONS_INIT;
  all.world = 4;
  all.tag = 1;
  op = Ask(lh_all_to_all_start, all);
  EXPECT_EQ(op.kind, LH_WIRE_ALL_TO_ALL);
  EXPECT_EQ(op.source.region + op.target.region, 0u);
  End(0);
  End(1);
}

TEST_F(CollectiveTest, AnAllToAllMayOverlapAndLosesNothingIfItFails) {
  float* const data = Alloc(8);
  std::copy_n(Rising(8).begin(), 8, data);
  lh_all_to_all_options o = LH_ALL_TO_ALL_OPTIONS_INIT;
  o.source = o.target = data;
  o.count = 2;
  o.world = 4;
  for (const lh_status status : {LH_ABORTED, LH_OK}) {
    const lh_ipc_op op = Ask(lh_all_to_all_start, o);
    EXPECT_NE(op.source.offset, op.target.offset);
    std::fill_n(reinterpret_cast<float*>(peerd_.Memory(op.target)), 8, 5.0f);
    End(started_.size() - 1, status);
    EXPECT_EQ(data[0], status == LH_OK ? 5.0f : 0.0f);
    EXPECT_EQ(data[7], status == LH_OK ? 5.0f : 7.0f);
  }
}

TEST_F(CollectiveTest, ASourceWithinItsTargetIsPutBackIfTheOpFails) {
  float* const data = Alloc(8);
  const auto start = [&](float* source) {
    std::copy_n(Rising(8).begin(), 8, data);
    lh_all_gather_options o = LH_ALL_GATHER_OPTIONS_INIT;
    o.source = source;
    o.target = data;
    o.count = 2;
    o.world = 4;
    const lh_ipc_op op = Ask(lh_all_gather_start, o);
    // Parts of others arrive.
    std::fill_n(reinterpret_cast<float*>(peerd_.Memory(op.target)), 8, 5.0f);
  };
  for (float* const source : {data, data + 3, data + 6}) {
    for (const lh_status status : {LH_ABORTED, LH_EVICTED, LH_OK}) {
      start(source);
      End(started_.size() - 1, status);
      const bool ok = status == LH_OK;
      EXPECT_EQ(source[0], ok ? 5.0f : static_cast<float>(source - data)) << status;
      EXPECT_EQ(source[1], ok ? 5.0f : static_cast<float>(source - data + 1)) << status;
      EXPECT_EQ(data[source == data ? 7 : 0], 5.0f);
    }
  }
}

TEST_F(CollectiveTest, ASourceWithinItsTargetIsPutBackIfPeerdDies) {
  float* const data = Alloc(8);
  std::copy_n(Rising(8).begin(), 8, data);
  lh_gather_options o = LH_GATHER_OPTIONS_INIT;
  o.source = data + 4;
  o.target = data;
  o.count = 2;
  o.world = 4;
  o.root_member = kMember;
  const lh_ipc_op op = Ask(lh_gather_start, o);
  std::fill_n(reinterpret_cast<float*>(peerd_.Memory(op.target)), 8, 5.0f);
  peerd_.Die();
  EXPECT_EQ(lh_op_wait(started_[0], 20000), LH_UNAVAILABLE);
  EXPECT_EQ(data[4], 4.0f);
  EXPECT_EQ(data[5], 5.0f);
}

// ------------------------------------------------------------------------------ unequal parts

TEST_F(CollectiveTest, UnequalPartsGiveAndGetWhatTheirKindSays) {
  const uint64_t counts[] = {3, 0, 1, 4};
  const uint64_t others[] = {2, 0, 2, 2};
  float whole[8] = {};
  float mine[8] = {};
  using Lengths = std::vector<uint64_t>;
  const auto check = [&](const lh_ipc_op& op, const Lengths& gives, const Lengths& gets) {
    EXPECT_EQ(op.unequal, 1);
    EXPECT_EQ(op.count, 0u);
    EXPECT_EQ(op.world, 4);
    EXPECT_EQ(peerd_.TableOf(op).gives, gives);
    EXPECT_EQ(peerd_.TableOf(op).gets, gets);
  };
  lh_reduce_scatter_options reduce = LH_REDUCE_SCATTER_OPTIONS_INIT;
  reduce.source = whole;
  reduce.world = 4;
  reduce.counts = counts;
  lh_ipc_op op = Ask(lh_reduce_scatter_start, reduce);
  check(op, {3, 0, 1, 4}, {0});
  EXPECT_EQ(op.target.region, 0u) << "its part has no elements";

  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  gather.source = mine;
  gather.target = whole;
  gather.count = 1;
  gather.world = 4;
  gather.counts = counts;
  gather.tag = 1;
  check(Ask(lh_all_gather_start, gather), {1}, {3, 0, 1, 4});

  lh_gather_options to_root = LH_GATHER_OPTIONS_INIT;
  to_root.source = mine;
  to_root.target = whole;
  to_root.count = 3;
  to_root.world = 4;
  to_root.counts = counts;
  to_root.root = kRank;
  to_root.tag = 2;
  check(Ask(lh_gather_start, to_root), {3}, {3, 0, 1, 4});
  const uint64_t unread = 0;
  to_root.root = 0;
  to_root.counts = &unread;
  to_root.target = nullptr;
  to_root.tag = 3;
  check(Ask(lh_gather_start, to_root), {3}, {});

  lh_scatter_options scatter = LH_SCATTER_OPTIONS_INIT;
  scatter.source = whole;
  scatter.target = mine;
  scatter.count = 4;
  scatter.world = 4;
  scatter.counts = counts;
  scatter.root_member = kMember;
  scatter.tag = 4;
  check(Ask(lh_scatter_start, scatter), {3, 0, 1, 4}, {4});
  scatter.root_member = 8;
  scatter.counts = &unread;
  scatter.tag = 5;
  op = Ask(lh_scatter_start, scatter);
  check(op, {}, {4});
  EXPECT_EQ(op.source.region, 0u);

  lh_all_to_all_options all = LH_ALL_TO_ALL_OPTIONS_INIT;
  all.source = whole;
  all.target = mine;
  all.world = 4;
  all.counts = counts;
  all.target_counts = others;
  all.tag = 6;
  check(Ask(lh_all_to_all_start, all), {3, 0, 1, 4}, {2, 0, 2, 2});
}

TEST_F(CollectiveTest, AMembersOwnPartIsAsLongAsItsCountsSay) {
  peerd_.step_size = kWorld;
  for (int i = 0; i < 2; ++i) {  // the first one is that of the join
    ASSERT_EQ(lh_begin_step(comm_, 20000), LH_OK) << lh_last_error();
  }
  const uint64_t counts[] = {3, 2, 1, 2};
  const uint64_t others[] = {2, 3, 2, 1};
  float whole[8] = {};
  float mine[8] = {};
  const auto check = [&](auto start, auto options, uint64_t wrong, uint64_t right) {
    options.counts = counts;
    options.world = kWorld;
    options.count = wrong;
    Refused(start, options, "and counts[1], for the member of its rank, is 2");
    const uint64_t ids[] = {2, kMember, 8, 9};
    options.participants = ids;  // among these, its rank may be another one
    options.participant_count = 4;
    (void)Ask(start, options);
    options.participants = nullptr;
    options.participant_count = 0;
    options.count = right;
    (void)Ask(start, options);
  };
  lh_reduce_scatter_options reduce = LH_REDUCE_SCATTER_OPTIONS_INIT;
  reduce.source = whole;
  reduce.target = mine;
  check(lh_reduce_scatter_start, reduce, 3, 2);
  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  gather.source = mine;
  gather.target = whole;
  gather.tag = 1;
  check(lh_all_gather_start, gather, 1, 2);
  lh_gather_options to_root = LH_GATHER_OPTIONS_INIT;
  to_root.source = mine;
  to_root.target = whole;
  to_root.root = kRank;
  to_root.tag = 2;
  check(lh_gather_start, to_root, 0, 2);
  lh_scatter_options scatter = LH_SCATTER_OPTIONS_INIT;
  scatter.source = whole;
  scatter.target = mine;
  scatter.root_member = kMember;
  scatter.tag = 3;
  check(lh_scatter_start, scatter, 5, 2);
  lh_all_to_all_options all = LH_ALL_TO_ALL_OPTIONS_INIT;
  all.source = whole;
  all.target = mine;
  all.world = kWorld;
  all.counts = counts;
  all.target_counts = others;
  all.tag = 4;
  Refused(lh_all_to_all_start, all, "expects 3 elements of itself, and counts[1], for the member");
  const uint64_t fitting[] = {2, 2, 2, 1};
  all.target_counts = fitting;
  (void)Ask(lh_all_to_all_start, all);
  // Laid out for another world, nobody can tell which part is whose.
  gather.tag = 5;
  gather.counts = counts;
  gather.count = 1;
  gather.world = 3;
  (void)Ask(lh_all_gather_start, gather);
  // Only the root's lengths are read.
  to_root.tag = 6;
  to_root.root = 0;
  to_root.target = nullptr;
  to_root.counts = counts;
  to_root.world = kWorld;
  to_root.count = 1;
  (void)Ask(lh_gather_start, to_root);
}

TEST_F(CollectiveTest, LengthsThatCannotBeAreRefused) {
  const uint64_t counts[] = {1, uint64_t{1} << 41, 1, 1};
  float data[8] = {};
  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  gather.source = data;
  gather.target = data;
  gather.world = 4;
  gather.counts = counts;
  Refused(lh_all_gather_start, gather, "counts[1] is 2199023255552");
  const uint64_t few[] = {1, 1, 1, 1};
  std::vector<float> whole(4);
  gather.counts = few;
  gather.count = 1;
  gather.target = whole.data();
  gather.algorithm = LH_ONESHOT;
  Illegal(lh_all_gather_start, gather, "unequal lengths cannot travel as a one-shot op");
  gather.algorithm = LH_AUTO;
  gather.count = 0;
  const lh_slice slice = {data, data, 1, LH_FLOAT32, 0};
  gather.source = gather.target = nullptr;
  gather.slices = &slice;
  gather.slice_count = 1;
  Illegal(lh_all_gather_start, gather, "unequal is 1, not 0 for a list of tensors");
  lh_all_to_all_options all = LH_ALL_TO_ALL_OPTIONS_INIT;
  all.world = 4;
  all.counts = counts;
  Refused(lh_all_to_all_start, all, "give counts and target_counts, or neither");
  const std::vector<uint64_t> none(257, 0);
  all.counts = all.target_counts = none.data();
  all.count = 1;
  Illegal(lh_all_to_all_start, all, "count is 1, not 0 with parts of unequal lengths");
  all.count = 0;
  all.world = 257;
  Illegal(lh_all_to_all_start, all, "world is 257, not at most 256 for an all-to-all");
}

// ------------------------------------------------------------------------------ refusals

TEST_F(CollectiveTest, ReductionsThatCannotBeAreRefused) {
  uint8_t data[64] = {};
  const auto options = [&](auto spoil) {
    lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
    o.source = o.target = data;
    o.count = 4;
    spoil(&o);
    return o;
  };
  const auto refused = [&](auto spoil, const char* text) {
    Refused(lh_all_reduce_start, options(spoil), text);
  };
  const auto illegal = [&](auto spoil, const char* text) {
    Illegal(lh_all_reduce_start, options(spoil), text);
  };
  using O = lh_all_reduce_options;
  const double one = 1;
  const double negative = -0.5;
  const double nan = std::nan("");
  const double infinite = std::numeric_limits<double>::infinity();
  illegal([](O* o) { o->dtype = LH_FLOAT8_E4M3; }, "can only be moved");
  illegal([](O* o) { o->dtype = LH_FLOAT8_E5M2; }, "can only be moved");
  refused([](O* o) { o->dtype = static_cast<lh_dtype>(15); }, "dtype is 15");
  illegal(
      [](O* o) {
        o->dtype = LH_BOOL;
        o->op = LH_AVG;
      },
      "reduce is avg, not sum, min or max for bool");
  illegal(
      [](O* o) {
        o->dtype = LH_BOOL;
        o->op = LH_PROD;
      },
      "reduce is prod, not sum, min or max for bool");
  illegal([&](O* o) { o->weight = &negative; }, "weight is -0.5");
  illegal([&](O* o) { o->weight = &nan; }, "weight is ");
  illegal([&](O* o) { o->weight = &infinite; }, "weight is inf");
  illegal(
      [&](O* o) {
        o->weight = &one;
        o->op = LH_MAX;
      },
      "reduce is max, not sum or avg with weights");
  illegal(
      [&](O* o) {
        o->weight = &one;
        o->dtype = LH_INT32;
      },
      "dtype is int32, not a float with weights");
  illegal([](O* o) { o->order = static_cast<lh_order>(2); }, "order is 2");
  illegal(
      [](O* o) {
        o->order = LH_RANK_ORDER;
        o->algorithm = LH_RING;
      },
      "the order of the sums follows the ring");
  illegal([](O* o) { o->min_world = 1025; }, "min_world is 1025");
  illegal([](O* o) { o->op = static_cast<lh_reduce_op>(5); }, "reduce is 5, not at most 4");
  refused([](O* o) { o->op = static_cast<lh_reduce_op>(256); }, "op is 256, and there is no such");
  illegal([](O* o) { o->on_fault = static_cast<lh_on_fault>(3); }, "on_fault is 3, not at most 1");
  illegal([](O* o) { o->algorithm = static_cast<lh_algorithm>(5); }, "algorithm is 5, not at most");
  refused([](O* o) { o->source = nullptr; }, "source is NULL");
  const lh_slice mixed[] = {{data, data, 4, LH_FLOAT32, 0}, {data + 32, data + 32, 4, LH_INT8, 0}};
  illegal(
      [&](O* o) {
        o->source = o->target = nullptr;
        o->count = 0;
        o->slices = mixed;
        o->slice_count = 2;
        o->weight = &one;
      },
      "piece 1: dtype is int8, not a float with weights");
}

TEST_F(CollectiveTest, PartnersAndRootsThatCannotBeAreRefused) {
  float data[4] = {};
  lh_send_options send = LH_SEND_OPTIONS_INIT;
  send.source = data;
  send.count = 4;
  send.to = 4;
  Refused(lh_send_start, send, "to is rank 4, and the group has 4 members");
  lh_recv_options recv = LH_RECV_OPTIONS_INIT;
  recv.count = 4;
  recv.algorithm = LH_RING;
  Refused(lh_recv_start, recv, "target is NULL");
  recv.target = data;
  Illegal(lh_recv_start, recv, "algorithm is ring, not auto, oneshot or mesh for this kind");
  lh_gather_options gather = LH_GATHER_OPTIONS_INIT;
  gather.source = data;
  gather.count = 4;
  gather.root = kRank;
  Refused(lh_gather_start, gather, "world is 0");
  gather.world = 4;
  Refused(lh_gather_start, gather, "target is NULL");
  std::vector<float> whole(16);
  gather.target = whole.data();
  gather.algorithm = LH_RING;
  Illegal(lh_gather_start, gather, "algorithm is ring, not auto, oneshot or mesh for this kind");
}

TEST_F(CollectiveTest, Float8AndBoolAreMoved) {
  uint8_t data[6] = {1, 2, 3, 4, 5, 6};
  lh_broadcast_options o = LH_BROADCAST_OPTIONS_INIT;
  o.source = o.target = data;
  o.count = 6;
  for (const lh_dtype dtype : {LH_BOOL, LH_FLOAT8_E4M3, LH_FLOAT8_E5M2}) {
    o.dtype = dtype;
    o.tag = dtype;
    const lh_ipc_op op = Ask(lh_broadcast_start, o);
    EXPECT_EQ(op.dtype, dtype);
    EXPECT_EQ(memcmp(peerd_.Memory(op.source), data, 6), 0);
    EXPECT_EQ(lh_dtype_size(dtype), 1u);
  }
}

// ------------------------------------------------------------------------------ lists

constexpr size_t kLarge = LHI_PIECE_BYTES_MIN / sizeof(float);

TEST_F(CollectiveTest, LargeTensorsArePiecesAndSmallOnesAreOnePieceForEachDtype) {
  float* const shared = Alloc(kLarge);
  std::vector<float> large = Rising(kLarge + 1, 1);
  std::vector<float> small = {1, 2, 3};
  std::vector<double> wide = {7, 8};
  std::vector<float> more = {4, 5};
  shared[0] = 42;
  const lh_slice slices[] = {Slice(small.data(), small.data(), 3),
                             Slice(shared, shared, kLarge),
                             Slice(wide.data(), wide.data(), 2),
                             {nullptr, nullptr, 0, LH_INT16, 0},
                             Slice(large.data(), large.data(), kLarge + 1),
                             Slice(more.data(), more.data(), 2)};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.slices = slices;
  o.slice_count = 6;
  const lh_ipc_op op = Ask(lh_all_reduce_start, o);
  EXPECT_NE(op.list, 0u);
  EXPECT_EQ(op.count, 0u);
  EXPECT_EQ(op.dtype, LH_WIRE_FLOAT32);
  EXPECT_EQ(op.source.region + op.target.region, 0u);
  const std::vector<lh_ipc_piece> pieces = peerd_.TableOf(op).pieces;
  ASSERT_EQ(pieces.size(), 5u);
  const uint64_t counts[] = {5, kLarge, 2, 0, kLarge + 1};
  const uint8_t dtypes[] = {LH_FLOAT32, LH_FLOAT32, LH_FLOAT64, LH_INT16, LH_FLOAT32};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(pieces[i].count, counts[i]);
    EXPECT_EQ(pieces[i].dtype, dtypes[i]);
    // One tensor is in place in the arena. So the others are in place in the staged block, too.
    EXPECT_EQ(pieces[i].source.region, pieces[i].target.region);
    EXPECT_EQ(pieces[i].source.offset, pieces[i].target.offset);
    EXPECT_EQ(pieces[i].source.offset % 64, 0u);
  }
  EXPECT_EQ(pieces[3].source.region, 0u);
  EXPECT_EQ(*Floats(pieces[1].source), 42) << "from where it is";
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(Floats(pieces[0].source)[i], static_cast<float>(i + 1));
  EXPECT_EQ(Floats(pieces[4].source)[kLarge], static_cast<float>(kLarge + 1));
  // The result.
  for (const lh_ipc_piece& piece : pieces) {
    if (piece.dtype != LH_FLOAT32) continue;
    auto* const data = reinterpret_cast<float*>(peerd_.Memory(piece.target));
    for (size_t i = 0; i < piece.count; ++i) data[i] *= 2;
  }
  EXPECT_EQ(lh_free(client_, shared), LH_FAILED_PRECONDITION) << "peerd uses it";
  End(0);
  EXPECT_EQ(small, (std::vector<float>{2, 4, 6}));
  EXPECT_EQ(more, (std::vector<float>{8, 10}));
  EXPECT_EQ(wide, (std::vector<double>{7, 8}));
  EXPECT_EQ(large[kLarge], 2 * static_cast<float>(kLarge + 1));
  EXPECT_EQ(shared[0], 84);
  lh_op_info_t info = LH_OP_INFO_INIT;
  EXPECT_EQ(lh_op_info(started_[0], &info), LH_OK);
  EXPECT_EQ(info.staged, 1u);
  EXPECT_EQ(lh_free(client_, shared), LH_OK) << lh_last_error();
}

TEST_F(CollectiveTest, AListThatIsNowhereInPlaceInTheArenaHasSourcesAndTargetsApart) {
  float* const source = Alloc(kLarge);
  float* const target = Alloc(kLarge);
  std::vector<float> plain = {1, 2, 3};
  const lh_slice slices[] = {Slice(source, target, kLarge), Slice(plain.data(), plain.data(), 3)};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.slices = slices;
  o.slice_count = 2;
  const std::vector<lh_ipc_piece> pieces = peerd_.TableOf(Ask(lh_all_reduce_start, o)).pieces;
  ASSERT_EQ(pieces.size(), 2u);
  for (const lh_ipc_piece& piece : pieces) EXPECT_NE(piece.source.offset, piece.target.offset);
  source[5] = 5;
  EXPECT_EQ(Floats(pieces[0].source)[5], 5);
  target[5] = 6;
  EXPECT_EQ(Floats(pieces[0].target)[5], 6);
}

TEST_F(CollectiveTest, IfOnePieceIsInPlaceAllAre) {
  float* const in_place = Alloc(kLarge);
  float* const source = Alloc(kLarge);
  float* const target = Alloc(kLarge);
  source[9] = 9;
  const lh_slice slices[] = {Slice(source, target, kLarge), Slice(in_place, in_place, kLarge)};
  lh_broadcast_options o = LH_BROADCAST_OPTIONS_INIT;
  o.slices = slices;
  o.slice_count = 2;
  o.root = kRank;
  const std::vector<lh_ipc_piece> pieces = peerd_.TableOf(Ask(lh_broadcast_start, o)).pieces;
  ASSERT_EQ(pieces.size(), 2u);
  for (const lh_ipc_piece& piece : pieces) {
    EXPECT_EQ(piece.source.region, piece.target.region);
    EXPECT_EQ(piece.source.offset, piece.target.offset);
  }
  EXPECT_EQ(Floats(pieces[0].source)[9], 9);
  source[9] = 10;
  EXPECT_EQ(Floats(pieces[0].source)[9], 9) << "a copy";
  End(0);
  EXPECT_EQ(target[9], 9);
}

TEST_F(CollectiveTest, PackedPartsLieMemberByMember) {
  // Two tensors with parts of 2 and of 1 for four members.
  const std::vector<float> two = {1, 2, 11, 12, 21, 22, 31, 32};
  const std::vector<float> one = {3, 13, 23, 33};
  float part_of_two[2] = {};
  float part_of_one[1] = {};
  const lh_slice slices[] = {Slice(two.data(), part_of_two, 2), Slice(one.data(), part_of_one, 1)};
  lh_reduce_scatter_options o = LH_REDUCE_SCATTER_OPTIONS_INIT;
  o.slices = slices;
  o.slice_count = 2;
  o.world = 4;
  const std::vector<lh_ipc_piece> pieces = peerd_.TableOf(Ask(lh_reduce_scatter_start, o)).pieces;
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].count, 3u);
  const float* const whole = Floats(pieces[0].source);
  EXPECT_EQ(std::vector<float>(whole, whole + 12),
            (std::vector<float>{1, 2, 3, 11, 12, 13, 21, 22, 23, 31, 32, 33}));
  std::copy_n(whole + 3, 3, reinterpret_cast<float*>(peerd_.Memory(pieces[0].target)));
  End(0);
  EXPECT_EQ(part_of_two[1], 12);
  EXPECT_EQ(part_of_one[0], 13);

  std::vector<float> all_two(8);
  std::vector<float> all_one(4);
  const lh_slice back[] = {Slice(part_of_two, all_two.data(), 2),
                           Slice(part_of_one, all_one.data(), 1)};
  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  gather.slices = back;
  gather.slice_count = 2;
  gather.world = 4;
  const lh_ipc_piece piece = peerd_.TableOf(Ask(lh_all_gather_start, gather)).pieces[0];
  const float values[] = {1, 2, 3, 11, 12, 13, 21, 22, 23, 31, 32, 33};
  std::copy_n(values, 12, reinterpret_cast<float*>(peerd_.Memory(piece.target)));
  End(1);
  EXPECT_EQ(all_two, two);
  EXPECT_EQ(all_one, one);
}

TEST_F(CollectiveTest, APartOfAListMayLieInItsWhole) {
  float* const whole = Alloc(4 * kLarge);
  const lh_slice slice = Slice(whole, whole + kLarge, kLarge);
  lh_reduce_scatter_options o = LH_REDUCE_SCATTER_OPTIONS_INIT;
  o.slices = &slice;
  o.slice_count = 1;
  o.world = 4;
  const lh_ipc_op op = Ask(lh_reduce_scatter_start, o);
  const lh_ipc_piece piece = peerd_.TableOf(op).pieces[0];
  EXPECT_EQ(peerd_.Memory(piece.source)[0], 0);
  const uint64_t end = piece.source.offset + 4 * kLarge * sizeof(float);
  EXPECT_TRUE(piece.target.offset >= end || piece.target.region != piece.source.region ||
              piece.target.offset + kLarge * sizeof(float) <= piece.source.offset);
  std::fill_n(reinterpret_cast<float*>(peerd_.Memory(piece.target)), kLarge, 3.0f);
  End(0);
  EXPECT_EQ(whole[kLarge], 3);
  EXPECT_EQ(whole[0], 0);
}

TEST_F(CollectiveTest, ASourceOfAListThatLiesInItsTargetIsPutBackIfTheOpFails) {
  float* const whole = Alloc(4 * kLarge);
  float* const part = whole + kLarge / 2;
  std::fill_n(part, kLarge, 2.0f);
  const lh_slice slice = Slice(part, whole, kLarge);
  lh_all_gather_options o = LH_ALL_GATHER_OPTIONS_INIT;
  o.slices = &slice;
  o.slice_count = 1;
  o.world = 4;
  const lh_ipc_piece piece = peerd_.TableOf(Ask(lh_all_gather_start, o)).pieces[0];
  std::fill_n(reinterpret_cast<float*>(peerd_.Memory(piece.target)), 4 * kLarge, 3.0f);
  End(0, LH_ABORTED);
  EXPECT_EQ(part[-1], 3);
  EXPECT_EQ(part[0], 2);
  EXPECT_EQ(part[kLarge - 1], 2);
  EXPECT_EQ(part[kLarge], 3);
}

TEST_F(CollectiveTest, TheDigestTellsListsApart) {
  float data[16] = {};
  uint64_t seen = 0;
  const auto digest = [&](const std::vector<lh_slice>& slices) {
    lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
    o.slices = slices.data();
    o.slice_count = slices.size();
    o.tag = ++seen;
    return Ask(lh_all_reduce_start, o).list;
  };
  const uint64_t first = digest({Slice(data, data, 3), Slice(data + 4, data + 4, 2)});
  EXPECT_NE(first, 0u);
  EXPECT_EQ(first, digest({Slice(data + 8, data, 3), Slice(data + 12, data + 12, 2)}));
  EXPECT_NE(first, digest({Slice(data, data, 2), Slice(data + 4, data + 4, 3)}));
  EXPECT_NE(first, digest({Slice(data, data, 5)}));
  EXPECT_NE(first, digest({{data, data, 3, LH_INT32, 0}, Slice(data + 4, data + 4, 2)}));
  EXPECT_NE(first,
            digest({Slice(data, data, 3), Slice(data + 4, data + 4, 2), Slice(data, data, 0)}));
}

TEST_F(CollectiveTest, TheOutlineHasTheFirstTensorsOfAList) {
  std::vector<float> data(1000);
  std::vector<lh_slice> slices = {Slice(data.data(), data.data(), 3),
                                  {nullptr, nullptr, 0, LH_INT32, 0},
                                  Slice(data.data() + 4, data.data() + 4, 200)};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.slices = slices.data();
  o.slice_count = slices.size();
  std::string outline = peerd_.TableOf(Ask(lh_all_reduce_start, o)).outline;
  EXPECT_EQ(ListDifference(outline, "\x01\x18"),
            ": 3 tensors there, and 1 here: tensor[0] is float32 x 3 there, and float16 x 1 here");
  EXPECT_EQ(outline.size(), 5u);
  slices.clear();
  for (size_t i = 0; i < 900; ++i) slices.push_back(Slice(&data[i], &data[i], 1));
  o.slices = slices.data();
  o.slice_count = slices.size();
  o.tag = 1;
  outline = peerd_.TableOf(Ask(lh_all_reduce_start, o)).outline;
  EXPECT_GT(outline.size(), size_t{LH_OUTLINE_BYTES_MAX} - 10);
  EXPECT_LE(outline.size(), size_t{LH_OUTLINE_BYTES_MAX});
  EXPECT_EQ(OutlineFault(outline), "");
}

TEST_F(CollectiveTest, AListOfEmptyTensorsIsOnePieceWithoutElements) {
  const lh_slice slices[] = {{nullptr, nullptr, 0, LH_INT8, 0}, {nullptr, nullptr, 0, LH_INT8, 0}};
  lh_broadcast_options o = LH_BROADCAST_OPTIONS_INIT;
  o.slices = slices;
  o.slice_count = 2;
  const lh_ipc_op op = Ask(lh_broadcast_start, o);
  ASSERT_EQ(op.pieces, 1u);
  EXPECT_EQ(op.dtype, LH_INT8);
  const lh_ipc_piece piece = peerd_.TableOf(op).pieces[0];
  EXPECT_EQ(piece.count, 0u);
  EXPECT_EQ(piece.source.region + piece.target.region, 0u);
  End(0);
}

TEST_F(CollectiveTest, ManyTensorsAreFewPieces) {
  constexpr size_t kTensors = 65536;
  std::vector<float> data(kTensors * 3, 1);
  std::vector<lh_slice> slices;
  for (size_t i = kTensors; i-- > 0;) slices.push_back(Slice(&data[3 * i], &data[3 * i], 3));
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.slices = slices.data();
  o.slice_count = slices.size();
  const lh_ipc_op op = Ask(lh_all_reduce_start, o);
  ASSERT_EQ(op.pieces, 1u);
  const lh_ipc_piece piece = peerd_.TableOf(op).pieces[0];
  EXPECT_EQ(piece.count, data.size());
  std::fill_n(reinterpret_cast<float*>(peerd_.Memory(piece.target)), data.size(), 2.0f);
  End(0);
  EXPECT_EQ(data, std::vector<float>(data.size(), 2));
}

TEST_F(CollectiveTest, AListSendsFromItsSourcesOnly) {
  const std::vector<float> values = {1, 2};
  const lh_slice slice = {values.data(), nullptr, 2, LH_FLOAT32, 0};
  lh_send_options o = LH_SEND_OPTIONS_INIT;
  o.slices = &slice;
  o.slice_count = 1;
  const lh_ipc_piece piece = peerd_.TableOf(Ask(lh_send_start, o)).pieces[0];
  EXPECT_EQ(Floats(piece.source)[1], 2);
  EXPECT_EQ(piece.target.region, 0u);
  End(0);
  EXPECT_EQ(values, (std::vector<float>{1, 2}));
}

TEST_F(CollectiveTest, SlicesThatCannotBeAreRefusedAndNamed) {
  float data[8] = {};
  const auto refused = [&](const std::vector<lh_slice>& slices, const char* text) {
    lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
    o.slices = slices.data();
    o.slice_count = slices.size();
    Refused(lh_all_reduce_start, o, text);
  };
  refused({Slice(data, data, 4), Slice(data + 3, data + 3, 2)}, "slices 0 and 1 share memory");
  refused({Slice(data + 3, data + 3, 2), Slice(data, data, 4)}, "slices 1 and 0 share memory");
  refused({Slice(data, data + 1, 4)}, "slices 0 and 0 share memory");
  refused({Slice<float>(data, nullptr, 4)}, "the target of slice 0 is NULL");
  refused({Slice(data, data, UINT64_MAX)}, "slice 0 has 18446744073709551615 elements");
  refused({{data, data, 1, static_cast<lh_dtype>(99), 0}}, "the dtype of slice 0 is 99");
  const lh_slice moved = {data, data, 1, LH_FLOAT8_E5M2, 0};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.slices = &moved;
  o.slice_count = 1;
  Illegal(lh_all_reduce_start, o, "piece 0: dtype is float8_e5m2, not one that can be reduced");
}

// ------------------------------------------------------------------------------ cancel

TEST_F(CollectiveTest, ACancelNamesTheOpAndItsOutcomeIsThatOfPeerd) {
  float data[4] = {};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.source = o.target = data;
  o.count = 4;
  (void)Ask(lh_all_reduce_start, o);
  EXPECT_EQ(lh_op_cancel(started_[0]), LH_OK) << lh_last_error();
  const lh_ipc_request cancel = peerd_.Cancel(0);
  EXPECT_EQ(cancel.member, 9u);
  EXPECT_EQ(cancel.u.cancel.op, peerd_.Op(0).call);
  EXPECT_EQ(lh_op_wait(started_[0], 0), LH_DEADLINE_EXCEEDED) << "peerd has not answered the op";
  End(0, LH_ABORTED);
  EXPECT_EQ(lh_op_cancel(started_[0]), LH_OK) << "it is over";
  EXPECT_EQ(lh_op_cancel(nullptr), LH_INVALID_ARGUMENT);
  lh_op* step = nullptr;
  ASSERT_EQ(lh_begin_step_start(comm_, &step), LH_OK);
  EXPECT_EQ(lh_op_cancel(step), LH_INVALID_ARGUMENT);
  lh_op_free(step);
}

TEST_F(CollectiveTest, AnOpThatWaitsInTheClientIsCancelledWhenItHasGoneToPeerd) {
  float data[4] = {};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.source = o.target = data;
  o.count = 4;
  std::vector<lh_op*> ops(LH_OPS_OPEN_MAX + 2);
  for (size_t i = 0; i < ops.size(); ++i) {
    o.tag = i;
    ASSERT_EQ(lh_all_reduce_start(comm_, &o, &ops[i]), LH_OK) << lh_last_error();
  }
  EXPECT_EQ(lh_op_cancel(ops[LH_OPS_OPEN_MAX]), LH_OK);
  EXPECT_EQ(lh_op_wait(ops[LH_OPS_OPEN_MAX], 0), LH_DEADLINE_EXCEEDED);
  peerd_.Answer(peerd_.Op(0));
  ASSERT_EQ(lh_op_wait(ops[0], 20000), LH_OK);
  const lh_ipc_request sent = peerd_.Op(LH_OPS_OPEN_MAX);
  EXPECT_EQ(sent.u.op.tag, uint64_t{LH_OPS_OPEN_MAX});
  EXPECT_EQ(peerd_.Cancel(0).u.cancel.op, sent.call);
  started_ = ops;
}

TEST_F(CollectiveTest, AWaitingTagIsRefusedForTheSameParticipantsOnly) {
  float data[4] = {};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.source = o.target = data;
  o.count = 4;
  started_.resize(LH_OPS_OPEN_MAX);
  for (size_t i = 0; i < started_.size(); ++i) {
    o.tag = i;
    ASSERT_EQ(lh_all_reduce_start(comm_, &o, &started_[i]), LH_OK) << lh_last_error();
  }
  o.tag = 5;
  lh_op* op = nullptr;
  EXPECT_EQ(lh_all_reduce_start(comm_, &o, &op), LH_INVALID_ARGUMENT);
  EXPECT_TRUE(Says("has an op with tag 5 in flight")) << lh_last_error();
  const uint64_t ids[] = {kMember, 8};
  o.participants = ids;
  o.participant_count = 2;
  EXPECT_EQ(lh_all_reduce_start(comm_, &o, &op), LH_OK) << lh_last_error();
  started_.push_back(op);
  // Nor is a set of members like a partner and a direction.
  for (const uint64_t first : {0, 1}) {
    const uint64_t set[] = {first, 8};
    o.participants = set;
    o.tag = LH_OPS_OPEN_MAX + first;
    EXPECT_EQ(lh_all_reduce_start(comm_, &o, &op), LH_OK) << lh_last_error();
    started_.push_back(op);
    lh_send_options send = LH_SEND_OPTIONS_INIT;
    lh_recv_options recv = LH_RECV_OPTIONS_INIT;
    send.source = recv.target = data;
    send.count = recv.count = 4;
    send.tag = recv.tag = o.tag;
    send.to_member = recv.from_member = 8;
    EXPECT_EQ(lh_send_start(comm_, &send, &op), LH_OK) << lh_last_error();
    started_.push_back(op);
    EXPECT_EQ(lh_recv_start(comm_, &recv, &op), LH_OK) << lh_last_error();
    started_.push_back(op);
    EXPECT_EQ(lh_send_start(comm_, &send, &op), LH_INVALID_ARGUMENT);
  }
}

// ------------------------------------------------------------------------------ quantization

TEST_F(CollectiveTest, ACodecReachesPeerd) {
  float data[4] = {};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.source = o.target = data;
  o.count = 4;
  o.quantize = LH_QUANTIZE_INT4;
  o.rounding = LH_STOCHASTIC;
  o.block = 256;
  lh_ipc_op op = Ask(lh_all_reduce_start, o);
  EXPECT_EQ(op.quantization, LH_WIRE_QUANTIZE_INT4);
  EXPECT_EQ(op.rounding, LH_WIRE_STOCHASTIC);
  EXPECT_EQ(op.block, 256);
  EXPECT_EQ(op.error.region, 0u);
  o.tag = 1;
  o.block = 0;
  EXPECT_EQ(Ask(lh_all_reduce_start, o).block, LH_BLOCK_DEFAULT);
  o.tag = 2;
  o.quantize = LH_QUANTIZE_BF16;
  EXPECT_EQ(Ask(lh_all_reduce_start, o).block, 0);
  o.tag = 4;
  o.quantize = LH_QUANTIZE_AUTO;
  o.codecs = LH_CODEC_BIT(LH_QUANTIZE_BF16) | LH_CODEC_BIT(LH_QUANTIZE_INT8);
  op = Ask(lh_all_reduce_start, o);
  EXPECT_EQ(op.quantization, LH_WIRE_QUANTIZE_AUTO + 2);
  EXPECT_EQ(op.block, LH_BLOCK_DEFAULT);
  lh_all_gather_options gather = LH_ALL_GATHER_OPTIONS_INIT;
  std::vector<float> whole(16);
  gather.source = data;
  gather.target = whole.data();
  gather.count = 4;
  gather.world = 4;
  gather.tag = 3;
  gather.quantize = LH_QUANTIZE_INT8;
  EXPECT_EQ(Ask(lh_all_gather_start, gather).quantization, LH_WIRE_QUANTIZE_INT8);
}

TEST_F(CollectiveTest, AnErrorIsUsedWhereItIsOrCopiedThereAndBack) {
  float* const shared = Alloc(16);
  float* const target = Alloc(16);
  std::vector<float> plain = Rising(4, 1);
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.source = o.target = target;
  o.count = 4;
  o.quantize = LH_QUANTIZE_INT8;
  o.error = shared;
  lh_ipc_op op = Ask(lh_all_reduce_start, o);
  shared[2] = 9;
  EXPECT_EQ(Floats(op.error)[2], 9) << "from where it is";
  EXPECT_EQ(lh_free(client_, shared), LH_FAILED_PRECONDITION) << "peerd uses it";
  End(0);
  o.tag = 1;
  o.error = plain.data();
  op = Ask(lh_all_reduce_start, o);
  auto* const staged = reinterpret_cast<float*>(peerd_.Memory(op.error));
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(staged[i], static_cast<float>(i + 1));
  staged[1] = 50;
  EXPECT_EQ(plain[1], 2);
  End(1);
  EXPECT_EQ(plain[1], 50);
  // Of an op that fails, nothing is copied back.
  o.tag = 2;
  op = Ask(lh_all_reduce_start, o);
  reinterpret_cast<float*>(peerd_.Memory(op.error))[1] = 60;
  End(2, LH_ABORTED);
  EXPECT_EQ(plain[1], 50);
  EXPECT_EQ(lh_free(client_, shared), LH_OK) << lh_last_error();
}

TEST_F(CollectiveTest, ErrorsOfAListArePackedLikeItsTensors) {
  std::vector<float> large = Rising(kLarge);
  std::vector<float> a = {1, 2, 3};
  std::vector<float> b = {4, 5};
  std::vector<float> large_error = Rising(kLarge, 7);
  std::vector<float> a_error = {10, 20, 30};
  std::vector<float> b_error = {40, 50};
  const lh_slice slices[] = {Slice(a.data(), a.data(), 3),
                             Slice(large.data(), large.data(), kLarge),
                             Slice(b.data(), b.data(), 2)};
  float* const errors[] = {a_error.data(), large_error.data(), b_error.data()};
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  o.slices = slices;
  o.slice_count = 3;
  o.quantize = LH_QUANTIZE_INT8;
  o.errors = errors;
  const std::vector<lh_ipc_piece> pieces = peerd_.TableOf(Ask(lh_all_reduce_start, o)).pieces;
  ASSERT_EQ(pieces.size(), 2u);
  auto* const packed = reinterpret_cast<float*>(peerd_.Memory(pieces[0].error));
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(packed[i], 10 * static_cast<float>(i + 1));
  EXPECT_EQ(Floats(pieces[1].error)[kLarge - 1], static_cast<float>(kLarge + 6));
  for (size_t i = 0; i < 5; ++i) packed[i] = -packed[i];
  End(0);
  EXPECT_EQ(a_error, (std::vector<float>{-10, -20, -30}));
  EXPECT_EQ(b_error, (std::vector<float>{-40, -50}));
}

TEST_F(CollectiveTest, CodecsAndErrorsThatCannotBeAreRefused) {
  std::vector<float> data(64);
  std::vector<float> error(64);
  const auto options = [&](const auto& change) {
    lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
    o.source = o.target = data.data();
    o.count = 16;
    o.quantize = LH_QUANTIZE_INT8;
    change(&o);
    return o;
  };
  const auto refused = [&](const std::string& text, const auto& change) {
    Refused(lh_all_reduce_start, options(change), text);
  };
  const auto illegal = [&](const std::string& text, const auto& change) {
    Illegal(lh_all_reduce_start, options(change), text);
  };
  using Options = lh_all_reduce_options;
  refused("quantize is 5; give an lh_quantization",
          [](Options* o) { o->quantize = static_cast<lh_quantization>(5); });
  illegal("rounding is 2, not at most 1",
          [](Options* o) { o->rounding = static_cast<lh_rounding>(2); });
  illegal("block is 100, not a power of two from 32 to 4096", [](Options* o) { o->block = 100; });
  illegal("block is 64, not 0 with quantization bf16", [](Options* o) {
    o->quantize = LH_QUANTIZE_BF16;
    o->block = 64;
  });
  illegal("reduce is max, not sum or avg with quantization int8",
          [](Options* o) { o->op = LH_MAX; });
  illegal("dtype is int32, not float32, float16 or bfloat16 with",
          [](Options* o) { o->dtype = LH_INT32; });
  illegal("an error is given, and only a quantized", [&](Options* o) {
    o->quantize = LH_UNQUANTIZED;
    o->error = error.data();
  });
  refused("error overlaps source or target", [&](Options* o) { o->error = &data[15]; });
  float* const alone[] = {error.data()};
  refused("errors is given without slices", [&](Options* o) { o->errors = alone; });
  refused("codecs is 0; give LH_CODEC_BIT()", [](Options* o) { o->quantize = LH_QUANTIZE_AUTO; });
  refused("codecs is 8; give LH_CODEC_BIT()", [](Options* o) {
    o->quantize = LH_QUANTIZE_AUTO;
    o->codecs = 8;
  });
  refused("codecs is 1; give LH_CODEC_BIT()", [](Options* o) { o->codecs = 1; });
  illegal("an error is given, and peerd chooses the codec", [&](Options* o) {
    o->quantize = LH_QUANTIZE_AUTO;
    o->codecs = LH_CODEC_BIT(LH_QUANTIZE_INT8);
    o->error = error.data();
  });
  const lh_slice slices[] = {Slice(&data[0], &data[0], 3), Slice(&data[8], &data[8], 3)};
  const auto list = [&](float* const* errors) {
    return [&slices, errors](Options* o) {
      o->source = o->target = nullptr;
      o->count = 0;
      o->slices = slices;
      o->slice_count = 2;
      o->errors = errors;
    };
  };
  float* const missing[] = {error.data(), nullptr};
  refused("errors[1] is NULL", list(missing));
  float* const twice[] = {error.data(), error.data() + 2};
  refused("share memory", list(twice));
}

// ------------------------------------------------------------------------------ C++

TEST_F(CollectiveTest, TheCppHeaderHasEveryCollective) {
  peerd_.hold = false;
  lh_comm* const taken = std::exchange(comm_, nullptr);
  Comm comm(taken);
  std::vector<float> whole(8);
  std::vector<float> part(2);
  float* const w = whole.data();
  float* const p = part.data();
  comm.AllReduce(w, 8);
  comm.Reduce(w, w, 8, 1, LH_MAX);
  comm.ReduceScatter(w, p, 2);
  comm.AllGather(p, w, 2);
  comm.Broadcast(w, 8, 3);
  comm.Gather(p, w, 2, 2);
  comm.Scatter(w, p, 2, 1);
  comm.AllToAll(w, w, 2);
  comm.Send(p, 2, 0, 5);
  comm.Recv(p, 2, 2, 6);
  comm.Barrier();
  const uint8_t kinds[] = {LH_WIRE_ALL_REDUCE, LH_WIRE_REDUCE,     LH_WIRE_REDUCE_SCATTER,
                           LH_WIRE_ALL_GATHER, LH_WIRE_BROADCAST,  LH_WIRE_GATHER,
                           LH_WIRE_SCATTER,    LH_WIRE_ALL_TO_ALL, LH_WIRE_SEND_RECV,
                           LH_WIRE_SEND_RECV,  LH_WIRE_BARRIER};
  for (size_t i = 0; i < std::size(kinds); ++i) EXPECT_EQ(peerd_.Op(i).u.op.kind, kinds[i]) << i;
  EXPECT_EQ(peerd_.Op(9).u.op.root, 2u);
  // And the beginning of each, which does not wait.
  lh_gather_options gather = LH_GATHER_OPTIONS_INIT;
  lh_scatter_options scatter = LH_SCATTER_OPTIONS_INIT;
  lh_all_to_all_options all = LH_ALL_TO_ALL_OPTIONS_INIT;
  lh_send_options send = LH_SEND_OPTIONS_INIT;
  lh_recv_options recv = LH_RECV_OPTIONS_INIT;
  gather.world = scatter.world = all.world = kWorld;
  Op started[] = {comm.GatherStart(gather), comm.ScatterStart(scatter), comm.AllToAllStart(all),
                  comm.SendStart(send), comm.RecvStart(recv)};
  for (size_t i = 0; i < std::size(started); ++i) {
    EXPECT_EQ(peerd_.Op(std::size(kinds) + i).u.op.kind, kinds[5 + i]) << i;
    EXPECT_EQ(WaitAny(client_, {&started[i]}, 20000), 0u);
    started[i].Wait();
  }
  const size_t before = std::size(kinds) + std::size(started);
  peerd_.hold = true;
  Op op = comm.AllReduceStart(w, w, 8);
  op.Cancel();
  (void)peerd_.Cancel(0);
  peerd_.Answer(peerd_.Op(before), LH_ABORTED, "cancelled");
  EXPECT_THROW(op.Wait(), Error);
}

TEST_F(CollectiveTest, TheCppHeaderStartsEveryCollective) {
  Comm comm(std::exchange(comm_, nullptr));
  std::vector<float> whole(8);
  std::vector<float> other(8);
  const auto filled = [&](auto options) {
    options.dtype = LH_FLOAT32;
    options.count = 2;
    if constexpr (requires { options.source; }) options.source = whole.data();
    if constexpr (requires { options.target; }) options.target = other.data();
    if constexpr (requires { options.world; }) options.world = kWorld;
    return options;
  };
  size_t count = 0;
  const auto ends = [&](uint8_t kind, Op op) {
    const lh_ipc_request request = peerd_.Op(count++);
    EXPECT_EQ(request.u.op.kind, kind);
    EXPECT_FALSE(op.Finished()) << int{kind};
    peerd_.Answer(request);
    EXPECT_TRUE(op.Wait(20000)) << int{kind};
    EXPECT_EQ(op.Info().world_size, 1u) << int{kind};
  };
  ends(LH_WIRE_ALL_REDUCE,
       comm.AllReduceStart(filled(lh_all_reduce_options LH_ALL_REDUCE_OPTIONS_INIT)));
  ends(LH_WIRE_REDUCE, comm.ReduceStart(filled(lh_reduce_options LH_REDUCE_OPTIONS_INIT)));
  ends(LH_WIRE_REDUCE_SCATTER,
       comm.ReduceScatterStart(filled(lh_reduce_scatter_options LH_REDUCE_SCATTER_OPTIONS_INIT)));
  ends(LH_WIRE_ALL_GATHER,
       comm.AllGatherStart(filled(lh_all_gather_options LH_ALL_GATHER_OPTIONS_INIT)));
  ends(LH_WIRE_BROADCAST,
       comm.BroadcastStart(filled(lh_broadcast_options LH_BROADCAST_OPTIONS_INIT)));
  ends(LH_WIRE_GATHER, comm.GatherStart(filled(lh_gather_options LH_GATHER_OPTIONS_INIT)));
  ends(LH_WIRE_SCATTER, comm.ScatterStart(filled(lh_scatter_options LH_SCATTER_OPTIONS_INIT)));
  ends(LH_WIRE_ALL_TO_ALL,
       comm.AllToAllStart(filled(lh_all_to_all_options LH_ALL_TO_ALL_OPTIONS_INIT)));
  ends(LH_WIRE_SEND_RECV, comm.SendStart(filled(lh_send_options LH_SEND_OPTIONS_INIT)));
  ends(LH_WIRE_SEND_RECV, comm.RecvStart(filled(lh_recv_options LH_RECV_OPTIONS_INIT)));
  ends(LH_WIRE_BARRIER, comm.BarrierStart());
}

TEST_F(CollectiveTest, WaitAnyTellsWhichOfTheOpsHasEnded) {
  Comm comm(std::exchange(comm_, nullptr));
  lh_barrier_options options = LH_BARRIER_OPTIONS_INIT;
  Op first = comm.BarrierStart(options);
  options.tag = 1;
  Op second = comm.BarrierStart(options);
  const lh_ipc_request requests[] = {peerd_.Op(0), peerd_.Op(1)};
  EXPECT_THROW(WaitAny(client_, {&first, &second}, 0), Error);
  peerd_.Answer(requests[1]);
  EXPECT_EQ(WaitAny(client_, {&first, &second}, 20000), 1u);
  EXPECT_TRUE(second.Finished());
  EXPECT_FALSE(first.Finished());
  peerd_.Answer(requests[0]);
  EXPECT_EQ(WaitAny(client_, {&first}, 20000), 0u);
}

}  // namespace
}  // namespace longhaul
