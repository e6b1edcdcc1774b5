#include "coordinator/grpc/certificate_caller.h"

#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"

namespace longhaul::coordinator {

absl::StatusOr<std::optional<tls::Identity>> CertificateCaller(const grpc::AuthContext& context) {
  const std::vector<grpc::string_ref> pem =
      context.FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
  if (pem.empty()) return std::optional<tls::Identity>();
  LH_ASSIGN_OR_RETURN(tls::Identity identity,
                      tls::IdentityOf(std::string(pem.front().data(), pem.front().size())));
  return std::optional<tls::Identity>(std::move(identity));
}

}  // namespace longhaul::coordinator
