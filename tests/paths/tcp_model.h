// A model of TCP connections between hosts, in virtual time.
//
// Each host has an access link: a rate and a queue of limited length in each direction, which all
// its connections share. A packet takes this way:
//
//   random loss -> rate of its connection -> uplink of the sender -> propagation delay
//               -> downlink of the receiver
//
// Acknowledgements go back through the same queues, and none of them is lost. A queue drops what
// does not fit. The unit is a train: what the kernel hands to the network at once, two packets or
// what is sent in a millisecond (one packet where packets are lost at random).
//
// A connection finds its rate as the kernel does: slow start with HyStart, cubic, losses that later
// acknowledgements show, tail loss probes, timeouts, a smaller window after a pause, pacing; or bbr
// (version 1). It is a model: enough to show who fills which queue, and who waits for whom. Options
// of the kernel that do not matter for that are left out.
//
// Deterministic: all randomness comes from the seed. One thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "base/tcp.h"
#include "base/tick.h"

namespace longhaul::paths_model {

using Nanos = int64_t;

struct AccessRates {
  double up_mbit = 0;
  double down_mbit = 0;
};

// The network between the hosts.
struct Between {
  Nanos one_way = 0;
  double loss = 0;             // the share of packets that are lost at random
  double connection_mbit = 0;  // a limit for each connection; 0: none
};

class TcpModel {
 public:
  // Calls come from within Run().
  class User {
   public:
    virtual ~User() = default;
    // The kernel of the sender holds less than kUnsentBytes that it has not sent.
    virtual void OnWritable(int connection) = 0;
    // `bytes` in all have come to the receiver, in order.
    virtual void OnReceived(int connection, uint64_t bytes) = 0;
  };

  TcpModel(uint64_t seed, const Between& between, Nanos queue, User* user);

  int AddHost(const AccessRates& rates);
  void SetRates(int host, const AccessRates& rates);
  const AccessRates& Rates(int host) const { return hosts_[host].rates; }
  // Opens a connection, which can send after a round trip.
  int Open(int from, int to, const std::string& congestion);
  void SetCongestion(int connection, const std::string& congestion);
  // The network limits this connection.
  void SetOwnRate(int connection, double mbit);
  // 0: no limit.
  void SetPace(int connection, uint64_t bytes_per_second);
  // Gives bytes to the kernel of the sender.
  void Write(int connection, uint64_t bytes);
  // What the kernel has not sent.
  uint64_t unsent(int connection) const;
  TcpDelivery Delivery(int connection) const;

  // Calls `call` at `at`.
  void At(Nanos at, std::function<void()> call);
  Nanos now() const { return now_; }
  Tick Now() const { return Tick{now_ / 1000}; }
  // Goes on until `done`, or until `end`.
  void Run(Nanos end, const std::function<bool()>& done);

  // Payload that a host has sent in all, and sent again.
  uint64_t sent(int host) const { return hosts_[host].sent; }
  uint64_t repeated(int host) const { return hosts_[host].repeated; }

 private:
  struct Train {
    uint64_t seq = 0;
    uint32_t bytes = 0;
    bool again = false;        // sent again
    bool probe = false;        // a copy of the train before, which is not known to be lost
    bool app_limited = false;  // the sender had too little to send
    Nanos sent_at = 0;
    uint64_t arrived = 0;  // Connection::arrived, when this was sent
    Nanos arrived_at = 0;  // when that was
    Nanos first_sent_at = 0;
    uint64_t in_flight = 0;  // with this train
  };
  struct Queue {
    double rate = 0;  // bytes a nanosecond; 0: no limit
    Nanos idle_at = 0;
  };
  struct Host {
    AccessRates rates;
    Queue up;
    Queue down;
    uint64_t sent = 0;
    uint64_t repeated = 0;
  };
  // Of bbr.
  struct Bbr {
    enum class Mode { kStartup, kDrain, kProbeBandwidth, kProbeRtt };
    Mode mode = Mode::kStartup;
    std::deque<std::pair<uint64_t, double>> rates;  // round and rate; the rates fall
    uint64_t round = 0;
    uint64_t round_ends = 0;  // at so many arrived bytes
    double full_rate = 0;
    int full_rounds = 0;
    int phase = 2;
    Nanos phase_at = 0;
    double min_rtt_ns = 0;
    Nanos min_rtt_at = 0;
    Nanos probe_rtt_done = 0;
    double gain = 2.885;
    double window_gain = 2.885;
    double cwnd_before = 0;
  };
  struct Connection {
    int from = 0;
    int to = 0;
    bool bbr = false;
    Queue own;
    // The sender.
    Nanos opens_at = 0;
    uint64_t written = 0;
    uint64_t sent = 0;   // for the first time
    uint64_t acked = 0;  // in order
    uint64_t arrived = 0;
    Nanos arrived_at = 0;
    Nanos first_sent_at = 0;
    uint64_t in_flight = 0;
    uint64_t first_id = 0;  // of trains.front()
    std::deque<Train> trains;
    std::deque<std::pair<uint64_t, uint32_t>> lost;  // to be sent again: seq and bytes
    uint64_t all_sent = 0;
    uint64_t all_repeated = 0;
    double rate_sample = 0;  // bytes a nanosecond
    bool sample_limited = false;
    double cwnd = 10;  // packets
    double ssthresh = 1e9;
    uint64_t recovery_ends = 0;  // with the acknowledgement of this train
    bool in_recovery = false;
    Nanos limited_at = -1;  // when the window last held the sender back
    double srtt = 0;
    double rttvar = 0;
    double min_rtt = 0;
    Nanos last_ack = 0;
    Nanos last_sent = 0;
    uint64_t app_limited_until = 0;  // until so many bytes have arrived
    double pace = 0;                 // bytes a nanosecond; 0: no limit
    Nanos next_send = 0;
    bool send_planned = false;
    Nanos timer_at = -1;
    bool timer_planned = false;
    int timeouts = 0;
    bool probed = false;
    bool writable_told = false;
    // HyStart.
    uint64_t hystart_ends = 0;
    double hystart_rtt = 0;
    int hystart_samples = 0;
    // Cubic.
    Nanos epoch = 0;
    double w_max = 0;
    double w_last = 0;
    double k = 0;
    double w_tcp = 0;
    Bbr of_bbr;
    // The receiver.
    uint64_t received = 0;
    std::map<uint64_t, uint64_t> behind_gaps;  // seq and end
  };
  enum class Kind : uint8_t { kSend, kUplink, kDownlink, kReceived, kAck, kTimer, kCall };
  struct Event {
    Nanos at;
    uint64_t order;
    Kind kind;
    int32_t connection;
    uint64_t id;
    uint64_t seq;
    uint32_t bytes;
  };
  static bool Later(const Event& a, const Event& b) {
    return a.at != b.at ? a.at > b.at : a.order > b.order;
  }

  void Push(Nanos at, Kind kind, int connection, uint64_t id, uint64_t seq, uint32_t bytes);
  void Handle(const Event& event);
  // Returns when these bytes leave the queue; -1: they do not fit.
  Nanos Pass(Queue* queue, Nanos at, double bytes, bool drops) const;
  void TrySend(int connection);
  void Transmit(int connection, uint64_t seq, uint32_t bytes, bool again, bool probe);
  void OnTrain(int connection, uint64_t id, uint64_t seq, uint32_t bytes);
  void OnAck(int connection, uint64_t id, uint64_t acked);
  void OnTimer(int connection);
  void SetTimer(int connection);
  Nanos TimeoutOf(const Connection& c) const;
  double PacingRate(const Connection& c) const;
  void Lose(Connection* c, const Train& train);
  void AfterPause(Connection* c);
  void Grow(Connection* c, const Train& train, double packets, double rtt);
  void GrowCubic(Connection* c, double packets);
  void Shrink(Connection* c);
  void UpdateBbr(Connection* c, const Train& train, double rtt);
  double BbrRate(const Connection& c) const;

  const Between between_;
  const Nanos queue_;
  User* const user_;
  Prng random_;
  std::vector<Host> hosts_;
  std::deque<Connection> connections_;  // references stay valid
  std::vector<Event> events_;           // a heap
  std::vector<std::function<void()>> calls_;
  std::vector<size_t> free_calls_;
  uint64_t order_ = 0;
  Nanos now_ = 0;
};

}  // namespace longhaul::paths_model
