#include "coordinator/grpc/accept.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/log.h"
#include "base/mutex.h"

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

struct Watches {
  Mutex mutex;
  std::map<const AcceptWatch*, std::pair<uint16_t, std::function<void(const std::string&)>>> all
      ABSL_GUARDED_BY(mutex);
};
Watches& TheWatches() {
  static auto* const watches = new Watches;  // never destroyed: threads of gRPC may outlive main()
  return *watches;
}

std::string TextOf(const in6_addr& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    inet_ntop(AF_INET, &address.s6_addr[12], text, sizeof text);
  } else {
    inet_ntop(AF_INET6, &address, text, sizeof text);
  }
  return text;
}

// The host of an end of a connection, and its port.
std::pair<std::string, uint16_t> EndOf(const sockaddr_storage& end) {
  if (end.ss_family == AF_INET) {
    sockaddr_in v4{};
    memcpy(&v4, &end, sizeof v4);
    char text[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
    return {text, ntohs(v4.sin_port)};
  }
  if (end.ss_family != AF_INET6) return {"", 0};
  sockaddr_in6 v6{};
  memcpy(&v6, &end, sizeof v6);
  return {TextOf(v6.sin6_addr), ntohs(v6.sin6_port)};
}

void TellWatches(int fd) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t size = sizeof here;
  socklen_t size_there = sizeof there;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &size) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&there), &size_there) != 0) {
    return;
  }
  const uint16_t port = EndOf(here).second;
  const std::string host = EndOf(there).first;
  if (host.empty()) return;
  Watches& watches = TheWatches();
  MutexLock lock(&watches.mutex);
  for (const auto& [watch, entry] : watches.all) {
    if (entry.first == port) entry.second(host);
  }
}

}  // namespace

AcceptWatch::AcceptWatch(uint16_t port, std::function<void(const std::string& host)> came) {
  MutexLock lock(&TheWatches().mutex);
  TheWatches().all.emplace(this, std::pair(port, std::move(came)));
}

AcceptWatch::~AcceptWatch() {
  MutexLock lock(&TheWatches().mutex);
  TheWatches().all.erase(this);
}

std::string HostOfUri(const std::string& uri) {
  const std::string text = absl::StrReplaceAll(uri, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
  const size_t begin = text.find(':');
  const size_t end = text.rfind(':');
  if (begin == std::string::npos || end <= begin) return "";
  std::string host = text.substr(begin + 1, end - begin - 1);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  host = host.substr(0, host.find('%'));
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 ? TextOf(v6) : host;
}

}  // namespace longhaul::coordinator

extern "C" int accept4(int listener, struct sockaddr* address, socklen_t* length, int flags) {
  namespace lc = longhaul::coordinator;
  const socklen_t room = length == nullptr ? 0 : *length;
  while (true) {
    if (length != nullptr) *length = room;
    const int fd = static_cast<int>(syscall(SYS_accept4, listener, address, length, flags));
    if (fd >= 0) {
      if (!lc::IsOneOfTheLast(fd)) {
        lc::TellWatches(fd);
        return fd;
      }
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
