// A hostile trainer attacks the IPC server, over a real Unix socket: requests with any fields, in
// pieces cut at any point, with regions and other descriptors, tables in the arena that do not fit,
// anything in the queues of shared memory, and connections that end at any time. The engine behind
// the server answers at once, later, or after the end of the member.
//
// Whatever comes, no check may fire, memory that a post or a state names can be read and written,
// and when the trainers are gone, nothing of them is left.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/ipc_server.h"
#include "proto/wire/ipc.h"
#include "tests/support/fuzz_files.h"
#include "tests/support/fuzz_input.h"
#include "tests/support/raw_trainer.h"

namespace longhaul::peerd {
namespace {

constexpr size_t kPage = 4096;

// The engine: keeps what it is asked, and answers when the input says so.
class Engine : public TrainerRequests {
 public:
  void OnJoin(const LocalJoin& join) override { joins[join.local] = true; }
  void OnStep(LocalId local, const StateSync* sync) override {
    if (sync != nullptr) OnSync(local, *sync);
    steps[local] = true;
  }
  void OnSync(LocalId local, const StateSync& sync) override {
    LH_CHECK(sync.state != nullptr);
    Touch(*sync.state);
    syncs[local] = sync;
  }
  void OnTake(LocalId local, uint32_t) override { takes[local] = true; }
  void OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) override {
    Touch(*state);
    prepares.push_back(std::move(done));
  }
  void OnWhy(const GroupKey&, std::function<void(const std::string&)> done) override {
    whys.push_back(std::move(done));
  }
  bool OnKept(LocalId, const LocalState& state, uint64_t* revision) override {
    Touch(state);
    *revision = 3;
    return true;
  }
  void OnLeave(LocalId local) override { leaves[local] = true; }
  void OnPost(const LocalPost& post, PostBuffers buffers) override {
    LH_CHECK(buffers.sources.size() == buffers.pieces.size());
    LH_CHECK(buffers.targets.size() == buffers.pieces.size());
    for (const uint8_t* source : buffers.sources) {
      if (source != nullptr) sum += *source;
    }
    for (uint8_t* target : buffers.targets) {
      if (target != nullptr) *target = 1;
    }
    posts.emplace_back(post.post, std::move(buffers));
  }
  void OnCancel(const PostRef&) override {}
  void OnRefusal(LocalRefusal) override {}
  PeerCore::MembersView OnMembers(LocalId, PeerCore::AsOf) override { return {Epoch(1), members}; }
  std::optional<PeerCore::MemberView> OnMember(LocalId, MemberId member) override {
    if (member.value() % 2 == 0) return std::nullopt;
    return PeerCore::MemberView{{{member, PeerId(9), Epoch(1), "n", {}, "host"}, "h.example"}, 1};
  }
  void OnGone(LocalId local, const std::string&) override { Forget(local); }
  void OnRegionAdded(const uint8_t* data, size_t) override { mapped.insert(data); }
  void OnRegionRemoved(const uint8_t* data, size_t) override { mapped.erase(data); }

  void Forget(LocalId local) {
    joins.erase(local);
    steps.erase(local);
    syncs.erase(local);
    takes.erase(local);
    leaves.erase(local);
  }
  // Reads all of the tensors, and writes all of the inboxes.
  void Touch(const LocalState& state) {
    for (size_t i = 0; i < state.manifest.size(); ++i) {
      const uint64_t bytes = state.manifest[i].bytes;
      for (uint64_t at = 0; at < bytes; ++at) sum += state.places[i][at];
      if (bytes > 0 && i < state.inbox.size() && state.inbox[i] != nullptr) {
        memset(state.inbox[i], 2, bytes);
      }
    }
  }

  std::map<LocalId, bool> joins, steps, takes, leaves;
  std::map<LocalId, StateSync> syncs;
  std::vector<std::function<void()>> prepares;
  std::vector<std::function<void(const std::string&)>> whys;
  std::vector<std::pair<PostRef, PostBuffers>> posts;
  std::vector<MemberId> members = {MemberId(1), MemberId(2)};
  std::set<const uint8_t*> mapped;  // regions that posts may name
  uint64_t sum = 0;
};

// A region as the trainer sees it.
struct Memory {
  int fd = -1;
  uint8_t* data = nullptr;
  size_t bytes = 0;
};

class Attack {
 public:
  Attack(const uint8_t* data, size_t size) : in_(data, size) {
    SetLogSink([](std::string_view) {});
    auto ring = MakeEpollRing();
    LH_CHECK(ring.ok()) << ring.status().ToString();
    ring_ = *std::move(ring);
    IpcServerOptions options;
    options.path = Path();
    options.arena_limit = 1 << 20;
    options.user_share = in_.Bool() ? 100 : 50;
    auto server = MakeIpcServer(options, ring_.get(), &engine_);
    LH_CHECK(server.ok()) << server.status().ToString();
    server_ = *std::move(server);
  }

  void Run() {
    Connect();
    for (int i = 0; i < 100 && !in_.empty(); ++i) Choose();
    clients_.clear();
    for (int i = 0; i < 1000 && server_->GetStats().clients > 0; ++i) Turn();
    LH_CHECK(server_->GetStats().clients == 0) << "a connection is left";
    LH_CHECK(engine_.joins.empty() && engine_.steps.empty() && engine_.leaves.empty() &&
             engine_.syncs.empty())
        << "a member is left";
    engine_.posts.clear();
    engine_.prepares.clear();
    engine_.whys.clear();
    for (int i = 0; i < 10000 && !engine_.mapped.empty(); ++i) Turn();
    LH_CHECK(engine_.mapped.empty()) << "a region is left";
    server_.reset();
    for (const Memory& memory : memories_) {
      munmap(memory.data, memory.bytes);
      close(memory.fd);
    }
  }

 private:
  struct Client {
    explicit Client(const std::string& path) : raw(path) {}
    RawClient raw;
    RawQueues queues;
    uint64_t calls = 0;
  };

  static const std::string& Path() {
    static const auto& path = *new std::string(FuzzDirectory() + "/s");
    return path;
  }

  void Turn() { LH_CHECK_OK(ring_->RunOnce(ring_->Now())); }

  void Connect() {
    if (clients_.size() >= 4) return;
    clients_.push_back(std::make_unique<Client>(Path()));
    for (int i = 0; i < 4; ++i) Turn();
    Client& client = *clients_.back();
    const uint64_t how = in_.Below(8);
    std::vector<int> descriptors;
    if (how < 4) descriptors.push_back(client.queues.fd());
    if (how != 7) SendWhole(client, Hello(++client.calls), descriptors);
  }

  void Choose() {
    if (clients_.empty()) return Connect();
    Client& client = *clients_[in_.Below(clients_.size())];
    switch (in_.Byte() % 13) {
      case 0:
        return Connect();
      case 1:
        std::erase_if(clients_, [&](const auto& one) { return one.get() == &client; });
        return Turn();
      case 2:
      case 3:
        return Region(client);
      case 4: {
        lh_ipc_request join = Request(LH_IPC_JOIN, ++client.calls);
        strcpy(join.u.join.run, "run");
        return Send(client, join);
      }
      case 5:
      case 6:
        return Post(client);
      case 7:
        return State(client);
      case 8:
        return Small(client);
      case 9: {  // any bytes behind a right head
        lh_ipc_request request =
            Request(static_cast<uint32_t>(in_.Below(20)), ++client.calls, in_.Number());
        const std::string bytes = in_.Bytes(sizeof request.u);
        memcpy(&request.u, bytes.data(), bytes.size());
        return Send(client, request);
      }
      case 10:
      case 11:
        return Answer();
      case 12:
        return Queue(client);
    }
  }

  // Puts something into the queue of requests, and changes any byte of the queues.
  void Queue(Client& client) {
    const std::string bytes = in_.Bytes(sizeof(lh_ipc_request));
    lh_ipc_request request = Request(LH_IPC_STEP, ++client.calls, Member());
    memcpy(&request, bytes.data(), bytes.size() < 16 ? 0 : bytes.size());
    for (uint64_t count = in_.Below(4); count > 0; --count) {
      client.queues.Put(request, in_.Below(8));
      ++request.call;
    }
    auto* const memory = reinterpret_cast<uint8_t*>(client.queues.get());
    if (in_.Below(4) == 3) memory[in_.Number() % sizeof(lh_ipc_shared)] = in_.Byte();
    Drain(client);
  }

  // Sends the request, perhaps in pieces, changed, or with descriptors that do not belong to it.
  void Send(Client& client, lh_ipc_request request, std::vector<int> descriptors = {}) {
    const uint8_t how = in_.Byte();
    if ((how & 0x70) == 0x70) {
      auto* const bytes = reinterpret_cast<uint8_t*>(&request);
      bytes[in_.Below(sizeof request)] = in_.Byte();
    }
    if ((how & 0x0e) == 0x0e && !memories_.empty()) descriptors.push_back(memories_[0].fd);
    if ((how & 0x81) != 0x81) return SendWhole(client, request, descriptors);
    const size_t first = in_.Below(sizeof request);
    if (first > 0 && !client.raw.SendPart(request, 0, first, descriptors)) return;
    if (first > 0) descriptors.clear();
    Turn();
    if (in_.Below(8) == 7) return;  // the rest never comes
    client.raw.SendPart(request, first, sizeof request - first, descriptors);
    Drain(client);
  }
  void SendWhole(Client& client, const lh_ipc_request& request,
                 const std::vector<int>& descriptors = {}) {
    client.raw.Send(request, descriptors);
    Drain(client);
  }
  void Drain(Client& client) {
    for (int i = 0; i < 3; ++i) {
      Turn();
      char reply[4096];
      while (recv(client.raw.fd(), reply, sizeof reply, MSG_DONTWAIT) > 0) {
      }
    }
  }

  void Region(Client& client) {
    Memory memory;
    memory.bytes = kPage * (1 + in_.Below(4));
    const uint8_t how = in_.Byte();
    if (memories_.size() < 8) {
      memory.fd = MakeMemfd(memory.bytes, (how & 7) == 7 ? 0 : F_SEAL_SHRINK);
      memory.data = static_cast<uint8_t*>(
          mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0));
      LH_CHECK(memory.data != MAP_FAILED);
      memories_.push_back(memory);
    } else {
      memory = memories_[in_.Below(memories_.size())];
    }
    lh_ipc_request request = Request(LH_IPC_REGION, ++client.calls);
    request.u.region = {1 + in_.Below(3), memory.bytes, 0, 0};
    if ((how & 0x18) == 0x18) request.u.region.bytes = in_.Number();
    if ((how & 0x60) == 0x60) request.u.region.flags = static_cast<uint32_t>(in_.Number());
    int pipes[2] = {-1, -1};
    std::vector<int> descriptors = {memory.fd};
    if ((how & 0xe0) == 0xe0) {
      LH_CHECK(pipe(pipes) == 0);
      descriptors = {pipes[0]};
    }
    Send(client, request, descriptors);
    for (const int fd : pipes) {
      if (fd >= 0) close(fd);
    }
  }

  lh_ipc_range Range() {
    lh_ipc_range range{1 + in_.Below(3), in_.Below(8) * 512};
    if (in_.Below(16) == 15) range = {in_.Number(), in_.Number()};
    return range;
  }
  // Puts a table at the end of a region.
  lh_ipc_range Table(const void* bytes, size_t size) {
    for (const Memory& memory : memories_) {
      if (size <= 2048) memcpy(memory.data + 2048, bytes, size);
    }
    return {1 + in_.Below(2), in_.Below(16) == 15 ? in_.Number() : 2048};
  }
  uint64_t Member() { return in_.Below(16) == 15 ? in_.Number() : 1 + in_.Below(3); }

  void Post(Client& client) {
    lh_ipc_request request = longhaul::peerd::Op(++client.calls, Member(), in_.Below(3));
    lh_ipc_op& op = request.u.op;
    op.source = Range();
    op.target = Range();
    op.count = in_.Number();
    const uint8_t set = in_.Byte();
    if ((set & 1) != 0) op.kind = static_cast<uint8_t>(1 + in_.Below(10));
    if ((set & 2) != 0) op.dtype = static_cast<uint8_t>(in_.Below(16));
    if ((set & 4) != 0) op.world = static_cast<uint16_t>(in_.Below(4));
    if ((set & 8) != 0) op.root = in_.Number();
    if ((set & 16) != 0) {
      lh_ipc_piece pieces[4] = {};
      op.pieces = static_cast<uint32_t>(1 + in_.Below(4));
      op.list = 1;
      op.count = 0;
      for (uint32_t i = 0; i < op.pieces; ++i) {
        pieces[i].count = in_.Number();
        pieces[i].source = Range();
        pieces[i].target = Range();
        pieces[i].dtype = static_cast<uint8_t>(in_.Below(16));
      }
      op.table = Table(pieces, sizeof pieces);
    }
    if ((set & 32) != 0) {
      op.quantization = static_cast<uint8_t>(in_.Below(5));
      op.block = 32;
      op.error = Range();
    }
    if ((set & 64) != 0) op.flags = static_cast<uint8_t>(in_.Below(4));
    if ((set & 128) != 0) {
      op.participants = static_cast<uint32_t>(in_.Number());
      uint64_t ids[8];
      for (uint64_t& id : ids) id = in_.Number();
      if (op.pieces == 0) op.table = Table(ids, sizeof ids);
    }
    Send(client, request);
  }

  void State(Client& client) {
    lh_ipc_request request = Request(LH_IPC_STATE, ++client.calls);
    lh_ipc_tensor tensors[2] = {};
    for (lh_ipc_tensor& tensor : tensors) {
      strcpy(tensor.name, in_.Bool() ? "weights" : "step");
      tensor.dims = static_cast<uint8_t>(in_.Below(3));
      tensor.dtype = LH_WIRE_UINT8;
      tensor.bytes = 1;
      for (uint8_t i = 0; i < tensor.dims; ++i) {
        tensor.shape[i] = in_.Below(40);
        tensor.bytes *= tensor.shape[i];
      }
      if (in_.Below(8) == 7) tensor.bytes = in_.Number();
      tensor.flags = static_cast<uint8_t>(in_.Below(3));
      if (tensor.bytes == 0) continue;
      tensor.data = Range();
      tensor.inbox = in_.Bool() ? tensor.data : Range();
    }
    request.u.state.state = 1 + in_.Below(3);
    request.u.state.count =
        static_cast<uint32_t>(in_.Below(8) == 7 ? in_.Number() : 1 + in_.Below(2));
    request.u.state.table = Table(tensors, sizeof tensors);
    request.u.state.changed = {1 + in_.Below(2), 8 * in_.Below(256)};
    Send(client, request);
  }

  // A request with few fields.
  void Small(Client& client) {
    static constexpr uint32_t kTypes[] = {
        LH_IPC_LEAVE, LH_IPC_STEP, LH_IPC_MEMBERS, LH_IPC_CANCEL,  LH_IPC_MEMBER,   LH_IPC_UNSTATE,
        LH_IPC_SYNC,  LH_IPC_KEPT, LH_IPC_TAKE,    LH_IPC_PREPARE, LH_IPC_UNREGION, LH_IPC_HELLO};
    lh_ipc_request request = Request(kTypes[in_.Below(12)], ++client.calls, Member());
    switch (request.type) {
      case LH_IPC_STEP:
      case LH_IPC_SYNC:
        request.u.sync.state = in_.Below(4);
        request.u.sync.revision = in_.Number();
        request.u.sync.strategy = static_cast<uint32_t>(1 + in_.Below(3));
        if (in_.Bool()) request.u.sync.touched = Range();
        break;
      case LH_IPC_CANCEL:
        request.u.cancel.op = in_.Below(64);
        break;
      case LH_IPC_UNREGION:
        request.u.region.region = 1 + in_.Below(3);
        break;
      case LH_IPC_HELLO:
        request = Hello(++client.calls);
        break;
      default:
        request.u.state.state = 1 + in_.Below(3);
        if (request.type == LH_IPC_LEAVE || request.type == LH_IPC_MEMBERS) {
          memset(&request.u, 0, sizeof request.u);
        }
        break;
    }
    if (in_.Below(16) == 15) request.call = in_.Below(64);
    Send(client, request);
  }

  // ---- the engine answers

  template <class Map>
  LocalId TakeFrom(Map* map) {
    auto it = std::next(map->begin(), static_cast<ptrdiff_t>(in_.Below(map->size())));
    const LocalId local = it->first;
    map->erase(it);
    return local;
  }
  Outcome Result() {
    if (in_.Below(4) != 3) return {};
    return {Code::kAborted, "test"};
  }
  void Answer() {
    switch (in_.Below(8)) {
      case 0:
      case 1: {
        if (engine_.joins.empty()) return;
        const LocalId local = TakeFrom(&engine_.joins);
        const Outcome outcome = Result();
        if (!outcome.ok()) engine_.Forget(local);
        server_->JoinDone(local, outcome, {Epoch(1), MemberId(local.value()), 0, 2, 0}, false);
        if (outcome.ok()) admitted_.push_back(local);
        break;
      }
      case 2: {
        if (engine_.steps.empty()) return;
        const LocalId local = engine_.steps.begin()->first;
        if (engine_.syncs.erase(local) > 0) server_->SyncDone(local, Result(), {});
        engine_.steps.erase(local);
        server_->StepDone(local, Result(), {Epoch(1), MemberId(1), 0, 2, 0});
        break;
      }
      case 3: {
        if (engine_.syncs.empty()) return;
        const LocalId local = engine_.syncs.begin()->first;
        if (in_.Below(4) == 3) {
          server_->SyncProgress(local, in_.Draw<control::FetchProgress>());
          break;
        }
        engine_.syncs.erase(local);
        StateSyncInfo info;
        info.revision = 3;
        server_->SyncDone(local, Result(), info);
        break;
      }
      case 4: {
        if (engine_.posts.empty()) return;
        auto post = std::move(engine_.posts.back());
        engine_.posts.pop_back();
        for (uint8_t* target : post.second.targets) {
          if (target != nullptr) *target = 3;
        }
        server_->PostDone(post.first, Result(), OpInfo{Epoch(1), engine_.members}, {});
        break;
      }
      case 5: {
        if (engine_.leaves.empty()) return;
        const LocalId local = TakeFrom(&engine_.leaves);
        engine_.Forget(local);
        server_->LeaveDone(local, {});
        break;
      }
      case 6:
        if (!engine_.whys.empty()) {
          engine_.whys.back()("why");
          engine_.whys.pop_back();
          break;
        }
        if (engine_.prepares.empty()) return;
        engine_.prepares.back()();
        engine_.prepares.pop_back();
        break;
      case 7: {
        if (!engine_.takes.empty() && in_.Bool()) {
          const LocalId local = TakeFrom(&engine_.takes);
          server_->TakeDone(local, Result(), {});
          break;
        }
        if (admitted_.empty()) return;
        const LocalId local = admitted_[in_.Below(admitted_.size())];
        server_->WorldChanged(local, {Epoch(2), MemberId(1), 0, 3, 0});
        // The engine has answered all requests of a member before it says that the member is gone.
        const bool busy = engine_.steps.contains(local) || engine_.syncs.contains(local) ||
                          engine_.takes.contains(local) || engine_.leaves.contains(local);
        if (in_.Below(4) != 3 || busy) break;
        for (auto& [post, buffers] : engine_.posts) {
          if (post.local == local) return;
        }
        server_->MemberGone(local, Result());
        break;
      }
    }
    Turn();
  }

  FuzzInput in_;
  Engine engine_;
  std::unique_ptr<Ring> ring_;
  std::unique_ptr<IpcServer> server_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::vector<Memory> memories_;
  std::vector<LocalId> admitted_;
};

}  // namespace
}  // namespace longhaul::peerd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longhaul::peerd::Attack(data, size).Run();
  return 0;
}
