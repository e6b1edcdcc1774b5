// Whether new TLS files may take the place of those in use. Files that are good in themselves can
// still cut a program off: a certificate for another name is refused by everybody who dials the old
// one, and one of another CA by everybody who trusts the old CA. Each looks like a death of all
// the others. And a CRL that was lost, as by a copy onto a full disk, would let everybody in again
// whose certificate was revoked.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "base/tls/certificate.h"

namespace longhaul::tls {

// What a program shows, and whom it trusts. `cert` and `key` may be empty.
struct Shown {
  std::string cert, key, ca;     // PEM
  const Trust* trust = nullptr;  // in `ca`; null without CAs
};

// InvalidArgument: `now` revokes less (Trust::CheckRevokesAsMuchAs()); or its certificate lacks a
// name (DNS, IP or URI) of the one in `old`; or it fails where the one in `old` passes: a handshake
// of this program with itself, in memory, in which the client trusts the CAs of the same files, or
// these CAs' check of a client. So a pair of certificate and CAs that never belonged together, like
// a public certificate and a private CA for clients, may stay so.
absl::Status CheckSuccessor(const Shown& old, const Shown& now);

}  // namespace longhaul::tls
