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
  std::string Name() const override { return "memory"; }

 private:
  Records records_;
};

}  // namespace

std::unique_ptr<Store> MakeMemoryStore() { return std::make_unique<MemoryStore>(); }

}  // namespace longhaul::coordinator
