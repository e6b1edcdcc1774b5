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
// From so many repeated bytes on bbr is questioned.
constexpr uint64_t kMuchPerMille = 15;
// Packets are lost at random if at least one byte of so many is repeated, and at least so many are,
// though queues are short.
constexpr uint64_t kLossyOneOf = 2000;
constexpr uint64_t kLossyBytesMin = 16 << 10;
// Payload of a packet, and how much faster than the model connections may be in a measurement. With
// larger packets the model gives too little, so bbr is tried less often.
constexpr double kPacketBytes = 1400;
constexpr double kModelTolerance = 1.5;
// The worth of bbr has to be so much higher: measurements also differ because their ops and the
// controls of other hosts differ.
constexpr uint64_t kBetterPercent = 120;
// Where packets are lost at random, a control that is so much faster is better, whatever it
// repeats.
constexpr uint64_t kFarFasterPercent = 150;
// The loser is tried again after this time.
constexpr int64_t kAgainUs = Seconds(300);

}  // namespace

std::string CongestionChoice::Add(const Sample& sample, Tick now) {
  if (!offers_bbr_) return "";
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
  if (sum_.us < kMeasuredUs || sum_.bytes < kMeasuredBytesMin) return "";
  const Sample sum = std::exchange(sum_, {});
  return Judge({.rate = sum.bytes * Seconds(1) / static_cast<uint64_t>(sum.us),
                .per_mille = sum.bytes_repeated * 1000 / sum.bytes,
                .lossy = LosesAtRandom(sum)},
               now);
}

bool CongestionChoice::LosesAtRandom(const Sample& sum) {
  const bool short_queues =
      sum.arrived != 0 && QueuesAreShort(sum.queued_us / sum.arrived, sum.rtt_us);
  if (!short_queues || sum.bytes_repeated < kLossyBytesMin ||
      sum.bytes_repeated * kLossyOneOf < sum.bytes) {
    return false;
  }
  // The packets that a connection has on the way: at short round trips as many as one that halves
  // its window at each loss, at long ones more.
  const double loss = static_cast<double>(sum.bytes_repeated) / static_cast<double>(sum.bytes);
  const double rtt_s = static_cast<double>(sum.rtt_us) / Seconds(1);
  const double packets = std::max(std::sqrt(1.5 / loss), 1.054 * std::pow(rtt_s / loss, 0.75));
  const double rate = sum.round_trips * packets * kPacketBytes;
  return static_cast<double>(sum.bytes) <=
         kModelTolerance * rate * static_cast<double>(sum.us) / Seconds(1);
}

std::string CongestionChoice::Judge(const Measured& measured, Tick now) {
  const auto figures = [](const Measured& of) {
    return absl::StrCat(of.per_mille, " per mille at ", of.rate, " bytes/s");
  };
  if (!trying_) {
    const bool reason = bbr_ ? measured.per_mille >= kMuchPerMille : measured.lossy;
    if (now < try_after_ || !reason) return "";
    trying_ = true;
    before_ = measured;
    return Switch(absl::StrCat(
        in_use(), bbr_ ? " repeats much: " : " loses packets at random: ", figures(measured)));
  }
  const Measured& bbr = bbr_ ? measured : before_;
  const Measured& cubic = bbr_ ? before_ : measured;
  const bool better = bbr.worth() * 100 >= cubic.worth() * kBetterPercent ||
                      (cubic.lossy && bbr.rate * 100 >= cubic.rate * kFarFasterPercent);
  // One measurement may be low by chance, for instance because other hosts change their controls.
  if (better != bbr_ && !std::exchange(doubted_, true)) return "";
  doubted_ = trying_ = false;
  try_after_ = now + kAgainUs;
  if (better == bbr_) return "";
  return Switch(absl::StrCat(in_use(), " is not better: ", figures(measured),
                             ", before: ", figures(before_)));
}

std::string CongestionChoice::Switch(const std::string& why) {
  bbr_ = !bbr_;
  settle_us_ = kSettlingUs;
  return why;
}

}  // namespace longhaul::peerd
