#include "peerd/collective/segmentless_attempt.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/collective/kernels.h"
#include "peerd/collective/layout.h"
#include "peerd/collective/local.h"

namespace longhaul::peerd {
namespace {

// Calls `function` with the place of byte `skip` of a chunk in every local target that gets it.
template <typename Function>
void ForEachTarget(const AttemptSpec& spec, const Layout::Chunk& chunk, uint64_t skip,
                   const Function& function) {
  const auto place = [&](size_t member) {
    return spec.targets[member][chunk.piece] + chunk.target + skip;
  };
  if (chunk.to_local >= 0) return function(place(chunk.to_local));
  if (chunk.to_position >= 0) return;
  for (size_t i = 0; i < spec.targets.size(); ++i) function(place(i));
}

// What is not encoded loses nothing: the errors of these bytes of a chunk are 0.
void ClearErrors(const AttemptSpec& spec, const Inputs& inputs, const Layout::Chunk& chunk,
                 uint64_t skip, uint64_t bytes) {
  for (const LocalInput& input : inputs) {
    float* const error = ErrorOf(spec, input.member, chunk, skip);
    if (error != nullptr) std::fill_n(error, bytes / SizeOf(chunk.dtype), 0.0F);
  }
}

class LocalAttempt final : public SegmentlessAttempt {
 public:
  explicit LocalAttempt(const AttemptSpec& spec)
      : spec_(spec), layout_(spec, 1), inputs_(InputsOf(spec)) {}

  void Commit() override { committed_ = true; }
  bool HasWork() const override { return committed_ && chunk_ < layout_.chunks().size(); }

  // Block by block: all sources of a block are read before any target is written.
  uint64_t Work(uint64_t bytes_max) override {
    alignas(64) uint8_t block[16 << 10];
    uint64_t worked = 0;
    while (HasWork() && worked < bytes_max) {
      const Layout::Chunk& chunk = layout_.chunks()[chunk_];
      const uint64_t n = std::min<uint64_t>(sizeof(block), chunk.bytes - done_);
      const uint8_t* const in_place = InPlace(chunk);
      if (!spec_.reduces()) {
        std::memcpy(block, spec_.sources[chunk.local][chunk.piece] + chunk.source + done_, n);
      } else if (inputs_.empty()) {
        FillWithIdentity(spec_.desc.reduce, chunk.dtype, n, block, /*wide=*/false);
      } else {
        Combine(block, /*out_wide=*/false, TermsOf(spec_, inputs_, chunk, done_),
                n / SizeOf(chunk.dtype), chunk.dtype, spec_.desc.reduce, DivisorOf(spec_));
      }
      worked += n * std::max<uint64_t>(inputs_.size(), 1);
      ClearErrors(spec_, inputs_, chunk, done_, n);
      ForEachTarget(spec_, chunk, done_, [&](uint8_t* target) {
        if (target == in_place) return;
        std::memcpy(target, block, n);
        worked += n;
      });
      done_ += n;
      if (done_ == chunk.bytes) {
        ++chunk_;
        done_ = 0;
      }
    }
    return worked;
  }

 private:
  // Where the result of the chunk is from the start: the input of a single member, or the source of
  // the owner.
  const uint8_t* InPlace(const Layout::Chunk& chunk) const {
    if (!spec_.reduces()) return spec_.sources[chunk.local][chunk.piece] + chunk.source + done_;
    const bool same = inputs_.size() == 1 && inputs_[0].weight == 1 && DivisorOf(spec_) == 0 &&
                      !KeepsErrors(spec_);
    return same ? TermsOf(spec_, inputs_, chunk, done_)[0].data : nullptr;
  }

  const AttemptSpec spec_;
  const Layout layout_;
  const Inputs inputs_;
  bool committed_ = false;
  size_t chunk_ = 0;   // the chunk in work
  uint64_t done_ = 0;  // bytes of it that are done
};

class OneShotAttempt final : public SegmentlessAttempt {
 public:
  OneShotAttempt(const AttemptSpec& spec, std::string result)
      : spec_(spec),
        result_(std::move(result)),
        bytes_moved_(OneShotPayloadBytes(spec.desc) * (spec.size - 1)) {}

  void Commit() override {
    const Layout layout(spec_, 1);
    const Inputs inputs = InputsOf(spec_);
    for (const Layout::Chunk& chunk : layout.chunks()) {
      ClearErrors(spec_, inputs, chunk, 0, chunk.bytes);
      ForEachTarget(spec_, chunk, 0, [&](uint8_t* target) {
        std::memcpy(target, result_.data() + chunk.offset, chunk.bytes);
      });
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

// The byte of the whole at offset o is at o * PayloadWidth() in a payload.
uint64_t PayloadWidth(const OpDesc& desc) {
  return desc.bytes() == 0 ? 1 : OneShotPayloadBytes(desc) / desc.bytes();
}
bool IsWideInPayload(const OpDesc& desc, DType dtype) { return desc.Sums() && IsHalf(dtype); }

std::string Payload(const AttemptSpec& spec, const Layout& layout) {
  std::string payload(OneShotPayloadBytes(spec.desc), '\0');
  const uint64_t width = PayloadWidth(spec.desc);
  const Inputs inputs = InputsOf(spec);
  const bool contributes =
      spec.contributes.empty() ||
      std::find(spec.contributes.begin(), spec.contributes.end(), true) != spec.contributes.end();
  for (const Layout::Chunk& chunk : layout.chunks()) {
    uint8_t* const out = Bytes(payload) + chunk.offset * width;
    if (spec.reduces()) {
      if (!contributes) break;
      SumInputs(spec, inputs, chunk, 0, chunk.bytes, out, IsWideInPayload(spec.desc, chunk.dtype));
    } else if (chunk.local >= 0) {
      std::memcpy(out, spec.sources[chunk.local][chunk.piece] + chunk.source, chunk.bytes);
    }
  }
  return payload;
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

std::string OneShotPayload(const AttemptSpec& spec) { return Payload(spec, Layout(spec, 1)); }

absl::StatusOr<std::string> ReducePayloads(const AttemptSpec& spec,
                                           const std::vector<std::string>& payloads) {
  CheckSpec(spec);
  LH_CHECK(payloads.size() == static_cast<size_t>(spec.size)) << payloads.size() << " payloads";
  const uint64_t bytes = OneShotPayloadBytes(spec.desc);
  for (int i = 0; i < spec.size; ++i) {
    if (i == spec.position || payloads[i].size() == bytes) continue;
    return absl::InvalidArgumentError(absl::StrCat("input of position ", i, " has ",
                                                   payloads[i].size(), " bytes, ",
                                                   ToString(spec.desc), " has ", bytes));
  }
  const Layout layout(spec, 1);
  LH_CHECK(layout.bytes() <= spec.desc.bytes())
      << ToString(spec.desc) << " is laid out in " << layout.bytes() << " bytes";
  const std::string own = Payload(spec, layout);
  const uint64_t width = PayloadWidth(spec.desc);
  const auto input = [&](int i, const Layout::Chunk& chunk) {
    return Bytes(i == spec.position ? own : payloads[i]) + chunk.offset * width;
  };
  const std::vector<int> order = OrderOf(spec);
  std::string result(spec.desc.bytes(), '\0');
  for (const Layout::Chunk& chunk : layout.chunks()) {
    uint8_t* const out = Bytes(result) + chunk.offset;
    if (!spec.reduces()) {
      std::memcpy(out, input(chunk.position, chunk), chunk.bytes);
      continue;
    }
    const bool wide = IsWideInPayload(spec.desc, chunk.dtype);
    const uint64_t count = chunk.bytes / SizeOf(chunk.dtype);
    std::vector<Term> terms;
    for (const int i : order) {
      if (!PositionContributes(spec, i)) continue;
      terms.push_back({input(i, chunk), wide, 1});
    }
    Combine(out, /*out_wide=*/false, terms, count, chunk.dtype, spec.desc.reduce, DivisorOf(spec));
  }
  return result;
}

std::unique_ptr<Attempt> MakeOneShotAttempt(const AttemptSpec& spec, std::string result) {
  LH_CHECK(result.size() == spec.desc.bytes()) << result.size() << " bytes";
  return std::make_unique<OneShotAttempt>(spec, std::move(result));
}

}  // namespace longhaul::peerd
