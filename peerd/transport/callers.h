// The callers: connections in a handshake at the data port. Chooses which caller to turn away when
// there are too many.
//
// A stranger may connect as often as it likes, from any address that it has, and may repeat a HELLO
// that it has overheard. Before HELLO only the address distinguishes a stranger from a member. From
// HELLO to CONFIRM nothing else does. So callers are turned away in this order:
//   1. callers of an address block with more than kCallersPerBlockMax callers of their kind (a
//      kind: with, or without, a HELLO that was judged well),
//   2. callers from where no peer is known, without a HELLO that was judged well,
//   3. callers from where no peer is known, with such a HELLO,
//   4. callers from where a peer is known: first without such a HELLO, then with one.
// Within one step, a caller of the block with the most callers of that kind goes first, and the
// oldest of these. Peers behind one address share a block. This costs them nothing while there is
// room.
//
// Plain value: no threads, no clock. A call takes time in proportion to the number of callers.
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

// Addresses that one host or site may use at will: an IPv4 /24 or an IPv6 /64.
struct AddressBlock {
  std::array<uint8_t, 9> bytes{};  // 4 or 6, then the common prefix

  static AddressBlock Of(const SocketAddress& address);
  friend auto operator<=>(const AddressBlock&, const AddressBlock&) = default;
};

// "10.1.2.0/24", "2001:db8::/64".
std::string ToString(const AddressBlock& block);

inline constexpr size_t kCallersPerBlockMax = LH_HANDSHAKES_MAX / 4;

class Callers {
 public:
  // `known`: a peer is known at that address. Returns the caller's number, which is never used
  // again.
  uint64_t Add(const AddressBlock& block, bool known);
  // The caller's HELLO names an epoch and a peer that we expect.
  void SetJudged(uint64_t caller);
  // Does nothing if the caller is not there.
  void Remove(uint64_t caller);
  size_t size() const { return callers_.size(); }

  struct Victim {
    uint64_t caller = 0;
    AddressBlock block;
  };
  // Returns the caller to turn away. There must be one.
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
