#include <memory>
#include <vector>

#include "base/check.h"
#include "peerd/collective/instant_attempt.h"
#include "peerd/collective/segment_attempt.h"

namespace longhaul::peerd {
namespace {

constexpr uint64_t kAlignment = 64;

// Every position owns the chunk of its number and holds a part of scratch for each other position:
//
//   to the owner of each chunk        its own input of it                       (reduce)
//   a segment of the own chunk, with everybody's input of it here: adds them, finished; sends it
//   to all                                                                      (gather)
//
// The inputs are added when all of them are here, in ring order of positions, the own one at its
// place: the result does not depend on the order in which they came, and is that of a one-shot
// exchange bit by bit.
class MeshAttempt final : public SegmentAttempt {
 public:
  static absl::StatusOr<std::unique_ptr<Attempt>> Make(const AttemptSpec& spec, AttemptSink* sink,
                                                       ScratchPool* pool) {
    const Plan plan(spec.desc.bytes(), spec.size, spec.segment_bytes);
    const uint64_t part = PartBytes(plan, spec.position);
    uint64_t parts = 0;
    for (int i = 0; i < spec.size; ++i) parts += HasPart(spec, i) ? 1 : 0;
    const auto memory = TakeMemory(spec, parts * part, pool);
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<Attempt>(new MeshAttempt(spec, sink, pool, *memory));
  }

  void Start() override {
    LH_CHECK(!started_);
    started_ = true;
    HandFresh();
    if (inputs_missing_.empty() || inputs_missing_.front() > 0) return;
    // No other position counts.
    for (uint64_t index = own_begin_; index < own_end_; ++index) Finish(index);
  }

  void Credit(int position) override {
    if (position == spec_.position || credit_[position]) return;
    credit_[position] = true;
    if (!started_) return;
    for (uint64_t index = own_begin_; index < own_end_; ++index) {
      if (inputs_missing_[index - own_begin_] == 0) HandResult(position, index);
    }
    HandFresh();
  }

 private:
  MeshAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool, const Memory& memory)
      : SegmentAttempt(spec, sink, pool, memory),
        own_begin_(plan_.FirstSegment(spec.position)),
        own_end_(plan_.FirstSegment(spec.position + 1)),
        own_offset_(plan_.Chunk(spec.position).offset),
        own_marks_((own_end_ - own_begin_) * spec.size),
        credit_(spec.size),
        fresh_(spec.size),
        turn_(Next(spec.position)) {
    uint8_t* part = memory.extra;
    uint16_t others = 0;
    for (int i = 0; i < spec_.size; ++i) {
      fresh_[i] = plan_.FirstSegment(i);
      parts_.push_back(HasPart(spec_, i) ? part : nullptr);
      if (parts_.back() != nullptr) part += PartBytes(plan_, spec_.position);
      if (i == spec_.position) continue;
      sends_open_ += own_end_ - own_begin_;
      if (PositionCounts(spec_, spec_.position)) sends_open_ += SegmentsOf(i);
      if (PositionCounts(spec_, i)) ++others;
    }
    inputs_missing_.assign(own_end_ - own_begin_, others);
  }

  static uint64_t PartBytes(const Plan& plan, int chunk) {
    return (plan.Chunk(chunk).bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // Memory for the input of that position to the own chunk. Several members' at this one are
  // reduced there; one member's is where it was posted, or among the originals.
  static bool HasPart(const AttemptSpec& spec, int position) {
    if (position == spec.position) return InputsOf(spec).size() > 1;
    return PositionCounts(spec, position);
  }
  int Next(int position) const { return (position + 1) % spec_.size; }
  bool Owns(uint64_t index) const { return index >= own_begin_ && index < own_end_; }

  uint16_t& MarksOf(uint64_t index, int other) override {
    return Owns(index) ? own_marks_[(index - own_begin_) * spec_.size + other] : marks_[index];
  }

  const char* Objection(int from, uint64_t index, Phase phase) override {
    if (phase == Phase::kReduce) {
      if (!Owns(index)) return "the chunk is not this position's";
      return PositionCounts(spec_, from) ? nullptr : "the sender's input does not count";
    }
    if (plan_.ChunkOf(index) != from) return "the chunk is not the sender's";
    if (PositionCounts(spec_, spec_.position) && !(marks_[index] & kReduceHanded)) {
      return "finished before this position added to it";
    }
    return nullptr;
  }

  uint8_t* PlaceOf(int from, const Plan::Piece& piece) override {
    return parts_[from] + (piece.offset - own_offset_);
  }

  void OnReceived(int /*from*/, uint64_t index, Phase phase) override {
    if (phase != Phase::kReduce) return;
    if (--inputs_missing_[index - own_begin_] == 0) Finish(index);
  }

  void OnSent(uint64_t index, Phase phase) override {
    if (phase != Phase::kReduce) return;
    // Now, while it is in cache: it was read just before, to be sent.
    Keep(index);
    fresh_out_bytes_ -= plan_.Segment(index).bytes;
    HandFresh();
  }

  // Own input of others' chunks, as much as the window allows, to one after the other: none of them
  // waits for its first segment until another one has its last.
  void HandFresh() {
    if (!started_ || !PositionCounts(spec_, spec_.position)) return;
    for (int passed_by = 0; passed_by < spec_.size; turn_ = Next(turn_)) {
      const uint64_t index = fresh_[turn_];
      if (turn_ == spec_.position || !credit_[turn_] || index == plan_.FirstSegment(turn_ + 1)) {
        ++passed_by;
        continue;
      }
      const Plan::Piece piece = plan_.Segment(index);
      if (fresh_out_bytes_ > 0 && fresh_out_bytes_ + piece.bytes > spec_.window_bytes) return;
      fresh_out_bytes_ += piece.bytes;
      ++fresh_[turn_];
      passed_by = 0;
      const uint8_t* data = inputs_[0] + piece.offset;
      if (inputs_.size() > 1) {
        // The finished segment comes there later.
        ReduceInputs(spec_.desc, inputs_, piece.offset, piece.bytes, result_ + piece.offset);
        data = result_ + piece.offset;
      }
      Hand(turn_, Phase::kReduce, index, data);
    }
  }

  // A segment of the own chunk, with all inputs here.
  void Finish(uint64_t index) {
    const Plan::Piece piece = plan_.Segment(index);
    const uint64_t skip = piece.offset - own_offset_;
    if (uint8_t* const own = parts_[spec_.position]) {
      ReduceInputs(spec_.desc, inputs_, piece.offset, piece.bytes, own + skip);
    }
    Inputs inputs;
    for (int i = 0; i < spec_.size; ++i) {
      if (!PositionCounts(spec_, i)) continue;
      inputs.push_back(parts_[i] != nullptr ? parts_[i] + skip : inputs_[0] + piece.offset);
    }
    if (in_place_) {
      FinishInPlace(index, inputs);
    } else {
      ReduceInputs(spec_.desc, inputs, 0, piece.bytes, result_ + piece.offset);
      DivideSums(spec_, piece.bytes, result_ + piece.offset);
    }
    --results_open_;
    for (int to = Next(spec_.position); to != spec_.position; to = Next(to)) {
      if (credit_[to]) HandResult(to, index);
    }
  }

  void HandResult(int to, uint64_t index) {
    Hand(to, Phase::kGather, index, result_ + plan_.Segment(index).offset);
  }

  const uint64_t own_begin_;  // segments of the own chunk
  const uint64_t own_end_;
  const uint64_t own_offset_;
  std::vector<uint16_t> own_marks_;       // by segment of the own chunk, then by position
  std::vector<uint16_t> inputs_missing_;  // by segment of the own chunk
  std::vector<uint8_t*> parts_;           // by position; nullptr: has none
  std::vector<bool> credit_;              // by position
  std::vector<uint64_t> fresh_;           // by position: next segment of own input to hand over
  int turn_;                              // whose it is
  uint64_t fresh_out_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempt>> MakeMeshAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool) {
  CheckSpec(spec);
  if (spec.size == 1 || spec.desc.bytes() == 0) return MakeLocalAttempt(spec);
  return MeshAttempt::Make(spec, sink, pool);
}

}  // namespace longhaul::peerd
