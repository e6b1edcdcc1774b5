#include "coordinator/store/files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

namespace longhaul::coordinator {

absl::Status MakeDirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return absl::OkStatus();
  const std::string directory = path.substr(0, slash);
  if (mkdir(directory.c_str(), 0700) == 0 || errno == EEXIST) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot make directory ", directory, " for store ",
                                             path, ": ", strerror(errno),
                                             "; make it, or choose another file"));
}

absl::StatusOr<Fd> LockFile(const std::string& path) {
  const std::string lock_path = path + "-lock";
  Fd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock.get() < 0) {
    return absl::UnavailableError(absl::StrCat("cannot open ", lock_path, ", the lock of store ",
                                               path, ": ", strerror(errno)));
  }
  char owner[32] = {};
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return absl::UnavailableError(absl::StrCat("cannot lock ", lock_path, ": ", strerror(errno)));
    }
    const ssize_t got = pread(lock.get(), owner, sizeof owner - 1, 0);
    return absl::FailedPreconditionError(absl::StrCat(
        "store ", path, " is in use by another coordinator",
        got > 0 ? absl::StrCat(" (process ", std::string(owner, got), ")") : std::string(),
        "; stop it first, or choose another file"));
  }
  const std::string self = std::to_string(getpid());
  // Only the message above reads the process number, so a failure here does no harm.
  if (ftruncate(lock.get(), 0) == 0) (void)!pwrite(lock.get(), self.data(), self.size(), 0);
  return lock;
}

}  // namespace longhaul::coordinator
