// What the services know of the connection of a call.
//
// gRPC does not speak with the caller itself: front.h does, and passes gRPC one end of a pair of
// sockets. What gRPC calls the peer of a call is the name of that pair. Connection says who is
// behind it.
//
// Threads: any thread may call anything here.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/tls/certificate.h"

namespace longhaul::coordinator {

class Connection {
 public:
  // `client`: the address of the caller, as gRPC writes it ("ipv4:10.0.0.1:5123").
  // `certificate`: of the caller, in PEM; "": it showed none. `check`: checks it, now; null: there
  // is nothing to check. `known`: see Known(); may be null.
  struct Options {
    std::string client;
    std::string certificate;
    std::function<tls::CertificateCheck()> check;
    std::function<void()> known;
  };
  explicit Connection(Options options) : options_(std::move(options)) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const std::string& client() const { return options_.client; }
  const std::string& certificate() const { return options_.certificate; }
  // Why the caller's certificate is refused; nullopt: it is good, or it showed none.
  std::optional<tls::CertificateCheck> Refusal() const;
  // The caller has shown who it is: it is no stranger any more.
  void Known() const {
    if (options_.known) options_.known();
  }

 private:
  const Options options_;
};

// The connection that gRPC calls by this name; null: it does not come from a front, or is gone.
std::shared_ptr<const Connection> ConnectionOf(const std::string& grpc_peer);
// The address of the caller, for logs.
std::string ClientOf(const std::string& grpc_peer);
// The host in such an address ("ipv4:10.0.0.1:5123", "ipv6:%5B::1%5D:5123"). An IPv4 address in
// IPv6 form is the same host. "": there is none in it.
std::string HostOfUri(const std::string& uri);

// Gives a connection a name, and forgets it. Returns the name of an abstract Unix socket.
std::string NameConnection(uint64_t id, std::shared_ptr<const Connection> connection);
void ForgetConnection(uint64_t id);

}  // namespace longhaul::coordinator
