#include "peerd/paths/receive_pace.h"

#include <algorithm>
#include <utility>

namespace longhaul::peerd {
namespace {

// What a sender tells is not believed beyond this.
constexpr uint64_t kWaitUsMax = Seconds(10);

}  // namespace

void ReceivePace::OnTold(uint64_t link, const Told& told) { senders_[link].told = told; }

void ReceivePace::Received(uint64_t link, int64_t rtt_us, uint64_t bytes, Tick now) {
  if (bytes == 0) return;
  Sender& sender = senders_[link];
  sender.received += bytes;
  pace_.Sent(link, rtt_us, bytes, now);
  pace_.QueueEmptied(link);  // this host does not know whether more is waiting
  const uint64_t queued_us = bytes * std::min(sender.told.wait_us, kWaitUsMax);
  pace_.Arrived(link, bytes, {.shared_us = queued_us, .any_us = queued_us});
}

void ReceivePace::Remove(uint64_t link) {
  senders_.erase(link);
  pace_.Remove(link);
}

std::string ReceivePace::Measure(Tick now) {
  bool settled = true;
  for (auto& [link, sender] : senders_) {
    if (sender.received == 0) continue;
    const uint64_t received = std::exchange(sender.received, 0);
    const uint64_t before = std::exchange(sender.repeated, sender.told.repeated);
    const uint64_t repeated = sender.repeated - std::min(before, sender.repeated);
    // So that a sender cannot say more than it can have sent.
    pace_.Repeated(link, received, std::min(repeated, received));
    settled &= !sender.told.tries;
  }
  return pace_.Measure(settled, now);
}

uint64_t ReceivePace::RateOf(uint64_t link, Tick now) const {
  const auto sender = senders_.find(link);
  if (sender != senders_.end() && sender->second.told.tries) return 0;
  return pace_.RateOf(link, now);
}

}  // namespace longhaul::peerd
