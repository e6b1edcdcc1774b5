#include "proto/control/grpc/credentials.h"

#include "absl/strings/match.h"

namespace longhaul::control {
std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const tls::Material& material) {
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = material.ca;
  options.pem_private_key = material.key;
  options.pem_cert_chain = material.cert;
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(tls::Files* files) {
  if (files == nullptr) return grpc::InsecureChannelCredentials();
  files->Refresh();
  return MakeChannelCredentials(*files->Current());
}

ServerFault ServerFaultOf(const grpc::Status& status) {
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return ServerFault::kNone;
  const std::string& text = status.error_message();
  if (absl::StrContains(text, "not in peer certificate")) return ServerFault::kOtherNames;
  if (absl::StrContains(text, "certificate verify failed")) return ServerFault::kUntrusted;
  return ServerFault::kNone;
}

std::string TlsAdvice(const grpc::Status& status, bool tls) {
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return "";
  const std::string& text = status.error_message();
  if (!tls) {
    // Through a tunnel, this end may call an address of loopback.
    return absl::StrContains(text, "Socket closed") || absl::StrContains(text, "reset by peer")
               ? "; if the coordinator speaks TLS there, give --tls-ca"
               : "";
  }
  const ServerFault fault = ServerFaultOf(status);
  if (fault == ServerFault::kOtherNames) {
    return "; the coordinator's certificate is for other names: dial one of these, or issue it "
           "anew with --host";
  }
  if (fault == ServerFault::kUntrusted) {
    return "; no CA in --tls-ca has issued the coordinator's certificate, or it has expired";
  }
  if (absl::StrContains(text, "wrong version number")) {
    return "; the coordinator speaks in clear there: start it with --tls-cert and --tls-key";
  }
  return "";
}

}  // namespace longhaul::control
