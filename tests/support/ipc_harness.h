// For tests: an IPC server on a real ring, in a thread of its own, with a handler that a test
// scripts.
//
// A Harness owns the thread, the ring, the server and its socket. The test's thread calls the
// Harness; Run() carries work over to the reactor thread. Failures are LH_CHECKs. The ring is
// io_uring, or epoll where the environment has LONGHAUL_TEST_ON_EPOLL.
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/mailbox.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/ipc_server.h"

namespace longhaul::peerd {

inline int OpenDescriptors() {
  int count = 0;
  DIR* const directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

// Answers the IPC server's requests. Only the reactor thread uses it. By default joins, steps and
// leaves succeed at once. An op's result is twice its source (for float32), as if two members had
// posted the same tensor. A hold_ field set to true makes requests of its kind wait.
class ScriptedHandler : public TrainerRequests {
 public:
  void OnJoin(const LocalJoin& join) override {
    events.push_back("join " + std::to_string(join.local.value()) + " " + ToString(join.group) +
                     " " + join.name);
    const control::JoinWish& wish = join.wish;
    if (!wish.cohort.empty()) {
      events.back() += " cohort " + wish.cohort + " of " + std::to_string(wish.cohort_size);
    }
    if (wish.members != 0) events.back() += " members " + std::to_string(wish.members);
    if (wish.step_deadline_ms != 0) {
      events.back() += " step_deadline_ms " + std::to_string(wish.step_deadline_ms);
    }
    if (!hold_joins) server->JoinDone(join.local, {}, WorldOf(join.local), newcomers);
  }
  void OnStep(LocalId local, const StateSync* sync) override {
    events.push_back("step " + std::to_string(local.value()));
    if (sync != nullptr) OnSync(local, *sync);
    if (!hold_steps) server->StepDone(local, {}, WorldOf(local));
  }
  // By default a sync finds equal states, at the revision that was offered.
  void OnSync(LocalId local, const StateSync& sync) override {
    events.push_back("sync " + std::to_string(local.value()) + " revision " +
                     std::to_string(sync.revision));
    syncs.push_back(sync);
    if (!hold_syncs) FinishSync(local);
  }
  void OnLeave(LocalId local) override {
    events.push_back("leave " + std::to_string(local.value()));
    if (!hold_leaves) server->LeaveDone(local, {});
  }
  void OnPost(const LocalPost& post, PostBuffers buffers) override {
    posts.push_back({post, std::move(buffers)});
    if (!hold_posts) FinishPost();
  }
  void OnRefusal(LocalRefusal refusal) override { refusals.push_back(std::move(refusal)); }
  void OnCancel(const PostRef& post) override {
    events.push_back("cancel " + std::to_string(post.local.value()));
  }
  PeerCore::MembersView OnMembers(LocalId, PeerCore::AsOf as_of) override {
    return {Epoch(epoch), as_of == PeerCore::AsOf::kStep ? step_members : members};
  }
  std::optional<PeerCore::MemberView> OnMember(LocalId, MemberId member) override {
    if (member != MemberId(7)) return std::nullopt;
    return PeerCore::MemberView{{{member, PeerId(9), Epoch(1), "gpu-3", {}, "host-b"}, "b.example"},
                                2};
  }
  void OnTake(LocalId local, uint32_t timeout_ms) override {
    events.push_back("take " + std::to_string(local.value()) + " " + std::to_string(timeout_ms));
  }
  void OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) override {
    prepared.push_back(state->manifest);
    if (hold_prepares) {
      prepares.push_back(std::move(done));
    } else {
      done();
    }
  }
  void OnWhy(const GroupKey& group, std::function<void(const std::string&)> done) override {
    events.push_back("why " + ToString(group));
    if (hold_whys) {
      whys.push_back(std::move(done));
    } else {
      done("m2 of " + ToString(group) + " is missing");
    }
  }
  bool OnKept(LocalId, const LocalState& state, uint64_t* revision) override {
    kept_asked.push_back(state.manifest);
    *revision = kept_revision;
    return kept_revision != 0;
  }
  void OnGone(LocalId local, const std::string& reason) override {
    events.push_back("gone " + std::to_string(local.value()) + " " + reason);
  }
  void OnRegionAdded(const uint8_t*, size_t bytes) override { bytes_added += bytes; }
  void OnRegionRemoved(const uint8_t*, size_t bytes) override { bytes_removed += bytes; }

  World WorldOf(LocalId local) const {
    return {Epoch(epoch), MemberId(100 + local.value()), 0, 2, 0, false, {}, {Epoch(epoch), 0, 2}};
  }
  // Answers the held post at `index`, by default the newest one.
  void FinishPost(const Outcome& outcome = {}, size_t index = SIZE_MAX) {
    if (index == SIZE_MAX) index = posts.size() - 1;
    const HeldPost post = std::move(posts[index]);
    posts.erase(posts.begin() + static_cast<std::ptrdiff_t>(index));
    if (outcome.ok() && post.desc.dtype == DType::kFloat32) {
      const auto* source = reinterpret_cast<const float*>(post.sources[0]);
      auto* target = reinterpret_cast<float*>(post.targets[0]);
      for (uint64_t i = 0; i < post.desc.count; ++i) target[i] = 2 * source[i];
    }
    OpInfo info{Epoch(epoch), op_members, 77, 1, 3000, 1000, Algorithm::kMesh};
    server->PostDone(post.post, outcome, info, {post.desc.bytes(), post.desc.bytes(), 0});
  }

  // Answers the member's newest sync.
  void FinishSync(LocalId local, const Outcome& outcome = {}) {
    sync_info.revision = syncs.back().revision;
    server->SyncDone(local, outcome, sync_info);
  }

  struct HeldPost : LocalPost, PostBuffers {};

  IpcServer* server = nullptr;
  uint64_t epoch = 1;
  std::vector<MemberId> members;
  std::vector<MemberId> step_members;
  std::vector<MemberId> op_members = {MemberId(1), MemberId(2)};  // OpInfo::members of good posts
  bool hold_joins = false;
  bool hold_steps = false;
  bool hold_leaves = false;
  bool hold_posts = false;
  bool hold_syncs = false;
  StateSyncInfo sync_info{0, {0xa, 0xb}, 0, 0, 5000};
  uint64_t kept_revision = 0;  // 0: no state is kept
  std::vector<Manifest> kept_asked;
  bool hold_prepares = false;
  bool newcomers = false;  // other members were in the groups before
  bool hold_whys = false;
  std::vector<Manifest> prepared;               // of all OnPrepare() calls
  std::vector<std::function<void()>> prepares;  // the `done` of each held call
  std::vector<std::function<void(const std::string&)>> whys;
  std::vector<StateSync> syncs;  // of all syncs
  std::vector<HeldPost> posts;   // the posts that are not answered
  std::vector<LocalRefusal> refusals;
  std::vector<std::string> events;
  uint64_t bytes_added = 0;
  uint64_t bytes_removed = 0;
};

class Harness {
 public:
  // `poll_us`: how long the ring polls before it sleeps.
  explicit Harness(IpcServerOptions options = {}, uint32_t poll_us = 0)
      : options_(std::move(options)), poll_us_(poll_us) {
    SetLogSink([](std::string_view) {});
    char directory[] = "/tmp/lh_ipc_XXXXXX";
    LH_CHECK(mkdtemp(directory) != nullptr);
    directory_ = directory;
    // For tests that connect as another user.
    LH_CHECK(chmod(directory, 0755) == 0);
    options_.path = directory_ + "/peerd.sock";
    std::promise<void> ready;
    thread_ = std::thread([this, &ready] { Main(&ready); });
    ready.get_future().wait();
  }
  ~Harness() {
    Stop();
    rmdir(directory_.c_str());
  }

  const std::string& path() const { return options_.path; }

  // Runs `task` on the reactor thread and waits for it.
  void Run(const std::function<void(ScriptedHandler&, IpcServer&)>& task) {
    std::promise<void> done;
    LH_CHECK(tasks_->Post([&] {
      task(handler_, *server_);
      done.set_value();
    }));
    done.get_future().wait();
  }
  IpcStats Stats() {
    IpcStats stats;
    Run([&](ScriptedHandler&, IpcServer& server) { stats = server.GetStats(); });
    return stats;
  }
  std::vector<std::string> Events() {
    std::vector<std::string> events;
    Run([&](ScriptedHandler& handler, IpcServer&) { events = handler.events; });
    return events;
  }
  // Waits until the condition holds. Returns false if it did not hold within half a minute.
  bool Until(const std::function<bool(ScriptedHandler&, IpcServer&)>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    bool met = false;
    while (!met && std::chrono::steady_clock::now() < deadline) {
      Run([&](ScriptedHandler& handler, IpcServer& server) { met = condition(handler, server); });
      std::this_thread::yield();
    }
    return met;
  }
  // Stops the server as if peerd were killed.
  void Stop() {
    if (!thread_.joinable()) return;
    LH_CHECK(tasks_->Post([this] { stop_ = true; }));
    posted_last_.set_value();
    thread_.join();
  }

 private:
  void Main(std::promise<void>* ready) {
    auto ring = getenv("LONGHAUL_TEST_ON_EPOLL") ? MakeEpollRing() : MakeUringRing(256);
    LH_CHECK(ring.ok()) << ring.status().ToString();
    Ring* const r = ring->get();
    r->SetPoll(poll_us_);
    tasks_ = std::make_unique<Mailbox<std::function<void()>>>(1024, [r] { r->Wake(); });
    auto server = MakeIpcServer(options_, r, &handler_);
    LH_CHECK(server.ok()) << server.status().ToString();
    server_ = server->get();
    handler_.server = server_;
    ready->set_value();
    while (!stop_) {
      LH_CHECK_OK(r->RunOnce(kNever));
      for (auto& task : tasks_->TakeAll()) task();
    }
    // Stop() may still be about to wake the ring, so wait before the ring goes.
    posted_last_.get_future().wait();
    server->reset();
    handler_.posts.clear();
    handler_.syncs.clear();
  }

  IpcServerOptions options_;
  const uint32_t poll_us_;
  std::string directory_;
  ScriptedHandler handler_;
  IpcServer* server_ = nullptr;
  std::unique_ptr<Mailbox<std::function<void()>>> tasks_;
  bool stop_ = false;
  std::promise<void> posted_last_;
  std::thread thread_;
};

}  // namespace longhaul::peerd
