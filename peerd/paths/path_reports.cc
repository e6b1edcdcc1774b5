#include "peerd/paths/path_reports.h"

#include <algorithm>
#include <set>

namespace longhaul::peerd {

void PathReports::Look(Tick now, const HostSample& sample, uint64_t received, bool op_ended) {
  int64_t waiting_us = 0;
  for (const HostSample::Waiting& link : sample.waiting) waiting_us = std::max(waiting_us, link.us);
  host_.Add(now, sample.bytes, received, sample.arrivals.rtt_us, op_ended,
            {.up_full = sample.up_full, .waiting_us = waiting_us});
  for (const HostSample::Waiting& link : sample.waiting) {
    if (host_.Holds(link.us, link.rtt_us, sample.waiting.size(), sample.links)) {
      links_.SetHeld(link.peer);
    }
  }
}

void PathReports::AddRates(std::vector<std::pair<PeerId, RateSample>> rates, Tick now) {
  uint64_t sent = 0;
  for (const auto& [peer, rate] : rates) sent += rate.bytes_sent;
  for (auto& [peer, rate] : rates) {
    rate.crowded = sent - rate.bytes_sent > rate.bytes_sent / 8;
    links_.Add(peer, rate, now);
  }
}

control::LinkReport PathReports::PopReport(const std::vector<Link>& up, Tick now) {
  std::vector<PeerId> peers;
  peers.reserve(up.size());
  std::set<PeerId> small;
  for (const Link& link : up) {
    peers.push_back(link.peer);
    links_.SetRtt(link.peer, link.rtt_us);
    if (link.small_packets) small.insert(link.peer);
  }
  for (const PeerId peer : peers) links_.SetSmallPackets(peer, small.contains(peer));
  links_.Keep(peers);
  control::LinkReport report = links_.PopReport(now);
  (void)host_.PopReport(now, &report);
  return report;
}

void PathReports::SayAllAgain() {
  links_.SayAllAgain();
  host_.SayAgain();
}

std::optional<PeerId> PathReports::NextProbe(std::vector<ProbeCandidate> links, Tick now) {
  for (ProbeCandidate& link : links) link.measured = links_.Measured(link.peer);
  return probes_.Next(links, now);
}

void PathReports::Probed(PeerId peer, const RateSample& rate, bool failed, Tick begun, Tick ended,
                         Tick now) {
  probes_.Ended(begun, ended);
  if (!failed) links_.Add(peer, rate, now);
}

}  // namespace longhaul::peerd
