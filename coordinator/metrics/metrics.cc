#include "coordinator/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/cpu_time.h"
#include "base/daemon/version.h"

namespace longhaul::coordinator {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;

Counter& MakeCounter(Registry& registry, const char* name, const char* help) {
  return BuildCounter().Name(name).Help(help).Register(registry).Add({});
}
Gauge& MakeGauge(Registry& registry, const char* name, const char* help) {
  return BuildGauge().Name(name).Help(help).Register(registry).Add({});
}
Histogram& MakeHistogram(Registry& registry, const char* name, const char* help,
                         const Histogram::BucketBoundaries& bounds) {
  return BuildHistogram().Name(name).Help(help).Register(registry).Add({}, bounds);
}

Family<Gauge>& MakeGauges(Registry& registry, const char* name, const char* help) {
  return BuildGauge().Name(name).Help(help).Register(registry);
}

// The causes of FaultRecord.
constexpr std::array kCauses = {"leave",  "trainer_died", "peer_died", "silence",
                                "reset",  "unreachable",  "evict",     "step_deadline",
                                "cohort", "restart",      "cancel",    "dispute"};

// The reasons of TokenRefusal.
constexpr std::array kRefusals = {"missing",     "malformed", "unknown", "expired", "revoked",
                                  "certificate", "role",      "run",     "quota"};

// Why certificates are refused: what tls::RefusalName() gives.
constexpr std::array kCertificateReasons = {"malformed", "untrusted", "expired", "revoked"};

const std::vector<std::string>& CpuParts() {
  static const auto& parts = *new std::vector<std::string>{"loop", "ring", "http"};
  return parts;
}

double SecondsOf(int64_t us) { return static_cast<double>(us) * 1e-6; }

// Gauges of things that come and go, several of each thing. A series is made when its thing is
// first shown, and removed when the thing is not shown any more.
template <class Key, size_t kGauges>
class GaugeTable {
 public:
  using Labels = std::map<std::string, std::string>;
  explicit GaugeTable(std::array<Family<Gauge>*, kGauges> families) : families_(families) {}

  void Set(const Key& key, const Labels& labels, const std::array<double, kGauges>& values) {
    Row& row = rows_[key];
    row.seen = true;
    for (size_t i = 0; i < kGauges; ++i) {
      if (row.gauges[i] == nullptr) row.gauges[i] = &families_[i]->Add(labels);
      row.gauges[i]->Set(values[i]);
    }
  }
  // Removes what was not set since the last call.
  void Sweep() {
    for (auto it = rows_.begin(); it != rows_.end();) {
      Row& row = it->second;
      if (std::exchange(row.seen, false)) {
        ++it;
        continue;
      }
      for (size_t i = 0; i < kGauges; ++i) families_[i]->Remove(row.gauges[i]);
      it = rows_.erase(it);
    }
  }

 private:
  struct Row {
    std::array<Gauge*, kGauges> gauges{};
    bool seen = false;
  };
  std::array<Family<Gauge>*, kGauges> families_;
  std::map<Key, Row> rows_;
};

}  // namespace

// All metrics but those of groups and links exist from the start, with the value 0: if a series
// appears late, rate() misses its first increase. Names and labels are fixed, so building them
// cannot throw.
struct CoordinatorMetrics::Impl {
  Registry registry;

  Gauge& build_info = BuildGauge()
                          .Name("longhaul_coordinator_build_info")
                          .Help("1; the version is in the label")
                          .Register(registry)
                          .Add({{"version", kVersion}});
  Gauge& runs = MakeGauge(registry, "longhaul_coordinator_runs", "Runs that the coordinator knows");
  Gauge& groups =
      MakeGauge(registry, "longhaul_coordinator_groups", "Groups that the coordinator knows");
  Gauge& members = MakeGauge(registry, "longhaul_coordinator_members", "Admitted members");
  Gauge& pending = MakeGauge(registry, "longhaul_coordinator_members_pending",
                             "Members that wait for admission");
  Gauge& preparing = MakeGauge(registry, "longhaul_coordinator_groups_preparing",
                               "Groups that are preparing an epoch");
  Gauge& streams =
      MakeGauge(registry, "longhaul_coordinator_streams", "Control streams of peers that are open");

  Gauge& streams_without_hello =
      MakeGauge(registry, "longhaul_coordinator_streams_without_hello",
                "Control streams on which the peer has not said Hello yet; at most 256");

  prometheus::Family<Counter>& epochs = BuildCounter()
                                            .Name("longhaul_coordinator_epochs_total")
                                            .Help("Committed epochs, by what made them necessary")
                                            .Register(registry);
  Counter& epochs_admit = epochs.Add({{"cause", "admit"}});
  Counter& epochs_removal = epochs.Add({{"cause", "removal"}});
  Counter& epochs_repair = epochs.Add({{"cause", "repair"}});
  Counter& epochs_ring = epochs.Add({{"cause", "ring"}});
  Counter& preparations_aborted =
      MakeCounter(registry, "longhaul_coordinator_preparations_aborted_total",
                  "Preparations of an epoch that ended without the epoch");
  Counter& votes =
      MakeCounter(registry, "longhaul_coordinator_votes_total", "Votes at step boundaries");
  prometheus::Family<Counter>& syncs =
      BuildCounter()
          .Name("longhaul_coordinator_syncs_total")
          .Help(
              "Syncs of shared state, by outcome; refused counts members that a sync refused, not "
              "syncs")
          .Register(registry);
  Counter& syncs_committed = syncs.Add({{"outcome", "committed"}});
  Counter& syncs_failed = syncs.Add({{"outcome", "failed"}});
  Counter& syncs_refused = syncs.Add({{"outcome", "refused"}});
  Counter& sync_bytes = MakeCounter(registry, "longhaul_coordinator_sync_bytes_total",
                                    "Bytes received by members that had to fetch the state");
  Counter& states_corrupt =
      MakeCounter(registry, "longhaul_coordinator_states_corrupt_total",
                  "Reports that a member served other bytes of the state than it had announced");
  Family<Counter>& removed =
      BuildCounter()
          .Name("longhaul_coordinator_members_removed_total")
          .Help("Members removed from their groups, by cause; leave: by their own wish, or drained")
          .Register(registry);
  std::map<std::string, Counter*> removals = [this] {
    std::map<std::string, Counter*> counters;
    for (const char* cause : kCauses) counters[cause] = &removed.Add({{"cause", cause}});
    return counters;
  }();
  Counter& removals_other = removed.Add({{"cause", "other"}});
  Counter& streams_opened =
      MakeCounter(registry, "longhaul_coordinator_streams_opened_total", "Control streams opened");
  Counter& refused =
      MakeCounter(registry, "longhaul_coordinator_messages_refused_total",
                  "Messages that broke the protocol, and streams that were turned away");

  Counter& strangers_refused =
      MakeCounter(registry, "longhaul_coordinator_strangers_refused_total",
                  "Streams that named a peer and did not prove that they have its key");
  Counter& joins_refused =
      MakeCounter(registry, "longhaul_coordinator_joins_refused_total",
                  "Joins that were refused; lhctl events says why (kind refuse)");

  Family<Counter>& callers =
      BuildCounter()
          .Name("longhaul_coordinator_callers_refused_total")
          .Help(
              "Calls and joins that were refused, and streams that were ended, because of the "
              "caller's join token or certificate, or for want of one, by reason")
          .Register(registry);
  std::map<std::string, Counter*> callers_refused = [this] {
    std::map<std::string, Counter*> counters;
    for (const char* reason : kRefusals) counters[reason] = &callers.Add({{"reason", reason}});
    return counters;
  }();

  Family<Counter>& certificates_refused =
      BuildCounter()
          .Name("longhaul_coordinator_certificates_refused_total")
          .Help("Calls refused for the caller's certificate, by reason")
          .Register(registry);
  std::map<std::string, Counter*> certificate_reasons = [this] {
    std::map<std::string, Counter*> counters;
    for (const char* reason : kCertificateReasons) {
      counters[reason] = &certificates_refused.Add({{"reason", reason}});
    }
    return counters;
  }();
  Family<Counter>& tls_files =
      BuildCounter()
          .Name("longhaul_coordinator_tls_files_total")
          .Help(
              "New contents of the TLS files: good, in use now; broken, the last good stay in use")
          .Register(registry);
  Counter& tls_files_good = tls_files.Add({{"outcome", "good"}});
  Counter& tls_files_broken = tls_files.Add({{"outcome", "broken"}});
  Gauge& tls_files_refused = MakeGauge(
      registry, "longhaul_coordinator_tls_files_refused",
      "1: the TLS files hold contents that are refused, and the last good ones are in use");

  Histogram& preparation =
      MakeHistogram(registry, "longhaul_coordinator_preparation_seconds",
                    "Time from the first PrepareEpoch of a change to its CommitEpoch",
                    {0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30});
  prometheus::Family<Histogram>& fault =
      BuildHistogram()
          .Name("longhaul_coordinator_fault_seconds")
          .Help(
              "For each epoch that froze ops: the silence before the first report of the fault "
              "(detect), and the time from there to the commit (agree)")
          .Register(registry);
  const Histogram::BucketBoundaries fault_bounds = {0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2,
                                                    0.5,   1,     1.5,  2,    3,    5,   10};
  Histogram& fault_detect = fault.Add({{"phase", "detect"}}, fault_bounds);
  Histogram& fault_agree = fault.Add({{"phase", "agree"}}, fault_bounds);
  Histogram& sync = MakeHistogram(registry, "longhaul_coordinator_sync_seconds",
                                  "Time from the first vote for a sync to its commit",
                                  {0.002, 0.01, 0.05, 0.2, 1, 5, 20, 60, 300, 1800});
  Histogram& store_write =
      MakeHistogram(registry, "longhaul_coordinator_store_write_seconds",
                    "Time of one durable transaction of the store",
                    {0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 2});
  Histogram& step = MakeHistogram(registry, "longhaul_coordinator_step_seconds",
                                  "Time to handle one event of the core with all its actions",
                                  {0.00001, 0.00005, 0.0002, 0.001, 0.005, 0.02, 0.1, 0.5, 2});

  Gauge& queue = MakeGauge(registry, "longhaul_coordinator_loop_queue",
                           "Messages, streams and requests that wait for the coordinator's loop");
  Histogram& loop_lag =
      MakeHistogram(registry, "longhaul_coordinator_loop_lag_seconds",
                    "Time that a message, a stream or a request waited for the coordinator's loop",
                    {0.00001, 0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1, 5});
  Gauge& ballot_wait = MakeGauge(
      registry, "longhaul_coordinator_ballot_wait_seconds",
      "Time since the first vote of the oldest ballot that is not decided; 0: none waits");
  Gauge& blocked = MakeGauge(registry, "longhaul_coordinator_pairs_blocked",
                             "Pairs of members' hosts without a path to each other, of all groups");
  Gauge& time = MakeGauge(registry, "longhaul_coordinator_time_seconds",
                          "This host's clock: seconds since 1970 when the page was made");
  std::vector<Counter*> cpu = [this] {
    Family<Counter>& family =
        BuildCounter()
            .Name("longhaul_coordinator_cpu_seconds_total")
            .Help(
                "Processor time by part of the program: decisions and the store (loop), orders of "
                "rings (ring), this page (http), gRPC and the rest (other)")
            .Register(registry);
    std::vector<Counter*> counters;
    for (const std::string& part : CpuParts())
      counters.push_back(&family.Add({{"component", part}}));
    counters.push_back(&family.Add({{"component", "other"}}));
    return counters;
  }();

  // Only SetOverview() uses these.
  GaugeTable<GroupKey, 5> shown_groups{
      {&MakeGauges(registry, "longhaul_coordinator_group_members",
                   "Admitted members of a group; at most 64 groups are shown"),
       &MakeGauges(registry, "longhaul_coordinator_group_epoch", "The committed epoch of a group"),
       &MakeGauges(registry, "longhaul_coordinator_group_revision",
                   "Revision of the shared state that a group agreed on last; 0: none"),
       &MakeGauges(registry, "longhaul_coordinator_group_ballot_wait_seconds",
                   "Time since the first vote of a group's open ballot; 0: no vote came yet"),
       &MakeGauges(registry, "longhaul_coordinator_group_step_age_seconds",
                   "Time since a group's last step boundary; since this page first showed the "
                   "group if there was none")}};
  GaugeTable<std::tuple<GroupKey, PeerId, PeerId>, 2> shown_links{
      {&MakeGauges(registry, "longhaul_coordinator_ring_link_bytes_per_second",
                   "What the slowest links of rings can carry from one peer to the next one; at "
                   "most 8 links are shown"),
       &MakeGauges(registry, "longhaul_coordinator_ring_link_rtt_seconds",
                   "The round trip of these links")}};
  std::map<GroupKey, Tick> first_shown;
};

CoordinatorMetrics::CoordinatorMetrics() : impl_(std::make_unique<Impl>()) {
  impl_->build_info.Set(1);
}
CoordinatorMetrics::~CoordinatorMetrics() = default;

void CoordinatorMetrics::OnEpochCommitted(EpochCause cause) {
  switch (cause) {
    case EpochCause::kAdmit:
      return impl_->epochs_admit.Increment();
    case EpochCause::kRemoval:
      return impl_->epochs_removal.Increment();
    case EpochCause::kRepair:
      return impl_->epochs_repair.Increment();
    case EpochCause::kRing:
      return impl_->epochs_ring.Increment();
  }
}
void CoordinatorMetrics::OnPreparation(std::chrono::duration<double> took) {
  impl_->preparation.Observe(took.count());
}
void CoordinatorMetrics::OnFault(std::chrono::duration<double> detect,
                                 std::chrono::duration<double> agree) {
  impl_->fault_detect.Observe(detect.count());
  impl_->fault_agree.Observe(agree.count());
}
void CoordinatorMetrics::OnPreparationAborted() { impl_->preparations_aborted.Increment(); }
void CoordinatorMetrics::OnVote() { impl_->votes.Increment(); }
void CoordinatorMetrics::OnSync(std::chrono::duration<double> took, uint64_t bytes) {
  impl_->syncs_committed.Increment();
  impl_->sync.Observe(took.count());
  impl_->sync_bytes.Increment(static_cast<double>(bytes));
}
void CoordinatorMetrics::OnSyncFailed() { impl_->syncs_failed.Increment(); }
void CoordinatorMetrics::OnSyncRefused() { impl_->syncs_refused.Increment(); }
void CoordinatorMetrics::OnStateCorrupt() { impl_->states_corrupt.Increment(); }
void CoordinatorMetrics::OnRemoval(const std::string& cause) {
  const auto it = impl_->removals.find(cause);
  (it == impl_->removals.end() ? impl_->removals_other : *it->second).Increment();
}
void CoordinatorMetrics::OnStreamOpened() {
  impl_->streams_opened.Increment();
  impl_->streams.Increment();
}
void CoordinatorMetrics::OnStreamClosed() { impl_->streams.Decrement(); }
void CoordinatorMetrics::OnRefused() { impl_->refused.Increment(); }
void CoordinatorMetrics::OnStrangerRefused() { impl_->strangers_refused.Increment(); }
void CoordinatorMetrics::OnJoinRefused() { impl_->joins_refused.Increment(); }
void CoordinatorMetrics::OnCallerRefused(const std::string& reason) {
  const auto it = impl_->callers_refused.find(reason);
  if (it != impl_->callers_refused.end()) it->second->Increment();
}
void CoordinatorMetrics::OnCertificateRefused(const std::string& reason) {
  const auto it = impl_->certificate_reasons.find(reason);
  if (it != impl_->certificate_reasons.end()) it->second->Increment();
}
void CoordinatorMetrics::OnTlsFiles(bool good) {
  (good ? impl_->tls_files_good : impl_->tls_files_broken).Increment();
}
void CoordinatorMetrics::SetTlsFilesRefused(bool refused) {
  impl_->tls_files_refused.Set(refused ? 1 : 0);
}
void CoordinatorMetrics::SetStreamsWithoutHello(size_t count) {
  impl_->streams_without_hello.Set(static_cast<double>(count));
}
void CoordinatorMetrics::OnStoreWrite(std::chrono::duration<double> took) {
  impl_->store_write.Observe(took.count());
}
void CoordinatorMetrics::OnMail(std::chrono::duration<double> waited) {
  impl_->loop_lag.Observe(waited.count());
}
void CoordinatorMetrics::SetQueue(size_t mails) { impl_->queue.Set(static_cast<double>(mails)); }
void CoordinatorMetrics::OnStep(std::chrono::duration<double> took) {
  impl_->step.Observe(took.count());
}

namespace {

// The seconds since then; 0: never, or the clock was moved on since.
double Age(Tick then, Tick now) { return then >= now ? 0 : SecondsOf(now - then); }

}  // namespace

// A group without any boundary counts from when it was first shown.
void CoordinatorMetrics::ShowGroups(const Overview& overview, Impl* impl) {
  std::map<GroupKey, Tick> first_shown;
  for (size_t i = 0; i < std::min(overview.groups.size(), kGroupsShownMax); ++i) {
    const GroupView& group = overview.groups[i];
    const auto known = impl->first_shown.find(group.group);
    const Tick first = known == impl->first_shown.end() ? overview.now : known->second;
    first_shown.emplace(group.group, first);
    const auto admitted =
        std::count_if(group.members.begin(), group.members.end(),
                      [](const MemberView& member) { return static_cast<bool>(member.joined); });
    const Tick since = group.last_step == kNever ? first : group.last_step;
    impl->shown_groups.Set(
        group.group, {{"run", group.group.run}, {"group", std::to_string(group.group.group)}},
        {static_cast<double>(admitted), static_cast<double>(group.committed.value()),
         static_cast<double>(group.state ? group.state->revision : 0),
         Age(group.first_vote, overview.now), Age(since, overview.now)});
  }
  impl->shown_groups.Sweep();
  impl->first_shown = std::move(first_shown);
}

void CoordinatorMetrics::ShowLinks(const Overview& overview, Impl* impl) {
  struct Link {
    const GroupView* group = nullptr;
    const PeerView* from = nullptr;
    const PeerView* to = nullptr;
  };
  std::vector<Link> links;
  for (const GroupView& group : overview.groups) {
    for (size_t i = 0; i < group.ring.size(); ++i) {
      const PeerView& from = group.ring[i];
      if (!from.next || from.next->bytes_per_second == 0) continue;
      links.push_back({&group, &from, &group.ring[(i + 1) % group.ring.size()]});
    }
  }
  const auto rank = [](const Link& link) {
    return std::tuple(link.from->next->bytes_per_second, link.group->group, link.from->peer);
  };
  std::sort(links.begin(), links.end(),
            [&](const Link& a, const Link& b) { return rank(a) < rank(b); });
  if (links.size() > kLinksShownMax) links.resize(kLinksShownMax);
  for (const Link& link : links) {
    impl->shown_links.Set({link.group->group, link.from->peer, link.to->peer},
                          {{"run", link.group->group.run},
                           {"group", std::to_string(link.group->group.group)},
                           {"from", ToString(link.from->peer)},
                           {"from_host", link.from->host},
                           {"to", ToString(link.to->peer)},
                           {"to_host", link.to->host}},
                          {static_cast<double>(link.from->next->bytes_per_second),
                           SecondsOf(link.from->next->rtt_us)});
  }
  impl->shown_links.Sweep();
}

void CoordinatorMetrics::SetOverview(const Overview& overview) {
  std::set<std::string> runs;
  size_t members = 0;
  size_t pending = 0;
  size_t preparing = 0;
  size_t blocked = 0;
  double ballot_wait = 0;
  for (const GroupView& group : overview.groups) {
    blocked += group.blocked.size();
    ballot_wait = std::max(ballot_wait, Age(group.first_vote, overview.now));
    runs.insert(group.group.run);
    if (group.preparing) ++preparing;
    for (const MemberView& member : group.members) ++(member.joined ? members : pending);
  }
  impl_->runs.Set(static_cast<double>(runs.size()));
  impl_->groups.Set(static_cast<double>(overview.groups.size()));
  impl_->members.Set(static_cast<double>(members));
  impl_->pending.Set(static_cast<double>(pending));
  impl_->preparing.Set(static_cast<double>(preparing));
  impl_->blocked.Set(static_cast<double>(blocked));
  impl_->ballot_wait.Set(ballot_wait);
  ShowGroups(overview, impl_.get());
  ShowLinks(overview, impl_.get());
}

std::string CoordinatorMetrics::Text() const {
  const std::vector<double> seconds = CpuSeconds(CpuParts());
  for (size_t i = 0; i < seconds.size(); ++i) {
    // Two threads may be here: the one that comes too late adds nothing.
    impl_->cpu[i]->Increment(std::max(0.0, seconds[i] - impl_->cpu[i]->Value()));
  }
  impl_->time.SetToCurrentTime();
  return prometheus::TextSerializer().Serialize(impl_->registry.Collect());
}

}  // namespace longhaul::coordinator
