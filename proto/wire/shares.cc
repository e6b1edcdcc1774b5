#include "proto/wire/shares.h"

#include <algorithm>
#include <numeric>

namespace longhaul {
namespace {

uint64_t Sum(const Shares& shares) {
  return std::accumulate(shares.begin(), shares.end(), uint64_t{0});
}

}  // namespace

std::string SharesFault(const Shares& shares, size_t positions) {
  if (shares.empty()) return "";
  if (shares.size() != positions) {
    return std::to_string(shares.size()) + " shares for " + std::to_string(positions) + " peers";
  }
  if (const uint64_t sum = Sum(shares); sum != kShareUnits) {
    return "shares add up to " + std::to_string(sum) + ", expected " + std::to_string(kShareUnits);
  }
  const uint32_t most = *std::max_element(shares.begin(), shares.end());
  if (most <= GreatestShare(positions)) return "";
  return "a share of " + std::to_string(most) + ", expected at most " +
         std::to_string(GreatestShare(positions)) + " among " + std::to_string(positions) +
         " peers";
}

Shares SharesOf(const Shares& shares, const std::vector<size_t>& left) {
  if (shares.empty()) return {};
  Shares of;
  for (const size_t place : left) of.push_back(shares[place]);
  const uint64_t sum = Sum(of);
  if (sum == 0) return {};
  for (uint32_t& share : of) share = static_cast<uint32_t>(share * uint64_t{kShareUnits} / sum);
  const auto greatest = std::max_element(of.begin(), of.end());
  *greatest += kShareUnits - static_cast<uint32_t>(Sum(of));
  if (*greatest > GreatestShare(of.size())) return {};
  return of;
}

}  // namespace longhaul
