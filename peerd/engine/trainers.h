// The requests of trainers to a peer (TrainerRequests), and the answers (TrainerPort).
//
// The engine takes the requests. The IPC server makes them from the frames of trainers' sockets and
// takes the answers. The simulation and the search of small runs have models of trainers there.
//
// Threads: the reactor thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/outcome.h"
#include "peerd/collective/attempt.h"
#include "peerd/core/events.h"
#include "peerd/core/peer_core.h"
#include "peerd/core/values.h"
#include "peerd/state/local_state.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

// The memory of one post.
struct PostBuffers {
  std::vector<Piece> pieces;  // at least one
  // For each piece, as in AttemptSpec.
  std::vector<const uint8_t*> sources;
  std::vector<uint8_t*> targets;
  std::vector<float*> errors;                        // empty: none
  std::vector<std::shared_ptr<const void>> holders;  // keep the memory

  // Whether results replace inputs: then they do in all pieces.
  bool in_place() const {
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (sources[i] != nullptr && sources[i] == targets[i]) return true;
    }
    return false;
  }
};

// What the attempts of an op have moved, and what they have found.
struct OpTraffic {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t blocks_not_finite = 0;  // Attempt::blocks_not_finite()
};

// How long the coordinator may take to say why a group waits, in microseconds.
inline constexpr int64_t kWhyPatience = 1000000;

// The requests. The caller numbers the members (LocalId).
class TrainerRequests {
 public:
  virtual ~TrainerRequests() = default;

  virtual void OnJoin(const LocalJoin& join) = 0;
  // A member has at most one open step or sync, and one open leave. There is no step or sync after
  // a leave. A step with a sync (`sync` is not null) is answered by SyncDone() and then StepDone().
  // A sync is answered by SyncDone().
  virtual void OnStep(LocalId local, const StateSync* sync) = 0;
  virtual void OnSync(LocalId local, const StateSync& sync) = 0;
  // Must not be called while a step, a sync or a take of the member is open. Answered by
  // TakeDone().
  virtual void OnTake(LocalId local, uint32_t timeout_ms) = 0;
  // If the member is not admitted yet, this withdraws the join.
  virtual void OnLeave(LocalId local) = 0;
  // The member must be admitted. It has at most LH_OPS_OPEN_MAX open posts, with different tags.
  virtual void OnPost(const LocalPost& post, PostBuffers buffers) = 0;
  // A call was refused, and its trainer was told or knows it.
  virtual void OnRefusal(LocalRefusal refusal) = 0;
  // The trainer gives up an op, which is answered as always.
  virtual void OnCancel(const PostRef& post) = 0;
  // Empty while the member is not admitted.
  virtual PeerCore::MembersView OnMembers(LocalId local, PeerCore::AsOf as_of) = 0;
  // nullopt: nothing is known of the member.
  virtual std::optional<PeerCore::MemberView> OnMember(LocalId local, MemberId member) = 0;
  // Hashes all tensors of the state ahead of a sync. Runs `done` afterwards, within a later turn.
  virtual void OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) = 0;
  // Runs `done` once, with a sentence that says why members of the group wait: what is wrong with
  // the coordinator, else what the coordinator says. In this call, or in a later turn within
  // kWhyPatience. It depends on no member: a trainer that was removed may ask, too.
  virtual void OnWhy(const GroupKey& group, std::function<void(const std::string& text)> done) = 0;
  // Returns whether a state with this manifest is kept for the member, and sets its revision.
  virtual bool OnKept(LocalId local, const LocalState& state, uint64_t* revision) = 0;
  // The trainer is gone, or was cut off.
  virtual void OnGone(LocalId local, const std::string& reason) = 0;

  // Posts may name this memory from now on. Not called for memory that is only an inbox of states.
  // OnRegionRemoved() is called for both kinds; the range may be unmapped when it returns.
  virtual void OnRegionAdded(const uint8_t* data, size_t bytes) = 0;
  virtual void OnRegionRemoved(const uint8_t* data, size_t bytes) = 0;
};

// The answers. An answer for a member that has ended is ignored.
class TrainerPort {
 public:
  virtual ~TrainerPort() = default;

  // newcomer: other members were in the group before.
  virtual void JoinDone(LocalId local, const Outcome& outcome, const World& world,
                        bool newcomer) = 0;
  virtual void StepDone(LocalId local, const Outcome& outcome, const World& world) = 0;
  // Nothing reads or writes the tensors any more. Exception: info.background is true. Then the
  // tensors are held until a TakeDone() or a later SyncDone() without `background`; their state
  // must not be freed before.
  virtual void SyncDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) = 0;
  // OK: like SyncDone() without `background`.
  virtual void TakeDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) = 0;
  // How far the transfer for an open sync, or for a held state, is. A trainer that does not read
  // gets only the last of these.
  virtual void SyncProgress(LocalId local, const control::FetchProgress& progress) = 0;
  virtual void LeaveDone(LocalId local, const Outcome& outcome) = 0;
  virtual void PostDone(const PostRef& post, const Outcome& outcome, const OpInfo& info,
                        const OpTraffic& traffic) = 0;
  virtual void WorldChanged(LocalId local, const World& world) = 0;
  // The member is out. This also answers all its open requests, with `outcome`.
  virtual void MemberGone(LocalId local, const Outcome& outcome) = 0;
};

}  // namespace longhaul::peerd
