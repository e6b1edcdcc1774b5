// TLS at the server's end, with OpenSSL. For coordinator/grpc/front.cc only.
//
// It asks clients for a certificate if `material` has CAs, and takes any, or none: the certificate
// is checked with each call, not in the handshake, so that a caller hears what is wrong with it
// (docs/adr/0042-tls-on-grpc.md).
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/tls/openssl.h"
#include "base/tls/tls_files.h"

namespace longhaul::tls {

using SslContextPtr = std::unique_ptr<SSL_CTX, Freer<SSL_CTX_free>>;
using SslPtr = std::unique_ptr<SSL, Freer<SSL_free>>;

// InvalidArgument: OpenSSL does not take the certificate or the key.
absl::StatusOr<SslContextPtr> MakeServerContext(const Material& material);

// What the client has shown, in PEM; "": nothing.
struct ShownCertificate {
  std::string certificate;
  std::string chain;  // CAs between it and ours
};
ShownCertificate ShownBy(const SSL* ssl);

}  // namespace longhaul::tls
