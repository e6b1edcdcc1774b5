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

// Among equal hosts of which each sends `hop` bytes a second: what the mesh adds up in a second.
uint64_t EvenMesh(uint64_t hop, uint64_t peers) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(Wide{hop} * peers / (2 * (peers - 1))));
}

struct Rates {
  uint64_t ring;
  uint64_t mesh;
};
Rates RatesOf(const OpDesc& desc, uint64_t peers, const control::LinkCost& cost) {
  uint64_t mesh = IsShared(desc.kind) ? cost.mesh_bytes_per_second : cost.even_bytes_per_second;
  uint64_t ring = cost.ring_bytes_per_second;
  if (ring == 0 && mesh != 0) {
    ring = static_cast<uint64_t>(std::min<Wide>(Wide{mesh} * 2 * (peers - 1) / peers, UINT64_MAX));
  }
  if (ring == 0) ring = kDefaultLinkCost.ring_bytes_per_second;
  if (mesh == 0) mesh = EvenMesh(ring, peers);
  return {ring, mesh};
}

bool MeshIsFaster(const OpDesc& desc, uint64_t peers, const control::LinkCost& cost) {
  const Rates rates = RatesOf(desc, peers, cost);
  const uint64_t bytes = desc.bytes();
  const uint32_t us = cost.latency_us != 0 ? cost.latency_us : kDefaultLinkCost.latency_us;
  const Wide latency = Wide{us} * 1000;
  const Wide others = peers - 1;
  if (desc.kind == OpKind::kBroadcast || desc.kind == OpKind::kReduce) {
    const Wide whole = Nanoseconds(bytes, rates.ring);
    return latency + others * whole < others * latency + whole;
  }
  // Sums of halves travel around the ring as float32, in one of the two phases.
  const bool wide = desc.Sums() && IsHalf(desc.dtype);
  const Wide hop = Nanoseconds(bytes / peers, rates.ring);
  const Wide ring = others * (2 * latency + (wide ? 3 : 2) * hop);
  const uint64_t percent = us < kFarUs ? kNearMeshPercent : kFarMeshPercent;
  const Wide mesh = 2 * latency + Nanoseconds(bytes, rates.mesh) * percent / 100;
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
