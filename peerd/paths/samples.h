// What was measured of paths to other hosts: the values that come into this directory, and that go
// from one part of it to another. Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"

namespace longhaul::peerd {

// From this round trip time on a path counts as long: it leaves the site.
inline constexpr uint32_t kLongWayUs = 5000;

// One measurement of the rate of a link, in the direction away from us: of all lanes that were used
// since the last sample, or of a probe.
struct RateSample {
  uint64_t bytes_per_second = 0;  // 0: nothing was sent, or measured
  // Some lanes had too little to send, so the link may carry more.
  bool limited_by_sender = false;
  uint32_t rtt_us = 0;  // the shortest round trip; 0: unknown
  // More connections may carry more: the sample is from a probe, or the search for the best number
  // of lanes goes on.
  bool few_connections = false;
  // The host sent on other links at the same time.
  bool crowded = false;
  uint64_t bytes_sent = 0;      // given to TCP; by a probe: sent, each repeated byte once more
  uint64_t bytes_repeated = 0;  // sent again by TCP
};

// What has arrived at the peer of a link since the last sample.
struct LinkArrivals {
  uint64_t bytes = 0;
  // The time that each of these bytes waited in queues of the path, added up.
  uint64_t queued_us = 0;
  // The same without queues that hold the packets of one connection only. Networks that limit each
  // connection have such queues.
  uint64_t shared_queued_us = 0;
  uint32_t rtt_us = 0;  // the longest of the shortest round trips of these lanes; 0: unknown
};

// How long a link keeps us waiting for the peer, and on which of its lanes.
struct LinkWait {
  // The longest of the silence, the stall, and the time that TCP needs for what waits. 0: nothing
  // is unusual.
  int64_t us = 0;
  uint32_t lane = 0;              // 0: the control lane; data lanes count from 1
  int64_t silent_us = 0;          // since something was last heard on any lane
  int64_t stalled_us = 0;         // for how long the lane has had bytes, and no acknowledgement
  uint64_t waiting_bytes = 0;     // of the whole link: not sent, or not acknowledged by TCP
  uint64_t bytes_per_second = 0;  // at which TCP delivers on the whole link; 0: unknown
  uint32_t rtt_us = 0;            // of the last PING; 0: unknown
};

// What has arrived at other peers over all links together, and which links are behind.
struct HostSample {
  uint64_t bytes = 0;     // since the start; never falls
  LinkArrivals arrivals;  // of all links together
  // A link for whose lanes segments have waited without a break.
  struct Waiting {
    PeerId peer;
    int64_t us = 0;
    uint32_t rtt_us = 0;
  };
  std::vector<Waiting> waiting;
  size_t links = 0;  // that are up
  // Whether the queue in front of this host's access link may have been full since the last call
  // (HostPace::PopFull()). Nothing: that was not measured.
  std::optional<bool> up_full;
};

}  // namespace longhaul::peerd
