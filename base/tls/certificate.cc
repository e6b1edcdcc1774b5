#include "base/tls/certificate.h"

#include <time.h>

#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/tls/openssl.h"

namespace longhaul::tls {
namespace {

// A chain of a stranger costs one check of a signature for each certificate.
constexpr size_t kChainMax = 8;

absl::Status Bad(const std::string& what) { return absl::InvalidArgumentError(what); }

std::string CommonName(X509* certificate) {
  const X509_NAME* subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at < 0) return "";
  unsigned char* text = nullptr;
  const int size =
      ASN1_STRING_to_UTF8(&text, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
  if (size < 0) return "";
  std::string name(reinterpret_cast<char*>(text), static_cast<size_t>(size));
  OPENSSL_free(text);
  return name;
}

std::string Fingerprint(X509* certificate) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  if (X509_digest(certificate, EVP_sha256(), digest, &size) != 1) return "";
  return absl::BytesToHexString(std::string(reinterpret_cast<char*>(digest), size));
}

std::vector<std::string> Uris(X509* certificate) {
  std::vector<std::string> uris;
  const NamesPtr names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_IA5STRING* uri = name->d.uniformResourceIdentifier;
    uris.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)),
                      static_cast<size_t>(ASN1_STRING_length(uri)));
  }
  return uris;
}

absl::Status Take(const std::string& uri, const char* prefix, std::string* value) {
  if (!absl::StartsWith(uri, prefix)) return absl::OkStatus();
  const std::string named = uri.substr(strlen(prefix));
  if (named.empty() || named.find('\0') != std::string::npos) {
    return Bad(absl::StrCat("the certificate's URI '", absl::CHexEscape(uri), "' names nothing"));
  }
  if (!value->empty()) {
    return Bad(absl::StrCat("the certificate has several names that begin with ", prefix));
  }
  *value = named;
  return absl::OkStatus();
}

absl::StatusOr<Subject> Read(X509* certificate) {
  Subject identity;
  identity.name = CommonName(certificate);
  identity.fingerprint = Fingerprint(certificate);
  for (const std::string& uri : Uris(certificate)) {
    if (absl::Status taken = Take(uri, kRoleUri, &identity.role); !taken.ok()) return taken;
    if (absl::Status taken = Take(uri, kRunUri, &identity.run); !taken.ok()) return taken;
  }
  return identity;
}

// Reads certificates up to the end of `pem`.
absl::StatusOr<std::vector<CertificatePtr>> ReadAll(const std::string& pem) {
  std::vector<CertificatePtr> all;
  ERR_clear_error();
  const BioPtr bio = Reader(pem);
  while (CertificatePtr next = ReadCertificate(bio.get())) all.push_back(std::move(next));
  if (!AtEnd()) return Bad("a certificate in it cannot be read");
  if (all.empty()) return Bad("it has no certificate in PEM form");
  return all;
}

std::string TimeText(const ASN1_TIME* time) {
  struct tm parts {};
  char text[32];
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "an unknown time";
  strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

CertificateRefusal RefusalOf(int error) {
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return CertificateRefusal::kExpired;
    case X509_V_ERR_CERT_REVOKED:
      return CertificateRefusal::kRevoked;
    default:
      return CertificateRefusal::kUntrusted;
  }
}

std::string Sentence(int error, X509* certificate) {
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return absl::StrCat("your certificate expired at ", TimeText(X509_get0_notAfter(certificate)),
                          ": get a new one");
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return absl::StrCat("your certificate is not valid before ",
                          TimeText(X509_get0_notBefore(certificate)), ": compare the clocks");
    case X509_V_ERR_CERT_REVOKED:
      return "your certificate was revoked: get a new one";
    default:
      return absl::StrCat("your certificate is not trusted (", X509_verify_cert_error_string(error),
                          "): use one that a CA in the coordinator's --tls-ca has issued for "
                          "clients");
  }
}

// A CA without a CRL has revoked nothing. A CRL counts at any time: to refuse everybody because its
// successor is late, or because clocks differ, would stop a run.
int AllowAnyTimeOfCrls(int ok, X509_STORE_CTX* context) {
  switch (X509_STORE_CTX_get_error(context)) {
    case X509_V_ERR_UNABLE_TO_GET_CRL:
    case X509_V_ERR_CRL_HAS_EXPIRED:
    case X509_V_ERR_CRL_NOT_YET_VALID:
      X509_STORE_CTX_set_error(context, X509_V_OK);
      return 1;
    default:
      return ok;
  }
}

bool SignedByOne(X509_CRL* crl, const std::vector<CertificatePtr>& cas) {
  for (const CertificatePtr& ca : cas) {
    if (X509_NAME_cmp(X509_CRL_get_issuer(crl), X509_get_subject_name(ca.get())) == 0 &&
        X509_CRL_verify(crl, X509_get0_pubkey(ca.get())) == 1) {
      return true;
    }
  }
  ERR_clear_error();
  return false;
}

std::string IssuerOf(X509_CRL* crl) {
  const BioPtr bio(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(bio.get(), X509_CRL_get_issuer(crl), 0, XN_FLAG_RFC2253);
  return Written(bio.get());
}

bool ListsAllOf(X509_CRL* crl, X509_CRL* other) {
  const STACK_OF(X509_REVOKED)* const entries = X509_CRL_get_REVOKED(other);
  for (int i = 0; i < sk_X509_REVOKED_num(entries); ++i) {
    const ASN1_INTEGER* const serial =
        X509_REVOKED_get0_serialNumber(sk_X509_REVOKED_value(entries, i));
    X509_REVOKED* found = nullptr;
    if (X509_CRL_get0_by_serial(crl, &found, const_cast<ASN1_INTEGER*>(serial)) == 0) return false;
  }
  return true;
}

CertificateCheck Refuse(CertificateRefusal refusal, std::string why) {
  CertificateCheck verdict;
  verdict.refusal = refusal;
  verdict.why = std::move(why);
  return verdict;
}

}  // namespace

const char* RefusalName(CertificateRefusal refusal) {
  switch (refusal) {
    case CertificateRefusal::kMalformed:
      return "malformed";
    case CertificateRefusal::kUntrusted:
      return "untrusted";
    case CertificateRefusal::kExpired:
      return "expired";
    case CertificateRefusal::kRevoked:
      return "revoked";
  }
  return "unknown";
}

absl::StatusOr<Subject> SubjectOf(const std::string& pem) {
  const CertificatePtr certificate = ReadCertificate(Reader(pem).get());
  ERR_clear_error();
  if (certificate == nullptr) return Bad("the certificate cannot be read");
  return Read(certificate.get());
}

struct Trust::Impl {
  StorePtr store{X509_STORE_new()};
  std::vector<CertificatePtr> cas;
  std::vector<CrlPtr> crls;
};

Trust::Trust(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Trust::~Trust() = default;

absl::StatusOr<std::shared_ptr<const Trust>> Trust::Make(const std::string& ca_pem,
                                                         const std::string& crl_pem) {
  absl::StatusOr<std::vector<CertificatePtr>> cas = ReadAll(ca_pem);
  if (!cas.ok()) return Bad(absl::StrCat("the file of CAs: ", cas.status().message()));
  auto impl = std::make_unique<Impl>();
  for (const CertificatePtr& ca : *cas) {
    if (X509_STORE_add_cert(impl->store.get(), ca.get()) != 1) return Bad(LastError());
  }
  const BioPtr bio = Reader(crl_pem);
  while (CrlPtr crl{PEM_read_bio_X509_CRL(bio.get(), nullptr, NoPassword, nullptr)}) {
    if (!SignedByOne(crl.get(), *cas)) {
      return Bad("the CRL is not signed by a CA in the file of CAs");
    }
    if (X509_STORE_add_crl(impl->store.get(), crl.get()) != 1) return Bad(LastError());
    impl->crls.push_back(std::move(crl));
  }
  if (!crl_pem.empty() && (!AtEnd() || impl->crls.empty())) return Bad("the CRL cannot be read");
  ERR_clear_error();
  X509_STORE_set_verify_cb(impl->store.get(), AllowAnyTimeOfCrls);
  // A CA of ours may itself have been issued by a CA that is not ours.
  X509_STORE_set_flags(impl->store.get(), X509_V_FLAG_PARTIAL_CHAIN);
  if (!impl->crls.empty()) {
    X509_STORE_set_flags(impl->store.get(), X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL);
  }
  impl->cas = *std::move(cas);
  return std::shared_ptr<const Trust>(new Trust(std::move(impl)));
}

CertificateCheck Trust::Check(const std::string& certificate_pem,
                              const std::string& chain_pem) const {
  const CertificatePtr certificate = ReadCertificate(Reader(certificate_pem).get());
  ERR_clear_error();
  if (certificate == nullptr) {
    return Refuse(CertificateRefusal::kMalformed, "your certificate cannot be read");
  }
  const StackPtr chain(sk_X509_new_null());
  const BioPtr bio = Reader(chain_pem);
  for (size_t i = 0; i <= kChainMax; ++i) {
    CertificatePtr next = ReadCertificate(bio.get());
    if (next == nullptr) break;
    if (i == kChainMax) {
      return Refuse(CertificateRefusal::kMalformed, "the chain of your certificate is too long");
    }
    sk_X509_push(chain.get(), next.release());
  }
  ERR_clear_error();
  absl::StatusOr<Subject> identity = Read(certificate.get());
  if (!identity.ok()) {
    return Refuse(CertificateRefusal::kMalformed, std::string(identity.status().message()));
  }
  const StoreContextPtr context(X509_STORE_CTX_new());
  CertificateCheck verdict;
  verdict.identity = *std::move(identity);
  if (X509_STORE_CTX_init(context.get(), impl_->store.get(), certificate.get(), chain.get()) != 1 ||
      X509_STORE_CTX_set_default(context.get(), "ssl_client") != 1) {
    verdict.refusal = CertificateRefusal::kUntrusted;
    verdict.why = LastError();
    return verdict;
  }
  verdict.ok = X509_verify_cert(context.get()) == 1;
  if (!verdict.ok) {
    const int error = X509_STORE_CTX_get_error(context.get());
    verdict.refusal = RefusalOf(error);
    verdict.why = Sentence(error, certificate.get());
  }
  ERR_clear_error();
  return verdict;
}

absl::Status Trust::CheckRevokesAsMuchAs(const Trust& before) const {
  for (const CrlPtr& old : before.impl_->crls) {
    if (!SignedByOne(old.get(), impl_->cas)) continue;
    bool any = false;
    bool follows = false;
    for (const CrlPtr& crl : impl_->crls) {
      if (X509_NAME_cmp(X509_CRL_get_issuer(crl.get()), X509_CRL_get_issuer(old.get())) != 0) {
        continue;
      }
      any = true;
      const int age = ASN1_TIME_compare(X509_CRL_get0_lastUpdate(crl.get()),
                                        X509_CRL_get0_lastUpdate(old.get()));
      follows = follows || age == 1 || ListsAllOf(crl.get(), old.get());
    }
    if (follows) continue;
    return Bad(absl::StrCat("the CRL of ", IssuerOf(old.get()),
                            any ? " lists fewer certificates than the one in use, and is no newer"
                                : " is not there any more, and its CA is still trusted",
                            ": put its newest CRL into the file of CRLs"));
  }
  return absl::OkStatus();
}

bool Trust::crl_is_old() const {
  for (const CrlPtr& crl : impl_->crls) {
    const ASN1_TIME* next = X509_CRL_get0_nextUpdate(crl.get());
    if (next != nullptr && X509_cmp_current_time(next) < 0) return true;
  }
  return false;
}

absl::StatusOr<int64_t> CheckKeyPair(const std::string& cert_pem, const std::string& key_pem) {
  const absl::StatusOr<std::vector<CertificatePtr>> chain = ReadAll(cert_pem);
  if (!chain.ok()) return Bad(absl::StrCat("the certificate: ", chain.status().message()));
  X509* const own = chain->front().get();
  const KeyPtr key = ReadKey(key_pem);
  ERR_clear_error();
  if (key == nullptr) {
    return Bad("the key cannot be read: give an unencrypted private key in PEM form");
  }
  if (X509_check_private_key(own, key.get()) != 1) {
    ERR_clear_error();
    return Bad("the key is not the key of the certificate");
  }
  if (X509_cmp_current_time(X509_get0_notAfter(own)) <= 0) {
    return Bad(absl::StrCat("the certificate expired at ", TimeText(X509_get0_notAfter(own))));
  }
  if (X509_cmp_current_time(X509_get0_notBefore(own)) > 0) {
    return Bad(
        absl::StrCat("the certificate is not valid before ", TimeText(X509_get0_notBefore(own))));
  }
  struct tm parts {};
  ASN1_TIME_to_tm(X509_get0_notAfter(own), &parts);
  return static_cast<int64_t>(timegm(&parts));
}

}  // namespace longhaul::tls
