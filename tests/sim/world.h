// Virtual time, processes and paths: the ground on which a run is simulated.
//
// All that happens is an event in one queue. Events are ordered by time, and at equal times by the
// order in which they were made. A Node is a process. While it is frozen its events wait; when it
// dies its events are dropped. Latencies and blocked paths have a direction, so a partition may be
// one-way.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "base/prng.h"
#include "base/tick.h"

namespace longhaul::sim {

struct Node {
  int index = 0;  // 0: the coordinator
  std::string name;
  bool alive = true;
  uint64_t life = 1;  // rises when the node dies
  bool frozen = false;
  // Events that came while the node was frozen, in order. Events that come before all of these have
  // run are queued behind them.
  std::deque<std::function<void()>> backlog;
};

class World {
 public:
  struct Latency {
    int64_t low_us = 50;
    int64_t high_us = 500;
  };

  // `scripted`: nothing is random; see Between(), Below() and Chance().
  World(uint64_t seed, Latency latency, bool scripted = false)
      : prng_(seed), latency_(latency), scripted_(scripted) {}

  Tick now() const { return now_; }
  // Random numbers from the seed. In a scripted world Between() and Below() return the smallest
  // number, and Chance() is true only if `p` is 1. So a story does not change with the number of
  // draws.
  int64_t Between(int64_t low, int64_t high) { return scripted_ ? low : prng_.Between(low, high); }
  uint64_t Below(uint64_t n) { return scripted_ ? 0 : prng_.Below(n); }
  bool Chance(double p) { return scripted_ ? p >= 1 : prng_.Chance(p); }
  uint64_t Random() { return prng_.Next(); }

  void At(Tick when, std::function<void()> event);
  // Runs the event in a process: never if the process dies before `when`, and after the thaw if the
  // process is frozen then.
  void On(Node* node, Tick when, std::function<void()> event);
  // Runs the next event. Returns false if there is none up to `limit`.
  bool RunOne(Tick limit);
  // Moves the clock to `until`. No event may be due before.
  void Skip(Tick until);
  uint64_t events() const { return events_; }
  // A number that NewNumber() has not returned before.
  uint64_t NewNumber() { return ++last_number_; }

  void Kill(Node* node);
  void Freeze(Node* node);
  void Thaw(Node* node);

  // Returns when something that leaves `from` now reaches `to`.
  Tick Arrival(const Node& from, const Node& to);
  // Delays all that leaves `from` before `until`: it reaches `to` after `until`.
  void Block(int from, int to, Tick until);
  // Opens every path.
  void Unblock() { blocked_.clear(); }

 private:
  void CatchUp(Node* node, uint64_t life);

  struct Event {
    Tick when;
    uint64_t number = 0;
    std::function<void()> run;
    bool operator>(const Event& other) const {
      return when != other.when ? when > other.when : number > other.number;
    }
  };

  Tick now_;
  Prng prng_;
  const Latency latency_;
  const bool scripted_;
  uint64_t next_number_ = 0;
  uint64_t events_ = 0;
  uint64_t last_number_ = 0;
  std::vector<Event> queue_;  // a heap
  struct Blocked {
    int from;
    int to;
    Tick until;
  };
  std::vector<Blocked> blocked_;
};

}  // namespace longhaul::sim
