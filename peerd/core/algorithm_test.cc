#include "peerd/core/algorithm.h"

#include <gtest/gtest.h>

#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::LinkCost;

OpDesc Of(uint64_t bytes, Algorithm algorithm = Algorithm::kAuto) {
  OpDesc desc;
  desc.dtype = DType::kUint8;
  desc.count = bytes;
  desc.algorithm = algorithm;
  return desc;
}

Algorithm Choose(uint64_t bytes, size_t peers, const LinkCost& cost = {}) {
  return ChooseAlgorithm(Of(bytes), peers, /*mesh=*/true, cost);
}

// The costs of links of which the ring's carry `hop`. `mesh`: 0: as among equal hosts.
LinkCost Rates(uint32_t latency_us, uint64_t hop, uint64_t mesh = 0) {
  return {latency_us, hop, mesh, mesh, {}};
}

// Returns the tensor size in bytes above which the ring is chosen.
uint64_t MeshUpTo(size_t peers, const LinkCost& cost) {
  uint64_t bytes = LH_ONE_SHOT_BYTES_MAX + 1;
  while (Choose(bytes, peers, cost) == Algorithm::kMesh) bytes += bytes / 16;
  return bytes;
}

TEST(ChooseAlgorithm, SmallOpsAreOneShotAndOnePeerIsLocal) {
  EXPECT_EQ(Choose(1, 3), Algorithm::kOneShot);
  EXPECT_EQ(Choose(LH_ONE_SHOT_BYTES_MAX, 16), Algorithm::kOneShot);
  EXPECT_NE(Choose(LH_ONE_SHOT_BYTES_MAX + 1, 3), Algorithm::kOneShot);
  EXPECT_EQ(Choose(1, 1), Algorithm::kLocal);
  EXPECT_EQ(ChooseAlgorithm(Of(1 << 20, Algorithm::kMesh), 1, true, {}), Algorithm::kLocal);
}

TEST(CarriesInput, FarPeersSendInputsWithReadyIfThatMovesFewMoreBytes) {
  const auto carries = [](uint64_t bytes, size_t peers, const LinkCost& cost,
                          uint32_t latency_us = 0) {
    return CarriesInput(Of(bytes), peers, /*mesh=*/true, cost, latency_us);
  };
  const LinkCost far = Rates(100'000, 62'500'000);
  for (const uint64_t bytes : {uint64_t{LH_ONE_SHOT_BYTES_MAX} + 1, uint64_t{64} << 10,
                               uint64_t{LH_READY_INPUT_BYTES_MAX}}) {
    EXPECT_TRUE(carries(bytes, 2, far)) << bytes;
    EXPECT_TRUE(carries(bytes, 3, far)) << bytes;
    // Two peers move no more bytes, so the latency alone decides.
    EXPECT_TRUE(carries(bytes, 2, Rates(2500, 1'000'000))) << bytes;
    EXPECT_FALSE(carries(bytes, 2, Rates(2499, 62'500'000))) << bytes;
  }
  EXPECT_FALSE(carries(LH_READY_INPUT_BYTES_MAX + 1, 2, far));
  EXPECT_FALSE(carries(LH_READY_INPUT_BYTES_MAX, 3, Rates(20'000, 62'500'000)));
  EXPECT_TRUE(carries(64 << 10, 3, Rates(20'000, 1000))) << "few bytes more";
  EXPECT_FALSE(carries(256 << 10, 3, Rates(20'000, 1000)));
  EXPECT_TRUE(carries(256 << 10, 3, Rates(0, 1000), 20'000)) << "rates of a few bytes";
  EXPECT_TRUE(carries(256 << 10, 3, Rates(20'000, 62'500'000)));
  // All of it is added up in one turn.
  EXPECT_TRUE(carries(LH_READY_INPUT_BYTES_MAX, 5, Rates(100'000, 1'000'000'000)));
  EXPECT_FALSE(carries(LH_READY_INPUT_BYTES_MAX, 6, Rates(100'000, 1'000'000'000)));
  // What this peer has measured counts only if the epoch says nothing.
  EXPECT_FALSE(carries(64 << 10, 2, {}));
  EXPECT_TRUE(carries(64 << 10, 2, {}, 100'000));
  EXPECT_FALSE(carries(64 << 10, 2, Rates(1000, 62'500'000), 100'000));
  EXPECT_FALSE(carries(64 << 10, 1, far));
}

TEST(CarriesInput, OnlyAllReducesWithoutACodecOfAllPeersWithLinks) {
  const LinkCost far = Rates(100'000, 62'500'000);
  OpDesc desc = Of(64 << 10);
  EXPECT_TRUE(CarriesInput(desc, 2, true, far, 0));
  EXPECT_FALSE(CarriesInput(desc, 2, false, far, 0)) << "there is a relay, or a link without lanes";
  EXPECT_FALSE(CarriesInput(Of(64 << 10, Algorithm::kRing), 2, true, far, 0));
  desc.kind = OpKind::kBroadcast;
  EXPECT_FALSE(CarriesInput(desc, 2, true, far, 0));
  desc = Of(64 << 10);
  desc.dtype = DType::kFloat32;
  desc.quantization = Quantization::kBf16;
  EXPECT_FALSE(CarriesInput(desc, 2, true, far, 0));
  // Sums of halves travel as float32.
  desc = Of(LH_READY_INPUT_BYTES_MAX / 4);
  desc.dtype = DType::kFloat16;
  EXPECT_TRUE(CarriesInput(desc, 2, true, far, 0));
  ++desc.count;
  EXPECT_FALSE(CarriesInput(desc, 2, true, far, 0));
}

TEST(ChooseAlgorithm, LatencyDecidesForTheMeshAndBytesForTheRing) {
  for (size_t peers = 3; peers <= kMeshPeersMax; ++peers) {
    EXPECT_EQ(Choose(LH_ONE_SHOT_BYTES_MAX + 1, peers), Algorithm::kMesh) << peers;
    EXPECT_EQ(Choose(kMeshBytesMax + 1, peers), Algorithm::kRing) << peers;
    EXPECT_EQ(Choose(uint64_t{1} << 50, peers), Algorithm::kRing) << peers;
    // Above the limit, all larger ops use the ring.
    const uint64_t limit = MeshUpTo(peers, {});
    EXPECT_LE(limit, kMeshBytesMax) << peers;
    for (uint64_t bytes = limit; bytes <= kMeshBytesMax; bytes += bytes / 16) {
      EXPECT_EQ(Choose(bytes, peers), Algorithm::kRing) << peers << " " << bytes;
    }
  }
  // A long way: 40 ms and 500 Mbit/s.
  EXPECT_EQ(Choose(16 << 20, 4, Rates(40000, 62'500'000)), Algorithm::kMesh);
  EXPECT_EQ(Choose(64 << 20, 4, Rates(40000, 62'500'000)), Algorithm::kMesh);
}

TEST(ChooseAlgorithm, BetweenTwoPeersTheRingIsAsDirect) {
  EXPECT_EQ(Choose(8192, 2), Algorithm::kRing);
  EXPECT_EQ(Choose(8192, 2, Rates(40000, 1'000'000)), Algorithm::kRing);
}

TEST(ChooseAlgorithm, AnOpThatEncodesTakesTheMeshWhereItCan) {
  OpDesc desc;
  desc.quantization = Quantization::kInt8;
  desc.block = 128;
  desc.count = kMeshBytesMax;  // as many bytes are sent
  for (const size_t peers : {2, 3, 16}) {
    EXPECT_EQ(ChooseAlgorithm(desc, peers, true, {}), Algorithm::kMesh) << peers;
    EXPECT_EQ(ChooseAlgorithm(desc, peers, false, {}), Algorithm::kRing) << peers;
  }
  desc.algorithm = Algorithm::kRing;
  EXPECT_EQ(ChooseAlgorithm(desc, 4, true, {}), Algorithm::kRing);
  desc.algorithm = Algorithm::kAuto;
  desc.count = kMeshBytesMax + 64;
  EXPECT_EQ(ChooseAlgorithm(desc, 4, true, {}), Algorithm::kRing) << "for lack of memory";
  desc.quantization = Quantization::kInt4;
  EXPECT_EQ(ChooseAlgorithm(desc, 4, true, {}), Algorithm::kMesh);
  // Small ones travel as they are.
  desc.count = 1024;
  EXPECT_EQ(ChooseAlgorithm(desc, 4, true, {}), Algorithm::kOneShot);
}

TEST(ChooseCodec, OnlySlowLinksAreWorthACodec) {
  OpDesc desc;
  desc.block = 128;
  desc.count = 4 << 20;
  const auto choose = [&](int set, const LinkCost& cost) {
    desc.quantization = static_cast<Quantization>(LH_WIRE_QUANTIZE_AUTO + set - 1);
    return ChooseCodec(desc, 4, /*mesh=*/true, cost);
  };
  const LinkCost slow = Rates(20000, 25'000'000);
  EXPECT_EQ(choose(1, slow), Quantization::kBf16);
  EXPECT_EQ(choose(3, slow), Quantization::kInt8);
  EXPECT_EQ(choose(7, slow), Quantization::kInt4);
  EXPECT_EQ(choose(5, slow), Quantization::kInt4);
  // Within a site, and where nothing was measured.
  for (int set = 1; set < 8; ++set) {
    EXPECT_EQ(choose(set, Rates(50, 3'000'000'000)), Quantization::kNone) << set;
    EXPECT_EQ(choose(set, {}), Quantization::kNone) << set;
  }
  // What is named is taken.
  desc.quantization = Quantization::kInt8;
  EXPECT_EQ(ChooseCodec(desc, 4, true, Rates(50, 3'000'000'000)), Quantization::kInt8);
  // A small op is not encoded.
  desc.quantization = static_cast<Quantization>(LH_WIRE_QUANTIZE_AUTO + 6);
  desc.count = 1000;
  EXPECT_EQ(ChooseCodec(desc, 4, true, slow), Quantization::kNone);
}

TEST(ChooseAlgorithm, ASlowLinkThatTheRingAvoidsDecidesForTheRing) {
  EXPECT_EQ(Choose(1 << 19, 4, Rates(1000, 100'000'000)), Algorithm::kMesh);
  EXPECT_EQ(Choose(1 << 19, 4, Rates(1000, 100'000'000, 2'000'000)), Algorithm::kRing);
}

TEST(ChooseAlgorithm, WithSharesTheMeshOutrunsARingThatASlowHostLimits) {
  // One of eight hosts has half the rate. The ring sends 7/4 of the tensor over its link.
  LinkCost cost{20000, 6'250'000, 3'571'428, 6'250'000, {}};
  EXPECT_EQ(Choose(64 << 20, 8, cost), Algorithm::kMesh);
  // On a short way the mesh has to be a quarter faster.
  cost.latency_us = 25;
  EXPECT_EQ(Choose(64 << 20, 8, cost), Algorithm::kMesh);
  cost.mesh_bytes_per_second = cost.even_bytes_per_second;
  EXPECT_EQ(Choose(64 << 20, 8, cost), Algorithm::kRing);
}

TEST(ChooseAlgorithm, SharesAreForAllReduceAlone) {
  OpDesc desc = Of(1 << 22);
  desc.kind = OpKind::kReduceScatter;
  desc.world = 8;
  desc.count /= 8;
  const LinkCost cost{1000, 6'250'000, 1'000'000, 100'000'000, {}};
  EXPECT_EQ(Choose(1 << 22, 8, cost), Algorithm::kMesh);
  EXPECT_EQ(ChooseAlgorithm(desc, 8, true, cost), Algorithm::kRing);
}

TEST(ChooseAlgorithm, WhatIsUnknownIsTakenForTheDefault) {
  const uint64_t hop = kDefaultLinkCost.ring_bytes_per_second;
  for (uint64_t bytes = 8192; bytes <= kMeshBytesMax; bytes += bytes / 4) {
    for (const uint64_t peers : {3, 8, 16}) {
      EXPECT_EQ(Choose(bytes, peers),
                Choose(bytes, peers, Rates(kDefaultLinkCost.latency_us, hop)));
      // If one of the two rates is unknown, the other one stands for it.
      const uint64_t mesh = 50'000'000 * peers / (2 * (peers - 1));
      EXPECT_EQ(Choose(bytes, peers, {500, 50'000'000, 0, 0, {}}),
                Choose(bytes, peers, {500, 50'000'000, mesh, mesh, {}}));
      EXPECT_EQ(Choose(bytes, peers, {500, 0, mesh, mesh, {}}),
                Choose(bytes, peers, {500, 50'000'000, mesh, mesh, {}}));
    }
  }
}

TEST(ChooseAlgorithm, NoLinkIsNearerThanTheDefault) {
  // A packet takes a few microseconds on a loopback interface, but a hop of the ring takes more.
  for (uint64_t bytes = 8192; bytes <= kMeshBytesMax; bytes += bytes / 4) {
    EXPECT_EQ(Choose(bytes, 8, Rates(3, 1'000'000'000)),
              Choose(bytes, 8, Rates(kDefaultLinkCost.latency_us, 1'000'000'000)));
  }
  EXPECT_EQ(Choose(64 << 10, 3, Rates(3, 1'000'000'000)), Algorithm::kMesh);
}

TEST(ChooseAlgorithm, TheCallerDecidesWhereThereIsAChoice) {
  for (const uint64_t bytes : {uint64_t{16}, uint64_t{1} << 20, uint64_t{1} << 40}) {
    EXPECT_EQ(ChooseAlgorithm(Of(bytes, Algorithm::kMesh), 4, true, {}), Algorithm::kMesh);
    EXPECT_EQ(ChooseAlgorithm(Of(bytes, Algorithm::kMesh), 4, false, {}), Algorithm::kRing);
    EXPECT_EQ(ChooseAlgorithm(Of(bytes, Algorithm::kRing), 4, true, {}), Algorithm::kRing);
  }
  EXPECT_EQ(ChooseAlgorithm(Of(1 << 20), 4, false, {}), Algorithm::kRing);
  EXPECT_EQ(ChooseAlgorithm(Of(16, Algorithm::kOneShot), 4, false, {}), Algorithm::kOneShot);
}

TEST(ChooseAlgorithm, OpsThatMayUseTheMeshAreKnownBeforehand) {
  for (const Algorithm wanted : {Algorithm::kAuto, Algorithm::kMesh, Algorithm::kRing}) {
    for (const uint64_t bytes : {uint64_t{16}, uint64_t{1} << 20, kMeshBytesMax + 1}) {
      for (const LinkCost& cost : {LinkCost{}, Rates(4'000'000'000, 1), Rates(1, UINT64_MAX, 1),
                                   Rates(1, 1, UINT64_MAX)}) {
        for (const size_t peers : {1, 2, 3, 16}) {
          const OpDesc desc = Of(bytes, wanted);
          if (ChooseAlgorithm(desc, peers, true, cost) != Algorithm::kMesh) continue;
          EXPECT_TRUE(MayUseMesh(desc, peers)) << ToString(desc);
        }
      }
    }
  }
}

OpDesc OfKind(OpKind kind, uint64_t bytes, Algorithm algorithm = Algorithm::kAuto) {
  OpDesc desc = Of(bytes, algorithm);
  desc.kind = kind;
  if (desc.InParts()) desc.world = 4;
  return desc;
}

TEST(ChooseAlgorithm, DirectOpsGoStraightWhateverLinksThereAre) {
  for (const OpKind kind :
       {OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll, OpKind::kSendRecv}) {
    for (const bool mesh : {true, false}) {
      for (const size_t peers : {2, 3, 100}) {
        for (const uint64_t bytes : {uint64_t{1} << 16, uint64_t{1} << 36}) {
          EXPECT_EQ(ChooseAlgorithm(OfKind(kind, bytes), peers, mesh, {}), Algorithm::kMesh);
          EXPECT_TRUE(MayUseMesh(OfKind(kind, bytes), peers));
        }
      }
    }
    EXPECT_EQ(ChooseAlgorithm(OfKind(kind, 16), 3, false, {}), Algorithm::kOneShot);
    EXPECT_EQ(ChooseAlgorithm(OfKind(kind, 1 << 20), 1, true, {}), Algorithm::kLocal);
  }
}

TEST(ChooseAlgorithm, TheOrderOfRanksTakesTheMeshAtAnySize) {
  for (const uint64_t bytes : {uint64_t{8192}, uint64_t{1} << 40}) {
    for (const size_t peers : {2, 3, 16}) {
      OpDesc desc = Of(bytes);
      desc.order = Order::kRank;
      EXPECT_EQ(ChooseAlgorithm(desc, peers, true, {}), Algorithm::kMesh);
      EXPECT_TRUE(MayUseMesh(desc, peers));
      EXPECT_EQ(ChooseAlgorithm(desc, peers, false, {}), Algorithm::kRing);
    }
  }
}

TEST(ChooseAlgorithm, PartsOfUnequalLengthsTakeTheRingUnlessTheCallerWantsTheMesh) {
  OpDesc desc = OfKind(OpKind::kAllGather, 0);
  desc.unequal = true;
  EXPECT_EQ(ChooseAlgorithm(desc, 4, true, {}), Algorithm::kRing);
  EXPECT_FALSE(MayUseMesh(desc, 4));
  desc.algorithm = Algorithm::kMesh;
  EXPECT_EQ(ChooseAlgorithm(desc, 4, true, {}), Algorithm::kMesh);
}

TEST(ChooseAlgorithm, ABroadcastOrReduceTakesTheMeshWhereLatencyCounts) {
  const LinkCost far = Rates(40000, 62'500'000);
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReduce}) {
    EXPECT_EQ(ChooseAlgorithm(OfKind(kind, 1 << 20), 4, true, far), Algorithm::kMesh);
    EXPECT_EQ(ChooseAlgorithm(OfKind(kind, 1 << 20), 4, false, far), Algorithm::kRing);
  }
  EXPECT_EQ(ChooseAlgorithm(OfKind(OpKind::kReduce, 32 << 20), 4, true, far), Algorithm::kRing)
      << "the root would get it three times";
  EXPECT_EQ(ChooseAlgorithm(OfKind(OpKind::kBroadcast, 32 << 20), 4, true, far), Algorithm::kMesh)
      << "passed on";
  EXPECT_EQ(ChooseAlgorithm(OfKind(OpKind::kBroadcast, 32 << 20), 4, true, {}), Algorithm::kRing)
      << "on short ways the ring is as fast";
}

TEST(PassedOn, ALongBroadcastIsPassedOnByAllButTheRoot) {
  const LinkCost far = Rates(40000, 62'500'000);
  const OpDesc large = OfKind(OpKind::kBroadcast, 32 << 20);
  EXPECT_EQ(PassedOn(large, 2, 4, far), (Shares{1, 1, 0, 1}));
  EXPECT_EQ(PassedOn(large, 1, 2, far), Shares()) << "to whom?";
  EXPECT_EQ(PassedOn(OfKind(OpKind::kBroadcast, 100'000), 2, 4, far), Shares())
      << "one latency counts for more";
  EXPECT_EQ(PassedOn(OfKind(OpKind::kReduce, 32 << 20), 2, 4, far), Shares());
}

TEST(PassedOn, ASlowHostPassesOnItsShare) {
  LinkCost cost = Rates(40000, 12'500'000, 40'000'000);
  cost.shares = {kShareUnits / 2, 0, kShareUnits / 4, kShareUnits / 4};
  const OpDesc large = OfKind(OpKind::kBroadcast, 32 << 20);
  EXPECT_EQ(ChooseAlgorithm(large, 4, true, cost), Algorithm::kMesh);
  EXPECT_EQ(PassedOn(large, 2, 4, cost), (Shares{kShareUnits / 2, 0, 0, kShareUnits / 4}));
  cost.shares = {0, 0, kShareUnits, 0};
  EXPECT_EQ(PassedOn(large, 2, 4, cost), Shares()) << "nobody but the root has a share";
}

TEST(ChooseAlgorithm, SumsOfHalvesMakeTheRingSlower) {
  // The largest sum that takes the mesh, in bytes.
  const auto mesh_up_to = [](DType dtype) {
    OpDesc desc;
    desc.dtype = dtype;
    uint64_t bytes = 8192;
    for (; bytes < kMeshBytesMax; bytes += bytes / 16) {
      desc.count = bytes / SizeOf(dtype);
      if (ChooseAlgorithm(desc, 4, true, {}) == Algorithm::kRing) break;
    }
    return bytes;
  };
  EXPECT_GT(mesh_up_to(DType::kBfloat16), mesh_up_to(DType::kFloat32));
  EXPECT_EQ(mesh_up_to(DType::kInt16), mesh_up_to(DType::kFloat32));
}

TEST(ChooseAlgorithm, EveryKindThatGetsTheMeshIsKnownBeforehand) {
  for (int i = NamesOf(OpKind()).first; i <= static_cast<int>(NamesOf(OpKind()).last()); ++i) {
    for (const uint64_t bytes : {uint64_t{16}, uint64_t{1} << 20, uint64_t{1} << 30}) {
      for (const LinkCost& cost : {LinkCost{}, Rates(4'000'000'000, 1)}) {
        for (const size_t peers : {1, 2, 3, 16}) {
          const OpDesc desc = OfKind(static_cast<OpKind>(i), bytes);
          if (ChooseAlgorithm(desc, peers, true, cost) != Algorithm::kMesh) continue;
          EXPECT_TRUE(MayUseMesh(desc, peers)) << ToString(desc);
        }
      }
    }
  }
}

}  // namespace
}  // namespace longhaul::peerd
