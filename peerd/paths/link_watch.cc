#include "peerd/paths/link_watch.h"

#include <algorithm>
#include <utility>

#include "peerd/paths/news.h"

namespace longhaul::peerd {
namespace {

constexpr Tick kNotSaid{INT64_MIN / 2};

template <class T>
void DropOld(std::deque<std::pair<Tick, T>>* samples, Tick now) {
  while (!samples->empty() && now - samples->front().first > LinkWatch::kWindow) {
    samples->pop_front();
  }
}

}  // namespace

void LinkWatch::Add(PeerId peer, const RateSample& sample, Tick now) {
  if (peer == self_) return;
  Watched& link = links_[peer];
  DropOld(&link.rtts, now);
  if (sample.rtt_us != 0) {
    while (!link.rtts.empty() && link.rtts.back().second >= sample.rtt_us) link.rtts.pop_back();
    link.rtts.emplace_back(now, sample.rtt_us);
    if (link.rtts.size() > kSamplesMax) link.rtts.pop_front();
    link.rtt_us = link.rtts.front().second;
  }
  if (sample.bytes_per_second == 0) return;
  const bool held_now = std::exchange(link.held_now, false);
  if (held_now) {
    link.held_samples = kHeldSamples;
    ++link.held_seen;
  } else if (link.held_samples > 0 && --link.held_samples == 0) {
    link.held_seen = 0;
  }
  DropOld(&link.samples, now);
  if (link.samples.empty()) link.since = now;
  if (now - link.at > kForget) link.rate = 0;
  // A sample with too little to send, with too few connections, or beside other links is only a
  // lower bound.
  const uint64_t known = link.samples.empty() ? link.rate : link.samples.front().second;
  const bool crowded = sample.crowded && !held_now;
  const bool may_carry_more = sample.few_connections || crowded;
  const bool bound = sample.limited_by_sender || may_carry_more;
  // What is more than a bound stays so, unless clearly more comes.
  if (crowded && !link.at_least && sample.bytes_per_second < known + known / 20) return;
  if (bound && sample.bytes_per_second < known) return;
  if (sample.limited_by_sender && known == 0) return;
  while (!link.samples.empty() && link.samples.back().second <= sample.bytes_per_second) {
    link.samples.pop_back();
  }
  link.samples.emplace_back(now, sample.bytes_per_second);
  if (link.samples.size() > kSamplesMax) link.samples.pop_front();
  const uint64_t highest = link.samples.front().second;
  const bool confirmed = now - link.since >= kConfirm;
  if (highest < link.rate && !confirmed) return;
  link.at_least = may_carry_more || (!confirmed && (link.rate == 0 || link.at_least));
  link.rate = highest;
  link.at = now;
}

void LinkWatch::SetRtt(PeerId peer, uint32_t rtt_us) {
  if (peer == self_ || rtt_us == 0) return;
  Watched& link = links_[peer];
  if (link.rtts.empty() && link.rate == 0) link.rtt_us = rtt_us;
}

void LinkWatch::SetHeld(PeerId peer) {
  if (peer != self_) links_[peer].held_now = true;
}

void LinkWatch::SetSmallPackets(PeerId peer, bool small) {
  const auto link = links_.find(peer);
  if (link != links_.end()) {
    link->second.small_packets = small;
  } else if (small && peer != self_) {
    links_[peer].small_packets = true;
  }
}

LinkWatch::Known LinkWatch::Look(PeerId peer) const {
  const auto link = links_.find(peer);
  if (link == links_.end()) return {};
  return {link->second.rate, link->second.rtt_us};
}

std::optional<Tick> LinkWatch::Measured(PeerId peer) const {
  const auto link = links_.find(peer);
  if (link == links_.end() || link->second.rate == 0) return std::nullopt;
  return link->second.at;
}

control::LinkReport LinkWatch::PopReport(Tick now) {
  control::LinkReport report;
  for (auto& [peer, link] : links_) {
    const bool measured = link.rate != 0 && now - link.at <= kForget;
    const bool rtt_alone = link.rate == 0 && link.rtt_us != 0;
    if (!measured && !rtt_alone && !link.small_packets) continue;
    if (report.links.size() >= control::kLinkMeasuresMax) break;
    const bool held = link.held_seen >= kHeldSeen;
    const bool changed = IsNews(link.rate, link.said_rate) ||
                         IsNews(link.rtt_us, link.said_rtt_us) ||
                         link.at_least != link.said_at_least ||
                         link.small_packets != link.said_small_packets || held != link.said_held;
    if (!changed && now - link.said_at < kReportRepeat) continue;
    link.said_rate = link.rate;
    link.said_at_least = link.at_least;
    link.said_held = held;
    link.said_rtt_us = link.rtt_us;
    link.said_small_packets = link.small_packets;
    link.said_at = now;
    control::LinkMeasure& said = report.links.emplace_back();
    said.from = self_;
    said.to = peer;
    said.small_packets = link.small_packets;
    if (measured || rtt_alone) said.rtt_us = link.rtt_us;
    if (!measured) continue;
    said.bytes_per_second = link.rate;
    said.age_ms = static_cast<uint32_t>((now - link.at) / Millis(1));
    said.at_least = link.at_least;
    said.held = held;
  }
  return report;
}

void LinkWatch::SayAllAgain() {
  for (auto& [peer, link] : links_) link.said_at = kNotSaid;
}

void LinkWatch::Keep(const std::vector<PeerId>& peers) {
  std::erase_if(links_, [&peers](const auto& entry) {
    return std::find(peers.begin(), peers.end(), entry.first) == peers.end();
  });
}

}  // namespace longhaul::peerd
