#include "peerd/ipc/accounts.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

struct Words {
  const char* unit;
  const char* advice;
};

constexpr Words kWords[kResources] = {
    {"connections", "close some"},
    {"members", "let some leave, or run another peerd"},
    {"arena regions", "free tensors"},
    {"bytes of arena (the arena limit)", "free tensors or raise --arena-limit"},
    {"tensors of registered states", "free some states"},
    {"pieces of ops in flight", "wait for some of the ops"},
};

}  // namespace

ResourceLimits ShareOf(const ResourceLimits& limits, uint32_t percent) {
  LH_CHECK(percent <= 100);
  ResourceLimits share = limits;
  for (uint64_t& limit : share) {
    if (limit == UINT64_MAX) continue;
    limit = std::max(limit / 100 * percent + limit % 100 * percent / 100, uint64_t{1});
  }
  return share;
}

Hold::~Hold() {
  if (account_ != nullptr) account_->Give(resource_, amount_);
}

std::shared_ptr<Account> Account::Make(std::string owner, std::string advice,
                                       const ResourceLimits& limits,
                                       std::shared_ptr<Account> parent) {
  return std::shared_ptr<Account>(
      new Account(std::move(owner), std::move(advice), limits, std::move(parent)));
}

absl::StatusOr<Hold> Account::Take(Resource resource, uint64_t amount) {
  const auto at = static_cast<size_t>(resource);
  for (const Account* account = this; account != nullptr; account = account->parent_.get()) {
    const uint64_t limit = account->limits_[at];
    if (account->held_[at] <= limit && amount <= limit - account->held_[at]) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        account->owner_, " may have at most ", limit, " ", kWords[at].unit,
        account->advice_.empty() ? "" : " ", account->advice_, ", and has ", account->held_[at],
        amount == 1 ? "" : absl::StrCat("; ", amount, " more are asked for"), "; ",
        kWords[at].advice));
  }
  for (Account* account = this; account != nullptr; account = account->parent_.get()) {
    account->held_[at] += amount;
  }
  return Hold(shared_from_this(), resource, amount);
}

void Account::Give(Resource resource, uint64_t amount) {
  const auto at = static_cast<size_t>(resource);
  for (Account* account = this; account != nullptr; account = account->parent_.get()) {
    LH_CHECK(account->held_[at] >= amount)
        << "more " << kWords[at].unit << " given back than taken";
    account->held_[at] -= amount;
  }
}

}  // namespace longhaul::peerd
