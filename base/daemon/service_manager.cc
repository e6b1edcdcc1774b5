#include "base/daemon/service_manager.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul {
namespace {

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

ServiceManager::ServiceManager(const std::function<const char*(const char*)>& getenv) {
  const char* socket_name = getenv("NOTIFY_SOCKET");
  if (socket_name == nullptr || *socket_name == '\0') return;
  socket_ = socket_name;
  fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

  const char* period = getenv("WATCHDOG_USEC");
  const char* pid = getenv("WATCHDOG_PID");
  int64_t us = 0;
  int64_t watched = 0;
  if (period == nullptr || !absl::SimpleAtoi(period, &us) || us <= 0) return;
  // A process that the service manager did not start itself inherits the variables of its parent.
  if (pid != nullptr && (!absl::SimpleAtoi(pid, &watched) || watched != getpid())) return;
  alive_period_ = std::chrono::microseconds(us / 2);
}

ServiceManager::~ServiceManager() {
  if (fd_ >= 0) close(fd_);
}

absl::Status ServiceManager::Ready() { return Send("READY=1", /*wait=*/true); }

void ServiceManager::Stopping(std::chrono::milliseconds longest) {
  const int64_t us = std::chrono::duration_cast<std::chrono::microseconds>(longest).count();
  const absl::Status sent =
      Send(absl::StrCat("STOPPING=1\nEXTEND_TIMEOUT_USEC=", us), /*wait=*/false);
  if (!sent.ok()) Log(LogLevel::kWarning, std::string(sent.message()));
}

void ServiceManager::Alive() {
  if (alive_period_.count() == 0) return;
  const int64_t now = NowUs();
  int64_t due = alive_due_us_.load(std::memory_order_relaxed);
  if (now < due) return;
  // Half a period: a caller that comes once in a period is never too early.
  if (!alive_due_us_.compare_exchange_strong(due, now + alive_period_.count() / 2)) return;
  const absl::Status sent = Send("WATCHDOG=1", /*wait=*/false);
  if (!sent.ok()) Log(LogLevel::kWarning, std::string(sent.message()));
}

absl::Status ServiceManager::Send(const std::string& text, bool wait) {
  if (socket_.empty()) return absl::OkStatus();
  const auto failed = [&](const std::string& what) {
    return absl::UnavailableError(absl::StrCat(
        "cannot tell the service manager ", text.substr(0, text.find('\n')), " at NOTIFY_SOCKET=",
        socket_, ": ", what, "; without Type=notify in the unit, unset the variable"));
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const bool abstract = socket_[0] == '@';
  if ((socket_[0] != '/' && !abstract) || socket_.size() >= sizeof address.sun_path) {
    return failed("that is no Unix socket");
  }
  memcpy(address.sun_path, socket_.data(), socket_.size());
  if (abstract) address.sun_path[0] = '\0';
  // The name of an abstract socket has no zero byte at its end.
  const auto bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_.size() + (abstract ? 0 : 1));
  ssize_t sent = 0;
  do {
    sent = sendto(fd_, text.data(), text.size(), MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT),
                  reinterpret_cast<const sockaddr*>(&address), bytes);
  } while (sent < 0 && errno == EINTR);
  return sent >= 0 ? absl::OkStatus() : failed(strerror(errno));
}

ServiceManager& TheServiceManager() {
  static ServiceManager* const manager =
      new ServiceManager([](const char* name) { return ::getenv(name); });
  return *manager;
}

}  // namespace longhaul
