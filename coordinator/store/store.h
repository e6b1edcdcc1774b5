// Where the coordinator's records survive a restart.
//
// The coordinator loop's thread owns the store. Calls block. The stores are:
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
#include "coordinator/tokens/token_record.h"

namespace longhaul::coordinator {

class Store {
 public:
  virtual ~Store() = default;

  // Returns all records. DataLoss: the store holds something that no coordinator writes.
  virtual absl::StatusOr<Records> Load() = 0;

  // Applies all mutations in order, as one transaction. OK: they are durable. After an error none
  // of them is durable, except that an error at the very end leaves it open whether all of them
  // are. Therefore a coordinator ends after an error, and the next one reads what the store really
  // holds.
  virtual absl::Status Apply(const std::vector<Mutation>& mutations) = 0;

  // Join tokens. They are no part of Records, because the core knows nothing of them. LoadTokens()
  // has the errors of Load(), and a change those of Apply() above.
  virtual absl::StatusOr<std::vector<TokenRecord>> LoadTokens() = 0;
  virtual absl::Status ChangeTokens(const TokenChange& change) = 0;

  // The store's name for people: "memory", "sqlite:/var/lib/longhaul/coordinator.db".
  virtual std::string Name() const = 0;
};

std::unique_ptr<Store> MakeMemoryStore();

// Opens the file, or creates it and its directory, for the owner only. The store holds the lock
// `PATH-lock` until it is destroyed. A store of an older schema N is migrated; a copy of it stays
// in `PATH-schema-N`. After an error the file is as it was. Errors:
//   FailedPrecondition  another coordinator uses the file; another program wrote it, or a newer
//                       release, or one that is too old; it is not a regular file; or its file
//                       system has no write-ahead log
//   DataLoss            the file is corrupt
//   Unavailable         the file cannot be opened, or not be migrated
absl::StatusOr<std::unique_ptr<Store>> OpenSqliteStore(const std::string& path);

// The `system_directory` that the daemon gives to DefaultStore().
inline constexpr char kStateDirectory[] = "/var/lib/longhaul";

// Returns the default of --store. A store that is there already wins, in this order:
//   `system_directory`, $XDG_STATE_HOME/longhaul, $HOME/.local/state/longhaul
// Where there has never been one, a new one is for the first of these directories if this process
// may write there or may make it, else for the next one that the environment names; the log says so
// at WARNING. Makes only the directories above the latter. Errors:
//   FailedPrecondition  there is a store in `system_directory`, or may be one, and this process
//                       cannot write it. An empty one elsewhere would remove all members
//   InvalidArgument     no place is possible
absl::StatusOr<std::string> DefaultStore(const std::string& system_directory,
                                         const std::function<const char*(const char*)>& getenv);

// Opens the store that `spec`, the value of --store, names. InvalidArgument: this version has no
// such store. Other errors are those of OpenSqliteStore().
absl::StatusOr<std::unique_ptr<Store>> OpenStore(const std::string& spec);

}  // namespace longhaul::coordinator
