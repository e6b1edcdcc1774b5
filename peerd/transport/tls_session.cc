#include "peerd/transport/tls_session.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/x509.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

// All sessions of a process have the same kind of pointer at this place of their SSL.
int SessionIndex() {
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

// Returns a certificate of this key that it has signed itself.
std::unique_ptr<X509, decltype(&X509_free)> CertificateOf(EVP_PKEY* key) {
  std::unique_ptr<X509, decltype(&X509_free)> certificate(X509_new(), &X509_free);
  X509* const x = certificate.get();
  // Nobody looks at the dates.
  constexpr long kSecondsValid = long{10} * 365 * 86400;
  LH_CHECK(X509_set_version(x, X509_VERSION_3) == 1 &&
           ASN1_INTEGER_set(X509_get_serialNumber(x), 1) == 1 &&
           X509_gmtime_adj(X509_getm_notBefore(x), -86400) != nullptr &&
           X509_gmtime_adj(X509_getm_notAfter(x), kSecondsValid) != nullptr &&
           X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC,
                                      reinterpret_cast<const uint8_t*>("longhaul peer"), -1, -1,
                                      0) == 1 &&
           X509_set_issuer_name(x, X509_get_subject_name(x)) == 1 && X509_set_pubkey(x, key) == 1 &&
           X509_sign(x, key, nullptr) > 0)
      << "OpenSSL makes no certificate";
  return certificate;
}

// Returns the Ed25519 key of a certificate; "": it has another kind of key.
std::string KeyOf(X509* certificate) {
  const EVP_PKEY* const key = certificate == nullptr ? nullptr : X509_get0_pubkey(certificate);
  if (key == nullptr || EVP_PKEY_get_base_id(key) != EVP_PKEY_ED25519) return "";
  std::string raw(kPublicKeyBytes, '\0');
  size_t bytes = raw.size();
  const bool got =
      EVP_PKEY_get_raw_public_key(key, reinterpret_cast<uint8_t*>(raw.data()), &bytes) == 1;
  return got && bytes == raw.size() ? raw : "";
}

std::string Short(const std::string& key) {
  return key.empty() ? "no Ed25519 key" : absl::BytesToHexString(key.substr(0, 8)) + "...";
}

}  // namespace

TlsContext::TlsContext(const Identity& identity)
    : context_(SSL_CTX_new(TLS_method()), &SSL_CTX_free) {
  SSL_CTX* const c = context_.get();
  LH_CHECK(c != nullptr) << "OpenSSL makes no TLS context";
  const auto certificate = CertificateOf(identity.key());
  // A client without AES instructions prefers ChaCha20, and the server follows it then.
  SSL_CTX_set_options(c, SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA |
                             SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_verify(c, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_cert_verify_callback(c, &TlsSession::Verify, nullptr);
  SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
  LH_CHECK(
      SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) == 1 &&
      SSL_CTX_set_max_proto_version(c, TLS1_3_VERSION) == 1 &&
      SSL_CTX_set_ciphersuites(c, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") == 1 &&
      SSL_CTX_set1_groups_list(c, "X25519") == 1 && SSL_CTX_set1_sigalgs_list(c, "ed25519") == 1 &&
      SSL_CTX_set_num_tickets(c, 0) == 1 && SSL_CTX_use_certificate(c, certificate.get()) == 1 &&
      SSL_CTX_use_PrivateKey(c, identity.key()) == 1)
      << "OpenSSL lacks what peers need";
}

TlsSession::TlsSession(const TlsContext& context, Side side, std::string peer_key)
    : peer_key_(std::move(peer_key)),
      ssl_(SSL_new(context.get()), &SSL_free),
      in_(BIO_new(BIO_s_mem())),
      out_(BIO_new(BIO_s_mem())) {
  LH_CHECK(ssl_ != nullptr && in_ != nullptr && out_ != nullptr);
  SSL_set_bio(ssl_.get(), in_, out_);
  LH_CHECK(SSL_set_ex_data(ssl_.get(), SessionIndex(), this) == 1);
  if (side == Side::kClient) {
    SSL_set_connect_state(ssl_.get());
  } else {
    SSL_set_accept_state(ssl_.get());
  }
}

// Takes the place of OpenSSL's check of names, dates and issuers. TLS itself checks that the other
// side has the private key.
int TlsSession::Verify(X509_STORE_CTX* store, void*) {
  const auto* const ssl =
      static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto* const self = static_cast<TlsSession*>(SSL_get_ex_data(ssl, SessionIndex()));
  const std::string key = KeyOf(X509_STORE_CTX_get0_cert(store));
  if (!self->peer_key_.empty() && key == self->peer_key_) return 1;
  self->why_ = absl::StrCat("the other side has the key ", Short(key),
                            " and the epoch names the key ", Short(self->peer_key_));
  X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
  return 0;
}

void TlsSession::Feed(std::span<const uint8_t> bytes) {
  LH_CHECK(bytes.size() <= INT_MAX);
  LH_CHECK(BIO_write(in_, bytes.data(), static_cast<int>(bytes.size())) ==
           static_cast<int>(bytes.size()));
}

bool TlsSession::has_output() const { return BIO_ctrl_pending(out_) > 0; }

std::vector<uint8_t> TlsSession::TakeOutput() {
  std::vector<uint8_t> bytes(BIO_ctrl_pending(out_));
  if (!bytes.empty()) {
    LH_CHECK(BIO_read(out_, bytes.data(), static_cast<int>(bytes.size())) ==
             static_cast<int>(bytes.size()));
  }
  return bytes;
}

absl::Status TlsSession::Shake() {
  ERR_clear_error();
  const int value = SSL_do_handshake(ssl_.get());
  if (value == 1 || SSL_get_error(ssl_.get(), value) == SSL_ERROR_WANT_READ) {
    return absl::OkStatus();
  }
  return Fault("TLS handshake failed");
}

absl::StatusOr<size_t> TlsSession::Read(std::span<uint8_t> room) {
  if (BIO_ctrl_pending(in_) == 0 && SSL_pending(ssl_.get()) == 0) return size_t{0};
  ERR_clear_error();
  size_t bytes = 0;
  const int value = SSL_read_ex(ssl_.get(), room.data(), room.size(), &bytes);
  if (value == 1) return bytes;
  if (SSL_get_error(ssl_.get(), value) == SSL_ERROR_WANT_READ) return size_t{0};
  return Fault("TLS record refused");
}

bool TlsSession::Write(std::span<const uint8_t> text) {
  ERR_clear_error();
  size_t bytes = 0;
  return text.empty() ||
         (SSL_write_ex(ssl_.get(), text.data(), text.size(), &bytes) == 1 && bytes == text.size());
}

KeySecret TlsSession::Export(const std::string& label) const {
  KeySecret secret;
  LH_CHECK(SSL_export_keying_material(ssl_.get(), secret.data(), KeySecret::kBytes, label.data(),
                                      label.size(), nullptr, 0, 0) == 1);
  return secret;
}

Aead TlsSession::aead() const {
  const SSL_CIPHER* const cipher = SSL_get_current_cipher(ssl_.get());
  return SSL_CIPHER_get_protocol_id(cipher) == 0x1303 ? Aead::kChaCha20Poly1305 : Aead::kAes128Gcm;
}

absl::Status TlsSession::Fault(const char* what) const {
  if (!why_.empty()) return absl::UnauthenticatedError(absl::StrCat(what, ": ", why_));
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  return absl::UnauthenticatedError(
      absl::StrCat(what, ": ", reason != nullptr ? reason : "the other side ended the session"));
}

}  // namespace longhaul::peerd
