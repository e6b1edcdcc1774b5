// What members say of ops whose verdicts differ, and what that proves
// (docs/adr/0045-unequal-verdicts.md).
//
// Plain value: no clock, no thread. The group (group.h) asks it, and decides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/digest.h"
#include "base/ids.h"
#include "coordinator/core/routes.h"
#include "coordinator/core/suspicion.h"
#include "proto/control/messages.h"
#include "proto/control/signed_ready.h"

namespace longhaul::coordinator {

// The statements about so many READYs are kept.
inline constexpr size_t kReadiesKept = 64;
// After so many disputes of one pair that prove nothing, a peer is removed.
inline constexpr uint32_t kDisputesMax = 3;
// Of one peer in one attempt; more are ignored. To check them takes the coordinator time.
inline constexpr uint32_t kDisputesOfPeerMax = 8;

class Disputes {
 public:
  // Returns the public key of a peer of the group; "": there is no such peer.
  using KeyOf = std::function<std::string(PeerId)>;

  // Returns false if the peer has sent too many disputes in this attempt.
  bool Admit(PeerId reporter, Epoch attempt);
  // Adds the statements of a dispute that are signed well. Uses only the first dispute of each
  // reporter about an op. Returns a peer that has said two different things of the same op.
  std::optional<PeerId> Add(PeerId reporter, const control::Dispute& dispute, const KeyOf& key_of);
  bool Knows(const control::ReadyName& name) const { return said_.contains(name); }

  // Counts a dispute that proves nothing. Returns true if the pair has had too many of them.
  bool CountUnproven(PeerId reporter, const control::Dispute& dispute);
  // All pairs with such disputes.
  LostLinks Unproven() const;
  void ForgetUnproven() { unproven_.clear(); }
  void ForgetIf(const std::function<bool(PeerId)>& stranger);

  void AddTo(Digester* digest) const;

 private:
  struct Said {
    std::set<PeerId> reporters;
    std::map<PeerId, std::string> digests;
  };
  std::map<control::ReadyName, Said> said_;
  std::map<PeerId, std::pair<Epoch, uint32_t>> sent_;  // how many in the peer's newest attempt
  struct Unproved {
    uint32_t count = 0;
    std::string what;
  };
  std::map<LostLink, Unproved> unproven_;  // the smaller peer first
};

// The name of the READYs that a dispute is about.
control::ReadyName NameOf(const control::Dispute& dispute);

}  // namespace longhaul::coordinator
