#include "base/tls/successor.h"

#include <openssl/ssl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/tls/openssl.h"

namespace longhaul::tls {
namespace {

using ContextPtr = std::unique_ptr<SSL_CTX, Freer<SSL_CTX_free>>;
using SslPtr = std::unique_ptr<SSL, Freer<SSL_free>>;

// A handshake takes two turns of each side. What does not end is no handshake.
constexpr int kTurnsMax = 16;

std::string TextOf(const GENERAL_NAME* name) {
  const BioPtr bio(BIO_new(BIO_s_mem()));
  GENERAL_NAME_print(bio.get(), const_cast<GENERAL_NAME*>(name));
  return Written(bio.get());
}

std::set<std::string> NamesOf(const std::string& cert_pem) {
  std::set<std::string> names;
  const CertificatePtr certificate = ReadCertificate(Reader(cert_pem).get());
  if (certificate == nullptr) return names;
  const NamesPtr all(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate.get(), NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; all != nullptr && i < sk_GENERAL_NAME_num(all.get()); ++i) {
    names.insert(TextOf(sk_GENERAL_NAME_value(all.get(), i)));
  }
  ERR_clear_error();
  return names;
}

ContextPtr ServerOf(const Shown& shown) {
  ContextPtr context(SSL_CTX_new(TLS_server_method()));
  const BioPtr chain = Reader(shown.cert);
  const CertificatePtr own = ReadCertificate(chain.get());
  const KeyPtr key = ReadKey(shown.key);
  if (own == nullptr || key == nullptr || SSL_CTX_use_certificate(context.get(), own.get()) != 1 ||
      SSL_CTX_use_PrivateKey(context.get(), key.get()) != 1) {
    return nullptr;
  }
  while (const CertificatePtr next = ReadCertificate(chain.get())) {
    SSL_CTX_add1_chain_cert(context.get(), next.get());
  }
  return context;
}

ContextPtr ClientOf(const Shown& shown) {
  ContextPtr context(SSL_CTX_new(TLS_client_method()));
  if (shown.ca.empty()) return context;
  X509_STORE* const store = SSL_CTX_get_cert_store(context.get());
  const BioPtr bio = Reader(shown.ca);
  while (const CertificatePtr ca = ReadCertificate(bio.get())) X509_STORE_add_cert(store, ca.get());
  X509_STORE_set_flags(store, X509_V_FLAG_PARTIAL_CHAIN);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  return context;
}

// Lets one side of a handshake do what it can. False: it has failed.
bool Turn(SSL* ssl) {
  const int value = SSL_do_handshake(ssl);
  return value == 1 || SSL_get_error(ssl, value) == SSL_ERROR_WANT_READ;
}

// Returns why a handshake of the program with itself fails; "": it does not.
std::string WhyNoServer(const Shown& shown) {
  const ContextPtr server_context = ServerOf(shown);
  const ContextPtr client_context = ClientOf(shown);
  if (server_context == nullptr) return LastError();
  const SslPtr server(SSL_new(server_context.get()));
  const SslPtr client(SSL_new(client_context.get()));
  BIO* at_server = nullptr;
  BIO* at_client = nullptr;
  if (BIO_new_bio_pair(&at_server, 0, &at_client, 0) != 1) return LastError();
  SSL_set_bio(server.get(), at_server, at_server);
  SSL_set_bio(client.get(), at_client, at_client);
  SSL_set_accept_state(server.get());
  SSL_set_connect_state(client.get());
  ERR_clear_error();
  bool alive = true;
  for (int turn = 0; alive && turn < kTurnsMax; ++turn) {
    alive = Turn(client.get()) && Turn(server.get());
    if (SSL_is_init_finished(client.get()) == 1 && SSL_is_init_finished(server.get()) == 1) {
      ERR_clear_error();
      return "";
    }
  }
  const long verified = SSL_get_verify_result(client.get());
  const std::string error = LastError();
  return verified == X509_V_OK ? error : X509_verify_cert_error_string(verified);
}

// The same for the program as a client of servers that trust the CAs in `shown`.
std::string WhyNoClient(const Shown& shown) {
  if (shown.trust == nullptr) return "";
  const CertificateCheck check = shown.trust->Check(shown.cert, shown.cert);
  return check.ok ? "" : check.why;
}

}  // namespace

absl::Status CheckSuccessor(const Shown& old, const Shown& now) {
  if (old.trust != nullptr && now.trust != nullptr) {
    LH_RETURN_IF_ERROR(now.trust->CheckRevokesAsMuchAs(*old.trust));
  }
  if (old.cert.empty() || now.cert.empty()) return absl::OkStatus();
  const std::set<std::string> before = NamesOf(old.cert);
  const std::set<std::string> after = NamesOf(now.cert);
  std::set<std::string> lost;
  std::set_difference(before.begin(), before.end(), after.begin(), after.end(),
                      std::inserter(lost, lost.end()));
  if (!lost.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the new certificate lacks names of the one in use (", absl::StrJoin(lost, ", "),
        "), and whoever relies on them would be cut off: issue it for these names, too, or restart "
        "this program with it if they have to go"));
  }
  for (const auto why_not : {WhyNoServer, WhyNoClient}) {
    const std::string why = why_not(now);
    if (why.empty() || !why_not(old).empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the new certificate fails a handshake of this program with itself (", why,
                     "), and the one in use passes: give the CAs that have issued it, too"));
  }
  return absl::OkStatus();
}

}  // namespace longhaul::tls
