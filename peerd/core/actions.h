// The actions of the peer core: what it asks the engine (peerd/engine) to do.
//
// The engine carries actions out in order. Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

struct ToCoordinator {
  control::PeerMessage message;
  friend bool operator==(const ToCoordinator&, const ToCoordinator&) = default;
};

// Answers to requests of local trainers: each request gets one answer of its kind.
struct JoinDone {
  LocalId local;
  Outcome outcome;
  World world;
  bool newcomer = false;  // other members were in the group before
};
struct StepDone {
  LocalId local;
  Outcome outcome;
  World world;
};
// Answers a LocalSync. A LocalStep with a sync is answered by SyncDone and then by StepDone.
struct SyncDone {
  LocalId local;
  Outcome outcome;
  // OK: the state that all members have now. The chunks that were fetched must be copied to the
  // tensors. Not OK: the tensors stay as the trainer brought them.
  uint64_t revision = 0;
  Hash128 state;
  uint64_t bytes = 0;    // fetched
  uint32_t sources = 0;  // members that sent any of these bytes
  // The member is in the background. Nobody may write to its tensors until a TakeDone that is OK, a
  // later SyncDone without `background`, or MemberGone.
  bool background = false;
  friend bool operator==(const SyncDone&, const SyncDone&) = default;
};
// Answers a LocalTake. OK: all of the state is here; the fields are those of SyncDone.
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
// No answer to a request. The member's world has changed.
struct WorldChanged {
  LocalId local;
  World world;
};
// No answer to a request. The member is out, by its own wish or not. This is the last answer or
// message for a member whose JoinDone was OK: all its open requests were answered before.
struct MemberGone {
  LocalId local;
  Outcome outcome;
};

// A link that an epoch needs.
struct LinkWanted {
  control::PeerInfo peer;
  PeerId relay;           // the link goes through this peer, which `links` names, too; 0: straight
  bool dial = false;      // this peer dials; false: the other peer dials
  bool data = false;      // data lanes too, not only the control lane
  bool one_lane = false;  // begin with a single data lane: the epoch needs very many links
};
// Build these links. LinkUp follows for each link that is up or comes up, also if it was up before.
// LinkDown follows for each link that is not up by `deadline`.
struct OpenLinks {
  GroupKey group;
  Epoch epoch;
  std::string token;
  std::vector<LinkWanted> links;
  Tick deadline;
};
// From now on the group needs links to these peers only. A link that no group of the run needs is
// closed in an orderly way, without LinkDown. Tokens of the group's epochs before `epoch` are
// forgotten.
struct KeepLinks {
  GroupKey group;
  Epoch epoch;
  std::vector<PeerId> peers;
};

// Find out whether the peer answers at its data port. AddressTried follows by `deadline`.
struct TryAddress {
  GroupKey group;
  uint64_t trial = 0;
  control::PeerInfo peer;
  Tick deadline;
};

// A part of the whole that belongs to a member. Ops other than all-reduce and barrier have these
// (peerd/collective/attempt.h says which, and in what order).
struct CutOwner {
  int position = 0;  // the place of the owner's peer in the ring
  int post = -1;  // the index of the owner's post among `posts`; -1: the owner is at another peer
  // Of the one receiver, if the op is direct (IsDirect()).
  int to_position = 0;
  int to_post = -1;
  uint64_t count = 0;  // elements, if desc.unequal
};

struct SendReady {
  GroupKey group;
  PeerId to;
  OpOrdinal ordinal;
  Epoch attempt;
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;  // SetOf() the members that take part
  OpDesc desc;
  std::optional<OtherOffer> other_offer;               // if the offers of local members differ
  uint64_t step = 0;                                   // the latest NewPost::step of its members
  std::optional<OpRefusal> refusal = std::nullopt;     // no posts, and no inputs
  std::vector<OpTerms> terms;                          // of the members of `posts`; see ReadyBody
  bool one_shot = false;                               // attach the inputs of `posts`, reduced
  ReadyInput input = ReadyInput::kSegments;            // kCarried: one_shot is set
  std::optional<OneShotResult> result = std::nullopt;  // attach this in place of inputs
  std::vector<PostRef> posts;
  std::vector<bool> contributes;  // for each of `posts`; an input is left out if false
  std::vector<double> weights;    // for each of `posts`, if desc.weighted
  std::vector<CutOwner> cuts;     // see CutOwner
  // Set: sign it, with this ReadyName::index, and answer ReadySigned.
  std::optional<uint64_t> sign = std::nullopt;
  std::string outline = {};  // of a list; see OutlineFault()
};
struct SendDone {
  GroupKey group;
  PeerId to;
  OpOrdinal ordinal;  // the receiver's
  Epoch attempt;
  bool refused = false;
  bool may_wait = false;  // no trainer waits for it: it may be sent with the next frame
  bool started = false;   // not done yet: this peer has every READY, and takes segments
  std::optional<Hash128> readies_digest =
      std::nullopt;  // a digest of all READYs, if they are signed
};

// Start to move and add up the op's bytes. A position in `ring` stands for a peer.
struct StartAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  OpDesc desc;
  std::vector<PeerId> ring;  // participants in ring order, including this peer
  uint32_t members = 0;      // members whose inputs are in the result, at all peers together
  std::vector<PostRef> posts;
  std::vector<bool> contributes;           // for each of `posts`: its input is in the result
  std::vector<uint32_t> ring_contributes;  // for each position: how many inputs of that peer are
  std::vector<double> weights;             // for each of `posts`, if desc.weighted
  double weight_sum = 0;                   // of all members, if desc.weighted
  std::vector<int> order;      // the positions in the order in which to add; empty: any order
  std::vector<CutOwner> cuts;  // see CutOwner
  Algorithm algorithm = Algorithm::kRing;  // never kAuto
  // If desc.Encodes(): for random numbers. It depends on the op's name, not on the attempt.
  uint64_t seed = 0;
  // Of each position in the mesh. If the op IsShared(): what it owns; empty: equal shares. In a
  // broadcast: what it passes on; empty: nobody passes anything on.
  Shares shares;
  // One-shot op: the input of each position; empty for this peer's own position.
  std::vector<std::string> payloads;
  // One-shot op: set in place of `payloads` if a participant has the result of an earlier attempt.
  std::optional<std::string> result = std::nullopt;
};
// `peer` has announced the op in this attempt, and has started it if it needs terms: segments may
// be sent to it. They name the op by the ordinal `theirs`.
struct CreditAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  PeerId peer;
  OpOrdinal theirs;
};
// Stop moving bytes, restore the inputs, answer AttemptStopped.
struct StopAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
};
// The op is over here, and the engine forgets it. commit: put the result into all targets, then
// answer AttemptFinished; the PostDones follow. Otherwise the attempt was stopped or never ran, and
// there is no answer.
struct FinishAttempt {
  GroupKey group;
  OpOrdinal ordinal;
  bool commit = false;
};

// Other peers may ask this member for chunks of this state until EndServe. Nobody writes to the
// state meanwhile, unless `may_change` is true.
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
// Fetch this state: the chunks in which it differs from the member's own state. Verify the result.
// The trainer's tensors stay as they are. Ends with exactly one TransferEnded.
struct StartTransfer {
  LocalId local;
  GroupKey group;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  std::vector<control::SyncSource> sources;  // may include members at this peer
  // Also fetch the tensors with allow_unequal: the member has never held an agreed state.
  bool unequal_too = false;
  // The sources train meanwhile. A chunk that has changed at all sources is left out.
  bool background = false;
  friend bool operator==(const StartTransfer&, const StartTransfer&) = default;
};
// Replaces the list of sources of the transfer in progress.
struct ChangeSources {
  LocalId local;
  std::vector<control::SyncSource> sources;
  friend bool operator==(const ChangeSources&, const ChangeSources&) = default;
};
struct StopTransfer {
  LocalId local;
  friend bool operator==(const StopTransfer&, const StopTransfer&) = default;
};
// Get the manifest of `other` and compare it. ManifestCompared follows with the first difference.
struct CompareManifest {
  LocalId local;
  control::SyncSource other;
  friend bool operator==(const CompareManifest&, const CompareManifest&) = default;
};

// A fault is over here. `agree_us`: from the first PrepareEpoch that froze ops to CommitEpoch.
// `resume_us`: from CommitEpoch to the end of the first op that was redone; -1: no op was redone,
// or the next fault came first.
struct FaultOver {
  GroupKey group;
  int64_t agree_us = 0;
  int64_t resume_us = -1;
};

// Every local member is out and the drain is complete.
struct Drained {};

struct LogLine {
  std::string text;  // fixed words, then key=value pairs
};

// A frame of the peer broke the protocol: close the link. LinkDown follows, as for any link that
// breaks. Until the group's next freeze the core ignores the peer's frames for this group.
struct BreakLink {
  GroupKey group;
  PeerId peer;
  std::string reason;
};

// The control stream leads to a coordinator that this peer may not follow: close the stream, and
// try the next address. CoordinatorDown follows.
struct RefuseCoordinator {
  std::string reason;
};

using Action =
    std::variant<ToCoordinator, JoinDone, StepDone, SyncDone, TakeDone, LeaveDone, PostDone,
                 WorldChanged, MemberGone, OpenLinks, KeepLinks, TryAddress, SendReady, SendDone,
                 StartAttempt, CreditAttempt, StopAttempt, FinishAttempt, ServeState, EndServe,
                 StartTransfer, ChangeSources, StopTransfer, CompareManifest, FaultOver, Drained,
                 LogLine, BreakLink, RefuseCoordinator>;

}  // namespace longhaul::peerd
