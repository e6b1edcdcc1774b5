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

// "m3", or "m3(name)" if the trainer has a name of its own.
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
  if (admitted == 0) return "the group has no admitted member";
  if (ops_open > 0) {
    return absl::StrCat("the coordinator waits for nothing; a peer has up to ", ops_open,
                        " ops in flight");
  }
  return "the coordinator waits for nothing; no op is in flight";
}

void AddPeers(const GroupView& group, uint32_t detect_ms, std::vector<std::string>* facts) {
  for (const PeerView& peer : group.ring) {
    if (!peer.attached) {
      // A peer in the ring has admitted members, so the list of its members is not empty.
      facts->push_back(absl::StrCat(
          PeerName(peer), " has no control stream: if it does not return within ",
          kLease * detect_ms, " ms of the loss, its members ", MembersAt(group, peer.peer),
          " count as dead (at once if another peer reports it silent)"));
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
            ? absl::StrCat("; their link goes through the relay ", ToString(blocked.pair.relay))
            : "",
        "; open the data port between them"));
  }
  for (const auto& [a, b] : group.small_packets) {
    facts->push_back(
        absl::StrCat("large packets vanish between ", ToString(a), " and ", ToString(b),
                     "; their link uses small packets and is slower: check the MTU of the path, "
                     "and let ICMP \"fragmentation needed\" through"));
  }
  if (group.fault_epoch) {
    facts->push_back(absl::StrCat(
        "the last epoch after a fault was epoch ", ToString(group.fault_epoch), ": ",
        group.fault.cause, group.fault.subject.empty() ? "" : " of ", group.fault.subject,
        ", seen by ", group.fault.detector, " after ", group.fault.detect_ms,
        " ms of silence, committed within ", group.fault.agree_ms, " ms"));
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
    facts->push_back(absl::StrCat("members that wait for admission: ", List(pending),
                                  "; they are admitted when all admitted members stand at a step "
                                  "boundary (lh_begin_step, or `with comm.step(...)`)"));
  }
  if ((!here.empty() || !pending.empty()) && !away.empty()) {
    facts->push_back(absl::StrCat("members that have not reached the step boundary: ", List(away),
                                  "; their trainers still compute, or are stuck"));
  }
  if (!here.empty() && !away.empty()) {
    facts->push_back(absl::StrCat("members that wait at the step boundary: ", List(here)));
  }
}

void AddState(const GroupView& group, std::vector<std::string>* facts) {
  if (!group.state) return;
  facts->push_back(absl::StrCat("the shared state of the last sync: revision ",
                                group.state->revision, ", digest ", ToString(group.state->state)));
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
    facts->push_back(absl::StrCat("peers without an op in flight: ", List(behind),
                                  "; an op needs every member to start it"));
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
