// Every kind of op, with every dtype and reduction that it may have, in worlds of several sizes,
// over every algorithm, with random order of events. Results must be exact (testing.h computes them
// apart from the code under test), and inputs must stay, also if the op is stopped half-way.
//
// What an op may not have must be refused by OpDesc::Fault(), so that nothing is left over.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/prng.h"
#include "peerd/collective/attempt.h"
#include "peerd/collective/testing.h"

namespace longhaul::peerd {
namespace {

constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                             OpKind::kBroadcast, OpKind::kBarrier,       OpKind::kReduce,
                             OpKind::kGather,    OpKind::kScatter,       OpKind::kAllToAll,
                             OpKind::kSendRecv};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd, ReduceOp::kMin,
                             ReduceOp::kMax};
constexpr int kWorlds[] = {1, 2, 3, 5, 8};

DType DTypeOf(int index) { return static_cast<DType>(index); }

// Whether this repository promises the op: the rules of docs/concepts.md, written once more.
bool AddsUp(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kBarrier || kind == OpKind::kReduceScatter ||
         kind == OpKind::kReduce;
}
bool Promised(OpKind kind, DType dtype, ReduceOp op) {
  if (!AddsUp(kind)) return op == ReduceOp::kSum;  // the field is not used
  if (dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2) return false;
  return dtype != DType::kBool || (op != ReduceOp::kAvg && op != ReduceOp::kProd);
}

OpDesc Desc(OpKind kind, DType dtype, ReduceOp op, uint64_t count, int members) {
  OpDesc desc;
  desc.kind = kind;
  desc.dtype = dtype;
  desc.reduce = op;
  desc.count = count;
  const bool parts = kind == OpKind::kReduceScatter || kind == OpKind::kAllGather ||
                     kind == OpKind::kGather || kind == OpKind::kScatter ||
                     kind == OpKind::kAllToAll;
  if (parts) desc.world = static_cast<uint16_t>(members);
  return desc;
}

// ------------------------------------------------------------------------------ refusals

TEST(RefusalTest, EveryDescriptionIsEitherPromisedOrRefused) {
  int allowed = 0;
  int refused = 0;
  int all = 0;
  for (const OpKind kind : kKinds) {
    for (int d = 0; d < LH_WIRE_DTYPE_COUNT; ++d) {
      for (const ReduceOp op : kOps) {
        for (const auto algorithm : {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kMesh,
                                     Algorithm::kRing, Algorithm::kLocal}) {
          // Bits: order rank, weighted, unequal, a list.
          for (int options = 0; options < 16; ++options) {
            const DType dtype = DTypeOf(d);
            OpDesc desc = Desc(kind, dtype, op, 4, 2);
            desc.algorithm = algorithm;
            desc.order = options & 1 ? Order::kRank : Order::kAny;
            desc.weighted = options & 2;
            desc.unequal = options & 4;
            if (desc.unequal) desc.count = 0;
            desc.list = options & 8 ? 1 : 0;
            if (desc.list != 0) desc.list_bytes = 64;
            const bool direct = kind == OpKind::kGather || kind == OpKind::kScatter ||
                                kind == OpKind::kAllToAll || kind == OpKind::kSendRecv;
            const bool is_float = dtype == DType::kFloat16 || dtype == DType::kBfloat16 ||
                                  dtype == DType::kFloat32 || dtype == DType::kFloat64;
            bool promised = Promised(kind, dtype, op) && algorithm != Algorithm::kLocal;
            if (desc.order == Order::kRank) {
              promised = promised && AddsUp(kind) && algorithm != Algorithm::kRing;
            }
            if (desc.weighted) {
              promised = promised && AddsUp(kind) && is_float &&
                         (op == ReduceOp::kSum || op == ReduceOp::kAvg);
            }
            if (desc.unequal) {
              promised =
                  promised && desc.world != 0 && desc.list == 0 && algorithm != Algorithm::kOneShot;
            }
            if (direct && algorithm == Algorithm::kRing) promised = false;
            ++all;
            const std::string fault = desc.Fault();
            ++(fault.empty() ? allowed : refused);
            ASSERT_EQ(fault.empty(), promised) << longhaul::ToString(desc) << ": " << fault;
          }
        }
      }
    }
  }
  EXPECT_EQ(all, 10 * 15 * 5 * 5 * 16);
  EXPECT_EQ(allowed + refused, all);
  EXPECT_GT(allowed, 1000);
}

// ------------------------------------------------------------------------------ results

constexpr AttemptMaker kOneShot = nullptr;
const char* NameOfMaker(AttemptMaker make) {
  if (make == kOneShot) return "one-shot";
  return make == &MakeRingAttempt ? "ring" : "mesh";
}

std::vector<AttemptMaker> MakersOf(OpDesc desc) {
  std::vector<AttemptMaker> makers;
  for (const auto& [algorithm, make] :
       std::vector<std::pair<Algorithm, AttemptMaker>>{{Algorithm::kRing, &MakeRingAttempt},
                                                       {Algorithm::kMesh, &MakeMeshAttempt},
                                                       {Algorithm::kOneShot, kOneShot}}) {
    desc.algorithm = algorithm;
    if (desc.Fault().empty()) makers.push_back(make);
  }
  return makers;
}

// Does the whole op. Returns what is wrong, or "".
std::string RunOp(ModelOp* op, AttemptMaker make, uint64_t seed) {
  if (make == kOneShot) {
    std::vector<std::string> payloads;
    for (const AttemptSpec& spec : op->specs) payloads.push_back(OneShotPayload(spec));
    std::vector<std::unique_ptr<Attempt>> attempts;
    for (const AttemptSpec& spec : op->specs) {
      const auto result = ReducePayloads(spec, payloads);
      if (!result.ok()) return std::string(result.status().message());
      attempts.push_back(MakeOneShotAttempt(spec, *result));
      attempts.back()->Start();
    }
    if (std::string text = op->InputsDiffer(); !text.empty()) return text;
    for (const auto& attempt : attempts) CommitWhole(attempt.get());
    return "";
  }
  const auto pool = MakeScratchPool(1 << 30);
  ModelNetwork network(make, op->specs, pool.get(), seed);
  if (!network.Run()) return "not complete: " + network.ToString();
  for (size_t p = 0; p < op->specs.size(); ++p) CommitWhole(&network.attempt(static_cast<int>(p)));
  return "";
}

// Stops the op somewhere. Returns what is wrong with the inputs, or "".
std::string RunAndStop(ModelOp* op, AttemptMaker make, uint64_t seed) {
  Prng prng(seed);
  const auto pool = MakeScratchPool(1 << 30);
  ModelNetwork network(make, op->specs, pool.get(), seed);
  for (uint64_t steps = prng.Below(300); steps > 0 && network.Step(); --steps) continue;
  for (size_t p = 0; p < op->specs.size(); ++p) {
    network.Stop(static_cast<int>(p));
    for (uint64_t more = prng.Below(5); more > 0 && network.Step(); --more) continue;
  }
  network.Run();
  for (size_t p = 0; p < op->specs.size(); ++p) {
    if (!network.attempt(static_cast<int>(p)).Idle()) return "not idle";
  }
  const std::string touched = op->TargetsTouched();
  return touched.empty() ? op->InputsDiffer() : touched;
}

bool MayBeInPlace(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kBroadcast;
}

// Tensors of other dtypes, which this op may have too.
std::vector<Piece> ListOf(OpKind kind, DType dtype, ReduceOp op, uint64_t count) {
  std::vector<Piece> pieces = {{dtype, count}, {dtype, 0}};
  for (const auto& [other, length] :
       std::vector<std::pair<DType, uint64_t>>{{DType::kBfloat16, 33},
                                               {DType::kUint8, 7},
                                               {DType::kFloat64, 9},
                                               {DType::kBool, 65},
                                               {DType::kFloat8E4M3, 1},
                                               {DType::kFloat16, count}}) {
    if (Promised(kind, other, op)) pieces.push_back({other, length});
  }
  return pieces;
}

// About so many grains make up the whole.
uint32_t GrainBytes(uint64_t bytes) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / 24 / 64 * 64, 64, kGrainBytes));
}

class TableTest : public testing::TestWithParam<std::tuple<OpKind, int>> {
 protected:
  static OpKind Kind() { return std::get<0>(GetParam()); }
  static int World() { return std::get<1>(GetParam()); }
};

TEST_P(TableTest, EveryResultIsExactAndAStopRestoresTheInputs) {
  uint64_t cells = 0;
  uint64_t refused = 0;
  uint64_t runs = 0;
  Prng prng(1000 * static_cast<int>(Kind()) + World());
  const std::set<uint64_t> counts = {0, 1, static_cast<uint64_t>(World() - 1), 1025};
  for (int d = 0; d < LH_WIRE_DTYPE_COUNT; ++d) {
    for (const ReduceOp reduce : kOps) {
      ++cells;
      const DType dtype = DTypeOf(d);
      if (!Desc(Kind(), dtype, reduce, 1, World()).Fault().empty()) {
        ++refused;
        continue;
      }
      // Bits: in place, a list, two members at each position.
      for (int axes = 0; axes < 8; ++axes) {
        if ((axes & 1) && !MayBeInPlace(Kind())) continue;
        for (const uint64_t count : counts) {
          const int members = axes & 4 ? 2 : 1;
          // The whole of an op in parts is longer than this by the number of members, or its
          // square.
          if (count > 1000 && (axes & 6) && World() > 3 &&
              Desc(Kind(), dtype, reduce, 1, 1).world) {
            continue;
          }
          ModelOp::Options options;
          options.size = World();
          options.local_members.assign(World(), members);
          options.desc = Desc(Kind(), dtype, reduce, count, 0);
          if (axes & 2) options.pieces = ListOf(Kind(), dtype, reduce, count);
          options.in_place.assign(World(), std::vector<bool>(members, axes & 1));
          options.root = static_cast<int>(prng.Below(World()));
          if (prng.Chance(0.3)) {
            options.contributes.assign(World(), std::vector<bool>(members, true));
            for (auto& flags : options.contributes) flags[0] = prng.Chance(0.5);
            options.contributes[prng.Below(World())][0] = true;
          }
          options.segment_grains = 3;
          options.window_bytes = 64 << prng.Below(8);
          options.cached = prng.Chance(0.5);
          options.seed = prng.Next();
          const uint64_t parts = Kind() == OpKind::kAllToAll ? World() * World() : World();
          options.grain_bytes = GrainBytes(count * SizeOf(dtype) * parts);
          ModelOp first(options);
          const OpDesc desc = first.specs[0].desc;
          const std::vector<AttemptMaker> makers = MakersOf(desc);
          for (const AttemptMaker make : makers) {
            const auto where = [&] {
              return longhaul::ToString(desc) + ", " + NameOfMaker(make) + ", world " +
                     std::to_string(World()) + ", axes " + std::to_string(axes) + ", seed " +
                     std::to_string(options.seed);
            };
            ++runs;
            ModelOp op = make == makers.front() ? std::move(first) : ModelOp(options);
            ASSERT_EQ(RunOp(&op, make, prng.Next()), "") << where();
            ASSERT_EQ(op.ResultsDiffer(), "") << where();
            if (!(axes & 1)) {
              ASSERT_EQ(op.InputsDiffer(), "") << where();
            }
            if (make == kOneShot || runs % 4 != 0) continue;
            ModelOp stopped(options);
            ASSERT_EQ(RunAndStop(&stopped, make, prng.Next()), "") << where();
          }
        }
      }
    }
  }
  EXPECT_EQ(cells, 15u * 5);
  const uint64_t allowed = AddsUp(Kind()) ? 12 * 5 + 3 : 15;
  EXPECT_EQ(cells - refused, allowed);
  EXPECT_GE(runs, allowed * 2);
}

std::string NameOfCell(const testing::TestParamInfo<std::tuple<OpKind, int>>& info) {
  std::string name = longhaul::Name(std::get<0>(info.param));
  std::erase(name, '-');
  return name + std::to_string(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(All, TableTest,
                         testing::Combine(testing::ValuesIn(kKinds), testing::ValuesIn(kWorlds)),
                         NameOfCell);

// ------------------------------------------------------------------------------ large tensors

class LargeTest : public testing::TestWithParam<OpKind> {};

TEST_P(LargeTest, AMillionElementsAreExact) {
  constexpr DType kSample[] = {DType::kFloat32, DType::kBfloat16, DType::kInt8, DType::kFloat64,
                               DType::kUint16};
  constexpr uint64_t kElements = 1 << 20;
  const OpKind kind = GetParam();
  Prng prng(static_cast<int>(kind));
  for (int sample = 0; sample < 3; ++sample) {
    ModelOp::Options options;
    options.size = 2 + sample % 2;
    options.local_members.assign(options.size, 1);
    options.local_members[0] = 1 + sample % 2;
    const int members = options.size + sample % 2;
    const DType dtype = kSample[(static_cast<int>(kind) + sample) % 5];
    options.desc = Desc(kind, dtype, AddsUp(kind) ? kOps[sample] : ReduceOp::kSum, 1, members);
    const uint64_t parts = options.desc.world == 0     ? 1
                           : kind == OpKind::kAllToAll ? members * members
                                                       : members;
    options.desc.count = kElements / parts + 3;
    options.in_place.assign(options.size, std::vector<bool>(2, sample == 1));
    options.grain_bytes = kGrainBytes;
    options.window_bytes = 1 << 20;
    options.seed = prng.Next();
    ModelOp first(options);
    const std::vector<AttemptMaker> makers = MakersOf(first.specs[0].desc);
    for (const AttemptMaker make : makers) {
      ModelOp op = make == makers.front() ? std::move(first) : ModelOp(options);
      ASSERT_EQ(RunOp(&op, make, prng.Next()), "") << longhaul::ToString(options.desc);
      ASSERT_EQ(op.ResultsDiffer(), "") << longhaul::ToString(options.desc);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, LargeTest, testing::ValuesIn(kKinds));

// ------------------------------------------------------------------------------ order rank

// The same op in which base position perm[p] is at position p. Inputs are still added in the order
// of the same members.
std::vector<AttemptSpec> Permuted(const std::vector<AttemptSpec>& base,
                                  const std::vector<int>& perm) {
  std::vector<int> now(perm.size());  // by base position
  for (size_t p = 0; p < perm.size(); ++p) now[perm[p]] = static_cast<int>(p);
  std::vector<AttemptSpec> specs;
  for (size_t p = 0; p < perm.size(); ++p) {
    AttemptSpec& spec = specs.emplace_back(base[perm[p]]);
    spec.position = static_cast<int>(p);
    for (size_t i = 0; i < perm.size(); ++i) {
      spec.order[i] = now[base[0].order[i]];
      spec.ring_contributes[i] = base[0].ring_contributes[perm[i]];
    }
    for (Cut& cut : spec.cuts) {
      cut.position = now[cut.position];
      cut.to_position = now[cut.to_position];
    }
  }
  return specs;
}

TEST(OrderTest, InRankOrderTheBitsDoNotDependOnTheRingOrOnTheAlgorithm) {
  constexpr DType kFloats[] = {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64};
  constexpr OpKind kAddUp[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce};
  Prng prng(3);
  int differ_by_order = 0;
  for (int run = 0; run < 240; ++run) {
    ModelOp::Options options;
    options.size = 2 + static_cast<int>(prng.Below(6));
    options.local_members.assign(options.size, run % 3 == 0 ? 2 : 1);
    options.desc = Desc(kAddUp[prng.Below(3)], kFloats[run % 4],
                        prng.Chance(0.5) ? ReduceOp::kSum : ReduceOp::kAvg, 40, 0);
    options.desc.order = Order::kRank;
    options.desc.weighted = prng.Chance(0.3);
    options.root = static_cast<int>(prng.Below(options.size));
    if (prng.Chance(0.3)) {
      options.pieces = {{options.desc.dtype, 11}, {DType::kFloat16, 9}, {DType::kFloat32, 20}};
    }
    options.seed = prng.Next();
    ModelOp op(options);
    op.FillWithFractions(prng.Next());
    const std::vector<AttemptSpec> base = op.specs;
    const auto results = [&] {
      std::vector<std::string> all;
      for (const AttemptSpec& spec : base) {
        for (size_t i = 0; i < spec.targets.size(); ++i) {
          all.push_back(op.TargetsOf(spec.position, static_cast<int>(i)));
        }
      }
      return all;
    };
    std::vector<std::string> expected;
    std::vector<int> perm(options.size);
    std::iota(perm.begin(), perm.end(), 0);
    for (int turn = 0; turn < 6; ++turn) {
      for (int i = options.size - 1; turn > 1 && i > 0; --i) {
        std::swap(perm[i], perm[prng.Below(i + 1)]);
      }
      op.specs = Permuted(base, perm);
      ASSERT_EQ(RunOp(&op, turn % 2 == 0 ? &MakeMeshAttempt : kOneShot, prng.Next()), "");
      op.specs = base;
      if (turn == 0) expected = results();
      ASSERT_EQ(results(), expected) << longhaul::ToString(options.desc) << " turn " << turn;
    }
    // To see that the inputs can show a difference: another order often gives other bits.
    for (AttemptSpec& spec : op.specs)
      std::rotate(spec.order.begin(), spec.order.begin() + 1, spec.order.end());
    ASSERT_EQ(RunOp(&op, &MakeMeshAttempt, prng.Next()), "");
    op.specs = base;
    if (results() != expected) ++differ_by_order;
  }
  EXPECT_GT(differ_by_order, 60);
}

}  // namespace
}  // namespace longhaul::peerd
