// Chooses the algorithm of an op. The choice depends on the op and the epoch only, so all
// participants make the same choice without a message.
//
// If the caller did not choose, an op of at most LH_ONE_SHOT_BYTES_MAX bytes is a one-shot
// exchange. For a larger op, mesh and ring move the same number of bytes out of and into every
// peer. Their times are estimated with the usual model, in which a message of m bytes takes L + m /
// B (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
// MPICH", 2005). With N peers and n bytes:
//
//   ring  2 (N - 1) (L + n/N / R)
//   mesh  2 L + c n / M
//
// L: the latency between the two peers that are farthest apart, but at least that of
//    kDefaultLinkCost. A packet may take less, but the peer that gets it has to wake up.
// R: bytes per second of the ring's slowest hop, or of the slowest host. Every byte passes that
// hop. M: the bytes of a tensor that the mesh adds up in a second, with the shares that peers own
//    (proto/wire/shares.h). Hosts and links limit it. The coordinator knows it.
// c: 1 on long ways; 1.25 if L is below 2.5 ms. On short ways processors are the limit: all peers
//    send to a receiver at once, and it adds their inputs from memory, not from the cache.
//
// Of what was not measured, the fastest is assumed: kDefaultLinkCost, and where only one of R and M
// is known, the other follows from it as among equal hosts.
//
// A reduce-scatter or an all-gather has half of the terms, and M of equal shares, because the
// caller cuts the tensor. In a broadcast or a reduce, the root sends or gets the whole tensor once
// in the ring, and once for each other peer in the mesh:
//
//   ring  (N - 1) L + n / R
//   mesh  L + (N - 1) n / R
//
// A broadcast may also be passed on: the root sends each peer its share, and each peer sends what
// it got to all others. A slow host has a small share, so it sends little. Among equal hosts each
// peer then sends B = 2 (N - 1) / N M bytes a second:
//
//   mesh, passed on  2 L + c n / B
//
// Of an op that encodes, n counts the encoded bytes. It takes the mesh wherever it can, because the
// ring encodes every partial sum anew. (Between two peers, too: the result then does not depend on
// the algorithm.)
//
// A larger op may still be a one-shot exchange (MayCarryInput()). It takes one latency:
//
//   one-shot  L + (N - 1) n / R
//
// Ring and mesh take at least four, because READY, two phases and DONE are one each. On a long path
// they take more, since a connection that was idle sends ten packets, and then waits for a round
// trip. A one-shot exchange moves more bytes, which matters if ops are under way at the same time.
// So it is taken where the bytes that it moves more take at most half a latency, or are few. Two
// peers move no more bytes.
//
// Direct ops (IsDirect()) always take the mesh, over whatever links there are. Order::kRank takes
// the mesh or one-shot, because sums along a ring follow the ring's order.
//
// So the mesh wins where latency counts. The ring wins for large tensors on short ways, and where
// it avoids a slow link. Between two peers both take the same time, and the ring is taken.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"
#include "proto/wire/shares.h"

namespace longhaul::peerd {

// If an epoch has at most this many peers, all its straight links have data lanes for the mesh.
inline constexpr size_t kMeshPeersMax = 64;
// If it has more than this many, links that only the mesh needs begin with one data lane.
inline constexpr size_t kManyLanesPeersMax = 16;

// Larger ops use the mesh only if the caller asks for it, because it takes twice the scratch
// memory.
inline constexpr uint64_t kMeshBytesMax = 64 << 20;

// The cost that is assumed where none was measured: that of a fast link to a near peer. No message
// takes less than its latency.
struct DefaultLinkCost {
  uint32_t latency_us;
  uint64_t ring_bytes_per_second;
};
inline constexpr DefaultLinkCost kDefaultLinkCost{25, 1'000'000'000};

// Returns the codec of an op: the one that it names, or kNone or one out of a set (IsAuto()). Out
// of a set it takes the one with which the op takes the least time, if links were measured.
// Encoding and decoding are taken to do kCodecBytesPerSecond of the tensor. Of equal times, the
// more exact one.
inline constexpr uint64_t kCodecBytesPerSecond = 1'000'000'000;
Quantization ChooseCodec(const OpDesc& desc, size_t peers, bool mesh,
                         const control::LinkCost& cost);

// Returns the algorithm of an op in which `peers` peers take part: kLocal for one peer, never
// kAuto. The codec has been chosen. `mesh`: any two of these peers have a straight link with data
// lanes. If they do not, an op that asks for the mesh gets the ring and no error, because the next
// epoch may lack a link, too. (Order::kRank gets the ring as well, and cannot run there.)
Algorithm ChooseAlgorithm(const OpDesc& desc, size_t peers, bool mesh,
                          const control::LinkCost& cost);

// Returns whether peers had better send their inputs with READY, so that the op becomes a one-shot
// exchange. `desc`, `mesh`, `cost`: as above; the op is no one-shot op anyway. `latency_us`: the
// latency to the farthest peer as this peer has measured it, which counts if `cost` has none. 0:
// not measured. So two peers may get different answers. Then the op takes longer (ReadyInput).
bool CarriesInput(const OpDesc& desc, size_t peers, bool mesh, const control::LinkCost& cost,
                  uint32_t latency_us);

// Returns which share of a broadcast over the mesh each position passes on; nothing if the root had
// better send all to everybody itself. `root`: its position.
Shares PassedOn(const OpDesc& desc, size_t root, size_t peers, const control::LinkCost& cost);

// Whether ops of this description may use the mesh in an epoch in which at most `peers` take part,
// with some codec if it names a set.
bool MayUseMesh(const OpDesc& desc, size_t peers);

}  // namespace longhaul::peerd
