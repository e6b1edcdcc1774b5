// The two queues in memory that a trainer shares with peerd (lh_ipc_shared in proto/wire/ipc.h).
//
// The trainer may write to that memory at any time. So peerd copies each request before it looks at
// it, and keeps its own counts here. Whatever the trainer writes, it harms only its own connection.
//
// Threads: the reactor thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd::ipc {

class SharedQueues {
 public:
  // Maps the memfd of a trainer. InvalidArgument: see CheckMemfd(); or it has another size, or may
  // grow. (To unmap a large file takes long if nobody else uses it.) Unavailable: the system
  // refused to map it.
  static absl::StatusOr<std::unique_ptr<SharedQueues>> Map(int fd);
  ~SharedQueues();
  SharedQueues(const SharedQueues&) = delete;
  SharedQueues& operator=(const SharedQueues&) = delete;

  // Tells the trainer whether peerd looks for requests without being told.
  void SetAwake(bool awake) { lh_ipc_queue_wake(&memory_->requests, awake ? 1 : 0); }
  // Whether there is a request that comes behind at most `frames` requests of the socket, or the
  // trainer has broken the queue. Changes nothing.
  bool HasRequest(uint64_t frames) const;
  // From now on Peek() finds the requests that the trainer has put in by now. `frames`: the
  // requests that have come over the socket by now. Returns false if the trainer has broken the
  // queue.
  bool Look(uint64_t frames);
  // Copies the next request, if it comes behind at most `frames` requests of the socket. Returns
  // whether there is one.
  bool Peek(uint64_t frames, lh_ipc_request* request) const;
  // Removes the request that Peek() has found.
  void Pop() { lh_ipc_queue_take(&memory_->requests, ++taken_); }

  // `sent`: the replies that were sent over the socket so far.

  // Puts a reply in, behind these. Returns false if the reply must take the socket.
  bool Put(const lh_ipc_reply& reply, uint64_t sent);
  // Shows the trainer the replies that were put in. Returns false if the trainer no longer looks,
  // and must be told with LOOK.
  bool Show(uint64_t sent) { return lh_ipc_queue_show(&memory_->replies, put_, sent) != 0; }

 private:
  explicit SharedQueues(void* memory) : memory_(static_cast<lh_ipc_shared*>(memory)) {}

  lh_ipc_shared* const memory_;
  uint32_t taken_ = 0;  // requests
  uint32_t seen_ = 0;   // requests that were there at the last Look()
  uint32_t put_ = 0;    // replies
};

}  // namespace longhaul::peerd::ipc
