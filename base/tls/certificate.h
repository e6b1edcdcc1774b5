// X.509 certificates: what one says of its holder, and whether the holder may be trusted. OpenSSL
// does the work; no OpenSSL type appears here.
//
// A certificate names its role and its run by URIs among the subject alternative names:
// "longhaul:role:operator", "longhaul:run:NAME". lhctl ca and cert-manager both issue such names
// (docs/security.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace longhaul::tls {

inline constexpr char kRoleUri[] = "longhaul:role:";
inline constexpr char kRunUri[] = "longhaul:run:";
// The name that stands for all runs.
inline constexpr char kAllRuns[] = "*";

struct Subject {
  std::string name;         // common name of the subject; may be empty
  std::string role;         // empty: the certificate names none
  std::string run;          // kAllRuns: every run; empty: the certificate names none
  std::string fingerprint;  // SHA-256 of the certificate, 64 hex digits
};

// Why a caller was refused.
enum class CertificateRefusal {
  kMalformed,  // not a certificate, or it names two roles or two runs
  kUntrusted,  // no CA of ours has issued it, or not for this use
  kExpired,    // no longer valid, or not yet
  kRevoked,    // listed in the CRL
};
inline constexpr size_t kRefusals = 4;

// A word for logs and labels of metrics: "malformed", "untrusted", ...
const char* RefusalName(CertificateRefusal refusal);

struct CertificateCheck {
  bool ok = false;
  Subject identity;  // as far as the certificate could be read; proven only if ok
  CertificateRefusal refusal = CertificateRefusal::kMalformed;  // if not ok
  std::string why;  // if not ok: a sentence for the caller, without secrets
};

// Reads the first certificate of `pem`. Does not check who issued the certificate.
// InvalidArgument: there is none, or it names two roles or two runs.
absl::StatusOr<Subject> SubjectOf(const std::string& pem);

// CAs that issue certificates of clients, and the certificates that they have revoked. Immutable;
// any thread may use it.
class Trust {
 public:
  // `ca_pem`: one certificate or more. `crl_pem`: any number of CRLs. InvalidArgument: something in
  // them cannot be read, or a CRL is not signed by one of the CAs.
  static absl::StatusOr<std::shared_ptr<const Trust>> Make(const std::string& ca_pem,
                                                           const std::string& crl_pem);
  ~Trust();
  Trust(const Trust&) = delete;
  Trust& operator=(const Trust&) = delete;

  // Checks a certificate of a client, now. `chain_pem`: CAs between it and ours; may be empty.
  CertificateCheck Check(const std::string& certificate_pem, const std::string& chain_pem) const;

  // Whether this may take the place of `before`. InvalidArgument: it would revoke less, and no
  // issuer has said so. For each CRL of `before` whose issuer is still among the CAs, there has to
  // be one of this issuer that was signed later or lists all that it lists. The text says what is
  // missing.
  absl::Status CheckRevokesAsMuchAs(const Trust& before) const;

  // Whether a CRL is past the time at which its issuer promised a newer one. Such a CRL still
  // counts.
  bool crl_is_old() const;

 private:
  struct Impl;
  explicit Trust(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// Checks what a program wants to show: `cert_pem` (its certificate, then CAs in between) and
// `key_pem`. Returns the time at which the certificate expires, in seconds since 1970.
// InvalidArgument: something cannot be read, the key is of another certificate, or the certificate
// has expired or is not valid yet. The text never quotes the key.
absl::StatusOr<int64_t> CheckKeyPair(const std::string& cert_pem, const std::string& key_pem);

}  // namespace longhaul::tls
