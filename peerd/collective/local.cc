#include "peerd/collective/local.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "peerd/collective/kernels.h"

namespace longhaul::peerd {
namespace {

// Block by block, so that the accumulator goes through memory once, and not once for each source.
constexpr uint64_t kBlockBytes = 32 << 10;

}  // namespace

Inputs InputsOf(const AttemptSpec& spec) {
  if (spec.contributes.empty()) return spec.sources;
  Inputs inputs;
  for (size_t i = 0; i < spec.sources.size(); ++i) {
    if (spec.contributes[i]) inputs.push_back(spec.sources[i]);
  }
  return inputs;
}

bool PositionContributes(const AttemptSpec& spec, int position) {
  return spec.ring_contributes.empty() || spec.ring_contributes[position];
}

void AddInputs(const OpDesc& desc, const Inputs& inputs, uint64_t offset, uint64_t bytes,
               uint8_t* accumulator) {
  if (inputs.empty()) return;
  const uint64_t block = inputs.size() == 1 ? bytes : kBlockBytes;
  for (uint64_t done = 0; done < bytes; done += block) {
    const uint64_t n = std::min(block, bytes - done);
    for (const uint8_t* input : inputs) {
      ReduceInto(accumulator + done, input + offset + done, n / SizeOf(desc.dtype), desc.dtype,
                 desc.reduce);
    }
  }
}

void ReduceInputs(const OpDesc& desc, const Inputs& inputs, uint64_t offset, uint64_t bytes,
                  uint8_t* out) {
  if (inputs.size() == 1) {
    std::memcpy(out, inputs[0] + offset, bytes);
    return;
  }
  for (uint64_t done = 0; done < bytes; done += kBlockBytes) {
    const uint64_t n = std::min(kBlockBytes, bytes - done);
    const uint64_t count = n / SizeOf(desc.dtype);
    const uint64_t at = offset + done;
    Reduce(out + done, inputs[0] + at, inputs[1] + at, count, desc.dtype, desc.reduce);
    for (size_t i = 2; i < inputs.size(); ++i) {
      ReduceInto(out + done, inputs[i] + at, count, desc.dtype, desc.reduce);
    }
  }
}

void DivideSums(const AttemptSpec& spec, uint64_t bytes, uint8_t* data) {
  if (spec.desc.reduce != ReduceOp::kAvg || spec.members == 1) return;
  Divide(data, bytes / SizeOf(spec.desc.dtype), spec.desc.dtype, spec.members);
}

void CheckSpec(const AttemptSpec& spec) {
  LH_CHECK(spec.desc.quantization == 0 && spec.cuts.empty() == (spec.reduces() && spec.gathers()))
      << ToString(spec.desc) << " with " << spec.cuts.size() << " cuts";
  for (const Cut& cut : spec.cuts) {
    LH_CHECK(cut.position >= 0 && cut.position < spec.size &&
             cut.local < static_cast<int>(spec.sources.size()) &&
             (cut.local >= 0) == (cut.position == spec.position))
        << "cut of " << cut.position << " at " << spec.position << " local " << cut.local;
  }
  LH_CHECK(spec.size >= 1 && spec.position >= 0 && spec.position < spec.size)
      << "position " << spec.position << " of " << spec.size;
  LH_CHECK(!spec.sources.empty() && spec.sources.size() == spec.targets.size())
      << spec.sources.size() << " sources, " << spec.targets.size() << " targets";
  LH_CHECK(spec.contributes.empty() || spec.contributes.size() == spec.sources.size())
      << spec.contributes.size() << " of " << spec.sources.size() << " sources";
  LH_CHECK(spec.ring_contributes.empty() ||
           (spec.ring_contributes.size() == static_cast<size_t>(spec.size) &&
            spec.ring_contributes[spec.position] == !InputsOf(spec).empty() &&
            std::find(spec.ring_contributes.begin(), spec.ring_contributes.end(), true) !=
                spec.ring_contributes.end()))
      << spec.ring_contributes.size() << " of " << spec.size << " positions";
  LH_CHECK(spec.members >= 1 && spec.members >= InputsOf(spec).size())
      << spec.members << " members";
}

}  // namespace longhaul::peerd
