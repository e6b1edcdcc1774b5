#include <algorithm>
#include <memory>
#include <vector>

#include "base/check.h"
#include "peerd/collective/segment_attempt.h"
#include "peerd/collective/segmentless_attempt.h"

namespace longhaul::peerd {
namespace {

// Each position owns the chunk of its number. It has a part of scratch for the input of each other
// position to that chunk.
//
// - Phase reduce: this position sends its own input of each other chunk to the owner of that chunk.
// - When the inputs of all positions to a grain of its own chunk are here, it adds them.
// - Phase gather: it sends the finished grains to all other positions.
//
// The inputs are added in the order of positions. So the result does not depend on the order in
// which they arrived, and is equal to that of a one-shot op, bit by bit.
class MeshAttempt final : public SegmentAttempt {
 public:
  static absl::StatusOr<std::unique_ptr<Attempt>> Make(const AttemptSpec& spec, AttemptSink* sink,
                                                       ScratchPool* pool) {
    const Plan plan(spec.desc.bytes(), spec.size, spec.grain_bytes);
    const uint64_t part = PartBytes(plan, spec.position);
    uint64_t parts = 0;
    for (int i = 0; i < spec.size; ++i) parts += HasPart(spec, i) ? 1 : 0;
    const auto memory = BorrowMemory(spec, parts * part, pool);
    if (!memory.ok()) return memory.status();
    return std::unique_ptr<Attempt>(new MeshAttempt(spec, sink, pool, *memory));
  }

  void Start() override {
    LH_CHECK(!started_);
    started_ = true;
    HandFresh();
  }

  void Credit(int position) override {
    if (position == spec_.position || credit_[position]) return;
    credit_[position] = true;
    if (!started_) return;
    ForEachFinished(own_, [&](const Plan::Grains& grains) { HandResult(position, grains); });
    HandFresh();
  }

 private:
  MeshAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool, const Memory& memory)
      : SegmentAttempt(spec, sink, pool, memory),
        own_(plan_.GrainsOf(spec.position)),
        own_offset_(plan_.Chunk(spec.position).offset),
        own_marks_(own_.count * spec.size),
        credit_(spec.size),
        fresh_(spec.size),
        alone_(own_.end()),
        turn_(Next(spec.position)) {
    uint8_t* part = memory.extra;
    uint16_t others = 0;
    for (int i = 0; i < spec_.size; ++i) {
      fresh_[i] = plan_.GrainsOf(i).first;
      parts_.push_back(HasPart(spec_, i) ? part : nullptr);
      if (parts_.back() != nullptr) part += PartBytes(plan_, spec_.position);
      if (i == spec_.position) continue;
      sends_open_ += own_.count;
      if (PositionContributes(spec_, spec_.position)) sends_open_ += plan_.GrainsOf(i).count;
      if (PositionContributes(spec_, i)) ++others;
    }
    if (others == 0) alone_ = own_.first;
    inputs_missing_.assign(own_.count, std::max<uint16_t>(others, 1));
  }

  static uint64_t PartBytes(const Plan& plan, int chunk) {
    return Aligned(plan.Chunk(chunk).bytes);
  }
  // Whether scratch needs a part for the input of a position to the own chunk. This position needs
  // one only if several of its members contribute: their inputs are reduced there. The input of a
  // single member is in its source, or among the originals.
  static bool HasPart(const AttemptSpec& spec, int position) {
    if (position == spec.position) return InputsOf(spec).size() > 1;
    return PositionContributes(spec, position);
  }
  int Next(int position) const { return (position + 1) % spec_.size; }
  bool Owns(uint64_t grain) const { return grain >= own_.first && grain < own_.end(); }

  uint16_t& MarksOf(uint64_t grain, int other) override {
    return Owns(grain) ? own_marks_[(grain - own_.first) * spec_.size + other] : marks_[grain];
  }

  const char* Objection(int from, const Plan::Grains& grains, Phase phase) override {
    if (phase == Phase::kReduce) {
      if (!Owns(grains.first)) return "the chunk is not this position's";
      return PositionContributes(spec_, from) ? nullptr : "the sender does not contribute";
    }
    if (plan_.ChunkOf(grains.first) != from) return "the chunk is not the sender's";
    if (!PositionContributes(spec_, spec_.position)) return nullptr;
    for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
      if (!(marks_[grain] & kReduceHanded)) return "finished before this position added to it";
    }
    return nullptr;
  }

  uint8_t* PlaceOf(int from, const Plan::Grains& grains) override {
    return parts_[from] + (plan_.PieceOf(grains).offset - own_offset_);
  }

  void OnReceived(int /*from*/, const Plan::Grains& grains, Phase phase) override {
    if (phase != Phase::kReduce) return;
    for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
      --inputs_missing_[grain - own_.first];
    }
    ForEachFinished(grains, [&](const Plan::Grains& finished) { Finish(finished); });
  }

  // Calls `function` for each stretch of these grains that has the inputs of all positions.
  template <typename Function>
  void ForEachFinished(const Plan::Grains& grains, const Function& function) {
    const auto finished = [&](uint64_t grain) { return inputs_missing_[grain - own_.first] == 0; };
    for (uint64_t first = grains.first; first < grains.end(); ++first) {
      if (!finished(first)) continue;
      uint64_t end = first + 1;
      while (end < grains.end() && finished(end)) ++end;
      function(Plan::Grains{first, end - first});
      first = end;
    }
  }

  void OnSent(const Plan::Grains& grains, Phase phase) override {
    if (phase != Phase::kReduce) return;
    // Keep the originals now: they were just read to be sent, so they are in the cache.
    Keep(grains);
    fresh_out_bytes_ -= plan_.PieceOf(grains).bytes;
    HandFresh();
  }

  // Hands over own input of other chunks, as much as the window allows. The owners of the chunks
  // take turns, so that none has to wait until another owner has got all of its input. The inputs
  // of several members must be added up first; Work() does that.
  void HandFresh() {
    while (inputs_.size() == 1 && MayHandFresh()) HandOneFresh();
  }
  bool HasFresh(int position) const {
    return position != spec_.position && credit_[position] &&
           fresh_[position] < plan_.GrainsOf(position).end();
  }
  // Returns the next position that has fresh segments to be sent to it; spec_.size: there is none.
  int NextFresh() const {
    for (int i = 0, to = turn_; i < spec_.size; ++i, to = Next(to)) {
      if (HasFresh(to)) return to;
    }
    return spec_.size;
  }
  bool MayHandFresh() const {
    if (!started_ || inputs_.empty()) return false;
    const int to = NextFresh();
    if (to == spec_.size) return false;
    const uint64_t bytes = plan_.PieceOf(NextSegment(fresh_[to], plan_.GrainsOf(to).end())).bytes;
    return fresh_out_bytes_ == 0 || fresh_out_bytes_ + bytes <= spec_.window_bytes;
  }
  uint64_t HandOneFresh() {
    const int to = NextFresh();
    const Plan::Grains grains = NextSegment(fresh_[to], plan_.GrainsOf(to).end());
    const Plan::Piece piece = plan_.PieceOf(grains);
    fresh_out_bytes_ += piece.bytes;
    fresh_[to] = grains.end();
    turn_ = Next(to);
    const uint8_t* data = inputs_[0] + piece.offset;
    if (inputs_.size() > 1) {
      // The place of the result is free until the finished grains arrive.
      ReduceInputs(spec_.desc, inputs_, piece.offset, piece.bytes, result_ + piece.offset);
      data = result_ + piece.offset;
    }
    Hand(to, Phase::kReduce, grains, data);
    return piece.bytes * (inputs_.size() + 1);
  }

  bool MayGoOn() const override {
    return (started_ && alone_ < own_.end()) || (inputs_.size() > 1 && MayHandFresh());
  }
  uint64_t GoOn() override {
    if (alone_ == own_.end()) return HandOneFresh();
    // No other position contributes, so the grains are finished without segments.
    const Plan::Grains grains = NextSegment(alone_, own_.end());
    alone_ = grains.end();
    for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
      --inputs_missing_[grain - own_.first];
    }
    Finish(grains);
    return plan_.PieceOf(grains).bytes * (inputs_.size() + 1);
  }

  // Adds up grains of the own chunk, of which all inputs are here.
  void Finish(const Plan::Grains& grains) {
    const Plan::Piece piece = plan_.PieceOf(grains);
    const uint64_t skip = piece.offset - own_offset_;
    if (uint8_t* const own = parts_[spec_.position]) {
      ReduceInputs(spec_.desc, inputs_, piece.offset, piece.bytes, own + skip);
    }
    Inputs inputs;
    for (int i = 0; i < spec_.size; ++i) {
      if (!PositionContributes(spec_, i)) continue;
      inputs.push_back(parts_[i] != nullptr ? parts_[i] + skip : inputs_[0] + piece.offset);
    }
    if (in_place_) {
      SumInPlace(grains, inputs, /*finished=*/true);
    } else {
      ReduceInputs(spec_.desc, inputs, 0, piece.bytes, result_ + piece.offset);
      DivideSums(spec_, piece.bytes, result_ + piece.offset);
    }
    for (int to = Next(spec_.position); to != spec_.position; to = Next(to)) {
      if (credit_[to]) HandResult(to, grains);
    }
    Finished(grains);
  }

  void HandResult(int to, const Plan::Grains& grains) {
    Hand(to, Phase::kGather, grains, result_ + plan_.PieceOf(grains).offset);
  }

  const Plan::Grains own_;  // the grains of the own chunk
  const uint64_t own_offset_;
  std::vector<uint16_t> own_marks_;       // by grain of the own chunk, then by position
  std::vector<uint16_t> inputs_missing_;  // by grain of the own chunk
  std::vector<uint8_t*> parts_;           // by position; nullptr: no part is needed
  std::vector<bool> credit_;              // by position
  std::vector<uint64_t> fresh_;           // by position: next grain of own input to hand over
  uint64_t alone_;  // next grain of the own chunk to finish, if no other position contributes
  int turn_;        // the position that is next in turn
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
