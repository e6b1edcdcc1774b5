#include "peerd/collective/coder.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/digest.h"
#include "peerd/collective/kernels.h"

namespace longhaul::peerd {
namespace {

// Elements that are worked on at a time: a multiple of every block. As float32 they take half of a
// first-level cache.
constexpr uint64_t kStep = 4096;
static_assert(kStep % kBlockMax == 0);

uint8_t* Bytes(float* data) { return reinterpret_cast<uint8_t*>(data); }
const uint8_t* Bytes(const float* data) { return reinterpret_cast<const uint8_t*>(data); }

// Calls `function(step, done)` for each step of the stretch; `done`: elements before the step.
template <typename Function>
void ForEachStep(const Stretch& stretch, const Function& function) {
  const uint64_t size = SizeOf(stretch.chunk->dtype);
  for (uint64_t done = 0; done < stretch.bytes; done += kStep * size) {
    const uint64_t bytes = std::min(kStep * size, stretch.bytes - done);
    function(Stretch{stretch.chunk, stretch.skip + done, bytes}, done / size);
  }
}

uint64_t CountOf(const Stretch& stretch) { return stretch.bytes / SizeOf(stretch.chunk->dtype); }

// error[i] += factor * (wanted[i] - got[i])
void AddError(const float* wanted, const float* got, uint64_t count, float factor, float* error) {
  for (uint64_t i = 0; i < count; ++i) error[i] += factor * (wanted[i] - got[i]);
}
void DropNotFinite(float* error, uint64_t count) {
  // x - x is 0 for finite x, and NaN for all others.
  for (uint64_t i = 0; i < count; ++i) error[i] = error[i] - error[i] == 0 ? error[i] : 0;
}

// If elements share scales, an element that is not finite spoils its block, as it does where the
// sum is encoded. Returns the number of blocks with such an element.
uint64_t SpoilBlocks(const BlockOptions& options, float* data, uint64_t count) {
  const uint64_t spoilt = BlocksNotFinite(options, data, count);
  if (spoilt == 0 || options.format == BlockFormat::kBfloat16) return spoilt;
  for (uint64_t done = 0; done < count; done += options.block) {
    const uint64_t n = std::min<uint64_t>(options.block, count - done);
    if (BlocksNotFinite(options, data + done, n) == 0) continue;
    std::fill_n(data + done, n, std::numeric_limits<float>::quiet_NaN());
  }
  return spoilt;
}

// Rounds float32 to the dtype of the chunk.
void Store(const Stretch& stretch, const float* in, uint8_t* out) {
  const DType dtype = stretch.chunk->dtype;
  const Term term{Bytes(in), IsHalf(dtype), 1};
  Combine(out, /*out_wide=*/false, {&term, 1}, CountOf(stretch), dtype, ReduceOp::kSum,
          /*divisor=*/0);
}

}  // namespace

Coder::Coder(const AttemptSpec& spec, const Inputs& inputs)
    : spec_(spec), inputs_(inputs), options_(CodecOf(spec.desc)) {}

uint64_t Coder::BytesOf(DType dtype, uint64_t bytes) const {
  return EncodedBytes(options_, bytes / SizeOf(dtype));
}

uint64_t Coder::SeedOfInput(const Layout::Chunk& chunk) const {
  const int member = spec_.reduces() ? (inputs_.empty() ? 0 : inputs_[0].member) : chunk.local;
  return spec_.seeds[member];
}

void Coder::LoadInput(const Stretch& stretch, float* out) const {
  const Layout::Chunk& chunk = *stretch.chunk;
  if (spec_.reduces()) {
    SumInputs(spec_, inputs_, chunk, stretch.skip, stretch.bytes, Bytes(out), IsHalf(chunk.dtype));
    return;
  }
  const Term source{spec_.sources[chunk.local][chunk.piece] + chunk.source + stretch.skip};
  Combine(Bytes(out), IsHalf(chunk.dtype), {&source, 1}, CountOf(stretch), chunk.dtype,
          ReduceOp::kSum, /*divisor=*/0);
}

uint64_t Coder::Encode(const Stretch& stretch, uint64_t seed, const float* in, uint8_t* out) const {
  const Layout::Chunk& chunk = *stretch.chunk;
  const uint64_t size = SizeOf(chunk.dtype);
  // A part that belongs to a member may begin anywhere. Its blocks count from its beginning.
  const uint64_t base = chunk.source % (options_.block * size) == 0 ? 0 : chunk.source;
  const uint64_t first = (chunk.source - base + stretch.skip) / size;
  const uint64_t mixed = Digester().Add(seed).Add(uint64_t{chunk.piece}).Add(base).value();
  return longhaul::peerd::Encode(options_, mixed, first, in, CountOf(stretch), out);
}

void Coder::EncodeInput(const Stretch& stretch, uint8_t* out, float* error) const {
  alignas(64) float input[kStep];
  alignas(64) float decoded[kStep];
  const uint64_t seed = SeedOfInput(*stretch.chunk);
  ForEachStep(stretch, [&](const Stretch& step, uint64_t done) {
    const uint64_t count = CountOf(step);
    uint8_t* const to = out + EncodedBytes(options_, done);
    LoadInput(step, input);
    Encode(step, seed, input, to);
    if (error == nullptr) return;
    longhaul::peerd::Decode(options_, to, count, decoded);
    std::fill_n(error + done, count, 0.0F);
    AddError(input, decoded, count, 1, error + done);
    DropNotFinite(error + done, count);
  });
}

uint64_t Coder::Add(const Stretch& stretch, const CodedSum& sum) const {
  LH_CHECK((sum.encoded == nullptr) != (sum.result == nullptr));
  alignas(64) float total[kStep];
  alignas(64) float input[kStep];
  alignas(64) float decoded[kStep];
  std::vector<uint8_t> sent(sum.own_as_sent ? EncodedBytes(options_, kStep) : 0);
  uint64_t not_finite = 0;
  const uint64_t own_seed = sum.own_as_sent ? SeedOfInput(*stretch.chunk) : 0;
  ForEachStep(stretch, [&](const Stretch& step, uint64_t done) {
    const uint64_t count = CountOf(step);
    const uint64_t skip = EncodedBytes(options_, done);
    float* const error = sum.error == nullptr ? nullptr : sum.error + done;
    if (error != nullptr) std::fill_n(error, count, 0.0F);
    const auto combine = [&](std::span<const Term> terms, double divisor) {
      Combine(Bytes(total), /*out_wide=*/false, terms, count, DType::kFloat32,
              divisor == 0 ? ReduceOp::kSum : ReduceOp::kAvg, divisor);
    };
    bool first = true;
    for (const uint8_t* const each : sum.inputs) {
      const uint8_t* encoded = each == nullptr ? nullptr : each + skip;
      if (each == nullptr) {
        LoadInput(step, input);
        if (sum.own_as_sent) {
          Encode(step, own_seed, input, sent.data());
          encoded = sent.data();
        }
        if (sum.own_as_sent && error != nullptr) {
          longhaul::peerd::Decode(options_, encoded, count, decoded);
          AddError(input, decoded, count, 1, error);
        }
      }
      if (encoded == nullptr) {
        const Term terms[] = {{Bytes(total)}, {Bytes(input)}};
        combine(first ? std::span(terms + 1, 1) : std::span(terms), 0);
      } else if (first) {
        longhaul::peerd::Decode(options_, encoded, count, total);
      } else {
        DecodeAdd(options_, encoded, count, total);
      }
      first = false;
    }
    const Term all{Bytes(total)};
    if (sum.divisor != 0) combine({&all, 1}, sum.divisor);
    if (sum.result != nullptr) {
      not_finite += SpoilBlocks(options_, total, count);
      Store(step, total, sum.result + done * SizeOf(step.chunk->dtype));
    } else {
      Encode(step, sum.seed, total, sum.encoded + skip);
    }
    if (error == nullptr) return;
    if (sum.encoded != nullptr) {
      longhaul::peerd::Decode(options_, sum.encoded + skip, count, decoded);
      AddError(total, decoded, count, sum.divisor == 0 ? 1 : static_cast<float>(sum.divisor),
               error);
    }
    DropNotFinite(error, count);
  });
  return not_finite;
}

uint64_t Coder::Decode(const Stretch& stretch, const uint8_t* in,
                       std::span<uint8_t* const> out) const {
  alignas(64) float decoded[kStep];
  uint64_t not_finite = 0;
  const uint64_t size = SizeOf(stretch.chunk->dtype);
  ForEachStep(stretch, [&](const Stretch& step, uint64_t done) {
    const uint64_t count = CountOf(step);
    not_finite +=
        longhaul::peerd::Decode(options_, in + EncodedBytes(options_, done), count, decoded);
    for (uint8_t* const each : out) Store(step, decoded, each + done * size);
  });
  return not_finite;
}

}  // namespace longhaul::peerd
