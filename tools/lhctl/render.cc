#include "tools/lhctl/render.h"

#include <google/protobuf/util/json_util.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/text.h"

namespace longhaul {
namespace {

constexpr int kRingShownMax = 8;

// How many columns UTF-8 text takes: one for each character.
size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

std::string GroupName(const std::string& run, uint32_t group) {
  return absl::StrCat(Printable(run), "/", group);
}

std::string Number(uint64_t number) { return absl::StrCat(number); }

std::string RingText(const v1::GroupStatus& group) {
  std::string text;
  for (int i = 0; i < group.ring_size() && i < kRingShownMax; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ">", group.ring(i).peer(),
                    group.ring(i).attached() ? "" : "(away)");
  }
  if (group.ring_size() > kRingShownMax) {
    absl::StrAppend(&text, ">..", group.ring_size() - kRingShownMax, " more");
  }
  return text.empty() ? "-" : text;
}

std::string State(const v1::GroupStatus& group) {
  std::string waiting = Printable(group.waiting_for());
  if (group.preparing() != 0) {
    return absl::StrCat("preparing ", group.preparing(), waiting.empty() ? "" : ": ", waiting);
  }
  if (!waiting.empty()) return waiting;
  if (group.epoch() == 0) return "no epoch yet";
  std::string around;
  for (const v1::BlockedStatus& pair : group.blocked()) {
    absl::StrAppend(&around, around.empty() ? "" : " ", pair.a(), "-", pair.b());
  }
  std::string text = "steady";
  if (group.has_state()) {
    // The first eight digits are enough to compare digests by eye.
    absl::StrAppend(&text, ", revision ", group.state().revision(), " of state ",
                    Printable(group.state().digest()).substr(0, 8));
  }
  return around.empty() ? text : absl::StrCat(text, ", blocked pairs: ", around);
}

// A table of the members that fetch shared state, and of their progress; "" if no member does.
std::string RenderFetches(const v1::GetOverviewResponse& overview) {
  std::vector<std::vector<std::string>> rows = {
      {"GROUP", "FETCHING", "NAME", "DONE", "LEFT", "SOURCES", "PER SECOND"}};
  for (const v1::GroupStatus& group : overview.groups()) {
    for (const v1::MemberStatus& member : group.members()) {
      if (!member.has_fetch()) continue;
      const v1::Fetch& fetch = member.fetch();
      const uint64_t total = fetch.bytes_total();
      const uint64_t done = std::min(fetch.bytes_done(), total);
      rows.push_back(
          {GroupName(group.run(), group.group()), member.member(),
           member.name().empty() ? "-" : Printable(member.name()),
           total == 0 ? "-"
                      : absl::StrFormat("%.0f %%", std::floor(100.0 * static_cast<double>(done) /
                                                              static_cast<double>(total))),
           total == 0 ? "-" : RenderBytes(total - done), Number(fetch.sources()),
           RenderBytes(fetch.bytes_per_second())});
    }
  }
  return rows.size() == 1 ? "" : RenderTable(rows);
}

}  // namespace

std::string Printable(const std::string& text) {
  std::string out;
  for (std::string_view rest = text; !rest.empty();) {
    const Character first = FirstCharacter(rest);
    out += first.shown ? rest.substr(0, first.bytes) : "?";
    rest.remove_prefix(std::max<size_t>(first.bytes, 1));
  }
  return out;
}

std::string RenderTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += row[i];
      if (i + 1 < row.size()) text.append(widths[i] + 2 - Width(row[i]), ' ');
    }
    text += '\n';
  }
  return text;
}

std::string MemberState(const v1::MemberStatus& member) {
  if (member.joined() == 0) return "pending";
  if (member.has_fetch()) return member.background() ? "fetching (background)" : "fetching";
  if (member.background()) return "background";
  return member.voting() ? "at boundary" : "working";
}

std::string PeerState(const v1::PeerStatus& peer) {
  if (!peer.attached()) return "away";
  return peer.draining() ? "draining" : "attached";
}

std::vector<std::string> LinkCells(const v1::PeerStatus& peer) {
  if (!peer.has_next()) return {"-", "-", "-"};
  const v1::Link& link = peer.next();
  const char* const bound = link.at_least() ? ">= " : "";
  return {link.bytes_per_second() == 0
              ? "-"
              : absl::StrCat(bound, RenderBytes(link.bytes_per_second()), "/s"),
          link.rtt_us() == 0 ? "-" : absl::StrFormat("%.1f ms", link.rtt_us() / 1000.0),
          absl::StrCat(link.age_s(), " s ago")};
}

std::string RenderShare(double share) { return absl::StrFormat("%.1f %%", share * 100); }

std::string RenderBytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string RenderStatus(const v1::GetOverviewResponse& overview) {
  std::string text =
      absl::StrCat("coordinator ", Printable(overview.incarnation()), "  version ",
                   Printable(overview.version()), "  store ", Printable(overview.store()),
                   "  detect ", overview.detect_ms(), " ms  peers ", overview.streams(), "\n");
  if (overview.groups().empty()) return text + "no runs\n";
  std::vector<std::vector<std::string>> rows = {
      {"GROUP", "EPOCH", "MEMBERS", "PENDING", "OPS", "RING", "STATE"}};
  for (const v1::GroupStatus& group : overview.groups()) {
    uint64_t admitted = 0;
    uint32_t ops = 0;
    for (const v1::MemberStatus& member : group.members()) admitted += member.joined() != 0;
    for (const v1::PeerStatus& peer : group.ring()) ops = std::max(ops, peer.ops_open());
    rows.push_back({GroupName(group.run(), group.group()), Number(group.epoch()), Number(admitted),
                    Number(static_cast<uint64_t>(group.members_size()) - admitted), Number(ops),
                    RingText(group), State(group)});
  }
  text += "\n" + RenderTable(rows);
  const std::string fetches = RenderFetches(overview);
  return fetches.empty() ? text : text + "\n" + fetches;
}

std::string RenderRuns(const v1::ListRunsResponse& runs) {
  if (runs.runs().empty()) return "no runs\n";
  std::vector<std::vector<std::string>> rows = {{"RUN", "GROUPS", "MEMBERS", "PENDING"}};
  for (const auto& run : runs.runs()) {
    rows.push_back(
        {Printable(run.run()), Number(run.groups()), Number(run.members()), Number(run.pending())});
  }
  return RenderTable(rows);
}

std::string RenderMembers(const v1::GetOverviewResponse& overview) {
  std::vector<std::vector<std::string>> rows = {
      {"GROUP", "RANK", "MEMBER", "NAME", "PEER", "HOST", "SINCE", "STATE"}};
  for (const v1::GroupStatus& group : overview.groups()) {
    std::map<std::string, std::string> hosts;
    for (const v1::PeerStatus& peer : group.ring()) hosts[peer.peer()] = peer.host();
    uint64_t rank = 0;
    for (const v1::MemberStatus& member : group.members()) {
      const bool pending = member.joined() == 0;
      const std::string host = Printable(hosts[member.peer()]);
      rows.push_back({GroupName(group.run(), group.group()), pending ? "-" : Number(rank++),
                      member.member(), member.name().empty() ? "-" : Printable(member.name()),
                      member.peer(), host.empty() ? "-" : host,
                      pending ? "-" : absl::StrCat("epoch ", member.joined()),
                      MemberState(member)});
    }
  }
  return rows.size() == 1 ? "no members\n" : RenderTable(rows);
}

std::string RenderRing(const v1::GetRingResponse& rings) {
  std::vector<std::vector<std::string>> rows = {
      {"GROUP", "POSITION", "PEER", "HOST", "ENDPOINT", "STATE", "OPS", "SETTLED", "SENT",
       "RECEIVED", "UP", "DOWN", "SHARE", "TO NEXT", "RTT", "MEASURED"}};
  const auto rate = [](uint64_t bytes_per_second) {
    return bytes_per_second == 0 ? "-" : RenderBytes(bytes_per_second) + "/s";
  };
  std::string changes;
  for (const auto& ring : rings.rings()) {
    if (ring.ring_epoch() != 0) {
      absl::StrAppend(&changes, GroupName(ring.run(), ring.group()), ": ordered anew in epoch ",
                      ring.ring_epoch(), ", ", Printable(ring.ring_gain()), "\n");
    }
    uint64_t position = 0;
    for (const v1::PeerStatus& peer : ring.peers()) {
      rows.push_back({GroupName(ring.run(), ring.group()), Number(position++), peer.peer(),
                      Printable(peer.host()), Printable(peer.endpoint()), PeerState(peer),
                      Number(peer.ops_open()), Number(peer.ops_settled()),
                      RenderBytes(peer.bytes_sent()), RenderBytes(peer.bytes_received()),
                      rate(peer.up_bytes_per_second()), rate(peer.down_bytes_per_second()),
                      RenderShare(peer.share())});
      for (std::string& cell : LinkCells(peer)) rows.back().push_back(std::move(cell));
    }
  }
  if (rows.size() == 1) return "no peers\n";
  return RenderTable(rows) + (changes.empty() ? "" : "\n" + changes);
}

std::string RenderWhy(const v1::ExplainResponse& explanation) {
  if (explanation.groups().empty()) return "no runs\n";
  std::string text;
  for (const auto& group : explanation.groups()) {
    absl::StrAppend(&text, GroupName(group.run(), group.group()), ": ", Printable(group.verdict()),
                    "\n");
    for (const std::string& fact : group.facts()) {
      absl::StrAppend(&text, "  - ", Printable(fact), "\n");
    }
  }
  return text;
}

std::string RenderEvent(const v1::Event& event) {
  const time_t seconds = static_cast<time_t>(event.time_us() / 1000000);
  struct tm utc {};
  gmtime_r(&seconds, &utc);
  std::string text =
      absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%03dZ  %-9s  ", utc.tm_year + 1900,
                      utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                      event.time_us() % 1000000 / 1000, Printable(event.kind()));
  absl::StrAppend(&text, event.run().empty() ? "-" : GroupName(event.run(), event.group()), "  ",
                  Printable(event.text()), "\n");
  return text;
}

std::string RenderJson(const google::protobuf::Message& message, bool one_line) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = !one_line;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  LH_CHECK(google::protobuf::util::MessageToJsonString(message, &json, options).ok());
  if (json.empty() || json.back() != '\n') json += '\n';
  return json;
}

}  // namespace longhaul
