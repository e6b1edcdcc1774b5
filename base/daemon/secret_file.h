// Reads a file that holds a secret of one line, such as a join token.
//
// No state; any thread. Blocks on the file system.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace longhaul {

// Returns the contents without white space around them. `flag` names the file in error texts
// ("--token-file"); no text repeats the contents.
//
// FailedPrecondition: not a regular file; or too many may read it. Only the owner may (mode 0600 or
// less), with one exception: a file of root may be readable by its group (0640), so that a daemon
// that is not root can read a file that it cannot change. InvalidArgument: the file is empty,
// longer than 4 KiB, or has more than one line. Unavailable: it cannot be opened or read.
absl::StatusOr<std::string> ReadSecretFile(const std::string& flag, const std::string& path);

}  // namespace longhaul
