#include "coordinator/core/coordinator_core.h"

#include <algorithm>
#include <set>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "coordinator/core/group.h"
#include "coordinator/core/leases.h"
#include "coordinator/core/link_table.h"
#include "coordinator/core/text.h"
#include "coordinator/core/token.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

// A run without members is forgotten after this time.
constexpr int64_t kRunEmptyMax = Seconds(600);
// Terms and member numbers that a peer claims to know are ignored from here on. No correct peer
// comes near this number. Without the limit, one claim could use up all numbers.
constexpr uint64_t kClaimMax = uint64_t{1} << 62;

Tick TickAfter(Tick now, uint32_t ms, int64_t times) { return now + times * Millis(ms); }

}  // namespace

// Owns the sessions and the peers. Each group is a state machine of its own (group.h), which knows
// of peers only what the PeerDirectory tells. An event touches some groups. At the end of a step
// each of these advances. Then one Persist with all changes goes before all other actions.
class CoordinatorCore::Impl : public PeerDirectory {
 public:
  Impl(CoreConfig config, Records records);
  Impl(const Impl& other);
  Impl& operator=(const Impl&) = delete;

  std::vector<Action> Step(const Event& event, Tick now);
  Tick NextDeadline() const;
  bool HasPeer(PeerId peer) const { return peers_.contains(peer); }
  Holdings HoldingsOf(const std::set<PeerId>& peers) const;
  bool KnowsJoin(PeerId peer, const control::Join& join) const;
  Overview GetOverview() const;
  // What is known of the link from one peer to another.
  std::optional<DirectionView> Direction(PeerId from, PeerId to) const;
  std::optional<PaceView> PaceOf(const GroupKey& group) const;
  void CheckInvariants() const;
  uint64_t Digest() const;

  bool Attached(PeerId peer) const override;
  bool HeardWithin(PeerId peer, int64_t us) const override;
  bool Draining(PeerId peer) const override;
  bool CohortBegun(const std::string& run, PeerId peer, const std::string& cohort) const override;
  control::LinkCost CostOf(const std::vector<PeerId>& ring, const control::BlockedPairs& blocked,
                           const Shares* kept) const override {
    return links_.Cost(ring, blocked, kept, now_);
  }
  Tick Now() const override { return now_; }

 private:
  // Since the last message of a stream.
  uint32_t UnheardMs(SessionId session) const;

  struct Session {
    PeerId peer;  // 0 before Hello
    // If no message comes before this time, the peer counts as dead from then on if another peer
    // has lost its link to the peer. kNever: that time has passed.
    Tick quiet_at;
    Tick silent_at;  // the same, but whatever other peers report
  };
  // A peer that has a stream or members, or that may come back to be drained.
  struct Peer {
    SessionId session;      // 0: not attached
    bool closed = false;    // its stream has closed; false: it has had none since the start
    bool ended = false;     // it was not quiet when its stream closed, so silence was not the cause
    Tick dead_at = kNever;  // while not attached: the peer is dead from this time on
    // While the peer is not attached: as Session::quiet_at.
    Tick quiet_at = kNever;
    PeerRecord record;
    bool draining = false;
    std::string drain_reason;  // set if an operator drains the peer
    // Whether the peer may still come back; it then has to hear the operator's order. Only for a
    // peer without a stream.
    bool awaited() const { return !drain_reason.empty() && dead_at != kNever; }
    std::map<GroupKey, control::GroupLoad> loads;
    std::vector<control::FetchLoad> fetches;  // only for the overview
  };

  void Start();
  void Handle(const SessionOpened& event);
  void Handle(const SessionClosed& event);
  void Handle(const FromPeer& event);
  void Handle(const EvictMember& event);
  void Handle(const DrainPeer& event);
  void Handle(const RingOrdered& event);
  void Handle(const TimePassed& event);

  // Messages of a peer that has said Hello.
  Violation Handle(PeerId peer, const control::Hello& message);
  Violation Handle(PeerId peer, const control::Join& message);
  Violation Handle(PeerId peer, const control::Leave& message);
  Violation Handle(PeerId peer, const control::Vote& message);
  Violation Handle(PeerId peer, const control::EpochReady& message);
  Violation Handle(PeerId peer, const control::EpochFailed& message);
  Violation Handle(PeerId peer, const control::LinkLost& message);
  Violation Handle(PeerId peer, const control::CancelOp& message);
  Violation Handle(PeerId peer, const control::Dispute& message);
  Violation Handle(PeerId peer, const control::Heartbeat& message);
  Violation Handle(PeerId peer, const control::Draining& message);
  Violation Handle(PeerId peer, const control::SyncVote& message);
  Violation Handle(PeerId peer, const control::FetchDone& message);
  Violation Handle(PeerId peer, const control::LinkReport& message);
  Violation Handle(PeerId peer, const control::PeerTried& message);

  bool HasKeyOfPeer(const control::Hello& hello) const;
  // Returns why this coordinator may not serve the peer; "": it may.
  std::string RefuseHello(const control::Hello& hello) const;
  void Attach(SessionId session, const control::Hello& hello);
  void LearnTerm(const control::Hello& hello);
  void LearnNumbers(const control::GroupState& said);
  void Forget(PeerId peer);
  void Drop(SessionId session, const std::string& reason, StreamEnd end);
  void Detach(SessionId session, const std::string& reason);
  void PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms);
  bool Quiet(PeerId peer) const;
  bool Succeeded(PeerId peer) const;
  bool HasAdmitted(PeerId peer) const;
  void BuryIfAccused(PeerId peer);
  void Heard(Session* session) const;
  void ForgiveOwnStall();
  bool HearsNobody() const;
  bool MayDie(PeerId peer) const;
  bool AnyoneFallsDue() const;
  void EndIsolation();
  Tick GroupDeadline(const Group& group) const {
    return isolated_ ? group.GraceDue() : std::min(group.GraceDue(), group.SilenceDue());
  }
  void ForgetEmptyRuns();
  void OrderARing();
  std::string RefuseGroup(const GroupKey& key) const;
  std::string RefuseJoin(PeerId peer, const control::Join& join) const;
  Group& EnsureGroup(const GroupKey& key);
  Group* FindGroup(const GroupKey& key);
  std::vector<GroupKey> GroupsOf(PeerId peer) const;
  // Runs `call(group, output)` on the group, emits the output, and returns what `call` returns.
  template <class Call>
  auto On(const GroupKey& key, Call call) {
    touched_.insert(key);
    GroupOutput output;
    Group& group = groups_.at(key);
    if constexpr (std::is_void_v<decltype(call(group, &output))>) {
      call(group, &output);
      Emit(key, std::move(output));
    } else {
      auto result = call(group, &output);
      Emit(key, std::move(output));
      return result;
    }
  }

  // Members of one run at one peer that come and go together.
  struct Cohort {
    std::string run;
    PeerId peer;
    std::string name;
    friend auto operator<=>(const Cohort&, const Cohort&) = default;
  };
  // Runs `call(key, group)` on each group that its members are in.
  template <class Call>
  void ForGroupsOf(const Cohort& cohort, Call call) {
    ForGroupsOf(groups_, cohort, call);
  }
  template <class Call>
  void ForGroupsOf(const Cohort& cohort, Call call) const {
    ForGroupsOf(groups_, cohort, call);
  }
  template <class Groups, class Call>
  static void ForGroupsOf(Groups& groups, const Cohort& cohort, Call call);
  size_t CountCohort(const Cohort& cohort, uint32_t* size) const;
  void SetNumber(const Cohort& cohort);
  void RetireFellows();
  bool CompleteCohorts();
  void MindPassedOver();

  void AdvanceTouched();
  void Emit(const GroupKey& key, GroupOutput output);
  void Send(PeerId peer, control::CoordinatorMessage message);
  void Note(std::string kind, PeerId peer, std::string text);
  void EmitPersist();

  CoreConfig config_;
  bool started_ = false;
  // Set while this coordinator itself is cut off. It was about to remove a member for silence, and
  // had heard no peer for detect_ms. Until it hears a peer, it removes no member for silence.
  bool isolated_ = false;
  Tick isolated_since_;  // meaningless unless isolated_
  StoreRecord store_;
  std::map<SessionId, Session> sessions_;
  std::map<PeerId, Peer> peers_;
  std::map<std::string, RunRecord> runs_;
  std::map<GroupKey, Group> groups_;
  std::map<std::string, Tick> empty_since_;  // runs without members
  uint64_t runs_created_ = 0;
  LinkTable links_;  // between peers of peers_
  uint64_t ring_requests_ = 0;
  // The ring problem that is being solved. Its request is ring_requests_.
  struct Ordering {
    GroupKey group;
    Epoch epoch;
  };
  std::optional<Ordering> ordering_;

  Records durable_;  // what the Persist actions so far have stored
  // These are used within one step.
  Tick now_;
  std::set<GroupKey> touched_;
  std::vector<std::pair<Cohort, std::string>> bereft_;  // cohorts to remove, and why
  std::vector<Action> actions_;
};

CoordinatorCore::Impl::Impl(CoreConfig config, Records records)
    : config_(std::move(config)), runs_(records.runs), durable_(std::move(records)) {
  LH_CHECK(config_.detect_ms > 0);
  LH_CHECK(config_.store != 0);
  LH_CHECK(config_.entropy.size() == kSecretBytes)
      << "CoreConfig.entropy has " << config_.entropy.size() << " bytes";
  for (const auto& [key, record] : durable_.groups) {
    LH_CHECK(runs_.contains(key.run))
        << "the store has group " << ToString(key) << " without its run";
    groups_.emplace(key, Group(record, runs_.at(key.run).secret, config_, this));
    for (const PeerRecord& peer : record.peers) peers_[peer.peer].record = peer;
  }
  for (const auto& [id, drain] : durable_.drains) {
    Peer& peer = peers_[id];
    peer.record.peer = id;
    peer.draining = true;
    peer.drain_reason = drain.reason;
  }
}

CoordinatorCore::Impl::Impl(const Impl& other)
    : config_(other.config_),
      started_(other.started_),
      isolated_(other.isolated_),
      isolated_since_(other.isolated_since_),
      store_(other.store_),
      sessions_(other.sessions_),
      peers_(other.peers_),
      runs_(other.runs_),
      groups_(other.groups_),
      empty_since_(other.empty_since_),
      runs_created_(other.runs_created_),
      links_(other.links_),
      ring_requests_(other.ring_requests_),
      ordering_(other.ordering_),
      durable_(other.durable_) {
  LH_CHECK(other.actions_.empty() && other.touched_.empty());
  for (auto& [key, group] : groups_) group.SetDirectory(this);
}

std::vector<Action> CoordinatorCore::Impl::Step(const Event& event, Tick now) {
  const Tick due = NextDeadline();
  now_ = now;
  if (!started_) {
    Start();
  } else if (due != kNever && now - due > Millis(config_.detect_ms) / 2) {
    ForgiveOwnStall();
  }
  std::visit([this](const auto& e) { Handle(e); }, event);
  AdvanceTouched();
  EmitPersist();
  return std::exchange(actions_, {});
}

// The first step. All times to come back after a restart begin here.
void CoordinatorCore::Impl::Start() {
  started_ = true;
  store_ = durable_.store;
  if (store_.store == 0) store_.store = config_.store;
  ++store_.term;
  for (auto& [id, peer] : peers_) {
    peer.dead_at = TickAfter(now_, config_.detect_ms, kLease);
    peer.quiet_at = TickAfter(now_, config_.detect_ms, kShortLease);
  }
  for (const auto& [key, group] : groups_) touched_.insert(key);
  for (const auto& [run, record] : runs_) empty_since_[run] = now_;
  if (runs_.empty()) return;
  Note("restart", PeerId{},
       "coordinator restarted runs=" + std::to_string(runs_.size()) +
           " groups=" + std::to_string(groups_.size()) + " peers=" + std::to_string(peers_.size()));
  AdvanceTouched();
}

// ------------------------------------------------------------------------------ sessions

void CoordinatorCore::Impl::Handle(const SessionOpened& event) {
  Session session;
  Heard(&session);
  LH_CHECK(sessions_.emplace(event.session, session).second) << "a session was opened twice";
}

void CoordinatorCore::Impl::Handle(const SessionClosed& event) {
  Detach(event.session, "its stream closed");
}

void CoordinatorCore::Impl::Handle(const FromPeer& event) {
  const auto it = sessions_.find(event.session);
  if (it == sessions_.end()) return;  // already dropped; this message was on its way
  Heard(&it->second);
  if (!it->second.peer) {
    const auto* hello = std::get_if<control::Hello>(&event.message);
    if (hello == nullptr || !hello->peer) {
      Drop(event.session,
           hello == nullptr ? "against the protocol: the first message is not Hello"
                            : "against the protocol: Hello names no peer",
           StreamEnd::kViolation);
    } else if (hello->protocol != control::kProtocolVersion) {
      Drop(event.session,
           "against the protocol: " + ToString(hello->peer) + " (release " + Clean(hello->version) +
               ") speaks protocol " + std::to_string(hello->protocol) + ", this coordinator " +
               std::to_string(control::kProtocolVersion) + ": run the same release at both ends",
           StreamEnd::kViolation);
    } else if (!HasKeyOfPeer(*hello)) {
      Drop(event.session,
           "refused: " + ToString(hello->peer) +
               " is known here with another key. Start this peerd again: it then makes a new key, "
               "and has another id",
           StreamEnd::kStranger);
    } else if (const std::string refusal = RefuseHello(*hello); !refusal.empty()) {
      Drop(event.session, refusal, StreamEnd::kOtherStore);
    } else {
      Attach(event.session, *hello);
    }
    return;
  }
  const PeerId peer = it->second.peer;
  if (isolated_) EndIsolation();
  const Violation violation = std::visit(
      [this, peer](const auto& message) { return Handle(peer, message); }, event.message);
  if (violation) Drop(event.session, "against the protocol: " + *violation, StreamEnd::kViolation);
}

// The caller has shown that it has the private key of `hello.key`, and that the id is derived from
// the key. The id has 63 bits only, so another key may have the same one. Only the key itself says
// that the caller is the peer that is known here.
bool CoordinatorCore::Impl::HasKeyOfPeer(const control::Hello& hello) const {
  const auto known = peers_.find(hello.peer);
  // The key of a peer that is to be drained and has no members was not kept.
  return known == peers_.end() || known->second.record.key.empty() ||
         known->second.record.key == hello.key;
}

// A peer with members in another store is refused. This coordinator does not know these members, so
// the peer would lose them, and could found a second group of the same name.
std::string CoordinatorCore::Impl::RefuseHello(const control::Hello& hello) const {
  const bool has_members =
      std::any_of(hello.groups.begin(), hello.groups.end(),
                  [](const control::GroupState& state) { return !state.members.empty(); });
  if (hello.store == 0 || hello.store == store_.store || !has_members) return "";
  return "refused: " + ToString(hello.peer) + " has members in store " + HexText(hello.store) +
         ", and this coordinator has store " + HexText(store_.store) +
         ": list only coordinators of one store in --coordinator, or let the members leave first";
}

// If the peer knows a newer term of this store, or another start with the same term, the store went
// back in time. The term of this start is then raised above the peer's term.
void CoordinatorCore::Impl::LearnTerm(const control::Hello& hello) {
  if (hello.store != store_.store || hello.term >= kClaimMax) return;
  const bool newer = hello.term > store_.term;
  const bool twin = hello.term == store_.term && hello.coordinator != config_.incarnation;
  if (!newer && !twin) return;
  Note("restart", hello.peer,
       "store went back term=" + std::to_string(store_.term) +
           " known_term=" + std::to_string(hello.term) + " peer=" + ToString(hello.peer));
  store_.term = hello.term + 1;
}

// Makes sure that numbers of members that the peer names are not given out again.
void CoordinatorCore::Impl::LearnNumbers(const control::GroupState& said) {
  uint64_t& next = runs_.at(said.group.run).next_member;
  for (MemberId member : said.members) {
    if (member.value() < kClaimMax) next = std::max(next, member.value() + 1);
  }
}

void CoordinatorCore::Impl::Attach(SessionId session, const control::Hello& hello) {
  LearnTerm(hello);
  if (isolated_) EndIsolation();
  Peer& peer = peers_[hello.peer];
  const bool anew = peer.closed || peer.session;
  if (peer.session) {
    const SessionId old = std::exchange(peer.session, SessionId{});
    sessions_.erase(old);
    actions_.push_back(CloseSession{old, "replaced by a newer stream of " + ToString(hello.peer)});
  }
  sessions_.at(session).peer = hello.peer;
  peer.session = session;
  peer.closed = peer.ended = false;
  peer.dead_at = peer.quiet_at = kNever;
  peer.record = {hello.peer, hello.endpoints, hello.lanes, hello.host, hello.key};
  Note("attach", hello.peer,
       "peer attached peer=" + ToString(hello.peer) + " host=" + Clean(hello.host) +
           " endpoint=" + (hello.endpoints.empty() ? "" : Clean(hello.endpoints.front())) +
           " version=" + Clean(hello.version));
  Send(hello.peer,
       control::Welcome{config_.incarnation, config_.detect_ms, store_.store, store_.term});
  if (!peer.drain_reason.empty()) Send(hello.peer, control::Drain{peer.drain_reason});

  // By group: what the peer says of it. If the peer has members in a group here and says nothing of
  // the group, the entry is empty.
  std::map<GroupKey, control::GroupState> states;
  for (const GroupKey& key : GroupsOf(hello.peer)) states[key].group = key;
  for (const control::GroupState& said : hello.groups) {
    control::GroupState& state = states[said.group];
    state.group = said.group;
    state.committed = std::max(state.committed, said.committed);
    if (said.prepared > state.prepared) {
      state.prepared = said.prepared;
      state.preparation = said.preparation;
      state.frozen = said.frozen;
    }
    state.members.insert(state.members.end(), said.members.begin(), said.members.end());
  }
  for (const auto& [key, state] : states) {
    const bool known = FindGroup(key) != nullptr;
    if (known) {
      LearnNumbers(state);
      On(key, [&, &said = state](Group& group, GroupOutput* out) {
        group.Attach(peer.record, said, anew, now_, out);
      });
      continue;
    }
    for (MemberId member : state.members) {
      Send(hello.peer, control::Removed{key, member, control::Removal::kUnknown,
                                        "the coordinator does not know the group (any more)"});
    }
  }
  std::vector<PeerId> succeeded;
  for (const auto& [id, other] : peers_) {
    if (id != hello.peer && other.record.endpoints == hello.endpoints) succeeded.push_back(id);
  }
  for (PeerId id : succeeded) BuryIfAccused(id);
}

// Ends the session. Messages that still arrive on it are ignored.
void CoordinatorCore::Impl::Drop(SessionId session, const std::string& reason, StreamEnd end) {
  actions_.push_back(CloseSession{session, reason, end});
  Detach(session, reason);
}

void CoordinatorCore::Impl::Detach(SessionId session, const std::string& reason) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  const PeerId id = it->second.peer;
  const Tick silent_at = it->second.silent_at;
  const bool heard = it->second.quiet_at != kNever && it->second.quiet_at > now_;
  sessions_.erase(it);
  if (!id) return;
  Peer& peer = peers_.at(id);
  peer.session = SessionId{};
  peer.closed = true;
  peer.ended = heard;
  // The time until the peer is dead runs from its last message, not from the end of the stream. So
  // a stream that closes after a long silence does not give the peer that time again.
  const int64_t shorter = HasAdmitted(id) ? 0 : kLease - kShortLease;
  peer.dead_at = std::max(now_, TickAfter(silent_at, config_.detect_ms, -shorter));
  peer.quiet_at = kNever;
  Note("detach", id, "peer detached peer=" + ToString(id) + " reason=" + reason);
  const std::vector<GroupKey> groups = GroupsOf(id);
  if (groups.empty() && !peer.awaited()) return Forget(id);
  touched_.insert(groups.begin(), groups.end());
  BuryIfAccused(id);
}

void CoordinatorCore::Impl::Forget(PeerId peer) {
  peers_.erase(peer);
  links_.Forget(peer);
}

void CoordinatorCore::Impl::PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms) {
  peers_.at(peer).dead_at = kNever;
  for (const GroupKey& key : GroupsOf(peer)) {
    On(key, [&](Group& group, GroupOutput* out) { group.PeerDied(peer, reason, silent_ms, out); });
  }
  if (!Attached(peer) && GroupsOf(peer).empty()) Forget(peer);
}

void CoordinatorCore::Impl::Heard(Session* session) const {
  session->quiet_at = TickAfter(now_, config_.detect_ms, 1);
  session->silent_at = TickAfter(now_, config_.detect_ms, kLease);
}

bool CoordinatorCore::Impl::HasAdmitted(PeerId peer) const {
  for (const auto& [key, group] : groups_) {
    for (const MemberRecord& member : group.record().members) {
      if (member.peer == peer && member.joined) return true;
    }
  }
  return false;
}

// Whether the coordinator does not hear the peer: its stream is quiet, or it has none and has not
// come back in time.
bool CoordinatorCore::Impl::Quiet(PeerId id) const {
  const auto it = peers_.find(id);
  if (it == peers_.end()) return false;
  const Peer& peer = it->second;
  if (!peer.session) {
    return peer.dead_at != kNever && (peer.quiet_at == kNever || peer.quiet_at <= now_);
  }
  const Tick quiet_at = sessions_.at(peer.session).quiet_at;
  return quiet_at == kNever || quiet_at <= now_;
}

// Whether the peer has no stream, while another peer with the same addresses has one.
bool CoordinatorCore::Impl::Succeeded(PeerId id) const {
  const auto it = peers_.find(id);
  if (it == peers_.end() || it->second.session || it->second.record.endpoints.empty()) return false;
  return std::any_of(peers_.begin(), peers_.end(), [&](const auto& entry) {
    return entry.second.session && entry.second.record.endpoints == it->second.record.endpoints;
  });
}

// Removes the peer if neither the coordinator nor an accuser hears it: then the peer is dead, and
// not just one network path. After a restart of the coordinator a peer without a stream may be
// about to come back. So it is removed before its time only if all witnesses accuse it, or another
// peer listens at its address.
void CoordinatorCore::Impl::BuryIfAccused(PeerId peer) {
  const bool quiet = Quiet(peer);
  const bool succeeded = Succeeded(peer);
  if (Attached(peer) && !quiet) return;
  for (const GroupKey& key : GroupsOf(peer)) {
    const Group& group = groups_.at(key);
    const bool by_all = group.AccusedByAll(peer);
    if (!by_all && (!group.Accused(peer, now_) || !(quiet || succeeded))) continue;
    const Peer& dead = peers_.at(peer);
    const std::string here = dead.session
                                 ? "it is silent for " + std::to_string(config_.detect_ms) + " ms"
                             : dead.closed ? "its stream closed"
                             : succeeded   ? "another peer listens at its address"
                                           : "it did not come back after the coordinator's restart";
    PeerDied(peer,
             here + " and lost by " + List(group.Accusers(peer), " ", kNamesShownMax) + " of " +
                 ToString(key),
             dead.session ? config_.detect_ms : 0);
    return;
  }
}

// ------------------------------------------------------------------------------ messages

Violation CoordinatorCore::Impl::Handle(PeerId, const control::Hello&) {
  return "a second Hello on one stream";
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Join& join) {
  if (Group* group = FindGroup(join.group)) {
    const MemberId known = group->FindRequest(peer, join.request);
    if (known) {
      Send(peer, group->PendingOf(known));
      return std::nullopt;
    }
  }
  const std::string refusal = RefuseJoin(peer, join);
  if (!refusal.empty()) {
    Send(peer,
         control::JoinRefused{join.request, join.group, {Code::kFailedPrecondition, refusal}});
    Note("refuse", peer, "join refused peer=" + ToString(peer) + " reason=" + refusal);
    return std::nullopt;
  }
  EnsureGroup(join.group);
  const MemberId member(runs_.at(join.group.run).next_member++);
  On(join.group, [&](Group& group, GroupOutput* out) {
    group.Join(peers_.at(peer).record, join, member, out);
  });
  return std::nullopt;
}

// Returns why the group cannot be made; "": it exists, or it can be made.
std::string CoordinatorCore::Impl::RefuseGroup(const GroupKey& key) const {
  const std::string until = "; a run that has had no member for " +
                            std::to_string(kRunEmptyMax / Seconds(1)) + " s is forgotten";
  if (!runs_.contains(key.run) && runs_.size() >= LH_COORDINATOR_RUNS_MAX) {
    return "the coordinator has " + std::to_string(runs_.size()) +
           " runs, the most it can have (LH_COORDINATOR_RUNS_MAX)" + until;
  }
  if (!groups_.contains(key) && groups_.size() >= LH_COORDINATOR_GROUPS_MAX) {
    return "the coordinator has " + std::to_string(groups_.size()) +
           " groups of all its runs, the most it can have (LH_COORDINATOR_GROUPS_MAX)" + until;
  }
  return "";
}

// Returns why the peer cannot have a further member in the group; "": it can.
std::string CoordinatorCore::Impl::RefuseJoin(PeerId peer, const control::Join& join) const {
  const std::string what =
      "join of " + ToString(join.group) + " at " + ToString(peer) + " refused: ";
  if (Draining(peer)) return what + "the peer is draining; join at another host";
  if (const std::string full = RefuseGroup(join.group); !full.empty()) return what + full;
  const auto group = groups_.find(join.group);
  size_t members = 0;
  size_t local = 0;
  if (group != groups_.end()) {
    members = group->second.record().members.size();
    local = group->second.CountMembers(peer);
  }
  if (members >= LH_MEMBERS_MAX) {
    return what + "the group has " + std::to_string(members) +
           " members, the most it can have (LH_MEMBERS_MAX)";
  }
  if (local >= LH_LOCAL_MEMBERS_MAX) {
    return what + "the peer has " + std::to_string(local) +
           " members of the group, the most it can have (LH_LOCAL_MEMBERS_MAX)";
  }
  if (group != groups_.end()) {
    const std::string objection = group->second.ObjectionTo(peer, join);
    if (!objection.empty()) return what + objection;
  }
  const size_t groups = local > 0 ? 0 : GroupsOf(peer).size();
  if (groups >= LH_GROUPS_MAX) {
    return what + "the peer takes part in " + std::to_string(groups) +
           " groups, the most it can (LH_GROUPS_MAX)";
  }
  if (join.wish.cohort.empty()) return "";
  uint32_t size = 0;
  const size_t fellows = CountCohort({join.group.run, peer, join.wish.cohort}, &size);
  if (fellows > 0 && size != join.wish.cohort_size) {
    return what + "cohort " + join.wish.cohort + " has " + std::to_string(join.wish.cohort_size) +
           " members by this join and " + std::to_string(size) +
           " by the others': give all the same cohort_size";
  }
  if (fellows >= join.wish.cohort_size) {
    return what + "cohort " + join.wish.cohort + " has its " + std::to_string(fellows) +
           " members already: give another cohort, or a larger cohort_size at all of them";
  }
  return "";
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Leave& leave) {
  if (FindGroup(leave.group) == nullptr) {
    Send(peer, control::Removed{leave.group, leave.member, control::Removal::kLeft,
                                "the coordinator does not know the group (any more)"});
    return std::nullopt;
  }
  On(leave.group, [&](Group& group, GroupOutput* out) { group.Leave(peer, leave, out); });
  return std::nullopt;
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Vote& vote) {
  if (FindGroup(vote.group) == nullptr) {
    Send(peer, control::Removed{vote.group, vote.member, control::Removal::kUnknown,
                                "the coordinator does not know the group (any more)"});
    return std::nullopt;
  }
  return On(vote.group,
            [&](Group& group, GroupOutput* out) { return group.Vote(peer, vote, out); });
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::EpochReady& ready) {
  if (FindGroup(ready.group) == nullptr) return std::nullopt;
  return On(ready.group, [&](Group& group, GroupOutput*) { return group.Ready(peer, ready); });
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::EpochFailed& failed) {
  if (FindGroup(failed.group) == nullptr) return std::nullopt;
  Violation violation =
      On(failed.group, [&](Group& group, GroupOutput*) { return group.Failed(peer, failed); });
  if (!violation) {
    for (const control::Unreachable& other : failed.unreachable) BuryIfAccused(other.peer);
  }
  return violation;
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::LinkLost& lost) {
  if (FindGroup(lost.group) == nullptr) return std::nullopt;
  Violation violation = On(lost.group, [&](Group& group, GroupOutput* out) {
    return group.LinkLost(peer, lost, now_, out);
  });
  if (!violation) BuryIfAccused(lost.peer);
  return violation;
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::CancelOp& cancel) {
  if (FindGroup(cancel.group) == nullptr) return std::nullopt;
  return On(cancel.group,
            [&](Group& group, GroupOutput* out) { return group.CancelOp(peer, cancel, out); });
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Dispute& dispute) {
  if (FindGroup(dispute.group) == nullptr) return std::nullopt;
  return On(dispute.group,
            [&](Group& group, GroupOutput* out) { return group.Dispute(peer, dispute, out); });
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Heartbeat& heartbeat) {
  std::map<GroupKey, control::GroupLoad> loads;
  for (const control::GroupLoad& load : heartbeat.loads) {
    if (FindGroup(load.group) != nullptr) loads[load.group] = load;
  }
  peers_.at(peer).loads = std::move(loads);
  peers_.at(peer).fetches = heartbeat.fetches;
  return std::nullopt;
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Draining&) {
  peers_.at(peer).draining = true;
  return std::nullopt;
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::SyncVote& vote) {
  if (FindGroup(vote.group) == nullptr) {
    Send(peer, control::Removed{vote.group, vote.member, control::Removal::kUnknown,
                                "the coordinator does not know the group (any more)"});
    return std::nullopt;
  }
  return On(vote.group,
            [&](Group& group, GroupOutput* out) { return group.Sync(peer, vote, out); });
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::FetchDone& done) {
  if (FindGroup(done.group) == nullptr) return std::nullopt;
  On(done.group, [&](Group& group, GroupOutput* out) { group.FetchDone(peer, done, out); });
  return std::nullopt;
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::PeerTried& tried) {
  if (FindGroup(tried.group) == nullptr) return std::nullopt;
  On(tried.group, [&](Group& group, GroupOutput*) { group.Tried(peer, tried); });
  return std::nullopt;
}

// Ignores measurements of links to peers that are unknown here.
Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::LinkReport& report) {
  for (const control::LinkMeasure& link : report.links) {
    if (link.from != peer && link.to != peer) {
      return "a measurement of the link from " + ToString(link.from) + " to " + ToString(link.to) +
             ", of which it is no end";
    }
  }
  const bool host_changed =
      links_.RecordHost(peer, report.up_bytes_per_second, report.down_bytes_per_second, now_);
  std::vector<PeerId> others;  // the peers whose link to `peer` has changed
  for (const control::LinkMeasure& link : report.links) {
    if (!peers_.contains(link.from) || !peers_.contains(link.to)) continue;
    const bool news = link.small_packets && links_.SmallPackets({link.from, link.to}, now_).empty();
    if (links_.Record(link, now_)) others.push_back(link.from == peer ? link.to : link.from);
    if (news) {
      Note("large_packets_vanish", peer,
           "large packets vanish from=" + ToString(link.from) + " to=" + ToString(link.to) +
               ": their lanes use small ones; check the MTU of the path, and that ICMP "
               "\"fragmentation needed\" is let through");
    }
  }
  for (auto& [key, group] : groups_) {
    if (!group.HasPeer(peer)) continue;
    const bool concerned =
        host_changed || std::any_of(others.begin(), others.end(),
                                    [&g = group](PeerId other) { return g.HasPeer(other); });
    if (concerned) group.LinkMeasured(now_);
  }
  return std::nullopt;
}

// ------------------------------------------------------------------------------ operator and time

void CoordinatorCore::Impl::Handle(const EvictMember& event) {
  if (FindGroup(event.group) == nullptr) return;
  On(event.group, [&](Group& group, GroupOutput* out) {
    group.Evict(event.member, "evicted by an operator: " + event.reason, out);
  });
}

void CoordinatorCore::Impl::Handle(const DrainPeer& event) {
  const auto it = peers_.find(event.peer);
  if (it == peers_.end()) return;
  it->second.draining = true;
  it->second.drain_reason = Clean("drained by an operator: " + event.reason);
  Send(event.peer, control::Drain{it->second.drain_reason});
}

void CoordinatorCore::Impl::Handle(const RingOrdered& event) {
  if (!ordering_ || event.request != ring_requests_) return;
  const Ordering asked = *std::exchange(ordering_, std::nullopt);
  if (FindGroup(asked.group) != nullptr) {
    On(asked.group, [&](Group& group, GroupOutput* out) {
      group.RingFound(event.ring, asked.epoch, event.score, event.present, out);
    });
  }
  // The search of another group may have fallen due meanwhile. If it waited for the next
  // TimePassed, that event would look late, as if this process had been held up.
  OrderARing();
}

// Asks for a ring if the search of a group is due. If several are due, asks for the group that fell
// due first. One ring is solved at a time, because a large ring takes seconds and much memory.
void CoordinatorCore::Impl::OrderARing() {
  if (ordering_) return;
  std::map<std::pair<Tick, GroupKey>, Group*> due;
  for (auto& [key, group] : groups_) {
    if (group.OrderDue() <= now_) due.emplace(std::pair(group.OrderDue(), key), &group);
  }
  for (const auto& [when, group] : due) {
    if (!group->OrderFallsDue(now_) || links_.size() == 0) continue;
    const GroupRecord& record = group->record();
    OrderRing order{++ring_requests_, record.group, group->Ring(), {}};
    order.problem.links = links_.Matrix(order.peers, now_);
    order.problem.seed = record.committed.value();
    std::map<PeerId, size_t> place;
    for (PeerId peer : order.peers) {
      order.problem.present.push_back(static_cast<uint32_t>(place.size()));
      place.emplace(peer, place.size());
    }
    for (const BlockedRecord& blocked : record.blocked) {
      const auto a = place.find(blocked.pair.a);
      const auto b = place.find(blocked.pair.b);
      if (a == place.end() || b == place.end()) continue;
      order.problem.links.At(a->second, b->second).blocked = true;
      order.problem.links.At(b->second, a->second).blocked = true;
    }
    ordering_ = Ordering{record.group, record.committed};
    actions_.push_back(std::move(order));
    return;
  }
}

void CoordinatorCore::Impl::Handle(const TimePassed&) {
  if (!isolated_ && AnyoneFallsDue() && HearsNobody()) {
    isolated_ = true;
    isolated_since_ = now_;
    Note("isolated", PeerId{},
         "no peer is heard, so nobody is removed for silence until one is peers=" +
             std::to_string(peers_.size()));
  }
  std::vector<SessionId> silent;
  std::vector<PeerId> quiet_peers;
  for (auto& [id, session] : sessions_) {
    if (session.silent_at <= now_) silent.push_back(id);
    if (session.quiet_at > now_) continue;
    session.quiet_at = kNever;
    if (session.peer) quiet_peers.push_back(session.peer);
  }
  for (auto& [id, peer] : peers_) {
    if (peer.session || peer.quiet_at > now_) continue;
    peer.quiet_at = kNever;
    quiet_peers.push_back(id);
  }
  for (auto& [key, group] : groups_) {
    for (const PeerId peer : group.NewlyAccused(now_)) quiet_peers.push_back(peer);
  }
  for (const PeerId peer : quiet_peers) BuryIfAccused(peer);
  const std::string quiet = "silent for " + std::to_string(kLease * config_.detect_ms) + " ms";
  for (SessionId id : silent) {
    const PeerId peer = sessions_.at(id).peer;
    Drop(id, quiet, StreamEnd::kGone);
    if (MayDie(peer)) PeerDied(peer, quiet, static_cast<uint32_t>(kLease) * config_.detect_ms);
  }
  std::vector<PeerId> dead;
  for (const auto& [id, peer] : peers_) {
    if (peer.dead_at <= now_ && MayDie(id)) dead.push_back(id);
  }
  for (PeerId id : dead) {
    PeerDied(id,
             peers_.at(id).closed ? "no stream of its peer in time"
                                  : "its peer did not come back after the coordinator's restart",
             static_cast<uint32_t>(kLease) * config_.detect_ms);
  }
  for (auto& [key, group] : groups_) {
    if (GroupDeadline(group) > now_) continue;
    On(key, [&](Group& g, GroupOutput* out) {
      g.OnGraceOver(now_, out);
      if (!isolated_) g.OnSilence(now_, out);
    });
  }
  OrderARing();
  ForgetEmptyRuns();
}

// Whether no peer with a stream was heard for detect_ms.
bool CoordinatorCore::Impl::HearsNobody() const {
  return std::all_of(sessions_.begin(), sessions_.end(), [this](const auto& entry) {
    const Session& session = entry.second;
    return !session.peer || session.quiet_at == kNever || session.quiet_at <= now_;
  });
}

// Whether the peer may be removed for silence. While the coordinator is isolated, a peer with
// members may not, unless its stream ended and was not silent before.
bool CoordinatorCore::Impl::MayDie(PeerId peer) const {
  const auto it = peers_.find(peer);
  return it != peers_.end() && (!isolated_ || it->second.ended || GroupsOf(peer).empty());
}

// Whether a member is to be removed now because it, or its peer, was silent.
bool CoordinatorCore::Impl::AnyoneFallsDue() const {
  return std::any_of(sessions_.begin(), sessions_.end(),
                     [this](const auto& entry) {
                       const Session& session = entry.second;
                       return session.silent_at <= now_ && !GroupsOf(session.peer).empty();
                     }) ||
         std::any_of(peers_.begin(), peers_.end(),
                     [this](const auto& entry) {
                       const auto& [id, peer] = entry;
                       return peer.dead_at <= now_ && !peer.ended && !GroupsOf(id).empty();
                     }) ||
         std::any_of(groups_.begin(), groups_.end(),
                     [this](const auto& entry) { return entry.second.SilenceDue() <= now_; });
}

// A peer is heard again. The other peers get the same time to come back as after a restart of the
// coordinator. A peer that is dead is removed after that time.
void CoordinatorCore::Impl::EndIsolation() {
  isolated_ = false;
  Note("isolated", PeerId{},
       "peers are heard again isolated_ms=" + std::to_string((now_ - isolated_since_) / Millis(1)));
  for (auto& [id, session] : sessions_) Heard(&session);
  for (auto& [id, peer] : peers_) {
    if (peer.session) continue;
    peer.dead_at = TickAfter(now_, config_.detect_ms, kLease);
    peer.quiet_at = TickAfter(now_, config_.detect_ms, kShortLease);
  }
  for (auto& [key, group] : groups_) {
    group.PostponeSilence(now_ - isolated_since_ + kLease * Millis(config_.detect_ms));
  }
}

// The driver is late, so this process did not run for a while. Messages that peers sent meanwhile
// have not been read yet. So the times of silence of all peers start again.
void CoordinatorCore::Impl::ForgiveOwnStall() {
  const int64_t late = now_ - NextDeadline();
  const Tick fresh = TickAfter(now_, config_.detect_ms, kLease);
  for (auto& [id, session] : sessions_) Heard(&session);
  for (auto& [id, peer] : peers_) {
    if (peer.dead_at != kNever) peer.dead_at = std::max(peer.dead_at, fresh);
    if (peer.session || peer.quiet_at == kNever) continue;
    peer.quiet_at = TickAfter(now_, config_.detect_ms, kShortLease);
  }
  for (auto& [key, group] : groups_) group.Postpone(late + Millis(config_.detect_ms));
}

void CoordinatorCore::Impl::ForgetEmptyRuns() {
  std::vector<std::string> forgotten;
  for (const auto& [run, since] : empty_since_) {
    if (since + kRunEmptyMax <= now_) forgotten.push_back(run);
  }
  for (const std::string& run : forgotten) {
    empty_since_.erase(run);
    runs_.erase(run);
    std::erase_if(groups_, [&](const auto& group) { return group.first.run == run; });
    std::erase_if(touched_, [&](const GroupKey& key) { return key.run == run; });
  }
}

Tick CoordinatorCore::Impl::NextDeadline() const {
  if (!started_) return runs_.empty() ? kNever : Tick{};
  Tick next = kNever;
  for (const auto& [id, session] : sessions_) {
    next = std::min({next, session.quiet_at, session.silent_at});
  }
  for (const auto& [id, peer] : peers_) {
    if (peer.session) continue;
    next = std::min(next, peer.quiet_at);
    if (MayDie(id)) next = std::min(next, peer.dead_at);
  }
  for (const auto& [key, group] : groups_) {
    next = std::min(next, GroupDeadline(group));
    if (!ordering_) next = std::min(next, group.OrderDue());
  }
  for (const auto& [run, since] : empty_since_) next = std::min(next, since + kRunEmptyMax);
  return next;
}

// ------------------------------------------------------------------------------ groups

Group* CoordinatorCore::Impl::FindGroup(const GroupKey& key) {
  const auto it = groups_.find(key);
  return it == groups_.end() ? nullptr : &it->second;
}

Group& CoordinatorCore::Impl::EnsureGroup(const GroupKey& key) {
  if (!runs_.contains(key.run)) {
    RunRecord record;
    record.run = key.run;
    record.secret = RunSecret(config_.entropy, ++runs_created_, key.run);
    runs_.emplace(key.run, record);
  }
  if (Group* group = FindGroup(key)) return *group;
  GroupRecord record;
  record.group = key;
  record.sign_ops = config_.sign_ops;
  Group group(record, runs_.at(key.run).secret, config_, this);
  return groups_.emplace(key, std::move(group)).first->second;
}

std::vector<GroupKey> CoordinatorCore::Impl::GroupsOf(PeerId peer) const {
  std::vector<GroupKey> keys;
  for (const auto& [key, group] : groups_) {
    if (group.HasPeer(peer)) keys.push_back(key);
  }
  return keys;
}

// ------------------------------------------------------------------------------ cohorts

template <class Groups, class Call>
void CoordinatorCore::Impl::ForGroupsOf(Groups& groups, const Cohort& cohort, Call call) {
  for (auto it = groups.lower_bound({cohort.run, 0});
       it != groups.end() && it->first.run == cohort.run; ++it) {
    if (!it->second.Cohort(cohort.peer, cohort.name).empty()) call(it->first, it->second);
  }
}

bool CoordinatorCore::Impl::CohortBegun(const std::string& run, PeerId peer,
                                        const std::string& cohort) const {
  bool begun = false;
  ForGroupsOf({run, peer, cohort}, [&](const GroupKey&, const Group& group) {
    for (const MemberRecord* member : group.Cohort(peer, cohort)) {
      begun = begun || group.AdmittedOrPrepared(*member);
    }
  });
  return begun;
}

// Returns how many members of the cohort there are. Sets `*size` to how many there have to be.
size_t CoordinatorCore::Impl::CountCohort(const Cohort& cohort, uint32_t* size) const {
  size_t count = 0;
  ForGroupsOf(cohort, [&](const GroupKey&, const Group& group) {
    for (const MemberRecord* member : group.Cohort(cohort.peer, cohort.name)) {
      *size = member->cohort_size;
      ++count;
    }
  });
  return count;
}

// The cohort is complete. Each of its groups admits its member in the same ballot: the first one
// that none of these groups has begun.
void CoordinatorCore::Impl::SetNumber(const Cohort& cohort) {
  uint64_t newest = 0;
  ForGroupsOf(cohort, [&](const GroupKey&, const Group& group) {
    newest = std::max(newest, group.NewestBallot());
  });
  ForGroupsOf(cohort, [&](const GroupKey& key, Group& group) {
    group.AdmitCohortAfter(cohort.peer, cohort.name, newest);
    touched_.insert(key);
  });
}

// A cohort is complete when its last member has joined, and the members of all its groups can reach
// its peer. Returns whether a cohort became complete.
bool CoordinatorCore::Impl::CompleteCohorts() {
  std::set<Cohort> open;
  for (const GroupKey& key : touched_) {
    const auto group = groups_.find(key);
    if (group == groups_.end()) continue;
    for (const MemberRecord& member : group->second.record().members) {
      if (member.after == kCohortIncomplete) open.insert({key.run, member.peer, member.cohort});
    }
  }
  bool any = false;
  for (const Cohort& cohort : open) {
    uint32_t size = 0;
    if (CountCohort(cohort, &size) != size) continue;
    bool reached = true;
    ForGroupsOf(cohort, [&](const GroupKey&, const Group& group) {
      reached = reached && group.Reached(cohort.peer);
    });
    if (!reached) continue;
    SetNumber(cohort);
    any = true;
  }
  return any;
}

void CoordinatorCore::Impl::RetireFellows() {
  while (!bereft_.empty()) {
    const std::pair<Cohort, std::string> loss = bereft_.front();
    bereft_.erase(bereft_.begin());
    std::vector<GroupKey> keys;
    ForGroupsOf(loss.first, [&](const GroupKey& key, const Group&) { keys.push_back(key); });
    for (const GroupKey& key : keys) {
      On(key, [&](Group& group, GroupOutput* out) {
        group.RemoveCohort(loss.first.peer, loss.first.name, loss.second, out);
      });
    }
  }
}

// Handles cohorts that a ballot has passed over: it did not admit a member that it was to admit,
// because the peer was not attached or had begun to drain. If no group has admitted a member of the
// cohort, the whole cohort waits for a later ballot. Otherwise the whole cohort is removed, because
// its members can no longer come in together.
void CoordinatorCore::Impl::MindPassedOver() {
  std::set<Cohort> passed_over;
  for (const GroupKey& key : touched_) {
    const auto group = groups_.find(key);
    if (group == groups_.end()) continue;
    for (const MemberRecord& member : group->second.record().members) {
      if (group->second.PassedOver(member))
        passed_over.insert({key.run, member.peer, member.cohort});
    }
  }
  for (const Cohort& cohort : passed_over) {
    if (!CohortBegun(cohort.run, cohort.peer, cohort.name)) {
      SetNumber(cohort);
    } else {
      bereft_.emplace_back(cohort, "cohort " + cohort.name +
                                       " could not be admitted in all its groups at one boundary: "
                                       "join again");
    }
  }
}

// Advances all touched groups, in order of their names, until nothing changes any more.
void CoordinatorCore::Impl::AdvanceTouched() {
  std::set<std::string> runs;
  for (int round = 0;; ++round) {
    LH_CHECK(round < 64) << "cohorts do not come to rest";
    RetireFellows();
    CompleteCohorts();
    const std::set<GroupKey> advanced = touched_;
    for (const GroupKey& key : advanced) {
      On(key, [this](Group& group, GroupOutput* out) { group.Advance(now_, out); });
      runs.insert(key.run);
    }
    MindPassedOver();
    if (bereft_.empty() && touched_ == advanced && !CompleteCohorts()) break;
  }
  const std::set<GroupKey> touched = touched_;
  for (const std::string& run : runs) {
    bool empty = true;
    for (auto it = groups_.lower_bound({run, 0}); it != groups_.end() && it->first.run == run;
         ++it) {
      empty = empty && it->second.Empty();
    }
    if (!empty) {
      empty_since_.erase(run);
    } else {
      empty_since_.emplace(run, now_);
    }
  }
  // Forget peers without a stream that lost their last member.
  if (!touched.empty()) {
    std::erase_if(peers_, [this](const auto& entry) {
      const Peer& peer = entry.second;
      if (peer.session || peer.awaited() || !GroupsOf(entry.first).empty()) return false;
      links_.Forget(entry.first);
      return true;
    });
  }
}

// ------------------------------------------------------------------------------ output

void CoordinatorCore::Impl::Emit(const GroupKey& key, GroupOutput output) {
  for (const Removed& removed : output.removed) {
    const MemberRecord& member = removed.member;
    bereft_.emplace_back(Cohort{key.run, member.peer, member.cohort},
                         "its cohort " + member.cohort + " lost " + ToString(member.member) +
                             " of " + ToString(key) + ": " + removed.reason);
  }
  for (auto& [peer, message] : output.messages) Send(peer, std::move(message));
  for (EventRecord& event : output.notices) actions_.push_back(Notice{std::move(event)});
}

// A message to a peer without a stream is dropped. When the peer attaches, it gets what it missed.
void CoordinatorCore::Impl::Send(PeerId peer, control::CoordinatorMessage message) {
  const auto it = peers_.find(peer);
  if (it == peers_.end() || !it->second.session) return;
  actions_.push_back(ToPeer{it->second.session, std::move(message)});
}

void CoordinatorCore::Impl::Note(std::string kind, PeerId peer, std::string text) {
  EventRecord event;
  event.kind = std::move(kind);
  event.peer = peer;
  event.text = std::move(text);
  actions_.push_back(Notice{std::move(event)});
}

// Puts all changes of the step, as one transaction, before all its messages.
void CoordinatorCore::Impl::EmitPersist() {
  std::set<std::string> runs;
  for (const GroupKey& key : touched_) runs.insert(key.run);
  std::vector<Mutation> mutations;
  if (store_ != durable_.store) mutations.push_back(PutStore{store_});
  for (const std::string& run : runs) {
    const auto record = runs_.find(run);
    if (record == runs_.end()) continue;
    const auto durable = durable_.runs.find(run);
    if (durable == durable_.runs.end() || durable->second != record->second) {
      mutations.push_back(PutRun{record->second});
    }
  }
  for (const GroupKey& key : touched_) {
    const GroupRecord& record = groups_.at(key).record();
    const auto durable = durable_.groups.find(key);
    if (durable == durable_.groups.end() || durable->second != record) {
      mutations.push_back(PutGroup{record});
    }
  }
  // Only ForgetEmptyRuns() removes groups and runs.
  if (durable_.groups.size() > groups_.size()) {
    for (const auto& [key, record] : durable_.groups) {
      if (!groups_.contains(key)) mutations.push_back(DeleteGroup{key});
    }
  }
  if (durable_.runs.size() > runs_.size()) {
    for (const auto& [run, record] : durable_.runs) {
      if (!runs_.contains(run)) mutations.push_back(DeleteRun{run});
    }
  }
  for (const auto& [id, peer] : peers_) {
    if (peer.drain_reason.empty()) continue;
    const auto durable = durable_.drains.find(id);
    if (durable == durable_.drains.end() || durable->second.reason != peer.drain_reason) {
      mutations.push_back(PutDrain{{id, peer.drain_reason}});
    }
  }
  for (const auto& [id, drain] : durable_.drains) {
    if (!peers_.contains(id)) mutations.push_back(DeleteDrain{id});
  }
  touched_.clear();
  if (mutations.empty()) return;
  for (const Mutation& mutation : mutations) Apply(mutation, &durable_);
  actions_.insert(actions_.begin(), Persist{std::move(mutations)});
}

bool CoordinatorCore::Impl::Attached(PeerId peer) const {
  const auto it = peers_.find(peer);
  return it != peers_.end() && it->second.session;
}

uint32_t CoordinatorCore::Impl::UnheardMs(SessionId session) const {
  const int64_t lease = int64_t{kLease} * Millis(config_.detect_ms);
  const int64_t us = lease - (sessions_.at(session).silent_at - now_);
  return static_cast<uint32_t>(std::clamp<int64_t>(us / Millis(1), 0, UINT32_MAX));
}

bool CoordinatorCore::Impl::HeardWithin(PeerId peer, int64_t us) const {
  if (!Attached(peer)) return false;
  const int64_t lease = int64_t{kLease} * Millis(config_.detect_ms);
  return sessions_.at(peers_.at(peer).session).silent_at - now_ >= lease - us;
}

bool CoordinatorCore::Impl::Draining(PeerId peer) const {
  const auto it = peers_.find(peer);
  return it != peers_.end() && it->second.draining;
}

// ------------------------------------------------------------------------------ view and checks

std::optional<DirectionView> CoordinatorCore::Impl::Direction(PeerId from, PeerId to) const {
  const std::optional<MeasuredLink> link = links_.Find(from, to, now_);
  if (!link) return std::nullopt;
  const auto age_s = static_cast<uint32_t>((now_ - link->at) / Seconds(1));
  return DirectionView{from, to,
                       LinkView{link->bytes_per_second, link->rtt_us, age_s, link->at_least},
                       link->small_packets, link->held};
}

std::optional<PaceView> CoordinatorCore::Impl::PaceOf(const GroupKey& key) const {
  const auto found = groups_.find(key);
  if (found == groups_.end()) return std::nullopt;
  return links_.PaceOf(found->second.Ring(), found->second.Blocked(), now_);
}

Holdings CoordinatorCore::Impl::HoldingsOf(const std::set<PeerId>& peers) const {
  Holdings holdings;
  for (const auto& [key, group] : groups_) {
    for (const MemberRecord& member : group.record().members) {
      if (!peers.contains(member.peer)) continue;
      ++holdings.members;
      holdings.groups.insert(key);
    }
  }
  return holdings;
}

bool CoordinatorCore::Impl::KnowsJoin(PeerId peer, const control::Join& join) const {
  const auto group = groups_.find(join.group);
  return group != groups_.end() && group->second.FindRequest(peer, join.request);
}

Overview CoordinatorCore::Impl::GetOverview() const {
  Overview overview;
  overview.incarnation = config_.incarnation;
  for (const auto& [key, group] : groups_) {
    GroupView view = group.View();
    if (isolated_) {
      view.waiting_for = "the coordinator hears no peer, so nobody is removed for silence" +
                         (view.waiting_for.empty() ? "" : "; " + view.waiting_for);
    }
    const std::vector<PeerId> ring = group.Ring();
    for (PeerId id : ring) {
      const Peer& peer = peers_.at(id);
      PeerView& shown = view.ring.emplace_back();
      const Shares& shares = group.ToldShares();
      shown.share = shares.size() == ring.size() ? shares[view.ring.size() - 1]
                                                 : kShareUnits / static_cast<uint32_t>(ring.size());
      shown.peer = id;
      shown.host = peer.record.host;
      if (!peer.record.endpoints.empty()) shown.endpoint = peer.record.endpoints.front();
      shown.attached = static_cast<bool>(peer.session);
      if (shown.attached) shown.unheard_ms = UnheardMs(peer.session);
      shown.draining = peer.draining;
      if (const auto rates = links_.HostOf(id, now_)) {
        shown.up_bytes_per_second = rates->up;
        shown.down_bytes_per_second = rates->down;
      }
      shown.load.group = key;
      const auto load = peer.loads.find(key);
      if (load != peer.loads.end()) shown.load = load->second;
    }
    view.small_packets = links_.SmallPackets(group.Ring(), now_);
    for (size_t i = 0; i < view.ring.size(); ++i) {
      const PeerId next = view.ring[(i + 1) % view.ring.size()].peer;
      if (const auto link = Direction(view.ring[i].peer, next)) view.ring[i].next = link->link;
    }
    for (MemberView& member : view.members) {
      for (const control::FetchLoad& fetch : peers_.at(member.peer).fetches) {
        if (fetch.group == key && fetch.member == member.member) member.fetch = fetch.progress;
      }
    }
    overview.groups.push_back(std::move(view));
  }
  return overview;
}

void CoordinatorCore::Impl::CheckInvariants() const {
  LH_CHECK(actions_.empty() && touched_.empty()) << "a step left something behind";
  if (!started_) return;
  for (const auto& [id, session] : sessions_) {
    LH_CHECK(!session.peer || peers_.at(session.peer).session == id) << "session " << id.value();
  }
  for (const auto& [id, peer] : peers_) {
    LH_CHECK(peer.record.peer == id) << ToString(id);
    LH_CHECK(peer.session || peer.awaited() || !GroupsOf(id).empty())
        << ToString(id) << " is kept for nothing";
    if (!peer.session) continue;
    LH_CHECK(sessions_.contains(peer.session)) << ToString(id);
    LH_CHECK(sessions_.at(peer.session).peer == id) << ToString(id);
    LH_CHECK(peer.dead_at == kNever && !peer.closed) << ToString(id);
  }
  Records now;
  now.store = store_;
  now.runs = runs_;
  for (const auto& [id, peer] : peers_) {
    if (!peer.drain_reason.empty()) now.drains.emplace(id, DrainRecord{id, peer.drain_reason});
  }
  for (const auto& [key, group] : groups_) {
    group.CheckInvariants();
    LH_CHECK(group.record().group == key) << ToString(key);
    LH_CHECK(group.record().members.size() <= LH_MEMBERS_MAX) << ToString(key);
    LH_CHECK(runs_.contains(key.run)) << ToString(key);
    for (const MemberRecord& member : group.record().members) {
      LH_CHECK(member.member.value() < runs_.at(key.run).next_member) << ToString(key);
      LH_CHECK(peers_.contains(member.peer)) << ToString(key) << " " << ToString(member.member);
    }
    now.groups.emplace(key, group.record());
  }
  LH_CHECK(now == durable_) << "a change was not given to Persist";
  // A cohort is complete before one of its members is admitted, and is removed in one step.
  std::map<Cohort, std::pair<size_t, uint32_t>> cohorts;
  std::set<Cohort> admitted;
  for (const auto& [key, record] : now.groups) {
    for (const MemberRecord& member : record.members) {
      if (member.cohort.empty() || member.departs) continue;
      const Cohort cohort{key.run, member.peer, member.cohort};
      auto& [count, size] = cohorts[cohort];
      LH_CHECK(count == 0 || size == member.cohort_size) << "cohort " << member.cohort;
      ++count;
      size = member.cohort_size;
      if (member.joined) admitted.insert(cohort);
    }
  }
  for (const Cohort& cohort : admitted) {
    const auto& [count, size] = cohorts.at(cohort);
    LH_CHECK(count == size) << "cohort " << cohort.name << " has " << count << " of " << size;
  }
}

uint64_t CoordinatorCore::Impl::Digest() const {
  Digester digest;
  digest.Add(config_).Add(store_).Add(started_).Add(runs_created_).Add(isolated_);
  if (isolated_) digest.Add(isolated_since_);
  links_.AddTo(&digest);
  digest.Add(ring_requests_).Add(uint64_t{ordering_.has_value()});
  if (ordering_) digest.Add(ordering_->group).Add(ordering_->epoch);
  digest.Add(sessions_.size());
  for (const auto& [id, session] : sessions_) {
    digest.Add(id).Add(session.peer).Add(session.quiet_at).Add(session.silent_at);
  }
  digest.Add(peers_.size());
  for (const auto& [id, peer] : peers_) {
    digest.Add(id).Add(peer.session).Add(uint64_t{peer.closed}).Add(peer.dead_at).Add(peer.ended);
    digest.Add(peer.quiet_at);
    digest.Add(peer.draining).Add(peer.drain_reason).Add(peer.record);
    // What heartbeats tell besides explains, and decides nothing.
    for (const auto& [key, load] : peer.loads) {
      digest.Add(key).Add(load.ops_open).Add(load.ops_settled);
      digest.Add(load.bytes_sent).Add(load.bytes_received);
    }
  }
  digest.Add(runs_).Add(groups_).Add(empty_since_);
  return digest.value();
}

// ------------------------------------------------------------------------------ the shell

RingOrdered Solve(const OrderRing& order) {
  const RingSolution solution = SolveRing(order.problem);
  RingOrdered answer{order.request, order.group, {}, solution.score, solution.present};
  for (const uint32_t node : solution.order) answer.ring.push_back(order.peers[node]);
  return answer;
}

CoordinatorCore::CoordinatorCore(CoreConfig config, Records records)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(records))) {}
CoordinatorCore::CoordinatorCore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CoordinatorCore::~CoordinatorCore() = default;
CoordinatorCore::CoordinatorCore(CoordinatorCore&&) noexcept = default;
CoordinatorCore& CoordinatorCore::operator=(CoordinatorCore&&) noexcept = default;

std::vector<Action> CoordinatorCore::Step(const Event& event, Tick now) {
  return impl_->Step(event, now);
}
Tick CoordinatorCore::NextDeadline() const { return impl_->NextDeadline(); }
bool CoordinatorCore::HasPeer(PeerId peer) const { return impl_->HasPeer(peer); }
Holdings CoordinatorCore::HoldingsOf(const std::set<PeerId>& peers) const {
  return impl_->HoldingsOf(peers);
}
bool CoordinatorCore::KnowsJoin(PeerId peer, const control::Join& join) const {
  return impl_->KnowsJoin(peer, join);
}
Overview CoordinatorCore::GetOverview() const { return impl_->GetOverview(); }
std::vector<DirectionView> CoordinatorCore::LinksOf(const GroupView& group) const {
  std::vector<DirectionView> links;
  for (const PeerView& from : group.ring) {
    for (const PeerView& to : group.ring) {
      if (from.peer == to.peer) continue;
      if (const auto link = impl_->Direction(from.peer, to.peer)) links.push_back(*link);
    }
  }
  return links;
}
std::optional<PaceView> CoordinatorCore::PaceOf(const GroupKey& group) const {
  return impl_->PaceOf(group);
}
void CoordinatorCore::CheckInvariants() const { impl_->CheckInvariants(); }
uint64_t CoordinatorCore::Digest() const { return impl_->Digest(); }
CoordinatorCore CoordinatorCore::Clone() const {
  return CoordinatorCore(std::make_unique<Impl>(*impl_));
}

}  // namespace longhaul::coordinator
