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

// The number of landings. On links with a short latency about so many segments arrive at a time,
// and so many fit into the cache of one processor. On links with a long latency most segments find
// no free landing, but there the processor has time.
constexpr uint64_t kLandings = 4;
constexpr uint64_t kLandingBytesMax = 512 << 10;

}  // namespace

absl::StatusOr<SegmentAttempt::Memory> SegmentAttempt::BorrowMemory(const AttemptSpec& spec,
                                                                    uint64_t extra_bytes,
                                                                    ScratchPool* pool) {
  Memory memory;
  if (!spec.reduces()) {
    memory.result = spec.targets.front();
    return memory;
  }
  // A target that is not a source can be written to at once.
  for (size_t i = 0; spec.gathers() && i < spec.targets.size() && memory.result == nullptr; ++i) {
    if (spec.targets[i] != spec.sources[i]) memory.result = spec.targets[i];
  }
  const uint64_t whole = memory.result == nullptr ? Aligned(spec.bytes()) : 0;
  if (whole + extra_bytes == 0) return memory;
  auto scratch = pool->Borrow(whole + extra_bytes);
  if (!scratch.ok()) return scratch.status();
  memory.scratch = *scratch;
  memory.extra = memory.scratch + whole;
  if (memory.result == nullptr) {
    const bool in_place = spec.gathers() && spec.targets.size() == 1;
    memory.result = in_place ? spec.targets[0] : memory.scratch;
  }
  return memory;
}

SegmentAttempt::SegmentAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool,
                               const Memory& memory)
    : spec_(spec),
      inputs_(InputsOf(spec)),
      plan_(PlanOf(spec)),
      scratch_(memory.scratch),
      result_(memory.result),
      in_place_(spec.cuts.empty() && spec.sources.size() == 1 && memory.result == spec.sources[0]),
      marks_(plan_.grains()),
      results_open_(plan_.grains()),
      sink_(sink),
      pool_(pool),
      segment_grains_(
          std::clamp<uint64_t>(spec.segment_bytes / spec.grain_bytes, 1, kSegmentGrainsMax)),
      reads_out_(plan_.grains()) {
  if (!spec.gathers()) results_open_ = 0;
  for (size_t c = 0; !spec.gathers() && c < spec.cuts.size(); ++c) {
    if (spec.cuts[c].local < 0) continue;
    const int chunk = static_cast<int>(c);
    const Plan::Piece piece = plan_.Chunk(chunk);
    late_.push_back({spec.targets[spec.cuts[c].local], piece.offset, piece.offset + piece.bytes});
    results_open_ += plan_.GrainsOf(chunk).count;
  }
  for (size_t i = 0; spec.gathers() && i < spec.targets.size(); ++i) {
    if (spec.targets[i] == result_) continue;
    if (spec.targets[i] == spec.sources[i]) {
      late_.push_back({spec.targets[i], 0, plan_.bytes()});
    } else {
      early_targets_.push_back(spec.targets[i]);
    }
  }
}

Plan SegmentAttempt::PlanOf(const AttemptSpec& spec) {
  if (spec.cuts.empty()) return {spec.desc.bytes(), spec.size, spec.grain_bytes};
  return Plan::OfEqual(static_cast<int>(spec.cuts.size()), spec.desc.part_bytes(),
                       spec.grain_bytes);
}

void SegmentAttempt::MakeLandings() {
  if (!in_place_ || plan_.bytes() <= spec_.cached_bytes_max) return;
  landing_bytes_ = std::min(Aligned(segment_grains_ * spec_.grain_bytes), kLandingBytesMax);
  // Without memory for landings an op takes longer, but is right.
  const absl::StatusOr<uint8_t*> memory = pool_->Borrow(kLandings * landing_bytes_);
  for (uint64_t i = 0; memory.ok() && i < kLandings; ++i) {
    landings_.push_back({*memory + i * landing_bytes_, std::nullopt});
  }
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
  const Plan::Piece piece{segment.offset, segment.bytes};
  const auto found = plan_.Find(piece);
  if (!found) return refuse("not as the tensor is cut");
  if (segment.phase != Phase::kReduce && segment.phase != Phase::kGather) {
    return refuse("no such phase");
  }
  if (const char* const why = Objection(from, *found, segment.phase)) return refuse(why);
  const bool reduce = segment.phase == Phase::kReduce;
  const uint16_t placed = reduce ? kReducePlaced : kGatherPlaced;
  for (uint64_t grain = found->first; grain < found->end(); ++grain) {
    if (MarksOf(grain, from) & placed) return refuse("it came before");
  }
  for (uint64_t grain = found->first; grain < found->end(); ++grain) MarksOf(grain, from) |= placed;
  if (reduce) return PlaceOf(from, *found);
  Overwrite(*found);
  return result_ + segment.offset;
}

Plan::Grains SegmentAttempt::GrainsOf(const Segment& segment) const {
  const auto found = plan_.Find({segment.offset, segment.bytes});
  LH_CHECK(!stopped_ && found.has_value());
  return *found;
}

void SegmentAttempt::Abandoned(int from, const Segment& segment) {
  const Plan::Grains grains = GrainsOf(segment);
  const bool reduce = segment.phase == Phase::kReduce;
  const uint16_t placed = reduce ? kReducePlaced : kGatherPlaced;
  if (reduce) GiveLanding(plan_.PieceOf(grains));
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    uint16_t& marks = MarksOf(grain, from);
    LH_CHECK((marks & placed) && !(marks & (reduce ? kReduceReceived : kGatherReceived)))
        << "grain " << grain << " marks " << marks;
    marks &= static_cast<uint16_t>(~placed);
  }
}

void SegmentAttempt::Received(int from, const Segment& segment) {
  const Plan::Grains grains = GrainsOf(segment);
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
  for (uint64_t first = grains.first; first < grains.end(); first += segment_grains_) {
    const Plan::Grains part = NextSegment(first, grains.end());
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
    const Plan::Piece piece = plan_.PieceOf(part);
    bytes_sent_ += piece.bytes;
    sink_->SendSegment(to, {phase, piece.offset, static_cast<uint32_t>(piece.bytes)}, data,
                       CookieOf(to, phase, part));
    data += piece.bytes;
  }
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
  if (committed_) return !late_.empty() && copied_ < plan_.bytes();
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
  // Block by block, so that the result is read from memory once for all copies.
  constexpr uint64_t kBlockBytes = 16 << 10;
  uint64_t worked = 0;
  while (worked < bytes_max && HasWork()) {
    const uint64_t n = std::min(kBlockBytes, plan_.bytes() - copied_);
    worked += n;
    for (const Late& late : late_) {
      const uint64_t begin = std::max(copied_, late.begin);
      const uint64_t end = std::min(copied_ + n, late.end);
      if (begin >= end) continue;
      std::memcpy(late.to + (begin - late.begin), result_ + begin, end - begin);
      worked += end - begin;
    }
    copied_ += n;
  }
  return worked;
}

void SegmentAttempt::Finished(const Plan::Grains& grains) {
  results_open_ -= grains.count;
  const Plan::Piece piece = plan_.PieceOf(grains);
  for (uint8_t* target : early_targets_) {
    if (plan_.bytes() > spec_.cached_bytes_max) {
      CopyAside(target + piece.offset, result_ + piece.offset, piece.bytes);
    } else {
      std::memcpy(target + piece.offset, result_ + piece.offset, piece.bytes);
    }
  }
}

void SegmentAttempt::Keep(const Plan::Grains& grains) {
  if (!in_place_) return;
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    if (marks_[grain] & kKept) continue;
    marks_[grain] |= kKept;
    const Plan::Piece piece = plan_.PieceOf({grain, 1});
    CopyAside(scratch_ + piece.offset, result_ + piece.offset, piece.bytes);
  }
}

void SegmentAttempt::Overwrite(const Plan::Grains& grains) {
  if (!in_place_) return;
  Keep(grains);
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) marks_[grain] |= kOverwritten;
}

uint8_t* SegmentAttempt::BorrowLanding(const Plan::Piece& piece) {
  if (piece.bytes > landing_bytes_) return nullptr;
  for (Landing& landing : landings_) {
    if (landing.offset) continue;
    landing.offset = piece.offset;
    return landing.data;
  }
  return nullptr;
}

uint8_t* SegmentAttempt::LandingOf(const Plan::Piece& piece) const {
  for (const Landing& landing : landings_) {
    if (landing.offset == piece.offset) return landing.data;
  }
  return nullptr;
}

void SegmentAttempt::GiveLanding(const Plan::Piece& piece) {
  for (Landing& landing : landings_) {
    if (landing.offset == piece.offset) landing.offset.reset();
  }
}

void SegmentAttempt::SumInPlace(const Plan::Grains& grains, const Inputs& inputs, bool finished) {
  const Plan::Piece piece = plan_.PieceOf(grains);
  // Fits into the first-level cache, together with the inputs.
  alignas(64) uint8_t block[16 << 10];
  const bool landed = LandingOf(piece) != nullptr;
  for (uint64_t done = 0; done < piece.bytes; done += sizeof(block)) {
    const uint64_t n = std::min<uint64_t>(sizeof(block), piece.bytes - done);
    uint8_t* const own = result_ + piece.offset + done;
    uint8_t* const kept = scratch_ + piece.offset + done;
    uint8_t* const sum = landed ? own : block;
    if (landed) CopyAside(kept, own, n);
    ReduceInputs(spec_.desc, inputs, done, n, sum);
    if (finished) DivideSums(spec_, n, sum);
    if (landed) continue;
    std::memcpy(kept, own, n);
    std::memcpy(own, block, n);
  }
  for (uint64_t grain = grains.first; grain < grains.end(); ++grain) {
    marks_[grain] |= kKept | kOverwritten;
  }
}

uint64_t SegmentAttempt::Restore(uint64_t grain) {
  // Looking at a grain counts as work, too: it reads the two numbers.
  if (reads_out_[grain] > 0 || !(marks_[grain] & kOverwritten)) return 2 * sizeof(uint16_t);
  // Restore only once: later the memory may belong to another op.
  marks_[grain] &= static_cast<uint16_t>(~kOverwritten);
  const Plan::Piece piece = plan_.PieceOf({grain, 1});
  std::memcpy(result_ + piece.offset, scratch_ + piece.offset, piece.bytes);
  return 2 * piece.bytes;
}

// Callers must call it last, because the sink may call Stop() or Commit() from within Complete().
void SegmentAttempt::MaybeComplete() {
  if (results_open_ > 0 || sends_open_ > 0 || complete_) return;
  complete_ = true;
  sink_->Complete();
}

void SegmentAttempt::ReleaseScratch() {
  if (uint8_t* const scratch = std::exchange(scratch_, nullptr)) pool_->Give(scratch);
  if (!landings_.empty()) pool_->Give(landings_.front().data);
  landings_.clear();
}

}  // namespace longhaul::peerd
