#include "peerd/collective/local.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace longhaul::peerd {

Inputs InputsOf(const AttemptSpec& spec) {
  Inputs inputs;
  if (!spec.reduces()) return inputs;
  for (size_t i = 0; i < spec.sources.size(); ++i) {
    if (!spec.contributes.empty() && !spec.contributes[i]) continue;
    const bool weighted = spec.desc.weighted && !spec.weights.empty();
    const double weight = weighted ? spec.weights[i] : 1;
    if (weight != 0) inputs.push_back({static_cast<int>(i), weight});
  }
  return inputs;
}

bool KeepsErrors(const AttemptSpec& spec) {
  return std::any_of(spec.errors.begin(), spec.errors.end(),
                     [](const auto& errors) { return !errors.empty(); });
}

float* ErrorOf(const AttemptSpec& spec, int member, const Layout::Chunk& chunk, uint64_t skip) {
  if (spec.errors.empty() || spec.errors[member].empty()) return nullptr;
  float* const error = spec.errors[member][chunk.piece];
  return error == nullptr ? nullptr : error + (chunk.source + skip) / SizeOf(chunk.dtype);
}

std::vector<Term> TermsOf(const AttemptSpec& spec, const Inputs& inputs, const Layout::Chunk& chunk,
                          uint64_t skip) {
  std::vector<Term> terms;
  terms.reserve(2 * inputs.size() + 1);
  for (const LocalInput& input : inputs) {
    const uint8_t* const tensor = spec.sources[input.member][chunk.piece];
    terms.push_back({tensor + chunk.source + skip, /*wide=*/false, input.weight});
    if (const float* const error = ErrorOf(spec, input.member, chunk, skip)) {
      const bool half = IsHalf(chunk.dtype);
      terms.push_back({reinterpret_cast<const uint8_t*>(error), /*wide=*/half, 1});
    }
  }
  return terms;
}

void SumInputs(const AttemptSpec& spec, const Inputs& inputs, const Layout::Chunk& chunk,
               uint64_t skip, uint64_t bytes, uint8_t* out, bool wide) {
  if (inputs.empty()) return FillWithIdentity(spec.desc.reduce, chunk.dtype, bytes, out, wide);
  Combine(out, wide, TermsOf(spec, inputs, chunk, skip), bytes / SizeOf(chunk.dtype), chunk.dtype,
          spec.desc.reduce, /*divisor=*/0);
}

void FillWithIdentity(ReduceOp reduce, DType dtype, uint64_t bytes, uint8_t* out, bool wide) {
  const uint64_t count = bytes / SizeOf(dtype);
  if (wide) dtype = DType::kFloat32;
  // As numbers, 0 is no element of an "or", and 255 is "true" for an "and".
  if (dtype == DType::kBool) dtype = DType::kUint8;
  FillIdentity(out, count, dtype, reduce);
}

double DivisorOf(const AttemptSpec& spec) {
  if (spec.desc.reduce != ReduceOp::kAvg) return 0;
  if (spec.desc.weighted) return spec.weight_sum;
  return spec.members == 1 ? 0 : spec.members;
}

bool PositionContributes(const AttemptSpec& spec, int position) {
  return spec.ring_contributes.empty() || spec.ring_contributes[position] > 0;
}

std::vector<int> OrderOf(const AttemptSpec& spec) {
  if (!spec.order.empty()) return spec.order;
  std::vector<int> order(spec.size);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

bool SumsHalves(const AttemptSpec& spec) {
  if (spec.desc.Encodes()) return false;
  return spec.desc.Sums() && std::any_of(spec.pieces.begin(), spec.pieces.end(),
                                         [](const Piece& piece) { return IsHalf(piece.dtype); });
}

bool IsWideInRing(const AttemptSpec& spec) {
  if (!SumsHalves(spec)) return false;
  return spec.size > 2 || spec.desc.weighted ||
         std::any_of(spec.ring_contributes.begin(), spec.ring_contributes.end(),
                     [](uint32_t sources) { return sources > 1; });
}

bool IsWideFrom(const AttemptSpec& spec, int position) {
  if (!SumsHalves(spec)) return false;
  return spec.desc.weighted ||
         (!spec.ring_contributes.empty() && spec.ring_contributes[position] > 1);
}

bool IsInPlace(const AttemptSpec& spec, int member) {
  for (size_t k = 0; k < spec.pieces.size(); ++k) {
    const uint8_t* const target = spec.targets[member][k];
    if (target != nullptr) return target == spec.sources[member][k];
  }
  return false;
}

namespace {

void CheckCuts(const AttemptSpec& spec) {
  LH_CHECK(spec.cuts.empty() == (spec.reduces() && spec.gathers()))
      << ToString(spec.desc) << " with " << spec.cuts.size() << " cuts";
  const auto check = [&](const char* who, int position, int local) {
    LH_CHECK(position >= 0 && position < spec.size &&
             local < static_cast<int>(spec.sources.size()) &&
             (local >= 0) == (position == spec.position))
        << who << " of a cut is at " << position << " of " << spec.size << ", this is "
        << spec.position << ", and has local index " << local;
  };
  for (const Cut& cut : spec.cuts) {
    check("owner", cut.position, cut.local);
    if (IsDirect(spec.desc.kind)) check("receiver", cut.to_position, cut.to_local);
    LH_CHECK(spec.desc.unequal || cut.count == 0) << "cut of " << cut.count;
  }
}

void CheckTensors(const AttemptSpec& spec) {
  LH_CHECK(!spec.sources.empty() && spec.sources.size() == spec.targets.size())
      << spec.sources.size() << " sources, " << spec.targets.size() << " targets";
  LH_CHECK(!spec.pieces.empty() && (!spec.desc.unequal || spec.pieces.size() == 1))
      << spec.pieces.size() << " pieces";
  for (size_t i = 0; i < spec.sources.size(); ++i) {
    LH_CHECK(spec.sources[i].size() == spec.pieces.size() &&
             spec.targets[i].size() == spec.pieces.size())
        << "member " << i << " has " << spec.sources[i].size() << " sources, "
        << spec.targets[i].size() << " targets, of " << spec.pieces.size();
    const bool in_place = IsInPlace(spec, static_cast<int>(i));
    // With several cuts, a chunk lies elsewhere in a source than in a target.
    LH_CHECK(!in_place || spec.cuts.size() <= 1) << "member " << i << " is in place with a part";
    for (size_t k = 0; k < spec.pieces.size(); ++k) {
      LH_CHECK(spec.targets[i][k] == nullptr ||
               (spec.targets[i][k] == spec.sources[i][k]) == in_place)
          << "member " << i << " is in place with some tensors of a list";
    }
  }
}

void CheckContributors(const AttemptSpec& spec) {
  const size_t members = spec.sources.size();
  LH_CHECK(spec.contributes.empty() || spec.contributes.size() == members)
      << spec.contributes.size() << " of " << members << " sources";
  LH_CHECK(spec.weights.empty() || spec.weights.size() == members)
      << spec.weights.size() << " of " << members << " weights";
  for (const double weight : spec.weights) {
    LH_CHECK(weight >= 0 && std::isfinite(weight)) << "weight " << weight;
  }
  LH_CHECK(spec.order.empty() || (spec.order.size() == static_cast<size_t>(spec.size) &&
                                  std::is_permutation(spec.order.begin(), spec.order.end(),
                                                      OrderOf({.size = spec.size}).begin())))
      << "an order of " << spec.order.size();
  const size_t inputs = InputsOf(spec).size();
  LH_CHECK(spec.members >= 1 && spec.members >= inputs) << spec.members << " members";
  if (spec.ring_contributes.empty()) {
    LH_CHECK(!spec.reduces() || inputs <= 1) << inputs << " inputs";
    return;
  }
  LH_CHECK(spec.ring_contributes.size() == static_cast<size_t>(spec.size))
      << spec.ring_contributes.size() << " of " << spec.size << " positions";
  if (!spec.reduces()) return;
  // A source of weight 0 may count as one that contributes.
  LH_CHECK(spec.ring_contributes[spec.position] >= inputs &&
           spec.ring_contributes[spec.position] <= members)
      << spec.ring_contributes[spec.position] << " sources, " << inputs << " inputs";
  LH_CHECK(std::any_of(spec.ring_contributes.begin(), spec.ring_contributes.end(),
                       [](uint32_t sources) { return sources > 0; }))
      << "nobody contributes";
}

void CheckCodec(const AttemptSpec& spec) {
  LH_CHECK(!IsAuto(spec.desc.quantization)) << ToString(spec.desc);
  LH_CHECK(spec.desc.Fault().empty()) << ToString(spec.desc) << ": " << spec.desc.Fault();
  LH_CHECK(spec.seeds.size() == spec.sources.size())
      << spec.seeds.size() << " seeds of " << spec.sources.size();
  LH_CHECK(spec.errors.empty() || (spec.reduces() && spec.errors.size() == spec.sources.size()))
      << spec.errors.size() << " errors of " << spec.sources.size() << ", " << ToString(spec.desc);
  for (const Piece& piece : spec.pieces) {
    LH_CHECK(spec.grain_bytes % (CodecOf(spec.desc).block * SizeOf(piece.dtype)) == 0)
        << "grains of " << spec.grain_bytes << " cut blocks of " << ToString(spec.desc);
  }
}

}  // namespace

void CheckSpec(const AttemptSpec& spec) {
  if (spec.desc.Encodes()) CheckCodec(spec);
  LH_CHECK(spec.size >= 1 && spec.position >= 0 && spec.position < spec.size)
      << "position " << spec.position << " of " << spec.size;
  CheckCuts(spec);
  CheckTensors(spec);
  CheckContributors(spec);
}

}  // namespace longhaul::peerd
