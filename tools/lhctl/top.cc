#include "tools/lhctl/top.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "tools/lhctl/render.h"

namespace longhaul {
namespace {

using Rows = std::vector<std::vector<std::string>>;

std::pair<std::string, uint32_t> KeyOf(const v1::GroupStatus& group) {
  return {group.run(), group.group()};
}

std::string OpsPerSecond(double rate) { return absl::StrFormat("%.1f", rate); }

std::string BytesPerSecond(double rate) { return RenderBytes(static_cast<uint64_t>(rate)); }

// The first `columns` characters of UTF-8 text.
std::string Cut(absl::string_view line, size_t columns) {
  size_t shown = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    const bool begins = (static_cast<unsigned char>(line[i]) & 0xc0) != 0x80;
    if (begins && shown++ == columns) return std::string(line.substr(0, i));
  }
  return std::string(line);
}

// "m1 at boundary, m2 working" of one peer.
std::string MembersAt(const v1::GroupStatus& group, const std::string& peer) {
  std::string text;
  for (const v1::MemberStatus& member : group.members()) {
    if (member.peer() != peer) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ", member.member(), " ", MemberState(member));
  }
  return text.empty() ? "-" : text;
}

}  // namespace

void Top::Rate::Take(uint64_t value, double seconds) {
  per_second = value >= last && seconds > 0 ? static_cast<double>(value - last) / seconds : 0;
  last = value;
}

void Top::Update(const v1::GetOverviewResponse& overview, int64_t now_us) {
  const double seconds = updated_us_ == 0 ? 0 : static_cast<double>(now_us - updated_us_) / 1e6;
  std::map<PeerKey, PeerRates> rates;
  std::map<std::pair<std::string, uint32_t>, Waiting> waiting;
  for (const v1::GroupStatus& group : overview.groups()) {
    for (const v1::PeerStatus& peer : group.ring()) {
      const PeerKey key{KeyOf(group), peer.peer()};
      const auto before = rates_.find(key);
      PeerRates& now = rates[key];
      if (before != rates_.end()) now = before->second;
      // The first value of a counter is no rate: it counts from the start of the peer.
      now.measured = before != rates_.end();
      const double passed = now.measured ? seconds : 0;
      now.ops.Take(peer.ops_settled(), passed);
      now.sent.Take(peer.bytes_sent(), passed);
      now.received.Take(peer.bytes_received(), passed);
    }
    if (group.waiting_for().empty()) continue;
    const auto before = waiting_.find(KeyOf(group));
    const bool same = before != waiting_.end() && before->second.text == group.waiting_for();
    waiting[KeyOf(group)] = same ? before->second : Waiting{group.waiting_for(), now_us};
  }
  rates_ = std::move(rates);
  waiting_ = std::move(waiting);
  overview_ = overview;
  lost_.clear();
  updated_us_ = now_us_ = now_us;
}

void Top::Lost(const std::string& why, int64_t now_us) {
  lost_ = why;
  now_us_ = now_us;
}

std::string Top::RenderHead() const {
  std::string text = absl::StrCat("coordinator ", Printable(overview_.incarnation()), "  version ",
                                  Printable(overview_.version()), "  peers ", overview_.streams(),
                                  "  groups ", overview_.groups_size(), "\n");
  if (lost_.empty()) return text;
  if (updated_us_ == 0) return absl::StrCat("NO ANSWER: ", Printable(lost_), "\n");
  return absl::StrCat(text, "NO ANSWER for ", (now_us_ - updated_us_) / 1000000,
                      " s; below is what it said last: ", Printable(lost_), "\n");
}

std::string Top::RenderGroups() const {
  Rows rows = {{"GROUP", "EPOCH", "MEMBERS", "PENDING", "REVISION", "OPEN", "OPS/S", "SENT/S",
                "RECEIVED/S", "WAITS"}};
  for (const v1::GroupStatus& group : overview_.groups()) {
    uint64_t admitted = 0;
    for (const v1::MemberStatus& member : group.members()) admitted += member.joined() != 0;
    uint32_t open = 0;
    double ops = 0;
    double sent = 0;
    double received = 0;
    for (const v1::PeerStatus& peer : group.ring()) {
      const PeerRates& rates = rates_.at({KeyOf(group), peer.peer()});
      // All peers settle each op of the group.
      open = std::max(open, peer.ops_open());
      ops = std::max(ops, rates.ops.per_second);
      sent += rates.sent.per_second;
      received += rates.received.per_second;
    }
    const auto waiting = waiting_.find(KeyOf(group));
    const std::string waits =
        waiting == waiting_.end()
            ? "-"
            : absl::StrCat(Printable(waiting->second.text), " (",
                           (now_us_ - waiting->second.since_us) / 1000000, " s)");
    rows.push_back({absl::StrCat(Printable(group.run()), "/", group.group()),
                    absl::StrCat(group.epoch()), absl::StrCat(admitted),
                    absl::StrCat(static_cast<uint64_t>(group.members_size()) - admitted),
                    group.has_state() ? absl::StrCat(group.state().revision()) : "-",
                    absl::StrCat(open), OpsPerSecond(ops), BytesPerSecond(sent),
                    BytesPerSecond(received), waits});
  }
  return rows.size() == 1 ? "no runs\n" : RenderTable(rows);
}

std::string Top::RenderPeers() const {
  Rows rows = {{"GROUP", "PEER", "HOST", "STATE", "OPEN", "OPS/S", "SENT/S", "RECEIVED/S",
                "TO NEXT", "RTT", "MEMBERS"}};
  for (const v1::GroupStatus& group : overview_.groups()) {
    for (const v1::PeerStatus& peer : group.ring()) {
      const PeerRates& rates = rates_.at({KeyOf(group), peer.peer()});
      const std::vector<std::string> link = LinkCells(peer);
      rows.push_back({absl::StrCat(Printable(group.run()), "/", group.group()), peer.peer(),
                      Printable(peer.host()), PeerState(peer), absl::StrCat(peer.ops_open()),
                      rates.measured ? OpsPerSecond(rates.ops.per_second) : "-",
                      rates.measured ? BytesPerSecond(rates.sent.per_second) : "-",
                      rates.measured ? BytesPerSecond(rates.received.per_second) : "-", link[0],
                      link[1], MembersAt(group, peer.peer())});
    }
  }
  return rows.size() == 1 ? "" : "\n" + RenderTable(rows);
}

std::string Top::Render(size_t rows, size_t columns) const {
  const std::string text = updated_us_ == 0
                               ? RenderHead()
                               : absl::StrCat(RenderHead(), "\n", RenderGroups(), RenderPeers());
  std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  lines.pop_back();  // behind the last newline
  const size_t shown = rows == 0 || lines.size() <= rows ? lines.size() : rows - 1;
  std::string out;
  for (size_t i = 0; i < shown; ++i) {
    absl::StrAppend(&out, columns == 0 ? std::string(lines[i]) : Cut(lines[i], columns), "\n");
  }
  if (shown < lines.size()) absl::StrAppend(&out, lines.size() - shown, " more lines\n");
  return out;
}

}  // namespace longhaul
