// TLS 1.3 (RFC 8446) between two peers, over memory: whoever owns a session moves its bytes.
//
// Each side shows a certificate that it has signed itself, with the key of its peer (Identity). A
// session accepts one key only: the one that the epoch names for the other peer. Names, dates and
// issuers of certificates mean nothing. OpenSSL 3.0 does not know raw public keys (RFC 7250), which
// would say the same in fewer bytes.
//
// Threads: one.
#pragma once

#include <openssl/ssl.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/crypto/identity.h"
#include "base/crypto/sealing.h"

namespace longhaul::peerd {

// What the sessions of one peer share: its certificate.
class TlsContext {
 public:
  explicit TlsContext(const Identity& identity);
  SSL_CTX* get() const { return context_.get(); }

 private:
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
};

class TlsSession {
 public:
  enum class Side { kClient, kServer };
  // `peer_key`: the public key that the other side must have.
  TlsSession(const TlsContext& context, Side side, std::string peer_key);

  // The bytes that came from the other side.
  void Feed(std::span<const uint8_t> bytes);
  // Returns the bytes that have to go to the other side. Ask after each of the calls below, and if
  // they fail, too: then the bytes tell the other side why.
  std::vector<uint8_t> TakeOutput();
  bool has_output() const;

  // Goes on with the handshake. Unauthenticated: the other side does not have the key, or its bytes
  // are no TLS.
  absl::Status Shake();
  bool shaken() const { return SSL_is_init_finished(ssl_.get()) == 1; }

  // Only after the handshake:
  // Returns how many bytes of text it has put into `room`; 0: more bytes have to come first.
  // Unauthenticated: what came was not sent by the other side, or not in this order.
  absl::StatusOr<size_t> Read(std::span<uint8_t> room);
  // Returns false if the session has failed before.
  bool Write(std::span<const uint8_t> text);
  // A secret that only the two sides know (RFC 5705, and RFC 8446 section 7.5).
  KeySecret Export(const std::string& label) const;
  // The cipher that both sides want.
  Aead aead() const;

 private:
  friend class TlsContext;
  static int Verify(X509_STORE_CTX* store, void*);
  absl::Status Fault(const char* what) const;

  const std::string peer_key_;
  std::string why_;  // the other side's certificate was refused
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  BIO* in_;   // of ssl_
  BIO* out_;  // of ssl_
};

// The connection of a lane whose handshake is over.
struct LaneSocket {
  int fd = -1;
  std::unique_ptr<TlsSession> tls;  // of a sealed control lane
  // Of a control lane in clear: a secret that only the two ends know.
  std::string clear_secret;
};

}  // namespace longhaul::peerd
