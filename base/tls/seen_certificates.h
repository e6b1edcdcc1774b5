// The certificates of those who call, so that a caller whose certificate is revoked while a call of
// its goes on can be found. The credentials of a server tell it of each call, and who keeps calls
// open asks it from time to time.
//
// Threads: any thread may call anything here.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/tls/tls_files.h"

namespace longhaul::tls {

// So many certificates are known at most. Beyond that the one that called longest ago is forgotten:
// its calls end when their connection has reached its age.
inline constexpr size_t kSeenCertificatesMax = 16384;

class SeenCertificates {
 public:
  explicit SeenCertificates(std::shared_ptr<Files> files) : files_(std::move(files)) {}

  // A call came with this certificate, which was good.
  void Saw(const std::string& fingerprint, const std::string& certificate_pem,
           const std::string& chain_pem);

  // Why the certificate may not be used any more, by the files as they are now: a sentence for the
  // caller, or "" if it may, or if it is not known. Cheap unless the files have changed, so it does
  // not notice that a certificate expires.
  std::string WhyNot(const std::string& fingerprint);

 private:
  struct Seen {
    std::string certificate, chain;
    std::shared_ptr<const Material> checked;  // the files that it was checked against last
    std::string why_not;
    std::list<std::string>::iterator place;  // in order_
  };

  const std::shared_ptr<Files> files_;
  Mutex mutex_;
  std::map<std::string, Seen> seen_ ABSL_GUARDED_BY(mutex_);  // by fingerprint
  std::list<std::string> order_ ABSL_GUARDED_BY(mutex_);  // fingerprints; called last: at the end
};

}  // namespace longhaul::tls
