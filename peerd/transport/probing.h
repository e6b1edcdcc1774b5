// Probes of links. A probe measures what a path carries: it sends bytes that mean nothing over
// connections of its own. This class also accepts the connections of other peers' probes.
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
#include "peerd/paths/rate_meter.h"
#include "peerd/transport/alarm.h"
#include "peerd/transport/event_queue.h"
#include "peerd/transport/handshakes.h"
#include "peerd/transport/probe_stream.h"
#include "peerd/transport/run_table.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

class Probing {
 public:
  // `done` is called when our probe is over, with its result, before PopResult() returns it.
  Probing(Ring* ring, const TransportOptions* options, EventQueue* events, Alarm* alarm,
          Handshakes* handshakes, RunTable* runs, absl::AnyInvocable<void(const LinkProbe&)> done)
      : ring_(ring),
        options_(options),
        events_(events),
        alarm_(alarm),
        handshakes_(handshakes),
        runs_(runs),
        done_(std::move(done)) {}
  // Leaks connections that the kernel still refers to.
  ~Probing();

  // See Transport::StartProbe() and PopProbe().
  bool Start(const LinkKey& key);
  std::optional<LinkProbe> PopResult();
  // HasRoom(): whether one more connection of other peers' probes can be accepted. Adopt() accepts
  // it.
  bool HasRoom() const;
  void Adopt(int fd);

  // Stops streams whose time is up, looks at our probe, and ends it when it is over. Returns when
  // to call again.
  Tick Work(Tick now);
  void Close();
  // The kernel refers to nothing of this object.
  bool idle() const { return streams_.empty(); }
  // Probes that measured something, probes that did not, and the bytes that all of them sent.
  uint64_t probes() const { return probes_; }
  uint64_t failed() const { return failed_; }
  uint64_t bytes() const { return bytes_; }

 private:
  // Our probe.
  struct Probe {
    LinkProbe result;
    std::set<LaneDial*> dials;
    std::vector<ProbeStream*> streams;  // streams that have not ended
    TcpDelivery gone;                   // of streams that have ended
    uint32_t connections = 0;           // how many were planned
    uint32_t started = 0;               // how many streams began
    Tick first;                         // when the first stream began
    uint64_t acked = 0;
    // The link's own traffic during the probe, which takes part of what the link carries.
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
  // The streams of our probe, and of other peers' probes.
  std::map<ProbeStream*, std::unique_ptr<ProbeStream>> streams_;
  size_t sinks_ = 0;  // streams of other peers' probes
  uint64_t probes_ = 0;
  uint64_t failed_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace longhaul::peerd
