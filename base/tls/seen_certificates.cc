#include "base/tls/seen_certificates.h"

#include <utility>

namespace longhaul::tls {

void SeenCertificates::Saw(const std::string& fingerprint, const std::string& certificate_pem,
                           const std::string& chain_pem) {
  std::shared_ptr<const Material> now = files_->Current();
  MutexLock lock(&mutex_);
  const auto [it, is_new] = seen_.try_emplace(fingerprint);
  Seen& seen = it->second;
  if (is_new) {
    seen.certificate = certificate_pem;
    seen.chain = chain_pem;
    seen.checked = std::move(now);
    seen.place = order_.insert(order_.end(), fingerprint);
  } else {
    order_.splice(order_.end(), order_, seen.place);
  }
  if (seen_.size() <= kSeenCertificatesMax) return;
  seen_.erase(order_.front());
  order_.pop_front();
}

std::string SeenCertificates::WhyNot(const std::string& fingerprint) {
  std::shared_ptr<const Material> now = files_->Current();
  MutexLock lock(&mutex_);
  const auto it = seen_.find(fingerprint);
  if (it == seen_.end() || now->trust == nullptr) return "";
  Seen& seen = it->second;
  if (seen.checked != now) {
    const CertificateCheck verdict = now->trust->Check(seen.certificate, seen.chain);
    seen.why_not = verdict.ok ? "" : verdict.why;
    seen.checked = std::move(now);
  }
  return seen.why_not;
}

}  // namespace longhaul::tls
