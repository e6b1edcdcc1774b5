// Who a caller is by its certificate.
#pragma once

#include <grpcpp/grpcpp.h>

#include <optional>

#include "absl/status/statusor.h"
#include "base/tls/certificate.h"

namespace longhaul::coordinator {

// The role, run and fingerprint of a caller's certificate; nullopt if the caller showed none, as in
// clear. A service may trust the answer: before a call reaches its service, the port's credentials
// (proto/control/grpc/credentials.h) have refused certificates of other CAs, and those that have
// expired or are in the CRL. InvalidArgument: the certificate cannot be read; refuse the caller.
absl::StatusOr<std::optional<tls::Identity>> CertificateCaller(const grpc::AuthContext& context);

}  // namespace longhaul::coordinator
