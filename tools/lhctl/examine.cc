#include "tools/lhctl/examine.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/daemon/host_port.h"
#include "peerd/io/ring.h"
#include "tools/lhctl/admin_client.h"

namespace longhaul {
namespace {

constexpr std::chrono::milliseconds kPatience{3000};
// As the daemon has it.
constexpr unsigned kRingEntries = 4096;
constexpr char kDefaultCoordinator[] = "127.0.0.1:29600";
constexpr size_t kMembersTriedMax = 256;

int64_t WallTimeUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The address at which this host itself reaches a listener.
std::string Local(const std::string& listen) {
  auto address = ParseHostPort(listen);
  if (!address.ok()) return listen;
  if (address->host == "0.0.0.0") address->host = "127.0.0.1";
  if (address->host == "::") address->host = "::1";
  return ToString(*address);
}

// The value of a gauge without labels on a page of metrics.
std::optional<bool> Gauge(const std::string& page, const std::string& name) {
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    if (line == name + " 1") return true;
    if (line == name + " 0") return false;
  }
  return std::nullopt;
}

void ExaminePeerd(Symptoms* s) {
  const PeerdFacts& peerd = s->host.peerd;
  if (peerd.pid == 0) {
    const auto listen = ParseHostPort(peerd.listen);
    const absl::Status free = !listen.ok()        ? listen.status()
                              : listen->port == 0 ? absl::OkStatus()
                                                  : TryListening(*listen, "peerd", "--listen");
    s->listen_error = std::string(free.message());
    return;
  }
  s->data_port = TryConnecting({Local(peerd.listen)}, kPatience)[0];
  if (peerd.http.empty()) return;
  s->readyz = GetPage(Local(peerd.http), "/readyz", kPatience);
  if (!s->readyz) return;
  s->on_epoll = Gauge(GetPage(Local(peerd.http), "/metrics", kPatience).value_or(""),
                      "longhaul_peerd_on_epoll");
}

// Asks an address for an overview. On success `*admin` has it.
absl::Status AskAdmin(const std::string& address, const ExamineOptions& options,
                      std::optional<AdminSeen>* admin) {
  AdminClient client({address}, kPatience, options.tls, options.token_file);
  const int64_t before = WallTimeUs();
  const auto overview = client.GetOverview({});
  const int64_t after = WallTimeUs();
  if (!overview.ok()) return overview.status();
  admin->emplace();
  (*admin)->address = address;
  (*admin)->overview = *overview;
  if (overview->time_us() != 0) {
    (*admin)->clock_ahead_us = (before + after) / 2 - overview->time_us();
    (*admin)->clock_error_us = (after - before) / 2;
  }
  return absl::OkStatus();
}

// Finds out which of the operator's addresses are for operators and which for peers.
void ExamineAdmin(const ExamineOptions& options, Symptoms* s, std::vector<std::string>* for_peers) {
  std::vector<std::string> errors;
  s->admin_named = options.coordinators_named;
  for (const Reached& reached : TryConnecting(options.coordinators, kPatience)) {
    if (!reached.error.empty()) {
      errors.push_back(absl::StrCat(reached.address, ": ", reached.error));
      continue;
    }
    const absl::Status asked = AskAdmin(reached.address, options, &s->admin);
    if (asked.ok()) return;
    if (absl::IsFailedPrecondition(asked)) {
      // The operator has named the way of peerd. That is a way to use doctor, and no mistake.
      s->admin_named = false;
      if (std::find(for_peers->begin(), for_peers->end(), reached.address) == for_peers->end()) {
        for_peers->push_back(reached.address);
      }
      errors.push_back(absl::StrCat(reached.address, " is a port for peers"));
    } else {
      errors.push_back(absl::StrCat(reached.address, ": ", std::string(asked.message())));
    }
  }
  s->admin_error = "no coordinator's port for operators answers";
  for (size_t i = 0; i < errors.size(); ++i) {
    absl::StrAppend(&s->admin_error, i == 0 ? " (" : "; ", errors[i],
                    i + 1 == errors.size() ? ")" : "");
  }
}

void ExamineCoordinators(const std::vector<std::string>& addresses, std::shared_ptr<tls::Files> tls,
                         Symptoms* s) {
  if (const std::string& ca = s->host.peerd.tls_ca; tls == nullptr && !ca.empty()) {
    if (auto files = tls::Files::Open({.ca = ca}); files.ok()) tls = *std::move(files);
  }
  for (Reached& reached : TryConnecting(addresses, kPatience)) {
    CoordinatorSeen& seen = s->coordinators.emplace_back();
    seen.reached = std::move(reached);
    if (!seen.reached.error.empty()) continue;
    const absl::Status asked =
        AdminClient({seen.reached.address}, kPatience, tls).ListRuns().status();
    if (asked.ok()) {
      seen.answer = CoordinatorSeen::Answer::kAdmin;
    } else if (absl::IsFailedPrecondition(asked)) {
      seen.answer = CoordinatorSeen::Answer::kPeers;
    }
  }
}

void ExamineMembers(Symptoms* s) {
  if (!s->admin) return;
  std::set<std::string> endpoints;
  std::set<std::string> loopback;
  for (const v1::GroupStatus& group : s->admin->overview.groups()) {
    for (const v1::PeerStatus& peer : group.ring()) {
      if (!peer.attached() || peer.endpoint().empty() || IsThisHost(s->host, peer)) continue;
      if (endpoints.size() == kMembersTriedMax) continue;
      const auto address = ParseHostPort(peer.endpoint());
      if (address.ok() && IsLoopback(*address) && peer.host() != s->host.hostname) {
        loopback.insert(peer.endpoint());  // here it is another peer's, or nobody's
      } else {
        endpoints.insert(peer.endpoint());
      }
    }
  }
  s->members = TryConnecting({endpoints.begin(), endpoints.end()}, kPatience);
  for (const std::string& endpoint : loopback) {
    s->members.push_back({.address = endpoint, .error = "only its own host reaches this address"});
  }
}

}  // namespace

Symptoms Examine(const ExamineOptions& options) {
  Symptoms s;
  s.host = ReadHost(options.places, options.choice);
  s.uring_error = std::string(peerd::MakeUringRing(kRingEntries).status().message());
  ExaminePeerd(&s);
  std::vector<std::string> for_peers = s.host.peerd.coordinators;
  if (for_peers.empty() && !s.host.peerd.source.empty()) for_peers.push_back(kDefaultCoordinator);
  ExamineAdmin(options, &s, &for_peers);
  ExamineCoordinators(for_peers, options.tls, &s);
  ExamineMembers(&s);
  return s;
}

}  // namespace longhaul
