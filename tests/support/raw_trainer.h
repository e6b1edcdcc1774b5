// For tests: a trainer that sends whatever the test likes to the Unix socket of peerd.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "proto/wire/ipc.h"

namespace longhaul::peerd {

inline constexpr size_t kRegionBytes = 1 << 20;

inline int MakeMemfd(size_t bytes, int seals) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  LH_CHECK(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  if (seals != 0) LH_CHECK(fcntl(fd, F_ADD_SEALS, seals) == 0);
  return fd;
}

inline lh_ipc_request Request(uint32_t type, uint64_t call, uint64_t member = 0) {
  lh_ipc_request request;
  memset(&request, 0, sizeof request);
  request.magic = LH_IPC_MAGIC;
  request.type = type;
  request.call = call;
  request.member = member;
  return request;
}

inline lh_ipc_request Hello(uint64_t call = 1) {
  lh_ipc_request request = Request(LH_IPC_HELLO, call);
  request.u.hello.version = LH_IPC_VERSION;
  strcpy(request.u.hello.name, "raw");
  return request;
}

inline lh_ipc_request Op(uint64_t call, uint64_t member, uint64_t tag) {
  lh_ipc_request request = Request(LH_IPC_OP, call, member);
  request.u.op.tag = tag;
  request.u.op.count = 4;
  request.u.op.kind = LH_WIRE_ALL_REDUCE;
  request.u.op.dtype = LH_WIRE_FLOAT32;
  request.u.op.source = {1, 0};
  request.u.op.target = {1, 64};
  return request;
}

// Memory for queues, as a trainer makes it for HELLO.
class RawQueues {
 public:
  explicit RawQueues(int seals = F_SEAL_SHRINK | F_SEAL_GROW)
      : fd_(MakeMemfd(sizeof(lh_ipc_shared), seals)),
        memory_(static_cast<lh_ipc_shared*>(
            mmap(nullptr, sizeof(lh_ipc_shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0))) {
    LH_CHECK(memory_ != MAP_FAILED);
  }
  ~RawQueues() {
    munmap(memory_, sizeof *memory_);
    close(fd_);
  }
  int fd() const { return fd_; }
  lh_ipc_shared* operator->() { return memory_; }
  lh_ipc_shared* get() { return memory_; }

  // Waits until peerd looks into the queue by itself. Returns false after 30 s.
  bool UntilAwake() {
    for (int ms = 0; ms < 30000; ++ms) {
      if (__atomic_load_n(&memory_->requests.awake, __ATOMIC_SEQ_CST) != 0) return true;
      usleep(1000);
    }
    return false;
  }
  // Puts a request in, behind `frames` requests of the socket. Returns whether peerd will look.
  bool Put(const lh_ipc_request& request, uint64_t frames) {
    memory_->request[put_ % LH_IPC_QUEUE_ENTRIES] = {frames, request};
    return lh_ipc_queue_show(&memory_->requests, ++put_, frames) != 0;
  }
  // Takes the next reply, if there is one that comes behind at most `frames` replies of the socket.
  bool Take(uint64_t frames, lh_ipc_reply* reply) {
    if (__atomic_load_n(&memory_->replies.put, __ATOMIC_SEQ_CST) == taken_) return false;
    const lh_ipc_queued_reply& next = memory_->reply[taken_ % LH_IPC_QUEUE_ENTRIES];
    if (next.frames > frames) return false;
    *reply = next.reply;
    lh_ipc_queue_take(&memory_->replies, ++taken_);
    return true;
  }
  uint32_t taken() const { return taken_; }

 private:
  const int fd_;
  lh_ipc_shared* const memory_;
  uint32_t put_ = 0;
  uint32_t taken_ = 0;
};

// A trainer that sends whatever the test likes.
class RawClient {
 public:
  explicit RawClient(const std::string& path) {
    fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    LH_CHECK(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    // A hanging test ends here rather than in the runner's timeout.
    const timeval patience = {30, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  ~RawClient() { Close(); }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  bool SendBytes(const void* data, size_t bytes) {
    return send(fd_, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }
  bool Send(const lh_ipc_request& request, const std::vector<int>& descriptors = {}) {
    return SendPart(request, 0, sizeof request, descriptors);
  }
  // Sends `bytes` bytes of the request, from `first` on.
  bool SendPart(const lh_ipc_request& request, size_t first, size_t bytes,
                const std::vector<int>& descriptors = {}) {
    iovec iov = {reinterpret_cast<char*>(const_cast<lh_ipc_request*>(&request)) + first, bytes};
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(253 * sizeof(int))] = {};
    if (descriptors.size() > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    }
    return sendmsg(fd_, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }
  int fd() const { return fd_; }
  // Reads a reply from the socket. Returns false if the connection has ended.
  bool Read(lh_ipc_reply* reply) {
    if (recv(fd_, reply, sizeof *reply, MSG_WAITALL) != sizeof *reply) return false;
    ++read_;
    if (queues_ != nullptr) lh_ipc_queue_look(&queues_->get()->replies, read_);
    return true;
  }
  // Returns the call of the next reply, whichever way it takes; 0 if none comes within 30 s.
  uint64_t NextCall() {
    for (int ms = 0; ms < 30000; ++ms) {
      if (queues_->Take(read_, &reply_)) return reply_.call;
      pollfd readable = {fd_, POLLIN, 0};
      if (poll(&readable, 1, 1) == 0) continue;
      if (!Read(&reply_)) return 0;
      if (reply_.type != LH_IPC_LOOK) return reply_.call;
    }
    return 0;
  }
  // Returns the status of the next reply; -1 if the connection has ended.
  int Status() { return Read(&reply_) ? reply_.status : -1; }
  int Ask(const lh_ipc_request& request, const std::vector<int>& descriptors = {}) {
    return Send(request, descriptors) ? Status() : -1;
  }
  const lh_ipc_reply& reply() const { return reply_; }
  std::string text() const { return reply_.u.text; }

  // Says HELLO, with `queues` if there are any, registers region 1 of kRegionBytes, and joins.
  // Returns the member.
  uint64_t Attach(RawQueues* queues = nullptr) {
    LH_CHECK(Ask(Hello(), queues == nullptr ? std::vector<int>() : std::vector{queues->fd()}) == 0);
    LH_CHECK((reply_.flags == LH_IPC_SHARED) == (queues != nullptr));
    queues_ = queues;
    if (queues != nullptr) lh_ipc_queue_look(&queues->get()->replies, read_);
    LH_CHECK(AddRegion(1, kRegionBytes) == 0);
    return Join();
  }
  uint64_t Join(uint64_t call = 3) {
    lh_ipc_request join = Request(LH_IPC_JOIN, call);
    strcpy(join.u.join.run, "run");
    LH_CHECK(Ask(join) == 0);
    return reply_.member;
  }
  int AddRegion(uint64_t region, size_t bytes, uint8_t** data = nullptr) {
    const int fd = MakeMemfd(bytes, F_SEAL_SHRINK);
    if (data != nullptr) {
      *data =
          static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    }
    lh_ipc_request request = Request(LH_IPC_REGION, 1000000 + region);
    request.u.region = {region, bytes, 0, 0};
    const int status = Ask(request, {fd});
    close(fd);
    return status;
  }

 private:
  int fd_;
  RawQueues* queues_ = nullptr;
  uint64_t read_ = 0;  // replies that were read from the socket
  lh_ipc_reply reply_{};
};

}  // namespace longhaul::peerd
