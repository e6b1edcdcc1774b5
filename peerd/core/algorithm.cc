#include "peerd/core/algorithm.h"

#include <algorithm>

namespace longhaul::peerd {
namespace {

// Times are computed in integers, so that peers with different processors get the same result.
// Nothing overflows.
using Wide = unsigned __int128;

// The factor c of the header, in percent. A latency below kFarUs is a short way.
constexpr uint64_t kNearMeshPercent = 125;
constexpr uint64_t kFarMeshPercent = 100;
constexpr uint32_t kFarUs = 2500;

Wide Nanoseconds(uint64_t bytes, uint64_t bytes_per_second) {
  return Wide{bytes} * 1'000'000'000 / bytes_per_second;
}

control::LinkCost WithDefaults(control::LinkCost cost) {
  if (cost.latency_us == 0) cost.latency_us = kDefaultLinkCost.latency_us;
  if (cost.ring_bytes_per_second == 0) cost.ring_bytes_per_second = cost.bytes_per_second;
  if (cost.ring_bytes_per_second == 0) {
    cost.ring_bytes_per_second = kDefaultLinkCost.ring_bytes_per_second;
  }
  if (cost.bytes_per_second == 0) cost.bytes_per_second = cost.ring_bytes_per_second;
  return cost;
}

bool MeshIsFaster(const OpDesc& desc, uint64_t peers, const control::LinkCost& known) {
  const control::LinkCost cost = WithDefaults(known);
  const uint64_t bytes = desc.bytes();
  const Wide latency = Wide{cost.latency_us} * 1000;
  const Wide others = peers - 1;
  if (desc.kind == OpKind::kBroadcast || desc.kind == OpKind::kReduce) {
    const Wide whole = Nanoseconds(bytes, cost.ring_bytes_per_second);
    return latency + others * whole < others * latency + whole;
  }
  const Wide hop = Nanoseconds(bytes / peers, cost.ring_bytes_per_second);
  const Wide link = Nanoseconds(bytes / peers, cost.bytes_per_second);
  // Sums of halves travel around the ring as float32, in one of the two phases.
  const bool wide = desc.Sums() && IsHalf(desc.dtype);
  const Wide ring = others * (2 * latency + (wide ? 3 : 2) * hop);
  const uint64_t percent = cost.latency_us < kFarUs ? kNearMeshPercent : kFarMeshPercent;
  const Wide mesh = 2 * latency + std::max(2 * link, 2 * others * hop * percent / 100);
  return mesh < ring;
}

}  // namespace

bool MayUseMesh(const OpDesc& desc, size_t peers) {
  if (peers <= 1 || IsOneShot(desc)) return false;
  if (IsDirect(desc.kind)) return true;
  if (desc.order == Order::kRank || desc.algorithm == Algorithm::kMesh) return true;
  // Between two peers the mesh is never faster. Of unequal parts, the size is not known here.
  return desc.algorithm == Algorithm::kAuto && peers > 2 && !desc.unequal &&
         desc.count <= kMeshBytesMax && desc.bytes() <= kMeshBytesMax;
}

Algorithm ChooseAlgorithm(const OpDesc& desc, size_t peers, bool mesh,
                          const control::LinkCost& cost) {
  if (peers <= 1) return Algorithm::kLocal;
  if (IsOneShot(desc)) return Algorithm::kOneShot;
  if (IsDirect(desc.kind)) return Algorithm::kMesh;
  if (!mesh || !MayUseMesh(desc, peers)) return Algorithm::kRing;
  if (desc.algorithm == Algorithm::kMesh || desc.order == Order::kRank) return Algorithm::kMesh;
  return MeshIsFaster(desc, peers, cost) ? Algorithm::kMesh : Algorithm::kRing;
}

}  // namespace longhaul::peerd
