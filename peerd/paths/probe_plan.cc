#include "peerd/paths/probe_plan.h"

#include <algorithm>
#include <tuple>

#include "base/prng.h"

namespace longhaul::peerd {

ProbePlan::ProbePlan(PeerId self, int64_t interval_us) : self_(self), interval_us_(interval_us) {}

// Returns a number that differs from peer to peer. So two peers probe at different moments and in a
// different order.
uint64_t ProbePlan::Draw(PeerId peer) const {
  return Prng(self_.value() * 0x9e3779b97f4a7c15 + peer.value()).Next();
}

std::optional<PeerId> ProbePlan::Next(const std::vector<ProbeCandidate>& links, Tick now) {
  if (interval_us_ == 0 || links.empty()) return std::nullopt;
  if (!begun_) {
    begun_ = true;
    due_ = now + static_cast<int64_t>(Draw(self_) % static_cast<uint64_t>(interval_us_));
  }
  if (now < due_) return std::nullopt;
  std::erase_if(tried_, [&links](const auto& tried) {
    return std::none_of(links.begin(), links.end(),
                        [&tried](const ProbeCandidate& c) { return c.peer == tried.first; });
  });
  std::optional<std::tuple<bool, Tick, uint64_t, PeerId>> best;
  for (const ProbeCandidate& link : links) {
    if (link.measured && now - *link.measured < kFresh) continue;
    const auto tried = tried_.find(link.peer);
    const Tick before = tried == tried_.end() ? Tick{INT64_MIN} : tried->second;
    const std::tuple rank(link.in_use, before, Draw(link.peer), link.peer);
    if (!best || rank < *best) best = rank;
  }
  if (!best) return std::nullopt;
  const PeerId peer = std::get<PeerId>(*best);
  tried_[peer] = now;
  due_ = now + interval_us_;
  return peer;
}

void ProbePlan::Ended(Tick begun, Tick now) { due_ = std::max(due_, now + kShare * (now - begun)); }

}  // namespace longhaul::peerd
