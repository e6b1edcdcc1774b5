#include "coordinator/loop/explain.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

// An op that is open for less than this is no cause, nor is a lane that stalls for less.
constexpr uint32_t kSlowMs = 300;
// Nor is a link that needs less for what waits on it: that is an op on its way.
constexpr uint64_t kSlowLinkMs = 1000;
// A write of the store that takes longer keeps all groups waiting.
constexpr uint32_t kSlowWriteMs = 300;
// Peers beat every detect_ms / 3, so after this share of detect_ms two beats are missing.
constexpr double kUnheardShare = 0.8;
constexpr size_t kWitnessesMax = 3;

std::string Seconds(uint64_t ms) {
  return absl::StrFormat("%.1f s", static_cast<double>(ms) / 1000);
}

std::string Mega(uint64_t bytes) {
  return absl::StrFormat("%.1f MB", static_cast<double>(bytes) / 1e6);
}

std::string HostOf(const PeerView& peer) {
  return absl::StrCat("peer ", ToString(peer.peer), " (host ", peer.host.empty() ? "?" : peer.host,
                      ")");
}

// What is known of one group, in the forms that the search for the cause needs.
class Search {
 public:
  Search(const GroupView& group, uint32_t detect_ms) : group_(group), detect_ms_(detect_ms) {
    for (const PeerView& peer : group.ring) {
      peers_[peer.peer] = &peer;
      if (!peer.attached || Unheard(peer)) continue;
      const std::optional<control::OldestOp>& oldest = peer.load.oldest;
      if (oldest && oldest->age_ms >= kSlowMs) witnesses_.push_back(&peer);
    }
    std::stable_sort(witnesses_.begin(), witnesses_.end(), [](const auto* a, const auto* b) {
      return a->load.oldest->age_ms > b->load.oldest->age_ms;
    });
  }

  // The cause of waiting ops, in one sentence; "": ops do not wait, or nobody told why.
  std::string Cause() const {
    std::string cause = SilentPeer();
    if (cause.empty() && !witnesses_.empty()) {
      cause = MissingMembers(*witnesses_[0]);
      if (cause.empty()) cause = WorstLink();
    }
    return cause;
  }

  // What the peers with the oldest ops tell.
  std::vector<std::string> Witnesses() const {
    std::vector<std::string> facts;
    for (const PeerView* peer : witnesses_) {
      if (facts.size() == kWitnessesMax) break;
      facts.push_back(Testimony(*peer));
    }
    return facts;
  }

 private:
  bool Unheard(const PeerView& peer) const { return peer.unheard_ms > kUnheardShare * detect_ms_; }
  const PeerView* Find(PeerId peer) const {
    const auto it = peers_.find(peer);
    return it == peers_.end() ? nullptr : it->second;
  }
  std::string Name(PeerId id) const {
    const PeerView* peer = Find(id);
    return peer == nullptr ? "peer " + ToString(id) : HostOf(*peer);
  }
  std::string MembersOf(PeerId peer) const {
    std::vector<std::string> names;
    for (const MemberView& member : group_.members) {
      if (member.peer == peer && member.joined) names.push_back(MemberName(member));
    }
    return List(names);
  }

  // A peer of which the coordinator hears nothing, while it hears another one.
  std::string SilentPeer() const {
    const PeerView* silent = nullptr;
    bool heard = false;
    for (const PeerView& peer : group_.ring) {
      if (peer.attached && !Unheard(peer)) {
        heard = true;
      } else if (silent == nullptr || (peer.attached && peer.unheard_ms > silent->unheard_ms)) {
        silent = &peer;
      }
    }
    if (silent == nullptr || !heard) return "";
    return absl::StrCat(HostOf(*silent), " with ", MembersOf(silent->peer), " ",
                        silent->attached ? "was last heard " + Seconds(silent->unheard_ms) + " ago"
                                         : "has no control stream",
                        ": its longhaul-peerd stands still, or its host or network is gone");
  }

  // Members that have not called the op that `witness` has.
  std::string MissingMembers(const PeerView& witness) const {
    const control::OldestOp& op = *witness.load.oldest;
    std::vector<std::string> missing;
    if (op.phase == control::OpPhase::kStart) {
      for (const MemberView& member : group_.members) {
        const auto& awaited = op.members;
        if (std::find(awaited.begin(), awaited.end(), member.member) != awaited.end()) {
          missing.push_back(MemberName(member) + " at " + HostOf(witness));
        }
      }
    } else if (op.phase == control::OpPhase::kReady) {
      for (const PeerId id : op.peers) {
        const PeerView* peer = Find(id);
        if (peer == nullptr) continue;
        const std::optional<control::OldestOp>& theirs = peer->load.oldest;
        if (theirs && theirs->tag == op.tag && theirs->boundary > op.boundary) {
          return absl::StrCat("the op with tag ", op.tag, " was called at ", HostOf(witness),
                              " at boundary ", op.boundary.value(), " and at ", HostOf(*peer),
                              " at boundary ", theirs->boundary.value(),
                              ": these calls cannot meet, and the older one ends Aborted once all "
                              "that made it have passed that boundary");
        }
        const bool has_it = theirs && theirs->tag == op.tag && theirs->boundary == op.boundary;
        // It has told everybody, but that has not arrived: a matter of the link.
        if (has_it && theirs->phase != control::OpPhase::kStart) continue;
        if (has_it && !theirs->members.empty()) {
          std::string more = MissingMembers(*peer);
          if (!more.empty()) return more;
        }
        missing.push_back(MembersOf(id) + " at " + HostOf(*peer));
      }
    }
    if (missing.empty()) return "";
    return absl::StrCat(List(missing), missing.size() == 1 ? " has" : " have",
                        " not called the op with tag ", op.tag, ", which others called ",
                        Seconds(op.age_ms), " ago: a trainer computes longer, or stands still");
  }

  // How long a link keeps a peer waiting, in milliseconds.
  uint64_t WaitMs(const control::WorstLane& lane) const {
    uint64_t ms = lane.stalled_ms;
    // PINGs come every detect_ms / 3, so a shorter silence says nothing.
    if (lane.silent_ms >= detect_ms_ / 2) ms = std::max<uint64_t>(ms, lane.silent_ms);
    if (lane.bytes_per_second == 0) return ms;
    const uint64_t needed =
        lane.waiting_bytes / std::max<uint64_t>(lane.bytes_per_second / 1000, 1);
    return needed < kSlowLinkMs ? ms : std::max(ms, needed);
  }

  std::string WorstLink() const {
    const PeerView* at = nullptr;
    std::map<PeerId, size_t> accusers;
    for (const PeerView& peer : group_.ring) {
      const std::optional<control::WorstLane>& worst = peer.load.worst;
      if (!worst || !peer.attached || Unheard(peer) || WaitMs(*worst) < kSlowMs) continue;
      // The group has gone on without that peer; its last fault says so.
      if (Find(worst->peer) == nullptr) continue;
      ++accusers[worst->peer];
      if (at == nullptr || WaitMs(*worst) > WaitMs(*at->load.worst)) at = &peer;
    }
    if (at == nullptr) return "";
    for (const auto& [peer, count] : accusers) {
      if (count < 2 || count + 1 < group_.ring.size()) continue;
      return absl::StrCat("all other peers wait for ", Name(peer), " with ", MembersOf(peer),
                          ": its host or its network is slow or cut off; ", Describe(*at));
    }
    return Describe(*at);
  }

  // What keeps `peer` waiting on its worst link.
  std::string Describe(const PeerView& peer) const {
    const control::WorstLane& lane = *peer.load.worst;
    const std::string from = HostOf(peer);
    const std::string to = Name(lane.peer);
    const PeerView* other = Find(lane.peer);
    const bool mutual = other != nullptr && other->load.worst &&
                        other->load.worst->peer == peer.peer && other->load.worst->silent_ms != 0;
    if (lane.silent_ms >= std::max<uint32_t>(lane.stalled_ms, detect_ms_ / 2)) {
      return absl::StrCat("nothing from ", to, " has reached ", from, " for ",
                          Seconds(lane.silent_ms),
                          mutual ? ", nor the other way: the path between them is cut"
                                 : ": the path from the former to the latter is cut or very slow");
    }
    const std::string where =
        lane.lane == 0 ? "the control lane" : absl::StrCat("data lane ", lane.lane);
    if (lane.stalled_ms >= kSlowMs) {
      return absl::StrCat("the link from ", from, " to ", to, " stalls: ", where,
                          " has had bytes for ", Seconds(lane.stalled_ms),
                          " and got no acknowledgement; ", Mega(lane.waiting_bytes), " wait");
    }
    return absl::StrCat("the link from ", from, " to ", to, " is slow: ", Mega(lane.waiting_bytes),
                        " wait, and it carries ", Mega(lane.bytes_per_second), "/s (",
                        Seconds(WaitMs(lane)), "); its worst lane is ", where, ", round trip ",
                        absl::StrFormat("%.1f ms", lane.rtt_us / 1000.0));
  }

  std::string Testimony(const PeerView& peer) const {
    const control::OldestOp& op = *peer.load.oldest;
    std::string text = absl::StrCat(HostOf(peer), ": its oldest op, tag ", op.tag, ", is open for ",
                                    Seconds(op.age_ms), " and ");
    std::vector<std::string> awaited;
    for (const PeerId id : op.peers) awaited.push_back(ToString(id));
    for (const MemberId id : op.members) awaited.push_back(ToString(id));
    const std::string whom = List(awaited);
    switch (op.phase) {
      case control::OpPhase::kStart:
        return text + "waits for " + whom + ", which did not call it";
      case control::OpPhase::kReady:
        return text + "waits until it was called at " + whom;
      case control::OpPhase::kTransfer:
        return text + "moves its bytes";
      case control::OpPhase::kDone:
        return text + "has its result, and waits for " + whom;
      case control::OpPhase::kFinish:
        return text + "copies its result";
      case control::OpPhase::kFrozen:
        return text + "waits for the next epoch";
    }
    return text;
  }

  const GroupView& group_;
  const uint32_t detect_ms_;
  std::map<PeerId, const PeerView*> peers_;
  std::vector<const PeerView*> witnesses_;  // peers whose oldest op is slow, the slowest first
};

// Whether all members that have not voted are at peers with an op in flight. Then the ballot waits
// for these ops.
bool VotesWaitForOps(const GroupView& group) {
  std::set<PeerId> busy;
  for (const PeerView& peer : group.ring) {
    if (peer.load.ops_open > 0) busy.insert(peer.peer);
  }
  for (const MemberView& member : group.members) {
    if (member.joined && !member.voting && !busy.contains(member.peer)) return false;
  }
  return true;
}

// Members that fetch the state while the others wait for them.
std::string Fetches(const GroupView& group) {
  for (const MemberView& member : group.members) {
    if (!member.fetch || member.background) continue;
    const control::FetchProgress& fetch = *member.fetch;
    return absl::StrCat(MemberName(member), " at peer ", ToString(member.peer),
                        " fetches the shared state: ", Mega(fetch.bytes_done),
                        fetch.bytes_total == 0 ? "" : " of " + Mega(fetch.bytes_total), ", ",
                        Mega(fetch.bytes_per_second), "/s from ", fetch.sources,
                        fetch.sources == 1 ? " source" : " sources");
  }
  return "";
}

std::string Blocked(const BlockedRecord& blocked) {
  return absl::StrCat("peers ", ToString(blocked.pair.a), " and ", ToString(blocked.pair.b),
                      " cannot reach each other (", blocked.reason, ")",
                      blocked.pair.relay ? absl::StrCat("; their link goes through the relay ",
                                                        ToString(blocked.pair.relay))
                                         : "",
                      "; open the data port between them");
}

std::string LastFault(const GroupView& group) {
  if (!group.fault_epoch) return "";
  return absl::StrCat("the last epoch after a fault was epoch ", ToString(group.fault_epoch), ": ",
                      group.fault.cause, group.fault.subject.empty() ? "" : " of ",
                      group.fault.subject, ", seen by ", group.fault.detector, " after ",
                      group.fault.detect_ms, " ms of silence, committed within ",
                      group.fault.agree_ms, " ms");
}

std::string Verdict(const GroupView& group, const std::string& cause, uint32_t ops_open,
                    size_t admitted) {
  if (group.preparing) {
    return absl::StrCat("epoch ", ToString(group.preparing), " is being prepared: ",
                        group.waiting_for.empty() ? "about to be committed" : group.waiting_for,
                        cause.empty() ? "" : "; " + cause);
  }
  std::string fetches = Fetches(group);
  if (!cause.empty() && (group.waiting_for.empty() || VotesWaitForOps(group))) return cause;
  if (!fetches.empty()) return fetches;
  if (!group.waiting_for.empty()) return group.waiting_for;
  if (admitted == 0) return "the group has no admitted member";
  if (!group.blocked.empty()) return Blocked(group.blocked.front());
  const std::string fault = LastFault(group);
  return absl::StrCat("the coordinator waits for nothing; ",
                      ops_open > 0 ? absl::StrCat("a peer has up to ", ops_open, " ops in flight")
                                   : "no op is in flight",
                      fault.empty() ? "" : "; " + fault);
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
  for (const BlockedRecord& blocked : group.blocked) facts->push_back(Blocked(blocked));
  for (const auto& [a, b] : group.small_packets) {
    facts->push_back(
        absl::StrCat("large packets vanish between ", ToString(a), " and ", ToString(b),
                     "; their link uses small packets and is slower: check the MTU of the path, "
                     "and let ICMP \"fragmentation needed\" through"));
  }
  if (const std::string fault = LastFault(group); !fault.empty()) facts->push_back(fault);
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

std::string Rate(uint64_t bytes_per_second) {
  return absl::StrFormat("%.1f MB/s", static_cast<double>(bytes_per_second) / 1e6);
}

// Names the host without which ops would be faster.
void AddPace(const GroupView& group, std::vector<std::string>* facts) {
  if (!group.pace) return;
  const auto slow = std::find_if(group.ring.begin(), group.ring.end(), [&](const PeerView& peer) {
    return peer.peer == group.pace->peer;
  });
  if (slow == group.ring.end()) return;
  const auto seconds = [](uint64_t bytes_per_second) {
    constexpr uint64_t kTensor = 64 << 20;
    return absl::StrFormat("%.2f s",
                           static_cast<double>(kTensor) / static_cast<double>(bytes_per_second));
  };
  std::string text = absl::StrCat(PeerName(*slow), " sets the pace: ");
  if (slow->up_bytes_per_second != 0) {
    absl::StrAppend(&text, "its host sends at most ", Rate(slow->up_bytes_per_second), "; ");
  }
  absl::StrAppend(&text, "an all-reduce of 64 MiB over the mesh takes ",
                  seconds(group.pace->bytes_per_second), " and the latency, and without this peer ",
                  seconds(group.pace->without));
  facts->push_back(std::move(text));
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

Explanation Explain(const GroupView& group, uint32_t detect_ms, uint32_t slow_write_ms) {
  uint32_t ops_open = 0;
  for (const PeerView& peer : group.ring) ops_open = std::max(ops_open, peer.load.ops_open);
  size_t admitted = 0;
  for (const MemberView& member : group.members) admitted += member.joined ? 1 : 0;
  const Search search(group, detect_ms);
  Explanation explanation;
  explanation.verdict = Verdict(group, search.Cause(), ops_open, admitted);
  if (slow_write_ms >= kSlowWriteMs) {
    explanation.verdict = absl::StrCat(
        "the coordinator's store is slow: a write took ", Seconds(slow_write_ms),
        ", and every step boundary, join and repair waits for one; look at its disk. Besides: ",
        explanation.verdict);
  }
  explanation.facts = search.Witnesses();
  if (!group.waiting_for.empty() &&
      explanation.verdict.find(group.waiting_for) == std::string::npos) {
    explanation.facts.push_back(group.waiting_for);
  }
  AddPeers(group, detect_ms, &explanation.facts);
  AddVotes(group, &explanation.facts);
  AddOps(group, &explanation.facts);
  AddPace(group, &explanation.facts);
  AddState(group, &explanation.facts);
  AddFaults(group, &explanation.facts);
  return explanation;
}

std::string ExplainToTrainer(const GroupView& group, uint32_t detect_ms, uint32_t slow_write_ms) {
  std::string text = Explain(group, detect_ms, slow_write_ms).verdict;
  if (group.waiting_for.empty() || !absl::StrContains(text, group.waiting_for)) return text;
  std::vector<std::string> missing;
  for (const MemberView& member : group.members) {
    if (!member.joined || member.voting) continue;
    const auto at = std::find_if(group.ring.begin(), group.ring.end(),
                                 [&](const PeerView& peer) { return peer.peer == member.peer; });
    if (at != group.ring.end()) missing.push_back(MemberName(member) + " at " + HostOf(*at));
  }
  return missing.empty() ? text : absl::StrCat(text, "; not there: ", List(missing));
}

}  // namespace longhaul::coordinator
