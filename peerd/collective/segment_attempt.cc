#include "peerd/collective/segment_attempt.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/collective/kernels.h"

namespace longhaul::peerd {
namespace {

// The most grains in a segment. More gain nothing, and the number must fit into a cookie.
constexpr uint64_t kSegmentGrainsMax = 64;

}  // namespace

Outline::Outline(const AttemptSpec& spec) : layout(spec, spec.size), inputs(InputsOf(spec)) {
  const int members = static_cast<int>(spec.targets.size());
  if (!layout.chunks().empty() && layout.chunks().front().to_position < 0) {
    // A target that is not a source can be written to at once.
    lead = 0;
    for (int i = members - 1; i >= 0; --i) {
      if (!IsInPlace(spec, i)) lead = i;
    }
  } else {
    for (const Layout::Chunk& chunk : layout.chunks()) {
      lead = chunk.to_local;
      if (lead >= 0) break;
    }
  }
  in_place = spec.reduces() && lead >= 0 && IsInPlace(spec, lead);
}

absl::Status SegmentAttempt::Borrow(const AttemptSpec& spec, const Outline& outline, Memory* memory,
                                    ScratchPool* pool) {
  uint64_t slots = Aligned(outline.layout.bytes()) * memory->slot_width;
  if (spec.desc.Encodes()) {
    slots = 0;
    uint64_t elements = 0;
    for (const Layout::Chunk& chunk : outline.layout.chunks()) {
      const uint64_t count = chunk.bytes / SizeOf(chunk.dtype);
      memory->slot_begin.push_back(slots);
      memory->error_begin.push_back(elements);
      slots += EncodedBytes(CodecOf(spec.desc), count);
      elements += count;
    }
    slots = Aligned(slots);
    memory->extra_bytes = Aligned(memory->extra_bytes);
    if (KeepsErrors(spec)) memory->error_bytes = sizeof(float) * elements;
  }
  uint64_t held = 0;
  if (HoldsResults(spec.desc)) {
    for (const Layout::Chunk& chunk : outline.layout.chunks()) {
      memory->held_begin.push_back(held);
      if (chunk.position == spec.position) held += Aligned(chunk.bytes);
    }
    memory->extra_bytes = Aligned(memory->extra_bytes);
    memory->error_bytes = Aligned(memory->error_bytes);
  }
  const uint64_t bytes = slots + memory->extra_bytes + memory->error_bytes + held;
  if (bytes == 0) return absl::OkStatus();
  const auto scratch = pool->Borrow(bytes);
  if (!scratch.ok()) return scratch.status();
  memory->scratch = *scratch;
  memory->extra = memory->scratch + slots;
  if (memory->error_bytes > 0) {
    memory->errors = reinterpret_cast<float*>(memory->extra + memory->extra_bytes);
  }
  if (held > 0) memory->held = memory->extra + memory->extra_bytes + memory->error_bytes;
  return absl::OkStatus();
}

SegmentAttempt::SegmentAttempt(const AttemptSpec& spec, Outline outline, AttemptSink* sink,
                               ScratchPool* pool, const Memory& memory)
    : spec_(spec),
      outline_(std::move(outline)),
      inputs_(outline_.inputs),
      plan_(outline_.layout.MakePlan(spec.grain_bytes)),
      scratch_(memory.scratch),
      slot_width_(memory.slot_width),
      in_place_(outline_.in_place && !spec.desc.Encodes()),
      divisor_(DivisorOf(spec)),
      marks_(plan_.grains()),
      landings_(pool),
      sink_(sink),
      pool_(pool),
      segment_grains_(
          std::clamp<uint64_t>(spec.segment_bytes / spec.grain_bytes, 1, kSegmentGrainsMax)),
      slot_begin_(memory.slot_begin),
      error_begin_(memory.error_begin),
      pending_errors_(memory.errors),
      held_(memory.held),
      held_begin_(memory.held_begin),
      blocks_not_finite_(spec.sources.size()),
      reads_out_(plan_.grains()) {
  if (spec.desc.Encodes()) coder_.emplace(spec_, inputs_);
  bool everybody = false;
  for (int c = 0; c < plan_.chunks(); ++c) {
    const Layout::Chunk& chunk = outline_.layout.chunks()[c];
    if (IsForHere(chunk)) results_open_ += plan_.GrainsOf(c).count;
    everybody = everybody || IsForEverybody(chunk);
  }
  for (int i = 0; everybody && i < static_cast<int>(spec.targets.size()); ++i) {
    if (i == outline_.lead && !coder_) continue;
    // Without phase reduce, what is overwritten is no input. But an op that encodes overwrites the
    // tensor of its root.
    const bool input = spec.reduces() || (coder_ && spec.cuts.front().local == i);
    (input && IsInPlace(spec, i) ? late_ : early_).push_back(i);
  }
}

uint8_t* SegmentAttempt::ResultOf(const Plan::Grains& grains) const {
  const Layout::Chunk& chunk = ChunkOf(grains);
  if (held_ != nullptr) {
    return held_ + held_begin_[plan_.ChunkOf(grains.first)] + SkipOf(chunk, grains);
  }
  return TargetOf(IsForEverybody(chunk) ? outline_.lead : chunk.to_local, grains);
}

uint8_t* SegmentAttempt::TargetOf(int member, const Plan::Grains& grains) const {
  const Layout::Chunk& chunk = ChunkOf(grains);
  return spec_.targets[member][chunk.piece] + chunk.target + SkipOf(chunk, grains);
}

uint8_t* SegmentAttempt::SlotOf(const Plan::Grains& grains) const {
  const Layout::Chunk& chunk = ChunkOf(grains);
  if (coder_) {
    return scratch_ + slot_begin_[plan_.ChunkOf(grains.first)] +
           coder_->BytesOf(chunk.dtype, SkipOf(chunk, grains));
  }
  const uint64_t width = IsHalf(chunk.dtype) ? slot_width_ : 1;
  return scratch_ + chunk.offset * slot_width_ + SkipOf(chunk, grains) * width;
}

const uint8_t* SegmentAttempt::SourceOf(const Plan::Grains& grains) const {
  const Layout::Chunk& chunk = ChunkOf(grains);
  const int member = spec_.reduces() ? inputs_[0].member : chunk.local;
  return spec_.sources[member][chunk.piece] + chunk.source + SkipOf(chunk, grains);
}

float* SegmentAttempt::PendingErrorOf(const Plan::Grains& grains) const {
  if (pending_errors_ == nullptr) return nullptr;
  const Layout::Chunk& chunk = ChunkOf(grains);
  return pending_errors_ + error_begin_[plan_.ChunkOf(grains.first)] +
         SkipOf(chunk, grains) / SizeOf(chunk.dtype);
}

void SegmentAttempt::EncodeInput(const Plan::Grains& grains) {
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    if (marks_[grain] & kEncoded) continue;
    marks_[grain] |= kEncoded;
    const Plan::Grains one{grain, 1};
    coder_->EncodeInput(StretchOf(one), SlotOf(one), PendingErrorOf(one));
  }
  MarkErrorsKnown(grains);
}

void SegmentAttempt::AddEncoded(const Plan::Grains& grains, CodedSum sum) {
  sum.error = PendingErrorOf(grains);
  const uint64_t not_finite = coder_->Add(StretchOf(grains), sum);
  MarkErrorsKnown(grains);
  const int receiver = ChunkOf(grains).to_local;
  if (sum.result != nullptr && receiver >= 0) blocks_not_finite_[receiver] += not_finite;
}

void SegmentAttempt::MarkErrorsKnown(const Plan::Grains& grains) {
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) marks_[grain] |= kErrorKnown;
}

Plan::Grains SegmentAttempt::NextSegment(uint64_t first, uint64_t end, Form form) const {
  uint64_t most = segment_grains_;
  if (form == Form::kWide) most = std::max<uint64_t>(most / 2, 1);
  if (form == Form::kEncoded) {
    // About as many bytes are sent at once as if they were not encoded.
    const DType dtype = ChunkOf({first, 1}).dtype;
    most *= plan_.grain_bytes() / coder_->BytesOf(dtype, plan_.grain_bytes());
    most = std::clamp<uint64_t>(most, 1, kSegmentGrainsMax);
  }
  return {first, std::min(most, end - first)};
}

void SegmentAttempt::MakeLandings() {
  if (!in_place_ || outline_.layout.bytes() <= spec_.cached_bytes_max) return;
  // Sums that are float32 are not built in place.
  if (slot_width_ > 1 && spec_.pieces.size() == 1) return;
  landings_.Make(segment_grains_ * spec_.grain_bytes);
}

SegmentAttempt::~SegmentAttempt() {
  LH_CHECK(out_ == 0) << out_ << " segments are out";
  ReleaseScratch();
}

void SegmentAttempt::MarkAfter(uint64_t grain, uint16_t* marks, uint16_t before, uint16_t mark) {
  LH_CHECK((*marks & before) && !(*marks & mark))
      << "grain " << grain << " marks " << *marks << " mark " << mark;
  *marks |= mark;
}

std::optional<Plan::Grains> SegmentAttempt::Find(int from, const Segment& segment) const {
  const int chunk = plan_.ChunkAt(segment.offset);
  if (chunk < 0) return std::nullopt;
  const Layout::Chunk& of = outline_.layout.chunks()[chunk];
  const Form form = FormOf(of, segment.phase, from);
  // A segment has whole grains, or what is left of the chunk.
  const uint64_t left = of.offset + of.bytes - segment.offset;
  uint64_t bytes = left;
  if (BytesIn(form, of.dtype, left) != segment.bytes) {
    const uint64_t grain = BytesIn(form, of.dtype, plan_.grain_bytes());
    if (segment.bytes % grain != 0) return std::nullopt;
    bytes = segment.bytes / grain * plan_.grain_bytes();
  }
  return plan_.FindIn(chunk, {segment.offset, bytes});
}

absl::StatusOr<uint8_t*> SegmentAttempt::Place(int from, const Segment& segment) {
  LH_CHECK(started_ && !stopped_);
  const auto refuse = [&](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment refused: ", segment.phase == Phase::kReduce ? "reduce" : "gather",
                     " at byte ", segment.offset, " of ", segment.bytes, " bytes from position ",
                     from, " to ", spec_.position, " of ", spec_.size, ": ", why));
  };
  if (from < 0 || from >= spec_.size || from == spec_.position)
    return refuse("not from another position");
  const auto found = Find(from, segment);
  if (!found) return refuse("not as the tensor is cut");
  const bool reduce = segment.phase == Phase::kReduce;
  if (!reduce && segment.phase != Phase::kGather) return refuse("no such phase");
  if (!(reduce ? spec_.reduces() : spec_.gathers())) return refuse("the op has no such phase");
  if (const char* const why = Objection(from, *found, segment.phase)) return refuse(why);
  const uint16_t placed = reduce ? kReducePlaced : kGatherPlaced;
  for (uint64_t grain = found->first; grain < found->end(); ++grain) {
    if (MarksOf(grain, from) & placed) return refuse("it came before");
  }
  for (uint64_t grain = found->first; grain < found->end(); ++grain) MarksOf(grain, from) |= placed;
  if (reduce) return PlaceOf(from, *found);
  Overwrite(*found);
  return FinishedOf(*found);
}

Plan::Grains SegmentAttempt::GrainsOf(int from, const Segment& segment) const {
  const auto found = Find(from, segment);
  LH_CHECK(!stopped_ && found.has_value());
  return *found;
}

void SegmentAttempt::Abandoned(int from, const Segment& segment) {
  const Plan::Grains grains = GrainsOf(from, segment);
  const bool reduce = segment.phase == Phase::kReduce;
  const uint16_t placed = reduce ? kReducePlaced : kGatherPlaced;
  if (reduce) landings_.Give(plan_.RangeOf(grains));
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    uint16_t& marks = MarksOf(grain, from);
    LH_CHECK((marks & placed) && !(marks & (reduce ? kReduceReceived : kGatherReceived)))
        << "grain " << grain << " marks " << marks;
    marks &= static_cast<uint16_t>(~placed);
  }
}

void SegmentAttempt::Received(int from, const Segment& segment) {
  const Plan::Grains grains = GrainsOf(from, segment);
  const bool reduce = segment.phase == Phase::kReduce;
  bytes_received_ += segment.bytes;
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    MarkAfter(grain, &MarksOf(grain, from), reduce ? kReducePlaced : kGatherPlaced,
              reduce ? kReduceReceived : kGatherReceived);
  }
  // First pass the segment on, because other peers wait for it. Then copy it to the local targets.
  OnReceived(from, grains, segment.phase);
  if (!reduce) Finished(grains);
  MaybeComplete();
}

uint64_t SegmentAttempt::CookieOf(int to, Phase phase, const Plan::Grains& grains) const {
  const uint64_t which = grains.first * kSegmentGrainsMax + (grains.count - 1);
  return (which * spec_.size + to) * 2 + (phase == Phase::kReduce ? 0 : 1);
}

void SegmentAttempt::Hand(int to, Phase phase, const Plan::Grains& grains, const uint8_t* data) {
  const Form form = FormOf(ChunkOf(grains), phase, spec_.position);
  for (uint64_t first = grains.first; first < grains.end();) {
    const Plan::Grains part = NextSegment(first, grains.end(), form);
    for (uint64_t grain = part.first; grain < part.end(); ++grain) {
      MarksOf(grain, to) |= phase == Phase::kReduce ? kReduceHanded : kGatherHanded;
      if (phase == Phase::kGather) {
        ++reads_out_[grain];
      } else if (marks_[grain] & kOverwritten) {
        marks_[grain] |= kSumHanded;
        ++reads_out_[grain];
      }
    }
    ++out_;
    const uint64_t bytes = WireBytes(part, form);
    bytes_sent_ += bytes;
    sink_->SendSegment(to, {phase, plan_.RangeOf(part).offset, static_cast<uint32_t>(bytes)}, data,
                       CookieOf(to, phase, part));
    data += bytes;
    first = part.end();
  }
}

void SegmentAttempt::Take(const Plan::Grains& grains, std::deque<Plan::Grains>* list) {
  Plan::Grains& front = list->front();
  front = {grains.end(), front.count - grains.count};
  if (front.count == 0) list->pop_front();
}

void SegmentAttempt::Sent(uint64_t cookie) {
  const Phase phase = cookie % 2 == 0 ? Phase::kReduce : Phase::kGather;
  const bool reduce = phase == Phase::kReduce;
  const int to = static_cast<int>(cookie / 2 % spec_.size);
  const uint64_t which = cookie / 2 / spec_.size;
  const Plan::Grains grains{which / kSegmentGrainsMax, which % kSegmentGrainsMax + 1};
  LH_CHECK(grains.end() <= plan_.grains()) << "cookie " << cookie;
  --out_;
  sends_open_ -= grains.count;
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    MarkAfter(grain, &MarksOf(grain, to), reduce ? kReduceHanded : kGatherHanded,
              reduce ? kReduceSent : kGatherSent);
    if (!reduce || (marks_[grain] & kSumHanded)) --reads_out_[grain];
    if (reduce) marks_[grain] &= static_cast<uint16_t>(~kSumHanded);
  }
  if (stopped_) {
    if (in_place_) restore_.push_back(grains);
    if (Idle()) ReleaseScratch();
    return;
  }
  OnSent(grains, phase);
  MaybeComplete();
}

void SegmentAttempt::Stop() {
  LH_CHECK(!committed_);
  if (std::exchange(stopped_, true)) return;
  if (in_place_ && plan_.grains() > 0) restore_.push_back({0, plan_.grains()});
  if (Idle()) ReleaseScratch();
}

void SegmentAttempt::Commit() {
  LH_CHECK(complete_ && !stopped_ && !committed_);
  committed_ = true;
}

bool SegmentAttempt::HasWork() const {
  if (stopped_) return !restore_.empty();
  if (committed_) {
    const bool any = !late_.empty() || pending_errors_ != nullptr || held_ != nullptr;
    return any && copied_ < plan_.grains();
  }
  return MayGoOn();
}

uint64_t SegmentAttempt::Work(uint64_t bytes_max) {
  if (stopped_) return RestoreSome(bytes_max);
  if (committed_) return CopySome(bytes_max);
  uint64_t worked = 0;
  while (worked < bytes_max && MayGoOn()) worked += GoOn();
  if (worked > 0) MaybeComplete();
  return worked;
}

uint64_t SegmentAttempt::RestoreSome(uint64_t bytes_max) {
  uint64_t worked = 0;
  while (worked < bytes_max && !restore_.empty()) {
    Plan::Grains& grains = restore_.back();
    worked += Restore(grains.first);
    ++grains.first;
    if (--grains.count == 0) restore_.pop_back();
  }
  if (Idle()) ReleaseScratch();
  return worked;
}

uint64_t SegmentAttempt::CopySome(uint64_t bytes_max) {
  // Grain by grain, so that the result is read from memory once for all copies.
  uint64_t worked = 0;
  while (worked < bytes_max && HasWork()) {
    const Plan::Grains grain{copied_++, 1};
    worked += CopyHeld(grain);
    if (coder_) {
      // The input in place is overwritten, but its error is known.
      worked += DecodeTo(late_, grain) + CommitErrors(grain) + sizeof(uint64_t);
      continue;
    }
    if (late_.empty()) continue;
    const uint64_t bytes = plan_.RangeOf(grain).bytes;
    const uint8_t* const result = ResultOf(grain);
    for (const int member : late_) std::memcpy(TargetOf(member, grain), result, bytes);
    worked += bytes * (1 + late_.size());
  }
  return worked;
}

uint64_t SegmentAttempt::CopyHeld(const Plan::Grains& grains) {
  if (held_ == nullptr) return 0;
  const Layout::Chunk& chunk = ChunkOf(grains);
  // Looking at a grain counts as work, too.
  if (chunk.to_local < 0) return sizeof(chunk);
  const uint64_t bytes = plan_.RangeOf(grains).bytes;
  std::memcpy(TargetOf(chunk.to_local, grains), ResultOf(grains), bytes);
  return 2 * bytes;
}

uint64_t SegmentAttempt::DecodeTo(const std::vector<int>& members, const Plan::Grains& grains) {
  const Layout::Chunk& chunk = ChunkOf(grains);
  if (members.empty() || !IsForEverybody(chunk)) return 0;
  const Stretch stretch = StretchOf(grains);
  std::vector<uint8_t*> targets;
  targets.reserve(members.size());
  for (const int member : members) {
    targets.push_back(spec_.targets[member][chunk.piece] + chunk.target + stretch.skip);
  }
  const uint64_t not_finite = coder_->Decode(stretch, SlotOf(grains), targets);
  for (const int member : members) blocks_not_finite_[member] += not_finite;
  return stretch.bytes * targets.size();
}

uint64_t SegmentAttempt::CommitErrors(const Plan::Grains& grains) {
  const float* const pending = PendingErrorOf(grains);
  if (pending == nullptr || !(marks_[grains.first] & kErrorKnown)) return 0;
  const Stretch stretch = StretchOf(grains);
  const uint64_t count = stretch.bytes / SizeOf(stretch.chunk->dtype);
  const auto error_of = [&](int member) {
    return ErrorOf(spec_, member, *stretch.chunk, stretch.skip);
  };
  // The inputs of a position travel together, so they have one error: the first member that keeps
  // errors gets it.
  bool taken = false;
  for (const LocalInput& input : inputs_) {
    float* const error = error_of(input.member);
    if (error == nullptr) continue;
    if (std::exchange(taken, true)) {
      std::fill_n(error, count, 0.0F);
    } else {
      std::copy_n(pending, count, error);
    }
  }
  if (!inputs_.empty()) return count * sizeof(float);
  // Nobody here gave anything, but this position has encoded a sum. What the sum lost is added to
  // the error of a member, whose input will take it along some time.
  for (int member = 0; !taken && member < static_cast<int>(spec_.errors.size()); ++member) {
    float* const error = error_of(member);
    if (error == nullptr) continue;
    for (uint64_t i = 0; i < count; ++i) error[i] += pending[i];
    taken = true;
  }
  return count * sizeof(float);
}

uint64_t SegmentAttempt::GoOn() {
  const Plan::Grains range = uncopied_.front();
  if (coder_) {
    const Plan::Grains grains = NextSegment(range.first, range.end(), Form::kEncoded);
    EncodeInput(grains);
    Take(grains, &uncopied_);
    Finished(grains);
    return 2 * plan_.RangeOf(grains).bytes;
  }
  const Plan::Grains grains = NextSegment(range.first, range.end(), Form::kPlain);
  const uint8_t* const own = SourceOf(grains);
  uint8_t* const result = ResultOf(grains);
  const uint64_t bytes = plan_.RangeOf(grains).bytes;
  if (own != result) std::memcpy(result, own, bytes);
  Take(grains, &uncopied_);
  Finished(grains);
  return 2 * bytes;
}

void SegmentAttempt::Finished(const Plan::Grains& grains) {
  results_open_ -= grains.count;
  const Layout::Chunk& chunk = ChunkOf(grains);
  if (!IsForEverybody(chunk) || early_.empty()) return;
  if (coder_) {
    DecodeTo(early_, grains);
    return;
  }
  const uint64_t skip = SkipOf(chunk, grains);
  const uint64_t bytes = plan_.RangeOf(grains).bytes;
  const uint8_t* const result = ResultOf(grains);
  const uint8_t* const own = chunk.local < 0 || spec_.reduces() ? nullptr : SourceOf(grains);
  for (const int member : early_) {
    uint8_t* const target = spec_.targets[member][chunk.piece] + chunk.target + skip;
    if (target == own) continue;
    if (outline_.layout.bytes() > spec_.cached_bytes_max) {
      CopyAside(target, result, bytes);
    } else {
      std::memcpy(target, result, bytes);
    }
  }
}

void SegmentAttempt::Keep(const Plan::Grains& grains) {
  if (!in_place_) return;
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    if (marks_[grain] & kKept) continue;
    marks_[grain] |= kKept;
    CopyAside(SlotOf({grain, 1}), ResultOf({grain, 1}), plan_.RangeOf({grain, 1}).bytes);
  }
}

void SegmentAttempt::Overwrite(const Plan::Grains& grains) {
  if (!in_place_) return;
  Keep(grains);
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) marks_[grain] |= kOverwritten;
}

void SegmentAttempt::SumInPlace(const Plan::Grains& grains, const SumFunction& sum) {
  const bool landed = landings_.Of(plan_.RangeOf(grains)) != nullptr;
  // Fits into the first-level cache, together with the inputs.
  alignas(64) uint8_t block[16 << 10];
  uint64_t before = 0;  // bytes of the grains that are done
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    const uint64_t bytes = plan_.RangeOf({grain, 1}).bytes;
    uint8_t* const place = ResultOf({grain, 1});
    uint8_t* const slot = SlotOf({grain, 1});
    for (uint64_t done = 0; done < bytes; done += sizeof(block)) {
      const uint64_t n = std::min<uint64_t>(sizeof(block), bytes - done);
      if (landed) {
        CopyAside(slot + done, place + done, n);
        sum(before + done, n, place + done);
        continue;
      }
      // What lies in the slot may be in the sum. If it is float32, it is farther ahead than the
      // original that is written there.
      sum(before + done, n, block);
      std::memcpy(slot + done, place + done, n);
      std::memcpy(place + done, block, n);
    }
    before += bytes;
    marks_[grain] |= kKept | kOverwritten;
  }
}

uint64_t SegmentAttempt::Restore(uint64_t grain) {
  // Looking at a grain counts as work, too: it reads the two numbers.
  if (reads_out_[grain] > 0 || !(marks_[grain] & kOverwritten)) return 2 * sizeof(uint16_t);
  // Restore only once: later the memory may belong to another op.
  marks_[grain] &= static_cast<uint16_t>(~kOverwritten);
  const uint64_t bytes = plan_.RangeOf({grain, 1}).bytes;
  std::memcpy(ResultOf({grain, 1}), SlotOf({grain, 1}), bytes);
  return 2 * bytes;
}

// Callers must call it last, because the sink may call Stop() or Commit() from within Complete().
void SegmentAttempt::MaybeComplete() {
  if (results_open_ > 0 || sends_open_ > 0 || complete_) return;
  complete_ = true;
  sink_->Complete();
}

void SegmentAttempt::ReleaseScratch() {
  if (uint8_t* const scratch = std::exchange(scratch_, nullptr)) pool_->Give(scratch);
  landings_.Release();
}

}  // namespace longhaul::peerd
