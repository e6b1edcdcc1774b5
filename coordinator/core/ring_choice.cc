#include "coordinator/core/ring_choice.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "coordinator/core/text.h"

namespace longhaul::coordinator {
namespace {

// Fractions of `interval_ms`. A search is scheduled for interval_ms / kSearchWait after a link was
// measured, because other measurements follow soon. Two searches are at least interval_ms /
// kSearchEvery apart.
constexpr int64_t kSearchWait = 60;
constexpr int64_t kSearchEvery = 10;
// Link costs are compared with the told ones this long after a link was measured, and at least this
// long after they were compared last.
constexpr int64_t kTellingWait = Seconds(1);
constexpr int64_t kTellingEvery = Seconds(2);
// New link costs get an epoch only if they differ from the told costs by at least this much.
// Shares: this part of the tensor would have other owners.
constexpr uint32_t kTellLatencyUs = 1000;
constexpr uint32_t kTellFactor = 2;
constexpr uint64_t kTellShareUnits = kShareUnits / 20;

// Each change of shares costs some time: links carry other parts of the next ops, for which their
// TCP windows and their parts of a host's limit do not fit. Measured rates, and so the best shares,
// differ a little every time. So new shares stay for a while.
constexpr int64_t kSharesNew = Seconds(20);

std::string MegabytesText(uint64_t bytes_per_second) {
  if (bytes_per_second == 0) return "unknown";
  const uint64_t tenths = bytes_per_second / 100000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10);
}

// Says what makes the better ring better than the present one.
std::string GainText(const RingScore& score, const RingScore& present) {
  return "slowest_mb_s=" + MegabytesText(score.bottleneck) +
         " was=" + MegabytesText(present.bottleneck) +
         " rtt_sum_ms=" + std::to_string(score.latency_us / 1000) +
         " was=" + std::to_string(present.latency_us / 1000);
}

// How much of a tensor has another owner with other shares.
uint64_t Moved(const Shares& from, const Shares& to) {
  const size_t peers = std::max(from.size(), to.size());
  uint64_t differences = 0;
  for (size_t i = 0; i < peers; ++i) {
    const auto share = [&](const Shares& shares) {
      return shares.size() == peers ? int64_t{shares[i]} : int64_t{kShareUnits} / int64_t(peers);
    };
    differences += static_cast<uint64_t>(std::abs(share(from) - share(to)));
  }
  return differences / 2;
}

// Whether peers would own other parts by the costs `now` than by the costs `told`, or may choose
// other algorithms. The choice depends on the latency, and on how much faster the ring is than the
// mesh. Unknown costs count as latency 0 and as equally fast.
bool TellsMore(const control::LinkCost& told, const control::LinkCost& now) {
  if (Moved(told.shares, now.shares) >= kTellShareUnits) return true;
  const auto [near, far] = std::minmax(told.latency_us, now.latency_us);
  if (far - near >= kTellLatencyUs && far / kTellFactor >= near) return true;
  const auto unevenness = [](const control::LinkCost& cost) {
    if (cost.mesh_bytes_per_second == 0 || cost.ring_bytes_per_second == 0) return 1.0;
    return static_cast<double>(cost.ring_bytes_per_second) /
           static_cast<double>(cost.mesh_bytes_per_second);
  };
  const auto [even, uneven] = std::minmax({unevenness(told), unevenness(now)});
  return uneven >= kTellFactor * even;
}

std::string SharesText(const Shares& shares) {
  if (shares.empty()) return "equal";
  std::string text;
  for (const uint32_t share : shares) {
    const uint64_t thousandths = (uint64_t{share} * 1000 + kShareUnits / 2) / kShareUnits;
    text += (text.empty() ? "" : ",") + std::to_string(thousandths / 10) + "." +
            std::to_string(thousandths % 10) + "%";
  }
  return text;
}

}  // namespace

std::string CostText(const control::LinkCost& cost) {
  return "latency_us=" + std::to_string(cost.latency_us) +
         " ring_mb_s=" + MegabytesText(cost.ring_bytes_per_second) +
         " mesh_mb_s=" + MegabytesText(cost.mesh_bytes_per_second) +
         " shares=" + SharesText(cost.shares);
}

void RingChoice::Measured(Tick now) {
  if (interval_ms_ == 0) return;
  telling_due_ = std::min(telling_due_, std::max(now + kTellingWait, telling_not_before_));
  if (due_ != kNever) return;
  due_ = std::max(now + Millis(interval_ms_) / kSearchWait, not_before_);
}

bool RingChoice::FallsDue(Tick now, size_t peers, bool preparing) {
  if (due_ > now) return false;
  due_ = kNever;
  Hold(now + Millis(interval_ms_) / kSearchEvery);
  if (preparing) Measured(now);
  // Two peers have only one ring.
  return !preparing && peers > 2;
}

void RingChoice::Hold(Tick until) {
  not_before_ = std::max(not_before_, until);
  if (due_ != kNever) due_ = std::max(due_, not_before_);
}

std::string RingChoice::Found(const std::vector<PeerId>& ring, const std::vector<PeerId>& present,
                              const RingScore& score, const RingScore& present_score,
                              const control::LinkCost& cost) {
  // A ring that was found before may not be better any more.
  better_.clear();
  if (ring != present && WorthChanging(present_score, score)) {
    better_ = ring;
    gain_ = GainText(score, present_score);
    return "better ring found ring=" + List(ring, ",", kNamesShownMax) + " " + gain_;
  }
  Compare(present, cost);
  return "";
}

bool RingChoice::TellingFallsDue(Tick now, size_t peers, bool preparing) {
  if (telling_due_ > now) return false;
  telling_due_ = NewShares(now) != nullptr ? shares_at_ + kSharesNew : kNever;
  telling_not_before_ = now + kTellingEvery;
  if (preparing) telling_due_ = telling_not_before_;
  // Peers are told all costs when they get the better ring.
  return !preparing && peers > 2 && better_.empty();
}

void RingChoice::Compare(const std::vector<PeerId>& present, const control::LinkCost& cost) {
  if (!TellsMore(told_, cost)) return;
  better_ = present;
  gain_ = CostText(cost);
}

void RingChoice::Told(const control::LinkCost& cost, Tick now) {
  if (told_.shares != cost.shares) {
    shares_at_ = now;
    if (interval_ms_ != 0) telling_due_ = std::min(telling_due_, now + kSharesNew);
  }
  told_ = cost;
}

const Shares* RingChoice::NewShares(Tick now) const {
  return now - shares_at_ < kSharesNew ? &told_.shares : nullptr;
}

void RingChoice::GiveUp(Tick now) {
  better_.clear();
  Hold(now + Millis(interval_ms_));
  Measured(now);
}

void RingChoice::Ordered(Epoch epoch, Tick now) {
  ordered_epoch_ = epoch;
  ordered_gain_ = std::exchange(gain_, "");
  Hold(now + Millis(interval_ms_));
}

}  // namespace longhaul::coordinator
