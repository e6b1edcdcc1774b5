#include "peerd/ipc/shared_queues.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "peerd/ipc/arena_regions.h"

namespace longhaul::peerd::ipc {

absl::StatusOr<std::unique_ptr<SharedQueues>> SharedQueues::Map(int fd) {
  LH_RETURN_IF_ERROR(CheckMemfd(fd, sizeof(lh_ipc_shared)));
  struct stat status;
  if (fstat(fd, &status) != 0 || status.st_size != sizeof(lh_ipc_shared) ||
      (fcntl(fd, F_GET_SEALS) & F_SEAL_GROW) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("not a memfd of ", sizeof(lh_ipc_shared), " bytes sealed against growing"));
  }
  void* const memory =
      mmap(nullptr, sizeof(lh_ipc_shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return absl::UnavailableError(absl::StrCat("mmap failed (", strerror(errno), ")"));
  }
  return std::unique_ptr<SharedQueues>(new SharedQueues(memory));
}

SharedQueues::~SharedQueues() { munmap(memory_, sizeof(lh_ipc_shared)); }

bool SharedQueues::HasRequest(uint64_t frames) const {
  const uint32_t waiting = __atomic_load_n(&memory_->requests.put, __ATOMIC_SEQ_CST) - taken_;
  if (waiting == 0 || waiting > LH_IPC_QUEUE_ENTRIES) return waiting != 0;
  const lh_ipc_queued_request& next = memory_->request[taken_ % LH_IPC_QUEUE_ENTRIES];
  return __atomic_load_n(&next.frames, __ATOMIC_RELAXED) <= frames;
}

bool SharedQueues::Look(uint64_t frames) {
  seen_ = lh_ipc_queue_look(&memory_->requests, frames);
  return seen_ - taken_ <= LH_IPC_QUEUE_ENTRIES;
}

bool SharedQueues::Peek(uint64_t frames, lh_ipc_request* request) const {
  if (taken_ == seen_) return false;
  const lh_ipc_queued_request& next = memory_->request[taken_ % LH_IPC_QUEUE_ENTRIES];
  if (__atomic_load_n(&next.frames, __ATOMIC_RELAXED) > frames) return false;
  memcpy(request, &next.request, sizeof *request);
  return true;
}

bool SharedQueues::Put(const lh_ipc_reply& reply, uint64_t sent) {
  if (lh_ipc_queue_open(&memory_->replies, put_, sent) == 0) return false;
  lh_ipc_queued_reply& next = memory_->reply[put_++ % LH_IPC_QUEUE_ENTRIES];
  next.frames = sent;
  next.reply = reply;
  return true;
}

}  // namespace longhaul::peerd::ipc
