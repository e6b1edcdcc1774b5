#include "coordinator/core/link_reports.h"

#include <algorithm>

namespace longhaul::coordinator {
namespace {

constexpr Tick kLongAgo{INT64_MIN / 2};

}  // namespace

// ------------------------------------------------------------------------------
// reports

// With two witnesses or more, the accusation waits for half of detect_ms. If the accused is dead,
// all witnesses report it silent within that time, and then it counts at once
// (Accusations::ByAll). If there was only a short outage, a witness hears the accused again.
void LinkReports::Accuse(const LinkEnds& link, const Evidence& evidence, Tick now) {
  const int64_t doubt_us = evidence.witnesses >= 2 ? detect_us_ / kDoubtShare : Grace(evidence);
  accusations_.try_emplace(link, evidence.silent_ms > 0 ? now + doubt_us : kLongAgo);
}

bool LinkReports::Lose(const LinkEnds& link, const Evidence& evidence, Loss loss, Tick now) {
  loss.due = now + Grace(evidence);
  return losses_.try_emplace(link, std::move(loss)).second;
}

void LinkReports::Absolve(PeerId reporter, Epoch epoch) {
  std::erase_if(accusations_, [&](const auto& entry) { return entry.first.first == reporter; });
  std::erase_if(losses_, [&](const auto& entry) {
    return entry.first.first == reporter && entry.second.epoch < epoch;
  });
}

std::vector<LinkEnds> LinkReports::LossesDue(Tick now) const {
  std::vector<LinkEnds> due;
  for (const auto& [link, loss] : losses_) {
    if (loss.due <= now) due.push_back(link);
  }
  return due;
}

std::optional<LinkReports::Loss> LinkReports::RemoveLoss(const LinkEnds& link) {
  auto loss = losses_.extract(link);
  if (loss.empty()) return std::nullopt;
  return std::move(loss.mapped());
}

bool LinkReports::Accuses(const LinkEnds& link, Tick at) const {
  const auto accusation = accusations_.find(link);
  return accusation != accusations_.end() && accusation->second <= at;
}

std::vector<PeerId> LinkReports::NewlyAccused(Tick now) {
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

void LinkReports::Start(Tick now) {
  for (auto& [pair, retry] : retries_) {
    if (retry.since == kNever) retry.since = now;
  }
}

bool LinkReports::Block(const control::BlockedPair& pair, int64_t retry_us, Tick now) {
  const auto [retry, fresh] = retries_.try_emplace(pair);
  retry->second.since = now;
  retry->second.after_us = retry_us;
  return fresh;
}

void LinkReports::Strike(const control::BlockedPair& pair, Tick now) {
  Strikes& strikes = strikes_[pair];
  strikes.count = now - strikes.last > kStrikesForgotten ? 1 : strikes.count + 1;
  if (now - strikes.last > kSilencesForgotten) strikes.silences = 0;
  strikes.last = now;
}

bool LinkReports::StrikesTooOften(const control::BlockedPair& pair) const {
  const auto strikes = strikes_.find(pair);
  return strikes != strikes_.end() && strikes->second.count > kStrikesMax;
}

void LinkReports::FailRelay(const control::BlockedPair& pair, PeerId relay) {
  retries_.at(pair).failed_relays.insert(relay);
}

FailedRelays LinkReports::failed_relays() const {
  FailedRelays failed;
  for (const auto& [pair, retry] : retries_) {
    if (!retry.failed_relays.empty()) failed.emplace(pair, retry.failed_relays);
  }
  return failed;
}

int64_t LinkReports::NextSilentRetry(const control::BlockedPair& pair) {
  return std::min(kSilentRetry << 2 * std::min(strikes_[pair].silences++, 3u), kBlockedRetry);
}

void LinkReports::TryAgain(const control::BlockedPair& pair) { retries_[pair].since = kLongAgo; }

void LinkReports::TryAgain(PeerId peer) {
  for (auto& [pair, retry] : retries_) {
    if (pair.a == peer || pair.b == peer) retry.since = kLongAgo;
  }
}

bool LinkReports::TryDue(const control::BlockedPair& pair, Tick now) const {
  const Retry& retry = retries_.at(pair);
  return now - retry.since >= retry.after_us;
}

bool LinkReports::BlockedBefore(const control::BlockedPair& pair, Tick when) const {
  const auto retry = retries_.find(pair);
  return retry != retries_.end() && retry->second.since < when;
}

// ------------------------------------------------------------------------------
// both

void LinkReports::ForgetReportsOf(const std::function<bool(PeerId)>& stranger) {
  std::erase_if(accusations_, [&](const auto& entry) {
    return stranger(entry.first.first) || stranger(entry.first.second);
  });
}

void LinkReports::ForgetPairsOf(const std::function<bool(PeerId)>& stranger,
                                const std::function<bool(const control::BlockedPair&)>& blocked) {
  std::erase_if(retries_, [&](const auto& entry) { return !blocked(entry.first); });
  std::erase_if(strikes_, [&](const auto& entry) {
    return stranger(entry.first.a) || stranger(entry.first.b);
  });
}

Tick LinkReports::NextDeadline() const {
  Tick next = kNever;
  for (const auto& [link, loss] : losses_) next = std::min(next, loss.due);
  for (const auto& [link, from] : accusations_) {
    if (from != kLongAgo) next = std::min(next, from);
  }
  return next;
}

void LinkReports::Postpone(int64_t us) {
  for (auto& [link, loss] : losses_) loss.due = loss.due + us;
  for (auto& [link, from] : accusations_) {
    if (from != kLongAgo) from = from + us;
  }
}

}  // namespace longhaul::coordinator
