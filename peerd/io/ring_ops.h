// What UringRing and EpollRing have in common: the table of operations, timers, and calls before
// submission. None of these needs the kernel.
//
// An operation has an id from its start until its last callback begins. A ring that carries an
// operation out calls End() when the operation has ended. RingOps ends timers by itself.
//
// Threads: the ring's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "base/tick.h"
#include "peerd/io/ring.h"

namespace longhaul::peerd {

// The clock of both rings.
Tick MonotonicNow();
// "6.1.0-25-amd64"
std::string KernelRelease();

class RingOps {
 public:
  // Ids below this are never given to operations.
  static constexpr IoId kIdMin = IoId{1} << 24;
  // A small number for an operation in progress. No two operations in progress share one.
  static uint32_t Index(IoId id) { return static_cast<uint32_t>(id & (kIdMin - 1)); }

  // Starts an operation that the ring carries out.
  IoId Add(IoCallback done);
  IoId AddTimer(Tick at, IoCallback done);
  void BeforeSubmit(absl::AnyInvocable<void()> run);

  // True: the ring still has to carry this operation out.
  bool Has(IoId id) const;
  // Cancels the timer of this id. False: the id names no timer.
  bool CancelTimer(IoId id);
  // The number of operations that the ring still has to carry out.
  size_t open() const { return open_; }
  // Calls `visit` with the ids of these operations. `visit` must not start or end any.
  template <class Visit>
  void ForEach(Visit visit) const {
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (ops_[i].kind == Kind::kCarriedOut) visit(ops_[i].generation * kIdMin | i);
    }
  }

  // Calls the last callback of an operation. Its id names nothing from then on.
  void End(IoId id, IoResult result);
  // Calls End() in the next RunReady(). The ring has nothing more to do with the operation.
  void EndLater(IoId id, int value);
  // Calls the callback of an operation that goes on.
  void Report(IoId id, IoResult result);

  // These four make one turn of the ring, in this order. After the first the ring submits its
  // operations. After the second it waits, at most until the tick that WaitUntil() gives.
  void RunBeforeSubmit();
  Tick WaitUntil(Tick until);
  void RunReady();
  void RunTimers(Tick now);

  // From now on no callback is called.
  void Silence() { silent_ = true; }

 private:
  // kEnding: the callback is still to come, from RunReady().
  enum class Kind : uint8_t { kFree, kCarriedOut, kTimer, kEnding };
  struct Op {
    IoCallback done;
    uint64_t generation = 1;
    Kind kind = Kind::kFree;
  };
  struct Timer {
    Tick at;
    uint64_t order;  // timers of one tick fire in the order in which they were started
    IoId id;
    bool operator>(const Timer& other) const {
      return std::pair(at, order) > std::pair(other.at, other.order);
    }
  };

  IoId New(Kind kind, IoCallback done);
  const Op* Find(IoId id) const;
  Op* Find(IoId id) { return const_cast<Op*>(std::as_const(*this).Find(id)); }
  bool TimerLive(IoId id) const;
  void CompactTimers();

  std::deque<Op> ops_;  // a slab: entries never move
  std::vector<uint32_t> free_;
  size_t open_ = 0;
  std::vector<Timer> timers_;  // a heap; entries of timers that have ended are skipped
  size_t timers_live_ = 0;
  uint64_t timer_order_ = 0;
  std::vector<absl::AnyInvocable<void()>> before_submit_;
  std::vector<std::pair<IoId, int>> ready_;  // what EndLater() was told
  bool silent_ = false;
};

}  // namespace longhaul::peerd
