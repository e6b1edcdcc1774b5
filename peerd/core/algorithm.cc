#include "peerd/core/algorithm.h"

#include <algorithm>
#include <iterator>

#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

// Times are computed in integers, so that peers with different processors get the same result.
// Nothing overflows.
using Wide = unsigned __int128;

// The factor c of the header, in percent. A latency below kFarNs is a short way.
constexpr uint64_t kNearMeshPercent = 125;
constexpr uint64_t kFarMeshPercent = 100;
constexpr uint32_t kFarNs = 2'500'000;

Wide Nanoseconds(uint64_t bytes, uint64_t bytes_per_second) {
  return Wide{bytes} * 1'000'000'000 / bytes_per_second;
}

// Among equal hosts of which each sends `hop` bytes a second: what the mesh adds up in a second.
uint64_t EvenMesh(uint64_t hop, uint64_t peers) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(Wide{hop} * peers / (Wide{2} * (peers - 1))));
}

// The reverse: what each of equal hosts sends in a second.
uint64_t HopOf(uint64_t mesh, uint64_t peers) {
  return static_cast<uint64_t>(std::min<Wide>(Wide{mesh} * 2 * (peers - 1) / peers, UINT64_MAX));
}

// A peer sends at most so many bytes of input with the READYs of an op. It gets as many, and adds
// them up in one turn of the reactor.
constexpr uint64_t kOneShotBytesSentMax = LH_OP_TURN_BYTES_MAX;
// If a peer sends only so many bytes more than in a ring, no rate is asked for.
constexpr uint64_t kOneShotMoreBytes = 64 << 10;

struct Rates {
  uint64_t ring;
  uint64_t mesh;
};
Rates RatesOf(const OpDesc& desc, uint64_t peers, const control::LinkCost& cost) {
  uint64_t mesh = IsShared(desc.kind) ? cost.mesh_bytes_per_second : cost.even_bytes_per_second;
  uint64_t ring = cost.ring_bytes_per_second;
  if (ring == 0 && mesh != 0) ring = HopOf(mesh, peers);
  if (ring == 0) ring = kDefaultLinkCost.ring_bytes_per_second;
  if (mesh == 0) mesh = EvenMesh(ring, peers);
  return {ring, mesh};
}

// The time of a broadcast or a reduce over the mesh, if the root sends or gets all itself.
Wide StraightTime(uint64_t bytes, uint64_t others, Wide latency, const Rates& rates) {
  return latency + others * Nanoseconds(bytes, rates.ring);
}

// The time of an op over the mesh in two phases, which together get so many bytes of the tensor
// done in a second.
Wide TwoPhaseTime(uint64_t bytes, uint64_t bytes_per_second, Wide latency) {
  const uint64_t percent = latency < kFarNs ? kNearMeshPercent : kFarMeshPercent;
  return 2 * latency + Nanoseconds(bytes, bytes_per_second) * percent / 100;
}

// The time of a broadcast that is passed on.
Wide PassedOnTime(uint64_t bytes, uint64_t peers, Wide latency, const control::LinkCost& cost,
                  const Rates& rates) {
  const uint64_t mesh = cost.mesh_bytes_per_second != 0 ? cost.mesh_bytes_per_second : rates.mesh;
  return TwoPhaseTime(bytes, HopOf(mesh, peers), latency);
}

Wide LatencyOf(const control::LinkCost& cost) {
  return Wide{std::max(cost.latency_us, kDefaultLinkCost.latency_us)} * 1000;
}

// The bytes of the whole as they are sent, but for the scales of blocks.
uint64_t SentBytes(const OpDesc& desc) {
  const uint64_t bits = 8 * SizeOf(desc.dtype);
  switch (desc.quantization) {
    case Quantization::kBf16:
      return desc.bytes() / bits * 16;
    case Quantization::kInt8:
      return desc.bytes() / bits * 8;
    case Quantization::kInt4:
      return desc.bytes() / bits * 4;
    default:
      return desc.bytes();
  }
}

struct Times {
  Wide mesh;
  Wide ring;
};
Times TimesOf(const OpDesc& desc, uint64_t peers, const control::LinkCost& cost) {
  const Rates rates = RatesOf(desc, peers, cost);
  const uint64_t bytes = SentBytes(desc);
  const Wide latency = LatencyOf(cost);
  const uint64_t others = peers - 1;
  if (desc.kind == OpKind::kBroadcast || desc.kind == OpKind::kReduce) {
    Wide mesh = StraightTime(bytes, others, latency, rates);
    if (desc.kind == OpKind::kBroadcast) {
      mesh = std::min(mesh, PassedOnTime(bytes, peers, latency, cost, rates));
    }
    return {mesh, others * latency + Nanoseconds(bytes, rates.ring)};
  }
  // Sums of halves travel around the ring as float32, in one of the two phases.
  const bool wide = desc.Sums() && IsHalf(desc.dtype) && !desc.Encodes();
  const Wide hop = Nanoseconds(bytes / peers, rates.ring);
  const Wide ring = others * (2 * latency + (wide ? 3 : 2) * hop);
  return {TwoPhaseTime(bytes, rates.mesh, latency), ring};
}

bool MeshIsFaster(const OpDesc& desc, uint64_t peers, const control::LinkCost& cost) {
  const Times times = TimesOf(desc, peers, cost);
  return times.mesh < times.ring;
}

constexpr Quantization kCodecs[] = {Quantization::kNone, Quantization::kBf16, Quantization::kInt8,
                                    Quantization::kInt4};

}  // namespace

Shares PassedOn(const OpDesc& desc, size_t root, size_t peers, const control::LinkCost& cost) {
  if (desc.kind != OpKind::kBroadcast || peers <= 2) return {};
  const Rates rates = RatesOf(desc, peers, cost);
  const Wide latency = LatencyOf(cost);
  const uint64_t bytes = SentBytes(desc);
  if (StraightTime(bytes, peers - 1, latency, rates) <=
      PassedOnTime(bytes, peers, latency, cost, rates)) {
    return {};
  }
  Shares shares = cost.shares;
  if (shares.empty()) shares.assign(peers, 1);
  shares[root] = 0;
  const bool any = std::any_of(shares.begin(), shares.end(), [](uint32_t s) { return s != 0; });
  return any ? shares : Shares();
}

bool CarriesInput(const OpDesc& desc, size_t peers, bool mesh, const control::LinkCost& cost,
                  uint32_t latency_us) {
  if (peers <= 1 || !mesh || !MayCarryInput(desc)) return false;
  const Wide latency = Wide{cost.latency_us != 0 ? cost.latency_us : latency_us} * 1000;
  if (latency < kFarNs) return false;
  const uint64_t others = peers - 1;
  const uint64_t bytes = others * OneShotPayloadBytes(desc);
  if (bytes > kOneShotBytesSentMax) return false;
  const uint64_t more = bytes - 2 * others * desc.bytes() / peers;
  // Without a latency, the epoch's rates come from too few bytes.
  const Rates rates = RatesOf(desc, peers, cost.latency_us != 0 ? cost : control::LinkCost());
  return more <= kOneShotMoreBytes || 2 * Nanoseconds(more, rates.ring) <= latency;
}

bool MayUseMesh(const OpDesc& desc, size_t peers) {
  if (IsAuto(desc.quantization)) {
    return std::any_of(std::begin(kCodecs), std::end(kCodecs), [&](Quantization codec) {
      return IsAmong(desc.quantization, codec) && MayUseMesh(desc.With(codec), peers);
    });
  }
  if (peers <= 1 || IsOneShot(desc)) return false;
  if (IsDirect(desc.kind)) return true;
  if (desc.order == Order::kRank || desc.algorithm == Algorithm::kMesh) return true;
  if (desc.algorithm != Algorithm::kAuto || desc.unequal) return false;
  // Between two peers the mesh is never faster. Of unequal parts, the size is not known here.
  if (peers <= 2 && !desc.Encodes()) return false;
  return desc.count <= 2 * kMeshBytesMax && SentBytes(desc) <= kMeshBytesMax;
}

Quantization ChooseCodec(const OpDesc& desc, size_t peers, bool mesh,
                         const control::LinkCost& cost) {
  if (!IsAuto(desc.quantization)) return desc.quantization;
  const bool measured = cost.ring_bytes_per_second != 0 || cost.even_bytes_per_second != 0;
  if (peers <= 1 || IsOneShot(desc) || desc.unequal || !measured) return Quantization::kNone;
  Quantization best = Quantization::kNone;
  Wide least = 0;
  for (const Quantization codec : kCodecs) {
    if (!IsAmong(desc.quantization, codec)) continue;
    const OpDesc with = desc.With(codec);
    const Times times = TimesOf(with, peers, cost);
    Wide time =
        ChooseAlgorithm(with, peers, mesh, cost) == Algorithm::kMesh ? times.mesh : times.ring;
    if (codec != Quantization::kNone) time += Nanoseconds(desc.bytes(), kCodecBytesPerSecond);
    if (codec != Quantization::kNone && time >= least) continue;
    best = codec;
    least = time;
  }
  return best;
}

Algorithm ChooseAlgorithm(const OpDesc& desc, size_t peers, bool mesh,
                          const control::LinkCost& cost) {
  if (peers <= 1) return Algorithm::kLocal;
  if (IsOneShot(desc)) return Algorithm::kOneShot;
  if (IsDirect(desc.kind)) return Algorithm::kMesh;
  if (!mesh || !MayUseMesh(desc, peers)) return Algorithm::kRing;
  if (desc.algorithm == Algorithm::kMesh || desc.order == Order::kRank) return Algorithm::kMesh;
  // The root of a broadcast encodes once, whichever way its bytes go.
  if (desc.Encodes() && Reduces(desc.kind)) return Algorithm::kMesh;
  return MeshIsFaster(desc, peers, cost) ? Algorithm::kMesh : Algorithm::kRing;
}

}  // namespace longhaul::peerd
