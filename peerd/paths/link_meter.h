// Measures what the data lanes of one link carry, and how long their packets wait, by what TCP
// tells of each connection.
//
// Asking TCP costs a system call, so each function asks only about lanes that may have news for it.
//
// Plain value: no clock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/tcp.h"
#include "base/tick.h"
#include "peerd/paths/lane_schedule.h"
#include "peerd/paths/samples.h"

namespace longhaul::peerd {

class LinkMeter {
 public:
  // A data lane that is up.
  struct Lane {
    uint32_t index = 0;
    uint64_t sent = 0;  // segments put on it so far
    bool idle = false;  // all of them have arrived
  };
  // Returns what TCP has measured of a lane of the link: of the data lane with this index, or of
  // the control lane (kControlLane). Nothing: there is no such lane, or TCP tells nothing.
  using AskTcp = absl::FunctionRef<std::optional<TcpDelivery>(uint32_t lane)>;
  static constexpr uint32_t kControlLane = UINT32_MAX;

  // Tells `schedule` what was measured. It must outlive this object.
  explicit LinkMeter(LaneSchedule* schedule) : schedule_(schedule) {}

  // The data lane is gone. Another one may come with its index.
  void Forget(uint32_t index);

  // Returns what the lanes that were used since the last call have delivered. `bytes_sent`: given
  // to all lanes so far. `waits`: segments wait for lanes.
  RateSample PopRate(const std::vector<Lane>& lanes, uint64_t bytes_sent, bool waits, AskTcp ask);
  // Returns what has arrived since the last call, apart from the last bytes on lanes that were
  // lost. Asks only about lanes that were used since then. Raises the round trip to the shortest
  // one of each of these lanes.
  LinkArrivals PopArrivals(const std::vector<Lane>& lanes, AskTcp ask);
  // Adds to `wait`, which knows what waits for lanes and for how long the link is silent, what
  // waits on lanes. Up to `usual_silence_us` a silence says nothing.
  LinkWait PopWait(LinkWait wait, const std::vector<Lane>& lanes, int64_t usual_silence_us,
                   Tick now, AskTcp ask);

 private:
  struct Seen {
    uint64_t sent_at_rate = 0;  // Lane::sent at the last PopRate()
    uint64_t repeated = 0;      // by TCP on this lane's socket, at the last PopRate()
    // As PopArrivals() saw the lane last.
    uint64_t sent = 0;
    uint64_t arrived = 0;
    bool idle = true;
    // As PopWait() saw the lane last: what TCP had delivered, and since when it has had bytes and
    // delivered none of them. kNever: it had none.
    uint64_t acked = 0;
    Tick stalled_since = kNever;
  };
  Seen& Of(uint32_t index);
  uint64_t QueuedUs(const TcpDelivery& lane) const;
  uint64_t SharedQueuedUs(uint64_t bytes, uint64_t queued_us, AskTcp ask);

  LaneSchedule* const schedule_;
  std::vector<Seen> seen_;        // by index
  uint64_t bytes_at_rate_ = 0;    // bytes sent until the last PopRate()
  uint64_t usual_queued_us_ = 0;  // for which a byte lately waited in queues
};

}  // namespace longhaul::peerd
