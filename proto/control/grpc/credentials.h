// TLS of clients of gRPC. The files may be replaced while connections stand: each handshake uses
// the last good contents. At the server's end TLS is coordinator/grpc/front.h.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/tls/tls_files.h"

namespace longhaul::control {

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
