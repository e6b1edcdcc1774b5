// What one transport knows of other peers: the runs that it takes part in, the tokens of their
// epochs, and the peers of each run, with or without a link.
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

// A link that an epoch needs and that is not up yet.
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

// When to try again. The pause doubles with each failure.
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

// What authenticates a lane.
struct Credential {
  uint32_t group = 0;
  Epoch epoch;
  std::string token;
};

// One peer in one run. Each part of the transport has a struct of its own below.
struct Peering {
  LinkKey key;
  uint64_t serial = 0;  // distinguishes this peering from an earlier one with the same key
  std::map<uint32_t, PeerId> groups;  // groups that need the link, and their relay; 0: none
  std::vector<Request> requests;
  std::unique_ptr<Link> link;  // alive, or nullptr
  bool announcing = false;     // the call of OnLinkUp() is queued
  std::string last_error;      // why there is no link

  std::string public_key;              // of the peer, from the last request
  std::vector<std::string> endpoints;  // of the peer or its relay, from the last request
  std::vector<AddressBlock> blocks;    // of the numeric endpoints
  std::optional<AddressBlock> linked;  // of the last link's remote address
  uint64_t probed_rate = 0;            // of the last probe that measured something
  size_t token_attempts = 0;

  // Dialling the control lane of a new link.
  struct ControlDialling {
    LaneDial* dial = nullptr;
    std::deque<SocketAddress> candidates;
    int resolving = 0;
    Backoff backoff;
    size_t attempts = 0;
    Tick gone_since = kNever;  // since then every address has said that the peer is gone
    // The peer was taken to be on this host, and is not: its lanes are sealed.
    bool looked_local = false;
  } control;

  struct DataDialling {
    uint32_t planned = 0;   // how many lanes to have, if we dial them
    bool one_lane = false;  // begin with one: no request wanted more
    bool peer_wants = false;
    bool want_sent = false;
    Tick peer_wants_until;
    // Until when to dial lanes that the link can do without, or to wait for the peer to dial them.
    Tick optional_until;
    std::vector<LaneDial*> dials;
    Backoff backoff;
    std::string error;
  } data;

  // Repairing an established link.
  struct Repairing {
    LaneDial* redial = nullptr;  // the dial of the control lane
    Backoff redial_backoff;
    std::string redial_error;
    // For a lost control lane that the peer has to dial: does anybody listen there?
    int knocks = 0;          // under way, names that are being resolved included
    int knocks_refused = 0;  // in this round of knocks
    int knocks_other = 0;
    std::string knock_refused;  // an address that refused
    Backoff knock_backoff;
    Tick losses_since;
    int losses = 0;  // since losses_since
  } repair;

  bool needed() const { return !groups.empty() || !requests.empty(); }
  // Whether a group wants the link to take this path. 0: straight.
  bool Wants(PeerId relay) const {
    return std::any_of(groups.begin(), groups.end(),
                       [relay](const auto& group) { return group.second == relay; });
  }
  bool data_wanted() const {
    return std::any_of(requests.begin(), requests.end(), [](const Request& r) { return r.data; });
  }
  // Only if there is a link.
  bool MissingLanesWanted() const {
    return data_wanted() && !link->data_complete() && !link->data_usable();
  }
};

struct Run {
  std::string name;
  std::map<uint32_t, std::map<Epoch, std::string>> tokens;  // by group and epoch
  std::map<PeerId, Peering> peers;
};

class RunTable {
 public:
  std::map<std::string, Run>& all() { return runs_; }
  const std::map<std::string, Run>& all() const { return runs_; }

  // These make what is not there yet.
  Run& Get(const std::string& name);
  Peering& GetPeering(Run* run, PeerId peer);
  void SetEndpoints(Peering* p, const std::vector<std::string>& endpoints);
  void SetLinked(Peering* p, const SocketAddress& remote);
  // Removes the peering, which is not needed any more. Returns the next one.
  std::map<PeerId, Peering>::iterator Drop(Run* run, std::map<PeerId, Peering>::iterator peering);

  // The run that HELLO means, and the token of its epoch. nullptr: none here has such a token.
  struct Known {
    Run* run = nullptr;
    const std::string* token = nullptr;
  };
  Known Find(const LaneHello& hello);
  // Whether some run has this link to the peer.
  bool HasLink(PeerId peer, uint64_t link) const;
  Peering* Find(const LinkKey& key);
  const Link* FindLink(const LinkKey& key) const;
  Peering* FindSerial(const LinkKey& key, uint64_t serial);
  Link* FindOpen(const LinkKey& key);
  const Run& RunOf(const Peering& p) const { return runs_.at(p.key.run); }
  const std::string* FindToken(const Run& run, uint32_t group, Epoch epoch) const;
  // Returns a token to dial a lane of an established link with. Each failed attempt moves on to the
  // next token, since the peer may have forgotten one and not know another yet. First come the
  // groups of requests, then the link's own group, then the other groups that need the link.
  std::optional<Credential> AnyToken(const Peering& p) const;
  // If this dial was refused for its token, AnyToken() returns the next token from now on. Several
  // dials with one token count once.
  void TryNextToken(Peering* p, const LaneDial& dial) const;

  // Whether a peer listens at such an address, or was linked from there.
  bool PeerIsKnownAt(const AddressBlock& block);

 private:
  std::map<std::string, Run> runs_;
  uint64_t next_serial_ = 1;
  std::set<AddressBlock> known_blocks_;  // of all peers
  bool known_blocks_stale_ = false;
};

}  // namespace longhaul::peerd
