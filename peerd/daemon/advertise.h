// Which address others should dial to reach this host's data port.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace longhaul::peerd {

// `listen` is the bound address. A concrete one is advertised as it is; for a wildcard the address
// of the interface that leads to the first coordinator that resolves is taken. FailedPrecondition:
// none does; use --advertise.
absl::StatusOr<std::string> AdvertisedEndpoint(const std::string& listen,
                                               const std::vector<std::string>& coordinators);

// What a peer says of itself each time that it attaches to a coordinator: the host may have another
// address by then. Any thread.
class AdvertisedAddress {
 public:
  using Derive = std::function<absl::StatusOr<std::string>()>;

  // `fixed`: --advertise, which stays what it is; empty: it is derived.
  AdvertisedAddress(std::string fixed, Derive derive);

  // Derives it anew. A failure, with which no attach may end, leaves it as it was, unless it was
  // never known.
  absl::Status Refresh();
  // host:port; empty: never known.
  std::string Get() const;

 private:
  const Derive derive_;  // null: it is fixed
  mutable Mutex mutex_;
  std::string endpoint_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace longhaul::peerd
