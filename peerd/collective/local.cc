#include "peerd/collective/local.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "peerd/collective/kernels.h"

namespace longhaul::peerd {
namespace {

// With several sources the accumulator goes through memory once, not once a source.
constexpr uint64_t kBlockBytes = 32 << 10;

}  // namespace

void AddSources(const AttemptSpec& spec, uint64_t offset, uint64_t bytes, uint8_t* accumulator) {
  const uint64_t block = spec.sources.size() == 1 ? bytes : kBlockBytes;
  for (uint64_t done = 0; done < bytes; done += block) {
    const uint64_t n = std::min(block, bytes - done);
    for (const uint8_t* source : spec.sources) {
      ReduceInto(accumulator + done, source + offset + done, n / SizeOf(spec.desc.dtype),
                 spec.desc.dtype, spec.desc.reduce);
    }
  }
}

void ReduceSources(const AttemptSpec& spec, uint64_t offset, uint64_t bytes, uint8_t* out) {
  if (spec.sources.size() == 1) {
    std::memcpy(out, spec.sources[0] + offset, bytes);
    return;
  }
  for (uint64_t done = 0; done < bytes; done += kBlockBytes) {
    const uint64_t n = std::min(kBlockBytes, bytes - done);
    const uint64_t count = n / SizeOf(spec.desc.dtype);
    const uint64_t at = offset + done;
    Reduce(out + done, spec.sources[0] + at, spec.sources[1] + at, count, spec.desc.dtype,
           spec.desc.reduce);
    for (size_t i = 2; i < spec.sources.size(); ++i) {
      ReduceInto(out + done, spec.sources[i] + at, count, spec.desc.dtype, spec.desc.reduce);
    }
  }
}

void DivideSums(const AttemptSpec& spec, uint64_t bytes, uint8_t* data) {
  if (spec.desc.reduce != ReduceOp::kAvg || spec.members == 1) return;
  Divide(data, bytes / SizeOf(spec.desc.dtype), spec.desc.dtype, spec.members);
}

void CheckSpec(const AttemptSpec& spec) {
  LH_CHECK(spec.desc.kind == OpKind::kAllReduce && spec.desc.quantization == 0);
  LH_CHECK(spec.size >= 1 && spec.position >= 0 && spec.position < spec.size)
      << "position " << spec.position << " of " << spec.size;
  LH_CHECK(!spec.sources.empty() && spec.sources.size() == spec.targets.size())
      << spec.sources.size() << " sources, " << spec.targets.size() << " targets";
  LH_CHECK(spec.members >= spec.sources.size()) << spec.members << " members";
}

}  // namespace longhaul::peerd
