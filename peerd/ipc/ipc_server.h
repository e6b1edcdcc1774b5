// The server on the Unix socket of peerd, to which trainers connect.
//
// The frames are those of proto/wire/ipc.h. The server checks each request and passes it to the
// engine as a call of TrainerRequests. The engine answers each request exactly once, at once or
// later, through the methods of TrainerPort. There are two kinds of refusal:
// - The request breaks the protocol (garbage, wrong version, missing descriptor). The server closes
//   and counts the connection. If no other frame is being sent, the trainer first gets a frame with
//   the reason.
// - The request cannot be granted (unknown region, tag in use, limit reached). The server answers
//   with the reason, and the connection goes on.
//
// Members: the server numbers the local members. A member ends when its join fails, when its leave
// succeeds, when the engine calls MemberGone(), or when its connection ends. In the last case the
// server calls OnGone() for each member that had not ended. Answers for a member that has ended are
// ignored, so the engine need not know which members have ended.
//
// States: a state that a trainer registers belongs to its connection. At most one sync uses it at a
// time. A LocalState exists as long as there is a shared_ptr to it, even after the end of its
// connection.
//
// Regions: a region of the arena is mapped from the trainer's REGION request on, as long as
// anything refers to it:
// - the connection, until UNREGION or its end
// - posts, until PostDone()
// - states
// - any other holder of the shared_ptr
// So an op can finish on memory of a trainer that has died. After the last release the server calls
// OnRegionRemoved() in a later RunOnce(), never inside the call that released the region. Then
// another thread unmaps the memory.
//
// Threads: the reactor thread. The ring must outlive the server. The server calls TrainerRequests
// only inside Ring::RunOnce(), and never inside a call of TrainerPort or IpcServer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/counters.h"
#include "base/ids.h"
#include "peerd/engine/trainers.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

struct IpcServerOptions {
  std::string path;  // at most 107 bytes. A missing parent directory is created
  // Who may connect, and the mode (0600, 0660 or 0666) and group of the socket file: see
  // SocketAccessOptions in ipc_socket.h.
  uint32_t mode = 0660;
  std::string group;
  std::vector<std::string> allow_users;
  std::vector<std::string> allow_groups;
  uint64_t arena_limit = 0;  // bytes of all regions together; 0: no limit
  // The most that one user may have of what all users together may have: connections, members,
  // regions and their bytes, tensors of states, pieces of ops. 1 to 100 percent.
  uint32_t user_share = 100;
  uint32_t hello_timeout_ms = 10000;  // a connection without HELLO is closed after this
};

struct IpcStats {
  uint32_t clients = 0;
  uint32_t members = 0;
  uint32_t posts_open = 0;
  uint32_t states = 0;       // registered
  uint64_t arena_bytes = 0;  // of all regions that are mapped
  // Connections closed before a valid HELLO: not permitted, too many, not of this protocol, or no
  // HELLO in time.
  uint64_t connections_refused = 0;
  // Those of connections_refused whose user may not use this peerd.
  uint64_t users_refused = 0;
  // Requests and connections that were refused because of a limit: of the client, its user, or
  // peerd.
  uint64_t limits_reached = 0;
  // Connections closed after HELLO: the trainer broke the protocol, or does not read.
  uint64_t connections_cut = 0;
  // All refusals: requests that were not granted, connections as above, and failed accepts.
  uint64_t requests_refused = 0;
};

// The counters that /metrics shows.
inline constexpr Counter<IpcStats> kIpcCounters[] = {
    {"longhaul_peerd_trainers_refused_total",
     "Connections to the Unix socket that were closed before a valid HELLO: of a user who may not "
     "use this peerd, one too many, of another protocol, or silent",
     &IpcStats::connections_refused},
    {"longhaul_peerd_users_refused_total",
     "Connections to the Unix socket of users who may not use this peerd (--socket-group, "
     "--allow-users, --allow-groups)",
     &IpcStats::users_refused},
    {"longhaul_peerd_trainers_cut_total",
     "Connections of trainers that were closed for breaking the protocol, or for not reading",
     &IpcStats::connections_cut},
    {"longhaul_peerd_trainer_limits_total",
     "Requests and connections of trainers that were refused because a limit was reached: of the "
     "trainer, of its user (--user-share), or of peerd",
     &IpcStats::limits_reached},
    {"longhaul_peerd_requests_refused_total",
     "Requests of trainers that peerd refused, and connections of trainers refused or closed for "
     "an "
     "error",
     &IpcStats::requests_refused},
};

class IpcServer : public TrainerPort {
 public:
  virtual IpcStats GetStats() const = 0;
  // The number of ops that trainers have posted and that have not ended. As in GetStats().
  virtual uint32_t posts_open() const = 0;

  // Stops listening and removes the socket file. Takes no more requests. Closes each connection
  // when all its answers are sent. OnGone() is not called any more.
  virtual void Close() = 0;
  // Returns whether Close() is complete: the ring has no operation of the server left.
  virtual bool closed() const = 0;
};

// Makes a server that listens. A stale socket file (no process answers on it) is replaced. `ring`
// and `handler` must outlive the server.
//
// AlreadyExists: another process listens there. InvalidArgument: there is no such path or group.
// Unavailable: the system refused; the text says why.
absl::StatusOr<std::unique_ptr<IpcServer>> MakeIpcServer(const IpcServerOptions& options,
                                                         Ring* ring, TrainerRequests* handler);

}  // namespace longhaul::peerd
