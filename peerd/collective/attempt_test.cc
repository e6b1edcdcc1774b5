#include "peerd/collective/attempt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <set>
#include <string>
#include <tuple>

#include "base/prng.h"
#include "peerd/collective/testing.h"

namespace longhaul::peerd {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd, ReduceOp::kMin,
                             ReduceOp::kMax};

// An algorithm that moves segments. The tests below hold for each of them.
struct Algorithm {
  const char* name;
  AttemptMaker make;
};
constexpr Algorithm kRing{"Ring", &MakeRingAttempt};
constexpr Algorithm kMesh{"Mesh", &MakeMeshAttempt};
void PrintTo(const Algorithm& algorithm, std::ostream* out) { *out << algorithm.name; }

OpDesc Desc(DType dtype, ReduceOp op, uint64_t count) {
  OpDesc desc;
  desc.dtype = dtype;
  desc.reduce = op;
  desc.count = count;
  return desc;
}

// A dtype that this op can reduce.
DType RandomDType(ReduceOp op, bool weighted, Prng* prng) {
  for (;;) {
    const auto dtype = static_cast<DType>(prng->Below(LH_WIRE_DTYPE_COUNT));
    if (ReductionFault(dtype, op, weighted).empty()) return dtype;
  }
}

// Each peer has one to three members. Each member's op is in place or not. Some ops are weighted,
// and some are on a list of tensors.
ModelOp::Options RandomOptions(Prng* prng, int size) {
  ModelOp::Options options;
  const auto reduce = static_cast<ReduceOp>(prng->Below(LH_WIRE_REDUCE_COUNT));
  const bool weighted = reduce <= ReduceOp::kAvg && prng->Chance(0.3);
  options.desc = Desc(RandomDType(reduce, weighted, prng), reduce, prng->Below(600));
  options.desc.weighted = weighted;
  if (prng->Chance(0.3)) {
    for (uint64_t left = 1 + prng->Below(5); left > 0; --left) {
      const DType dtype = RandomDType(reduce, weighted, prng);
      options.pieces.push_back({dtype, prng->Chance(0.2) ? 0 : prng->Below(300)});
    }
  }
  options.size = size;
  const bool several = prng->Chance(0.5);
  for (int i = 0; i < size; ++i) {
    options.local_members.push_back(several ? 1 + static_cast<int>(prng->Below(3)) : 1);
    options.in_place.emplace_back();
    for (int m = 0; m < options.local_members.back(); ++m) {
      options.in_place.back().push_back(prng->Chance(0.6));
    }
  }
  if (prng->Chance(0.5)) {
    for (const int local : options.local_members) {
      options.contributes.emplace_back();
      for (int m = 0; m < local; ++m) options.contributes.back().push_back(prng->Chance(0.5));
    }
    options.contributes[prng->Below(options.contributes.size())][0] = true;
  }
  options.shares = RandomShares(prng, size);
  options.grain_bytes = 64 * (1 + prng->Below(4));
  options.window_bytes = 64 << prng->Below(5);
  options.cached = prng->Chance(0.5);
  options.seed = prng->Next();
  return options;
}

std::string Trace(const ModelOp::Options& options, uint64_t seed) {
  return longhaul::ToString(options.desc) + ", " + std::to_string(options.size) +
         " positions, seed " + std::to_string(seed);
}

void ExpectReduces(AttemptMaker make, const ModelOp::Options& options, uint64_t seed) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp op(options);
  ModelNetwork network(make, op.specs, pool.get(), seed);
  ASSERT_TRUE(network.Run()) << Trace(options, seed) << ": " << network.ToString();
  for (int i = 0; i < options.size; ++i) CommitWhole(&network.attempt(i));
  EXPECT_EQ(op.ResultsDiffer(), "") << Trace(options, seed);
}

// ------------------------------------------------------------------------------ results

class WorldTest : public testing::TestWithParam<std::tuple<Algorithm, int>> {
 protected:
  static int Size() { return std::get<1>(GetParam()); }
  static void Expect(const ModelOp::Options& options, uint64_t seed) {
    ExpectReduces(std::get<0>(GetParam()).make, options, seed);
  }
};

TEST_P(WorldTest, EveryDtypeAndOpIsExactInPlaceAndOutOfPlace) {
  for (int dtype = 0; dtype < LH_WIRE_DTYPE_COUNT; ++dtype) {
    for (const ReduceOp reduce : kOps) {
      if (!ReductionFault(static_cast<DType>(dtype), reduce, false).empty()) continue;
      for (const bool in_place : {false, true}) {
        ModelOp::Options options;
        options.desc = Desc(static_cast<DType>(dtype), reduce, 211);
        options.size = Size();
        options.in_place.assign(options.size, {in_place});
        options.grain_bytes = 128;
        Expect(options, 7 * dtype + static_cast<int>(reduce));
      }
    }
  }
}

TEST_P(WorldTest, WhoDoesNotCountGetsTheResultAndAddsNothing) {
  for (int dtype = 0; dtype < LH_WIRE_DTYPE_COUNT; ++dtype) {
    for (const ReduceOp reduce : kOps) {
      if (!ReductionFault(static_cast<DType>(dtype), reduce, false).empty()) continue;
      for (const bool in_place : {false, true}) {
        ModelOp::Options options;
        options.desc = Desc(static_cast<DType>(dtype), reduce, 211);
        options.size = Size();
        options.in_place.assign(options.size, {in_place});
        options.contributes.assign(options.size, {false});
        options.contributes[dtype % options.size] = {true};
        options.grain_bytes = 128;
        Expect(options, 7 * dtype + static_cast<int>(reduce));
      }
    }
  }
}

TEST_P(WorldTest, CountsThatDoNotDivideAndCountsBelowTheNumberOfPositions) {
  for (const uint64_t count : {0, 1, 2, 15, 16, 17, 33, 100, 1023, 5000}) {
    for (const bool in_place : {false, true}) {
      ModelOp::Options options;
      options.desc = Desc(DType::kFloat32, ReduceOp::kSum, count);
      options.size = Size();
      options.in_place.assign(options.size, {in_place});
      Expect(options, count);
    }
  }
}

TEST_P(WorldTest, UnalignedTensorsAreExact) {
  for (const bool in_place : {false, true}) {
    ModelOp::Options options;
    options.desc = Desc(DType::kFloat64, ReduceOp::kAvg, 301);
    options.size = Size();
    options.in_place.assign(options.size, {in_place});
    options.misalign = 8;
    Expect(options, 1);
  }
}

TEST_P(WorldTest, RandomMembersPlacesAndSchedulesAreExact) {
  Prng prng(Size());
  for (int i = 0; i < 60; ++i) {
    Expect(RandomOptions(&prng, Size()), prng.Next());
    if (HasFailure()) return;
  }
}

std::string NameOf(const testing::TestParamInfo<std::tuple<Algorithm, int>>& info) {
  return std::get<0>(info.param).name + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Worlds, WorldTest,
                         testing::Combine(testing::Values(kRing, kMesh), testing::Range(1, 17)),
                         NameOf);

class AlgorithmTest : public testing::TestWithParam<Algorithm> {
 protected:
  static AttemptMaker Make() { return GetParam().make; }
};
class FaultTest : public AlgorithmTest {};

std::string NameOfAlgorithm(const testing::TestParamInfo<Algorithm>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Both, AlgorithmTest, testing::Values(kRing, kMesh), NameOfAlgorithm);
INSTANTIATE_TEST_SUITE_P(Both, FaultTest, testing::Values(kRing, kMesh), NameOfAlgorithm);

TEST_P(AlgorithmTest, LargeSegmentsThroughTheDefaultPlanAreExact) {
  ModelOp::Options options;
  options.desc = Desc(DType::kBfloat16, ReduceOp::kAvg, (1 << 20) + 77);
  options.size = 3;
  options.local_members = {2, 1, 1};
  options.in_place = {{true, true}, {true}, {false}};
  options.grain_bytes = kGrainBytes;
  options.segment_grains = 8;
  options.window_bytes = 8 << 20;
  ExpectReduces(Make(), options, 5);
}

TEST_P(AlgorithmTest, EveryPeerSendsTwiceItsShareAndNoMore) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4096);
  options.size = 4;
  ModelOp op(options);
  ModelNetwork network(Make(), op.specs, pool.get(), 1);
  ASSERT_TRUE(network.Run());
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(network.attempt(i).bytes_sent(), 2u * 3 * 4096);
    EXPECT_EQ(network.attempt(i).bytes_received(), 2u * 3 * 4096);
    CommitWhole(&network.attempt(i));
  }
}

TEST(RingTest, OutOfPlaceNeedsNoScratchAndInPlaceSaysWhenThereIsNone) {
  struct None final : ScratchPool {
    absl::StatusOr<uint8_t*> Borrow(uint64_t) override {
      return absl::ResourceExhaustedError("none");
    }
    void Give(uint8_t*) override { FAIL() << "nothing was taken"; }
  } pool;
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4096);
  options.size = 2;
  options.in_place = {{false}, {true}};
  ModelOp op(options);
  EXPECT_TRUE(MakeRingAttempt(op.specs[0], nullptr, &pool).ok());
  EXPECT_EQ(MakeRingAttempt(op.specs[1], nullptr, &pool).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(RingTest, InPlaceDoesWithoutLandings) {
  // A pool with room only for the originals.
  struct Tight final : ScratchPool {
    absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
      ++asked;
      if (asked % 2 == 0) return absl::ResourceExhaustedError("none");
      return pool->Borrow(bytes);
    }
    void Give(uint8_t* data) override { pool->Give(data); }
    std::unique_ptr<ScratchPool> pool = MakeScratchPool(1 << 20);
    int asked = 0;
  } pool;
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4096);
  options.size = 3;
  options.in_place = {{true}, {true}, {true}};
  ModelOp op(options);
  ModelNetwork network(&MakeRingAttempt, op.specs, &pool, 1);
  ASSERT_TRUE(network.Run());
  for (int i = 0; i < options.size; ++i) CommitWhole(&network.attempt(i));
  EXPECT_EQ(op.ResultsDiffer(), "");
  EXPECT_EQ(pool.asked, 6);
}

TEST_P(AlgorithmTest, OnePeerAloneIsCompleteAtOnceAndLeavesTheTargetUntilCommit) {
  const auto pool = MakeScratchPool(1 << 20);
  ModelOp::Options options;
  options.desc = Desc(DType::kInt32, ReduceOp::kSum, 5000);
  options.local_members = {3};
  options.in_place = {{true, false, true}};
  ModelOp op(options);
  ModelNetwork network(Make(), op.specs, pool.get(), 1);
  EXPECT_TRUE(network.Run());
  EXPECT_TRUE(network.attempt(0).CompleteAtOnce());
  EXPECT_EQ(op.InputsDiffer(), "");
  CommitWhole(&network.attempt(0));
  EXPECT_EQ(op.ResultsDiffer(), "");
}

// ------------------------------------------------------------------------------ what a peer may
// send

struct Recorder final : AttemptSink {
  void SendSegment(int to, const Segment& segment, const uint8_t* data, uint64_t cookie) override {
    to_.insert(to);
    sent_.push_back(segment);
    data_.push_back(data);
    cookies_.push_back(cookie);
  }
  void Complete() override { ++completed_; }
  std::set<int> to_;
  std::vector<Segment> sent_;
  std::vector<const uint8_t*> data_;
  std::vector<uint64_t> cookies_;
  int completed_ = 0;
};

class PlaceTest : public testing::Test {
 protected:
  // Position 1 of 3, in place. Chunks have 128 bytes, grains 64, and a segment holds one grain.
  // Position 2 does not contribute.
  explicit PlaceTest(const Algorithm& algorithm) : pool_(MakeScratchPool(1 << 20)) {
    ModelOp::Options options;
    options.desc = Desc(DType::kInt32, ReduceOp::kSum, 96);
    options.size = 3;
    options.in_place = {{true}, {true}, {true}};
    options.contributes = {{true}, {true}, {false}};
    options.segment_grains = 1;
    options.window_bytes = 1 << 20;
    op_ = std::make_unique<ModelOp>(options);
    attempt_ = *algorithm.make(op_->specs[1], &sink_, pool_.get());
    attempt_->Start();
  }
  ~PlaceTest() override {
    for (const uint64_t cookie : sink_.cookies_) attempt_->Sent(cookie);
  }

  std::string Refusal(int from, Phase phase, uint64_t offset, uint32_t bytes) {
    const auto place = attempt_->Place(from, {phase, offset, bytes});
    if (place.ok()) return "accepted";
    EXPECT_EQ(place.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string text(place.status().message());
    return text.substr(text.rfind(": ") + 2);
  }

  std::unique_ptr<ScratchPool> pool_;
  std::unique_ptr<ModelOp> op_;
  Recorder sink_;
  std::unique_ptr<Attempt> attempt_;
};

class RingPlaceTest : public PlaceTest {
 protected:
  RingPlaceTest() : PlaceTest(kRing) {}
};

TEST_F(RingPlaceTest, AcceptsPartialSumsOfOthersChunks) {
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 320, 64), "accepted");
}

TEST_F(RingPlaceTest, RefusesOtherSenders) {
  EXPECT_EQ(Refusal(2, Phase::kReduce, 0, 64), "not from the previous position");
  for (const int nobody : {-1, 1, 3}) {
    EXPECT_EQ(Refusal(nobody, Phase::kReduce, 0, 64), "not from another position");
  }
}

TEST_F(RingPlaceTest, RefusesWhatIsNoSegment) {
  for (const auto& [offset, bytes] :
       std::vector<std::pair<uint64_t, uint32_t>>{{1, 64},
                                                  {0, 63},
                                                  {0, 65},
                                                  {0, 192},
                                                  {64, 128},
                                                  {384, 64},
                                                  {0, 0},
                                                  {UINT64_MAX - 63, 64}}) {
    EXPECT_EQ(Refusal(0, Phase::kReduce, offset, bytes), "not as the tensor is cut") << offset;
  }
}

TEST_F(RingPlaceTest, RefusesASegmentTwice) {
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 64), "it came before");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 128), "it came before") << "half of it";
  EXPECT_EQ(Refusal(0, Phase::kReduce, 64, 64), "accepted") << "nothing is left of the one refused";
}

TEST_F(RingPlaceTest, PassesLongerSegmentsOnInSegmentsOfItsOwnLength) {
  attempt_->Credit(2);
  const size_t own = sink_.sent_.size();
  const Segment segment{Phase::kReduce, 0, 128};
  ASSERT_TRUE(attempt_->Place(0, segment).ok());
  attempt_->Received(0, segment);
  ASSERT_EQ(sink_.sent_.size(), own + 2);
  EXPECT_EQ(sink_.sent_[own].offset, 0u);
  EXPECT_EQ(sink_.sent_[own].bytes, 64u);
  EXPECT_EQ(sink_.sent_[own + 1].offset, 64u);
  EXPECT_EQ(sink_.data_[own + 1], sink_.data_[own] + 64);
  attempt_->Stop();
}

TEST_F(RingPlaceTest, ReceivesPartialSumsWhereOthersWereReceivedJustBefore) {
  const auto place = [this](uint64_t offset, uint32_t bytes) {
    uint8_t* const at = attempt_->Place(0, {Phase::kReduce, offset, bytes}).value();
    std::memset(at, 0, bytes);
    return at;
  };
  uint8_t* const first = place(0, 64);
  uint8_t* const second = place(64, 64);
  EXPECT_NE(first, second);
  attempt_->Abandoned(0, {Phase::kReduce, 0, 64});
  EXPECT_EQ(place(0, 64), first);
  attempt_->Received(0, {Phase::kReduce, 0, 64});
  EXPECT_EQ(place(256, 64), first) << "its sum lies elsewhere by now";
  attempt_->Received(0, {Phase::kReduce, 64, 64});
  EXPECT_EQ(place(320, 64), second);
}

TEST_F(RingPlaceTest, ReceivesSegmentsLongerThanALandingInScratch) {
  uint8_t* const longer = attempt_->Place(0, {Phase::kReduce, 0, 128}).value();
  std::memset(longer, 0, 128);
  uint8_t* const shorter = attempt_->Place(0, {Phase::kReduce, 256, 64}).value();
  EXPECT_NE(shorter, longer + 256) << "not in scratch at its offset";
  attempt_->Received(0, {Phase::kReduce, 0, 128});
  EXPECT_EQ(std::memcmp(longer, op_->specs[1].sources[0][0], 128), 0) << "the sum of zeros and it";
}

TEST_F(RingPlaceTest, RefusesPartialSumsOfItsOwnChunk) {
  EXPECT_EQ(Refusal(0, Phase::kReduce, 128, 64), "the chunk starts here");
}

TEST_F(RingPlaceTest, RefusesFinishedSegmentsOfTheChunkItFinishes) {
  EXPECT_EQ(Refusal(0, Phase::kGather, 256, 64), "the chunk is finished here");
}

TEST_F(RingPlaceTest, RefusesFinishedSegmentsThatItHasNotAddedTo) {
  const char* const kTooEarly = "finished before this position added to it";
  EXPECT_EQ(Refusal(0, Phase::kGather, 128, 64), kTooEarly);
  EXPECT_EQ(Refusal(0, Phase::kGather, 0, 64), kTooEarly);
  attempt_->Credit(2);
  EXPECT_EQ(Refusal(0, Phase::kGather, 128, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kGather, 0, 64), kTooEarly);
  const Segment segment{Phase::kReduce, 0, 64};
  ASSERT_TRUE(attempt_->Place(0, segment).ok());
  attempt_->Received(0, segment);
  EXPECT_EQ(Refusal(0, Phase::kGather, 0, 128), kTooEarly) << "to half of it";
  EXPECT_EQ(Refusal(0, Phase::kGather, 0, 64), "accepted");
  attempt_->Stop();
}

TEST_F(RingPlaceTest, RefusesUnknownPhases) {
  EXPECT_EQ(Refusal(0, static_cast<Phase>(2), 0, 64), "no such phase");
}

TEST_F(RingPlaceTest, SendsToTheNextPositionOnceItHasCredit) {
  EXPECT_EQ(sink_.sent_.size(), 0u);
  attempt_->Credit(0);
  EXPECT_EQ(sink_.sent_.size(), 0u);
  attempt_->Credit(2);
  EXPECT_EQ(sink_.sent_.size(), 2u);
  attempt_->Credit(2);
  EXPECT_EQ(sink_.sent_.size(), 2u);
  EXPECT_EQ(sink_.to_, std::set<int>{2});
}

TEST_F(RingPlaceTest, IsIdleOnlyWhenEverySegmentHasReturned) {
  EXPECT_TRUE(attempt_->Idle());
  attempt_->Credit(2);
  ASSERT_EQ(sink_.cookies_.size(), 2u);
  EXPECT_FALSE(attempt_->Idle());
  attempt_->Sent(sink_.cookies_[1]);
  EXPECT_FALSE(attempt_->Idle());
  attempt_->Stop();
  EXPECT_FALSE(attempt_->Idle());
  attempt_->Sent(sink_.cookies_[0]);
  EXPECT_FALSE(attempt_->Idle());
  WorkOff(attempt_.get());
  EXPECT_TRUE(attempt_->Idle());
  sink_.cookies_.clear();
}

class MeshPlaceTest : public PlaceTest {
 protected:
  MeshPlaceTest() : PlaceTest(kMesh) {}
};

TEST_F(MeshPlaceTest, AcceptsInputsOfItsChunkThatCountOnce) {
  EXPECT_EQ(Refusal(0, Phase::kReduce, 192, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 128, 128), "it came before");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 128, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 128, 64), "it came before");
  EXPECT_EQ(Refusal(2, Phase::kReduce, 128, 64), "the sender does not contribute");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 64), "the chunk is not this position's");
  EXPECT_EQ(Refusal(1, Phase::kReduce, 128, 64), "not from another position");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 160, 64), "not as the tensor is cut");
  EXPECT_EQ(Refusal(0, static_cast<Phase>(2), 128, 64), "no such phase");
}

TEST_F(MeshPlaceTest, AcceptsFinishedSegmentsOfItsOwnersThatItHasAddedTo) {
  const char* const kTooEarly = "finished before this position added to it";
  EXPECT_EQ(Refusal(2, Phase::kGather, 256, 64), kTooEarly);
  attempt_->Credit(0);
  EXPECT_EQ(Refusal(2, Phase::kGather, 256, 64), kTooEarly);
  attempt_->Credit(2);
  EXPECT_EQ(Refusal(2, Phase::kGather, 256, 64), "accepted");
  EXPECT_EQ(Refusal(2, Phase::kGather, 256, 64), "it came before");
  EXPECT_EQ(Refusal(2, Phase::kGather, 0, 64), "the chunk is not the sender's");
  EXPECT_EQ(Refusal(2, Phase::kGather, 128, 64), "the chunk is not the sender's");
  EXPECT_EQ(Refusal(0, Phase::kGather, 0, 64), "accepted");
  attempt_->Stop();
}

TEST_F(MeshPlaceTest, SendsToEachPositionOnceItHasCreditFromThere) {
  EXPECT_EQ(sink_.sent_.size(), 0u);
  attempt_->Credit(2);
  EXPECT_EQ(sink_.to_, std::set<int>{2});
  EXPECT_EQ(sink_.sent_.size(), 2u);
  // A finished segment goes at once to positions that have given credit, and to the rest later.
  const Segment segment{Phase::kReduce, 128, 64};
  ASSERT_TRUE(attempt_->Place(0, segment).ok());
  attempt_->Received(0, segment);
  EXPECT_EQ(sink_.to_, std::set<int>{2});
  ASSERT_EQ(sink_.sent_.size(), 3u);
  EXPECT_EQ(sink_.sent_[2].phase, Phase::kGather);
  attempt_->Credit(0);
  EXPECT_EQ(sink_.to_, (std::set<int>{0, 2}));
  EXPECT_EQ(sink_.sent_.size(), 6u);
}

// ------------------------------------------------------------------------------ mesh

// The result of an op whose floats depend on the order of additions.
std::set<std::string> ResultsOfFractions(const ModelOp::Options& options, AttemptMaker make,
                                         uint64_t seed) {
  std::set<std::string> results;
  ModelOp op(options);
  op.FillWithFractions(options.seed);
  const auto pool = MakeScratchPool(1 << 30);
  std::vector<std::unique_ptr<Attempt>> attempts;
  const auto collect = [&] {
    for (const AttemptSpec& spec : op.specs) {
      for (size_t i = 0; i < spec.targets.size(); ++i) {
        results.insert(op.TargetsOf(spec.position, static_cast<int>(i)));
      }
    }
  };
  if (make != nullptr) {
    ModelNetwork network(make, op.specs, pool.get(), seed);
    EXPECT_TRUE(network.Run());
    for (int p = 0; p < options.size; ++p) CommitWhole(&network.attempt(p));
    collect();
    return results;
  }
  std::vector<std::string> payloads;
  for (const AttemptSpec& spec : op.specs) payloads.push_back(OneShotPayload(spec));
  for (const AttemptSpec& spec : op.specs) {
    attempts.push_back(MakeOneShotAttempt(spec, *ReducePayloads(spec, payloads)));
    attempts.back()->Start();
    CommitWhole(attempts.back().get());
  }
  collect();
  return results;
}

TEST(MeshTest, TheBitsAreThoseOfAOneShotExchangeWhateverTheOrderOfArrival) {
  constexpr DType kFloats[] = {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64};
  Prng prng(5);
  for (int i = 0; i < 200; ++i) {
    ModelOp::Options options = RandomOptions(&prng, 2 + static_cast<int>(prng.Below(8)));
    options.desc.dtype = kFloats[i % 4];
    options.desc.reduce = prng.Chance(0.5) ? ReduceOp::kSum : ReduceOp::kAvg;
    options.desc.weighted = prng.Chance(0.5);
    options.desc.count += 1;
    for (Piece& piece : options.pieces) piece.dtype = kFloats[prng.Below(4)];
    const std::set<std::string> results = ResultsOfFractions(options, nullptr, 0);
    ASSERT_EQ(results.size(), 1u) << Trace(options, i);
    for (int turn = 0; turn < 2; ++turn) {
      ASSERT_EQ(ResultsOfFractions(options, &MakeMeshAttempt, prng.Next()), results)
          << Trace(options, i);
    }
  }
}

// Whoever owns a part, it is added up in the same order.
TEST(MeshTest, TheBitsDoNotDependOnTheShares) {
  Prng prng(6);
  for (int i = 0; i < 100; ++i) {
    ModelOp::Options options = RandomOptions(&prng, 2 + static_cast<int>(prng.Below(8)));
    options.desc.dtype = prng.Chance(0.5) ? DType::kFloat32 : DType::kBfloat16;
    options.desc.reduce = ReduceOp::kSum;
    options.pieces.clear();
    std::set<std::string> results;
    for (int k = 0; k < 4; ++k) {
      if (k > 0) options.shares = RandomShares(&prng, options.size);
      results.merge(ResultsOfFractions(options, &MakeMeshAttempt, prng.Next()));
    }
    ASSERT_EQ(results.size(), 1u) << Trace(options, i);
  }
}

TEST(MeshTest, APeerSendsItsInputAndItsShareOfTheResultToAllOthers) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 1 << 16);
  options.size = 4;
  options.shares = {kShareUnits / 2, 0, kShareUnits / 4, kShareUnits / 4};
  ModelOp op(options);
  ModelNetwork network(&MakeMeshAttempt, op.specs, pool.get(), 1);
  ASSERT_TRUE(network.Run());
  EXPECT_EQ(op.ResultsDiffer(), "");
  const uint64_t bytes = options.desc.bytes();
  for (int i = 0; i < 4; ++i) {
    const uint64_t own = bytes * options.shares[i] / kShareUnits;
    EXPECT_EQ(network.attempt(i).bytes_sent(), bytes + 2 * own);
    EXPECT_EQ(network.attempt(i).bytes_received(), bytes + 2 * own);
    CommitWhole(&network.attempt(i));
  }
}

ModelOp::Options PassedOnBroadcast() {
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 1 << 16);
  options.desc.kind = OpKind::kBroadcast;
  options.size = 4;
  options.root = 2;
  options.shares = {kShareUnits / 2, kShareUnits / 2, 0, 0};
  return options;
}

TEST(MeshTest, ABroadcastIsPassedOnByThoseThatHaveShares) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp op(PassedOnBroadcast());
  ModelNetwork network(&MakeMeshAttempt, op.specs, pool.get(), 1);
  ASSERT_TRUE(network.Run());
  EXPECT_EQ(op.ResultsDiffer(), "");
  const uint64_t bytes = op.specs[0].desc.bytes();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(network.attempt(i).bytes_sent(), i == 3 ? 0 : bytes) << i;
    EXPECT_EQ(network.attempt(i).bytes_received(), i == 2 ? 0 : bytes) << i;
    CommitWhole(&network.attempt(i));
  }
}

TEST(MeshTest, WhatIsPassedOnComesFromOnePositionOnly) {
  struct Nothing final : AttemptSink {
    void SendSegment(int, const Segment&, const uint8_t*, uint64_t) override {}
    void Complete() override {}
  } sink;
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp op(PassedOnBroadcast());
  // Position 0 passes the first half on, and position 1 the second.
  const Segment first{Phase::kGather, 0, kGrainBytes};
  const Segment second{Phase::kGather, op.specs[0].desc.bytes() / 2, kGrainBytes};
  const auto from = [&](int position, const Segment& segment) {
    std::vector<int> senders;
    for (int sender = 0; sender < 4; ++sender) {
      const auto made = MakeMeshAttempt(op.specs[position], &sink, pool.get());
      LH_CHECK(made.ok());
      (*made)->Start();
      if ((*made)->Place(sender, segment).ok()) senders.push_back(sender);
      (*made)->Stop();
    }
    return senders;
  };
  EXPECT_EQ(from(0, first), (std::vector<int>{2})) << "from the root";
  EXPECT_EQ(from(1, first), (std::vector<int>{0}));
  EXPECT_EQ(from(3, first), (std::vector<int>{0}));
  EXPECT_EQ(from(2, first), std::vector<int>()) << "the root has it";
  EXPECT_EQ(from(3, second), (std::vector<int>{1}));
}

TEST(MeshTest, TakesNoMoreScratchThanItSaysAndFailsWhereThereIsNone) {
  struct Limited final : ScratchPool {
    absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
      taken = bytes;
      return absl::ResourceExhaustedError("none");
    }
    void Give(uint8_t*) override {}
    uint64_t taken = 0;
  } pool;
  for (int size = 2; size <= 16; ++size) {
    for (const uint64_t count : {1, 1000, 20000, 20003}) {
      for (const int members : {1, 3}) {
        ModelOp::Options options;
        options.desc = Desc(DType::kFloat32, ReduceOp::kSum, count);
        options.size = size;
        options.local_members.assign(size, members);
        options.in_place.assign(size, std::vector<bool>(members, true));
        const ModelOp op(options);
        for (const AttemptSpec& spec : op.specs) {
          EXPECT_EQ(MakeMeshAttempt(spec, nullptr, &pool).status().code(),
                    absl::StatusCode::kResourceExhausted);
          EXPECT_LE(pool.taken, 2 * options.desc.bytes() + 64 + 128 * size);
          EXPECT_EQ(MakeRingAttempt(spec, nullptr, &pool).status().code(),
                    absl::StatusCode::kResourceExhausted);
          EXPECT_LE(pool.taken, options.desc.bytes() + 64);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------ faults

// Runs `steps` steps. Then stops one peer after the other, with some more steps in between.
void ExpectRestores(AttemptMaker make, const ModelOp::Options& options, uint64_t steps,
                    uint64_t seed) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp op(options);
  {
    ModelNetwork network(make, op.specs, pool.get(), seed);
    Prng prng(seed);
    for (uint64_t i = 0; i < steps && network.Step(); ++i) {
    }
    std::vector<int> order(options.size);
    for (int i = 0; i < options.size; ++i) order[i] = i;
    for (int i = options.size - 1; i > 0; --i) std::swap(order[i], order[prng.Below(i + 1)]);
    for (const int position : order) {
      network.Stop(position);
      for (uint64_t more = prng.Below(30); more > 0 && network.Step(); --more) {
      }
    }
    network.Run();
    for (int i = 0; i < options.size; ++i) ASSERT_TRUE(network.attempt(i).Idle());
  }
  EXPECT_EQ(op.InputsDiffer(), "") << Trace(options, seed) << " stopped after " << steps;
}

TEST_P(FaultTest, StopAtEveryPointOfAScheduleRestoresEveryInput) {
  for (const int size : {2, 3, 5}) {
    for (int places = 0; places < 3; ++places) {
      ModelOp::Options options;
      options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 500);
      options.size = size;
      options.local_members.assign(size, places == 2 ? 2 : 1);
      options.in_place.assign(size, std::vector<bool>(2, places != 0));
      options.grain_bytes = 192;
      options.seed = size;
      uint64_t all = 0;
      {
        const auto pool = MakeScratchPool(1 << 20);
        ModelOp op(options);
        ModelNetwork network(Make(), op.specs, pool.get(), size);
        while (network.Step()) ++all;
      }
      for (uint64_t steps = 0; steps <= all; ++steps) {
        ExpectRestores(Make(), options, steps, size);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(FaultTest, StopInRandomOpsAndSchedulesRestoresEveryInput) {
  Prng prng(2026);
  for (int i = 0; i < 1500; ++i) {
    const ModelOp::Options options = RandomOptions(&prng, 1 + static_cast<int>(prng.Below(7)));
    ExpectRestores(Make(), options, prng.Below(400), prng.Next());
    if (testing::Test::HasFailure()) return;
  }
}

TEST_P(FaultTest, StopAfterCompleteRestoresEveryInput) {
  Prng prng(11);
  for (int i = 0; i < 200; ++i) {
    const auto pool = MakeScratchPool(1 << 30);
    const ModelOp::Options options = RandomOptions(&prng, 1 + static_cast<int>(prng.Below(5)));
    ModelOp op(options);
    ModelNetwork network(Make(), op.specs, pool.get(), prng.Next());
    ASSERT_TRUE(network.Run());
    for (int p = 0; p < options.size; ++p) network.Stop(p);
    network.Run();
    ASSERT_EQ(op.InputsDiffer(), "") << Trace(options, i);
  }
}

TEST_P(FaultTest, ARedoFromRestoredInputsIsExact) {
  Prng prng(12);
  for (int i = 0; i < 200; ++i) {
    const auto pool = MakeScratchPool(1 << 30);
    const ModelOp::Options options = RandomOptions(&prng, 2 + static_cast<int>(prng.Below(4)));
    ModelOp op(options);
    {
      ModelNetwork network(Make(), op.specs, pool.get(), prng.Next());
      for (uint64_t steps = prng.Below(300); steps > 0 && network.Step(); --steps) {
      }
      for (int p = 0; p < options.size; ++p) network.Stop(p);
      network.Run();
    }
    ModelNetwork network(Make(), op.specs, pool.get(), prng.Next());
    ASSERT_TRUE(network.Run());
    for (int p = 0; p < options.size; ++p) CommitWhole(&network.attempt(p));
    ASSERT_EQ(op.ResultsDiffer(), "") << Trace(options, i);
  }
}

// 1. A finishes a segment in place and sends it on.
// 2. A freezes and stops. The segment is still being sent.
// 3. B is not frozen yet and receives the rest of the segment.
// If A put its original back between 2 and 3, B would take the original for the result. If A then
// died, B and other peers could commit a wrong result.
TEST(RingFaultTest, AFinishedSegmentThatIsBeingSentIsRestoredAtItsReturn) {
  struct Sink final : AttemptSink {
    void SendSegment(int, const Segment& segment, const uint8_t* data, uint64_t cookie) override {
      if (segment.phase == Phase::kGather) gather = data;
      cookies.push_back(cookie);
    }
    void Complete() override {}
    const uint8_t* gather = nullptr;
    std::vector<uint64_t> cookies;
  } sink;
  const auto pool = MakeScratchPool(1 << 20);
  ModelOp::Options options;
  options.desc = Desc(DType::kInt32, ReduceOp::kSum, 32);
  options.size = 2;
  options.in_place = {{true}, {true}};
  const ModelOp op(options);
  const auto attempt = *MakeRingAttempt(op.specs[0], &sink, pool.get());
  attempt->Start();
  attempt->Credit(1);
  const Segment partial{Phase::kReduce, 64, 64};
  uint8_t* const place = *attempt->Place(1, partial);
  std::memset(place, 1, 64);
  attempt->Received(1, partial);
  ASSERT_NE(sink.gather, nullptr);
  const std::string finished(reinterpret_cast<const char*>(sink.gather), 64);

  attempt->Stop();
  WorkOff(attempt.get());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(sink.gather), 64), finished);
  EXPECT_NE(op.InputsDiffer(), "");
  for (const uint64_t cookie : sink.cookies) attempt->Sent(cookie);
  WorkOff(attempt.get());
  EXPECT_TRUE(attempt->Idle());
  EXPECT_EQ(op.InputsDiffer(), "");
}

// The same in the mesh, where the segment is sent to several positions: it is restored when the
// last send has returned.
TEST(MeshFaultTest, AFinishedSegmentThatIsBeingSentIsRestoredAtItsLastReturn) {
  Recorder sink;
  const auto pool = MakeScratchPool(1 << 20);
  ModelOp::Options options;
  options.desc = Desc(DType::kInt32, ReduceOp::kSum, 48);
  options.size = 3;
  options.in_place = {{true}, {true}, {true}};
  const ModelOp op(options);
  const auto attempt = *MakeMeshAttempt(op.specs[0], &sink, pool.get());
  attempt->Start();
  for (const int other : {1, 2}) {
    attempt->Credit(other);
    const Segment input{Phase::kReduce, 0, 64};
    std::memset(*attempt->Place(other, input), 1, 64);
    attempt->Received(other, input);
  }
  ASSERT_EQ(sink.sent_.size(), 4u);
  const uint8_t* const place = op.specs[0].targets[0][0];
  EXPECT_EQ(sink.data_[2], place);
  EXPECT_EQ(sink.data_[3], place);
  const std::string finished(reinterpret_cast<const char*>(place), 64);

  attempt->Stop();
  for (const int i : {0, 3, 1}) attempt->Sent(sink.cookies_[i]);
  WorkOff(attempt.get());
  EXPECT_FALSE(attempt->Idle());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(place), 64), finished);
  EXPECT_NE(op.InputsDiffer(), "");
  attempt->Sent(sink.cookies_[2]);
  WorkOff(attempt.get());
  EXPECT_TRUE(attempt->Idle());
  EXPECT_EQ(op.InputsDiffer(), "");
}

// ------------------------------------------------------------------------------ slices

// Counts the bytes of the local members' tensors that each call changes.
class SliceTest : public AlgorithmTest {
 protected:
  static constexpr uint64_t kSlice = 64 << 10;

  static ModelOp::Options Options(int size, bool in_place) {
    ModelOp::Options options;
    options.desc = Desc(DType::kInt32, ReduceOp::kSum, 1 << 18);
    options.size = size;
    options.local_members.assign(size, 3);
    options.in_place.assign(size, std::vector<bool>(3, in_place));
    options.grain_bytes = 4096;
    options.segment_grains = 4;
    options.window_bytes = UINT64_MAX;
    return options;
  }
  void Watch(const AttemptSpec& spec) {
    spec_ = &spec;
    before_.clear();
    for (const auto& tensors : spec.targets) {
      before_.emplace_back(tensors[0], tensors[0] + Bytes());
    }
  }
  uint64_t Bytes() const { return spec_->desc.bytes(); }
  // Bytes changed since the last call, in whole grains.
  uint64_t Changed() {
    uint64_t changed = 0;
    for (size_t i = 0; i < before_.size(); ++i) {
      for (uint64_t at = 0; at < Bytes(); at += 4096) {
        const uint8_t* const now = spec_->targets[i][0] + at;
        if (std::memcmp(&before_[i][at], now, 4096) == 0) continue;
        changed += 4096;
        std::memcpy(&before_[i][at], now, 4096);
      }
    }
    return changed;
  }
  // Calls Work() until no work is left. Expects that no slice exceeds its limit by more than one
  // piece. Returns the number of slices.
  int WorkOffInSlices(Attempt* attempt) {
    int slices = 0;
    for (; attempt->HasWork(); ++slices) {
      attempt->Work(kSlice);
      EXPECT_LE(Changed(), 2 * kSlice);
    }
    return slices;
  }

  const AttemptSpec* spec_ = nullptr;
  std::vector<std::vector<uint8_t>> before_;
};
INSTANTIATE_TEST_SUITE_P(Both, SliceTest, testing::Values(kRing, kMesh), NameOfAlgorithm);

TEST_P(SliceTest, AResultComesToTheTargetsOfACommittedOpInSlices) {
  for (const int size : {1, 2}) {
    const auto pool = MakeScratchPool(1 << 30);
    const ModelOp::Options options = Options(size, /*in_place=*/true);
    ModelOp op(options);
    ModelNetwork network(Make(), op.specs, pool.get(), 1);
    ASSERT_TRUE(network.Run());
    Watch(op.specs[0]);
    Attempt& attempt = network.attempt(0);
    attempt.Commit();
    EXPECT_EQ(Changed(), 0u);
    EXPECT_FALSE(attempt.Idle());
    EXPECT_GT(WorkOffInSlices(&attempt), 10);
    EXPECT_TRUE(attempt.Idle());
    for (int i = 1; i < size; ++i) CommitWhole(&network.attempt(i));
    EXPECT_EQ(op.ResultsDiffer(), "");
  }
}

TEST_P(SliceTest, OriginalsComeBackInSlices) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options = Options(2, /*in_place=*/true);
  options.local_members = {1, 1};
  ModelOp op(options);
  ModelNetwork network(Make(), op.specs, pool.get(), 1);
  ASSERT_TRUE(network.Run());
  Watch(op.specs[0]);
  Attempt& attempt = network.attempt(0);
  attempt.Stop();
  EXPECT_EQ(Changed(), 0u);
  EXPECT_GT(WorkOffInSlices(&attempt), 10);
  EXPECT_TRUE(attempt.Idle());
  network.Stop(1);
  network.Run();
  EXPECT_EQ(op.InputsDiffer(), "");
}

// A target that is out of place holds the result when the op is complete, so Commit() leaves no
// work.
TEST_P(SliceTest, TargetsThatAreNoSourcesGetTheResultSegmentBySegment) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp op(Options(2, /*in_place=*/false));
  ModelNetwork network(Make(), op.specs, pool.get(), 1);
  ASSERT_TRUE(network.Run());
  EXPECT_EQ(op.InputsDiffer(), "");
  EXPECT_EQ(op.ResultsDiffer(), "");
  for (int i = 0; i < 2; ++i) {
    network.attempt(i).Commit();
    EXPECT_FALSE(network.attempt(i).HasWork());
  }
}

// Also if the next position has given credit, so that all of the input may be sent.
TEST_P(SliceTest, InputsOfSeveralMembersAreAddedUpInSlices) {
  const auto pool = MakeScratchPool(1 << 30);
  Recorder sink;
  ModelOp op(Options(2, /*in_place=*/false));
  const auto attempt = *Make()(op.specs[0], &sink, pool.get());
  Watch(op.specs[0]);
  attempt->Start();
  attempt->Credit(1);
  EXPECT_EQ(Changed(), 0u);
  EXPECT_GT(WorkOffInSlices(attempt.get()), 10);
  uint64_t handed = 0;
  for (const Segment& segment : sink.sent_) handed += segment.bytes;
  EXPECT_EQ(handed, Bytes() / 2);
  attempt->Stop();
  for (const uint64_t cookie : sink.cookies_) attempt->Sent(cookie);
}

TEST(MeshSliceTest, WhoContributesAloneFinishesItsChunkInSlices) {
  const auto pool = MakeScratchPool(1 << 30);
  Recorder sink;
  ModelOp::Options options;
  options.desc = Desc(DType::kInt32, ReduceOp::kSum, 1 << 18);
  options.size = 2;
  options.contributes = {{true}, {false}};
  options.grain_bytes = 4096;
  const ModelOp op(options);
  const auto attempt = *MakeMeshAttempt(op.specs[0], &sink, pool.get());
  attempt->Start();
  EXPECT_TRUE(attempt->HasWork());
  attempt->Work(1);
  attempt->Credit(1);
  uint64_t finished = 0;
  for (const Segment& segment : sink.sent_) {
    if (segment.phase == Phase::kGather) finished += segment.bytes;
  }
  EXPECT_GT(finished, 0u);
  EXPECT_LE(finished, 4u * 4096);
  WorkOff(attempt.get());
  finished = 0;
  for (const Segment& segment : sink.sent_) {
    if (segment.phase == Phase::kGather) finished += segment.bytes;
  }
  EXPECT_EQ(finished, options.desc.bytes() / 2);
  attempt->Stop();
  for (const uint64_t cookie : sink.cookies_) attempt->Sent(cookie);
}

// ------------------------------------------------------------------------------ one-shot

class OneShotTest : public testing::TestWithParam<int> {
 protected:
  static std::vector<std::string> Payloads(const ModelOp& op, int position) {
    std::vector<std::string> payloads;
    for (const AttemptSpec& spec : op.specs) {
      payloads.push_back(spec.position == position ? "" : OneShotPayload(spec));
    }
    return payloads;
  }
};

TEST_P(OneShotTest, RandomOpsAreExactAndInputsIntactUntilCommit) {
  Prng prng(GetParam());
  for (int i = 0; i < 40; ++i) {
    const ModelOp::Options options = RandomOptions(&prng, GetParam());
    ModelOp op(options);
    std::vector<std::unique_ptr<Attempt>> attempts;
    for (const AttemptSpec& spec : op.specs) {
      const auto result = ReducePayloads(spec, Payloads(op, spec.position));
      ASSERT_TRUE(result.ok()) << result.status();
      attempts.push_back(MakeOneShotAttempt(spec, *result));
      attempts.back()->Start();
      EXPECT_TRUE(attempts.back()->CompleteAtOnce());
      EXPECT_TRUE(attempts.back()->Idle());
    }
    ASSERT_EQ(op.InputsDiffer(), "");
    for (const auto& attempt : attempts) attempt->Commit();
    ASSERT_EQ(op.ResultsDiffer(), "") << Trace(options, i);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, OneShotTest, testing::Range(1, 17));

TEST(OneShotRefusalTest, PayloadsOfAnotherLengthAreRefused) {
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4);
  options.size = 3;
  const ModelOp op(options);
  for (const size_t bytes : {0, 15, 17, 4096}) {
    const auto result =
        ReducePayloads(op.specs[1], {std::string(16, '\0'), "", std::string(bytes, '\0')});
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(result.status().ToString().find("position 2"), std::string::npos);
  }
}

TEST(OneShotRefusalTest, SegmentsAreRefused) {
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4);
  const ModelOp op(options);
  const auto attempt = MakeOneShotAttempt(op.specs[0], std::string(16, '\0'));
  EXPECT_EQ(attempt->Place(0, {Phase::kReduce, 0, 16}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// ------------------------------------------------------------------------------ all kinds

constexpr OpKind kKinds[] = {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast,
                             OpKind::kReduce,        OpKind::kGather,    OpKind::kScatter,
                             OpKind::kAllToAll,      OpKind::kSendRecv};

// Each position has one to three members. Some do not contribute. Some parts are unequal.
ModelOp::Options RandomOfKind(OpKind kind, int size, uint64_t count, Prng* prng) {
  ModelOp::Options options = RandomOptions(prng, size);
  options.desc.kind = kind;
  options.desc.count = count;
  if (!Reduces(kind)) {
    options.desc.reduce = ReduceOp::kSum;
    options.desc.weighted = false;
  }
  if (options.pieces.empty() && options.desc.InParts()) options.desc.unequal = prng->Chance(0.4);
  for (Piece& piece : options.pieces) piece.count = prng->Below(count + 1);
  options.root = static_cast<int>(prng->Below(size));
  return options;
}

// The algorithms that an op of this kind may take.
std::vector<AttemptMaker> MakersOf(OpKind kind) {
  if (IsDirect(kind)) return {&MakeMeshAttempt};
  return {&MakeRingAttempt, &MakeMeshAttempt};
}

class KindTest : public testing::TestWithParam<std::tuple<OpKind, int>> {
 protected:
  static OpKind Kind() { return std::get<0>(GetParam()); }
  static int Size() { return std::get<1>(GetParam()); }
};

TEST_P(KindTest, TheResultIsExactAndTheInputsStay) {
  const auto pool = MakeScratchPool(1 << 30);
  Prng prng(71 + Size());
  for (const uint64_t count : {1, 2, 7, 211, 1025}) {
    for (int run = 0; run < 20; ++run) {
      for (const AttemptMaker make : MakersOf(Kind())) {
        ModelOp::Options options = RandomOfKind(Kind(), Size(), count, &prng);
        if (count == 1025) options.grain_bytes = 1024;
        if (run % 2 == 0) options.in_place.clear();
        ModelOp op(options);
        ModelNetwork network(make, op.specs, pool.get(), run);
        ASSERT_TRUE(network.Run()) << Trace(options, run) << ": " << network.ToString();
        ASSERT_EQ(op.TargetsTouched(), "") << Trace(options, run);
        for (int i = 0; i < Size(); ++i) CommitWhole(&network.attempt(i));
        ASSERT_EQ(op.ResultsDiffer(), "") << Trace(options, run);
        if (run % 2 == 0) {
          ASSERT_EQ(op.InputsDiffer(), "") << Trace(options, run);
        }
      }
    }
  }
}

TEST_P(KindTest, AStopAtAnyMomentLeavesTheInputsAndReturnsAllScratch) {
  Prng prng(83 + Size());
  for (int run = 0; run < 200; ++run) {
    const ModelOp::Options options = RandomOfKind(Kind(), Size(), 1 + prng.Below(600), &prng);
    const std::vector<AttemptMaker> makers = MakersOf(Kind());
    const auto pool = MakeScratchPool(1 << 30);
    ModelOp op(options);
    ModelNetwork network(makers[run % makers.size()], op.specs, pool.get(), run);
    for (uint64_t steps = prng.Below(400); steps > 0 && network.Step(); --steps) continue;
    for (int i = 0; i < Size(); ++i) network.Stop(i);
    network.Run();
    for (int i = 0; i < Size(); ++i) {
      WorkOff(&network.attempt(i), 1000);
      EXPECT_TRUE(network.attempt(i).Idle()) << Trace(options, run);
    }
    ASSERT_EQ(op.InputsDiffer(), "") << Trace(options, run);
    ASSERT_EQ(op.TargetsTouched(), "") << Trace(options, run);
  }
}

TEST_P(KindTest, AOneShotExchangeGivesTheSame) {
  Prng prng(97 + Size());
  for (int run = 0; run < 100; ++run) {
    ModelOp::Options options = RandomOfKind(Kind(), Size(), 1 + prng.Below(60), &prng);
    options.desc.unequal = false;
    options.in_place.clear();
    ModelOp op(options);
    std::vector<std::string> payloads;
    for (const AttemptSpec& spec : op.specs) payloads.push_back(OneShotPayload(spec));
    for (const AttemptSpec& spec : op.specs) {
      const auto result = ReducePayloads(spec, payloads);
      ASSERT_TRUE(result.ok()) << result.status();
      const auto attempt = MakeOneShotAttempt(spec, *result);
      attempt->Start();
      CommitWhole(attempt.get());
    }
    ASSERT_EQ(op.ResultsDiffer(), "") << Trace(options, run);
    ASSERT_EQ(op.InputsDiffer(), "") << Trace(options, run);
  }
}

TEST(PhaseTest, ASegmentOfAPhaseThatTheOpDoesNotHaveIsRefused) {
  const auto pool = MakeScratchPool(1 << 30);
  for (const OpKind kind : kKinds) {
    for (const AttemptMaker make : MakersOf(kind)) {
      ModelOp::Options options;
      options.desc = Desc(DType::kInt32, ReduceOp::kSum, 1024);
      options.desc.kind = kind;
      options.size = 3;
      ModelOp op(options);
      class Ignore final : public AttemptSink {
        void SendSegment(int, const Segment&, const uint8_t*, uint64_t) override {}
        void Complete() override {}
      } sink;
      auto attempt = *make(op.specs[1], &sink, pool.get());
      attempt->Start();
      const Phase other = Reduces(kind) ? Phase::kGather : Phase::kReduce;
      const auto placed = attempt->Place(0, {other, 0, 64});
      EXPECT_FALSE(placed.ok());
      EXPECT_NE(placed.status().message().find("no such phase"), std::string::npos)
          << placed.status();
      attempt->Stop();
      WorkOff(attempt.get());
    }
  }
}

TEST(DirectTest, AChunkIsTakenOnlyFromItsOwnerAndByItsReceiver) {
  // Each position sends position 0 a chunk of 64 bytes. Position 1 is asked.
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options;
  options.desc = Desc(DType::kInt32, ReduceOp::kSum, 16);
  options.desc.kind = OpKind::kAllToAll;
  options.size = 3;
  ModelOp op(options);
  Recorder sink;
  const auto attempt = *MakeMeshAttempt(op.specs[1], &sink, pool.get());
  attempt->Start();
  const auto why = [&](int from, uint64_t offset) {
    const auto place = attempt->Place(from, {Phase::kGather, offset, 64});
    const std::string text(place.status().message());
    return place.ok() ? "accepted" : text.substr(text.rfind(": ") + 2);
  };
  // Ranks go from the last position to the first, so the chunks of position 2 come first.
  EXPECT_EQ(why(2, 64), "accepted");
  EXPECT_EQ(why(2, 64), "it came before");
  EXPECT_EQ(why(0, 0), "the chunk is not the sender's");
  EXPECT_EQ(why(2, 0), "the chunk is for another position");
  EXPECT_EQ(why(2, 128), "the chunk is for another position");
  EXPECT_EQ(why(2, 7 * 64), "the chunk is not the sender's");
  EXPECT_EQ(why(0, 7 * 64), "accepted");
  attempt->Stop();
}

TEST(DirectTest, WhoHasNothingToSendOrReceiveIsCompleteAtOnce) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat8E4M3, ReduceOp::kSum, 100);
  options.desc.kind = OpKind::kSendRecv;
  options.size = 4;
  options.root = 1;
  ModelOp op(options);
  ModelNetwork network(&MakeMeshAttempt, op.specs, pool.get(), 1);
  for (const int position : {0, 1, 2, 3}) {
    EXPECT_EQ(network.attempt(position).CompleteAtOnce(), position == 0 || position == 3);
  }
  ASSERT_TRUE(network.Run());
  for (int i = 0; i < options.size; ++i) CommitWhole(&network.attempt(i));
  EXPECT_EQ(op.ResultsDiffer(), "");
}

// ------------------------------------------------------------------------------ halves

// Returns the bytes of segments that each position sends in all, for 64 halves.
uint64_t BytesOfHalves(AttemptMaker make, int size, int members, bool weighted, ReduceOp reduce) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options;
  options.desc = Desc(DType::kBfloat16, reduce, 64 * size);
  options.desc.kind = OpKind::kReduceScatter;
  options.desc.count = 64;
  options.desc.weighted = weighted;
  options.size = size;
  options.local_members.assign(size, members);
  ModelOp op(options);
  ModelNetwork network(make, op.specs, pool.get(), 1);
  EXPECT_TRUE(network.Run());
  const uint64_t parts = members * (size - 1);
  return network.attempt(0).bytes_sent() / parts;
}

TEST(HalvesTest, TravelAsFloat32OnlyWhereTheyWouldBeRounded) {
  const AttemptMaker ring = &MakeRingAttempt;
  const AttemptMaker mesh = &MakeMeshAttempt;
  EXPECT_EQ(BytesOfHalves(ring, 2, 1, false, ReduceOp::kSum), 128u);
  EXPECT_EQ(BytesOfHalves(ring, 3, 1, false, ReduceOp::kSum), 256u);
  EXPECT_EQ(BytesOfHalves(ring, 2, 2, false, ReduceOp::kProd), 256u);
  EXPECT_EQ(BytesOfHalves(ring, 2, 1, true, ReduceOp::kAvg), 256u);
  EXPECT_EQ(BytesOfHalves(ring, 5, 2, false, ReduceOp::kMax), 128u);
  EXPECT_EQ(BytesOfHalves(mesh, 5, 1, false, ReduceOp::kSum), 128u);
  EXPECT_EQ(BytesOfHalves(mesh, 5, 2, false, ReduceOp::kSum), 256u);
  EXPECT_EQ(BytesOfHalves(mesh, 2, 1, true, ReduceOp::kAvg), 256u);
  EXPECT_EQ(BytesOfHalves(mesh, 5, 2, false, ReduceOp::kMin), 128u);
}

TEST(HalvesTest, WideSegmentsAreRefusedUnlessTheyHaveWholeElements) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat16, ReduceOp::kSum, 96);  // chunks of 64 bytes
  options.size = 3;
  ModelOp op(options);
  Recorder sink;
  const auto attempt = *MakeRingAttempt(op.specs[1], &sink, pool.get());
  attempt->Start();
  for (const uint32_t bytes : {1, 64, 127, 129, 256}) {
    EXPECT_FALSE(attempt->Place(0, {Phase::kReduce, 0, bytes}).ok()) << bytes;
  }
  EXPECT_TRUE(attempt->Place(0, {Phase::kReduce, 0, 128}).ok());
  attempt->Stop();
}

// ------------------------------------------------------------------------------ scratch

TEST(ScratchTest, NoAttemptTakesMoreThanItSays) {
  struct Counting final : ScratchPool {
    absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) override {
      taken = std::max(taken, bytes);
      return pool->Borrow(bytes);
    }
    void Give(uint8_t* data) override { pool->Give(data); }
    std::unique_ptr<ScratchPool> pool = MakeScratchPool(1 << 30);
    uint64_t taken = 0;
  } pool;
  Prng prng(77);
  for (int run = 0; run < 1000; ++run) {
    const auto kind = static_cast<OpKind>(LH_WIRE_ALL_REDUCE + prng.Below(10));
    if (kind == OpKind::kBarrier) continue;
    const int size = 2 + static_cast<int>(prng.Below(9));
    ModelOp::Options options = RandomOfKind(kind, size, 1 + prng.Below(2000), &prng);
    options.cached = true;  // no landings
    ModelOp op(options);
    for (const AttemptSpec& spec : op.specs) {
      bool in_place = false;
      for (size_t i = 0; i < spec.targets.size(); ++i) {
        for (size_t k = 0; k < spec.pieces.size(); ++k) {
          in_place = in_place ||
                     (spec.targets[i][k] != nullptr && spec.targets[i][k] == spec.sources[i][k]);
        }
      }
      OpDesc desc = spec.desc;
      desc.algorithm = longhaul::Algorithm::kMesh;
      const bool crowded = std::any_of(options.local_members.begin(), options.local_members.end(),
                                       [](int members) { return members > 1; });
      uint64_t whole = 0;
      for (const Cut& cut : spec.cuts) whole += cut.count * SizeOf(desc.dtype);
      for (const bool mesh : {false, true}) {
        if (IsDirect(kind) && !mesh) continue;
        pool.taken = 0;
        const auto make = mesh ? &MakeMeshAttempt : &MakeRingAttempt;
        Recorder sink;
        ASSERT_TRUE(make(spec, &sink, &pool).ok());
        ASSERT_LE(pool.taken, ScratchBytesMax(desc, in_place, size, crowded, mesh, whole))
            << Trace(options, run) << (mesh ? " mesh" : " ring") << (in_place ? " in place" : "");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, KindTest,
                         testing::Combine(testing::ValuesIn(kKinds),
                                          testing::Values(1, 2, 3, 5, 8)));

}  // namespace
}  // namespace longhaul::peerd
