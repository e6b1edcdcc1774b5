// Which way an op's bytes go: the same at all its members, since it is a function of the op and the
// epoch only.
//
// Up to LH_ONE_SHOT_BYTES_MAX bytes an op is a one-shot exchange. Beyond, mesh and ring move the
// same number of bytes out of and into every peer, and the times of both are estimated as usual
// (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
// 2005): N peers, n bytes, a message of m bytes takes L + m / B:
//
//   ring  2 (N - 1) (L + n/N / R)     R: of the ring's slowest hop, which every byte passes
//   mesh  2 L + max(2 n/N / B,        B: of the slowest of all links, each of which carries n/N
//                   c 2 (N - 1) n/N / R)
//
// twice. The last term: a peer sends to all others at once no more than it sends to one, taken to
// be R, and where processors are the limit, on short ways, a little less (c > 1): receivers are
// sent to by all at once, and the inputs of all are added from memory, not from cache. So the mesh
// wins where latency counts, and the ring for large tensors on short ways and where a slow link can
// be avoided. Between two peers they do the same, and it is the ring.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// In groups of at most so many peers all links have data lanes, as the mesh needs.
inline constexpr size_t kMeshPeersMax = 16;

// Ops beyond this size use the mesh only if the caller asks for it: it takes twice the scratch.
inline constexpr uint64_t kMeshBytesMax = 64 << 20;

// What an unknown cost is taken for: fast and near, so that a wrong guess costs little.
inline constexpr control::LinkCost kDefaultLinkCost{25, 1'000'000'000, 1'000'000'000};

// `peers` take part; `mesh`: all of them are linked to all others with data lanes. The answer is
// never kAuto, and kLocal for one peer. A caller who asks for the mesh where there is none gets the
// ring: whether there is one may change with every epoch.
Algorithm ChooseAlgorithm(const OpDesc& desc, size_t peers, bool mesh,
                          const control::LinkCost& cost);

// Whether ops of this description use the mesh in some epoch in which at most `peers` take part.
bool MayUseMesh(const OpDesc& desc, size_t peers);

}  // namespace longhaul::peerd
