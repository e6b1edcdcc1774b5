// Base class of the ring attempt and the mesh attempt: where the result goes, where originals are
// kept, which segments have come and gone, and when an attempt is complete.
//
// Result. Finished segments are received into `result_`, or computed there:
//
//   local members               result_ is
//   one, out of place           its target
//   one, in place               its target, which is also its source. Before a sum overwrites a
//                               segment there, the original goes to scratch
//   several, some out of place  the first target that is out of place
//   several, all in place       scratch
//
// With several local members, each finished segment is copied to the other targets that are out of
// place at once, while it is in the cache. The targets that are in place get the result after
// Commit(). Otherwise the original of each of them would have to be kept, too.
//
// If chunks belong to members, the result is: for phase reduce alone, scratch, from where Work()
// copies chunks to the targets of their owners after Commit(); for phase gather alone, the first
// target.
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
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "peerd/collective/attempt.h"
#include "peerd/collective/local.h"
#include "peerd/collective/plan.h"

namespace longhaul::peerd {

class SegmentAttempt : public Attempt {
 public:
  bool CompleteAtOnce() const final { return false; }
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
    kKept = 1 << 8,         // the original is in the scratch buffer
    kOverwritten = 1 << 9,  // the place of the grain may no longer hold the original
    kSumHanded = 1 << 10,   // a partial sum is being sent from the place of the grain
  };

  // Rounds up to 64 bytes: everything in the scratch buffer begins at a multiple of 64.
  static uint64_t Aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

  struct Memory {
    uint8_t* scratch = nullptr;  // from the pool; nullptr: none is needed
    uint8_t* result = nullptr;   // where the result goes
    uint8_t* extra = nullptr;    // for the attempt's own use, 64-byte aligned
  };
  // Borrows the scratch memory of an attempt, with `extra_bytes` for its own use.
  // ResourceExhausted: the pool has no memory.
  static absl::StatusOr<Memory> BorrowMemory(const AttemptSpec& spec, uint64_t extra_bytes,
                                             ScratchPool* pool);

  SegmentAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool,
                 const Memory& memory);
  ~SegmentAttempt() override;

  // The marks of a grain on its way between this position and `other`.
  virtual uint16_t& MarksOf(uint64_t grain, int other) = 0;
  // Why grains cannot come from position `from` in this phase now; nullptr: they can.
  virtual const char* Objection(int from, const Plan::Grains& grains, Phase phase) = 0;
  // Where the payload of a segment in phase reduce must be written.
  virtual uint8_t* PlaceOf(int from, const Plan::Grains& grains) = 0;
  // A segment has arrived. The marks are set.
  virtual void OnReceived(int from, const Plan::Grains& grains, Phase phase) = 0;
  // Sent() was called for a segment. The marks are set.
  virtual void OnSent(const Plan::Grains& grains, Phase phase) = 0;
  // HasWork() and Work() of an attempt that is neither stopped nor committed. GoOn() works on one
  // segment and returns the bytes that it read and wrote.
  virtual bool MayGoOn() const = 0;
  virtual uint64_t GoOn() = 0;

  // Hands grains to the sink, in segments of at most segment_grains_.
  void Hand(int to, Phase phase, const Plan::Grains& grains, const uint8_t* data);
  // The grains of the first segment, out of the grains from `first` to `end`, which are of one
  // chunk.
  Plan::Grains NextSegment(uint64_t first, uint64_t end) const {
    return {first, std::min(segment_grains_, end - first)};
  }
  // These grains of the result are finished. Copies them to the targets that get them at once.
  void Finished(const Plan::Grains& grains);
  // For a member in place: copies the originals of these grains to scratch, if that was not done
  // yet.
  void Keep(const Plan::Grains& grains);
  // The same, and notes that the place of these grains is about to be overwritten.
  void Overwrite(const Plan::Grains& grains);
  // Borrows the landings, if this attempt uses them.
  void MakeLandings();
  // Takes a landing for a segment. nullptr: none is free, or the segment is too long.
  uint8_t* BorrowLanding(const Plan::Piece& piece);
  // The landing that holds the segment, or nullptr.
  uint8_t* LandingOf(const Plan::Piece& piece) const;
  // Frees the landing of the segment, if there is one.
  void GiveLanding(const Plan::Piece& piece);
  // For a member in place. Moves the originals of these grains to scratch, and writes the sum of
  // the inputs to their place. The inputs may include the originals, and one that lies in scratch
  // where the originals go. `finished`: the sum is the result, so it is divided for avg.
  void SumInPlace(const Plan::Grains& grains, const Inputs& inputs, bool finished);

  const AttemptSpec spec_;
  const Inputs inputs_;  // the local sources that contribute
  const Plan plan_;
  uint8_t* scratch_;
  uint8_t* const result_;
  // One local member, in place: the original of a grain must be kept, at its offset in scratch_.
  const bool in_place_;

  bool started_ = false;
  std::vector<uint16_t> marks_;  // by grain
  uint64_t results_open_;        // grains of the result that are not finished
  uint64_t sends_open_ = 0;      // sends of grains that are not Sent, handed to the sink or not

 private:
  struct Landing {
    uint8_t* data = nullptr;
    std::optional<uint64_t> offset;  // of the segment that it holds; nullopt: free
  };

  // The bytes [begin, end) of the result go to `to` after Commit().
  struct Late {
    uint8_t* to = nullptr;
    uint64_t begin = 0;
    uint64_t end = 0;
  };

  static Plan PlanOf(const AttemptSpec& spec);
  static void MarkAfter(uint64_t grain, uint16_t* marks, uint16_t before, uint16_t mark);
  Plan::Grains GrainsOf(const Segment& segment) const;
  // A number for a send: it encodes the grains, the receiver and the phase.
  uint64_t CookieOf(int to, Phase phase, const Plan::Grains& grains) const;
  // Puts the original of a grain back, unless the grain may still be sent from there. Returns the
  // bytes that it read and wrote.
  uint64_t Restore(uint64_t grain);
  uint64_t RestoreSome(uint64_t bytes_max);
  uint64_t CopySome(uint64_t bytes_max);
  void MaybeComplete();
  void ReleaseScratch();

  AttemptSink* const sink_;
  ScratchPool* const pool_;
  const uint64_t segment_grains_;  // the most grains that this position puts into a segment
  bool complete_ = false;
  bool stopped_ = false;
  bool committed_ = false;
  uint64_t landing_bytes_ = 0;
  std::vector<Landing> landings_;  // parts of one buffer of the pool, which begins with the first
  std::vector<uint8_t*> early_targets_;  // targets out of place, other than result_
  std::vector<Late> late_;               // what is copied after Commit()
  uint64_t copied_ = 0;                  // bytes of the result that were copied to late_
  std::vector<Plan::Grains> restore_;    // after Stop(): grains that may have to be restored
  // By grain: sends that are not Sent, and read from its place something else than the original.
  std::vector<uint16_t> reads_out_;
  uint64_t out_ = 0;  // segments that were handed to the sink and are not Sent
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace longhaul::peerd
