#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "coordinator/store/store.h"

namespace longhaul::coordinator {
namespace {

constexpr char kSqlite[] = "sqlite:";

std::string FileIn(const std::string& directory) {
  return absl::StrCat(directory, "/coordinator.db");
}

// Returns why a store in the directory cannot be written or made there; "": it can.
std::string WhyNot(const std::string& directory) {
  const std::string file = FileIn(directory);
  if (access(directory.c_str(), W_OK | X_OK) != 0) {
    const std::string above = directory.substr(0, directory.rfind('/'));
    if (errno == ENOENT && access(above.c_str(), W_OK | X_OK) == 0) return "";
    return strerror(errno);
  }
  return access(file.c_str(), W_OK) == 0 || errno == ENOENT ? "" : strerror(errno);
}

// Whether there is a store in the directory, or was one. Its lock stays where the file has gone.
// EACCES and the like: this process cannot see that.
std::error_code SeeStore(const std::string& directory, bool* been) {
  *been = false;
  for (const char* const suffix : {"", "-lock"}) {
    struct stat stat {};
    if (::stat((FileIn(directory) + suffix).c_str(), &stat) == 0) {
      *been = true;
    } else if (errno != ENOENT && errno != ENOTDIR) {
      return {errno, std::generic_category()};
    }
  }
  return {};
}

// The places of a user who cannot write the system's directory, the one to take first.
std::vector<std::string> UserDirectories(const std::function<const char*(const char*)>& getenv) {
  std::vector<std::string> directories;
  const char* const state = getenv("XDG_STATE_HOME");
  if (state != nullptr && *state == '/') directories.push_back(absl::StrCat(state, "/longhaul"));
  const char* const home = getenv("HOME");
  if (home != nullptr && *home == '/') {
    directories.push_back(absl::StrCat(home, "/.local/state/longhaul"));
  }
  return directories;
}

}  // namespace

absl::StatusOr<std::string> DefaultStore(const std::string& system_directory,
                                         const std::function<const char*(const char*)>& getenv) {
  constexpr char kElsewhere[] =
      "a coordinator that began elsewhere, with an empty store, would remove all members";
  const std::string file = FileIn(system_directory);
  const std::string why_not = WhyNot(system_directory);
  bool been = false;
  if (const std::error_code error = SeeStore(system_directory, &been)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot see whether there is a store at ", file, ": ", error.message(), "; ", kElsewhere,
        ": let user ", getuid(), " read that directory, or name another store with --store"));
  }
  if (been && !why_not.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write the store ", file, ": ", why_not, "; ", kElsewhere,
                     ": let user ", getuid(), " write it, or name another store with --store"));
  }
  if (been) return kSqlite + file;
  const std::vector<std::string> own = UserDirectories(getenv);
  for (const std::string& directory : own) {
    // This user's coordinator may have begun when it could not write the system's directory.
    if (SeeStore(directory, &been) || !been) continue;
    Log(LogLevel::kWarning, "the store is that of an earlier start" +
                                LogField("store", FileIn(directory)) +
                                LogField("instead_of", file));
    return kSqlite + FileIn(directory);
  }
  if (why_not.empty()) return kSqlite + file;
  if (own.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--store: the default store cannot be written (", file, ": ", why_not,
                     "), and neither XDG_STATE_HOME nor HOME names a directory; give "
                     "--store=sqlite:PATH"));
  }
  const std::string instead = FileIn(own.front());
  Log(LogLevel::kWarning, "the default store cannot be made; a new one is elsewhere" +
                              LogField("store", instead) + LogField("instead_of", file) +
                              LogField("reason", why_not));
  // The last directory is made with the store. A new user has not the ones above it either.
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(own.front()).parent_path(), error);
  return kSqlite + instead;
}

absl::StatusOr<std::unique_ptr<Store>> OpenStore(const std::string& spec) {
  if (spec == "memory") return MakeMemoryStore();
  if (spec.empty()) {
    return absl::InvalidArgumentError("--store: no store is named; give --store=sqlite:PATH");
  }
  if (absl::StartsWith(spec, kSqlite)) {
    const std::string path = spec.substr(sizeof kSqlite - 1);
    if (!path.empty()) return OpenSqliteStore(path);
    return absl::InvalidArgumentError("--store=sqlite: needs a path; write sqlite:/path/to/file");
  }
  if (spec == "etcd" || absl::StartsWith(spec, "etcd:")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--store=", spec,
                     ": etcd is not in this version; use sqlite:PATH for a coordinator that "
                     "survives its restart"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--store=", spec, ": no such store; write memory or sqlite:PATH"));
}

}  // namespace longhaul::coordinator
