// What the coordinator remembers across a restart, and what it shows an operator. Plain values.
//
// Each record lists its fields (base/fields.h). The text in stores and the digest are made
// from that list, so a new field needs a declaration and an entry in the list. A field that an
// older store does not have gets its default. The version of the store's schema rises with each
// change of these fields (kSchemaVersion in store/sqlite_store.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/tick.h"
#include "proto/control/messages.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {

// The length of a run's secret.
inline constexpr size_t kSecretBytes = 32;

// Whether a store that holds `known` may have gone back in time from `claimed`, as a peer says it
// has. Any host may say that: what it says must not use numbers up. So a claim counts only if it is
// not further ahead than a backup can be old, in starts, members or epochs.
inline bool MayBeForgotten(uint64_t claimed, uint64_t known) {
  constexpr uint64_t kForgottenMax = uint64_t{1} << 20;
  return claimed <= known || claimed - known <= kForgottenMax;
}

// The store itself.
struct StoreRecord {
  uint64_t store = 0;  // the store's name, which never changes; 0: a new store without a name
  uint64_t term = 0;   // rises with each start of a coordinator on the store
  LH_FIELDS(StoreRecord, LH_FIELD(store), LH_FIELD(term));
};

struct RunRecord {
  std::string run;
  uint64_t next_member = 1;
  std::string secret;  // kSecretBytes random bytes; epoch tokens derive from them
  std::string Key() const { return run; }
  LH_FIELDS(RunRecord, LH_FIELD(run), LH_FIELD(next_member),
            LH_FIELD(secret, rule::Secret{kSecretBytes, kSecretBytes}));
};

// Why an admitted member will not be in the next epoch.
struct Departure {
  control::Removal why = control::Removal::kDied;
  std::string reason;
  LH_FIELDS(Departure, LH_FIELD(why), LH_FIELD(reason));
};

// MemberRecord::after while the cohort is incomplete: no ballot admits the member.
inline constexpr uint64_t kCohortIncomplete = UINT64_MAX;

// A member, pending or admitted.
struct MemberRecord {
  MemberId member;
  PeerId peer;
  uint64_t request = 0;  // Join::request
  std::string name;
  Epoch joined;        // 0: pending
  uint64_t votes = 0;  // boundaries passed (VoteResult sent)
  uint64_t syncs = 0;  // number of its last offer that was committed or refused
  bool holds = false;  // took part in the commit of GroupRecord::state
  std::string cohort;  // the name of its cohort; "": none
  uint32_t cohort_size = 0;
  uint64_t after = 0;  // pending member: only a ballot with a higher number admits it
  uint32_t step_deadline_ms = 0;
  // As MemberInfo::background_until. kInBackground also for a pending member that is to be admitted
  // in the background.
  Epoch background_until;
  // As in control::Join.
  uint32_t members = 0;
  bool named = false;
  // Set from the decision to remove the member until the commit of an epoch without the member.
  // Stored, so that the decision survives a restart of the coordinator.
  std::optional<Departure> departs;
  LH_FIELDS(MemberRecord, LH_FIELD(member), LH_FIELD(peer), LH_FIELD(request), LH_FIELD(name),
            LH_FIELD(joined), LH_FIELD(votes), LH_FIELD(syncs), LH_FIELD(holds), LH_FIELD(cohort),
            LH_FIELD(cohort_size), LH_FIELD(after), LH_FIELD(step_deadline_ms),
            LH_FIELD(background_until), LH_FIELD(members), LH_FIELD(named), LH_FIELD(departs));
};

struct PeerRecord {
  PeerId peer;
  std::vector<std::string> endpoints;
  uint32_t lanes = 0;
  std::string host;
  std::string key;  // Hello::key
  LH_FIELDS(PeerRecord, LH_FIELD(peer), LH_FIELD(endpoints, rule::List{0, LH_ENDPOINTS_MAX}),
            LH_FIELD(lanes), LH_FIELD(host), LH_FIELD(key, control::kPublicKey));
};

// The fates that the last commit gave to the ops of one peer. They are kept until the next commit:
// a peer that lost its stream between EpochReady and CommitEpoch gets them when it attaches.
struct FatesRecord {
  PeerId peer;
  std::vector<control::OpFate> fates;
  std::vector<control::MissedOp> missed;
  LH_FIELDS(FatesRecord, LH_FIELD(peer), LH_FIELD(fates, rule::List{0, control::kOpReportsMax}),
            // No limit here, so that whatever was written can be read. The message has a limit.
            LH_FIELD(missed, rule::List{0, SIZE_MAX}));
};

// A blocked pair. `pair.relay` is the relay in the committed epoch; 0: the pair is not blocked in
// that epoch yet.
struct BlockedRecord {
  control::BlockedPair pair;
  std::string reason;
  LH_FIELDS(BlockedRecord, LH_FIELD(pair, rule::Flat{}), LH_FIELD(reason));
};

// The shared state of the last committed sync.
struct StateRecord {
  uint64_t revision = 0;
  Hash128 state;
  Hash128 manifest;
  uint64_t ballots = 0;  // GroupRecord::ballots then
  LH_FIELDS(StateRecord, LH_FIELD(revision), LH_FIELD(state), LH_FIELD(manifest),
            LH_FIELD(ballots));
};

inline constexpr size_t kBarredMax = 256;

struct GroupRecord {
  GroupKey group;
  Epoch committed;
  Epoch highest;  // the highest number ever prepared, as far as the store or peers know
  Epoch boundary;
  Epoch last_freeze;
  uint64_t ballots = 0;  // completed ballots; the admission into an empty group counts as one
  Epoch stepped;         // in force when the last of these ballots was completed
  // nullopt: no sync was committed since the group was last empty. The first sync may then bring
  // any revision.
  std::optional<StateRecord> state;
  std::vector<MemberRecord> members;  // in rank order, then pending members
  std::vector<PeerRecord> peers;      // in ring order
  std::vector<FatesRecord> fates;
  std::vector<BlockedRecord> blocked;  // in the order of the pairs
  // Whether peers sign their READYs, in attempts from `sign_ops_from` on.
  bool sign_ops = false;
  Epoch sign_ops_from;
  // Peers that were caught lying. They are not admitted again.
  std::vector<PeerId> barred;
  // Whether they do so in the attempt `last_freeze`.
  bool SignsOps() const { return sign_ops && last_freeze >= sign_ops_from; }
  GroupKey Key() const { return group; }
  LH_FIELDS(GroupRecord, LH_FIELD(group, rule::Flat{}), LH_FIELD(committed), LH_FIELD(highest),
            LH_FIELD(boundary), LH_FIELD(last_freeze), LH_FIELD(ballots), LH_FIELD(stepped),
            LH_FIELD(state), LH_FIELD(members, rule::Rows{}), LH_FIELD(peers, rule::Rows{}),
            LH_FIELD(fates, rule::Rows{}), LH_FIELD(blocked, rule::Rows{}), LH_FIELD(sign_ops),
            LH_FIELD(sign_ops_from), LH_FIELD(barred, rule::List{0, kBarredMax}));
};

// An operator's order to drain a peer.
struct DrainRecord {
  PeerId peer;
  std::string reason;
  PeerId Key() const { return peer; }
  LH_FIELDS(DrainRecord, LH_FIELD(peer), LH_FIELD(reason));
};

// These return nullptr if the record has no such member.
MemberRecord* FindMember(GroupRecord& record, MemberId member);
const MemberRecord* FindMember(const GroupRecord& record, MemberId member);

struct PutStore {
  StoreRecord record;
};
struct PutRun {
  RunRecord record;
};
struct DeleteRun {
  std::string run;
};
struct PutGroup {
  GroupRecord record;
};
struct DeleteGroup {
  GroupKey group;
};
struct PutDrain {
  DrainRecord record;
};
struct DeleteDrain {
  PeerId peer;
};
using Mutation =
    std::variant<PutStore, PutRun, DeleteRun, PutGroup, DeleteGroup, PutDrain, DeleteDrain>;

struct Records {
  StoreRecord store;
  std::map<std::string, RunRecord> runs;
  std::map<GroupKey, GroupRecord> groups;
  std::map<PeerId, DrainRecord> drains;  // an order is deleted when its peer is gone
  LH_FIELDS(Records, LH_FIELD(store), LH_FIELD(runs), LH_FIELD(groups), LH_FIELD(drains));
};

// Applies one mutation as a store would.
void Apply(const Mutation& mutation, Records* records);

// What made an epoch freeze ops, and how long the group took over it.
struct FaultRecord {
  // From a closed set: leave, trainer_died, peer_died, silence, reset, unreachable, evict,
  // step_deadline, cohort, restart, cancel, dispute.
  std::string cause;
  std::string detector;    // who reported it: "p1f", "coordinator", "operator"
  uint32_t detect_ms = 0;  // silence before the report; 0: no silence showed the fault
  uint32_t agree_ms = 0;   // from the first report of the fault to the commit
  // The members that were removed, with their hosts. If no member was removed: the peer that was
  // reported. "": neither.
  std::string subject;
  LH_FIELDS(FaultRecord, LH_FIELD(cause), LH_FIELD(detector), LH_FIELD(detect_ms),
            LH_FIELD(agree_ms), LH_FIELD(subject));
};

// A sync that was committed.
struct SyncRecord {
  uint64_t revision = 0;
  Hash128 state;
  uint64_t bytes = 0;    // received by all members that had to fetch
  uint32_t took_ms = 0;  // from the first offer to the commit
  friend bool operator==(const SyncRecord&, const SyncRecord&) = default;
};

// One line of `lhctl events`. `kind` is from a closed set: join, admit, leave, death, evict,
// refuse, prepare, commit, abort, link_lost, block, ring, attach, detach, restart, isolated, ready,
// fetch, sync, sync_refused, sync_failed, state_corrupt, large_packets_vanish, cancel, dispute.
struct EventRecord {
  std::string kind;
  GroupKey group;    // an empty run: the event is not about one group
  Epoch epoch;       // 0: none
  MemberId member;   // 0: none
  PeerId peer;       // 0: none
  std::string text;  // fixed words, then key=value
  std::optional<FaultRecord> fault = std::nullopt;  // set if an epoch that froze ops is committed
  std::optional<SyncRecord> sync = std::nullopt;    // set if the kind is sync
  std::string cause = "";  // of the removal of a member: as FaultRecord::cause; else ""
  friend bool operator==(const EventRecord&, const EventRecord&) = default;
};

struct MemberView {
  MemberId member;
  PeerId peer;
  std::string name;
  Epoch joined;  // 0: pending
  bool voting = false;
  std::string cohort;
  std::optional<control::FetchProgress> fetch = std::nullopt;
  bool background = false;  // whether it is in the background
};
// One direction of a link, as measured.
struct LinkView {
  uint64_t bytes_per_second = 0;  // 0: unknown
  uint32_t rtt_us = 0;            // 0: unknown
  uint32_t age_s = 0;
  bool at_least = false;  // the link may carry more
};
struct PeerView {
  PeerId peer;
  std::string host;
  std::string endpoint;
  bool attached = false;
  uint32_t unheard_ms = 0;  // while attached: since its last message
  bool draining = false;
  control::GroupLoad load;
  // What its host can send and receive in all. 0: unknown.
  uint64_t up_bytes_per_second = 0;
  uint64_t down_bytes_per_second = 0;
  uint32_t share = 0;  // of a tensor in the mesh, in units of 1 / kShareUnits
  std::optional<LinkView> next = std::nullopt;  // the link to the next peer of the ring
};
// The peer whose host or links set the pace of an all-reduce over the mesh.
struct PaceView {
  PeerId peer;
  // How many bytes of a tensor the mesh adds up in a second, without latencies: with the best
  // shares, and if the peer were not there.
  uint64_t bytes_per_second = 0;
  uint64_t without = 0;
  friend bool operator==(const PaceView&, const PaceView&) = default;
};
struct GroupView {
  GroupKey group;
  Epoch committed;
  Epoch preparing;  // 0: none
  std::string
      waiting_for;  // why the preparation or the ballot is not finished; "" if nothing waits
  std::vector<MemberView> members;  // in rank order, then pending members
  std::vector<PeerView> ring;
  std::vector<BlockedRecord> blocked;
  // The pairs of peers between which large packets vanish.
  std::set<std::pair<PeerId, PeerId>> small_packets;
  std::optional<StateRecord> state;
  Tick first_vote = kNever;  // when the first vote of the open ballot came; kNever: none came yet
  Tick last_step = kNever;   // of the last ballot; kNever: none since this start of the coordinator
  // The last committed epoch that froze ops, since this start of the coordinator.
  Epoch fault_epoch;  // 0: none
  FaultRecord fault;
  // The last epoch that was made for a better ring, since this start of the coordinator, and what
  // it gained.
  Epoch ring_epoch;  // 0: none
  std::string ring_gain;
  std::optional<PaceView> pace = std::nullopt;  // filled in only where it is asked for
};
struct Overview {
  std::string incarnation;
  Tick now;  // when it was made; set by the loop
  // The longest write of the store that ended in the last ten seconds; set by the loop.
  uint32_t slow_write_ms = 0;
  std::vector<GroupView> groups;
};

}  // namespace longhaul::coordinator
