// Knows how much this host sends and receives in all over its links together, and when the
// coordinator must be told. All links of a host share its access link, so these two rates say what
// a tensor may be divided by, while the rates of links measured at the same time do not.
//
// Plain value: no clock, no thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/tick.h"
#include "peerd/paths/traffic_meter.h"
#include "proto/control/messages.h"

namespace longhaul::peerd {

class HostWatch {
 public:
  // A link's segments must wait for so long, and for so many of its round trips, until the link can
  // count as held. They wait as long before that: at the start of an op, TCP is slow.
  static constexpr int64_t kHeld = Millis(400);
  static constexpr int64_t kHeldRoundTrips = 4;
  static constexpr double kHeldPart = 0.85;
  // The host is busy if segments of a link have waited for so long, the shortest stretch that is
  // measured. Small ops wait for less. On long ways it stays so for a while: what was sent is still
  // on its way, and an op is made of bursts.
  static constexpr int64_t kBusy = Millis(100);
  static constexpr int64_t kBusyLasts = Seconds(1);

  // What was seen of queues since the last Add().
  struct Queues {
    std::optional<bool> up_full;  // HostSample::up_full
    // For how long segments of a link have waited without a break; of several, the longest.
    int64_t waiting_us = 0;
  };
  // Since the start of peerd, `arrived` bytes that this host sent have arrived, and it has received
  // `received` bytes. `rtt_us`: the longest round trip of the links in use; 0: unknown.
  // `op_ended`: an op of a local member has ended since the last call.
  void Add(Tick at, uint64_t arrived, uint64_t received, uint32_t rtt_us, bool op_ended,
           const Queues& queues);
  // The most that this host was lately seen to send, while it had more to send, and to receive. 0:
  // unknown. What a host that was not busy happened to send is no limit.
  uint64_t up() const { return !up_.limits() ? 0 : up_.bytes_per_second(); }
  uint64_t down() const { return down_.bytes_per_second(); }
  // Whether a link whose segments have waited for `waiting_us` is held: it, or its receiver, limits
  // what it carries. `waiting`: how many of the host's `links` have segments waiting.
  //
  // All links could share what the host can send. A link is held if the host sends in all clearly
  // less than the part that the waiting links would have then. If the last of several links is left
  // alone and TCP is slow to make use of that, the link still carries its part.
  bool Holds(int64_t waiting_us, uint32_t rtt_us, size_t waiting, size_t links) const;
  // Puts the rates into the report if they must be reported: the last report is kReportRepeat old,
  // or a rate has changed since then by more than a twentieth. Returns whether it did.
  bool PopReport(Tick now, control::LinkReport* report);
  // Makes the next PopReport() put them in. Call it when a coordinator has greeted.
  void SayAgain();

 private:
  static constexpr Tick kNotSaid{INT64_MIN / 2};

  // An acknowledgement may have waited in the queue of the peer's host.
  TrafficMeter up_{{.stretch = Millis(100), .late_percent = 150, .late_max = Millis(75)}};
  // The bytes behind a lost packet come when TCP has sent the packet again.
  TrafficMeter down_{{.stretch = Millis(500), .late_percent = 300, .late_max = Millis(150)}};
  Tick busy_at_{INT64_MIN / 2};  // when the host was last busy
  // The figures of the last report, and its time.
  uint64_t said_up_ = 0;
  uint64_t said_down_ = 0;
  Tick said_at_ = kNotSaid;
};

}  // namespace longhaul::peerd
