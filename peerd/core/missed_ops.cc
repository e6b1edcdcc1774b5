#include "peerd/core/missed_ops.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace longhaul::peerd {

void MissedOps::Add(MemberId member, const OpKey& key, Missed missed) {
  missed_[member][key].push_back(std::move(missed));
}

std::optional<MissedOps::Missed> MissedOps::Take(MemberId member, const OpKey& key, OpKind kind) {
  const auto of_member = missed_.find(member);
  if (of_member == missed_.end()) return std::nullopt;
  auto& keys = of_member->second;
  const auto found = keys.find(key);
  if (found == keys.end()) return std::nullopt;
  std::vector<Missed>& ops = found->second;
  const auto it = std::find_if(ops.begin(), ops.end(),
                               [kind](const Missed& op) { return op.kind == kind || op.refusal; });
  std::optional<Missed> missed;
  if (it != ops.end()) missed = *it;
  ops.erase(ops.begin(), it == ops.end() ? it : it + 1);
  if (ops.empty()) keys.erase(found);
  if (keys.empty()) missed_.erase(of_member);
  return missed;
}

void MissedOps::Pass(MemberId member, Epoch boundary, uint64_t step) {
  const auto of_member = missed_.find(member);
  if (of_member == missed_.end()) return;
  std::map<OpKey, std::vector<Missed>>& keys = of_member->second;
  for (auto it = keys.begin(); it != keys.end();) {
    std::erase_if(it->second, [&](const Missed& op) {
      return std::pair(it->first.boundary, op.step) < std::pair(boundary, step);
    });
    it = it->second.empty() ? keys.erase(it) : std::next(it);
  }
  if (keys.empty()) missed_.erase(of_member);
}

void MissedOps::KeepMembersOf(const EpochRecord& record) {
  std::erase_if(missed_, [&](const auto& entry) { return record.RankOf(entry.first) < 0; });
}

void MissedOps::CheckInvariants() const {
  for (const auto& [member, keys] : missed_) {
    LH_CHECK(!keys.empty()) << ToString(member);
    for (const auto& [key, ops] : keys) LH_CHECK(!ops.empty()) << ToString(member);
  }
}

}  // namespace longhaul::peerd
