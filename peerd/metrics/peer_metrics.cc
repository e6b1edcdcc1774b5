#include "peerd/metrics/peer_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <map>
#include <utility>

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
  Follower(prometheus::Registry& registry, const char* name, const char* help)
      : counter_(BuildCounter().Name(name).Help(help).Register(registry).Add({})) {}
  void Follow(uint64_t total) { counter_.Increment(static_cast<double>(total) - counter_.Value()); }

 private:
  Counter& counter_;
};

// The buckets cover both ends: a link that was reset (milliseconds), and a coordinator that had to
// be started again first (seconds).
Histogram& AddFaultPhase(prometheus::Family<Histogram>& family, const char* phase) {
  return family.Add({{"phase", phase}}, Histogram::BucketBoundaries{0.005, 0.01, 0.02, 0.05, 0.1,
                                                                    0.2, 0.5, 1, 2, 5, 10, 30});
}

const char* OutcomeLabel(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kAborted:
      return "aborted";
    case Code::kInvalidArgument:
    case Code::kTooFewMembers:
      return "refused";
    default:
      return "failed";
  }
}

}  // namespace

struct PeerMetrics::Impl {
  explicit Impl(prometheus::Registry& r)
      : members(AddGauge(r, "longhaul_peerd_members", "Local members, pending or admitted")),
        ops_open(
            AddGauge(r, "longhaul_peerd_ops_open", "Ops announced or waiting for local members")),
        clients(AddGauge(r, "longhaul_peerd_clients", "Connections on the Unix socket")),
        arena(AddGauge(r, "longhaul_peerd_arena_bytes", "Memory shared with trainers")),
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
        op_outcomes(BuildCounter()
                        .Name("longhaul_peerd_ops_total")
                        .Help("Ops of local members that ended, by outcome")
                        .Register(r)),
        op_algorithms(BuildCounter()
                          .Name("longhaul_peerd_ops_done_total")
                          .Help("Ops of local members that ended well, by the way their bytes went")
                          .Register(r)),
        op_seconds(BuildHistogram()
                       .Name("longhaul_peerd_op_seconds")
                       .Help("From post to outcome of ops that ended well")
                       .Register(r)
                       .Add({}, Histogram::BucketBoundaries{1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1,
                                                            0.3, 1, 3, 10, 30, 100})),
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
                         "Lanes carried for pairs of peers that cannot reach each other")) {}

  Gauge& members;
  Gauge& ops_open;
  Gauge& clients;
  Gauge& arena;
  Gauge& links;
  Gauge& lanes;
  Gauge& lanes_used;
  Gauge& coordinator;
  Gauge& on_epoll;
  prometheus::Family<Counter>& op_outcomes;
  prometheus::Family<Counter>& op_algorithms;
  Histogram& op_seconds;
  prometheus::Family<Histogram>& fault_seconds;
  Histogram& fault_agree;
  Histogram& fault_resume;
  Histogram& state_hash_seconds;
  Gauge& state_kept;
  Gauge& tunnels;
  std::map<std::string, Follower> followers;  // by name
  std::shared_ptr<prometheus::Registry> registry;
};

PeerMetrics::PeerMetrics(std::function<void()> wake) : wake_(std::move(wake)) {
  auto registry = std::make_shared<prometheus::Registry>();
  impl_ = std::make_unique<Impl>(*registry);
  impl_->registry = std::move(registry);
  // Show these series as 0 from the start, so that the first event already counts in a rate.
  for (const Code code : {Code::kOk, Code::kAborted, Code::kInvalidArgument, Code::kUnavailable}) {
    impl_->op_outcomes.Add({{"outcome", OutcomeLabel(code)}});
  }
  for (const Algorithm algorithm :
       {Algorithm::kOneShot, Algorithm::kMesh, Algorithm::kRing, Algorithm::kLocal}) {
    impl_->op_algorithms.Add({{"algorithm", Name(algorithm)}});
  }
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
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

void PeerMetrics::Publish(const PeerSnapshot& s) {
  // A Text() that asks after this line waits for the next Publish().
  const uint64_t answers = asked_;
  Impl& m = *impl_;
  m.members.Set(s.core.members);
  m.ops_open.Set(s.core.ops_open);
  m.clients.Set(s.clients);
  m.arena.Set(static_cast<double>(s.arena_bytes));
  m.links.Set(s.transport.links_up);
  m.lanes.Set(s.transport.lanes_up);
  m.lanes_used.Set(s.transport.lanes_used);
  m.coordinator.Set(s.coordinator_up ? 1 : 0);
  m.on_epoll.Set(s.on_epoll ? 1 : 0);
  m.state_kept.Set(static_cast<double>(s.state_bytes_kept));
  m.tunnels.Set(s.transport.tunnels);
  std::map<std::string, CounterTotal> totals;
  for (const CounterTotal& part : s.totals) {
    totals.try_emplace(part.name, CounterTotal{part.name, part.help}).first->second.total +=
        part.total;
  }
  for (const auto& [name, counter] : totals) {
    m.followers.try_emplace(name, *m.registry, counter.name, counter.help)
        .first->second.Follow(counter.total);
  }
  MutexLock lock(&mutex_);
  published_ = answers;
  answered_.SignalAll();
}

void PeerMetrics::ObserveOp(Code outcome, const OpInfo& info) {
  impl_->op_outcomes.Add({{"outcome", OutcomeLabel(outcome)}}).Increment();
  if (outcome != Code::kOk) return;
  impl_->op_algorithms.Add({{"algorithm", Name(info.algorithm)}}).Increment();
  impl_->op_seconds.Observe(static_cast<double>(info.total_us) * 1e-6);
}

void PeerMetrics::ObserveFault(const FaultOver& fault) {
  impl_->fault_agree.Observe(static_cast<double>(fault.agree_us) * 1e-6);
  if (fault.resume_us < 0) return;
  impl_->fault_resume.Observe(static_cast<double>(fault.resume_us) * 1e-6);
}

void PeerMetrics::ObserveStateHash(int64_t us) {
  impl_->state_hash_seconds.Observe(static_cast<double>(us) * 1e-6);
}

}  // namespace longhaul::peerd
