#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "peerd/collective/kernels.h"
#include "peerd/collective/segment_attempt.h"
#include "peerd/collective/segmentless_attempt.h"

namespace longhaul::peerd {
namespace {

// The hop of a chunk at this position is its distance from the position where it starts; chunk c
// starts at position c. What this position does with a chunk:
//
//   phase reduce, hop 0           sends its own input
//   phase reduce, hop 1..size-2   adds its input to the sum that arrived, and passes the sum on
//   phase reduce, hop size-1      adds its input: the sum is finished, and phase gather begins
//   phase gather, hop size-1      sends the finished segment
//   phase gather, hop 0..size-3   receives the finished segment, and passes it on
//   phase gather, hop size-2      receives the finished segment, as the last position
//
// Out of place, partial sums are received into `partial_`, and this position's input is added
// there. `partial_` is the scratch buffer if there is one, otherwise the place of the result. In
// place, a partial sum is received into a landing, or into scratch if no landing is free. The new
// sum replaces the original, and the original goes to scratch, while both are in the cache. The sum
// is sent from there, and stays there until the next position certainly has it, because it may have
// to be sent again.
class RingAttempt final : public SegmentAttempt {
 public:
  static absl::StatusOr<std::unique_ptr<Attempt>> Make(const AttemptSpec& spec, AttemptSink* sink,
                                                       ScratchPool* pool) {
    const auto memory = BorrowMemory(spec, 0, pool);
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<Attempt>(new RingAttempt(spec, sink, pool, *memory));
  }

  void Start() override {
    LH_CHECK(!started_);
    started_ = true;
    HandFresh();
  }

  void Credit(int position) override {
    if (position != next_ || credit_) return;
    credit_ = true;
    for (const auto& [phase, grains] : std::exchange(waiting_, {})) Pass(phase, grains);
    HandFresh();
  }

 private:
  RingAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool, const Memory& memory)
      : SegmentAttempt(spec, sink, pool, memory),
        next_((spec.position + 1) % spec.size),
        previous_((spec.position + spec.size - 1) % spec.size),
        partial_(memory.scratch != nullptr ? memory.scratch : memory.result),
        fresh_(plan_.GrainsOf(spec.position).first),
        fresh_end_(plan_.GrainsOf(spec.position).end()) {
    for (int chunk = 0; chunk < spec_.size; ++chunk) {
      if (SendsReduce(Hop(chunk))) sends_open_ += plan_.GrainsOf(chunk).count;
      if (SendsGather(Hop(chunk))) sends_open_ += plan_.GrainsOf(chunk).count;
    }
    MakeLandings();
    if (inputs_.empty() && fresh_ < fresh_end_) {
      const uint64_t longest = plan_.PieceOf(NextSegment(fresh_, fresh_end_)).bytes;
      identity_.resize(longest);
      FillIdentity(identity_.data(), longest / SizeOf(spec_.desc.dtype), spec_.desc.dtype,
                   spec_.desc.reduce);
    }
  }

  int Hop(int chunk) const { return (spec_.position - chunk + spec_.size) % spec_.size; }
  int HopOf(const Plan::Grains& grains) const { return Hop(plan_.ChunkOf(grains.first)); }
  bool IsLast(int hop) const { return hop == spec_.size - 1; }
  // Whether this position adds something to the sum, or only passes it on.
  bool AddsTo(int hop) const { return IsLast(hop) || !inputs_.empty(); }
  bool SendsReduce(int hop) const { return !IsLast(hop); }
  bool SendsGather(int hop) const { return hop != spec_.size - 2; }

  uint16_t& MarksOf(uint64_t grain, int /*other*/) override { return marks_[grain]; }

  const char* Objection(int from, const Plan::Grains& grains, Phase phase) override {
    if (from != previous_) return "not from the previous position";
    const int hop = HopOf(grains);
    if (phase == Phase::kReduce) return hop == 0 ? "the chunk starts here" : nullptr;
    if (IsLast(hop)) return "the chunk is finished here";
    for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
      if (!(marks_[grain] & kReduceHanded)) return "finished before this position added to it";
    }
    return nullptr;
  }

  uint8_t* PlaceOf(int /*from*/, const Plan::Grains& grains) override {
    const Plan::Piece piece = plan_.PieceOf(grains);
    if (in_place_ && AddsTo(HopOf(grains))) {
      if (uint8_t* const landing = BorrowLanding(piece)) return landing;
    }
    return partial_ + piece.offset;
  }

  void OnReceived(int /*from*/, const Plan::Grains& grains, Phase phase) override {
    if (phase == Phase::kGather) return PassResult(grains);
    const Plan::Piece piece = plan_.PieceOf(grains);
    const bool last = IsLast(HopOf(grains));
    if (in_place_ && AddsTo(HopOf(grains))) {
      const uint8_t* const landing = LandingOf(piece);
      Inputs inputs{landing != nullptr ? landing : partial_ + piece.offset};
      for (const uint8_t* input : inputs_) inputs.push_back(input + piece.offset);
      SumInPlace(grains, inputs, last);
      GiveLanding(piece);
    } else {
      AddInputs(spec_.desc, inputs_, piece.offset, piece.bytes, partial_ + piece.offset);
      if (last) DivideSums(spec_, piece.bytes, result_ + piece.offset);
    }
    if (!last) return Pass(Phase::kReduce, grains);
    PassResult(grains);
    Finished(grains);
  }

  void OnSent(const Plan::Grains& grains, Phase phase) override {
    if (phase != Phase::kReduce || HopOf(grains) != 0) return;
    // Keep the originals now: they were just read to be sent, so they are in the cache.
    Keep(grains);
    fresh_out_bytes_ -= plan_.PieceOf(grains).bytes;
    HandFresh();
  }

  // Hands over own input, as much as the window allows. The inputs of several members must be added
  // up first; Work() does that.
  void HandFresh() {
    while (inputs_.size() <= 1 && MayHandFresh()) HandOneFresh();
  }
  bool MayHandFresh() const {
    if (!started_ || !credit_ || fresh_ == fresh_end_) return false;
    const uint64_t bytes = plan_.PieceOf(NextSegment(fresh_, fresh_end_)).bytes;
    return fresh_out_bytes_ == 0 || fresh_out_bytes_ + bytes <= spec_.window_bytes;
  }
  uint64_t HandOneFresh() {
    const Plan::Grains grains = NextSegment(fresh_, fresh_end_);
    const Plan::Piece piece = plan_.PieceOf(grains);
    fresh_out_bytes_ += piece.bytes;
    if (inputs_.size() > 1) {
      ReduceInputs(spec_.desc, inputs_, piece.offset, piece.bytes, partial_ + piece.offset);
    }
    fresh_ = grains.end();
    Pass(Phase::kReduce, grains);
    return piece.bytes * (inputs_.size() + 1);
  }

  bool MayGoOn() const override { return inputs_.size() > 1 && MayHandFresh(); }
  uint64_t GoOn() override { return HandOneFresh(); }

  void PassResult(const Plan::Grains& grains) {
    if (SendsGather(HopOf(grains))) Pass(Phase::kGather, grains);
  }

  // Sends grains to the next position, now or when its credit comes.
  void Pass(Phase phase, const Plan::Grains& grains) {
    if (!credit_) {
      waiting_.emplace_back(phase, grains);
      return;
    }
    const uint64_t offset = plan_.PieceOf(grains).offset;
    const uint8_t* data = result_ + offset;
    if (phase == Phase::kReduce) {
      // In place, the sum is at the place of the result as soon as the original is in scratch.
      if (!(marks_[grains.first] & kOverwritten)) data = partial_ + offset;
      if (HopOf(grains) == 0) {
        if (inputs_.size() == 1) data = inputs_[0] + offset;
        if (inputs_.empty()) data = identity_.data();
      }
    }
    Hand(next_, phase, grains, data);
  }

  // One segment of the identity of the op. A sum that begins here begins with it if no local input
  // contributes.
  std::vector<uint8_t> identity_;
  const int next_;
  const int previous_;
  uint8_t* const partial_;
  bool credit_ = false;
  std::vector<std::pair<Phase, Plan::Grains>> waiting_;  // what was ready before the credit came
  uint64_t fresh_;                                       // next grain of own input to hand over
  const uint64_t fresh_end_;
  uint64_t fresh_out_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempt>> MakeRingAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool) {
  CheckSpec(spec);
  if (spec.size == 1 || spec.desc.bytes() == 0) return MakeLocalAttempt(spec);
  return RingAttempt::Make(spec, sink, pool);
}

}  // namespace longhaul::peerd
