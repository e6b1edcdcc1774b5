// Helpers for the file of a store, which only one coordinator at a time may use.
//
// No state of their own; any thread. Calls block on the file system.
#pragma once

#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul::coordinator {

// Owns a file descriptor and closes it when destroyed.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&&) = delete;
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Makes the directory of `path` if it is missing, with access for the owner only. The directories
// above it must exist. Unavailable: the directory cannot be made; the text says why and what to do,
// and nothing has changed.
absl::Status MakeDirectoryOf(const std::string& path);

// Locks the file `PATH-lock`, which is made if it is missing, until the result is closed. The
// kernel also drops the lock when the process ends in any way. FailedPrecondition: another
// coordinator has the lock; the text names its process. Unavailable: the file cannot be opened or
// locked.
absl::StatusOr<Fd> LockFile(const std::string& path);

}  // namespace longhaul::coordinator
