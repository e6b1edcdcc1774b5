// The peer's protocol core: local members, epochs, and the life of each op short of its bytes.
//
// Pure: Step(event, now) -> actions, deterministic, no clock, thread, socket or protobuf. The
// driver carries out actions in order.
//
// One op at one peer (docs/life_of_an_op.md):
//
//   gathering --(all local members posted)--> announced: READY to every other participant
//   announced --> attempt running (segments flow to another peer once its READY is here)
//   running --(result complete, all sends returned, every READY here)--> done: DONE to all
//   done --(every DONE here)--> settled: trainers get the outcome
//   any of these --(PrepareEpoch that freezes)--> frozen: attempt stopped unless done, reported
//   frozen --(CommitEpoch)--> settled (commit, abort) or announced again (redo, next attempt)
//
// An op of at most LH_EAGER_BYTES_MAX bytes carries its input in the READY and has no segments.
// Which way the others go: algorithm.h.
//
// Syncs of shared state: local_syncs.h. The driver hashes states and moves their chunks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// One local member from join to end. Chosen by the driver, never reused; doubles as Join.request.
using LocalId = Id<struct LocalIdKind>;

struct World {
  Epoch epoch;
  MemberId member;
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t pending = 0;
  bool counts = true;  // false: this member is in the background
  friend bool operator==(const World&, const World&) = default;
};

struct OpInfo {
  Epoch epoch;        // whose members took part (those admitted by the op's boundary)
  uint32_t size = 0;  // members whose tensors are in the result
  uint32_t retries = 0;
  int64_t total_us = 0;
  int64_t wait_us = 0;
  Algorithm algorithm = Algorithm::kAuto;  // of the attempt that counted
  friend bool operator==(const OpInfo&, const OpInfo&) = default;
};

// A post of a local member: the driver knows its buffers by this.
struct PostRef {
  LocalId local;
  uint64_t call = 0;
  friend auto operator<=>(const PostRef&, const PostRef&) = default;
};

// How a one-shot op has ended at some participant, for those that were kept from it by a fault.
struct OneShotResult {
  Epoch epoch;           // whose members took part
  uint32_t members = 0;  // whose tensors are in it
  std::string bytes;     // of the tensor
  friend bool operator==(const OneShotResult&, const OneShotResult&) = default;
};

// The state that a trainer brings to a sync; hashed by the driver before.
struct SyncRequest {
  control::SyncStrategy strategy = control::SyncStrategy::kPopular;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  // The trainer has written all of it since its last sync, from a checkpoint for instance: whatever
  // broke off then, it is whole.
  bool restored = false;
  // It is what the peer kept of a former member of the name, at the revision that it had then.
  bool kept = false;
  // It holds nothing of use: a copy of kept bits into it broke off, or a transfer, for a former
  // member of its trainer for instance.
  bool torn = false;
  // Some of its tensors may be unequal.
  bool unequal = false;
  // A transfer in the background writes to it: `state` says nothing.
  bool fetching = false;
  friend bool operator==(const SyncRequest&, const SyncRequest&) = default;
};

// ------------------------------------------------------------------------------ events

// The control stream stands (the core says Hello first on it) or is gone.
struct CoordinatorUp {};
struct CoordinatorDown {};
struct FromCoordinator {
  control::CoordinatorMessage message;
};

struct LocalJoin {
  LocalId local;
  GroupKey group;
  std::string name;
  // As in control::Join.
  std::string cohort;
  uint32_t cohort_size = 0;
  uint32_t step_deadline_ms = 0;
  bool background = false;
};
// At most one LocalStep and one LocalLeave is open for a member; the driver sees to it. From the
// event until SyncEnded nobody but the driver writes to the tensors of `sync`.
struct LocalStep {
  LocalId local;
  std::optional<SyncRequest> sync = std::nullopt;
};
struct LocalSync {
  LocalId local;
  SyncRequest sync;
};
// The member in the background wants its tensors back as soon as they hold what was agreed on last:
// one TakeDone, by `deadline` at the latest.
struct LocalTake {
  LocalId local;
  Tick deadline;
};
struct LocalLeave {
  LocalId local;
};
// The trainer is gone. Its posted ops finish for the others, then the member leaves.
struct LocalDied {
  LocalId local;
  std::string reason;
};
struct LocalPost {
  PostRef post;
  uint64_t tag = 0;
  OpDesc desc;
};

// The control lane to the peer stands, and the data lanes that were asked for.
struct LinkUp {
  std::string run;
  PeerId peer;
};
// It broke or fell silent after LinkUp; or it could not be built in time.
struct LinkDown {
  std::string run;
  PeerId peer;
  std::string reason;
  uint32_t silent_ms = 0;  // nothing was heard of the peer for this long; 0: it broke
};
struct PeerReady {
  GroupKey group;
  PeerId peer;
  OpOrdinal ordinal;  // theirs
  Epoch attempt;
  Epoch boundary;
  uint64_t tag = 0;
  OpDesc desc;
  bool local_mismatch = false;
  std::string payload;  // eager input, else empty
  PeerId via;           // who relayed it; 0: it came straight from the peer
  // In place of an input: the op has ended there, before the fault that has it announced again.
  std::optional<OneShotResult> result = std::nullopt;
};
struct PeerDone {
  GroupKey group;
  PeerId peer;
  OpOrdinal ordinal;  // ours
  Epoch attempt;
  bool refused = false;
  PeerId via;  // as in PeerReady
};

// The attempt's result is complete and all its sends have returned.
struct AttemptComplete {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  std::string result = {};  // the tensor's bytes, of kOneShot; else empty
};
// Answer to StopAttempt: nothing more is written to the op's buffers, inputs are as posted.
struct AttemptStopped {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
};

// A state that the peer kept for a member.
struct PutBack {
  uint64_t revision = 0;
  Hash128 state;
};
// Of a StartTransfer: nothing writes to the tensors any more.
struct TransferEnded {
  LocalId local;
  Outcome outcome;  // OK: the state is there and verified
  uint64_t bytes = 0;
  std::vector<MemberId> sources;  // that sent some of it
  std::vector<MemberId> corrupt;
  bool wrote = true;  // not OK: something was written to the tensors
  // Not OK: in place of a mixture they hold this, which was agreed on before.
  std::optional<PutBack> put_back = std::nullopt;
};
// Of a StartTransfer: what differs is known. `bytes_left` of a state of `bytes_total` are to be
// fetched. May be left out.
struct TransferMeasured {
  LocalId local;
  uint64_t bytes_left = 0;
  uint64_t bytes_total = 0;
};
// Answer to CompareManifest: in words, or "" if the other one did not say.
struct ManifestCompared {
  LocalId local;
  std::string difference;
};

// SIGTERM or an operator: leave at the next step boundary of each member, by `deadline` at the
// latest.
struct DrainRequested {
  Tick deadline;
};
struct TimePassed {};

using Event = std::variant<CoordinatorUp, CoordinatorDown, FromCoordinator, LocalJoin, LocalStep,
                           LocalSync, LocalTake, LocalLeave, LocalDied, LocalPost, LinkUp, LinkDown,
                           PeerReady, PeerDone, AttemptComplete, AttemptStopped, TransferMeasured,
                           TransferEnded, ManifestCompared, DrainRequested, TimePassed>;

// ------------------------------------------------------------------------------ actions

struct ToCoordinator {
  control::PeerMessage message;
  friend bool operator==(const ToCoordinator&, const ToCoordinator&) = default;
};

// Answers to local requests, exactly one each.
struct JoinDone {
  LocalId local;
  Outcome outcome;
  World world;
};
struct StepDone {
  LocalId local;
  Outcome outcome;
  World world;
};
// The answer to a LocalSync; of a LocalStep with a sync the first of two, before StepDone.
struct SyncEnded {
  LocalId local;
  Outcome outcome;
  // OK: what the tensors hold now. Not OK: what was put back in them (PutBack), if anything was.
  uint64_t revision = 0;
  Hash128 state;
  bool torn =
      false;  // they hold nothing of use; also if a transfer was complete and its sync failed
  uint64_t bytes = 0;
  uint32_t sources = 0;
  // The member is in the background: the tensors are the driver's until it takes them (LocalTake),
  // syncs again, or is gone (MemberGone): they are torn then.
  bool background = false;
  friend bool operator==(const SyncEnded&, const SyncEnded&) = default;
};
// The answer to a LocalTake. OK: nobody writes to the tensors, which hold this.
struct TakeDone {
  LocalId local;
  Outcome outcome;
  uint64_t revision = 0;
  Hash128 state;
  uint64_t bytes = 0;
  uint32_t sources = 0;
  friend bool operator==(const TakeDone&, const TakeDone&) = default;
};
struct LeaveDone {
  LocalId local;
  Outcome outcome;
};
struct PostDone {
  PostRef post;
  Outcome outcome;
  OpInfo info;
};
// Unasked. The member's world changed. The member is out, by its own wish or not: the last that is
// said of a member whose JoinDone was OK, after every open request of it was answered.
struct WorldChanged {
  LocalId local;
  World world;
};
struct MemberGone {
  LocalId local;
  Outcome outcome;
};

// Links that an epoch needs. Those that stand already count as up: LinkUp is sent for each all the
// same. A link that cannot be built within the deadline ends in LinkDown.
struct LinkWanted {
  control::PeerInfo peer;
  bool dial = false;  // we dial (the other one waits); false: we wait
  bool data = false;  // data lanes too, not only the control lane
};
struct OpenLinks {
  GroupKey group;
  Epoch epoch;
  std::string token;
  std::vector<LinkWanted> links;
  Tick deadline;
};
// The peers that the group needs from now on; what no group of the run needs is closed in order.
// Tokens of epochs of the group below `epoch` are forgotten.
struct KeepLinks {
  GroupKey group;
  Epoch epoch;
  std::vector<PeerId> peers;
};

// READY and DONE go to `via`, which hands them on to `to`: `to` itself, unless the epoch says that
// the two peers have no link.
struct SendReady {
  GroupKey group;
  PeerId to;
  PeerId via;
  OpOrdinal ordinal;
  Epoch attempt;
  Epoch boundary;
  uint64_t tag = 0;
  OpDesc desc;
  bool local_mismatch = false;
  bool eager = false;                                  // attach the input of `posts`
  std::optional<OneShotResult> result = std::nullopt;  // or attach this
  std::vector<PostRef> posts;
  std::vector<bool> counts;  // by post; the others are left out
};
struct SendDone {
  GroupKey group;
  PeerId to;
  PeerId via;
  OpOrdinal ordinal;  // theirs
  Epoch attempt;
  bool refused = false;
  bool may_wait = false;  // nobody waits for it: it may go with the next frame
};

// Runs the op's bytes: ring positions are peers; `members` is how many inputs there are in all.
struct StartAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  OpDesc desc;
  std::vector<PeerId> ring;  // participants in ring order, this peer among them
  uint32_t members = 0;
  std::vector<PostRef> posts;
  std::vector<bool> counts;                // by post: its input is in the result
  std::vector<bool> ring_counts;           // by ring position: the input of one of its members is
  Algorithm algorithm = Algorithm::kRing;  // never kAuto. Of kOneShot all inputs are here:
  std::vector<std::string> payloads;       // by ring position, own one empty
  // Or, in their place, what comes out: somebody has it, from an attempt before.
  std::optional<std::string> result = std::nullopt;
};
// `peer` waits for segments of the attempt under its own name of the op.
struct CreditAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  PeerId peer;
  OpOrdinal theirs;
};
// Stop moving bytes, undo what was written, answer AttemptStopped.
struct StopAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
};
// The op is settled. commit: the result is in (or is to be put into) the targets; else the attempt
// was stopped or never ran. The driver forgets the op; the PostDones follow.
struct FinishAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  bool commit = false;
};

// Other peers may ask this member for chunks of this state until EndServe. Nobody writes to it,
// unless it may change.
struct ServeState {
  LocalId local;
  GroupKey group;
  MemberId member;
  Hash128 state;
  bool may_change = false;
  friend bool operator==(const ServeState&, const ServeState&) = default;
};
struct EndServe {
  LocalId local;
  friend bool operator==(const EndServe&, const EndServe&) = default;
};
// Fetch into the member's tensors what differs, and check that they have this state then. Ends with
// exactly one TransferEnded, after which nothing writes to the tensors.
struct StartTransfer {
  LocalId local;
  GroupKey group;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  std::vector<control::SyncSource> sources;  // a peer may be this one
  bool unequal_too = false;  // also the tensors that may differ: the member never held a state
  // Its sources train: what has changed at all of them is left out.
  bool background = false;
  friend bool operator==(const StartTransfer&, const StartTransfer&) = default;
};
// Of the transfer that is on: those not named are gone, others have come.
struct ChangeSources {
  LocalId local;
  std::vector<control::SyncSource> sources;
  friend bool operator==(const ChangeSources&, const ChangeSources&) = default;
};
struct StopTransfer {
  LocalId local;
  friend bool operator==(const StopTransfer&, const StopTransfer&) = default;
};
// Get the manifest of the other one; ManifestCompared with the first difference.
struct CompareManifest {
  LocalId local;
  control::SyncSource other;
  friend bool operator==(const CompareManifest&, const CompareManifest&) = default;
};

// A freezing epoch has done its work here: from PrepareEpoch to CommitEpoch, and from there until
// the first of the ops that had to be redone ended. -1: none had to be, or the next fault came
// first.
struct FaultOver {
  GroupKey group;
  int64_t agree_us = 0;
  int64_t resume_us = -1;
};

// Every local member is out and the drain is complete.
struct Drained {};

struct LogLine {
  std::string text;  // fixed words, then key=value
};

// A frame of the peer was against the protocol: close the link. LinkDown follows as for any link
// that breaks.
struct BreakLink {
  std::string run;
  PeerId peer;
  std::string reason;
};

using Action = std::variant<ToCoordinator, JoinDone, StepDone, SyncEnded, TakeDone, LeaveDone,
                            PostDone, WorldChanged, MemberGone, OpenLinks, KeepLinks, SendReady,
                            SendDone, StartAttempt, CreditAttempt, StopAttempt, FinishAttempt,
                            ServeState, EndServe, StartTransfer, ChangeSources, StopTransfer,
                            CompareManifest, FaultOver, Drained, LogLine, BreakLink>;

// ------------------------------------------------------------------------------ the core

struct CoreConfig {
  PeerId peer;
  std::vector<std::string> endpoints;
  uint32_t lanes = 0;
  std::string version;
  std::string host;
  uint32_t detect_ms = 1500;          // until Welcome says otherwise
  uint32_t drain_timeout_ms = 30000;  // of a drain that the coordinator asks for
};

// READY or DONE of two peers that are to have no link, and the peer that carries it.
struct RelayedFrame {
  GroupKey group;
  PeerId origin;
  PeerId relay;
  PeerId destination;
  Epoch attempt;
};

enum class RelayCheck : uint8_t {
  kTake,    // an epoch of the attempt, committed or prepared, blocks the pair and has this relay
  kStale,   // of an attempt, a group or a peer that was
  kRefuse,  // against the protocol: whoever it came from
};

class PeerCore {
 public:
  explicit PeerCore(CoreConfig config);
  ~PeerCore();
  PeerCore(PeerCore&&) noexcept;
  PeerCore& operator=(PeerCore&&) noexcept;

  std::vector<Action> Step(const Event& event, Tick now);
  Tick NextDeadline() const;

  // Bytes that ops of the group moved so far: told to the coordinator with the next heartbeat.
  void SetBytes(const GroupKey& group, uint64_t sent, uint64_t received);
  // How far the transfer of a local member is, for heartbeats; ignored if it has none.
  void SetProgress(LocalId local, const control::FetchProgress& progress);

  // Members of the group's epoch in rank order, for the local member; empty while it is pending.
  struct MembersView {
    Epoch epoch;
    std::vector<MemberId> members;
  };
  MembersView GetMembers(LocalId local) const;

  // Of a frame that this peer is to pass on, or to take as the origin's.
  RelayCheck CheckRelay(const RelayedFrame& frame) const;

  // Counts for metrics and the heartbeat.
  struct Stats {
    uint32_t members = 0;
    uint32_t ops_open = 0;
    uint64_t ops_committed = 0;
    uint64_t ops_aborted = 0;
    uint64_t ops_refused = 0;
    uint64_t retries = 0;
    uint64_t frames_stale = 0;    // of an older attempt
    uint64_t frames_refused = 0;  // against the protocol
  };
  Stats GetStats() const;

  // Aborts the process with a reason if an internal invariant is broken. Called by tests after each
  // step.
  void CheckInvariants() const;
  uint64_t Digest() const;
  // A core in the same state, from which another future can be tried.
  PeerCore Clone() const;

 private:
  class Impl;
  explicit PeerCore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::peerd
