// A certificate authority in a directory, for those without one: what `lhctl ca` does.
//
//   DIR/ca.crt       the CA's certificate: for --tls-ca of all programs
//   DIR/ca.key       its private key (mode 0600): whoever has it can issue certificates
//   DIR/NAME.crt     a certificate that it has issued; DIR/NAME.key: the private key (mode 0600)
//   DIR/issued       copies of all certificates, so that replaced ones can be revoked, too
//   DIR/crl.pem      what it has revoked: for --tls-crl of the coordinator
//
// Keys are ECDSA P-256. A file is written whole or not at all. After an error, files that were
// written before the error stay.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul {

// Makes the directory if it is missing (mode 0700), key, certificate and an empty CRL.
// `days`: how long the certificate is valid. FailedPrecondition: the directory has a CA already.
absl::Status InitCa(const std::string& directory, uint32_t days);

struct IssueOptions {
  std::string name;                // of the holder, and of the files
  std::string role;                // coordinator, trainer, observer or operator
  std::string run;                 // empty: all runs
  std::vector<std::string> hosts;  // DNS names and IP addresses; for a coordinator, and only for it
  uint32_t days = 0;
};

// Issues a certificate, and replaces an older one of this name. Certificates of coordinators can
// prove a server only, all others a client only. InvalidArgument: an option is wrong.
// NotFound: the directory has no CA.
absl::Status IssueCertificate(const std::string& directory, const IssueOptions& options);

// Adds certificates to DIR/crl.pem: all that were issued for a NAME, or the one in a file.
// NotFound: no such certificate, or no CA. InvalidArgument: another CA has issued it. Returns how
// many certificates of `which` are revoked now.
absl::StatusOr<size_t> RevokeCertificates(const std::string& directory, const std::string& which);

}  // namespace longhaul
