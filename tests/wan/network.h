// The model of the network. It decides what happens to a packet between two hosts, and when the
// packet comes out.
//
// A packet takes this way:
//
//   random loss -> rate of its flow -> uplink of src -> rate of the pair -> propagation delay
//               -> downlink of dst -> delivery
//
// A FIFO queue of limited length stands in front of each of the four rates, and drops what does not
// fit. Rates and queues count IP bytes. Loss and drops hit single segments, also those of a
// super-packet; the rest of the super-packet goes on in pieces. Only time is coarser: a
// super-packet arrives when its last segment does.
//
// The model knows no clock and no device, so a test can drive it exactly. All randomness comes from
// the seed, separately for each pair. So in every run with one seed a pair loses the same segments
// of its sequence.
//
// The network owns the packets in it. One thread uses it. Nothing here fails; a host that was not
// added is a bug of the caller.
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

// How many flows a pair remembers. A further flow replaces the flow whose last packet is oldest.
inline constexpr size_t kFlowsMax = 1024;

// How much a queue in front of a rate holds: `bytes`, or if `bytes` is 0, what passes in `time`. A
// queue always has room for at least ten packets.
struct QueueLimit {
  Nanos time = 50 * kMillisecond;
  int64_t bytes = 0;
  friend bool operator==(const QueueLimit&, const QueueLimit&) = default;
};

// The settings of a pair: one direction between two hosts. A rate of 0 means no limit.
struct PairConfig {
  Nanos delay = 0;
  Nanos jitter = 0;  // uniform, added to the delay; never reorders
  int64_t rate = 0;  // in bits per second, like all rates here
  QueueLimit queue;
  double loss = 0;        // the share of segments
  int64_t flow_rate = 0;  // for each flow by itself
  QueueLimit flow_queue;
  bool down = false;  // drops all packets, also those in flight
};

// What all pairs of a host share.
struct AccessConfig {
  int64_t up = 0;
  int64_t down = 0;
  QueueLimit queue;
};

// These fields count segments, except `packets`, the bytes and the time.
struct PairCounters {
  int64_t packets = 0;  // packets that entered; a super-packet is one
  int64_t entered = 0;
  int64_t delivered = 0;
  int64_t delivered_bytes = 0;
  int64_t lost = 0;        // at random
  int64_t dropped = 0;     // at full queues
  int64_t blackholed = 0;  // while down
  Nanos queued_max = 0;    // the longest time that a packet took to pass the rate of the pair
};

struct FlowView {
  FlowKey key;
  int64_t rate = 0;
  bool rate_is_own = false;  // SetFlowRate() set the rate; it is not the pair's flow_rate
  int64_t delivered_bytes = 0;
  int64_t dropped = 0;  // segments, at its own queue
};

// A FIFO queue in front of a rate. It keeps no packets, only the time at which its last byte
// leaves.
class RateQueue {
 public:
  // Changes rate and length. Packets in the queue leave at the times that were set before.
  void Configure(int64_t rate, const QueueLimit& limit);

  // Returns how many of `count` segments fit. Together they have `bytes` bytes. An idle queue has
  // room for at least one segment.
  int Room(Nanos now, int count, int64_t bytes) const;

  // Takes `bytes` and returns the time at which the last of them leaves. Only with a rate.
  Nanos Admit(Nanos now, int64_t bytes);

  // For a queue without a rate: returns the time at which a packet leaves. The packet waits for
  // packets that came while the queue still had a rate.
  Nanos Pass(Nanos now) const { return idle_from_ > now ? idle_from_ : now; }

  bool limited() const { return rate_ != 0; }
  int64_t rate() const { return rate_; }

 private:
  int64_t rate_ = 0;
  int64_t limit_bytes_ = 0;
  Nanos idle_from_ = 0;
};

// Decides which segments of a sequence are lost, each with the same chance. It draws how many
// segments pass before the next loss, so a super-packet costs only one comparison.
class LossProcess {
 public:
  explicit LossProcess(uint64_t seed) : random_(seed) {}

  void Configure(double rate);

  // Takes segments up to the next loss, at most `count`. Returns how many pass.
  int TakePassing(int count);
  // Takes the lost segment. Only after TakePassing() returned less than `count`.
  void TakeLost();

 private:
  void Draw();

  Prng random_;
  double rate_ = 0;
  int64_t passing_ = INT64_MAX;
};

class Network {
 public:
  // Takes a packet at its destination. `due` is the time at which the packet should have arrived.
  using Deliver = std::function<void(const Packet& packet, Nanos due)>;

  Network(uint64_t seed, Deliver deliver);

  // Adds a host with a number from 1 to kHostNumberMax. Adding a host again does nothing. All calls
  // below need hosts that were added.
  void AddHost(int host);
  bool HasHost(int host) const { return hosts_.contains(host); }

  // A new configuration applies to the stages that a packet has not passed yet. Loss is the first
  // stage, so a new loss applies to packets that enter from now on. `down` applies to all packets.
  const PairConfig& pair(int src, int dst) const { return PairOf(src, dst).config; }
  void SetPair(int src, int dst, const PairConfig& config);
  const AccessConfig& access(int host) const { return hosts_.at(host).config; }
  void SetAccess(int host, const AccessConfig& config);
  void SetHostDown(int host, bool down) { hosts_.at(host).down = down; }
  bool host_down(int host) const { return hosts_.at(host).down; }

  // Gives one flow of a pair a rate of its own, with the pair's flow_queue. The flow need not exist
  // yet. The rate holds for as long as the pair remembers the flow.
  void SetFlowRate(int src, int dst, const FlowKey& flow, int64_t rate);

  const PairCounters& counters(int src, int dst) const { return PairOf(src, dst).counters; }
  // The flows of a pair, in the order of their keys.
  std::vector<FlowView> Flows(int src, int dst) const;
  // Sets the counters of all pairs and flows to 0.
  void ResetCounters();

  // Puts a packet into the network. Ignores a packet between hosts that were not added.
  void Enter(Packet packet, Nanos now);

  // Moves and delivers all packets that are due until `now`.
  void Run(Nanos now);

  // The time at which to call Run() next. Negative: no packet is in flight.
  Nanos NextDue() const { return events_.empty() ? -1 : events_.front().due; }

 private:
  enum Stage { kFlow, kUplink, kPair, kDownlink, kDelivery };

  struct Flow {
    RateQueue queue;
    bool rate_is_own = false;
    Nanos last = 0;  // when the flow's last packet entered
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
  std::vector<Event> events_;  // a heap with the next event in front
  uint64_t order_ = 0;
};

}  // namespace longhaul::wan
