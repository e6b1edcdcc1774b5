#include <map>

#include "coordinator/store/store.h"

namespace longhaul::coordinator {
namespace {

class MemoryStore final : public Store {
 public:
  absl::StatusOr<Records> Load() override { return records_; }
  absl::Status Apply(const std::vector<Mutation>& mutations) override {
    for (const Mutation& mutation : mutations) coordinator::Apply(mutation, &records_);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<TokenRecord>> LoadTokens() override {
    std::vector<TokenRecord> tokens;
    for (const auto& [id, record] : tokens_) tokens.push_back(record);
    return tokens;
  }
  absl::Status ChangeTokens(const TokenChange& change) override {
    for (const std::string& id : change.gone) tokens_.erase(id);
    if (change.put) tokens_[change.put->id] = *change.put;
    return absl::OkStatus();
  }
  std::string Name() const override { return "memory"; }

 private:
  Records records_;
  std::map<std::string, TokenRecord> tokens_;
};

}  // namespace

std::unique_ptr<Store> MakeMemoryStore() { return std::make_unique<MemoryStore>(); }

}  // namespace longhaul::coordinator
