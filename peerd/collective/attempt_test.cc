#include "peerd/collective/attempt.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "base/prng.h"
#include "peerd/collective/testing.h"

namespace longhaul::peerd {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd, ReduceOp::kMin,
                             ReduceOp::kMax};

OpDesc Desc(DType dtype, ReduceOp op, uint64_t count) {
  OpDesc desc;
  desc.dtype = dtype;
  desc.reduce = op;
  desc.count = count;
  return desc;
}

// One to three members at each peer, each in place or not.
ModelOp::Options RandomOptions(Prng* prng, int size) {
  ModelOp::Options options;
  options.desc = Desc(static_cast<DType>(prng->Below(LH_WIRE_DTYPE_COUNT)),
                      static_cast<ReduceOp>(prng->Below(LH_WIRE_REDUCE_COUNT)), prng->Below(600));
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
      options.counts.emplace_back();
      for (int m = 0; m < local; ++m) options.counts.back().push_back(prng->Chance(0.5));
    }
    options.counts[prng->Below(options.counts.size())][0] = true;
  }
  options.segment_bytes = 64 * (1 + prng->Below(4));
  options.window_bytes = 64 << prng->Below(5);
  options.seed = prng->Next();
  return options;
}

std::string Trace(const ModelOp::Options& options, uint64_t seed) {
  return longhaul::ToString(options.desc) + ", " + std::to_string(options.size) +
         " positions, seed " + std::to_string(seed);
}

void ExpectReduces(const ModelOp::Options& options, uint64_t seed) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp op(options);
  ModelRing ring(op.specs, pool.get(), seed);
  ASSERT_TRUE(ring.Run()) << Trace(options, seed) << ": " << ring.ToString();
  for (int i = 0; i < options.size; ++i) ring.attempt(i).Commit();
  EXPECT_EQ(op.ResultsDiffer(), "") << Trace(options, seed);
}

// ------------------------------------------------------------------------------ results

class RingWorldTest : public testing::TestWithParam<int> {};

TEST_P(RingWorldTest, EveryDtypeAndOpIsExactInPlaceAndOutOfPlace) {
  for (int dtype = 0; dtype < LH_WIRE_DTYPE_COUNT; ++dtype) {
    for (const ReduceOp reduce : kOps) {
      for (const bool in_place : {false, true}) {
        ModelOp::Options options;
        options.desc = Desc(static_cast<DType>(dtype), reduce, 211);
        options.size = GetParam();
        options.in_place.assign(options.size, {in_place});
        options.segment_bytes = 128;
        ExpectReduces(options, 7 * dtype + static_cast<int>(reduce));
      }
    }
  }
}

TEST_P(RingWorldTest, WhoDoesNotCountGetsTheResultAndAddsNothing) {
  for (int dtype = 0; dtype < LH_WIRE_DTYPE_COUNT; ++dtype) {
    for (const ReduceOp reduce : kOps) {
      for (const bool in_place : {false, true}) {
        ModelOp::Options options;
        options.desc = Desc(static_cast<DType>(dtype), reduce, 211);
        options.size = GetParam();
        options.in_place.assign(options.size, {in_place});
        options.counts.assign(options.size, {false});
        options.counts[dtype % options.size] = {true};
        options.segment_bytes = 128;
        ExpectReduces(options, 7 * dtype + static_cast<int>(reduce));
      }
    }
  }
}

TEST_P(RingWorldTest, CountsThatDoNotDivideAndCountsBelowTheNumberOfPositions) {
  for (const uint64_t count : {0, 1, 2, 15, 16, 17, 33, 100, 1023, 5000}) {
    for (const bool in_place : {false, true}) {
      ModelOp::Options options;
      options.desc = Desc(DType::kFloat32, ReduceOp::kSum, count);
      options.size = GetParam();
      options.in_place.assign(options.size, {in_place});
      ExpectReduces(options, count);
    }
  }
}

TEST_P(RingWorldTest, UnalignedTensorsAreExact) {
  for (const bool in_place : {false, true}) {
    ModelOp::Options options;
    options.desc = Desc(DType::kFloat64, ReduceOp::kAvg, 301);
    options.size = GetParam();
    options.in_place.assign(options.size, {in_place});
    options.misalign = 8;
    ExpectReduces(options, 1);
  }
}

TEST_P(RingWorldTest, RandomMembersPlacesAndSchedulesAreExact) {
  Prng prng(GetParam());
  for (int i = 0; i < 60; ++i) {
    ExpectReduces(RandomOptions(&prng, GetParam()), prng.Next());
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, RingWorldTest, testing::Range(1, 17));

TEST(RingTest, LargeSegmentsThroughTheDefaultPlanAreExact) {
  ModelOp::Options options;
  options.desc = Desc(DType::kBfloat16, ReduceOp::kAvg, (1 << 20) + 77);
  options.size = 3;
  options.local_members = {2, 1, 1};
  options.in_place = {{true, true}, {true}, {false}};
  options.segment_bytes = 128 << 10;
  options.window_bytes = 8 << 20;
  ExpectReduces(options, 5);
}

TEST(RingTest, EveryPeerSendsTwiceItsShareAndNoMore) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4096);
  options.size = 4;
  ModelOp op(options);
  ModelRing ring(op.specs, pool.get(), 1);
  ASSERT_TRUE(ring.Run());
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(ring.attempt(i).bytes_sent(), 2u * 3 * 4096);
    EXPECT_EQ(ring.attempt(i).bytes_received(), 2u * 3 * 4096);
    ring.attempt(i).Commit();
  }
}

TEST(RingTest, OutOfPlaceNeedsNoScratchAndInPlaceSaysWhenThereIsNone) {
  const auto pool = MakeScratchPool(0);
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4096);
  options.size = 2;
  options.in_place = {{false}, {true}};
  ModelOp op(options);
  EXPECT_TRUE(MakeRingAttempt(op.specs[0], nullptr, pool.get()).ok());
  EXPECT_EQ(MakeRingAttempt(op.specs[1], nullptr, pool.get()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(RingTest, OnePeerAloneIsCompleteAtOnceAndLeavesTheTargetUntilCommit) {
  const auto pool = MakeScratchPool(1 << 20);
  ModelOp::Options options;
  options.desc = Desc(DType::kInt32, ReduceOp::kSum, 5000);
  options.local_members = {3};
  options.in_place = {{true, false, true}};
  ModelOp op(options);
  ModelRing ring(op.specs, pool.get(), 1);
  EXPECT_TRUE(ring.Run());
  EXPECT_TRUE(ring.attempt(0).CompleteAtOnce());
  EXPECT_EQ(op.InputsDiffer(), "");
  ring.attempt(0).Commit();
  EXPECT_EQ(op.ResultsDiffer(), "");
}

// ------------------------------------------------------------------------------ what a peer may
// send

class PlaceTest : public testing::Test {
 protected:
  struct Recorder final : AttemptSink {
    void SendSegment(int to, const Segment& segment, const uint8_t*, uint64_t cookie) override {
      to_.insert(to);
      sent_.push_back(segment);
      cookies_.push_back(cookie);
    }
    void Complete() override { ++completed_; }
    std::set<int> to_;
    std::vector<Segment> sent_;
    std::vector<uint64_t> cookies_;
    int completed_ = 0;
  };

  // Position 1 of 3, in place; chunks of 128 bytes, segments of 64.
  PlaceTest() : pool_(MakeScratchPool(1 << 20)) {
    ModelOp::Options options;
    options.desc = Desc(DType::kInt32, ReduceOp::kSum, 96);
    options.size = 3;
    options.in_place = {{true}, {true}, {true}};
    options.window_bytes = 1 << 20;
    op_ = std::make_unique<ModelOp>(options);
    attempt_ = *MakeRingAttempt(op_->specs[1], &sink_, pool_.get());
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

TEST_F(PlaceTest, AcceptsPartialSumsOfOthersChunks) {
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 320, 64), "accepted");
}

TEST_F(PlaceTest, RefusesOtherSenders) {
  EXPECT_EQ(Refusal(2, Phase::kReduce, 0, 64), "not from the previous position");
  EXPECT_EQ(Refusal(1, Phase::kReduce, 0, 64), "not from the previous position");
  EXPECT_EQ(Refusal(-1, Phase::kReduce, 0, 64), "not from the previous position");
}

TEST_F(PlaceTest, RefusesWhatIsNoSegment) {
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint32_t>>{
           {1, 64}, {0, 63}, {0, 65}, {0, 128}, {384, 64}, {0, 0}, {UINT64_MAX - 63, 64}}) {
    EXPECT_EQ(Refusal(0, Phase::kReduce, offset, bytes), "no segment of the plan") << offset;
  }
}

TEST_F(PlaceTest, RefusesASegmentTwice) {
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kReduce, 0, 64), "it came before");
}

TEST_F(PlaceTest, RefusesPartialSumsOfItsOwnChunk) {
  EXPECT_EQ(Refusal(0, Phase::kReduce, 128, 64), "the chunk starts here");
}

TEST_F(PlaceTest, RefusesFinishedSegmentsOfTheChunkItFinishes) {
  EXPECT_EQ(Refusal(0, Phase::kGather, 256, 64), "the chunk is finished here");
}

TEST_F(PlaceTest, RefusesFinishedSegmentsThatItHasNotAddedTo) {
  const char* const kTooEarly = "finished before this position added to it";
  EXPECT_EQ(Refusal(0, Phase::kGather, 128, 64), kTooEarly);
  EXPECT_EQ(Refusal(0, Phase::kGather, 0, 64), kTooEarly);
  attempt_->Credit(2);
  EXPECT_EQ(Refusal(0, Phase::kGather, 128, 64), "accepted");
  EXPECT_EQ(Refusal(0, Phase::kGather, 0, 64), kTooEarly);
  attempt_->Stop();
}

TEST_F(PlaceTest, RefusesUnknownPhases) {
  EXPECT_EQ(Refusal(0, static_cast<Phase>(2), 0, 64), "no such phase");
}

TEST_F(PlaceTest, SendsToTheNextPositionOnceItHasCredit) {
  EXPECT_EQ(sink_.sent_.size(), 0u);
  attempt_->Credit(0);
  EXPECT_EQ(sink_.sent_.size(), 0u);
  attempt_->Credit(2);
  EXPECT_EQ(sink_.sent_.size(), 2u);
  attempt_->Credit(2);
  EXPECT_EQ(sink_.sent_.size(), 2u);
  EXPECT_EQ(sink_.to_, std::set<int>{2});
}

TEST_F(PlaceTest, IsIdleOnlyWhenEverySegmentHasReturned) {
  EXPECT_TRUE(attempt_->Idle());
  attempt_->Credit(2);
  ASSERT_EQ(sink_.cookies_.size(), 2u);
  EXPECT_FALSE(attempt_->Idle());
  attempt_->Sent(sink_.cookies_[1]);
  EXPECT_FALSE(attempt_->Idle());
  attempt_->Stop();
  EXPECT_FALSE(attempt_->Idle());
  attempt_->Sent(sink_.cookies_[0]);
  EXPECT_TRUE(attempt_->Idle());
  sink_.cookies_.clear();
}

// ------------------------------------------------------------------------------ faults

// Runs `steps` steps, then stops every peer, each after some more steps of those that go on.
void ExpectRestores(const ModelOp::Options& options, uint64_t steps, uint64_t seed) {
  const auto pool = MakeScratchPool(1 << 30);
  ModelOp op(options);
  {
    ModelRing ring(op.specs, pool.get(), seed);
    Prng prng(seed);
    for (uint64_t i = 0; i < steps && ring.Step(); ++i) {
    }
    std::vector<int> order(options.size);
    for (int i = 0; i < options.size; ++i) order[i] = i;
    for (int i = options.size - 1; i > 0; --i) std::swap(order[i], order[prng.Below(i + 1)]);
    for (const int position : order) {
      ring.Stop(position);
      for (uint64_t more = prng.Below(30); more > 0 && ring.Step(); --more) {
      }
    }
    ring.Run();
    for (int i = 0; i < options.size; ++i) ASSERT_TRUE(ring.attempt(i).Idle());
  }
  EXPECT_EQ(op.InputsDiffer(), "") << Trace(options, seed) << " stopped after " << steps;
}

TEST(RingFaultTest, StopAtEveryPointOfAScheduleRestoresEveryInput) {
  for (const int size : {2, 3, 5}) {
    for (int places = 0; places < 3; ++places) {
      ModelOp::Options options;
      options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 500);
      options.size = size;
      options.local_members.assign(size, places == 2 ? 2 : 1);
      options.in_place.assign(size, std::vector<bool>(2, places != 0));
      options.segment_bytes = 192;
      options.seed = size;
      uint64_t all = 0;
      {
        const auto pool = MakeScratchPool(1 << 20);
        ModelOp op(options);
        ModelRing ring(op.specs, pool.get(), size);
        while (ring.Step()) ++all;
      }
      for (uint64_t steps = 0; steps <= all; ++steps) {
        ExpectRestores(options, steps, size);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(RingFaultTest, StopInRandomOpsAndSchedulesRestoresEveryInput) {
  Prng prng(2026);
  for (int i = 0; i < 1500; ++i) {
    const ModelOp::Options options = RandomOptions(&prng, 1 + static_cast<int>(prng.Below(7)));
    ExpectRestores(options, prng.Below(400), prng.Next());
    if (testing::Test::HasFailure()) return;
  }
}

TEST(RingFaultTest, StopAfterCompleteRestoresEveryInput) {
  Prng prng(11);
  for (int i = 0; i < 200; ++i) {
    const auto pool = MakeScratchPool(1 << 30);
    const ModelOp::Options options = RandomOptions(&prng, 1 + static_cast<int>(prng.Below(5)));
    ModelOp op(options);
    ModelRing ring(op.specs, pool.get(), prng.Next());
    ASSERT_TRUE(ring.Run());
    for (int p = 0; p < options.size; ++p) ring.Stop(p);
    ASSERT_EQ(op.InputsDiffer(), "") << Trace(options, i);
  }
}

TEST(RingFaultTest, ARedoFromRestoredInputsIsExact) {
  Prng prng(12);
  for (int i = 0; i < 200; ++i) {
    const auto pool = MakeScratchPool(1 << 30);
    const ModelOp::Options options = RandomOptions(&prng, 2 + static_cast<int>(prng.Below(4)));
    ModelOp op(options);
    {
      ModelRing ring(op.specs, pool.get(), prng.Next());
      for (uint64_t steps = prng.Below(300); steps > 0 && ring.Step(); --steps) {
      }
      for (int p = 0; p < options.size; ++p) ring.Stop(p);
      ring.Run();
    }
    ModelRing ring(op.specs, pool.get(), prng.Next());
    ASSERT_TRUE(ring.Run());
    for (int p = 0; p < options.size; ++p) ring.attempt(p).Commit();
    ASSERT_EQ(op.ResultsDiffer(), "") << Trace(options, i);
  }
}

// 1. A finishes a segment in place and sends it on. 2. A freezes and stops; the segment is still
// being sent. 3. B, not frozen yet, receives the rest of it. Had A put its original back in
// between, B would take that for the result; and were A to die now, B and its like could commit it.
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
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(sink.gather), 64), finished);
  EXPECT_NE(op.InputsDiffer(), "");
  for (const uint64_t cookie : sink.cookies) attempt->Sent(cookie);
  EXPECT_TRUE(attempt->Idle());
  EXPECT_EQ(op.InputsDiffer(), "");
}

// ------------------------------------------------------------------------------ eager

class EagerTest : public testing::TestWithParam<int> {
 protected:
  static std::vector<std::string> Payloads(const ModelOp& op, int position) {
    std::vector<std::string> payloads;
    for (const AttemptSpec& spec : op.specs) {
      payloads.push_back(spec.position == position ? "" : EagerPayload(spec));
    }
    return payloads;
  }
};

TEST_P(EagerTest, RandomOpsAreExactAndInputsIntactUntilCommit) {
  Prng prng(GetParam());
  for (int i = 0; i < 40; ++i) {
    const ModelOp::Options options = RandomOptions(&prng, GetParam());
    ModelOp op(options);
    std::vector<std::unique_ptr<Attempt>> attempts;
    for (const AttemptSpec& spec : op.specs) {
      auto attempt = MakeEagerAttempt(spec, Payloads(op, spec.position), op.ring_counts);
      ASSERT_TRUE(attempt.ok()) << attempt.status();
      attempts.push_back(*std::move(attempt));
      attempts.back()->Start();
      EXPECT_TRUE(attempts.back()->CompleteAtOnce());
      EXPECT_TRUE(attempts.back()->Idle());
    }
    ASSERT_EQ(op.InputsDiffer(), "");
    for (const auto& attempt : attempts) attempt->Commit();
    ASSERT_EQ(op.ResultsDiffer(), "") << Trace(options, i);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, EagerTest, testing::Range(1, 17));

TEST(EagerRefusalTest, PayloadsOfAnotherLengthAreRefused) {
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4);
  options.size = 3;
  const ModelOp op(options);
  for (const size_t bytes : {0, 15, 17, 4096}) {
    const auto attempt =
        MakeEagerAttempt(op.specs[1], {std::string(16, '\0'), "", std::string(bytes, '\0')});
    EXPECT_EQ(attempt.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(attempt.status().ToString().find("position 2"), std::string::npos);
  }
}

TEST(EagerRefusalTest, SegmentsAreRefused) {
  ModelOp::Options options;
  options.desc = Desc(DType::kFloat32, ReduceOp::kSum, 4);
  const ModelOp op(options);
  const auto attempt = *MakeEagerAttempt(op.specs[0], {""});
  EXPECT_EQ(attempt->Place(0, {Phase::kReduce, 0, 16}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace longhaul::peerd
