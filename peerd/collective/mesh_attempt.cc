#include <algorithm>
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

// Each position owns some chunks, or none. It has a part of scratch for the input of each other
// position to its own chunks.
//
// - Phase reduce: this position sends its own input of each other chunk to the owner of that chunk.
// - When the inputs of all positions to a grain of an own chunk are here, it adds them.
// - Phase gather: it sends the finished grains to all other positions.
//
// The inputs are added in the order that the spec says. So the result does not depend on the order
// in which they arrived, and is equal to that of a one-shot op, bit by bit.
//
// Without phase reduce, the owner sends its source to everybody, or to the one receiver of the
// chunk, or to the position that passes the chunk on to everybody else.
class MeshAttempt final : public SegmentAttempt {
 public:
  static absl::StatusOr<std::unique_ptr<Attempt>> Make(const AttemptSpec& spec, Outline outline,
                                                       AttemptSink* sink, ScratchPool* pool) {
    Memory memory;
    if (spec.reduces()) {
      const bool wide = IsWideFrom(spec, spec.position);
      // What this position sends is prepared where the result goes later, if it fits there.
      const bool prepares = PositionContributes(spec, spec.position) &&
                            (wide || outline.inputs.size() != 1 || outline.inputs[0].weight != 1);
      if (outline.in_place || (prepares && (wide || !spec.gathers()))) {
        memory.slot_width = prepares && wide ? 2 : 1;
      }
      const uint64_t own = OwnBytes(spec, outline.layout);
      for (int i = 0; i < spec.size; ++i) memory.extra_bytes += PartBytes(spec, own, i);
    }
    if (const absl::Status status = Borrow(spec, outline, &memory, pool); !status.ok()) {
      return status;
    }
    return std::unique_ptr<Attempt>(new MeshAttempt(spec, std::move(outline), sink, pool, memory));
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
    if (spec_.reduces() && spec_.gathers()) {
      for (const Plan::Grains& own : own_) {
        ForEachFinished(own, [&](const Plan::Grains& grains) { HandResult(position, grains); });
      }
    }
    for (const auto& [grains, owner] : passed_) {
      if (position != owner) HandResult(position, grains);
    }
    HandFresh();
  }

 private:
  static constexpr uint32_t kNotOwn = UINT32_MAX;
  static constexpr uint64_t kBlockBytes = 16 << 10;

  MeshAttempt(const AttemptSpec& spec, Outline outline, AttemptSink* sink, ScratchPool* pool,
              const Memory& memory)
      : SegmentAttempt(spec, std::move(outline), sink, pool, memory),
        order_(OrderOf(spec)),
        credit_(spec.size),
        fresh_(spec.size),
        turn_(Next(spec.position)) {
    for (int i = 0; i < spec_.size; ++i) {
      wide_from_.push_back(IsWideFrom(spec_, i));
      contributes_.push_back(spec_.reduces() && PositionContributes(spec_, i));
    }
    uint16_t others = 0;
    uint8_t* part = memory.extra;
    const uint64_t own_bytes = OwnBytes(spec_, outline_.layout);
    for (int i = 0; i < spec_.size; ++i) {
      const uint64_t bytes = spec_.reduces() ? PartBytes(spec_, own_bytes, i) : 0;
      parts_.push_back(part);
      if (bytes > 0) part += bytes;
      if (i != spec_.position && contributes_[i]) ++others;
    }
    own_index_.assign(plan_.grains(), kNotOwn);
    for (int c = 0; c < plan_.chunks(); ++c) AddChunk(c);
    uint64_t own_grains = 0;
    for (const Plan::Grains& own : own_) own_grains += own.count;
    own_marks_.resize(own_grains * spec_.size);
    if (spec_.reduces()) {
      if (spec_.gathers()) sends_open_ += own_grains * (spec_.size - 1);
      inputs_missing_.assign(own_grains, std::max<uint16_t>(others, 1));
      if (others == 0) alone_.assign(own_.begin(), own_.end());
    }
    for (const std::deque<Plan::Grains>& list : fresh_) {
      for (const Plan::Grains& grains : list) sends_open_ += grains.count;
    }
    OnMade();
  }

  // Bytes of a chunk in the part for another position, if they are not float32.
  static uint64_t PartBytesOf(const AttemptSpec& spec, const Layout::Chunk& chunk) {
    if (!spec.desc.Encodes()) return chunk.bytes;
    return EncodedBytes(CodecOf(spec.desc), chunk.bytes / SizeOf(chunk.dtype));
  }
  // Such bytes of all chunks that this position owns.
  static uint64_t OwnBytes(const AttemptSpec& spec, const Layout& layout) {
    uint64_t bytes = 0;
    for (const Layout::Chunk& chunk : layout.chunks()) {
      if (chunk.position == spec.position) bytes += PartBytesOf(spec, chunk);
    }
    return bytes;
  }
  // Bytes of the part for the input of another position to own chunks.
  static uint64_t PartBytes(const AttemptSpec& spec, uint64_t own_bytes, int position) {
    if (position == spec.position || !PositionContributes(spec, position)) return 0;
    return Aligned(own_bytes * (IsWideFrom(spec, position) ? 2 : 1));
  }

  // Notes who sends a chunk to whom. Chunks are added in their order.
  void AddChunk(int c) {
    const Layout::Chunk& chunk = outline_.layout.chunks()[c];
    const Plan::Grains grains = plan_.GrainsOf(c);
    own_offset_.push_back(own_bytes_);
    if (chunk.position != spec_.position && !PassesOn(chunk)) {
      if (contributes_[spec_.position]) fresh_[chunk.position].push_back(grains);
      return;
    }
    own_bytes_ += PartBytesOf(spec_, chunk);
    if (PassesOn(chunk)) {
      sends_open_ += grains.count * (spec_.size - 2);
    } else if (!spec_.reduces()) {
      if (IsForHere(chunk)) uncopied_.push_back(grains);
      for (int to = 0; to < spec_.size; ++to) {
        if (to == spec_.position) continue;
        const bool all = IsForEverybody(chunk) && chunk.via < 0;
        if (all || chunk.via == to || chunk.to_position == to) fresh_[to].push_back(grains);
      }
      // A grain that goes to one position only needs no marks for the others.
      if (!IsForEverybody(chunk) || chunk.via >= 0) return;
    }
    const uint64_t before = own_.empty() ? 0 : own_index_[own_.back().end() - 1] + uint64_t{1};
    for (uint64_t i = 0; i < grains.count; ++i) {
      own_index_[grains.first + i] = static_cast<uint32_t>(before + i);
    }
    own_.push_back(grains);
  }

  bool PassesOn(const Layout::Chunk& chunk) const { return chunk.via == spec_.position; }
  int Next(int position) const { return (position + 1) % spec_.size; }
  bool IsWide(const Layout::Chunk& chunk, int position) const override {
    return wide_from_[position] && IsHalf(chunk.dtype);
  }

  uint16_t& MarksOf(uint64_t grain, int other) override {
    const uint32_t own = own_index_[grain];
    return own == kNotOwn ? marks_[grain] : own_marks_[uint64_t{own} * spec_.size + other];
  }

  const char* Objection(int from, const Plan::Grains& grains, Phase phase) override {
    const Layout::Chunk& chunk = ChunkOf(grains);
    if (phase == Phase::kReduce) {
      if (chunk.position != spec_.position) return "the chunk is not this position's";
      return contributes_[from] ? nullptr : "the sender does not contribute";
    }
    const int sender = chunk.via < 0 || PassesOn(chunk) ? chunk.position : chunk.via;
    if (sender != from || chunk.position == spec_.position) return "the chunk is not the sender's";
    if (!IsForHere(chunk)) return "the chunk is for another position";
    if (!contributes_[spec_.position]) return nullptr;
    for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
      if (!(marks_[grain] & kReduceHanded)) return "finished before this position added to it";
    }
    return nullptr;
  }

  // Where the input of another position to grains of an own chunk is.
  uint8_t* PlaceOf(int from, const Plan::Grains& grains) override {
    const int c = plan_.ChunkOf(grains.first);
    const Layout::Chunk& chunk = outline_.layout.chunks()[c];
    // In a part, all chunks are as wide as the widest, so that their places are known.
    return parts_[from] + own_offset_[c] * (wide_from_[from] ? 2 : 1) +
           BytesIn(FormOf(chunk, Phase::kReduce, from), chunk.dtype, SkipOf(chunk, grains));
  }

  void OnReceived(int /*from*/, const Plan::Grains& grains, Phase phase) override {
    if (phase != Phase::kReduce) return PassOn(grains);
    for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
      --inputs_missing_[own_index_[grain]];
    }
    ForEachFinished(grains, [&](const Plan::Grains& finished) { Finish(finished); });
  }

  void PassOn(const Plan::Grains& grains) {
    const Layout::Chunk& chunk = ChunkOf(grains);
    if (!PassesOn(chunk)) return;
    passed_.emplace_back(grains, chunk.position);
    HandResultToOthersThan(chunk.position, grains);
  }

  // Calls `function` for each stretch of these grains that has the inputs of all positions.
  template <typename Function>
  void ForEachFinished(const Plan::Grains& grains, const Function& function) {
    const auto finished = [&](uint64_t grain) { return inputs_missing_[own_index_[grain]] == 0; };
    for (uint64_t first = grains.first; first < grains.end(); ++first) {
      if (!finished(first)) continue;
      uint64_t end = first + 1;
      while (end < grains.end() && finished(end)) ++end;
      function(Plan::Grains{first, end - first});
      first = end;
    }
  }

  void OnSent(const Plan::Grains& grains, Phase phase) override {
    if (phase != FreshPhase() || PassesOn(ChunkOf(grains))) return;
    // Keep the originals now: they were just read to be sent, so they are in the cache. If they
    // were prepared, what was sent is still in their slots.
    if (!MustAddUp(grains)) Keep(grains);
    fresh_out_bytes_ -= WireBytes(grains, FreshFormOf(grains));
    HandFresh();
  }

  Phase FreshPhase() const { return spec_.reduces() ? Phase::kReduce : Phase::kGather; }
  Form FreshFormOf(const Plan::Grains& grains) const {
    return FormOf(ChunkOf(grains), FreshPhase(), spec_.position);
  }
  bool MustAddUp(const Plan::Grains& grains) const {
    return coder_ || (spec_.reduces() && MustPrepare(ChunkOf(grains)));
  }

  // Hands over own input of other chunks, or own chunks, as much as the window allows. The
  // receivers take turns, so that none has to wait until another one has got all. What must be
  // added up or prepared first is left to Work().
  void HandFresh() {
    while (MayHandFresh() && !MustAddUp(NextFresh(NextReceiver()))) HandOneFresh();
  }
  // Returns the next position that has fresh segments to be sent to it; spec_.size: there is none.
  int NextReceiver() const {
    for (int i = 0, to = turn_; i < spec_.size; ++i, to = Next(to)) {
      if (credit_[to] && !fresh_[to].empty()) return to;
    }
    return spec_.size;
  }
  Plan::Grains NextFresh(int to) const {
    const Plan::Grains& front = fresh_[to].front();
    return NextSegment(front.first, front.end(), FreshFormOf(front));
  }
  bool MayHandFresh() const {
    if (!started_) return false;
    const int to = NextReceiver();
    if (to == spec_.size) return false;
    const Plan::Grains grains = NextFresh(to);
    const uint64_t bytes = WireBytes(grains, FreshFormOf(grains));
    return fresh_out_bytes_ == 0 || fresh_out_bytes_ + bytes <= spec_.window_bytes;
  }
  uint64_t HandOneFresh() {
    const int to = NextReceiver();
    const Plan::Grains grains = NextFresh(to);
    const Layout::Chunk& chunk = ChunkOf(grains);
    const Plan::Range range = plan_.RangeOf(grains);
    const Form form = FreshFormOf(grains);
    fresh_out_bytes_ += WireBytes(grains, form);
    Take(grains, &fresh_[to]);
    turn_ = Next(to);
    const uint8_t* data = nullptr;
    if (coder_) {
      EncodeInput(grains);
      data = SlotOf(grains);
    } else if (MustAddUp(grains)) {
      // In place of the result, or in the slot: both are free until the finished grains arrive.
      uint8_t* const stage = StageOf(grains);
      SumInputs(spec_, inputs_, chunk, range.offset - chunk.offset, range.bytes, stage,
                form == Form::kWide);
      data = stage;
    } else {
      data = SourceOf(grains);
    }
    Hand(to, FreshPhase(), grains, data);
    return range.bytes * std::max<uint64_t>(inputs_.size(), 1) + WireBytes(grains, form);
  }

  bool MayGoOn() const override {
    if (SegmentAttempt::MayGoOn() || (started_ && !alone_.empty())) return true;
    return MayHandFresh() && MustAddUp(NextFresh(NextReceiver()));
  }
  uint64_t GoOn() override {
    // What others wait for comes first.
    const bool fresh_first = coder_ && MayHandFresh();
    if (!uncopied_.empty() && !fresh_first) return SegmentAttempt::GoOn();
    if (alone_.empty()) {
      const uint64_t worked = HandOneFresh();
      HandFresh();
      return worked;
    }
    // No other position contributes, so the grains are finished without segments.
    const Plan::Grains& front = alone_.front();
    const Plan::Grains grains = NextSegment(front.first, front.end(), Form::kPlain);
    Take(grains, &alone_);
    for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
      --inputs_missing_[own_index_[grain]];
    }
    Finish(grains);
    return plan_.RangeOf(grains).bytes * (inputs_.size() + 1);
  }

  // Adds up grains of an own chunk, of which all inputs are here.
  void Finish(const Plan::Grains& grains) {
    if (coder_) {
      FinishEncoded(grains);
    } else {
      FinishPlain(grains);
    }
    if (spec_.gathers()) HandResultToOthersThan(spec_.position, grains);
    Finished(grains);
  }

  void FinishEncoded(const Plan::Grains& grains) {
    CodedSum sum;
    for (const int i : order_) {
      if (!contributes_[i]) continue;
      sum.inputs.push_back(i == spec_.position ? nullptr : PlaceOf(i, grains));
    }
    sum.own_as_sent = true;
    sum.divisor = divisor_;
    sum.seed = spec_.sum_seed;
    (spec_.gathers() ? sum.encoded : sum.result) =
        spec_.gathers() ? SlotOf(grains) : ResultOf(grains);
    AddEncoded(grains, std::move(sum));
  }

  void FinishPlain(const Plan::Grains& grains) {
    const Layout::Chunk& chunk = ChunkOf(grains);
    const uint64_t skip = SkipOf(chunk, grains);
    // As it would be sent, so that the result does not depend on who owns the chunk.
    const bool prepares = contributes_[spec_.position] && MustPrepare(chunk);
    alignas(64) uint8_t prepared[2 * kBlockBytes];
    std::vector<Term> terms;  // of the positions that contribute, in their order
    size_t own = 0;           // which of them is prepared block by block
    for (const int i : order_) {
      if (!contributes_[i]) continue;
      const uint8_t* data = nullptr;
      if (i != spec_.position) {
        data = PlaceOf(i, grains);
      } else if (prepares) {
        own = terms.size();
      } else {
        data = SourceOf(grains);
      }
      terms.push_back({data, IsWide(chunk, i), 1});
    }
    std::vector<Term> rest = terms;
    const auto sum = [&](uint64_t done, uint64_t bytes, uint8_t* out) {
      for (size_t i = 0; i < terms.size(); ++i) {
        if (prepares && i == own) {
          SumInputs(spec_, inputs_, chunk, skip + done, bytes, prepared, terms[i].wide);
          rest[i].data = prepared;
        } else {
          rest[i].data = terms[i].data + done * (terms[i].wide ? 2 : 1);
        }
      }
      Combine(out, /*out_wide=*/false, rest, bytes / SizeOf(chunk.dtype), chunk.dtype,
              spec_.desc.reduce, divisor_);
    };
    if (in_place_) {
      SumInPlace(grains, sum);
    } else {
      const uint64_t all = plan_.RangeOf(grains).bytes;
      uint8_t* const result = ResultOf(grains);
      for (uint64_t done = 0; done < all; done += kBlockBytes) {
        sum(done, std::min(kBlockBytes, all - done), result + done);
      }
    }
  }

  // Hands finished grains to all positions that have credit, but not to `except` or this position.
  void HandResultToOthersThan(int except, const Plan::Grains& grains) {
    for (int to = Next(spec_.position); to != spec_.position; to = Next(to)) {
      if (credit_[to] && to != except) HandResult(to, grains);
    }
  }
  void HandResult(int to, const Plan::Grains& grains) {
    Hand(to, Phase::kGather, grains, FinishedOf(grains));
  }

  const std::vector<int> order_;
  std::vector<bool> wide_from_;    // by position: its inputs of halves are float32
  std::vector<bool> contributes_;  // by position; none does if the op does not reduce
  // The own chunks that are added up, or that go to everybody, and the chunks to pass on.
  std::vector<Plan::Grains> own_;
  std::vector<uint32_t> own_index_;       // by grain: its number among those of own_, or kNotOwn
  std::vector<uint16_t> own_marks_;       // by number, then by position
  std::vector<uint16_t> inputs_missing_;  // by number
  std::vector<uint64_t> own_offset_;      // by chunk: bytes of the own chunks before it
  uint64_t own_bytes_ = 0;
  std::vector<uint8_t*> parts_;  // by position: its inputs of the own chunks, one behind the other
  std::vector<bool> credit_;     // by position
  std::vector<std::deque<Plan::Grains>> fresh_;  // by position: what is to be handed over to it
  // What has arrived of the chunks to pass on, and the position that it came from.
  std::vector<std::pair<Plan::Grains, int>> passed_;
  std::deque<Plan::Grains> alone_;  // own grains to finish, if no other position contributes
  int turn_;                        // the position that is next in turn
  uint64_t fresh_out_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempt>> MakeMeshAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool) {
  CheckSpec(spec);
  Outline outline(spec);
  if (spec.size == 1 || outline.layout.chunks().empty()) return MakeLocalAttempt(spec);
  return MeshAttempt::Make(spec, std::move(outline), sink, pool);
}

}  // namespace longhaul::peerd
