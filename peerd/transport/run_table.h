// What one transport knows of others: the runs it takes part in, the tokens of their epochs, and
// its peers in each run, linked or not.
//
// Threads: the ring's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "peerd/transport/callers.h"
#include "peerd/transport/lane_handshake.h"
#include "peerd/transport/link.h"
#include "peerd/transport/transport.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

// A link that an epoch needs, and that is not there yet.
struct Request {
  uint32_t group = 0;
  Epoch epoch;
  bool dial = false;
  bool data = false;
  PeerId relay;
  std::vector<std::string> endpoints;
  Tick started;
  Tick deadline;
};

// When to try next.
struct Backoff {
  static constexpr int64_t kUsMin = Millis(5);
  static constexpr int64_t kUsMax = Millis(200);

  Tick next;
  int64_t us = kUsMin;
  void Failed(Tick now) {
    next = now + us;
    us = std::min(us * 2, kUsMax);
  }
  void Reset(Tick now) { *this = Backoff{.next = now}; }
};

// With what a lane is authenticated.
struct Credential {
  uint32_t group = 0;
  Epoch epoch;
  std::string token;
};

// One peer in one run. Each part of the transport has its own of the structs below.
struct Peering {
  LinkKey key;
  uint64_t serial = 0;                // tells it from an earlier one of the same key
  std::map<uint32_t, PeerId> groups;  // that need the link, through which relay; 0: straight
  std::vector<Request> requests;
  std::unique_ptr<Link> link;  // alive, or none
  bool announcing = false;     // OnLinkUp is queued
  std::string last_error;      // why there is no link

  std::vector<std::string> endpoints;  // of the peer or its relay, as told last
  std::vector<AddressBlock> blocks;    // of those that are numeric
  std::optional<AddressBlock> linked;  // of the last link
  uint64_t probed_rate = 0;            // of the last probe that showed something
  size_t token_attempts = 0;

  // The control lane of a link that is not there yet, where we dial.
  struct ControlDialling {
    LaneDial* dial = nullptr;
    std::deque<SocketAddress> candidates;
    int resolving = 0;
    Backoff backoff;
    size_t attempts = 0;
    Tick gone_since = kNever;  // from then on each address said that the peer is not there
  } control;

  struct DataDialling {
    uint32_t planned = 0;  // lanes, if we dial them
    bool peer_wants = false;
    bool want_sent = false;
    Tick peer_wants_until;
    // Lanes that the link can do without: dialled until then, or asked of the peer until then.
    Tick optional_until;
    std::vector<LaneDial*> dials;
    Backoff backoff;
    std::string error;
  } data;

  // Of a link that stands.
  struct Repairing {
    LaneDial* redial = nullptr;  // of the control lane
    Backoff redial_backoff;
    std::string redial_error;
    // While the control lane is lost and the other side dials: is anybody there?
    int knocks = 0;          // under way, names being resolved included
    int knocks_refused = 0;  // in this round
    int knocks_other = 0;
    std::string knock_refused;  // by that address
    Backoff knock_backoff;
    Tick losses_since;
    int losses = 0;  // since then
  } repair;

  bool needed() const { return !groups.empty() || !requests.empty(); }
  // Some group wants the link to go that way.
  bool Wants(PeerId relay) const {
    return std::any_of(groups.begin(), groups.end(),
                       [relay](const auto& group) { return group.second == relay; });
  }
  bool data_wanted() const {
    return std::any_of(requests.begin(), requests.end(), [](const Request& r) { return r.data; });
  }
  // There is a link.
  bool MissingLanesWanted() const {
    return data_wanted() && !link->data_complete() && !link->data_usable();
  }
};

struct Run {
  std::string name;
  Digest32 digest;
  std::map<uint32_t, std::map<Epoch, std::string>> tokens;  // by group
  std::map<PeerId, Peering> peers;
};

class RunTable {
 public:
  std::map<std::string, Run>& all() { return runs_; }
  const std::map<std::string, Run>& all() const { return runs_; }

  // Makes it, if it is new.
  Run& Get(const std::string& name);
  Peering& GetPeering(Run* run, PeerId peer);
  void SetEndpoints(Peering* p, const std::vector<std::string>& endpoints);
  void SetLinked(Peering* p, const SocketAddress& remote);
  // The peering, which is not needed any more.
  std::map<PeerId, Peering>::iterator Drop(Run* run, std::map<PeerId, Peering>::iterator peering);

  Run* Find(const Digest32& digest);
  Peering* Find(const LinkKey& key);
  const Link* FindLink(const LinkKey& key) const;
  Peering* FindSerial(const LinkKey& key, uint64_t serial);
  Link* FindOpen(const LinkKey& key);
  const Run& RunOf(const Peering& p) const { return runs_.at(p.key.run); }
  const std::string* FindToken(const Run& run, uint32_t group, Epoch epoch) const;
  // For a link that stands. One token after the other, as attempts go by: the other side may have
  // forgotten one already and not know the other yet. First those of requests, then those of the
  // link's own group.
  std::optional<Credential> AnyToken(const Peering& p) const;
  // After a dial that failed, if that was for its token. Several may fail with the same one.
  void TryNextToken(Peering* p, const LaneDial& dial) const;

  // A peer listens there, or was linked from there.
  bool PeerIsKnownAt(const AddressBlock& block);

 private:
  std::map<std::string, Run> runs_;
  uint64_t next_serial_ = 1;
  std::set<AddressBlock> known_blocks_;  // of all peers
  bool known_blocks_stale_ = false;
};

}  // namespace longhaul::peerd
