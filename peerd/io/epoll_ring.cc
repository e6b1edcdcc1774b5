// Ring over epoll and plain system calls, for hosts that refuse io_uring.
//
// An operation is tried when it is submitted, with one system call that does not block. If it
// cannot end yet, it joins the operations that wait for its socket. The ring then asks epoll for
// one event of that socket, and tries again when the event comes. A try makes one system call, so
// an operation of many bytes does not keep others waiting.
//
// An event says no more than "try again". An event that is out of date does no harm: such an event
// may belong to a socket that is closed, while a new socket has its number. Missing an event would
// do harm. So the ring forgets what it asked for as soon as no operation waits for the socket, and
// asks anew for the next one. Whether the kernel still knows of the earlier request does not
// matter, then.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/io/ring.h"
#include "peerd/io/ring_ops.h"

namespace longhaul::peerd {
namespace {

constexpr int kEventsMax = 256;  // taken from the kernel in one turn; the rest waits for the next

class EpollRing final : public Ring {
 public:
  ~EpollRing() override;

  absl::Status Init();

  IoId Accept(int listen_fd, IoCallback done) override;
  IoId Connect(int fd, const sockaddr* address, socklen_t length, IoCallback done) override;
  IoId Recv(int fd, void* data, size_t bytes, bool wait_all, IoCallback done) override;
  IoId RecvMsg(int fd, msghdr* message, IoCallback done) override;
  IoId Send(int fd, const void* data, size_t bytes, bool wait_all, IoCallback done) override;
  IoId SendMsg(int fd, const msghdr* message, bool wait_all, IoCallback done) override;
  IoId SendZeroCopy(int fd, const void* data, size_t bytes, int buffer, IoCallback done) override;
  IoId Timeout(Tick at, IoCallback done) override;
  void BeforeSubmit(absl::AnyInvocable<void()> run) override;
  IoId PollIn(int fd, IoCallback done) override;
  void Cancel(IoId id) override;
  absl::StatusOr<int> RegisterBuffer(const void* data, size_t bytes) override;
  void UnregisterBuffer(int buffer) override;
  absl::Status RunOnce(Tick until) override;
  void SetPoll(uint32_t us) override { poll_us_ = us; }
  void SetSharedWork(SharedWork* work) override { work_ = work; }
  void Wake() override;
  Tick Now() const override { return MonotonicNow(); }
  const RingFeatures& features() const override { return features_; }
  Sockets& sockets() override { return SystemSockets(); }

 private:
  enum class Kind : uint8_t { kAccept, kConnect, kRecv, kRecvMsg, kSend, kPollIn };
  // What an operation does. Has the index of its id.
  struct Task {
    Kind kind = Kind::kPollIn;
    int fd = -1;
    bool wait_all = false;
    bool waits = false;        // it is in the list of its socket
    size_t done = 0;           // bytes moved
    iovec part{};              // kRecv: the memory; kSend of one piece: the same
    msghdr message{};          // kSend: what is left to send
    std::vector<iovec> parts;  // kSend: the pieces that are left, once some bytes are sent
    msghdr* into = nullptr;    // kRecvMsg
    SocketAddress address;     // kConnect

    bool sends() const { return kind == Kind::kSend || kind == Kind::kConnect; }
  };
  // Of each descriptor.
  struct Waiting {
    std::vector<IoId> ids;  // operations that wait, in the order of their start
    uint32_t asked = 0;     // the events that epoll was asked for and has not told yet
    bool changed = false;   // in changed_
    bool drained = false;   // the last receive emptied the socket: the next one will have to wait
  };

  IoId Start(Task task, IoCallback done);
  Task& TaskOf(IoId id) { return tasks_[RingOps::Index(id)]; }
  Waiting& WaitingFor(int fd);
  bool HasToWait(const Task& task);
  void Join(IoId id);
  void Leave(IoId id);
  void MarkChanged(int fd);

  bool Advance(IoId id);
  std::optional<int> Try(Task* task);
  std::optional<int> TryConnect(Task* task);
  std::optional<int> TryRecv(Task* task);
  std::optional<int> TrySend(Task* task);
  std::optional<int> TryPollIn(Task* task);

  bool Submit();
  void Ask();
  int AskFor(int fd, uint32_t events);
  int Wait(Tick until);
  int WaitAtMost(int64_t us);
  void OnEvent(int fd, uint32_t events);

  uint32_t poll_us_ = 0;
  SharedWork* work_ = nullptr;
  RingFeatures features_;
  RingOps ops_;
  std::deque<Task> tasks_;        // entries never move
  std::vector<IoId> started_;     // not yet tried
  std::vector<IoId> submitting_;  // Submit() only
  std::vector<IoId> trying_;      // OnEvent() only
  std::vector<Waiting> waiting_;  // indexed by the descriptor
  std::vector<int> changed_;      // descriptors whose lists have changed since Ask()
  std::array<epoll_event, kEventsMax> events_;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
  bool exact_ = true;  // the kernel waits to the microsecond
};

// ------------------------------------------------------------------------------ set-up

absl::Status EpollRing::Init() {
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_fd_ >= 0) wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_fd_;
  if (wake_fd_ < 0 || epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) != 0) {
    const int error = errno;
    return absl::FailedPreconditionError(
        absl::StrCat("epoll setup refused (", strerror(error), ")",
                     error == EMFILE || error == ENFILE
                         ? ": too many open files; raise the limit (ulimit -n, LimitNOFILE=)"
                         : ""));
  }
  // Finds out how exactly the kernel waits.
  (void)WaitAtMost(0);
  features_.description = absl::StrCat("epoll of Linux ", KernelRelease(),
                                       exact_ ? ""
                                              : " without epoll_pwait2: timers are rounded "
                                                "up to milliseconds");
  return absl::OkStatus();
}

EpollRing::~EpollRing() {
  if (epoll_fd_ >= 0) close(epoll_fd_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

// ------------------------------------------------------------------------------ operations

IoId EpollRing::Start(Task task, IoCallback done) {
  const IoId id = ops_.Add(std::move(done));
  const uint32_t index = RingOps::Index(id);
  if (index >= tasks_.size()) tasks_.resize(index + 1);
  tasks_[index] = std::move(task);
  started_.push_back(id);
  return id;
}

IoId EpollRing::Accept(int listen_fd, IoCallback done) {
  // Listeners block (sockets.h). Between the event and accept4() the caller may be gone, and this
  // thread must not wait for the next caller.
  const int flags = fcntl(listen_fd, F_GETFL);
  if (flags >= 0 && (flags & O_NONBLOCK) == 0) fcntl(listen_fd, F_SETFL, flags | O_NONBLOCK);
  return Start({.kind = Kind::kAccept, .fd = listen_fd}, std::move(done));
}

IoId EpollRing::Connect(int fd, const sockaddr* address, socklen_t length, IoCallback done) {
  Task task{.kind = Kind::kConnect, .fd = fd};
  LH_CHECK(length <= sizeof(task.address.storage));
  memcpy(&task.address.storage, address, length);
  task.address.length = length;
  return Start(std::move(task), std::move(done));
}

IoId EpollRing::Recv(int fd, void* data, size_t bytes, bool wait_all, IoCallback done) {
  return Start({.kind = Kind::kRecv,
                .fd = fd,
                .wait_all = wait_all,
                .part = {data, std::min<size_t>(bytes, INT32_MAX)}},
               std::move(done));
}

IoId EpollRing::RecvMsg(int fd, msghdr* message, IoCallback done) {
  return Start({.kind = Kind::kRecvMsg, .fd = fd, .into = message}, std::move(done));
}

IoId EpollRing::Send(int fd, const void* data, size_t bytes, bool wait_all, IoCallback done) {
  return Start({.kind = Kind::kSend,
                .fd = fd,
                .wait_all = wait_all,
                .part = {const_cast<void*>(data), std::min<size_t>(bytes, INT32_MAX)}},
               std::move(done));
}

IoId EpollRing::SendMsg(int fd, const msghdr* message, bool wait_all, IoCallback done) {
  return Start({.kind = Kind::kSend, .fd = fd, .wait_all = wait_all, .message = *message},
               std::move(done));
}

IoId EpollRing::SendZeroCopy(int fd, const void* data, size_t bytes, int buffer, IoCallback done) {
  LH_CHECK(buffer < 0) << "a buffer of another ring";
  return Send(fd, data, bytes, true, std::move(done));
}

IoId EpollRing::PollIn(int fd, IoCallback done) {
  return Start({.kind = Kind::kPollIn, .fd = fd}, std::move(done));
}

IoId EpollRing::Timeout(Tick at, IoCallback done) { return ops_.AddTimer(at, std::move(done)); }

void EpollRing::BeforeSubmit(absl::AnyInvocable<void()> run) { ops_.BeforeSubmit(std::move(run)); }

void EpollRing::Cancel(IoId id) {
  if (ops_.CancelTimer(id) || !ops_.Has(id)) return;
  Leave(id);
  const size_t done = TaskOf(id).done;
  ops_.EndLater(id, done > 0 ? static_cast<int>(done) : -ECANCELED);
}

absl::StatusOr<int> EpollRing::RegisterBuffer(const void*, size_t) {
  return absl::UnimplementedError("epoll has no registered buffers");
}

void EpollRing::UnregisterBuffer(int buffer) {
  LH_CHECK(false) << "buffer " << buffer << " is not registered";
}

// ------------------------------------------------------------------------------ waiting lists

EpollRing::Waiting& EpollRing::WaitingFor(int fd) {
  // The kernel has just accepted the descriptor, so it is below the limit of open files.
  if (static_cast<size_t>(fd) >= waiting_.size()) waiting_.resize(fd + 1);
  return waiting_[fd];
}

// Whether an earlier operation moves bytes in the same direction and has not ended, or a try would
// find nothing.
bool EpollRing::HasToWait(const Task& task) {
  if (task.fd < 0 || static_cast<size_t>(task.fd) >= waiting_.size()) return false;
  const Waiting& waiting = waiting_[task.fd];
  if (task.kind == Kind::kPollIn) return false;
  if (waiting.drained && !task.sends()) return true;
  return std::any_of(waiting.ids.begin(), waiting.ids.end(), [&](IoId id) {
    const Task& other = TaskOf(id);
    return other.kind != Kind::kPollIn && other.sends() == task.sends();
  });
}

void EpollRing::Join(IoId id) {
  Task& task = TaskOf(id);
  task.waits = true;
  WaitingFor(task.fd).ids.push_back(id);
  MarkChanged(task.fd);
}

void EpollRing::Leave(IoId id) {
  Task& task = TaskOf(id);
  if (!std::exchange(task.waits, false)) return;
  Waiting& waiting = waiting_[task.fd];
  waiting.ids.erase(std::find(waiting.ids.begin(), waiting.ids.end(), id));
  // The socket may be closed from now on, and another one may get its number.
  if (waiting.ids.empty()) waiting.asked = 0;
}

void EpollRing::MarkChanged(int fd) {
  if (!std::exchange(waiting_[fd].changed, true)) changed_.push_back(fd);
}

// ------------------------------------------------------------------------------ one try

// Tries the operation once. True: it has ended, and its callback was called.
bool EpollRing::Advance(IoId id) {
  const std::optional<int> value = Try(&TaskOf(id));
  if (!value) return false;
  Leave(id);
  ops_.End(id, {.value = *value});
  return true;
}

// The result of the operation. None: it has to wait.
std::optional<int> EpollRing::Try(Task* task) {
  switch (task->kind) {
    case Kind::kAccept: {
      const int fd = accept4(task->fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) return fd;
      if (errno == EAGAIN || errno == EINTR) return std::nullopt;
      return -errno;
    }
    case Kind::kConnect:
      return TryConnect(task);
    case Kind::kRecv:
    case Kind::kRecvMsg:
      return TryRecv(task);
    case Kind::kSend:
      return TrySend(task);
    case Kind::kPollIn:
      return TryPollIn(task);
  }
  return -EINVAL;
}

// The second call tells what became of the first one.
std::optional<int> EpollRing::TryConnect(Task* task) {
  if (connect(task->fd, task->address.get(), task->address.length) == 0) return 0;
  if (errno == EINPROGRESS || errno == EALREADY || errno == EINTR) return std::nullopt;
  return -errno;
}

std::optional<int> EpollRing::TryRecv(Task* task) {
  size_t room = 0;
  ssize_t n = 0;
  if (task->kind == Kind::kRecv) {
    room = task->part.iov_len - task->done;
    n = recv(task->fd, static_cast<uint8_t*>(task->part.iov_base) + task->done, room, MSG_DONTWAIT);
  } else {
    for (size_t i = 0; i < task->into->msg_iovlen; ++i) room += task->into->msg_iov[i].iov_len;
    n = recvmsg(task->fd, task->into, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  }
  const int error = n < 0 ? errno : 0;
  if (error == EAGAIN || error == EINTR) {
    WaitingFor(task->fd).drained = error == EAGAIN;
    return std::nullopt;
  }
  if (n <= 0) return task->done > 0 ? static_cast<int>(task->done) : -error;
  task->done += static_cast<size_t>(n);
  if (static_cast<size_t>(n) < room) {
    WaitingFor(task->fd).drained = true;
    if (task->wait_all) return std::nullopt;
  }
  return static_cast<int>(task->done);
}

std::optional<int> EpollRing::TrySend(Task* task) {
  msghdr& message = task->message;
  if (message.msg_iov == nullptr) {
    message.msg_iov = &task->part;
    message.msg_iovlen = 1;
  }
  size_t bytes = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) bytes += message.msg_iov[i].iov_len;
  const ssize_t n = sendmsg(task->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return std::nullopt;
    return task->done > 0 ? static_cast<int>(task->done) : -errno;
  }
  task->done += static_cast<size_t>(n);
  if (!task->wait_all || static_cast<size_t>(n) >= bytes) return static_cast<int>(task->done);
  // The caller's pieces stay as they are.
  if (task->parts.empty()) {
    task->parts.assign(message.msg_iov, message.msg_iov + message.msg_iovlen);
    message.msg_iov = task->parts.data();
    message.msg_control = nullptr;  // went with the first bytes
    message.msg_controllen = 0;
  }
  for (size_t left = static_cast<size_t>(n); left > 0;) {
    iovec& part = *message.msg_iov;
    const size_t used = std::min(left, part.iov_len);
    part.iov_base = static_cast<uint8_t*>(part.iov_base) + used;
    part.iov_len -= used;
    left -= used;
    if (part.iov_len > 0) break;
    ++message.msg_iov;
    --message.msg_iovlen;
  }
  return std::nullopt;
}

std::optional<int> EpollRing::TryPollIn(Task* task) {
  pollfd at{.fd = task->fd, .events = POLLIN, .revents = 0};
  const int n = task->fd < 0 ? 1 : poll(&at, 1, 0);
  if (task->fd < 0 || (at.revents & POLLNVAL) != 0) return -EBADF;
  if (n < 0 && errno != EINTR) return -errno;
  if (n <= 0) return std::nullopt;
  return at.revents;
}

// ------------------------------------------------------------------------------ running

// Tries what was started. True: a callback was called.
bool EpollRing::Submit() {
  bool called = false;
  submitting_.swap(started_);  // what callbacks start waits for the next turn
  for (const IoId id : submitting_) {
    if (!ops_.Has(id)) continue;  // cancelled
    if (!HasToWait(TaskOf(id)) && Advance(id)) {
      called = true;
    } else {
      Join(id);
    }
  }
  submitting_.clear();
  return called;
}

// Asks epoll for the events that operations wait for.
void EpollRing::Ask() {
  for (const int fd : changed_) {
    Waiting& waiting = waiting_[fd];
    waiting.changed = false;
    uint32_t events = 0;
    for (const IoId id : waiting.ids) events |= TaskOf(id).sends() ? EPOLLOUT : EPOLLIN;
    if ((events & ~waiting.asked) == 0) continue;
    if (const int error = AskFor(fd, events); error == 0) {
      waiting.asked = events;
    } else {
      trying_ = waiting.ids;
      for (const IoId id : trying_) {
        Leave(id);
        ops_.EndLater(id, -error);
      }
    }
  }
  changed_.clear();
}

// One event is told, and no more until epoll is asked again.
int EpollRing::AskFor(int fd, uint32_t events) {
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.fd = fd;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd, &event) == 0) return 0;
  if (errno != ENOENT) return errno;
  return epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : errno;
}

// Gives the number of events, or -errno.
int EpollRing::WaitAtMost(int64_t us) {
  int n = 0;
  if (exact_) {
    timespec ts{.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    n = static_cast<int>(syscall(SYS_epoll_pwait2, epoll_fd_, events_.data(), kEventsMax,
                                 us == kNever.us ? nullptr : &ts, nullptr, 0));
    // Linux before 5.11, or a seccomp profile that is older than this call.
    if (n < 0 && (errno == ENOSYS || errno == EPERM)) exact_ = false;
  }
  if (!exact_) {
    const int64_t ms = us == kNever.us ? -1 : std::min<int64_t>((us + 999) / 1000, INT32_MAX);
    n = epoll_wait(epoll_fd_, events_.data(), kEventsMax, static_cast<int>(ms));
  }
  if (n >= 0) return n;
  return errno == EINTR ? 0 : -errno;
}

int EpollRing::Wait(Tick until) {
  const auto left = [&] {
    return until == kNever ? kNever.us : std::max<int64_t>(until - MonotonicNow(), 0);
  };
  if (poll_us_ > 0 && left() > 0) {
    const Tick end = std::min(until, MonotonicNow() + int64_t{poll_us_});
    do {
      const int n = WaitAtMost(0);
      const bool work = work_ != nullptr && work_->Look();
      if (work || n != 0) return n;
      sched_yield();
    } while (MonotonicNow() < end);
  }
  if (work_ != nullptr && left() > 0 && work_->StopLooking()) return WaitAtMost(0);
  return WaitAtMost(left());
}

void EpollRing::OnEvent(int fd, uint32_t events) {
  if (fd == wake_fd_) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = read(wake_fd_, &count, sizeof(count));
    return;
  }
  Waiting& waiting = waiting_[fd];
  waiting.asked = 0;
  waiting.drained = false;
  MarkChanged(fd);
  // An error, or the end of the connection, concerns both directions.
  const bool both = (events & (EPOLLERR | EPOLLHUP)) != 0;
  bool in = both || (events & EPOLLIN) != 0;
  bool out = both || (events & EPOLLOUT) != 0;
  trying_ = waiting.ids;
  for (const IoId id : trying_) {
    if (!ops_.Has(id)) continue;  // a callback has cancelled it
    bool& able = TaskOf(id).sends() ? out : in;
    const bool poll = TaskOf(id).kind == Kind::kPollIn;
    if (able && !Advance(id) && !poll) able = false;
  }
}

absl::Status EpollRing::RunOnce(Tick until) {
  ops_.RunBeforeSubmit();
  const bool called = Submit();
  Ask();
  until = ops_.WaitUntil(until);
  if (called || !started_.empty()) until = Tick{};
  const int n = Wait(until);
  if (n < 0) return absl::UnavailableError(absl::StrCat("epoll wait: ", strerror(-n)));
  ops_.RunReady();
  for (int i = 0; i < n; ++i) OnEvent(events_[i].data.fd, events_[i].events);
  if (work_ != nullptr) work_->Run();
  ops_.RunTimers(MonotonicNow());
  return absl::OkStatus();
}

void EpollRing::Wake() {
  const uint64_t one = 1;
  // The write fails only if 2^64 wake-ups are pending, and then the ring wakes up anyway.
  [[maybe_unused]] const ssize_t n = write(wake_fd_, &one, sizeof(one));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ring>> MakeEpollRing() {
  auto ring = std::make_unique<EpollRing>();
  if (auto status = ring->Init(); !status.ok()) return status;
  return ring;
}

}  // namespace longhaul::peerd
