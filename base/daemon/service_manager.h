// Tells the service manager that started this process, such as systemd, what the process does.
//
// The protocol is that of sd_notify(3): a datagram with lines NAME=value, sent to the Unix socket
// that $NOTIFY_SOCKET names. systemd keeps it stable and documents it for programs without
// libsystemd. These few lines spare both daemons a library that brings five others with it.
//
// Without a service manager that listens, every call does nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"

namespace longhaul {

// Threads: any thread may call any method.
class ServiceManager {
 public:
  // `getenv` looks up an environment variable (nullptr: not set).
  explicit ServiceManager(const std::function<const char*(const char*)>& getenv);
  ~ServiceManager();
  ServiceManager(const ServiceManager&) = delete;
  ServiceManager& operator=(const ServiceManager&) = delete;

  // The process serves. Unavailable: the service manager named a socket and cannot be reached
  // there. It would wait for this message, and end the process when it has waited long enough.
  absl::Status Ready();

  // The process ends, and takes at most `longest` for it. The service manager waits as long before
  // it kills the process, also if its own limit is lower.
  void Stopping(std::chrono::milliseconds longest);

  // The process makes progress. If a service manager watches (WatchdogSec= of systemd), and does
  // not hear this for the time that it has set, it kills the process and starts it again. Call this
  // as often as you like, and at least once in each alive_period(): most calls send nothing.
  void Alive();

  // 0: nobody watches.
  std::chrono::microseconds alive_period() const { return alive_period_; }

 private:
  absl::Status Send(const std::string& text, bool wait);

  std::string socket_;  // as the environment names it; empty: there is no service manager
  int fd_ = -1;
  std::chrono::microseconds alive_period_{0};
  std::atomic<int64_t> alive_due_us_{0};  // by the monotonic clock
};

// The service manager of this process, by the environment of the process.
ServiceManager& TheServiceManager();

}  // namespace longhaul
