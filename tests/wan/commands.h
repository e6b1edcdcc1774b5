// What the control socket understands: a line of text in, a line of JSON out.
//
// HOST, SRC, DST, A, B are names of hosts, or * for all of them.
//
//   host NAME NUMBER NETNS DEVICE  a new host: its TUN device in a network namespace (a path)
//   set SRC DST KEY=VALUE...       one direction
//   link A B KEY=VALUE...          both directions
//       delay=40ms jitter=2ms      one-way; jitter is uniform on top and does not reorder
//       rate=500mbit queue=50ms    of all flows together; 0 is no limit; the queue in front of it
//                                  as time at the rate or as bytes (queue=256KiB)
//       loss=0.1%                  of segments, at random
//       flow_rate=25mbit flow_queue=50ms   of each flow by itself
//   access HOST up=1gbit down=200mbit queue=50ms   what all pairs of a host share
//   flow SRC DST SPORT DPORT RATE  one TCP flow of a pair (0 here is no limit, too)
//   down SRC DST | down HOST       swallows everything, also what is in flight, and tells nobody
//   up SRC DST | up HOST
//   show                           how pairs are set up
//   stats                          counters of pairs that carried something, and of the emulator
//   flows SRC DST                  what each flow of a pair got
//   reset                          counters begin at 0
//
// The answer is {"ok":true,...}, or {"error":"..."} and then nothing was changed.
// Threads: one.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/wan/network.h"

namespace longhaul::wan {

// A line that is longer is refused.
inline constexpr size_t kLineBytesMax = 4096;

class Commands {
 public:
  struct Hooks {
    // Takes up a host's device before the network knows the host.
    std::function<absl::Status(int number, const std::string& netns, const std::string& device)>
        attach;
    // A JSON object about the emulator itself, for `stats`.
    std::function<std::string()> emulator;
    std::function<void()> reset;
  };

  // `network` outlives it.
  Commands(Network* network, Hooks hooks) : network_(network), hooks_(std::move(hooks)) {}

  // The answer, without a newline.
  std::string Execute(std::string_view line);

 private:
  using Words = std::vector<std::string>;

  absl::StatusOr<std::string> Dispatch(const Words& words);
  absl::Status AddHost(const Words& words);
  absl::Status SetPairs(const Words& words, bool both_ways);
  absl::Status SetAccess(const Words& words);
  absl::Status SetFlow(const Words& words);
  absl::Status SetDown(const Words& words, bool down);
  std::string Show() const;
  std::string Stats() const;
  absl::StatusOr<std::string> Flows(const Words& words) const;

  absl::StatusOr<std::vector<int>> HostsNamed(const std::string& name) const;
  absl::StatusOr<int> HostNamed(const std::string& name) const;

  Network* const network_;
  const Hooks hooks_;
  std::map<std::string, int> hosts_;  // by name
};

}  // namespace longhaul::wan
