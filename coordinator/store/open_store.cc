#include <errno.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/store/store.h"

namespace longhaul::coordinator {
namespace {

bool MayWrite(const std::string& directory) {
  if (access(directory.c_str(), W_OK) == 0) return true;
  const std::string above = directory.substr(0, directory.rfind('/'));
  return errno == ENOENT && access(above.c_str(), W_OK) == 0;
}

}  // namespace

std::string DefaultStore(const std::string& system_directory,
                         const std::function<const char*(const char*)>& getenv) {
  const auto in = [](const std::string& directory) {
    return absl::StrCat("sqlite:", directory, "/coordinator.db");
  };
  if (MayWrite(system_directory)) return in(system_directory);
  const char* state = getenv("XDG_STATE_HOME");
  if (state != nullptr && *state == '/') return in(absl::StrCat(state, "/longhaul"));
  const char* home = getenv("HOME");
  if (home != nullptr && *home == '/') return in(absl::StrCat(home, "/.local/state/longhaul"));
  return "";
}

absl::StatusOr<std::unique_ptr<Store>> OpenStore(const std::string& spec) {
  static constexpr char kSqlite[] = "sqlite:";
  if (spec == "memory") return MakeMemoryStore();
  if (spec.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--store: no place for the default store can be written (", kStateDirectory,
                     "), and neither XDG_STATE_HOME nor HOME names a directory; give "
                     "--store=sqlite:PATH"));
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
