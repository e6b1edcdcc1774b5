#include "coordinator/grpc/accept.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul::coordinator {
namespace {

constexpr int64_t kLogSeconds = 60;
// A caller that asks again at once must not keep a processor busy.
constexpr unsigned kPauseUs = 1000;

std::atomic<uint64_t> refused{0};
std::atomic<int64_t> quiet_until_s{0};

void CountRefused() {
  ++refused;
  const int64_t now_s = std::chrono::duration_cast<std::chrono::seconds>(
                            std::chrono::steady_clock::now().time_since_epoch())
                            .count();
  int64_t until = quiet_until_s;
  if (now_s < until || !quiet_until_s.compare_exchange_strong(until, now_s + kLogSeconds)) return;
  Log(LogLevel::kWarning, absl::StrCat("connections refused, because file descriptors run out; "
                                       "raise the limit (LimitNOFILE=, ulimit -n) refused=",
                                       refused.load()));
}

// The kernel gives the lowest free number. So a high number says that few are left.
bool IsOneOfTheLast(int fd) {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  return static_cast<rlim_t>(fd) + kDescriptorsReserved >= limit.rlim_cur;
}

void Reset(int fd) {
  const struct linger now = {1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  close(fd);
}

}  // namespace
}  // namespace longhaul::coordinator

extern "C" int accept4(int listener, struct sockaddr* address, socklen_t* length, int flags) {
  namespace lc = longhaul::coordinator;
  const socklen_t room = length == nullptr ? 0 : *length;
  while (true) {
    if (length != nullptr) *length = room;
    const int fd = static_cast<int>(syscall(SYS_accept4, listener, address, length, flags));
    if (fd >= 0) {
      if (!lc::IsOneOfTheLast(fd)) return fd;
      lc::Reset(fd);
      lc::CountRefused();
      continue;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      lc::CountRefused();
      usleep(lc::kPauseUs);
      errno = EAGAIN;
    }
    return -1;
  }
}
