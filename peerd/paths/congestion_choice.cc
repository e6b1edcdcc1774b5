#include "peerd/paths/congestion_choice.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "peerd/paths/lane_count.h"

namespace longhaul::peerd {
namespace {

// One measurement, and what is left out after a change: packets that the old control has sent may
// still be repeated, and connections find their rate anew.
constexpr int64_t kMeasuredUs = Seconds(6);
constexpr int64_t kSettlingUs = Seconds(4);
// A measurement with fewer bytes says nothing about how many are repeated.
constexpr uint64_t kMeasuredBytesMin = 4 << 20;
// From so many repeated bytes on the other control is tried, and from so many it is tried soon.
constexpr uint64_t kMuchPerMille = 15;
constexpr int64_t kSoonUs = Seconds(2);
constexpr uint64_t kVeryMuchPerMille = 50;
// Packets are lost at random if at least one byte of so many is repeated, and at least so many are,
// though queues are short.
constexpr uint64_t kLossyOneOf = 2000;
constexpr uint64_t kLossyBytesMin = 16 << 10;
// Payload of a packet, and how much faster than the model connections may be in a measurement. With
// larger packets the model gives too little, so bbr is tried less often.
constexpr double kPacketBytes = 1400;
constexpr double kModelTolerance = 1.5;
// Up to this, two controls are about as good: measurements also differ because their ops and the
// controls of other hosts differ.
constexpr uint64_t kEqualPercent = 120;
// Where packets are lost at random, a control that is so much faster is better, whatever it
// repeats.
constexpr uint64_t kFarFasterPercent = 150;
// A control that repeats at most this part of what the one before did may be slower.
constexpr uint64_t kFewerPercent = 67;
// Below this part of the rate with which a control won, it is questioned.
constexpr uint64_t kFallenPercent = 50;
// A control that repeats clearly fewer bytes is kept unless it is so slow.
constexpr uint64_t kFarSlowerPercent = 40;
// The loser is tried again after this time. One that repeats clearly fewer bytes may have been slow
// only because other hosts of the op were, for instance while they tried it too. One that repeats
// many bytes although packets wait may have suffered from queues that other hosts filled. So both
// are tried again sooner, and each time after twice as long.
constexpr int64_t kAgainUs = Seconds(300);
constexpr int64_t kSoonAgainUs = Seconds(20);
// If it seems to lose packets at random, the path is the more likely reason.
constexpr int64_t kSoonAgainLossyUs = Seconds(60);

constexpr char kCubic[] = "cubic";
constexpr char kBbr[] = "bbr";

}  // namespace

std::string CongestionChoice::OtherThan(const std::string& system_default) {
  return system_default == kCubic ? kBbr : kCubic;
}

CongestionChoice::CongestionChoice(std::string system_default, std::string other)
    : names_{std::move(system_default), std::move(other)} {}

std::string CongestionChoice::Add(const Sample& sample, Tick now) {
  if (names_[1].empty() || names_[1] == names_[0]) return "";
  if (settle_us_ > 0) {
    settle_us_ -= sample.us;
    return "";
  }
  sum_.us += sample.us;
  sum_.bytes += sample.bytes;
  sum_.bytes_repeated += sample.bytes_repeated;
  sum_.arrived += sample.arrived;
  sum_.queued_us += sample.queued_us;
  sum_.rtt_us = std::max(sum_.rtt_us, sample.rtt_us);
  sum_.round_trips = std::max(sum_.round_trips, sample.round_trips);
  const bool very_much = sum_.bytes_repeated * 1000 >= sum_.bytes * kVeryMuchPerMille;
  const int64_t enough = !trying_ && very_much ? kSoonUs : kMeasuredUs;
  if (sum_.us < enough || sum_.bytes < kMeasuredBytesMin) return "";
  const Sample sum = std::exchange(sum_, {});
  return Judge({.rate = sum.bytes * Seconds(1) / static_cast<uint64_t>(sum.us),
                .per_mille = sum.bytes_repeated * 1000 / sum.bytes,
                .lossy = LosesAtRandom(sum)},
               now);
}

bool CongestionChoice::LosesAtRandom(const Sample& sum) const {
  const bool short_queues =
      sum.arrived != 0 && QueuesAreShort(sum.queued_us / sum.arrived, sum.rtt_us);
  if (!short_queues || sum.bytes_repeated < kLossyBytesMin ||
      sum.bytes_repeated * kLossyOneOf < sum.bytes) {
    return false;
  }
  if (in_use() == kBbr) return true;
  // The packets that a connection has on the way: at short round trips as many as one that halves
  // its window at each loss, at long ones more.
  const double loss = static_cast<double>(sum.bytes_repeated) / static_cast<double>(sum.bytes);
  const double rtt_s = static_cast<double>(sum.rtt_us) / Seconds(1);
  const double packets = std::max(std::sqrt(1.5 / loss), 1.054 * std::pow(rtt_s / loss, 0.75));
  const double rate = sum.round_trips * packets * kPacketBytes;
  return static_cast<double>(sum.bytes) <=
         kModelTolerance * rate * static_cast<double>(sum.us) / Seconds(1);
}

bool CongestionChoice::HasFallen(const Measured& measured) const {
  return measured.rate * 100 < rate_won_ * kFallenPercent;
}

// Where cubic overruns queues, bbr overruns them more. So many repeated bytes are no reason for
// bbr.
bool CongestionChoice::FearsLosses() const { return now_ == 0 && names_[1] == kBbr; }

bool CongestionChoice::IsReasonToTry(const Measured& measured) const {
  if (HasFallen(measured)) return true;
  return FearsLosses() ? measured.lossy : measured.per_mille >= kMuchPerMille;
}

bool CongestionChoice::RepeatsFewer(const Measured& measured) const {
  return measured.per_mille * 100 <= before_.per_mille * kFewerPercent;
}

bool CongestionChoice::IsWorse(const Measured& measured) const {
  const bool tries_bbr = names_[now_] == kBbr;
  const bool had_bbr = names_[1 - now_] == kBbr;
  if (tries_bbr || had_bbr) {
    const Measured& bbr = tries_bbr ? measured : before_;
    const Measured& other = tries_bbr ? before_ : measured;
    // The other one is slow because packets are lost at random: the path has room.
    if (other.lossy && bbr.rate * 100 >= other.rate * kFarFasterPercent) return had_bbr;
  }
  if (tries_bbr && names_[0] == kCubic) {
    return measured.worth() * 100 < before_.worth() * kEqualPercent;
  }
  // The worth and not the rate: a control that overruns queues puts more on the way than arrives.
  if (RepeatsFewer(measured)) {
    return measured.rate * 100 < before_.worth() * kFarSlowerPercent;
  }
  return before_.worth() * 100 > measured.worth() * kEqualPercent;
}

std::string CongestionChoice::Judge(const Measured& measured, Tick now) {
  const auto figures = [](const Measured& of) {
    return absl::StrCat(of.per_mille, " per mille at ", of.rate, " bytes/s");
  };
  if (!trying_) {
    if (now < try_after_ || !IsReasonToTry(measured)) {
      doubted_ = false;
      return "";
    }
    // A control that has won repeats much now and then, and one such measurement says little.
    if (rate_won_ != 0 && !std::exchange(doubted_, true)) return "";
    doubted_ = false;
    trying_ = true;
    before_ = measured;
    const char* const why = HasFallen(measured) ? "has become slow"
                            : FearsLosses()     ? "loses packets at random"
                                                : "repeats much";
    return Switch(absl::StrCat(names_[now_], " ", why, ": ", figures(measured)));
  }
  const bool worse = IsWorse(measured);
  // One measurement may be low by chance, for instance because other hosts change their controls.
  if (worse && !std::exchange(doubted_, true)) return "";
  doubted_ = false;
  trying_ = false;
  const bool overruns = measured.per_mille >= kMuchPerMille && !measured.lossy;
  const bool soon = worse && (RepeatsFewer(measured) || overruns);
  const bool loses_at_random = measured.lossy && before_.per_mille < kVeryMuchPerMille;
  const int64_t first = loses_at_random ? kSoonAgainLossyUs : kSoonAgainUs;
  soon_again_us_ = soon ? std::clamp(2 * soon_again_us_, first, kAgainUs) : 0;
  try_after_ = now + (soon ? soon_again_us_ : kAgainUs);
  rate_won_ = worse ? before_.rate : measured.rate;
  if (!worse) return "";
  return Switch(absl::StrCat(names_[now_], " is not better: ", figures(measured),
                             ", before: ", figures(before_)));
}

std::string CongestionChoice::Switch(const std::string& why) {
  now_ = 1 - now_;
  settle_us_ = kSettlingUs;
  return why;
}

}  // namespace longhaul::peerd
