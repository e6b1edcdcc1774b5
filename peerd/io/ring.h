// Asynchronous I/O for one thread: what the data plane asks of the kernel.
//
// Two implementations: UringRing (io_uring, the only file that includes liburing) and FakeRing (in
// memory, for tests: partial transfers, any completion order, late zero-copy notices). One contract
// test runs on both.
//
// Threads: the thread of the first RunOnce() owns the ring; all later calls are its own, except
// Wake(). Callbacks run inside RunOnce() only, never inside a call that starts something, and may
// start and cancel operations but not call RunOnce(). Every started operation ends in exactly one
// callback with `more == false`, cancelled or not; the memory it names belongs to the ring until
// then. Only the destructor drops callbacks: it cancels what is left and waits until the kernel let
// go of the memory.
//
// A socket with an operation in flight stays open inside the kernel: cancel, wait for the end, then
// close. A cancelled or failing transfer may end with fewer bytes than asked for, also with
// wait_all.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/tick.h"
#include "peerd/io/sockets.h"

namespace longhaul::peerd {

struct IoResult {
  int value = 0;      // bytes, a file descriptor, 0; or -errno (-ECANCELED after Cancel)
  bool more = false;  // another callback of this operation follows (zero-copy: the release notice)
  bool copied = false;  // on that notice: the kernel copied the bytes after all
};
using IoCallback = absl::AnyInvocable<void(IoResult)>;
// Names an operation that has not ended; 0 is none. Never reused.
using IoId = uint64_t;

struct RingFeatures {
  bool send_zero_copy = false;
  bool registered_buffers = false;
  std::string description;  // for the log: kernel, setup flags, what is missing
};

class Ring {
 public:
  virtual ~Ring() = default;

  // One connection; `value` is the new socket (non-blocking, close-on-exec).
  virtual IoId Accept(int listen_fd, IoCallback done) = 0;
  virtual IoId Connect(int fd, const sockaddr* address, socklen_t length, IoCallback done) = 0;
  // At least one byte unless the stream ended (0) or failed. `wait_all`: all of them, if the stream
  // lasts.
  virtual IoId Recv(int fd, void* data, size_t bytes, bool wait_all, IoCallback done) = 0;
  // `message` and what it points to stay until the end. Passed descriptors are close-on-exec.
  virtual IoId RecvMsg(int fd, msghdr* message, IoCallback done) = 0;
  virtual IoId Send(int fd, const void* data, size_t bytes, bool wait_all, IoCallback done) = 0;
  virtual IoId SendMsg(int fd, const msghdr* message, bool wait_all, IoCallback done) = 0;
  // First callback: bytes sent or -errno, more == true (or the end, if the kernel holds nothing);
  // last: value 0, the memory is no longer referred to. `buffer` is a registered buffer or -1.
  // -EINVAL or -EOPNOTSUPP: not on this socket; -ENOMEM or -ENOBUFS: not beyond the memlock limit;
  // nothing was sent then, and Send() still works.
  virtual IoId SendZeroCopy(int fd, const void* data, size_t bytes, int buffer,
                            IoCallback done) = 0;
  // value 0 at `at` or later, -ECANCELED if cancelled before.
  virtual IoId Timeout(Tick at, IoCallback done) = 0;
  // At the start of the next RunOnce(), before it submits what was started: for whoever gathers
  // small things into one operation. Cannot be cancelled.
  virtual void BeforeSubmit(absl::AnyInvocable<void()> run) = 0;
  // Once readable: value > 0.
  virtual IoId PollIn(int fd, IoCallback done) = 0;
  // Asks the operation to end soon; it may still succeed. Unknown ids are ignored.
  virtual void Cancel(IoId id) = 0;

  // Pins memory for SendZeroCopy: takes about 0.3 ms a MiB. Unavailable: not all of it has been
  // touched (or is swapped out), and to clear fresh memory may take a hundred times as long; sends
  // from it work without. ResourceExhausted (memlock, table full) or Unimplemented: likewise, and
  // trying again is of no use.
  virtual absl::StatusOr<int> RegisterBuffer(const void* data, size_t bytes) = 0;
  // Also while sends from it are in flight.
  virtual void UnregisterBuffer(int buffer) = 0;

  // Submits what was started, waits for something to end (not beyond `until`; kNever: for ever; a
  // past tick: not at all) and runs the callbacks. Unavailable only if the ring itself broke.
  virtual absl::Status RunOnce(Tick until) = 0;
  // Ends a wait in RunOnce() from another thread.
  virtual void Wake() = 0;
  // Monotonic clock of this ring.
  virtual Tick Now() const = 0;
  virtual const RingFeatures& features() const = 0;
  // Where the sockets of this ring come from.
  virtual Sockets& sockets() = 0;
};

// FailedPrecondition with a text for the operator where kernel, seccomp or limits refuse io_uring.
// `poll_us`: before it sleeps, RunOnce() looks for so long whether something ends: a wake-up less
// for what comes soon, at the price of a processor that is busy meanwhile. Others that want it get
// it in between.
absl::StatusOr<std::unique_ptr<Ring>> MakeUringRing(unsigned entries, uint32_t poll_us = 0);

}  // namespace longhaul::peerd
