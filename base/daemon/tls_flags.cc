#include "base/daemon/tls_flags.h"

#include <utility>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/host_port.h"
#include "base/log.h"
#include "base/status_macros.h"

ABSL_FLAG(std::string, tls_cert, "",
          "file with this program's certificate, and CAs between it and a root (PEM); new contents "
          "are used without a restart");
ABSL_FLAG(std::string, tls_key, "", "file with the private key of --tls-cert (PEM, not encrypted)");
ABSL_FLAG(std::string, tls_ca, "",
          "file with the CAs whose certificates this program trusts at the other end (PEM); peerd "
          "and lhctl use TLS if it is given");
ABSL_FLAG(bool, insecure, false,
          "allow gRPC in clear to and from other hosts: for a private network or a tunnel only");

namespace longhaul {

absl::StatusOr<tls::Paths> TlsPathsFromFlags() {
  tls::Paths paths;
  paths.cert = absl::GetFlag(FLAGS_tls_cert);
  paths.key = absl::GetFlag(FLAGS_tls_key);
  paths.ca = absl::GetFlag(FLAGS_tls_ca);
  if (paths.cert.empty() != paths.key.empty()) {
    return absl::InvalidArgumentError("give --tls-cert and --tls-key together, or neither");
  }
  return paths;
}

bool InsecureFlag() { return absl::GetFlag(FLAGS_insecure); }

absl::StatusOr<std::shared_ptr<tls::Files>> ClientTlsFromFlags(
    const std::string& flag, const std::vector<std::string>& addresses) {
  LH_ASSIGN_OR_RETURN(const tls::Paths paths, TlsPathsFromFlags());
  if (paths.any() && InsecureFlag()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--insecure contradicts ", paths.ca.empty() ? "--tls-cert" : "--tls-ca",
                     ": with TLS nothing goes in clear. Remove --insecure"));
  }
  if (!paths.ca.empty()) {
    auto files = tls::Files::Open(paths);
    if (files.ok()) return files;
    return absl::InvalidArgumentError(absl::StrCat("TLS: ", files.status().message()));
  }
  if (!paths.cert.empty()) {
    return absl::InvalidArgumentError(
        "--tls-cert needs --tls-ca=FILE, the CA of the coordinator's certificate");
  }
  for (const std::string& address : addresses) {
    LH_ASSIGN_OR_RETURN(const HostPort parsed, ParseHostPort(address));
    if (IsLoopback(parsed)) continue;
    if (!InsecureFlag()) {
      return absl::InvalidArgumentError(absl::StrCat(
          flag, "=", address,
          ": this is another host, and nothing would be encrypted. Give --tls-ca=FILE "
          "(docs/security.md: lhctl ca makes the files), or --insecure in a private network or a "
          "tunnel"));
    }
    Log(LogLevel::kWarning,
        "--insecure: gRPC to the coordinator is not encrypted" + LogField("coordinator", address));
  }
  return std::shared_ptr<tls::Files>();
}

}  // namespace longhaul
