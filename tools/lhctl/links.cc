#include "tools/lhctl/links.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/lhctl/render.h"

namespace longhaul {
namespace {

using Direction = v1::GetLinksResponse::Direction;
using Rows = std::vector<std::vector<std::string>>;

std::string MegaBytes(uint64_t bytes_per_second) {
  if (bytes_per_second == 0) return "?";
  return absl::StrFormat("%.1f", static_cast<double>(bytes_per_second) / (1 << 20));
}

std::string MegaBytes(const v1::Link& link) {
  return MegaBytes(link.bytes_per_second()) + (link.at_least() ? "+" : "");
}

std::string RoundTrip(const v1::Link& link) {
  return link.rtt_us() == 0 ? "?" : absl::StrFormat("%.1f", link.rtt_us() / 1000.0);
}

// What is known of one group, by the names of peers.
struct Known {
  explicit Known(const v1::GetLinksResponse::Group& group) {
    for (const Direction& each : group.links()) links[{each.from(), each.to()}] = &each;
    for (const v1::BlockedStatus& pair : group.blocked()) {
      blocked.insert({pair.a(), pair.b()});
      blocked.insert({pair.b(), pair.a()});
    }
  }

  std::map<std::pair<std::string, std::string>, const Direction*> links;
  std::set<std::pair<std::string, std::string>> blocked;
};

std::string Matrix(const v1::GetLinksResponse::Group& group, const Known& known,
                   const std::string& corner, std::string (*cell)(const v1::Link&)) {
  Rows rows = {{corner, "HOST"}};
  for (const v1::PeerStatus& to : group.peers()) rows[0].push_back(to.peer());
  for (const v1::PeerStatus& from : group.peers()) {
    std::vector<std::string>& row = rows.emplace_back();
    row = {from.peer(), Printable(from.host())};
    for (const v1::PeerStatus& to : group.peers()) {
      const std::pair<std::string, std::string> way(from.peer(), to.peer());
      const auto link = known.links.find(way);
      if (from.peer() == to.peer()) {
        row.push_back("-");
      } else if (known.blocked.contains(way)) {
        row.push_back("blocked");
      } else {
        row.push_back(link == known.links.end() ? "?" : cell(link->second->link()));
      }
    }
  }
  return RenderTable(rows);
}

// What hosts carry in all: each, or of a large group the slowest that are known.
std::string Hosts(const v1::GetLinksResponse::Group& group) {
  std::vector<const v1::PeerStatus*> all;
  const auto least = [](const v1::PeerStatus& peer) {
    // An unknown rate does not count.
    return std::min(peer.up_bytes_per_second() - 1, peer.down_bytes_per_second() - 1);
  };
  for (const v1::PeerStatus& peer : group.peers()) all.push_back(&peer);
  if (group.peers_size() > kMatrixPeersMax) {
    std::stable_sort(all.begin(), all.end(),
                     [&](const auto* a, const auto* b) { return least(*a) < least(*b); });
    all.resize(kWorstLinksShown);
  }
  const auto known = [](const v1::PeerStatus* peer) {
    return peer->up_bytes_per_second() != 0 || peer->down_bytes_per_second() != 0;
  };
  if (std::none_of(all.begin(), all.end(), known)) return "";
  Rows rows = {{"MIB/S IN ALL", "HOST", "UP", "DOWN", "SHARE"}};
  for (const v1::PeerStatus* peer : all) {
    rows.push_back({peer->peer(), Printable(peer->host()), MegaBytes(peer->up_bytes_per_second()),
                    MegaBytes(peer->down_bytes_per_second()), RenderShare(peer->share())});
  }
  return "\n" + RenderTable(rows);
}

// Sentences about links that hold their senders.
std::string HeldLinks(const v1::GetLinksResponse::Group& group) {
  std::string text;
  size_t held = 0;
  for (const Direction& each : group.links()) {
    if (!each.held() || held++ >= kWorstLinksShown) continue;
    absl::StrAppend(&text, "held: ", each.from(), " could send more; its link to ", each.to(),
                    ", or ", each.to(), " itself, takes no more\n");
  }
  return text;
}

// A table of the directions for which `value` is not 0, those with the least value first.
std::string Worst(const v1::GetLinksResponse::Group& group, const Known& known,
                  const std::string& title, const std::function<double(const v1::Link&)>& value) {
  std::vector<const Direction*> all;
  for (const Direction& each : group.links()) {
    if (value(each.link()) != 0 && !known.blocked.contains({each.from(), each.to()})) {
      all.push_back(&each);
    }
  }
  std::stable_sort(all.begin(), all.end(), [&](const Direction* a, const Direction* b) {
    return value(a->link()) < value(b->link());
  });
  if (all.empty()) return "";
  if (all.size() > kWorstLinksShown) all.resize(kWorstLinksShown);
  std::map<std::string, std::string> hosts;
  for (const v1::PeerStatus& peer : group.peers()) hosts[peer.peer()] = Printable(peer.host());
  Rows rows = {{title, "FROM HOST", "TO", "TO HOST", "MIB/S", "RTT MS", "MEASURED"}};
  for (const Direction* each : all) {
    rows.push_back({each->from(), hosts[each->from()], each->to(), hosts[each->to()],
                    MegaBytes(each->link()), RoundTrip(each->link()),
                    absl::StrCat(each->link().age_s(), " s ago")});
  }
  return "\n" + RenderTable(rows);
}

double Rate(const v1::Link& link) { return static_cast<double>(link.bytes_per_second()); }

// Negative, so that the longest is the least.
double Way(const v1::Link& link) { return -static_cast<double>(link.rtt_us()); }

// Sentences about what is broken.
std::string Faults(const v1::GetLinksResponse::Group& group) {
  std::string text;
  for (const v1::BlockedStatus& pair : group.blocked()) {
    absl::StrAppend(
        &text, "blocked: ", pair.a(), " and ", pair.b(), " cannot reach each other (",
        Printable(pair.reason()), ")",
        pair.relay().empty() ? "" : absl::StrCat("; ", pair.relay(), " carries their link"), "\n");
  }
  for (const Direction& each : group.links()) {
    if (!each.small_packets()) continue;
    absl::StrAppend(&text, "large packets vanish: ", each.from(), " to ", each.to(),
                    "; check the MTU of the path\n");
  }
  return text;
}

std::string RenderGroup(const v1::GetLinksResponse::Group& group) {
  const Known known(group);
  const int64_t peers = group.peers_size();
  std::string text = absl::StrCat(Printable(group.run()), "/", group.group(), ", epoch ",
                                  group.epoch(), ": ", peers, " peers, ", group.links_size(),
                                  " of ", peers * (peers - 1), " directions measured\n");
  if (peers <= kMatrixPeersMax) {
    absl::StrAppend(&text, "\n", Matrix(group, known, "MIB/S TO", MegaBytes));
    absl::StrAppend(&text, "\n", Matrix(group, known, "RTT MS TO", RoundTrip));
  } else {
    text += Worst(group, known, "SLOWEST FROM", Rate);
    text += Worst(group, known, "LONGEST FROM", Way);
  }
  text += Hosts(group);
  const std::string faults = HeldLinks(group) + Faults(group);
  return faults.empty() ? text : absl::StrCat(text, "\n", faults);
}

}  // namespace

std::string RenderLinks(const v1::GetLinksResponse& links) {
  std::string text;
  for (const v1::GetLinksResponse::Group& group : links.groups()) {
    if (group.peers_size() < 2) continue;
    absl::StrAppend(&text, text.empty() ? "" : "\n", RenderGroup(group));
  }
  return text.empty() ? "no links: no group has two peers\n" : text;
}

}  // namespace longhaul
