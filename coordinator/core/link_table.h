// What peers have measured of the links between them, and of their hosts: the newest measurement of
// each direction, and what each host can send and receive in all.
//
// Plain value, no clock. Nothing here is durable, because each report would cost a write, and peers
// measure again within minutes. Bounded by kLinksMax and kHostsMax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/records.h"
#include "coordinator/solver/ring_solver.h"
#include "coordinator/solver/share_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// How long a measurement counts. Peers repeat what they know before that.
inline constexpr int64_t kLinkExpires = Seconds(900);
// For so long a link's rate bounds that of its host, though the host's rate has changed since.
inline constexpr int64_t kLinkOutlivesRate = Seconds(60);
// The most directions of links in the table. Measurements of further ones are ignored.
inline constexpr size_t kLinksMax = size_t{1} << 20;
// The most hosts in the table. Rates of further ones are ignored.
inline constexpr size_t kHostsMax = size_t{1} << 16;

struct MeasuredLink {
  uint64_t bytes_per_second = 0;  // 0: unknown
  uint32_t rtt_us = 0;            // 0: unknown
  Tick at;                        // when it was measured
  bool at_least = false;          // as in control::LinkMeasure
  bool small_packets = false;     // as in control::LinkMeasure
  bool held = false;              // as in control::LinkMeasure
  // Whether the link is known to carry no more than measured.
  bool limits() const { return bytes_per_second != 0 && !at_least; }
  LH_FIELDS(MeasuredLink, LH_FIELD(bytes_per_second), LH_FIELD(rtt_us), LH_FIELD(at),
            LH_FIELD(at_least), LH_FIELD(small_packets), LH_FIELD(held));
};

// The most that a host was lately seen to send and receive in all, in bytes per second. 0: unknown.
struct HostRates {
  uint64_t up = 0;
  uint64_t down = 0;
  LH_FIELDS(HostRates, LH_FIELD(up), LH_FIELD(down));
};

class LinkTable {
 public:
  // Takes a measurement that was reported now. Ignores it if it is older than the known one.
  // Returns true if another ring may be the best now: the link was unknown, or the measurement
  // differs from the known one by more than noise.
  bool Record(const control::LinkMeasure& measure, Tick now);
  // Takes the rates of a peer's host that were reported now. 0: unknown; the known rate stays. `up`
  // of control::kNoLimitBytesPerSecond or more: the known rate no longer holds.
  // Returns true if a rate differs by more than a tenth from the one for which this last returned
  // true.
  bool RecordHost(PeerId peer, uint64_t up, uint64_t down, Tick now);
  // Returns what is known of this direction; nullopt: nothing, or the measurement has expired. If
  // the round trip was not measured in this direction, the other direction's is returned.
  std::optional<MeasuredLink> Find(PeerId from, PeerId to, Tick now) const;
  // Returns what is known of the peer's host; nullopt: nothing, or the report has expired.
  std::optional<HostRates> HostOf(PeerId peer, Tick now) const;
  // Drops all measurements of links from the peer and to it, and the rates of its host.
  void Forget(PeerId peer);
  // Returns the links between these peers. A peer's index is its place in the list. Latencies are
  // round trips.
  LinkMatrix Matrix(const std::vector<PeerId>& peers, Tick now) const;
  // Returns the costs of links between the peers of this ring, and the shares that they should own
  // in the mesh. `blocked`: pairs of which the mesh cannot use the link. `present`: the shares
  // that they own now, and that stay unless others make an op faster by a twentieth or are equal;
  // nullptr: there are none.
  control::LinkCost Cost(const std::vector<PeerId>& ring, const control::BlockedPairs& blocked,
                         const Shares* present, Tick now) const;
  // Returns the peer without which the mesh would be fastest; nullopt: as far as is known, it would
  // not be faster by a twentieth than without the fastest peer, or there are less than three peers.
  std::optional<PaceView> PaceOf(const std::vector<PeerId>& ring,
                                 const control::BlockedPairs& blocked, Tick now) const;
  // Returns the pairs of these peers between which large packets vanish, as one of the two reports.
  std::set<std::pair<PeerId, PeerId>> SmallPackets(const std::vector<PeerId>& peers,
                                                   Tick now) const;
  // Returns what limits a mesh among the peers of this ring. An index is a place in the ring.
  //   - A host's rate up is a limit, but not below what one of its links carries: in a ring, all
  //     hosts send only as fast as the slowest one. A link counts for that if it was measured since
  //     the host's rate has changed, or within kLinkOutlivesRate: the access link may have become
  //     slower since, and beside other links nothing lowers what is known of one.
  //     A host whose rate is unknown counts as being as fast as the fastest one of the others: it
  //     may be slow, and is no reason to give them less.
  //   - Its rate down is a limit only if at least two others were held by their link to it.
  //     Otherwise the host may have received little just because little was sent. It is no limit
  //     below what its links were seen to carry: a link that seems to be held may have had a bad
  //     moment.
  //   - A pair's rate is a limit if it is no lower bound, unless several senders were held by their
  //     links to the same host, which then limits. (While a host is busy with several links, it
  //     reports lower bounds, because these links share its access link.)
  //   - If no host's rate up is known, a pair without a known limit counts as the fastest link.
  //   - Rates of hosts that are within 12 % of each other count as equal.
  // Without any limit if the ring has more than kShareHostsMax peers.
  ShareProblem Capacities(const std::vector<PeerId>& ring, Tick now) const;
  size_t size() const { return size_; }

  LH_STATE(LinkTable, LH_FIELD(links_), LH_FIELD(size_), LH_FIELD(hosts_));

 private:
  struct Host {
    HostRates rates;
    HostRates told;  // the rates for which RecordHost() last returned true
    Tick at;
    Tick changed_at;  // when the rate up last changed by more than a tenth
    LH_FIELDS(Host, LH_FIELD(rates), LH_FIELD(told), LH_FIELD(at), LH_FIELD(changed_at));
  };
  const MeasuredLink* Fresh(PeerId from, PeerId to, Tick now) const;

  std::map<PeerId, std::map<PeerId, MeasuredLink>> links_;  // by sender, then receiver
  size_t size_ = 0;
  std::map<PeerId, Host> hosts_;
};

}  // namespace longhaul::coordinator
