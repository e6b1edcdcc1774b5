// Which strangers are served, and which wait. A stranger that is served may cost memory (TLS, and a
// transport of gRPC), so few are served at a time; one that waits costs a descriptor. Each address
// gets its share, so that a flood from some addresses leaves room for a caller from another one.
// An address is an IPv4 address or a /64 of IPv6: who has one address of IPv6 has 2^64.
//
// Plain value: no thread, and the owner gives the time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/tick.h"

namespace longhaul::coordinator {

class StrangerTable {
 public:
  // A stranger that is served may be put out for one of its own address, or of an address with as
  // many, after this time. An honest caller needs two round trips.
  static constexpr int64_t kLeastUs = Seconds(1);

  StrangerTable(size_t served_max, size_t waiting_max)
      : served_max_(served_max), waiting_max_(waiting_max) {}

  // A connection came; it waits. Ids go up. Returns one that is to be closed for it: the oldest
  // that waits, of the address with the most of them.
  std::optional<uint64_t> Add(uint64_t id, const std::string& address);
  // The caller has begun to speak, so it wants to be served.
  void Ready(uint64_t id);

  struct Step {
    std::optional<uint64_t> serve;    // begin to serve this one; it counts as served
    std::optional<uint64_t> put_out;  // or close this one; it counts until Remove()
  };
  // What to do now. Call it until it says nothing.
  Step Next(Tick now);
  // When Next() may have something to say again, although nothing else has happened.
  Tick due() const { return due_; }

  // The connection is gone, or no stranger's any more.
  void Remove(uint64_t id);

  size_t served() const { return served_; }
  size_t waiting() const { return strangers_.size() - served_; }

 private:
  struct Share {
    size_t served = 0;  // without those that are leaving
    size_t waiting = 0;
  };
  using Shares = std::map<std::string, Share>;
  struct Stranger {
    Shares::iterator address;
    bool ready = false;
    bool served = false;
    bool leaving = false;
    Tick since;
    Share& share() const { return address->second; }
  };

  const size_t served_max_;
  const size_t waiting_max_;
  std::map<uint64_t, Stranger> strangers_;
  Shares shares_;  // by address
  size_t served_ = 0;
  size_t leaving_ = 0;
  Tick due_ = kNever;
};

}  // namespace longhaul::coordinator
