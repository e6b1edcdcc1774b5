// What the coordinator remembers across a restart, and what it shows an operator. Plain values.
//
// Records name their fields (base/fields.h). The text in stores and journals and the digest derive
// from that: a new field is a member and its place in the list. A store that an older release wrote
// has the default there.
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

// Of the secret of a run.
inline constexpr size_t kSecretBytes = 32;

// The store itself.
struct StoreRecord {
  uint64_t store = 0;  // random, as old as the store; 0: it is new, nobody has named it yet
  uint64_t term = 0;   // rises with each start of a coordinator on it
  LH_FIELDS(StoreRecord, LH_FIELD(store), LH_FIELD(term));
};

struct RunRecord {
  std::string run;
  uint64_t next_member = 1;
  std::string secret;  // kSecretBytes random bytes: epoch tokens derive from it
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

// The members of an incomplete cohort are admissible after this ballot.
inline constexpr uint64_t kCohortIncomplete = UINT64_MAX;

// A member, pending or admitted.
struct MemberRecord {
  MemberId member;
  PeerId peer;
  uint64_t request = 0;  // of its Join
  std::string name;
  Epoch joined;        // 0: pending
  uint64_t votes = 0;  // boundaries passed (VoteResult sent)
  uint64_t syncs = 0;  // number of its last offer that was committed or refused
  std::string cohort;  // members of the run at this peer that come and go together; "": none
  uint32_t cohort_size = 0;
  uint64_t after = 0;  // pending: it is admitted by a ballot of a number above this one
  uint32_t step_deadline_ms = 0;
  // As MemberInfo::background_until; kInBackground also of one that is pending.
  Epoch background_until;
  // Set while the epoch without it is being agreed: what was decided, also by an operator, outlives
  // the coordinator.
  std::optional<Departure> departs;
  LH_FIELDS(MemberRecord, LH_FIELD(member), LH_FIELD(peer), LH_FIELD(request), LH_FIELD(name),
            LH_FIELD(joined), LH_FIELD(votes), LH_FIELD(syncs), LH_FIELD(cohort),
            LH_FIELD(cohort_size), LH_FIELD(after), LH_FIELD(step_deadline_ms),
            LH_FIELD(background_until), LH_FIELD(departs));
};

struct PeerRecord {
  PeerId peer;
  std::vector<std::string> endpoints;
  uint32_t lanes = 0;
  std::string host;
  LH_FIELDS(PeerRecord, LH_FIELD(peer), LH_FIELD(endpoints, rule::List{0, LH_ENDPOINTS_MAX}),
            LH_FIELD(lanes), LH_FIELD(host));
};

// Fates of the last commit, by peer, until the next one: a peer that lost its stream between
// EpochReady and CommitEpoch asks again by attaching.
struct FatesRecord {
  PeerId peer;
  std::vector<control::OpFate> fates;
  std::vector<control::MissedOp> missed;
  LH_FIELDS(FatesRecord, LH_FIELD(peer), LH_FIELD(fates, rule::List{0, control::kOpReportsMax}),
            // As many as there are: what was written can be read. The message has the limit.
            LH_FIELD(missed, rule::List{0, SIZE_MAX}));
};

// A pair of peers that cannot reach each other. Its relay is that of the committed epoch; 0: the
// pair is not blocked there yet.
struct BlockedRecord {
  control::BlockedPair pair;
  std::string reason;
  LH_FIELDS(BlockedRecord, LH_FIELD(pair, rule::Flat{}), LH_FIELD(reason));
};

// The shared state that was agreed on last.
struct StateRecord {
  uint64_t revision = 0;
  Hash128 state;
  Hash128 manifest;
  LH_FIELDS(StateRecord, LH_FIELD(revision), LH_FIELD(state), LH_FIELD(manifest));
};

struct GroupRecord {
  GroupKey group;
  Epoch committed;
  Epoch highest;  // highest number ever prepared
  Epoch boundary;
  Epoch last_freeze;
  uint64_t ballots = 0;  // completed; the first admission into an empty group counts as one
  // None: nothing was agreed on since the group was last empty, any revision may come.
  std::optional<StateRecord> state;
  std::vector<MemberRecord> members;  // rank order; pending ones behind
  std::vector<PeerRecord> peers;      // ring order
  std::vector<FatesRecord> fates;
  std::vector<BlockedRecord> blocked;  // in the order of the pairs
  GroupKey Key() const { return group; }
  LH_FIELDS(GroupRecord, LH_FIELD(group, rule::Flat{}), LH_FIELD(committed), LH_FIELD(highest),
            LH_FIELD(boundary), LH_FIELD(last_freeze), LH_FIELD(ballots), LH_FIELD(state),
            LH_FIELD(members, rule::Rows{}), LH_FIELD(peers, rule::Rows{}),
            LH_FIELD(fates, rule::Rows{}), LH_FIELD(blocked, rule::Rows{}));
};

// An operator drains the peer.
struct DrainRecord {
  PeerId peer;
  std::string reason;
  PeerId Key() const { return peer; }
  LH_FIELDS(DrainRecord, LH_FIELD(peer), LH_FIELD(reason));
};

// nullptr: not there.
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
  std::map<PeerId, DrainRecord> drains;  // of peers that are not gone
  LH_FIELDS(Records, LH_FIELD(store), LH_FIELD(runs), LH_FIELD(groups), LH_FIELD(drains));
};

// Applies one mutation as a store would.
void Apply(const Mutation& mutation, Records* records);

// What made an epoch freeze ops, and how long the group took over it.
struct FaultRecord {
  // From a closed set: leave, trainer_died, peer_died, silence, reset, unreachable, evict,
  // step_deadline, cohort, restart.
  std::string cause;
  std::string detector;    // who said so: "p1f", "coordinator", "operator"
  uint32_t detect_ms = 0;  // silence before the report; 0: it showed at once
  uint32_t agree_ms = 0;   // from the first report to the commit
  // Whom it cost: the members that were removed, with their hosts. If nobody was: the peer that
  // was reported. Empty: neither.
  std::string subject;
  friend bool operator==(const FaultRecord&, const FaultRecord&) = default;
};

// A sync that was committed.
struct SyncRecord {
  uint64_t revision = 0;
  Hash128 state;
  uint64_t bytes = 0;    // received by all that had to fetch
  uint32_t took_ms = 0;  // from the first offer
  friend bool operator==(const SyncRecord&, const SyncRecord&) = default;
};

// One line of `lhctl events`. `kind` is from a closed set: join, admit, leave, death, evict,
// refuse, prepare, commit, abort, link_lost, block, ring, attach, detach, restart, isolated, ready,
// fetch, sync, sync_refused, sync_failed, state_corrupt.
struct EventRecord {
  std::string kind;
  GroupKey group;                                   // run empty: concerns no group
  Epoch epoch;                                      // 0: none
  MemberId member;                                  // 0: none
  PeerId peer;                                      // 0: none
  std::string text;                                 // fixed words, then key=value
  std::optional<FaultRecord> fault = std::nullopt;  // of the commit of an epoch that froze ops
  std::optional<SyncRecord> sync = std::nullopt;    // of kind sync
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
  bool background = false;  // its input is not in results yet
};
// One direction of a link, as measured.
struct LinkView {
  uint64_t bytes_per_second = 0;  // 0: unknown
  uint32_t rtt_us = 0;            // 0: unknown
  uint32_t age_s = 0;
  bool at_least = false;  // it may carry more
};
struct PeerView {
  PeerId peer;
  std::string host;
  std::string endpoint;
  bool attached = false;
  bool draining = false;
  control::GroupLoad load;
  std::optional<LinkView> next = std::nullopt;  // to the next peer of the ring
};
struct GroupView {
  GroupKey group;
  Epoch committed;
  Epoch preparing;  // 0: none
  std::string
      waiting_for;  // why the preparation or the ballot is not finished; "" if nothing waits
  std::vector<MemberView> members;  // rank order, pending ones behind
  std::vector<PeerView> ring;
  std::vector<BlockedRecord> blocked;
  // Between these peers large packets vanish.
  std::set<std::pair<PeerId, PeerId>> small_packets;
  std::optional<StateRecord> state;
  // The last commit of an epoch that froze ops, since this start of the coordinator.
  Epoch fault_epoch;  // 0: none
  FaultRecord fault;
  // The last epoch that was there to order the ring anew, since this start of the coordinator, and
  // what it gained.
  Epoch ring_epoch;  // 0: none
  std::string ring_gain;
};
struct Overview {
  std::string incarnation;
  std::vector<GroupView> groups;
};

}  // namespace longhaul::coordinator
