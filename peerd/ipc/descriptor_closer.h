// Closes file descriptors that came from trainers, where close() may wait as long as the sender
// likes.
//
// A trainer can send any descriptor. To close the last descriptor of a TCP socket with SO_LINGER
// waits until the other end has taken all bytes. To close a file of FUSE or NFS waits for whoever
// serves it. To close a large memfd that nobody else uses frees its pages, which takes a fifth of a
// second for each GiB. Descriptors that wait in the queue of a Unix socket are closed with that
// socket. A thread that has to answer others must not wait so long.
//
// Threads: one thread makes all calls. The descriptors are closed by threads of the object's own: a
// new one starts if all others are busy, up to kThreadsMax. The destructor waits for them briefly;
// a thread that still waits inside close() then stays behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "peerd/ipc/ipc_socket.h"

namespace longhaul::peerd {

class DescriptorCloser {
 public:
  static constexpr size_t kThreadsMax = 16;
  // Counts descriptors that are not closed yet.
  using Count = std::shared_ptr<std::atomic<uint32_t>>;

  DescriptorCloser();
  ~DescriptorCloser();
  DescriptorCloser(const DescriptorCloser&) = delete;
  DescriptorCloser& operator=(const DescriptorCloser&) = delete;

  // Closes a small memfd at once, and any other descriptor on a thread. One that is no memfd counts
  // in `unclosed` until then.
  void CloseForeign(UniqueFd fd, const Count& unclosed);
  // Shuts a Unix socket down and closes it: at once if nothing waits in its queue, else on a
  // thread.
  void CloseSocket(UniqueFd fd);

 private:
  struct Shared;
  void Queue(UniqueFd fd, Count unclosed);
  const std::shared_ptr<Shared> shared_;  // the threads keep it, too
};

}  // namespace longhaul::peerd
