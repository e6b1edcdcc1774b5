#include "peerd/core/missed_ops.h"

#include "base/check.h"

namespace longhaul::peerd {

void MissedOps::Add(MemberId member, const OpKey& key, const std::string& cause) {
  Missed& missed = missed_[member][key];
  ++missed.count;
  missed.cause = cause;
}

std::optional<std::string> MissedOps::Take(MemberId member, const OpKey& key) {
  const auto of_member = missed_.find(member);
  if (of_member == missed_.end()) return std::nullopt;
  auto& ops = of_member->second;
  // The member posts no ops of older boundaries any more.
  std::erase_if(ops, [&](const auto& entry) { return entry.first.boundary < key.boundary; });
  std::optional<std::string> cause;
  if (const auto it = ops.find(key); it != ops.end()) {
    cause = it->second.cause;
    if (--it->second.count == 0) ops.erase(it);
  }
  if (ops.empty()) missed_.erase(of_member);
  return cause;
}

void MissedOps::KeepMembersOf(const EpochRecord& record) {
  std::erase_if(missed_, [&](const auto& entry) { return record.RankOf(entry.first) < 0; });
}

void MissedOps::CheckInvariants() const {
  for (const auto& [member, ops] : missed_) {
    LH_CHECK(!ops.empty()) << ToString(member);
    for (const auto& [key, missed] : ops) LH_CHECK(missed.count > 0) << ToString(member);
  }
}

}  // namespace longhaul::peerd
