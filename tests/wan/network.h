// The model of the network: what happens to a packet between two hosts, and when it comes out.
//
// The way of a packet:
//
//   random loss -> rate of its flow -> uplink of src -> rate of the pair -> propagation delay
//               -> downlink of dst -> delivery
//
// Each of the four rates is a FIFO queue of limited length that drops what does not fit. Rates and
// queues count IP bytes. Loss and drops strike single segments, also those of a super-packet,
// which goes on in pieces then. Only time is coarser: a super-packet arrives when its last segment
// does.
//
// Knows no clock and no device: tests drive it exactly. What is random comes from the seed, for
// each pair by itself: a pair loses the same segments of its sequence in every run.
// Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "tests/wan/packet.h"
#include "tests/wan/units.h"

namespace longhaul::wan {

// Flows that a pair remembers; beyond, those that were silent for longest are forgotten.
inline constexpr size_t kFlowsMax = 1024;

// How much waits in front of a rate: as much as passes in a time, or, unless 0, a number of bytes.
// Never less than a few packets.
struct QueueLimit {
  Nanos time = 50 * kMillisecond;
  int64_t bytes = 0;
  friend bool operator==(const QueueLimit&, const QueueLimit&) = default;
};

// One direction between two hosts. A rate of 0 is no limit.
struct PairConfig {
  Nanos delay = 0;
  Nanos jitter = 0;  // uniform, added to the delay; never reorders
  int64_t rate = 0;  // bits a second, as all rates here
  QueueLimit queue;
  double loss = 0;
  int64_t flow_rate = 0;  // of each flow by itself
  QueueLimit flow_queue;
  bool down = false;  // swallows everything, also what is in flight
};

// What all pairs of a host share.
struct AccessConfig {
  int64_t up = 0;
  int64_t down = 0;
  QueueLimit queue;
};

// Segments, except where it says bytes.
struct PairCounters {
  int64_t packets = 0;  // that entered, super-packets as one
  int64_t entered = 0;
  int64_t delivered = 0;
  int64_t delivered_bytes = 0;
  int64_t lost = 0;        // at random
  int64_t dropped = 0;     // at full queues
  int64_t blackholed = 0;  // while down
  Nanos queued_max = 0;    // longest wait in front of the rate of the pair
};

struct FlowView {
  FlowKey key;
  int64_t rate = 0;
  bool rate_is_own = false;  // by SetFlowRate(), not that of the pair
  int64_t delivered_bytes = 0;
  int64_t dropped = 0;  // segments, at its own queue
};

// A FIFO queue in front of a rate. Keeps no packets, only when the last byte that it took leaves.
class RateQueue {
 public:
  // What waits already leaves when it was to leave.
  void Configure(int64_t rate, const QueueLimit& limit);

  // How many of `count` segments of `bytes` in all fit. An idle queue has room for one at least.
  int Room(Nanos now, int count, int64_t bytes) const;

  // Takes `bytes` and says when the last of them leaves.
  Nanos Admit(Nanos now, int64_t bytes);

  // Without a limit any more: when what still waits has left.
  Nanos Pass(Nanos now) const { return idle_from_ > now ? idle_from_ : now; }

  bool limited() const { return rate_ != 0; }
  int64_t rate() const { return rate_; }

 private:
  int64_t rate_ = 0;
  int64_t limit_bytes_ = 0;
  Nanos idle_from_ = 0;
};

// Which segments of a sequence are lost, each with the same chance: draws how many pass until the
// next one that does not, so that a super-packet costs one comparison.
class LossProcess {
 public:
  explicit LossProcess(uint64_t seed) : random_(seed) {}

  void Configure(double rate);

  // Of the next `count` segments, how many pass before one is lost.
  int TakePassing(int count);
  // After TakePassing() gave less than it was asked for: takes the lost one.
  void TakeLost();

 private:
  void Draw();

  Prng random_;
  double rate_ = 0;
  int64_t passing_ = INT64_MAX;
};

class Network {
 public:
  // Takes a packet off the network at its destination. `due`: when that should have happened.
  using Deliver = std::function<void(const Packet& packet, Nanos due)>;

  Network(uint64_t seed, Deliver deliver);

  // Numbers are 1 to kHostNumberMax; twice is once. Calls below name hosts that were added.
  void AddHost(int host);
  bool HasHost(int host) const { return hosts_.contains(host); }

  // A new configuration holds for packets that enter from then on; `down` for all.
  const PairConfig& pair(int src, int dst) const { return PairOf(src, dst).config; }
  void SetPair(int src, int dst, const PairConfig& config);
  const AccessConfig& access(int host) const { return hosts_.at(host).config; }
  void SetAccess(int host, const AccessConfig& config);
  void SetHostDown(int host, bool down) { hosts_.at(host).down = down; }
  bool host_down(int host) const { return hosts_.at(host).down; }

  // A rate of its own for one flow of a pair, with the queue of the pair's flows. Known before the
  // flow's first packet, and for as long as the flow is remembered.
  void SetFlowRate(int src, int dst, const FlowKey& flow, int64_t rate);

  const PairCounters& counters(int src, int dst) const { return PairOf(src, dst).counters; }
  // In the order of their keys.
  std::vector<FlowView> Flows(int src, int dst) const;
  // Those of pairs and of flows.
  void ResetCounters();

  // A packet that no two hosts exchange is ignored.
  void Enter(Packet packet, Nanos now);

  // Does everything that is due until `now`.
  void Run(Nanos now);

  // When to call Run() next; negative: nothing is in flight.
  Nanos NextDue() const { return events_.empty() ? -1 : events_.front().due; }

 private:
  enum Stage { kFlow, kUplink, kPair, kDownlink, kDelivery };

  struct Flow {
    RateQueue queue;
    bool rate_is_own = false;
    Nanos last = 0;  // when it last sent something
    int64_t delivered_bytes = 0;
    int64_t dropped = 0;
  };

  struct Pair {
    explicit Pair(uint64_t seed) : loss(seed), jitter(seed + 1) {}
    PairConfig config;
    PairCounters counters;
    RateQueue queue;
    Nanos last_out = 0;
    LossProcess loss;
    Prng jitter;
    std::map<FlowKey, Flow> flows;
  };

  struct Host {
    AccessConfig config;
    bool down = false;
    RateQueue uplink;
    RateQueue downlink;
  };

  struct Event {
    Nanos due;
    uint64_t order;
    Stage stage;
    Packet packet;
  };

  Pair& PairOf(int src, int dst) { return pairs_.at({src, dst}); }
  const Pair& PairOf(int src, int dst) const { return pairs_.at({src, dst}); }
  Flow& FlowOf(Pair& pair, const FlowKey& key);
  RateQueue& QueueAt(Stage stage, Pair& pair, Flow& flow, const Packet& packet);
  bool Down(const Pair& pair, const Packet& packet) const;
  void Advance(Packet packet, Stage stage, Nanos now);
  static bool Later(const Event& a, const Event& b);

  const uint64_t seed_;
  const Deliver deliver_;
  std::map<int, Host> hosts_;
  std::map<std::pair<int, int>, Pair> pairs_;
  std::vector<Event> events_;  // a heap, the next one in front
  uint64_t order_ = 0;
};

}  // namespace longhaul::wan
