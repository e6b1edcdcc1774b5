// The commands of the control socket: a line of text in, a line of JSON out.
//
// HOST, SRC, DST, A and B are names of hosts. In set, link, access, down and up, * means all hosts.
//
//   host NAME NUMBER NETNS DEVICE  adds a host; its TUN device lies in a network namespace (a path)
//   set SRC DST KEY=VALUE...       changes one direction
//   link A B KEY=VALUE...          changes both directions
//       delay=40ms jitter=2ms      one way; jitter is uniform, on top of it, without reordering
//       rate=500mbit queue=50ms    the rate of all flows together (0: no limit), and the queue in
//                                  front of it, as time at that rate or as bytes (queue=256KiB)
//       loss=0.1%                  the share of segments that are lost at random
//       flow_rate=25mbit flow_queue=50ms   rate and queue of each flow by itself
//   access HOST up=1gbit down=200mbit queue=50ms   what all pairs of a host share
//   flow SRC DST SPORT DPORT RATE  gives one TCP flow of a pair a rate of its own (0: no limit)
//   down SRC DST | down HOST       drops all packets, also those in flight, and tells nobody
//   up SRC DST | up HOST           ends that
//   show                           the settings of hosts and pairs
//   stats                          counters of the emulator and of the pairs that got packets
//   flows SRC DST                  counters of each flow of a pair
//   reset                          sets all counters to 0
//
// The answer is {"ok":true,...} or {"error":"..."}. A command that ends in an error has changed
// nothing. One thread uses a Commands object; it owns nothing but the names of the hosts.
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

// The connection of a client that sends a longer line is closed.
inline constexpr size_t kLineBytesMax = 4096;

class Commands {
 public:
  struct Hooks {
    // Opens a host's device. Called before the host is added to the network. After an error the
    // host is not added.
    std::function<absl::Status(int number, const std::string& netns, const std::string& device)>
        attach;
    // Gives a JSON object about the emulator itself, for `stats`.
    std::function<std::string()> emulator;
    // Sets the emulator's own counters to 0.
    std::function<void()> reset;
  };

  // `network` must outlive this object.
  Commands(Network* network, Hooks hooks) : network_(network), hooks_(std::move(hooks)) {}

  // Executes a command and returns the answer, without a newline.
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
  std::map<std::string, int> hosts_;  // name to number
};

}  // namespace longhaul::wan
