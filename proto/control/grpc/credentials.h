// TLS for gRPC, at both ends. The files may be replaced while connections stand: each handshake
// uses the last good contents of `files`.
//
// A server asks clients for a certificate and takes those without one, too. It checks the
// certificate with each call, not in the handshake
// (docs/adr/0042-tls-on-grpc.md says why): a call with a bad certificate ends with UNAUTHENTICATED
// and a text that says what is wrong, before any message of it is read.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/tls/seen_certificates.h"
#include "base/tls/tls_files.h"

namespace longhaul::control {

struct ServerTlsOptions {
  // Files with certificate and key. Without CAs, clients are not asked for certificates.
  std::shared_ptr<tls::Files> files;
  // Is told of the certificates of callers. May be null.
  std::shared_ptr<tls::SeenCertificates> seen;
  // Called for each call that is refused, in threads of gRPC. May be null.
  std::function<void(const tls::CertificateCheck&)> refused;
};

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(ServerTlsOptions options);

// For one channel. Servers must have a certificate that a CA in `material` has issued for the name
// or the IP address that is dialled.
std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const tls::Material& material);
// The same with what the files hold now. nullptr: in clear.
std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(tls::Files* files);

// What is wrong with the server's certificate, in the eyes of a client with TLS.
enum class ServerFault : uint8_t { kNone, kUntrusted, kOtherNames };
ServerFault ServerFaultOf(const grpc::Status& status);

// What a client may do about an error of gRPC that comes from TLS at one end or both: "; ..." to
// append to the error, or nothing. `tls`: this client speaks TLS.
std::string TlsAdvice(const grpc::Status& status, bool tls);

}  // namespace longhaul::control
