// Counts the callers at the data port that did not get a lane, by reason, and logs some of them.
//
// Strangers can be refused as often as they like, so one line for each reason is logged in ten
// seconds. The line says how many others were held back.
//
// Threads: the ring's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "base/counters.h"
#include "base/ids.h"
#include "base/rarely.h"
#include "base/tick.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

enum class CallerRefusal : uint8_t {
  kMalformed,  // no HELLO or CONFIRM of this protocol
  kVersion,    // another version of the protocol
  kLook,       // a peer that looks whether this one listens, and wants nothing else
  kEpoch,      // the run or epoch is not known here, or over, or does not have these peers
  kToken,      // the caller does not have the epoch's token, or repeats somebody else's handshake
  kKey,        // the caller does not have the key of the peer that it names
  kPeer,       // it looks for another peer, or names a peer that may not open this lane
  kSealing,    // one end wants a sealed lane, and the other one does not
  kLink,       // the link of the lane was given up
  kBusy,       // another connection goes first, or there is no room
  kBroken,     // the connection was cut, or silent, or turned away
};
inline constexpr size_t kCallerRefusals = 11;

// The value of the label "reason".
const char* Name(CallerRefusal refusal);
// Returns what a refusal on the wire counts as. `result` is not kAccepted.
CallerRefusal RefusalOf(LaneResult result);

class RefusedCallers {
 public:
  using Counts = std::array<uint64_t, kCallerRefusals>;

  // `peer`: the one that the caller names, if any.
  void Add(CallerRefusal refusal, PeerId peer, const std::string& from, const std::string& why,
           Tick now);
  const Counts& counts() const { return counts_; }

 private:
  Counts counts_{};
  Rarely<CallerRefusal> log_{Seconds(10), kCallerRefusals};
};

inline uint64_t Sum(const RefusedCallers::Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

// Appends the counters that /metrics shows.
void AddTotals(const RefusedCallers::Counts& counts, std::vector<CounterTotal>* totals);

}  // namespace longhaul::peerd
