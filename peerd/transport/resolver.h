// Turns host names into addresses without blocking the ring: helper threads call getaddrinfo().
//
// At most kWorkersMax look-ups run at once, and more wait in a queue. A look-up that hangs in the
// system's resolver delays neither Close() nor the end of the process.
//
// Threads: the ring's. Answers come from within Ring::RunOnce().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

class Resolver {
 public:
  using Addresses = absl::StatusOr<std::vector<SocketAddress>>;
  using Done = absl::AnyInvocable<void(Addresses)>;
  static constexpr int kWorkersMax = 4;

  explicit Resolver(Ring* ring) : ring_(ring) {}
  ~Resolver();

  // Call this first. Unavailable: no file descriptor is free.
  absl::Status Start();
  void Resolve(const HostPort& host_port, Done done);
  // Drops all look-ups: their `done` is never called. Run the ring until closed().
  void Close();
  bool closed() const { return poll_ == 0; }

 private:
  struct Shared;
  static void Worker(const std::shared_ptr<Shared>& shared);
  void Poll();
  void OnReadable();

  Ring* const ring_;
  std::shared_ptr<Shared> shared_;
  std::map<uint64_t, Done> waiting_;
  uint64_t next_ = 1;
  IoId poll_ = 0;
};

}  // namespace longhaul::peerd
