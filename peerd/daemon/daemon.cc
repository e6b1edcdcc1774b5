#include "peerd/daemon/daemon.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/http/http_server.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "peerd/control/control_client.h"
#include "peerd/control/control_inbox.h"
#include "peerd/core/peer_core.h"
#include "peerd/daemon/advertise.h"
#include "peerd/engine/control_frames.h"
#include "peerd/engine/op_runner.h"
#include "peerd/engine/state_runner.h"
#include "peerd/io/ring.h"
#include "peerd/io/unmapper.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/metrics/peer_metrics.h"
#include "peerd/probe/link_watch.h"
#include "peerd/probe/probe_plan.h"
#include "peerd/state/hash_pool.h"
#include "peerd/state/state_exchange.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {
namespace {

// How long closing lanes, sockets and the control stream may take at the end.
constexpr int64_t kCloseUs = Seconds(2);
// How often links are looked at, and metrics published though nobody asks for them.
constexpr int64_t kWatchUs = Millis(500);
// How often the coordinator hears of measured links at most.
constexpr int64_t kReportUs = Seconds(2);
const Outcome kLeaves{Code::kAborted, "the member leaves"};
// Messages of the coordinator that may wait for the reactor.
constexpr size_t kInboxMax = 65536;

PeerId RandomPeerId() {
  uint64_t value = 0;
  while (value == 0) {
    LH_CHECK(getrandom(&value, sizeof value, 0) == sizeof value);
    value >>= 1;  // stays positive wherever it is shown as a signed number
  }
  return PeerId(value);
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

class DaemonImpl final : public Daemon, TransportListener, IpcHandler {
 public:
  explicit DaemonImpl(DaemonOptions options)
      : options_(std::move(options)),
        self_(RandomPeerId()),
        inbox_(kInboxMax, [this] { ring_->Wake(); }) {}

  ~DaemonImpl() override {
    // Threads of others first: they post to what follows.
    if (control_) control_->Stop();
    http_.reset();
  }

  absl::Status Open();

  std::string listen_address() const override { return transport_->listen_address(); }
  std::string socket_path() const override { return options_.socket_path; }
  std::string http_address() const override { return http_ ? http_->address() : ""; }
  absl::Status Run() override;

 private:
  // ---- events
  void Post(Event event) { events_.push_back(std::move(event)); }
  void TakeInbox();
  // Steps the core until nothing is left to tell it.
  void Drain();
  void Carry(Action& action);
  // False: it was answered, and is none of the core's business.
  bool Admit(const LocalPost& post);
  void Send(const ControlFrame& frame) {
    if (frame.may_wait) {
      transport_->SendControlInTime(frame.link, frame.header, frame.bytes());
    } else {
      transport_->SendControl(frame.link, frame.header, frame.bytes());
    }
  }
  void EndSync(const SyncEnded& ended);
  static void LogSync(LocalId local, const Outcome& outcome, const StateSyncInfo& info);
  // The answer to a sync that the core has not heard of and never will.
  void WithdrawSync(LocalId local, const Outcome& outcome);
  void FailHopelessJoins();
  // Drained, and all has been said.
  bool Over() const { return drained_ && !states_->reading(); }
  void WatchSignals();
  void OnSignal();
  void PublishMetrics();
  void WatchLinks();
  void ProbeLinks(const std::vector<LinkStats>& stats, Tick now);
  // On the HTTP server's thread.
  HttpResponse Serve(const std::string& path);

  // ---- TransportListener
  void OnLinkUp(const LinkKey& link) override {
    states_->exchange()->OnLinkUp(link, ring_->Now());
    Post(LinkUp{link.run, link.peer});
  }
  void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) override {
    states_->exchange()->OnLinkDown(link, ring_->Now());
    Post(LinkDown{link.run, link.peer, reason, silent_ms});
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override;
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override {
    if (StateExchange::IsOurs(header)) return states_->exchange()->OnDataHeader(link, header);
    return runner_->OnDataHeader(link, header);
  }
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) override {
    if (StateExchange::IsOurs(header)) return states_->exchange()->OnDataReceived(link, header);
    return runner_->OnDataReceived(link, header);
  }
  void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) override {
    if (StateExchange::IsOurs(header)) return states_->exchange()->OnDataAbandoned(link, header);
    runner_->OnDataAbandoned(link, header);
  }
  void OnSegmentSent(uint64_t cookie) override {
    if (StateExchange::IsOurs(cookie)) return states_->exchange()->OnSegmentSent(cookie);
    runner_->OnSegmentSent(cookie);
  }
  uint64_t OnSegmentRepeat(uint64_t owner) override {
    if (StateExchange::IsOurs(owner)) return states_->exchange()->OnSegmentRepeat(owner);
    return runner_->OnSegmentRepeat(owner);
  }
  void OnReceivesDetached(uint64_t cookie) override {
    if (StateExchange::IsOurs(cookie)) return states_->exchange()->OnReceivesDetached(cookie);
    runner_->OnReceivesDetached(cookie);
  }

  // ---- IpcHandler
  void OnJoin(const LocalJoin& join) override;
  void OnStep(LocalId local, const StateSync* sync) override;
  void OnSync(LocalId local, const StateSync& sync) override {
    states_->Begin(local, groups_.at(local), sync, /*with_step=*/false);
  }
  void OnTake(LocalId local, uint32_t timeout_ms) override {
    Post(LocalTake{local, ring_->Now() + Millis(timeout_ms)});
  }
  void OnLeave(LocalId local) override;
  void OnPost(const IpcPost& post) override;
  IpcMembers OnMembers(LocalId local) override;
  void OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) override {
    states_->Prepare(state, std::move(done));
  }
  bool OnKept(LocalId local, const LocalState& state, uint64_t* revision) override {
    return states_->KeptRevision(local, state.manifest, revision);
  }
  void OnGone(LocalId local, const std::string& reason) override;
  void OnRegionAdded(const uint8_t* data, size_t bytes) override {
    transport_->AddMemory(data, bytes);
  }
  void OnRegionRemoved(const uint8_t* data, size_t) override { transport_->RemoveMemory(data); }

  DaemonOptions options_;
  const PeerId self_;
  std::unique_ptr<Ring> ring_;
  std::unique_ptr<Transport> transport_;
  Unmapper unmapper_;  // of scratch memory
  std::unique_ptr<OpRunner> runner_;
  std::unique_ptr<StateRunner> states_;
  std::unique_ptr<IpcServer> ipc_;
  std::unique_ptr<PeerCore> core_;
  std::unique_ptr<PeerMetrics> metrics_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<ControlClient> control_;

  ControlInbox inbox_;

  std::deque<Event> events_;
  std::map<LocalId, Tick> joins_;  // trainers that wait for admission, since when
  std::map<LocalId, GroupKey> groups_;
  bool stream_up_ = false;
  // The coordinator has welcomed this peer on the stream; one that accepts it and then refuses the
  // peer is as good as none. Written by the reactor only.
  std::atomic<bool> coordinator_up_ = false;
  Tick coordinator_down_since_;
  std::string coordinator_error_ = "not tried yet";
  Tick watch_due_;
  LinkWatch link_watch_{self_};
  ProbePlan probe_plan_{self_, Seconds(options_.probe_interval_s)};
  std::map<LinkKey, uint64_t> sent_before_;  // of the links that were up, when it was looked last
  Tick report_due_;
  RelayCounts relays_;
  int signals_ = 0;
  bool drained_ = false;
};

absl::Status DaemonImpl::Open() {
  LH_ASSIGN_OR_RETURN(ring_, MakeUringRing(4096, options_.poll_us));
  Log(LogLevel::kInfo, absl::StrCat("io_uring ready ", ring_->features().description));

  TransportOptions transport;
  transport.self = self_;
  transport.listen = options_.listen;
  transport.lanes = options_.lanes;
  transport.congestion = options_.congestion;
  transport.zero_copy = options_.zero_copy == "on"    ? TransportOptions::ZeroCopy::kOn
                        : options_.zero_copy == "off" ? TransportOptions::ZeroCopy::kOff
                                                      : TransportOptions::ZeroCopy::kAuto;
  LH_ASSIGN_OR_RETURN(transport_, MakeTransport(transport, ring_.get(), this));

  OpRunner::Options runner;
  runner.self = self_;
  runner.scratch_limit = options_.scratch_limit;
  runner.unmap = [this](void* data, size_t bytes) { unmapper_.Unmap(data, bytes); };
  runner_ = std::make_unique<OpRunner>(transport_.get(), runner);

  StateRunner::Options states;
  states.self = self_;
  states.hash_threads = options_.hash_threads != 0 ? options_.hash_threads : DefaultHashThreads();
  states.state_rate = options_.state_rate;
  states.kept = {options_.keep_state, Millis(options_.keep_state_for_ms)};
  states_ = std::make_unique<StateRunner>(
      states, transport_.get(), [this] { ring_->Wake(); }, [this] { return ring_->Now(); });

  std::string endpoint = options_.advertise;
  if (endpoint.empty()) {
    LH_ASSIGN_OR_RETURN(endpoint,
                        AdvertisedEndpoint(transport_->listen_address(), options_.coordinators));
  }
  CoreConfig core;
  core.peer = self_;
  core.endpoints = {endpoint};
  core.lanes = options_.lanes;
  core.version = options_.version;
  core.host = HostName();
  core.drain_timeout_ms = options_.drain_timeout_ms;
  core_ = std::make_unique<PeerCore>(core);

  metrics_ = std::make_unique<PeerMetrics>([this] { ring_->Wake(); });
  if (!options_.http.empty()) {
    LH_ASSIGN_OR_RETURN(http_, HttpServer::Start(options_.http, [this](const std::string& path) {
                          return Serve(path);
                        }));
  }

  IpcServerOptions ipc;
  ipc.path = options_.socket_path;
  ipc.group = options_.socket_group;
  ipc.arena_limit = options_.arena_limit;
  LH_ASSIGN_OR_RETURN(ipc_, MakeIpcServer(ipc, ring_.get(), this));

  ControlClientOptions control;
  control.addresses = options_.coordinators;
  ControlClientCallbacks callbacks;
  callbacks.connected = [this] { return inbox_.Begin(); };
  callbacks.disconnected = [this](std::string reason) { inbox_.End(std::move(reason)); };
  callbacks.message = [this](control::CoordinatorMessage message) {
    return inbox_.Add(std::move(message));
  };
  control_ = MakeControlClient(control, std::move(callbacks));
  coordinator_down_since_ = ring_->Now();
  Log(LogLevel::kInfo,
      absl::StrCat("peerd serving peer=", ToString(self_), " listen=", listen_address(),
                   " advertise=", endpoint, " socket=", options_.socket_path,
                   " coordinator=", absl::StrJoin(options_.coordinators, ",")));
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------ the loop

absl::Status DaemonImpl::Run() {
  WatchSignals();
  while (!Over() && signals_ < 2) {
    const Tick now = ring_->Now();
    if (now >= core_->NextDeadline()) Post(TimePassed{});
    TakeInbox();
    runner_->Work();
    states_->Work();
    for (const auto& [local, progress] : states_->TakeProgress()) {
      ipc_->SyncProgress(local, progress);
      core_->SetProgress(local, progress);
    }
    FailHopelessJoins();
    const bool watch = now >= watch_due_;
    if (watch) WatchLinks();
    Drain();
    if (watch || metrics_->wanted()) PublishMetrics();
    if (Over()) break;
    const Tick until = runner_->HasWork()
                           ? now
                           : std::min({core_->NextDeadline(), states_->NextDeadline(), watch_due_});
    LH_RETURN_IF_ERROR(ring_->RunOnce(until));
  }
  if (signals_ >= 2) return absl::CancelledError("stopped by a second signal");
  Log(LogLevel::kInfo, "drained; closing");
  ipc_->Close();
  transport_->Close();
  const Tick deadline = ring_->Now() + kCloseUs;
  while (ring_->Now() < deadline && !(transport_->closed() && ipc_->closed())) {
    LH_RETURN_IF_ERROR(ring_->RunOnce(std::min(deadline, ring_->Now() + Millis(50))));
  }
  control_->Stop();
  return absl::OkStatus();
}

void DaemonImpl::TakeInbox() {
  for (ControlInbox::Mail& mail : inbox_.TakeAll()) {
    if (std::holds_alternative<StreamBegan>(mail)) {
      stream_up_ = true;
      Post(CoordinatorUp{});
    } else if (const auto* down = std::get_if<StreamEnded>(&mail)) {
      if (coordinator_up_) coordinator_down_since_ = ring_->Now();
      if (stream_up_) Post(CoordinatorDown{});
      stream_up_ = coordinator_up_ = false;
      coordinator_error_ = down->reason;
    } else {
      auto& message = std::get<control::CoordinatorMessage>(mail);
      if (const auto* welcome = std::get_if<control::Welcome>(&message)) {
        coordinator_up_ = true;
        link_watch_.SayAllAgain();
        transport_->SetDetectMs(welcome->detect_ms);
        states_->SetDetectMs(welcome->detect_ms);
      }
      Post(FromCoordinator{std::move(message)});
    }
  }
}

void DaemonImpl::Drain() {
  while (true) {
    for (Event& event : runner_->TakeEvents()) events_.push_back(std::move(event));
    for (Event& event : states_->TakeEvents()) events_.push_back(std::move(event));
    if (events_.empty()) return;
    const Event event = std::move(events_.front());
    events_.pop_front();
    if (const auto* post = std::get_if<LocalPost>(&event); post && !Admit(*post)) continue;
    std::vector<Action> actions = core_->Step(event, ring_->Now());
    for (Action& action : actions) Carry(action);
  }
}

bool DaemonImpl::Admit(const LocalPost& post) {
  const std::optional<PostView> view = core_->ViewPost(post);
  if (!view) return true;  // the core says why it may not be
  Outcome outcome = runner_->Admit(post, *view);
  if (outcome.ok()) return true;
  Action answer = PostDone{post.post, std::move(outcome), {}};
  Carry(answer);
  return false;
}

void DaemonImpl::Carry(Action& action) {
  struct Visitor {
    DaemonImpl* d;
    void operator()(ToCoordinator& a) { d->control_->Send(a.message); }
    void operator()(JoinDone& a) {
      d->joins_.erase(a.local);
      if (!a.outcome.ok()) {
        d->groups_.erase(a.local);
        d->states_->Forget(a.local);
      }
      d->ipc_->JoinDone(a.local, a.outcome, a.world);
    }
    // What is said of one member arrives in order, whatever waits for its tensors.
    void operator()(StepDone& a) {
      d->states_->WhenUnread(a.local,
                             [d = d, a] { d->ipc_->StepDone(a.local, a.outcome, a.world); });
    }
    void operator()(LeaveDone& a) {
      d->states_->WhenUnread(a.local, [d = d, a] { d->ipc_->LeaveDone(a.local, a.outcome); });
    }
    void operator()(PostDone& a) {
      const OpTraffic traffic = d->runner_->TakePost(a.post);
      d->metrics_->ObserveOp(a.outcome.code, a.info);
      d->ipc_->PostDone(a.post, a.outcome, a.info, traffic.bytes_sent, traffic.bytes_received);
    }
    void operator()(WorldChanged& a) {
      d->states_->WhenUnread(a.local, [d = d, a] { d->ipc_->WorldChanged(a.local, a.world); });
    }
    void operator()(MemberGone& a) {
      d->WithdrawSync(a.local, a.outcome.ok() ? kLeaves : a.outcome);
      d->groups_.erase(a.local);
      d->states_->WhenUnread(a.local, [d = d, a] {
        d->states_->Forget(a.local);
        d->ipc_->MemberGone(a.local, a.outcome);
      });
    }
    void operator()(OpenLinks& a) {
      std::vector<LinkRequest> links;
      for (const LinkWanted& want : a.links) {
        links.push_back({want.peer.peer, want.peer.endpoints, want.dial, want.data});
      }
      d->transport_->OpenLinks(a.group.run, a.group.group, a.epoch, a.token, links, a.deadline);
    }
    void operator()(KeepLinks& a) {
      if (a.peers.empty()) d->runner_->ForgetGroup(a.group);
      d->transport_->KeepLinks(a.group.run, a.group.group, a.epoch, a.peers);
    }
    void operator()(SendReady& a) {
      d->Send(FrameOf(a, d->self_, a.eager ? d->runner_->Payload(a) : ""));
    }
    void operator()(SendDone& a) { d->Send(FrameOf(a, d->self_)); }
    void operator()(StartAttempt& a) { d->runner_->Start(a); }
    void operator()(CreditAttempt& a) { d->runner_->Credit(a); }
    void operator()(StopAttempt& a) { d->runner_->Stop(a); }
    void operator()(FinishAttempt& a) { d->runner_->Finish(a); }
    void operator()(SyncEnded& a) { d->EndSync(a); }
    void operator()(TakeDone& a) {
      const StateSyncInfo info = d->states_->Carry(a);
      if (info.bytes > 0) d->LogSync(a.local, a.outcome, info);
      d->ipc_->TakeDone(a.local, a.outcome, info);
    }
    void operator()(ServeState& a) { d->states_->Carry(a); }
    void operator()(EndServe& a) { d->states_->Carry(a); }
    void operator()(StartTransfer& a) { d->states_->Carry(a); }
    void operator()(ChangeSources& a) { d->states_->Carry(a); }
    void operator()(StopTransfer& a) { d->states_->Carry(a); }
    void operator()(CompareManifest& a) { d->states_->Carry(a); }
    void operator()(BreakLink& a) { d->transport_->BreakLink({a.run, a.peer}, a.reason); }
    void operator()(RefuseCoordinator& a) {
      d->coordinator_up_ = false;
      d->control_->Refuse(a.reason);
    }
    void operator()(FaultOver& a) { d->metrics_->ObserveFault(a); }
    void operator()(Drained&) { d->drained_ = true; }
    void operator()(LogLine& a) { Log(LogLevel::kInfo, a.text); }
  };
  std::visit(Visitor{this}, action);
}

// ------------------------------------------------------------------------------ trainers

void DaemonImpl::OnJoin(const LocalJoin& join) {
  joins_[join.local] = ring_->Now();
  groups_[join.local] = join.group;
  states_->Add(join.local, join.group, join.name);
  Post(join);
}

void DaemonImpl::OnPost(const IpcPost& post) {
  PostBuffers buffers{post.source, post.target, post.source_region, post.target_region};
  runner_->AddPost(post.post, post.desc, std::move(buffers));
  Post(LocalPost{post.post, post.tag, post.desc});
}

IpcMembers DaemonImpl::OnMembers(LocalId local) {
  PeerCore::MembersView view = core_->GetMembers(local);
  return {view.epoch, std::move(view.members)};
}

void DaemonImpl::OnStep(LocalId local, const StateSync* sync) {
  if (sync != nullptr) {
    states_->Begin(local, groups_.at(local), *sync, /*with_step=*/true);
  } else {
    Post(LocalStep{local});
  }
}

void DaemonImpl::OnLeave(LocalId local) {
  WithdrawSync(local, kLeaves);
  Post(LocalLeave{local});
}

// Those that the core has heard of end with the member, and are answered then.
void DaemonImpl::WithdrawSync(LocalId local, const Outcome& outcome) {
  const std::optional<StateSyncInfo> info = states_->Withdraw(local);
  if (!info) return;
  ipc_->SyncDone(local, outcome, *info);
  ipc_->StepDone(local, outcome, {});
}

void DaemonImpl::LogSync(LocalId local, const Outcome& outcome, const StateSyncInfo& info) {
  Log(LogLevel::kInfo, absl::StrCat("state sync ended local=", local.value(), " ok=", outcome.ok(),
                                    " revision=", info.revision, " bytes=", info.bytes,
                                    " sources=", info.sources, " took_ms=", info.total_us / 1000) +
                           LogField("torn", info.torn ? "yes" : "no") +
                           LogField("reason", outcome.text));
}

void DaemonImpl::EndSync(const SyncEnded& ended) {
  const StateSyncInfo info = states_->Carry(ended);
  // Where all were equal there is nothing to tell: that is so at each step.
  if (!ended.outcome.ok() || info.bytes > 0) LogSync(ended.local, ended.outcome, info);
  states_->WhenUnread(ended.local, [this, ended, told = info, since = ring_->Now()]() mutable {
    told.total_us += ring_->Now() - since;
    ipc_->SyncDone(ended.local, ended.outcome, told);
  });
}

void DaemonImpl::OnGone(LocalId local, const std::string& reason) {
  joins_.erase(local);
  groups_.erase(local);
  states_->Withdraw(local);
  states_->Gone(local);
  Post(LocalDied{local, reason});
}

void DaemonImpl::FailHopelessJoins() {
  if (coordinator_up_ || joins_.empty()) return;
  const Tick now = ring_->Now();
  const int64_t patience = Millis(options_.coordinator_timeout_ms);
  if (now - coordinator_down_since_ < patience) return;
  for (auto it = joins_.begin(); it != joins_.end();) {
    const auto [local, since] = *it;
    if (now - since < patience) {
      ++it;
      continue;
    }
    it = joins_.erase(it);
    ipc_->JoinDone(local,
                   {Code::kUnavailable,
                    absl::StrCat("join refused: no coordinator of ",
                                 absl::StrJoin(options_.coordinators, ","), " serves this peer (",
                                 coordinator_error_, "); check --coordinator of peerd")},
                   {});
    states_->Forget(local);
    Post(LocalDied{local, "no coordinator"});
  }
}

// ------------------------------------------------------------------------------ frames

absl::Status DaemonImpl::OnControlFrame(const LinkKey& link, const FrameHeader& header,
                                        std::span<const uint8_t> payload) {
  if (StateExchange::IsOurs(header)) {
    return states_->exchange()->OnControlFrame(link, header, payload, ring_->Now());
  }
  const auto check = [this](const RelayedFrame& frame) { return core_->CheckRelay(frame); };
  LH_ASSIGN_OR_RETURN(TakenFrame taken, TakeFrame(link, header, payload, self_, check));
  if (auto* const ready = std::get_if<PeerReady>(&taken)) {
    Post(std::move(*ready));
  } else if (const auto* const done = std::get_if<PeerDone>(&taken)) {
    Post(*done);
  } else if (const auto* const forward = std::get_if<ControlFrame>(&taken)) {
    ++relays_.passed_on;
    Send(*forward);
  } else {
    ++relays_.stale;
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------ signals, metrics

void DaemonImpl::WatchSignals() {
  if (options_.signal_fd < 0) return;
  ring_->PollIn(options_.signal_fd, [this](IoResult result) {
    if (result.value < 0) return;
    OnSignal();
    WatchSignals();
  });
}

void DaemonImpl::OnSignal() {
  signalfd_siginfo info;
  if (read(options_.signal_fd, &info, sizeof info) != sizeof info) return;
  ++signals_;
  if (signals_ > 1) return;
  Log(LogLevel::kInfo,
      absl::StrCat("draining signal=", info.ssi_signo, " timeout_ms=", options_.drain_timeout_ms));
  Post(DrainRequested{ring_->Now() + Millis(options_.drain_timeout_ms)});
}

void DaemonImpl::WatchLinks() {
  const Tick now = ring_->Now();
  watch_due_ = now + kWatchUs;
  for (const auto& [group, traffic] : runner_->Traffic()) {
    core_->SetBytes(group, traffic.bytes_sent, traffic.bytes_received);
  }
  for (const LinkDelivery& seen : transport_->TakeDeliveries()) {
    link_watch_.Add(
        seen.link.peer,
        {seen.bytes_per_second, seen.limited_by_sender, seen.rtt_us, seen.lanes_growing}, now);
  }
  // Not before Hello has been answered: it is the first message of a stream.
  if (!coordinator_up_) return;
  const std::vector<LinkStats> links = transport_->GetLinkStats();
  if (!drained_ && signals_ == 0) ProbeLinks(links, now);
  if (now < report_due_) return;
  report_due_ = now + kReportUs;
  std::vector<PeerId> peers;
  peers.reserve(links.size());
  for (const LinkStats& link : links) peers.push_back(link.link.peer);
  link_watch_.Keep(peers);
  const control::LinkReport report = link_watch_.TakeReport(now);
  if (!report.links.empty()) control_->Send(report);
}

void DaemonImpl::ProbeLinks(const std::vector<LinkStats>& stats, Tick now) {
  if (const std::optional<LinkProbe> probe = transport_->TakeProbe()) {
    probe_plan_.Ended(probe->begun, probe->ended);
    if (probe->error.empty()) {
      const auto link = std::find_if(stats.begin(), stats.end(), [&](const LinkStats& link) {
        return link.link == probe->link;
      });
      // On a long way ops find themselves how many lanes they need.
      const bool fewer = probe->rtt_us >= kLongWayUs ||
                         (link != stats.end() && link->lanes_used > kProbeConnectionsMax);
      link_watch_.Add(probe->link.peer,
                      {probe->bytes_per_second, /*limited_by_sender=*/false, probe->rtt_us, fewer},
                      now);
    }
    // Every one of them: there are few, and an operator wants to know what uses the link.
    Log(LogLevel::kInfo,
        absl::StrCat("link probed peer=", ToString(probe->link.peer),
                     " bytes_per_second=", probe->bytes_per_second, " rtt_us=", probe->rtt_us,
                     " sent=", probe->bytes_sent, " repeated=", probe->bytes_repeated,
                     " took_ms=", (probe->ended - probe->begun) / 1000) +
            (probe->error.empty() ? "" : LogField("error", probe->error)));
  }
  std::map<LinkKey, uint64_t> sent;
  std::map<PeerId, LinkKey> links;
  std::vector<ProbeCandidate> candidates;
  for (const LinkStats& link : stats) {
    const PeerId peer = link.link.peer;
    sent[link.link] = link.bytes_sent;
    // One that is linked in two runs is the same peer.
    if (!links.emplace(peer, link.link).second) continue;
    const auto before = sent_before_.find(link.link);
    const bool in_use = before != sent_before_.end() && before->second != link.bytes_sent;
    candidates.push_back({peer, link_watch_.Measured(peer), in_use});
  }
  sent_before_ = std::move(sent);
  const std::optional<PeerId> next = probe_plan_.Next(candidates, now);
  if (next) (void)transport_->StartProbe(links.at(*next));
}

void DaemonImpl::PublishMetrics() {
  for (const int64_t us : states_->TakeHashTimes()) metrics_->ObserveStateHash(us);
  PeerSnapshot snapshot;
  snapshot.core = core_->GetStats();
  snapshot.transport = transport_->GetStats();
  const IpcStats ipc = ipc_->GetStats();
  snapshot.relays = relays_;
  const StateExchange::Stats states = states_->exchange()->GetStats();
  snapshot.states = {states.bytes_sent, states.bytes_received, states.bytes_repeated,
                     states.chunks_corrupt, states_->kept_bytes()};
  snapshot.clients = ipc.clients;
  snapshot.requests_refused = ipc.requests_refused;
  snapshot.arena_bytes = ipc.arena_bytes;
  snapshot.coordinator_up = coordinator_up_;
  metrics_->Publish(snapshot);
}

HttpResponse DaemonImpl::Serve(const std::string& path) {
  if (path == "/metrics") {
    return {200, "text/plain; version=0.0.4; charset=utf-8", metrics_->Text()};
  }
  if (path == "/healthz") return {200, "text/plain", "ok\n"};
  if (path == "/readyz") {
    if (coordinator_up_) return {200, "text/plain", "ok\n"};
    return {503, "text/plain", "no coordinator serves this peer\n"};
  }
  return {404, "text/plain", "there are /metrics, /healthz and /readyz\n"};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> MakeDaemon(DaemonOptions options) {
  auto daemon = std::make_unique<DaemonImpl>(std::move(options));
  LH_RETURN_IF_ERROR(daemon->Open());
  return daemon;
}

}  // namespace longhaul::peerd
