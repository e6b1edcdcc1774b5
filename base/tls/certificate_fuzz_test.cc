// Feeds any text to the readers of certificates, keys and CRLs, and any bytes to the checks of keys
// and signatures of peers. The first byte chooses.
#include <algorithm>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/crypto/identity.h"
#include "base/tls/certificate.h"

namespace longhaul {
namespace {

void One(uint8_t which, const std::string& text) {
  const std::string front = text.substr(0, text.size() / 2);
  const std::string back = text.substr(text.size() / 2);
  switch (which % 5) {
    case 0:
      if (const auto identity = tls::SubjectOf(text); identity.ok()) {
        LH_CHECK(identity->fingerprint.size() == 64);
      }
      return;
    case 1:
      // One text in both places: a key and its certificate, or neither.
      (void)tls::CheckKeyPair(text, text);
      return;
    case 2: {
      // A self-signed certificate is its own CA. What is behind the CAs is taken for the chain.
      const auto trust = tls::Trust::Make(text, "");
      if (!trust.ok()) return;
      const tls::CertificateCheck verdict = (*trust)->Check(text, text);
      LH_CHECK(verdict.ok || !verdict.why.empty());
      return;
    }
    case 3: {
      const auto trust = tls::Trust::Make(front, back);
      if (!trust.ok()) return;
      (*trust)->crl_is_old();
      (*trust)->Check(back, front);
      return;
    }
    case 4: {
      static const auto& identity = *new Identity(Identity::ForTest(1));
      static const auto& signature = *new std::string(identity.Sign("text"));
      LH_CHECK(PeerIdOf(text).value() != 0);
      const std::string key = text.substr(0, std::min(text.size(), kPublicKeyBytes));
      IsSignedBy(key, "text", text.substr(key.size()));
      IsSignedBy(key, "text", signature);
      LH_CHECK(!IsSignedBy(identity.public_key(), "text", text) || text == signature);
      LH_CHECK(text == "text" || !IsSignedBy(identity.public_key(), text, signature));
      PossessionText(front, back);
      return;
    }
  }
}

}  // namespace
}  // namespace longhaul

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  longhaul::One(data[0], std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
