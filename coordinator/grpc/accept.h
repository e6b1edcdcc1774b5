// Accepts connections such that a lack of descriptors does no lasting harm.
//
// gRPC 1.51 gives a listening port up for good once accept4() fails for another reason than EAGAIN:
// strangers who use up the descriptors of the coordinator would shut its ports until a restart. So
// accept.cc defines accept4() for this process, in place of the C library's. It never tells gRPC of
// such an error, and resets connections that would take one of the last kDescriptorsReserved
// descriptors, which stores, logs and certificates need. It logs that at most once a minute.
//
// It also tells who comes: gRPC says nothing of a connection whose TLS handshake fails.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace longhaul::coordinator {

inline constexpr int kDescriptorsReserved = 32;

// While it lives, `came` is told of each connection to a port: the numeric address of the host that
// it comes from, as HostOfUri() gives it. The thread that accepts calls it, with a lock held; it
// must not block.
class AcceptWatch {
 public:
  AcceptWatch(uint16_t port, std::function<void(const std::string& host)> came);
  ~AcceptWatch();
  AcceptWatch(const AcceptWatch&) = delete;
  AcceptWatch& operator=(const AcceptWatch&) = delete;
};

// The host in what gRPC calls a peer ("ipv4:10.0.0.1:5123", "ipv6:%5B::1%5D:5123"). An IPv4 address
// in IPv6 form is the same host. "": there is none in it.
std::string HostOfUri(const std::string& uri);

}  // namespace longhaul::coordinator
