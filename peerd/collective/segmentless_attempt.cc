#include "peerd/collective/segmentless_attempt.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/collective/kernels.h"
#include "peerd/collective/local.h"

namespace longhaul::peerd {
namespace {

class LocalAttempt final : public SegmentlessAttempt {
 public:
  explicit LocalAttempt(const AttemptSpec& spec) : spec_(spec), inputs_(InputsOf(spec)) {
    // The input of a single member is the result.
    const uint8_t* const only = spec.cuts.empty() && inputs_.size() == 1 ? inputs_[0] : nullptr;
    for (uint8_t* target : spec.targets) {
      if (target != only) targets_.push_back(target);
    }
  }

  void Commit() override { committed_ = true; }
  bool HasWork() const override { return committed_ && !targets_.empty() && done_ < spec_.bytes(); }

  // Block by block: all sources of a block are read before any target is written.
  uint64_t Work(uint64_t bytes_max) override {
    alignas(64) uint8_t block[16 << 10];
    uint64_t worked = 0;
    while (HasWork() && worked < bytes_max) {
      // A block is of one chunk.
      const uint64_t chunk_bytes = spec_.cuts.empty() ? spec_.bytes() : spec_.desc.part_bytes();
      const uint64_t skip = done_ % chunk_bytes;
      const uint64_t n = std::min<uint64_t>(sizeof(block), chunk_bytes - skip);
      const int owner = spec_.cuts.empty() ? -1 : spec_.cuts[done_ / chunk_bytes].local;
      if (spec_.reduces()) {
        ReduceInputs(spec_.desc, inputs_, done_, n, block);
        DivideSums(spec_, n, block);
      } else {
        std::memcpy(block, spec_.sources[owner] + skip, n);
      }
      if (spec_.gathers()) {
        for (uint8_t* target : targets_) std::memcpy(target + done_, block, n);
      } else {
        std::memcpy(spec_.targets[owner] + skip, block, n);
      }
      done_ += n;
      worked += n * (inputs_.size() + targets_.size());
    }
    return worked;
  }

 private:
  const AttemptSpec spec_;
  const Inputs inputs_;
  std::vector<uint8_t*> targets_;  // targets that must be written
  bool committed_ = false;
  uint64_t done_ = 0;  // bytes of the tensor
};

class OneShotAttempt final : public SegmentlessAttempt {
 public:
  OneShotAttempt(const AttemptSpec& spec, std::string result)
      : spec_(spec), result_(std::move(result)), bytes_moved_(result_.size() * (spec.size - 1)) {}

  void Commit() override {
    // memcpy() must not get a null target, which a tensor without elements may have.
    if (result_.empty()) return;
    const uint64_t part = spec_.desc.part_bytes();
    for (size_t c = 0; !spec_.gathers() && c < spec_.cuts.size(); ++c) {
      const int owner = spec_.cuts[c].local;
      if (owner >= 0) std::memcpy(spec_.targets[owner], result_.data() + c * part, part);
    }
    for (size_t i = 0; spec_.gathers() && i < spec_.targets.size(); ++i) {
      std::memcpy(spec_.targets[i], result_.data(), spec_.bytes());
    }
  }
  uint64_t bytes_sent() const override { return bytes_moved_; }
  uint64_t bytes_received() const override { return bytes_moved_; }

 private:
  const AttemptSpec spec_;
  const std::string result_;
  const uint64_t bytes_moved_;
};

uint8_t* Bytes(std::string& text) { return reinterpret_cast<uint8_t*>(text.data()); }
const uint8_t* Bytes(const std::string& text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

}  // namespace

void SegmentlessAttempt::Abandoned(int /*from*/, const Segment& /*segment*/) {
  LH_CHECK(false) << "no segment was placed";
}

void SegmentlessAttempt::Received(int /*from*/, const Segment& /*segment*/) {
  LH_CHECK(false) << "no segment was placed";
}

void SegmentlessAttempt::Sent(uint64_t cookie) {
  LH_CHECK(false) << "no segment was sent as " << cookie;
}

std::unique_ptr<Attempt> MakeLocalAttempt(const AttemptSpec& spec) {
  return std::make_unique<LocalAttempt>(spec);
}

std::string OneShotPayload(const AttemptSpec& spec) {
  std::string payload(spec.desc.bytes(), '\0');
  if (!spec.reduces()) {
    const uint64_t part = spec.desc.part_bytes();
    for (size_t c = 0; c < spec.cuts.size(); ++c) {
      const int owner = spec.cuts[c].local;
      if (owner >= 0) std::memcpy(Bytes(payload) + c * part, spec.sources[owner], part);
    }
    return payload;
  }
  const Inputs inputs = InputsOf(spec);
  if (!payload.empty() && !inputs.empty()) {
    ReduceInputs(spec.desc, inputs, 0, payload.size(), Bytes(payload));
  }
  return payload;
}

absl::StatusOr<std::string> ReducePayloads(const AttemptSpec& spec,
                                           const std::vector<std::string>& payloads) {
  CheckSpec(spec);
  LH_CHECK(payloads.size() == static_cast<size_t>(spec.size)) << payloads.size() << " payloads";
  const uint64_t bytes = spec.desc.bytes();
  for (int i = 0; i < spec.size; ++i) {
    if (i == spec.position || payloads[i].size() == bytes) continue;
    return absl::InvalidArgumentError(absl::StrCat("input of position ", i, " has ",
                                                   payloads[i].size(), " bytes, ",
                                                   ToString(spec.desc), " has ", bytes));
  }
  const std::string own = OneShotPayload(spec);
  const auto input = [&](int i) -> const std::string& {
    return i == spec.position ? own : payloads[i];
  };
  if (!spec.reduces()) {
    const uint64_t part = spec.desc.part_bytes();
    std::string whole(bytes, '\0');
    for (size_t c = 0; c < spec.cuts.size(); ++c) {
      whole.replace(c * part, part, input(spec.cuts[c].position), c * part, part);
    }
    return whole;
  }
  int first = 0;
  while (!PositionContributes(spec, first)) ++first;
  std::string result = input(first);
  for (int i = first + 1; i < spec.size; ++i) {
    if (!PositionContributes(spec, i)) continue;
    ReduceInto(Bytes(result), Bytes(input(i)), bytes / SizeOf(spec.desc.dtype), spec.desc.dtype,
               spec.desc.reduce);
  }
  DivideSums(spec, bytes, Bytes(result));
  return result;
}

std::unique_ptr<Attempt> MakeOneShotAttempt(const AttemptSpec& spec, std::string result) {
  LH_CHECK(result.size() == spec.desc.bytes()) << result.size() << " bytes";
  return std::make_unique<OneShotAttempt>(spec, std::move(result));
}

}  // namespace longhaul::peerd
