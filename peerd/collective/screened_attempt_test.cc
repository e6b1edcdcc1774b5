// What attempts see of the inputs (AttemptSpec::seen), over a model network.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "peerd/collective/attempt.h"
#include "peerd/collective/screen.h"
#include "peerd/collective/testing.h"

namespace longhaul::peerd {
namespace {

constexpr int kSize = 3;
constexpr uint64_t kCount = 960;
constexpr double kFactor = 100;

// An op of three positions. Every value is 1 at first.
class Op {
 public:
  Op(const OpDesc& desc, std::vector<int> local_members, bool in_place) : desc_(desc) {
    ModelOp::Options options;
    options.desc = desc;
    options.size = kSize;
    options.local_members = std::move(local_members);
    if (in_place) options.in_place.assign(kSize, {true, true});
    if (desc.Encodes()) options.grain_bytes = 256;
    model_ = std::make_unique<ModelOp>(options);
    for (AttemptSpec& spec : model_->specs) {
      seen_.push_back(std::make_unique<Seen>(kSize, spec.sources.size()));
      spec.seen = seen_.back().get();
      if (desc.Encodes()) spec.seeds.assign(spec.sources.size(), 1);
      for (size_t i = 0; i < spec.sources.size(); ++i) Set(spec.position, static_cast<int>(i), 1);
    }
  }

  // Sets all float32 values of a local member's input.
  void Set(int position, int local, float value) {
    const auto* source = model_->specs[position].sources[local][0];
    std::fill_n(reinterpret_cast<float*>(const_cast<uint8_t*>(source)), kCount, value);
  }

  // Runs the op, and returns what each position suspects.
  std::vector<std::vector<Suspicion>> Run(AttemptMaker make) {
    const auto pool = MakeScratchPool(1 << 20);
    ModelNetwork network(make, model_->specs, pool.get(), /*seed=*/1);
    EXPECT_TRUE(network.Run()) << network.ToString();
    for (int i = 0; i < kSize; ++i) CommitWhole(&network.attempt(i));
    return Found();
  }
  std::vector<std::vector<Suspicion>> RunOneShot() {
    std::vector<std::string> payloads;
    for (const AttemptSpec& spec : model_->specs) payloads.push_back(OneShotPayload(spec));
    for (const AttemptSpec& spec : model_->specs) {
      EXPECT_TRUE(ReducePayloads(spec, payloads).ok());
    }
    return Found();
  }
  const Seen& seen(int position) const { return *seen_[position]; }

 private:
  std::vector<std::vector<Suspicion>> Found() const {
    std::vector<std::vector<Suspicion>> found;
    for (int i = 0; i < kSize; ++i) found.push_back(Judge(*seen_[i], i, kFactor));
    return found;
  }

  const OpDesc desc_;
  std::unique_ptr<ModelOp> model_;
  std::vector<std::unique_ptr<Seen>> seen_;
};

OpDesc Sum(Quantization quantization = Quantization::kNone) {
  OpDesc desc;
  desc.dtype = DType::kFloat32;
  desc.count = kCount;
  desc.quantization = quantization;
  if (desc.Encodes()) desc.block = 32;
  return desc;
}

class ScreenedAttemptTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(InPlace, ScreenedAttemptTest, testing::Bool());

TEST_P(ScreenedAttemptTest, OwnersOfTheMeshFindANanAndALargeNorm) {
  Op op(Sum(), {1, 1, 1}, GetParam());
  op.Set(1, 0, NAN);
  op.Set(2, 0, 1e6);
  const auto found = op.Run(&MakeMeshAttempt);
  // Position 1 has no norm, so only two are left, and nothing is compared.
  for (int i = 0; i < kSize; ++i) {
    ASSERT_EQ(found[i].size(), 1u) << i;
    EXPECT_EQ(found[i][0].position, 1);
  }
  EXPECT_EQ(found[1][0].nan, kCount);
  EXPECT_EQ(found[1][0].locals, std::vector<int>{0});
  EXPECT_EQ(found[0][0].nan + found[2][0].nan, kCount * 2 / 3);
}

TEST_P(ScreenedAttemptTest, OwnersOfTheMeshFindALargeNorm) {
  Op op(Sum(), {1, 1, 1}, GetParam());
  op.Set(2, 0, 1e6);
  for (const auto& found : op.Run(&MakeMeshAttempt)) {
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].position, 2);
    EXPECT_EQ(found[0].rms, 1e6);
    EXPECT_EQ(found[0].median, 1);
  }
}

TEST_P(ScreenedAttemptTest, TheRingShowsOwnInputsOnly) {
  Op op(Sum(), {1, 1, 1}, GetParam());
  op.Set(1, 0, INFINITY);
  op.Set(2, 0, 1e6);
  const auto found = op.Run(&MakeRingAttempt);
  EXPECT_TRUE(found[0].empty());
  ASSERT_EQ(found[1].size(), 1u);
  EXPECT_EQ(found[1][0].inf, kCount);
  EXPECT_TRUE(found[2].empty());
  EXPECT_EQ(op.seen(2).locals[0].finite, kCount);
}

TEST_P(ScreenedAttemptTest, EachInputIsLookedAtOnce) {
  for (const AttemptMaker make : {AttemptMaker{&MakeMeshAttempt}, AttemptMaker{&MakeRingAttempt}}) {
    Op op(Sum(), {2, 1, 1}, GetParam());
    for (const auto& found : op.Run(make)) EXPECT_TRUE(found.empty());
    EXPECT_EQ(op.seen(0).locals[0].finite, kCount);
    EXPECT_EQ(op.seen(0).locals[1].finite, kCount);
    EXPECT_EQ(op.seen(1).locals[0].finite, kCount);
  }
}

TEST_P(ScreenedAttemptTest, ALocalMemberIsNamedAmongSeveral) {
  for (const AttemptMaker make : {AttemptMaker{&MakeMeshAttempt}, AttemptMaker{&MakeRingAttempt}}) {
    Op op(Sum(), {2, 1, 1}, GetParam());
    op.Set(0, 1, NAN);
    const auto found = op.Run(make);
    ASSERT_EQ(found[0].size(), 1u);
    EXPECT_EQ(found[0][0].locals, std::vector<int>{1});
    EXPECT_EQ(found[0][0].nan, kCount);
  }
}

TEST(ScreenedOneShotTest, EverybodySeesAllInputs) {
  Op op(Sum(), {1, 1, 1}, /*in_place=*/false);
  op.Set(0, 0, 1e6);
  const auto large = op.RunOneShot();
  for (const auto& found : large) {
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].position, 0);
    EXPECT_EQ(found[0].rms, 1e6);
  }
}

TEST(ScreenedOneShotTest, FindsNan) {
  Op op(Sum(), {1, 1, 1}, /*in_place=*/false);
  op.Set(2, 0, NAN);
  for (const auto& found : op.RunOneShot()) {
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].position, 2);
    EXPECT_EQ(found[0].nan, kCount);
  }
}

// The owner decodes what arrives, so encoded inputs are looked at as all others.
TEST(ScreenedCodedTest, OwnersOfTheMeshFindEncodedNanAndLargeNorms) {
  Op large(Sum(Quantization::kInt8), {1, 1, 1}, /*in_place=*/false);
  large.Set(2, 0, 1e6);
  for (const auto& found : large.Run(&MakeMeshAttempt)) {
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].position, 2);
    EXPECT_NEAR(found[0].rms, 1e6, 1e4);
  }
  Op nan(Sum(Quantization::kInt8), {1, 1, 1}, /*in_place=*/true);
  nan.Set(1, 0, NAN);
  for (const auto& found : nan.Run(&MakeMeshAttempt)) {
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].position, 1);
    EXPECT_GT(found[0].nan, 0u);
  }
  EXPECT_EQ(nan.seen(0).locals[0].finite, kCount);
}

}  // namespace
}  // namespace longhaul::peerd
