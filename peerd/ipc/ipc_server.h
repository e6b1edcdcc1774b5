// Where trainers attach: the Unix socket of peerd, the arena regions that come over it, and the
// local members behind it.
//
// Speaks proto/wire/ipc.h. Requests that make sense become calls of IpcHandler; the driver answers
// through the server's methods, exactly once each, at once or later. Two kinds of refusal:
// - against the protocol (garbage, wrong version, a missing descriptor): the connection is closed
// and
//   counted, after a last frame with the reason where the other side can read it;
// - a request that cannot be granted (unknown region, tag in use, limit reached): answered with its
//   reason, the connection lives.
//
// Local members. The server numbers them. A member ends when its join fails, its leave succeeds, it
// is gone (MemberGone), or its connection ends (OnGone, told once for each that had not ended).
// What is answered about a member that has ended is ignored, so the driver need not keep count.
//
// States. What a trainer registers belongs to its connection; at most one sync uses it at a time.
// A LocalState lives as long as anybody holds it, also beyond the connection.
//
// Regions. A region is mapped from the trainer's REGION until nothing refers to it: the connection
// (until UNREGION or its end), posts (until PostDone), states, and whoever holds the shared_ptr, so
// an op
// finishes on memory of a trainer that has died. OnRegionRemoved follows the last release in a
// later RunOnce(), not inside the call that released; the unmapping, after that, on a thread of its
// own.
//
// Threads: the ring's. The ring outlives the server; handler calls come from inside RunOnce() only,
// and never inside a method of the server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/events.h"
#include "peerd/core/values.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/arena_regions.h"
#include "peerd/state/local_state.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

struct IpcPost {
  PostRef post;
  uint64_t tag = 0;
  OpDesc desc;
  // desc.bytes() each, checked against their regions; equal (in place) or disjoint.
  const uint8_t* source = nullptr;
  uint8_t* target = nullptr;
  std::shared_ptr<const ArenaRegion> source_region;
  std::shared_ptr<const ArenaRegion> target_region;
};

struct IpcMembers {
  Epoch epoch;
  std::vector<MemberId> members;  // in rank order; at most LH_MEMBERS_MAX
};

class IpcHandler {
 public:
  virtual ~IpcHandler() = default;

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
  virtual void OnPost(const IpcPost& post) = 0;
  // Empty while the member is not admitted.
  virtual IpcMembers OnMembers(LocalId local) = 0;
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

struct IpcServerOptions {
  std::string path;  // at most 107 bytes; the parent directory is made if it is missing
  uint32_t mode = 0660;
  // Who may connect besides root and the own user: members of this group. "": of the own group.
  std::string group;
  uint64_t arena_limit = 0;           // bytes of all regions together; 0: no limit
  uint32_t hello_timeout_ms = 10000;  // a connection that has not said HELLO by then is closed
};

struct IpcStats {
  uint32_t clients = 0;
  uint32_t members = 0;
  uint32_t posts_open = 0;
  uint64_t arena_bytes = 0;  // mapped
  uint64_t connections_refused =
      0;                          // before or instead of HELLO: not permitted, too many, not ours
  uint64_t connections_cut = 0;   // after HELLO: against the protocol, or they do not read
  uint64_t requests_refused = 0;  // connections_* and requests that were not granted
};

class IpcServer {
 public:
  virtual ~IpcServer() = default;

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

  virtual IpcStats GetStats() const = 0;

  // Stops listening, removes the socket file, and closes every connection once what was answered
  // has been sent. The handler hears of no member any more.
  virtual void Close() = 0;
  // Nothing of the server is left in the ring.
  virtual bool closed() const = 0;
};

// Listens at once. A socket file that nobody answers on is replaced. AlreadyExists: another process
// serves there. InvalidArgument: no such path or group. Unavailable: what the system said.
// `ring` and `handler` outlive the server.
absl::StatusOr<std::unique_ptr<IpcServer>> MakeIpcServer(const IpcServerOptions& options,
                                                         Ring* ring, IpcHandler* handler);

}  // namespace longhaul::peerd
