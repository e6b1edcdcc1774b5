// Helpers for the file of a store, which only one coordinator at a time may use.
//
// No state of their own; any thread. Calls block on the file system.
#pragma once

#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace longhaul::coordinator {

// Makes the directory of `path` if it is missing, with access for the owner only. The directories
// above it must exist. Unavailable: the directory cannot be made; the text says why and what to do,
// and nothing has changed.
absl::Status MakeDirectoryOf(const std::string& path);

// Locks the file `PATH-lock`, which is made if it is missing, until the result is closed. The
// kernel also drops the lock when the process ends in any way. FailedPrecondition: another
// coordinator has the lock; the text names its process. Unavailable: the file cannot be opened or
// locked.
absl::StatusOr<UniqueFd> LockFile(const std::string& path);

}  // namespace longhaul::coordinator
