// Which address others should dial to reach this host's data port.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace longhaul::peerd {

// `listen` is the bound address. A concrete one is advertised as it is; for a wildcard the address
// of the interface that leads to the first coordinator that resolves is taken. FailedPrecondition:
// none does; use --advertise.
absl::StatusOr<std::string> AdvertisedEndpoint(const std::string& listen,
                                               const std::vector<std::string>& coordinators);

}  // namespace longhaul::peerd
