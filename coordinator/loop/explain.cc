#include "coordinator/loop/explain.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/core/leases.h"

namespace longhaul::coordinator {
namespace {

constexpr size_t kNamesMax = 8;

std::string List(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kNamesMax);
  std::string text =
      absl::StrJoin(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown), " ");
  if (shown < names.size()) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

std::string PeerName(const PeerView& peer) {
  return absl::StrCat("peer ", ToString(peer.peer), " (host ", peer.host.empty() ? "?" : peer.host,
                      ", ", peer.endpoint, ")");
}

std::string MembersAt(const GroupView& group, PeerId peer) {
  std::vector<std::string> names;
  for (const MemberView& member : group.members) {
    if (member.peer == peer) names.push_back(ToString(member.member));
  }
  return List(names);
}

// A member with the trainer's own name, if it has one.
std::string MemberName(const MemberView& member) {
  return member.name.empty() ? ToString(member.member)
                             : absl::StrCat(ToString(member.member), "(", member.name, ")");
}

std::string Verdict(const GroupView& group, uint32_t ops_open, size_t admitted) {
  if (group.preparing) {
    return absl::StrCat("epoch ", ToString(group.preparing), " is being prepared: ",
                        group.waiting_for.empty() ? "about to be committed" : group.waiting_for);
  }
  if (!group.waiting_for.empty()) return group.waiting_for;
  if (admitted == 0) return "nobody has been admitted";
  if (ops_open > 0) {
    return absl::StrCat("nothing to agree on; up to ", ops_open, " ops are in flight at a peer");
  }
  return "nothing waits; no op is in flight";
}

void AddPeers(const GroupView& group, uint32_t detect_ms, std::vector<std::string>* facts) {
  for (const PeerView& peer : group.ring) {
    if (!peer.attached) {
      // Who is in the ring has admitted members.
      facts->push_back(absl::StrCat(PeerName(peer), " has no control stream: unless it returns ",
                                    "within ", kLease * detect_ms, " ms of its loss (at once if ",
                                    "another peer reports it silent), its members ",
                                    MembersAt(group, peer.peer), " count as dead"));
    } else if (peer.draining) {
      facts->push_back(absl::StrCat(PeerName(peer), " is draining: its members ",
                                    MembersAt(group, peer.peer),
                                    " leave at their next step boundary"));
    }
  }
}

void AddFaults(const GroupView& group, std::vector<std::string>* facts) {
  for (const BlockedRecord& blocked : group.blocked) {
    facts->push_back(absl::StrCat(
        "peers ", ToString(blocked.pair.a), " and ", ToString(blocked.pair.b),
        " cannot reach each other (", blocked.reason, ")",
        blocked.pair.relay
            ? absl::StrCat("; ", ToString(blocked.pair.relay), " passes on what they send")
            : "",
        "; open the data port between them"));
  }
  for (const auto& [a, b] : group.small_packets) {
    facts->push_back(
        absl::StrCat("large packets vanish between ", ToString(a), " and ", ToString(b),
                     ", whose link uses small ones and is slower: check the MTU of "
                     "the path, and that ICMP \"fragmentation needed\" is let through"));
  }
  if (group.fault_epoch) {
    facts->push_back(absl::StrCat(
        "the last change in the middle of ops was epoch ", ToString(group.fault_epoch), ": ",
        group.fault.cause, group.fault.subject.empty() ? "" : " of ", group.fault.subject,
        ", seen by ", group.fault.detector, " after ", group.fault.detect_ms,
        " ms of silence, agreed within ", group.fault.agree_ms, " ms"));
  }
}

void AddVotes(const GroupView& group, std::vector<std::string>* facts) {
  std::vector<std::string> pending;
  std::vector<std::string> here;
  std::vector<std::string> away;
  for (const MemberView& member : group.members) {
    if (!member.joined) {
      pending.push_back(MemberName(member));
    } else {
      (member.voting ? here : away).push_back(MemberName(member));
    }
  }
  if (!pending.empty()) {
    facts->push_back(absl::StrCat("wait for admission: ", List(pending),
                                  "; that happens when all admitted members stand at a step "
                                  "boundary (lh_begin_step, or `with comm.step(...)`)"));
  }
  if ((!here.empty() || !pending.empty()) && !away.empty()) {
    facts->push_back(absl::StrCat("not at a step boundary: ", List(away),
                                  "; still computing, or stuck in the trainer"));
  }
  if (!here.empty() && !away.empty()) {
    facts->push_back(absl::StrCat("wait at the step boundary: ", List(here)));
  }
}

void AddState(const GroupView& group, std::vector<std::string>* facts) {
  if (!group.state) return;
  facts->push_back(absl::StrCat("shared state agreed on: revision ", group.state->revision,
                                ", digest ", ToString(group.state->state)));
}

void AddOps(const GroupView& group, std::vector<std::string>* facts) {
  if (group.ring.empty()) return;
  std::vector<std::string> behind;
  bool open = false;
  for (const PeerView& peer : group.ring) {
    open |= peer.load.ops_open > 0;
    if (peer.load.ops_open == 0) behind.push_back(PeerName(peer));
  }
  if (!open) return;
  std::vector<std::string> counts;
  for (const PeerView& peer : group.ring) {
    counts.push_back(absl::StrCat(ToString(peer.peer), "=", peer.load.ops_open));
  }
  facts->push_back(absl::StrCat("ops in flight by peer: ", List(counts)));
  if (!behind.empty()) {
    facts->push_back(absl::StrCat("has no op in flight while others have: ", List(behind),
                                  "; an op starts when every member has posted it"));
  }
}

}  // namespace

Explanation Explain(const GroupView& group, uint32_t detect_ms) {
  uint32_t ops_open = 0;
  for (const PeerView& peer : group.ring) ops_open = std::max(ops_open, peer.load.ops_open);
  size_t admitted = 0;
  for (const MemberView& member : group.members) admitted += member.joined ? 1 : 0;
  Explanation explanation;
  explanation.verdict = Verdict(group, ops_open, admitted);
  AddPeers(group, detect_ms, &explanation.facts);
  AddVotes(group, &explanation.facts);
  AddOps(group, &explanation.facts);
  AddState(group, &explanation.facts);
  AddFaults(group, &explanation.facts);
  return explanation;
}

}  // namespace longhaul::coordinator
