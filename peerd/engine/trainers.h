// What trainers may ask of a peer, and what they are answered.
//
// The IPC server stands between both and the trainers' sockets. The simulation and the search of
// small runs put trainers of their own there.
//
// Threads: the reactor thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/ids.h"
#include "base/outcome.h"
#include "peerd/core/events.h"
#include "peerd/core/peer_core.h"
#include "peerd/core/values.h"
#include "peerd/state/local_state.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

// Memory of one post, both as long as the op's tensor; the holders keep them mapped.
struct PostBuffers {
  const uint8_t* source = nullptr;
  uint8_t* target = nullptr;
  std::shared_ptr<const void> source_holder;
  std::shared_ptr<const void> target_holder;
};

// What trainers ask for. Whoever speaks for the trainers numbers the members (LocalId).
class TrainerRequests {
 public:
  virtual ~TrainerRequests() = default;

  virtual void OnJoin(const LocalJoin& join) = 0;
  // At most one step or sync and one leave of a member at a time, neither after a leave. A step
  // with a sync (else null) is answered by SyncDone() and then StepDone(), a sync by SyncDone().
  virtual void OnStep(LocalId local, const StateSync* sync) = 0;
  virtual void OnSync(LocalId local, const StateSync& sync) = 0;
  // Not while a step, a sync or a take of the member is open; answered by TakeDone().
  virtual void OnTake(LocalId local, uint32_t timeout_ms) = 0;
  // The member may still be waiting for admission: then this withdraws the join.
  virtual void OnLeave(LocalId local) = 0;
  // Admitted members only; no two open posts of a member share a tag, at most LH_OPS_OPEN_MAX.
  virtual void OnPost(const LocalPost& post, PostBuffers buffers) = 0;
  // Empty while the member is not admitted.
  virtual PeerCore::MembersView OnMembers(LocalId local) = 0;
  // Hashes all tensors of the state ahead of a sync, then runs `done`, within a later turn.
  virtual void OnPrepare(const std::shared_ptr<LocalState>& state, std::function<void()> done) = 0;
  // Whether a state of these tensors is kept for the member, and of which revision.
  virtual bool OnKept(LocalId local, const LocalState& state, uint64_t* revision) = 0;
  // The trainer is gone, or was cut off.
  virtual void OnGone(LocalId local, const std::string& reason) = 0;

  // Memory that posts may name from now on, other than inboxes of states; the range will be
  // unmapped after OnRegionRemoved returns, which is called for those, too.
  virtual void OnRegionAdded(const uint8_t* data, size_t bytes) = 0;
  virtual void OnRegionRemoved(const uint8_t* data, size_t bytes) = 0;
};

// The answers. What is said of a member that has ended is ignored.
class TrainerPort {
 public:
  virtual ~TrainerPort() = default;

  virtual void JoinDone(LocalId local, const Outcome& outcome, const World& world) = 0;
  virtual void StepDone(LocalId local, const Outcome& outcome, const World& world) = 0;
  // Nothing reads or writes the tensors any more, unless the member is in the background: then they
  // are held, and their state is not freed, until TakeDone() or a SyncDone() that is not.
  virtual void SyncDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) = 0;
  // OK: as SyncDone() without `background`.
  virtual void TakeDone(LocalId local, const Outcome& outcome, const StateSyncInfo& info) = 0;
  // Of a sync that is open, or of a state that is held; a trainer that does not read gets the last
  // one only.
  virtual void SyncProgress(LocalId local, const control::FetchProgress& progress) = 0;
  virtual void LeaveDone(LocalId local, const Outcome& outcome) = 0;
  virtual void PostDone(const PostRef& post, const Outcome& outcome, const OpInfo& info,
                        uint64_t bytes_sent, uint64_t bytes_received) = 0;
  virtual void WorldChanged(LocalId local, const World& world) = 0;
  // Requests of the member that are still open are answered with `outcome`.
  virtual void MemberGone(LocalId local, const Outcome& outcome) = 0;
};

}  // namespace longhaul::peerd
