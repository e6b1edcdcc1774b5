#include "coordinator/core/coordinator_core.h"

#include <algorithm>
#include <set>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "coordinator/core/cohorts.h"
#include "coordinator/core/group.h"
#include "coordinator/core/leases.h"
#include "coordinator/core/link_table.h"
#include "coordinator/core/peers.h"
#include "coordinator/core/text.h"
#include "coordinator/core/token.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

// A run without members is forgotten after this time.
constexpr int64_t kRunEmptyMax = Seconds(600);

constexpr char kUnknownGroup[] = "the coordinator does not know the group (any more)";

}  // namespace

// Owns the peers (peers.h) and the groups. Each group is a state machine of its own (group.h),
// which knows of peers only what the PeerDirectory tells. An event touches some groups. At the end
// of a step each of these advances. Then one Persist with all changes goes before all other
// actions.
class CoordinatorCore::Impl {
 public:
  Impl(CoreConfig config, Records records);

  std::vector<Action> Step(const Event& event, Tick now);
  Tick NextDeadline() const;
  bool HasPeer(PeerId peer) const { return peers_.Find(peer) != nullptr; }
  Holdings HoldingsOf(const std::set<PeerId>& peers) const;
  bool KnowsJoin(PeerId peer, const control::Join& join) const;
  Overview GetOverview() const;
  // What is known of the link from one peer to another.
  std::optional<DirectionView> Direction(PeerId from, PeerId to) const;
  std::optional<PaceView> PaceOf(const GroupKey& group) const;
  void CheckInvariants() const;

  LH_STATE(Impl, LH_FIELD(config_), LH_FIELD(started_), LH_FIELD(store_), LH_FIELD(peers_),
           LH_FIELD(runs_), LH_FIELD(groups_), LH_FIELD(empty_since_), LH_FIELD(runs_created_),
           LH_FIELD(links_), LH_FIELD(ring_requests_), LH_FIELD(ordering_),
           LH_FIELD(durable_, rule::Aside{}), LH_FIELD(now_, rule::Aside{}),
           LH_FIELD(touched_, rule::Aside{}), LH_FIELD(cohorts_, rule::Aside{}),
           LH_FIELD(actions_, rule::Aside{}));

 private:
  // What groups may ask, while one of their methods runs.
  class Directory : public PeerDirectory {
   public:
    explicit Directory(const Impl* core) : core_(core) {}
    bool Attached(PeerId peer) const override { return core_->peers_.Attached(peer); }
    bool HeardWithin(PeerId peer, int64_t us) const override {
      return core_->peers_.UnheardFor(peer, core_->now_) <= us;
    }
    bool Draining(PeerId peer) const override { return core_->peers_.Draining(peer); }
    bool CohortBegun(const std::string& run, PeerId peer,
                     const std::string& cohort) const override {
      return HasBegun({run, peer, cohort}, core_->groups_);
    }
    control::LinkCost CostOf(const std::vector<PeerId>& ring, const control::BlockedPairs& blocked,
                             const Shares* present) const override {
      return core_->links_.Cost(ring, blocked, present, core_->now_);
    }
    Tick Now() const override { return core_->now_; }

   private:
    const Impl* const core_;
  };

  void Start();
  void Handle(const SessionOpened& event);
  void Handle(const SessionClosed& event);
  void Handle(const FromPeer& event);
  void Handle(const EvictMember& event);
  void Handle(const DrainPeer& event);
  void Handle(const PeerKnocked& event);
  void Handle(const RingOrdered& event);
  void Handle(const TimePassed& event);

  // Messages of a peer that has said Hello. All but these are about one group (Group::Take).
  Violation Handle(PeerId peer, const control::Hello& message);
  Violation Handle(PeerId peer, const control::Join& message);
  Violation Handle(PeerId peer, const control::Heartbeat& message);
  Violation Handle(PeerId peer, const control::Draining& message);
  Violation Handle(PeerId peer, const control::LinkReport& message);
  template <class Message>
  Violation Handle(PeerId peer, const Message& message);

  // The first message of a stream.
  void Greet(SessionId session, const control::PeerMessage& message);
  bool HasKeyOfPeer(const control::Hello& hello) const;
  // Returns why this coordinator may not serve the peer; "": it may.
  std::string RefuseHello(const control::Hello& hello) const;
  void Attach(SessionId session, const control::Hello& hello);
  void LearnTerm(const control::Hello& hello);
  void LearnNumbers(const control::GroupState& said);
  void Forget(PeerId peer);
  void Drop(SessionId session, const std::string& reason, StreamEnd end);
  void Detach(SessionId session, bool ended_here, const std::string& reason);
  void PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms);
  void BuryIfAccused(PeerId peer);
  void ForgiveOwnStall();
  void EndIsolation();
  Tick GroupDeadline(const Group& group) const {
    return peers_.isolated() ? group.GraceDue() : std::min(group.GraceDue(), group.SilenceDue());
  }
  void ForgetEmptyRuns();
  void OrderARing();
  std::string RefuseGroup(const GroupKey& key) const;
  std::string RefuseJoin(PeerId peer, const control::Join& join) const;
  std::string RefuseCohort(PeerId peer, const control::Join& join) const;
  Group& EnsureGroup(const GroupKey& key);
  bool HasGroup(const GroupKey& key) const { return groups_.contains(key); }
  std::vector<GroupKey> GroupsOf(PeerId peer) const;
  Peers::HasMembers has_members() const {
    return [this](PeerId peer) { return !GroupsOf(peer).empty(); };
  }
  // Runs `call(group, step)` on the group, emits its output, and returns what `call` returns.
  template <class Call>
  auto On(const GroupKey& key, Call call) {
    touched_.insert(key);
    GroupOutput output;
    const Directory directory(this);
    const GroupStep step{now_, directory, &output};
    Group& group = groups_.at(key);
    if constexpr (std::is_void_v<decltype(call(group, step))>) {
      call(group, step);
      Emit(key, std::move(output));
    } else {
      auto result = call(group, step);
      Emit(key, std::move(output));
      return result;
    }
  }

  void AdvanceTouched();
  void Emit(const GroupKey& key, GroupOutput output);
  void Send(PeerId peer, control::CoordinatorMessage message);
  void Note(std::string kind, PeerId peer, std::string text);
  void EmitPersist();

  CoreConfig config_;
  bool started_ = false;
  StoreRecord store_;
  Peers peers_;
  std::map<std::string, RunRecord> runs_;
  Groups groups_;
  std::map<std::string, Tick> empty_since_;  // runs without members
  uint64_t runs_created_ = 0;
  LinkTable links_;  // between peers of peers_
  uint64_t ring_requests_ = 0;
  // The ring problem that is being solved. Its request is ring_requests_.
  struct Ordering {
    GroupKey group;
    Epoch epoch;
    LH_FIELDS(Ordering, LH_FIELD(group), LH_FIELD(epoch));
  };
  std::optional<Ordering> ordering_;

  Records durable_;  // what the Persist actions so far have stored: the records above
  // These are used within one step.
  Tick now_;
  std::set<GroupKey> touched_;
  Cohorts cohorts_;
  std::vector<Action> actions_;
};

CoordinatorCore::Impl::Impl(CoreConfig config, Records records)
    : config_(std::move(config)),
      peers_(config_.detect_ms),
      runs_(records.runs),
      durable_(std::move(records)) {
  LH_CHECK(config_.detect_ms > 0);
  LH_CHECK(config_.store != 0);
  LH_CHECK(config_.entropy.size() == kSecretBytes)
      << "CoreConfig.entropy has " << config_.entropy.size() << " bytes";
  for (const auto& [key, record] : durable_.groups) {
    LH_CHECK(runs_.contains(key.run))
        << "the store has group " << ToString(key) << " without its run";
    groups_.emplace(key, Group(record, runs_.at(key.run).secret, config_));
    for (const PeerRecord& peer : record.peers) peers_.Restore(peer);
  }
  for (const auto& [id, drain] : durable_.drains) peers_.Restore(drain);
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
  peers_.AwaitAll(now_);
  for (const auto& [key, group] : groups_) touched_.insert(key);
  for (const auto& [run, record] : runs_) empty_since_[run] = now_;
  if (runs_.empty()) return;
  Note("restart", PeerId{},
       "coordinator restarted runs=" + std::to_string(runs_.size()) + " groups=" +
           std::to_string(groups_.size()) + " peers=" + std::to_string(peers_.all().size()));
  AdvanceTouched();
}

// ------------------------------------------------------------------------------ sessions

void CoordinatorCore::Impl::Handle(const SessionOpened& event) {
  LH_CHECK(peers_.Open(event.session, now_)) << "a session was opened twice";
}

void CoordinatorCore::Impl::Handle(const SessionClosed& event) {
  Detach(event.session, event.ended_here,
         event.ended_here ? "the coordinator ended its stream" : "its stream closed");
}

void CoordinatorCore::Impl::Handle(const FromPeer& event) {
  // If the stream is not known, it was dropped while this message was on its way.
  if (!peers_.Heard(event.session, now_)) return;
  const PeerId peer = peers_.PeerOf(event.session);
  if (!peer) return Greet(event.session, event.message);
  if (peers_.isolated()) EndIsolation();
  const Violation violation = std::visit(
      [this, peer](const auto& message) { return Handle(peer, message); }, event.message);
  if (violation) Drop(event.session, "against the protocol: " + *violation, StreamEnd::kViolation);
}

void CoordinatorCore::Impl::Greet(SessionId session, const control::PeerMessage& message) {
  const auto* hello = std::get_if<control::Hello>(&message);
  if (hello == nullptr || !hello->peer) {
    Drop(session,
         hello == nullptr ? "against the protocol: the first message is not Hello"
                          : "against the protocol: Hello names no peer",
         StreamEnd::kViolation);
  } else if (hello->protocol != control::kProtocolVersion) {
    Drop(session,
         "against the protocol: " + ToString(hello->peer) + " (release " + Clean(hello->version) +
             ") speaks protocol " + std::to_string(hello->protocol) + ", this coordinator " +
             std::to_string(control::kProtocolVersion) + ": run the same release at both ends",
         StreamEnd::kViolation);
  } else if (!HasKeyOfPeer(*hello)) {
    Drop(session,
         "refused: " + ToString(hello->peer) +
             " is known here with another key. Start this peerd again: it then makes a new key, "
             "and has another id",
         StreamEnd::kStranger);
  } else if (const std::string refusal = RefuseHello(*hello); !refusal.empty()) {
    Drop(session, refusal, StreamEnd::kOtherStore);
  } else {
    Attach(session, *hello);
  }
}

// The caller has shown that it has the private key of `hello.key`, and that the id is derived from
// the key. The id has 63 bits only, so another key may have the same one. Only the key itself says
// that the caller is the peer that is known here.
bool CoordinatorCore::Impl::HasKeyOfPeer(const control::Hello& hello) const {
  const Peer* const known = peers_.Find(hello.peer);
  // The key of a peer that is to be drained and has no members is not stored.
  return known == nullptr || known->record.key.empty() || known->record.key == hello.key;
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
  if (hello.store != store_.store) return;
  if (!MayBeForgotten(hello.term, store_.term)) {
    return Note("restart", hello.peer,
                "term not believed term=" + std::to_string(store_.term) +
                    " claimed=" + std::to_string(hello.term) + " peer=" + ToString(hello.peer));
  }
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
    if (MayBeForgotten(member.value(), next)) next = std::max(next, member.value() + 1);
  }
}

void CoordinatorCore::Impl::Attach(SessionId session, const control::Hello& hello) {
  LearnTerm(hello);
  if (peers_.isolated()) EndIsolation();
  const Peer* const known = peers_.Find(hello.peer);
  const bool anew = known != nullptr && (known->closed || known->session);
  if (const std::optional<SessionId> replaced = peers_.Attach(session, hello)) {
    actions_.push_back(
        CloseSession{*replaced, "replaced by a newer stream of " + ToString(hello.peer)});
  }
  const Peer& peer = *peers_.Find(hello.peer);
  Note("attach", hello.peer,
       "peer attached peer=" + ToString(hello.peer) + LogField("host", Clean(hello.host)) +
           LogField("endpoint", hello.endpoints.empty() ? "" : Clean(hello.endpoints.front())) +
           LogField("version", Clean(hello.version)));
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
    if (HasGroup(key)) {
      LearnNumbers(state);
      On(key, [&, &said = state](Group& group, const GroupStep& step) {
        group.Attach(peer.record, said, anew, step);
      });
      continue;
    }
    for (MemberId member : state.members) {
      Send(hello.peer, control::Removed{key, member, control::Removal::kUnknown, kUnknownGroup});
    }
  }
  for (PeerId id : peers_.OthersAt(hello.endpoints, hello.peer)) BuryIfAccused(id);
}

// Ends the session. Messages that still arrive on it are ignored.
void CoordinatorCore::Impl::Drop(SessionId session, const std::string& reason, StreamEnd end) {
  actions_.push_back(CloseSession{session, reason, end});
  Detach(session, end != StreamEnd::kGone, reason);
}

void CoordinatorCore::Impl::Detach(SessionId session, bool ended_here, const std::string& reason) {
  const auto has_admitted = [this](PeerId peer) {
    return std::any_of(groups_.begin(), groups_.end(), [peer](const auto& entry) {
      return AdmittedPeers(entry.second.record()).contains(peer);
    });
  };
  const PeerId id = peers_.Close(session, ended_here, has_admitted, now_);
  if (!id) return;
  Note("detach", id, "peer detached peer=" + ToString(id) + LogField("reason", reason));
  const std::vector<GroupKey> groups = GroupsOf(id);
  if (groups.empty() && !peers_.Find(id)->awaited()) return Forget(id);
  touched_.insert(groups.begin(), groups.end());
  BuryIfAccused(id);
}

void CoordinatorCore::Impl::Forget(PeerId peer) {
  peers_.Forget(peer);
  links_.Forget(peer);
}

void CoordinatorCore::Impl::PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms) {
  peers_.SetDead(peer);
  for (const GroupKey& key : GroupsOf(peer)) {
    On(key,
       [&](Group& group, const GroupStep& step) { group.PeerDied(peer, reason, silent_ms, step); });
  }
  if (!peers_.Attached(peer) && GroupsOf(peer).empty()) Forget(peer);
}

// Removes the peer if neither the coordinator nor an accuser hears it: then the peer is dead, and
// not just one network path. After a restart of the coordinator a peer without a stream may be
// about to come back. So it is removed before its time only if all witnesses accuse it, or another
// peer listens at its address.
void CoordinatorCore::Impl::BuryIfAccused(PeerId peer) {
  const bool quiet = peers_.Quiet(peer, now_);
  const bool succeeded = peers_.Succeeded(peer);
  if (peers_.SpokenFor(peer, now_)) return;
  for (const GroupKey& key : GroupsOf(peer)) {
    const Directory directory(this);
    const Accusations accusations = groups_.at(key).AccusationsNow(directory);
    const bool by_all = accusations.AccusedByAll(peer);
    if (!by_all && (!accusations.Accused(peer) || !(quiet || succeeded))) continue;
    const Peer& dead = *peers_.Find(peer);
    const bool attached = peers_.Attached(peer);
    const std::string here =
        attached          ? "it is silent for " + std::to_string(config_.detect_ms) + " ms"
        : dead.ended_here ? "it has not come back since the coordinator ended its stream"
        : dead.closed     ? "its stream closed"
        : succeeded       ? "another peer listens at its address"
                          : "it did not come back after the coordinator's restart";
    PeerDied(peer,
             here + " and lost by " + List(accusations.Accusers(peer), " ", kNamesShownMax) +
                 " of " + ToString(key),
             attached ? config_.detect_ms : 0);
    return;
  }
}

// ------------------------------------------------------------------------------ messages

template <class Message>
Violation CoordinatorCore::Impl::Handle(PeerId peer, const Message& message) {
  if (!HasGroup(message.group)) {
    constexpr bool kLeaves = std::is_same_v<Message, control::Leave>;
    if constexpr (kLeaves || std::is_same_v<Message, control::Vote> ||
                  std::is_same_v<Message, control::SyncVote>) {
      const auto why = kLeaves ? control::Removal::kLeft : control::Removal::kUnknown;
      Send(peer, control::Removed{message.group, message.member, why, kUnknownGroup});
    }
    return std::nullopt;
  }
  Violation violation = On(message.group, [&](Group& group, const GroupStep& step) {
    return group.Take(peer, message, step);
  });
  if (violation) return violation;
  if constexpr (std::is_same_v<Message, control::LinkLost>) BuryIfAccused(message.peer);
  if constexpr (std::is_same_v<Message, control::EpochFailed>) {
    for (const control::Unreachable& other : message.unreachable) BuryIfAccused(other.peer);
  }
  return std::nullopt;
}

Violation CoordinatorCore::Impl::Handle(PeerId, const control::Hello&) {
  return "a second Hello on one stream";
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Join& join) {
  if (HasGroup(join.group)) {
    const Group& group = groups_.at(join.group);
    if (const MemberId known = group.FindRequest(peer, join.request)) {
      Send(peer, group.PendingOf(known, Directory(this)));
      return std::nullopt;
    }
  }
  const std::string refusal = RefuseJoin(peer, join);
  if (!refusal.empty()) {
    Send(peer,
         control::JoinRefused{join.request, join.group, {Code::kFailedPrecondition, refusal}});
    Note("refuse", peer, "join refused peer=" + ToString(peer) + LogField("reason", refusal));
    return std::nullopt;
  }
  EnsureGroup(join.group);
  const MemberId member(runs_.at(join.group.run).next_member++);
  On(join.group, [&](Group& group, const GroupStep& step) {
    group.Join(peers_.Find(peer)->record, join, member, step);
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
  if (!HasGroup(key) && groups_.size() >= LH_COORDINATOR_GROUPS_MAX) {
    return "the coordinator has " + std::to_string(groups_.size()) +
           " groups of all its runs, the most it can have (LH_COORDINATOR_GROUPS_MAX)" + until;
  }
  return "";
}

// Returns why the peer cannot have a further member in the group; "": it can.
std::string CoordinatorCore::Impl::RefuseJoin(PeerId peer, const control::Join& join) const {
  const std::string what =
      "join of " + ToString(join.group) + " at " + ToString(peer) + " refused: ";
  if (peers_.Draining(peer)) return what + "the peer is draining; join at another host";
  if (const std::string full = RefuseGroup(join.group); !full.empty()) return what + full;
  const auto group = groups_.find(join.group);
  size_t members = 0;
  size_t local = 0;
  if (group != groups_.end()) {
    members = group->second.record().members.size();
    local = CountMembers(group->second.record(), peer);
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
  const std::string cohort = RefuseCohort(peer, join);
  return cohort.empty() ? "" : what + cohort;
}

std::string CoordinatorCore::Impl::RefuseCohort(PeerId peer, const control::Join& join) const {
  if (join.wish.cohort.empty()) return "";
  uint32_t size = 0;
  const size_t fellows = CountMembers({join.group.run, peer, join.wish.cohort}, groups_, &size);
  if (fellows > 0 && size != join.wish.cohort_size) {
    return "cohort " + join.wish.cohort + " has " + std::to_string(join.wish.cohort_size) +
           " members by this join and " + std::to_string(size) +
           " by the others': give all the same cohort_size";
  }
  if (fellows >= join.wish.cohort_size) {
    return "cohort " + join.wish.cohort + " has its " + std::to_string(fellows) +
           " members already: give another cohort, or a larger cohort_size at all of them";
  }
  return "";
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Heartbeat& heartbeat) {
  std::map<GroupKey, control::GroupLoad> loads;
  for (const control::GroupLoad& load : heartbeat.loads) {
    if (HasGroup(load.group)) loads[load.group] = load;
  }
  peers_.SetLoads(peer, std::move(loads), heartbeat.fetches);
  return std::nullopt;
}

Violation CoordinatorCore::Impl::Handle(PeerId peer, const control::Draining&) {
  peers_.SetDraining(peer);
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
    if (!HasPeer(link.from) || !HasPeer(link.to)) continue;
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
    const auto concerns = [&record = group.record()](PeerId id) {
      return coordinator::HasPeer(record, id);
    };
    if (!concerns(peer)) continue;
    if (host_changed || std::any_of(others.begin(), others.end(), concerns)) {
      group.LinkMeasured(now_);
    }
  }
  return std::nullopt;
}

// ------------------------------------------------------------------------------ operator and time

void CoordinatorCore::Impl::Handle(const EvictMember& event) {
  if (!HasGroup(event.group)) return;
  On(event.group, [&](Group& group, const GroupStep& step) {
    group.Evict(event.member, "evicted by an operator: " + event.reason, step);
  });
}

void CoordinatorCore::Impl::Handle(const DrainPeer& event) {
  if (!HasPeer(event.peer)) return;
  const std::string reason = Clean("drained by an operator: " + event.reason);
  peers_.Drain(event.peer, reason);
  Send(event.peer, control::Drain{reason});
}

void CoordinatorCore::Impl::Handle(const PeerKnocked& event) {
  if (!peers_.Knock(event.peer, now_)) return;
  Note("detach", event.peer,
       "peer has no stream, and its host connects peer=" + ToString(event.peer) +
           LogField("host", Clean(peers_.Find(event.peer)->record.host)) +
           ": it is not removed while no other peer is let in; if it does not come back, its log "
           "says why (docs/security.md: certificates and tokens)");
}

void CoordinatorCore::Impl::Handle(const RingOrdered& event) {
  if (!ordering_ || event.request != ring_requests_) return;
  const Ordering asked = *std::exchange(ordering_, std::nullopt);
  if (HasGroup(asked.group)) {
    On(asked.group, [&](Group& group, const GroupStep& step) {
      group.RingFound(event.ring, asked.epoch, event.score, event.present, step);
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
  const auto any_silence_due = [this](const auto& entry) {
    return entry.second.SilenceDue() <= now_;
  };
  if (!peers_.isolated() &&
      (peers_.AnyFallsDue(now_, has_members()) ||
       std::any_of(groups_.begin(), groups_.end(), any_silence_due)) &&
      peers_.NobodyHeard(now_)) {
    peers_.Isolate(now_);
    Note("isolated", PeerId{},
         "no peer is heard, so nobody is removed for silence until one is peers=" +
             std::to_string(peers_.all().size()));
  }
  const std::vector<SessionId> silent = peers_.Silent(now_);
  std::vector<PeerId> quiet_peers = peers_.TakeQuiet(now_);
  for (auto& [key, group] : groups_) {
    for (const PeerId peer : group.NewlyAccused(now_)) quiet_peers.push_back(peer);
  }
  for (const PeerId peer : quiet_peers) BuryIfAccused(peer);
  const auto lease_ms = static_cast<uint32_t>(kLease) * config_.detect_ms;
  const std::string quiet = "silent for " + std::to_string(lease_ms) + " ms";
  for (SessionId id : silent) {
    const PeerId peer = peers_.PeerOf(id);
    Drop(id, quiet, StreamEnd::kGone);
    if (peers_.MayDie(peer, has_members())) PeerDied(peer, quiet, lease_ms);
  }
  for (PeerId id : peers_.Overdue(now_, has_members())) {
    PeerDied(id,
             peers_.Find(id)->closed ? "no stream of its peer in time"
                                     : "its peer did not come back after the coordinator's restart",
             lease_ms);
  }
  for (auto& [key, group] : groups_) {
    if (GroupDeadline(group) > now_) continue;
    On(key, [&](Group& g, const GroupStep& step) {
      g.OnGraceOver(step);
      if (!peers_.isolated()) g.OnSilence(step);
    });
  }
  OrderARing();
  ForgetEmptyRuns();
}

void CoordinatorCore::Impl::EndIsolation() {
  const int64_t us = peers_.EndIsolation(now_);
  Note("isolated", PeerId{}, "peers are heard again isolated_ms=" + std::to_string(us / Millis(1)));
  for (auto& [key, group] : groups_) group.PostponeSilence(us + kLease * Millis(config_.detect_ms));
}

void CoordinatorCore::Impl::ForgiveOwnStall() {
  const int64_t late = now_ - NextDeadline();
  peers_.ForgiveStall(now_);
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
  Tick next = peers_.NextDeadline(has_members());
  for (const auto& [key, group] : groups_) {
    next = std::min(next, GroupDeadline(group));
    if (!ordering_) next = std::min(next, group.OrderDue());
  }
  for (const auto& [run, since] : empty_since_) next = std::min(next, since + kRunEmptyMax);
  return next;
}

// ------------------------------------------------------------------------------ groups

Group& CoordinatorCore::Impl::EnsureGroup(const GroupKey& key) {
  if (!runs_.contains(key.run)) {
    RunRecord record;
    record.run = key.run;
    record.secret = RunSecret(config_.entropy, ++runs_created_, key.run);
    runs_.emplace(key.run, record);
  }
  GroupRecord record;
  record.group = key;
  record.sign_ops = config_.sign_ops;
  return groups_.try_emplace(key, std::move(record), runs_.at(key.run).secret, config_)
      .first->second;
}

std::vector<GroupKey> CoordinatorCore::Impl::GroupsOf(PeerId peer) const {
  std::vector<GroupKey> keys;
  for (const auto& [key, group] : groups_) {
    if (coordinator::HasPeer(group.record(), peer)) keys.push_back(key);
  }
  return keys;
}

// Advances all touched groups, in order of their names, until nothing changes any more.
void CoordinatorCore::Impl::AdvanceTouched() {
  std::set<std::string> runs;
  for (int round = 0;; ++round) {
    LH_CHECK(round < 64) << "cohorts do not come to rest";
    while (const std::optional<Cohorts::Loss> lost = cohorts_.TakeLost()) {
      for (const GroupKey& key : coordinator::GroupsOf(lost->cohort, groups_)) {
        On(key, [&](Group& group, const GroupStep& step) {
          group.RemoveCohort(lost->cohort.peer, lost->cohort.name, lost->reason, step);
        });
      }
    }
    Cohorts::Complete(&groups_, &touched_);
    const std::set<GroupKey> advanced = touched_;
    for (const GroupKey& key : advanced) {
      On(key, [](Group& group, const GroupStep& step) { group.Advance(step); });
      runs.insert(key.run);
    }
    cohorts_.MindPassedOver(&groups_, &touched_);
    if (!cohorts_.any_lost() && touched_ == advanced && !Cohorts::Complete(&groups_, &touched_)) {
      break;
    }
  }
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
  if (touched_.empty()) return;
  // Forget peers without a stream that lost their last member.
  std::vector<PeerId> useless;
  for (const auto& [id, peer] : peers_.all()) {
    if (!peer.session && !peer.awaited() && GroupsOf(id).empty()) useless.push_back(id);
  }
  for (const PeerId id : useless) Forget(id);
}

// ------------------------------------------------------------------------------ output

void CoordinatorCore::Impl::Emit(const GroupKey& key, GroupOutput output) {
  cohorts_.Add(key, output.cohort_losses);
  for (auto& [peer, message] : output.messages) Send(peer, std::move(message));
  for (EventRecord& event : output.notices) actions_.push_back(Notice{std::move(event)});
}

// A message to a peer without a stream is dropped. When the peer attaches, it gets what it missed.
void CoordinatorCore::Impl::Send(PeerId peer, control::CoordinatorMessage message) {
  const SessionId session = peers_.SessionOf(peer);
  if (session) actions_.push_back(ToPeer{session, std::move(message)});
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
      if (!HasGroup(key)) mutations.push_back(DeleteGroup{key});
    }
  }
  if (durable_.runs.size() > runs_.size()) {
    for (const auto& [run, record] : durable_.runs) {
      if (!runs_.contains(run)) mutations.push_back(DeleteRun{run});
    }
  }
  for (const auto& [id, peer] : peers_.all()) {
    if (peer.drain_reason.empty()) continue;
    const auto durable = durable_.drains.find(id);
    if (durable == durable_.drains.end() || durable->second.reason != peer.drain_reason) {
      mutations.push_back(PutDrain{{id, peer.drain_reason}});
    }
  }
  for (const auto& [id, drain] : durable_.drains) {
    if (!HasPeer(id)) mutations.push_back(DeleteDrain{id});
  }
  touched_.clear();
  if (mutations.empty()) return;
  for (const Mutation& mutation : mutations) Apply(mutation, &durable_);
  actions_.insert(actions_.begin(), Persist{std::move(mutations)});
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
    GroupView view = group.View(Directory(this));
    if (peers_.isolated()) {
      view.waiting_for = "the coordinator hears no peer, so nobody is removed for silence" +
                         (view.waiting_for.empty() ? "" : "; " + view.waiting_for);
    }
    const std::vector<PeerId> ring = group.Ring();
    for (PeerId id : ring) {
      const Peer& peer = *peers_.Find(id);
      PeerView& shown = view.ring.emplace_back();
      const Shares& shares = group.ToldShares();
      shown.share = shares.size() == ring.size() ? shares[view.ring.size() - 1]
                                                 : kShareUnits / static_cast<uint32_t>(ring.size());
      shown.peer = id;
      shown.host = peer.record.host;
      if (!peer.record.endpoints.empty()) shown.endpoint = peer.record.endpoints.front();
      shown.attached = static_cast<bool>(peer.session);
      if (shown.attached) {
        shown.unheard_ms = static_cast<uint32_t>(
            std::clamp<int64_t>(peers_.UnheardFor(id, now_) / Millis(1), 0, UINT32_MAX));
      }
      shown.draining = peer.draining;
      if (const auto rates = links_.HostOf(id, now_)) {
        shown.up_bytes_per_second = rates->up;
        shown.down_bytes_per_second = rates->down;
      }
      shown.load.group = key;
      const auto load = peer.loads.find(key);
      if (load != peer.loads.end()) shown.load = load->second;
    }
    view.small_packets = links_.SmallPackets(ring, now_);
    for (size_t i = 0; i < view.ring.size(); ++i) {
      const PeerId next = view.ring[(i + 1) % view.ring.size()].peer;
      if (const auto link = Direction(view.ring[i].peer, next)) view.ring[i].next = link->link;
    }
    for (MemberView& member : view.members) {
      for (const control::FetchLoad& fetch : peers_.Find(member.peer)->fetches) {
        if (fetch.group == key && fetch.member == member.member) member.fetch = fetch.progress;
      }
    }
    overview.groups.push_back(std::move(view));
  }
  return overview;
}

void CoordinatorCore::Impl::CheckInvariants() const {
  LH_CHECK(actions_.empty() && touched_.empty() && !cohorts_.any_lost())
      << "a step left something behind";
  if (!started_) return;
  peers_.CheckInvariants(has_members());
  Records now;
  now.store = store_;
  now.runs = runs_;
  for (const auto& [id, peer] : peers_.all()) {
    if (!peer.drain_reason.empty()) now.drains.emplace(id, DrainRecord{id, peer.drain_reason});
  }
  for (const auto& [key, group] : groups_) {
    group.CheckInvariants(Directory(this));
    LH_CHECK(group.record().group == key) << ToString(key);
    LH_CHECK(group.record().members.size() <= LH_MEMBERS_MAX) << ToString(key);
    LH_CHECK(runs_.contains(key.run)) << ToString(key);
    for (const MemberRecord& member : group.record().members) {
      LH_CHECK(member.member.value() < runs_.at(key.run).next_member) << ToString(key);
      LH_CHECK(HasPeer(member.peer)) << ToString(key) << " " << ToString(member.member);
    }
    now.groups.emplace(key, group.record());
  }
  LH_CHECK(now == durable_) << "a change was not given to Persist";
  CheckCohorts(now.groups);
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
uint64_t CoordinatorCore::Digest() const { return longhaul::Digester().Add(*impl_).value(); }
CoordinatorCore CoordinatorCore::Clone() const {
  return CoordinatorCore(std::make_unique<Impl>(*impl_));
}

}  // namespace longhaul::coordinator
