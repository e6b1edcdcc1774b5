// What the peer core can be told: all that happens at one peer, one event at a time.
//
// The engine (peerd/engine) makes them from what the coordinator, the trainers, the links and its
// own runners do. Plain values.
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
// event until SyncDone nobody writes to the tensors of `sync`.
struct LocalStep {
  LocalId local;
  std::optional<SyncRequest> sync = std::nullopt;
};
struct LocalSync {
  LocalId local;
  SyncRequest sync;
};
// The member in the background wants to have what was agreed on last, as soon as all of it is here:
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
// Answer to TryAddress. `error`: names the address and what was seen; empty: the peer answers.
struct PeerTried {
  GroupKey group;
  uint64_t trial = 0;
  PeerId peer;
  std::string error;
};
struct PeerReady {
  GroupKey group;
  PeerId peer;
  OpOrdinal ordinal;  // theirs
  Epoch attempt;
  Epoch boundary;
  uint64_t tag = 0;
  OpDesc desc;
  std::optional<OtherOffer> other_offer;  // of another member there, if they disagree
  std::string payload;                    // one-shot input, else empty
  // In place of an input: the op has ended there, before the fault that has it announced again.
  std::optional<OneShotResult> result = std::nullopt;
};
struct PeerDone {
  GroupKey group;
  PeerId peer;
  OpOrdinal ordinal;  // ours
  Epoch attempt;
  bool refused = false;
};

// The attempt's result is complete and all its sends have returned.
struct AttemptComplete {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
  std::string result = {};  // the tensor's bytes, of kOneShot; else empty
};
// Answer to a FinishAttempt that commits: the result is in all targets.
struct AttemptFinished {
  GroupKey group;
  OpOrdinal ordinal;
};
// Answer to StopAttempt: nothing more is written to the op's buffers, inputs are as posted.
struct AttemptStopped {
  GroupKey group;
  OpOrdinal ordinal;
  Epoch attempt;
};

// Of a StartTransfer: nothing is received for it any more.
struct TransferEnded {
  LocalId local;
  Outcome outcome;  // OK: the state is there and verified
  uint64_t bytes = 0;
  std::vector<MemberId> sources;  // that sent some of it
  std::vector<MemberId> corrupt;
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

using Event =
    std::variant<CoordinatorUp, CoordinatorDown, FromCoordinator, LocalJoin, LocalStep, LocalSync,
                 LocalTake, LocalLeave, LocalDied, LocalPost, LinkUp, LinkDown, PeerTried,
                 PeerReady, PeerDone, AttemptComplete, AttemptFinished, AttemptStopped,
                 TransferMeasured, TransferEnded, ManifestCompared, DrainRequested, TimePassed>;

}  // namespace longhaul::peerd
