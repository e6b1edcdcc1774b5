// Ring over io_uring. The only file that includes liburing.
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "peerd/io/ring.h"
#include "peerd/io/ring_ops.h"

namespace longhaul::peerd {
namespace {

// The usage report of zero-copy sends (Linux 6.2). The oldest liburing that we build with does not
// declare it. The names are our own because the kernel's are enumerators in some versions and
// macros in others.
constexpr uint16_t kZeroCopyReportUsage = 1u << 3;
constexpr uint32_t kNoticeSaysCopied = 1u << 31;

// Tags of completions that are not an operation's; the other tags are ids.
constexpr uint64_t kIgnored = 0;  // cancel requests
constexpr uint64_t kWakeTag = 1;  // the read of the event descriptor
static_assert(kWakeTag < RingOps::kIdMin);
constexpr unsigned kBufferSlots = 16384;             // the kernel allows so many
constexpr size_t kBufferBytesMax = size_t{1} << 30;  // the kernel allows so much in one buffer
constexpr int64_t kDestructorWaitUs = Seconds(1);

// `call`: which of the three system calls of io_uring the system refuses.
absl::Status Refused(const char* call, int error) {
  switch (error) {
    case EPERM:
    case EACCES:
      return absl::FailedPreconditionError(absl::StrCat(
          "io_uring ", call,
          " refused (EPERM): seccomp or kernel.io_uring_disabled blocks it; run the container with "
          "the seccomp profile deploy/docker/seccomp-peerd.json, and set the sysctl to 0"));
    case ENOSYS:
      return absl::FailedPreconditionError(absl::StrCat(
          "io_uring ", call,
          " refused (ENOSYS): seccomp hides it, or this kernel has no io_uring; run the container "
          "with the seccomp profile deploy/docker/seccomp-peerd.json, or use Linux 6.1 or later"));
    case ENOMEM:
      return absl::FailedPreconditionError(
          "io_uring setup refused (ENOMEM): the limit of locked memory is too low; raise it "
          "(ulimit -l, LimitMEMLOCK=) or grant IPC_LOCK");
    case EMFILE:
    case ENFILE:
      return absl::FailedPreconditionError(
          "io_uring setup refused (EMFILE): too many open files; raise the limit (ulimit -n, "
          "LimitNOFILE=)");
    default:
      return absl::FailedPreconditionError(
          absl::StrCat("io_uring ", call, " refused (", strerror(error), "): Linux ",
                       KernelRelease(), " does not offer what is needed; use Linux 6.1 or later"));
  }
}
absl::Status SetupRefused(int error) { return Refused("setup", error); }

struct SetupFlag {
  unsigned flag;
  const char* name;
};
constexpr SetupFlag kSetupFlags[] = {
    {IORING_SETUP_SUBMIT_ALL, "submit_all"},
    {IORING_SETUP_COOP_TASKRUN, "coop_taskrun"},
    {IORING_SETUP_SINGLE_ISSUER, "single_issuer"},
    {IORING_SETUP_DEFER_TASKRUN, "defer_taskrun"},
};
// The combinations of flags to try, best first. Older kernels lack the flags of the earlier lines.
constexpr unsigned kSetupTries[] = {
    IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER |
        IORING_SETUP_DEFER_TASKRUN,
    IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER,
    IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
    IORING_SETUP_SUBMIT_ALL,
    0,
};

struct NeededOp {
  int code;
  const char* name;
};
constexpr NeededOp kNeededOps[] = {
    {IORING_OP_ACCEPT, "accept"},   {IORING_OP_CONNECT, "connect"},
    {IORING_OP_RECV, "recv"},       {IORING_OP_SEND, "send"},
    {IORING_OP_RECVMSG, "recvmsg"}, {IORING_OP_SENDMSG, "sendmsg"},
    {IORING_OP_POLL_ADD, "poll"},   {IORING_OP_ASYNC_CANCEL, "cancel"},
    {IORING_OP_READ, "read"},
};

class UringRing final : public Ring {
 public:
  ~UringRing() override;

  absl::Status Init(unsigned entries);

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
  struct Buffer {
    const uint8_t* data = nullptr;
    size_t bytes = 0;  // 0: the entry is free
  };

  absl::Status ProbeEnter();
  absl::Status ProbeOps();
  void ProbeZeroCopyReport();
  void RegisterSparse();
  void Describe(unsigned flags, const std::vector<const char*>& missing);

  IoId Start(io_uring_sqe& sqe, IoCallback done);
  void Push(const io_uring_sqe& sqe);
  bool TryPush(const io_uring_sqe& sqe);
  void FlushOverflow();
  void ArmWake();
  bool Enable();
  int Enter(Tick until);
  bool Poll(Tick until, int* rc);
  void Reap();
  void OnCompletion(uint64_t tag, int value, unsigned flags);

  uint32_t poll_us_ = 0;
  SharedWork* work_ = nullptr;
  io_uring ring_{};
  bool made_ = false;
  bool enabled_ = false;
  bool closing_ = false;
  bool report_usage_ = false;
  RingFeatures features_;

  RingOps ops_;
  std::deque<io_uring_sqe> overflow_;  // entries that did not fit into the submission queue

  int wake_fd_ = -1;
  uint64_t wake_value_ = 0;

  std::vector<Buffer> buffers_;  // indexed by the slot in the kernel's table
  std::vector<int> free_slots_;
};

// ------------------------------------------------------------------------------ set-up

absl::Status UringRing::Init(unsigned entries) {
  // The ring starts disabled. The thread that enables the ring becomes its only issuer; that need
  // not be the thread that made it.
  int error = EINVAL;
  unsigned flags = 0;
  for (const unsigned attempt : kSetupTries) {
    io_uring_params params{};
    params.flags = attempt | IORING_SETUP_R_DISABLED | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
    params.cq_entries = entries * 4;
    error = -io_uring_queue_init_params(entries, &ring_, &params);
    flags = attempt;
    if (error != EINVAL) break;
  }
  if (error != 0) return SetupRefused(error);
  made_ = true;
  if ((ring_.features & IORING_FEAT_NODROP) == 0) return SetupRefused(EOPNOTSUPP);
  if (auto status = ProbeEnter(); !status.ok()) return status;
  if (auto status = ProbeOps(); !status.ok()) return status;
  std::vector<const char*> missing;
  for (const SetupFlag& f : kSetupFlags) {
    if ((flags & f.flag) == 0) missing.push_back(f.name);
  }
  RegisterSparse();
  if (!features_.send_zero_copy) missing.push_back("send_zc");
  if (!features_.registered_buffers) missing.push_back("registered buffers");
  Describe(flags, missing);
  // The descriptor blocks on purpose: io_uring ends a read of a non-blocking one with EAGAIN.
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  if (wake_fd_ < 0) return SetupRefused(errno);
  return absl::OkStatus();
}

// A filter may admit one of the three system calls and not another one. The kernel says EBADFD of a
// ring that is not enabled yet.
absl::Status UringRing::ProbeEnter() {
  if (syscall(__NR_io_uring_enter, ring_.ring_fd, 0, 0, 0, nullptr, 0) >= 0 || errno == EBADFD) {
    return absl::OkStatus();
  }
  return Refused("enter", errno);
}

absl::Status UringRing::ProbeOps() {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
  if (probe == nullptr) {
    // liburing does not say why, and a kernel that offers no probe says EINVAL.
    const long rc =
        syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_PROBE, nullptr, 0);
    return Refused("register", rc == 0 || errno == EINVAL ? EOPNOTSUPP : errno);
  }
  std::vector<std::string> missing;
  for (const NeededOp& op : kNeededOps) {
    if (!io_uring_opcode_supported(probe, op.code)) missing.push_back(op.name);
  }
  features_.send_zero_copy = io_uring_opcode_supported(probe, IORING_OP_SEND_ZC);
  io_uring_free_probe(probe);
  if (!missing.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("io_uring of Linux ", KernelRelease(),
                                                      " lacks ", absl::StrJoin(missing, ", "),
                                                      "; use Linux 6.1 or later"));
  }
  if (features_.send_zero_copy) ProbeZeroCopyReport();
  return absl::OkStatus();
}

// The kernel checks the flags before the descriptor, so EBADF means that it knows the flag. The
// probe uses a small ring of its own because ours is not enabled yet.
void UringRing::ProbeZeroCopyReport() {
  io_uring ring;
  if (io_uring_queue_init(4, &ring, 0) != 0) return;
  io_uring_sqe* sqe = io_uring_get_sqe(&ring);
  char byte = 0;
  io_uring_prep_send_zc(sqe, -1, &byte, 1, 0, kZeroCopyReportUsage);
  if (io_uring_submit(&ring) == 1) {
    io_uring_cqe* cqe = nullptr;
    if (io_uring_wait_cqe(&ring, &cqe) == 0) {
      report_usage_ = cqe->res == -EBADF;
      io_uring_cqe_seen(&ring, cqe);
    }
  }
  io_uring_queue_exit(&ring);
}

void UringRing::RegisterSparse() {
  if (!features_.send_zero_copy) return;  // only zero-copy sends use registered buffers
  if (io_uring_register_buffers_sparse(&ring_, kBufferSlots) != 0) return;
  features_.registered_buffers = true;
  buffers_.resize(kBufferSlots);
  for (int i = kBufferSlots; i-- > 0;) free_slots_.push_back(i);
}

void UringRing::Describe(unsigned flags, const std::vector<const char*>& missing) {
  std::vector<const char*> have;
  for (const SetupFlag& f : kSetupFlags) {
    if ((flags & f.flag) != 0) have.push_back(f.name);
  }
  if (features_.send_zero_copy) have.push_back("send_zc");
  if (features_.registered_buffers) have.push_back("registered_buffers");
  features_.description =
      absl::StrCat("io_uring of Linux ", KernelRelease(), " with ", absl::StrJoin(have, ","),
                   missing.empty() ? "" : " without ", absl::StrJoin(missing, ","));
}

UringRing::~UringRing() {
  if (made_ && enabled_) {
    closing_ = true;
    ops_.Silence();
    ops_.ForEach([this](IoId id) { Cancel(id); });
    const Tick deadline = MonotonicNow() + kDestructorWaitUs;
    while (ops_.open() > 0 && MonotonicNow() < deadline) {
      FlushOverflow();
      const int rc = Enter(deadline);
      if (rc < 0 && rc != -ETIME && rc != -EINTR && rc != -EBUSY && rc != -EAGAIN) break;
      Reap();
    }
  }
  if (made_) io_uring_queue_exit(&ring_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

// ------------------------------------------------------------------------------ operations

IoId UringRing::Start(io_uring_sqe& sqe, IoCallback done) {
  const IoId id = ops_.Add(std::move(done));
  sqe.user_data = id;
  Push(sqe);
  return id;
}

void UringRing::Push(const io_uring_sqe& sqe) {
  // Entries that wait go first: a cancel request must not overtake its operation.
  if (!overflow_.empty() || !TryPush(sqe)) overflow_.push_back(sqe);
}

bool UringRing::TryPush(const io_uring_sqe& sqe) {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr && enabled_) {
    io_uring_submit(&ring_);
    entry = io_uring_get_sqe(&ring_);
  }
  if (entry == nullptr) return false;
  *entry = sqe;
  return true;
}

void UringRing::FlushOverflow() {
  while (!overflow_.empty() && TryPush(overflow_.front())) overflow_.pop_front();
}

IoId UringRing::Accept(int listen_fd, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_accept(&sqe, listen_fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  return Start(sqe, std::move(done));
}

IoId UringRing::Connect(int fd, const sockaddr* address, socklen_t length, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_connect(&sqe, fd, address, length);
  return Start(sqe, std::move(done));
}

IoId UringRing::Recv(int fd, void* data, size_t bytes, bool wait_all, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_recv(&sqe, fd, data, std::min<size_t>(bytes, INT32_MAX),
                     wait_all ? MSG_WAITALL : 0);
  return Start(sqe, std::move(done));
}

IoId UringRing::RecvMsg(int fd, msghdr* message, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_recvmsg(&sqe, fd, message, MSG_CMSG_CLOEXEC);
  return Start(sqe, std::move(done));
}

IoId UringRing::Send(int fd, const void* data, size_t bytes, bool wait_all, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_send(&sqe, fd, data, std::min<size_t>(bytes, INT32_MAX),
                     MSG_NOSIGNAL | (wait_all ? MSG_WAITALL : 0));
  return Start(sqe, std::move(done));
}

IoId UringRing::SendMsg(int fd, const msghdr* message, bool wait_all, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_sendmsg(&sqe, fd, message, MSG_NOSIGNAL | (wait_all ? MSG_WAITALL : 0));
  return Start(sqe, std::move(done));
}

IoId UringRing::SendZeroCopy(int fd, const void* data, size_t bytes, int buffer, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_send_zc(&sqe, fd, data, std::min<size_t>(bytes, INT32_MAX),
                        MSG_NOSIGNAL | MSG_WAITALL, report_usage_ ? kZeroCopyReportUsage : 0);
  if (buffer >= 0) {
    LH_CHECK(static_cast<size_t>(buffer) < buffers_.size());
    const Buffer& b = buffers_[buffer];
    const uint64_t offset = static_cast<const uint8_t*>(data) - b.data;
    LH_CHECK(offset <= b.bytes && bytes <= b.bytes - offset);
    sqe.ioprio |= IORING_RECVSEND_FIXED_BUF;
    sqe.buf_index = static_cast<uint16_t>(buffer);
  }
  return Start(sqe, std::move(done));
}

IoId UringRing::PollIn(int fd, IoCallback done) {
  io_uring_sqe sqe{};
  io_uring_prep_poll_add(&sqe, fd, POLLIN);
  return Start(sqe, std::move(done));
}

IoId UringRing::Timeout(Tick at, IoCallback done) { return ops_.AddTimer(at, std::move(done)); }

void UringRing::BeforeSubmit(absl::AnyInvocable<void()> run) { ops_.BeforeSubmit(std::move(run)); }

void UringRing::Cancel(IoId id) {
  if (ops_.CancelTimer(id) || !ops_.Has(id)) return;
  io_uring_sqe sqe{};
  io_uring_prep_cancel64(&sqe, id, 0);
  sqe.user_data = kIgnored;
  Push(sqe);
}

// ------------------------------------------------------------------------------ registered memory

// Whether all pages exist, so that pinning does not make the kernel clear new ones. A page of
// shared memory exists whichever process has touched it.
bool Resident(const void* data, size_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = begin / page;
  unsigned char in_memory[256];
  // From the end: programs mostly fill memory from the start, so a missing page is found early.
  for (uintptr_t end = (begin + bytes + page - 1) / page; end > first;) {
    const uintptr_t count = std::min<uintptr_t>(end - first, sizeof(in_memory));
    end -= count;
    if (mincore(reinterpret_cast<void*>(end * page), count * page, in_memory) != 0) return false;
    for (uintptr_t i = 0; i < count; ++i) {
      if ((in_memory[i] & 1) == 0) return false;
    }
  }
  return true;
}

absl::StatusOr<int> UringRing::RegisterBuffer(const void* data, size_t bytes) {
  if (!features_.registered_buffers) {
    return absl::UnimplementedError("this kernel has no registered buffers for zero-copy sends");
  }
  LH_CHECK(bytes > 0 && bytes <= kBufferBytesMax);
  if (free_slots_.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("register ", bytes, " bytes: the table of registered buffers is full"));
  }
  if (!Resident(data, bytes)) {
    return absl::UnavailableError(
        absl::StrCat("register ", bytes, " bytes: not all are in memory"));
  }
  const int slot = free_slots_.back();
  iovec part{const_cast<void*>(data), bytes};
  __u64 tag = 0;
  const int rc = io_uring_register_buffers_update_tag(&ring_, slot, &part, &tag, 1);
  if (rc != 1) {
    const int error = rc < 0 ? -rc : ENOMEM;
    return absl::ResourceExhaustedError(
        absl::StrCat("register ", bytes, " bytes for zero-copy sends: ", strerror(error),
                     error == ENOMEM ? "; raise the limit of locked memory (ulimit -l, "
                                       "LimitMEMLOCK=) or grant IPC_LOCK"
                                     : ""));
  }
  free_slots_.pop_back();
  buffers_[slot] = {.data = static_cast<const uint8_t*>(data), .bytes = bytes};
  return slot;
}

// Sends in flight keep the pages, because the kernel counts the references to them.
void UringRing::UnregisterBuffer(int buffer) {
  LH_CHECK(buffer >= 0 && static_cast<size_t>(buffer) < buffers_.size() &&
           buffers_[buffer].bytes > 0);
  iovec none{};
  __u64 tag = 0;
  io_uring_register_buffers_update_tag(&ring_, buffer, &none, &tag, 1);
  buffers_[buffer] = {};
  free_slots_.push_back(buffer);
}

// ------------------------------------------------------------------------------ running

bool UringRing::Enable() {
  if (enabled_) return true;
  // liburing 2.3 declares io_uring_enable_rings(), but its library does not export it.
  if (syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) !=
      0) {
    return false;
  }
  enabled_ = true;
  ArmWake();
  return true;
}

void UringRing::ArmWake() {
  io_uring_sqe sqe{};
  io_uring_prep_read(&sqe, wake_fd_, &wake_value_, sizeof(wake_value_), 0);
  sqe.user_data = kWakeTag;
  Push(sqe);
}

void UringRing::Wake() {
  const uint64_t one = 1;
  // The write fails only if 2^64 wake-ups are pending, and then the ring wakes up anyway.
  [[maybe_unused]] const ssize_t n = write(wake_fd_, &one, sizeof(one));
}

// Submits and looks for completions and for shared work, again and again, for poll_us_. Returns
// whether there are any. *rc: the last result of the kernel.
bool UringRing::Poll(Tick until, int* rc) {
  const Tick end = std::min(until, MonotonicNow() + int64_t{poll_us_});
  do {
    *rc = io_uring_submit_and_get_events(&ring_);
    const bool work = work_ != nullptr && work_->Look();
    if (work || *rc < 0 || io_uring_cq_ready(&ring_) > 0) return true;
    sched_yield();
  } while (MonotonicNow() < end);
  return false;
}

// Submits, and waits for a completion until `until`. Makes one system call unless it polls.
int UringRing::Enter(Tick until) {
  int rc = 0;
  if (poll_us_ > 0 && until > MonotonicNow() && Poll(until, &rc)) return rc;
  int64_t us = until - MonotonicNow();
  if (us > 0 && work_ != nullptr && work_->StopLooking()) us = 0;
  if (us <= 0) return io_uring_submit_and_get_events(&ring_);
  if (until == kNever) return io_uring_submit_and_wait(&ring_, 1);
  __kernel_timespec ts{};
  ts.tv_sec = us / 1000000;
  ts.tv_nsec = us % 1000000 * 1000;
  io_uring_cqe* cqe = nullptr;
  return io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &ts, nullptr);
}

absl::Status UringRing::RunOnce(Tick until) {
  if (!Enable()) return absl::UnavailableError("io_uring: the ring could not be enabled");
  ops_.RunBeforeSubmit();
  FlushOverflow();
  until = overflow_.empty() ? ops_.WaitUntil(until) : Tick{};
  const int rc = Enter(until);
  if (rc < 0) {
    switch (-rc) {
      case ETIME:
      case EINTR:
      case EBUSY:   // the completion queue is full: reap it, submit the rest next time
      case EAGAIN:  // no memory for a request now
        break;
      default:
        return absl::UnavailableError(absl::StrCat("io_uring enter: ", strerror(-rc)));
    }
  }
  ops_.RunReady();
  Reap();
  if (work_ != nullptr) work_->Run();
  ops_.RunTimers(MonotonicNow());
  return absl::OkStatus();
}

void UringRing::Reap() {
  // Reap only the completions that are there now: callbacks may submit and so add more, for ever.
  for (unsigned n = io_uring_cq_ready(&ring_); n > 0; --n) {
    io_uring_cqe* cqe = nullptr;
    if (io_uring_peek_cqe(&ring_, &cqe) != 0 || cqe == nullptr) return;
    const uint64_t tag = cqe->user_data;
    const int value = cqe->res;
    const unsigned flags = cqe->flags;
    io_uring_cqe_seen(&ring_, cqe);
    OnCompletion(tag, value, flags);
  }
}

void UringRing::OnCompletion(uint64_t tag, int value, unsigned flags) {
  if (tag == kIgnored) return;
  if (tag == kWakeTag) {
    if (!closing_) ArmWake();
    return;
  }
  if ((flags & IORING_CQE_F_NOTIF) != 0) {
    const bool copied = report_usage_ && (static_cast<uint32_t>(value) & kNoticeSaysCopied) != 0;
    ops_.End(tag, {.value = 0, .more = false, .copied = copied});
  } else if ((flags & IORING_CQE_F_MORE) != 0) {
    ops_.Report(tag, {.value = value, .more = true});
  } else {
    ops_.End(tag, {.value = value});
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ring>> MakeUringRing(unsigned entries) {
  auto ring = std::make_unique<UringRing>();
  if (auto status = ring->Init(entries); !status.ok()) return status;
  return ring;
}

}  // namespace longhaul::peerd
