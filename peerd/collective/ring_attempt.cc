#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/collective/attempt.h"
#include "peerd/collective/instant_attempt.h"
#include "peerd/collective/kernels.h"
#include "peerd/collective/local.h"
#include "peerd/collective/plan.h"

namespace longhaul::peerd {
namespace {

// What has happened to a segment here.
enum Mark : uint16_t {
  kReducePlaced = 1 << 0,
  kReduceReceived = 1 << 1,
  kReduceHanded = 1 << 2,  // to the sink
  kReduceSent = 1 << 3,
  kGatherPlaced = 1 << 4,
  kGatherReceived = 1 << 5,
  kGatherHanded = 1 << 6,
  kGatherSent = 1 << 7,
  kKept = 1 << 8,         // the original is in the scratch buffer
  kOverwritten = 1 << 9,  // and no longer (certainly) in its place
};

// Where a chunk's journey has got to when it passes this position. Chunk c starts at position c:
//
//   hop 0          sends its own input                        (reduce)
//   hop 1..size-2  adds its input to what came, passes it on  (reduce)
//   hop size-1     adds its input: finished; sends it on      (gather)
//   hop 0..size-3  receives the finished segment, passes it on
//   hop size-2     receives it, last of all
//
// Memory. Partial sums are received into `partial_` and added to there; finished segments are
// received into `result_`, or made there.
//
//                                    partial_                 result_
//   one member, out of place         its target               its target
//   one member, in place             scratch                  its target, which is the source
//   several members                  a target that is no      the same as partial_;
//                                    source, or scratch       Commit() copies it to the others
//
// In place, the original of a segment is kept in its place in scratch, whose partial sum has gone
// by then, before the finished segment is received over it.
//
// Late references. Sent() does not say that a segment has arrived: a partial sum may have to be
// sent again from the same place. When a finished segment arrives, though, our own partial sum of
// it has been received by the next position: without it nobody could have finished. Only then its
// memory is written to, even if Sent() is still to come: what the kernel refers to then are at most
// packets that were delivered, and a repetition of them is dropped by the receiver's TCP without a
// look at its bytes.
class RingAttempt final : public Attempt {
 public:
  RingAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool, uint8_t* scratch,
              uint8_t* partial, uint8_t* result)
      : spec_(spec),
        inputs_(InputsOf(spec)),
        sink_(sink),
        pool_(pool),
        plan_(spec.desc.bytes(), spec.size, spec.segment_bytes),
        next_((spec.position + 1) % spec.size),
        previous_((spec.position + spec.size - 1) % spec.size),
        scratch_(scratch),
        partial_(partial),
        result_(result),
        in_place_(spec.sources.size() == 1 && result == spec.sources[0]),
        marks_(plan_.segments()),
        fresh_(plan_.FirstSegment(spec.position)),
        fresh_end_(plan_.FirstSegment(spec.position + 1)),
        results_open_(plan_.segments()) {
    for (int chunk = 0; chunk < spec_.size; ++chunk) {
      const uint64_t segments = plan_.FirstSegment(chunk + 1) - plan_.FirstSegment(chunk);
      if (SendsReduce(Hop(chunk))) sends_open_ += segments;
      if (SendsGather(Hop(chunk))) sends_open_ += segments;
    }
    if (inputs_.empty()) {
      uint64_t longest = 0;
      for (uint64_t i = fresh_; i < fresh_end_; ++i) {
        longest = std::max<uint64_t>(longest, plan_.Segment(i).bytes);
      }
      identity_.resize(longest);
      FillIdentity(identity_.data(), longest / SizeOf(spec_.desc.dtype), spec_.desc.dtype,
                   spec_.desc.reduce);
    }
  }
  ~RingAttempt() override {
    LH_CHECK(Idle()) << out_ << " segments are out";
    ReleaseScratch();
  }

  void Start() override {
    LH_CHECK(!started_);
    started_ = true;
    HandFresh();
  }

  bool CompleteAtOnce() const override { return false; }

  void Credit(int position) override {
    if (position != next_ || credit_) return;
    credit_ = true;
    for (const auto& [phase, index] : std::exchange(waiting_, {})) Hand(phase, index);
    HandFresh();
  }

  absl::StatusOr<uint8_t*> Place(int from, const Segment& segment) override {
    LH_CHECK(started_ && !stopped_);
    const auto refuse = [&](const char* why) {
      return absl::InvalidArgumentError(
          absl::StrCat("segment refused: ", segment.phase == Phase::kReduce ? "reduce" : "gather",
                       " at byte ", segment.offset, " of ", segment.bytes, " bytes from position ",
                       from, " to ", spec_.position, " of ", spec_.size, ": ", why));
    };
    if (from != previous_) return refuse("not from the previous position");
    const auto found = plan_.Find({segment.offset, segment.bytes});
    if (!found) return refuse("no segment of the plan");
    const uint64_t index = *found;
    const int hop = Hop(plan_.ChunkOf(index));
    uint16_t& marks = marks_[index];
    if (segment.phase == Phase::kReduce) {
      if (hop == 0) return refuse("the chunk starts here");
      if (marks & kReducePlaced) return refuse("it came before");
      marks |= kReducePlaced;
      return partial_ + segment.offset;
    }
    if (segment.phase != Phase::kGather) return refuse("no such phase");
    if (IsLast(hop)) return refuse("the chunk is finished here");
    if (marks & kGatherPlaced) return refuse("it came before");
    if (!(marks & kReduceHanded)) return refuse("finished before this position added to it");
    if (in_place_) {
      Keep(index);
      marks |= kOverwritten;
    }
    marks |= kGatherPlaced;
    return result_ + segment.offset;
  }

  void Abandoned(int from, const Segment& segment) override {
    const auto found = plan_.Find({segment.offset, segment.bytes});
    LH_CHECK(!stopped_ && from == previous_ && found.has_value());
    const bool reduce = segment.phase == Phase::kReduce;
    const uint16_t placed = reduce ? kReducePlaced : kGatherPlaced;
    LH_CHECK((marks_[*found] & placed) &&
             !(marks_[*found] & (reduce ? kReduceReceived : kGatherReceived)))
        << "segment " << *found << " marks " << marks_[*found];
    marks_[*found] &= static_cast<uint16_t>(~placed);
  }

  void Received(int from, const Segment& segment) override {
    const auto found = plan_.Find({segment.offset, segment.bytes});
    LH_CHECK(!stopped_ && from == previous_ && found.has_value());
    bytes_received_ += segment.bytes;
    if (segment.phase == Phase::kReduce) {
      Mark1(*found, kReducePlaced, kReduceReceived);
      PartialReceived(*found);
    } else {
      Mark1(*found, kGatherPlaced, kGatherReceived);
      ResultReady(*found);
    }
  }

  void Sent(uint64_t cookie) override {
    const uint64_t index = cookie / 2;
    const Phase phase = cookie % 2 == 0 ? Phase::kReduce : Phase::kGather;
    LH_CHECK(index < marks_.size()) << "cookie " << cookie;
    if (phase == Phase::kReduce) {
      Mark1(index, kReduceHanded, kReduceSent);
    } else {
      Mark1(index, kGatherHanded, kGatherSent);
    }
    --out_;
    --sends_open_;
    if (stopped_) {
      if (phase == Phase::kGather) Restore(index);
      if (Idle()) ReleaseScratch();
      return;
    }
    if (phase == Phase::kReduce) {
      if (Hop(plan_.ChunkOf(index)) == 0) {
        // Now, while it is in cache: it was read just before, to be sent. (Partial sums of others
        // are in the way until the next position has them for certain.)
        if (in_place_) Keep(index);
        fresh_out_bytes_ -= plan_.Segment(index).bytes;
        HandFresh();
      }
    }
    MaybeComplete();
  }

  void Stop() override {
    LH_CHECK(!committed_);
    if (std::exchange(stopped_, true)) return;
    waiting_.clear();
    for (uint64_t index = 0; index < marks_.size(); ++index) {
      const bool out = (marks_[index] & kGatherHanded) && !(marks_[index] & kGatherSent);
      if (!out) Restore(index);
    }
    if (Idle()) ReleaseScratch();
  }

  void Commit() override {
    LH_CHECK(complete_ && !stopped_ && !committed_);
    committed_ = true;
    // With several copies to make, the result is read once.
    constexpr uint64_t kBlockBytes = 64 << 10;
    const uint64_t bytes = spec_.desc.bytes();
    for (uint64_t offset = 0; offset < bytes && spec_.targets.size() > 1; offset += kBlockBytes) {
      const uint64_t n = std::min(kBlockBytes, bytes - offset);
      for (uint8_t* target : spec_.targets) {
        if (target != result_) std::memcpy(target + offset, result_ + offset, n);
      }
    }
    ReleaseScratch();
  }

  bool Idle() const override { return out_ == 0; }
  uint64_t bytes_sent() const override { return bytes_sent_; }
  uint64_t bytes_received() const override { return bytes_received_; }

 private:
  int Hop(int chunk) const { return (spec_.position - chunk + spec_.size) % spec_.size; }
  bool IsLast(int hop) const { return hop == spec_.size - 1; }
  bool SendsReduce(int hop) const { return !IsLast(hop); }
  bool SendsGather(int hop) const { return hop != spec_.size - 2; }

  // `mark` follows `before`, once.
  void Mark1(uint64_t index, uint16_t before, uint16_t mark) {
    LH_CHECK((marks_[index] & before) && !(marks_[index] & mark))
        << "segment " << index << " marks " << marks_[index] << " mark " << mark;
    marks_[index] |= mark;
  }

  // Own input, as much as the window allows.
  void HandFresh() {
    if (!started_ || !credit_ || stopped_) return;
    while (fresh_ < fresh_end_) {
      const Plan::Piece piece = plan_.Segment(fresh_);
      if (fresh_out_bytes_ > 0 && fresh_out_bytes_ + piece.bytes > spec_.window_bytes) return;
      fresh_out_bytes_ += piece.bytes;
      if (inputs_.size() > 1) {
        ReduceInputs(spec_.desc, inputs_, piece.offset, piece.bytes, partial_ + piece.offset);
      }
      Hand(Phase::kReduce, fresh_++);
    }
  }

  void PartialReceived(uint64_t index) {
    const Plan::Piece piece = plan_.Segment(index);
    const bool last = IsLast(Hop(plan_.ChunkOf(index)));
    if (last && in_place_) {
      FinishInPlace(index, piece);
    } else {
      AddInputs(spec_.desc, inputs_, piece.offset, piece.bytes, partial_ + piece.offset);
      if (last) DivideSums(spec_, piece.bytes, result_ + piece.offset);
    }
    if (last) {
      ResultReady(index);
    } else {
      Queue(Phase::kReduce, index);
    }
  }

  // The finished segment takes the place of the original, and the original that of the partial sum.
  void FinishInPlace(uint64_t index, const Plan::Piece& piece) {
    alignas(64) uint8_t block[8 << 10];
    for (uint64_t done = 0; done < piece.bytes; done += sizeof(block)) {
      const uint64_t n = std::min<uint64_t>(sizeof(block), piece.bytes - done);
      uint8_t* const sum = partial_ + piece.offset + done;
      uint8_t* const own = result_ + piece.offset + done;
      if (inputs_.empty()) {
        std::memcpy(block, sum, n);
      } else {
        Reduce(block, sum, own, n / SizeOf(spec_.desc.dtype), spec_.desc.dtype, spec_.desc.reduce);
      }
      DivideSums(spec_, n, block);
      std::memcpy(sum, own, n);
      std::memcpy(own, block, n);
    }
    marks_[index] |= kKept | kOverwritten;
  }

  void ResultReady(uint64_t index) {
    --results_open_;
    if (SendsGather(Hop(plan_.ChunkOf(index)))) {
      Queue(Phase::kGather, index);
    } else {
      MaybeComplete();
    }
  }

  void Keep(uint64_t index) {
    if (marks_[index] & kKept) return;
    marks_[index] |= kKept;
    const Plan::Piece piece = plan_.Segment(index);
    CopyAside(scratch_ + piece.offset, result_ + piece.offset, piece.bytes);
  }

  void Restore(uint64_t index) {
    if (!(marks_[index] & kOverwritten)) return;
    const Plan::Piece piece = plan_.Segment(index);
    std::memcpy(result_ + piece.offset, scratch_ + piece.offset, piece.bytes);
  }

  void Queue(Phase phase, uint64_t index) {
    if (credit_) {
      Hand(phase, index);
    } else {
      waiting_.emplace_back(phase, index);
    }
  }

  void Hand(Phase phase, uint64_t index) {
    const Plan::Piece piece = plan_.Segment(index);
    const uint8_t* data = result_ + piece.offset;
    if (phase == Phase::kReduce) {
      data = partial_ + piece.offset;
      if (Hop(plan_.ChunkOf(index)) == 0) {
        if (inputs_.size() == 1) data = inputs_[0] + piece.offset;
        if (inputs_.empty()) data = identity_.data();
      }
    }
    marks_[index] |= phase == Phase::kReduce ? kReduceHanded : kGatherHanded;
    ++out_;
    bytes_sent_ += piece.bytes;
    const uint64_t cookie = 2 * index + (phase == Phase::kReduce ? 0 : 1);
    sink_->SendSegment(next_, {phase, piece.offset, static_cast<uint32_t>(piece.bytes)}, data,
                       cookie);
  }

  // Last in whatever calls it: the sink may stop or commit from within Complete().
  void MaybeComplete() {
    if (results_open_ > 0 || sends_open_ > 0 || complete_) return;
    complete_ = true;
    sink_->Complete();
  }

  void ReleaseScratch() {
    if (uint8_t* const scratch = std::exchange(scratch_, nullptr)) pool_->Give(scratch);
  }

  const AttemptSpec spec_;
  const Inputs inputs_;  // those of its sources that count
  // Where a sum begins here and no input of ours counts: as if there had been one that changes
  // nothing.
  std::vector<uint8_t> identity_;
  AttemptSink* const sink_;
  ScratchPool* const pool_;
  const Plan plan_;
  const int next_;
  const int previous_;
  uint8_t* scratch_;
  uint8_t* const partial_;
  uint8_t* const result_;
  const bool in_place_;  // originals have to be kept

  bool started_ = false;
  bool credit_ = false;
  bool complete_ = false;
  bool stopped_ = false;
  bool committed_ = false;
  std::vector<uint16_t> marks_;                      // by segment
  std::vector<std::pair<Phase, uint64_t>> waiting_;  // ready before the credit came
  uint64_t fresh_;                                   // next segment of own input to hand over
  uint64_t fresh_end_;
  uint64_t fresh_out_bytes_ = 0;
  uint64_t results_open_;    // segments that are not finished here
  uint64_t sends_open_ = 0;  // sends that have not returned, begun or not
  uint64_t out_ = 0;         // sends that have begun and not returned
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempt>> MakeRingAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool) {
  CheckSpec(spec);
  const uint64_t bytes = spec.desc.bytes();
  if (spec.size == 1 || bytes == 0) return MakeLocalAttempt(spec);

  // A target that is not an input can be written to at once.
  uint8_t* result = nullptr;
  for (size_t i = 0; i < spec.targets.size() && result == nullptr; ++i) {
    if (spec.targets[i] != spec.sources[i]) result = spec.targets[i];
  }
  if (result != nullptr) {
    return std::make_unique<RingAttempt>(spec, sink, pool, nullptr, result, result);
  }
  auto scratch = pool->Take(bytes);
  if (!scratch.ok()) return scratch.status();
  result = spec.targets.size() == 1 ? spec.targets[0] : *scratch;
  return std::make_unique<RingAttempt>(spec, sink, pool, *scratch, *scratch, result);
}

}  // namespace longhaul::peerd
