#include <deque>
#include <map>
#include <memory>
#include <span>
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
// Out of place, partial sums are received into the stage (StageOf()), and this position's input is
// added there. In place, a partial sum is received into a landing, or into its slot if no landing
// is free. The new sum replaces the original, and the original goes to the slot, while both are in
// the cache. The sum is sent from there, and stays there until the next position certainly has it,
// because it may have to be sent again. A partial sum of halves that is float32 stays in the slot
// until the finished segment arrives.
class RingAttempt final : public SegmentAttempt {
 public:
  static absl::StatusOr<std::unique_ptr<Attempt>> Make(const AttemptSpec& spec, Outline outline,
                                                       AttemptSink* sink, ScratchPool* pool) {
    Memory memory;
    const bool wide = IsWideInRing(spec);
    if (spec.reduces() && (outline.in_place || wide || !spec.gathers())) {
      memory.slot_width = wide ? 2 : 1;
    }
    if (const absl::Status status = Borrow(spec, outline, &memory, pool); !status.ok()) {
      return status;
    }
    return std::unique_ptr<Attempt>(new RingAttempt(spec, std::move(outline), sink, pool, memory));
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
  RingAttempt(const AttemptSpec& spec, Outline outline, AttemptSink* sink, ScratchPool* pool,
              const Memory& memory)
      : SegmentAttempt(spec, std::move(outline), sink, pool, memory),
        wide_(IsWideInRing(spec)),
        next_((spec.position + 1) % spec.size),
        previous_((spec.position + spec.size - 1) % spec.size),
        fresh_hop_(spec.reduces() ? 0 : spec.size - 1) {
    for (int c = 0; c < plan_.chunks(); ++c) {
      const Layout::Chunk& chunk = outline_.layout.chunks()[c];
      const Plan::Grains grains = plan_.GrainsOf(c);
      const int hop = Hop(chunk);
      if (SendsReduce(hop)) sends_open_ += grains.count;
      if (SendsGather(hop)) sends_open_ += grains.count;
      if (hop != fresh_hop_) continue;
      fresh_.push_back(grains);
      if (spec.reduces() && inputs_.empty() && !coder_) AddIdentity(chunk, grains);
    }
    if (!spec.reduces()) uncopied_ = fresh_;
    MakeLandings();
    OnMade();
  }

  int Hop(const Layout::Chunk& chunk) const {
    const int start = spec_.cuts.empty() ? chunk.position : (chunk.position + 1) % spec_.size;
    return (spec_.position - start + spec_.size) % spec_.size;
  }
  int HopOf(const Plan::Grains& grains) const { return Hop(ChunkOf(grains)); }
  bool IsLast(int hop) const { return hop == spec_.size - 1; }
  bool SendsReduce(int hop) const { return spec_.reduces() && !IsLast(hop); }
  bool SendsGather(int hop) const { return spec_.gathers() && hop != spec_.size - 2; }
  bool IsWide(const Layout::Chunk& chunk, int /*position*/) const override {
    return wide_ && IsHalf(chunk.dtype);
  }
  // Whether this position replaces the originals of a chunk by a sum.
  bool SumsInPlace(const Layout::Chunk& chunk, int hop) const {
    if (!in_place_) return false;
    return IsLast(hop) || (!inputs_.empty() && !IsWide(chunk, spec_.position));
  }

  uint16_t& MarksOf(uint64_t grain, int /*other*/) override { return marks_[grain]; }

  const char* Objection(int from, const Plan::Grains& grains, Phase phase) override {
    if (from != previous_) return "not from the previous position";
    const int hop = HopOf(grains);
    if (phase == Phase::kReduce) return hop == 0 ? "the chunk starts here" : nullptr;
    if (IsLast(hop)) return "the chunk is finished here";
    for (uint64_t grain = grains.first; spec_.reduces() && grain < grains.end(); ++grain) {
      if (!(marks_[grain] & kReduceHanded)) return "finished before this position added to it";
    }
    return nullptr;
  }

  uint8_t* PlaceOf(int /*from*/, const Plan::Grains& grains) override {
    if (coder_) return SlotOf(grains);
    const Layout::Chunk& chunk = ChunkOf(grains);
    if (SumsInPlace(chunk, Hop(chunk)) && !IsWide(chunk, previous_)) {
      if (uint8_t* const landing = landings_.Borrow(plan_.RangeOf(grains))) return landing;
    }
    return StageOf(grains);
  }

  void OnReceived(int /*from*/, const Plan::Grains& grains, Phase phase) override {
    if (phase == Phase::kGather) return PassResult(grains);
    const Layout::Chunk& chunk = ChunkOf(grains);
    const bool last = IsLast(Hop(chunk));
    if (coder_) {
      AddToEncoded(grains, last);
    } else {
      AddPlain(grains, last);
    }
    if (!last) return Pass(Phase::kReduce, grains);
    PassResult(grains);
    Finished(grains);
  }

  // Adds own input to the encoded sum in the slots.
  void AddToEncoded(const Plan::Grains& grains, bool last) {
    if (!last && inputs_.empty()) return;
    CodedSum sum;
    sum.inputs.push_back(SlotOf(grains));
    if (!inputs_.empty()) sum.inputs.push_back(nullptr);
    sum.divisor = last ? divisor_ : 0;
    sum.seed = last ? spec_.sum_seed : spec_.seeds[inputs_[0].member];
    (last && !spec_.gathers() ? sum.result : sum.encoded) =
        last && !spec_.gathers() ? ResultOf(grains) : SlotOf(grains);
    AddEncoded(grains, std::move(sum));
  }

  void AddPlain(const Plan::Grains& grains, bool last) {
    const Layout::Chunk& chunk = ChunkOf(grains);
    const Plan::Range range = plan_.RangeOf(grains);
    const bool wide = IsWide(chunk, previous_);
    const uint8_t* const landing = landings_.Of(range);
    std::vector<Term> terms = TermsOf(spec_, inputs_, chunk, range.offset - chunk.offset);
    terms.insert(terms.begin(), {landing != nullptr ? landing : StageOf(grains), wide, 1});
    const auto sum = [&](std::span<const Term> of, uint64_t bytes, uint8_t* out) {
      Combine(out, wide && !last, of, bytes / SizeOf(chunk.dtype), chunk.dtype, spec_.desc.reduce,
              last ? divisor_ : 0);
    };
    if (SumsInPlace(chunk, Hop(chunk))) {
      std::vector<Term> rest = terms;
      SumInPlace(grains, [&](uint64_t done, uint64_t bytes, uint8_t* out) {
        for (size_t i = 0; i < terms.size(); ++i) {
          rest[i].data = terms[i].data + done * (terms[i].wide ? 2 : 1);
        }
        sum(rest, bytes, out);
      });
      landings_.Give(range);
    } else if (last) {
      sum(terms, range.bytes, ResultOf(grains));
    } else if (!inputs_.empty()) {
      sum(terms, range.bytes, StageOf(grains));
    }
  }

  void OnSent(const Plan::Grains& grains, Phase phase) override {
    if (phase != FreshPhase() || HopOf(grains) != fresh_hop_) return;
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
  // The next segment of fresh_, which is not empty.
  Plan::Grains NextFresh() const {
    const Plan::Grains& front = fresh_.front();
    return NextSegment(front.first, front.end(), FreshFormOf(front));
  }

  // Hands over own input, as much as the window allows. What must be added up or prepared first is
  // left to Work().
  void HandFresh() {
    while (MayHandFresh() && !MustAddUp(fresh_.front())) HandOneFresh();
  }
  bool MustAddUp(const Plan::Grains& grains) const {
    return coder_ || (!inputs_.empty() && MustPrepare(ChunkOf(grains)));
  }
  bool MayHandFresh() const {
    if (!started_ || !credit_ || fresh_.empty()) return false;
    const Plan::Grains grains = NextFresh();
    const uint64_t bytes = WireBytes(grains, FreshFormOf(grains));
    return fresh_out_bytes_ == 0 || fresh_out_bytes_ + bytes <= spec_.window_bytes;
  }
  uint64_t HandOneFresh() {
    const Plan::Grains grains = NextFresh();
    const Layout::Chunk& chunk = ChunkOf(grains);
    const Plan::Range range = plan_.RangeOf(grains);
    const Form form = FreshFormOf(grains);
    fresh_out_bytes_ += WireBytes(grains, form);
    if (coder_) {
      EncodeInput(grains);
    } else if (MustAddUp(grains)) {
      SumInputs(spec_, inputs_, chunk, range.offset - chunk.offset, range.bytes, StageOf(grains),
                form == Form::kWide);
    }
    Take(grains, &fresh_);
    Pass(FreshPhase(), grains);
    return range.bytes * std::max<uint64_t>(inputs_.size(), 1) + WireBytes(grains, form);
  }

  bool MayGoOn() const override {
    return SegmentAttempt::MayGoOn() || (MayHandFresh() && MustAddUp(fresh_.front()));
  }
  uint64_t GoOn() override {
    // What others wait for comes first.
    const bool fresh_first = coder_ && MayHandFresh();
    if (!uncopied_.empty() && !fresh_first) return SegmentAttempt::GoOn();
    const uint64_t worked = HandOneFresh();
    HandFresh();
    return worked;
  }

  void PassResult(const Plan::Grains& grains) {
    if (SendsGather(HopOf(grains))) Pass(Phase::kGather, grains);
  }

  // Sends grains to the next position, now or when its credit comes.
  void Pass(Phase phase, const Plan::Grains& grains) {
    if (!credit_) {
      waiting_.emplace_back(phase, grains);
      return;
    }
    Hand(next_, phase, grains, DataOf(phase, ChunkOf(grains), grains));
  }
  const uint8_t* DataOf(Phase phase, const Layout::Chunk& chunk, const Plan::Grains& grains) const {
    if (coder_) return SlotOf(grains);
    if (phase == Phase::kReduce && Hop(chunk) == 0) {
      if (inputs_.empty()) return identities_.at(chunk.dtype).data();
      return MustPrepare(chunk) ? StageOf(grains) : SourceOf(grains);
    }
    if (phase == Phase::kReduce) {
      // A sum that was built in place is there as soon as the original is in its slot.
      return marks_[grains.first] & kOverwritten ? ResultOf(grains) : StageOf(grains);
    }
    return !spec_.reduces() && IsLast(Hop(chunk)) ? SourceOf(grains) : ResultOf(grains);
  }

  // Makes sure that there is a segment of the identity for a chunk that starts here.
  void AddIdentity(const Layout::Chunk& chunk, const Plan::Grains& grains) {
    const Form form = FormOf(chunk, Phase::kReduce, spec_.position);
    const Plan::Grains segment = NextSegment(grains.first, grains.end(), form);
    std::vector<uint8_t>& identity = identities_[chunk.dtype];
    if (identity.size() >= WireBytes(segment, form)) return;
    identity.resize(WireBytes(segment, form));
    FillWithIdentity(spec_.desc.reduce, chunk.dtype, plan_.RangeOf(segment).bytes, identity.data(),
                     form == Form::kWide);
  }

  const bool wide_;  // partial sums of halves are float32
  const int next_;
  const int previous_;
  bool credit_ = false;
  // By dtype: one segment of the identity of the op. A sum that begins here begins with it if no
  // local input contributes.
  std::map<DType, std::vector<uint8_t>> identities_;
  std::vector<std::pair<Phase, Plan::Grains>> waiting_;  // what was ready before the credit came
  // The hop at which this position sends its own input without a segment of others.
  const int fresh_hop_;
  std::deque<Plan::Grains> fresh_;  // own input that is not handed over yet
  uint64_t fresh_out_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempt>> MakeRingAttempt(const AttemptSpec& spec, AttemptSink* sink,
                                                         ScratchPool* pool) {
  CheckSpec(spec);
  LH_CHECK(!IsDirect(spec.desc.kind) && spec.desc.order != Order::kRank) << ToString(spec.desc);
  Outline outline(spec);
  if (spec.size == 1 || outline.layout.chunks().empty()) return MakeLocalAttempt(spec);
  return RingAttempt::Make(spec, std::move(outline), sink, pool);
}

}  // namespace longhaul::peerd
