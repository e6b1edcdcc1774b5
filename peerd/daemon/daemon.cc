#include "peerd/daemon/daemon.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/cpu_time.h"
#include "base/crypto/identity.h"
#include "base/daemon/service_manager.h"
#include "base/http/http_server.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "peerd/control/control_client.h"
#include "peerd/control/control_inbox.h"
#include "peerd/core/actions.h"
#include "peerd/daemon/advertise.h"
#include "peerd/daemon/peer_recorder.h"
#include "peerd/daemon/totals.h"
#include "peerd/engine/engine.h"
#include "peerd/engine/op_runner.h"
#include "peerd/engine/state_runner.h"
#include "peerd/io/open_ring.h"
#include "peerd/io/ring.h"
#include "peerd/io/unmapper.h"
#include "peerd/ipc/ipc_server.h"
#include "peerd/metrics/peer_metrics.h"
#include "peerd/paths/path_reports.h"
#include "peerd/state/hash_pool.h"
#include "peerd/state/state_exchange.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {
namespace {

// How long the daemon waits at its end until lanes and the Unix socket are closed.
constexpr int64_t kCloseUs = Seconds(2);
// The service manager waits for a drain this much longer than members may take to reach their next
// step boundary: afterwards ops in flight still have to end.
constexpr std::chrono::seconds kDrainSpare(30);
// How often links are looked at. Metrics are published at least as often.
constexpr int64_t kWatchUs = Millis(500);
// While bytes move, what the host sends and receives is looked at so often, but only when so many
// bytes have moved since the last look: a look costs a system call for each lane in use.
constexpr int64_t kLookUs = Millis(100);
// How long after an op the next one is expected.
constexpr int64_t kOpsNearUs = 500;
constexpr uint64_t kLookBytes = 512 << 10;
// The coordinator hears of measured links at most once in this time.
constexpr int64_t kReportUs = Seconds(2);
constexpr char kHttpDefault[] = "127.0.0.1:29701";
// How many messages of the control client may wait for the reactor.
constexpr size_t kInboxMax = 65536;

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

class DaemonImpl final : public Daemon, EngineObserver {
 public:
  explicit DaemonImpl(DaemonOptions options)
      : options_(std::move(options)),
        self_(identity_.peer()),
        inbox_(kInboxMax, [this] { ring_->Wake(); }) {}

  ~DaemonImpl() override {
    // End other threads first: they use the members that are destroyed afterwards.
    if (control_) control_->Stop();
    http_.reset();
  }

  absl::Status Open();

  std::string listen_address() const override { return transport_->listen_address(); }
  std::string socket_path() const override { return options_.socket_path; }
  std::string http_address() const override { return http_ ? http_->address() : ""; }
  absl::Status Run() override;

 private:
  absl::Status MakeRing();
  absl::Status StartHttp();
  // Sends to the coordinator. Puts the present address into Hello, because the core knows only the
  // address at the start.
  void Send(const control::PeerMessage& message);
  // Whether a trainer waits for an op, or will probably post one soon.
  bool OpsAreNear();
  void HandleInbox();
  void WatchSignals();
  void OnSignal();
  void PublishMetrics();
  std::vector<LinkSample> SampleLinks();
  void WatchLinks();
  void LookAtHost(Tick now);
  void TellWorstLanes();
  void ProbeLinks(const std::vector<LinkStats>& stats, Tick now);
  // Runs on the HTTP server's thread.
  HttpResponse Serve(const std::string& path);

  // ---- EngineObserver
  bool OnEvent(Event* event) override {
    recorder_.OnEvent(*event, ring_->Now());
    return true;
  }
  bool OnAction(const Action& action) override;

  DaemonOptions options_;
  const Identity identity_ = Identity::New();
  const PeerId self_;
  std::unique_ptr<Ring> ring_;
  bool on_epoll_ = false;
  std::unique_ptr<Engine> engine_;  // listens to the transport and the IPC server
  std::unique_ptr<Transport> transport_;
  Unmapper unmapper_;  // for scratch memory
  std::unique_ptr<OpRunner> ops_;
  std::unique_ptr<StateRunner> states_;
  std::unique_ptr<IpcServer> ipc_;
  std::unique_ptr<PeerMetrics> metrics_;
  std::unique_ptr<HttpServer> http_;
  const OwnAddresses own_ = SystemAddresses();
  AdvertisedAddress address_{options_.advertise, [this](const std::string& coordinator) {
                               return AdvertisedEndpoints(transport_->listen_address(), coordinator,
                                                          own_);
                             }};
  std::unique_ptr<ControlClient> control_;

  ControlInbox inbox_;
  control::RecordingSource recording_{options_.recorder};
  PeerRecorder recorder_{options_.recorder,
                         [this](std::string_view why) { options_.dumps->Fault(why); }};

  std::atomic<bool> coordinator_up_ = false;  // Engine::welcome(), also for other threads
  Tick watch_due_;
  Tick look_due_;
  Tick op_seen_;           // when a trainer last had an op open
  uint64_t moved_ = 0;     // bytes sent and received, at the last LookAtHost()
  bool op_ended_ = false;  // since the last LookAtHost()
  PathReports path_reports_{self_, Seconds(options_.probe_interval_s)};
  std::map<LinkKey, uint64_t> sent_before_;  // bytes sent, at the last ProbeLinks()
  Tick report_due_;
  RepeatedBytes repeated_;
  std::map<PeerId, uint64_t> repeated_by_peer_;  // of links that are up
  int signals_ = 0;
};

absl::Status DaemonImpl::Open() {
  LH_RETURN_IF_ERROR(MakeRing());
  options_.recorder->SetPeer(self_.value());

  engine_ = std::make_unique<Engine>();

  TransportOptions transport;
  transport.self = self_;
  transport.listen = WhereKernelListens(options_.listen);
  transport.lanes = options_.lanes;
  transport.congestion = options_.congestion;
  transport.zero_copy = options_.zero_copy == "on"    ? TransportOptions::ZeroCopy::kOn
                        : options_.zero_copy == "off" ? TransportOptions::ZeroCopy::kOff
                                                      : TransportOptions::ZeroCopy::kAuto;
  transport.identity = identity_;
  transport.own_endpoints = [this] { return address_.Get(); };
  transport.encryption = options_.lane_encryption == "off"       ? LaneEncryption::kOff
                         : options_.lane_encryption == "require" ? LaneEncryption::kRequire
                                                                 : LaneEncryption::kAuto;
  LH_ASSIGN_OR_RETURN(transport_, MakeTransport(transport, ring_.get(), engine_.get()));

  OpRunner::Options runner;
  runner.self = self_;
  runner.scratch_limit = options_.scratch_limit;
  runner.unmap = [this](void* data, size_t bytes) { unmapper_.Unmap(data, bytes); };
  ops_ = std::make_unique<OpRunner>(transport_.get(), runner);

  StateRunner::Options states;
  states.self = self_;
  states.hash_threads = options_.hash_threads != 0 ? options_.hash_threads : DefaultHashThreads();
  states.state_rate = options_.state_rate;
  states.kept = {options_.keep_state, Millis(options_.keep_state_for_ms)};
  states_ = std::make_unique<StateRunner>(
      states, transport_.get(), [this] { ring_->Wake(); }, [this] { return ring_->Now(); });
  transport_->SetSegmentListeners({.ops = ops_->segments(), .states = states_->segments()});

  // A coordinator is not needed yet, and its name may not resolve yet.
  address_.Refresh("");
  metrics_ = std::make_unique<PeerMetrics>([this] { ring_->Wake(); });
  LH_RETURN_IF_ERROR(StartHttp());

  IpcServerOptions ipc;
  ipc.path = options_.socket_path;
  ipc.mode = options_.socket_mode;
  ipc.group = options_.socket_group;
  ipc.allow_users = options_.allow_users;
  ipc.allow_groups = options_.allow_groups;
  ipc.user_share = options_.user_share;
  ipc.arena_limit = options_.arena_limit;
  LH_ASSIGN_OR_RETURN(ipc_, MakeIpcServer(ipc, ring_.get(), engine_.get()));

  ControlClientOptions control;
  control.identity = identity_;
  control.addresses = options_.coordinators;
  control.tls = options_.tls;
  control.token_file = options_.token_file;
  ControlClientCallbacks callbacks;
  callbacks.connected = [this](const std::string& coordinator) {
    address_.Refresh(coordinator);
    return inbox_.Begin();
  };
  callbacks.disconnected = [this](std::string reason) { inbox_.End(std::move(reason)); };
  callbacks.message = [this](control::CoordinatorMessage message) {
    return inbox_.Add(std::move(message));
  };
  callbacks.recording = [this](const control::ReadRecording& request, int64_t received_us) {
    return recording_.Answer(request, received_us);
  };
  callbacks.told_why = [this](control::TellWhy tell) { return inbox_.Add(std::move(tell)); };
  control_ = MakeControlClient(control, std::move(callbacks));

  EngineOptions engine;
  engine.core.peer = self_;
  engine.core.endpoints = address_.Get();
  engine.core.lanes = options_.lanes;
  engine.core.version = options_.version;
  engine.core.host = HostName();
  engine.core.drain_timeout_ms = options_.drain_timeout_ms;
  engine.coordinator_timeout_ms = options_.coordinator_timeout_ms;
  engine.coordinators = absl::StrJoin(options_.coordinators, ",");
  EnginePorts ports;
  ports.trainers = ipc_.get();
  ports.links = transport_.get();
  ports.ops = ops_.get();
  ports.states = states_.get();
  ports.to_coordinator = [this](const control::PeerMessage& m) { Send(m); };
  ports.ask_why = [this](const control::AskWhy& ask) { (void)control_->AskWhy(ask); };
  ports.refuse_coordinator = [this](const std::string& reason) { control_->Refuse(reason); };
  ports.reached = [this](const auto& endpoints) { return address_.Reached(endpoints); };
  ports.clock = [this] { return ring_->Now(); };
  ports.sign = [this](const std::string& text) { return identity_.Sign(text); };
  ports.observer = this;
  engine_->Start(std::move(engine), std::move(ports));
  Log(LogLevel::kInfo,
      absl::StrCat("peerd serving peer=", ToString(self_), " listen=", listen_address(),
                   " advertise=", absl::StrJoin(address_.Get(), ","),
                   " socket=", options_.socket_path,
                   " coordinator=", absl::StrJoin(options_.coordinators, ",")));
  return absl::OkStatus();
}

absl::Status DaemonImpl::MakeRing() {
  LH_ASSIGN_OR_RETURN(OpenedRing opened, OpenRing(options_.io, 4096));
  ring_ = std::move(opened.ring);
  on_epoll_ = !opened.why_epoll.empty();
  Log(LogLevel::kInfo, "data plane ready" + LogField("ring", ring_->features().description));
  if (on_epoll_) {
    Log(LogLevel::kWarning, "epoll instead of io_uring: ops take more processor time" +
                                LogField("reason", opened.why_epoll));
  }
  return absl::OkStatus();
}

absl::Status DaemonImpl::StartHttp() {
  if (options_.http.empty()) return absl::OkStatus();
  const bool named = options_.http != "auto";
  auto http = HttpServer::Start(named ? options_.http : kHttpDefault,
                                [this](const std::string& path) { return Serve(path); });
  if (http.ok()) {
    http_ = *std::move(http);
  } else if (named) {
    return http.status();
  } else {
    Log(LogLevel::kWarning,
        absl::StrCat("peerd goes on without a port for metrics: ", http.status().message()));
  }
  return absl::OkStatus();
}

void DaemonImpl::Send(const control::PeerMessage& message) {
  const auto* hello = std::get_if<control::Hello>(&message);
  if (hello == nullptr) {
    control_->Send(message);
    return;
  }
  control::Hello now = *hello;
  now.endpoints = address_.Get();
  control_->Send(now);
}

// ------------------------------------------------------------------------------ the loop

absl::Status DaemonImpl::Run() {
  const CpuTime cpu("reactor");
  WatchSignals();
  while (signals_ < 2) {
    HandleInbox();
    const bool watch = ring_->Now() >= watch_due_;
    if (watch) {
      WatchLinks();
      TheServiceManager().Alive();
    } else if (ring_->Now() >= look_due_) {
      // Nothing wakes the loop for this: while bytes move, it turns anyway.
      look_due_ = ring_->Now() + kLookUs;
      const TransportStats stats = transport_->GetStats();
      if (stats.bytes_sent + stats.bytes_taken - moved_ >= kLookBytes) LookAtHost(ring_->Now());
    }
    engine_->Turn();
    coordinator_up_ = engine_->welcome();
    if (watch || metrics_->wanted()) PublishMetrics();
    if (engine_->over()) break;
    ring_->SetPoll(OpsAreNear() ? options_.poll_us : 0);
    LH_RETURN_IF_ERROR(ring_->RunOnce(std::min(engine_->NextDeadline(), watch_due_)));
  }
  if (signals_ >= 2) return absl::CancelledError("stopped by a second signal");
  Log(LogLevel::kInfo, "drained; closing");
  // A drain that the coordinator asked for has not been announced before: it has no limit.
  TheServiceManager().Stopping(kDrainSpare);
  ipc_->Close();
  transport_->Close();
  const Tick deadline = ring_->Now() + kCloseUs;
  while (ring_->Now() < deadline && !(transport_->closed() && ipc_->closed())) {
    LH_RETURN_IF_ERROR(ring_->RunOnce(std::min(deadline, ring_->Now() + Millis(50))));
  }
  control_->Stop();
  return absl::OkStatus();
}

bool DaemonImpl::OpsAreNear() {
  const Tick now = ring_->Now();
  if (ipc_->posts_open() > 0) op_seen_ = now;
  return now - op_seen_ < kOpsNearUs;
}

void DaemonImpl::HandleInbox() {
  for (ControlInbox::Mail& mail : inbox_.TakeAll()) {
    if (std::holds_alternative<StreamBegan>(mail)) {
      engine_->OnStreamUp();
    } else if (const auto* down = std::get_if<StreamEnded>(&mail)) {
      engine_->OnStreamDown(down->reason);
    } else if (auto* tell = std::get_if<control::TellWhy>(&mail)) {
      engine_->OnTellWhy(std::move(*tell));
    } else {
      auto& message = std::get<control::CoordinatorMessage>(mail);
      if (std::holds_alternative<control::Welcome>(message)) path_reports_.SayAllAgain();
      engine_->OnMessage(std::move(message));
    }
  }
}

bool DaemonImpl::OnAction(const Action& action) {
  recorder_.OnAction(action, ring_->Now());
  if (const auto* done = std::get_if<PostDone>(&action)) {
    op_ended_ = true;
    metrics_->ObserveOp(done->outcome.code, done->info, ring_->Now());
  } else if (const auto* step = std::get_if<StepDone>(&action)) {
    if (step->outcome.code == Code::kOk) metrics_->ObserveStep(ring_->Now());
  } else if (const auto* sync = std::get_if<SyncDone>(&action)) {
    if (sync->outcome.code == Code::kOk) metrics_->ObserveSync(sync->revision);
  } else if (const auto* fault = std::get_if<FaultOver>(&action)) {
    metrics_->ObserveFault(*fault);
  }
  return true;
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
  TheServiceManager().Stopping(std::chrono::milliseconds(options_.drain_timeout_ms) + kDrainSpare);
  engine_->OnDrain(ring_->Now() + Millis(options_.drain_timeout_ms));
}

void DaemonImpl::LookAtHost(Tick now) {
  look_due_ = now + kLookUs;
  const TransportStats stats = transport_->GetStats();
  moved_ = stats.bytes_sent + stats.bytes_taken;
  path_reports_.Look(now, transport_->PopArrivals(), stats.bytes_taken,
                     std::exchange(op_ended_, false));
}

void DaemonImpl::WatchLinks() {
  const Tick now = ring_->Now();
  watch_due_ = now + kWatchUs;
  LookAtHost(now);
  recorder_.OnLanesLost(transport_->GetStats().lanes_lost, now);
  for (const auto& [group, traffic] : ops_->Traffic()) {
    engine_->core().SetBytes(group, traffic.bytes_sent, traffic.bytes_received);
  }
  std::vector<std::pair<PeerId, RateSample>> rates;
  for (const auto& [link, rate] : transport_->PopRates()) {
    rates.emplace_back(link.peer, rate);
    repeated_.bytes += rate.bytes_repeated;
    repeated_by_peer_[link.peer] += rate.bytes_repeated;
  }
  path_reports_.AddRates(std::move(rates), now);
  TellWorstLanes();
  // Hello has to be the first message of a stream, so nothing is reported before Welcome.
  if (!coordinator_up_) return;
  const std::vector<LinkStats> links = transport_->GetLinkStats();
  if (!engine_->drained() && signals_ == 0) ProbeLinks(links, now);
  if (now < report_due_) return;
  report_due_ = now + kReportUs;
  std::vector<PathReports::Link> up;
  up.reserve(links.size());
  for (const LinkStats& link : links) {
    const int64_t us = link.relay ? 0 : std::clamp<int64_t>(link.shortest_rtt_us, 0, UINT32_MAX);
    up.push_back({link.link.peer, static_cast<uint32_t>(us), link.small_packets});
  }
  const control::LinkReport report = path_reports_.PopReport(up, now);
  const bool host = report.up_bytes_per_second != 0 || report.down_bytes_per_second != 0;
  if (host || !report.links.empty()) control_->Send(report);
}

void DaemonImpl::TellWorstLanes() {
  const auto ms = [](int64_t us) {
    return static_cast<uint32_t>(std::clamp<int64_t>(us / 1000, 0, UINT32_MAX));
  };
  std::map<std::string, control::WorstLane> worst;
  for (const auto& [link, wait] : transport_->PopWaits()) {
    worst[link.run] = {link.peer,           wait.lane,          ms(wait.silent_us),
                       ms(wait.stalled_us), wait.waiting_bytes, wait.bytes_per_second,
                       wait.rtt_us};
  }
  engine_->core().SetWorstLanes(std::move(worst));
}

void DaemonImpl::ProbeLinks(const std::vector<LinkStats>& stats, Tick now) {
  if (const std::optional<LinkProbe> probe = transport_->PopProbe()) {
    const auto link = std::find_if(stats.begin(), stats.end(),
                                   [&](const LinkStats& link) { return link.link == probe->link; });
    // The rate is only a lower bound on a path with long round trips, where ops search for the
    // number of lanes that they need, and on a link that uses more lanes than a probe.
    RateSample rate = probe->rate;
    rate.few_connections = rate.rtt_us >= kLongWayUs ||
                           (link != stats.end() && link->lanes_used > kProbeConnectionsMax);
    path_reports_.Probed(probe->link.peer, rate, !probe->error.empty(), probe->begun, probe->ended,
                         now);
    // Every probe is logged. Probes are few, and an operator wants to know what uses the link.
    Log(LogLevel::kInfo,
        absl::StrCat("link probed peer=", ToString(probe->link.peer), " bytes_per_second=",
                     probe->rate.bytes_per_second, " rtt_us=", probe->rate.rtt_us,
                     " sent=", probe->rate.bytes_sent, " repeated=", probe->rate.bytes_repeated,
                     " took_ms=", (probe->ended - probe->begun) / 1000) +
            (probe->error.empty() ? "" : LogField("error", probe->error)));
  }
  std::map<LinkKey, uint64_t> sent;
  std::map<PeerId, LinkKey> links;
  std::vector<ProbeCandidate> candidates;
  for (const LinkStats& link : stats) {
    const PeerId peer = link.link.peer;
    sent[link.link] = link.bytes_sent;
    if (link.relay) continue;  // the ring avoids a relayed link, whatever it carries
    // A peer that has a link in each of two runs counts once.
    if (!links.emplace(peer, link.link).second) continue;
    const auto before = sent_before_.find(link.link);
    const bool in_use = before != sent_before_.end() && before->second != link.bytes_sent;
    candidates.push_back({peer, std::nullopt, in_use});
  }
  sent_before_ = std::move(sent);
  const std::optional<PeerId> next = path_reports_.NextProbe(std::move(candidates), now);
  if (next) (void)transport_->StartProbe(links.at(*next));
}

void DaemonImpl::PublishMetrics() {
  for (const int64_t us : states_->PopHashTimes()) metrics_->ObserveStateHash(us);
  PeerSnapshot snapshot;
  snapshot.now = ring_->Now();
  snapshot.core = engine_->core().GetStats();
  snapshot.transport = transport_->GetStats();
  const IpcStats ipc = ipc_->GetStats();
  snapshot.clients = ipc.clients;
  snapshot.arena_bytes = ipc.arena_bytes;
  snapshot.arena_limit = options_.arena_limit;
  snapshot.scratch_bytes = ops_->scratch_bytes();
  snapshot.scratch_limit = ops_->scratch_limit();
  snapshot.host_up = path_reports_.up();
  snapshot.host_down = path_reports_.down();
  snapshot.links = SampleLinks();
  snapshot.state_bytes_kept = states_->kept_bytes();
  snapshot.coordinator_up = coordinator_up_;
  snapshot.on_epoll = on_epoll_;
  snapshot.totals = Totals({snapshot.core, snapshot.transport, states_->exchange()->GetStats(), ipc,
                            repeated_, ops_->counts(), control_->GetStats()});
  metrics_->Publish(snapshot);
}

std::vector<LinkSample> DaemonImpl::SampleLinks() {
  std::map<PeerId, LinkSample> samples;  // a peer that has a link in each of two runs counts once
  for (const LinkStats& link : transport_->GetLinkStats()) {
    const PeerId peer = link.link.peer;
    const LinkWatch::Known known = path_reports_.Of(peer);
    const auto repeated = repeated_by_peer_.find(peer);
    samples[peer] = {peer, known.bytes_per_second, known.rtt_us,
                     repeated == repeated_by_peer_.end() ? 0 : repeated->second};
  }
  std::erase_if(repeated_by_peer_,
                [&](const auto& entry) { return !samples.contains(entry.first); });
  std::vector<LinkSample> result;
  result.reserve(samples.size());
  for (const auto& [peer, sample] : samples) result.push_back(sample);
  return result;
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
  return {404, "text/plain", "no such page; there are /metrics, /healthz and /readyz\n"};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> MakeDaemon(DaemonOptions options) {
  auto daemon = std::make_unique<DaemonImpl>(std::move(options));
  LH_RETURN_IF_ERROR(daemon->Open());
  return daemon;
}

}  // namespace longhaul::peerd
