#include "coordinator/core/suspicion.h"

#include <algorithm>

namespace longhaul::coordinator {
namespace {

constexpr Tick kLongAgo{INT64_MIN / 2};

}  // namespace

// ------------------------------------------------------------------------------
// reports

// With two witnesses or more, the accusation waits for half of detect_ms. If the suspect is dead,
// all witnesses report it silent within that time, and then it counts at once
// (Group::AccusedByAll). If there was only a short outage, a witness hears the suspect again.
void Suspicion::Accuse(const LostLink& link, const Evidence& evidence, Tick now) {
  const int64_t doubt_us = evidence.witnesses >= 2 ? detect_us_ / kDoubtShare : Grace(evidence);
  accusations_.try_emplace(link, evidence.silent_ms > 0 ? now + doubt_us : kLongAgo);
}

bool Suspicion::Lose(const LostLink& link, const Evidence& evidence, Loss loss, Tick now) {
  loss.due = now + Grace(evidence);
  return losses_.try_emplace(link, std::move(loss)).second;
}

void Suspicion::Absolve(PeerId reporter, Epoch epoch) {
  std::erase_if(accusations_, [&](const auto& entry) { return entry.first.first == reporter; });
  std::erase_if(losses_, [&](const auto& entry) {
    return entry.first.first == reporter && entry.second.epoch < epoch;
  });
}

std::vector<LostLink> Suspicion::LossesDue(Tick now) const {
  std::vector<LostLink> due;
  for (const auto& [link, loss] : losses_) {
    if (loss.due <= now) due.push_back(link);
  }
  return due;
}

std::optional<Suspicion::Loss> Suspicion::RemoveLoss(const LostLink& link) {
  auto loss = losses_.extract(link);
  if (loss.empty()) return std::nullopt;
  return std::move(loss.mapped());
}

bool Suspicion::Accuses(const LostLink& link, Tick at) const {
  const auto accusation = accusations_.find(link);
  return accusation != accusations_.end() && accusation->second <= at;
}

std::vector<PeerId> Suspicion::NewlyAccused(Tick now) {
  std::vector<PeerId> accused;
  for (auto& [link, from] : accusations_) {
    if (from == kLongAgo || from > now) continue;
    accused.push_back(link.second);
    from = kLongAgo;
  }
  return accused;
}

// ------------------------------------------------------------------------------
// blocked pairs

void Suspicion::Start(Tick now) {
  for (auto& [pair, retry] : retries_) {
    if (retry.since == kNever) retry.since = now;
  }
}

bool Suspicion::Block(const control::BlockedPair& pair, int64_t retry_us, Tick now) {
  const auto [retry, fresh] = retries_.try_emplace(pair);
  retry->second.since = now;
  retry->second.after_us = retry_us;
  return fresh;
}

void Suspicion::Strike(const control::BlockedPair& pair, Tick now) {
  Strikes& strikes = strikes_[pair];
  strikes.count = now - strikes.last > kStrikesForgotten ? 1 : strikes.count + 1;
  if (now - strikes.last > kSilencesForgotten) strikes.silences = 0;
  strikes.last = now;
}

bool Suspicion::StrikesTooOften(const control::BlockedPair& pair) const {
  const auto strikes = strikes_.find(pair);
  return strikes != strikes_.end() && strikes->second.count > kStrikesMax;
}

void Suspicion::FailRelay(const control::BlockedPair& pair, PeerId relay) {
  retries_.at(pair).failed_relays.insert(relay);
}

FailedRelays Suspicion::failed_relays() const {
  FailedRelays failed;
  for (const auto& [pair, retry] : retries_) {
    if (!retry.failed_relays.empty()) failed.emplace(pair, retry.failed_relays);
  }
  return failed;
}

int64_t Suspicion::NextSilentRetry(const control::BlockedPair& pair) {
  return std::min(kSilentRetry << 2 * std::min(strikes_[pair].silences++, 3u), kBlockedRetry);
}

void Suspicion::TryAgain(const control::BlockedPair& pair) { retries_[pair].since = kLongAgo; }

void Suspicion::TryAgain(PeerId peer) {
  for (auto& [pair, retry] : retries_) {
    if (pair.a == peer || pair.b == peer) retry.since = kLongAgo;
  }
}

bool Suspicion::TryDue(const control::BlockedPair& pair, Tick now) const {
  const Retry& retry = retries_.at(pair);
  return now - retry.since >= retry.after_us;
}

bool Suspicion::BlockedBefore(const control::BlockedPair& pair, Tick when) const {
  const auto retry = retries_.find(pair);
  return retry != retries_.end() && retry->second.since < when;
}

// ------------------------------------------------------------------------------
// both

void Suspicion::ForgetReportsOf(const std::function<bool(PeerId)>& stranger) {
  std::erase_if(accusations_, [&](const auto& entry) {
    return stranger(entry.first.first) || stranger(entry.first.second);
  });
}

void Suspicion::ForgetPairsOf(const std::function<bool(PeerId)>& stranger,
                              const std::function<bool(const control::BlockedPair&)>& blocked) {
  std::erase_if(retries_, [&](const auto& entry) { return !blocked(entry.first); });
  std::erase_if(strikes_, [&](const auto& entry) {
    return stranger(entry.first.a) || stranger(entry.first.b);
  });
}

Tick Suspicion::NextDeadline() const {
  Tick next = kNever;
  for (const auto& [link, loss] : losses_) next = std::min(next, loss.due);
  for (const auto& [link, from] : accusations_) {
    if (from != kLongAgo) next = std::min(next, from);
  }
  return next;
}

void Suspicion::Postpone(int64_t us) {
  for (auto& [link, loss] : losses_) loss.due = loss.due + us;
  for (auto& [link, from] : accusations_) {
    if (from != kLongAgo) from = from + us;
  }
}

void Suspicion::AddTo(Digester* digest) const {
  digest->Add(strikes_.size());
  for (const auto& [pair, strikes] : strikes_) {
    digest->Add(pair.a).Add(pair.b).Add(strikes.last);
    digest->Add(uint64_t{strikes.count}).Add(uint64_t{strikes.silences});
  }
  digest->Add(retries_.size());
  for (const auto& [pair, retry] : retries_) {
    digest->Add(pair.a).Add(pair.b);
    digest->Add(retry.since).Add(static_cast<uint64_t>(retry.after_us));
    digest->Add(retry.failed_relays);
  }
  digest->Add(losses_.size());
  for (const auto& [link, loss] : losses_) {
    digest->Add(link.first).Add(link.second).Add(loss.due).Add(loss.epoch).Add(loss.reason);
    digest->Add(loss.fault);
  }
  digest->Add(accusations_.size());
  for (const auto& [link, from] : accusations_) {
    digest->Add(link.first).Add(link.second).Add(from);
  }
}

}  // namespace longhaul::coordinator
