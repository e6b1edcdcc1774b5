// Who is in a handshake at the data port, and who has to go when there are too many.
//
// A stranger may connect as often as it likes, from any address that it has, and repeat a HELLO
// that it has overheard. Nothing but the address tells it from a member before that has sent its
// HELLO, and nothing but the CONFIRM after that. So those go first
//   1. of whose block of addresses there are more than kCallersPerBlockMax of their kind,
//   2. who call from where no peer is known, and have not sent a HELLO that was judged well,
//   3. who have,
//   4. and then the same of those who call from where a peer is known;
// among these the oldest one of the block that has the most of that kind. Peers behind one address
// share a block; that costs them nothing while there is room.
//
// Plain value: no threads, no clock. A call takes time in proportion to the callers there are.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "peerd/io/sockets.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {

// Addresses that one host or site can have at will: an IPv4 /24 or an IPv6 /64.
struct AddressBlock {
  std::array<uint8_t, 9> bytes{};  // 4 or 6, then what the block has in common

  static AddressBlock Of(const SocketAddress& address);
  friend auto operator<=>(const AddressBlock&, const AddressBlock&) = default;
};

// "10.1.2.0/24", "2001:db8::/64".
std::string ToString(const AddressBlock& block);

inline constexpr size_t kCallersPerBlockMax = LH_HANDSHAKES_MAX / 4;

class Callers {
 public:
  // `known`: a peer is known at that address. Numbers are never used again.
  uint64_t Add(const AddressBlock& block, bool known);
  // Its HELLO names an epoch and a peer that are expected.
  void SetJudged(uint64_t caller);
  // No effect on one that is not there.
  void Remove(uint64_t caller);
  size_t size() const { return callers_.size(); }

  struct Victim {
    uint64_t caller = 0;
    AddressBlock block;
  };
  // Who goes first. There is somebody.
  Victim First() const;

 private:
  struct Held {
    size_t silent = 0;
    size_t judged = 0;
  };
  struct Caller {
    uint64_t number = 0;
    AddressBlock block;
    Held* held = nullptr;  // in blocks_
    bool known = false;
    bool judged = false;

    size_t& alike() const { return judged ? held->judged : held->silent; }
    int Worth() const;
  };
  std::vector<Caller>::iterator Find(uint64_t caller);

  uint64_t next_ = 1;
  std::vector<Caller> callers_;  // oldest first
  std::map<AddressBlock, Held> blocks_;
};

}  // namespace longhaul::peerd
