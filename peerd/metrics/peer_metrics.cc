#include "peerd/metrics/peer_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "base/cpu_time.h"
#include "base/daemon/version.h"

namespace longhaul::peerd {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;

Gauge& AddGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

// A Prometheus counter with the value of a total that another part of peerd counts.
class Follower {
 public:
  // `reason`: the value of the label of this name; "": the counter has no label.
  Follower(prometheus::Registry& registry, const char* name, const char* help,
           const std::string& reason = "")
      : counter_(BuildCounter().Name(name).Help(help).Register(registry).Add(
            reason.empty() ? prometheus::Labels{} : prometheus::Labels{{"reason", reason}})) {}
  explicit Follower(Counter& counter) : counter_(counter) {}
  void Follow(double total) { counter_.Increment(total - counter_.Value()); }

 private:
  Counter& counter_;
};

// The buckets cover both ends: a link that was reset (milliseconds), and a coordinator that had to
// be started again first (seconds).
Histogram& AddFaultPhase(prometheus::Family<Histogram>& family, const char* phase) {
  return family.Add({{"phase", phase}}, Histogram::BucketBoundaries{0.005, 0.01, 0.02, 0.05, 0.1,
                                                                    0.2, 0.5, 1, 2, 5, 10, 30});
}

enum OutcomeIndex : size_t { kOk, kAborted, kRefused, kFailed, kOutcomes };
constexpr std::array<const char*, kOutcomes> kOutcomeLabels = {"ok", "aborted", "refused",
                                                               "failed"};

OutcomeIndex IndexOf(Code code) {
  switch (code) {
    case Code::kOk:
      return OutcomeIndex::kOk;
    case Code::kAborted:
      return OutcomeIndex::kAborted;
    case Code::kInvalidArgument:
    case Code::kTooFewMembers:
      return OutcomeIndex::kRefused;
    default:
      return OutcomeIndex::kFailed;
  }
}

constexpr std::array kAlgorithms = {Algorithm::kOneShot, Algorithm::kMesh, Algorithm::kRing,
                                    Algorithm::kLocal};

prometheus::Family<Counter>& CounterFamily(prometheus::Registry& registry, const char* name,
                                           const char* help) {
  return BuildCounter().Name(name).Help(help).Register(registry);
}
prometheus::Family<Gauge>& GaugeFamily(prometheus::Registry& registry, const char* name,
                                       const char* help) {
  return BuildGauge().Name(name).Help(help).Register(registry);
}

// Adds one series for each value of the only label, so that later nothing is looked up by its text.
template <size_t kSize>
std::array<Counter*, kSize> AddCounters(prometheus::Family<Counter>& family, const char* label,
                                        const std::array<const char*, kSize>& values) {
  std::array<Counter*, kSize> added;
  for (size_t i = 0; i < kSize; ++i) added[i] = &family.Add({{label, values[i]}});
  return added;
}

std::array<const char*, kAlgorithms.size()> AlgorithmLabels() {
  std::array<const char*, kAlgorithms.size()> labels{};
  for (size_t i = 0; i < labels.size(); ++i) labels[i] = Name(kAlgorithms[i]);
  return labels;
}

const std::vector<std::string>& CpuParts() {
  static const std::vector<std::string>& parts =
      *new std::vector<std::string>(std::begin(kCpuParts), std::end(kCpuParts));
  return parts;
}

double SecondsOf(int64_t us) { return static_cast<double>(us) * 1e-6; }

const Histogram::BucketBoundaries& OpBounds() {
  static const auto& bounds = *new Histogram::BucketBoundaries{
      1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 100};
  return bounds;
}

// The series of one link.
struct LinkSeries {
  Gauge* rate = nullptr;
  Gauge* rtt = nullptr;
  Counter* repeated = nullptr;
};

}  // namespace

struct PeerMetrics::Impl {
  explicit Impl(prometheus::Registry& r)
      : members(AddGauge(r, "longhaul_peerd_members", "Local members, pending or admitted")),
        ops_open(
            AddGauge(r, "longhaul_peerd_ops_open", "Ops announced or waiting for local members")),
        clients(AddGauge(r, "longhaul_peerd_clients", "Connections on the Unix socket")),
        arena(AddGauge(r, "longhaul_peerd_arena_bytes", "Memory shared with trainers")),
        arena_limit(AddGauge(r, "longhaul_peerd_arena_limit_bytes",
                             "The most memory that trainers may share with peerd "
                             "(--arena-limit); 0: no limit")),
        scratch(
            AddGauge(r, "longhaul_peerd_scratch_bytes", "Scratch memory that ops in flight hold")),
        scratch_limit(AddGauge(r, "longhaul_peerd_scratch_limit_bytes",
                               "The most scratch memory that all ops in flight may hold "
                               "(--scratch-limit)")),
        op_age(AddGauge(r, "longhaul_peerd_op_age_seconds",
                        "Time since an op of a local member last ended well; since the start of "
                        "peerd if none has")),
        step_age(AddGauge(r, "longhaul_peerd_step_age_seconds",
                          "Time since a local member last passed a step boundary; since the start "
                          "of peerd if none has")),
        revision(AddGauge(r, "longhaul_peerd_revision",
                          "Revision of the shared state that a local member last had in common "
                          "with its group")),
        time(AddGauge(r, "longhaul_peerd_time_seconds",
                      "This host's clock: seconds since 1970 when the page was made")),
        build_info(BuildGauge()
                       .Name("longhaul_peerd_build_info")
                       .Help("1; the version is in the label")
                       .Register(r)
                       .Add({{"version", kVersion}})),
        links(AddGauge(r, "longhaul_peerd_links", "Links to other peers that are up")),
        lanes(AddGauge(r, "longhaul_peerd_lanes", "Connections of these links")),
        lanes_used(AddGauge(r, "longhaul_peerd_lanes_used",
                            "Connections on which tensors are sent; all, unless --lanes=auto "
                            "found that fewer carry as much")),
        coordinator(AddGauge(r, "longhaul_peerd_coordinator_up",
                             "1 while the stream to the coordinator stands")),
        on_epoll(AddGauge(r, "longhaul_peerd_on_epoll",
                          "1 if epoll moves the bytes, because io_uring was refused or not wanted; "
                          "0 if io_uring does")),
        op_outcomes(AddCounters(CounterFamily(r, "longhaul_peerd_ops_total",
                                              "Ops of local members that ended, by outcome"),
                                "outcome", kOutcomeLabels)),
        op_algorithms(AddCounters(
            CounterFamily(r, "longhaul_peerd_ops_done_total",
                          "Ops of local members that ended well, by the way their bytes went"),
            "algorithm", AlgorithmLabels())),
        op_seconds(BuildHistogram()
                       .Name("longhaul_peerd_op_seconds")
                       .Help("From post to outcome of ops that ended well")
                       .Register(r)
                       .Add({}, OpBounds())),
        op_phases(
            BuildHistogram()
                .Name("longhaul_peerd_op_phase_seconds")
                .Help(
                    "Parts of the time of ops that ended well: until all peers had started the op "
                    "(wait), from there until the result was here (transfer), and until the "
                    "trainer had its answer (commit). Inputs of small ops travel in the phase "
                    "wait")
                .Register(r)),
        op_wait(op_phases.Add({{"phase", "wait"}}, OpBounds())),
        op_transfer(op_phases.Add({{"phase", "transfer"}}, OpBounds())),
        op_commit(op_phases.Add({{"phase", "commit"}}, OpBounds())),
        fault_seconds(
            BuildHistogram()
                .Name("longhaul_peerd_fault_seconds")
                .Help("Of each fault: from the freeze of the ops to the agreement on them "
                      "(agree), from there to the end of the first op that was redone "
                      "(resume)")
                .Register(r)),
        fault_agree(AddFaultPhase(fault_seconds, "agree")),
        fault_resume(AddFaultPhase(fault_seconds, "resume")),
        state_hash_seconds(BuildHistogram()
                               .Name("longhaul_peerd_state_hash_seconds")
                               .Help("Time to hash what may have changed of a state, of each sync")
                               .Register(r)
                               .Add({}, Histogram::BucketBoundaries{1e-4, 1e-3, 1e-2, 0.1, 0.3, 1,
                                                                    3, 10, 30, 100})),
        state_kept(
            AddGauge(r, "longhaul_peerd_state_kept_bytes",
                     "Memory of the states kept for members that are here or may come back")),
        tunnels(AddGauge(r, "longhaul_peerd_tunnels",
                         "Lanes carried for pairs of peers that cannot reach each other")),
        mesh_share(AddGauge(r, "longhaul_peerd_mesh_share",
                            "The part of a tensor that this peer owns in the mesh, from 0 to 1; of "
                            "its groups, the largest")),
        host_up(AddGauge(r, "longhaul_peerd_host_up_bytes_per_second",
                         "The most that this host was lately seen to send in all, over all its "
                         "links together; 0: not measured yet")),
        host_down(AddGauge(r, "longhaul_peerd_host_down_bytes_per_second",
                           "The most that this host was lately seen to receive in all; 0: not "
                           "measured yet")),
        pace(
            AddGauge(r, "longhaul_peerd_pace_bytes_per_second",
                     "What this host sends at most in all on long ways, so that the queue in front "
                     "of its access link stays short; 0: no limit")),
        link_rates(GaugeFamily(r, "longhaul_peerd_link_bytes_per_second",
                               "What the slowest measured links can carry, at most 4 of them, away "
                               "from this peer; a lower bound while ops send little")),
        link_rtts(GaugeFamily(r, "longhaul_peerd_link_rtt_seconds",
                              "The shortest recent round trip on these links")),
        link_repeated(CounterFamily(r, "longhaul_peerd_link_repeated_bytes_total",
                                    "Bytes that TCP sent again on these links")) {
    prometheus::Family<Counter>& family =
        CounterFamily(r, "longhaul_peerd_cpu_seconds_total",
                      "Processor time by part of the program: sockets, sums and decisions "
                      "(reactor), hashing and copying of states (hash), the stream to the "
                      "coordinator (control), giving memory back (unmap), this page (http), gRPC "
                      "and the rest (other)");
    for (const std::string& part : CpuParts()) cpu.emplace_back(family.Add({{"component", part}}));
    cpu.emplace_back(family.Add({{"component", "other"}}));
    build_info.Set(1);
  }

  void ShowLinks(std::vector<LinkSample> links);

  Gauge& members;
  Gauge& ops_open;
  Gauge& clients;
  Gauge& arena;
  Gauge& arena_limit;
  Gauge& scratch;
  Gauge& scratch_limit;
  Gauge& op_age;
  Gauge& step_age;
  Gauge& revision;
  Gauge& time;
  Gauge& build_info;
  Gauge& links;
  Gauge& lanes;
  Gauge& lanes_used;
  Gauge& coordinator;
  Gauge& on_epoll;
  std::array<Counter*, kOutcomes> op_outcomes;
  std::array<Counter*, kAlgorithms.size()> op_algorithms;
  Histogram& op_seconds;
  prometheus::Family<Histogram>& op_phases;
  Histogram& op_wait;
  Histogram& op_transfer;
  Histogram& op_commit;
  prometheus::Family<Histogram>& fault_seconds;
  Histogram& fault_agree;
  Histogram& fault_resume;
  Histogram& state_hash_seconds;
  Gauge& state_kept;
  Gauge& tunnels;
  Gauge& mesh_share;
  Gauge& host_up;
  Gauge& host_down;
  Gauge& pace;
  prometheus::Family<Gauge>& link_rates;
  prometheus::Family<Gauge>& link_rtts;
  prometheus::Family<Counter>& link_repeated;
  std::map<PeerId, LinkSeries> link_series;
  std::vector<Follower> cpu;                                          // as CpuSeconds(CpuParts())
  std::map<std::pair<std::string, std::string>, Follower> followers;  // by name and reason
  std::shared_ptr<prometheus::Registry> registry;
};

PeerMetrics::PeerMetrics(std::function<void()> wake) : wake_(std::move(wake)) {
  auto registry = std::make_shared<prometheus::Registry>();
  impl_ = std::make_unique<Impl>(*registry);
  impl_->registry = std::move(registry);
}

PeerMetrics::~PeerMetrics() = default;

std::string PeerMetrics::Text(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  const uint64_t ask = ++asked_;
  wake_();
  {
    MutexLock lock(&mutex_);
    while (published_ < ask && std::chrono::steady_clock::now() < deadline) {
      answered_.WaitFor(&mutex_, deadline - std::chrono::steady_clock::now());
    }
  }
  // Only the HTTP server's thread comes here, so nobody else follows these.
  const std::vector<double> cpu = CpuSeconds(CpuParts());
  for (size_t i = 0; i < cpu.size(); ++i) impl_->cpu[i].Follow(cpu[i]);
  impl_->time.SetToCurrentTime();
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

void PeerMetrics::Publish(const PeerSnapshot& s) {
  // A Text() that asks after this line waits for the next Publish().
  const uint64_t answers = asked_;
  Impl& m = *impl_;
  if (last_op_ == kNever) last_op_ = s.now;
  if (last_step_ == kNever) last_step_ = s.now;
  m.op_age.Set(SecondsOf(s.now - last_op_));
  m.step_age.Set(SecondsOf(s.now - last_step_));
  m.members.Set(s.core.members);
  m.ops_open.Set(s.core.ops_open);
  m.clients.Set(s.clients);
  m.arena.Set(static_cast<double>(s.arena_bytes));
  m.arena_limit.Set(static_cast<double>(s.arena_limit));
  m.scratch.Set(static_cast<double>(s.scratch_bytes));
  m.scratch_limit.Set(static_cast<double>(s.scratch_limit));
  m.links.Set(s.transport.links_up);
  m.lanes.Set(s.transport.lanes_up);
  m.lanes_used.Set(s.transport.lanes_used);
  m.coordinator.Set(s.coordinator_up ? 1 : 0);
  m.on_epoll.Set(s.on_epoll ? 1 : 0);
  m.state_kept.Set(static_cast<double>(s.state_bytes_kept));
  m.tunnels.Set(s.transport.tunnels);
  m.mesh_share.Set(s.core.mesh_share);
  m.pace.Set(static_cast<double>(s.transport.pace));
  m.host_up.Set(static_cast<double>(s.host_up));
  m.host_down.Set(static_cast<double>(s.host_down));
  m.ShowLinks(s.links);
  std::map<std::pair<std::string, std::string>, CounterTotal> totals;  // by name and reason
  for (const CounterTotal& part : s.totals) {
    totals.try_emplace({part.name, part.reason}, CounterTotal{part.name, part.help, 0, part.reason})
        .first->second.total += part.total;
  }
  for (const auto& [key, counter] : totals) {
    m.followers.try_emplace(key, *m.registry, counter.name, counter.help, counter.reason)
        .first->second.Follow(static_cast<double>(counter.total));
  }
  MutexLock lock(&mutex_);
  published_ = answers;
  answered_.SignalAll();
}

void PeerMetrics::Impl::ShowLinks(std::vector<LinkSample> samples) {
  std::erase_if(samples, [](const LinkSample& link) { return link.bytes_per_second == 0; });
  std::sort(samples.begin(), samples.end(), [](const LinkSample& a, const LinkSample& b) {
    return std::pair(a.bytes_per_second, a.peer) < std::pair(b.bytes_per_second, b.peer);
  });
  if (samples.size() > kLinksShownMax) samples.resize(kLinksShownMax);
  std::set<PeerId> shown;
  for (const LinkSample& link : samples) shown.insert(link.peer);
  std::erase_if(link_series, [&](const auto& entry) {
    if (shown.contains(entry.first)) return false;
    link_rates.Remove(entry.second.rate);
    link_rtts.Remove(entry.second.rtt);
    link_repeated.Remove(entry.second.repeated);
    return true;
  });
  for (const LinkSample& link : samples) {
    LinkSeries& series = link_series[link.peer];
    if (series.rate == nullptr) {
      const std::map<std::string, std::string> label = {{"peer", ToString(link.peer)}};
      series = {&link_rates.Add(label), &link_rtts.Add(label), &link_repeated.Add(label)};
    }
    series.rate->Set(static_cast<double>(link.bytes_per_second));
    series.rtt->Set(SecondsOf(link.rtt_us));
    Follower(*series.repeated).Follow(static_cast<double>(link.bytes_repeated));
  }
}

void PeerMetrics::ObserveOp(Code outcome, const OpInfo& info, Tick now) {
  impl_->op_outcomes[IndexOf(outcome)]->Increment();
  if (outcome != Code::kOk) return;
  last_op_ = now;
  for (size_t i = 0; i < kAlgorithms.size(); ++i) {
    if (kAlgorithms[i] == info.algorithm) impl_->op_algorithms[i]->Increment();
  }
  impl_->op_seconds.Observe(SecondsOf(info.total_us));
  impl_->op_wait.Observe(SecondsOf(info.wait_us));
  impl_->op_transfer.Observe(SecondsOf(info.transfer_us));
  impl_->op_commit.Observe(
      SecondsOf(std::max<int64_t>(0, info.total_us - info.wait_us - info.transfer_us)));
}

void PeerMetrics::ObserveSync(uint64_t revision) {
  impl_->revision.Set(static_cast<double>(revision));
}

void PeerMetrics::ObserveFault(const FaultOver& fault) {
  impl_->fault_agree.Observe(SecondsOf(fault.agree_us));
  if (fault.resume_us < 0) return;
  impl_->fault_resume.Observe(SecondsOf(fault.resume_us));
}

void PeerMetrics::ObserveStateHash(int64_t us) { impl_->state_hash_seconds.Observe(SecondsOf(us)); }

}  // namespace longhaul::peerd
