// Virtual time, processes and paths: the ground on which a run is simulated.
//
// Everything that happens is an event in one queue, ordered by time and then by the order in which
// events were made. A Node is a process: its events wait while it is frozen and are gone when it
// has died. Latencies and blocked paths are directed, so a partition may be one-way.
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
  uint64_t life = 1;  // rises when it dies
  bool frozen = false;
  // What came while it was frozen, in that order; what comes before it is through goes behind it.
  std::deque<std::function<void()>> backlog;
};

class World {
 public:
  struct Latency {
    int64_t low_us = 50;
    int64_t high_us = 500;
  };

  // `scripted`: nothing is left to chance; see Between() and Chance().
  World(uint64_t seed, Latency latency, bool scripted = false)
      : prng_(seed), latency_(latency), scripted_(scripted) {}

  Tick now() const { return now_; }
  // Drawn from the seed; in a scripted world always the smallest, and nothing that may not happen
  // does, so that a story does not change with the number of draws.
  int64_t Between(int64_t low, int64_t high) { return scripted_ ? low : prng_.Between(low, high); }
  uint64_t Below(uint64_t n) { return scripted_ ? 0 : prng_.Below(n); }
  bool Chance(double p) { return scripted_ ? p >= 1 : prng_.Chance(p); }
  uint64_t Random() { return prng_.Next(); }

  void At(Tick when, std::function<void()> event);
  // In a process: never if it dies before, later if it is frozen then.
  void On(Node* node, Tick when, std::function<void()> event);
  // Runs the next event; false: there is none before `limit`.
  bool RunOne(Tick limit);
  // Nothing happens until then.
  void Skip(Tick until);
  uint64_t events() const { return events_; }
  // A number that nothing else in this world has.
  uint64_t NewNumber() { return ++last_number_; }

  void Kill(Node* node);
  void Freeze(Node* node);
  void Thaw(Node* node);

  // When something that leaves `from` now reaches `to`.
  Tick Arrival(const Node& from, const Node& to);
  // Nothing that leaves `from` before `until` reaches `to` before then.
  void Block(int from, int to, Tick until);
  // Every path is open from now on.
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
