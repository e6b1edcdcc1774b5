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

constexpr uint64_t kAlignment = 64;

// The number of a send: which segment, to whom, in which phase.
uint64_t CookieOf(uint64_t index, int size, int to, Phase phase) {
  return (index * size + to) * 2 + (phase == Phase::kReduce ? 0 : 1);
}

}  // namespace

absl::StatusOr<SegmentAttempt::Memory> SegmentAttempt::TakeMemory(const AttemptSpec& spec,
                                                                  uint64_t extra_bytes,
                                                                  ScratchPool* pool) {
  Memory memory;
  // A target that is not an input can be written to at once.
  for (size_t i = 0; i < spec.targets.size() && memory.result == nullptr; ++i) {
    if (spec.targets[i] != spec.sources[i]) memory.result = spec.targets[i];
  }
  const uint64_t whole =
      memory.result == nullptr ? (spec.desc.bytes() + kAlignment - 1) / kAlignment * kAlignment : 0;
  if (whole + extra_bytes == 0) return memory;
  auto scratch = pool->Take(whole + extra_bytes);
  if (!scratch.ok()) return scratch.status();
  memory.scratch = *scratch;
  memory.extra = memory.scratch + whole;
  if (memory.result == nullptr) {
    memory.result = spec.targets.size() == 1 ? spec.targets[0] : memory.scratch;
  }
  return memory;
}

SegmentAttempt::SegmentAttempt(const AttemptSpec& spec, AttemptSink* sink, ScratchPool* pool,
                               const Memory& memory)
    : spec_(spec),
      inputs_(InputsOf(spec)),
      plan_(spec.desc.bytes(), spec.size, spec.segment_bytes),
      scratch_(memory.scratch),
      result_(memory.result),
      in_place_(spec.sources.size() == 1 && memory.result == spec.sources[0]),
      marks_(plan_.segments()),
      results_open_(plan_.segments()),
      sink_(sink),
      pool_(pool),
      gathers_out_(plan_.segments()) {}

SegmentAttempt::~SegmentAttempt() {
  LH_CHECK(out_ == 0) << out_ << " segments are out";
  ReleaseScratch();
}

void SegmentAttempt::MarkAfter(uint64_t index, uint16_t* marks, uint16_t before, uint16_t mark) {
  LH_CHECK((*marks & before) && !(*marks & mark))
      << "segment " << index << " marks " << *marks << " mark " << mark;
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
  if (!found) return refuse("no segment of the plan");
  if (segment.phase != Phase::kReduce && segment.phase != Phase::kGather) {
    return refuse("no such phase");
  }
  if (const char* const why = Objection(from, *found, segment.phase)) return refuse(why);
  const bool reduce = segment.phase == Phase::kReduce;
  uint16_t& marks = MarksOf(*found, from);
  const uint16_t placed = reduce ? kReducePlaced : kGatherPlaced;
  if (marks & placed) return refuse("it came before");
  marks |= placed;
  if (reduce) return PlaceOf(from, piece);
  Overwrite(*found);
  return result_ + segment.offset;
}

uint64_t SegmentAttempt::IndexOf(const Segment& segment) const {
  const auto found = plan_.Find({segment.offset, segment.bytes});
  LH_CHECK(!stopped_ && found.has_value());
  return *found;
}

void SegmentAttempt::Abandoned(int from, const Segment& segment) {
  const uint64_t index = IndexOf(segment);
  const bool reduce = segment.phase == Phase::kReduce;
  const uint16_t placed = reduce ? kReducePlaced : kGatherPlaced;
  uint16_t& marks = MarksOf(index, from);
  LH_CHECK((marks & placed) && !(marks & (reduce ? kReduceReceived : kGatherReceived)))
      << "segment " << index << " marks " << marks;
  marks &= static_cast<uint16_t>(~placed);
}

void SegmentAttempt::Received(int from, const Segment& segment) {
  const uint64_t index = IndexOf(segment);
  bytes_received_ += segment.bytes;
  uint16_t* const marks = &MarksOf(index, from);
  if (segment.phase == Phase::kReduce) {
    MarkAfter(index, marks, kReducePlaced, kReduceReceived);
  } else {
    MarkAfter(index, marks, kGatherPlaced, kGatherReceived);
    --results_open_;
  }
  OnReceived(from, index, segment.phase);
  MaybeComplete();
}

void SegmentAttempt::Hand(int to, Phase phase, uint64_t index, const uint8_t* data) {
  const Plan::Piece piece = plan_.Segment(index);
  MarksOf(index, to) |= phase == Phase::kReduce ? kReduceHanded : kGatherHanded;
  if (phase == Phase::kGather) ++gathers_out_[index];
  ++out_;
  bytes_sent_ += piece.bytes;
  sink_->SendSegment(to, {phase, piece.offset, static_cast<uint32_t>(piece.bytes)}, data,
                     CookieOf(index, spec_.size, to, phase));
}

void SegmentAttempt::Sent(uint64_t cookie) {
  const Phase phase = cookie % 2 == 0 ? Phase::kReduce : Phase::kGather;
  const int to = static_cast<int>(cookie / 2 % spec_.size);
  const uint64_t index = cookie / 2 / spec_.size;
  LH_CHECK(index < marks_.size()) << "cookie " << cookie;
  uint16_t* const marks = &MarksOf(index, to);
  if (phase == Phase::kReduce) {
    MarkAfter(index, marks, kReduceHanded, kReduceSent);
  } else {
    MarkAfter(index, marks, kGatherHanded, kGatherSent);
    --gathers_out_[index];
  }
  --out_;
  --sends_open_;
  if (stopped_) {
    if (gathers_out_[index] == 0) Restore(index);
    if (Idle()) ReleaseScratch();
    return;
  }
  OnSent(index, phase);
  MaybeComplete();
}

void SegmentAttempt::Stop() {
  LH_CHECK(!committed_);
  if (std::exchange(stopped_, true)) return;
  for (uint64_t index = 0; index < marks_.size(); ++index) {
    if (gathers_out_[index] == 0) Restore(index);
  }
  if (Idle()) ReleaseScratch();
}

void SegmentAttempt::Commit() {
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

void SegmentAttempt::Keep(uint64_t index) {
  if (!in_place_ || (marks_[index] & kKept)) return;
  marks_[index] |= kKept;
  const Plan::Piece piece = plan_.Segment(index);
  CopyAside(scratch_ + piece.offset, result_ + piece.offset, piece.bytes);
}

void SegmentAttempt::Overwrite(uint64_t index) {
  if (!in_place_) return;
  Keep(index);
  marks_[index] |= kOverwritten;
}

void SegmentAttempt::FinishInPlace(uint64_t index, const Inputs& inputs) {
  const Plan::Piece piece = plan_.Segment(index);
  alignas(64) uint8_t block[8 << 10];
  for (uint64_t done = 0; done < piece.bytes; done += sizeof(block)) {
    const uint64_t n = std::min<uint64_t>(sizeof(block), piece.bytes - done);
    uint8_t* const own = result_ + piece.offset + done;
    ReduceInputs(spec_.desc, inputs, done, n, block);
    DivideSums(spec_, n, block);
    std::memcpy(scratch_ + piece.offset + done, own, n);
    std::memcpy(own, block, n);
  }
  marks_[index] |= kKept | kOverwritten;
}

void SegmentAttempt::Restore(uint64_t index) {
  if (!(marks_[index] & kOverwritten)) return;
  // Not twice: the inputs may be another op's by then.
  marks_[index] &= static_cast<uint16_t>(~kOverwritten);
  const Plan::Piece piece = plan_.Segment(index);
  std::memcpy(result_ + piece.offset, scratch_ + piece.offset, piece.bytes);
}

// Last in whatever calls it: the sink may stop or commit from within Complete().
void SegmentAttempt::MaybeComplete() {
  if (results_open_ > 0 || sends_open_ > 0 || complete_) return;
  complete_ = true;
  sink_->Complete();
}

void SegmentAttempt::ReleaseScratch() {
  if (uint8_t* const scratch = std::exchange(scratch_, nullptr)) pool_->Give(scratch);
}

}  // namespace longhaul::peerd
