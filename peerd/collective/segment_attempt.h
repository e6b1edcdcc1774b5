// Base class of the ring attempt and the mesh attempt: where the result goes, where originals are
// kept, which segments have come and gone, and when an attempt is complete.
//
// Result. Finished segments are received into a target, or computed there. If a chunk has a single
// receiver, it is the target of that member. Otherwise it is that of the *lead*, a local member:
// the first one that is out of place, or the first one of all.
//
// If the lead is in place, its target is also its source. Before a sum overwrites a segment there,
// the original goes to scratch.
//
// The parts of a reduce-scatter are held in scratch, and copied to their targets after Commit(). So
// the targets stay as they are until the op ends well.
//
// The targets of other local members that are out of place get a copy of each finished segment at
// once, while it is in the cache. Those that are in place get the result after Commit(). Otherwise
// the original of each of them would have to be kept, too.
//
// Slots. Scratch memory may have a slot for each grain of the whole. First, sums that are not
// finished are built there. Later the original goes to the same slot: a finished grain replaces the
// original only when nobody needs what this position had put into the sum. If sums of halves are
// float32, all slots are twice as wide.
//
// If the op encodes, a grain's slot holds what is sent of it: first the own input or the partial
// sum, then the finished segment. Each is encoded there (coder.h). Nothing is received into targets
// or computed there. Finished segments are decoded into the targets of all members: in place after
// Commit(), otherwise at once.
//
// Landings. They are used for a large tensor of one local member in place. When a sum replaces an
// original, the original is written to scratch. The data of others could be received into the same
// part of scratch. But then that part would be written, read and written again. So the data is
// received into one of a few small buffers, the landings, which stay in the cache because they are
// used all the time. Then scratch is only written to, past the caches. If no landing is free, the
// data is received into scratch.
//
// When memory may be overwritten. Sent() does not say that a segment has arrived: the sink may have
// to send it again from the same place. But when a finished segment arrives, all peers that needed
// this position's part of it have received that part; otherwise nobody could have finished the
// segment. Only then is the memory that the part was sent from overwritten, even if Sent() is still
// to come. What the kernel still refers to then are packets that were delivered. If the kernel
// repeats one of them, the TCP of the receiver drops it without looking at its bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "peerd/collective/attempt.h"
#include "peerd/collective/coder.h"
#include "peerd/collective/landings.h"
#include "peerd/collective/layout.h"
#include "peerd/collective/local.h"
#include "peerd/collective/plan.h"

namespace longhaul::peerd {

// What follows from the spec alone.
struct Outline {
  explicit Outline(const AttemptSpec& spec);

  Layout layout;
  Inputs inputs;
  // The local member whose targets are the result of chunks that everybody gets. If there are none:
  // the receiver of the first chunk that comes to a local member, or -1.
  int lead = -1;
  // The op reduces, and the lead is in place. So originals are overwritten.
  bool in_place = false;
};

class SegmentAttempt : public Attempt {
 public:
  bool CompleteAtOnce() const final { return at_once_; }
  absl::StatusOr<uint8_t*> Place(int from, const Segment& segment) final;
  void Abandoned(int from, const Segment& segment) final;
  void Received(int from, const Segment& segment) final;
  void Sent(uint64_t cookie) final;
  void Stop() final;
  void Commit() final;
  bool HasWork() const final;
  uint64_t Work(uint64_t bytes_max) final;
  bool Idle() const final { return out_ == 0 && !HasWork(); }
  uint64_t bytes_sent() const final { return bytes_sent_; }
  uint64_t bytes_received() const final { return bytes_received_; }
  uint64_t blocks_not_finite(size_t member) const final { return blocks_not_finite_[member]; }

 protected:
  // What has happened to a grain. A mark up to kGatherSent is about the way between this position
  // and another one.
  enum Mark : uint16_t {
    kReducePlaced = 1 << 0,
    kReduceReceived = 1 << 1,
    kReduceHanded = 1 << 2,  // handed to the sink
    kReduceSent = 1 << 3,
    kGatherPlaced = 1 << 4,
    kGatherReceived = 1 << 5,
    kGatherHanded = 1 << 6,
    kGatherSent = 1 << 7,
    // Marks of the grain itself:
    kKept = 1 << 8,         // the original is in the slot
    kOverwritten = 1 << 9,  // the place of the grain may no longer hold the original
    kSumHanded = 1 << 10,   // a partial sum is being sent from the place of the grain
    kEncoded = 1 << 11,     // own input was encoded into the slot
    kErrorKnown = 1 << 12,  // what was lost by encoding is in PendingErrorOf()
  };

  // Rounds up to 64 bytes: everything in the scratch buffer begins at a multiple of 64.
  static uint64_t Aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

  // How the bytes of a grain travel: as the tensor has them, as float32 in place of halves, or
  // encoded.
  enum class Form : uint8_t { kPlain, kWide, kEncoded };

  // The scratch memory of an attempt.
  struct Memory {
    // 0: no slots are needed; 1; or 2: halves may be float32 there. An op that encodes has slots of
    // another kind.
    uint64_t slot_width = 0;
    uint64_t extra_bytes = 0;    // for the attempt's own use
    uint8_t* scratch = nullptr;  // from the pool: the slots, then the rest; nullptr: none is needed
    uint8_t* extra = nullptr;    // 64-byte aligned
    uint64_t error_bytes = 0;
    float* errors = nullptr;  // 64-byte aligned; nullptr: nobody keeps errors
    uint8_t* held = nullptr;  // 64-byte aligned; nullptr: results are not held
    // If results are held: by chunk, where its result begins in `held`.
    std::vector<uint64_t> held_begin;
    // If the op encodes: by chunk, where its slots begin in `scratch`, and its errors in `errors`.
    std::vector<uint64_t> slot_begin;
    std::vector<uint64_t> error_begin;
  };
  // Borrows the memory of which the sizes are set. ResourceExhausted: the pool has no memory.
  static absl::Status Borrow(const AttemptSpec& spec, const Outline& outline, Memory* memory,
                             ScratchPool* pool);

  SegmentAttempt(const AttemptSpec& spec, Outline outline, AttemptSink* sink, ScratchPool* pool,
                 const Memory& memory);
  ~SegmentAttempt() override;
  // The last step of making an attempt: the numbers of open sends and results are set.
  void OnMade() { at_once_ = complete_ = results_open_ == 0 && sends_open_ == 0; }

  // The marks of a grain on its way between this position and `other`.
  virtual uint16_t& MarksOf(uint64_t grain, int other) = 0;
  // Whether segments of a chunk in phase reduce are float32 if this position sends them.
  virtual bool IsWide(const Layout::Chunk& chunk, int position) const = 0;
  // Why grains cannot come from position `from` in this phase now; nullptr: they can.
  virtual const char* Objection(int from, const Plan::Grains& grains, Phase phase) = 0;
  // Where the payload of a segment in phase reduce must be written.
  virtual uint8_t* PlaceOf(int from, const Plan::Grains& grains) = 0;
  // A segment has arrived. The marks are set.
  virtual void OnReceived(int from, const Plan::Grains& grains, Phase phase) = 0;
  // Sent() was called for a segment. The marks are set.
  virtual void OnSent(const Plan::Grains& grains, Phase phase) = 0;
  // HasWork() and Work() of an attempt that is neither stopped nor committed. GoOn() works on one
  // segment and returns the bytes that it read and wrote. The base class copies own chunks of an op
  // without phase reduce to local targets; attempts that do more override both.
  virtual bool MayGoOn() const { return started_ && !uncopied_.empty(); }
  virtual uint64_t GoOn();

  const Layout::Chunk& ChunkOf(const Plan::Grains& grains) const {
    return outline_.layout.chunks()[plan_.ChunkOf(grains.first)];
  }
  // Bytes of the chunk before these grains.
  uint64_t SkipOf(const Layout::Chunk& chunk, const Plan::Grains& grains) const {
    return plan_.RangeOf(grains).offset - chunk.offset;
  }
  bool IsForEverybody(const Layout::Chunk& chunk) const { return chunk.to_position < 0; }
  // Whether a local member gets the result.
  bool IsForHere(const Layout::Chunk& chunk) const {
    return IsForEverybody(chunk) || chunk.to_position == spec_.position;
  }
  // Where the result of these grains is until the op is committed: in the target of a local member,
  // or in held_.
  uint8_t* ResultOf(const Plan::Grains& grains) const;
  // Where these grains are in their slots: one behind the other, if they are of one chunk.
  uint8_t* SlotOf(const Plan::Grains& grains) const;
  // Where finished grains are sent from and received.
  uint8_t* FinishedOf(const Plan::Grains& grains) const {
    return coder_ ? SlotOf(grains) : ResultOf(grains);
  }
  // Where a sum of these grains is built before it is finished: in the slots, if there are any.
  uint8_t* StageOf(const Plan::Grains& grains) const {
    return slot_width_ > 0 ? SlotOf(grains) : ResultOf(grains);
  }
  // These grains in the source of the local member that owns their chunk, or that is the only
  // input.
  const uint8_t* SourceOf(const Plan::Grains& grains) const;
  // Whether own input of a chunk must be computed before it is sent in phase reduce.
  bool MustPrepare(const Layout::Chunk& chunk) const {
    return inputs_.size() != 1 || inputs_[0].weight != 1 || coder_ || IsWide(chunk, spec_.position);
  }
  // The form of a chunk's segments in this phase if position `from` sends them.
  Form FormOf(const Layout::Chunk& chunk, Phase phase, int from) const {
    if (coder_) return Form::kEncoded;
    return phase == Phase::kReduce && IsWide(chunk, from) ? Form::kWide : Form::kPlain;
  }
  // The bytes of some bytes of a tensor in this form.
  uint64_t BytesIn(Form form, DType dtype, uint64_t bytes) const {
    if (form == Form::kEncoded) return coder_->BytesOf(dtype, bytes);
    return form == Form::kWide ? 2 * bytes : bytes;
  }
  uint64_t WireBytes(const Plan::Grains& grains, Form form) const {
    return BytesIn(form, ChunkOf(grains).dtype, plan_.RangeOf(grains).bytes);
  }
  Stretch StretchOf(const Plan::Grains& grains) const {
    const Layout::Chunk& chunk = ChunkOf(grains);
    return {&chunk, SkipOf(chunk, grains), plan_.RangeOf(grains).bytes};
  }
  // Makes sure that own input of these grains is encoded in their slots.
  void EncodeInput(const Plan::Grains& grains);
  // Adds up encoded inputs. The caller has set all but the error.
  void AddEncoded(const Plan::Grains& grains, CodedSum sum);

  // Hands grains to the sink, in segments as NextSegment() cuts them.
  void Hand(int to, Phase phase, const Plan::Grains& grains, const uint8_t* data);
  // The grains of the first segment, out of the grains from `first` to `end`, which are of one
  // chunk.
  Plan::Grains NextSegment(uint64_t first, uint64_t end, Form form) const;
  // Takes these grains, with which the first range begins, from a list.
  static void Take(const Plan::Grains& grains, std::deque<Plan::Grains>* list);
  // These grains of the result are finished. Copies them to the targets that get them at once.
  void Finished(const Plan::Grains& grains);
  // If the lead is in place: copies the originals of these grains to their slots, if that was not
  // done yet.
  void Keep(const Plan::Grains& grains);
  // The same, and notes that the place of these grains is about to be overwritten.
  void Overwrite(const Plan::Grains& grains);
  // Borrows the landings, if this attempt uses them.
  void MakeLandings();
  // Computes bytes [done, done + bytes) of some grains into `out`.
  using SumFunction = std::function<void(uint64_t done, uint64_t bytes, uint8_t* out)>;
  // If the lead is in place: moves the originals of these grains to their slots, and writes the sum
  // to their place. What is summed up may include the originals, and what lies in the slots.
  void SumInPlace(const Plan::Grains& grains, const SumFunction& sum);

  const AttemptSpec spec_;
  const Outline outline_;
  const Inputs& inputs_;  // the local sources that contribute
  const Plan plan_;
  std::optional<Coder> coder_;  // set if the op encodes
  uint8_t* scratch_;
  const uint64_t slot_width_;
  const bool in_place_;  // originals are overwritten, and kept in their slots
  const double divisor_;

  bool started_ = false;
  std::vector<uint16_t> marks_;  // by grain
  uint64_t results_open_ = 0;    // grains of the result that are not finished
  uint64_t sends_open_ = 0;      // sends of grains that are not Sent, handed over or not
  Landings landings_;
  std::deque<Plan::Grains> uncopied_;  // own chunks that are not copied to the local targets yet

 private:
  static void MarkAfter(uint64_t grain, uint16_t* marks, uint16_t before, uint16_t mark);
  // The grains that a segment from position `from` has; nullopt: they are not cut like that.
  std::optional<Plan::Grains> Find(int from, const Segment& segment) const;
  Plan::Grains GrainsOf(int from, const Segment& segment) const;
  // A number for a send: it encodes the grains, the receiver and the phase.
  uint64_t CookieOf(int to, Phase phase, const Plan::Grains& grains) const;
  // Puts the original of a grain back, unless the grain may still be sent from there. Returns the
  // bytes that it read and wrote.
  uint64_t Restore(uint64_t grain);
  uint64_t RestoreSome(uint64_t bytes_max);
  uint64_t CopySome(uint64_t bytes_max);
  // These grains in the target of a local member.
  uint8_t* TargetOf(int member, const Plan::Grains& grains) const;
  // Copies committed grains that are held to their target. Returns the bytes read and written.
  uint64_t CopyHeld(const Plan::Grains& grains);
  // Where the errors of these grains are until they are committed; nullptr: nobody keeps them.
  float* PendingErrorOf(const Plan::Grains& grains) const;
  void MarkErrorsKnown(const Plan::Grains& grains);
  // Decodes finished grains into the targets of these members. Returns the bytes written.
  uint64_t DecodeTo(const std::vector<int>& members, const Plan::Grains& grains);
  // Writes the errors of committed grains to the tensors of the members that keep them. Returns the
  // bytes written.
  uint64_t CommitErrors(const Plan::Grains& grains);
  void MaybeComplete();
  void ReleaseScratch();

  AttemptSink* const sink_;
  ScratchPool* const pool_;
  const uint64_t segment_grains_;  // the most grains that this position puts into a segment
  bool at_once_ = false;
  bool complete_ = false;
  bool stopped_ = false;
  bool committed_ = false;
  // Local members that get what everybody gets, at once and after Commit(). Without the lead,
  // unless the op encodes.
  std::vector<int> early_;
  std::vector<int> late_;
  // If the op encodes: by chunk, where its slots begin in scratch_, and its errors in
  // pending_errors_.
  const std::vector<uint64_t> slot_begin_;
  const std::vector<uint64_t> error_begin_;
  float* pending_errors_ = nullptr;          // nullptr: nobody keeps errors
  uint8_t* const held_;                      // nullptr: results are not held
  const std::vector<uint64_t> held_begin_;   // by chunk: where its result begins in held_
  std::vector<uint64_t> blocks_not_finite_;  // by local member
  uint64_t copied_ = 0;                      // grains of which the work after Commit() is done
  std::vector<Plan::Grains> restore_;        // after Stop(): grains that may have to be restored
  // By grain: sends that are not Sent, and read from its place something else than the original.
  std::vector<uint16_t> reads_out_;
  uint64_t out_ = 0;  // segments that were handed to the sink and are not Sent
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace longhaul::peerd
