// What the attempts that move segments have in common: where results go, what is kept of the
// inputs, what has come and gone, and when an attempt is complete.
//
// Memory. Finished segments are received into `result_`, or made there:
//
//   one member, out of place   its target
//   one member, in place       its target, which is the source: the original of a segment is kept
//                              in scratch before a sum is written over it
//   several members            a target that is no source, or scratch
//
// With several members, a finished segment is copied at once, while it is in cache, to the other
// targets that are no sources. Those that are sources get theirs after Commit(): to keep the
// originals of each would take as much scratch again.
//
// Where the original of a segment goes to scratch, and that is not in cache, what is to be added to
// it is received elsewhere: to one of a few landings, which are in cache as they are used all the
// time. So scratch is only written to, past the caches.
//
// Late references. Sent() does not say that a segment has arrived: it may have to be sent again
// from the same place. When a finished segment arrives, though, whatever this position added to it
// has been received by those who needed it: without it nobody could have finished. Only then the
// memory that it was sent from is written to, even if Sent() is still to come: what the kernel
// refers to then are at most packets that were delivered, and a repetition of them is dropped by
// the receiver's TCP without a look at its bytes.
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
  // What has happened to a grain on its way between this position and another one.
  enum Mark : uint16_t {
    kReducePlaced = 1 << 0,
    kReduceReceived = 1 << 1,
    kReduceHanded = 1 << 2,  // to the sink
    kReduceSent = 1 << 3,
    kGatherPlaced = 1 << 4,
    kGatherReceived = 1 << 5,
    kGatherHanded = 1 << 6,
    kGatherSent = 1 << 7,
    // Of the grain here:
    kKept = 1 << 8,         // the original is in the scratch buffer
    kOverwritten = 1 << 9,  // and no longer (certainly) in its place
    kSumHanded = 1 << 10,   // a partial sum is being sent from its place
  };

  // What lies in the scratch buffer begins at a multiple of 64 bytes.
  static uint64_t Aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

  struct Memory {
    uint8_t* scratch = nullptr;  // of the pool; nullptr: none is needed
    uint8_t* result = nullptr;
    uint8_t* extra = nullptr;  // 64-byte aligned
  };
  // With `extra_bytes` for the attempt's own use. ResourceExhausted: the pool has no room.
  static absl::StatusOr<Memory> BorrowMemory(const AttemptSpec& spec, uint64_t extra_bytes,
                                             ScratchPool* pool);

  SegmentAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool,
                 const Memory& memory);
  ~SegmentAttempt() override;

  // The marks of a grain on its way between here and `other`.
  virtual uint16_t& MarksOf(uint64_t grain, int other) = 0;
  // Why these cannot come from there now; nullptr: they can.
  virtual const char* Objection(int from, const Plan::Grains& grains, Phase phase) = 0;
  // Where the payload of phase reduce belongs.
  virtual uint8_t* PlaceOf(int from, const Plan::Grains& grains) = 0;
  virtual void OnReceived(int from, const Plan::Grains& grains, Phase phase) = 0;
  virtual void OnSent(const Plan::Grains& grains, Phase phase) = 0;
  // As HasWork() and Work(), of one segment, while the attempt is neither stopped nor committed.
  virtual bool MayGoOn() const = 0;
  virtual uint64_t GoOn() = 0;

  // In segments of as many grains as this position puts into one.
  void Hand(int to, Phase phase, const Plan::Grains& grains, const uint8_t* data);
  // Of grains from `first` to `end`, all of one chunk: those of the first segment.
  Plan::Grains NextSegment(uint64_t first, uint64_t end) const {
    return {first, std::min(segment_grains_, end - first)};
  }
  // These grains are finished, where the result goes.
  void Finished(const Plan::Grains& grains);
  void Keep(const Plan::Grains& grains);
  // Their place is about to be written to.
  void Overwrite(const Plan::Grains& grains);
  // If originals go to scratch that is not in cache.
  void MakeLandings();
  // For a segment; nullptr: there is no free one of that length.
  uint8_t* BorrowLanding(const Plan::Piece& piece);
  // The one where that segment is, or nullptr.
  uint8_t* LandingOf(const Plan::Piece& piece) const;
  // It is free for another segment.
  void GiveLanding(const Plan::Piece& piece);
  // In place: the sum of the inputs (of these grains, the originals may be one of them) takes the
  // place of the originals, and those their place in scratch, from which an input may be read.
  // `finished`: it is the result.
  void SumInPlace(const Plan::Grains& grains, const Inputs& inputs, bool finished);

  const AttemptSpec spec_;
  const Inputs inputs_;  // those of its sources that contribute
  const Plan plan_;
  uint8_t* scratch_;
  uint8_t* const result_;
  const bool in_place_;  // originals have to be kept: at their offsets in the scratch buffer

  bool started_ = false;
  std::vector<uint16_t> marks_;  // by grain
  uint64_t results_open_;        // grains that are not finished here
  uint64_t sends_open_ = 0;      // grains whose sends have not returned, begun or not

 private:
  struct Landing {
    uint8_t* data = nullptr;
    std::optional<uint64_t> offset;  // of the segment that has it
  };

  static void MarkAfter(uint64_t grain, uint16_t* marks, uint16_t before, uint16_t mark);
  Plan::Grains GrainsOf(const Segment& segment) const;
  // The number of a send: which grains, to whom, in which phase.
  uint64_t CookieOf(int to, Phase phase, const Plan::Grains& grains) const;
  // Its place has the original again, unless somebody may still read the result there. Returns the
  // bytes that it read and wrote.
  uint64_t Restore(uint64_t grain);
  uint64_t RestoreSome(uint64_t bytes_max);
  uint64_t CopySome(uint64_t bytes_max);
  void MaybeComplete();
  void ReleaseScratch();

  AttemptSink* const sink_;
  ScratchPool* const pool_;
  const uint64_t segment_grains_;  // most that this position puts into one segment
  bool complete_ = false;
  bool stopped_ = false;
  bool committed_ = false;
  uint64_t landing_bytes_ = 0;
  std::vector<Landing> landings_;  // parts of one buffer of the pool, which begins with the first
  std::vector<uint8_t*> early_targets_;  // others than the result's that are no sources
  std::vector<uint8_t*> late_targets_;   // others that are
  uint64_t copied_ = 0;                  // bytes of the result, to late ones
  std::vector<Plan::Grains> restore_;    // stopped: to be looked at
  // By grain: sends that are out and read from its place what is not the original.
  std::vector<uint16_t> reads_out_;
  uint64_t out_ = 0;  // sends that have begun and not returned
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace longhaul::peerd
