// Where trainers attach: the Unix socket of peerd, the arena regions that come over it, and the
// local members behind it.
//
// Speaks proto/wire/ipc.h. Requests that make sense become calls of TrainerRequests; the engine
// answers through the server's methods, exactly once each, at once or later. Two kinds of refusal:
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

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "peerd/engine/trainers.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

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

class IpcServer : public TrainerPort {
 public:
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
                                                         Ring* ring, TrainerRequests* handler);

}  // namespace longhaul::peerd
