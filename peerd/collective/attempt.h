// One attempt at one op at one peer: which segments go where, what is done with those that come.
//
// Algorithm apart from transport: an Attempt makes no system call and knows no socket. It asks its
// Sink to send segments and is told of those that arrived; the same code runs over TCP, and in the
// simulation over a model network. Owned and called by one thread.
//
// Words: a tensor is cut into one chunk per ring position, a chunk into grains, at every position
// alike (plan.h). A segment, what is sent at once, is one or more grains that follow each other in
// a chunk: as many as its sender likes, and named by (phase, byte offset in the tensor, bytes). Few
// and large ones cost less; many small ones can be shared out among many slow lanes.
//
// Ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
// 2009), without barriers between steps: a partial sum of a segment starts at its chunk's first
// position, is added to and passed on at each following one (phase reduce), and the finished
// segment goes round once more (phase gather). Segments flow from each position to the next one.
//
// Mesh: each position owns one chunk. All others send it their inputs of its segments directly
// (phase reduce); it adds them and sends what is finished to all (phase gather). Two steps however
// many positions there are, where a ring takes 2 (size - 1), and segments flow between any two.
//
// Work in slices: no call works on a whole tensor. What takes time in proportion to the tensor
// (putting originals back, copying the result to other local members, adding up several members'
// inputs before they are sent) is done by Work(), as much at a time as its caller allows.
//
// Undo: until Commit() the inputs can be had back. Out of place they are not touched. In place,
// what arrives of others' inputs lives in a scratch buffer; before a sum, finished or not,
// overwrites its input, the original moves there, and Stop() puts it back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "peerd/collective/plan.h"
#include "proto/wire/frame.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

struct Segment {
  Phase phase = Phase::kReduce;
  uint64_t offset = 0;  // bytes
  uint32_t bytes = 0;
};

class AttemptSink {
 public:
  virtual ~AttemptSink() = default;
  // Sends `segment` from `data` to ring position `to`. The memory stays valid until Sent(cookie),
  // and after that as long as the attempt. Its bytes stay as they are until the receiver has all of
  // them, be it before or after Sent(): a segment that was lost on its way is read again. Sent() is
  // not called from within.
  virtual void SendSegment(int to, const Segment& segment, const uint8_t* data,
                           uint64_t cookie) = 0;
  // The result is complete and every segment has been Sent. At most once, and never for an attempt
  // that is CompleteAtOnce(). The attempt may be stopped or committed from within, not destroyed.
  virtual void Complete() = 0;
};

// Memory for partial sums and kept originals. One pool a peerd.
class ScratchPool {
 public:
  virtual ~ScratchPool() = default;
  // At least `bytes`, 64-byte aligned, not cleared; ResourceExhausted: the system has no more.
  virtual absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) = 0;
  virtual void Give(uint8_t* data) = 0;
};
// Gives the pages of a mapping back to the system, which takes time in proportion to its size.
using UnmapFunction = std::function<void(void* data, size_t bytes)>;
// Keeps freed buffers for reuse, as long as they and what is taken are no more than
// `kept_bytes_max`. How much is taken is for those to bound who take it. `unmap`: what is done with
// the others; null: munmap(), at once.
std::unique_ptr<ScratchPool> MakeScratchPool(uint64_t kept_bytes_max,
                                             UnmapFunction unmap = nullptr);

inline constexpr uint64_t kCachedBytesMax = 2 << 20;

struct AttemptSpec {
  OpDesc desc;
  int size = 1;          // ring positions (peers)
  int position = 0;      // of this peer
  uint32_t members = 1;  // who contribute, in all: the divisor of avg
  // One of each per local member; targets[i] is sources[i] or does not overlap any of them.
  std::vector<const uint8_t*> sources;
  std::vector<uint8_t*> targets;
  // By source: its contents are in the result. The others are left out, and get it all the same.
  // Empty: all do.
  std::vector<bool> contributes;
  // By position: whether a source there contributes; at least one does. Empty: all do. A ring, in
  // which sums pass by all positions, has no use for it.
  std::vector<bool> ring_contributes;
  // A multiple of 64; the same at every peer.
  uint32_t grain_bytes = kGrainBytes;
  // What this peer puts into a segment, at most (but one grain always).
  uint32_t segment_bytes = kGrainBytes;
  // Own input that is handed to the sink and not Sent, at most (but one segment always): segments
  // that others wait for then find a short queue while they are hot in cache. Long ways need more.
  uint64_t window_bytes = 8 << 20;
  // A tensor up to this is taken to be in the processor's caches, with its scratch buffer.
  uint64_t cached_bytes_max = kCachedBytesMax;
};

class Attempt {
 public:
  virtual ~Attempt() = default;

  // Begins to send and compute. Call once.
  virtual void Start() = 0;
  // Nothing has to be sent or received (one peer, a one-shot op, no elements): complete as soon as
  // started, and the sink's Complete() is not called.
  virtual bool CompleteAtOnce() const = 0;
  // Segments may be sent to ring position `position` from now on. May come before Start().
  virtual void Credit(int position) = 0;
  // Where the payload of an arriving segment belongs, after Start(). InvalidArgument: it does not
  // fit this attempt (sender, bounds, phase, size, order, or it was already placed): the sender
  // broke the protocol.
  virtual absl::StatusOr<uint8_t*> Place(int from, const Segment& segment) = 0;
  // The payload of the segment that was placed will not come; it is placed again when it is sent
  // again. Nothing is written to its place meanwhile.
  virtual void Abandoned(int from, const Segment& segment) = 0;
  // The payload of a placed segment is complete.
  virtual void Received(int from, const Segment& segment) = 0;
  // The bytes of SendSegment(..., cookie) are no longer referred to.
  virtual void Sent(uint64_t cookie) = 0;

  // Gives up, before or after Complete(). No receive into a placed segment may be under way.
  // Afterwards only Sent() and Work() may be called; the sink is not called any more. The inputs
  // are as posted once Idle(): a finished segment that is on its way to a peer which does not know
  // of the stop yet is restored after its Sent(), or that peer could take the original for the
  // result.
  virtual void Stop() = 0;
  // The op is committed, after Complete(): once there is no more work, the result is in every
  // target. Afterwards only Work() may be called.
  virtual void Commit() = 0;
  // Start(), Credit(), Sent(), Stop() and Commit() may leave work to be done, and so may Work().
  virtual bool HasWork() const = 0;
  // Does some of it: until it has read and written `bytes_max` bytes of tensors, or there is no
  // more. The last piece, of one segment at most, may go beyond. Returns the bytes.
  virtual uint64_t Work(uint64_t bytes_max) = 0;
  // No segment handed to SendSegment() is still out, repeats aside, and there is no work: the
  // object may be destroyed, and after Stop() the inputs are restored.
  virtual bool Idle() const = 0;

  // Payload handed to the sink; payload that was placed and came in whole.
  virtual uint64_t bytes_sent() const = 0;
  virtual uint64_t bytes_received() const = 0;
};

// ResourceExhausted: the scratch pool has no room. `sink` and `pool` outlive the attempt.
absl::StatusOr<std::unique_ptr<Attempt>> MakeRingAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool);

// The same over the mesh. The inputs (of several members on one host: their sum) are added in ring
// order of positions, whatever the order in which they arrive: the bits of the result are those of
// a one-shot exchange, and the same each time. Positions that do not contribute send no input.
absl::StatusOr<std::unique_ptr<Attempt>> MakeMeshAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool);
// What an attempt cannot do without of the pool, at most, and takes before anything else: where all
// local targets are in place, for originals; in the mesh, for inputs of others.
constexpr uint64_t OriginalsBytesMax(uint64_t tensor_bytes) { return tensor_bytes + 64; }
constexpr uint64_t MeshInputsBytesMax(uint64_t tensor_bytes, size_t size) {
  return tensor_bytes + 128 * size;
}

// One-shot exchange of a small op: every input is at hand, added in ring order at every peer, so
// all get the same bits. payloads[i] is the (locally reduced) input of position i; that of
// `position` is empty and taken from the sources. Positions that do not contribute are left out.
// InvalidArgument: a payload is not as long as the op's tensor.
absl::StatusOr<std::string> ReducePayloads(const AttemptSpec& spec,
                                           const std::vector<std::string>& payloads);
// Commit() stores the result, which is as long as the op's tensor, and leaves no work.
std::unique_ptr<Attempt> MakeOneShotAttempt(const AttemptSpec& spec, std::string result);

// The input that this peer contributes to a one-shot op: its sources, reduced in order; zeros if
// none of them contributes.
std::string OneShotPayload(const AttemptSpec& spec);

}  // namespace longhaul::peerd
