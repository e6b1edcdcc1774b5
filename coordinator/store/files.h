// Files that one coordinator at a time keeps: its store, its journal.
#pragma once

#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul::coordinator {

// Closes it when destroyed.
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

// Makes the directory of the file if it is missing, for the owner only; not those above it.
// Unavailable: it cannot be made; says why and what to do. `what` is the file in words ("store").
absl::Status MakeDirectoryOf(const std::string& what, const std::string& path);

// Locks `PATH-lock` for as long as the result is open: it goes with the process, whatever way that
// ends. FailedPrecondition: another coordinator has it, named in the text; Unavailable: it cannot
// be locked.
absl::StatusOr<Fd> LockFile(const std::string& what, const std::string& path);

}  // namespace longhaul::coordinator
