// Where the coordinator's records survive a restart.
//
// One owner thread, the coordinator loop's; calls block. Stores:
//   memory       nothing survives; for tests and runs that may be lost with the coordinator
//   sqlite:PATH  one file, every Apply() on disk before it returns
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/core/records.h"

namespace longhaul::coordinator {

class Store {
 public:
  virtual ~Store() = default;

  // Everything that was applied. DataLoss: the store holds what no coordinator wrote.
  virtual absl::StatusOr<Records> Load() = 0;

  // Applies all mutations in order as one transaction: after OK they are durable, after an error
  // none of them is, or, where the error came at the very end, it is not known whether they are.
  // A coordinator that sees an error therefore ends; its successor reads what is true.
  virtual absl::Status Apply(const std::vector<Mutation>& mutations) = 0;

  // For people: "memory", "sqlite:/var/lib/longhaul/coordinator.db".
  virtual std::string Name() const = 0;
};

std::unique_ptr<Store> MakeMemoryStore();

// Opens or creates the file (and its directory, for the owner only), and holds `PATH-lock`
// exclusively until destroyed. Errors:
// FailedPrecondition: another coordinator has it, or a newer version wrote it, or it is a file of
// another program; DataLoss: corrupt; Unavailable: it cannot be opened.
absl::StatusOr<std::unique_ptr<Store>> OpenSqliteStore(const std::string& path);

// The system's place for the store: the `system_directory` of the daemon.
inline constexpr char kStateDirectory[] = "/var/lib/longhaul";

// What --store is where nobody gives it: a file in `system_directory` if this process may write
// there (the directory is made if it is missing), else in $XDG_STATE_HOME/longhaul, else in
// $HOME/.local/state/longhaul. "": there is no such place.
std::string DefaultStore(const std::string& system_directory,
                         const std::function<const char*(const char*)>& getenv);

// `spec` is the value of --store. InvalidArgument: it names no store that this version has.
absl::StatusOr<std::unique_ptr<Store>> OpenStore(const std::string& spec);

}  // namespace longhaul::coordinator
