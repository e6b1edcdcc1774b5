// Attempts of ops that encode: int8, int4 and bfloat16, over ring and mesh.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/prng.h"
#include "peerd/collective/attempt.h"
#include "peerd/collective/block_codec.h"
#include "peerd/collective/kernels.h"
#include "peerd/collective/testing.h"

namespace longhaul::peerd {
namespace {

struct Codec {
  Quantization quantization = Quantization::kInt8;
  uint16_t block = 32;
  Rounding rounding = Rounding::kNearest;
};
constexpr Codec kCodecs[] = {
    {Quantization::kInt8, 32, Rounding::kNearest}, {Quantization::kInt8, 64, Rounding::kStochastic},
    {Quantization::kInt4, 32, Rounding::kNearest}, {Quantization::kInt4, 64, Rounding::kStochastic},
    {Quantization::kBf16, 0, Rounding::kNearest},  {Quantization::kBf16, 0, Rounding::kStochastic},
};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};

BlockOptions OptionsOf(const Codec& codec) {
  BlockOptions options;
  options.format = codec.quantization == Quantization::kInt8   ? BlockFormat::kInt8
                   : codec.quantization == Quantization::kInt4 ? BlockFormat::kInt4
                                                               : BlockFormat::kBfloat16;
  options.block = codec.block == 0 ? 32 : codec.block;
  options.stochastic = codec.rounding == Rounding::kStochastic;
  return options;
}

std::vector<float> Load(DType dtype, const uint8_t* data, uint64_t count) {
  std::vector<float> out(count);
  const Term term{data};
  Combine(reinterpret_cast<uint8_t*>(out.data()), IsHalf(dtype), {&term, 1}, count, dtype,
          ReduceOp::kSum, 0);
  return out;
}
std::string Store(DType dtype, const std::vector<float>& values) {
  std::string out(values.size() * SizeOf(dtype), '\0');
  const Term term{reinterpret_cast<const uint8_t*>(values.data()), IsHalf(dtype), 1};
  Combine(reinterpret_cast<uint8_t*>(out.data()), false, {&term, 1}, values.size(), dtype,
          ReduceOp::kSum, 0);
  return out;
}

// Counts what is borrowed at a time.
class CountingPool final : public ScratchPool {
 public:
  absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
    const auto data = pool_->Borrow(bytes);
    most = std::max(most, bytes);
    return data;
  }
  void Give(uint8_t* data) override { pool_->Give(data); }
  uint64_t most = 0;

 private:
  std::unique_ptr<ScratchPool> pool_ = MakeScratchPool(1 << 30);
};

// An op that encodes, and what must come of it.
class CodedOp {
 public:
  CodedOp(const Codec& codec, ModelOp::Options options, bool errors, uint64_t seed)
      : codec_(codec), block_(OptionsOf(codec)), op_(With(codec, options)) {
    op_.FillWithFractions(seed);
    Prng prng(seed);
    for (AttemptSpec& spec : op_.specs) {
      spec.sum_seed = 77;
      const size_t position = spec.position;
      for (size_t i = 0; i < spec.sources.size(); ++i) {
        spec.seeds.push_back(1000 * position + i);
        if (!errors) continue;
        spec.errors.emplace_back();
        // Some members keep none.
        if (prng.Chance(0.2)) continue;
        for (size_t k = 0; k < spec.pieces.size(); ++k) {
          std::vector<float>& error = errors_[{position, i, k}];
          error.resize(SourceCount(spec, k));
          for (float& e : error) e = static_cast<float>(prng.Below(1000)) * 1e-5F - 5e-3F;
          spec.errors[i].push_back(error.data());
        }
      }
    }
    before_ = errors_;
    for (const AttemptSpec& spec : op_.specs) inputs_.push_back(InputsOf(spec));
  }

  ModelOp& model() { return op_; }
  std::vector<AttemptSpec>& specs() { return op_.specs; }
  bool ErrorsAreAsBefore() const { return errors_ == before_; }

  uint64_t SourceCount(const AttemptSpec& spec, size_t k) const {
    return spec.pieces[k].count * (spec.desc.InParts() ? spec.desc.world : 1);
  }

  // The input of each position to piece k, before it is encoded; empty: it does not contribute.
  std::vector<std::vector<float>> InputsOf(const AttemptSpec& of) const {
    std::vector<std::vector<float>> inputs;
    for (size_t k = 0; k < of.pieces.size(); ++k) {
      std::vector<float> sum;
      for (size_t i = 0; i < of.sources.size(); ++i) {
        const float weight = of.weights.empty() ? 1 : static_cast<float>(of.weights[i]);
        if (!of.contributes[i] || weight == 0) continue;
        const uint64_t count = SourceCount(of, k);
        std::vector<float> own = Load(of.pieces[k].dtype, of.sources[i][k], count);
        const auto error = errors_.find({of.position, i, k});
        for (uint64_t e = 0; e < count; ++e) {
          const float weighted = weight == 1 ? own[e] : own[e] * weight;
          if (sum.size() <= e) {
            sum.push_back(weighted);
          } else {
            sum[e] = sum[e] + weighted;
          }
          if (error != errors_.end()) sum[e] = sum[e] + error->second[e];
        }
      }
      inputs.push_back(std::move(sum));
    }
    return inputs;
  }

  std::vector<float> RoundTrip(uint64_t seed, size_t piece, uint64_t base,
                               const std::vector<float>& in) const {
    const uint64_t mixed = Digester().Add(seed).Add(uint64_t{piece}).Add(base).value();
    std::vector<uint8_t> bytes(EncodedBytes(block_, in.size()));
    Encode(block_, mixed, 0, in.data(), in.size(), bytes.data());
    std::vector<float> out(in.size());
    Decode(block_, bytes.data(), in.size(), out.data());
    return out;
  }

  // The result of an all-reduce over the mesh.
  std::vector<float> MeshSum(size_t k) const {
    std::vector<float> sum;
    for (const int position : op_.specs[0].order) {
      if (inputs_[position][k].empty()) continue;
      const AttemptSpec& spec = op_.specs[position];
      size_t first = 0;
      while (!spec.contributes[first] || (!spec.weights.empty() && spec.weights[first] == 0)) {
        ++first;
      }
      const std::vector<float> sent = RoundTrip(spec.seeds[first], k, 0, inputs_[position][k]);
      if (sum.empty()) {
        sum = sent;
      } else {
        for (size_t e = 0; e < sum.size(); ++e) sum[e] = sum[e] + sent[e];
      }
    }
    if (op_.specs[0].desc.reduce == ReduceOp::kAvg) {
      const double divisor = Divisor();
      for (float& e : sum) e = e / static_cast<float>(divisor);
    }
    return RoundTrip(77, k, 0, sum);
  }

  double Divisor() const {
    const AttemptSpec& spec = op_.specs[0];
    if (spec.desc.reduce != ReduceOp::kAvg) return 1;
    return spec.desc.weighted ? spec.weight_sum : spec.members;
  }

  // What goes in is what comes out, and what stays behind as errors. Only if everybody keeps them.
  std::string Unbalanced() const {
    for (size_t k = 0; k < op_.specs[0].pieces.size(); ++k) {
      const DType dtype = op_.specs[0].pieces[k].dtype;
      const uint64_t count = op_.specs[0].pieces[k].count;
      if (count == 0) continue;
      const std::vector<float> result = Load(dtype, op_.specs[0].targets[0][k], count);
      for (uint64_t e = 0; e < count; ++e) {
        double in = 0;
        double out = result[e] * Divisor();
        double scale = std::fabs(out);
        for (size_t p = 0; p < inputs_.size(); ++p) {
          if (inputs_[p][k].empty()) continue;
          in += inputs_[p][k][e];
          scale += std::fabs(inputs_[p][k][e]);
        }
        for (const auto& [where, error] : errors_) {
          if (std::get<2>(where) == k) out += error[e] - NotGiven(where)[e];
        }
        // Halves are rounded once more in the target.
        const double slack = (IsHalf(dtype) ? 1.0 / 128 : 1e-5) * (scale + 1e-3);
        if (std::fabs(in - out) > slack) {
          return absl::StrCat("piece ", k, " element ", e, ": ", in, " in, ", out, " out");
        }
      }
    }
    return "";
  }

  // The error that a member had before, if its input does not count: it was not added to anything.
  std::vector<float> NotGiven(const std::tuple<size_t, size_t, size_t>& where) const {
    const auto [position, member, piece] = where;
    const AttemptSpec& spec = op_.specs[position];
    const bool counts =
        spec.contributes[member] && (spec.weights.empty() || spec.weights[member] != 0);
    return counts ? std::vector<float>(before_.at(where).size()) : before_.at(where);
  }

  const std::map<std::tuple<size_t, size_t, size_t>, std::vector<float>>& errors() const {
    return errors_;
  }

 private:
  static ModelOp::Options With(const Codec& codec, ModelOp::Options options) {
    options.desc.quantization = codec.quantization;
    options.desc.block = codec.block;
    options.desc.rounding = codec.rounding;
    return options;
  }

  const Codec codec_;
  const BlockOptions block_;
  ModelOp op_;
  // By position, member and piece.
  std::map<std::tuple<size_t, size_t, size_t>, std::vector<float>> errors_;
  std::map<std::tuple<size_t, size_t, size_t>, std::vector<float>> before_;
  std::vector<std::vector<std::vector<float>>> inputs_;  // by position and piece, before the op
};

void CheckMemory(const AttemptSpec& spec, bool errors, uint64_t borrowed) {
  const bool crowded = std::any_of(spec.ring_contributes.begin(), spec.ring_contributes.end(),
                                   [](uint32_t members) { return members > 1; }) ||
                       spec.sources.size() > 1;
  const uint64_t most = ScratchBytesMax(spec.desc, /*in_place=*/true, spec.size, crowded,
                                        /*mesh=*/true, /*unequal_bytes=*/0, errors);
  ASSERT_LE(borrowed, most) << ToString(spec.desc);
}

ModelOp::Options RandomOptions(Prng* prng, const Codec& codec, DType dtype, int size) {
  ModelOp::Options options;
  options.desc.dtype = dtype;
  options.desc.reduce = prng->Chance(0.5) ? ReduceOp::kSum : ReduceOp::kAvg;
  options.desc.weighted = prng->Chance(0.2);
  options.desc.count = prng->Below(900);
  options.desc.algorithm = longhaul::Algorithm::kMesh;
  options.size = size;
  if (prng->Chance(0.3)) {
    for (uint64_t left = 1 + prng->Below(5); left > 0; --left) {
      options.pieces.push_back({kDTypes[prng->Below(3)], prng->Chance(0.2) ? 0 : prng->Below(300)});
    }
  }
  const bool several = prng->Chance(0.3);
  for (int i = 0; i < size; ++i) {
    options.local_members.push_back(several ? 1 + static_cast<int>(prng->Below(3)) : 1);
    options.in_place.emplace_back();
    options.contributes.emplace_back();
    for (int m = 0; m < options.local_members.back(); ++m) {
      options.in_place.back().push_back(prng->Chance(0.6));
      options.contributes.back().push_back(prng->Chance(0.8));
    }
  }
  options.contributes[prng->Below(size)][0] = true;
  options.shares = RandomShares(prng, size);
  options.grain_bytes = OptionsOf(codec).block * 4 * static_cast<uint32_t>(1 + prng->Below(3));
  options.window_bytes = 64 << prng->Below(5);
  options.cached = prng->Chance(0.5);
  options.seed = prng->Next();
  return options;
}

std::string Trace(const ModelOp::Options& options, const AttemptSpec& spec, uint64_t seed) {
  return ToString(spec.desc) + ", " + std::to_string(options.size) + " positions, seed " +
         std::to_string(seed);
}

using Maker = AttemptMaker;
bool IsMesh(Maker make) { return make == &MakeMeshAttempt; }

class CodedTest : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  static Codec codec() { return kCodecs[std::get<0>(GetParam())]; }
  static int size() { return std::get<1>(GetParam()); }
};
std::string NameOf(const testing::TestParamInfo<std::tuple<int, int>>& info) {
  const Codec& codec = kCodecs[std::get<0>(info.param)];
  return absl::StrCat(Name(codec.quantization), "_", Name(codec.rounding), "_",
                      std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Codecs, CodedTest,
                         testing::Combine(testing::Range(0, 6), testing::Values(2, 3, 5, 8)),
                         NameOf);

// All members have the bits that plain loops compute, whoever owns a chunk and in whatever order
// segments arrive. Over the ring all members have the same bits.
TEST_P(CodedTest, AllMembersGetTheSameBits) {
  Prng prng(size());
  for (const DType dtype : kDTypes) {
    const uint64_t block = OptionsOf(codec()).block;
    for (const uint64_t count :
         {uint64_t{0}, uint64_t{1}, block - 1, block, block + 1, 7 * block + 3, uint64_t{900}}) {
      for (const Maker make : {&MakeMeshAttempt, &MakeRingAttempt}) {
        ModelOp::Options options = RandomOptions(&prng, codec(), dtype, size());
        if (options.pieces.empty()) options.desc.count = count;
        CodedOp op(codec(), options, prng.Chance(0.5), prng.Next());
        const uint64_t seed = prng.Next();
        CountingPool pool;
        ModelNetwork network(make, op.specs(), &pool, seed);
        SCOPED_TRACE(Trace(options, op.specs()[0], seed));
        ASSERT_TRUE(network.Run()) << network.ToString();
        ASSERT_EQ(op.model().InputsDiffer(), "");
        ASSERT_TRUE(op.ErrorsAreAsBefore());
        for (int i = 0; i < size(); ++i) CommitWhole(&network.attempt(i));
        for (const AttemptSpec& spec : op.specs()) {
          for (size_t m = 0; m < spec.targets.size(); ++m) {
            ASSERT_EQ(op.model().TargetsOf(spec.position, static_cast<int>(m)),
                      op.model().TargetsOf(0, 0))
                << spec.position << " " << m;
          }
          CheckMemory(spec, !spec.errors.empty(), pool.most);
        }
        if (!IsMesh(make)) continue;
        std::string expected;
        for (size_t k = 0; k < op.specs()[0].pieces.size(); ++k) {
          expected += Store(op.specs()[0].pieces[k].dtype, op.MeshSum(k));
        }
        ASSERT_EQ(op.model().TargetsOf(0, 0), expected);
      }
    }
  }
}

TEST_P(CodedTest, ErrorsHaveWhatTheResultLacks) {
  Prng prng(100 + size());
  int balanced = 0;
  for (int run = 0; run < 60; ++run) {
    const Maker make = run % 2 == 0 ? &MakeMeshAttempt : &MakeRingAttempt;
    ModelOp::Options options = RandomOptions(&prng, codec(), kDTypes[run % 3], size());
    CodedOp op(codec(), options, /*errors=*/true, prng.Next());
    // At each host one whose input counts keeps errors; where none counts, one keeps errors.
    bool all = true;
    for (const AttemptSpec& spec : op.specs()) {
      bool any_counts = false;
      bool any = false;
      bool counted = false;
      for (size_t i = 0; i < spec.sources.size(); ++i) {
        const bool counts = spec.contributes[i] && (spec.weights.empty() || spec.weights[i] != 0);
        any_counts = any_counts || counts;
        any = any || !spec.errors[i].empty();
        counted = counted || (counts && !spec.errors[i].empty());
      }
      all = all && (any_counts ? counted : any);
    }
    if (!all) continue;
    ++balanced;
    const auto pool = MakeScratchPool(1 << 30);
    ModelNetwork network(make, op.specs(), pool.get(), prng.Next());
    ASSERT_TRUE(network.Run());
    for (int i = 0; i < size(); ++i) CommitWhole(&network.attempt(i));
    ASSERT_EQ(op.Unbalanced(), "") << run << " " << Trace(options, op.specs()[0], 0);
  }
  EXPECT_GE(balanced, 4);
}

TEST_P(CodedTest, AStopLeavesTensorsAndErrorsAsTheyWere) {
  Prng prng(200 + size());
  for (int run = 0; run < 20; ++run) {
    const Maker make = run % 2 == 0 ? &MakeMeshAttempt : &MakeRingAttempt;
    ModelOp::Options options = RandomOptions(&prng, codec(), kDTypes[run % 3], size());
    if (run % 4 >= 2) {
      options.desc.kind = OpKind::kReduceScatter;
      options.shares.clear();
    }
    CodedOp op(codec(), options, /*errors=*/true, prng.Next());
    const auto pool = MakeScratchPool(1 << 30);
    ModelNetwork network(make, op.specs(), pool.get(), prng.Next());
    for (uint64_t steps = prng.Below(400); steps > 0 && network.Step(); --steps) {
    }
    for (int i = 0; i < size(); ++i) network.Stop(i);
    while (network.Step()) {
    }
    for (int i = 0; i < size(); ++i) {
      WorkOff(&network.attempt(i));
      ASSERT_TRUE(network.attempt(i).Idle());
    }
    ASSERT_EQ(op.model().InputsDiffer(), "");
    ASSERT_EQ(op.model().TargetsTouched(), "") << run;
    ASSERT_TRUE(op.ErrorsAreAsBefore());
  }
}

// Each part is encoded once, from its beginning on.
TEST_P(CodedTest, APartIsRoundedOnceOnTheWayToItsOwner) {
  Prng prng(300 + size());
  for (const OpKind kind : {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast}) {
    for (const Maker make : {&MakeMeshAttempt, &MakeRingAttempt}) {
      ModelOp::Options options;
      options.desc.kind = kind;
      options.desc.dtype = kDTypes[prng.Below(3)];
      options.desc.count = 1 + prng.Below(300);
      options.desc.algorithm = longhaul::Algorithm::kMesh;
      options.size = size();
      options.grain_bytes = OptionsOf(codec()).block * 4;
      options.root = static_cast<int>(prng.Below(size()));
      if (kind == OpKind::kBroadcast && IsMesh(make)) options.shares = RandomShares(&prng, size());
      options.in_place.assign(size(), {kind == OpKind::kBroadcast && prng.Chance(0.5)});
      options.seed = prng.Next();
      CodedOp op(codec(), options, false, prng.Next());
      CountingPool pool;
      // The whole as everybody gets it.
      std::string expected;
      if (kind != OpKind::kReduceScatter) {
        for (const Cut& cut : op.specs()[0].cuts) {
          const AttemptSpec& spec = op.specs()[cut.position];
          const std::vector<float> part =
              Load(options.desc.dtype, spec.sources[0][0], options.desc.count);
          expected += Store(options.desc.dtype, op.RoundTrip(spec.seeds[0], 0, 0, part));
        }
      }
      ModelNetwork network(make, op.specs(), &pool, prng.Next());
      SCOPED_TRACE(Trace(options, op.specs()[0], 0));
      ASSERT_TRUE(network.Run()) << network.ToString();
      ASSERT_EQ(op.model().InputsDiffer(), "");
      for (int i = 0; i < size(); ++i) CommitWhole(&network.attempt(i));
      for (const AttemptSpec& spec : op.specs()) {
        CheckMemory(spec, false, pool.most);
        if (kind != OpKind::kReduceScatter) {
          ASSERT_EQ(op.model().TargetsOf(spec.position, 0), expected);
          continue;
        }
        // The part of this member, from the inputs of all.
        const size_t mine = std::find_if(spec.cuts.begin(), spec.cuts.end(),
                                         [](const Cut& cut) { return cut.local == 0; }) -
                            spec.cuts.begin();
        const uint64_t count = options.desc.count;
        std::vector<float> sum(count);
        double slack = 1e-6;
        for (const AttemptSpec& from : op.specs()) {
          const std::vector<float> all =
              Load(options.desc.dtype, from.sources[0][0], count * size());
          for (uint64_t e = 0; e < count; ++e) sum[e] += all[mine * count + e];
          slack += 1.0 / 7;  // more than a step of int4 for each
        }
        const std::vector<float> got = Load(options.desc.dtype, spec.targets[0][0], count);
        for (uint64_t e = 0; e < count; ++e) ASSERT_NEAR(got[e], sum[e], slack) << e;
      }
    }
  }
}

TEST_P(CodedTest, ABlockThatIsNotFiniteIsSoEverywhereAndCounted) {
  for (const Maker make : {&MakeMeshAttempt, &MakeRingAttempt}) {
    ModelOp::Options options;
    options.desc.dtype = DType::kFloat32;
    options.desc.count = 500;
    options.desc.algorithm = longhaul::Algorithm::kMesh;
    options.size = size();
    options.grain_bytes = OptionsOf(codec()).block * 4;
    CodedOp op(codec(), options, /*errors=*/true, 5);
    float nan = std::numeric_limits<float>::quiet_NaN();
    auto* const source = const_cast<uint8_t*>(op.specs()[1].sources[0][0]);
    std::memcpy(source + 4 * 70, &nan, 4);
    const auto pool = MakeScratchPool(1 << 30);
    ModelNetwork network(make, op.specs(), pool.get(), 9);
    ASSERT_TRUE(network.Run());
    for (int i = 0; i < size(); ++i) CommitWhole(&network.attempt(i));
    const uint64_t block = OptionsOf(codec()).block;
    for (const AttemptSpec& spec : op.specs()) {
      EXPECT_EQ(network.attempt(spec.position).blocks_not_finite(0), 1u);
      const std::vector<float> got = Load(DType::kFloat32, spec.targets[0][0], 500);
      for (uint64_t e = 0; e < 500; ++e) {
        const bool bad =
            codec().quantization == Quantization::kBf16 ? e == 70 : e / block == 70 / block;
        ASSERT_EQ(std::isnan(got[e]), bad) << e;
      }
    }
    for (const auto& [where, error] : op.errors()) {
      for (const float e : error) ASSERT_TRUE(std::isfinite(e));
    }
  }
}

// Whoever gives the NaN, and whichever way the parts take.
TEST_P(CodedTest, ANaNInAPartSpoilsItsBlockAndIsCountedByItsOwner) {
  const uint64_t block = OptionsOf(codec()).block;
  const bool alone = codec().quantization == Quantization::kBf16;  // elements share nothing
  for (const Maker make : {&MakeMeshAttempt, &MakeRingAttempt}) {
    for (int giver = 0; giver < size(); ++giver) {
      ModelOp::Options options;
      options.desc.kind = OpKind::kReduceScatter;
      options.desc.dtype = DType::kFloat32;
      options.desc.count = 150;
      options.desc.algorithm = longhaul::Algorithm::kMesh;
      options.size = size();
      options.grain_bytes = OptionsOf(codec()).block * 4;
      CodedOp op(codec(), options, /*errors=*/true, 5);
      const float nan = std::numeric_limits<float>::quiet_NaN();
      for (int part = 0; part < size(); ++part) {
        auto* const source = const_cast<uint8_t*>(op.specs()[giver].sources[0][0]);
        std::memcpy(source + 4 * (part * 150 + 70), &nan, 4);
      }
      const auto pool = MakeScratchPool(1 << 30);
      ModelNetwork network(make, op.specs(), pool.get(), 9);
      ASSERT_TRUE(network.Run());
      for (int i = 0; i < size(); ++i) CommitWhole(&network.attempt(i));
      for (const AttemptSpec& spec : op.specs()) {
        EXPECT_EQ(network.attempt(spec.position).blocks_not_finite(0), 1u)
            << (IsMesh(make) ? "mesh" : "ring") << " giver " << giver << " at " << spec.position;
        const std::vector<float> got = Load(DType::kFloat32, spec.targets[0][0], 150);
        for (uint64_t e = 0; e < 150; ++e) {
          const bool bad = alone ? e == 70 : e / block == 70 / block;
          ASSERT_EQ(std::isnan(got[e]), bad)
              << (IsMesh(make) ? "mesh" : "ring") << " giver " << giver << " at " << spec.position
              << " element " << e;
        }
      }
    }
  }
}

TEST_P(CodedTest, SegmentsThatDoNotFitAreRefused) {
  ModelOp::Options options;
  options.desc.dtype = DType::kFloat32;
  options.desc.count = 2000;
  options.desc.algorithm = longhaul::Algorithm::kMesh;
  options.size = 2;
  options.grain_bytes = OptionsOf(codec()).block * 4;
  CodedOp op(codec(), options, false, 5);
  struct Sink final : AttemptSink {
    void SendSegment(int, const Segment&, const uint8_t*, uint64_t cookie) override {
      cookies.push_back(cookie);
    }
    void Complete() override {}
    std::vector<uint64_t> cookies;
  } sink;
  const auto pool = MakeScratchPool(1 << 30);
  auto attempt = MakeMeshAttempt(op.specs()[0], &sink, pool.get());
  ASSERT_TRUE(attempt.ok());
  (*attempt)->Start();
  const uint64_t grain = EncodedBytes(OptionsOf(codec()), OptionsOf(codec()).block);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, grain - 1, grain + 1, uint64_t{1} << 20}) {
    EXPECT_FALSE((*attempt)->Place(1, {Phase::kReduce, 0, static_cast<uint32_t>(bytes)}).ok())
        << bytes;
  }
  EXPECT_TRUE((*attempt)->Place(1, {Phase::kReduce, 0, static_cast<uint32_t>(grain)}).ok());
  (*attempt)->Abandoned(1, {Phase::kReduce, 0, static_cast<uint32_t>(grain)});
  (*attempt)->Stop();
}

// A peerd takes the memory of an op before it announces the op, and cannot take more later. These
// attempts have no tensors, because none is read before they start.
TEST(CodedMemory, NoAttemptBorrowsMoreThanTheBound) {
  struct Sink final : AttemptSink {
    void SendSegment(int, const Segment&, const uint8_t*, uint64_t) override {}
    void Complete() override {}
  } sink;
  // Takes no memory.
  struct Pool final : ScratchPool {
    absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
      most = bytes;
      return reinterpret_cast<uint8_t*>(uintptr_t{4096});
    }
    void Give(uint8_t*) override {}
    uint64_t most = 0;
  };
  Prng prng(7);
  for (int run = 0; run < 20000; ++run) {
    AttemptSpec spec;
    OpDesc& desc = spec.desc;
    spec.size = 2 + static_cast<int>(prng.Below(15));
    const auto size = static_cast<uint64_t>(spec.size);
    desc.quantization = static_cast<Quantization>(1 + prng.Below(3));
    desc.block =
        desc.quantization == Quantization::kBf16 ? 0 : static_cast<uint16_t>(32 << prng.Below(8));
    desc.kind = prng.Chance(0.7) ? OpKind::kAllReduce : OpKind::kReduceScatter;
    desc.algorithm = longhaul::Algorithm::kMesh;
    desc.dtype = kDTypes[prng.Below(3)];
    desc.count = prng.Below(uint64_t{1} << prng.Below(22));
    if (desc.kind == OpKind::kReduceScatter) {
      desc.world = static_cast<uint16_t>(size);
      for (int i = 0; i < spec.size; ++i) spec.cuts.push_back({.position = i});
    }
    spec.pieces = {{desc.dtype, desc.count}};
    if (desc.kind == OpKind::kAllReduce && prng.Chance(0.3)) {
      spec.pieces.clear();
      for (uint64_t left = 1 + prng.Below(20); left > 0; --left) {
        const Piece piece{kDTypes[prng.Below(3)], prng.Below(uint64_t{1} << prng.Below(16))};
        spec.pieces.push_back(piece);
        desc.list_bytes += (piece.count * SizeOf(piece.dtype) + 63) / 64 * 64;
      }
      desc.list = 1;
      desc.dtype = spec.pieces.front().dtype;
      desc.count = 0;
    }
    spec.sources = {std::vector<const uint8_t*>(spec.pieces.size())};
    spec.targets = {std::vector<uint8_t*>(spec.pieces.size())};
    spec.seeds = {1};
    const bool errors = prng.Chance(0.5);
    if (errors) spec.errors = {std::vector<float*>(spec.pieces.size())};
    // This position owns as much as a position may.
    spec.position = static_cast<int>(prng.Below(size));
    if (!spec.cuts.empty()) spec.cuts[spec.position].local = 0;
    if (IsShared(desc.kind) && prng.Chance(0.7)) {
      spec.shares.assign(size, (kShareUnits - GreatestShare(size)) / (spec.size - 1));
      spec.shares[spec.position] = GreatestShare(size);
    }
    for (const Maker make : {&MakeMeshAttempt, &MakeRingAttempt}) {
      Pool pool;
      const auto attempt = make(spec, &sink, &pool);
      ASSERT_TRUE(attempt.ok());
      const uint64_t most = ScratchBytesMax(desc, /*in_place=*/true, size, /*crowded=*/false,
                                            /*mesh=*/true, /*unequal_bytes=*/0, errors);
      if (IsOneShot(desc.With(Quantization::kNone)) && most == 0) continue;
      ASSERT_LE(pool.most, most) << ToString(desc) << ", " << spec.size << " positions, run "
                                 << run;
    }
  }
}

}  // namespace
}  // namespace longhaul::peerd
