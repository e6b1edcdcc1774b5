// The address at which other peers reach this host's data port.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace longhaul::peerd {

// Derives the address from `listen`, the bound address. A concrete `listen` is the answer itself.
// For a wildcard the answer is this host's own address on the route to a coordinator: the first in
// the list that resolves and has a route. FailedPrecondition: no coordinator does; the text
// names --advertise.
absl::StatusOr<std::string> AdvertisedEndpoint(const std::string& listen,
                                               const std::vector<std::string>& coordinators);

// The address that a peer names in Hello. The peer derives it anew for each control stream, because
// the host may have another address by then. Any thread may call it.
class AdvertisedAddress {
 public:
  using Derive =
      std::function<absl::StatusOr<std::string>(const std::vector<std::string>& coordinators)>;

  // `fixed` is the value of --advertise and never changes. Empty: `derive` gives the address.
  AdvertisedAddress(std::string fixed, Derive derive);

  // Derives the address anew, which may block if a coordinator has a name. If that fails, the
  // address stays as it was and the result is OK. An error comes only if no address was ever known.
  absl::Status Refresh(const std::vector<std::string>& coordinators);
  // host:port; empty: no address was ever known.
  std::string Get() const;

 private:
  const Derive derive_;  // null: the address is fixed
  mutable Mutex mutex_;
  std::string endpoint_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace longhaul::peerd
