// The flags --tls-cert, --tls-key, --tls-ca and --insecure, which the coordinator, peerd and lhctl
// share, and the rule that they follow: what leaves this host is encrypted, unless --insecure says
// otherwise.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/tls/tls_files.h"

namespace longhaul {

// InvalidArgument: a certificate without its key, or a key without its certificate.
absl::StatusOr<tls::Paths> TlsPathsFromFlags();

// The value of --insecure.
bool InsecureFlag();

// For a program that calls coordinators at `addresses`, which `flag` names. Returns the files for
// TLS, or null: the calls go in clear. In clear to another host, with --insecure, logs a warning.
// InvalidArgument: an address is of another host, and neither --tls-ca nor --insecure is given; or
// both are; or the files are not good. The text says what to do.
absl::StatusOr<std::shared_ptr<tls::Files>> ClientTlsFromFlags(
    const std::string& flag, const std::vector<std::string>& addresses);

}  // namespace longhaul
