#include "base/tls/server_context.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace longhaul::tls {
namespace {

// Of the messages with the client's certificates.
constexpr int kCertificateBytesMax = 16 << 10;
// For clients that have no TLS 1.3.
constexpr char kCiphers[] = "ECDHE+AESGCM:ECDHE+CHACHA20";

int ChooseH2(SSL*, const unsigned char** out, unsigned char* out_length, const unsigned char* in,
             unsigned int in_length, void*) {
  static constexpr unsigned char kH2[] = {2, 'h', '2'};
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, out_length, kH2, sizeof kH2, in, in_length) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

int AcceptAny(X509_STORE_CTX*, void*) { return 1; }

absl::Status Failed(const char* what) {
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", LastError()));
}

std::string Pem(X509* certificate) {
  const BioPtr bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || PEM_write_bio_X509(bio.get(), certificate) != 1) return "";
  return Written(bio.get());
}

}  // namespace

absl::StatusOr<SslContextPtr> MakeServerContext(const Material& material) {
  SslContextPtr context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return Failed("cannot make a context for TLS");
  SSL_CTX* const ctx = context.get();
  SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION);
  SSL_CTX_set_cipher_list(ctx, kCiphers);
  SSL_CTX_set_options(ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_num_tickets(ctx, 0);
  SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                            SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_max_cert_list(ctx, kCertificateBytesMax);
  SSL_CTX_set_alpn_select_cb(ctx, ChooseH2, nullptr);
  if (material.trust != nullptr) {
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER, nullptr);
    SSL_CTX_set_cert_verify_callback(ctx, AcceptAny, nullptr);
  }
  const BioPtr reader = Reader(material.cert);
  const CertificatePtr own = ReadCertificate(reader.get());
  if (own == nullptr || SSL_CTX_use_certificate(ctx, own.get()) != 1) {
    return Failed("the certificate cannot be used");
  }
  while (const CertificatePtr between = ReadCertificate(reader.get())) {
    if (SSL_CTX_add1_chain_cert(ctx, between.get()) != 1) {
      return Failed("a certificate of the chain cannot be used");
    }
  }
  ERR_clear_error();
  const KeyPtr key = ReadKey(material.key);
  if (key == nullptr || SSL_CTX_use_PrivateKey(ctx, key.get()) != 1) {
    return Failed("the private key cannot be used");
  }
  return context;
}

ShownCertificate ShownBy(const SSL* ssl) {
  ShownCertificate shown;
  const CertificatePtr certificate(SSL_get1_peer_certificate(ssl));
  if (certificate == nullptr) return shown;
  shown.certificate = Pem(certificate.get());
  // A server's chain does not have the client's own certificate.
  STACK_OF(X509)* const chain = SSL_get_peer_cert_chain(ssl);
  for (int i = 0; i < sk_X509_num(chain); ++i) shown.chain += Pem(sk_X509_value(chain, i));
  return shown;
}

}  // namespace longhaul::tls
