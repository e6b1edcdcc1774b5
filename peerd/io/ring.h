// Asynchronous I/O for one thread: all input and output of the data plane goes through a Ring.
//
// There are three implementations. UringRing uses io_uring; uring_ring.cc is the only file that
// includes liburing. EpollRing uses epoll, for hosts that refuse io_uring. FakeRing works in
// memory, for tests: transfers are partial, operations end in any order, and zero-copy notices come
// late. One contract test runs on all of them.
//
// Threads: the thread that calls RunOnce() first owns the ring. From then on only that thread calls
// the ring. The exception is Wake(), which any thread may call. Callbacks run inside RunOnce(),
// never inside a call that starts an operation. A callback may start and cancel operations. It must
// not call RunOnce().
//
// Memory: every started operation ends in exactly one callback with `more == false`, also when it
// is cancelled. The memory that an operation names belongs to the ring until that callback. The
// exception is the destructor, which calls no callbacks. It cancels the operations that are left,
// and waits for the kernel to let go of their memory, for at most a second.
//
// A socket with an operation in flight stays open inside the kernel. To close a socket, cancel its
// operations, wait until they have ended, then close. A transfer that is cancelled or fails may end
// with fewer bytes than were asked for, also with `wait_all`.
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
  int value = 0;      // bytes, a file descriptor, or 0; on failure -errno (-ECANCELED: cancelled)
  bool more = false;  // another callback follows; only SendZeroCopy() has two
  // Set in the last callback of SendZeroCopy(): the kernel copied the bytes after all.
  bool copied = false;
};
using IoCallback = absl::AnyInvocable<void(IoResult)>;
// Names an operation that has not ended. 0 names none. An id is never used again.
using IoId = uint64_t;

// Work that comes through shared memory, so that no operation of a ring tells of it. RunOnce()
// calls all of it.
class SharedWork {
 public:
  virtual ~SharedWork() = default;
  // Called again and again while RunOnce() polls. Returns whether there is work, without doing it.
  virtual bool Look() = 0;
  // RunOnce() is about to sleep. From now on, until the next Look(), whoever brings work must also
  // end an operation of the ring. Returns whether there is work already; then RunOnce() does not
  // sleep.
  virtual bool StopLooking() = 0;
  // Does the work that has come, with the callbacks of the ring.
  virtual void Run() = 0;
};

struct RingFeatures {
  bool send_zero_copy = false;
  bool registered_buffers = false;
  std::string description;  // for the log: the kernel, and what it offers and lacks
};

class Ring {
 public:
  virtual ~Ring() = default;

  // Accepts one connection. `value` is the new socket (non-blocking, close-on-exec).
  virtual IoId Accept(int listen_fd, IoCallback done) = 0;
  virtual IoId Connect(int fd, const sockaddr* address, socklen_t length, IoCallback done) = 0;
  // Receives at least one byte. With `wait_all`: all `bytes`, unless the stream ends before.
  // `value` is 0 when the stream has ended.
  virtual IoId Recv(int fd, void* data, size_t bytes, bool wait_all, IoCallback done) = 0;
  // `message`, and all memory that it points to, belong to the ring until the last callback. File
  // descriptors that arrive are close-on-exec.
  virtual IoId RecvMsg(int fd, msghdr* message, IoCallback done) = 0;
  virtual IoId Send(int fd, const void* data, size_t bytes, bool wait_all, IoCallback done) = 0;
  virtual IoId SendMsg(int fd, const msghdr* message, bool wait_all, IoCallback done) = 0;
  // Sends without a copy. `buffer` is a registered buffer that holds the bytes, or -1.
  // The first callback gives the bytes sent or -errno. If its `more` is true, the kernel still
  // refers to the memory; the last callback (value 0) comes when the kernel has let go.
  // If nothing could be sent this way, Send() still works. -EINVAL, -EOPNOTSUPP: this socket does
  // not support zero-copy. -ENOMEM, -ENOBUFS: the limit of locked memory is reached.
  // A ring without the feature `send_zero_copy` copies the bytes, and calls once.
  virtual IoId SendZeroCopy(int fd, const void* data, size_t bytes, int buffer,
                            IoCallback done) = 0;
  // Ends with value 0 at `at` or later, or with -ECANCELED.
  virtual IoId Timeout(Tick at, IoCallback done) = 0;
  // Calls `run` at the start of the next RunOnce(), before RunOnce() submits operations. A caller
  // that gathers small pieces starts one operation for all of them there. Cannot be cancelled.
  virtual void BeforeSubmit(absl::AnyInvocable<void()> run) = 0;
  // Ends with value > 0 once `fd` is readable.
  virtual IoId PollIn(int fd, IoCallback done) = 0;
  // Asks the operation to end soon. The operation may still succeed. An unknown id is ignored.
  virtual void Cancel(IoId id) = 0;

  // Pins memory for SendZeroCopy(). Pinning takes about 0.3 ms a MiB. On failure nothing has
  // changed, and sends from the memory work without a registered buffer.
  // Unavailable: some of the memory was never touched, or is swapped out. Pinning would make the
  // kernel clear fresh pages, which may take a hundred times as long. Touch it, then try again.
  // ResourceExhausted (limit of locked memory, table full), Unimplemented: do not try again.
  virtual absl::StatusOr<int> RegisterBuffer(const void* data, size_t bytes) = 0;
  // Sends from the buffer may be in flight: the kernel keeps the pages until they have ended.
  virtual void UnregisterBuffer(int buffer) = 0;

  // Submits the started operations, waits until one ends or until `until`, and runs the callbacks
  // of those that have ended. kNever waits for ever; a tick in the past does not wait.
  // Unavailable: the ring itself broke.
  virtual absl::Status RunOnce(Tick until) = 0;
  // From now on RunOnce() polls for `us` before it sleeps; 0, as at first: it sleeps at once.
  // Polling saves a wake-up when an operation ends soon. Its price is a busy processor. Each round
  // of polling yields the processor to other threads.
  virtual void SetPoll(uint32_t us) = 0;
  // From now on RunOnce() also does this work; nullptr: none. A ring that never polls need not.
  virtual void SetSharedWork(SharedWork* work) = 0;
  // Ends a wait in RunOnce() from another thread.
  virtual void Wake() = 0;
  // The monotonic clock of this ring.
  virtual Tick Now() const = 0;
  virtual const RingFeatures& features() const = 0;
  // Makes the sockets that work on this ring.
  virtual Sockets& sockets() = 0;
};

// FailedPrecondition, with a text for the operator: kernel, seccomp or limits refuse io_uring.
absl::StatusOr<std::unique_ptr<Ring>> MakeUringRing(unsigned entries);
// Without zero-copy sends and registered buffers. Listeners that Accept() is called for become
// non-blocking. FailedPrecondition, with a text for the operator: limits refuse epoll.
absl::StatusOr<std::unique_ptr<Ring>> MakeEpollRing();

}  // namespace longhaul::peerd
