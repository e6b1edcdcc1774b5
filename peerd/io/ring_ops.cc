#include "peerd/io/ring_ops.h"

#include <errno.h>
#include <sys/utsname.h>
#include <time.h>

#include <algorithm>
#include <functional>

#include "base/check.h"

namespace longhaul::peerd {

Tick MonotonicNow() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return Tick{int64_t{ts.tv_sec} * 1000000 + ts.tv_nsec / 1000};
}

std::string KernelRelease() {
  utsname name;
  return uname(&name) == 0 ? std::string(name.release) : std::string("unknown");
}

// An id is the generation of its entry in the slab, from 1 on, above the number of the entry.
IoId RingOps::New(Kind kind, IoCallback done) {
  if (free_.empty()) {
    LH_CHECK(ops_.size() < kIdMin - 1);
    free_.push_back(static_cast<uint32_t>(ops_.size()));
    ops_.emplace_back();
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  Op& op = ops_[index];
  op.kind = kind;
  op.done = std::move(done);
  return op.generation * kIdMin | index;
}

const RingOps::Op* RingOps::Find(IoId id) const {
  const uint32_t index = Index(id);
  if (index >= ops_.size()) return nullptr;
  const Op& op = ops_[index];
  return op.kind != Kind::kFree && op.generation == id / kIdMin ? &op : nullptr;
}

IoId RingOps::Add(IoCallback done) {
  ++open_;
  return New(Kind::kCarriedOut, std::move(done));
}

IoId RingOps::AddTimer(Tick at, IoCallback done) {
  const IoId id = New(Kind::kTimer, std::move(done));
  timers_.push_back({at, timer_order_++, id});
  std::push_heap(timers_.begin(), timers_.end(), std::greater<>());
  ++timers_live_;
  return id;
}

void RingOps::BeforeSubmit(absl::AnyInvocable<void()> run) {
  before_submit_.push_back(std::move(run));
}

bool RingOps::Has(IoId id) const {
  const Op* op = Find(id);
  return op != nullptr && op->kind == Kind::kCarriedOut;
}

bool RingOps::TimerLive(IoId id) const {
  const Op* op = Find(id);
  return op != nullptr && op->kind == Kind::kTimer;
}

bool RingOps::CancelTimer(IoId id) {
  if (!TimerLive(id)) return false;
  --timers_live_;
  Find(id)->kind = Kind::kEnding;
  ready_.emplace_back(id, -ECANCELED);
  return true;
}

void RingOps::EndLater(IoId id, int value) {
  LH_CHECK(Has(id));
  --open_;
  Find(id)->kind = Kind::kEnding;
  ready_.emplace_back(id, value);
}

// The entry is free before the callback runs.
void RingOps::End(IoId id, IoResult result) {
  Op* op = Find(id);
  LH_CHECK(op != nullptr);
  IoCallback done = std::move(op->done);
  op->done = nullptr;
  if (op->kind == Kind::kCarriedOut) --open_;
  op->kind = Kind::kFree;
  ++op->generation;
  free_.push_back(Index(id));
  if (!silent_) done(result);
}

void RingOps::Report(IoId id, IoResult result) {
  Op* op = Find(id);
  LH_CHECK(op != nullptr);
  if (!silent_) op->done(result);
}

void RingOps::RunBeforeSubmit() {
  for (auto& run : std::exchange(before_submit_, {})) run();
}

Tick RingOps::WaitUntil(Tick until) {
  CompactTimers();
  if (!ready_.empty() || !before_submit_.empty()) return Tick{};
  return timers_.empty() ? until : std::min(until, timers_.front().at);
}

void RingOps::RunReady() {
  std::vector<std::pair<IoId, int>> ready;
  ready.swap(ready_);
  for (const auto& [id, value] : ready) End(id, {.value = value});
}

void RingOps::RunTimers(Tick now) {
  const uint64_t order_end = timer_order_;  // timers that callbacks start wait for the next round
  while (!timers_.empty() && timers_.front().at <= now && timers_.front().order < order_end) {
    const IoId id = timers_.front().id;
    std::pop_heap(timers_.begin(), timers_.end(), std::greater<>());
    timers_.pop_back();
    if (!TimerLive(id)) continue;
    --timers_live_;
    End(id, {});
  }
}

// Drops timers that have ended from the front of the heap. Drops all of them once they are the
// larger part.
void RingOps::CompactTimers() {
  if (timers_.size() > 64 && timers_.size() > 2 * timers_live_) {
    std::erase_if(timers_, [this](const Timer& t) { return !TimerLive(t.id); });
    std::make_heap(timers_.begin(), timers_.end(), std::greater<>());
  }
  while (!timers_.empty() && !TimerLive(timers_.front().id)) {
    std::pop_heap(timers_.begin(), timers_.end(), std::greater<>());
    timers_.pop_back();
  }
}

}  // namespace longhaul::peerd
