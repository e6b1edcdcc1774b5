#include "tests/sim/tensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <numeric>

#include "base/check.h"
#include "base/prng.h"
#include "proto/wire/limits.h"
#include "tests/sim/coded_tensors.h"

namespace longhaul::sim {
namespace {

// Codecs are drawn with a random sequence of their own, so that old seeds stay the same runs.
constexpr uint64_t kCodecs = 0x636f64656373;

uint64_t Hash(uint64_t seed, const OpName& name) {
  uint64_t state = seed;
  for (const uint64_t part :
       {uint64_t{name.group}, name.step, name.tag, uint64_t{name.turn} << 32 | name.part}) {
    state = SplitMix64(&state) ^ part;
  }
  return SplitMix64(&state);
}

bool Wide(DType dtype) { return SizeOf(dtype) >= 4; }

// Returns the input of one member at one element.
int64_t Value(const OpDesc& desc, uint32_t slot, int64_t factor) {
  if (desc.dtype == DType::kBool) return (slot + factor) % 3 == 0 ? 1 : 0;
  if (desc.reduce == ReduceOp::kProd) return 1 + (slot + factor) % 2;
  if (Wide(desc.dtype)) return (int64_t{1} << slot) * factor;
  return 1 + (slot * 5 + factor) % 7;
}

int64_t Combine(ReduceOp op, int64_t a, int64_t b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return a + b;
    case ReduceOp::kProd:
      return a * b;
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
  }
  return 0;
}

// For integers from 1 to 2047, which float16 holds exactly.
uint16_t ToFloat16(int64_t value) {
  LH_CHECK(value > 0 && value < 2048) << value;
  const int exponent = std::bit_width(static_cast<uint64_t>(value)) - 1;
  const int64_t mantissa = (value - (int64_t{1} << exponent)) << (10 - exponent);
  return static_cast<uint16_t>((exponent + 15) << 10 | mantissa);
}

uint16_t ToBfloat16(int64_t value) {
  const float wide = static_cast<float>(value);
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(wide) >> 16);
}

template <class T>
void Put(T value, uint8_t* out) {
  std::memcpy(out, &value, sizeof value);
}

// Stores `sum` / `divisor` in the arithmetic of the dtype.
void Store(DType dtype, int64_t sum, int64_t divisor, uint8_t* out) {
  switch (dtype) {
    case DType::kBool:
      return Put(static_cast<uint8_t>(sum != 0 ? 1 : 0), out);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kUint8:
    case DType::kInt8:
      return Put(static_cast<uint8_t>(sum / divisor), out);
    case DType::kUint16:
    case DType::kInt16:
      return Put(static_cast<uint16_t>(sum / divisor), out);
    case DType::kUint32:
    case DType::kInt32:
      return Put(static_cast<uint32_t>(sum / divisor), out);
    case DType::kUint64:
    case DType::kInt64:
      return Put(static_cast<uint64_t>(sum / divisor), out);
    case DType::kFloat16:
      return Put(ToFloat16(sum / divisor), out);
    case DType::kBfloat16:
      return Put(ToBfloat16(sum / divisor), out);
    case DType::kFloat32:
      return Put(static_cast<float>(sum) / static_cast<float>(divisor), out);
    case DType::kFloat64:
      return Put(static_cast<double>(sum) / static_cast<double>(divisor), out);
  }
}

// Returns a factor that differs between elements and ops, so that old or misplaced bytes are
// noticed. The factors repeat after kPeriod elements. A grain has a power of two of elements, so
// segments do not fall into step with that.
constexpr uint64_t kPeriod = 53 * 7;
int64_t FactorOf(uint64_t hash, uint64_t element) {
  return 1 + static_cast<int64_t>(((hash >> (element % 53)) + element) % 7);
}

std::vector<uint8_t> Reduced(const OpName& name, const OpDesc& desc,
                             const std::vector<uint32_t>& slots, int64_t divisor) {
  std::vector<uint8_t> bytes(desc.bytes());
  const size_t size = SizeOf(desc.dtype);
  const uint64_t hash = Hash(0, name);
  // Elements with the same factor have the same result.
  std::vector<uint8_t> by_factor(8 * size);
  for (int64_t factor = 1; factor <= 7; ++factor) {
    // A single input is what its member posts, without the weight.
    const auto weighted = [&](uint32_t slot) {
      const bool weighs = desc.weighted && divisor != 0;
      return Value(desc, slot, factor) * (weighs ? static_cast<int64_t>(WeightOf(slot)) : 1);
    };
    int64_t value = weighted(slots.front());
    for (size_t i = 1; i < slots.size(); ++i) {
      value = Combine(desc.reduce, value, weighted(slots[i]));
    }
    Store(desc.dtype, value, std::max<int64_t>(divisor, 1), &by_factor[factor * size]);
  }
  for (uint64_t i = 0; i < std::min(bytes.size() / size, kPeriod); ++i) {
    std::memcpy(&bytes[i * size], &by_factor[FactorOf(hash, i) * size], size);
  }
  for (size_t done = kPeriod * size; done < bytes.size(); done += kPeriod * size) {
    std::memcpy(&bytes[done], bytes.data(), std::min(kPeriod * size, bytes.size() - done));
  }
  return bytes;
}

}  // namespace

std::string ToString(const OpName& name) {
  return "op " + std::to_string(name.group) + "/" + std::to_string(name.step) + "/" +
         std::to_string(name.tag) + "/" + std::to_string(name.turn) +
         (name.part == 0 ? "" : " part " + std::to_string(name.part));
}

OpShape ShapeOf(uint64_t seed, const OpName& name) {
  OpName whole = name;
  whole.part = 0;
  Prng prng(Hash(seed, whole));
  OpShape shape;
  OpDesc& desc = shape.desc;
  desc.dtype = static_cast<DType>(prng.Below(LH_WIRE_DTYPE_COUNT));
  if (prng.Chance(0.5)) desc.dtype = prng.Chance(0.5) ? DType::kFloat32 : DType::kInt64;
  desc.reduce = static_cast<ReduceOp>(prng.Below(LH_WIRE_REDUCE_COUNT));
  if (prng.Chance(0.5)) desc.reduce = ReduceOp::kSum;
  if (name.tag != kLateTag && prng.Chance(0.6)) {
    constexpr OpKind kKinds[] = {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast,
                                 OpKind::kBarrier,       OpKind::kReduce,    OpKind::kGather,
                                 OpKind::kScatter,       OpKind::kAllToAll,  OpKind::kSendRecv};
    desc.kind = kKinds[prng.Below(std::size(kKinds))];
  }
  if (Reduces(desc.kind)) {
    // Other reductions would not be exact, or are refused.
    const bool integer = !IsHalf(desc.dtype) && desc.dtype != DType::kBool;
    if (desc.reduce == ReduceOp::kAvg && !Wide(desc.dtype)) desc.reduce = ReduceOp::kSum;
    if (desc.reduce == ReduceOp::kProd && !integer) desc.reduce = ReduceOp::kMin;
    if (IsFloat8(desc.dtype)) desc.dtype = DType::kUint8;
    const bool real = desc.dtype == DType::kFloat32 || desc.dtype == DType::kFloat64;
    const bool sum = desc.reduce == ReduceOp::kSum || desc.reduce == ReduceOp::kAvg;
    desc.weighted = real && sum && desc.kind != OpKind::kBarrier && prng.Chance(0.2);
  } else {
    desc.reduce = ReduceOp::kSum;
  }
  desc.on_fault = prng.Chance(0.15) && name.tag != kLateTag ? OnFault::kAbort : OnFault::kRetry;
  const size_t size = SizeOf(desc.dtype);
  if (prng.Chance(0.4)) {
    desc.count = prng.Chance(0.05) ? 0 : prng.Below(200 / size) + 1;
  } else {
    desc.count = (LH_ONE_SHOT_BYTES_MAX + prng.Below(4000)) / size + 1;
  }
  shape.mismatched = desc.kind == OpKind::kAllReduce && prng.Chance(0.02);
  // Some of them have another reduction, which weights do not go with.
  if (shape.mismatched) desc.weighted = false;
  if (prng.Chance(0.1)) desc.min_world = static_cast<uint16_t>(2 + prng.Below(3));
  if (desc.kind == OpKind::kSendRecv) desc.min_world = 0;
  // Ops this small that choose no algorithm take the mesh where there is one.
  if (prng.Chance(0.4)) desc.algorithm = prng.Chance(0.7) ? Algorithm::kRing : Algorithm::kMesh;
  if (IsDirect(desc.kind)) desc.algorithm = Algorithm::kAuto;
  // A late op is awaited when newcomers may have come, and these do not know its parts.
  shape.split = !shape.mismatched && !desc.InParts() && !HasRoot(desc.kind) &&
                name.tag != kLateTag && prng.Chance(0.15);
  DrawCodec(Hash(seed ^ kCodecs, whole), &desc);
  return shape;
}

double WeightOf(uint32_t slot) { return 1 + slot % 2; }

OpDesc DescOf(uint64_t seed, const OpName& name, uint32_t slot) {
  const OpShape shape = ShapeOf(seed, name);
  OpDesc desc = shape.desc;
  if (!shape.mismatched) return desc;
  if (desc.Encodes()) {
    // Only the codecs differ: they do not go with all that the other offers have.
    DrawOtherCodec(Hash(seed ^ kCodecs, name) ^ slot, &desc);
    return desc;
  }
  uint64_t state = Hash(seed, name) ^ slot;
  switch (SplitMix64(&state) % 5) {
    case 2:
      desc.algorithm = desc.algorithm == Algorithm::kMesh ? Algorithm::kRing : Algorithm::kMesh;
      break;
    case 0:
      desc.count += 1;
      break;
    case 1:
      desc.reduce = desc.reduce == ReduceOp::kMax ? ReduceOp::kMin : ReduceOp::kMax;
      break;
    case 3:
      if (name.tag == kLateTag) break;
      desc.on_fault = desc.on_fault == OnFault::kAbort ? OnFault::kRetry : OnFault::kAbort;
      break;
    default:
      break;
  }
  return desc;
}

namespace {

// The all-reduce whose tensor is like one part of this op.
OpDesc PartOf(const OpDesc& desc) {
  OpDesc part = desc;
  part.kind = OpKind::kAllReduce;
  part.world = 0;
  return part;
}

// The weights of these members, as far as the op has weights.
std::vector<int64_t> WeightsOf(const OpDesc& desc, const std::vector<uint32_t>& slots) {
  std::vector<int64_t> weights;
  for (const uint32_t slot : slots) {
    weights.push_back(desc.weighted ? static_cast<int64_t>(WeightOf(slot)) : 1);
  }
  return weights;
}

}  // namespace

std::vector<uint8_t> InputOf(const OpName& name, const OpDesc& desc, uint32_t slot) {
  if (desc.Encodes()) return CodedInputOf(Hash(0, name), desc, slot);
  const Extent extent = SourceOf(desc.kind, true);
  OpDesc tensor = PartOf(desc);
  if (extent == Extent::kWhole && desc.InParts()) tensor.count *= desc.world;
  return Reduced(name, tensor, {slot}, 0);
}

std::vector<float> ErrorOf(const OpName& name, const OpDesc& desc, uint32_t slot) {
  if (!desc.Encodes()) return {};
  return CodedErrorOf(Hash(0, name), desc, slot, WeightsOf(desc, {slot}).front());
}

Slack SlackOf(const OpName& name, const OpDesc& desc, const std::vector<uint32_t>& slots) {
  if (!desc.Encodes()) return {};
  std::vector<int64_t> weights = WeightsOf(desc, slots);
  // Each tensor is encoded by itself.
  if (!Reduces(desc.kind)) weights.assign(1, 1);
  const uint64_t hash = Hash(0, name);
  return {SlackOf(hash, desc, weights), ErrorSlackOf(hash, desc, weights)};
}

std::vector<uint8_t> ResultOf(const OpName& name, const OpDesc& desc,
                              const std::vector<uint32_t>& slots, bool encoded) {
  if (desc.kind == OpKind::kAllGather || desc.kind == OpKind::kGather) {
    std::vector<uint8_t> whole;
    for (const uint32_t slot : slots) {
      const std::vector<uint8_t> part = InputOf(name, desc, slot);
      whole.insert(whole.end(), part.begin(), part.end());
    }
    return whole;
  }
  const std::vector<int64_t> weights = WeightsOf(desc, slots);
  if (desc.Encodes()) return CodedResultOf(Hash(0, name), desc, slots, weights, encoded);
  int64_t divisor = 1;
  if (desc.reduce == ReduceOp::kAvg) {
    divisor = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  }
  return Reduced(name, desc, slots, divisor);
}

uint64_t RootRankOf(const OpName& name, uint32_t world) { return Hash(7, name) % world; }

}  // namespace longhaul::sim
