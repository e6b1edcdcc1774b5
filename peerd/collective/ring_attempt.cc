#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "peerd/collective/kernels.h"
#include "peerd/collective/segment_attempt.h"
#include "peerd/collective/segmentless_attempt.h"

namespace longhaul::peerd {
namespace {

// A chunk starts at the position after that of its owner, where it is finished. In an all-reduce
// chunk c starts at position c. The hop of a chunk at this position is its distance from its start.
// What this position does with a chunk, as far as the op has the phase:
//
//   phase reduce, hop 0           sends its own input
//   phase reduce, hop 1..size-2   adds its input to the sum that arrived, and passes the sum on
//   phase reduce, hop size-1      adds its input: the sum is finished, and phase gather begins
//   phase gather, hop size-1      sends the finished segment
//   phase gather, hop 0..size-3   receives the finished segment, and passes it on
//   phase gather, hop size-2      receives the finished segment, as the last position
//
// Without phase reduce, the owner sends its source at hop size-1, and Work() copies the source to
// the local targets.
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
        fresh_hop_(spec.reduces() ? 0 : spec.size - 1) {
    for (int chunk = 0; chunk < plan_.chunks(); ++chunk) {
      const Plan::Grains grains = plan_.GrainsOf(chunk);
      if (SendsReduce(Hop(chunk))) sends_open_ += grains.count;
      if (SendsGather(Hop(chunk))) sends_open_ += grains.count;
      if (Hop(chunk) == fresh_hop_ && grains.count > 0) fresh_.push_back(grains);
    }
    if (!spec.reduces()) uncopied_ = fresh_;
    MakeLandings();
    if (spec.reduces() && inputs_.empty() && !fresh_.empty()) {
      const uint64_t longest = plan_.PieceOf(NextFresh()).bytes;
      identity_.resize(longest);
      FillIdentity(identity_.data(), longest / SizeOf(spec_.desc.dtype), spec_.desc.dtype,
                   spec_.desc.reduce);
    }
  }

  int Hop(int chunk) const {
    const int start = spec_.cuts.empty() ? chunk : (spec_.cuts[chunk].position + 1) % spec_.size;
    return (spec_.position - start + spec_.size) % spec_.size;
  }
  int HopOf(const Plan::Grains& grains) const { return Hop(plan_.ChunkOf(grains.first)); }
  bool IsLast(int hop) const { return hop == spec_.size - 1; }
  // Whether this position adds something to the sum, or only passes it on.
  bool AddsTo(int hop) const { return IsLast(hop) || !inputs_.empty(); }
  bool SendsReduce(int hop) const { return spec_.reduces() && !IsLast(hop); }
  bool SendsGather(int hop) const { return spec_.gathers() && hop != spec_.size - 2; }

  uint16_t& MarksOf(uint64_t grain, int /*other*/) override { return marks_[grain]; }

  const char* Objection(int from, const Plan::Grains& grains, Phase phase) override {
    if (from != previous_) return "not from the previous position";
    if (!(phase == Phase::kReduce ? spec_.reduces() : spec_.gathers())) {
      return "the op has no such phase";
    }
    const int hop = HopOf(grains);
    if (phase == Phase::kReduce) return hop == 0 ? "the chunk starts here" : nullptr;
    if (IsLast(hop)) return "the chunk is finished here";
    for (uint64_t grain = grains.first; spec_.reduces() && grain < grains.end(); ++grain) {
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
    if (phase != FreshPhase() || HopOf(grains) != fresh_hop_) return;
    // Keep the originals now: they were just read to be sent, so they are in the cache.
    Keep(grains);
    fresh_out_bytes_ -= plan_.PieceOf(grains).bytes;
    HandFresh();
  }

  Phase FreshPhase() const { return spec_.reduces() ? Phase::kReduce : Phase::kGather; }
  // The next segment of fresh_, which is not empty.
  Plan::Grains NextFresh() const { return NextSegment(fresh_.front().first, fresh_.front().end()); }
  // Takes these grains, with which the first range begins, from a list.
  static void Take(const Plan::Grains& grains, std::deque<Plan::Grains>* list) {
    Plan::Grains& front = list->front();
    front = {grains.end(), front.count - grains.count};
    if (front.count == 0) list->pop_front();
  }

  // Hands over own input, as much as the window allows. The inputs of several members must be added
  // up first; Work() does that.
  void HandFresh() {
    while (!MustAddUp() && MayHandFresh()) HandOneFresh();
  }
  bool MustAddUp() const { return spec_.reduces() && inputs_.size() > 1; }
  bool MayHandFresh() const {
    if (!started_ || !credit_ || fresh_.empty()) return false;
    const uint64_t bytes = plan_.PieceOf(NextFresh()).bytes;
    return fresh_out_bytes_ == 0 || fresh_out_bytes_ + bytes <= spec_.window_bytes;
  }
  uint64_t HandOneFresh() {
    const Plan::Grains grains = NextFresh();
    const Plan::Piece piece = plan_.PieceOf(grains);
    fresh_out_bytes_ += piece.bytes;
    if (MustAddUp()) {
      ReduceInputs(spec_.desc, inputs_, piece.offset, piece.bytes, partial_ + piece.offset);
    }
    Take(grains, &fresh_);
    Pass(FreshPhase(), grains);
    return piece.bytes * (inputs_.size() + 1);
  }

  // The input of a local member that owns the chunk of these grains.
  const uint8_t* OwnChunk(const Plan::Grains& grains) const {
    const int chunk = plan_.ChunkOf(grains.first);
    const uint64_t skip = plan_.PieceOf(grains).offset - plan_.Chunk(chunk).offset;
    return spec_.sources[spec_.cuts[chunk].local] + skip;
  }
  uint64_t CopyOwnChunk() {
    const Plan::Grains grains = NextSegment(uncopied_.front().first, uncopied_.front().end());
    const Plan::Piece piece = plan_.PieceOf(grains);
    const uint8_t* const own = OwnChunk(grains);
    if (own != result_ + piece.offset) std::memcpy(result_ + piece.offset, own, piece.bytes);
    Take(grains, &uncopied_);
    Finished(grains);
    return 2 * piece.bytes;
  }

  bool MayGoOn() const override {
    return (started_ && !uncopied_.empty()) || (MustAddUp() && MayHandFresh());
  }
  uint64_t GoOn() override { return uncopied_.empty() ? HandOneFresh() : CopyOwnChunk(); }

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
    } else if (!spec_.reduces() && IsLast(HopOf(grains))) {
      data = OwnChunk(grains);
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
  // The hop at which this position sends its own input without a segment of others.
  const int fresh_hop_;
  std::deque<Plan::Grains> fresh_;     // own input that is not handed over yet
  std::deque<Plan::Grains> uncopied_;  // own chunks that are not copied to the local targets yet
  uint64_t fresh_out_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempt>> MakeRingAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool) {
  CheckSpec(spec);
  if (spec.size == 1 || spec.bytes() == 0) return MakeLocalAttempt(spec);
  return RingAttempt::Make(spec, sink, pool);
}

}  // namespace longhaul::peerd
