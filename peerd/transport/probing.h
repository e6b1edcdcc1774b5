// Probes of links: finds out what a path carries by sending bytes that mean nothing over
// connections of their own, and takes in those of others.
//
// Threads: the ring's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "peerd/io/ring.h"
#include "peerd/transport/alarm.h"
#include "peerd/transport/event_queue.h"
#include "peerd/transport/handshakes.h"
#include "peerd/transport/probe_stream.h"
#include "peerd/transport/rate_meter.h"
#include "peerd/transport/run_table.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

class Probing {
 public:
  // `done`: the probe that was started is over; what it has shown, before PopResult() gives it
  // away.
  Probing(Ring* ring, const TransportOptions* options, EventQueue* events, Alarm* alarm,
          Handshakes* handshakes, RunTable* runs, absl::AnyInvocable<void(const LinkProbe&)> done)
      : ring_(ring),
        options_(options),
        events_(events),
        alarm_(alarm),
        handshakes_(handshakes),
        runs_(runs),
        done_(std::move(done)) {}
  // Connections that the kernel still refers to are left alone.
  ~Probing();

  // See Transport::StartProbe() and PopProbe().
  bool Start(const LinkKey& key);
  std::optional<LinkProbe> PopResult();
  // Whether there is room for one more connection of others' probes; takes it in.
  bool HasRoom() const;
  void Adopt(int fd);

  // Stops what has had its time; looks at what our probe has shown, and ends it. When to call
  // again.
  Tick Work(Tick now);
  void Close();
  // The kernel refers to nothing of it.
  bool idle() const { return streams_.empty(); }
  // Probes that showed something, those that did not, and bytes that they sent.
  uint64_t probes() const { return probes_; }
  uint64_t failed() const { return failed_; }
  uint64_t bytes() const { return bytes_; }

 private:
  // The probe that is under way.
  struct Probe {
    LinkProbe result;
    std::set<LaneDial*> dials;
    std::vector<ProbeStream*> streams;  // that have not ended
    TcpDelivery gone;                   // of those that have
    uint32_t connections = 0;           // planned
    uint32_t started = 0;               // streams
    Tick first;                         // of those
    uint64_t acked = 0;
    // Of the link's own traffic meanwhile, which takes a part of what the link carries.
    uint64_t link_arrived = 0;
    uint64_t link_arrived_before = 0;
    RateMeter meter;
  };

  std::optional<SocketAddress> DataAddress(const Peering& p) const;
  void OnDialled(LaneDial* dial);
  void AddStream(int fd, bool sends);
  void OnStreamEnded(ProbeStream* stream);
  void SumUp(Tick now);
  void End(std::string error);

  Ring* const ring_;
  const TransportOptions* const options_;
  EventQueue* const events_;
  Alarm* const alarm_;
  Handshakes* const handshakes_;
  RunTable* const runs_;
  absl::AnyInvocable<void(const LinkProbe&)> done_;
  bool closing_ = false;
  std::optional<Probe> probe_;
  std::optional<LinkProbe> result_;
  // Of our probe and of those of others.
  std::map<ProbeStream*, std::unique_ptr<ProbeStream>> streams_;
  size_t sinks_ = 0;  // of those, the others'
  uint64_t probes_ = 0;
  uint64_t failed_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace longhaul::peerd
