// What the peer core wants done. The engine (peerd/engine) carries actions out in order.
//
// Plain values.
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
struct SyncDone {
  LocalId local;
  Outcome outcome;
  // OK: what all have now; what was fetched of it is to be written to the tensors. Not OK: they
  // stay as the trainer brought them.
  uint64_t revision = 0;
  Hash128 state;
  uint64_t bytes = 0;
  uint32_t sources = 0;
  // The member is in the background: nobody writes to the tensors until it takes what is fetched
  // (LocalTake), a later sync says no more of this, or it is gone (MemberGone).
  bool background = false;
  friend bool operator==(const SyncDone&, const SyncDone&) = default;
};
// The answer to a LocalTake. OK: this is here, as in SyncDone.
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
  PeerId relay;       // through which the link goes, one of the others; 0: straight
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

// Find out whether the peer answers at its data port. PeerTried follows, by the deadline.
struct TryAddress {
  GroupKey group;
  uint64_t trial = 0;
  control::PeerInfo peer;
  Tick deadline;
};

struct SendReady {
  GroupKey group;
  PeerId to;
  OpOrdinal ordinal;
  Epoch attempt;
  Epoch boundary;
  uint64_t tag = 0;
  OpDesc desc;
  std::optional<OtherOffer> other_offer;               // if the members here disagree
  bool one_shot = false;                               // attach the input of `posts`
  std::optional<OneShotResult> result = std::nullopt;  // or attach this
  std::vector<PostRef> posts;
  std::vector<bool> contributes;  // by post; the others are left out
};
struct SendDone {
  GroupKey group;
  PeerId to;
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
  std::vector<bool> contributes;           // by post: its input is in the result
  std::vector<bool> ring_contributes;      // by ring position: the input of one of its members is
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
// The op is settled. commit: put the result into all targets, answer AttemptFinished; the PostDones
// follow. Else the attempt was stopped or never ran, and there is no answer. The driver forgets it.
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
// Fetch what differs from the member's state, and check that it is this state then. The trainer's
// tensors stay as they are. Ends with exactly one TransferEnded.
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

// A frame of the peer was against the protocol, and the core takes no more of it in this attempt:
// close the link. LinkDown follows as for any link that breaks.
struct BreakLink {
  GroupKey group;
  PeerId peer;
  std::string reason;
};

// The stream leads to a coordinator that this peer may not follow: end it, and go on to the next
// address. CoordinatorDown follows.
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
