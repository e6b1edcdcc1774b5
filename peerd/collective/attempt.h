// One attempt at one op, at one peer: decides which parts of the tensor go to which peer, and adds
// up what arrives.
//
// An Attempt makes no system call and knows no socket. It hands segments to its AttemptSink to
// send, and is told of arrived segments. So the same code runs over TCP, and in the simulation
// over a model network. One thread owns an Attempt and makes all calls.
//
// Words (layout.h and plan.h cut tensors in the same way at every peer):
// - position: the place of a peer in the ring, 0 to size - 1. The mesh uses the same numbers.
// - the whole: the tensor of the op, or all its tensors one after the other. It may be no tensor
//   that a single peer has in memory, but it numbers the bytes.
// - chunk: the whole is cut into one chunk for each position, or for each member (Cut).
// - grain: a chunk is cut into grains of grain_bytes.
// - segment: one or more consecutive grains of a chunk, which are sent together. The sender chooses
//   how many. Few large segments cost less; many small ones can be spread over many slow lanes. A
//   segment is named by its phase, its offset in the whole and its length. The offset counts bytes
//   of tensors, the length those that are sent.
//
// Ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
// 2009), without barriers between the steps. Each position sends only to the next one.
// - Phase reduce: the sum of a segment of chunk c begins at position c. Each following position
//   adds its input and passes the partial sum on. The last position has the finished segment.
// - Phase gather: the finished segment goes around the ring, and each position copies it.
//
// Mesh: position c owns chunk c. Segments go directly between any two positions.
// - Phase reduce: each other position sends its input of the chunk to the owner, which adds them.
// - Phase gather: the owner sends each finished segment to all other positions.
// So a segment needs 2 steps, where a ring needs 2 (size - 1).
//
// Both are an all-reduce. The other kinds of ops leave out a phase. In them a chunk belongs to a
// member (Cut), and ends or begins at that member's position:
// - reduce-scatter and reduce are phase reduce alone: the chunk is finished at its owner
// - all other kinds are phase gather alone: it begins at the owner, with the owner's input. In some
//   of them a chunk goes to one member only, straight from its owner, so they take the mesh.
// Sources are never written to, unless source and target are the same.
//
// Codecs (OpDesc::Encodes()). What is sent is encoded, and kept encoded in a scratch buffer until
// the attempt ends, because a lost segment is sent again from there.
// - Mesh: the input of a position is encoded once. The owner of a chunk adds in float32, its own
//   input rounded like all others, and encodes the sum once.
// - Ring: each position decodes the partial sum, adds its input, and encodes the new sum. So it
//   rounds size - 1 times before the last time, which the mesh does not.
// - Phase gather passes the encoded bytes on. All members decode the same bytes, the owner too.
// - A part that is finished at its owner (reduce-scatter) is not encoded again.
// Targets are only written to when the result is decoded; those in place, and errors, after
// Commit(). So there is nothing to undo.
//
// Work in slices: no call works on a whole tensor. Work() does everything that takes time in
// proportion to the tensor, as much at a time as its caller allows: restoring originals, copying
// the result to other local members, and adding up the inputs of several local members.
//
// Undo: until Commit(), Stop() can restore the inputs. Out of place (target apart from source) an
// attempt never writes to an input. In place, the original of a segment is copied to a scratch
// buffer before anything overwrites it, and Stop() puts it back. A target apart from its source may
// hold anything after a Stop(), but for those of a reduce-scatter (HoldsResults()).
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
#include "proto/wire/shares.h"

namespace longhaul::peerd {

// A part of the tensor that is sent at once.
struct Segment {
  Phase phase = Phase::kReduce;
  uint64_t offset = 0;  // in the whole, in bytes
  uint32_t bytes = 0;
};

// What an Attempt calls.
class AttemptSink {
 public:
  virtual ~AttemptSink() = default;
  // Sends `segment` from `data` to position `to`. The sink must call Attempt::Sent(cookie) later,
  // but not from within this call. The memory stays valid as long as the attempt. Unless the
  // attempt is stopped, its bytes do not change until the receiver has all of them, which may be
  // after Sent(): if a segment is lost on its way, the sink may read and send it again.
  virtual void SendSegment(int to, const Segment& segment, const uint8_t* data,
                           uint64_t cookie) = 0;
  // The result is complete, and Sent() was called for every segment. Called at most once, and never
  // for an attempt that is CompleteAtOnce(). The sink may call Stop() or Commit() from within, but
  // must not destroy the attempt.
  virtual void Complete() = 0;
};

// Memory for partial sums and for originals. A peerd has one pool.
class ScratchPool {
 public:
  virtual ~ScratchPool() = default;
  // Borrows at least `bytes`, aligned to 64 bytes, with undefined content. ResourceExhausted: the
  // system has no more memory.
  virtual absl::StatusOr<uint8_t*> Borrow(uint64_t bytes) = 0;
  // Gives borrowed memory back.
  virtual void Give(uint8_t* data) = 0;
};
// Unmaps memory. This takes time in proportion to its size.
using UnmapFunction = std::function<void(void* data, size_t bytes)>;
// Makes a pool. It keeps buffers that were given back for later use, as long as they and the
// borrowed buffers together have at most `kept_bytes_max`. It unmaps all others with `unmap` (null:
// munmap(), at once). The pool does not limit how much is borrowed; the borrowers must.
std::unique_ptr<ScratchPool> MakeScratchPool(uint64_t kept_bytes_max,
                                             UnmapFunction unmap = nullptr);

// Default of AttemptSpec::cached_bytes_max.
inline constexpr uint64_t kCachedBytesMax = 1 << 20;

// A part of the whole that belongs to a member (CutsOf() in the core lists them). An all-reduce has
// none.
//
// In phase reduce, the part is finished at its owner. In phase gather, it begins at its owner and
// goes to everybody, or to one receiver if the op is direct (IsDirect()).
struct Cut {
  int position = 0;     // of the owner
  int local = -1;       // the owner's index among the local members; -1: it is at another position
  int to_position = 0;  // of the receiver of a direct op
  int to_local = -1;    // the receiver's index among the local members; -1: at another position
  uint64_t count = 0;   // elements, if desc.unequal; otherwise those of each piece say it
  friend bool operator==(const Cut&, const Cut&) = default;
};

// An op has one piece, or several if it is on a list of tensors. Each piece is laid out as the
// tensor of an op with one piece.
struct Piece {
  DType dtype = DType::kFloat32;
  uint64_t count = 0;  // elements; of one part if desc.InParts(); 0 if desc.unequal
  friend bool operator==(const Piece&, const Piece&) = default;
};

// What an attempt is to do. "Contributes" means that an input is in the result. The input of a
// member in the background is left out, but that member gets the result.
struct AttemptSpec {
  OpDesc desc;
  int size = 1;          // number of positions (peers)
  int position = 0;      // of this peer
  uint32_t members = 1;  // members that contribute, at all peers together: the divisor of avg
  // If desc.weighted: the sum of the weights of these members, which is the divisor then.
  double weight_sum = 0;
  // Empty for an all-reduce. Reduce-scatter, all-gather and gather: one for each part. Scatter: one
  // for each part, all of the root. All-to-all: one for each pair, in the order of the senders,
  // then of the receivers. Broadcast, reduce, send: one.
  std::vector<Cut> cuts;
  // Mesh, without cuts: what each position owns of every piece. Empty: equal shares.
  // Mesh, broadcast: what each position passes on. Empty: the root sends all to everybody itself.
  Shares shares;
  // At least one.
  std::vector<Piece> pieces;
  // The tensors of the local members: piece k of member i is at sources[i][k] and targets[i][k].
  // nullptr where the op does not use such a tensor of the member (SourceOf(), TargetOf()), or
  // where it has no elements. Either all targets of a member are equal to its sources (in place),
  // or no target overlaps a source. Reduce, scatter, gather, all-to-all and send are never in place
  // with a part; reduce and broadcast may be in place.
  std::vector<std::vector<const uint8_t*>> sources;
  std::vector<std::vector<uint8_t*>> targets;
  // If desc.Encodes() and the op reduces: errors[i][k] is float32, as long as sources[i][k], and
  // has the error of member i in piece k; errors[i] is empty if the member keeps none. It is added
  // to the input. If the op is committed, it becomes what the input has lost by encoding. Empty:
  // nobody keeps any.
  std::vector<std::vector<float*>> errors;
  // If desc.Encodes(): for stochastic rounding, a seed for each local member, and one for sums.
  std::vector<uint64_t> seeds;
  uint64_t sum_seed = 0;
  // For each source, whether it contributes. Empty: all do.
  std::vector<bool> contributes;
  // For each source, its weight. Empty: 1. A source of weight 0 is not read.
  std::vector<double> weights;
  // For each position, how many sources there contribute. At least one source does. Empty: one
  // each. The ring only uses it to see whether halves need float32 on the way.
  std::vector<uint32_t> ring_contributes;
  // The order in which the inputs of the positions are added (mesh and one-shot). Empty: the order
  // of the positions.
  std::vector<int> order;
  // A multiple of 64. The same at every peer.
  uint32_t grain_bytes = kGrainBytes;
  // The longest segment that this peer sends. A segment has at least one grain.
  uint32_t segment_bytes = kGrainBytes;
  // The most bytes of this peer's own input that are handed to the sink and not Sent. One segment
  // is always allowed. With a short queue, a segment that others wait for is sent soon, while it is
  // in the cache. Links with a long latency need a longer queue.
  uint64_t window_bytes = 8 << 20;
  // A tensor of at most this size is taken to be in the caches, together with its scratch buffer.
  uint64_t cached_bytes_max = kCachedBytesMax;

  bool reduces() const { return Reduces(desc.kind); }
  bool gathers() const { return Gathers(desc.kind); }
};

class Attempt {
 public:
  virtual ~Attempt() = default;

  // Begins to send and to compute. Call it once.
  virtual void Start() = 0;
  // True if nothing has to be sent or received: one peer, a one-shot op, or no elements. The
  // attempt is complete as soon as it is started, and AttemptSink::Complete() is not called.
  virtual bool CompleteAtOnce() const = 0;
  // From now on segments may be sent to `position`: that peer has announced the op, so it has the
  // memory. May be called before Start().
  virtual void Credit(int position) = 0;
  // A segment begins to arrive. Returns where its payload must be written. Call it after Start().
  // InvalidArgument: the segment does not fit this attempt (sender, bounds, phase, size, order, or
  // it was placed before), so the sender broke the protocol.
  virtual absl::StatusOr<uint8_t*> Place(int from, const Segment& segment) = 0;
  // The payload of a placed segment will not come, because its lane was lost. The caller no longer
  // writes to the place. When the segment is sent again, Place() is called again.
  virtual void Abandoned(int from, const Segment& segment) = 0;
  // The payload of a placed segment has arrived completely.
  virtual void Received(int from, const Segment& segment) = 0;
  // The sink no longer reads the bytes of SendSegment(..., cookie), unless it must send them again.
  virtual void Sent(uint64_t cookie) = 0;

  // Gives the attempt up, before or after Complete(). No placed segment may still be written to.
  // Afterwards only Sent() and Work() may be called, and the attempt does not call the sink any
  // more. The inputs are restored when Idle() is true. Memory that is still being sent is restored
  // only after its Sent(): otherwise a peer that does not know of the stop could take the original
  // for the result.
  virtual void Stop() = 0;
  // Commits the op; call it after Complete(). The result is in every target when HasWork() is
  // false. Afterwards only Work() may be called.
  virtual void Commit() = 0;
  // Whether Work() has something to do. Start(), Credit(), Sent(), Stop(), Commit() and Work() may
  // leave work.
  virtual bool HasWork() const = 0;
  // Works until it has read and written `bytes_max` bytes of tensors, or nothing is left to do. The
  // last piece, of at most one segment, may go beyond. Returns the number of bytes.
  virtual uint64_t Work(uint64_t bytes_max) = 0;
  // True if Sent() was called for every segment that was handed to the sink, and there is no work.
  // Then the attempt may be destroyed, and if it was stopped, the inputs are restored.
  virtual bool Idle() const = 0;

  // Bytes of the segments that were handed to the sink, and of the segments that arrived
  // completely. For a one-shot op: the bytes of its inputs, which travel in other messages.
  virtual uint64_t bytes_sent() const = 0;
  virtual uint64_t bytes_received() const = 0;
  // After Commit() and its work: blocks of a local member's result with an element that is not
  // finite, if the op has encoded it. The same at all members that get the same result.
  virtual uint64_t blocks_not_finite(size_t /*member*/) const { return 0; }
};

// Makes an attempt over the ring. `sink` and `pool` must outlive the attempt. ResourceExhausted:
// the pool has no memory. Not for a direct op, nor for Order::kRank.
//
// Halves: if an input or a partial sum would be rounded on the way, because there are more than two
// positions, a position adds up several sources, or there are weights, then segments of phase
// reduce carry float32. Such a segment is named by its offset in the tensor as always, and has
// twice the bytes.
absl::StatusOr<std::unique_ptr<Attempt>> MakeRingAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool);

// Makes an attempt over the mesh, for every kind. The inputs are added in spec.order, in whatever
// order they arrive. So the result is the same each time, bit by bit, and equals that of a one-shot
// op. The input of a position is that of its local members, reduced together (float32 for halves,
// if there are several or if there are weights). A position that does not contribute sends no
// input.
absl::StatusOr<std::unique_ptr<Attempt>> MakeMeshAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool);

// Whether an attempt keeps its results in scratch memory until it is committed, so that targets
// apart from sources are written to only if the op ends well. Otherwise parts of a result may
// arrive in a target while the attempt runs.
constexpr bool HoldsResults(const OpDesc& desc) { return desc.kind == OpKind::kReduceScatter; }

// The most scratch memory that an attempt borrows when it is made. `in_place`: the only local
// member left is in place. `positions`: at most so many peers take part. `crowded`: a peer may have
// several members that contribute, or that own a part of a reduce-scatter. `mesh`: the op may take
// the mesh. `unequal_bytes`: of the whole if desc.unequal, where the description does not say it.
// `errors`: a local member keeps errors.
uint64_t ScratchBytesMax(const OpDesc& desc, bool in_place, size_t positions, bool crowded,
                         bool mesh, uint64_t unequal_bytes = 0, bool errors = false);

// Computes the result of a one-shot op: the whole, as layout.h lays it out. Every peer has the
// inputs of all positions and adds them in spec.order, so all get the same bits. payloads[i] is the
// OneShotPayload() of position i. The payload at this peer's own position is ignored, and the
// sources are used instead. Positions that do not contribute are left out. InvalidArgument: another
// payload does not have OneShotPayloadBytes().
absl::StatusOr<std::string> ReducePayloads(const AttemptSpec& spec,
                                           const std::vector<std::string>& payloads);
// Makes the attempt of a one-shot op. Commit() writes the result to the targets and leaves no work.
std::unique_ptr<Attempt> MakeOneShotAttempt(const AttemptSpec& spec, std::string result);

// The input of this peer for a one-shot op, of OneShotPayloadBytes(): its contributing sources,
// reduced in their order, or its parts at their places. Zeros where this peer has nothing.
std::string OneShotPayload(const AttemptSpec& spec);

}  // namespace longhaul::peerd
