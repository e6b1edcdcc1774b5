// The server's records of connections and of their local members.
#pragma once

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/outcome.h"
#include "base/tick.h"
#include "peerd/core/values.h"
#include "peerd/io/ring.h"
#include "peerd/ipc/accounts.h"
#include "peerd/ipc/arena_regions.h"
#include "peerd/ipc/descriptor_closer.h"
#include "peerd/ipc/ipc_socket.h"
#include "peerd/ipc/shared_queues.h"
#include "peerd/state/local_state.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

class Connections;

// Lets callbacks of the ring find out whether the connections are still served: some callbacks may
// come after the end of the server.
struct ConnectionsLife {
  Connections* connections = nullptr;  // null once they are gone
};

// The most descriptors that one message carries (SCM_MAX_FD of the kernel). A request of our client
// library carries at most one. A read takes all, so that the server closes them: those that a read
// has no room for, the kernel closes on the reactor thread (descriptor_closer.h).
inline constexpr size_t kDescriptorsMax = 253;

// The most requests that one read takes.
inline constexpr size_t kRequestsPerRead = 16;

// What the server knows of a user, by uid, while the user has connections or still holds something.
struct User {
  std::shared_ptr<Account> account;
  // Descriptors that are no memfds, that this user sent, and that are not closed yet.
  DescriptorCloser::Count unclosed = std::make_shared<std::atomic<uint32_t>>(0);
  // The user's next request that takes long (with thousands of tensors) waits until then.
  std::shared_ptr<Tick> costly_from = std::make_shared<Tick>();
};

// A local member, admitted or not, and its open requests.
struct Member {
  struct Client* client = nullptr;
  Hold held;
  bool admitted = false;
  uint64_t join_call = 0;
  uint64_t step_call = 0;   // 0: none open
  uint64_t sync_call = 0;   // 0: none open, or the sync belongs to the step
  uint64_t sync_state = 0;  // state that the open sync, or the open step with a sync, uses; 0: none
  uint64_t held_state = 0;  // state that is being fetched in the background; 0: none
  uint64_t take_call = 0;   // 0: none open
  // The result of the sync of an open step, once that sync has ended.
  std::optional<std::pair<Outcome, StateSyncInfo>> step_sync;
  uint64_t leave_call = 0;                       // 0: none open
  std::map<uint64_t, std::set<uint64_t>> posts;  // by call: the regions that the post uses
  // The numbers of the member's newest WORLD and PROGRESS frames. While such a frame waits to be
  // sent, newer contents overwrite it.
  uint64_t world_frame = 0;
  uint64_t progress_frame = 0;
};

// One connection. The callbacks of its operations in the ring keep it alive, because the operations
// use its memory.
struct Client {
  std::shared_ptr<ConnectionsLife> life;
  UniqueFd fd;
  uint64_t number = 0;
  PeerCredentials credentials;
  User user;
  std::shared_ptr<Account> account;  // of this connection; its parent is the user's
  Hold held;                         // the connection itself
  std::string name;
  bool greeted = false;
  bool logged = false;  // that it has attached

  // What has been read and not been carried out yet: `have` bytes, of which the first `taken`
  // requests have been carried out.
  std::array<lh_ipc_request, kRequestsPerRead> inbox{};
  size_t have = 0;
  size_t taken = 0;
  uint64_t frames_taken = 0;  // requests that were taken from the socket so far
  // Descriptors that came with the last byte of `inbox`. A read ends behind the bytes that they
  // were sent with (unix(7): ancillary data is a barrier), so they belong to the request of that
  // byte.
  std::vector<UniqueFd> arrived;
  // The request that is being carried out, and its descriptors.
  lh_ipc_request request{};
  std::vector<UniqueFd> descriptors;
  msghdr message{};
  iovec iov{};
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))];

  // The members that ended last, and why. A trainer may still name such a member in a request that
  // it sent before it heard of the end.
  std::deque<std::pair<LocalId, Outcome>> gone;

  // A shorter way for requests and replies; null: there is none.
  std::unique_ptr<SharedQueues> shared;

  std::vector<lh_ipc_reply> sending;  // handed to the ring
  uint64_t frames_sent = 0;           // replies that were put into `sending` so far
  size_t sent = 0;                    // bytes of `sending` that the kernel has taken
  std::vector<lh_ipc_reply> waiting;  // to be sent after `sending`
  size_t waiting_shared = 0;          // so many of them, the first ones, went into the queue
  uint64_t waiting_first = 1;         // number of the first frame in `waiting`
  bool send_due = false;              // `waiting` is sent before the ring submits

  IoId recv = 0;
  IoId send = 0;
  IoId timer = 0;
  IoId pause = 0;                 // the next request is whole, and waits
  bool drained = false;           // the end of the connection has been read
  bool ending = false;            // nothing is read or answered any more
  bool told = false;              // Settle() has told the handler of the end
  bool end_when_flushed = false;  // ends when all answers are sent, because the server closes
  std::string reason;             // why the connection ends

  struct Region {
    std::shared_ptr<ArenaRegion> region;
    uint32_t posts = 0;   // open posts that use the region
    uint32_t states = 0;  // registered states in the region
  };
  std::map<uint64_t, Region> regions;
  struct State {
    std::shared_ptr<LocalState> state;
    std::set<uint64_t> regions;
    bool syncing = false;  // a sync uses or holds the state, or the state is being prepared
  };
  std::map<uint64_t, State> states;
  std::set<LocalId> locals;
  std::set<uint64_t> calls;  // numbers of open calls
};

// Returns the address of `range`, which a trainer named and which has `bytes` bytes. Returns
// nullptr if the range is not wholly inside one region of this client.
inline uint8_t* Locate(const Client& client, const lh_ipc_range& range, uint64_t bytes) {
  const auto it = client.regions.find(range.region);
  if (it == client.regions.end()) return nullptr;
  const ArenaRegion& region = *it->second.region;
  if (range.offset > region.bytes || bytes > region.bytes - range.offset) return nullptr;
  return region.data + range.offset;
}

}  // namespace longhaul::peerd::ipc
