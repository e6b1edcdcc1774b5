#include "peerd/paths/link_meter.h"

#include <algorithm>
#include <utility>

namespace longhaul::peerd {
namespace {

// PopWait(): how many data lanes it looks at, and from when on a wait is unusual.
constexpr uint32_t kLanesLookedAtMax = 32;
constexpr int64_t kWaitUsMin = Millis(100);

// A link that sent less than this since the last measurement was limited by its sender, unless more
// segments wait.
constexpr uint64_t kMeasuredBytesMin = 1 << 20;

}  // namespace

LinkMeter::Seen& LinkMeter::Of(uint32_t index) {
  if (index >= seen_.size()) seen_.resize(index + 1);
  return seen_[index];
}

void LinkMeter::Forget(uint32_t index) { Of(index) = {}; }

RateSample LinkMeter::PopRate(const std::vector<Lane>& lanes, uint64_t bytes_sent, bool waits,
                              AskTcp ask) {
  RateSample sum{.few_connections = schedule_->growing()};
  // A few bytes measure nothing: the end of an op uses few lanes, and is slow if packets are lost.
  sum.bytes_sent = bytes_sent - std::exchange(bytes_at_rate_, bytes_sent);
  sum.limited_by_sender = sum.bytes_sent < kMeasuredBytesMin && !waits;
  for (const Lane& lane : lanes) {
    Seen& seen = Of(lane.index);
    if (lane.sent == std::exchange(seen.sent_at_rate, lane.sent)) continue;
    const std::optional<TcpDelivery> tcp = ask(lane.index);
    if (!tcp) continue;
    sum.bytes_per_second += tcp->bytes_per_second;
    // A lane that was dialled again has a new socket, which counts from 0.
    const uint64_t told = std::exchange(seen.repeated, tcp->bytes_repeated);
    sum.bytes_repeated += tcp->bytes_repeated - (told <= tcp->bytes_repeated ? told : 0);
    sum.limited_by_sender = sum.limited_by_sender || tcp->limited_by_sender;
    if (sum.rtt_us == 0 || (tcp->rtt_us != 0 && tcp->rtt_us < sum.rtt_us)) {
      sum.rtt_us = tcp->rtt_us;
    }
  }
  return sum;
}

LinkWait LinkMeter::PopWait(LinkWait wait, const std::vector<Lane>& lanes, int64_t usual_silence_us,
                            Tick now, AskTcp ask) {
  uint32_t looked_at = 0;
  for (const Lane& lane : lanes) {
    Seen& seen = Of(lane.index);
    if (lane.idle || looked_at == kLanesLookedAtMax) {
      seen.stalled_since = kNever;
      continue;
    }
    ++looked_at;
    const std::optional<TcpDelivery> tcp = ask(lane.index);
    if (!tcp) continue;
    wait.waiting_bytes += tcp->bytes_waiting;
    const uint64_t acked = std::exchange(seen.acked, tcp->bytes_acked);
    if (tcp->bytes_waiting == 0) {
      seen.stalled_since = kNever;
      continue;
    }
    wait.bytes_per_second += tcp->bytes_per_second;
    // The last acknowledgement says since when the lane stalls, unless the lane was idle then.
    if (acked != tcp->bytes_acked) {
      seen.stalled_since = now + -tcp->unheard_us;
    } else if (seen.stalled_since == kNever) {
      seen.stalled_since = now;
    }
    if (now - seen.stalled_since < wait.stalled_us) continue;
    wait.stalled_us = now - seen.stalled_since;
    wait.lane = lane.index + 1;
  }
  wait.us = wait.stalled_us;
  if (wait.bytes_per_second != 0) {
    const double needed_s =
        static_cast<double>(wait.waiting_bytes) / static_cast<double>(wait.bytes_per_second);
    wait.us = std::max(wait.us, static_cast<int64_t>(std::min(needed_s, 1e6) * 1e6));
  }
  if (wait.silent_us > usual_silence_us) wait.us = std::max(wait.us, wait.silent_us);
  if (wait.us < kWaitUsMin) wait.us = 0;
  return wait;
}

LinkArrivals LinkMeter::PopArrivals(const std::vector<Lane>& lanes, AskTcp ask) {
  LinkArrivals sum;
  for (const Lane& lane : lanes) {
    Seen& seen = Of(lane.index);
    const bool used = lane.sent != std::exchange(seen.sent, lane.sent);
    const bool arrived_before = std::exchange(seen.idle, lane.idle);
    if (!used && arrived_before) continue;
    const std::optional<TcpDelivery> tcp = ask(lane.index);
    if (!tcp || tcp->bytes_arrived <= seen.arrived) continue;
    sum.rtt_us = std::max(sum.rtt_us, tcp->rtt_us);
    const uint64_t bytes = tcp->bytes_arrived - seen.arrived;
    sum.bytes += bytes;
    // A lane that was opened while queues were full does not know the shortest round trip.
    schedule_->SawRtt(tcp->rtt_us);
    sum.queued_us += bytes * QueuedUs(*tcp);
    seen.arrived = tcp->bytes_arrived;
  }
  if (sum.bytes == 0) return sum;
  sum.shared_queued_us = SharedQueuedUs(sum.bytes, sum.queued_us, ask);
  schedule_->Arrived(sum.bytes, sum.shared_queued_us / sum.bytes);
  return sum;
}

// For how long packets of this lane wait in queues of the path.
uint64_t LinkMeter::QueuedUs(const TcpDelivery& lane) const {
  return static_cast<uint64_t>(std::max<int64_t>(lane.usual_rtt_us - schedule_->rtt_us(), 0));
}

// `bytes` waited in queues for `queued_us`, added up. Returns how much of that counts as time in
// queues that all lanes share. The control lane carries little, so its packets wait only there. If
// packets of data lanes wait clearly longer, the network limits each connection. Queues on the way
// back, which other hosts fill, do not matter then. (The measurement of the control lane is
// rougher, since an acknowledgement may wait for a frame to travel with.)
uint64_t LinkMeter::SharedQueuedUs(uint64_t bytes, uint64_t queued_us, AskTcp ask) {
  const std::optional<TcpDelivery> control = ask(kControlLane);
  if (!control || control->usual_rtt_us == 0) return queued_us;
  const uint64_t of_control = QueuedUs(*control);
  // It follows changes as slowly as the measurement of the control lane.
  usual_queued_us_ = (3 * usual_queued_us_ + queued_us / bytes) / 4;
  const int64_t rtt_us = schedule_->rtt_us();
  if (usual_queued_us_ > of_control && !QueuesAreShort(usual_queued_us_ - of_control, rtt_us)) {
    return 0;
  }
  return QueuesAreShort(of_control, rtt_us) ? std::min(queued_us, bytes * of_control) : queued_us;
}

}  // namespace longhaul::peerd
