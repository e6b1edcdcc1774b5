// Base class of attempts that exchange no segments. They are complete as soon as they are started.
#pragma once

#include "absl/status/status.h"
#include "peerd/collective/attempt.h"

namespace longhaul::peerd {

class SegmentlessAttempt : public Attempt {
 public:
  void Start() override {}
  bool CompleteAtOnce() const override { return true; }
  void Credit(int /*position*/) override {}
  absl::StatusOr<uint8_t*> Place(int /*from*/, const Segment& /*segment*/) override {
    return absl::InvalidArgumentError("segment refused: the op exchanges none");
  }
  void Abandoned(int from, const Segment& segment) override;
  void Received(int from, const Segment& segment) override;
  void Sent(uint64_t cookie) override;
  void Stop() override {}
  bool HasWork() const override { return false; }
  uint64_t Work(uint64_t /*bytes_max*/) override { return 0; }
  bool Idle() const override { return !HasWork(); }
  uint64_t bytes_sent() const override { return 0; }
  uint64_t bytes_received() const override { return 0; }
};

// Makes the attempt for one peer alone, or for a tensor without elements. After Commit(), Work()
// reduces the tensors of the local members.
std::unique_ptr<Attempt> MakeLocalAttempt(const AttemptSpec& spec);

}  // namespace longhaul::peerd
