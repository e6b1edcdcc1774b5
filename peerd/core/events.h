// The events of the peer core: everything that happens at one peer.
//
// The engine (peerd/engine) makes an event when the coordinator, a trainer, a link or one of its
// own runners does something. It gives the core one event at a time. Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// The control stream is open. The core sends Hello on it before anything else.
struct CoordinatorUp {};
// The control stream is closed.
struct CoordinatorDown {};
struct FromCoordinator {
  control::CoordinatorMessage message;
};

struct LocalJoin {
  LocalId local;
  GroupKey group;
  std::string name;
  control::JoinWish wish;
};
// A member has at most one open LocalStep and one open LocalLeave; the driver ensures this. From
// this event until SyncDone nobody writes to the tensors of `sync`.
struct LocalStep {
  LocalId local;
  std::optional<SyncRequest> sync = std::nullopt;
};
struct LocalSync {
  LocalId local;
  SyncRequest sync;
};
// A member in the background asks for the state that the group agreed on last. One TakeDone
// follows: as soon as all of the state is here, but by `deadline` at the latest.
struct LocalTake {
  LocalId local;
  Tick deadline;
};
struct LocalLeave {
  LocalId local;
};
// The trainer is gone. Its ops in flight have 2 * detect_ms to end, then the member leaves.
struct LocalDied {
  LocalId local;
  std::string reason;
};
struct LocalPost {
  PostRef post;
  uint64_t tag = 0;
  OpDesc desc;
  // Set: the root (or partner) is the member with this rank in the newest epoch, and desc.root (or
  // `partner`) is not set.
  std::optional<uint64_t> root_rank = std::nullopt;
  // Whether the trainer has taken its member for the root; kSendRecv: for the sender. Its buffers
  // are made for that.
  bool is_root = false;
  MemberId partner = MemberId();  // kSendRecv
  // The members that take part, rising; empty: all members. Not for kSendRecv.
  std::vector<MemberId> participants = {};
  OpTerms terms = {};        // if desc.NeedsTerms()
  std::string outline = {};  // of a list; see OutlineFault()
};
// A call of the trainer was refused, and the trainer knows. The other participants wait for it:
// they are told. Of `op` its name counts: `post.local`, tag, kind, root_rank, is_root, partner and
// participants.
struct LocalRefusal {
  LocalPost op;
  std::string why;
};
// The trainer gives up an op that it has posted. If the op is over already, nothing happens.
struct LocalCancel {
  PostRef post;
};

// The link to the peer is up: its control lane, and its data lanes if they were asked for.
struct LinkUp {
  std::string run;
  PeerId peer;
  uint32_t latency_us = 0;  // one way; 0: unknown, or the path is short
};
// The link broke or fell silent after LinkUp, or it could not be built by the deadline.
struct LinkDown {
  std::string run;
  PeerId peer;
  std::string reason;
  uint32_t silent_ms = 0;  // how long nothing was heard from the peer; 0: the link broke
};
// Answer to TryAddress. `error` is empty if the peer answered. Otherwise it names the address and
// what was seen there.
struct AddressTried {
  GroupKey group;
  uint64_t trial = 0;
  PeerId peer;
  std::string error;
};
struct ReadySignature {
  uint64_t index = 0;     // control::ReadyName::index
  std::string digest;     // as in control::Statement, computed here
  std::string signature;  // by the sender
  LH_FIELDS(ReadySignature, LH_FIELD(index), LH_FIELD(digest), LH_FIELD(signature));
};
struct PeerReady {
  GroupKey group;
  PeerId peer;
  OpOrdinal ordinal;  // the sender's
  Epoch attempt;
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;  // SetOf() the members that take part
  OpDesc desc;
  std::optional<OtherOffer> other_offer;  // if the offers of two members at that peer differ
  uint64_t step = 0;                      // the latest NewPost::step of the members at that peer
  std::optional<OpRefusal> refusal = {};  // the call of a member at that peer was refused
  std::vector<OpTerms> terms = {};        // of the members at that peer; see ReadyBody
  std::string payload = {};               // the input that READY carries, if it carries one
  // Comes in place of an input if that peer has answered its trainers. A fault made it announce the
  // op again.
  std::optional<OneShotResult> result = std::nullopt;
  // Set if it is signed. The signature has not been checked.
  std::optional<ReadySignature> signature = std::nullopt;
  ReadyInput input = ReadyInput::kSegments;
  std::string outline = {};  // of a list: of the first member at that peer
  LH_FIELDS(PeerReady, LH_FIELD(group), LH_FIELD(peer), LH_FIELD(ordinal), LH_FIELD(attempt),
            LH_FIELD(boundary), LH_FIELD(tag), LH_FIELD(set), LH_FIELD(desc), LH_FIELD(other_offer),
            LH_FIELD(step), LH_FIELD(refusal), LH_FIELD(terms), LH_FIELD(payload), LH_FIELD(result),
            LH_FIELD(signature), LH_FIELD(input), LH_FIELD(outline));
};
struct PeerDone {
  GroupKey group;
  PeerId peer;
  OpOrdinal ordinal;  // this peer's
  Epoch attempt;
  bool refused = false;
  bool started = false;  // not done yet: the peer has every READY, and takes segments
  std::optional<Hash128> readies_digest =
      std::nullopt;  // a digest of all READYs that the peer has got
  LH_FIELDS(PeerDone, LH_FIELD(group), LH_FIELD(peer), LH_FIELD(ordinal), LH_FIELD(attempt),
            LH_FIELD(refused), LH_FIELD(started), LH_FIELD(readies_digest));
};

// The answer to the first SendReady of an op in an attempt that asks for a signature.
struct ReadySigned {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  std::string digest;  // as in control::Statement
};

// The attempt's result is complete, and the kernel reads none of its sent segments any more.
struct AttemptComplete {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  std::string result = {};  // one-shot op: the bytes of the result; else empty
};
// Answer to a FinishAttempt that commits: the result is in all targets.
struct AttemptFinished {
  GroupKey group;
  OpOrdinal ordinal;
};
// Answer to StopAttempt: nothing more is written to the op's buffers, and the inputs are as they
// were posted.
struct AttemptStopped {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
};

// A transfer that StartTransfer began has ended: nothing more is received for it.
struct TransferEnded {
  LocalId local;
  Outcome outcome;  // OK: the state is here and verified
  uint64_t bytes = 0;
  std::vector<MemberId> sources;  // members that sent any of the bytes
  std::vector<MemberId> corrupt;  // members that sent wrong bytes, which were not used
};
// A transfer in the background has found out which chunks differ: it must fetch `bytes_left` bytes
// of a state of `bytes_total` bytes. A transfer may end without this event.
struct TransferMeasured {
  LocalId local;
  uint64_t bytes_left = 0;
  uint64_t bytes_total = 0;
};
// Answer to CompareManifest. `difference` describes the first difference. It is "" if there is
// none, or if the other member's peer did not answer.
struct ManifestCompared {
  LocalId local;
  std::string difference;
};

// The daemon is to stop (SIGTERM): each member leaves at its next step boundary, but by `deadline`
// at the latest.
struct DrainRequested {
  Tick deadline;
};
struct TimePassed {};

using Event =
    std::variant<CoordinatorUp, CoordinatorDown, FromCoordinator, LocalJoin, LocalStep, LocalSync,
                 LocalTake, LocalLeave, LocalDied, LocalPost, LocalRefusal, LocalCancel, LinkUp,
                 LinkDown, AddressTried, PeerReady, PeerDone, ReadySigned, AttemptComplete,
                 AttemptFinished, AttemptStopped, TransferMeasured, TransferEnded, ManifestCompared,
                 DrainRequested, TimePassed>;

}  // namespace longhaul::peerd
