// The messages between a peer and the coordinator, as plain values. Both cores use them.
//
// Each message lists its fields and what they may hold (base/fields.h). From this list
// proto/control/convert.h derives the conversion to and from the protobuf messages of
// proto/longhaul/v1. So a new field needs a member, an entry in the list below it, and a line of
// the .proto file under the same name. This header uses no protobuf, clock or socket.
//
// Every message of a peer may be sent twice. After a reconnect the peer sends Hello, then again
// all messages that have no answer yet (Join, Vote, SyncVote, Leave, EpochReady).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "proto/control/blocked.h"
#include "proto/wire/limits.h"
#include "proto/wire/shares.h"

namespace longhaul::control {

// The version of this protocol. It rises when one release would misunderstand the messages of
// another. Hello carries it. The coordinator refuses a stream with another version.
inline constexpr uint32_t kProtocolVersion = 10;

// Rules of fields (base/fields.h) that several messages share.
inline constexpr rule::Text kText{LH_ERROR_TEXT_BYTES_MAX};
inline constexpr rule::Text kLabel{128};  // versions, names of hosts and of coordinators
inline constexpr rule::Bytes kPublicKey{0, LH_PUBLIC_KEY_BYTES};
inline constexpr rule::List kEndpoints{1, LH_ENDPOINTS_MAX, rule::Endpoint{LH_ENDPOINT_BYTES_MAX}};
static_assert(kRunNameBytesMax == LH_RUN_NAME_BYTES_MAX);
static_assert(kOutcomeTextBytesMax == LH_ERROR_TEXT_BYTES_MAX);

// Limits of one peer in one group: the ops that it can have in flight, and the ops that one
// CommitEpoch can name as missed (MissedOp).
inline constexpr size_t kOpReportsMax = size_t{LH_LOCAL_MEMBERS_MAX} * LH_OPS_OPEN_MAX;
inline constexpr size_t kMissedOpsMax = 262144;

// ---------------------------------------------------------------- peer to coordinator

// Where a group stands at a peer that (re)attaches.
struct GroupState {
  GroupKey group;
  Epoch committed;                // the newest epoch committed here; 0: none yet
  std::vector<MemberId> members;  // local members, pending or admitted
  // The epoch that is prepared here and not committed; 0: none.
  Epoch prepared;
  uint64_t preparation = 0;  // PrepareEpoch::preparation of the prepared epoch
  bool frozen = false;       // whether the prepared epoch froze ops
  std::string Fault() const;
  GroupKey Key() const { return group; }
  LH_FIELDS(GroupState, LH_FIELD(group), LH_FIELD(committed),
            LH_FIELD(members, rule::List{0, LH_LOCAL_MEMBERS_MAX}), LH_FIELD(prepared),
            LH_FIELD(preparation), LH_FIELD(frozen));
};

// The first message on every stream.
struct Hello {
  PeerId peer;
  std::vector<std::string> endpoints;  // host:port of the data port, best first
  uint32_t protocol = 0;
  uint32_t lanes = 0;  // data lanes a link; 0: automatic
  std::string version;
  std::string host;  // name of the host, for people
  std::vector<GroupState> groups;
  // The peer's public key, from which its id is derived (base/crypto/identity.h), and the signature
  // that shows that the peer has the private key. The code at the stream's two ends sets and checks
  // both; in a core, `key` names the peer.
  std::string key;
  std::string signature;
  // Copied from the last Welcome that this peer accepted; 0, 0 and "": none yet.
  uint64_t store = 0;
  uint64_t term = 0;
  std::string coordinator;
  LH_MESSAGE(Hello, hello, LH_FIELD(peer, rule::Needed{}), LH_FIELD(endpoints, kEndpoints),
             LH_FIELD(protocol), LH_FIELD(lanes, rule::Range{0, LH_LANES_MAX}),
             LH_FIELD(version, kLabel), LH_FIELD(host, kLabel),
             LH_FIELD(groups, rule::List{0, LH_GROUPS_MAX}), LH_FIELD(key, kPublicKey),
             LH_FIELD(signature, rule::Bytes{0, LH_SIGNATURE_BYTES}), LH_FIELD(store),
             LH_FIELD(term), LH_FIELD(coordinator, kLabel));
};

// What a trainer wishes of its membership. Its request on the socket (lh_ipc_join in
// proto/wire/ipc.h) has fields of the same names, except `named`.
struct JoinWish {
  // The cohort: members of one run at this peer that are admitted together and removed together.
  // All of them give the same size. "" and 0: none.
  std::string cohort;
  uint32_t cohort_size = 0;
  // The member is evicted if it has not come to a boundary or a sync this long after the first
  // member came. 0: no limit.
  uint32_t step_deadline_ms = 0;
  // The member joins in the background: no sync waits until it has the group's state. Its
  // MemberInfo::background_until is kInBackground at first, unless the group is empty.
  bool background = false;
  // While the group has no admitted member, the coordinator holds this join until this many such
  // joins wait. Then it admits them together, in the order of their names; see `named`. 0: the
  // member does not wait for others.
  uint32_t members = 0;
  // The trainer chose the name. Members without a chosen name stand behind the others in the first
  // epoch, in the order of their peers.
  bool named = false;
  std::string Fault() const;
  LH_FIELDS(JoinWish, LH_FIELD(cohort, rule::Name{0, LH_COHORT_NAME_BYTES_MAX}),
            LH_FIELD(cohort_size),
            LH_FIELD(step_deadline_ms, rule::Range{0, LH_STEP_DEADLINE_MS_MAX}),
            LH_FIELD(background), LH_FIELD(members, rule::Range{0, LH_MEMBERS_MAX}),
            LH_FIELD(named));
};

// A local trainer asks to become a member. The peer never uses the same `request` for another join.
struct Join {
  uint64_t request = 0;
  GroupKey group;
  std::string name;  // for people
  JoinWish wish;
  LH_MESSAGE(Join, join, LH_FIELD(request, rule::Needed{}), LH_FIELD(group),
             LH_FIELD(name, rule::Name{0, LH_MEMBER_NAME_BYTES_MAX}), LH_FIELD(wish, rule::Flat{}));
};

// A member leaves, or its trainer died (`died`). The member is pending or admitted.
struct Leave {
  GroupKey group;
  MemberId member;
  bool died = false;
  std::string reason;
  LH_MESSAGE(Leave, leave, LH_FIELD(group), LH_FIELD(member, rule::Needed{}), LH_FIELD(died),
             LH_FIELD(reason, kText));
};

// How a member takes part in a sync of shared state (docs/life_of_a_sync.md).
enum class SyncStrategy : uint8_t { kPopular = 1, kReceive = 2, kSend = 3 };
constexpr auto NamesOf(SyncStrategy) { return EnumNames{1, {"popular", "receive", "send"}}; }

// The state that a member brings to a sync.
struct SyncOffer {
  uint64_t number = 0;  // counts the syncs of this member from 1
  SyncStrategy strategy = SyncStrategy::kPopular;
  uint64_t revision = 0;
  Hash128 manifest;  // names, order, dtypes, shapes, flags
  Hash128 state;     // the root: digest of the manifest and of the tensors that are compared
  // False: the member is still fetching the state, so it can only receive in this sync. A fetch
  // leaves the trainer's tensors unchanged, so a later offer of them may be complete.
  bool complete = true;
  // The peer offers a state that it kept of a former member. Such a state may come from another
  // history of the group. If its revision is more than one above the committed revision, the offer
  // can only receive.
  bool kept = false;
  std::string Fault() const;
  LH_FIELDS(SyncOffer, LH_FIELD(number, rule::Needed{}), LH_FIELD(strategy),
            LH_FIELD(revision, rule::Range{0, LH_REVISION_MAX}), LH_FIELD(manifest),
            LH_FIELD(state), LH_FIELD(complete), LH_FIELD(kept));
};

// The member stands at a step boundary. `number` counts the boundaries of this member from 1.
struct Vote {
  GroupKey group;
  MemberId member;
  uint64_t number = 0;
  // Takes effect when the coordinator sends VoteResult, like a SyncVote that arrives then.
  std::optional<SyncOffer> sync = std::nullopt;
  // A member in the background asks to contribute from this boundary on. If this is false, the vote
  // of a member in the background carries no offer.
  bool ready = false;
  LH_MESSAGE(Vote, vote, LH_FIELD(group), LH_FIELD(member, rule::Needed{}),
             LH_FIELD(number, rule::Needed{}), LH_FIELD(sync), LH_FIELD(ready));
};

// The ordinal that another peer gave the op of a report.
struct OpMatch {
  PeerId peer;
  OpOrdinal ordinal;
  PeerId Key() const { return peer; }
  LH_FIELDS(OpMatch, LH_FIELD(peer, rule::Needed{}), LH_FIELD(ordinal, rule::Needed{}));
};

// An op that this peer has announced and not settled. `matches` holds the ordinals that other
// participants gave the op, all of them if `done` is true. `matches` is empty if the op is not
// done, has no `abort_on_fault`, is not cancelled and is not one-shot, because then no fate depends
// on these ordinals.
struct OpReport {
  OpOrdinal ordinal;
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;  // a digest of the ids of the members that take part; 0: all members
  bool done = false;
  bool abort_on_fault = false;
  bool cancelled = false;  // CancelOp was sent for it. The op need not be announced then
  std::vector<OpMatch> matches;
  // If the op is done: what this peer's DONE says of it. 0 and 1: it has a result; 2: it is
  // refused. If READYs are signed: a digest of this and of all READYs, above 2.
  uint64_t verdict = 0;
  uint32_t kind = 0;  // OpKind
  // How many boundaries the caller had passed since that of `boundary`; of several callers, the
  // most. The same at all members between two boundaries.
  uint64_t step = 0;
  OpOrdinal Key() const { return ordinal; }
  LH_FIELDS(OpReport, LH_FIELD(ordinal, rule::Needed{}), LH_FIELD(boundary, rule::Needed{}),
            LH_FIELD(tag), LH_FIELD(set), LH_FIELD(done), LH_FIELD(abort_on_fault),
            LH_FIELD(cancelled), LH_FIELD(matches, rule::List{0, LH_MEMBERS_MAX}),
            LH_FIELD(verdict), LH_FIELD(kind), LH_FIELD(step));
};

// All links of the epoch are up. If the epoch freezes ops, this peer has frozen them: it sends no
// further DONE and settles nothing until the next CommitEpoch. The coordinator decides the fates
// from `ops`.
struct EpochReady {
  GroupKey group;
  Epoch epoch;
  std::vector<OpReport> ops;
  uint64_t preparation = 0;  // of the PrepareEpoch that this message answers
  LH_MESSAGE(EpochReady, epoch_ready, LH_FIELD(group), LH_FIELD(epoch, rule::Needed{}),
             LH_FIELD(ops, rule::List{0, kOpReportsMax}), LH_FIELD(preparation, rule::Needed{}));
};

struct Unreachable {
  PeerId peer;
  std::string reason;  // names the address tried
  PeerId Key() const { return peer; }
  LH_FIELDS(Unreachable, LH_FIELD(peer, rule::Needed{}), LH_FIELD(reason, kText));
};

// This peer could not build some links of the epoch.
struct EpochFailed {
  GroupKey group;
  Epoch epoch;
  std::vector<Unreachable> unreachable;
  uint64_t preparation = 0;  // of the PrepareEpoch that this message answers
  LH_MESSAGE(EpochFailed, epoch_failed, LH_FIELD(group), LH_FIELD(epoch, rule::Needed{}),
             LH_FIELD(unreachable, rule::List{1, LH_MEMBERS_MAX}),
             LH_FIELD(preparation, rule::Needed{}));
};

// The link to a peer of the group broke or fell silent. `epoch` is the newest epoch (prepared or
// committed) that the reporter knows. A report is stale if the coordinator has a newer epoch.
// `silent_ms` is how long the reporter had heard nothing before the report. 0: the loss showed at
// once (a reset, a refused connection).
struct LinkLost {
  GroupKey group;
  Epoch epoch;
  PeerId peer;
  std::string reason;
  uint32_t silent_ms = 0;
  LH_MESSAGE(LinkLost, link_lost, LH_FIELD(group), LH_FIELD(epoch, rule::Needed{}),
             LH_FIELD(peer, rule::Needed{}), LH_FIELD(reason, kText),
             LH_FIELD(silent_ms, rule::Capped{LH_DETECT_MS_MAX}));
};

// What an open op waits for:
// - start: local members that have not called it
// - ready: other peers' READY, so members there that have not called it
// - transfer: bytes
// - done: other peers' DONE
// - finish: the result is being put into the targets
// - frozen: the next epoch
enum class OpPhase : uint8_t {
  kStart = 1,
  kReady = 2,
  kTransfer = 3,
  kDone = 4,
  kFinish = 5,
  kFrozen = 6
};
constexpr auto NamesOf(OpPhase) {
  return EnumNames{1, {"start", "ready", "transfer", "done", "finish", "frozen"}};
}

// How many of those whom an op awaits are named.
inline constexpr size_t kAwaitedMax = 8;

// The op of a group that has been open for the longest time at a peer.
struct OldestOp {
  uint64_t tag = 0;
  Epoch boundary;
  OpPhase phase = OpPhase::kStart;
  uint32_t age_ms = 0;            // since the first local member called it
  std::vector<MemberId> members;  // phase start: the local members that are awaited
  std::vector<PeerId> peers;      // phases ready and done: the peers that are awaited
  uint32_t awaited = 0;           // how many there are of both, also those that are not named
  LH_FIELDS(OldestOp, LH_FIELD(tag), LH_FIELD(boundary), LH_FIELD(phase), LH_FIELD(age_ms),
            LH_FIELD(members, rule::List{0, kAwaitedMax}),
            LH_FIELD(peers, rule::List{0, kAwaitedMax}), LH_FIELD(awaited));
};

// The lane on which a peer waits longest for another peer of the run.
struct WorstLane {
  PeerId peer;
  uint32_t lane = 0;              // 0: the control lane; data lanes count from 1
  uint32_t silent_ms = 0;         // for how long nothing came from the peer, on any lane
  uint32_t stalled_ms = 0;        // for how long TCP has had bytes there, and no acknowledgement
  uint64_t waiting_bytes = 0;     // of the whole link: not sent, or not acknowledged by TCP
  uint64_t bytes_per_second = 0;  // at which TCP delivers on the whole link; 0: unknown
  uint32_t rtt_us = 0;            // of the last PING; 0: unknown
  LH_FIELDS(WorstLane, LH_FIELD(peer, rule::Needed{}), LH_FIELD(lane), LH_FIELD(silent_ms),
            LH_FIELD(stalled_ms), LH_FIELD(waiting_bytes), LH_FIELD(bytes_per_second),
            LH_FIELD(rtt_us));
};

// The coordinator decides nothing by `oldest` and `worst`: they explain what a group waits for.
struct GroupLoad {
  GroupKey group;
  uint32_t ops_open = 0;
  uint64_t ops_settled = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  std::optional<OldestOp> oldest = std::nullopt;  // unset: no op is open
  std::optional<WorstLane> worst = std::nullopt;  // unset: nothing waits on any link
  LH_FIELDS(GroupLoad, LH_FIELD(group), LH_FIELD(ops_open), LH_FIELD(ops_settled),
            LH_FIELD(bytes_sent), LH_FIELD(bytes_received), LH_FIELD(oldest), LH_FIELD(worst));
};

// The progress of a fetch of shared state.
struct FetchProgress {
  uint64_t bytes_done = 0;   // bytes fetched so far, at most bytes_total
  uint64_t bytes_total = 0;  // bytes that differ; 0: not known yet
  uint64_t bytes_per_second = 0;
  uint32_t sources = 0;  // sources that are being asked
  LH_FIELDS(FetchProgress, LH_FIELD(bytes_done), LH_FIELD(bytes_total), LH_FIELD(bytes_per_second),
            LH_FIELD(sources));
};

struct FetchLoad {
  GroupKey group;
  MemberId member;
  FetchProgress progress;
  LH_FIELDS(FetchLoad, LH_FIELD(group), LH_FIELD(member, rule::Needed{}),
            LH_FIELD(progress, rule::Flat{}));
};

// A peer sends a heartbeat every detect_ms / 3, also while it sends other messages. A peer that
// sends nothing counts as silent.
struct Heartbeat {
  std::vector<GroupLoad> loads;
  std::vector<FetchLoad> fetches;
  LH_MESSAGE(Heartbeat, heartbeat, LH_FIELD(loads, rule::List{0, LH_GROUPS_MAX}),
             LH_FIELD(fetches, rule::List{0, LH_LOCAL_MEMBERS_MAX}));
};

// The daemon is being stopped or drained. It takes no new members.
struct Draining {
  LH_MESSAGE(Draining, draining);
};

// The member offers its state and waits for the result of the sync.
struct SyncVote {
  GroupKey group;
  MemberId member;
  SyncOffer offer;
  LH_MESSAGE(SyncVote, sync_vote, LH_FIELD(group), LH_FIELD(member, rule::Needed{}),
             LH_FIELD(offer));
};

// A fetch that SyncResult asked for has ended. OK: the state is here and verified.
struct FetchDone {
  GroupKey group;
  MemberId member;
  uint64_t number = 0;  // SyncOffer::number of the member's offer
  Outcome outcome;
  Hash128 state;                  // outcome OK: the root of the member's state now
  uint64_t bytes = 0;             // bytes received
  std::vector<MemberId> sources;  // members that sent some of these bytes
  std::vector<MemberId> corrupt;  // members that sent wrong bytes, which were not used
  LH_MESSAGE(FetchDone, fetch_done, LH_FIELD(group), LH_FIELD(member, rule::Needed{}),
             LH_FIELD(number, rule::Needed{}), LH_FIELD(outcome, rule::Flat{}), LH_FIELD(state),
             LH_FIELD(bytes), LH_FIELD(sources, rule::List{0, LH_SYNC_SOURCES_MAX}),
             LH_FIELD(corrupt, rule::List{0, LH_SYNC_SOURCES_MAX}));
};

// A measurement of one direction of a link. The reporting peer is one of the two ends. If both ends
// report the same direction, the newest measurement counts.
struct LinkMeasure {
  PeerId from;
  PeerId to;
  uint64_t bytes_per_second = 0;  // bandwidth of the link; 0: not measured
  uint32_t rtt_us = 0;            // round trip without queues; 0: not measured
  uint32_t age_ms = 0;            // time since the measurement
  bool at_least = false;          // the bandwidth is a lower bound: ops may get more
  bool small_packets = false;     // large packets vanish on the path: lanes use small ones
  // Segments waited for this link although the sender sent clearly less in all than it can. So the
  // link or the receiver limits the bandwidth, and not the sender.
  bool held = false;
  std::pair<PeerId, PeerId> Key() const { return {from, to}; }
  std::string Fault() const;
  LH_FIELDS(LinkMeasure, LH_FIELD(from, rule::Needed{}), LH_FIELD(to, rule::Needed{}),
            LH_FIELD(bytes_per_second), LH_FIELD(rtt_us), LH_FIELD(age_ms), LH_FIELD(at_least),
            LH_FIELD(small_packets), LH_FIELD(held));
};

// Two directions for each link to another peer of a group (LH_MEMBERS_MAX).
inline constexpr size_t kLinkMeasuresMax = 2048;
// A host that reports this rate up, or more, knows of no limit of what it sends in all: the network
// limits each of its connections.
inline constexpr uint64_t kNoLimitBytesPerSecond = uint64_t{1} << 60;

// The coordinator orders rings and divides tensors by these measurements, and never waits for them.
// A peer sends them when they have changed, and again every few minutes, because the coordinator
// forgets old ones.
struct LinkReport {
  std::vector<LinkMeasure> links;  // at most kLinkMeasuresMax
  // The most that the reporting host was lately seen to send and receive in all over its links.
  // 0: unknown.
  uint64_t up_bytes_per_second = 0;
  uint64_t down_bytes_per_second = 0;
  LH_MESSAGE(LinkReport, link_report, LH_FIELD(links, rule::List{0, kLinkMeasuresMax}),
             LH_FIELD(up_bytes_per_second), LH_FIELD(down_bytes_per_second));
};

// The answer to TryPeer.
struct PeerTried {
  GroupKey group;
  uint64_t trial = 0;  // TryPeer::trial
  PeerId peer;
  std::string reason;  // names the address tried and what was seen there; empty: the peer answers
  LH_MESSAGE(PeerTried, peer_tried, LH_FIELD(group), LH_FIELD(trial, rule::Needed{}),
             LH_FIELD(peer, rule::Needed{}), LH_FIELD(reason, kText));
};

// An op of this peer has to end: a member has cancelled it, or it cannot meet the calls of others.
// An epoch that freezes ops decides what becomes of the op. The message is stale if the newest
// epoch that froze ops is newer than `after`: the peer sends it again if the op is still there.
struct CancelOp {
  GroupKey group;
  MemberId member;
  Epoch after;       // the newest epoch that froze ops at this peer; 0: none did
  std::string what;  // says what happened to which op, for people
  LH_MESSAGE(CancelOp, cancel_op, LH_FIELD(group), LH_FIELD(member, rule::Needed{}),
             LH_FIELD(after), LH_FIELD(what, kText));
};

// What a peer said in its READY of an op, signed by that peer (proto/control/signed_ready.h).
struct Statement {
  PeerId peer;
  std::string digest;     // the SHA-256 of the READY's payload without the signature
  std::string signature;  // as Hello::signature
  PeerId Key() const { return peer; }
  LH_FIELDS(Statement, LH_FIELD(peer, rule::Needed{}),
            LH_FIELD(digest, rule::Bytes{LH_SHA256_BYTES, LH_SHA256_BYTES}),
            LH_FIELD(signature, rule::Bytes{LH_SIGNATURE_BYTES, LH_SIGNATURE_BYTES}));
};

// Another peer's DONE says of an op what cannot be, after the READYs that this peer has got. So one
// of the two was told something else, or lies. The op waits for an epoch that freezes ops.
struct Dispute {
  GroupKey group;
  // Whose DONE differs. 0: nobody's. With statements, they are evidence for a dispute that others
  // may have about this op. Without, the peer has named so many ops in this attempt that it asks
  // for the next one, in which it counts the READYs of each name anew.
  PeerId peer;
  Epoch attempt;  // the newest epoch that froze ops at this peer; 0: none did
  // The name of the op, as in ReadyName.
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;
  uint64_t index = 0;
  // The READYs of this op, if READYs are signed. An honest peer sends those that it has
  // checked; they may be any bytes of a peer that lies.
  std::vector<Statement> statements;
  std::string what;  // names the op, for people
  LH_MESSAGE(Dispute, dispute, LH_FIELD(group), LH_FIELD(peer), LH_FIELD(attempt),
             LH_FIELD(boundary, rule::Needed{}), LH_FIELD(tag), LH_FIELD(set), LH_FIELD(index),
             LH_FIELD(statements, rule::List{0, LH_MEMBERS_MAX}), LH_FIELD(what, kText));
};

using PeerMessage =
    std::variant<Hello, Join, Leave, Vote, EpochReady, EpochFailed, LinkLost, Heartbeat, Draining,
                 SyncVote, FetchDone, LinkReport, PeerTried, CancelOp, Dispute>;

// ---------------------------------------------------------------- coordinator to peer

// The answer to Hello. The peer compares it with the last Welcome that it accepted. On the same
// store, the peer accepts the same start or a later one. It accepts another store only while it has
// no members. If it refuses a Welcome, it tries the next address of a coordinator
// (docs/adr/0021-stores-terms-and-prepared-epochs.md).
struct Welcome {
  std::string coordinator;  // names this start of the coordinator
  uint32_t detect_ms = 0;
  // Names the store. The name is random. Exception: a store in memory is named by a hash of the
  // host name and --listen, unless the port in --listen is 0.
  uint64_t store = 0;
  uint64_t term = 0;  // rises with each start of a coordinator on the store
  LH_MESSAGE(Welcome, welcome, LH_FIELD(coordinator, kLabel),
             LH_FIELD(detect_ms, rule::Range{1, LH_DETECT_MS_MAX}), LH_FIELD(store, rule::Needed{}),
             LH_FIELD(term, rule::Needed{}));
};

// The coordinator knows the join. The member waits for admission.
struct JoinPending {
  uint64_t request = 0;
  GroupKey group;
  MemberId member;
  // For people: who has come, if the member waits until Join::members members have. The
  // coordinator sends the message again when this changes. "": the member does not wait for that.
  std::string present;
  LH_MESSAGE(JoinPending, join_pending, LH_FIELD(request, rule::Needed{}), LH_FIELD(group),
             LH_FIELD(member, rule::Needed{}), LH_FIELD(present, kText));
};

struct JoinRefused {
  uint64_t request = 0;
  GroupKey group;
  Outcome outcome;
  std::string Fault() const;
  LH_MESSAGE(JoinRefused, join_refused, LH_FIELD(request, rule::Needed{}), LH_FIELD(group),
             LH_FIELD(outcome, rule::Flat{}));
};

// The answer to Vote: every member stands at the boundary, and admissions have been decided.
// `epoch` is the epoch that was in force then: the same in all answers for this boundary, also in
// one that is repeated when a later epoch is in force. Its CommitEpoch came before this message.
struct VoteResult {
  GroupKey group;
  MemberId member;
  uint64_t number = 0;
  Epoch epoch;
  LH_MESSAGE(VoteResult, vote_result, LH_FIELD(group), LH_FIELD(member, rule::Needed{}),
             LH_FIELD(number, rule::Needed{}), LH_FIELD(epoch, rule::Needed{}));
};

// MemberInfo::background_until of a member for which the end of the background is not known yet
// (docs/life_of_a_sync.md, "In the background").
inline constexpr Epoch kInBackground{UINT64_MAX};

struct MemberInfo {
  MemberId member;
  PeerId peer;
  Epoch joined;  // the epoch that admitted the member
  std::string name;
  // Ops whose boundary is older than this epoch leave the member's input out, and until this epoch
  // no sync waits for the member. 0: it contributes to all ops in which it takes part.
  Epoch background_until;
  std::string cohort;  // for people; "": none
  MemberId Key() const { return member; }
  LH_FIELDS(MemberInfo, LH_FIELD(member, rule::Needed{}), LH_FIELD(peer, rule::Needed{}),
            LH_FIELD(joined, rule::Needed{}),
            LH_FIELD(name, rule::Name{0, LH_MEMBER_NAME_BYTES_MAX}), LH_FIELD(background_until),
            LH_FIELD(cohort, rule::Name{0, LH_COHORT_NAME_BYTES_MAX}));
};

struct PeerInfo {
  PeerId peer;
  std::vector<std::string> endpoints;
  uint32_t lanes = 0;
  std::string host;  // name of the host
  std::string key;   // the peer's public key (Hello::key)
  PeerId Key() const { return peer; }
  LH_FIELDS(PeerInfo, LH_FIELD(peer, rule::Needed{}), LH_FIELD(endpoints, kEndpoints),
            LH_FIELD(lanes, rule::Range{0, LH_LANES_MAX}), LH_FIELD(host, kLabel),
            LH_FIELD(key, kPublicKey));
};

// The measured cost of a group's links when the epoch was prepared. All peers get the same figures,
// so all of them choose the same algorithms.
struct LinkCost {
  uint32_t latency_us = 0;             // one way, between the peers farthest apart; 0: unknown
  uint64_t ring_bytes_per_second = 0;  // of the slowest hop of the ring; 0: unknown
  // How many bytes of a tensor the mesh adds up in a second, without latencies, if all peers own
  // equal shares, and with `shares`. 0: unknown, or the mesh cannot be used.
  uint64_t even_bytes_per_second = 0;
  uint64_t mesh_bytes_per_second = 0;
  // What each peer owns of a tensor in the mesh (proto/wire/shares.h), in ring order.
  Shares shares;
  LH_FIELDS(LinkCost, LH_FIELD(latency_us), LH_FIELD(ring_bytes_per_second),
            LH_FIELD(even_bytes_per_second), LH_FIELD(mesh_bytes_per_second),
            LH_FIELD(shares, rule::List{0, LH_MEMBERS_MAX}));
};

// Asks the peer to build the links of the epoch and to answer EpochReady or EpochFailed. Replaces
// an earlier PrepareEpoch of the group that was not committed.
struct PrepareEpoch {
  GroupKey group;
  Epoch epoch;
  Epoch base;           // the committed epoch before this one; 0: this is the first
  Epoch boundary;       // newest epoch up to this one that was made at a step boundary
  Epoch last_freeze;    // newest epoch up to this one that froze ops
  bool freeze = false;  // epoch == last_freeze: ops in flight are frozen, judged, redone
  // In the attempt `last_freeze` peers sign their READYs (docs/adr/0045-unequal-verdicts.md).
  bool sign_ops = false;
  std::vector<MemberInfo> members;  // in rank order
  std::vector<PeerInfo> peers;      // in ring order
  // Pairs whose link goes through a relay, each with a relay that reaches both (BlockedFault()). If
  // possible, the ring of an op has no such pair as neighbours (RingAvoiding()).
  BlockedPairs blocked;
  std::string token;  // secret of this epoch: authenticates lanes
  std::string cause;
  LinkCost cost;
  // A random id of this preparation. The peer's answers repeat it. If the store forgets a
  // preparation, a later preparation may have the same epoch number, but not the same id.
  uint64_t preparation = 0;
  std::string Fault() const;
  LH_MESSAGE(PrepareEpoch, prepare_epoch, LH_FIELD(group), LH_FIELD(epoch, rule::Needed{}),
             LH_FIELD(base), LH_FIELD(boundary, rule::Needed{}), LH_FIELD(last_freeze),
             LH_FIELD(freeze), LH_FIELD(sign_ops), LH_FIELD(members, rule::List{1, LH_MEMBERS_MAX}),
             LH_FIELD(peers, rule::List{1, LH_MEMBERS_MAX}),
             LH_FIELD(blocked, rule::List{0, LH_BLOCKED_PAIRS_MAX}),
             LH_FIELD(token, rule::Secret{1, LH_TOKEN_BYTES_MAX}), LH_FIELD(cause, kText),
             LH_FIELD(cost), LH_FIELD(preparation, rule::Needed{}));
};

enum class Fate : uint8_t { kCommit = 1, kRedo = 2, kAbort = 3 };
constexpr auto NamesOf(Fate) { return EnumNames{1, {"commit", "redo", "abort"}}; }

struct OpFate {
  OpOrdinal ordinal;
  Fate fate = Fate::kRedo;
  OpOrdinal Key() const { return ordinal; }
  LH_FIELDS(OpFate, LH_FIELD(ordinal, rule::Needed{}), LH_FIELD(fate));
};

// An op that other peers abort, and that this peer did not report. Every call of this peer's
// members for the op ends Aborted, whether it was made already or comes later.
struct MissedOp {
  // As in OpReport. A member that has passed more boundaries than `step`, or that calls an op of
  // another kind, does not call this op any more.
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;
  uint32_t kind = 0;
  uint64_t step = 0;
  friend auto operator<=>(const MissedOp&, const MissedOp&) = default;
  LH_FIELDS(MissedOp, LH_FIELD(boundary, rule::Needed{}), LH_FIELD(tag), LH_FIELD(set),
            LH_FIELD(kind), LH_FIELD(step));
};

// The epoch is in force. If it freezes ops, `fates` has one entry for each op in this peer's
// EpochReady, and no others.
// `missed` holds ops that this peer did not report.
struct CommitEpoch {
  GroupKey group;
  Epoch epoch;
  std::vector<OpFate> fates;
  std::vector<MissedOp> missed;  // in rising order
  std::string Fault() const;
  LH_MESSAGE(CommitEpoch, commit_epoch, LH_FIELD(group), LH_FIELD(epoch, rule::Needed{}),
             LH_FIELD(fates, rule::List{0, kOpReportsMax}),
             LH_FIELD(missed, rule::List{0, kMissedOpsMax}));
};

// The prepared epoch is given up, and no other epoch replaces it. The coordinator never gives up an
// epoch that freezes ops in this way.
struct AbortEpoch {
  GroupKey group;
  Epoch epoch;
  std::string reason;
  LH_MESSAGE(AbortEpoch, abort_epoch, LH_FIELD(group), LH_FIELD(epoch, rule::Needed{}),
             LH_FIELD(reason, kText));
};

enum class Removal : uint8_t { kLeft = 1, kDied = 2, kEvicted = 3, kUnreachable = 4, kUnknown = 5 };
constexpr auto NamesOf(Removal) {
  return EnumNames{1, {"left", "died", "evicted", "unreachable", "unknown"}};
}

// The member is out of the group. Also the answer to its Leave.
struct Removed {
  GroupKey group;
  MemberId member;
  Removal why = Removal::kLeft;
  std::string reason;
  LH_MESSAGE(Removed, removed, LH_FIELD(group), LH_FIELD(member, rule::Needed{}), LH_FIELD(why),
             LH_FIELD(reason, kText));
};

// The number of members that wait for admission. Sent whenever it changes.
struct PendingCount {
  GroupKey group;
  uint32_t count = 0;
  LH_MESSAGE(PendingCount, pending_count, LH_FIELD(group),
             LH_FIELD(count, rule::Range{0, LH_MEMBERS_MAX}));
};

// An operator asks this peer to drain, as SIGTERM would.
struct Drain {
  std::string reason;
  LH_MESSAGE(Drain, drain, LH_FIELD(reason, kText));
};

struct SyncSource {
  MemberId member;
  PeerId peer;
  MemberId Key() const { return member; }
  LH_FIELDS(SyncSource, LH_FIELD(member, rule::Needed{}), LH_FIELD(peer, rule::Needed{}));
};

enum class SyncAction : uint8_t {
  // The sync is over for this member, with `outcome`. OK: the sync is committed, and all members
  // that took part have the state.
  kEnd = 1,
  // The member has the elected state. It waits for kEnd. Members that fetch may ask its peer for
  // chunks.
  kServe = 2,
  // The peer fetches the elected state from the sources, then sends FetchDone. The coordinator may
  // repeat the message with other sources; only the newest list counts.
  kFetch = 3,
};

constexpr auto NamesOf(SyncAction) { return EnumNames{1, {"end", "serve", "fetch"}}; }

// The answer to an offer (SyncVote, or Vote with `sync`).
struct SyncResult {
  GroupKey group;
  MemberId member;
  uint64_t number = 0;  // SyncOffer::number
  SyncAction action = SyncAction::kEnd;
  Outcome outcome;        // kEnd
  uint64_t revision = 0;  // elected or committed; 0 if the outcome is not OK
  Hash128 manifest;
  Hash128 state;
  // kFetch: members that have the state, at least one. kEnd after a refused manifest: a member with
  // the elected manifest, so that the peer can find the first difference.
  std::vector<SyncSource> sources;
  std::string Fault() const;
  LH_MESSAGE(SyncResult, sync_result, LH_FIELD(group), LH_FIELD(member, rule::Needed{}),
             LH_FIELD(number, rule::Needed{}), LH_FIELD(action), LH_FIELD(outcome, rule::Flat{}),
             LH_FIELD(revision), LH_FIELD(manifest), LH_FIELD(state),
             LH_FIELD(sources, rule::List{0, LH_SYNC_SOURCES_MAX}));
};

// The state that the group agreed on last. Peers with a member in the background get it with each
// commit of a sync, with the epoch that admits such a member, and when they attach.
struct StateAgreed {
  GroupKey group;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  LH_MESSAGE(StateAgreed, state_agreed, LH_FIELD(group),
             LH_FIELD(revision, rule::Range{0, LH_REVISION_MAX}), LH_FIELD(manifest),
             LH_FIELD(state));
};

// Asks a member's peer to connect to the data port of a newcomer's peer. The two have no token for
// this group yet, because no epoch names the newcomer. The peer answers once, with PeerTried, in a
// bounded time.
struct TryPeer {
  GroupKey group;
  uint64_t trial = 0;  // number of the trial, repeated by PeerTried
  PeerInfo peer;
  LH_MESSAGE(TryPeer, try_peer, LH_FIELD(group), LH_FIELD(trial, rule::Needed{}), LH_FIELD(peer));
};

using CoordinatorMessage =
    std::variant<Welcome, JoinPending, JoinRefused, VoteResult, PrepareEpoch, CommitEpoch,
                 AbortEpoch, Removed, PendingCount, Drain, SyncResult, StateAgreed, TryPeer>;

// Returns the name of the message's type, such as "EpochReady". For logs and metrics.
template <class... Kinds>
const char* Name(const std::variant<Kinds...>& message) {
  return std::visit([](const auto& m) { return std::decay_t<decltype(m)>::kName; }, message);
}

}  // namespace longhaul::control
