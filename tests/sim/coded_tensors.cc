#include "tests/sim/coded_tensors.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/prng.h"

namespace longhaul::sim {
namespace {

// Rough inputs are at most so large.
constexpr int64_t kRoughMax = 100;

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t state = a ^ b * 0x9e3779b97f4a7c15;
  return SplitMix64(&state);
}

bool MayBe(const OpDesc& desc, Quantization codec) { return IsAmong(desc.quantization, codec); }

bool IsRough(uint64_t hash, const OpDesc& desc) {
  // No input is exact for all codecs.
  if (MayBe(desc, Quantization::kInt8) + MayBe(desc, Quantization::kInt4) +
          MayBe(desc, Quantization::kBf16) >
      1) {
    return true;
  }
  // The mean of few bits has many bits.
  const bool lossy = MayBe(desc, Quantization::kBf16) && desc.reduce == ReduceOp::kAvg &&
                     desc.rounding == Rounding::kStochastic;
  return lossy || Prng(Mix(hash, 1)).Chance(0.4);
}

// The greatest number of a block; of bfloat16: the steps from a power of two to the next. Of the
// coarsest codec, if there are several.
int64_t GreatestOf(const OpDesc& desc) {
  if (MayBe(desc, Quantization::kInt4)) return 7;
  return MayBe(desc, Quantization::kInt8) ? 127 : 128;
}

bool Blocks(const OpDesc& desc) { return desc.block != 0; }

// What the member in `slot` contributes at one element.
class Values {
 public:
  Values(uint64_t hash, const OpDesc& desc, uint32_t slot)
      : desc_(desc), rough_(IsRough(hash, desc)), hash_(hash), own_(Mix(hash, 2 + slot)) {}

  int64_t At(uint64_t element) const {
    const bool parted = desc_.kind == OpKind::kReduceScatter;
    const uint64_t part = parted ? element / desc_.count : 0;
    const uint64_t at = parted ? element % desc_.count : element;
    const uint64_t unit = Blocks(desc_) && !rough_ ? at / desc_.block : at;
    const int64_t magnitude = Magnitude(Mix(own_, part << 32 | unit));
    return hash_ >> element % 53 & 1 ? -magnitude : magnitude;
  }

 private:
  // Sums of kSlotsMax of them, with weights, have as many bits as each codec and dtype carries.
  int64_t Magnitude(uint64_t random) const {
    if (rough_) return 1 + static_cast<int64_t>(random % kRoughMax);
    if (!Blocks(desc_)) return 1 + static_cast<int64_t>(random % 6);
    if (IsHalf(desc_.dtype)) return GreatestOf(desc_) << random % 4;
    return GreatestOf(desc_) * (1 + static_cast<int64_t>(random % 2047));
  }

  const OpDesc& desc_;
  const bool rough_;
  const uint64_t hash_;
  const uint64_t own_;
};

uint64_t SourceCount(const OpDesc& desc) {
  return desc.count * (desc.kind == OpKind::kReduceScatter ? desc.world : 1);
}

bool KeepsError(uint64_t hash, const OpDesc& desc, uint32_t slot) {
  if (!Reduces(desc.kind) || IsAuto(desc.quantization)) return false;
  return Prng(Mix(hash, 1000 + slot)).Chance(0.5);
}
// The part of the value that is in the source; the rest is in the error.
float InSource(uint64_t hash, const OpDesc& desc, uint32_t slot, uint64_t element, float value) {
  if (!KeepsError(hash, desc, slot)) return value;
  constexpr float kParts[] = {1, 0.5, 2, 0};
  return kParts[Mix(hash, 2000 + slot + element) % 4] * value;
}

uint16_t ToBfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float FromBfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// For numbers that are neither denormal nor too large.
uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  const uint32_t rebased = magnitude - ((127 - 15) << 23);
  const uint32_t rounded = (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
  LH_CHECK(magnitude > (127 - 15) << 23 && rounded < 0x7c00) << value;
  return static_cast<uint16_t>(sign | rounded);
}
float FromFloat16(uint16_t bits) {
  if ((bits & 0x7fff) == 0) return 0;
  const uint32_t wide = (uint32_t{bits} & 0x7fff) << 13;
  const float magnitude = std::bit_cast<float>(wide + ((127 - 15) << 23));
  return bits & 0x8000 ? -magnitude : magnitude;
}

void Store(DType dtype, float value, uint8_t* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, &value, sizeof value);
    return;
  }
  const uint16_t half = dtype == DType::kFloat16 ? ToFloat16(value) : ToBfloat16(value);
  std::memcpy(out, &half, sizeof half);
}
float Load(DType dtype, const uint8_t* in) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, in, sizeof value);
    return value;
  }
  uint16_t half = 0;
  std::memcpy(&half, in, sizeof half);
  return dtype == DType::kFloat16 ? FromFloat16(half) : FromBfloat16(half);
}

// An exact value that is encoded and decoded, the greatest of its block.
float AsEncoded(const OpDesc& desc, float value) {
  if (!Blocks(desc)) return FromBfloat16(ToBfloat16(value));
  const auto greatest = static_cast<float>(GreatestOf(desc));
  return value / greatest * greatest;
}

int64_t Sum(const std::vector<int64_t>& weights) {
  return std::accumulate(weights.begin(), weights.end(), int64_t{0});
}
double DivisorOf(const OpDesc& desc, const std::vector<int64_t>& weights) {
  return desc.reduce == ReduceOp::kAvg ? static_cast<double>(Sum(weights)) : 1;
}

void Draw(Prng* prng, OpDesc* desc) {
  constexpr Quantization kCodecs[] = {Quantization::kBf16, Quantization::kInt8,
                                      Quantization::kInt4};
  desc->quantization = kCodecs[prng->Below(3)];
  if (prng->Chance(0.2)) {
    constexpr auto kFirst = static_cast<uint64_t>(Quantization::kAutoFirst);
    constexpr auto kLast = static_cast<uint64_t>(Quantization::kAutoLast);
    desc->quantization = static_cast<Quantization>(kFirst + prng->Below(kLast - kFirst + 1));
  }
  // Blocks must divide the grains of the simulation.
  const auto block = static_cast<uint16_t>(32 << prng->Below(3));
  const bool blocks = MayBe(*desc, Quantization::kInt8) || MayBe(*desc, Quantization::kInt4);
  desc->block = blocks ? block : 0;
  desc->rounding = prng->Chance(0.5) ? Rounding::kNearest : Rounding::kStochastic;
  LH_CHECK(desc->Fault().empty() || desc->InParts()) << desc->Fault();
}

}  // namespace

void DrawCodec(uint64_t hash, OpDesc* desc) {
  const bool kind = desc->kind == OpKind::kAllReduce || desc->kind == OpKind::kReduceScatter ||
                    desc->kind == OpKind::kAllGather || desc->kind == OpKind::kBroadcast;
  const bool sum = desc->reduce == ReduceOp::kSum || desc->reduce == ReduceOp::kAvg;
  if (!kind || !sum || !QuantizedDTypeFault(Quantization::kInt8, desc->dtype).empty()) return;
  Prng prng(hash);
  if (prng.Chance(0.5)) Draw(&prng, desc);
}

void DrawOtherCodec(uint64_t hash, OpDesc* desc) {
  Prng prng(hash);
  if (prng.Chance(0.3)) Draw(&prng, desc);
}

std::vector<uint8_t> CodedInputOf(uint64_t hash, const OpDesc& desc, uint32_t slot) {
  const size_t size = SizeOf(desc.dtype);
  const Values values(hash, desc, slot);
  std::vector<uint8_t> bytes(SourceCount(desc) * size);
  for (uint64_t i = 0; i < SourceCount(desc); ++i) {
    const auto value = static_cast<float>(values.At(i));
    Store(desc.dtype, InSource(hash, desc, slot, i, value), &bytes[i * size]);
  }
  return bytes;
}

std::vector<float> CodedErrorOf(uint64_t hash, const OpDesc& desc, uint32_t slot, int64_t weight) {
  if (!KeepsError(hash, desc, slot)) return {};
  const Values values(hash, desc, slot);
  std::vector<float> error(SourceCount(desc));
  for (uint64_t i = 0; i < error.size(); ++i) {
    const auto value = static_cast<float>(values.At(i));
    error[i] = static_cast<float>(weight) * (value - InSource(hash, desc, slot, i, value));
  }
  return error;
}

std::vector<uint8_t> CodedResultOf(uint64_t hash, const OpDesc& desc,
                                   const std::vector<uint32_t>& slots,
                                   const std::vector<int64_t>& weights, bool encoded) {
  const size_t size = SizeOf(desc.dtype);
  std::vector<int64_t> sums(SourceCount(desc));
  for (size_t k = 0; k < slots.size(); ++k) {
    const Values values(hash, desc, slots[k]);
    for (uint64_t i = 0; i < sums.size(); ++i) sums[i] += weights[k] * values.At(i);
  }
  std::vector<uint8_t> bytes(sums.size() * size);
  for (uint64_t i = 0; i < sums.size(); ++i) {
    float value = static_cast<float>(sums[i]);
    if (desc.reduce == ReduceOp::kAvg) value /= static_cast<float>(Sum(weights));
    if (encoded && !IsRough(hash, desc)) value = AsEncoded(desc, value);
    Store(desc.dtype, value, &bytes[i * size]);
  }
  return bytes;
}

double SlackOf(uint64_t hash, const OpDesc& desc, const std::vector<int64_t>& weights) {
  if (!IsRough(hash, desc)) return 0;
  // A number is rounded by less than a step. The ring rounds each partial sum; these may be
  // greater than without rounding.
  const auto most = static_cast<double>(kRoughMax * Sum(weights));
  const double step = 1.0 / static_cast<double>(GreatestOf(desc));
  const auto times = static_cast<double>(weights.size() + 1);
  const double rounded = most * times * step * std::pow(1 + step, times);
  const double stored = most / (IsHalf(desc.dtype) ? 128 : 1 << 20);
  return (rounded + stored) / DivisorOf(desc, weights);
}

double ErrorSlackOf(uint64_t hash, const OpDesc& desc, const std::vector<int64_t>& weights) {
  const double divisor = DivisorOf(desc, weights);
  const double rough = SlackOf(hash, desc, weights) * divisor;
  if (rough > 0 || divisor == 1) return rough;
  // The mean may need more bits than its parts.
  const auto most = static_cast<double>(2048 * 127 * Sum(weights));
  return Blocks(desc) ? most / (1 << 20) : static_cast<double>(6 * Sum(weights)) / 128;
}

bool Near(DType dtype, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, double slack) {
  if (a.size() != b.size()) return false;
  for (size_t at = 0; at < a.size(); at += SizeOf(dtype)) {
    // False for a NaN, too.
    if (!(std::fabs(Load(dtype, &a[at]) - Load(dtype, &b[at])) <= slack)) return false;
  }
  return true;
}

}  // namespace longhaul::sim
