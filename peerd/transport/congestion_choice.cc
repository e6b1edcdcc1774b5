#include "peerd/transport/congestion_choice.h"

#include <utility>

#include "absl/strings/str_cat.h"

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
// Up to this, two controls are about as good: measurements also differ because their ops and the
// controls of other hosts differ.
constexpr uint64_t kEqualPercent = 120;
// A control that repeats at most this part of what the one before did may be slower.
constexpr uint64_t kFewerPercent = 67;
// Below this part of the rate before, the choice is wrong, or may have become wrong.
constexpr uint64_t kFallenPercent = 50;
constexpr int64_t kAgainUs = Seconds(300);

}  // namespace

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
  const bool very_much = sum_.bytes_repeated * 1000 >= sum_.bytes * kVeryMuchPerMille;
  const int64_t enough = !trying_ && very_much ? kSoonUs : kMeasuredUs;
  if (sum_.us < enough || sum_.bytes < kMeasuredBytesMin) return "";
  const Sample sum = std::exchange(sum_, {});
  return Judge({.rate = sum.bytes * Seconds(1) / static_cast<uint64_t>(sum.us),
                .per_mille = sum.bytes_repeated * 1000 / sum.bytes},
               now);
}

std::string CongestionChoice::Judge(const Measured& measured, Tick now) {
  if (!trying_) {
    const bool fallen = measured.rate * 100 < rate_won_ * kFallenPercent;
    if (now < try_after_ || (measured.per_mille < kMuchPerMille && !fallen)) return "";
    trying_ = true;
    before_ = measured;
    return Switch(absl::StrCat(names_[now_], fallen ? " has become slow: " : " repeats much: ",
                               measured.per_mille, " per mille at ", measured.rate, " bytes/s"));
  }
  const bool fewer = measured.per_mille * 100 <= before_.per_mille * kFewerPercent;
  // The worth and not the rate: a control that overruns queues puts more on the way than arrives.
  const bool slow = measured.rate * 100 < before_.worth() * kFallenPercent;
  const bool worth_less = before_.worth() * 100 > measured.worth() * kEqualPercent;
  const bool worse = fewer ? slow : worth_less;
  // One measurement may be low by chance, for instance because other hosts change their controls.
  if (worse && !std::exchange(doubted_, true)) return "";
  doubted_ = false;
  trying_ = false;
  try_after_ = now + kAgainUs;
  rate_won_ = worse ? before_.rate : measured.rate;
  if (!worse) return "";
  return Switch(absl::StrCat(names_[now_], " is worse: ", measured.per_mille, " per mille at ",
                             measured.rate, " bytes/s, before: ", before_.per_mille,
                             " per mille at ", before_.rate));
}

std::string CongestionChoice::Switch(const std::string& why) {
  now_ = 1 - now_;
  settle_us_ = kSettlingUs;
  return why;
}

}  // namespace longhaul::peerd
