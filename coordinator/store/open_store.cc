#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/store/store.h"

namespace longhaul::coordinator {

absl::StatusOr<std::unique_ptr<Store>> OpenStore(const std::string& spec) {
  static constexpr char kSqlite[] = "sqlite:";
  if (spec == "memory") return MakeMemoryStore();
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
