#include "base/daemon/secret_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace longhaul {
namespace {

constexpr size_t kBytesMax = 4096;

absl::StatusOr<std::string> ReadOpen(const std::string& what, int fd) {
  // Checks the file that is open, so that nobody can change it in between.
  struct stat stat {};
  if (fstat(fd, &stat) != 0) return absl::UnavailableError(what + ": " + strerror(errno));
  if (!S_ISREG(stat.st_mode)) return absl::FailedPreconditionError(what + ": no regular file");
  const mode_t allowed = stat.st_uid == 0 ? 0640 : 0600;
  if ((stat.st_mode & 0777 & ~allowed) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: others than its owner may read or change it (mode %04o), and it holds "
                        "a secret; run chmod 600 on it",
                        what, stat.st_mode & 07777));
  }
  std::string text(kBytesMax + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = read(fd, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::UnavailableError(what + ": " + strerror(errno));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > kBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": longer than ", kBytesMax, " bytes"));
  }
  text.resize(size);
  text = std::string(absl::StripAsciiWhitespace(text));
  if (text.empty()) return absl::InvalidArgumentError(what + ": the file is empty");
  for (const char c : text) {
    if (c <= ' ' || c > '~') {
      return absl::InvalidArgumentError(what + ": the file holds more than one word");
    }
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> ReadSecretFile(const std::string& flag, const std::string& path) {
  const std::string what = absl::StrCat(flag, "=", path);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::UnavailableError(what + ": " + strerror(errno));
  absl::StatusOr<std::string> text = ReadOpen(what, fd);
  close(fd);
  return text;
}

}  // namespace longhaul
